"""A conversation's sealed cache on disk: a long document is read once, and from disk after that.

A folder holds `state.safetensors` and the segments that it names. A segment is a file of sealed
blocks, which do not change: it is written once, so a turn costs what it added. The state has the
16-bit tokens and all token ids; it is replaced as a whole, after the segments that it names are
there and before those that it no longer names go. Layers with a sliding window hold little and
forget it soon, so all that they hold is in the state.

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
from tqchat.engine.cache import SealedCache
from tqchat.kernels import BLOCK, GROUP, SINK, tile_words
from tqchat.kernels.layout import TAIL_CAPACITY
from tqchat.models.kv import KVLayer

VERSION = 2
LAYOUT = f"blocks of {BLOCK}, groups of {GROUP}, sink of {SINK}, tail of {TAIL_CAPACITY}"

SEGMENT_BLOCKS = 128
"""At most, in one segment: what is held in memory while saving is one layer's part of it."""

DISK_RESERVE = 1 << 30
"""Bytes that stay free on the disk."""

_STATE = "state.safetensors"
_DIGEST_BYTES = 32
_WORDS = {"I32": np.int32, "U32": np.uint32}
_ITEM_BYTES = {"F16": 2, "BF16": 2, "U32": 4, "I32": 4, "U8": 1}


