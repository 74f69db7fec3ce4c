"""From logits to the next token."""

from collections.abc import Sequence

import mlx.core as mx

from tqchat.engine.events import Sampling

PENALTY_WINDOW = 64


def sample(logits: mx.array, sampling: Sampling, recent: Sequence[int]) -> mx.array:
    """The next token's id, a lazy scalar, of logits (vocab_size,).

    The repetition penalty (arXiv:1909.05858) looks at the last PENALTY_WINDOW tokens of `recent`.
    Filters see the distribution before temperature, in the order top-k, top-p (arXiv:1904.09751),
    min-p (arXiv:2407.01082). The likeliest token always survives.
    """
    if sampling.repetition_penalty != 1.0 and recent:
        logits = _penalised(logits, sampling.repetition_penalty, recent[-PENALTY_WINDOW:])
    if sampling.temperature == 0:
        return mx.argmax(logits)
    if 0 < sampling.top_k < logits.shape[0]:
        kth = mx.topk(logits, sampling.top_k).min()
        logits = mx.where(logits < kth, -mx.inf, logits)
    if sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0.0:
        floor = logits.max() + mx.log(mx.array(min(sampling.min_p, 1.0)))
        logits = mx.where(logits < floor, -mx.inf, logits)
    return mx.random.categorical(logits / sampling.temperature)


def _penalised(logits: mx.array, penalty: float, recent: Sequence[int]) -> mx.array:
    seen = mx.array(sorted(set(recent)))
    chosen = logits[seen]
    logits[seen] = mx.where(chosen < 0, chosen * penalty, chosen / penalty)
    return logits


def _nucleus(logits: mx.array, top_p: float) -> mx.array:
    """Keep the smallest set of likeliest tokens whose probability reaches top_p."""
    ordered = mx.sort(-logits)
    probabilities = mx.softmax(-ordered, precise=True)
    before = mx.cumsum(probabilities) - probabilities
    kept = mx.maximum((before < top_p).sum(), 1)
    return mx.where(-logits > ordered[kept - 1], -mx.inf, logits)


def token_id(token: mx.array) -> int:
    """Wait for a sampled token."""
    return int(token.item())  # type: ignore[arg-type]
