"""The reader that fills a model's layers: a checkpoint's tensors by name, their shapes checked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import mlx.core as mx

from tqchat.kernels import Backend, Weight
from tqchat.models.errors import ModelError
from tqchat.models.layers import Linear, RMSNorm

_FLOATS = (mx.float16, mx.bfloat16, mx.float32)
# Where the matrices of all experts are in one.
_TOGETHER = ("switch_mlp", "experts.switch_glu", "experts")
# By bits and group size, where scales are bytes.
_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}


class Weights:
    """A checkpoint's tensors, each handed out once, checked against the shape that is asked for."""

    def __init__(self, name: str, tensors: dict[str, mx.array], backend: Backend) -> None:
        self._name = name
        self._tensors = dict(tensors)
        self._backend = backend
        self.nbytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, parts: dict[str, int], columns: int, biases: bool = False) -> Linear:
        """The matrices named in `parts` (name -> rows), stacked in order, with what biases there
        are; `biases`: each must have one."""
        weights = [self._matrix(name, rows, columns) for name, rows in parts.items()]
        vectors = [self._bias(name, rows, biases) for name, rows in parts.items()]
        if len(weights) > 1 and _alike(weights):
            weights = [_joined(weights, mx.concatenate)]
        bias = None
        if any(b is not None for b in vectors):
            zeros = [mx.zeros((rows,)) for rows in parts.values()]
            bias = mx.concatenate(
                [
                    z if b is None else b.astype(mx.float32)
                    for b, z in zip(vectors, zeros, strict=True)
                ]
            )
            bias = self._backend.load_vector(bias)
        return Linear(self._backend, [self._load(w) for w in weights], bias)

    def experts(self, prefix: str, parts: dict[str, int], columns: int, n: int) -> Weight:
        """The matrices of `n` experts, (n, rows, columns), those in `parts` stacked in order.

        One by one, as Hugging Face has them (PREFIX.experts.0.gate_proj), or all in one, as MLX
        has them (PREFIX.switch_mlp.gate_proj and others, by family).
        """
        weights = []
        for part, rows in parts.items():
            together = [f"{prefix}.{folder}.{part}" for folder in _TOGETHER]
            if found := [name for name in together if f"{name}.weight" in self._tensors]:
                weights.append(self._matrix(found[0], rows, columns, (n,)))
                continue
            each = [self._matrix(f"{prefix}.experts.{i}.{part}", rows, columns) for i in range(n)]
            self._must_be_alike(each, f"{prefix}.experts")
            weights.append(_joined(each, mx.stack))
        self._must_be_alike(weights, prefix)
        return self._load(_joined(weights, lambda arrays: mx.concatenate(arrays, axis=1)))

    def _must_be_alike(self, weights: Sequence[Weight], what: str) -> None:
        if not _alike(weights):
            raise ModelError(
                f"{self._name}: {what} mixes number formats, which is not supported there. Choose "
                "another version of the model."
            )

    def embedding(self, name: str, rows: int, columns: int) -> Weight:
        return self._load(self._matrix(name, rows, columns))

    def norm(self, name: str, size: int, eps: float, plus: float = 0.0) -> RMSNorm:
        """`plus`: what the weights are stored without."""
        vector = self.vector(f"{name}.weight", (size,))
        if plus:
            vector = vector.astype(mx.float32) + plus
        return RMSNorm(self._backend, self._backend.load_vector(vector), eps)

    def vector(self, name: str, shape: tuple[int, ...]) -> mx.array:
        """A small tensor, as it is stored."""
        vector = self._take(name, shape)
        self.nbytes += vector.nbytes
        return vector

    def rename(self, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> None:
        """`change` gets all tensors by name and returns them as a model's reader expects them."""
        self._tensors = change(self._tensors)

    def discard(self, name: str) -> None:
        """Leave out a matrix that the checkpoint may hold but the model does not use."""
        for part in ("weight", "scales", "biases"):
            self._tensors.pop(f"{name}.{part}", None)

    def finish(self) -> None:
        """Raises ModelError if the checkpoint has tensors that nobody asked for."""
        left = sorted(name for name in self._tensors if not name.endswith("rotary_emb.inv_freq"))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"{self._name}: unexpected tensor {left[0]}{more}: its config.json does not "
                "describe these weights. Fetch the model again, or choose another."
            )

    def _load(self, weight: Weight) -> Weight:
        loaded = self._backend.load(weight)
        self._backend.evaluate(*loaded.arrays)
        self.nbytes += loaded.nbytes
        return loaded

    def _take(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtypes: tuple[mx.Dtype, ...] = _FLOATS,
    ) -> mx.array:
        if name not in self._tensors:
            raise ModelError(
                f"{self._name}: tensor {name} is missing. Fetch the model again, or choose another."
            )
        tensor = self._tensors.pop(name)
        if tensor.dtype not in dtypes:
            kind = str(tensor.dtype).removeprefix("mlx.core.")
            raise ModelError(
                f"{self._name}: tensor {name} holds {kind}, which is not supported there. Choose a "
                "version in 16 bits, or in MLX's 4-bit or 8-bit format."
            )
        if shape is not None and tensor.shape != shape:
            raise ModelError(
                f"{self._name}: tensor {name} has shape {tensor.shape}, its config.json asks "
                f"for {shape}. Fetch the model again, or choose another."
            )
        return tensor

    def _bias(self, name: str, rows: int, needed: bool) -> mx.array | None:
        key = f"{name}.bias"
        return self._take(key, (rows,)) if needed or key in self._tensors else None

    def _matrix(self, name: str, rows: int, columns: int, experts: tuple[int, ...] = ()) -> Weight:
        """Bits and group size follow from the shapes, so configs with exceptions need no care."""
        if f"{name}.scales" not in self._tensors:
            return Weight(self._take(f"{name}.weight", (*experts, rows, columns)))
        data = self._take(f"{name}.weight", dtypes=(mx.uint32,))
        scales = self._take(f"{name}.scales", dtypes=(*_FLOATS, mx.uint8))
        affine = scales.dtype != mx.uint8
        biases = self._take(f"{name}.biases", scales.shape) if affine else None
        all_rows = prod(experts) * rows
        bits = 32 * data.size // (all_rows * columns)
        groups = scales.size // all_rows
        sound = (
            data.shape == (*experts, rows, columns * bits // 32)
            and scales.shape == (*experts, rows, groups)
            and groups > 0
            and columns % groups == 0
        )
        group_size = columns // groups if sound else 0
        if affine:
            mode = "affine"
            sound &= bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)
        else:
            mode = _MODES.get((bits, group_size), "")
            sound &= bool(mode)
        if not sound:
            raise ModelError(
                f"{self._name}: quantised tensor {name} has shapes {data.shape} and "
                f"{scales.shape}, which do not make {rows} x {columns}. Fetch the model again, "
                "or choose another."
            )
        return Weight(data, scales, biases, group_size, bits, mode)


def _alike(weights: Sequence[Weight]) -> bool:
    return len({(w.mode, w.bits, w.group_size, w.data.dtype) for w in weights}) == 1


def _joined(weights: Sequence[Weight], join: Callable[[list[mx.array]], mx.array]) -> Weight:
    """Weights of one format as one."""
    parts: dict[str, Any] = {
        part: join([getattr(w, part) for w in weights])
        for part in ("data", "scales", "biases")
        if getattr(weights[0], part) is not None
    }
    return replace(weights[0], **parts)
