"""A compiled decode step beside an eager one, token by token, each on caches of its own."""

import mlx.core as mx

from tqchat.engine.cache import SealedCache
from tqchat.engine.step import CompiledStep
from tqchat.kernels import Backend
from tqchat.models.registry import Model


def decode(
    model: Model,
    backend: Backend,
    n_prompt: int,
    n_steps: int,
    trim: tuple[int, int],
    tolerance: float,
) -> tuple[int, list[SealedCache]]:
    """How many of the steps were compiled, and their caches at the end.

    `trim`: before which step, and to how many tokens. Logits must be as the eager ones are.
    """
    eager, compiled = (
        [SealedCache(backend, layer) for layer in model.shape.kv_layers] for _ in range(2)
    )
    step = CompiledStep(model, backend, compiled)
    prompt = [7 * i % model.vocab_size for i in range(n_prompt)]
    for caches in (eager, compiled):
        mx.eval(model(prompt, caches))
    n_compiled = 0
    for i in range(n_steps):
        if i == trim[0]:
            for cache in (*eager, *compiled):
                cache.trim(trim[1])
        ids = mx.array([3 * i % model.vocab_size], dtype=mx.uint32)
        expected = model(ids, eager)
        if step.ready:
            logits = step(ids)
            n_compiled += 1
        else:
            logits = model(ids, compiled)
        mx.eval(expected, logits)
        assert mx.allclose(logits, expected, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(compiled, eager, strict=True):
            assert (ours.offset, ours.n_blocks) == (theirs.offset, theirs.n_blocks)
    return n_compiled, compiled
