"""`tqchat doctor`: what this machine has, and whether the kernels compute what they should."""

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import mlx.core as mx
import numpy as np

from tqchat.engine.memory import machine_memory
from tqchat.engine.memory import measure as measure_memory
from tqchat.kernels import BLOCK, SINK, Array, Backend, KeysOfValues, KVView, select
from tqchat.kernels.layout import MAX_DECODE_TOKENS, TAIL_CAPACITY

GIB = 2**30

# Largest error of attention against float32 arithmetic, relative to the largest element.
TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}

KERNEL_REMEDY = (
    "Update MLX (pip install --upgrade mlx) and try again. If it stays, report it with this "
    "output; until then chat with --kv fp16."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` says what to do if something is wrong."""

    subject: str
    text: str
    is_wrong: bool = False
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything, one finding after the other; kernels are compiled on the way."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("tqchat", "mlx"))
    yield Finding("versions", f"{versions}, Python {platform.python_version()}, {system}")
    info = mx.device_info()
    yield Finding("device", f"{info.get('device_name', 'CPU')} ({info.get('architecture', '?')})")
    yield from _memory(info)
    dtypes = [mx.float16, mx.bfloat16] if mx.default_device().type == mx.gpu else [mx.float16]
    for dtype in dtypes:
        backend = select(dtype)
        yield Finding("backend", backend.name, bool(backend.note), backend.note)
        for head_dim in (64, 128, 256, 512):
            yield from check_kernels(backend, head_dim)
        if backend.derives_keys:
            yield from check_kernels(backend, 512, k_is_v=True)
        yield from check_kernels(select(dtype, kv_bits=3), 128)


def _memory(info: dict[str, Any]) -> Iterator[Finding]:
    memory = measure_memory(0, 0)
    yield Finding(
        "memory",
        f"{machine_memory() / GIB:.1f} GiB in the machine, {memory.limit / GIB:.1f} GiB for this "
        f"device, {memory.free / GIB:.1f} GiB free now",
    )
    if "max_recommended_working_set_size" not in info:
        return
    # Metal lets a process wire three quarters of the machine's memory or less, unless told.
    total = int(info.get("memory_size", machine_memory()))
    limit = int(info["max_recommended_working_set_size"])
    possible = total - max(total // 8, 6 * GIB)
    raise_it = f"sudo sysctl iogpu.wired_limit_mb={possible >> 20}"
    if possible > limit:
        text = f"{limit / GIB:.1f} GiB may be wired; for larger models or contexts: {raise_it}"
    else:
        text = f"{limit / GIB:.1f} GiB may be wired, as much as leaves the system enough"
    yield Finding("wired memory", text)


def check_kernels(backend: Backend, head_dim: int, k_is_v: bool = False) -> Iterator[Finding]:
    """Hold each kernel of a backend against plain MLX operations in float32.

    k_is_v: those of a cache that holds V alone.
    """
    cache = _Cache(backend, head_dim, k_is_v)
    window, looks = (None, "sinks") if k_is_v else (500, "window and sinks")
    checks: dict[str, Callable[[], float]] = {
        "sealing": cache.sealing,
        "unsealing": cache.unsealing,
        "attention, short": lambda: cache.attention(1, 1),
        "attention, long": lambda: cache.attention(cache.n_blocks, 1),
        f"attention, {MAX_DECODE_TOKENS} tokens": lambda: cache.attention(
            cache.n_blocks, MAX_DECODE_TOKENS
        ),
        f"attention, {looks}": lambda: cache.attention(
            cache.n_blocks, 1, window=window, sinks=cache.logits
        ),
        "prefill": cache.prefill,
    }
    for name, check in checks.items():
        subject = f"{name}, head_dim {head_dim}" + (", int3" if backend.kv_bits == 3 else "")
        subject += ", V alone" if k_is_v else ""
        try:
            error = check()
        except Exception as fault:
            first = str(fault).strip().splitlines()
            yield Finding(subject, first[0] if first else repr(fault), True, KERNEL_REMEDY)
            continue
        limit = 0.0 if name == "sealing" else TOLERANCE[backend.dtype]
        is_wrong = not error <= limit
        text = f"error {error:.1e}, at most {limit:.1e} is right" if is_wrong else f"{error:.1e}"
        yield Finding(subject, text, is_wrong, KERNEL_REMEDY if is_wrong else "")


class _Cache:
    """A random cache, held by a backend and by the oracle."""

    n_heads, n_kv_heads, n_blocks, n_tail = 8, 2, 40, 70

    def __init__(self, backend: Backend, head_dim: int, k_is_v: bool) -> None:
        self._backend = backend
        self._oracle = Backend(mx.float32, backend.cache_dtype, backend.kv_bits)
        self._dim, self._k_is_v = head_dim, k_is_v
        self._key = mx.random.key(0)

    def sealing(self) -> float:
        """The share of words that differ from the oracle's: there should be none."""
        blocks = self._blocks(self.n_blocks)
        tiles = self._seal(self._backend, map(self._own, blocks))
        tiles = self._backend.to_canonical(tiles, self._k_is_v)
        return float(np.mean(np.array(tiles != self._seal(self._oracle, blocks))))

    def unsealing(self) -> float:
        tiles = self._seal(self._oracle, self._blocks(self.n_blocks))
        own = self._backend.from_canonical(tiles, self._k_is_v)
        if self._k_is_v:
            return _error(self._backend.unseal_values(own), self._oracle.unseal_values(tiles))
        return max(map(_error, self._backend.unseal(own), self._oracle.unseal(tiles)))

    @property
    def logits(self) -> mx.array:
        """One for each query head."""
        return mx.arange(self.n_heads) / 2 - 2

    def attention(
        self, n_blocks: int, tokens: int, window: int | None = None, sinks: mx.array | None = None
    ) -> float:
        mine, oracles = self._views(n_blocks)
        q = self._random(tokens, self.n_heads)
        scale = self._dim**-0.5
        own = self._own(q.astype(self._backend.dtype))
        own_sinks = None if sinks is None else self._backend.load_vector(sinks)
        out = self._backend.attend(own, mine, scale, window=window, sinks=own_sinks)
        expected = self._oracle.attend(
            q.astype(mx.float32), oracles, scale, window=window, sinks=sinks
        )
        return _error(out, expected)

    def prefill(self) -> float:
        mine, oracles = self._views(self.n_blocks)
        q, k, v = self._random(33, self.n_heads), self._random(33), self._random(33)
        scale = self._dim**-0.5
        own = self._own(q.astype(self._backend.dtype))
        out = self._backend.attend_chunk(own, self._own(k), self._own(v), mine, scale)
        return _error(out, self._oracle.attend_chunk(q.astype(mx.float32), k, v, oracles, scale))

    def _random(self, tokens: int, heads: int | None = None) -> mx.array:
        self._key, key = mx.random.split(self._key)
        x = mx.random.normal((heads or self.n_kv_heads, tokens, self._dim), key=key)
        return x.astype(self._backend.cache_dtype)

    def _own(self, x: mx.array) -> Array:
        """An array as the backend has them."""
        own = self._backend.zeros((1,), mx.uint32)
        return x if isinstance(own, mx.array) else np.array(x)

    def _blocks(self, n: int) -> list[mx.array]:
        """K and V, or V alone, of n blocks."""
        return [self._random(BLOCK * n) for _ in range(1 if self._k_is_v else 2)]

    def _seal(self, backend: Backend, blocks: Iterable[Array]) -> Array:
        return backend.seal_values(*blocks) if self._k_is_v else backend.seal(*blocks)

    def _keys(self, backend: Backend) -> KeysOfValues | None:
        """As Gemma 4 has them: a quarter of the channels turns."""
        if not self._k_is_v:
            return None
        share = mx.arange(self._dim // 2) / (self._dim // 2)
        periods = mx.where(share < 0.25, 1e6**share, mx.inf)
        weight = 0.5 + mx.arange(self._dim) / self._dim
        return KeysOfValues(backend.load_vector(weight), backend.load_table(periods))

    def _views(self, n_blocks: int) -> tuple[KVView, KVView]:
        tiles = self._seal(self._oracle, self._blocks(n_blocks))
        sink, tail = self._random(SINK), self._random(TAIL_CAPACITY)
        lengths = (SINK, n_blocks, self.n_tail)
        own_sink, own_tail = self._own(sink), self._own(tail)
        own_tiles = self._backend.from_canonical(tiles, self._k_is_v)
        own_keys, keys = self._keys(self._backend), self._keys(self._oracle)
        return (
            KVView(own_sink, own_sink, own_tiles, own_tail, own_tail, *lengths, keys=own_keys),
            KVView(sink, sink, tiles, tail, tail, *lengths, keys=keys),
        )


def _error(got: Array, expected: mx.array) -> float:
    """The largest difference, relative to the largest element."""
    x, y = np.array(mx.array(got).astype(mx.float32)), np.array(expected.astype(mx.float32))
    return float(np.abs(x - y).max() / np.abs(y).max())


def main() -> int:
    """Print the findings as they come. Returns 1 if something is wrong."""
    wrong = []
    for finding in examine():
        mark = "WRONG" if finding.is_wrong else "   ok"
        print(f"{mark}  {finding.subject}: {finding.text}", flush=True)
        if finding.remedy:
            print(f"       {finding.remedy}")
        if finding.is_wrong:
            wrong.append(finding.subject)
    print(f"Not well: {', '.join(wrong)}." if wrong else "All well.")
    return int(bool(wrong))
