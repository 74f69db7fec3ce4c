"""The person's own editor, on a text of ours."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def command() -> str:
    chosen = (os.environ.get(name, "").strip() for name in ("VISUAL", "EDITOR"))
    return next(filter(None, chosen), "vi")


def edit(text: str) -> str:
    """`text` as it is after $VISUAL or $EDITOR (else vi) has ended. Raises OSError.

    To be called while the terminal is not ours. Native stderr may be a log file, so the editor
    gets the terminal's.
    """
    chosen = command()
    with tempfile.TemporaryDirectory(prefix="tqchat-") as folder:
        path = Path(folder) / "text.txt"
        path.touch(0o600)
        path.write_text(text, "utf-8", newline="")
        try:
            done = subprocess.run([*shlex.split(chosen), str(path)], stderr=sys.__stderr__)
        except ValueError as error:
            raise OSError(0, f"$EDITOR is {chosen!r}: {error}") from None
        if done.returncode:
            raise OSError(0, f"{chosen} ended with {done.returncode}")
        return path.read_text("utf-8", errors="replace")
