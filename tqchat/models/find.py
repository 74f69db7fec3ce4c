"""From what the user types to a model on this machine."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqchat import paths
from tqchat.models import builtin, hub
from tqchat.models.download import Progress
from tqchat.models.errors import ModelError
from tqchat.models.folder import regular, weight_files

BUILTIN = builtin.NAME

Kind = Literal["builtin", "folder", "gguf", "hub"]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as it was named. `name` finds it again from any folder.

    `path` is set for a folder and a .gguf file; `repo_id`, and `file` for a .gguf file in it, for
    a model on Hugging Face.
    """

    name: str
    kind: Kind
    path: Path | None = None
    repo_id: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Installed:
    """A model on this machine; `size_bytes` is its weight files'."""

    name: str
    kind: Kind
    path: Path
    size_bytes: int


def resolve(name: str) -> ModelRef:
    """What a name means, without asking the network.

    A folder, a .gguf file, "owner/name" or "owner/name/file.gguf" on Hugging Face, or the built-in
    model. What exists on disk comes first. Raises ModelError.
    """
    if name == BUILTIN:
        return ModelRef(name, "builtin")
    if path := _existing(name):
        return _on_disk(path)
    owner, _, rest = name.partition("/")
    repo, _, file = rest.partition("/")
    repo_id = f"{owner}/{repo}"
    if hub.REPO_ID.fullmatch(repo_id) and not repo.endswith(".gguf"):
        if not file:
            return ModelRef(repo_id, "hub", repo_id=repo_id)
        if file.endswith(".gguf"):
            return ModelRef(name, "hub", repo_id=repo_id, file=file)
    if "/" in name or name.endswith(".gguf"):
        raise ModelError(f"There is no folder or file {name}. Check the name.")
    raise ModelError(
        f"There is no model {name!r}. Name a folder, a .gguf file, a model on Hugging Face such as "
        f"mlx-community/Llama-3.2-1B-Instruct-4bit, or {BUILTIN}, the built-in one."
    )


def fetch(
    ref: ModelRef,
    progress: Callable[[Progress], None],
    stop: Callable[[], bool],
    *,
    update: bool = False,
) -> Path:
    """The folder or .gguf file of a model, fetched if it is not on this machine.

    `update` asks Hugging Face for a newer version of a model that is. `stop` is asked ten times a
    second. Raises ModelError, Stopped.
    """
    if ref.kind == "builtin":
        return builtin.fetch(progress, stop)
    if ref.repo_id is not None:
        return hub.fetch(ref.repo_id, ref.file, progress, stop, update)
    assert ref.path is not None
    return ref.path


def installed() -> list[Installed]:
    """The models that were fetched to this machine, the built-in one first."""
    models = []
    if path := builtin.fetched():
        models.append(Installed(BUILTIN, "builtin", path, path.stat().st_size))
    for name, path in hub.installed():
        files = weight_files(path) if path.is_dir() else [path]
        models.append(Installed(name, "hub", path, sum(file.stat().st_size for file in files)))
    return models


def last_used() -> str | None:
    """The name of the model used last, unless it is gone."""
    try:
        name = json.loads(_memory().read_bytes())["model"]
        return resolve(name).name
    except (OSError, ValueError, RecursionError, KeyError, TypeError, ModelError):
        return None


def remember(name: str) -> None:
    """Make `name` the model used last, where that can be written. Raises ModelError."""
    value = json.dumps({"model": resolve(name).name})
    with contextlib.suppress(OSError):
        paths.write_private(_memory(), value)


def _memory() -> Path:
    return paths.state_dir() / "last-model.json"


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.absolute() if name and path.exists() else None
    except (OSError, RuntimeError):
        return None


def _on_disk(path: Path) -> ModelRef:
    if path.is_dir():
        return ModelRef(str(path), "folder", path)
    regular(path)
    if path.suffix == ".gguf" or _starts_with_gguf(path):
        return ModelRef(str(path), "gguf", path)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is a part of a model. Name the folder: {path.parent}")
    raise ModelError(f"{path} is not a .gguf file. Name a .gguf file, or a model's folder.")


def _starts_with_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
