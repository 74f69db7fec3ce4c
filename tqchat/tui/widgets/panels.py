"""The live figures: four small panels at the side, or two lines when there is no room for them."""

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from tqchat.engine.events import Memory
from tqchat.tui.figures import bar, rate_text, seconds_text, sparkline, stacked_bar
from tqchat.tui.state import Figures
from tqchat.units import bytes_text

WIDTH = 28
_TIGHT = 0.10
_FULL = 0.90
_SPARK = "$primary 70%"


def _pair(name: str, value: str, width: int = WIDTH, style: str = "$text") -> Content:
    """A name at the left, its value at the right."""
    return Content.assemble((name, "$text-muted"), (value.rjust(width - len(name)), style))


def _big(value: str, unit: str, note: str = "") -> Content:
    room = WIDTH - len(value) - len(unit) - 1
    return Content.assemble(
        (value, "bold $text"), (f" {unit}", "$text-muted"), (note.rjust(room), "$text-muted")
    )


class Panel(Static):
    """A panel of fixed size: drawing it again never moves anything."""

    def __init__(self, title: str) -> None:
        super().__init__(markup=False)
        self._title = title

    def draw(self, figures: Figures) -> None:
        title = Content.styled(self._heading(figures), "bold $text-muted")
        self.update(Content("\n").join([title, *self._lines(figures)]), layout=False)

    def _heading(self, figures: Figures) -> str:
        return self._title

    def _lines(self, figures: Figures) -> list[Content]:
        raise NotImplementedError


class SpeedPanel(Panel):
    def _lines(self, figures: Figures) -> list[Content]:
        usage = figures.usage
        first = seconds_text(usage.ttft_s) if usage.ttft_s else "-"
        reading = f"{rate_text(usage.prefill_tps)} tok/s" if usage.prefill_tps else "-"
        return [
            _big(rate_text(usage.decode_tps), "tok/s"),
            sparkline(figures.speeds, WIDTH, _SPARK),
            _pair("first token", first),
            _pair("reading", reading),
        ]


class CachePanel(Panel):
    def _heading(self, figures: Figures) -> str:
        return f"{self._title} · {figures.kv}" if figures.kv else self._title

    def _lines(self, figures: Figures) -> list[Content]:
        cache = figures.cache
        if cache is None or not cache.kv_bytes_fp16:
            return [_big("-", ""), bar(0, WIDTH), _pair("in fp16", "-")]
        share = cache.kv_bytes / cache.kv_bytes_fp16
        smaller = f"{1 / share:.1f}x smaller" if share < 0.95 and cache.kv_bytes else ""
        value, unit = bytes_text(cache.kv_bytes).split(" ")
        return [
            _big(value, unit, smaller),
            bar(share, WIDTH, "$memory-kv"),
            _pair("in fp16", bytes_text(cache.kv_bytes_fp16)),
        ]


class ContextPanel(Panel):
    def _lines(self, figures: Figures) -> list[Content]:
        cache = figures.cache
        if cache is None or not cache.context:
            return [_big("-", ""), bar(0, WIDTH)]
        share = cache.tokens / cache.context
        style = "$error" if share > _FULL else "$primary"
        value = f"{cache.tokens:,}"
        return [
            _big(value, f"of {cache.context:,}", f"{share:.0%}"),
            bar(share, WIDTH, style),
        ]


class MemoryPanel(Panel):
    def _lines(self, figures: Figures) -> list[Content]:
        memory = figures.memory
        if memory is None or not memory.limit:
            return [_big("-", ""), bar(0, WIDTH)]
        value, unit = bytes_text(memory.free).split(" ")
        lines = [
            _big(value, f"{unit} free", f"of {bytes_text(memory.limit)}"),
            _memory_bar(memory, WIDTH),
        ]
        for name, size, style in _memory_parts(memory):
            figure = bytes_text(size)
            lines.append(
                Content.assemble(("■ ", style), (name, "$text-muted"))
                + Content(figure.rjust(WIDTH - 2 - len(name)))
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
    tight = memory.free / memory.limit < _TIGHT
    return stacked_bar(shares, width, "$error" if tight else "$track")


class SidePanel(Vertical):
    """All four, for a screen that is wide enough."""

    def compose(self) -> ComposeResult:
        yield SpeedPanel("Speed")
        yield ContextPanel("Context")
        yield CachePanel("KV cache")
        yield MemoryPanel("Memory")

    def draw(self, figures: Figures) -> None:
        for panel in self.query(Panel):
            panel.draw(figures)


class CompactStatus(Static):
    """The same in two lines."""

    def __init__(self) -> None:
        super().__init__(markup=False)

    def draw(self, figures: Figures) -> None:
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
                bar(share, 12, "$error" if share > _FULL else "$primary"),
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
        self.update(
            Content("\n").join([Content.assemble(*above), Content.assemble(*below)]), layout=False
        )
