"""Llama 2 and 3, SmolLM2, TinyLlama, Mistral without a sliding window (arXiv:2302.13971)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from tqchat.kernels import GROUP, Array, Backend
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
from tqchat.models.kv import KVLayer
from tqchat.models.layers import LayerCache, RoPE, Weights, rope_periods

MAX_HEAD_DIM = 512
"""What the kernels are written for; V is quantised in groups of GROUP channels."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The keys of config.json that shape the model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_periods: tuple[float, ...]
    tie_word_embeddings: bool
    context: int

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return (KVLayer(self.n_kv_heads, self.head_dim),) * self.n_layers

    @property
    def n_parameters(self) -> int:
        """Elements of all matrices; norms and biases are too small to count."""
        heads = (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        embeddings = 1 if self.tie_word_embeddings else 2
        return self.n_layers * layer + embeddings * self.vocab_size * self.hidden_size

    @classmethod
    def parse(cls, config: Config) -> "LlamaConfig":
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            raise ModelError(f"{config.name}: sliding-window attention is not supported yet.")
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
        if head_dim % GROUP or head_dim > MAX_HEAD_DIM:
            raise ModelError(
                f"{config.name}: a head_dim of {head_dim} is not supported, multiples of {GROUP} "
                f"up to {MAX_HEAD_DIM} are. Choose another model."
            )
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            n_layers=config.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            rope_periods=rope_periods(config, head_dim),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            context=config.integer("max_position_embeddings", 2048),
        )


class Attention:
    def __init__(self, c: LlamaConfig, weights: Weights, backend: Backend, prefix: str, rope: RoPE):
        self._backend = backend
        self._rope = rope
        self._n_heads, self._n_kv_heads = c.n_heads, c.n_kv_heads
        self._q_size, self._kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self._scale = c.head_dim**-0.5
        self.qkv_proj = weights.linear(
            {
                f"{prefix}.q_proj": self._q_size,
                f"{prefix}.k_proj": self._kv_size,
                f"{prefix}.v_proj": self._kv_size,
            },
            c.hidden_size,
        )
        self.o_proj = weights.linear({f"{prefix}.o_proj": c.hidden_size}, self._q_size)

    def __call__(self, x: Array, cache: LayerCache) -> Array:
        backend, qkv = self._backend, self.qkv_proj(x)
        v_start = self._q_size + self._kv_size
        q = backend.split_heads(qkv[:, : self._q_size], self._n_heads)
        k = backend.split_heads(qkv[:, self._q_size : v_start], self._n_kv_heads)
        v = backend.split_heads(qkv[:, v_start:], self._n_kv_heads)
        q = self._rope(q, cache.offset)
        k = self._rope(k, cache.offset)
        return self.o_proj(backend.merge_heads(cache.attend(q, k, v, self._scale)))


class MLP:
    def __init__(self, c: LlamaConfig, weights: Weights, backend: Backend, prefix: str):
        self._swiglu = backend.swiglu
        self.gate_up_proj = weights.linear(
            {f"{prefix}.gate_proj": c.intermediate_size, f"{prefix}.up_proj": c.intermediate_size},
            c.hidden_size,
        )
        self.down_proj = weights.linear({f"{prefix}.down_proj": c.hidden_size}, c.intermediate_size)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(self._swiglu(self.gate_up_proj(x)))


class Layer:
    def __init__(self, c: LlamaConfig, weights: Weights, backend: Backend, prefix: str, rope: RoPE):
        self.self_attn = Attention(c, weights, backend, f"{prefix}.self_attn", rope)
        self.mlp = MLP(c, weights, backend, f"{prefix}.mlp")
        norms = (f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
        self.input_norm, self.mlp_norm = (
            weights.norm(name, c.hidden_size, c.norm_eps) for name in norms
        )

    def __call__(self, x: Array, cache: LayerCache) -> Array:
        x = x + self.self_attn(self.input_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


class Llama:
    """`progress` hears of each layer read, as (done, n_layers)."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        backend: Backend,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        c = LlamaConfig.parse(config)
        self.backend = backend
        self.shape = c
        self.n_layers, self.n_kv_heads, self.head_dim = c.n_layers, c.n_kv_heads, c.head_dim
        self.context, self.vocab_size = c.context, c.vocab_size
        rope = RoPE(backend, mx.array(c.rope_periods))
        self.embed_tokens = weights.embedding("model.embed_tokens", c.vocab_size, c.hidden_size)
        self.layers = []
        for i in range(c.n_layers):
            self.layers.append(Layer(c, weights, backend, f"model.layers.{i}", rope))
            progress(i + 1, c.n_layers)
        self.norm = weights.norm("model.norm", c.hidden_size, c.norm_eps)
        if c.tie_word_embeddings:
            weights.discard("lm_head")
            self.lm_head = self.embed_tokens
        else:
            self.lm_head = weights.embedding("lm_head", c.vocab_size, c.hidden_size)

    def __call__(
        self, ids: Sequence[int] | mx.array, caches: Sequence[LayerCache], n_logits: int = 1
    ) -> mx.array:
        """Logits (n_logits, vocab_size) of the last n_logits of the tokens `ids`."""
        x = self.backend.embed(self.embed_tokens, ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.backend.logits(self.norm(x[-n_logits:]), self.lm_head)
