"""The Markdown that is understood: CommonMark, tables and strikethrough, without HTML."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline


@functools.cache
def parser() -> "MarkdownIt":
    """Imported at first use: the first frame does not need it."""
    from markdown_it import MarkdownIt

    # HTML is shown as it is written. So are link definitions: the link may be in another piece.
    made = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    made.inline.ruler.at("newline", _newline)
    return made.disable(["reference", "html_block", "html_inline"])


def _newline(state: "StateInline", silent: bool) -> bool:
    """A line ends. What the next one is indented by stays: it may be code without a fence."""
    if state.src[state.pos] != "\n":
        return False
    if not silent:
        state.pending = state.pending.rstrip(" ")
        state.push("softbreak", "br", 0)
    state.pos += 1
    return True
