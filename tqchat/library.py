"""The models to choose from, `tqchat models` and `tqchat pull`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from tqchat import plan
from tqchat.engine.events import KVKind
from tqchat.models import download
from tqchat.models.checkpoint import describe
from tqchat.models.config import Config
from tqchat.models.errors import ModelError, Stopped
from tqchat.models.find import BUILTIN, Installed, fetch, installed, resolve
from tqchat.models.recommended import recommended
from tqchat.models.registry import architecture
from tqchat.units import bytes_text


@dataclass(frozen=True, slots=True)
class Offer:
    """A model to choose. `size`: bytes of its weights; `context`: the most tokens that fit on this
    device, 0 if it does not; `about`: what it is good for, or what is wrong with it."""

    name: str
    size: int
    context: int
    is_here: bool
    licence: str = ""
    about: str = ""


def offers(kv: KVKind) -> list[Offer]:
    """Those on this machine, then those that are recommended."""
    limit = plan.device()
    found = []
    for model in installed():
        try:
            described = describe(model.path)
            config, weights = Config(model.name, described.config), described.weights_bytes
            context = _context(config, weights, kv, limit)
            found.append(Offer(model.name, weights, context, is_here=True))
        except ModelError as error:
            found.append(Offer(model.name, model.size_bytes, 0, is_here=True, about=str(error)))
    here = {offer.name for offer in found}
    for one in recommended():
        if one.id not in here:
            size = plan.weights_bytes(one.config, architecture(one.config).parse(one.config))
            context = _context(one.config, size, kv, limit)
            found.append(Offer(one.id, size, context, False, one.licence, one.about))
    return found


def _context(config: Config, weights: int, kv: KVKind, limit: plan.Limit) -> int:
    """As far as it was trained, and as the device is set up."""
    shape = architecture(config).parse(config)
    report = plan.of(config.name, shape, weights, kv, replace(limit, raised=limit.default))
    return min(report.longest, shape.context)


def plan_text(name: str, kv: KVKind) -> str:
    """The memory a model needs by context length, or why that cannot be told."""
    try:
        return plan.text(plan.report(name, kv))
    except ModelError as error:
        return str(error)


def get(
    name: str, progress: Callable[[str, int, int], None], stop: Callable[[], bool]
) -> tuple[str, str]:
    """Fetch a model if it is not here: the name that finds it again, or what is wrong.

    `progress` is given a label and bytes, done and in all (0: not known). When `stop` says so,
    both are empty.
    """
    try:
        ref = resolve(name)
        fetch(ref, lambda at: progress(at.label, at.done_bytes, at.total_bytes), stop)
    except ModelError as error:
        return "", str(error)
    except Stopped:
        return "", ""
    return ref.name, ""


def show() -> int:
    """List the models on this machine, and those to fetch. Returns the exit code."""
    if models := installed():
        _show_installed(models)
    else:
        print(f"No model yet. `tqchat` fetches {BUILTIN}; `tqchat pull ORG/NAME` fetches another.")
    table = Table(box=None, pad_edge=False)
    for heading in ("recommended", "size", "context", "licence"):
        table.add_column(heading, justify="right" if heading in ("size", "context") else "left")
    for offer in offers("int4"):
        if not offer.is_here:
            fits = f"{offer.context:,}" if offer.context else "-"
            table.add_row(offer.name, bytes_text(offer.size), fits, offer.licence)
    print("\n`tqchat pull` fetches these; their context is what fits on this device (-: the model")
    print("itself does not).\n")
    Console().print(table)
    return 0


def _show_installed(models: Sequence[Installed]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "architecture", "weights", "size", "context"):
        table.add_column(heading, justify="right" if heading in ("size", "context") else "left")
    for model in models:
        size = bytes_text(model.size_bytes)
        try:
            found = describe(model.path)
            size = bytes_text(found.weights_bytes)
        except ModelError as error:
            table.add_row(Text(model.name), Text(str(error)), "", size, "")
            continue
        context, kind = (found.config.get(key) for key in ("max_position_embeddings", "model_type"))
        context = f"{context:,}" if type(context) is int else ""
        row = (model.name, str(kind), found.format, size, context)
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def pull(name: str) -> int:
    """Fetch a model. Returns the exit code."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    progress = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True))
    try:
        ref = resolve(name)
        here = ref.path or next((one.path for one in installed() if one.name == ref.name), None)
        with progress:
            task = progress.add_task(ref.name, total=None)

            def fetched(event: download.Progress) -> None:
                progress.update(
                    task,
                    description=event.label,
                    completed=event.done_bytes,
                    total=event.total_bytes or None,
                )

            path = fetch(ref, fetched, lambda: False, update=True)
            if path == here:
                progress.live.transient = True
    except ModelError as error:
        print(f"tqchat: {error}", file=sys.stderr)
        return 2
    if path == here:
        print("It is on this machine already:", file=sys.stderr)
    print(path)
    return 0
