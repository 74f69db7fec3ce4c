"""The Markdown that is understood: CommonMark, tables and strikethrough, without HTML."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt


@functools.cache
def parser() -> "MarkdownIt":
    """Imported at first use: the first frame does not need it."""
    from markdown_it import MarkdownIt

    # HTML is shown as it is written. So are link definitions: the link may be in another piece.
    made = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return made.disable(["reference", "html_block", "html_inline"])
