"""`tqchat models` and `tqchat pull`."""

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from tqchat.models import download
from tqchat.models.checkpoint import describe
from tqchat.models.errors import ModelError
from tqchat.models.find import BUILTIN, fetch, installed, resolve


def show() -> int:
    """List the models on this machine. Returns the exit code."""
    models = installed()
    if not models:
        print(f"No model yet. `tqchat` fetches {BUILTIN}; `tqchat pull ORG/NAME` fetches another.")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "architecture", "weights", "size", "context"):
        table.add_column(heading, justify="right" if heading in ("size", "context") else "left")
    for model in models:
        size = f"{model.size_bytes / 1e9:.2f} GB"
        try:
            found = describe(model.path)
        except ModelError as error:
            table.add_row(Text(model.name), Text(str(error)), "", size, "")
            continue
        context, kind = (found.config.get(key) for key in ("max_position_embeddings", "model_type"))
        context = f"{context:,}" if type(context) is int else ""
        row = (model.name, str(kind), found.format, size, context)
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
    return 0


def pull(name: str) -> int:
    """Fetch a model. Returns the exit code."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    progress = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True))
    try:
        ref = resolve(name)
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
    except ModelError as error:
        print(f"tqchat: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0
