"""Compiled decode steps against eager ones, and the CUDA backend against plain MLX, in fp16.

On an NVIDIA GPU, elsewhere in the emulator, where a step is counted as if compiled but is not.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from tests.emulator import why_not
from tests.engine.compiled import decode
from tests.kernels.small_gpu import small_gpu
from tests.models.test_families import CASES, both
from tqchat.engine.cache import SealedCache, make_caches
from tqchat.kernels import Backend
from tqchat.kernels.cuda.backend import CUDA
from tqchat.models.registry import Model

ON_GPU = mx.cuda.is_available()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_GPU and bool(why_not()), reason=why_not()),
]

experts = pytest.mark.skipif(not ON_GPU, reason="MLX's experts take float32 alone on a CPU")
MODELS = [
    ("llama", 4),
    ("llama", 3),
    ("mistral, windows", 4),
    ("gemma4, shared", 4),
    pytest.param("qwen3_moe", 4, marks=experts),
    pytest.param("gpt_oss", 4, marks=experts),
]


def build(name: str, backend: Backend) -> Model:
    """A family with heads that the kernels take."""
    case = CASES[name]
    changes: dict[str, Any] = case.changes | {"head_dim": 64, "global_head_dim": 128}
    model, _ = both(replace(case, changes=changes), backend)
    backend.cache_dtype = mx.float16
    return model


@pytest.mark.parametrize(("name", "kv_bits"), MODELS)
def test_the_same_logits_through_seals_and_trims(name: str, kv_bits: int) -> None:
    with nullcontext() if ON_GPU else small_gpu(checked=False):
        backend = CUDA(mx.float16, kv_bits)
        model = build(name, backend)
        # A traced step has no values yet, which an emulated kernel needs.
        with nullcontext() if ON_GPU else patch.object(mx, "compile", lambda run: run):
            n_compiled, _ = decode(model, backend, 190, 60, trim=(40, 210), tolerance=2e-2)
    assert 50 < n_compiled < 60


@pytest.mark.parametrize(("name", "kv_bits"), MODELS)
def test_the_same_logits_as_in_plain_mlx(name: str, kv_bits: int) -> None:
    prompt = [7 * i % 96 for i in range(220)]
    last = []
    with nullcontext() if ON_GPU else small_gpu(checked=False):
        for backend in (CUDA(mx.float16, kv_bits), Backend(mx.float16, kv_bits=kv_bits)):
            model = build(name, backend)
            caches = make_caches(SealedCache, backend, model.shape.kv_layers)
            model(prompt[:140], caches)
            model(prompt[140:], caches)
            steps = [model([3 * i % 96], caches) for i in range(12)]
            last.append(mx.concatenate([*steps, model([5, 6, 7], caches, 3)]))
    ours, plain = last
    error = mx.linalg.norm(ours - plain, axis=-1) / mx.linalg.norm(plain, axis=-1)
    assert error.max() < 2e-2
