"""Which backend serves this machine."""

import mlx.core as mx

from tqchat.kernels.backend import Backend


def select(dtype: mx.Dtype, threads: int | None = None) -> Backend:
    """The backend for MLX's default device; `dtype` is the type the model's weights come in.

    `threads` is for a CPU; None: as many as the cores this process may use.

    A CPU computes in float32, whatever the weights' type.
    """
    if mx.default_device().type == mx.cpu:
        return Backend(mx.float32)
    return Backend(mx.float16 if dtype == mx.float32 else dtype)
