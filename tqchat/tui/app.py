"""The application: what is typed goes to the engine, what the engine tells goes on the screen."""

import importlib
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import ClassVar, Protocol

from textual import work
from textual.app import App, ComposeResult, SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from tqchat import paths
from tqchat.chat.conversation import Message
from tqchat.chat.documents import Document, read_document
from tqchat.chat.errors import ChatError
from tqchat.chat.sessions import Session
from tqchat.engine.events import (
    Counted,
    EngineOptions,
    Event,
    Failed,
    Finished,
    FinishReason,
    Loaded,
    Loading,
    ModelInfo,
    Note,
    Prefilling,
    Sampling,
    Stats,
    TakenUp,
    Token,
    Usage,
)
from tqchat.tui import themes, welcome
from tqchat.tui.commands import COMMANDS, Call, Command, Unknown, find
from tqchat.tui.counts import Counts
from tqchat.tui.editor import edit
from tqchat.tui.entries import Answer, Entry, Fault, Listing, Notice, Question
from tqchat.tui.figures import rate_text, seconds_text
from tqchat.tui.parser import parser
from tqchat.tui.record import Record
from tqchat.tui.screens.choice import Choice
from tqchat.tui.screens.sessions import SessionPicker
from tqchat.tui.screens.text import TextView
from tqchat.tui.state import NO_USAGE, Figures, Progress
from tqchat.tui.terminal import use_terminal_driver
from tqchat.tui.text import clean_line, clean_paste
from tqchat.tui.widgets.bars import Activity, Header, KeyHints
from tqchat.tui.widgets.conversation import Conversation
from tqchat.tui.widgets.panels import CompactStatus, SidePanel
from tqchat.tui.widgets.prompt import CommandMenu, Prompt

log = logging.getLogger(__name__)

