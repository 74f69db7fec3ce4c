"""The CUDA backend on a machine without a GPU: its kernels run in the emulator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from tests.emulator import EmulatedCUDAKernel
from tqchat.kernels.cuda import backend
from tqchat.kernels.cuda.device import Device


@contextmanager
def small_gpu(
    multiprocessors: int = 5, shared_memory: int = 227 << 10, **options: Any
) -> Iterator[dict[str, EmulatedCUDAKernel]]:
    """The kernels that are made meanwhile, by name; `options` are theirs."""
    made = {}

    def make(name: str, **text: Any) -> EmulatedCUDAKernel:
        made[name] = EmulatedCUDAKernel(name, **text, **options)
        return made[name]

    forget_kernels()
    with (
        patch.object(mx.fast, "cuda_kernel", make),
        patch.object(backend, "device", lambda: Device(multiprocessors, shared_memory)),
    ):
        yield made
    forget_kernels()


def forget_kernels() -> None:
    """The backend remembers its kernels and how work is cut; they are of one machine."""
    for remembered in vars(backend).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()
