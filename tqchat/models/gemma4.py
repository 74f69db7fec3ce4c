"""Gemma 4, the text part: dense (31B), a mixture of experts (26B-A4B), and with embeddings for
each layer and layers that read others' K and V (E2B, E4B). After Hugging Face's Gemma4TextModel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from tqchat.kernels import Array, Backend
from tqchat.models.config import Config
from tqchat.models.decoder import HEAD_DIMS, Decoder, DecoderConfig, Progress
from tqchat.models.errors import ModelError
from tqchat.models.gemma3 import read_rotations, read_sliding
from tqchat.models.kv import KVLayer
from tqchat.models.layers import MLP, LayerCache, Linear, RMSNorm, RoPE
from tqchat.models.rope import Rotation
from tqchat.models.weights import Weights

# What config.json leaves out where it is as in Hugging Face's Gemma4TextConfig.
_DEFAULTS: dict[str, Any] = {
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {},
    },
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}

# K and V of the layer that others read: attention of their queries to it.
Shared = Callable[[Array, float], Array]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. cache: which of the model's caches; owns: whether it fills it; shared: whether
    others read it too.

    k_is_v: V is K before its norm and its rotation, so that there is no matrix for it.
    """

    n_kv_heads: int
    head_dim: int
    sliding: bool
    k_is_v: bool
    cache: int
    owns: bool
    shared: bool
    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """`rotation` is that of layers which see everything, `local_rotation` of those with a window.

    softcap: of logits. per_layer_size: channels of each layer's own embedding of a token, 0 for
    none. n_experts: 0 for none.
    """

    layers: tuple[LayerShape, ...]
    local_rotation: Rotation
    softcap: float | None
    per_layer_size: int
    per_layer_vocab_size: int
    n_experts: int
    top_k: int
    moe_intermediate_size: int

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_expert_parameters(self) -> int:
        return 3 * self.n_layers * self.n_experts * self.hidden_size * self.moe_intermediate_size

    @property
    def n_parameters(self) -> int:
        hidden, per_layer = self.hidden_size, self.per_layer_size
        total = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        total += self.n_expert_parameters
        for layer in self.layers:
            kv = layer.owns * (2 - layer.k_is_v) * layer.n_kv_heads
            total += hidden * layer.head_dim * (2 * self.n_heads + kv)
            total += 3 * hidden * layer.intermediate_size
            total += hidden * self.n_experts
            total += per_layer * (3 * hidden + self.per_layer_vocab_size)
        return total

    @classmethod
    def parse(cls, config: Config) -> Self:
        given = {key: value for key, value in config.items() if value is not None}
        config = Config(config.name, _DEFAULTS | given)
        full, _ = read_rotations(config, config.integer("global_head_dim"))
        _, local = read_rotations(config, config.integer("head_dim"))
        layers, kv_layers = _read_layers(config, read_sliding(config, 6))
        softcap = config.get("final_logit_softcapping")
        n_experts = config.integer("num_experts") if config.get("enable_moe_block") else 0
        top_k = config.integer("top_k_experts") if n_experts else 0
        if top_k > n_experts:
            raise ModelError(f"{config.name}: {top_k} of {n_experts} experts make no sense.")
        per_layer = config["hidden_size_per_layer_input"]
        return cls.read(
            config,
            rotation=full,
            local_rotation=local,
            kv_layers=kv_layers,
            layers=layers,
            softcap=config.number("final_logit_softcapping") if softcap else None,
            per_layer_size=config.integer("hidden_size_per_layer_input") if per_layer else 0,
            per_layer_vocab_size=config.integer("vocab_size_per_layer_input"),
            n_experts=n_experts,
            top_k=top_k,
            moe_intermediate_size=config.integer("moe_intermediate_size") if n_experts else 0,
        )


