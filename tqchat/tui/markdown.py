"""Markdown to lines of styled text. One piece (see `chunks`) at a time, no widget involved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.content import Content, Span

from tqchat.tui.chunks import Chunk, Splitter
from tqchat.tui.parser import parser
from tqchat.tui.rows import EMPTY, Block, Code, Label, Line, Row, Rule, lines, rows_of
from tqchat.tui.text import clean, clean_line

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

CODE_FILL = "on $code"
CODE_MARGIN = Content.styled("  ", CODE_FILL)
_LONGEST_PARSED = 16_000  # characters; some inline syntax is parsed in quadratic time
_LONGEST_HIGHLIGHTED = 60_000
_BULLETS = "•◦▪"
_HEADINGS = {1: "bold $primary", 2: "bold $primary", 3: "bold $text"}
_INLINE = {"strong": "bold", "em": "italic", "s": "strike"}


def render(text: str) -> list[Block]:
    """A whole text, already `clean`, as blocks with blank lines between them."""
    splitter = Splitter()
    blocks: list[Block] = []
    for chunk in [*splitter.feed(text), *splitter.finish()]:
        blocks += render_chunk(chunk)
    return blocks


def render_chunk(chunk: Chunk) -> list[Block]:
    blocks: list[Block] = [Line(EMPTY)] if chunk.gap else []
    if chunk.kind == "math" or (chunk.kind != "fence" and len(chunk.text) > _LONGEST_PARSED):
        return [*blocks, *lines(chunk.text)]
    from markdown_it.tree import SyntaxTreeNode

    tree = SyntaxTreeNode(parser().parse(chunk.text))
    return blocks + _Renderer(chunk.number).blocks(tree.children, _Margin())


def code_label(code: Code, margin: Content = EMPTY) -> Label:
    return Label(code, margin + CODE_MARGIN, CODE_FILL)


def code_line(text: Content, margin: Content = EMPTY) -> Line:
    before = margin + CODE_MARGIN
    return Line(text, before, before, CODE_FILL)


class _Margin:
    """What stands left of a block: `first` once (a bullet, say), then `rest`."""

    def __init__(self, first: Content = EMPTY, rest: Content = EMPTY) -> None:
        self._first: Content | None = first
        self.rest = rest

    def take(self) -> Content:
        first, self._first = self._first, None
        return self.rest if first is None else first

    def within(self, first: Content, rest: Content) -> "_Margin":
        return _Margin(self.take() + first, self.rest + rest)


class _Renderer:
    def __init__(self, number: int | None) -> None:
        self._number = number
        self._depth = 0

    def blocks(self, nodes: Sequence["SyntaxTreeNode"], margin: _Margin) -> list[Block]:
        made: list[Block] = []
        for index, node in enumerate(nodes):
            if index and not _is_tight(nodes[index - 1], node):
                made.append(Line(EMPTY, margin.rest, margin.rest))
            made += self._block(node, margin)
        return made

    def _block(self, node: "SyntaxTreeNode", margin: _Margin) -> list[Block]:
        match node.type:
            case "paragraph":
                return _text_lines(_inline(node), margin)
            case "heading":
                style = _HEADINGS.get(int(node.tag[1:]), "bold $text-muted")
                return _text_lines(_inline(node).stylize_before(style), margin)
            case "bullet_list" | "ordered_list":
                return self._list(node, margin)
            case "fence" | "code_block":
                return _code(node, margin)
            case "blockquote":
                bar = Content.styled("▎ ", "$quote")
                return self.blocks(node.children, margin.within(bar, bar))
            case "hr":
                return [Rule(margin.take())]
            case "table":
                return [_table(node, margin)]
        return list(lines(clean(node.content), first=margin.take(), rest=margin.rest))

    def _list(self, node: "SyntaxTreeNode", margin: _Margin) -> list[Block]:
        made: list[Block] = []
        ordered = node.type == "ordered_list"
        number = int(node.attrs.get("start", 1)) if ordered else 0
        if ordered and self._depth == 0 and self._number is not None:
            number, self._number = self._number, None
        width = len(f"{number + len(node.children) - 1}. ")
        bullet = f"{_BULLETS[min(self._depth, len(_BULLETS) - 1)]} "
        self._depth += 1
        for index, item in enumerate(node.children):
            if index and not _is_tight(node.children[index - 1].children[-1:], item.children[:1]):
                made.append(Line(EMPTY, margin.rest, margin.rest))
            marker = f"{number + index}. ".rjust(width) if ordered else bullet
            inner = margin.within(Content.styled(marker, "$marker"), Content(" " * len(marker)))
            made += self.blocks(item.children, inner) or [Line(EMPTY, inner.take())]
        self._depth -= 1
        return made


def _is_tight(before: object, after: object) -> bool:
    """Whether two blocks follow each other without a blank line, as in a list without any."""
    pair = [one[0] if isinstance(one, Sequence) and one else one for one in (before, after)]
    return all(
        getattr(one, "hidden", False) or getattr(one, "type", "").endswith("_list") for one in pair
    )


def _text_lines(content: Content, margin: _Margin) -> list[Block]:
    return [
        Line(line, margin.take(), margin.rest) for line in content.split("\n", allow_blank=True)
    ]


def _inline(node: "SyntaxTreeNode") -> Content:
    text: list[str] = []
    spans: list[Span] = []
    length = 0

    def add(piece: str, style: str = "") -> None:
        nonlocal length
        piece = clean(piece)
        text.append(piece)
        if style:
            spans.append(Span(length, length + len(piece), style))
        length += len(piece)

    def walk(children: Sequence["SyntaxTreeNode"]) -> None:
        for child in children:
            start = length
            match child.type:
                case "softbreak" | "hardbreak":
                    add("\n")
                case "code_inline":
                    add(child.content, "$inline-code")
                case "link" | "image":
                    walk(child.children)
                    label = "".join(text)[start:]
                    spans.append(Span(start, length, "underline"))
                    address = str(child.attrs.get("href") or child.attrs.get("src") or "")
                    if address and address not in (label, f"mailto:{label}"):
                        add(f" ({address})", "$text-muted")
                case kind if kind in _INLINE:
                    walk(child.children)
                    spans.append(Span(start, length, _INLINE[kind]))
                case _:
                    if child.children:
                        walk(child.children)
                    else:
                        add(child.content)

    for inline in node.children:
        walk(inline.children)
    return Content("".join(text), sorted(spans, key=lambda span: (span.start, -span.end)))


def _code(node: "SyntaxTreeNode", margin: _Margin) -> list[Block]:
    language = clean_line(node.info).split(" ")[0] if node.type == "fence" else ""
    code = clean(node.content).rstrip("\n")
    margin_text = margin.take()
    made: list[Block] = []
    if node.type == "fence":
        made.append(code_label(Code(language, code), margin_text))
        margin_text = margin.rest
    for line in highlight(code, language).split("\n", allow_blank=True):
        made.append(code_line(line, margin_text))
        margin_text = margin.rest
    return made


def highlight(code: str, language: str) -> Content:
    """Code in colours, if the language is known and the code not endless."""
    if not language or len(code) > _LONGEST_HIGHLIGHTED:
        return Content.styled(code, CODE_FILL)
    from tqchat.tui.syntax import highlight_code

    return highlight_code(code, language).stylize_before(CODE_FILL)


def _table(node: "SyntaxTreeNode", margin: _Margin) -> "Table":
    rows: list[list[Content]] = []
    right: list[bool] = []
    for part in node.children:
        for row in part.children:
            rows.append([_inline(cell) for cell in row.children])
            if part.type == "thead":
                right = ["right" in str(cell.attrs.get("style", "")) for cell in row.children]
    return Table(rows[0], rows[1:], right, margin.take(), margin.rest)


@dataclass(frozen=True, slots=True)
class Table:
    """A table without borders: bold head, a rule under it, columns two cells apart."""

    head: list[Content]
    body: list[list[Content]]
    right: list[bool]
    first: Content = EMPTY
    rest: Content = EMPTY

    def rows(self, width: int) -> list[Row]:
        room = width - self.first.cell_length - 2 * (len(self.head) - 1)
        if room < 4 * len(self.head):
            return self._narrow(width)
        wanted = [
            max(max(map(cell_len, cell.plain.split("\n"))) for cell in column)
            for column in zip(self.head, *self.body, strict=True)
        ]
        widths = _fit(wanted, room)
        made = self._row([cell.stylize_before("bold") for cell in self.head], widths, self.first)
        rule = "  ".join("─" * width for width in widths)
        made.append(Row(self.rest + Content.styled(rule, "$rule"), skip=len(self.rest)))
        for cells in self.body:
            made += self._row(cells, widths, self.rest)
        return made

    def _row(self, cells: list[Content], widths: list[int], margin: Content) -> list[Row]:
        columns = [
            [row.content for row in rows_of(map(Line, cell.split("\n", allow_blank=True)), width)]
            for cell, width in zip(cells, widths, strict=True)
        ]
        made = []
        for index in range(max(map(len, columns))):
            parts: list[Content] = []
            for column, width, right in zip(columns, widths, self.right, strict=True):
                piece = column[index] if index < len(column) else EMPTY
                space = max(width - piece.cell_length, 0)
                parts.append(piece.pad_left(space) if right else piece.pad_right(space))
            made.append(Row(margin + Content("  ").join(parts).rstrip(), skip=len(margin)))
        return made

    def _narrow(self, width: int) -> list[Row]:
        """Too narrow for columns: each row as "head: cell" lines."""
        made: list[Block] = []
        for cells in self.body or [self.head]:
            for name, cell in zip(self.head, cells, strict=True):
                line = name.stylize_before("bold") + Content(": ") + cell
                made += [Line(part, self.rest, self.rest) for part in line.split("\n")]
            made.append(Line(EMPTY))
        return rows_of(made[:-1], width)


def _fit(wanted: list[int], room: int) -> list[int]:
    """Column widths: what each wants, the widest giving way until all fit."""
    widths = [max(want, 1) for want in wanted]
    while (excess := sum(widths) - room) > 0:
        widest = max(widths)
        level = max((width for width in widths if width < widest), default=0)
        those = [index for index, width in enumerate(widths) if width == widest]
        cut = min(widest - level, -(-excess // len(those)))
        for index in those:
            widths[index] -= cut
    return widths
