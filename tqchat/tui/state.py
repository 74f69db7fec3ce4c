"""What the panels show: the newest figures, and the speed of the last minutes."""

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from tqchat.engine.events import CacheUse, Memory, ModelInfo, Usage

_SAMPLE_S = 0.5
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
    """Something with a beginning and an end: loading, prefill. `rate` is per second, smoothed."""

    label: str
    done: int = 0
    total: int = 0
    skipped: int = 0
    started: float = field(default_factory=lambda: monotonic())

    def advance(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0

    @property
    def rate(self) -> float:
        elapsed = monotonic() - self.started
        return (self.done - self.skipped) / elapsed if elapsed > 0.2 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None while it cannot be told."""
        if not self.total or self.rate <= 0:
            return None
        return (self.total - self.done) / self.rate
