"""The one thread that owns MLX, and the calls by which others use it.

Streams and lazy arrays belong to the thread that made them (MLX 0.31.2 and newer), so loading,
seeding, prefill and decode all happen on one long-lived thread.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from tqchat.chat.conversation import Message
from tqchat.chat.errors import ChatError
from tqchat.chat.marks import opened_thought
from tqchat.chat.template import thinking
from tqchat.engine.counting import Counting
from tqchat.engine.events import (
    Counted,
    EngineOptions,
    Event,
    Failed,
    Loaded,
    Loading,
    Note,
    Prefilling,
    Sampling,
    Stats,
    TakenUp,
    Usage,
)
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel, load
from tqchat.engine.wired import Wiring
from tqchat.models.errors import ModelError, Stopped
from tqchat.models.find import BUILTIN, last_used, remember

log = logging.getLogger(__name__)

SAVE_INTERVAL_S = 30.0
"""While a long prompt is read; longer where saving takes long."""

SAVE_REST = 20
"""So many times what a save took go by until the next one."""

NO_USAGE = Usage(0, 0, 0, 0.0, 0.0, 0.0)


def default_model() -> tuple[str, bool]:
    """The model to load when none is named, and whether it is the small built-in one."""
    name = last_used() or BUILTIN
    return name, name == BUILTIN


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    run: Callable[[int], None]
    # What a failure is reported as belonging to.
    turn: int | None


class Engine:
    """Calls return at once and may come from any thread; what happens arrives in `events`.

    `events` is filled by the engine's thread and emptied by one reader.
    """

    def __init__(self, options: EngineOptions = EngineOptions()) -> None:  # noqa: B008
        self.events: deque[Event] = deque()
        self._options = options
        self._loaded: LoadedModel | None = None
        self._session: Session | None = None
        self._folder: Path | None = None
        self._wiring = Wiring()
        self._noted = ""
        self._next_save = 0.0
        self._counting = Counting(lambda number, tokens: self._emit(Counted(number, tokens)))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._last_job = self._last_turn = 0
        self._stopped_to = 0
        self._closing = False
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs, so that an answer may still come."""
        return self._thread.is_alive()

    def load(self, model: str | None) -> None:
        """Fetch if needed and read a model: Loading events, then Loaded or Failed.

        None: the last one used, else the built-in one.
        """
        self._add(lambda job: self._load(job, model), is_turn=False)

    def generate(
        self, messages: Sequence[Message], sampling: Sampling, max_tokens: int | None = None
    ) -> int:
        """Queue a turn; its number marks its events, Planned first, one Finished or Failed last."""
        held = tuple(messages)
        return self._add(lambda job: self._generate(job, held, sampling, max_tokens), is_turn=True)

    def take_up(self, folder: Path) -> None:
        """Go on with a conversation whose cache is saved in `folder`, or will be after each turn.

        What the cache held before is forgotten. Loading events and TakenUp follow, when a model is
        loaded; a Note comes before that if what is there cannot all be used.
        """
        self._add(lambda job: self._take_up(job, folder), is_turn=False)

    def count(self, text: str | Sequence[Message]) -> int:
        """Have the tokens of a text counted, or of messages in the chat template: a Counted event
        with this number follows, soon and without waiting for turns, if a model is loaded."""
        return self._counting.count(text)

    def stop(self) -> None:
        """Stop everything asked for so far, between layers or tokens. What was read is kept."""
        with self._lock:
            self._stopped_to = self._last_job

    def clear(self) -> None:
        """Forget the conversation and free its cache: a Stats event follows.

        What is saved of it stays on disk, and nothing more is saved.
        """
        self._add(lambda job: self._clear(), is_turn=False)

    def close(self, timeout: float | None = None) -> bool:
        """Stop, and wait for the thread to end, at most `timeout` seconds; False: it has not."""
        self._closing = True
        self.stop()
        self._counting.close()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Event | None:
        """The next event, or None when `timeout` seconds have passed without one."""
        while True:
            self._arrived.clear()
            if self.events:
                return self.events.popleft()
            if not self._arrived.wait(timeout):
                return None

    def _add(self, run: Callable[[int], None], is_turn: bool) -> int:
        with self._lock:
            self._last_job += 1
            number = self._last_job
            if is_turn:
                self._last_turn = number
        self._jobs.put(_Job(number, run, number if is_turn else None))
        return number

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self._arrived.set()

    def _stopped(self, job: int) -> bool:
        return job <= self._stopped_to or self._closing

    def _main(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._run(job)
        finally:
            self._loaded = self._session = None
            self._wiring.restore()
            # Without this the process may abort at exit.
            mx.clear_streams()

    def _run(self, job: _Job) -> None:
        try:
            job.run(job.number)
        except (ModelError, ChatError) as error:
            self._emit(Failed(job.turn, str(error)))
        except Stopped:
            self._emit(Failed(job.turn, "Stopped."))
        except MemoryError:
            self._emit(Failed(job.turn, "Out of memory. Use a shorter text or a smaller model."))
        except Exception as error:
            log.exception("A job failed")
            self._emit(Failed(job.turn, f"Internal error: {type(error).__name__}: {error}"))

    def _load(self, job: int, model: str | None) -> None:
        self._loaded = self._session = None
        self._counting.forget()
        mx.clear_cache()
        if self._options.wire:
            self._wiring.wire()
        self._loaded = load(model, self._options, self._emit, lambda: self._stopped(job))
        remember(self._loaded.info.name)
        self._session = Session(self._loaded)
        self._counting.use(self._loaded.tokenizer, self._loaded.template)
        self._session.warm_up()
        if self._folder is not None:
            self._restore(job, self._session, self._folder)
        self._emit(Loaded(self._loaded.info, self._session.cache_use(), self._session.memory()))

    def _take_up(self, job: int, folder: Path) -> None:
        self._folder = folder
        self._noted = ""
        if self._session is not None:
            self._restore(job, self._session, folder)

    def _restore(self, job: int, session: Session, folder: Path) -> None:
        def progress(done: int, total: int) -> None:
            self._emit(Loading("Reading the saved cache", done, total))
            if self._stopped(job):
                raise Stopped

        try:
            note = session.take_up(folder, self._options.disk_budget, progress)
        except Stopped:
            note = "Stopped: the conversation is read again."
        except Exception:
            log.exception("The saved cache was not taken up")
            note = "The saved cache could not be read; the log file says more."
        self._note(note)
        self._emit(TakenUp(session.cache_use(), session.memory()))

    def _save(self, session: Session, give_way: Callable[[], bool]) -> None:
        """Whatever happens here is no failure of a turn."""
        began = time.monotonic()
        try:
            note = session.save(give_way)
        except Exception:
            log.exception("The KV cache was not saved")
            note = "The KV cache could not be saved; the log file says more."
        ended = time.monotonic()
        self._next_save = ended + max(SAVE_INTERVAL_S, SAVE_REST * (ended - began))
        self._note(note)

    def _note(self, message: str) -> None:
        """Tell it, unless it was the last thing told."""
        if message and message != self._noted:
            self._noted = message
            self._emit(Note(message))

    def _generate(
        self, job: int, messages: Sequence[Message], sampling: Sampling, max_tokens: int | None
    ) -> None:
        if self._loaded is None or self._session is None:
            raise ModelError("No model is loaded. Start again with a model that can be read.")
        template, switches = self._loaded.template, thinking(sampling.think)
        if switches and not template.knows(switches):
            self._note("This model cannot be told to think or not.")
        tokenizer, session = self._loaded.tokenizer, self._session
        prompt = template.prompt_ids(tokenizer, messages, **switches)
        goes_on = bool(messages) and messages[-1].role == "assistant"
        opened = "" if goes_on else opened_thought(prompt, tokenizer.decode)

        def stopped() -> bool:
            return self._stopped(job)

        self._next_save = max(self._next_save, time.monotonic() + SAVE_INTERVAL_S)
        for event in session.turn(job, prompt, sampling, max_tokens, stopped, opened):
            self._emit(event)
            # An hour of reading is not to be lost with the process.
            if isinstance(event, Prefilling) and time.monotonic() >= self._next_save:
                self._save(session, give_way=stopped)
        # A turn that waits comes first; what it leaves to save is saved after it.
        self._save(session, give_way=lambda: self._last_turn > job)

    def _clear(self) -> None:
        self._folder = None
        if self._session is not None:
            self._session.take_up(None, 0, lambda done, total: None)
            self._emit(Stats(NO_USAGE, self._session.cache_use(), self._session.memory()))
