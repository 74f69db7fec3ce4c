"""Models on Hugging Face: found in its cache, fetched into it.

Fetching runs in a child process (`python -m tqchat.models.hub`), so that it can be stopped at
once. Small files go through `snapshot_download`. That starts a file which was interrupted from
its beginning, so large ones are fetched here, file by file, from where the last attempt ended,
checked, and laid where `snapshot_download` looks for them.
"""

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqchat.models.download import Progress, disk_error, run
from tqchat.models.errors import ModelError
from tqchat.models.folder import WEIGHTS, weight_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_TEXT_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens"
    r"|chat_template|model\.safetensors\.index)\.json"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja"
)
# ggml's types that are not read, as file names tell them.
_UNREADABLE = re.compile(r"(?i)(?<![a-z0-9])(Q\d_K|Q5_\d|IQ\d|TQ\d|MXFP4)")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PARALLEL_FILES = 4
_CHUNK_BYTES = 1 << 20
_REPORT_SECONDS = 0.1
_CHILD_ENVIRONMENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def cached(repo_id: str, file: str | None = None) -> Path | None:
    """The folder of a model that is whole on this machine, or `file` in it."""
    for snapshot in _snapshots(_storage(repo_id)):
        if file is not None and (snapshot / file).is_file():
            return snapshot / file
        if file is None and _is_whole(snapshot):
            return snapshot
    return None


def installed() -> Iterator[tuple[str, Path]]:
    """What is whole on this machine: "owner/name" or "owner/name/file.gguf", and where it lies."""
    for storage in sorted(_cache().glob("models--*--*")):
        repo_id = storage.name.removeprefix("models--").replace("--", "/", 1)
        if folder := cached(repo_id):
            yield repo_id, folder
        seen = set()
        for snapshot in _snapshots(storage):
            for path in sorted(snapshot.rglob("*.gguf")):
                name = f"{repo_id}/{path.relative_to(snapshot)}"
                if path.is_file() and name not in seen:
                    seen.add(name)
                    yield name, path


def fetch(
    repo_id: str,
    file: str | None,
    progress: Callable[[Progress], None],
    stop: Callable[[], bool],
    update: bool = False,
) -> Path:
    """The folder of a model, or a .gguf file in it.

    What is whole on this machine is taken as it is, without asking the network; `update` asks.
    Raises ModelError, Stopped.
    """
    here = cached(repo_id, file)
    if here and not update:
        return here
    label = f"Fetching {repo_id}"
    argv = [sys.executable, "-P", "-m", "tqchat.models.hub", repo_id, *([file] if file else [])]
    try:
        # Without a name it cannot be left behind, however this ends.
        with tempfile.TemporaryFile() as output:

            def tick() -> None:
                if "done" in (message := _last_message(output)):
                    progress(Progress(message["done"], message["total"], label))

            run(argv, output, tick, stop, _CHILD_ENVIRONMENT)
            message = _last_message(output)
    except OSError as error:
        raise disk_error(error, tempfile.gettempdir()) from None
    if "path" in message:
        return Path(message["path"])
    if here:
        return here
    raise ModelError(message.get("error", f"Fetching {repo_id} ended without a word. Try again."))


def look(repo_id: str) -> tuple[Path, int]:
    """config.json of a model that need not be here, and the bytes of its weight files.

    Asks the network, on the calling thread. Raises ModelError.
    """
    os.environ.update(_CHILD_ENVIRONMENT)
    from huggingface_hub import HfApi, hf_hub_download

    try:
        info = HfApi().model_info(repo_id, files_metadata=True)
        files = info.siblings or []
        _choose(repo_id, [file.rfilename for file in files])
        config = hf_hub_download(repo_id, "config.json", revision=info.sha)
    except Exception as error:
        raise ModelError(_what_to_do(error, repo_id)) from None
    return Path(config), sum(f.size or 0 for f in files if WEIGHTS.fullmatch(f.rfilename))


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _storage(repo_id: str) -> Path:
    return _cache() / f"models--{repo_id.replace('/', '--')}"


