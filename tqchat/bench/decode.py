"""Prefill and decode speed by context length, on whatever device there is."""

import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from tqchat.bench import charts
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel
from tqchat.engine.sampler import Rules, sample, token_id
from tqchat.kernels import Backend

DECODED = 32
REPEATS = 3

# Which calls of the backend belong to which share of a decode step.
SHARES = {
    "weights": ("linear", "logits", "embed"),
    "attention": ("attend", "attend_dense"),
    "sealing": ("seal",),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One context length: rates in tokens per second, medians of REPEATS runs; sizes in bytes."""

    context: int
    prefill_tps: float
    decode_tps: float
    ttft_s: float
    kv_bytes: int
    peak_bytes: int


def measure(loaded: LoadedModel, contexts: Sequence[int]) -> list[Row]:
    """Prefill each context length, then decode DECODED tokens. Greedy, so sampling is in it."""
    _run(loaded, Session(loaded), min(contexts))
    return [_row(loaded, context) for context in contexts]


def _row(loaded: LoadedModel, context: int) -> Row:
    session = Session(loaded)
    mx.reset_peak_memory()
    runs = [_run(loaded, session, context) for _ in range(REPEATS)]
    return Row(
        context=context,
        prefill_tps=context / statistics.median(run[0] for run in runs),
        decode_tps=1 / statistics.median(step for run in runs for step in run[1]),
        ttft_s=statistics.median(run[0] for run in runs),
        kv_bytes=session.cache_use().kv_bytes,
        peak_bytes=_peak(),
    )


def _run(loaded: LoadedModel, session: Session, context: int) -> tuple[float, list[float]]:
    """Seconds until the first token, and of each decode step after it."""
    session.clear()
    ids = [(7919 * i) % loaded.model.vocab_size for i in range(context)]
    chunk = loaded.backend.prefill_chunk
    start = time.perf_counter()
    for first in range(0, context, chunk):
        logits = session.feed(ids[first : first + chunk])
    token = _greedy(logits)
    ttft = time.perf_counter() - start
    steps = []
    for _ in range(DECODED):
        start = time.perf_counter()
        token = _greedy(session.feed([token]))
        steps.append(time.perf_counter() - start)
    return ttft, steps


def _greedy(logits: mx.array) -> int:
    return token_id(sample(logits[-1], Rules(temperature=0), []))


def _peak() -> int:
    """Bytes: the device's most allocated, or on a CPU the most this process has had resident."""
    if mx.default_device().type == mx.gpu:
        return mx.get_peak_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def profile(loaded: LoadedModel, context: int) -> dict[str, float]:
    """Milliseconds of a decode step by share, and the step's own as "step".

    Every call is waited for, so on a GPU the shares add up to more than a step takes.
    """
    session = Session(loaded)
    _run(loaded, session, context)
    step = statistics.median(_run(loaded, session, context)[1])
    times: dict[str, float] = defaultdict(float)
    with _timed(loaded.backend, times):
        start = time.perf_counter()
        for _ in range(DECODED * 2):
            logits = session.feed([1])
            before = time.perf_counter()
            _greedy(logits)
            times["sampling"] += time.perf_counter() - before
        total = time.perf_counter() - start
    shares = {name: 1000 * seconds / (DECODED * 2) for name, seconds in times.items()}
    rest = 1000 * total / (DECODED * 2) - sum(shares.values())
    return {**shares, "the rest": rest, "step": 1000 * step}


@contextmanager
def _timed(backend: Backend, times: dict[str, float]) -> Iterator[None]:
    """Time every call of SHARES. Sealing and attention nest in nothing that is timed itself."""

    def wrap(name: str, share: str) -> Any:
        original = getattr(backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = original(*args, **kwargs)
            backend.evaluate(out)
            times[share] += time.perf_counter() - start
            return out

        return call

    names = [(name, share) for share, calls in SHARES.items() for name in calls]
    for name, share in names:
        setattr(backend, name, wrap(name, share))
    try:
        yield
    finally:
        for name, _ in names:
            delattr(backend, name)


def as_json(loaded: LoadedModel, rows: Sequence[Row]) -> dict[str, Any]:
    info = loaded.info
    return {
        "device": info.device,
        "model": info.name,
        "kv": info.kv,
        "rows": [asdict(row) for row in rows],
    }


def report_charts(report: Mapping[str, Any]) -> list[charts.Chart]:
    """Of `as_json`."""
    lines = {
        what: [(row["context"], row[f"{what}_tps"]) for row in report["rows"]]
        for what in ("prefill", "decode")
    }
    title = f"{report['model']}, {report['kv']} KV, {report['device']}"
    return [charts.Lines("decode", title, "context", "tokens/s", lines, log_x=True, log_y=True)]


def profile_charts(report: Mapping[str, Any]) -> list[charts.Chart]:
    """Of the shares that `profile` gives, by context."""
    return [
        charts.Bars(
            f"decode-profile-{context}",
            f"A decode step of {report['model']} at {context:,} tokens",
            "ms",
            shares,
        )
        for context, shares in report["milliseconds"].items()
    ]
