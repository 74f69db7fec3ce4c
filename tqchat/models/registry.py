"""From config.json's `model_type` to the architecture's class."""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from tqchat.kernels import Backend
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
from tqchat.models.layers import LayerCache, Weights
from tqchat.models.llama import Llama


class Model(Protocol):
    """A model in memory, as the engine uses it."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int

    def __call__(
        self, ids: Sequence[int] | mx.array, caches: Sequence[LayerCache], n_logits: int = 1
    ) -> mx.array: ...


ARCHITECTURES: dict[str, Callable[..., Model]] = {"llama": Llama, "mistral": Llama}


def build(
    config: Config,
    weights: Weights,
    backend: Backend,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Model:
    """The model that `config` describes, its weights read. Raises ModelError."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{config.name}: model type {kind!r} is not supported. Choose a model of type {known}."
        )
    model = ARCHITECTURES[kind](config, weights, backend, progress)
    weights.finish()
    return model
