"""GGUF files: the header, checked against the file, and the tensors as MLX arrays.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensors are read here rather
than by `mx.load`, which trusts some lengths, wants to write to the file and holds the GIL.
"""

import mmap
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqchat.models.errors import ModelError
from tqchat.models.folder import regular

Metadata = dict[str, Any]
"""Key -> bool, int, float, str, or a list of one of these."""

_MAX_HEADER_BYTES = 64 << 20
_MAX_DIMS = 4
# Blocks decoded at a time, on one of a few threads: their temporaries stay in the cache.
_CHUNK = 1 << 14


@dataclass(frozen=True, slots=True)
class TensorType:
    """How ggml stores a row: in blocks of `block` elements that take `nbytes` each."""

    name: str
    block: int
    nbytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    14: TensorType("Q6_K", 256, 210),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    30: TensorType("BF16", 1, 2),
}
_UNREADABLE_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip
# llama.cpp keeps these two in Q6_K even in a Q4_0 file. They are expanded to 16 bits; a whole
# model in Q6_K would grow to two and a half times its size.
_Q6_K_TENSORS = ("token_embd.weight", "output.weight")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "<i1", "I16": "<i2", "I32": "<i4"}
_U64 = struct.Struct("<Q")
_UNSHUFFLE = [
    (np.uint64(0x00F000F000F000F0), np.uint64(4)),
    (np.uint64(0x0000FF000000FF00), np.uint64(8)),
    (np.uint64(0x00000000FFFF0000), np.uint64(16)),
]


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` is in MLX's order, rows first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    metadata: Metadata
    tensors: tuple[Tensor, ...]


def read_header(path: Path) -> Header:
    """Metadata and tensor descriptions, every one of which lies within the file.

    Raises ModelError: not a GGUF file, cut short, a count or length that cannot be, a part of a
    split model, a tensor type that is not supported.
    """
    return _Parser(path, _map(path)).header()


def read_tensors(
    path: Path, header: Header, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, mx.array]:
    """Tensors by their names in the file.

    A quantised `x.weight` becomes MLX's affine triplet in groups of 32: `x.weight` (uint32,
    packed), `x.scales` and `x.biases` (float16); Q6_K becomes float16. `progress` hears of bytes
    (done, total) after each tensor; what it raises ends the reading. Raises ModelError.
    """
    arrays: dict[str, mx.array] = {}
    total = sum(tensor.nbytes for tensor in header.tensors)
    done = 0
    data = _map(path)
    with ThreadPoolExecutor() as pool:
        for tensor in header.tensors:
            raw = np.frombuffer(data, np.uint8, tensor.nbytes, tensor.offset)
            arrays.update(_decode(tensor, raw, pool))
            done += tensor.nbytes
            progress(done, total)
    return arrays


def _map(path: Path) -> mmap.mmap:
    try:
        with regular(path).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty: fetch it again.") from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from None


class _Parser:
    """Walks the header from start to end; `_position` never passes `_limit`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._limit = min(len(data), _MAX_HEADER_BYTES)
        self._position = 0

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise self._broken("it is not a GGUF file")
        version = self._number("<u4")
        if version not in (2, 3):
            raise self._broken(f"GGUF version {version} is not 2 or 3 (little-endian)")
        n_tensors, n_values = self._number("<u8"), self._number("<u8")
        metadata: Metadata = {}
        for _ in range(n_values):
            key = self._string()
            if key in metadata:
                raise self._broken(f"{key!r} appears twice")
            metadata[key] = self._value(self._number("<u4"))
        parts = metadata.get("split.count", 1)
        if parts != 1:
            raise ModelError(
                f"{self._path} is one of {parts} parts of a model. Join them first: "
                "llama-gguf-split --merge FIRST-PART OUTPUT.gguf"
            )
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self._broken(f"the alignment {alignment!r} is not a multiple of 8")
        tensors = [self._tensor() for _ in range(n_tensors)]
        data_start = -(-self._position // alignment) * alignment
        return Header(version, metadata, self._placed(tensors, data_start, alignment))

    def _placed(self, tensors: list[Tensor], start: int, alignment: int) -> tuple[Tensor, ...]:
        """The same tensors, their offsets counted from the start of the file and checked."""
        placed = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
        names = [name for tensor in placed for name in _array_names(tensor)]
        if len(set(names)) != len(names):
            raise self._broken("two tensors have the same name")
        end = start
        for tensor in sorted(placed, key=lambda tensor: tensor.offset):
            if tensor.offset < end or (tensor.offset - start) % alignment:
                raise self._broken(f"tensor {tensor.name!r} lies at a wrong offset")
            end = tensor.offset + tensor.nbytes
        if end > len(self._data):
            raise self._broken(f"it is cut short: {len(self._data):,} of {end:,} bytes")
        return tuple(placed)

    def _tensor(self) -> Tensor:
        """A description; its offset still counts from the start of the data."""
        name = self._string()
        n_dims = self._number("<u4")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._broken(f"tensor {name!r} has {n_dims} dimensions")
        dims = [self._number("<u8") for _ in range(n_dims)]
        number = self._number("<u4")
        kind = TYPES.get(number)
        if kind is None or (kind.name == "Q6_K" and name not in _Q6_K_TENSORS):
            label = kind.name if kind else _UNREADABLE_TYPES.get(number, f"type {number}")
            raise ModelError(
                f"{self._path}: tensor {name!r} is stored as {label}, which is not supported. "
                "Choose a GGUF file in Q4_0, Q4_1, Q8_0, F16 or BF16, or the model in safetensors."
            )
        if any(not 0 < dim < 2**31 for dim in dims) or dims[0] % kind.block:
            raise self._broken(f"tensor {name!r} has dimensions {dims}")
        if kind.block > 1 and not name.endswith(".weight"):
            raise self._broken(f"tensor {name!r} is quantised but is no weight")
        nbytes = prod(dims) // kind.block * kind.nbytes
        return Tensor(name, tuple(reversed(dims)), kind, self._number("<u8"), nbytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            raise self._broken("its metadata has arrays of arrays")
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self._broken(f"its metadata has a value of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        if kind == _BOOL:
            if not set(values) <= {0, 1}:
                raise self._broken("its metadata has a truth value that is neither 0 nor 1")
            return [bool(value) for value in values]
        return values

    def _strings(self, count: int) -> list[str]:
        # Vocabularies hold 100,000s: kept free of calls.
        data, limit, position, length_at = self._data, self._limit, self._position, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if position > limit:
                    raise self._ends_early()
                strings.append(data[start:position].decode())
        except struct.error:
            raise self._ends_early() from None
        except UnicodeDecodeError:
            raise self._broken("its metadata has text that is not UTF-8") from None
        self._position = position
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _number(self, dtype: str) -> int:
        return int.from_bytes(self._take(np.dtype(dtype).itemsize), "little")

    def _take(self, size: int) -> bytes:
        start, self._position = self._position, self._position + size
        if self._position > self._limit:
            raise self._ends_early()
        return self._data[start : self._position]

    def _ends_early(self) -> ModelError:
        if self._limit < len(self._data):
            return self._broken(f"its header is longer than {_MAX_HEADER_BYTES >> 20} MB")
        return self._broken("it is cut short within its header")

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"{self._path} cannot be read: {what}. Fetch it again.")


def _array_names(tensor: Tensor) -> list[str]:
    """The names of the arrays that a tensor becomes."""
    if tensor.type.name not in ("Q4_0", "Q4_1", "Q8_0"):
        return [tensor.name]
    module = tensor.name.removesuffix(".weight")
    return [tensor.name, f"{module}.scales", f"{module}.biases"]


def _decode(
    tensor: Tensor, raw: NDArray[np.uint8], pool: ThreadPoolExecutor
) -> dict[str, mx.array]:
    if tensor.type.name not in _UNPACK:
        array = mx.array(raw.view(_DTYPES[tensor.type.name]).reshape(tensor.shape))
        return {tensor.name: array.view(mx.bfloat16) if tensor.type.name == "BF16" else array}
    blocks = raw.reshape(-1, tensor.type.nbytes)
    chunks = [blocks[i : i + _CHUNK] for i in range(0, len(blocks), _CHUNK)]
    parts = zip(*pool.map(_UNPACK[tensor.type.name], chunks), strict=True)
    arrays = [mx.array(np.concatenate(part).reshape(*tensor.shape[:-1], -1)) for part in parts]
    return dict(zip(_array_names(tensor), arrays, strict=True))


_Arrays = tuple[NDArray[Any], ...]


def _unpack_q4_0(blocks: NDArray[np.uint8]) -> _Arrays:
    """x = d * (q - 8)."""
    scales = _halves(blocks, 0)
    return _pack_nibbles(blocks[:, 2:]), scales, _times(scales, -8)


def _unpack_q4_1(blocks: NDArray[np.uint8]) -> _Arrays:
    """x = d * q + m."""
    return _pack_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 1)


def _unpack_q8_0(blocks: NDArray[np.uint8]) -> _Arrays:
    """x = d * q with a signed q; MLX's is unsigned, hence the bias of -128 d."""
    scales = _halves(blocks, 0)
    words = np.array(blocks[:, 2:], order="C").view("<u8")
    words ^= np.uint64(0x8080808080808080)
    return words.view("<u4"), scales, _times(scales, -128)


def _halves(blocks: NDArray[np.uint8], column: int) -> NDArray[np.float16]:
    return blocks.view("<f2")[:, column].copy()


def _times(scales: NDArray[np.float16], factor: int) -> NDArray[np.float16]:
    return _products(factor)[scales.view(np.uint16)]


@cache
def _products(factor: int) -> NDArray[np.float16]:
    """Each of the 65,536 half floats times `factor`: a look-up is faster than the arithmetic."""
    # Scales that overflow are broken, but that is for the model's answers to tell.
    with np.errstate(over="ignore", invalid="ignore"):
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        return (halves.astype(np.float32) * factor).astype(np.float16)


def _pack_nibbles(quants: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """From ggml's order to MLX's.

    Byte i of ggml's 16 holds elements i and i + 16, MLX's holds 2i and 2i + 1. So the low nibbles
    of 8 bytes are gathered in the lower half of a word and the high ones in the upper half, by
    swapping ever larger pieces.
    """
    words = np.array(quants, order="C").view("<u8")
    swapped = np.empty_like(words)
    for mask, shift in _UNSHUFFLE:
        np.right_shift(words, shift, out=swapped)
        swapped ^= words
        swapped &= mask
        words ^= swapped
        swapped <<= shift
        words ^= swapped
    low_and_high = words.view("<u4")
    packed = np.empty_like(low_and_high)
    for column, source in enumerate((0, 2, 1, 3)):
        packed[:, column] = low_and_high[:, source]
    return packed


def _unpack_q6_k(blocks: NDArray[np.uint8]) -> _Arrays:
    """x = d * scale * (q - 32): two halves of 128 elements, a scale for every 16, the low 4 bits
    and the high 2 bits of q stored apart."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 0x0F
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    q = low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << 4
    scales = blocks[:, 192:208].view(np.int8) * _halves(blocks, 104)[:, None].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values = (q.astype(np.float32) - 32) * scales[:, :, None]
        return (values.astype(np.float16).reshape(len(blocks), 256),)


_UNPACK: dict[str, Callable[[NDArray[np.uint8]], _Arrays]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q8_0": _unpack_q8_0,
    "Q6_K": _unpack_q6_k,
}
