"""What architectures share: layers bound to a backend.

Shapes have no batch axis: hidden states are (tokens, hidden_size).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from tqchat.kernels import GROUP, Array, Backend, KeysOfValues, Weight
from tqchat.models.rope import Rotation


class LayerCache(Protocol):
    """One layer's KV cache, as an attention layer uses it."""

    @property
    def offset(self) -> int:
        """Tokens held, and so the position of the next one."""
        ...

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        sinks: Array | None = None,
        keys: KeysOfValues | None = None,
    ) -> Array:
        """Take in K and V (n_kv_heads, tokens, head_dim); attend q (n_heads, tokens, head_dim).

        sinks: (n_heads,), a logit per head that joins the softmax without a value. keys: how k is
        made of v, of a layer that is `k_is_v`. How far back a token sees is the cache's own
        (`KVLayer.window`).
        """
        ...

    def share(
        self, q: Array, k: Array, v: Array, scale: float, keys: KeysOfValues | None = None
    ) -> tuple[Array, Callable[[Array, float], Array]]:
        """`attend`, and a call by which other layers' queries of the same tokens see the same."""
        ...


class Linear:
    """One matrix, or several of different formats whose outputs lie side by side."""

    def __init__(self, backend: Backend, weights: Sequence[Weight], bias: Array | None) -> None:
        self._backend = backend
        self.weights = tuple(weights)
        self.bias = bias

    def __call__(self, x: Array) -> Array:
        if len(self.weights) == 1:
            return self._backend.linear(x, self.weights[0], self.bias)
        outputs = [self._backend.linear(x, weight) for weight in self.weights]
        y = self._backend.concatenate(outputs)
        return y if self.bias is None else y + self.bias


class RMSNorm:
    def __init__(self, backend: Backend, weight: Array, eps: float) -> None:
        self._backend = backend
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return self._backend.rms_norm(x, self.weight, self.eps)


class RoPE:
    """Turns x (heads, tokens, head_dim), whose first token is at position `offset`."""

    def __init__(self, backend: Backend, rotation: Rotation, head_dim: int) -> None:
        self._backend = backend
        self.periods = backend.load_table(mx.array(rotation.periods))
        self._factors: Array | None = None
        if rotation.factor != 1.0:
            rotated = 2 * len(rotation.periods)
            factors = [rotation.factor] * rotated + [1.0] * (head_dim - rotated)
            self._factors = backend.load_vector(mx.array(factors))

    def __call__(self, x: Array, offset: int) -> Array:
        x = x if self._factors is None else x * self._factors
        return self._backend.rope(x, self.periods, offset)

    def keys(self, weight: Array) -> KeysOfValues:
        """How K is made of V where K is V times `weight` (head_dim,), and turned."""
        weight = weight if self._factors is None else weight * self._factors
        return KeysOfValues(weight, self.periods)


class Attention:
    """Grouped-query attention (arXiv:2305.13245) over a layer's cache.

    q_norm, k_norm: norms of each head's channels. rope None: positions are not embedded.
    temper: multiplies queries by a factor of their position, as (q, offset) -> q.
    sinks: (n_heads,), a logit per head that joins the softmax without a value.
    Heads of other sizes than the cache's (multiples of GROUP) are filled up with zeros.
    """

    def __init__(
        self,
        backend: Backend,
        qkv_proj: Linear,
        o_proj: Linear,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rope: RoPE | None,
        scale: float | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        temper: Callable[[Array, int], Array] | None = None,
        sinks: Array | None = None,
    ) -> None:
        self._backend = backend
        self.qkv_proj, self.o_proj = qkv_proj, o_proj
        self._n_heads, self._n_kv_heads, self._head_dim = n_heads, n_kv_heads, head_dim
        self._padding = -head_dim % GROUP
        self._rope, self._temper, self._sinks = rope, temper, sinks
        self._q_norm, self._k_norm = q_norm, k_norm
        self._scale = head_dim**-0.5 if scale is None else scale

    def __call__(self, x: Array, cache: LayerCache) -> Array:
        backend, qkv, offset = self._backend, self.qkv_proj(x), cache.offset
        k_start = self._n_heads * self._head_dim
        v_start = k_start + self._n_kv_heads * self._head_dim
        q = backend.split_heads(qkv[:, :k_start], self._n_heads)
        k = backend.split_heads(qkv[:, k_start:v_start], self._n_kv_heads)
        v = backend.split_heads(qkv[:, v_start:], self._n_kv_heads)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        if self._rope is not None:
            q, k = self._rope(q, offset), self._rope(k, offset)
        if self._temper is not None:
            q = self._temper(q, offset)
        if self._padding:
            q, k, v = (self._padded(x) for x in (q, k, v))
        out = cache.attend(q, k, v, self._scale, self._sinks)
        return self.o_proj(backend.merge_heads(out[..., : self._head_dim]))

    def _padded(self, x: Array) -> Array:
        zeros = self._backend.zeros((*x.shape[:2], self._padding), self._backend.dtype)
        return self._backend.concatenate([x, zeros])


class MLP:
    """A gated feed-forward layer (arXiv:2002.05202); `activation` takes gate and up, joined."""

    def __init__(
        self, gate_up_proj: Linear, down_proj: Linear, activation: Callable[[Array], Array]
    ) -> None:
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._activation = activation

    def __call__(self, x: Array) -> Array:
        return self.down_proj(self._activation(self.gate_up_proj(x)))


class MoE:
    """A mixture of experts: each token goes through `top_k` of many MLPs (arXiv:2101.03961).

    gate_up, down: an expert per entry of the first axis; biases: of both, a row per expert.
    renormalise: the chosen experts' shares add up to 1; else they are as the softmax over all
    experts gives them.
    """

    def __init__(
        self,
        backend: Backend,
        router: Linear,
        gate_up: Weight,
        down: Weight,
        *,
        top_k: int,
        renormalise: bool,
        activation: Callable[[Array], Array],
        biases: tuple[Array, Array] | None = None,
    ) -> None:
        self._backend = backend
        self.router, self.gate_up, self.down, self.biases = router, gate_up, down, biases
        self._top_k, self._renormalise, self._activation = top_k, renormalise, activation

    def __call__(self, x: Array) -> Array:
        backend = self._backend
        chosen, shares = backend.route(self.router(x), self._top_k, self._renormalise)
        return backend.experts(
            x, chosen, shares, self.gate_up, self.down, self._activation, self.biases
        )


class Layer:
    """Attention, then an MLP, each on a norm of what it adds to."""

    def __init__(
        self,
        input_norm: RMSNorm,
        self_attn: Callable[[Array, LayerCache], Array],
        mlp_norm: RMSNorm,
        mlp: Callable[[Array], Array],
    ) -> None:
        self.input_norm, self.self_attn = input_norm, self_attn
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, x: Array, cache: LayerCache) -> Array:
        x = x + self.self_attn(self.input_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))
