"""A long text to read: what a token in the prompt stands for."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static, TextArea

from tqchat.tui.text import clean

_LONGEST_LINE = 2_000
_NARROWEST = 40
"""Columns of a line, where the terminal is small."""


class TextView(ModalScreen[None]):
    """Lines too long for the widget are cut into several."""

    AUTO_FOCUS = "TextArea"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", show=False)]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = "\n".join(
            line[at : at + _LONGEST_LINE]
            for line in clean(text).split("\n")
            for at in range(0, max(len(line), 1), _LONGEST_LINE)
        )

    def compose(self) -> ComposeResult:
        rows = sum(len(line) // _NARROWEST + 1 for line in self._text.split("\n"))
        fits = rows < self.app.size.height // 2
        with Vertical(classes="box" if fits else "box tall"):
            yield Static(self._title, markup=False, classes="title")
            yield TextArea(self._text, read_only=True, compact=True, soft_wrap=True)
            yield Static("↑↓ PgUp PgDn scroll   Esc closes", classes="line")