@dataclass(frozen=True, slots=True)
class Identity:
    """What a saved cache and the model that takes it up must have in common.

    `model` and `tokenizer` are fingerprints, `layers` what the model's caches are (`cache.stored`),
    with codes of `kv_bits` bits.
    """

    model: str
    tokenizer: str
    layers: tuple[KVLayer, ...]
    kv_bits: int

    def tile_words(self, layer: KVLayer) -> int:
        return tile_words(layer.head_dim, self.kv_bits, layer.k_is_v)


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
        # The layers whose blocks are in segments, by their place among all.
        self._growing = {i: x for i, x in enumerate(identity.layers) if x.window is None}

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
        self, held: Sequence[int], caches: Sequence[SealedCache], give_way: Callable[[], bool]
    ) -> str:
        """Write what is new of the caches of `held`. Returns why not, or "".

        `give_way` is asked between segments; what is written until then can be taken up.
        """
        n_blocks = next((caches[i].n_blocks for i in self._growing), 0)
        try:
            if refusal := self._make_room(self._new_bytes(held, caches)):
                return refusal
            saved = self._n_blocks
            while saved < n_blocks and not give_way():
                stop = min(saved + SEGMENT_BLOCKS, n_blocks)
                self._segments.append(self._write_segment(caches, saved, stop))
                saved = stop
            if saved < n_blocks and len(self._growing) < len(caches):
                # Windows are of the last token, so the state before stays until all is saved.
                return ""
            self._write_state(held, caches, whole=saved == n_blocks)
            self._sweep()
        except OSError as error:
            return f"The KV cache is not saved: {error.strerror or error}."
        return ""

    @property
    def _n_blocks(self) -> int:
        return sum(segment.used for segment in self._segments)

    def _new_bytes(self, held: Sequence[int], caches: Sequence[SealedCache]) -> int:
        total = 4 * len(held)
        for layer, cache in zip(self._identity.layers, caches, strict=True):
            n_blocks = cache.n_blocks - (self._n_blocks if layer.window is None else 0)
            loose = (SINK + TAIL_CAPACITY) * 4 * layer.head_dim
            total += layer.n_kv_heads * (4 * n_blocks * self._identity.tile_words(layer) + loose)
        return total

    def _write_segment(self, caches: Sequence[SealedCache], start: int, stop: int) -> _Segment:
        name = f"{start:06}-{secrets.token_hex(4)}.safetensors"
        header = self._segment_header(stop - start)
        tiles = (np.array(caches[i].blocks(start, stop)) for i in self._growing)
        digest = _write(self._folder / name, header, tiles)
        return _Segment(name, stop - start, stop - start, digest)

    def _write_state(self, held: Sequence[int], caches: Sequence[SealedCache], whole: bool) -> None:
        """`whole`: with the tail, which follows the last block there is."""
        if not whole:
            held = held[: SINK + BLOCK * self._n_blocks]
        arrays: dict[str, NDArray[Any]] = {}
        for i, cache in enumerate(caches):
            parts = {"sink": cache.sink(), "tail": cache.tail()}
            if not whole:
                parts["tail"] = (parts["tail"][0][:, :0], parts["tail"][1][:, :0])
            for name, pair in parts.items():
                for part, array in zip("kv", pair, strict=True):
                    arrays[f"{name}.{part}.{i}"] = np.array(array.view(mx.uint16))
        dtype = "BF16" if caches[0].sink()[0].dtype == mx.bfloat16 else "F16"
        tensors = {name: (dtype, array.shape) for name, array in arrays.items()}
        for i, cache in enumerate(caches):
            if i not in self._growing:
                tiles = np.array(cache.blocks(0, cache.n_blocks))
                arrays[f"tiles.{i}"] = tiles
                tensors[f"tiles.{i}"] = ("U32", tiles.shape)
        dropped = np.array([cache.dropped for cache in caches], np.int32)
        tokens = np.array(held, np.int32)
        header = _header(
            {
                **self._metadata(),
                "segments": json.dumps([asdict(segment) for segment in self._segments]),
            },
            {**tensors, "dropped": ("I32", dropped.shape), "tokens": ("I32", tokens.shape)},
        )
        _write(self._folder / _STATE, header, [*arrays.values(), dropped, tokens])

    def _metadata(self) -> dict[str, str]:
        return {
            "format": "tqchat KV cache",
            "version": str(VERSION),
            "layout": f"int{self._identity.kv_bits}, {LAYOUT}",
            "model": self._identity.model,
            "tokenizer": self._identity.tokenizer,
            "layers": ", ".join(
                f"{layer.n_kv_heads}x{layer.head_dim}"
                + (f"/{layer.window}" if layer.window else "")
                + (" V" if layer.k_is_v else "")
                for layer in self._identity.layers
            ),
        }

    def _segment_header(self, n_blocks: int) -> bytes:
        tensors = {
            f"tiles.{i}": ("U32", (layer.n_kv_heads, n_blocks, self._identity.tile_words(layer)))
            for i, layer in self._growing.items()
        }
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
        caches: Sequence[SealedCache],
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
        caches: Sequence[SealedCache],
        fits: Callable[[int], bool],
        progress: Callable[[int, int], None],
    ) -> tuple[list[int], str]:
        state = self._folder / _STATE
        arrays, segments = self._read_state(state.read_bytes())
        tokens = np.array(arrays["tokens"]).tolist()
        if not fits(len(tokens)):
            raise _Unusable("The saved cache does not fit into the memory that is free")
        n_blocks = sum(segment.used for segment in segments)
        dropped = np.array(arrays["dropped"]).tolist()
        for i, cache in enumerate(caches):
            sink_k, sink_v = arrays[f"sink.k.{i}"], arrays[f"sink.v.{i}"]
            cache.restore_sink(sink_k, sink_v, n_blocks if i in self._growing else 0, dropped[i])
            if i not in self._growing:
                cache.restore_blocks(arrays[f"tiles.{i}"])
        growing = self._growing.values()
        words = sum(layer.n_kv_heads * self._identity.tile_words(layer) for layer in growing)
        block_bytes = 4 * words
        for segment in segments:
            try:
                self._restore_segment(segment, caches)
            except (OSError, _Unusable):
                return self._undamaged(tokens, caches)
            self._segments.append(segment)
            progress(block_bytes * self._n_blocks, block_bytes * n_blocks)
        for i, cache in enumerate(caches):
            cache.restore_tail(arrays[f"tail.k.{i}"], arrays[f"tail.v.{i}"])
        with contextlib.suppress(OSError):
            os.utime(state)
        return tokens, ""

    def _undamaged(
        self, tokens: Sequence[int], caches: Sequence[SealedCache]
    ) -> tuple[list[int], str]:
        """Go back to the end of the last segment that was taken up, if all layers can."""
        length = SINK + BLOCK * self._n_blocks
        if any(length < cache.trimmable_to for cache in caches):
            length, self._segments = 0, []
        for cache in caches:
            cache.trim(length)
        return list(tokens[:length]), f"{_DAMAGED}: what it lacks is read again."

    def _restore_segment(self, segment: _Segment, caches: Sequence[SealedCache]) -> None:
        header = self._segment_header(segment.stored)
        digest = hashlib.sha256(header)
        with (self._folder / segment.name).open("rb") as file:
            if file.read(len(header)) != header:
                raise _Unusable(_DAMAGED)
            for i, layer in self._growing.items():
                shape = (layer.n_kv_heads, segment.stored, self._identity.tile_words(layer))
                tiles = np.empty(shape, np.uint32)
                if file.readinto(tiles.data.cast("B")) != tiles.nbytes:
                    raise _Unusable(_DAMAGED)
                digest.update(tiles.data)
                caches[i].restore_blocks(mx.array(tiles[:, : segment.used]))
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
        header.pop("sha256")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            raw = data[start + begin : start + end]
            arrays[name] = _array(raw, entry["dtype"], entry["shape"])
        return arrays, [_Segment(**values) for values in json.loads(metadata["segments"])]


_OTHERS = {
    "layout": "another kind",
    "model": "another model",
    "layers": "another kind",
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


def _array(raw: bytes, dtype: str, shape: Sequence[int]) -> mx.array:
    if dtype in _WORDS:
        return mx.array(np.frombuffer(raw, _WORDS[dtype]).reshape(shape))
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
