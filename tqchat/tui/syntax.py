"""Syntax highlighting in the theme's colours. Pygments comes with it, so it is imported late."""

from pygments.token import Token  # type: ignore[import-untyped]
from textual.content import Content
from textual.highlight import HighlightTheme, highlight


class _Colours(HighlightTheme):
    STYLES = {  # noqa: RUF012
        Token.Comment: "$text-muted italic",
        Token.Keyword: "$syntax-keyword",
        Token.Operator.Word: "$syntax-keyword",
        Token.Literal.String: "$syntax-string",
        Token.Literal.Number: "$syntax-number",
        Token.Keyword.Constant: "$syntax-number",
        Token.Name.Builtin: "$syntax-name",
        Token.Name.Function: "$syntax-name",
        Token.Name.Class: "$syntax-name",
        Token.Name.Decorator: "$syntax-name",
        Token.Name.Tag: "$syntax-keyword",
        Token.Name.Attribute: "$syntax-name",
        Token.Generic.Inserted: "$success",
        Token.Generic.Deleted: "$error",
        Token.Generic.Heading: "bold",
        Token.Generic.Subheading: "bold",
    }


def highlight_code(code: str, language: str) -> Content:
    """Plain where the language is not known."""
    return highlight(code, language=language, theme=_Colours)
