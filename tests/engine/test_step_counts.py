"""What a compiled decode step counts, on any machine: not compiled, and its kernel in Python."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from tests.engine.compiled import decode
from tests.models.test_families import CASES, both
from tqchat.kernels import Array, Backend, KVView

MODELS = ("mistral, windows", "gemma4, dense", "gemma4, shared")


class Stepping(Backend):
    """Reads the counts that a kernel finds on the device."""

    derives_keys = False

    def append_and_attend(
        self, q: Array, k: Array, v: Array, view: KVView, scale: float, **options: Any
    ) -> Array:
        end = _counted(view).n_tail
        self.write_tokens(view.tail_k, end - 1, k)
        self.write_tokens(view.tail_v, end - 1, v)
        return self.attend(q, view, scale, **options)

    def attend(self, q: Array, view: KVView, scale: float, **options: Any) -> Array:
        return super().attend(q, _counted(view), scale, **options)

    def rope(self, x: Array, periods: Array, offset: Any) -> Array:
        return super().rope(x, periods, int(offset))


def _counted(view: KVView) -> KVView:
    if view.lengths is None:
        return view
    n_sink, n_blocks, n_tail, _ = view.lengths.tolist()
    return replace(view, n_sink=n_sink, n_blocks=n_blocks, n_tail=n_tail, lengths=None)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_through_seals_drops_and_trims(name: str) -> None:
    backend = Stepping(mx.float32)
    model, _ = both(CASES[name], backend)
    with (
        patch.object(mx, "compile", lambda run: run),
        patch("tqchat.engine.cache.REWIND_BYTES", 0),
    ):
        n_compiled, caches = decode(model, backend, 520, 70, trim=(40, 550), tolerance=1e-4)
    assert 60 < n_compiled < 70
    # Windows of 48 have dropped what went by.
    assert all((cache.dropped > 0) == (cache.window is not None) for cache in caches)
