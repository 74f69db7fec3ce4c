"""A matrix of a model as it is stored: dense, or MLX's affine quantisation."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Weight:
    """Rows are outputs. w = scale * code + bias per group of `group_size` inputs.

    Experts have one more axis, in front.

    data: (rows, columns) dense, or uint32 (rows, columns * bits / 32), lowest bits first
    scales, biases: (rows, columns / group_size), 16-bit float or float32; None where dense
    bits: 0 where dense
    """

    data: Any
    scales: Any = None
    biases: Any = None
    group_size: int = 0
    bits: int = 0

    @property
    def rows(self) -> int:
        return int(self.data.shape[-2])

    @property
    def columns(self) -> int:
        packed = int(self.data.shape[-1])
        return packed * 32 // self.bits if self.bits else packed

    @property
    def arrays(self) -> tuple[Any, ...]:
        return (self.data, self.scales, self.biases) if self.bits else (self.data,)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)

    def expert(self, i: int) -> "Weight":
        scales, biases = (None if x is None else x[i] for x in (self.scales, self.biases))
        return replace(self, data=self.data[i], scales=scales, biases=biases)
