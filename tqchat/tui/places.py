"""Files and folders that fit what is typed after an @."""

import contextlib
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic

_MOST_LISTED = 20_000
_LONGEST_LISTING_S = 0.05
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Place:
    """`typed` is what would be written to mean it; a folder's ends with a slash."""

    typed: str

    @property
    def is_folder(self) -> bool:
        return self.typed.endswith("/")

    @property
    def path(self) -> Path:
        return Path(os.path.expanduser(self.typed))


def places(typed: str) -> list[Place]:
    """Names that begin with what is typed, then those that have it somewhere, folders first.

    Hidden ones need their dot typed. A huge or slow folder is not read to its end.
    """
    folder, slash, start = typed.rpartition("/")
    wanted, until = start.lower(), monotonic() + _LONGEST_LISTING_S
    found: list[tuple[bool, bool, str, str]] = []
    root = Path(os.path.expanduser(folder + slash or "."))
    with contextlib.suppress(OSError, ValueError), os.scandir(root) as entries:
        for entry in islice(entries, _MOST_LISTED):
            name = entry.name
            if wanted in name.lower() and (start.startswith(".") or not name.startswith(".")):
                within = not name.lower().startswith(wanted)
                found.append((within, not entry.is_dir(), name.lower(), name))
            if monotonic() > until:
                break
    found.sort()
    return [
        Place(f"{folder}{slash}{name}{'' if is_file else '/'}")
        for _, is_file, _, name in found[:_MOST_SHOWN]
    ]
