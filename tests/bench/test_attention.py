"""`tqchat bench attention`: what it reports, not how fast anything is."""

import json

import mlx.core as mx
import pytest

from tqchat.bench import attention
from tqchat.kernels import Backend, select

SMALL = attention.Shape("small", 4, 2, 64)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SECONDS", 0.0), ("ROTATED_BYTES", 1), ("COPIED_BYTES", 1 << 20)):
        monkeypatch.setattr(attention, name, value)


@pytest.mark.parametrize("backend", [Backend(), select(mx.float16)], ids=["MLX", "this machine"])
@pytest.mark.parametrize("query_tokens", [1, 3])
def test_every_way_at_every_size(backend: Backend, query_tokens: int) -> None:
    report = attention.measure(backend, [SMALL], [128, 300], query_tokens)
    assert [(row.context, row.way) for row in report.rows] == [
        (context, way) for context in (128, 300) for way in attention.WAYS
    ]
    assert report.refused == []
    for row in report.rows:
        assert row.seconds > 0
        rate = row.bytes / row.seconds
        assert row.of_copy_bandwidth == pytest.approx(rate / report.copy_bandwidth)
    fp16 = report.rows[3]
    assert fp16.bytes == 2 * 2 * 2 * 64 * 128
    assert fp16.times_fp16 == 1
    # 300 tokens: 4 in the sink, 7 sealed blocks, 72 in the tail.
    assert report.rows[4].bytes == 2 * (7 * 10 * 64 * 4 + 2 * 2 * 64 * (4 + 72))
    assert json.loads(json.dumps(report.as_json()))["rows"][0]["way"] == attention.FUSED


def test_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    report = attention.measure(Backend(), [SMALL], [10**12])
    assert report.rows == []
    assert "small at 1,000,000,000,000 tokens needs" in report.refused[0]
    attention.show(report)
    assert "GiB is free" in capsys.readouterr().out
