"""The live figures: four small panels at the side, or two lines when there is no room for them.

A panel has a fixed size and draws what has changed, so that new figures cost no layout.
"""

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from tqchat.engine.events import Memory
from tqchat.tui.figures import bar, rate_text, seconds_text, sparkline, stacked_bar
from tqchat.tui.rows import EMPTY
from tqchat.tui.state import Figures
from tqchat.units import bytes_text

_NARROWEST = 28
# Shares of what there is from which on a colour warns.
_TIGHT, _FULL = 0.80, 0.90
_SPARK = "$primary 70%"


def _warning(share: float, calm: str) -> str:
    return "$error" if share > _FULL else "$warning" if share > _TIGHT else calm


class Panel(Static):
    """A click folds it to its heading and opens it again."""

    def __init__(self, title: str) -> None:
        super().__init__(markup=False)
        self._title = title
        self._figures = Figures()
        self._shown = EMPTY

    @property
    def columns(self) -> int:
        return max(self.size.width, _NARROWEST)

    def draw(self, figures: Figures) -> None:
        self._figures = figures
        folded = self.has_class("-folded")
        title = Content.styled(self._heading(figures), "bold $text-muted")
        if folded:
            title += Content.styled(" …", "$text-muted")
        shown = Content("\n").join([title, *([] if folded else self._lines(figures))])
        if not shown.is_same(self._shown):
            self._shown = shown
            self.update(shown, layout=False)

    def on_click(self) -> None:
        self.toggle_class("-folded")
        self.draw(self._figures)

    def on_resize(self) -> None:
        self.draw(self._figures)

    def _heading(self, figures: Figures) -> str:
        return self._title

    def _lines(self, figures: Figures) -> list[Content]:
        raise NotImplementedError

    def _pair(self, name: str, value: str, style: str = "$text") -> Content:
        """A name at the left, its value at the right."""
        room = self.columns - len(name)
        return Content.assemble((name, "$text-muted"), (value.rjust(room), style))

    def _big(self, value: str, unit: str, note: str = "") -> Content:
        room = self.columns - len(value) - len(unit) - 1
        return Content.assemble(
            (value, "bold $text"), (f" {unit}", "$text-muted"), (note.rjust(room), "$text-muted")
        )


class SpeedPanel(Panel):
    def _lines(self, figures: Figures) -> list[Content]:
        usage = figures.usage
        first = seconds_text(usage.ttft_s) if usage.ttft_s else "-"
        reading = f"{rate_text(usage.prefill_tps)} tok/s" if usage.prefill_tps else "-"
        return [
            self._big(rate_text(usage.decode_tps), "tok/s"),
            sparkline(figures.speeds, self.columns, _SPARK),
            self._pair("first token", first),
            self._pair("reading", reading),
        ]


class CachePanel(Panel):
    def _heading(self, figures: Figures) -> str:
        return f"{self._title} · {figures.kv}" if figures.kv else self._title

    def _lines(self, figures: Figures) -> list[Content]:
        cache = figures.cache
        if cache is None or not cache.kv_bytes_fp16:
            return [self._big("-", ""), bar(0, self.columns), self._pair("in fp16", "-")]
        share = cache.kv_bytes / cache.kv_bytes_fp16
        smaller = f"{1 / share:.1f}x smaller" if share < 0.95 and cache.kv_bytes else ""
        value, unit = bytes_text(cache.kv_bytes).split(" ")
        return [
            self._big(value, unit, smaller),
            bar(share, self.columns, "$memory-kv"),
            self._pair("in fp16", bytes_text(cache.kv_bytes_fp16)),
        ]


class ContextPanel(Panel):
    def _lines(self, figures: Figures) -> list[Content]:
        cache = figures.cache
        if cache is None or not cache.context:
            return [self._big("-", ""), bar(0, self.columns)]
        share = cache.tokens / cache.context
        value = f"{cache.tokens:,}"
        return [
            self._big(value, f"of {cache.context:,}", f"{share:.0%}"),
            bar(share, self.columns, _warning(share, "$primary")),
        ]