def _snapshots(storage: Path) -> list[Path]:
    """The newest first: what `main` names, then by age."""
    try:
        main = (storage / "refs" / "main").read_text().strip()
    except OSError:
        main = ""
    snapshots = [path for path in (storage / "snapshots").glob("*") if path.is_dir()]
    return sorted(snapshots, key=lambda s: (s.name == main, s.stat().st_mtime), reverse=True)


def _is_whole(snapshot: Path) -> bool:
    if not all((snapshot / name).is_file() for name in ("config.json", "tokenizer.json")):
        return False
    try:
        return all(file.is_file() for file in weight_files(snapshot))
    except ModelError:
        return False


def _last_message(output: BinaryIO) -> dict[str, Any]:
    """The last JSON object that the child wrote, among what its libraries wrote.

    Read where it lies: the child writes on from the same place in the file.
    """
    size = os.fstat(output.fileno()).st_size
    end = os.pread(output.fileno(), 8192, max(0, size - 8192))
    for line in reversed(end.splitlines()):
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            return message
    return {}


# From here on: the child.


def _main(repo_id: str, file: str | None = None) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        message = {"path": str(_Download(repo_id).fetch(file))}
    except Exception as error:
        message = {"error": _what_to_do(error, repo_id)}
    print(json.dumps(message), flush=True)
    # Without waiting for the threads that still fetch other files.
    os._exit(0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class _Download:
    def __init__(self, repo_id: str) -> None:
        self._repo_id = repo_id
        self._blobs = _storage(repo_id) / "blobs"
        self._lock = threading.Lock()
        self._total = 0
        self._done: dict[str, int] = {}
        self._reported_at = 0.0

    def fetch(self, file: str | None) -> Path:
        from huggingface_hub import HfApi, constants, snapshot_download

        # What is smaller is lost when a download ends early.
        constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
        info = HfApi().model_info(self._repo_id, files_metadata=True)
        files = {sibling.rfilename: sibling for sibling in info.siblings or []}
        wanted = [file] if file else _choose(self._repo_id, list(files))
        if file:
            _check_gguf(self._repo_id, file, list(files))
        small = [name for name in wanted if files[name].lfs is None]
        large = [files[name] for name in wanted if files[name].lfs is not None]
        # The small ones first: a folder with all its weights is then whole.
        if small:
            snapshot_download(self._repo_id, allow_patterns=small)
        self._make_sure_of_room(large)
        self._total = sum(sibling.lfs.size for sibling in large if sibling.lfs)
        pool = ThreadPoolExecutor(_PARALLEL_FILES)
        for done in as_completed(pool.submit(self._fetch_large, s, info.sha) for s in large):
            done.result()
        folder = Path(snapshot_download(self._repo_id, allow_patterns=wanted))
        return folder / file if file else folder

    def report(self, name: str, done: int) -> None:
        """Say how many bytes of a file there are."""
        with self._lock:
            self._done[name] = done
            if time.monotonic() - self._reported_at > _REPORT_SECONDS:
                self._reported_at = time.monotonic()
                message = {"done": sum(self._done.values()), "total": self._total}
                print(json.dumps(message), flush=True)

    def _make_sure_of_room(self, large: Sequence["RepoSibling"]) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        missing = 0
        for sibling in large:
            assert sibling.lfs
            blob, part = self._paths(sibling.lfs.sha256)
            if not blob.exists():
                missing += sibling.lfs.size - (part.stat().st_size if part.exists() else 0)
        free = shutil.disk_usage(self._blobs).free
        if missing > free:
            raise ModelError(
                f"{self._repo_id} takes {missing / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are "
                f"free: make room in {_cache()}, or set HF_HOME to a larger disk."
            )

    def _paths(self, sha256: str) -> tuple[Path, Path]:
        """Where a file lies once it is whole, and until then."""
        return self._blobs / sha256, self._blobs / f"{sha256}.incomplete"

    def _fetch_large(self, sibling: "RepoSibling", commit: str | None) -> None:
        from huggingface_hub import get_token, hf_hub_url
        from huggingface_hub.file_download import http_get

        assert sibling.lfs
        name, size, sha256 = sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256
        blob, part = self._paths(sha256)
        if not blob.exists():
            with _Part(part, lambda done: self.report(name, done)) as file:
                if blob.exists():
                    return
                url = hf_hub_url(self._repo_id, name, revision=commit)
                if file.tell() > size:
                    file.truncate(0)
                token = get_token()
                headers = {"authorization": f"Bearer {token}"} if token else {}
                http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)
                os.fsync(file.fileno())
                with part.open("rb") as whole:
                    digest = hashlib.file_digest(whole, "sha256").hexdigest()
                if digest != sha256:
                    part.unlink()
                    raise ModelError(f"{self._repo_id}/{name} came damaged. Fetch it again.")
                part.replace(blob)
        self.report(name, size)


