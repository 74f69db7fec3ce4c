"""Compiled decode steps against eager ones, token by token, on an NVIDIA GPU."""

import mlx.core as mx
import pytest

from tests.tiny import LLAMA, build_model, llama_weights
from tqchat.engine.cache import SealedCache
from tqchat.engine.step import CompiledStep
from tqchat.kernels.cuda.backend import CUDA

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX for CUDA"),
]


def test_the_same_logits_through_seals_and_trims() -> None:
    config = LLAMA | {"head_dim": 64}
    backend = CUDA(mx.float16)
    model = build_model(config, llama_weights(config), backend)
    eager, compiled = (
        [SealedCache(backend, 2, 64) for _ in range(model.n_layers)] for _ in range(2)
    )
    step = CompiledStep(model, backend, compiled)
    prompt = [7 * i % 128 for i in range(190)]
    for caches in (eager, compiled):
        mx.eval(model(prompt, caches))
    steps = 0
    for i in range(150):
        if i == 100:
            for cache in (*eager, *compiled):
                cache.trim(250)
        ids = mx.array([3 * i % 128], dtype=mx.uint32)
        expected = model(ids, eager)
        if step.ready:
            logits = step(ids)
            steps += 1
        else:
            logits = model(ids, compiled)
        mx.eval(expected, logits)
        assert mx.allclose(logits, expected, rtol=2e-2, atol=2e-2)
        assert compiled[0].offset == eager[0].offset
        assert compiled[0].n_blocks == eager[0].n_blocks
    assert 140 < steps < 150
