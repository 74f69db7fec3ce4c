"""How a KV cache lies in memory.

Positions 0 to SINK - 1 stay in 16 bits. Then come sealed blocks of codes of 4 bits or 3: block b
holds positions SINK + BLOCK * b to SINK + BLOCK * b + BLOCK - 1 and is never rewritten. The newest
TAIL_MIN to TAIL_MAX tokens wait in a 16-bit tail.

A sealed block is one tile per KV head, with 4 bits 10 * head_dim words of 32 bits (5 bits per
element):

    words                    what
    0        .. 4 head_dim   K codes: token t, channels 8 w to 8 w + 7 in word t * head_dim / 8 + w
    4        .. 5 head_dim   K parameters: channel c in word c (one pair per channel and block)
    5        .. 9 head_dim   V codes, as K's
    9        .. 10 head_dim  V parameters: token t, group g in word t * head_dim / GROUP + g

A code is a nibble, code + 8 in 0..15, the lowest nibble first. A parameter word is two fp16
numbers: scale in the low half, mid in the high half. This is the canonical order, the one saved
to disk; a backend may order the code words of its own tiles otherwise.

Codes of 3 bits are code + 4 in 0..7, so the top bit of each nibble is free. Of every four code
words the last is given away to the top bits of the other three: bit i of its nibbles to word i. A
tile is then 8 * head_dim words (4 bits per element): 3 head_dim of K codes, head_dim of K
parameters, and the same of V.

Where K is made of V (`view.KeysOfValues`), V alone is held: sink and tail have no K, and a tile is
the first half of the above, of V. Its parameters are per channel, as K's: scores are then sums over
channels with one factor each, and so are V's own sums over tokens.
"""

BLOCK = 32
GROUP = 32
SINK = 4
TAIL_MIN = 64
TAIL_MAX = 127
TAIL_CAPACITY = TAIL_MAX + 1

# A step of at most this many query tokens is a decode step: it attends to the cache as it lies.
MAX_DECODE_TOKENS = 8


def tile_words(head_dim: int, bits: int = 4, k_is_v: bool = False) -> int:
    """Words of 32 bits in one tile (one KV head, BLOCK tokens), codes of 3 or 4 bits.

    It holds K and V, or V alone if `k_is_v`.
    """
    return (1 if k_is_v else 2) * (bits + 1) * head_dim


def tile_bytes(head_dim: int, bits: int = 4, k_is_v: bool = False) -> int:
    return 4 * tile_words(head_dim, bits, k_is_v)
