"""From config.json's `model_type` to the architecture's class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from tqchat.kernels import Backend
from tqchat.models.config import Config
from tqchat.models.decoder import DecoderConfig, Progress
from tqchat.models.errors import ModelError
from tqchat.models.gemma3 import Gemma3, Gemma3Config
from tqchat.models.gemma4 import Gemma4, Gemma4Config
from tqchat.models.gpt_oss import GptOss, GptOssConfig
from tqchat.models.kv import KVLayer
from tqchat.models.layers import LayerCache
from tqchat.models.llama import Llama
from tqchat.models.ministral3 import Ministral3, Ministral3Config
from tqchat.models.phi3 import Phi3
from tqchat.models.qwen2 import Qwen2
from tqchat.models.qwen3 import Qwen3
from tqchat.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
from tqchat.models.smollm3 import SmolLM3, SmolLM3Config
from tqchat.models.weights import Weights


class Shape(Protocol):
    """What of a model's config decides its memory. `context` is what it was trained for.

    `n_expert_parameters`: those of `n_parameters` that are a mixture's experts.
    `kv_layers`: one for each cache that the model is called with, in order.
    """

    @property
    def kv_layers(self) -> Sequence[KVLayer]: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def n_parameters(self) -> int: ...
    @property
    def n_expert_parameters(self) -> int: ...


class Model(Protocol):
    """A model in memory, as the engine uses it."""

    @property
    def shape(self) -> Shape: ...

    n_layers: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int

    def __call__(
        self, ids: Sequence[int] | mx.array, caches: Sequence[LayerCache], n_logits: int = 1
    ) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """`build` takes what `parse` gave."""

    parse: Callable[[Config], Shape]
    build: Callable[[Any, Weights, Backend, Progress], Model]


LLAMA = Architecture(DecoderConfig.parse, Llama)
QWEN2 = Architecture(DecoderConfig.parse, Qwen2)
QWEN3 = Architecture(DecoderConfig.parse, Qwen3)
GEMMA3 = Architecture(Gemma3Config.parse, Gemma3)
GEMMA4 = Architecture(Gemma4Config.parse, Gemma4)
ARCHITECTURES = {
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "gpt_oss": Architecture(GptOssConfig.parse, GptOss),
    "llama": LLAMA,
    "ministral": LLAMA,
    "ministral3": Architecture(Ministral3Config.parse, Ministral3),
    "mistral": LLAMA,
    "phi3": Architecture(DecoderConfig.parse, Phi3),
    "qwen2": QWEN2,
    "qwen2_vl": QWEN2,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": Architecture(Qwen3MoEConfig.parse, Qwen3MoE),
    "qwen3_vl_text": QWEN3,
    "smollm3": Architecture(SmolLM3Config.parse, SmolLM3),
}


def architecture(config: Config) -> Architecture:
    """Raises ModelError."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{config.name}: model type {kind!r} is not supported. Choose a model of type {known}."
        )
    return ARCHITECTURES[kind]


def build(
    config: Config,
    weights: Weights,
    backend: Backend,
    progress: Progress = lambda done, total: None,
) -> Model:
    """The model that `config` describes, its weights read. Raises ModelError."""
    found = architecture(config)
    model = found.build(found.parse(config), weights, backend, progress)
    weights.finish()
    return model
