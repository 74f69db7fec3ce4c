"""The measurement of the screen measures a screen."""

from pathlib import Path

import pytest

from tqchat.bench import ui


@pytest.mark.parametrize("load", ["idle", "streaming", "list"])
def test_every_key_is_timed(monkeypatch: pytest.MonkeyPatch, load: ui.Load) -> None:
    monkeypatch.setattr(ui, "KEYS", 5)
    row = ui.measure(load)
    assert (row.load, row.keys) == (load, 5)
    assert 0 < row.p50 <= row.p95 <= row.p99


def test_a_key_that_never_shows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_PATIENCE_S", 0.0)
    with pytest.raises(TimeoutError, match="ready"):
        ui.measure("idle")


def test_decoding_is_measured_beside_the_screen_and_without_it(
    monkeypatch: pytest.MonkeyPatch, smollm2_gguf: Path
) -> None:
    monkeypatch.setattr(ui, "DECODED", 8)
    rates = ui.measure_decode(rounds=1)
    assert min(rates.headless, rates.screen) > 0


def test_the_first_frame_is_timed_beside_an_empty_applications() -> None:
    starts = ui.measure_start(rounds=1)
    assert min(starts.empty, starts.tqchat) > 0
