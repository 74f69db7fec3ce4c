"""A question with a few answers to choose from."""

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option


class Choice(ModalScreen[str | None]):
    """Ends with the key of the answer chosen, or None. `answers`: key and text of each."""

    AUTO_FOCUS = "OptionList"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]

    def __init__(self, question: str, answers: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._question = question
        self._answers = answers

    def compose(self) -> ComposeResult:
        options = [Option(text, id=key) for key, text in self._answers]
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield OptionList(*options, markup=False, compact=True)
            yield Static("↑↓ choose   Enter takes   Esc leaves all as it is", classes="line")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)
