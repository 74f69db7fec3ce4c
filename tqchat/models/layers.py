"""What architectures share: layers bound to a backend, and the reader that fills them.

Shapes have no batch axis: hidden states are (tokens, hidden_size).
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from tqchat.kernels import Array, Backend, Weight
from tqchat.models.config import LARGEST, SMALLEST, Config
from tqchat.models.errors import ModelError

_FLOATS = (mx.float16, mx.bfloat16, mx.float32)


class LayerCache(Protocol):
    """One layer's KV cache, as an attention layer uses it."""

    @property
    def offset(self) -> int:
        """Tokens held, and so the position of the next one."""
        ...

    def attend(
        self, q: Array, k: Array, v: Array, scale: float, sinks: Array | None = None
    ) -> Array:
        """Take in K and V (n_kv_heads, tokens, head_dim); attend q (n_heads, tokens, head_dim).

        sinks: (n_heads,), a logit per head that joins the softmax without a value. How far back a
        token sees is the cache's own (`KVLayer.window`).
        """
        ...

    def share(
        self, q: Array, k: Array, v: Array, scale: float
    ) -> tuple[Array, Callable[[Array, float], Array]]:
        """`attend`, and a call by which other layers' queries of the same tokens see the same."""
        ...


class Linear:
    """One matrix, or several of different formats whose outputs lie side by side."""

    def __init__(self, backend: Backend, weights: Sequence[Weight], bias: Array | None) -> None:
        self._backend = backend
        self.weights = tuple(weights)
        self.bias = bias

    def __call__(self, x: Array) -> Array:
        if len(self.weights) == 1:
            return self._backend.linear(x, self.weights[0], self.bias)
        outputs = [self._backend.linear(x, weight) for weight in self.weights]
        y = self._backend.concatenate(outputs)
        return y if self.bias is None else y + self.bias


class RMSNorm:
    def __init__(self, backend: Backend, weight: Array, eps: float) -> None:
        self._backend = backend
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return self._backend.rms_norm(x, self.weight, self.eps)


class RoPE:
    """Rotary position embedding with the period of each pair of channels given."""

    def __init__(self, backend: Backend, periods: mx.array) -> None:
        self._backend = backend
        self.periods = backend.load_table(periods)

    def __call__(self, x: Array, offset: int) -> Array:
        return self._backend.rope(x, self.periods, offset)


def rope_periods(config: Config, head_dim: int) -> tuple[float, ...]:
    """Positions per radian for each of head_dim / 2 pairs of channels. Raises ModelError.

    config.json has the base in `rope_theta` and the scaling in `rope_scaling`, or both in
    `rope_parameters`. Scaling is none, "linear", or "llama3", which stretches long wavelengths by
    a factor, leaves short ones and blends between (Llama 3.1's model card).
    """
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling") or parameters
    base = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    periods = [base ** (2 * i / head_dim) for i in range(head_dim // 2)]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        factor = scaling.number("factor")
        periods = [period * factor for period in periods]
    elif kind == "llama3":
        factor = scaling.number("factor")
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        trained = scaling.number("original_max_position_embeddings")
        if low >= high:
            raise ModelError(
                f"{config.name}: low_freq_factor in config.json is not below high_freq_factor. "
                "Fetch the model again, or choose another."
            )
        periods = [_stretch(period, factor, low, high, trained) for period in periods]
    elif kind != "default":
        raise ModelError(
            f"{config.name}: RoPE scaling {kind!r} is not supported yet (linear and llama3 are)."
        )
    if not all(SMALLEST < period < LARGEST for period in periods):
        raise ModelError(
            f"{config.name}: rope_theta and RoPE's scaling in config.json lead to numbers past "
            "float32's range. Fetch the model again, or choose another."
        )
    return tuple(periods)


def _stretch(period: float, factor: float, low: float, high: float, trained: float) -> float:
    turns = trained / (2 * math.pi * period)
    if turns > high:
        return period
    if turns < low:
        return period * factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / (factor * period) + smooth / period)


class Weights:
    """A checkpoint's tensors, each handed out once, checked against the shape that is asked for."""

    def __init__(self, name: str, tensors: dict[str, mx.array], backend: Backend) -> None:
        self._name = name
        self._tensors = dict(tensors)
        self._backend = backend
        self.nbytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, parts: dict[str, int], columns: int) -> Linear:
        """The matrices named in `parts` (name -> rows), stacked in order, and their biases."""
        weights = [self._matrix(name, rows, columns) for name, rows in parts.items()]
        biases = [self._bias(name, rows) for name, rows in parts.items()]
        formats = {(w.bits, w.group_size, w.data.dtype) for w in weights}
        if len(formats) == 1 and len(weights) > 1:
            weights = [_stack(weights)]
        bias = None
        if any(b is not None for b in biases):
            zeros = [mx.zeros((rows,)) for rows in parts.values()]
            bias = mx.concatenate(
                [
                    z if b is None else b.astype(mx.float32)
                    for b, z in zip(biases, zeros, strict=True)
                ]
            )
            bias = self._backend.load_vector(bias)
        return Linear(self._backend, [self._load(w) for w in weights], bias)

    def embedding(self, name: str, rows: int, columns: int) -> Weight:
        return self._load(self._matrix(name, rows, columns))

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        vector = self._take(f"{name}.weight", (size,))
        self.nbytes += vector.nbytes
        return RMSNorm(self._backend, self._backend.load_vector(vector), eps)

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

    def _bias(self, name: str, rows: int) -> mx.array | None:
        key = f"{name}.bias"
        return self._take(key, (rows,)) if key in self._tensors else None

    def _matrix(self, name: str, rows: int, columns: int) -> Weight:
        """Bits and group size follow from the shapes, so configs with exceptions need no care."""
        if f"{name}.scales" not in self._tensors:
            return Weight(self._take(f"{name}.weight", (rows, columns)))
        data = self._take(f"{name}.weight", dtypes=(mx.uint32,))
        scales = self._take(f"{name}.scales")
        biases = self._take(f"{name}.biases", scales.shape)
        bits = 32 * data.size // (rows * columns)
        groups = scales.size // rows
        sound = (
            data.shape == (rows, columns * bits // 32)
            and scales.shape == (rows, groups)
            and bits in (2, 3, 4, 5, 6, 8)
            and groups > 0
            and columns % groups == 0
            and columns // groups in (32, 64, 128)
        )
        if not sound:
            raise ModelError(
                f"{self._name}: quantised tensor {name} has shapes {data.shape} and "
                f"{scales.shape}, which do not make {rows} x {columns}. Fetch the model again, "
                "or choose another."
            )
        return Weight(data, scales, biases, columns // groups, bits)


def _stack(weights: Sequence[Weight]) -> Weight:
    first = weights[0]
    data = mx.concatenate([w.data for w in weights])
    if not first.bits:
        return Weight(data)
    scales = mx.concatenate([w.scales for w in weights])
    biases = mx.concatenate([w.biases for w in weights])
    return Weight(data, scales, biases, first.group_size, first.bits)
