"""How long a prompt takes to read, told from how long the last long one took on this machine.

One number is remembered for a model on a device: operations per second. Those of the matrices grow
with the tokens read, those of attention with the square of the position, so a rate seen at 4,096
tokens says something about 131,072. It is an estimate: the two do not run at quite the same rate.
"""

import contextlib
import json
import math

from tqchat import paths
from tqchat.models.registry import Shape

LONG_TOKENS = 1024
"""From so many on, a prompt's rate is worth remembering: overheads no longer count."""

ENOUGH_TOKENS = 256
"""From so many on, a rate is better than none."""

SMOOTH_S = 5.0
"""How long a chunk counts for the rest of its prompt: other programs come and go."""

REMEMBERED = 64
"""Models and devices; the one measured longest ago gives way."""


def work(shape: Shape, start: int, stop: int) -> float:
    """Operations that prefill of positions `start` to `stop` takes: two per multiplication.

    A mixture's experts, of which a token meets a few, are left out.
    """
    embedding = shape.vocab_size * shape.hidden_size
    matrices = shape.n_parameters - shape.n_expert_parameters - embedding
    seen = sum(_seen(stop, x.window) - _seen(start, x.window) for x in shape.kv_layers)
    return 2.0 * (matrices * (stop - start) + 2 * shape.n_heads * shape.head_dim * seen)


def _seen(stop: int, window: int | None) -> float:
    """How many tokens those before `stop` see, all together."""
    within = stop if window is None else min(stop, window)
    return within**2 / 2 + (stop - within) * within


class Pace:
    """The rate of the model that `key` names on this machine."""

    def __init__(self, shape: Shape, key: str) -> None:
        self._shape = shape
        self._key = key
        self._rate = _read().get(key)

    @property
    def rate(self) -> float | None:
        """Operations per second; None while nothing was measured."""
        return self._rate

    def work(self, start: int, stop: int) -> float:
        return work(self._shape, start, stop)

    def measured(self, start: int, stop: int, seconds: float) -> None:
        """Positions `start` to `stop` took so long."""
        if stop - start >= (ENOUGH_TOKENS if self._rate is None else LONG_TOKENS):
            self._rate = self.work(start, stop) / seconds

    def remember(self, tokens: int) -> None:
        """Keep the rate for the next start, if what it was measured on, `tokens`, is long."""
        if self._rate is None or tokens < LONG_TOKENS:
            return
        rates = _read()
        rates.pop(self._key, None)
        newest = [*rates.items(), (self._key, self._rate)][-REMEMBERED:]
        # What cannot be remembered is measured again.
        with contextlib.suppress(OSError):
            paths.write_private(paths.state_dir() / _NAME, json.dumps(dict(newest)))


class Reading:
    """Positions `start` to `stop` while they are read: how long it takes, as `pace` has it at first
    and then more and more as the newest chunks have gone."""

    def __init__(self, pace: Pace, start: int, stop: int) -> None:
        self.start = self._at = start
        self.stop = stop
        self._pace = pace
        self._rate = pace.rate
        self._elapsed = 0.0

    def came_to(self, at: int, elapsed: float) -> None:
        """All before `at` is read, `elapsed` seconds after it began."""
        chunk, seconds = self._pace.work(self._at, at), elapsed - self._elapsed
        self._pace.measured(self.start, at, elapsed)
        if self._rate is None:
            self._rate = self._pace.rate
        else:
            self._rate += -math.expm1(-seconds / SMOOTH_S) * (chunk / seconds - self._rate)
        self._at, self._elapsed = at, elapsed

    @property
    def seconds_left(self) -> float | None:
        """None while nothing was measured."""
        return None if self._rate is None else self._pace.work(self._at, self.stop) / self._rate

    @property
    def seconds(self) -> float | None:
        """For all of it, from the beginning."""
        left = self.seconds_left
        return None if left is None else self._elapsed + left


_NAME = "prefill-rates.json"


def _read() -> dict[str, float]:
    try:
        found = json.loads((paths.state_dir() / _NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        key: rate
        for key, rate in found.items()
        if isinstance(rate, float) and math.isfinite(rate) and rate > 0
    }
