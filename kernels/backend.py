"""The calls every backend offers, in plain MLX operations.

Models are written against these calls alone. This class is both the fallback where a machine has
no kernels of its own and the oracle that kernels are tested against.

Arrays have no batch axis: hidden states are (tokens, hidden_size), attention's are
(heads, tokens, head_dim).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import mlx.core as mx

from tqchat.kernels import codec
from tqchat.kernels.view import KeysOfValues, KVView
from tqchat.kernels.weight import Weight

# An mx.array; in the CPU backend a numpy array, which has the same operators and methods.
Array: TypeAlias = Any

# MLX's attention to many tokens does without a matrix of scores for heads of these sizes; for other
# ones as many queries are taken at a time as keep it below so many bytes.
FUSED_HEAD_DIMS = (64, 80, 128)
SCORES_BYTES = 256 << 20

# Of gpt-oss's SwiGLU, and twice sqrt(2 / pi)
CLAMP, SWISH, GELU = 7.0, 1.702, 1.5957691216057308


class Backend:
    """Plain MLX operations on the default device, activations in `dtype`.

    `cache_dtype` is the 16-bit type of tail, sink and dense cache. The quantised cache has codes of
    `kv_bits` bits, 3 or 4.
    """

    name = "plain MLX"
    # What the person should know about this backend and how to get a better one; empty if nothing.
    note = ""
    # Whether a device computes while Python goes on, so that steps are worth queueing ahead.
    asynchronous = False
    # Whether a decode step can be traced once and run with any counts (`append_and_attend`).
    compiles_steps = False
    # Whether a sealed cache may hold V alone where K is made of it (`KeysOfValues`).
    derives_keys = True
    # Tokens prefilled at a time: a stop is heard between chunks, so one must stay short.
    prefill_chunk = 512

    def __init__(
        self,
        dtype: mx.Dtype = mx.float32,
        cache_dtype: mx.Dtype | None = None,
        kv_bits: int = 4,
    ) -> None:
        self.dtype = dtype
        self.kv_bits = kv_bits
        self.cache_dtype = cache_dtype or (mx.float16 if dtype == mx.float32 else dtype)
        # Of each element of a layer's past that prefill writes out; 0: it reads codes as they lie.
        self.past_bytes = int(dtype.size)

    # Arrays

    def zeros(self, shape: Sequence[int], dtype: mx.Dtype) -> Array:
        return mx.zeros(shape, dtype)

    def evaluate(self, *arrays: Array) -> None:
        """Compute what is still lazy; returns when it is there."""
        mx.eval(*arrays)

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """Side by side along the last axis."""
        return mx.concatenate(list(arrays), axis=-1)

    def concatenate_tokens(self, arrays: Sequence[Array]) -> Array:
        """K or V of several spans (n_kv_heads, tokens, head_dim), one after the other."""
        return mx.concatenate(list(arrays), axis=1)

    def write_tokens(self, buffer: Array, start: int, x: Array) -> None:
        """Put K or V (n_kv_heads, n, head_dim) in a buffer of `cache_dtype`, from `start` on."""
        buffer[:, start : start + x.shape[1]] = x

    def split_heads(self, x: Array, n_heads: int) -> Array:
        """(tokens, n_heads * head_dim) -> (n_heads, tokens, head_dim)."""
        return x.reshape(x.shape[0], n_heads, -1).swapaxes(0, 1)

    def merge_heads(self, x: Array) -> Array:
        """(n_heads, tokens, head_dim) -> (tokens, n_heads * head_dim)."""
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)

    # Layers

    def load(self, weight: Weight) -> Weight:
        """The form of a weight that this backend computes with. Called once, when loading."""
        if weight.mode != "affine":
            return weight
        if weight.bits:
            # quantized_matmul wants scales in the activations' type.
            scales, biases = (x.astype(self.dtype) for x in (weight.scales, weight.biases))
            return replace(weight, scales=scales, biases=biases)
        return Weight(weight.data.astype(self.dtype))

    def load_vector(self, x: mx.array) -> Array:
        """A norm's weight or a bias, in the activations' type."""
        return x.astype(self.dtype)

    def load_table(self, x: mx.array) -> Array:
        """A table that stays in float32, such as RoPE's periods."""
        return x.astype(mx.float32)

    def embed(self, weight: Weight, ids: Sequence[int] | mx.array) -> Array:
        """Rows of the embedding: (tokens, hidden_size)."""
        index = ids if isinstance(ids, mx.array) else mx.array(list(ids), dtype=mx.uint32)
        if not weight.bits:
            return weight.data[index]
        return mx.dequantize(
            weight.data[index],
            weight.scales[index],
            None if weight.biases is None else weight.biases[index],
            group_size=weight.group_size,
            bits=weight.bits,
            mode=weight.mode,
        ).astype(self.dtype)

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """x (tokens, columns) times the weight's transpose: (tokens, rows)."""
        if weight.bits:
            y = mx.quantized_matmul(
                x,
                weight.data,
                weight.scales,
                weight.biases,
                transpose=True,
                group_size=weight.group_size,
                bits=weight.bits,
                mode=weight.mode,
            )
        else:
            y = x @ weight.data.T
        return y if bias is None else y + bias

    def logits(self, x: Array, weight: Weight) -> mx.array:
        """The output projection of one or more tokens, as MLX float32 (tokens, vocab_size)."""
        y: mx.array = self.linear(x, weight).astype(mx.float32)
        return y

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Root mean square normalisation over the last axis (arXiv:1910.07467)."""
        return mx.fast.rms_norm(x, weight, eps)

    def rope(self, x: Array, periods: Array, offset: int) -> Array:
        """Rotary position embedding of x (heads, tokens, head_dim), halves convention.

        The pair (i, i + n) with n = len(periods) turns by position / periods[i]; channels past
        2 n are left alone (arXiv:2104.09864).
        """
        return mx.fast.rope(
            x,
            2 * periods.shape[0],
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=periods,
        )

    def swiglu(self, gate_up: Array) -> Array:
        """silu(gate) * up of (tokens, 2 * size), gate first (arXiv:2002.05202)."""
        gate, up = mx.split(gate_up, 2, axis=-1)
        return gate * mx.sigmoid(gate) * up

    def clamped_swiglu(self, gate_up: Array) -> Array:
        """gate * sigmoid(1.702 gate) * (up + 1), the gate at most 7 and up within 7 of zero, of
        (tokens, 2 * size), gate first (gpt-oss's model card, arXiv:2508.10925)."""
        gate, up = mx.split(gate_up, 2, axis=-1)
        gate = mx.minimum(gate, CLAMP)
        return gate * mx.sigmoid(SWISH * gate) * (mx.clip(up, -CLAMP, CLAMP) + 1)

    def geglu(self, gate_up: Array) -> Array:
        """gelu(gate) * up of (tokens, 2 * size), gate first; GELU by tanh (arXiv:1606.08415)."""
        gate, up = mx.split(gate_up, 2, axis=-1)
        # 1 + tanh(x) = 2 sigmoid(2 x)
        return gate * mx.sigmoid(GELU * (gate + 0.044715 * gate * gate * gate)) * up

    def temper(self, q: Array, offset: int, beta: float, length: float) -> Array:
        """q (n_heads, tokens, head_dim) times 1 + beta * ln(1 + floor(position / length)).

        Keeps attention sharp over contexts longer than trained for (Llama 4, Ministral 3).
        """
        positions = offset + mx.arange(q.shape[1])
        factors = 1 + beta * mx.log1p(mx.floor(positions / length))
        return q * factors[:, None].astype(q.dtype)

    # Mixtures of experts

    def route(self, logits: Array, top_k: int, renormalise: bool) -> tuple[Array, Array]:
        """The experts with the largest logits of each token, and their shares: (tokens, top_k).

        Shares are a softmax over all experts, or over the chosen ones to `renormalise`.
        """
        logits = logits.astype(mx.float32)
        chosen = mx.argpartition(-logits, kth=top_k - 1, axis=-1)[:, :top_k]
        picked = mx.take_along_axis(logits, chosen, axis=-1)
        total = mx.logsumexp(picked if renormalise else logits, axis=-1, keepdims=True)
        return chosen, mx.exp(picked - total)

    def experts(
        self,
        x: Array,
        chosen: Array,
        shares: Array,
        gate_up: Weight,
        down: Weight,
        activation: Callable[[Array], Array],
        biases: tuple[Array, Array] | None = None,
    ) -> Array:
        """The sum of each token's chosen experts, by their shares; x and result (tokens, size).

        An expert is down(activation(gate_up(x))); activation takes (rows, 2 * size). biases: of
        gate_up and down, a row for each expert.
        """
        tokens, top_k = chosen.shape
        index, order = chosen.reshape(-1), mx.arange(top_k)
        grouped = tokens > 1
        if grouped:
            # By expert, so that a matrix is read once.
            order = mx.argsort(index)
            index = index[order]
        y = _gather(x[order // top_k], gate_up, index, grouped)
        if biases is not None:
            y = y + biases[0][index]
        y = _gather(activation(y), down, index, grouped)
        if biases is not None:
            y = y + biases[1][index]
        if grouped:
            y = y[mx.argsort(order)]
        y = y.reshape(tokens, top_k, -1)
        return (y * shares[..., None]).sum(axis=1).astype(x.dtype)

    # The sealed cache

    def seal(self, k: Array, v: Array) -> Array:
        """Tiles (n_kv_heads, n, tile_words) of K and V (n_kv_heads, n * BLOCK, head_dim)."""
        return codec.seal(k, v, self.kv_bits)

    def unseal(self, tiles: Array) -> tuple[Array, Array]:
        """K and V (n_kv_heads, n * BLOCK, head_dim) of tiles, in the activations' type."""
        k, v = codec.unseal(tiles, self.kv_bits)
        return k.astype(self.dtype), v.astype(self.dtype)

    def seal_values(self, v: Array) -> Array:
        """Tiles (n_kv_heads, n, tile_words) that hold V (n_kv_heads, n * BLOCK, head_dim) alone."""
        return codec.seal_channels(v, self.kv_bits)

    def unseal_values(self, tiles: Array) -> Array:
        """V (n_kv_heads, n * BLOCK, head_dim) of tiles that hold it alone, as `unseal`."""
        return codec.unseal_channels(tiles, self.kv_bits).astype(self.dtype)

    def to_canonical(self, tiles: Array, k_is_v: bool = False) -> Array:
        """This backend's tiles in the order of `layout`, as an MLX array.

        k_is_v: they hold V alone.
        """
        return tiles

    def from_canonical(self, tiles: mx.array, k_is_v: bool = False) -> Array:
        """Tiles in the order of `layout` in this backend's order."""
        return tiles

    def attend(
        self,
        q: Array,
        view: KVView,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        """Decode attention on a sealed cache that already holds the query tokens.

        q: (n_heads, tokens, head_dim), at most MAX_DECODE_TOKENS tokens, the last ones held; they
        are causal among themselves. softcap: cap * tanh(score / cap). sinks: (n_heads,), a logit
        per head that joins the softmax without a value. window: a token sees itself and the
        window - 1 before it. Returns q's shape.
        """
        k, v = self._held(view.seen(window, q.shape[1]))
        return self.attend_dense(q, k, v, scale, softcap=softcap, sinks=sinks, window=window)

    def attend_chunk(
        self,
        q: Array,
        k: Array,
        v: Array,
        view: KVView,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        """Prefill attention: a chunk's queries over the past in `view` and over its own K and V.

        k, v: (n_kv_heads, tokens, head_dim), not yet in the cache. Otherwise as `attend`.
        """
        k, v = self.gather(view.seen(window), k, v)
        return self.attend_dense(q, k, v, scale, softcap=softcap, sinks=sinks, window=window)

    def gather(self, view: KVView, k: Array, v: Array) -> tuple[Array, Array]:
        """K and V of what is held, followed by k and v, in 16 or 32 bits and in one piece."""
        past_k, past_v = self._held(view)
        return (
            self.concatenate_tokens([past_k, k.astype(past_k.dtype)]),
            self.concatenate_tokens([past_v, v.astype(past_v.dtype)]),
        )

    def attend_dense(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        """Attention of q's tokens, the last of those in k and v (n_kv_heads, length, head_dim)."""
        tokens, length = q.shape[1], k.shape[1]
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        at_a_time = max(1, SCORES_BYTES // (4 * q.shape[0] * length))
        if tokens > at_a_time and (softcap is not None or q.shape[2] not in FUSED_HEAD_DIMS):
            parts = []
            for start in range(0, tokens, at_a_time):
                part = q[:, start : start + at_a_time]
                end = length - tokens + start + part.shape[1]
                part = self.attend_dense(
                    part, k[:, :end], v[:, :end], scale, softcap=softcap, sinks=sinks, window=window
                )
                self.evaluate(part)
                parts.append(part)
            return self.concatenate_tokens(parts)
        if softcap is not None:
            return _soft_capped(q, k, v, scale, softcap, sinks, _mask(tokens, length, window))
        mask: str | mx.array | None = "causal" if tokens > 1 else None
        if window is not None:
            mask = _mask(tokens, length, window)
        return mx.fast.scaled_dot_product_attention(
            q[None], k[None], v[None], scale=scale, mask=mask, sinks=sinks
        )[0]

    def _held(self, view: KVView) -> tuple[Array, Array]:
        tiles = view.tiles[:, : view.n_blocks]
        sink, tail = slice(0, view.n_sink), slice(0, view.n_tail)

        def joined(sink_x: Array, x: Array, tail_x: Array) -> Array:
            return self.concatenate_tokens([sink_x[:, sink], x, tail_x[:, tail]])

        if view.keys is not None:
            v = joined(view.sink_v, self.unseal_values(tiles), view.tail_v)
            return self._keys(v, view.keys), v
        k, v = self.unseal(tiles)
        return joined(view.sink_k, k, view.tail_k), joined(view.sink_v, v, view.tail_v)

    def _keys(self, v: Array, keys: KeysOfValues) -> Array:
        """K of V, both (n_kv_heads, tokens, head_dim), from position 0 on."""
        return self.rope(v * keys.weight, keys.periods, 0)


def _gather(x: mx.array, weight: Weight, index: mx.array, grouped: bool) -> mx.array:
    """Each row of x times the transpose of its expert's matrix; grouped: `index` rises."""
    if not weight.bits:
        w = weight.data.swapaxes(-1, -2)
        return mx.gather_mm(x[:, None], w, rhs_indices=index, sorted_indices=grouped)[:, 0]
    return mx.gather_qmm(
        x[:, None],
        weight.data,
        weight.scales,
        weight.biases,
        rhs_indices=index,
        transpose=True,
        group_size=weight.group_size,
        bits=weight.bits,
        mode=weight.mode,
        sorted_indices=grouped,
    )[:, 0]


def _mask(tokens: int, length: int, window: int | None) -> mx.array:
    """(tokens, length): True where a query token may look."""
    query = mx.arange(length - tokens, length)[:, None]
    key = mx.arange(length)[None]
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)


def _soft_capped(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    softcap: float,
    sinks: mx.array | None,
    mask: mx.array,
) -> mx.array:
    n_heads, tokens, dim = q.shape
    n_kv_heads = k.shape[0]
    grouped = q.reshape(n_kv_heads, n_heads // n_kv_heads, tokens, dim).astype(mx.float32)
    scores = (grouped * scale) @ k[:, None].swapaxes(-1, -2).astype(mx.float32)
    scores = mx.where(mask, mx.tanh(scores / softcap) * softcap, -mx.inf)
    if sinks is not None:
        column = sinks.astype(mx.float32).reshape(n_kv_heads, -1, 1, 1)
        column = mx.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., :-1]
    out = weights @ v[:, None].astype(mx.float32)
    return out.reshape(n_heads, tokens, dim).astype(q.dtype)
