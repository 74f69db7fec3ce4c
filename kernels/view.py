"""What one layer's sealed cache holds, as attention reads it."""

from dataclasses import dataclass, replace
from typing import Any

from tqchat.kernels.layout import BLOCK


@dataclass(frozen=True, slots=True)
class KeysOfValues:
    """How K is made of V, so that V alone need be held: K = rope(weight * V) at V's own position.

    weight: (head_dim,), of the norm that K has and V has not
    periods: as `Backend.rope` takes them; those of what does not turn are infinite, and last
    """

    weight: Any
    periods: Any


@dataclass(frozen=True, slots=True)
class KVView:
    """Whole buffers and how much of each is filled; positions run sink, tiles, tail.

    sink_k, sink_v: (n_kv_heads, SINK, head_dim), 16 bits
    tiles: (n_kv_heads, capacity in blocks, tile_words(head_dim)), uint32, in the backend's order
    tail_k, tail_v: (n_kv_heads, TAIL_CAPACITY, head_dim), 16 bits
    lengths: (4,), int32, n_sink, n_blocks, n_tail and 0 on the device, for a decode step that is
        compiled once and run with any counts; the counts themselves then mean nothing
    keys: if V alone is held, what K is made by. Tiles are then tile_words(head_dim, k_is_v=True)
        wide, sink_k and tail_k have no channels, and the first token held is at position 0
    """

    sink_k: Any
    sink_v: Any
    tiles: Any
    tail_k: Any
    tail_v: Any
    n_sink: int
    n_blocks: int
    n_tail: int
    lengths: Any = None
    keys: KeysOfValues | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.n_sink + BLOCK * self.n_blocks + self.n_tail

    def seen(self, window: int | None, tokens: int = 0) -> "KVView":
        """Without the blocks, and the sink before them, that no query sees.

        The queries are the last `tokens` held and all that follow them.
        """
        first = 0 if window is None else self.length - tokens - window + 1
        n = min((first - self.n_sink) // BLOCK, self.n_blocks)
        if n <= 0:
            return self
        return replace(self, n_sink=0, n_blocks=self.n_blocks - n, tiles=self.tiles[:, n:])