def _read_layers(
    config: Config, sliding: Sequence[bool]
) -> tuple[tuple[LayerShape, ...], tuple[KVLayer, ...]]:
    """All layers, and the caches of those that have one. Raises ModelError."""
    n_shared = config.integer("num_kv_shared_layers") if config.get("num_kv_shared_layers") else 0
    n_own = len(sliding) - n_shared
    if n_own < 1 or not set(sliding[n_own:]) <= set(sliding[:n_own]):
        raise ModelError(
            f"{config.name}: {n_shared} of {len(sliding)} layers cannot share what the others hold."
        )
    n_heads, window = config.integer("num_attention_heads"), config.integer("sliding_window")
    k_is_v = bool(config.get("attention_k_eq_v"))

    def last(is_sliding: bool) -> int:
        """Of the layers of a kind that have a cache."""
        return max(i for i in range(n_own) if sliding[i] == is_sliding)

    read = {last(is_sliding) for is_sliding in sliding[n_own:]}
    layers = []
    for i, is_sliding in enumerate(sliding):
        n_kv_heads = config.integer("num_key_value_heads")
        if k_is_v and not is_sliding:
            n_kv_heads = config.integer("num_global_key_value_heads", n_kv_heads)
        head_dim = config.integer("head_dim" if is_sliding else "global_head_dim")
        least, most = HEAD_DIMS
        if n_heads % n_kv_heads or head_dim % 32 or not least <= head_dim <= most:
            raise ModelError(
                f"{config.name}: {n_heads} heads of {head_dim} channels on {n_kv_heads} KV heads "
                "are not supported. Choose another model."
            )
        inner = config.integer("intermediate_size")
        if i >= n_own and config.get("use_double_wide_mlp"):
            inner *= 2
        cache = i if i < n_own else last(is_sliding)
        layers.append(
            LayerShape(
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                sliding=is_sliding,
                k_is_v=k_is_v and not is_sliding,
                cache=cache,
                owns=i < n_own,
                shared=cache in read,
                intermediate_size=inner,
            )
        )
    kv_layers = [
        KVLayer(x.n_kv_heads, x.head_dim, window if x.sliding else None, x.k_is_v)
        for x in layers[:n_own]
    ]
    return tuple(layers), tuple(kv_layers)


class Attention:
    """Scores are not scaled: Q and K have norms, and V one without weights."""

    def __init__(self, model: "Gemma4", weights: Weights, layer: LayerShape, prefix: str) -> None:
        c = model.shape
        self._backend, self._layer, self._n_heads = model.backend, layer, c.n_heads
        self._rope = model.local_rope if layer.sliding else model.rope
        self._q_size = c.n_heads * layer.head_dim
        self._kv_size = layer.n_kv_heads * layer.head_dim
        parts = {f"{prefix}.q_proj": self._q_size}
        if layer.owns:
            parts[f"{prefix}.k_proj"] = self._kv_size
            if not layer.k_is_v:
                parts[f"{prefix}.v_proj"] = self._kv_size
            self.k_norm = model.make_norm(weights, f"{prefix}.k_norm", layer.head_dim)
            self.v_norm = model.plain_norm(layer.head_dim)
            self._keys = self._rope.keys(self.k_norm.weight) if layer.k_is_v else None
        else:
            for name in ("k_proj", "v_proj", "k_norm"):
                weights.discard(f"{prefix}.{name}")
        self.qkv_proj = weights.linear(parts, c.hidden_size)
        self.q_norm = model.make_norm(weights, f"{prefix}.q_norm", layer.head_dim)
        self.o_proj = weights.linear({f"{prefix}.o_proj": c.hidden_size}, self._q_size)

    def __call__(
        self, x: Array, cache: LayerCache, offset: int, shared: Shared | None
    ) -> tuple[Array, Shared | None]:
        """shared: attention to the cache's K and V, where this layer has none of its own; returned
        where others read this layer's."""
        backend, layer, qkv = self._backend, self._layer, self.qkv_proj(x)
        q = self.q_norm(backend.split_heads(qkv[:, : self._q_size], self._n_heads))
        q = self._rope(q, offset)
        if shared is not None:
            out = shared(q, 1.0)
        else:
            k = qkv[:, self._q_size : self._q_size + self._kv_size]
            k = backend.split_heads(k, layer.n_kv_heads)
            v = k
            if not layer.k_is_v:
                v = backend.split_heads(qkv[:, self._q_size + self._kv_size :], layer.n_kv_heads)
            k = self._rope(self.k_norm(k), offset)
            v = self.v_norm(v)
            if layer.shared:
                out, shared = cache.share(q, k, v, 1.0, self._keys)
            else:
                out = cache.attend(q, k, v, 1.0, keys=self._keys)
        return self.o_proj(backend.merge_heads(out)), shared


