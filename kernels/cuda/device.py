"""What the kernels need to know of the GPU, and how they are built for it."""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

HERE = Path(__file__).parent

# MLX ends the process once it has met too many new shapes in a row (CUDA graphs, cuDNN plans for
# SDPA), which a long prefill does. It reads this when it first uses a stream.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

MULTIPROCESSOR_COUNT = 16  # CUdevice_attribute
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


@dataclass(frozen=True, slots=True)
class Device:
    """shared_memory: bytes that one block of threads may have."""

    multiprocessors: int
    shared_memory: int


@cache
def device() -> Device:
    """MLX's GPU, as the driver describes it. Raises RuntimeError."""
    driver = ctypes.CDLL("libcuda.so.1")
    bus_id = str(mx.device_info(mx.gpu)["pci_bus_id"]).encode()
    handle = ctypes.c_int()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGetByPCIBusId(ctypes.byref(handle), bus_id), "cuDeviceGetByPCIBusId")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        error = driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        _check(error, "cuDeviceGetAttribute")
        return value.value

    return Device(attribute(MULTIPROCESSOR_COUNT), attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))


def _check(error: int, call: str) -> None:
    if error:
        raise RuntimeError(f"{call} failed with CUDA error {error}.")


def build(
    name: str,
    header: str,
    body: str,
    inputs: list[str],
    outputs: list[str],
    threads: int,
    shared_memory: int = 0,
    blocks: int = 1,
) -> Any:
    """A kernel whose `body` calls a device function of the file `header`.

    threads: of a block. shared_memory: bytes of a block. blocks: that a multiprocessor has to hold.

    The file is included by its path, as MLX goes through the whole source at every call.
    `__global__` is redefined to carry the launch bounds, which MLX's signature lacks.
    """
    bounds = f"__attribute__((global)) __attribute__((launch_bounds({threads}, {blocks})))"
    return mx.fast.cuda_kernel(
        name=f"tqchat_{name}",
        input_names=inputs,
        output_names=outputs,
        header=f'#include "{HERE / header}"\n#undef __global__\n#define __global__ {bounds}\n',
        source=body,
        shared_memory=shared_memory,
    )
