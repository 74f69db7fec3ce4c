"""Which backend serves this machine."""

import mlx.core as mx

from tqchat.kernels.backend import Backend
from tqchat.kernels.cuda.backend import CUDA
from tqchat.kernels.metal.backend import Metal


def select(dtype: mx.Dtype, threads: int | None = None, kv_bits: int = 4) -> Backend:
    """The backend for MLX's default device; `dtype` is the type the model's weights come in.

    `threads` is for a CPU; None: as many as the cores this process may use. `kv_bits`: of a code of
    the quantised cache, 3 or 4.

    A CPU computes in float32, whatever the weights' type.
    """
    if mx.default_device().type == mx.cpu:
        return _cpu(threads, kv_bits)
    if mx.metal.is_available():
        return Metal(mx.float16 if dtype == mx.float32 else dtype, kv_bits=kv_bits)
    dtype = mx.float16 if dtype == mx.float32 else dtype
    if mx.cuda.is_available() and int(mx.device_info()["compute_capability_major"]) >= 8:
        return CUDA(dtype, kv_bits)
    return Backend(dtype, kv_bits=kv_bits)


def _cpu(threads: int | None, kv_bits: int) -> Backend:
    try:
        from tqchat.kernels.cpu.backend import CPU
    except ImportError:
        plain = Backend(mx.float32, kv_bits=kv_bits)
        # At some 8 tokens per second, a stop should be heard within seconds.
        plain.prefill_chunk = 32
        plain.note = (
            "The native CPU kernels are not built, so this computes many times slower. "
            "Install a C compiler (gcc or clang), then reinstall tqchat."
        )
        return plain
    return CPU(threads, kv_bits)
