"""How large a chunk is, on clocks and in memories that are made up."""

from types import SimpleNamespace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_generation import GREEDY, session
from tqchat.engine.cache import DenseCache, KVCache, SealedCache
from tqchat.engine.chunks import PIECE_S, SMALLEST, ChunkSize
from tqchat.engine.events import Failed, Memory, Prefilling
from tqchat.kernels import Backend, select
from tqchat.kernels.layout import tile_bytes
from tqchat.models.kv import KVLayer


def llama(n_layers: int, n_heads: int, n_parameters: int) -> SimpleNamespace:
    return SimpleNamespace(
        n_layers=n_layers,
        n_heads=n_heads,
        head_dim=128,
        hidden_size=128 * n_heads,
        vocab_size=128256,
        n_parameters=n_parameters,
        n_expert_parameters=0,
        kv_layers=[KVLayer(8, 128)] * n_layers,
    )


# Llama 3.1 70B and 8B.
LARGE, SMALL = llama(80, 64, 70_553_000_000), llama(32, 32, 8_030_000_000)
MOST = 512


def anything(tokens: int) -> bool:
    return True


class Device:
    """Reads chunks at so many operations per second, and takes `idle_s` for each besides."""

    def __init__(self, shape: SimpleNamespace, rate: float, idle_s: float = 0.0) -> None:
        self.shape = shape
        self.rate = rate
        self.idle_s = idle_s

    def seconds(self, start: int, size: int) -> float:
        """By counting multiplications, not by what the code under test assumes."""
        c = self.shape
        matrices = 2 * (c.n_parameters - c.vocab_size * c.hidden_size) * size
        attention = sum(
            4 * c.n_layers * c.hidden_size * position for position in range(start, start + size)
        )
        return self.idle_s + (matrices + attention) / self.rate

    def read(self, chunks: ChunkSize, start: int, n_chunks: int) -> tuple[list[int], int]:
        """The sizes of the next chunks, and where they end."""
        sizes = []
        for _ in range(n_chunks):
            size = chunks.next(start, anything)
            chunks.took(start, size, self.seconds(start, size))
            sizes.append(size)
            start += size
        return sizes, start


@pytest.mark.parametrize(("shape", "rate"), [(LARGE, 6e12), (SMALL, 2.5e12), (SMALL, 1e15)])
def test_a_gpu_reads_the_largest_chunks_from_the_first_on(
    shape: SimpleNamespace, rate: float
) -> None:
    """M1 Max, M1, H200, at the start of a document: one layer is far from taking half a second."""
    sizes, _ = Device(shape, rate).read(ChunkSize(shape, MOST), 0, 20)  # type: ignore[arg-type]
    assert sizes == [MOST] * 20


def test_a_slow_device_reads_smaller_ones_after_the_first() -> None:
    """8B on a CPU at 70 GFLOP/s: 512 tokens would take 3 s a layer."""
    device = Device(SMALL, 7e10)
    sizes, _ = device.read(ChunkSize(SMALL, MOST), 0, 10)  # type: ignore[arg-type]
    assert sizes[0] == MOST
    assert set(sizes[1:]) == {64}
    assert device.seconds(1000, 64) / SMALL.n_layers <= PIECE_S < device.seconds(0, 128) / 32


def test_they_shrink_as_attention_reaches_further_back_and_grow_again() -> None:
    device = Device(SMALL, 8e11)
    chunks = ChunkSize(SMALL, MOST)  # type: ignore[arg-type]
    sizes = [device.read(chunks, start, 1)[0][0] for start in range(0, 131072, MOST)]
    assert sizes[0] == MOST > sizes[-1]
    assert sizes == sorted(sizes, reverse=True)
    for start, size in zip(range(0, 131072, MOST), sizes, strict=True):
        assert device.seconds(start, size) / SMALL.n_layers <= 1.05 * PIECE_S
    again, _ = device.read(chunks, 0, 10)
    assert again == [MOST] * 10


def test_they_grow_back_after_the_device_was_busy() -> None:
    shape, chunks = SMALL, ChunkSize(SMALL, MOST)  # type: ignore[arg-type]
    free, busy = Device(shape, 4e12, idle_s=0.05), Device(shape, 4e10, idle_s=0.05)
    _, end = free.read(chunks, 0, 5)
    under_load, end = busy.read(chunks, end, 5)
    assert under_load[0] == MOST
    assert under_load[-1] == SMALLEST
    recovered, _ = free.read(chunks, end, 8)
    assert recovered[-1] == MOST
    assert recovered == sorted(recovered)


@given(st.integers(1, 2048), st.floats(1e-6, 1e4), st.integers(0, 200_000))
def test_a_size_is_the_largest_that_is_halved_to(fit: int, seconds: float, start: int) -> None:
    chunks = ChunkSize(SMALL, 2048)  # type: ignore[arg-type]
    chunks.took(start, 256, seconds)
    size = chunks.next(start, lambda tokens: tokens <= fit)
    assert size in (32, 64, 128, 256, 512, 1024, 2048)
    assert size == SMALLEST or size <= fit


def test_where_memory_is_short_smaller_chunks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is refused only if it does not fit with the smallest."""
    prompt = [1] * 600
    needs = [session()._more_bytes(len(prompt), size) for size in (512, 128, SMALLEST)]
    for free, size in zip([*needs, needs[-1] - 1], [512, 128, SMALLEST, None], strict=True):
        fixed = Memory(weights=0, kv=0, other=0, free=free, limit=free)
        monkeypatch.setattr("tqchat.engine.memory.measure", lambda weights, kv, m=fixed: m)
        *events, last = session().turn(1, prompt, GREEDY, 1, lambda: False)
        if size is None:
            assert isinstance(last, Failed)
            assert events == []
        else:
            done = [event.done for event in events if isinstance(event, Prefilling)]
            assert done[1] == size
            assert done[-1] == len(prompt)


def feed(cache: KVCache, tokens: int, seed: int) -> np.ndarray:
    """Take in random tokens; returns what their queries saw."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        cache._backend.load_table(mx.array(rng.normal(size=(heads, tokens, 32)).astype(np.float32)))  # type: ignore[attr-defined]
        for heads in (4, 2, 2)
    )
    return np.array(cache.attend(q, k, v, 0.2))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([SealedCache, DenseCache]),
    backend=st.sampled_from([Backend(mx.float32), select(mx.float16)]),
    window=st.sampled_from([None, 31, 100]),
    before=st.lists(st.integers(1, 300), max_size=4),
    undone=st.integers(1, 400),
    after=st.integers(1, 100),
)
def test_a_cache_goes_back_as_if_the_chunk_had_never_been(
    kind, backend, window, before, undone, after
) -> None:
    with patch("tqchat.engine.cache.REWIND_BYTES", 5 * 2 * tile_bytes(32)):
        one, twin = (kind(backend, KVLayer(2, 32, window)) for _ in range(2))
    for seed, tokens in enumerate(before):
        for cache in (one, twin):
            feed(cache, tokens, seed)
    go_back = one.checkpoint()
    feed(one, undone, 100)
    go_back()
    for seed in (200, 201):
        np.testing.assert_array_equal(feed(one, after, seed), feed(twin, after, seed))
    assert (one.offset, one.nbytes, one.trimmable_to) == (
        twin.offset,
        twin.nbytes,
        twin.trimmable_to,
    )
