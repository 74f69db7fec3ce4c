"""The conversation: one widget that draws the rows in sight, however many there are.

Nothing is mounted per message and growing text costs no layout: only the rows that show are drawn.
"""

from bisect import bisect_right
from collections.abc import Sequence

from rich.segment import Segment
from textual import events
from textual.geometry import Offset, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from tqchat.tui.entries import Entry
from tqchat.tui.rows import Row

WIDEST = 96
"""Cells: longer lines are tiring to read."""


class Conversation(ScrollView, can_focus=False):
    """A column of entries, a blank row between them.

    It stays at the end while it grows, until the reader scrolls up; it follows again once the
    reader has come back down.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[Entry] = []
        self._starts: list[int] = []
        self._rows: list[Sequence[Row]] = []
        self._laid_out_width = 0
        self._following = True

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries)

    @property
    def column_width(self) -> int:
        return max(min(self.scrollable_content_region.width - 4, WIDEST), 20)

    @property
    def following(self) -> bool:
        """Whether new text is scrolled to: until the reader scrolls up from the end."""
        return self._following

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        # Only scrolling gets here; a box that shrinks or text that grows does not.
        self._following = new_value >= self.max_scroll_y

    def append(self, entry: Entry) -> None:
        self.insert(len(self._entries), entry)

    def insert(self, index: int, entry: Entry) -> None:
        self._entries.insert(index, entry)
        self._lay_out(index)

    def remove_entry(self, entry: Entry) -> None:
        if entry in self._entries:
            index = self._entries.index(entry)
            del self._entries[index]
            self._lay_out(index)

    def update_entry(self, entry: Entry) -> None:
        """The entry has changed: draws it again."""
        if entry in self._entries:
            self._lay_out(self._entries.index(entry))

    def empty(self) -> None:
        self._entries.clear()
        self._lay_out(0)

    def show_end(self) -> None:
        self._following = True
        self.scroll_to(y=self.max_scroll_y, animate=False)

    def _lay_out(self, first: int) -> None:
        """Places the entries from `first` on, and keeps the end in sight if it was."""
        if not self.size.width:
            return
        following = self.following
        del self._starts[first:]
        del self._rows[first:]
        bottom = self._starts[-1] + len(self._rows[-1]) if first else 0
        for entry in self._entries[first:]:
            self._starts.append(bottom + 1)
            self._rows.append(entry.rows(self.column_width))
            bottom += 1 + len(self._rows[-1])
        size = Size(self.scrollable_content_region.width, bottom + 1)
        if size != self.virtual_size:
            self.set_reactive(Widget.virtual_size, size)
            self._scroll_update(size)
        if following:
            self.show_end()
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        following, place = self.following, self._place(self.scroll_offset.y)
        if self.column_width != self._laid_out_width:
            self._laid_out_width = self.column_width
            self.screen.clear_selection()
            self._lay_out(0)
        if following:
            self.show_end()
        elif place is not None:
            # What was at the top stays at the top, though it may have wrapped differently.
            index, share = place
            self.scroll_to(y=self._starts[index] + share * len(self._rows[index]), animate=False)

    def _place(self, y: int) -> tuple[int, float] | None:
        """Which entry is at row `y`, and how far into it that is (0 to 1)."""
        index = bisect_right(self._starts, y) - 1
        if index < 0:
            return None
        return index, min((y - self._starts[index]) / max(len(self._rows[index]), 1), 1.0)

    def _row(self, y: int) -> Row | None:
        index = bisect_right(self._starts, y) - 1
        if index < 0 or y - self._starts[index] >= len(self._rows[index]):
            return None
        return self._rows[index][y - self._starts[index]]

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        y += self.scroll_offset.y
        base = self.visual_style
        row = self._row(y)
        if row is None:
            return Strip.blank(width, base.rich_style_with_offset(0, y))
        content = row.content
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            start, end = span
            highlight = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            content = content.stylize(highlight, start, len(content) if end == -1 else end)
        margin = max((self.container_size.width - self.column_width) // 2, 0)
        segments = [Segment(" " * margin, base.rich_style)]
        x = 0
        for text, style in content.render(base, end="", parse_style=self._get_style):
            segments.append(Segment(text, (base + style).rich_style_with_offset(x, y)))
            x += len(text)
        used = content.cell_length
        if row.fill and used < self.column_width:
            fill = (base + self._get_style(row.fill)).rich_style_with_offset(x, y)
            segments.append(Segment(" " * (self.column_width - used), fill))
            used = self.column_width
        strip = Strip(segments, margin + used)
        return strip.extend_cell_length(width, base.rich_style)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text that is selected, as it was before it was wrapped."""
        last = self.virtual_size.height - 1
        start = selection.start or Offset(0, 0)
        end = selection.end or Offset(10**9, last)
        parts: list[str] = []
        for y in range(start.y, min(end.y, last) + 1):
            row = self._row(y)
            text = row.content.plain if row else ""
            left = max(start.x if y == start.y else 0, row.skip if row else 0)
            if parts or y > start.y:
                parts.append(row.joint if row else "\n")
            parts.append(text[left : end.x if y == end.y else None])
        return "".join(parts).strip("\n"), "\n"
