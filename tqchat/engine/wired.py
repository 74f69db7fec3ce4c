"""Memory that macOS may not page out or compress while a model is in it (macOS 15 and newer).

Without that, the system takes back what a GPU has not touched for a while, and the next token
waits for it. Everywhere else there is nothing to wire, and nothing happens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

SYSTEM_RESERVE = 8 << 30
"""Bytes that stay out of it: Macs have frozen with all their memory wired."""


def limit(device: Mapping[str, Any]) -> int:
    """The most bytes to wire on `device`, as MLX describes it; 0: none."""
    recommended = int(device.get("max_recommended_working_set_size", 0))
    return max(0, min(recommended, int(device.get("memory_size", 0)) - SYSTEM_RESERVE))


class Wiring:
    """Wires from the first `wire` until `restore`, which puts back the limit there was before.

    `set_limit` takes a limit in bytes and returns the last one.
    """

    def __init__(
        self,
        set_limit: Callable[[int], int] = mx.set_wired_limit,
        device: Callable[[], Mapping[str, Any]] = mx.device_info,
    ) -> None:
        self._set_limit = set_limit
        self._device = device
        self._before: int | None = None

    def wire(self) -> None:
        most = limit(self._device())
        if self._before is None and most:
            self._before = self._set(most)

    def restore(self) -> None:
        if self._before is not None:
            self._set(self._before)
            self._before = None

    def _set(self, most: int) -> int | None:
        """The last limit; None where the system knows none."""
        try:
            return self._set_limit(most)
        except (ValueError, RuntimeError):
            return None