class _Part(io.FileIO):
    """A file that grows, by one process at a time; `report` hears of its size."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        super().__init__(path, "ab")
        self._report = report
        try:
            fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError("Another tqchat is fetching this model: wait for it.") from None

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._report(self.tell())
        return written


def _choose(repo_id: str, names: Sequence[str]) -> list[str]:
    """The files that a chat needs. Raises ModelError."""
    weights = [name for name in names if WEIGHTS.fullmatch(name)]
    if weights and "config.json" in names:
        return [name for name in names if _TEXT_FILES.fullmatch(name)] + weights
    if any(name.endswith(".gguf") for name in names):
        raise ModelError(f"{repo_id} holds GGUF files. {_readable_gguf(repo_id, names)}")
    raise ModelError(
        f"{repo_id} holds no config.json with model*.safetensors. Choose another version of the "
        "model, such as one of mlx-community."
    )


def _check_gguf(repo_id: str, file: str, names: Sequence[str]) -> None:
    if file not in names:
        raise ModelError(f"{repo_id} has no file {file}. {_readable_gguf(repo_id, names)}")
    if _UNREADABLE.search(file) or _PART.search(file):
        what = "is one part of several" if _PART.search(file) else "is in a format"
        raise ModelError(f"{file} {what} that cannot be read. {_readable_gguf(repo_id, names)}")


def _readable_gguf(repo_id: str, names: Sequence[str]) -> str:
    for name in names:
        if name.endswith(".gguf") and not _UNREADABLE.search(name) and not _PART.search(name):
            return f"Name one of them, such as {repo_id}/{name}"
    return "None of them is in Q4_0, Q4_1, Q8_0, F16 or BF16: choose another version of the model."


def _what_to_do(error: Exception, repo_id: str) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case ModelError():
            return str(error)
        case GatedRepoError():
            return (
                f"{repo_id} is gated: accept its terms on https://huggingface.co/{repo_id}, then "
                "run `hf auth login` or set HF_TOKEN."
            )
        case RepositoryNotFoundError():
            return (
                f"There is no folder {repo_id} here and no model {repo_id} on Hugging Face. Check "
                "the name; if the model is private, run `hf auth login` first."
            )
        case HfHubHTTPError():
            status = error.response.status_code
            return f"Hugging Face answered {status} for {repo_id}. Try again later."
        case OSError() if error.errno is not None:
            return str(disk_error(error, str(_cache())))
    # The HTTP client's own errors; which client it is depends on huggingface_hub's version.
    unreachable = type(error).__module__.partition(".")[0].startswith("httpx")
    if unreachable or isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        reason = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "Hugging Face cannot be reached"
        return (
            f"{reason}, and {repo_id} is not whole on this machine. Check the network, or choose "
            f"a model that `tqchat models` lists."
        )
    return f"Fetching {repo_id} failed ({type(error).__name__}: {error}). Try again later."


if __name__ == "__main__":
    _main(*sys.argv[1:])
