"""The messages that were sent, kept from one start to the next."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from tqchat import paths
from tqchat.tui.text import clean_paste

_MOST_KEPT = 1_000


class History:
    """The oldest first, none twice in a row. `path`: a line of JSON each, for its owner alone;
    where it cannot be read or written, messages are remembered until the end alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[str] = []

    def read(self) -> None:
        """What was said in former conversations comes before what was said in this one."""
        found: list[str] = []
        with contextlib.suppress(OSError):
            for line in self._path.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, RecursionError):
                    if isinstance(text := json.loads(line), str) and text:
                        found.append(clean_paste(text))
            if len(found) > 2 * _MOST_KEPT:
                paths.write_private(self._path, "".join(map(_line, found[-_MOST_KEPT:])))
        self.entries[:0] = _without_repetition(found[-_MOST_KEPT:])

    def add(self, shown: str, kept: str) -> None:
        """`shown`: as it was written; `kept`: what the file gets of it, perhaps nothing."""
        if self.entries[-1:] == [shown]:
            return
        self.entries.append(shown)
        if kept:
            with contextlib.suppress(OSError):
                paths.private_dir(self._path.parent)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                with open(os.open(self._path, flags, 0o600), "a", encoding="utf-8") as file:
                    file.write(_line(kept))

    def search(self, words: str) -> list[str]:
        """Those with all of `words` in them, the newest first, each once."""
        wanted = words.lower().split()
        found = (text for text in reversed(self.entries) if _has(text.lower(), wanted))
        return list(dict.fromkeys(found))


def _has(text: str, words: Iterable[str]) -> bool:
    return all(word in text for word in words)


def _line(text: str) -> str:
    return json.dumps(text) + "\n"


def _without_repetition(texts: list[str]) -> list[str]:
    return [text for place, text in enumerate(texts) if texts[place - 1 : place] != [text]]
