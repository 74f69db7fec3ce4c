"""What the screen needs of an engine, and how one is started behind the first frame."""

import importlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tqchat.chat.conversation import Message
from tqchat.chat.sessions import Session
from tqchat.engine.events import EngineOptions, Event, Sampling
from tqchat.settings import Settings
from tqchat.tui.parser import parser

log = logging.getLogger(__name__)


class ChatEngine(Protocol):
    """What the screen needs of an engine. Events arrive in `events`; `alive` is False once the
    thread that fills it has ended."""

    events: deque[Event]

    @property
    def alive(self) -> bool: ...
    def load(self, model: str) -> None: ...
    def generate(
        self, messages: Sequence[Message], sampling: Sampling, max_tokens: int | None = None
    ) -> int: ...
    def take_up(self, folder: Path) -> None: ...
    def count(self, text: str | Sequence[Message]) -> int: ...
    def stop(self) -> None: ...
    def clear(self) -> None: ...
    def close(self, timeout: float | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A started engine and the model to load. `suggest_larger`: nobody chose this small model."""

    engine: ChatEngine
    model: str
    suggest_larger: bool = False


class Opening:
    """Starts an engine on a thread of its own: `open_engine` may import MLX. It is given the name
    of the model that was chosen, or that the conversation to go on with was held with."""

    def __init__(self, open_engine: Callable[[str | None], Opened]) -> None:
        self._open_engine = open_engine
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self.opened: Opened | None = None

    def start(self, session: Session | None, model: str | None) -> None:
        if model is None and session is not None:
            model = session.model
        self._thread = threading.Thread(
            target=self._open, args=[session, model], name="open-engine", daemon=True
        )
        self._thread.start()

    def take_fault(self) -> BaseException | None:
        """Why it did not start; said once."""
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        """Ends the engine, if it was started. Waits for what cannot be interrupted."""
        if self._thread is not None:
            self._thread.join()
        if self.opened is not None:
            self.opened.engine.close()

    def _open(self, session: Session | None, model: str | None) -> None:
        try:
            opened = self._open_engine(model)
            if session is not None:
                opened.engine.take_up(session.cache_folder)
            opened.engine.load(opened.model)
            self.opened = opened
            # Needed with the first answer, and slow to import: better now than then.
            parser()
            importlib.import_module("tqchat.tui.syntax")
        except BaseException as fault:
            log.exception("The engine did not start")
            self._fault = fault


def open_engine(settings: Settings, name: str | None) -> Opened:
    """Starts an engine for the model called `name`, else the last one used, else the built-in
    one."""
    from tqchat.engine.engine import Engine, default_model

    name, is_small = default_model() if name is None else (name, False)
    engine = Engine(EngineOptions.of(settings))
    engine.start()
    return Opened(engine, name, suggest_larger=is_small)
