"""Long texts that the prompt shows as tokens: what was pasted, and files."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tqchat.chat.conversation import Message, Span
from tqchat.tui.text import clean_line
from tqchat.units import file_size_text

TOKEN = re.compile(r"\[([^\[\]:\n]+): (?:[\d,]+ tokens, )?[\d.]+ [KMG]?B\]")
_GONE = re.compile(r"\[([^\[\]\n]+), no longer here\]")
_LONGEST_NAME = 40


def gone(shown: str) -> str:
    """The name of an attachment that a remembered text has lost, or ""."""
    match = _GONE.search(shown)
    return match[1] if match else ""


@dataclass
class Attached:
    """`text` is what the model gets. `tokens` is None until they are counted."""

    name: str
    text: str
    tokens: int | None = None

    @property
    def label(self) -> str:
        counted = "" if self.tokens is None else f"{self.tokens:,} tokens, "
        size = file_size_text(len(self.text.encode(errors="replace")))
        return f"[{self.name}: {counted}{size}]"


class Attachments:
    """All that was attached, by name. Nothing leaves: a message recalled still has its texts."""

    def __init__(self) -> None:
        self._found: dict[str, Attached] = {}
        self._pasted = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def paste(self, text: str) -> Attached:
        self._pasted += 1
        while f"pasted {self._pasted}" in self._found:
            self._pasted += 1
        return self._add(f"pasted {self._pasted}", text)

    def file(self, name: str, text: str) -> Attached:
        """The model is told the name as well."""
        short = re.sub(r"[\[\]:]", "_", clean_line(name))[-_LONGEST_NAME:] or "file"
        unique, number = short, 1
        while unique in self._found:
            number += 1
            unique = f"{short} {number}"
        return self._add(unique, f"{name}:\n\n{text.rstrip()}\n\n")

    def _add(self, name: str, text: str) -> Attached:
        return self._found.setdefault(name, Attached(name, text))

    def spans(self, line: str) -> list[tuple[int, int, Attached]]:
        """Where the tokens of a line begin and end, and what they stand for."""
        if not self._found:
            return []
        return [
            (*match.span(), self._found[match[1]])
            for match in TOKEN.finditer(line)
            if match[1] in self._found
        ]

    def places(self, shown: str) -> tuple[Span, ...]:
        """Where what tokens stand for lies in the expanded text."""
        places, grown = [], 0
        for start, stop, one in self.spans(shown):
            places.append(Span(one.name, start + grown, start + grown + len(one.text)))
            grown += len(one.text) - (stop - start)
        return tuple(place for place in places if place.start < place.stop)

    def folded(self, message: Message) -> str:
        """The message as it was shown, its tokens standing for their texts again."""
        parts, end = [], 0
        for span in message.attached:
            text = message.content[span.start : span.stop]
            parts += [message.content[end : span.start], self._again(span.name, text).label]
            end = span.stop
        return "".join([*parts, message.content[end:]])

    def _again(self, name: str, text: str) -> Attached:
        name = re.sub(r"[\[\]:]", "_", clean_line(name))[-_LONGEST_NAME:] or "file"
        unique, number = name, 1
        while unique in self._found and self._found[unique].text != text:
            number += 1
            unique = f"{name} {number}"
        return self._add(unique, text)

    def inside(self, shown: str) -> list[Attached]:
        """What the tokens of a text stand for, each once."""
        return list({id(one): one for *_, one in self.spans(shown)}.values())

    def remembered(self, shown: str) -> str:
        """The text as it is kept when its attachments are not: each has left its name."""
        return self._replaced(shown, lambda one: f"[{one.name}, no longer here]")

    def typed(self, shown: str) -> str:
        """The text without its tokens."""
        return self._replaced(shown, lambda one: "")

    def expanded(self, shown: str) -> str:
        """The text with every token replaced by what it stands for."""
        return self._replaced(shown, lambda one: one.text)

    def _replaced(self, shown: str, text_of: Callable[[Attached], str]) -> str:
        parts, end = [], 0
        for start, stop, one in self.spans(shown):
            parts += [shown[end:start], text_of(one)]
            end = stop
        return "".join([*parts, shown[end:]])
