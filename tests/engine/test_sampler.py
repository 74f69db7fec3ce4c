"""The sampler's filters against their definitions in numpy."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tqchat.engine.events import Sampling
from tqchat.engine.sampler import PENALTY_WINDOW, Rules, sample

OPEN = Rules(temperature=1.0, top_p=1.0)


def drawn(logits: np.ndarray, rules: Rules, n: int = 400) -> set[int]:
    mx.random.seed(0)
    x = mx.array(logits)
    return set(mx.stack([sample(x, rules, []) for _ in range(n)]).tolist())


def kept_by(logits: np.ndarray, rules: Rules) -> set[int]:
    kept = np.ones(len(logits), bool)
    if rules.top_k:
        kept &= logits >= np.sort(logits)[-rules.top_k]
    p = np.exp(logits - logits.max()) * kept
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    nucleus = np.zeros(len(logits), bool)
    nucleus[order[before < rules.top_p]] = True
    kept &= nucleus
    kept &= logits - logits.max() >= np.log(max(rules.min_p, 1e-30))
    return set(np.flatnonzero(kept).tolist())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 3, 7]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_only_what_the_filters_keep_is_drawn(seed, top_k, top_p, min_p) -> None:
    logits = np.random.default_rng(seed).normal(size=12).astype(np.float32)
    rules = Rules(temperature=3.0, top_k=top_k, top_p=top_p, min_p=min_p)
    allowed = kept_by(logits, rules)
    seen = drawn(logits, rules)
    assert seen <= allowed
    assert int(logits.argmax()) in seen


def test_frequencies_follow_the_softmax_at_its_temperature() -> None:
    logits = mx.log(mx.array([0.5, 0.3, 0.2]))
    mx.random.seed(1)
    rules = Rules(temperature=0.5, top_p=1.0)
    draws = mx.stack([sample(logits, rules, []) for _ in range(4000)])
    counts = np.bincount(np.array(draws), minlength=3) / 4000
    expected = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(counts, expected, atol=0.03)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert sample(mx.array([0.1, 3.0, -1.0]), Rules(temperature=0), []).item() == 1


def test_a_seed_repeats_the_draws() -> None:
    logits = mx.zeros((1000,))

    def draws(seed: int) -> list[int]:
        mx.random.seed(seed)
        return [int(sample(logits, OPEN, []).item()) for _ in range(20)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


@pytest.mark.parametrize(("logits", "expected"), [([2.0, 1.9], 1), ([-1.0, -1.5], 1)])
def test_repetition_penalty_pushes_down_what_was_said(logits, expected) -> None:
    rules = Rules(temperature=0, repetition_penalty=2.0)
    assert sample(mx.array(logits), rules, [0]).item() == expected
    said_long_ago = [0] + [1] * PENALTY_WINDOW
    assert sample(mx.array(logits), rules, said_long_ago).item() == 0


def test_what_somebody_chose_goes_before_what_the_model_suggests() -> None:
    suggested = {"temperature": 0.2, "top_k": 20}
    rules = Rules.of(Sampling(temperature=0, seed=4), suggested)
    assert rules == Rules(temperature=0, top_k=20)


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-5])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    assert sample(mx.array([0.1, 3.0, -1.0]), Rules(temperature=temperature), []).item() == 1
