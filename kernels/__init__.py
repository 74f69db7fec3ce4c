"""Model arithmetic that MLX does not have: the KV cache's codec and attention on it, per backend.

`select()` gives the backend for this machine. Every backend offers the calls of
`backend.Backend`, whose own methods are plain MLX operations and serve as the oracle.
"""

from tqchat.kernels.backend import Array, Backend
from tqchat.kernels.layout import BLOCK, GROUP, SINK, TAIL_MAX, TAIL_MIN, tile_words
from tqchat.kernels.select import select
from tqchat.kernels.view import KeysOfValues, KVView
from tqchat.kernels.weight import Weight

__all__ = [
    "BLOCK",
    "GROUP",
    "SINK",
    "TAIL_MAX",
    "TAIL_MIN",
    "Array",
    "Backend",
    "KVView",
    "KeysOfValues",
    "Weight",
    "select",
    "tile_words",
]
