"""The saved conversations: one is chosen to go on with, renamed or deleted."""

from collections.abc import Callable
from time import time
from typing import ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from tqchat.chat import sessions
from tqchat.chat.errors import ChatError
from tqchat.chat.sessions import Summary
from tqchat.tui.figures import age_text
from tqchat.tui.screens.picker import Picker
from tqchat.tui.text import clean_line
from tqchat.units import file_size_text

_MOST_SHOWN = 500


class SessionPicker(Picker[str]):
    """Ends with the id of a conversation, or None. `rename` is given an id and a title."""

    HEADING: ClassVar[str] = "Conversations"
    KEYS: ClassVar[str] = "Enter opens   Ctrl-R renames   Ctrl-D deletes   Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "rename", show=False, priority=True),
        Binding("ctrl+d", "delete", show=False, priority=True),
    ]

    def __init__(self, rename: Callable[[str, str], None]) -> None:
        super().__init__()
        self._rename = rename
        self._summaries: list[Summary] = []
        self._renaming = self._deleting = ""

    def on_mount(self) -> None:
        self._say()
        self._read()

    def _read(self) -> None:
        """All of them."""
        try:
            self._summaries = sessions.summaries()
        except ChatError as error:
            self._say(str(error))
        self._fill()

    def _fill(self) -> None:
        place = self._list.highlighted or 0
        width, now = self._width, time()
        self._list.clear_options()
        for summary in self._summaries[:_MOST_SHOWN]:
            right = f"  {age_text(now - summary.modified):>9} {file_size_text(summary.size):>8}"
            title = Content(clean_line(summary.title)).truncate(
                width - len(right), ellipsis=True, pad=True
            )
            self._list.add_option(
                Option(title + Content.styled(right, "$text-muted"), id=summary.id)
            )
        if self._summaries:
            self._list.highlighted = min(place, self._list.option_count - 1)
        elif not self._input.value:
            self._say("Nothing is saved yet.")

    @property
    def _chosen(self) -> Summary | None:
        place = self._list.highlighted
        return None if place is None else self._summaries[place]

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        if self._renaming:
            return
        self._deleting = ""
        self._say()
        if event.value:
            self._find(event.value)
        else:
            self.workers.cancel_node(self)
            self._read()

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _find(self, query: str) -> None:
        """By title and text, read from the disk."""
        found = []
        for summary, _ in sessions.search(query):
            if get_current_worker().is_cancelled:
                return
            found.append(summary)
        self.app.call_from_thread(self._found, query, found)

    def _found(self, query: str, found: list[Summary]) -> None:
        if query == self._input.value and not self._renaming:
            self._summaries = found
            self._list.highlighted = 0 if found else None
            self._fill()
            self._say("" if found else "None has that in it.")

    @on(Input.Submitted)
    def _enter(self) -> None:
        if self._renaming:
            try:
                self._rename(self._renaming, self._input.value)
            except ChatError as error:
                self._say(str(error))
                return
            self._end_renaming()
        elif self._chosen is not None:
            self.dismiss(self._chosen.id)

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_move(self, step: int) -> None:
        self._deleting = ""
        self._say()
        super().action_move(step)

    def action_back(self) -> None:
        if self._renaming:
            self._end_renaming()
        else:
            self.dismiss(None)

    def action_rename(self) -> None:
        if self._chosen is not None:
            self._renaming = self._chosen.id
            self._input.value = self._chosen.title
            self._say("Enter renames, Esc leaves the title as it is.")

    def _end_renaming(self) -> None:
        self._input.value = ""
        self._renaming = ""
        self._read()
        self._say()

    def action_delete(self) -> None:
        chosen = self._chosen
        if chosen is None or self._renaming:
            return
        if self._deleting != chosen.id:
            self._deleting = chosen.id
            self._say(f"Ctrl-D again deletes for good: {chosen.title}")
            return
        self._deleting = ""
        try:
            sessions.delete(chosen.id)
        except ChatError as error:
            self._say(str(error))
        else:
            self._summaries.remove(chosen)
            self._fill()
            self._say()