class Experts:
    """A mixture of experts whose router has a norm, and its experts a factor each."""

    def __init__(self, model: "Gemma4", weights: Weights, prefix: str) -> None:
        c, backend = model.shape, model.backend
        hidden, inner = c.hidden_size, c.moe_intermediate_size
        self._backend, self._top_k = backend, c.top_k
        scale = weights.vector(f"{prefix}.router.scale", (hidden,))
        scale = backend.load_vector(scale.astype(mx.float32) * hidden**-0.5)
        self.router_norm = RMSNorm(backend, scale, c.norm_eps)
        self.router = weights.linear({f"{prefix}.router.proj": c.n_experts}, hidden)
        factors = weights.vector(f"{prefix}.router.per_expert_scale", (c.n_experts,))
        self.factors = backend.load_vector(factors)
        parts = {"gate_proj": inner, "up_proj": inner}
        if f"{prefix}.experts.gate_up_proj.weight" in weights:
            parts = {"gate_up_proj": 2 * inner}
        self.gate_up = weights.experts(prefix, parts, hidden, c.n_experts)
        self.down = weights.experts(prefix, {"down_proj": hidden}, inner, c.n_experts)

    def __call__(self, x: Array, routed: Array) -> Array:
        """x (tokens, hidden_size); routed: what the router decides on, before its norm."""
        backend = self._backend
        logits = self.router(self.router_norm(routed))
        chosen, shares = backend.route(logits, self._top_k, True)
        shares = shares * self.factors[chosen]
        return backend.experts(x, chosen, shares, self.gate_up, self.down, backend.geglu)


class Layer:
    def __init__(self, model: "Gemma4", weights: Weights, i: int, prefix: str) -> None:
        c, layer = model.shape, model.shape.layers[i]
        self._backend = model.backend
        self.cache = layer.cache

        def norm(name: str) -> RMSNorm:
            return model.make_norm(weights, f"{prefix}.{name}")

        def linear(name: str, rows: int, columns: int) -> Linear:
            return weights.linear({f"{prefix}.{name}": rows}, columns)

        self.input_norm, self.attn_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.self_attn = Attention(model, weights, layer, f"{prefix}.self_attn")
        self.pre_mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp_norm = norm("post_feedforward_layernorm")
        gates = {
            f"{prefix}.mlp.{name}": layer.intermediate_size for name in ("gate_proj", "up_proj")
        }
        self.mlp = MLP(
            weights.linear(gates, c.hidden_size),
            linear("mlp.down_proj", c.hidden_size, layer.intermediate_size),
            model.backend.geglu,
        )
        self.experts: Experts | None = None
        if c.n_experts:
            self.experts = Experts(model, weights, prefix)
            self.dense_norm = norm("post_feedforward_layernorm_1")
            self.pre_experts_norm = norm("pre_feedforward_layernorm_2")
            self.experts_norm = norm("post_feedforward_layernorm_2")
        if c.per_layer_size:
            self.per_layer_gate = linear("per_layer_input_gate", c.per_layer_size, c.hidden_size)
            self.per_layer_proj = linear("per_layer_projection", c.hidden_size, c.per_layer_size)
            self.per_layer_norm = norm("post_per_layer_input_norm")
        scalar = weights.vector(f"{prefix}.layer_scalar", (1,))
        self.scalar = model.backend.load_vector(scalar)

    def __call__(
        self,
        x: Array,
        cache: LayerCache,
        offset: int,
        shared: Shared | None,
        per_layer: Array | None,
    ) -> tuple[Array, Shared | None]:
        """per_layer: this layer's own embedding of the tokens, (tokens, per_layer_size)."""
        out, shared = self.self_attn(self.input_norm(x), cache, offset, shared)
        x = x + self.attn_norm(out)
        y = self.mlp(self.pre_mlp_norm(x))
        if self.experts is not None:
            y = self.dense_norm(y) + self.experts_norm(self.experts(self.pre_experts_norm(x), x))
        x = x + self.mlp_norm(y)
        if per_layer is not None:
            gated = self._backend.geglu(
                self._backend.concatenate([self.per_layer_gate(x), per_layer])
            )
            x = x + self.per_layer_norm(self.per_layer_proj(gated))
        return x * self.scalar, shared