TICK_S = 1 / 15
# While nothing happens, every wake-up costs more than what there is to do.
IDLE_TICK_S = 0.4
_HINT_S = 4.0
_MOMENT_S = 0.5
_PAUSE_S = 0.3
_NEARLY_FULL = 0.9
_NO_TOKEN = "There is no token in the prompt: paste a long text, or /file PATH."
_ENDINGS: dict[FinishReason, str] = {
    "stop": "",
    "stopped": "stopped",
    "length": "cut at the most tokens allowed (--max-tokens)",
    "context": "the context is full: /clear starts afresh, --context N makes more room",
}


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
    def count(self, text: str) -> int: ...
    def stop(self) -> None: ...
    def clear(self) -> None: ...
    def close(self, timeout: float | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A started engine and the model to load. `suggest_larger`: nobody chose this small model."""

    engine: ChatEngine
    model: str
    suggest_larger: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What a conversation is held with."""

    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None


@dataclass
class _Turn:
    """A question under way. `shown` is it as typed, with tokens for what was pasted."""

    number: int
    question: Question
    text: str
    shown: str
    answer: Answer | None = None
    tokens: int = 0
    began: float = field(default_factory=lambda: monotonic())


@dataclass
class _Waiting:
    question: Question
    text: str
    shown: str


class ChatApp(App[int]):
    """`open_engine` is called on a thread of its own after the first frame: it may import MLX. It
    is given the name of the model that `session`, the conversation to go on with, was held with."""

    CSS_PATH = "app.tcss"
    TITLE = "tqchat"
    AUTO_FOCUS = "Prompt"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "copy_or_stop", show=False, priority=True),
        Binding("escape", "stop", show=False),
        Binding("ctrl+q", "leave", show=False, priority=True),
        Binding("f3", "view_token", show=False, priority=True),
        Binding("f4", "edit_token", show=False, priority=True),
        Binding("ctrl+g", "edit_prompt", show=False, priority=True),
        Binding("ctrl+b,f2", "toggle_panel", show=False, priority=True),
        Binding("pageup", "scroll('page_up')", show=False, priority=True),
        Binding("pagedown", "scroll('page_down')", show=False, priority=True),
        Binding("ctrl+home", "scroll('home')", show=False, priority=True),
        Binding("ctrl+end", "scroll('end')", show=False, priority=True),
    ]
    KEYS: ClassVar[Sequence[tuple[str, str]]] = (
        ("Enter", "send"),
        ("Ctrl-J", "new line (Shift-Enter and Alt-Enter too, where the terminal has them)"),
        ("Esc", "stop the answer; what waits comes back to the prompt"),
        ("Ctrl-C", "copy what is selected, else stop"),
        ("Ctrl-D", "leave, when the prompt is empty"),
        ("Up, Down", "earlier messages"),
        ("F3, F4", "view or edit the text of the token at the cursor"),
        ("Ctrl-G", "write in $EDITOR"),
        ("PgUp, PgDn", "scroll; Ctrl-End goes to the newest"),
        ("Ctrl-P", "all commands, searchable"),
        ("Ctrl-B, F2", "show or hide the figures"),
    )

    def __init__(
        self,
        open_engine: Callable[[str | None], Opened],
        settings: Settings,
        theme: str = themes.DARK,
        session: Session | None = None,
        choose: bool = False,
    ) -> None:
        super().__init__()
        self._open_engine = open_engine
        self._given = settings
        self._choose = choose
        self._settings = settings
        self._opened: Opened | None = None
        self._open_fault: BaseException | None = None
        self._opener = threading.Thread(target=self._open, name="open-engine", daemon=True)
        self._dead = False
        self._loading: Progress | None = Progress("Starting")
        self._reading: Progress | None = None
        self._figures = Figures()
        self._counts = Counts()
        # Tokens of the conversation so far, as the engine told last.
        self._held = 0
        self._warned = False
        self._draft = ""
        self._draft_at = 0.0
        self._record = Record(settings.system, self._not_saved)
        if session is not None:
            self._record.go_on(session, settings.system)
        self._turn: _Turn | None = None
        self._waiting: deque[_Waiting] = deque()
        self._hint = ("", 0.0)
        self._ticks = 0
        self._resting = False
        self._draw_at = 0.0
        self._text: list[str] = []
        self._last_usage: Usage | None = None
        found, faults = themes.shipped()
        for one in found:
            self.register_theme(one)
        self._theme_faults = faults
        self.theme = theme

    def get_css_variables(self) -> dict[str, str]:
        self.theme_variables = themes.complete(super().get_css_variables())
        return self.theme_variables

    def compose(self) -> ComposeResult:
        self._header = Header()
        self._conversation = Conversation()
        self._menu = CommandMenu()
        self._activity = Activity()
        self._prompt = Prompt(self._menu)
        self._compact = CompactStatus()
        self._side = SidePanel()
        self._key_hints = KeyHints()
        yield self._header
        with Horizontal(id="main"):
            with Vertical(id="chat"):
                yield self._conversation
                with Vertical(id="foot"):
                    yield self._activity
                    yield self._menu
                    self._box = Horizontal(self._prompt, id="box")
                    yield self._box
                yield self._compact
            yield self._side
        yield self._key_hints

    def on_mount(self) -> None:
        self._conversation.append(welcome.greeting())
        if self._record.session is not None:
            self._show_record(self._record.session)
        for fault in self._theme_faults:
            self._conversation.append(Fault(clean_line(fault)))
        self._draw_figures()
        self._draw_bars()
        if self._choose:
            self.push_screen(SessionPicker(self._record.rename), self._start_with)
        else:
            self.call_after_refresh(self._opener.start)
        self._timer = self.set_interval(TICK_S, self._tick)
        self.set_interval(IDLE_TICK_S, self._idle_tick)

    def _start_with(self, session_id: str | None) -> None:
        self._go_on(session_id)
        self._opener.start()

    # The engine

    def _open(self) -> None:
        try:
            session = self._record.session
            opened = self._open_engine(None if session is None else session.model)
            if session is not None:
                opened.engine.take_up(session.cache_folder)
            opened.engine.load(opened.model)
            self._opened = opened
            # Needed with the first answer, and slow to import: better now than then.
            parser()
            importlib.import_module("tqchat.tui.syntax")
        except BaseException as fault:
            log.exception("The engine did not start")
            self._open_fault = fault

    def close_engine(self) -> None:
        """Ends the engine, if it was started, and then the session. Waits for what cannot be
        interrupted."""
        if self._opener.is_alive():
            self._opener.join()
        if self._opened is not None:
            self._opened.engine.close()
        self._record.close()

    @property
    def _engine(self) -> ChatEngine | None:
        return None if self._opened is None or self._dead else self._opened.engine

    @property
    def busy(self) -> bool:
        """Whether the model is being loaded or is answering."""
        return self._turn is not None or self._loading is not None

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks % 2:
            self._activity.tick()
        self._drain()
        self._count()
        if monotonic() >= self._draw_at:
            began = monotonic()
            self._draw_text()
            # Never more than a tenth of the time goes into drawing, however slow that is.
            self._draw_at = monotonic() + min(9 * (monotonic() - began), 1.0)
        self._draw_bars()
        self._resting = not self.busy
        if self._resting:
            self._timer.pause()
        else:
            self._timer.resume()

    def _idle_tick(self) -> None:
        if self._resting:
            self._tick()

    def _drain(self) -> None:
        if self._open_fault is not None:
            fault, self._open_fault = self._open_fault, None
            self._failed_to_load(f"The engine did not start: {type(fault).__name__}: {fault}")
        if (engine := self._engine) is None:
            return
        changed = False
        # What the engine said before it ended is read first.
        alive = engine.alive
        while engine.events:
            event = engine.events.popleft()
            changed |= self._take(event)
        if not alive:
            self._engine_died()
        if changed:
            self._draw_figures()

    def _take(self, event: Event) -> bool:
        """Acts on one event; True if the figures changed."""
        figures = self._figures
        match event:
            case Loading(label, done, total):
                if self._loading is None or self._loading.label != label:
                    self._loading = Progress(label, skipped=done)
                self._loading.advance(done, total)
                return False
            case Loaded(model, cache, memory):
                figures.model, figures.cache, figures.memory = model, cache, memory
                figures.kv = model.kv
                self._held = cache.tokens
                self._counts.forget()
                self._loaded(model)
            case Stats(usage, cache, memory):
                figures.cache, figures.memory = cache, memory
                if usage == NO_USAGE:
                    self._record.let_go()
                    self._held = 0
                elif self._turn is not None:
                    figures.usage = usage
            case TakenUp(cache, memory):
                figures.cache, figures.memory = cache, memory
                self._record.let_go()
                self._held = cache.tokens
                if figures.model is not None:
                    self._loading = None
                    self._next()
            case Counted(number, tokens):
                self._counts.answer(number, tokens)
                self._label_tokens()
                return False
            case Note(message):
                self._conversation.append(Notice(clean_line(message)))
                return False
            case Failed(None, message):
                self._failed_to_load(message)
                return False
            case Prefilling(turn, done, total, cached):
                if self._is_running(turn):
                    if self._reading is None:
                        self._reading = Progress("Reading", skipped=cached)
                    self._reading.advance(done, total)
                return False
            case Token(turn, text):
                return self._is_running(turn) and self._token(text)
            case Finished(turn, reason, text, usage, cache, memory):
                figures.cache, figures.memory = cache, memory
                if self._is_running(turn):
                    figures.usage = self._last_usage = usage
                    self._finished(reason, text)
            case Failed(turn, message, excess):
                if turn is not None and self._is_running(turn):
                    self._failed(message, excess)
                return False
        return True

    def _is_running(self, turn: int) -> bool:
        return self._turn is not None and self._turn.number == turn

    def _loaded(self, model: ModelInfo) -> None:
        self._loading = None
        said: list[Entry] = [Notice(clean_line(note)) for note in model.notes]
        if self._opened is not None and self._opened.suggest_larger:
            said.insert(0, welcome.larger_model(model))
        # Before the messages that wait for the model.
        place = len(self._conversation.entries) - len(self._waiting)
        for entry in reversed(said):
            self._conversation.insert(place, entry)
        self._next()

    def _failed_to_load(self, message: str) -> None:
        self._loading = None
        self._conversation.append(
            Fault(f"{clean_line(message)}\n/retry tries to load the model again, /quit leaves.")
        )
        self._take_back_waiting()

    def _engine_died(self) -> None:
        self._dead = True
        self._loading = None
        if self._turn is not None:
            self._failed("The engine has stopped working.", 0)
        self._take_back_waiting()
        self._conversation.append(
            Fault(
                "The engine has ended, so nothing more can be answered. Copy what you need, leave "
                "with /quit and start again; the log file says more."
            )
        )

    # A turn

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        command = find(event.text)
        if isinstance(command, Call):
            self._run(command.command, command.argument)
        elif isinstance(command, Unknown):
            self._prompt.put_back(event.shown)
            self.hint(clean_line(command.message))
        elif self._dead or (self._opened is not None and not self.busy and not self._figures.model):
            self._prompt.put_back(event.shown)
            self.hint("No model is loaded. /retry tries again, /quit leaves.")
        else:
            self._send(event.text, event.shown)

    def _run(self, command: Command, argument: str = "") -> None:
        if command.needs_argument and not argument:
            self._prompt.put_back(f"/{command.name} ")
            self.hint(f"{command.usage}: {command.help}")
        else:
            command.run(self, argument)

    def on_prompt_leave(self) -> None:
        self.action_leave()

    def _send(self, text: str, shown: str) -> None:
        question = Question(shown)
        self._waiting.append(_Waiting(question, text, shown))
        if self.busy:
            question.waiting("waits for the model" if self._loading else "waits for the answer")
        self._conversation.append(question)
        self._conversation.show_end()
        self._next()

    def _next(self) -> None:
        """Starts the next turn, if one waits and nothing runs."""
        engine = self._engine
        if self.busy or not self._waiting or engine is None:
            return
        waiting = self._waiting.popleft()
        waiting.question.waiting("")
        self._conversation.update_entry(waiting.question)
        assert self._figures.model is not None
        if folder := self._record.ask(waiting.text, self._figures.model.name):
            engine.take_up(folder)
        number = engine.generate(
            self._record.talk.prompt(), self._settings.sampling, self._settings.max_tokens
        )
        self._turn = _Turn(number, waiting.question, waiting.text, waiting.shown)
        self._timer.resume()
        self._reading = None

    def _token(self, text: str) -> bool:
        turn = self._turn
        assert turn is not None
        if turn.answer is None:
            turn.answer = Answer()
            place = self._conversation.entries.index(turn.question) + 1
            self._conversation.insert(place, turn.answer)
            self._reading = None
            self._figures.begin_decoding()
        turn.tokens += 1
        self._text.append(text)
        self._record.stream(text)
        return self._figures.count_tokens(1)

    def _draw_text(self) -> None:
        if self._text and self._turn is not None and self._turn.answer is not None:
            self._turn.answer.feed("".join(self._text))
            self._text.clear()
            self._conversation.update_entry(self._turn.answer)

    def _finished(self, reason: FinishReason, text: str) -> None:
        turn = self._turn
        assert turn is not None
        self._draw_text()
        self._turn = self._reading = None
        self._hint = ("", 0.0)
        if reason == "stopped" and not text:
            self._take_back(turn)
        else:
            self._record.finish(text)
            if (cache := self._figures.cache) is not None:
                self._held = cache.tokens
                self._warn_if_nearly_full(cache.tokens, cache.context)
            answer = turn.answer or Answer()
            answer.finish(self._footer(reason), "$text-muted" if reason == "stop" else "$warning")
            if turn.answer is None:
                place = self._conversation.entries.index(turn.question) + 1
                self._conversation.insert(place, answer)
            else:
                self._conversation.update_entry(answer)
        self._next()

    def _footer(self, reason: FinishReason) -> str:
        usage = self._figures.usage
        facts = [f"{usage.completion_tokens:,} tokens"]
        if usage.decode_tps:
            facts.append(f"{rate_text(usage.decode_tps)} tok/s")
        if usage.ttft_s:
            facts.append(f"first after {seconds_text(usage.ttft_s)}")
        if _ENDINGS[reason]:
            facts.insert(0, _ENDINGS[reason])
        return " · ".join(facts)

    def _failed(self, message: str, excess: int) -> None:
        turn = self._turn
        assert turn is not None
        self._draw_text()
        self._turn = self._reading = None
        message = clean_line(message)
        if excess and f"{excess:,}" not in message and str(excess) not in message:
            message = f"Too long by {excess:,} tokens. {message}"
        if turn.answer is not None:
            turn.answer.finish("not finished", "$warning")
            self._conversation.update_entry(turn.answer)
        self._take_back(turn)
        self._take_back_waiting()
        self._conversation.append(Fault(message))
        self._conversation.show_end()
        if excess:
            self._offer_room(excess)

    def _warn_if_nearly_full(self, tokens: int, context: int) -> None:
        nearly_full = tokens >= _NEARLY_FULL * context > 0
        if nearly_full and not self._warned:
            text = f"The context is nearly full: {context - tokens:,} of {context:,} tokens left."
            self._conversation.append(Notice(text, "!", "$warning"))
        self._warned = nearly_full

    def _offer_room(self, excess: int) -> None:
        """The message did not fit: the person chooses what goes, if anything."""
        messages, freed, stop = self._record.messages, 0, 0
        while stop < len(messages) and (freed < excess or messages[stop].role != "user"):
            freed += self._counts.guess(messages[stop].content)
            stop += 1
        answers = [("clear", "Begin a new conversation")]
        if freed >= excess:
            turns = sum(message.role == "user" for message in messages[:stop])
            what = "the oldest turn" if turns == 1 else f"the {turns} oldest turns"
            answers.insert(0, ("drop", f"Drop {what}: about {freed:,} tokens"))
        if messages:
            question = f"The message is {excess:,} tokens too long. It stays in the prompt."
            self.push_screen(Choice(question, answers), partial(self._make_room, stop, freed))

    def _make_room(self, stop: int, freed: int, way: str | None) -> None:
        shown = self._prompt.text
        if way == "clear":
            self.clear()
        elif way == "drop":
            self._drop(stop, freed)
        if way is not None:
            self._prompt.text = shown
            self.hint("There is more room now: Enter sends the message.")

    def _drop(self, stop: int, freed: int) -> None:
        """The oldest messages, `stop` of them, go from the conversation and the screen."""
        self._record.replace(0, stop)
        left = sum(message.role == "user" for message in self._record.messages)
        entries = self._conversation.entries
        questions = [place for place, one in enumerate(entries) if isinstance(one, Question)]
        first = questions[-left] if left else len(entries)
        for entry in entries[:first]:
            self._conversation.remove_entry(entry)
        self._held = max(self._held - freed, 0)
        text = f"What came before was dropped, about {freed:,} tokens: the model no longer sees it."
        self._conversation.insert(0, Notice(text))

    def _take_back(self, turn: _Turn) -> None:
        """The message was not answered: it returns to the prompt and leaves the conversation."""
        self._record.take_back()
        if turn.answer is None:
            self._conversation.remove_entry(turn.question)
        self._prompt.put_back(turn.shown)

    def _take_back_waiting(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            self._conversation.remove_entry(waiting.question)
            self._prompt.put_back(waiting.shown)

    # What would be sent

    def _count(self) -> None:
        """Has the prompt's texts counted, once it is left alone for a moment, and says what would
        be sent and what is left."""
        shown, prompt = self._prompt.text, self._prompt
        if shown != self._draft:
            self._draft, self._draft_at = shown, monotonic() + _PAUSE_S
        texts = [one.text for one in prompt.attachments.inside(shown)]
        typed = prompt.attachments.typed(shown)
        if monotonic() >= self._draft_at:
            texts.append(typed)
        if self._figures.model is not None and (engine := self._engine) is not None:
            for text in texts:
                if self._counts.known(text) is None and not self._counts.is_asked(text):
                    self._counts.ask(engine.count(text), text)
        self._draw_count(shown, typed)

    def _label_tokens(self) -> None:
        for one in self._prompt.attachments.inside(self._prompt.text):
            one.tokens = self._counts.known(one.text)
        self._prompt.relabel()

    def _draw_count(self, shown: str, typed: str) -> None:
        subtitle, full = "", False
        cache = self._figures.cache
        if shown and cache is not None and cache.context and not shown.startswith("/"):
            texts = [*(one.text for *_, one in self._prompt.attachments.spans(shown)), typed]
            tokens = sum(map(self._counts.guess, texts))
            about = "≈ " if any(self._counts.known(text) is None for text in texts) else ""
            left = cache.context - self._held - tokens
            full = left < 0
            rest = f"{-left:,} too many" if full else f"{left:,} left"
            subtitle = f"{about}{tokens:,} tokens · {rest}"
        if subtitle != self._box.border_subtitle:
            self._box.border_subtitle = subtitle
            self._box.set_class(full, "-full")

    # Drawing

    def _draw_figures(self) -> None:
        self._side.draw(self._figures)
        self._compact.draw(self._figures)

    def _draw_bars(self) -> None:
        now = monotonic()
        turn, activity = self._turn, self._activity
        hint, until = self._hint
        if self._dead:
            state, style = "stopped", "$error"
        elif self._loading is not None:
            state, style = "loading", "$warning"
        elif turn is not None:
            state, style = ("answering" if turn.answer else "reading"), "$accent"
        elif self._figures.model is None:
            state, style = "no model", "$error"
        else:
            state, style = "ready", "$success"
        self._header.draw(self._figures.model, state, style)
        if hint and now < until:
            activity.show_idle(hint)
        elif self._loading is not None:
            activity.show_loading(self._loading)
        elif turn is not None and turn.answer is not None:
            activity.show_answering(turn.tokens, now - turn.began)
        elif self._reading is not None and self._reading.total:
            activity.show_reading(self._reading)
        elif turn is not None:
            activity.show_busy("Reading")
        else:
            activity.show_idle()
        self._key_hints.draw(self._keys_now())

    def _keys_now(self) -> Sequence[tuple[str, str]]:
        keys: list[tuple[str, str]] = []
        if self._menu.display:
            return (("↑↓", "choose"), ("Tab", "complete"), ("Enter", "run"))
        if self.busy:
            keys.append(("Esc", "stop"))
        if not self._conversation.following:
            keys.append(("^End", "newest"))
        keys += [("Enter", "send"), ("^J", "new line"), ("/", "commands"), ("^B", "figures")]
        if not self.busy:
            keys.append(("^D", "leave"))
        return tuple(keys)

    def hint(self, text: str) -> None:
        """A passing line above the prompt."""
        self._hint = (text, monotonic() + _HINT_S)
        self._draw_bars()

    # Keys

    def action_copy_or_stop(self) -> None:
        selected = self.screen.get_selected_text() or self._prompt.selected_text
        if selected:
            self._copy(selected, "The selection")
            self.screen.clear_selection()
        elif self.busy:
            self.action_stop()
        else:
            self.hint("Nothing to stop. Ctrl-D or /quit leaves.")

    def action_stop(self) -> None:
        if self._menu.display:
            self._menu.display = False
        elif self.busy and (engine := self._engine) is not None:
            self._take_back_waiting()
            engine.stop()
            self.hint("Stopping …")
        else:
            self.screen.clear_selection()

    def action_leave(self) -> None:
        self.exit(0)

    def action_toggle_panel(self) -> None:
        self.screen.toggle_class("-calm")

    def action_scroll(self, way: str) -> None:
        conversation = self._conversation
        match way:
            case "page_up":
                conversation.scroll_page_up(animate=False)
            case "page_down":
                conversation.scroll_page_down(animate=False)
            case "home":
                conversation.scroll_home(animate=False)
            case "end":
                conversation.show_end()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            yield SystemCommand(f"/{command.name}", command.help, partial(self._run, command))

    # Commands

    def show_help(self) -> None:
        self._conversation.append(
            Listing("Commands", [(command.usage, command.help) for command in COMMANDS])
        )
        self._conversation.append(Listing("Keys", self.KEYS))
        self._conversation.show_end()

    def clear(self) -> None:
        """Begins a new conversation; a running answer is stopped first."""
        saved = self._record.session is not None
        if (engine := self._engine) is not None:
            if self._turn is not None:
                engine.stop()
            engine.clear()
        self._leave_conversation()
        before = " The one before is saved." if saved else ""
        self._conversation.append(Notice(f"A new conversation.{before}"))
        self._draw_figures()

    def _leave_conversation(self) -> None:
        self._turn = self._reading = None
        self._text.clear()
        self._waiting.clear()
        self._record.leave()
        if self._figures.model is None:
            self._record.let_go()
        self._figures.usage = NO_USAGE
        self._figures.speeds.clear()
        self._conversation.empty()

    def _show_record(self, session: Session) -> None:
        """The conversation that was taken up, as it was left."""
        messages = self._record.messages
        for number, message in enumerate(messages):
            if message.role == "user":
                self._conversation.append(Question(self._prompt.fold(message.content)))
                continue
            answer = Answer()
            answer.feed(message.content)
            cut = session.unfinished and number == len(messages) - 1
            answer.finish("not finished: /retry answers again" if cut else "", "$warning")
            self._conversation.append(answer)
        if self._record.unanswered:
            self._conversation.append(Notice("Not answered yet: /retry asks again."))
        self._conversation.show_end()

    def _not_saved(self, message: str) -> None:
        self._conversation.append(Notice(clean_line(message), "!", "$warning"))

    def reset(self) -> None:
        self._settings = self._given
        self._record.talk.system = self._given.system or ""
        self.clear()
        self._conversation.append(Notice("System prompt and sampling are as at the start."))

    def retry(self) -> None:
        """Answers the last question anew; without a model, tries to load it again."""
        engine = self._engine
        if engine is None or self._opened is None:
            self.hint("There is no engine to try again with: leave and start again.")
        elif self.busy:
            self.hint("Something is running: Esc stops it.")
        elif self._figures.model is None:
            self._loading = Progress("Starting")
            engine.load(self._opened.model)
        elif not self._record.messages:
            self.hint("There is nothing to answer again.")
        else:
            self._answer_again()

    def _answer_again(self) -> None:
        entries = self._conversation.entries
        place = max(n for n, entry in enumerate(entries) if isinstance(entry, Question))
        question = entries[place]
        assert isinstance(question, Question)
        for entry in entries[place + 1 :]:
            self._conversation.remove_entry(entry)
        start = max(n for n, m in enumerate(self._record.messages) if m.role == "user")
        text = self._record.messages[start].content
        self._record.replace(start)
        self._waiting.append(_Waiting(question, text, question.text))
        self._next()

    def attach_file(self, name: str) -> None:
        """Puts a token for a file into the prompt."""
        self._read_file(Path(name).expanduser())

    def on_prompt_file_chosen(self, event: Prompt.FileChosen) -> None:
        self._read_file(event.path)

    @work(thread=True, exit_on_error=False)
    def _read_file(self, path: Path) -> None:
        try:
            document = read_document(path)
        except ChatError as error:
            self.call_from_thread(self._conversation.append, Fault(str(error)))
        else:
            self.call_from_thread(self._attach_document, document)

    def _attach_document(self, document: Document) -> None:
        if document.note:
            self._conversation.append(Notice(clean_line(document.note)))
        self._prompt.attach(document.name, document.text)

    def action_view_token(self) -> None:
        if (one := self._prompt.token_here()) is None:
            self.hint(_NO_TOKEN)
        else:
            self.push_screen(TextView(one.label, one.text))

    def action_edit_token(self) -> None:
        """Opens the text of a token in the editor."""
        if (one := self._prompt.token_here()) is None:
            self.hint(_NO_TOKEN)
        elif (text := self._edited(one.text)) is not None:
            one.text, one.tokens = clean_paste(text), None
            self._prompt.relabel()

    def action_edit_prompt(self) -> None:
        """Opens the whole prompt in the editor; tokens stay tokens."""
        if (text := self._edited(self._prompt.text)) is not None:
            text = clean_paste(text).rstrip("\n")
            has_tokens = self._prompt.attachments.inside(text)
            self._prompt.text = text if has_tokens else self._prompt.fold(text)
            self._prompt.move_cursor(self._prompt.document.end)

    def _edited(self, text: str) -> str | None:
        try:
            with self.suspend():
                return edit(text)
        except (OSError, SuspendNotSupported) as error:
            self.hint(clean_line(f"Set $EDITOR to an editor that works: {error}"))
            return None

    def choose_session(self) -> None:
        self.push_screen(SessionPicker(self._record.rename), self._go_on)

    def _go_on(self, session_id: str | None) -> None:
        """Leaves the conversation for another one."""
        session = self._record.session
        if session_id is None or (session is not None and session.id == session_id):
            return
        try:
            session = self._record.open(session_id)
        except ChatError as error:
            self._conversation.append(Fault(str(error)))
            return
        engine = self._engine
        if engine is not None:
            if self._turn is not None:
                engine.stop()
            engine.take_up(session.cache_folder)
        self._leave_conversation()
        self._record.go_on(session, self._given.system)
        self._show_record(session)

    def rename(self, title: str) -> None:
        if (session := self._record.session) is None:
            self.hint("There is no conversation yet: ask something first.")
            return
        try:
            self._record.rename(session.id, title)
        except ChatError as error:
            self._conversation.append(Fault(str(error)))
        else:
            self.hint(f"The conversation is called: {clean_line(session.title)}")

    def export(self, name: str) -> None:
        """To a file in Markdown, or JSON if its name ends so; none is written over."""
        if (session := self._record.session) is None:
            self.hint("There is no saved conversation to export.")
            return
        words = re.sub(r"[^\w]+", "-", session.title).strip("-")[:40]
        path = Path(name or f"{words or session.id}.md").expanduser()
        is_json = path.suffix.lower() == ".json"
        try:
            if os.path.lexists(path):
                self.hint(f"There is one already: {clean_line(str(path))}")
                return
            if not path.parent.is_dir():
                self.hint(f"There is no folder {clean_line(str(path.parent))}.")
                return
            paths.write_private(path, session.to_json() if is_json else session.to_markdown())
        except OSError as error:
            self._conversation.append(
                Fault(f"The file cannot be written: {error.strerror}. Choose another place.")
            )
        else:
            self.hint(f"Written to {clean_line(str(path))}")

    def copy_answer(self) -> None:
        answers = [
            message.content for message in self._record.messages if message.role == "assistant"
        ]
        if answers:
            self._copy(answers[-1], "The last answer")
        else:
            self.hint("There is no answer to copy yet.")

    def _copy(self, text: str, what: str) -> None:
        self.copy_to_clipboard(text)
        self.hint(f"{what} went to the terminal's clipboard ({len(text):,} characters).")

    def show_stats(self) -> None:
        usage, figures = self._last_usage, self._figures
        if usage is None:
            self.hint("There are no figures yet: ask something first.")
            return
        pairs = [
            ("prompt", f"{usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them cached"),
            ("answer", f"{usage.completion_tokens:,} tokens"),
            ("first token", f"after {seconds_text(usage.ttft_s)}"),
            ("reading", f"{rate_text(usage.prefill_tps)} tokens/s"),
            ("writing", f"{rate_text(usage.decode_tps)} tokens/s"),
        ]
        if cache := figures.cache:
            pairs += [
                ("KV cache", f"{cache.kv_bytes:,} bytes, {cache.kv_bytes_allocated:,} allocated"),
                ("in fp16", f"{cache.kv_bytes_fp16:,} bytes"),
                ("context", f"{cache.tokens:,} of {cache.context:,} tokens"),
            ]
        self._conversation.append(Listing("The last answer", pairs))
        self._conversation.show_end()


def open_engine(model: str | None, options: EngineOptions, saved_model: str | None) -> Opened:
    """Starts an engine for the model named, else the one the saved conversation was held with, else
    the last one used, else the built-in one."""
    from tqchat.engine.engine import Engine, default_model

    name = model or saved_model
    name, is_small = default_model() if name is None else (name, False)
    engine = Engine(options)
    engine.start()
    return Opened(engine, name, suggest_larger=is_small)


def run(
    model: str | None,
    options: EngineOptions,
    settings: Settings,
    session: Session | None = None,
    choose: bool = False,
) -> int:
    """Chats on the terminal until the person leaves. Returns the exit code."""
    use_terminal_driver()
    app = ChatApp(partial(open_engine, model, options), settings, session=session, choose=choose)
    try:
        code = app.run()
    finally:
        saying = threading.Timer(_MOMENT_S, print, ["Saving …"])
        saying.start()
        app.close_engine()
        saying.cancel()
    return 1 if code is None else code
