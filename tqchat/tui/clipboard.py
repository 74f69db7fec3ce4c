"""The clipboard, by whatever reaches it from here.

A program of the system says whether it worked. The terminal does not: it is asked with OSC 52, that
some terminals ignore (Terminal.app), need switched on (tmux, iTerm2) or cut at some length. It is
the only way out of a remote machine, whose own clipboard nobody sees.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PATIENCE_S = 2.0


def programs(environment: Mapping[str, str] = os.environ) -> list[Sequence[str]]:
    """The commands that take a text for the clipboard that the person sees, best first."""
    if "SSH_CONNECTION" in environment or "SSH_TTY" in environment:
        return []
    commands: list[Sequence[str]] = []
    if sys.platform == "darwin":
        commands.append(["pbcopy"])
    if "WAYLAND_DISPLAY" in environment:
        commands.append(["wl-copy"])
    if "DISPLAY" in environment:
        commands += [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    if "WSL_DISTRO_NAME" in environment:
        commands.append(["clip.exe"])
    return [command for command in commands if shutil.which(command[0])]


def doubt(environment: Mapping[str, str] = os.environ) -> str:
    """What it takes for the terminal to copy, where no program did."""
    if "TMUX" in environment:
        return "if tmux may: set -s set-clipboard on"
    return "if the terminal can"


def copy(text: str) -> str:
    """Hands `text` to the first program that takes it; returns its name, or "" if none did."""
    for command in programs():
        encoding = "utf-16" if command[0] == "clip.exe" else "utf-8"
        try:
            subprocess.run(
                command,
                input=text.encode(encoding, errors="replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return command[0]
    return ""
