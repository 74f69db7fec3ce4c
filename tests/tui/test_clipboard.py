"""The clipboard: what takes a text, and what is said of it."""

import os
from pathlib import Path

import pytest

from tests.tui.conftest import chat
from tests.tui.fake_engine import FakeEngine
from tqchat.tui import clipboard


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place with programs for a clipboard."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("SSH_CONNECTION", "SSH_TTY", "WAYLAND_DISPLAY", "DISPLAY", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def install(folder: Path, name: str, code: int = 0) -> Path:
    """A program that keeps what it is given."""
    taken = folder / f"{name}.taken"
    program = folder / name
    program.write_text(f'#!/bin/sh\ncat > "{taken}"\nexit {code}\n')
    program.chmod(0o755)
    return taken


def test_the_first_that_works_takes_it(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    install(bin_folder, "wl-copy", 1)
    taken = install(bin_folder, "xclip")
    assert clipboard.copy("Où? 世界\n") == "xclip"
    assert taken.read_text() == "Où? 世界\n"


def test_a_far_machines_own_clipboard_is_no_use(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    install(bin_folder, "xclip")
    assert [command[0] for command in clipboard.programs()] == ["xclip"]
    monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
    assert clipboard.copy("x") == ""


async def test_what_happened_is_said(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    monkeypatch.delenv("TMUX", raising=False)
    async with chat(engine) as screen:
        await screen.exchange("one", "**bold** answer")
        await screen.command("/copy")
        await screen.shows("Copied, if the terminal can: the last answer, 15 characters")
        monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
        await screen.command("/copy")
        await screen.shows("Copied, if tmux may: set -s set-clipboard on: the last answer")
        monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
        taken = install(bin_folder, "wl-copy")
        await screen.command("/copy")
        await screen.shows("Copied: the last answer, 15 characters")
        assert taken.read_text() == "**bold** answer"
