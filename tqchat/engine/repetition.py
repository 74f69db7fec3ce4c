"""When an answer goes round in circles: small models do, and nothing in them would end it."""

from collections.abc import Sequence

EVERY = 32
"""Looked at once in so many tokens, so that a token does not pay for it."""

_WINDOW = 256
_LONGEST_CYCLE = 64


def goes_in_circles(tokens: Sequence[int]) -> bool:
    """Whether the last 256 of `tokens` are one cycle of at most 64, repeated exactly."""
    last = tokens[-_WINDOW:]
    return len(last) == _WINDOW and any(
        last[cycle:] == last[:-cycle] for cycle in range(1, _LONGEST_CYCLE + 1)
    )
