"""Our folders and files: where the user's system wants them, private, whole."""

import os
import stat
from pathlib import Path

import pytest

from tqchat import paths


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("kind", ["config", "cache", "data", "state"])
def test_folders_follow_xdg_and_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path))
    folder = getattr(paths, f"{kind}_dir")()
    assert folder == tmp_path / "tqchat"
    assert mode(folder) == 0o700


def test_written_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    before = os.umask(0)
    try:
        paths.write_private(path, "né")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"n\xc3\xa9"
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    paths.write_private(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        paths.write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    link, target = tmp_path / "settings.toml", tmp_path / "dotfiles" / "settings.toml"
    link.symlink_to(target)
    paths.write_private(link, "a = 1")
    assert link.is_symlink()
    assert target.read_text() == "a = 1"
