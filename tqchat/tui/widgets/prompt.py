"""Where the person writes. Enter sends; a large paste becomes a token that stands for it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeAlias

from rich.cells import split_graphemes
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.document._document import EditResult, Location, Selection
from textual.document._edit import Edit
from textual.message import Message
from textual.widgets import Static, TextArea

from tqchat.chat.conversation import Span
from tqchat.tui.attached import Attached, Attachments
from tqchat.tui.commands import Completion, completions
from tqchat.tui.history import History
from tqchat.tui.places import Place, places
from tqchat.tui.text import clean_line, clean_paste

TALLEST = 10
MOST_ROWS = 10
# Header, activity, prompt and keys, what says how many more there are, and a row to spare.
_ROWS_AROUND = 8
_LONGEST_PASTE = 2_000
_PLACE = re.compile(r"(?:^|(?<=\s))@(\S*)$")
_MOST_PASTED_LINES = 20
# Not printable, so a text area would drop them; emoji and Persian are written with them.
_JOINERS = ("\u200c", "\u200d")

Choice: TypeAlias = Completion | Place


class Prompt(TextArea):
    """A text box that grows with its text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+d", "delete_or_leave", show=False),
        Binding("up", "up", show=False),
        Binding("down", "down", show=False),
        Binding("ctrl+r", "search", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"prompt--token"}

    @dataclass
    class Sent(Message):
        """`text` is what the model gets, `shown` the same with its tokens, `attached` where what
        they stand for lies in `text`."""

        text: str
        shown: str
        attached: tuple[Span, ...] = ()

    @dataclass
    class FileChosen(Message):
        path: Path

    class Search(Message):
        """Ctrl-R: an earlier message is looked for."""

    class Leave(Message):
        """Ctrl-D in an empty box."""

    def __init__(self, menu: "CommandMenu", past: History) -> None:
        self.attachments = Attachments()
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            highlight_cursor_line=False,
            compact=True,
            placeholder="Ask anything  ·  / for commands",
        )
        # Blinking draws twice a second, for as long as the program waits.
        self.cursor_blink = False
        self._menu = menu
        self.past = past
        self._recalled: int | None = None
        self._draft = ""

    def full_text(self, shown: str) -> str:
        """The text with every token replaced by what it stands for."""
        return self.attachments.expanded(shown)

    def fold(self, text: str) -> str:
        """`text` itself, or a token that stands for it if it is long."""
        if len(text) <= _LONGEST_PASTE and text.count("\n") < _MOST_PASTED_LINES:
            return text
        return self.attachments.paste(text).label

    def attach(self, name: str, text: str) -> None:
        """A file, as a token where the cursor is."""
        self._insert(self.attachments.file(name, clean_paste(text)).label)

    def relabel(self) -> None:
        """Tokens say what has become known of them."""
        for row in range(self.document.line_count):
            for start, end, one in reversed(self._tokens(row)):
                if self.document.get_line(row)[start:end] != one.label:
                    self.replace(one.label, (row, start), (row, end))

    def token_here(self) -> Attached | None:
        """What the token at the cursor stands for, or else the last one in the prompt."""
        row, column = self.cursor_location
        for start, end, one in self._tokens(row):
            if start <= column <= end:
                return one
        return next(reversed(self.attachments.inside(self.text)), None)

    def put_back(self, shown: str) -> None:
        """Returns a message to the box, before whatever is in it."""
        self.text = f"{shown}\n{self.text}" if self.text.strip() else shown
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        # Not as bindings, which run before characters that were typed just before them are in.
        match event.key:
            case "enter":
                act = self._send
            case "ctrl+j" | "shift+enter" | "alt+enter":
                act = self._new_line
            case "tab" if self._menu.display:
                act = self._complete
            case _ if event.character in _JOINERS:
                act = partial(self._insert, event.character)
            case key if bindings := self._bindings.key_to_bindings.get(key):
                event.stop()
                event.prevent_default()
                await self.run_action(bindings[0].action)
                return
            case _:
                await super()._on_key(event)
                return
        event.stop()
        event.prevent_default()
        act()

    # Sending, history, completion

    def _send(self) -> None:
        choice = self._menu.chosen(self._choices())
        if isinstance(choice, Place):
            self._take_place(choice)
            return
        if choice is not None:
            self.text = choice.typed
            if not choice.is_whole:
                self.move_cursor(self.document.end)
                return
        shown = self.text.strip("\n").rstrip()
        if not shown.strip():
            return
        if not shown.startswith("/"):
            # What tokens stand for is gone when the program ends.
            self.past.add(shown, self.attachments.remembered(shown))
        self._recalled = None
        self.text = ""
        self.history.clear()
        self.post_message(self.Sent(self.full_text(shown), shown, self.attachments.places(shown)))

    def _new_line(self) -> None:
        self._replace_via_keyboard("\n", *self.selection)

    def _complete(self) -> None:
        choice = self._menu.chosen(self._choices())
        if isinstance(choice, Place):
            self._take_place(choice)
        elif choice is not None:
            self.text = choice.typed
            self.move_cursor(self.document.end)

    def _choices(self) -> Sequence[Choice]:
        """What the menu has to offer for what is typed."""
        themes = self.app.available_themes.values()
        looks = {theme.name: "dark" if theme.dark else "light" for theme in themes}
        if found := completions(self.text, looks):
            return found
        return places(word[1]) if (word := self._place_before()) else []

    def _place_before(self) -> re.Match[str] | None:
        """The @ and what is typed after it, right before the cursor."""
        row, column = self.cursor_location
        return _PLACE.search(self.document.get_line(row)[:column])

    def _take_place(self, place: Place) -> None:
        """A folder is gone into; a file is attached in place of its name."""
        if (word := self._place_before()) is None:
            return
        row, column = self.cursor_location
        start = (row, word.start(1) - 1)
        text = f"@{place.typed}" if place.is_folder else ""
        if result := self._replace_via_keyboard(text, start, (row, column)):
            self.move_cursor(result.end_location)
        if not place.is_folder:
            self.post_message(self.FileChosen(place.path))

    def action_delete_or_leave(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.Leave())

    def action_search(self) -> None:
        self.post_message(self.Search())

    def action_up(self) -> None:
        if self._menu.display:
            self._menu.move(-1)
        elif self.cursor_at_first_line:
            self._recall(-1)
        else:
            self.action_cursor_up()

    def action_down(self) -> None:
        if self._menu.display:
            self._menu.move(1)
        elif self.cursor_at_last_line:
            self._recall(1)
        else:
            self.action_cursor_down()

    def _recall(self, step: int) -> None:
        if self._recalled is None:
            if step > 0 or not self.past.entries:
                return
            self._draft = self.text
            self._recalled = len(self.past.entries)
        place = self._recalled + step
        if place < 0:
            return
        if place >= len(self.past.entries):
            self._recalled = None
            self.text = self._draft
        else:
            self._recalled = place
            self.text = self.past.entries[place]
        self._menu.display = False
        self.move_cursor(self.document.end if step < 0 else (0, 0))

    def on_text_area_changed(self) -> None:
        self._fit()
        self._menu.show(self._choices())

    def _on_resize(self) -> None:
        super()._on_resize()
        self._fit()

    def _fit(self) -> None:
        height = max(1, min(self.wrapped_document.height, TALLEST))
        if self.styles.height is None or self.styles.height.value != height:
            self.styles.height = height

    # Pasting, and tokens as one character

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        self._insert(self.fold(clean_paste(event.text)))

    def _insert(self, text: str) -> None:
        if result := self._replace_via_keyboard(text, *self.selection):
            self.move_cursor(result.end_location)
            self.focus()

    def _replace_via_keyboard(
        self, insert: str, start: Location, end: Location
    ) -> EditResult | None:
        """A word right after a token gets a space before it."""
        row, column = min(start, end)
        if insert[:1].isalnum() or insert[:1] in ("[", "@"):
            after_token = any(column == stop for _, stop, _ in self._tokens(row))
            insert = f" {insert}" if after_token else insert
        return super()._replace_via_keyboard(insert, start, end)

    def _tokens(self, row: int) -> list[tuple[int, int, Attached]]:
        return self.attachments.spans(self.document.get_line(row))

    def _outside_token(self, location: Location, forward: bool) -> Location:
        row, column = location
        if row == self.document.line_count:
            # The end of the last line, where a line is deleted with its break.
            return location
        for start, end, _ in self._tokens(row):
            if start < column < end:
                return row, end if forward else start
        return location

    def validate_selection(self, selection: Selection) -> Selection:
        start, end = selection
        outside = self._outside_token(end, forward=end > self.selection.end)
        if start == end:
            return Selection.cursor(outside)
        return Selection(self._outside_token(start, forward=start > end), outside)

    def edit(self, edit: Edit) -> EditResult:
        top, bottom = sorted((edit.from_location, edit.to_location))
        if top != bottom:
            edit.from_location = self._outside_token(top, forward=False)
            edit.to_location = self._outside_token(bottom, forward=True)
        return super().edit(edit)

    def get_cursor_left_location(self) -> Location:
        row, column = self.cursor_location
        if column:
            starts = [start for start in self._letters(row) if start < column]
            return self._outside_token((row, starts[-1]), forward=False)
        return super().get_cursor_left_location()

    def get_cursor_right_location(self) -> Location:
        row, column = self.cursor_location
        ends = [end for end in self._letters(row) if end > column]
        if ends:
            return self._outside_token((row, ends[0]), forward=True)
        return super().get_cursor_right_location()

    def _letters(self, row: int) -> list[int]:
        """Where a line's letters begin and end, as people see them: an emoji with joiners, or a
        letter with its accents, is one."""
        line = self.document.get_line(row)
        if line.isascii():
            return list(range(len(line) + 1))
        return [0, *(end for _, end, _ in split_graphemes(line)[0])]

    def get_line(self, line_index: int) -> Text:
        line = super().get_line(line_index)
        for start, end, _ in self._tokens(line_index):
            line.stylize(self.get_component_rich_style("prompt--token"), start, end)
        return line


