"""The single lines at the edges: what is loaded, what is going on, which keys matter now."""

import math
from collections.abc import Sequence

from textual import events
from textual.content import Content
from textual.widgets import Static

from tqchat.engine.events import ModelInfo
from tqchat.tui.figures import bar, rate_text, seconds_text
from tqchat.tui.rows import EMPTY
from tqchat.tui.state import Progress
from tqchat.tui.text import clean_line
from tqchat.units import bytes_text

_SPINNER = "⠋⠙⠸⠴⠦⠇"
_NARROWEST_BAR = 8
_WIDEST_BAR = 24


class Header(Static):
    """The model and how it runs."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._model: ModelInfo | None = None
        self._state = ("", "")

    def draw(self, model: ModelInfo | None, state: str, style: str) -> None:
        if (model, (state, style)) != (self._model, self._state):
            self._model, self._state = model, (state, style)
            self._draw()

    def on_resize(self, event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.size.width
        state, style = self._state
        parts: list[tuple[str, str]] = [("tqchat", "bold $primary")]
        if self._model is not None:
            parts.append(("   " + clean_line(self._model.name), "bold $text"))
            device = clean_line(self._model.device)
            parts.append((f"   {device} · {self._model.kv} KV cache", "$text-muted"))
        room = width - len(state) - 3
        left = Content.assemble(*parts).truncate(max(room, 0), ellipsis=True)
        space = max(width - left.cell_length - len(state) - 2, 1)
        right = Content.assemble(("● ", style), (state, "$text-muted"))
        self.update(left + Content(" " * space) + right, layout=False)


class Activity(Static):
    """What is going on right now, or a passing hint."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._frame = 0
        self._shown = EMPTY

    def show_idle(self, hint: str = "") -> None:
        self._put(Content.styled(hint, "$text-muted"))

    def tick(self) -> None:
        """Moves the spinner on by one."""
        self._frame = (self._frame + 1) % len(_SPINNER)

    def show_loading(self, progress: Progress) -> None:
        parts = [self._spinner(), (f"{clean_line(progress.label)}  ", "$text")]
        if not progress.total:
            self._put(Content.assemble(*parts))
            return
        figures = f"{bytes_text(progress.done)} of {bytes_text(progress.total)}"
        self._put_progress(parts, progress, figures, f"{bytes_text(progress.rate)}/s")

    def show_reading(self, progress: Progress) -> None:
        figures = f"{progress.done:,} of {progress.total:,} tokens"
        parts = [self._spinner(), ("Reading  ", "$text")]
        self._put_progress(parts, progress, figures, f"{rate_text(progress.rate)} tok/s")

    def show_answering(self, tokens: int, seconds: float) -> None:
        figures = (
            f" · {tokens:,} token{'s' * (tokens > 1)} · {seconds_text(seconds)}" if tokens else ""
        )
        self._put(
            Content.assemble(self._spinner(), ("Answering", "$text"), (figures, "$text-muted"))
        )

    def show_busy(self, text: str) -> None:
        self._put(Content.assemble(self._spinner(), (text, "$text")))

    def _put(self, line: Content) -> None:
        if not line.is_same(self._shown):
            self._shown = line
            # A hint alone may take more than one row; all else costs no layout.
            grows = line.cell_length > self.content_size.width
            self.update(line, layout=grows or self.size.height > 1)

    def _spinner(self) -> tuple[str, str]:
        return f"{_SPINNER[self._frame]} ", "$primary"

    def _put_progress(
        self, parts: list[tuple[str, str]], progress: Progress, figures: str, rate: str
    ) -> None:
        seconds = progress.seconds_left
        left = [] if seconds is None else [f"{_countdown(seconds)} left"]
        share = f" {progress.share:.0%}"
        label = Content.assemble(*parts).truncate(max(self.size.width - 40, 10), ellipsis=True)
        # As much as there is room for beside a bar; how long it takes matters most.
        for facts in ([share, figures, rate, *left], [share, figures, *left], [share, *left]):
            told = Content.styled(" · ".join(facts if left else facts[:2]), "$text-muted")
            room = self.size.width - label.cell_length - told.cell_length
            if room >= _NARROWEST_BAR:
                break
        line = label + bar(progress.share, max(min(room, _WIDEST_BAR), 0)) + told
        self._put(line.truncate(self.size.width, ellipsis=True))


def _countdown(seconds: float) -> str:
    """Whole seconds: tenths of an estimate would only flicker."""
    return f"{max(math.ceil(seconds), 1)} s" if seconds < 9 else seconds_text(seconds)


class KeyHints(Static):
    """The few keys that matter now."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._keys: Sequence[tuple[str, str]] = ()

    def draw(self, keys: Sequence[tuple[str, str]]) -> None:
        if keys != self._keys:
            self._keys = keys
            self._draw()

    def on_resize(self, event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        """The first ones, as many as there is room for."""
        line, gap = EMPTY, ""
        for key, meaning in self._keys:
            one = Content.assemble(gap, (key, "$primary"), (f" {meaning}", "$text-muted"))
            if line.cell_length + one.cell_length > self.content_size.width:
                break
            line, gap = line + one, "   "
        self.update(line, layout=False)
