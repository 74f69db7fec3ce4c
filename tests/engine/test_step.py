"""Compiled decode steps against eager ones, token by token, on an NVIDIA GPU."""

import mlx.core as mx
import pytest

from tests.engine.compiled import decode
from tests.tiny import LLAMA, build_model, llama_weights
from tqchat.kernels.cuda.backend import CUDA

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX for CUDA"),
]


def test_the_same_logits_through_seals_and_trims() -> None:
    config = LLAMA | {"head_dim": 64}
    backend = CUDA(mx.float16)
    model = build_model(config, llama_weights(config), backend)
    n_compiled, _ = decode(model, backend, 190, 150, trim=(100, 250), tolerance=2e-2)
    assert 140 < n_compiled < 150
