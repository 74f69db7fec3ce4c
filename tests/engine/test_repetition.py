"""An answer that goes round in circles ends, and no other does."""

from itertools import count, cycle, islice
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.engine.test_generation import run, session
from tqchat.engine.repetition import goes_in_circles

PROMPT = list(range(50))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=64), st.lists(st.integers(), max_size=300))
def test_a_cycle_is_seen_whatever_came_before(one: list[int], before: list[int]) -> None:
    assert goes_in_circles([*before, *islice(cycle(one), 256)])
    assert not goes_in_circles(list(islice(cycle(one), 255)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=64), st.integers(0, 255))
def test_one_fault_is_enough_to_go_on(one: list[int], at: int) -> None:
    """For a fault at an end the cycle may be another."""
    assume(64 <= at < 192)
    tokens = list(islice(cycle(one), 256))
    tokens[at] = 4
    assert not goes_in_circles(tokens)


def test_a_longer_cycle_may_have_a_meaning() -> None:
    assert goes_in_circles([*range(64)] * 4)
    assert not goes_in_circles([*range(65)] * 4)


@pytest.mark.parametrize(("varied", "expected"), [(0, 256), (1, 288), (100, 384)])
def test_a_turn_ends_by_it_soon_after_256_tokens(
    monkeypatch: pytest.MonkeyPatch, varied: int, expected: int
) -> None:
    one = session()

    def decode(*_: Any) -> Any:
        yield from islice(count(20), varied)
        yield from cycle([3, 4, 5])

    monkeypatch.setattr(one, "_decode", decode)
    # The turn after it begins to count anew.
    for _ in range(2):
        ended = run(one, PROMPT, max_tokens=1000)
        assert (ended.reason, ended.usage.completion_tokens) == ("repetition", expected)
    assert run(one, PROMPT, max_tokens=100).reason == "length"


def test_a_turn_that_does_not_repeat_itself_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = session()
    monkeypatch.setattr(one, "_decode", lambda *_: (n % 101 for n in count()))
    assert run(one, PROMPT, max_tokens=1000).reason == "length"
