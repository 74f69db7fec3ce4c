"""How much memory a model needs at a context length, before anything is loaded.

Sums of bytes: weights as stored, the KV cache, and the largest transient (one layer's past
dequantised for prefill, a chunk's activations, one token's logits).
"""

from dataclasses import dataclass

from tqchat.engine.events import KVKind
from tqchat.kernels.layout import BLOCK, SINK, TAIL_MAX, tile_bytes
from tqchat.models.registry import Shape


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes at one context length."""

    context: int
    kv_fp16: int
    kv: int
    transient: int
    total: int


def kv_bytes(shape: Shape, context: int, kv: KVKind) -> int:
    """Bytes of the cache holding `context` tokens, at its largest (a full tail)."""
    token = 4 * shape.n_layers * shape.n_kv_heads * shape.head_dim
    if kv == "fp16":
        return context * token
    n_blocks = max(0, context - SINK - TAIL_MAX) // BLOCK
    sealed = shape.n_layers * shape.n_kv_heads * n_blocks * tile_bytes(shape.head_dim)
    return sealed + (context - BLOCK * n_blocks) * token


def need(shape: Shape, weights: int, context: int, kv: KVKind, chunk: int) -> Need:
    """What `context` tokens take, prefilled `chunk` at a time, activations in 16 bits.

    `weights`: bytes of the weights as stored.
    """
    past = 4 * shape.n_kv_heads * shape.head_dim * context if kv == "int4" else 0
    widest = 2 * (2 * shape.hidden_size + 3 * shape.intermediate_size) * min(chunk, context)
    transient = past + widest + 4 * shape.vocab_size
    cache = kv_bytes(shape, context, kv)
    total = weights + cache + transient
    return Need(context, kv_bytes(shape, context, "fp16"), cache, transient, total)


def largest_context(shape: Shape, weights: int, kv: KVKind, chunk: int, memory: int) -> int:
    """The most tokens that fit in `memory` bytes, trained for or not; 0 if not even one block."""
    low, high = 0, 1 << 26
    while low < high:
        middle = (low + high + 1) // 2
        if need(shape, weights, middle, kv, chunk).total <= memory:
            low = middle
        else:
            high = middle - 1
    return low
