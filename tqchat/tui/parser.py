"""The Markdown that is understood: CommonMark, tables and strikethrough, without HTML. Formulas in
TeX are left as they are written."""

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline

_FORMULA = re.compile(
    r"\\\(.{1,1000}?\\\)|\\\[.{1,1000}?\\\]|\$\$.{1,1000}?\$\$"
    r"|\$(?=[^\s$])(?:[^$\n\\]|\\.)*?(?<=[^\s\\])\$(?!\d)",
    re.DOTALL,
)


@functools.cache
def parser() -> "MarkdownIt":
    """Imported at first use: the first frame does not need it."""
    from markdown_it import MarkdownIt

    # HTML is shown as it is written. So are link definitions: the link may be in another piece.
    made = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    made.inline.ruler.at("newline", _newline)
    made.inline.ruler.before("escape", "formula", _formula)
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


def _formula(state: "StateInline", silent: bool) -> bool:
    """A formula: its backslashes, stars and underscores mean something else than in Markdown."""
    if state.src[state.pos] not in "\\$":
        return False
    found = _FORMULA.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        state.push("formula", "", 0).content = found.group()
    state.pos = found.end()
    return True
