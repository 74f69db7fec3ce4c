"""A conversation's int4 cache on disk: a long document is read once, and from disk after that.

A folder holds `state.safetensors` and the segments that it names. A segment is a file of sealed
blocks, which do not change: it is written once, so a turn costs what it added. The state has the
16-bit tokens and all token ids; it is replaced as a whole, after the segments that it names are
there and before those that it no longer names go.

Files are safetensors (https://github.com/huggingface/safetensors#format) whose last tensor is the
SHA-256 of all bytes before it. Tiles are in the order of `kernels.layout`.
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqchat import paths
from tqchat.chat import sessions
from tqchat.chat.errors import ChatError
from tqchat.engine.cache import Int4Cache
from tqchat.kernels import BLOCK, GROUP, SINK, tile_words
from tqchat.kernels.layout import TAIL_CAPACITY, tile_bytes

VERSION = 1
LAYOUT = f"int4, blocks of {BLOCK}, groups of {GROUP}, sink of {SINK}, tail of {TAIL_CAPACITY}"

SEGMENT_BLOCKS = 128
"""At most, in one segment: what is held in memory while saving is one layer's part of it."""

DISK_RESERVE = 1 << 30
"""Bytes that stay free on the disk."""

_STATE = "state.safetensors"
_DIGEST_BYTES = 32
_ITEM_BYTES = {"F16": 2, "BF16": 2, "U32": 4, "I32": 4, "U8": 1}


@dataclass(frozen=True, slots=True)
class Identity:
    """What a saved cache and the model that takes it up must have in common.

    `model` and `tokenizer` are fingerprints, `shape` is layers, KV heads and head_dim.
    """

    model: str
    tokenizer: str
    shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Segment:
    """The first `used` of the `stored` blocks in a file are the cache's."""

    name: str
    stored: int
    used: int
    sha256: str


class _Unusable(Exception):
    """Why a file is not taken up, for the person to read."""


_DAMAGED = "The saved cache of this conversation is damaged"


