"""Gemma 3, the text part of its 270M to 27B (arXiv:2503.19786)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from tqchat.kernels import Array, Backend
from tqchat.models.config import Config
from tqchat.models.decoder import Decoder, DecoderConfig, Progress
from tqchat.models.errors import ModelError
from tqchat.models.layers import MLP, Attention, LayerCache, RMSNorm, RoPE
from tqchat.models.rope import Rotation, rotation
from tqchat.models.weights import Weights

# What config.json leaves out where it is as in Hugging Face's Gemma3TextConfig.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """`rotation` is that of layers which see everything, `local_rotation` of the `sliding` ones.

    scale: of attention's scores.
    """

    sliding: tuple[bool, ...]
    local_rotation: Rotation
    scale: float

    @classmethod
    def parse(cls, config: Config) -> Self:
        given = {key: value for key, value in config.items() if value is not None}
        config = Config(config.name, _DEFAULTS | given)
        sliding = read_sliding(config, config.integer("sliding_window_pattern"))
        full, local = read_rotations(config, config.integer("head_dim"))
        return cls.read(
            config,
            sliding=sliding,
            rotation=full,
            local_rotation=local,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
        )


def read_sliding(config: Config, period: int) -> tuple[bool, ...]:
    """Whether each layer has a window: by `layer_types`, which is filled in where it is missing;
    each `period`-th layer sees everything. Raises ModelError."""
    n_layers = config.integer("num_hidden_layers")
    names = ("full_attention", "sliding_attention")
    if config.get("layer_types") is None:
        config["layer_types"] = [names[(i + 1) % period != 0] for i in range(n_layers)]
    kinds = config["layer_types"]
    if (
        not isinstance(kinds, list)
        or len(kinds) != n_layers
        or any(kind not in names for kind in kinds)
    ):
        raise ModelError(
            f"{config.name}: 'layer_types' in config.json is not a list of {n_layers} times "
            "full_attention or sliding_attention. Choose another model."
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def read_rotations(config: Config, head_dim: int) -> tuple[Rotation, Rotation]:
    """Of layers that see everything and of those with a window. Raises ModelError."""
    full, local = config.section("rope_scaling"), Config(config.name, {})
    base, local_base = config.number("rope_theta"), config.number("rope_local_base_freq")
    both = config.section("rope_parameters")
    if "full_attention" in both:
        full, local = both.section("full_attention"), both.section("sliding_attention")
        base, local_base = full.number("rope_theta", base), local.number("rope_theta", local_base)
    return rotation(config, full, base, head_dim), rotation(config, local, local_base, head_dim)


class Layer:
    """Attention, then an MLP, each between two norms, and added to what came in."""

    def __init__(
        self,
        norms: Sequence[RMSNorm],
        self_attn: Callable[[Array, LayerCache], Array],
        mlp: Callable[[Array], Array],
    ) -> None:
        self.input_norm, self.attn_norm, self.pre_mlp_norm, self.mlp_norm = norms
        self.self_attn, self.mlp = self_attn, mlp

    def __call__(self, x: Array, cache: LayerCache) -> Array:
        x = x + self.attn_norm(self.self_attn(self.input_norm(x), cache))
        return x + self.mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Gemma3(Decoder[Gemma3Config]):
    def __init__(
        self,
        config: Gemma3Config,
        weights: Weights,
        backend: Backend,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.local_rope = RoPE(backend, config.local_rotation, config.head_dim)
        super().__init__(config, weights, backend, progress)

    def make_norm(self, weights: Weights, name: str, size: int | None = None) -> RMSNorm:
        c = self.shape
        return weights.norm(name, size or c.hidden_size, c.norm_eps, plus=1.0)

    def layer(self, weights: Weights, i: int, prefix: str) -> Layer:
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms = [self.make_norm(weights, f"{prefix}.{name}_layernorm") for name in names]
        attention = self.attention(weights, i, f"{prefix}.self_attn")
        return Layer(norms, attention, self.mlp(weights, i, f"{prefix}.mlp"))

    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        c = self.shape
        return self.make_attention(
            weights,
            prefix,
            rope=self.local_rope if c.sliding[i] else self.rope,
            scale=c.scale,
            q_norm=self.make_norm(weights, f"{prefix}.q_norm", c.head_dim),
            k_norm=self.make_norm(weights, f"{prefix}.k_norm", c.head_dim),
        )

    def mlp(self, weights: Weights, i: int, prefix: str) -> MLP:
        return self.make_mlp(weights, prefix, activation=self.backend.geglu)

    def embed(self, ids: Sequence[int] | mx.array) -> Array:
        # The factor is rounded as the model was trained with it.
        factor = mx.array(self.shape.hidden_size**0.5, mx.bfloat16).item()
        return super().embed(ids) * factor
