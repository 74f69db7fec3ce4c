"""Figures as people read them, and small pictures of them made of block characters."""

from collections.abc import Sequence

from textual.content import Content

from tqchat.units import seconds_text as seconds_text

Part = tuple[float, str]


def rate_text(tokens_per_second: float) -> str:
    """8.24 -> "8.2", 1234.5 -> "1,234", nothing measured -> "-"."""
    if tokens_per_second <= 0:
        return "-"
    return f"{tokens_per_second:,.{1 if tokens_per_second < 99.95 else 0}f}"


def age_text(seconds: float) -> str:
    """90 -> "1 min ago", 200000 -> "2 d ago"."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def bar(share: float, width: int, style: str = "$primary", track: str = "$track") -> Content:
    """A bar `width` cells wide, `share` (0 to 1) of it filled, to half a cell."""
    return stacked_bar([(share, style)], width, track)


def stacked_bar(parts: Sequence[Part], width: int, track: str = "$track") -> Content:
    """Shares (each 0 to 1, in order) side by side on a track of `width` cells.

    A part that is there at all gets a cell, so that a small one beside a large one can be seen.
    """
    cells: list[tuple[str, str]] = []
    left = width
    for share, style in parts:
        if share <= 0 or not left:
            continue
        filled = min(left, max(1, round(min(share, 1.0) * width)))
        cells.append(("━" * filled, style))
        left -= filled
    cells.append(("━" * left, track))
    return Content.assemble(*cells)


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, style: str = "$primary") -> Content:
    """The last `width` values as columns, the highest one full; padded at the left."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0) or 1.0
    columns = "".join(
        _LEVELS[min(len(_LEVELS) - 1, round(value / top * (len(_LEVELS) - 1)))] for value in shown
    )
    return Content.assemble(("▁" * (width - len(shown)), "$track"), (columns, style))
