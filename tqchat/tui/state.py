"""What the panels show: the newest figures, and the speed of the last minutes."""

import math
from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from tqchat.engine.events import CacheUse, Memory, ModelInfo, Usage

_SAMPLE_S = 0.5
# How often progress is looked at, and how long a look counts.
_LOOK_S, _SMOOTH_S = 0.2, 5.0
NO_USAGE = Usage(0, 0, 0, 0.0, 0.0, 0.0)


@dataclass
class Figures:
    model: ModelInfo | None = None
    usage: Usage = NO_USAGE
    cache: CacheUse | None = None
    memory: Memory | None = None
    kv: str = ""
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=128))
    _tokens: int = 0
    _sampled: float = 0.0

    def begin_decoding(self) -> None:
        self._tokens = 0
        self._sampled = monotonic()

    def count_tokens(self, tokens: int) -> bool:
        """Takes note of new tokens; True if that made a new sample of the speed."""
        self._tokens += tokens
        elapsed = monotonic() - self._sampled
        if elapsed < _SAMPLE_S:
            return False
        self.speeds.append(self._tokens / elapsed)
        self.begin_decoding()
        return True


@dataclass
class Progress:
    """Something with a beginning and an end: loading, prefill. `skipped` was there at the start.

    `rate` is per second, of what is new, smoothed: reading gets slower as a text gets longer.
    `told_left`: the seconds left, where who works knows them better than the rate does.
    """

    label: str
    done: int = 0
    total: int = 0
    skipped: int = 0
    rate: float = 0.0
    told_left: float | None = None
    _told_at: float = 0.0
    _seen: int = field(init=False)
    _seen_at: float = field(default_factory=lambda: monotonic())

    def __post_init__(self) -> None:
        self._seen = self.skipped

    def advance(self, done: int, total: int, seconds_left: float | None = None) -> None:
        self.done, self.total = done, total
        self.told_left, self._told_at = seconds_left, monotonic()
        elapsed = monotonic() - self._seen_at
        if elapsed > _LOOK_S and done > self._seen:
            rate = (done - self._seen) / elapsed
            weight = 1 - math.exp(-elapsed / _SMOOTH_S) if self.rate else 1.0
            self.rate += weight * (rate - self.rate)
            self._seen, self._seen_at = done, monotonic()

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None while it cannot be told."""
        if self.told_left is not None:
            return max(self.told_left - (monotonic() - self._told_at), 0.0)
        if not self.total or self.rate <= 0:
            return None
        return (self.total - self.done) / self.rate
