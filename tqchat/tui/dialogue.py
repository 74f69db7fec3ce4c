"""The conversation as it goes: messages wait, turns run, and what the engine tells is acted on."""

from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from tqchat.chat.sessions import Session
from tqchat.engine.events import (
    Counted,
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
from tqchat.settings import Settings
from tqchat.tui import welcome
from tqchat.tui.engine import ChatEngine
from tqchat.tui.entries import Answer, Entry, Fault, Notice, Question
from tqchat.tui.figures import rate_text, seconds_text
from tqchat.tui.record import Record
from tqchat.tui.room import Room
from tqchat.tui.state import NO_USAGE, Figures, Progress
from tqchat.tui.text import clean_line

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp

_ENDINGS: dict[FinishReason, str] = {
    "stop": "",
    "stopped": "stopped",
    "length": "cut at the most tokens allowed (--max-tokens)",
    "context": "the context is full: /clear starts afresh, --context N makes more room",
}


@dataclass
class Turn:
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


class Dialogue:
    """What is said, on the screen and in the record. `held`: tokens of the conversation so far, as
    the engine told last. `dead`: the engine's thread has ended."""

    def __init__(self, app: "ChatApp", settings: Settings, session: Session | None) -> None:
        self._app = app
        self.given = settings
        self.settings = settings
        self.record = Record(settings.system, self._not_saved)
        if session is not None:
            self.record.go_on(session, settings.system)
        self.room = Room(app, self)
        self.figures = Figures()
        self.loading: Progress | None = Progress("Starting")
        self.reading: Progress | None = None
        self.turn: Turn | None = None
        self.held = 0
        self.dead = False
        self.last_usage: Usage | None = None
        self._waiting: deque[_Waiting] = deque()
        self._text: list[str] = []

    @property
    def engine(self) -> ChatEngine | None:
        opened = self._app.opening.opened
        return None if opened is None or self.dead else opened.engine

    @property
    def busy(self) -> bool:
        """Whether the model is being loaded or is answering."""
        return self.turn is not None or self.loading is not None

    @property
    def has_no_model(self) -> bool:
        """Nothing sent now would ever be answered."""
        opened = self._app.opening.opened is not None
        return self.dead or (opened and not self.busy and self.figures.model is None)

    # What the engine tells

    def drain(self) -> bool:
        """Acts on what the engine told since; True if the figures changed."""
        if (fault := self._app.opening.take_fault()) is not None:
            self._failed_to_load(f"The engine did not start: {type(fault).__name__}: {fault}")
        if (engine := self.engine) is None:
            return False
        changed = False
        # What the engine said before it ended is read first.
        alive = engine.alive
        while engine.events:
            changed |= self._take(engine.events.popleft())
        if not alive:
            self._engine_died()
        return changed

    def _take(self, event: Event) -> bool:
        """Acts on one event; True if the figures changed."""
        figures = self.figures
        match event:
            case Loading(label, done, total):
                if self.loading is None or self.loading.label != label:
                    self.loading = Progress(label, skipped=done)
                self.loading.advance(done, total)
                return False
            case Loaded(model, cache, memory):
                figures.model, figures.cache, figures.memory = model, cache, memory
                figures.kv = model.kv
                self.held = cache.tokens
                self._app.draft.forget()
                self._loaded(model)
            case Stats(usage, cache, memory):
                figures.cache, figures.memory = cache, memory
                if usage == NO_USAGE:
                    self.record.let_go()
                    self.held = 0
                elif self.turn is not None:
                    figures.usage = usage
            case TakenUp(cache, memory):
                figures.cache, figures.memory = cache, memory
                self.record.let_go()
                self.held = cache.tokens
                if figures.model is not None:
                    self.loading = None
                    self._next()
            case Counted(number, tokens):
                self._app.draft.counted(number, tokens)
                return False
            case Note(message):
                self._app.conversation.append(Notice(clean_line(message)))
                return False
            case Failed(None, message):
                self._failed_to_load(message)
                return False
            case Prefilling(turn, done, total, cached):
                if self._is_running(turn):
                    if self.reading is None:
                        self.reading = Progress("Reading", skipped=cached)
                    self.reading.advance(done, total)
                return False
            case Token(turn, text):
                return self._is_running(turn) and self._token(text)
            case Finished(turn, reason, text, usage, cache, memory):
                figures.cache, figures.memory = cache, memory
                if self._is_running(turn):
                    figures.usage = self.last_usage = usage
                    self._finished(reason, text)
            case Failed(turn, message, excess):
                if turn is not None and self._is_running(turn):
                    self._failed(message, excess)
                return False
        return True

    def _is_running(self, turn: int) -> bool:
        return self.turn is not None and self.turn.number == turn

    def _loaded(self, model: ModelInfo) -> None:
        self.loading = None
        said: list[Entry] = [Notice(clean_line(note)) for note in model.notes]
        opened = self._app.opening.opened
        if opened is not None and opened.suggest_larger:
            said.insert(0, welcome.larger_model(model))
        # Before the messages that wait for the model.
        conversation = self._app.conversation
        place = len(conversation.entries) - len(self._waiting)
        for entry in reversed(said):
            conversation.insert(place, entry)
        self._next()

    def _failed_to_load(self, message: str) -> None:
        self.loading = None
        self._app.conversation.append(
            Fault(f"{clean_line(message)}\n/retry tries to load the model again, /quit leaves.")
        )
        self._take_back_waiting()

    def _engine_died(self) -> None:
        self.dead = True
        self.loading = None
        if self.turn is not None:
            self._failed("The engine has stopped working.", 0)
        self._take_back_waiting()
        self._app.conversation.append(
            Fault(
                "The engine has ended, so nothing more can be answered. Copy what you need, leave "
                "with /quit and start again; the log file says more."
            )
        )

    # A turn

    def send(self, text: str, shown: str) -> None:
        """Asks `text`, after what waits already."""
        question = Question(shown)
        self._waiting.append(_Waiting(question, text, shown))
        if self.busy:
            question.waiting("waits for the model" if self.loading else "waits for the answer")
        self._app.conversation.append(question)
        self._app.conversation.show_end()
        self._next()

    def _next(self) -> None:
        """Starts the next turn, if one waits and nothing runs."""
        engine = self.engine
        if self.busy or not self._waiting or engine is None:
            return
        waiting = self._waiting.popleft()
        waiting.question.waiting("")
        self._app.conversation.update_entry(waiting.question)
        assert self.figures.model is not None
        if folder := self.record.ask(waiting.text, self.figures.model.name):
            engine.take_up(folder)
        number = engine.generate(
            self.record.talk.prompt(), Sampling.of(self.settings), self.settings.max_tokens
        )
        self.turn = Turn(number, waiting.question, waiting.text, waiting.shown)
        self.reading = None
        self._app.wake()

    def _token(self, text: str) -> bool:
        turn, conversation = self.turn, self._app.conversation
        assert turn is not None
        if turn.answer is None:
            turn.answer = Answer()
            conversation.insert(conversation.entries.index(turn.question) + 1, turn.answer)
            self.reading = None
            self.figures.begin_decoding()
        turn.tokens += 1
        self._text.append(text)
        self.record.stream(text)
        return self.figures.count_tokens(1)

    def draw_text(self) -> None:
        """What was answered since goes on the screen."""
        if self._text and self.turn is not None and self.turn.answer is not None:
            self.turn.answer.feed("".join(self._text))
            self._text.clear()
            self._app.conversation.update_entry(self.turn.answer)

    def _finished(self, reason: FinishReason, text: str) -> None:
        turn, conversation = self.turn, self._app.conversation
        assert turn is not None
        self.draw_text()
        self.turn = self.reading = None
        self._app.hint("")
        if reason == "stopped" and not text:
            self._take_back(turn)
        else:
            self.record.finish(text)
            if (cache := self.figures.cache) is not None:
                self.held = cache.tokens
                self.room.warn_if_nearly_full(cache.tokens, cache.context)
            answer = turn.answer or Answer()
            answer.finish(self._footer(reason), "$text-muted" if reason == "stop" else "$warning")
            if turn.answer is None:
                conversation.insert(conversation.entries.index(turn.question) + 1, answer)
            else:
                conversation.update_entry(answer)
        self._next()

    def _footer(self, reason: FinishReason) -> str:
        usage = self.figures.usage
        facts = [f"{usage.completion_tokens:,} tokens"]
        if usage.decode_tps:
            facts.append(f"{rate_text(usage.decode_tps)} tok/s")
        if usage.ttft_s:
            facts.append(f"first after {seconds_text(usage.ttft_s)}")
        if _ENDINGS[reason]:
            facts.insert(0, _ENDINGS[reason])
        return " · ".join(facts)

    def _failed(self, message: str, excess: int) -> None:
        turn, conversation = self.turn, self._app.conversation
        assert turn is not None
        self.draw_text()
        self.turn = self.reading = None
        message = clean_line(message)
        if excess and f"{excess:,}" not in message and str(excess) not in message:
            message = f"Too long by {excess:,} tokens. {message}"
        if turn.answer is not None:
            turn.answer.finish("not finished", "$warning")
            conversation.update_entry(turn.answer)
        self._take_back(turn)
        self._take_back_waiting()
        conversation.append(Fault(message))
        conversation.show_end()
        if excess:
            self.room.offer(excess)

    def _take_back(self, turn: Turn) -> None:
        """The message was not answered: it returns to the prompt and leaves the conversation."""
        self.record.take_back()
        if turn.answer is None:
            self._app.conversation.remove_entry(turn.question)
        self._app.prompt.put_back(turn.shown)

    def _take_back_waiting(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            self._app.conversation.remove_entry(waiting.question)
            self._app.prompt.put_back(waiting.shown)

    def stop(self) -> None:
        """Stops what runs; what waits comes back to the prompt."""
        if self.busy and (engine := self.engine) is not None:
            self._take_back_waiting()
            engine.stop()
            self._app.hint("Stopping …")

    # Beginning anew, and again

    def clear(self) -> None:
        """Begins a new conversation; a running answer is stopped first."""
        saved = self.record.session is not None
        if (engine := self.engine) is not None:
            if self.turn is not None:
                engine.stop()
            engine.clear()
        self.leave()
        before = " The one before is saved." if saved else ""
        self._app.conversation.append(Notice(f"A new conversation.{before}"))
        self._app.draw_figures()

    def leave(self) -> None:
        """The conversation goes from the screen; it stays on the disk."""
        self.turn = self.reading = None
        self._text.clear()
        self._waiting.clear()
        self.record.leave()
        if self.figures.model is None:
            self.record.let_go()
        self.figures.usage = NO_USAGE
        self.figures.speeds.clear()
        self._app.conversation.empty()

    def show_record(self, session: Session) -> None:
        """The conversation that was taken up, as it was left."""
        messages, conversation = self.record.messages, self._app.conversation
        for number, message in enumerate(messages):
            if message.role == "user":
                conversation.append(Question(self._app.prompt.fold(message.content)))
                continue
            answer = Answer()
            answer.feed(message.content)
            cut = session.unfinished and number == len(messages) - 1
            answer.finish("not finished: /retry answers again" if cut else "", "$warning")
            conversation.append(answer)
        if self.record.unanswered:
            conversation.append(Notice("Not answered yet: /retry asks again."))
        conversation.show_end()

    def _not_saved(self, message: str) -> None:
        self._app.conversation.append(Notice(clean_line(message), "!", "$warning"))

    def reset(self) -> None:
        """As `clear`; system prompt and sampling are put back."""
        self.settings = self.given
        self.record.talk.system = self.given.system or ""
        self.clear()
        self._app.conversation.append(Notice("System prompt and sampling are as at the start."))

    def retry(self) -> None:
        """Answers the last question anew; without a model, tries to load it again."""
        engine, opened = self.engine, self._app.opening.opened
        if engine is None or opened is None:
            self._app.hint("There is no engine to try again with: leave and start again.")
        elif self.busy:
            self._app.hint("Something is running: Esc stops it.")
        elif self.figures.model is None:
            self.loading = Progress("Starting")
            engine.load(opened.model)
        elif not self.record.messages:
            self._app.hint("There is nothing to answer again.")
        else:
            self._answer_again()

    def _answer_again(self) -> None:
        conversation = self._app.conversation
        entries = conversation.entries
        place = max(n for n, entry in enumerate(entries) if isinstance(entry, Question))
        question = entries[place]
        assert isinstance(question, Question)
        for entry in entries[place + 1 :]:
            conversation.remove_entry(entry)
        start = max(n for n, m in enumerate(self.record.messages) if m.role == "user")
        text = self.record.messages[start].content
        self.record.replace(start)
        self._waiting.append(_Waiting(question, text, question.text))
        self._next()
