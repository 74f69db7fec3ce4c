"""`tqchat config`: where the settings file is, what is in it, and a way to edit it."""

import shlex
import subprocess
import sys
from typing import Literal

from tqchat import paths, settings
from tqchat.settings import Settings, SettingsError
from tqchat.tui.editor import command


def main(action: Literal["path", "edit", "show"]) -> int:
    """Returns the exit code."""
    try:
        return {"path": _path, "edit": _edit, "show": _show}[action]()
    except SettingsError as error:
        print(f"tqchat: {error}", file=sys.stderr)
        return 2


def _path() -> int:
    print(paths.settings_file())
    return 0


def _edit() -> int:
    path = paths.settings_file()
    try:
        if not path.exists():
            paths.write_private(path, settings.template())
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}.") from None
    try:
        done = subprocess.run([*shlex.split(command()), str(path)])
    except (OSError, ValueError) as error:
        raise SettingsError(f"Set $EDITOR to an editor that works: {error}") from None
    settings.read()
    return int(done.returncode != 0)


def _show() -> int:
    said = settings.read()
    rows = settings.shown(Settings.of(said), list(said))
    width = max(len(name) for name, *_ in rows)
    for name, value, origin in rows:
        print(f"{name.ljust(width)} = {value}  # {origin}")
    return 0
