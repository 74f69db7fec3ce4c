"""How far a long measurement is, on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Progress = Callable[[float], None]
"""Hears of the share that is done, 0 to 1."""


@contextmanager
def steps(console: Console, *names: str) -> Iterator[list[Progress]]:
    """A bar for each name, gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:

        def step(name: str) -> Progress:
            task = bars.add_task(name, total=1.0)
            return lambda share: bars.update(task, completed=share)

        yield [step(name) for name in names]