class CommandMenu(Static):
    """The commands or files that fit what is typed, over the prompt. Hidden when there are none."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._found: Sequence[Choice] = []
        self._place = 0
        self.display = False

    def show(self, found: Sequence[Choice]) -> None:
        if found != self._found:
            self._found = found
            self._place = 0
        self.display = bool(found)
        if found:
            self._draw()

    def move(self, step: int) -> None:
        self._place = (self._place + step) % len(self._found)
        self._draw()

    def chosen(self, found: Sequence[Choice]) -> Choice | None:
        """What is pointed at, if the menu is open and has what was found."""
        if not self.display or not found or found != self._found:
            return None
        return self._found[self._place]

    @property
    def what_enter_does(self) -> str:
        one = self._found[self._place]
        if isinstance(one, Place):
            return "open" if one.is_folder else "attach"
        return "run" if one.is_whole else "complete"

    def _draw(self) -> None:
        pairs = [
            (f"@{clean_line(one.typed)}", "")
            if isinstance(one, Place)
            else (one.name.ljust(12), one.help)
            for one in self._found
        ]
        width = max(len(name) + len(help) for name, help in pairs) + 2
        rows = []
        most = max(1, min(MOST_ROWS, self.screen.size.height - _ROWS_AROUND))
        first = max(0, min(self._place - most // 2, len(pairs) - most))
        for index, (name, help) in list(enumerate(pairs))[first : first + most]:
            here = index == self._place
            row = Content.assemble(
                (f" {name} ", "bold $primary" if here else "$primary"),
                (help.ljust(width - len(name)), "$text" if here else "$text-muted"),
            )
            rows.append(row.stylize_before("on $panel") if here else row)
        if below := len(pairs) - first - len(rows):
            rows.append(Content.styled(f" ↓ {below} more", "$text-muted"))
        self.update(Content("\n").join(rows))
