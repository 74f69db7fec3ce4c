"""From logits to the next token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx

from tqchat.engine.events import Sampling

PENALTY_WINDOW = 64
# Logits divided by less than this leave float32's range.
GREEDY_BELOW = 1e-4


@dataclass(frozen=True, slots=True)
class Rules:
    """`Sampling` with every choice made. The defaults are for models that suggest nothing."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, sampling: Sampling, suggested: Mapping[str, float]) -> "Rules":
        """What somebody chose, else what the model suggests, else the defaults."""
        said = {one.name: getattr(sampling, one.name) for one in fields(cls)}
        chosen = {name: x for name, x in said.items() if x is not None}
        return cls(**{**suggested, **chosen})


def sample(logits: mx.array, rules: Rules, recent: Sequence[int]) -> mx.array:
    """The next token's id, a lazy scalar, of logits (vocab_size,).

    The repetition penalty (arXiv:1909.05858) looks at the last PENALTY_WINDOW tokens of `recent`.
    Filters see the distribution before temperature, in the order top-k, top-p (arXiv:1904.09751),
    min-p (arXiv:2407.01082). The likeliest token always survives.
    """
    if rules.repetition_penalty != 1.0 and recent:
        logits = _penalised(logits, rules.repetition_penalty, recent[-PENALTY_WINDOW:])
    if rules.temperature < GREEDY_BELOW:
        return mx.argmax(logits)
    if 0 < rules.top_k < logits.shape[0]:
        kth = mx.topk(logits, rules.top_k).min()
        logits = mx.where(logits < kth, -mx.inf, logits)
    if rules.top_p < 1.0:
        logits = _nucleus(logits, rules.top_p)
    if rules.min_p > 0.0:
        floor = logits.max() + mx.log(mx.array(min(rules.min_p, 1.0)))
        logits = mx.where(logits < floor, -mx.inf, logits)
    return mx.random.categorical(logits / rules.temperature)


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