class Gemma4(Decoder[Gemma4Config]):
    def __init__(
        self,
        config: Gemma4Config,
        weights: Weights,
        backend: Backend,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.shape, self.backend = config, backend
        c = config
        weights.rename(_as_modules)
        self.rope = RoPE(backend, c.rotation, max(x.head_dim for x in c.layers))
        self.local_rope = RoPE(backend, c.local_rotation, c.head_dim)
        self.n_layers, self.vocab_size, self.context = c.n_layers, c.vocab_size, c.context
        self.n_kv_heads, self.head_dim = c.n_kv_heads, c.head_dim
        self.embed_tokens = weights.embedding("model.embed_tokens", c.vocab_size, c.hidden_size)
        if c.per_layer_size:
            size = c.n_layers * c.per_layer_size
            self.embed_per_layer = weights.embedding(
                "model.embed_tokens_per_layer", c.per_layer_vocab_size, size
            )
            self.per_layer_proj = weights.linear(
                {"model.per_layer_model_projection": size}, c.hidden_size
            )
            self.per_layer_norm = self.make_norm(
                weights, "model.per_layer_projection_norm", c.per_layer_size
            )
        self.decoder_layers = []
        for i in range(c.n_layers):
            self.decoder_layers.append(Layer(self, weights, i, f"model.layers.{i}"))
            progress(i + 1, c.n_layers)
        self.norm = self.make_norm(weights, "model.norm")
        self.read_head(weights)

    def plain_norm(self, size: int) -> RMSNorm:
        ones = self.backend.load_vector(mx.ones((size,)))
        return RMSNorm(self.backend, ones, self.shape.norm_eps)

    def embed(self, ids: Sequence[int] | mx.array) -> Array:
        return super().embed(ids) * self.shape.hidden_size**0.5

    def _per_layer(self, ids: Sequence[int] | mx.array, x: Array) -> Array:
        """Each layer's own embedding of the tokens: (tokens, n_layers, per_layer_size)."""
        c = self.shape
        own = self.backend.embed(self.embed_per_layer, ids) * c.per_layer_size**0.5
        projected = self.per_layer_proj(x) * c.hidden_size**-0.5
        shape = (x.shape[0], c.n_layers, c.per_layer_size)
        return (self.per_layer_norm(projected.reshape(shape)) + own.reshape(shape)) * 2**-0.5

    def __call__(
        self, ids: Sequence[int] | mx.array, caches: Sequence[LayerCache], n_logits: int = 1
    ) -> mx.array:
        c, x = self.shape, self.embed(ids)
        per_layer = self._per_layer(ids, x) if c.per_layer_size else None
        offset = caches[0].offset
        seen: dict[int, Shared | None] = {}
        for i, layer in enumerate(self.decoder_layers):
            shared = None if c.layers[i].owns else seen[layer.cache]
            own = None if per_layer is None else per_layer[:, i]
            x, attention = layer(x, caches[layer.cache], offset, shared, own)
            seen[layer.cache] = attention
        logits = self.backend.logits(self.norm(x[-n_logits:]), self.lm_head)
        return logits if c.softcap is None else mx.tanh(logits / c.softcap) * c.softcap


def _as_modules(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Hugging Face's experts are tensors without a module's ".weight"."""
    bare = ("experts.gate_up_proj", "experts.down_proj")
    return {f"{name}.weight" if name.endswith(bare) else name: x for name, x in tensors.items()}
