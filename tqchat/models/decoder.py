"""The decoder that most families share, and the part of config.json that they write alike.

A family's file has what is its own: DecoderConfig's `parse`, and Decoder's `layer`, `attention` or
`mlp`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeAlias, TypeVar

import mlx.core as mx

from tqchat.kernels import Array, Backend
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
from tqchat.models.kv import KVLayer
from tqchat.models.layers import MLP, Attention, Layer, LayerCache, RMSNorm, RoPE
from tqchat.models.rope import Rotation, read_rotation
from tqchat.models.weights import Weights

HEAD_DIMS = (32, 512)
"""The least and the most that the kernels are written for."""

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """`head_dim` is the model's; the cache's may be larger (`kv_layers`)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rotation: Rotation
    tie_word_embeddings: bool
    context: int
    kv_layers: tuple[KVLayer, ...]

    @property
    def n_layers(self) -> int:
        return len(self.kv_layers)

    @property
    def n_parameters(self) -> int:
        """Elements of all matrices; norms and biases are too small to count."""
        heads = 2 * (self.n_heads + self.n_kv_heads) * self.head_dim
        embeddings = 1 if self.tie_word_embeddings else 2
        attention = self.n_layers * self.hidden_size * heads
        return attention + self._mlp_parameters + embeddings * self.vocab_size * self.hidden_size

    @property
    def n_expert_parameters(self) -> int:
        return 0

    @property
    def _mlp_parameters(self) -> int:
        return 3 * self.n_layers * self.hidden_size * self.intermediate_size

    @classmethod
    def parse(cls, config: Config) -> Self:
        """Raises ModelError."""
        return cls.read(config)

    @classmethod
    def read(cls, config: Config, **own: Any) -> Self:
        """The keys that families write alike; `own` are a family's, or take their place."""
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(
                f"{config.name}: activation {config['hidden_act']!r} is not supported."
            )
        n_heads = config.integer("num_attention_heads")
        hidden_size = config.integer("hidden_size")
        n_kv_heads = config.integer("num_key_value_heads", n_heads)
        if n_heads % n_kv_heads:
            raise ModelError(f"{config.name}: {n_heads} heads cannot share {n_kv_heads} KV heads.")
        head_dim = config.integer("head_dim", hidden_size // n_heads)
        least, most = HEAD_DIMS
        if head_dim % 2 or not least <= head_dim <= most:
            raise ModelError(
                f"{config.name}: a head_dim of {head_dim} is not supported, even numbers from "
                f"{least} to {most} are. Choose another model."
            )
        rotation = read_rotation(config, head_dim)
        common: dict[str, Any] = {
            "vocab_size": config.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": config.integer("intermediate_size"),
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "norm_eps": config.number("rms_norm_eps", 1e-5),
            "rotation": rotation,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "context": max(config.integer("max_position_embeddings", 2048), rotation.context),
            "kv_layers": tuple(
                KVLayer.of(n_kv_heads, head_dim, window) for window in read_windows(config)
            ),
        }
        return cls(**common | own)


def read_windows(config: Config) -> list[int | None]:
    """Each layer's `sliding_window`, None where it sees everything. Raises ModelError.

    `layer_types` names them layer by layer. Without it, Qwen's `max_window_layers` first ones see
    everything, and other families' all have the window.
    """
    n_layers = config.integer("num_hidden_layers")
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return [None] * n_layers
    window = config.integer("sliding_window")
    if window >= config.integer("max_position_embeddings", 2048):
        return [None] * n_layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 0)
        if not isinstance(first, int):
            raise ModelError(f"{config.name}: config.json needs a number 'max_window_layers'.")
        return [None if i < first else window for i in range(n_layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if (
        not isinstance(types, list)
        or len(types) != n_layers
        or not all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise ModelError(
            f"{config.name}: 'layer_types' in config.json is not a list of {n_layers} times "
            "full_attention or sliding_attention. Choose another model."
        )
    return [known[kind] for kind in types]


C = TypeVar("C", bound=DecoderConfig)


class Decoder(Generic[C]):
    """Embedding, layers, norm and output projection. `progress` hears of each layer read, as
    (done, n_layers). Raises ModelError for weights that are not as `config` says.
    """

    def __init__(
        self,
        config: C,
        weights: Weights,
        backend: Backend,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.shape = c = config
        self.n_layers, self.vocab_size, self.context = c.n_layers, c.vocab_size, c.context
        self.n_kv_heads, self.head_dim = c.kv_layers[0].n_kv_heads, c.kv_layers[0].head_dim
        self.backend = backend
        self.rope = RoPE(backend, c.rotation, c.head_dim)
        self.embed_tokens = weights.embedding("model.embed_tokens", c.vocab_size, c.hidden_size)
        self.layers = []
        for i in range(c.n_layers):
            self.layers.append(self.layer(weights, i, f"model.layers.{i}"))
            progress(i + 1, c.n_layers)
        self.norm = self.make_norm(weights, "model.norm")
        self.read_head(weights)

    def read_head(self, weights: Weights) -> None:
        c = self.shape
        if c.tie_word_embeddings:
            weights.discard("lm_head")
            self.lm_head = self.embed_tokens
        else:
            self.lm_head = weights.embedding("lm_head", c.vocab_size, c.hidden_size)

    def make_norm(self, weights: Weights, name: str, size: int | None = None) -> RMSNorm:
        """Of hidden states, or of `size` channels."""
        return weights.norm(name, size or self.shape.hidden_size, self.shape.norm_eps)

    def layer(self, weights: Weights, i: int, prefix: str) -> Callable[[Array, LayerCache], Array]:
        return Layer(
            self.make_norm(weights, f"{prefix}.input_layernorm"),
            self.attention(weights, i, f"{prefix}.self_attn"),
            self.make_norm(weights, f"{prefix}.post_attention_layernorm"),
            self.mlp(weights, i, f"{prefix}.mlp"),
        )

    def attention(self, weights: Weights, i: int, prefix: str) -> Attention:
        return self.make_attention(weights, prefix)

    def make_attention(
        self,
        weights: Weights,
        prefix: str,
        *,
        parts: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        biases: bool = False,
        **options: Any,
    ) -> Attention:
        """parts: the names of the matrices that Q, K and V come from, one or three.

        biases: whether Q, K and V must have them. `options` are Attention's.
        """
        c = self.shape
        q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        qkv = _rows(prefix, parts, (q_size, kv_size, kv_size))
        return Attention(
            self.backend,
            weights.linear(qkv, c.hidden_size, biases),
            weights.linear({f"{prefix}.o_proj": c.hidden_size}, q_size),
            n_heads=c.n_heads,
            n_kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            **({"rope": self.rope} | options),
        )

    def mlp(self, weights: Weights, i: int, prefix: str) -> Callable[[Array], Array]:
        return self.make_mlp(weights, prefix)

    def make_mlp(
        self,
        weights: Weights,
        prefix: str,
        parts: Sequence[str] = ("gate_proj", "up_proj"),
        activation: Callable[[Array], Array] | None = None,
    ) -> MLP:
        """parts: the names of the matrices that gate and up come from, one or two."""
        c = self.shape
        inner = c.intermediate_size
        return MLP(
            weights.linear(_rows(prefix, parts, (inner, inner)), c.hidden_size),
            weights.linear({f"{prefix}.down_proj": c.hidden_size}, inner),
            activation or self.backend.swiglu,
        )

    def embed(self, ids: Sequence[int] | mx.array) -> Array:
        return self.backend.embed(self.embed_tokens, ids)

    def __call__(
        self, ids: Sequence[int] | mx.array, caches: Sequence[LayerCache], n_logits: int = 1
    ) -> mx.array:
        """Logits (n_logits, vocab_size) of the last n_logits of the tokens `ids`."""
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.backend.logits(self.norm(x[-n_logits:]), self.lm_head)


def _rows(prefix: str, parts: Sequence[str], rows: Sequence[int]) -> dict[str, int]:
    """Names of matrices and their rows; one alone has all of them."""
    sizes = rows if len(parts) > 1 else [sum(rows)]
    return {f"{prefix}.{part}": size for part, size in zip(parts, sizes, strict=True)}
