"""How much memory a model needs at a context length, before anything is loaded.

Sums of bytes: weights as stored, the KV cache with the room it has for more, and the largest
transient (one layer's past written out for prefill, a chunk's activations, one token's logits).
"""

from dataclasses import dataclass

from tqchat.engine.cache import GROWTH_TOKENS, next_capacity, window_tokens
from tqchat.engine.events import CODE_BITS, KVKind
from tqchat.kernels import Backend
from tqchat.kernels.backend import FUSED_HEAD_DIMS, SCORES_BYTES
from tqchat.kernels.layout import BLOCK, SINK, TAIL_CAPACITY, TAIL_MAX, TAIL_MIN, tile_bytes
from tqchat.models.kv import KVLayer
from tqchat.models.registry import Shape


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a prompt is read: `chunk` tokens at a time.

    activation_bytes: of an activation's element; past_bytes: of an element of the one layer's
    past that is written out for attention, 0 where the codes are read as they lie.
    derives_keys: whether the past is V alone where K is made of it.
    """

    chunk: int
    activation_bytes: int = 2
    past_bytes: int = 2
    derives_keys: bool = True

    @classmethod
    def on(cls, backend: Backend, chunk: int | None = None) -> "Prefill":
        """On this backend, `chunk` tokens at a time or as many as it likes best."""
        size = chunk or backend.prefill_chunk
        return cls(size, int(backend.dtype.size), backend.past_bytes, backend.derives_keys)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes at one context length; `kv` are those of the tokens held."""

    context: int
    kv_fp16: int
    kv: int
    transient: int
    total: int


def kv_bytes(shape: Shape, context: int, kv: KVKind, derives_keys: bool = True) -> int:
    """Bytes of the cache holding `context` tokens, at its largest (a full tail)."""
    return sum(_layer_bytes(layer, context, kv, derives_keys) for layer in shape.kv_layers)


def allocated_bytes(shape: Shape, context: int, kv: KVKind, derives_keys: bool = True) -> int:
    """Bytes of the buffers that `context` tokens are read into, with their room for more."""
    return sum(_layer_allocated(layer, context, kv, derives_keys) for layer in shape.kv_layers)


def token_bytes(shape: Shape, kv: KVKind, derives_keys: bool = True) -> int:
    """What a token more takes in the end, when windows have passed and the tail is full."""
    long = 1 << 22
    both = (kv_bytes(shape, n, kv, derives_keys) for n in (long + BLOCK, long))
    return (next(both) - next(both)) // BLOCK


def need(shape: Shape, weights: int, context: int, kv: KVKind, prefill: Prefill) -> Need:
    """What `context` tokens take, read as `prefill` says. `weights`: bytes as stored."""
    cache = kv_bytes(shape, context, kv, prefill.derives_keys)
    past = 0
    if kv in CODE_BITS:
        past = prefill.past_bytes * max(_elements(x) * _held(x, context) for x in shape.kv_layers)
    tokens = min(prefill.chunk, context)
    width = 2 * shape.hidden_size + 3 * shape.intermediate_size
    activations = prefill.activation_bytes * width * tokens
    scores = 0
    if past and any(x.head_dim not in FUSED_HEAD_DIMS for x in shape.kv_layers):
        # Before the softmax and after it.
        scores = 2 * min(SCORES_BYTES, 4 * shape.n_heads * tokens * context)
    transient = past + scores + activations + 4 * shape.vocab_size
    total = weights + allocated_bytes(shape, context, kv, prefill.derives_keys) + transient
    return Need(context, kv_bytes(shape, context, "fp16"), cache, transient, total)


def largest_context(shape: Shape, weights: int, kv: KVKind, prefill: Prefill, memory: int) -> int:
    """The most tokens that fit in `memory` bytes, trained for or not; 0 if not even one block."""
    low, high = 0, 1 << 26
    while low < high:
        middle = (low + high + 1) // 2
        if need(shape, weights, middle, kv, prefill).total <= memory:
            low = middle
        else:
            high = middle - 1
    return low


def _layer_bytes(layer: KVLayer, context: int, kv: KVKind, derives_keys: bool) -> int:
    tokens, token = _held(layer, context), 2 * _elements(layer)
    if kv == "fp16":
        return tokens * token
    n_blocks = max(0, tokens - SINK - TAIL_MAX) // BLOCK
    sealed = layer.n_kv_heads * n_blocks * tile_bytes(layer.head_dim, CODE_BITS[kv])
    both = sealed + (tokens - BLOCK * n_blocks) * token
    return both // 2 if layer.k_is_v and derives_keys else both


def _layer_allocated(layer: KVLayer, context: int, kv: KVKind, derives_keys: bool) -> int:
    tokens, token = _held(layer, context), 2 * _elements(layer)
    if kv == "fp16":
        return next_capacity(tokens, GROWTH_TOKENS) * token
    n_blocks = max(0, tokens - SINK - TAIL_MIN) // BLOCK
    capacity = next_capacity(n_blocks, GROWTH_TOKENS // BLOCK)
    sealed = layer.n_kv_heads * capacity * tile_bytes(layer.head_dim, CODE_BITS[kv])
    both = sealed + (SINK + TAIL_CAPACITY) * token
    return both // 2 if layer.k_is_v and derives_keys else both


def _held(layer: KVLayer, context: int) -> int:
    """Tokens that a layer's cache holds at most."""
    if layer.window is None:
        return context
    kept = window_tokens(layer.n_kv_heads, layer.head_dim, layer.window)
    return min(context, kept + GROWTH_TOKENS + TAIL_MAX)


def _elements(layer: KVLayer) -> int:
    """Of a token's K and V."""
    return 2 * layer.n_kv_heads * layer.head_dim
