"""What the model predicts with a kind of cache, against what it predicts with 16 bits.

Texts are fed 32 tokens at a time, through the cache: in one chunk a text never meets its own
quantised past.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqchat.bench.caches import MakeCache, fp16_cache
from tqchat.bench.progress import Progress
from tqchat.engine.cache import KVCache
from tqchat.engine.loading import LoadedModel
from tqchat.engine.sampler import token_id
from tqchat.kernels import Backend
from tqchat.models.registry import Model

CHUNK = 32
FP16 = "fp16"

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One kind of cache against fp16, over all scored tokens.

    kl: nats, from fp16's prediction to this one, mean
    greedy_run: tokens until the greedy continuation differs from fp16's, mean over the texts
    """

    kind: str
    perplexity: float
    kl: float
    same_top1: float
    greedy_run: float


def make_caches(model: Model, backend: Backend, make: MakeCache) -> list[KVCache]:
    return [make(backend, layer, number) for number, layer in enumerate(model.shape.kv_layers)]


def predictions(
    loaded: LoadedModel,
    kinds: Mapping[str, MakeCache],
    texts: Sequence[Text],
    scored_from: int,
    n_greedy: int,
    progress: Progress = lambda share: None,
) -> list[Prediction]:
    """Every kind's row, fp16's first. Tokens before `scored_from` are read and not scored.

    A text is continued greedily by up to `n_greedy` tokens where it ends.
    """
    kinds = {FP16: fp16_cache, **kinds}
    scores = {kind: _Scores() for kind in kinds}
    steps, total = 0, sum(len(text.ids) for text in texts) * len(kinds)
    for text in texts:
        caches = {
            kind: make_caches(loaded.model, loaded.backend, make) for kind, make in kinds.items()
        }
        last: dict[str, mx.array] = {}
        for start in range(0, len(text.ids), CHUNK):
            chunk, targets = text.ids[start : start + CHUNK], text.ids[start + 1 :][:CHUNK]
            scored = start >= scored_from
            log_p: Floats | None = None
            for kind, held in caches.items():
                logits = loaded.model(chunk, held, len(chunk) if scored else 1)
                last[kind] = logits[-1]
                if scored:
                    log_q = _log_softmax(logits)
                    log_p = log_q if log_p is None else log_p
                    scores[kind].add(log_p, log_q, targets)
                steps += len(chunk)
                progress(steps / total)
        _greedy_runs(loaded, caches, last, n_greedy, scores)
    return [_prediction(kind, score) for kind, score in scores.items()]


class _Scores:
    """What is known of one kind, token by token and text by text."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []
        self.nll: list[float] = []
        self.runs: list[int] = []

    def add(self, log_p: Floats, log_q: Floats, targets: Sequence[int]) -> None:
        """log_p (fp16's), log_q: (tokens, vocab_size). targets: the tokens that do come next."""
        self.kl += (np.exp(log_p) * (log_p - log_q)).sum(axis=-1, dtype=np.float64).tolist()
        self.same += (log_p.argmax(axis=-1) == log_q.argmax(axis=-1)).tolist()
        self.nll += (-log_q[np.arange(len(targets)), targets]).tolist()


def _prediction(kind: str, scores: _Scores) -> Prediction:
    perplexity = float(np.exp(np.mean(scores.nll)))
    means = (float(np.mean(x)) for x in (scores.kl, scores.same, scores.runs))
    return Prediction(kind, perplexity, *means)


def _log_softmax(logits: mx.array) -> Floats:
    x = np.array(logits, dtype=np.float32)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def _greedy_runs(
    loaded: LoadedModel,
    caches: Mapping[str, list[KVCache]],
    last: Mapping[str, mx.array],
    n_greedy: int,
    scores: Mapping[str, _Scores],
) -> None:
    """Continue every kind from its `last` logits, as far as it says what fp16 says."""
    said: list[int] = []
    for kind, held in caches.items():
        logits, run = last[kind], 0
        while run < n_greedy:
            token = token_id(logits.argmax())
            if kind == FP16:
                said.append(token)
            elif token != said[run]:
                break
            run += 1
            logits = loaded.model([token], held)[-1]
        scores[kind].runs.append(run)
