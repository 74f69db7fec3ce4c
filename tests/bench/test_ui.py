"""The measurement of the screen measures a screen."""

import pytest

from tqchat.bench import ui


@pytest.mark.parametrize("load", ["idle", "streaming"])
def test_every_key_is_timed(monkeypatch: pytest.MonkeyPatch, load: ui.Load) -> None:
    monkeypatch.setattr(ui, "KEYS", 5)
    row = ui.measure(load)
    assert (row.load, row.keys) == (load, 5)
    assert 0 < row.p50 <= row.p95 <= row.p99


def test_a_key_that_never_shows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_PATIENCE_S", 0.0)
    with pytest.raises(TimeoutError, match="ready"):
        ui.measure("idle")
