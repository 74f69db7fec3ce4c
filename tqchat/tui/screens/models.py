"""The models to choose from: those on this machine, and those recommended, to be fetched."""

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from tqchat.engine.events import KVKind
from tqchat.tui.screens.picker import Picker
from tqchat.tui.text import clean_line
from tqchat.units import bytes_text, file_size_text

if TYPE_CHECKING:
    from tqchat.library import Offer

_REDRAW_S = 0.1


class ModelPicker(Picker[str]):
    """Ends with the name of a model that is on this machine, or None. `now`: the one in use;
    `wanted`: one to take or fetch at once."""

    HEADING: ClassVar[str] = "Models"
    KEYS: ClassVar[str] = "Enter takes   Esc closes   or type a Hugging Face id, a folder or a file"

    def __init__(self, kv: KVKind, now: str, wanted: str = "") -> None:
        super().__init__(wanted, "Search, or name a model")
        self._kv = kv
        self._now = now
        self._wanted = wanted
        self._offers: list[Offer] = []
        self._shown: list[Offer] = []
        self._fetching = self._stop = False
        self._drawn = 0.0

    def on_mount(self) -> None:
        self._say("Looking …")
        self.run_worker(self._look, thread=True, exit_on_error=False)
        if self._wanted:
            self._fetch(self._wanted)

    def on_unmount(self) -> None:
        self._stop = True

    def _look(self) -> None:
        # Imports MLX.
        from tqchat import library

        offers = library.offers(self._kv)
        if self.is_attached:
            self.app.call_from_thread(self._looked, offers)

    def _looked(self, offers: "list[Offer]") -> None:
        self._offers = offers
        if not self._fetching:
            self._say()
        self._fill()

    def _fill(self) -> None:
        place = self._list.highlighted or 0
        words = self._input.value.lower().split()
        self._shown = [
            offer
            for offer in self._offers
            if self._fetching or all(word in offer.name.lower() for word in words)
        ]
        self._list.clear_options()
        for offer in self._shown:
            self._list.add_option(Option(self._row(offer, self._width)))
        if self._shown:
            self._list.highlighted = min(place, len(self._shown) - 1)

    def _row(self, offer: "Offer", width: int) -> Content:
        """Two lines: the name and its size, and what to know about it."""
        right = f"  {bytes_text(offer.size):>9}"
        mark = "● " if offer.name == self._now else "  "
        name = Content(mark + clean_line(offer.name)).truncate(
            width - len(right), ellipsis=True, pad=True
        )
        fits = f"{offer.context:,} tokens fit" if offer.context else "does not fit here"
        where = "on this machine" if offer.is_here else "to fetch"
        facts = [fits, where, offer.licence, clean_line(offer.about)]
        below = Content("  " + " · ".join(filter(None, facts))).truncate(width, ellipsis=True)
        below = below.stylize("$text-muted" if offer.context else "$text-error")
        return Content("\n").join([name + Content.styled(right, "$text-muted"), below])

    @on(Input.Changed)
    def _search(self) -> None:
        if not self._fetching:
            self._say()
            self._fill()

    @on(Input.Submitted)
    def _enter(self) -> None:
        place = self._list.highlighted
        if self._shown and place is not None:
            self._take(self._shown[place])
        elif self._input.value.strip():
            self._fetch(self._input.value.strip())

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self._take(self._shown[event.option_index])

    def _take(self, offer: "Offer") -> None:
        if offer.is_here:
            self.dismiss(offer.name)
        else:
            self._fetch(offer.name)

    def _fetch(self, name: str) -> None:
        if not self._fetching:
            self._fetching, self._stop = True, False
            with self.prevent(Input.Changed):
                self._input.value = name
            self._say(f"Looking for {name} …")
            self.run_worker(partial(self._get, name), thread=True, exit_on_error=False)

    def _get(self, name: str) -> None:
        from tqchat import library

        found = library.get(name, self._progress, lambda: self._stop)
        if self.is_attached:
            self.app.call_from_thread(self._got, *found)

    def _progress(self, label: str, done: int, total: int) -> None:
        if not self._stop and monotonic() - self._drawn >= _REDRAW_S:
            self._drawn = monotonic()
            share = f"{100 * done // total}%, " if total else ""
            of = f" of {file_size_text(total)}" if total else ""
            text = f"{label}: {share}{file_size_text(done)}{of}   Esc stops"
            self.app.call_from_thread(self._say, text)

    def _got(self, name: str, fault: str) -> None:
        self._fetching = False
        if name:
            self.dismiss(name)
        else:
            with self.prevent(Input.Changed):
                self._input.value = ""
            self._fill()
            self._say(fault or "Stopped. What was fetched is kept: Enter goes on with it.")

    def action_back(self) -> None:
        if self._fetching:
            self._stop = True
            self._say("Stopping …")
        else:
            self.dismiss(None)
