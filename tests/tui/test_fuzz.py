"""Ten thousand hostile answers, streamed and laid out: no crash, text alone, within the width."""

import random

import pytest
from rich.cells import cell_len

from tests.tui.test_hostile import ATTACKS
from tqchat.tui.entries import Answer
from tqchat.tui.text import clean

CASES = 10_000
SHARES = 20
WIDTHS = (20, 37, 80)
MARKS = (
    *(
        "*",
        "**",
        "_",
        "`",
        "~~",
        "\\",
        "\\(",
        "\\[",
        "```",
        "~~~",
        "$",
        "$$",
        "|",
        "&#27;",
        "[bold]",
    ),
    *("<think>", "</think>", "<|end|>", "<|channel|>analysis<|message|>", "[x](y)", "![", "]("),
    *("word", "\u4e16\u754c", "e\u0301", "\u05d0\u05d1", "\u202e", "\x1b[", "\x9b"),
)
LINES = (
    *("\n", "\n\n", "  ", "    ", "\t", "word ", "> ", "- ", "1. ", "# ", "---\n", "===\n", "\r"),
    *("```py\n", "\n$$\n", "\n\\[\n", "| a | b |\n|---|--:|\n", "| c ", "\n</think>\n", "\r\n"),
)
PIECES = [*MARKS, *LINES, *(attack[:300] for attack in ATTACKS.values())]


def hostile(numbers: random.Random) -> str:
    """Pieces that mean something, and characters from all of Unicode."""
    text = []
    for _ in range(numbers.randint(1, 12)):
        if numbers.random() < 0.8:
            text.append(numbers.choice(PIECES) * numbers.choice((1, 1, 1, 2, 5)))
        else:
            text.append("".join(chr(numbers.randrange(0x110000)) for _ in range(5)))
    return "".join(text)


@pytest.mark.parametrize("share", range(SHARES))
def test_no_answer_does_harm(share: int) -> None:
    numbers = random.Random(share)
    for _ in range(CASES // SHARES):
        text = hostile(numbers)
        width = numbers.choice(WIDTHS)
        answer = Answer()
        cut = numbers.randint(0, len(text))
        for piece in (text[:cut], text[cut:]):
            answer.feed(piece)
            check(answer, width, text)
        if answer.thought is not None:
            answer.thought.folded = False
        answer.finish("the end")
        check(answer, width, text)
        assert answer.text == text


def check(answer: Answer, width: int, text: str) -> None:
    for row in answer.rows(width):
        assert clean(row.content.plain) == row.content.plain, repr(text)
        assert "\n" not in row.content.plain, repr(text)
        # Spaces at the end of a line hang over.
        assert cell_len(row.content.plain.rstrip()) <= width, repr(text)
