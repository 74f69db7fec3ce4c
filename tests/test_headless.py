"""An answer without a screen: what of it goes where, moment by moment."""

import json
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from tqchat import headless
from tqchat.engine.engine import NO_USAGE
from tqchat.engine.events import (
    CacheUse,
    EngineOptions,
    Event,
    Finished,
    FinishReason,
    Memory,
    Sampling,
    Token,
)

Capture = pytest.CaptureFixture[str]


class Written:
    """An engine that tells an answer in pieces; `moments` is what was seen before each event."""

    def __init__(self, pieces: list[str], capture: Capture, reason: FinishReason = "stop") -> None:
        cache, memory = CacheUse(1, 2, 3, 4, 5), Memory(1, 2, 3, 4, 5)
        self.events: deque[Event] = deque()
        self._told: Iterator[Event] = iter(
            [
                *(Token(1, piece) for piece in pieces),
                Finished(1, reason, "".join(pieces), NO_USAGE, cache, memory),
            ]
        )
        self._capture = capture
        self.moments: list[tuple[str, str]] = []

    def wait(self, timeout: float) -> Event:
        self.moments.append(tuple(self._capture.readouterr()))
        return next(self._told)

    def close(self, grace: float | None) -> bool:
        return True

    def start(self) -> None: ...
    def load(self, model: str | None) -> None: ...
    def generate(self, *arguments: object) -> None: ...


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Any:
    def run(
        *pieces: str, as_json: bool = False, terminal: bool = False, reason: FinishReason = "stop"
    ) -> list[tuple[str, str]]:
        """What came on stdout and stderr after each piece, and at last."""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        engine = Written(list(pieces), capsys, reason)
        monkeypatch.setattr(headless, "Engine", lambda options: engine)
        assert headless.answer(
            None, "?", None, EngineOptions(), Sampling(), None, as_json, False, lambda: False
        ) == 0  # fmt: skip
        return [*engine.moments[1:], tuple(capsys.readouterr())]

    return run


def test_the_answer_alone_is_printed_as_it_comes(say) -> None:
    moments = say("<thi", "nk>Hm", ", </", "think>", "\n\nSo", " be ", "it.")
    assert [out for out, _ in moments] == ["", "", "", "", "So", " be ", "it.", "\n"]
    assert "".join(err for _, err in moments) == ""


def test_a_terminal_is_told_that_the_model_thinks(say) -> None:
    moments = say("<think>", "Hm", "</think>", "\nYes", terminal=True)
    assert "Thinking" in moments[1][1]
    # The line is gone before the answer begins.
    assert moments[3] == ("Yes", "\r\x1b[K")
    assert "Thinking" not in "".join(err for _, err in say("Yes", terminal=True))


def test_an_answer_that_went_in_circles_says_so(say) -> None:
    out, err = say("ha", "ha", reason="repetition")[-1]
    assert "repeated itself" in err
    assert "repeated" not in out
    *_, (out, err) = say("ha", "ha", as_json=True, reason="repetition")
    assert (json.loads(out)["finish_reason"], err) == ("repetition", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm, hm.\n</think>\n\nYes.", {"text": "Yes.", "thinking": "Hm, hm."}),
        ("<think>Hm", {"text": "", "thinking": "Hm"}),
        ("<think>\n\n</think>\n\nYes.", {"text": "Yes."}),
        ("<think", {"text": "<think"}),
        (" Say <think>x</think>.", {"text": " Say <think>x</think>."}),
    ],
)
def test_json_has_the_thought_apart(say, text: str, expected: dict[str, str]) -> None:
    for pieces in ([text], list(text)):
        moments = say(*pieces, as_json=True)
        assert {out for out, _ in moments[:-1]} == {""}
        answer = json.loads(moments[-1][0])
        assert {key: answer[key] for key in ("text", "thinking") if key in answer} == expected
        assert list(answer)[: len(expected)] == list(expected)
        printed = "".join(out for out, _ in say(*pieces))
        assert printed == expected["text"] + "\n"
