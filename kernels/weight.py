"""A matrix of a model as it is stored: dense, or quantised as MLX does it."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Weight:
    """Rows are outputs. Each group of `group_size` inputs has a scale; by `mode`

    - affine: w = scale * code + bias
    - mxfp4, mxfp8: w = scale * code, codes E2M1 and E4M3, scales powers of two (the OCP's
      Microscaling Formats, MX)
    - nvfp4: the same with codes E2M1 and scales E4M3

    Experts have one more axis, in front.

    data: (rows, columns) dense, or uint32 (rows, columns * bits / 32), lowest bits first
    scales, biases: (rows, columns / group_size), 16-bit float or float32; None where dense. Scales
        other than affine ones are uint8, and there are no biases.
    bits: 0 where dense
    """

    data: Any
    scales: Any = None
    biases: Any = None
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"

    @property
    def rows(self) -> int:
        return int(self.data.shape[-2])

    @property
    def columns(self) -> int:
        packed = int(self.data.shape[-1])
        return packed * 32 // self.bits if self.bits else packed

    @property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(x for x in (self.data, self.scales, self.biases) if x is not None)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)

    def expert(self, i: int) -> "Weight":
        scales, biases = (None if x is None else x[i] for x in (self.scales, self.biases))
        return replace(self, data=self.data[i], scales=scales, biases=biases)