class MemoryPanel(Panel):
    def _lines(self, figures: Figures) -> list[Content]:
        memory = figures.memory
        if memory is None or not memory.limit:
            return [self._big("-", ""), bar(0, self.columns)]
        value, unit = bytes_text(memory.free).split(" ")
        lines = [
            self._big(value, f"{unit} free", f"of {bytes_text(memory.limit)}"),
            _memory_bar(memory, self.columns),
        ]
        for name, size, style in _memory_parts(memory):
            figure = bytes_text(size)
            lines.append(
                Content.assemble(("■ ", style), (name, "$text-muted"))
                + Content(figure.rjust(self.columns - 2 - len(name)))
            )
        return lines


def _memory_parts(memory: Memory) -> list[tuple[str, int, str]]:
    """What takes memory: name, bytes, colour. The last is what other programs hold of the limit."""
    ours = memory.weights + memory.kv + memory.other
    return [
        ("weights", memory.weights, "$memory-weights"),
        ("KV cache", memory.kv, "$memory-kv"),
        ("other", memory.other, "$memory-other"),
        ("elsewhere", max(memory.limit - memory.free - ours, 0), "$memory-elsewhere"),
    ]


def _memory_bar(memory: Memory | None, width: int) -> Content:
    """All that takes memory, then what is free: in a warning colour once that is little."""
    if memory is None or not memory.limit:
        return bar(0, width)
    shares = [(size / memory.limit, style) for _, size, style in _memory_parts(memory)]
    return stacked_bar(shares, width, _warning(1 - memory.free / memory.limit, "$track"))


class SidePanel(Vertical):
    """All four, for a screen that is wide enough. Hidden, it is not drawn."""

    def __init__(self) -> None:
        super().__init__()
        self._figures = Figures()

    def compose(self) -> ComposeResult:
        yield SpeedPanel("Speed")
        yield ContextPanel("Context")
        yield CachePanel("KV cache")
        yield MemoryPanel("Memory")

    def draw(self, figures: Figures) -> None:
        self._figures = figures
        if self.display:
            self.on_show()

    def on_show(self) -> None:
        for panel in self.query_children(Panel):
            panel.draw(self._figures)


class CompactStatus(Static):
    """The same in two lines, for a screen that is not."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._figures = Figures()
        self._shown = EMPTY

    def draw(self, figures: Figures) -> None:
        self._figures = figures
        if self.display:
            self.on_show()

    def on_show(self) -> None:
        figures = self._figures
        usage, cache, memory = figures.usage, figures.cache, figures.memory
        first = seconds_text(usage.ttft_s) if usage.ttft_s else "-"
        above: list[Content | str | tuple[str, str]] = [
            (rate_text(usage.decode_tps).rjust(5), "bold $text"),
            (" tok/s ", "$text-muted"),
            sparkline(figures.speeds, 12, _SPARK),
            ("  first ", "$text-muted"),
            first,
            ("   KV ", "$text-muted"),
        ]
        below: list[Content | str | tuple[str, str]] = []
        if cache is None:
            above.append("-")
        else:
            above.append(bytes_text(cache.kv_bytes))
            above.append((f" of {bytes_text(cache.kv_bytes_fp16)} in fp16", "$text-muted"))
            share = cache.tokens / cache.context if cache.context else 0.0
            below += [
                ("context ", "$text-muted"),
                bar(share, 12, _warning(share, "$primary")),
                f" {cache.tokens:,}",
                (f" of {cache.context:,}", "$text-muted"),
            ]
        if memory is not None and memory.limit:
            below += [
                ("   memory ", "$text-muted"),
                _memory_bar(memory, 12),
                f" {bytes_text(memory.free)}",
                (" free", "$text-muted"),
            ]
        shown = Content("\n").join([Content.assemble(*above), Content.assemble(*below)])
        if not shown.is_same(self._shown):
            self._shown = shown
            self.update(shown, layout=False)
