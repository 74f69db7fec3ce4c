"""The conversation as it goes: messages wait, turns run, and what the engine tells is acted on."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING

from tqchat.chat.conversation import Conversation, Message, Span
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
    Planned,
    Prefilling,
    Sampling,
    Stats,
    TakenUp,
    Token,
    Usage,
)
from tqchat.settings import Settings, sampling
from tqchat.tui import welcome
from tqchat.tui.engine import ChatEngine
from tqchat.tui.entries import Answer, Entry, Fault, Notice, Question
from tqchat.tui.figures import rate_text, seconds_text
from tqchat.tui.record import Record
from tqchat.tui.room import Room
from tqchat.tui.state import NO_USAGE, Figures, Progress
from tqchat.tui.text import clean_line
from tqchat.units import bytes_text

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp

# From so many tokens and seconds on, it is said what reading takes.
_LONG_TOKENS, _LONG_S = 1024, 5.0
_ENDINGS: dict[FinishReason, str] = {
    "stop": "",
    "stopped": "stopped: /continue goes on",
    "length": "cut at max_tokens: /continue goes on",
    "repetition": "stopped, it only repeated itself: /continue goes on",
    "context": "the context is full: /clear starts afresh, --context N makes more room",
}


@dataclass
class Turn:
    """A question under way. `shown` is it as typed, with tokens for what was pasted. `before`: the
    answer as it was, if this turn goes on with one. `then`: what a whole answer is for, if it is no
    part of the conversation."""

    number: int
    question: Question
    text: str
    shown: str
    answer: Answer | None = None
    before: str = ""
    then: Callable[[str], None] | None = None
    tokens: int = 0
    usage: Usage = NO_USAGE
    began: float = field(default_factory=lambda: monotonic())


@dataclass
class _Waiting:
    question: Question
    text: str
    shown: str
    attached: tuple[Span, ...]


class Dialogue:
    """What is said, on the screen and in the record. `held`: tokens of the conversation so far, as
    the engine told last. `dead`: the engine's thread has ended."""

    def __init__(self, app: "ChatApp", settings: Settings, session: Session | None) -> None:
        self._app = app
        self.given = settings
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
        self.editing: Question | None = None
        self._waiting: deque[_Waiting] = deque()
        self._text: list[str] = []

    def hold_with(self, settings: Settings) -> None:
        """What the conversation is held with from now on."""
        self.given = settings
        if (session := self.record.session) is not None:
            # What the command line says took the place of some.
            self.record.talk.sampling = sampling(session.conversation.sampling)
        if settings.system not in (None, self.record.talk.system):
            self.record.set_system(settings.system or "")

    @property
    def settings(self) -> Settings:
        """Those in force, with what was chosen for this conversation."""
        return replace(self.given, **self.record.talk.sampling)

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
                    figures.usage = self.turn.usage = usage
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
            case Planned(turn):
                if self._is_running(turn):
                    self._announce(event)
                return False
            case Prefilling(turn, done, total, cached, seconds_left):
                if self._is_running(turn):
                    if self.reading is None:
                        self.reading = Progress("Reading")
                    self.reading.advance(done - cached, total - cached, seconds_left)
                return False
            case Token(turn, text):
                return self._is_running(turn) and self._token(text)
            case Finished(turn, reason, text, usage, cache, memory):
                figures.cache, figures.memory = cache, memory
                if self._is_running(turn):
                    figures.usage = usage
                    if usage.completion_tokens:
                        self.last_usage = usage
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
            Fault(f"{clean_line(message)}\n/retry tries to load it again, /model chooses another.")
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

    def send(self, text: str, shown: str, attached: tuple[Span, ...] = ()) -> None:
        """Asks `text`, after what waits already, or in the place of the message that is edited."""
        if self.editing is not None:
            self._forget_from(self.editing)
            self.end_editing()
        question = Question(shown)
        self._waiting.append(_Waiting(question, text, shown, attached))
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
        if folder := self.record.ask(waiting.text, self.figures.model.name, waiting.attached):
            engine.take_up(folder)
        self._begin(Turn(self._generate(engine), waiting.question, waiting.text, waiting.shown))

    def ask_aside(
        self, before: Sequence[Message], text: str, max_tokens: int, then: Callable[[str], None]
    ) -> None:
        """Asks `text` after the messages `before`, on the screen but not in the conversation;
        `then` gets the answer, unless it was stopped."""
        if self.busy or (engine := self.engine) is None:
            return
        question = Question(text)
        self._app.conversation.append(question)
        self._app.conversation.show_end()
        talk = Conversation(self.record.talk.system, [*before, Message("user", text)])
        number = engine.generate(talk.prompt(), Sampling.of(self.settings), max_tokens)
        self._begin(Turn(number, question, text, text, then=then))

    def _end_aside(self, turn: Turn) -> None:
        self._app.conversation.remove_entry(turn.question)
        if turn.answer is not None:
            self._app.conversation.remove_entry(turn.answer)

    def begin_with(self, messages: Sequence[Message]) -> None:
        """Leaves the conversation for a new one, of which this much is said already."""
        engine, model = self.engine, self.figures.model
        assert engine is not None
        assert model is not None
        self.leave()
        first, *rest = messages
        if folder := self.record.ask(first.content, model.name, first.attached):
            engine.take_up(folder)
        else:
            engine.clear()
        self.record.replace(1, messages=rest)
        self.show_record(self.record.session)

    def _generate(self, engine: ChatEngine) -> int:
        return engine.generate(
            self.record.talk.prompt(), Sampling.of(self.settings), self.settings.max_tokens
        )

    def _begin(self, turn: Turn) -> None:
        self.turn = turn
        self.reading = None
        self._app.wake()

    def _announce(self, plan: Planned) -> None:
        """Says under the question what a long reading takes."""
        if plan.tokens < _LONG_TOKENS or (plan.seconds is not None and plan.seconds < _LONG_S):
            return
        seconds = "" if plan.seconds is None else f", about {seconds_text(plan.seconds)}"
        self._say_under_question(
            f"{plan.tokens:,} tokens to read{seconds} · {bytes_text(plan.peak)} of memory at most, "
            f"{bytes_text(plan.free)} stays free"
        )

    def _say_under_question(self, note: str) -> None:
        assert self.turn is not None
        self.turn.question.waiting(note)
        self._app.conversation.update_entry(self.turn.question)

    def _token(self, text: str) -> bool:
        turn, conversation = self.turn, self._app.conversation
        assert turn is not None
        if turn.answer is None:
            turn.answer = Answer()
            conversation.insert(conversation.entries.index(turn.question) + 1, turn.answer)
        if not turn.tokens:
            self.reading = None
            self._say_under_question("")
            self.figures.begin_decoding()
        turn.tokens += 1
        self._text.append(text)
        if turn.then is None:
            self.record.stream(text)
        return self.figures.count_tokens(1)

    @property
    def undrawn(self) -> bool:
        return bool(self._text)

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
        self._say_under_question("")
        self.turn = self.reading = None
        self._app.hint("")
        if turn.then is not None:
            self._end_aside(turn)
            if reason in ("stop", "length") and text.strip():
                turn.then(text)
            else:
                why = "It only repeated itself" if reason == "repetition" else "Not finished"
                self._app.hint(f"{why}: the conversation is as it was.")
        elif reason == "stopped" and not text and not turn.before:
            self._take_back(turn)
        else:
            self.record.finish(text, "" if reason == "stop" else reason)
            if (cache := self.figures.cache) is not None:
                # Of an answer that was cut the last token is not in the cache yet.
                self.held = cache.tokens + (reason != "stop" and turn.tokens > 0)
                self.room.warn_if_nearly_full(cache.tokens, cache.context)
            answer = turn.answer or Answer()
            answer.finish(self._footer(reason), "$text-muted" if reason == "stop" else "$warning")
            if turn.answer is None:
                conversation.insert(conversation.entries.index(turn.question) + 1, answer)
            else:
                conversation.update_entry(answer)
            if reason == "context":
                self.room.offer()
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
        if turn.answer is not None:
            turn.answer.finish("not finished", "$warning")
            conversation.update_entry(turn.answer)
        if turn.then is not None:
            self._end_aside(turn)
        elif turn.answer is not None and turn.before:
            self.record.finish(turn.answer.text[len(turn.before) :])
        else:
            self._take_back(turn)
        self._take_back_waiting()
        if excess:
            way = "begin a new one: /clear" if self.record.messages else "use another model: /model"
            message += f" Shorten the message, or {way}."
        conversation.append(Fault(message))
        conversation.show_end()
        if excess and turn.then is None:
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
        self.end_editing()
        self._text.clear()
        self._take_back_waiting()
        self.record.leave()
        if self.figures.model is None:
            self.record.let_go()
        self.figures.usage = NO_USAGE
        self.figures.speeds.clear()
        self._app.conversation.empty()

    def show_record(self, session: Session | None) -> None:
        """The conversation that was taken up, as it was left."""
        messages, conversation = self.record.messages, self._app.conversation
        for number, message in enumerate(messages):
            if message.role == "user":
                prompt = self._app.prompt
                folded = prompt.attachments.folded(message)
                conversation.append(Question(folded if message.attached else prompt.fold(folded)))
                continue
            answer = Answer()
            answer.feed(message.content)
            cut = session is not None and session.unfinished and number == len(messages) - 1
            why = "not finished: /retry answers again" if cut else _ending(message.ended)
            answer.finish(why, "$warning")
            conversation.append(answer)
        if self.record.unanswered:
            conversation.append(Notice("Not answered yet: /retry asks again."))
        conversation.show_end()

    def _not_saved(self, message: str) -> None:
        self._app.conversation.append(Notice(clean_line(message), "!", "$warning"))

    def reset(self) -> None:
        """As `clear`; system prompt and sampling are put back."""
        self.record.talk.sampling = {}
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
        question, conversation = self._last_question, self._app.conversation
        for entry in conversation.entries[conversation.entries.index(question) + 1 :]:
            conversation.remove_entry(entry)
        start = self._last_asked
        asked = self.record.messages[start]
        self.record.replace(start)
        self._waiting.append(_Waiting(question, asked.content, question.text, asked.attached))
        self._next()

    @property
    def _last_question(self) -> Question:
        entries = self._app.conversation.entries
        return next(entry for entry in reversed(entries) if isinstance(entry, Question))

    @property
    def _last_asked(self) -> int:
        """Which message it is."""
        return max(n for n, m in enumerate(self.record.messages) if m.role == "user")

    def edit(self) -> None:
        """Brings the last question back to the prompt; sent again, it takes its own place."""
        if self.busy:
            self._app.hint("Something is running: Esc stops it.")
        elif not self.record.messages:
            self._app.hint("There is no message to edit.")
        elif self._app.prompt.text:
            self._app.hint("Send or delete what is in the prompt first.")
        else:
            self.editing = self._last_question
            self._app.prompt.put_back(self.editing.text)
            self._app.box.border_title = "your last message: Enter asks again, Esc leaves it"

    def end_editing(self) -> None:
        if self.editing is not None:
            self.editing = None
            self._app.prompt.text = ""
            self._app.box.border_title = ""

    def _forget_from(self, question: Question) -> None:
        conversation = self._app.conversation
        for entry in conversation.entries[conversation.entries.index(question) :]:
            conversation.remove_entry(entry)
        self.record.replace(self._last_asked)

    def go_on(self) -> None:
        """Has the last answer continued from where it ended."""
        engine, messages = self.engine, self.record.messages
        if self.busy:
            self._app.hint("Something is running: Esc stops it.")
        elif engine is None or self.figures.model is None:
            self._app.hint("No model is loaded. /retry tries again, /quit leaves.")
        elif not messages or messages[-1].role != "assistant":
            self._app.hint("There is no answer to go on with.")
        else:
            conversation, question = self._app.conversation, self._last_question
            place = conversation.entries.index(question) + 1
            for entry in conversation.entries[place:]:
                conversation.remove_entry(entry)
            before, answer = messages[-1].content, Answer()
            answer.feed(before)
            conversation.insert(place, answer)
            turn = Turn(self._generate(engine), question, "", question.text, answer, before)
            self._begin(turn)

    def set_system(self, text: str) -> None:
        """Another system prompt, from the next message on; "-" for none."""
        self.record.set_system("" if text == "-" else text)
        again = " What was said is read again with the next message." if self.held else ""
        self._app.conversation.append(Notice(f"The system prompt is changed.{again}"))

    def use_model(self, name: str) -> None:
        """Loads another model; it reads what was said with the next message."""
        engine, opened = self.engine, self._app.opening.opened
        if engine is None or opened is None:
            self._app.hint("There is no engine to load it with: leave and start again.")
        elif self.busy:
            self._app.hint("Something is running: Esc stops it.")
        else:
            self._app.opening.opened = replace(opened, model=name, suggest_larger=False)
            self.figures.model = None
            self.loading = Progress("Starting")
            engine.load(name)
            self._app.wake()


def _ending(ended: str) -> str:
    """Why a saved answer ended; nothing for what this program does not know."""
    return next((text for reason, text in _ENDINGS.items() if reason == ended), "")
