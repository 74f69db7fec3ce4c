"""The conversation: one widget that draws the rows in sight, however many there are.

Nothing is mounted per message and growing text costs no layout: only the rows that show are drawn.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment
from textual import events
from textual.geometry import Offset, Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from tqchat.tui.entries import Answer, Entry, Thought
from tqchat.tui.rows import Code, Row

WIDEST = 96
"""Cells: longer lines are tiring to read."""
_MOST_DRAWN = 1_000


class Conversation(ScrollView, can_focus=False):
    """A column of entries, a blank row between them.

    It stays at the end while it grows, until the reader scrolls up; it follows again once the
    reader has come back down.
    """

    @dataclass
    class CodePressed(Message):
        code: Code

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[Entry] = []
        self._starts: list[int] = []
        self._rows: list[Sequence[Row]] = []
        self._laid_out_width = 0
        # What was drawn last of the rows in sight, by row.
        self._drawn: dict[int, tuple[Row | None, Strip]] = {}
        self._following = True
        self._thumb = (0, 0, 0)

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

    @property
    def codes(self) -> list[Code]:
        """All blocks of code, in order."""
        rows = (row for rows in self._rows for row in rows)
        return [row.target for row in rows if isinstance(row.target, Code)]

    def toggle_thoughts(self) -> bool:
        """Opens what models thought, or folds it if the last is open; False: there is none."""
        thoughts = [
            (place, entry.thought)
            for place, entry in enumerate(self._entries)
            if isinstance(entry, Answer) and entry.thought is not None
        ]
        if not thoughts:
            return False
        folded = not thoughts[-1][1].folded
        for _, thought in thoughts:
            thought.folded = folded
        self._lay_out(thoughts[0][0])
        return True

    def on_click(self, event: events.Click) -> None:
        y = event.y + self.scroll_offset.y
        row, place = self._row(y), self._place(y)
        if row is None or place is None or self.text_selection is not None:
            return
        if isinstance(row.target, Code):
            self.post_message(self.CodePressed(row.target))
        elif isinstance(row.target, Thought):
            row.target.folded = not row.target.folded
            self._lay_out(place[0])

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        self._move_thumb()
        if round(old_value) != round(new_value):
            self.refresh(self.size.region)
        # Only scrolling gets here; a box that shrinks or text that grows does not.
        self._following = new_value >= self.max_scroll_y

    def _move_thumb(self) -> None:
        """Has the scrollbar drawn anew if that can be seen; it is drawn in eighths of a cell."""
        if not self.show_vertical_scrollbar:
            return
        window, total = self.size.height, self.virtual_size.height
        eighths = 8 * window / max(total, 1)
        thumb = window, round(eighths * self.scroll_y), round(eighths * window)
        if thumb != self._thumb:
            self._thumb = thumb
            self.vertical_scrollbar.window_virtual_size = total
            self.vertical_scrollbar.window_size = window
            self.vertical_scrollbar.position = self.scroll_y

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
            scrolled = self.show_vertical_scrollbar
            self.set_reactive(Widget.virtual_size, size)
            if scrolled and self.max_scroll_y > 0:
                self.scroll_y = self.validate_scroll_y(self.scroll_y)
            else:
                self._scroll_update(size)
        if following:
            self.show_end()
        self._move_thumb()
        self._refresh_changed()

    def _refresh_changed(self) -> None:
        """Draws the rows in sight that are not as they were drawn last. (Scrolling draws all.)"""
        top = self.scroll_offset.y
        for y in range(top, top + self.size.height):
            drawn = self._drawn.get(y)
            if drawn is None or not _is_same(drawn[0], self._row(y)):
                self.refresh(Region(0, y - top, self.size.width, 1))

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

    def notify_style_update(self) -> None:
        self._drawn.clear()
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        """As they were drawn before, where nothing has changed. Strips remember what is made of
        them, down to the terminal's codes; they would be made anew if styles were applied here,
        and this widget has none that add to its lines."""
        top, background = self.scroll_offset.y, self.background_colors[1]
        if len(self._drawn) > _MOST_DRAWN:
            self._drawn.clear()
        strips = [self._strip(top + y) for y in crop.line_range]
        for line_filter in self.get_line_filters():
            strips = [strip.apply_filter(line_filter, background) for strip in strips]
        if crop.column_span != (0, self.size.width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def render_line(self, y: int) -> Strip:
        return self._strip(self.scroll_offset.y + y)

    def _strip(self, y: int) -> Strip:
        row = self._row(y)
        selection = self.text_selection
        span = None if selection is None else selection.get_span(y)
        if span is None:
            drawn = self._drawn.get(y)
            if drawn is None or drawn[0] is not row:
                drawn = self._drawn[y] = row, self._draw(row, y, None)
            return drawn[1]
        self._drawn.pop(y, None)
        return self._draw(row, y, span)

    def _draw(self, row: Row | None, y: int, selected: tuple[int, int] | None) -> Strip:
        width, base = self.size.width, self.visual_style
        if row is None:
            return Strip.blank(width, base.rich_style_with_offset(0, y))
        content = row.content
        if selected is not None:
            start, end = selected
            highlight = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            content = content.stylize(highlight, start, len(content) if end == -1 else end)
        margin = max((self.container_size.width - self.column_width) // 2, 0)
        segments = [Segment(" " * margin, base.rich_style)]
        x = 0
        for text, style in content.render(base, end="", parse_style=self._get_style):
            segments.append(Segment(text, (base + style).rich_style_with_offset(x, y)))
            x += len(text)
        used = content.cell_length
        room = self.column_width - used - row.tail.cell_length
        if row.fill and room > 0:
            fill = (base + self._get_style(row.fill)).rich_style_with_offset(x, y)
            segments.append(Segment(" " * room, fill))
            for text, style in row.tail.render(base, end="", parse_style=self._get_style):
                segments.append(Segment(text, (base + style).rich_style_with_offset(x, y)))
            used = self.column_width
        return Strip(segments, margin + used).extend_cell_length(width, base.rich_style)

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


def _is_same(before: Row | None, now: Row | None) -> bool:
    if before is None or now is None or before is now:
        return before is now
    return before.content.is_same(now.content) and (
        (before.fill, before.tail, before.joint) == (now.fill, now.tail, now.joint)
    )
