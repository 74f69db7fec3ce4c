"""What screens to choose from have in common: a box to search in, a list, and a line of help."""

from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from tqchat.tui.text import clean_line

Chosen = TypeVar("Chosen")


class Picker(ModalScreen[Chosen | None]):
    """Keys go to the box; up and down move in the list."""

    AUTO_FOCUS = "Input"
    HEADING: ClassVar[str]
    KEYS: ClassVar[str]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", show=False),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
    ]

    def __init__(self, typed: str = "", placeholder: str = "Search") -> None:
        super().__init__()
        self._input = Input(typed, placeholder=placeholder, compact=True, select_on_focus=False)
        self._list = OptionList(markup=False, compact=True)
        self._list.can_focus = False
        self._line = Static(markup=False, classes="line")

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self.HEADING, classes="title")
            yield self._input
            yield self._list
            yield self._line

    def on_mount(self) -> None:
        self._say()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def _fill(self) -> None:
        """Puts what there is to choose from into the list."""
        raise NotImplementedError

    @property
    def _width(self) -> int:
        """Of a row, in cells."""
        return max(self._list.scrollable_content_region.width - 2, 20)

    def _say(self, text: str = "") -> None:
        self._line.update(clean_line(text) or self.KEYS)

    def action_move(self, step: int) -> None:
        if step < 0:
            self._list.action_cursor_up()
        else:
            self._list.action_cursor_down()

    def action_back(self) -> None:
        self.dismiss(None)