class SavedCache:
    """What is saved of one conversation in `folder`, which lies in the conversation's own.

    Its process must hold the conversation. `budget` is the most bytes that all conversations'
    saved caches may take; the one used longest ago gives way.
    """

    def __init__(self, folder: Path, identity: Identity, budget: int) -> None:
        self._folder = folder
        self._identity = identity
        self._budget = budget
        self._segments: list[_Segment] = []

    # Saving

    def trim(self, length: int) -> None:
        """The cache was cut to `length` tokens: blocks after them will be others."""
        left = max(0, length - SINK) // BLOCK
        kept = []
        for segment in self._segments:
            if used := min(segment.used, left):
                kept.append(replace(segment, used=used))
            left -= used
        self._segments = kept

    def save(
        self, held: Sequence[int], caches: Sequence[Int4Cache], give_way: Callable[[], bool]
    ) -> str:
        """Write what is new of the caches of `held`. Returns why not, or "".

        `give_way` is asked between segments; what is written until then can be taken up.
        """
        n_blocks = caches[0].n_blocks
        try:
            if refusal := self._make_room(self._new_bytes(held, caches)):
                return refusal
            saved = self._n_blocks
            while saved < n_blocks and not give_way():
                stop = min(saved + SEGMENT_BLOCKS, n_blocks)
                self._segments.append(self._write_segment(caches, saved, stop))
                saved = stop
            self._write_state(held, caches, whole=saved == n_blocks)
            self._sweep()
        except OSError as error:
            return f"The KV cache is not saved: {error.strerror or error}."
        return ""

    @property
    def _n_blocks(self) -> int:
        return sum(segment.used for segment in self._segments)

    def _new_bytes(self, held: Sequence[int], caches: Sequence[Int4Cache]) -> int:
        n_layers, n_kv_heads, head_dim = self._identity.shape
        sealed = (caches[0].n_blocks - self._n_blocks) * tile_bytes(head_dim)
        loose = (SINK + TAIL_CAPACITY) * 4 * head_dim
        return n_layers * n_kv_heads * (sealed + loose) + 4 * len(held)

    def _write_segment(self, caches: Sequence[Int4Cache], start: int, stop: int) -> _Segment:
        name = f"{start:06}-{secrets.token_hex(4)}.safetensors"
        header = self._segment_header(stop - start)
        tiles = (np.array(cache.blocks(start, stop)) for cache in caches)
        digest = _write(self._folder / name, header, tiles)
        return _Segment(name, stop - start, stop - start, digest)

    def _write_state(self, held: Sequence[int], caches: Sequence[Int4Cache], whole: bool) -> None:
        """`whole`: with the tail, which follows the last block there is."""
        sinks = [cache.sink() for cache in caches]
        tails = [cache.tail() for cache in caches]
        if not whole:
            held = held[: SINK + BLOCK * self._n_blocks]
            tails = [(k[:, :0], v[:, :0]) for k, v in tails]
        arrays = {
            f"{name}.{part}": _stacked([pair[index] for pair in pairs])
            for name, pairs in (("sink", sinks), ("tail", tails))
            for index, part in enumerate("kv")
        }
        dtype = "BF16" if sinks[0][0].dtype == mx.bfloat16 else "F16"
        tensors = {name: (dtype, array.shape) for name, array in arrays.items()}
        tokens = np.array(held, np.int32)
        header = _header(
            {
                **self._metadata(),
                "segments": json.dumps([asdict(segment) for segment in self._segments]),
            },
            {**tensors, "tokens": ("I32", tokens.shape)},
        )
        _write(self._folder / _STATE, header, [*arrays.values(), tokens])

    def _metadata(self) -> dict[str, str]:
        return {
            "format": "tqchat KV cache",
            "version": str(VERSION),
            "layout": LAYOUT,
            "model": self._identity.model,
            "tokenizer": self._identity.tokenizer,
            "shape": ", ".join(map(str, self._identity.shape)),
        }

    def _segment_header(self, n_blocks: int) -> bytes:
        n_layers, n_kv_heads, head_dim = self._identity.shape
        shape = (n_kv_heads, n_blocks, tile_words(head_dim))
        tensors = {f"tiles.{layer}": ("U32", shape) for layer in range(n_layers)}
        return _header(self._metadata(), tensors)

    def _sweep(self) -> None:
        """Remove what the state does not name."""
        named = {_STATE, *(segment.name for segment in self._segments)}
        for file in self._folder.iterdir():
            if file.name not in named:
                file.unlink()

    def _make_room(self, needed: int) -> str:
        """Remove other conversations' caches until `needed` more bytes may be written.

        Returns why they may not be, or "".
        """
        paths.private_dir(self._folder)
        kept = (self._folder / segment.name for segment in self._segments)
        taken = needed + sum(file.stat().st_size for file in kept if file.exists())
        if taken > self._budget:
            return "The KV cache is not saved: it is larger than the disk budget."
        others = [other for other in _saved(self._folder.parents[1]) if other[1] != self._folder]
        taken += sum(nbytes for _, _, nbytes in others)
        for _, folder, nbytes in others:
            if taken <= self._budget and not self._disk_is_full(needed):
                break
            if _remove(folder):
                taken -= nbytes
        if taken > self._budget:
            return "The KV cache is not saved: other open conversations take the disk budget."
        if self._disk_is_full(needed):
            return "The KV cache is not saved: the disk is nearly full."
        return ""

    def _disk_is_full(self, needed: int) -> bool:
        return shutil.disk_usage(self._folder).free < needed + DISK_RESERVE

    # Taking up

    def restore(
        self,
        caches: Sequence[Int4Cache],
        fits: Callable[[int], bool],
        progress: Callable[[int, int], None],
    ) -> tuple[list[int], str]:
        """Put into empty caches what is saved: the tokens they hold, and why not all, or "".

        `fits`: whether the memory is there for so many tokens. `progress` hears of bytes done and
        in all; what it raises ends it, with the caches in no state to be used.
        """
        self._segments = []
        try:
            return self._restore(caches, fits, progress)
        except FileNotFoundError:
            return [], ""
        except _Unusable as reason:
            return [], f"{reason}, so it is read again."
        except OSError as error:
            return [], f"The saved cache cannot be read ({error.strerror}), so it is read again."

    def _restore(
        self,
        caches: Sequence[Int4Cache],
        fits: Callable[[int], bool],
        progress: Callable[[int, int], None],
    ) -> tuple[list[int], str]:
        state = self._folder / _STATE
        arrays, segments = self._read_state(state.read_bytes())
        tokens = np.array(arrays["tokens"]).tolist()
        if not fits(len(tokens)):
            raise _Unusable("The saved cache does not fit into the memory that is free")
        n_blocks = sum(segment.used for segment in segments)
        for layer, cache in enumerate(caches):
            sink_k, sink_v = arrays["sink.k"][layer], arrays["sink.v"][layer]
            cache.restore_sink(mx.array(sink_k), mx.array(sink_v), n_blocks)
        n_layers, n_kv_heads, head_dim = self._identity.shape
        block_bytes = n_layers * n_kv_heads * tile_bytes(head_dim)
        for segment in segments:
            try:
                self._restore_segment(segment, caches)
            except (OSError, _Unusable):
                length = SINK + BLOCK * self._n_blocks
                for cache in caches:
                    cache.trim(length)
                return tokens[:length], f"{_DAMAGED}: what it lacks is read again."
            self._segments.append(segment)
            progress(block_bytes * self._n_blocks, block_bytes * n_blocks)
        for layer, cache in enumerate(caches):
            tail_k, tail_v = arrays["tail.k"][layer], arrays["tail.v"][layer]
            cache.restore_tail(mx.array(tail_k), mx.array(tail_v))
        with contextlib.suppress(OSError):
            os.utime(state)
        return tokens, ""

    def _restore_segment(self, segment: _Segment, caches: Sequence[Int4Cache]) -> None:
        header = self._segment_header(segment.stored)
        _, n_kv_heads, head_dim = self._identity.shape
        tiles = np.empty((n_kv_heads, segment.stored, tile_words(head_dim)), np.uint32)
        digest = hashlib.sha256(header)
        with (self._folder / segment.name).open("rb") as file:
            if file.read(len(header)) != header:
                raise _Unusable(_DAMAGED)
            for cache in caches:
                if file.readinto(tiles.data.cast("B")) != tiles.nbytes:
                    raise _Unusable(_DAMAGED)
                digest.update(tiles.data)
                cache.restore_blocks(mx.array(tiles[:, : segment.used]))
            if file.read() != digest.digest() or segment.sha256 != digest.hexdigest():
                raise _Unusable(_DAMAGED)

    def _read_state(self, data: bytes) -> tuple[dict[str, mx.array], list[_Segment]]:
        """The arrays of the state by name, and its segments. Raises _Unusable."""
        start = 8 + int.from_bytes(data[:8], "little")
        try:
            header = json.loads(data[8:start])
            metadata = header.pop("__metadata__")
            found = {key: metadata[key] for key in self._metadata()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _Unusable(_DAMAGED) from None
        for key, expected in self._metadata().items():
            if found[key] != expected:
                other = _OTHERS.get(key, "another version of tqchat")
                raise _Unusable(f"The saved cache of this conversation is of {other}")
        split = max(0, len(data) - _DIGEST_BYTES)
        if hashlib.sha256(data[:split]).digest() != data[split:]:
            raise _Unusable(_DAMAGED)
        arrays = {}
        for name in ("sink.k", "sink.v", "tail.k", "tail.v", "tokens"):
            entry = header[name]
            begin, end = entry["data_offsets"]
            raw = data[start + begin : start + end]
            arrays[name] = _array(raw, entry["dtype"], entry["shape"])
        return arrays, [_Segment(**values) for values in json.loads(metadata["segments"])]


_OTHERS = {
    "model": "another model",
    "shape": "another model",
    "tokenizer": "another tokenizer or chat template",
}


def _saved(root: Path) -> list[tuple[float, Path, int]]:
    """When it was used last, folder and bytes of all saved caches, the oldest first."""
    found = []
    for folder in root.glob("*/cache"):
        with contextlib.suppress(OSError):
            files = [file.stat() for file in folder.iterdir()]
            used = max((file.st_mtime for file in files), default=0.0)
            found.append((used, folder, sum(file.st_size for file in files)))
    return sorted(found)


def _remove(folder: Path) -> bool:
    """Remove a saved cache, unless its conversation is open."""
    try:
        with sessions.locked(folder.parent):
            (folder / _STATE).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    except ChatError:
        return False
    except FileNotFoundError:
        # What a removal of the conversation left behind.
        shutil.rmtree(folder.parent, ignore_errors=True)
    return True


def _header(metadata: dict[str, str], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """A safetensors header, for tensors in this order and the digest after them."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in {**tensors, "sha256": ("U8", (_DIGEST_BYTES,))}.items():
        end = offset + _ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stacked(arrays: Sequence[mx.array]) -> NDArray[np.uint16]:
    """The bits of 16-bit arrays, which numpy may have no type for."""
    return np.stack([np.array(array.view(mx.uint16)) for array in arrays])


def _array(raw: bytes, dtype: str, shape: Sequence[int]) -> mx.array:
    if dtype == "I32":
        return mx.array(np.frombuffer(raw, np.int32).reshape(shape))
    bits = mx.array(np.frombuffer(raw, np.uint16).reshape(shape))
    return bits.view(mx.bfloat16 if dtype == "BF16" else mx.float16)


def _write(path: Path, header: bytes, arrays: Iterable[NDArray[Any]]) -> str:
    """Write a file whole or not at all; returns its digest."""
    digest = hashlib.sha256(header)
    with paths.replacing(path) as file:
        file.write(header)
        for array in arrays:
            data = np.ascontiguousarray(array).data
            digest.update(data)
            file.write(data)
        file.write(digest.digest())
    return digest.hexdigest()
