"""The compiled kernels. Activations are float32; arrays of another type or layout are copied."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqchat.kernels.view import KVView
from tqchat.kernels.weight import Weight

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

def linear(x: Floats, weight: Weight, bias: Floats | None, /) -> Floats: ...
def embed(weight: Weight, ids: Sequence[int] | NDArray[Any], /) -> Floats: ...
def rms_norm(x: Floats, weight: Floats, eps: float, /) -> Floats: ...
def swiglu(gate_up: Floats, /) -> Floats: ...
def rope(x: Floats, table: Floats, /) -> Floats:
    """table: (tokens, 2, pairs), cosines and sines."""

def write(buffer: NDArray[np.float16], start: int, x: NDArray[Any], /) -> None:
    """buffer[:, start : start + x.shape[1]] = x; they may overlap."""

def seal(k: NDArray[Any] | None, v: NDArray[Any], bits: int, /) -> Words:
    """k None: V is alone."""

def unseal(tiles: Words, bits: int, /) -> tuple[Floats, Floats]: ...
def unseal_values(tiles: Words, bits: int, /) -> Floats: ...
def attend(
    q: Floats,
    view: KVView | None,
    k: NDArray[Any] | None,
    v: NDArray[Any] | None,
    scale: float,
    softcap: float | None,
    sinks: Floats | None,
    window: int | None,
    keys: tuple[Floats, Floats, Floats, int] | None,
    /,
) -> Floats:
    """q attends to what `view` holds and then to k and v; its tokens are the last of those.

    keys: if `view` holds V alone: weight (head_dim,), starts (blocks, 2, pairs) and places (BLOCK,
    2, pairs), cosines and sines, and between which channels a pair lies.
    """

def set_threads(n: int, /) -> int:
    """Returns how many there will be: there is a most."""

def trim_heap() -> None:
    """Gives freed memory back to the system, where malloc would keep it."""

def instruction_sets() -> list[str]:
    """What this machine and this build have, best first; the first is in use."""

def use(instruction_set: str, /) -> None: ...
