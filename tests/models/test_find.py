"""What a name means, what is on this machine, what was used last."""

import json
import os
from pathlib import Path

import huggingface_hub.constants
import pytest

from tqchat import paths
from tqchat.models import builtin, find
from tqchat.models.errors import ModelError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder, a home and caches of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_the_built_in_model(here: Path) -> None:
    (here / "smollm2").mkdir()
    assert find.resolve("smollm2") == find.ModelRef("smollm2", "builtin")
    assert find.resolve("./smollm2").kind == "folder"


@pytest.mark.parametrize("name", ["models/llama", "./models/llama", "~/../models/llama"])
def test_a_folder_comes_before_hugging_face(here: Path, name: str) -> None:
    (here / "home").mkdir()
    folder = here / "models" / "llama"
    folder.mkdir(parents=True)
    ref = find.resolve(name)
    assert ref.kind == "folder"
    assert ref.path is not None
    assert ref.path.is_absolute()
    assert ref.path.samefile(folder)
    assert find.fetch(ref, lambda progress: None, lambda: False).samefile(folder)


def test_a_gguf_file(here: Path) -> None:
    (here / "model.gguf").touch()
    # As Ollama stores them.
    (here / "sha256-1234").write_bytes(b"GGUF....")
    for name in ("model.gguf", "sha256-1234"):
        ref = find.resolve(name)
        assert (ref.kind, ref.path, ref.name) == ("gguf", here / name, str(here / name))


@pytest.mark.parametrize(
    ("name", "repo_id", "file"),
    [
        ("mlx-community/Llama-3.2-1B-Instruct-4bit", None, None),
        ("owner/repo/model-Q4_0.gguf", "owner/repo", "model-Q4_0.gguf"),
        ("owner/repo/Q8_0/model.gguf", "owner/repo", "Q8_0/model.gguf"),
    ],
)
def test_hugging_face(name: str, repo_id: str | None, file: str | None) -> None:
    assert find.resolve(name) == find.ModelRef(name, "hub", repo_id=repo_id or name, file=file)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "There is no model ''"),
        ("llama", "There is no model 'llama'. Name a folder, a .gguf file"),
        ("lla\x1b[2Jma", "There is no model"),
        ("/no/such/folder", "There is no folder or file /no/such/folder"),
        ("./none", "There is no folder or file ./none"),
        ("../a/b", "There is no folder or file ../a/b"),
        ("none.gguf", "There is no folder or file none.gguf"),
        ("folder/none.gguf", "There is no folder or file folder/none.gguf"),
        ("~nobody-of-this-name/model", "There is no folder or file"),
        ("owner/repo/none.bin", "There is no folder or file"),
        ("https://huggingface.co/owner/repo", "There is no folder or file"),
        ("a" * 5000, "There is no model"),
        ("a\0b", "There is no model"),
        ("model.safetensors", "is a part of a model. Name the folder"),
        ("readme.txt", "is not a .gguf file"),
    ],
)
def test_names_that_mean_nothing(here: Path, name: str, message: str) -> None:
    (here / "model.safetensors").touch()
    (here / "readme.txt").write_text("read me")
    with pytest.raises(ModelError) as error:
        find.resolve(name)
    assert message in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["model.gguf", "model", "/dev/zero"])
def test_pipes_and_devices_are_not_opened(here: Path, name: str) -> None:
    if not name.startswith("/"):
        os.mkfifo(here / name)
    with pytest.raises(ModelError, match="is not a regular file"):
        find.resolve(name)


def test_what_is_on_this_machine(here: Path) -> None:
    assert find.installed() == []
    model = paths.cache_dir() / "models" / Path(builtin._MEMBER).name
    model.parent.mkdir()
    model.write_bytes(bytes(7))
    snapshot = here / "hub" / "models--owner--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(5))
    (here / "hub" / "models--owner--partly" / "snapshots" / "1").mkdir(parents=True)
    (here / "hub" / "datasets--owner--data" / "snapshots" / "1").mkdir(parents=True)
    assert find.installed() == [
        find.Installed("smollm2", "builtin", model, 7),
        find.Installed("owner/a--b", "hub", snapshot, 5),
    ]


def test_the_model_used_last(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find.last_used() is None
    find.remember("owner/repo")
    assert find.last_used() == "owner/repo"
    (here / "mine").mkdir()
    find.remember("mine")
    monkeypatch.chdir("/")
    assert find.last_used() == str(here / "mine")
    (here / "mine").rmdir()
    assert find.last_used() is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"model": 3}', b"\xff", b"[" * 100_000]
)
def test_a_memory_that_makes_no_sense(content: bytes) -> None:
    find.remember("owner/repo")
    [memory] = paths.state_dir().iterdir()
    memory.write_bytes(content)
    assert find.last_used() is None


def test_the_memory_is_json(here: Path) -> None:
    find.remember("smollm2")
    [memory] = paths.state_dir().iterdir()
    assert json.loads(memory.read_text()) == {"model": "smollm2"}


def test_a_memory_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "file"))
    find.remember("smollm2")
    assert find.last_used() is None
