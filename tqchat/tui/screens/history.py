"""The messages that were sent: one is searched for, to be sent again or changed."""

from typing import ClassVar

from textual import on
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from tqchat.tui.history import History
from tqchat.tui.screens.picker import Picker
from tqchat.tui.text import clean_line

_MOST_SHOWN = 200


class HistoryPicker(Picker[str]):
    """Ends with a message, or None. `typed`: what to search for at first."""

    HEADING: ClassVar[str] = "Earlier messages"
    KEYS: ClassVar[str] = "Enter takes it to the prompt   Esc closes"

    def __init__(self, history: History, typed: str) -> None:
        super().__init__(typed)
        self._history = history
        self._found: list[str] = []

    @on(Input.Changed)
    def _fill(self) -> None:
        self._found = self._history.search(self._input.value)[:_MOST_SHOWN]
        self._list.clear_options()
        for text in self._found:
            row = Content(clean_line(text[: 4 * self._width])).truncate(self._width, ellipsis=True)
            self._list.add_option(Option(row))
        if self._found:
            self._list.highlighted = 0
        self._say("" if self._found else "None has that in it.")

    @on(Input.Submitted)
    def _enter(self) -> None:
        if self._found:
            self.dismiss(self._found[self._list.highlighted or 0])

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index])
