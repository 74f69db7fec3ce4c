"""A model's fingerprint: the same for the same files, another for any other."""

import os
import shutil
from pathlib import Path

import pytest

from tests.folders import write_tiny
from tqchat.models.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


def test_it_does_not_depend_on_the_place(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_time_or_another_byte_is_another_model(folder: Path, name: str) -> None:
    file = folder / name
    first = fingerprint(folder)
    touch(file)
    second = fingerprint(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    touch(file)
    assert len({first, second, fingerprint(folder)}) == 3


def test_weights_that_differ_all_over_are_told_apart_in_a_large_file(tmp_path: Path) -> None:
    found = set()
    for value in (b"\0", b"\1"):
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF" + value * (4 << 20))
        touch(file)
        found.add(fingerprint(file))
    assert len(found) == 2
