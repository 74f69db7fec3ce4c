"""One question, one answer, no screen."""

import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable

from tqchat.chat.conversation import Conversation, Message
from tqchat.chat.sessions import Session
from tqchat.engine.engine import Engine
from tqchat.engine.events import (
    EngineOptions,
    Failed,
    Finished,
    Loaded,
    Loading,
    Note,
    Planned,
    Prefilling,
    Sampling,
    Token,
)
from tqchat.tui.channels import Channel, Channels
from tqchat.tui.text import clean
from tqchat.units import bytes_text, seconds_text

GRACE_S = 3.0

LONG_S = 10.0
"""A prompt that takes longer to read is announced."""


def answer(
    model: str | None,
    message: str,
    system: str | None,
    options: EngineOptions,
    sampling: Sampling,
    max_tokens: int | None,
    as_json: bool,
    stats: bool,
    interrupted: Callable[[], bool],
    session: Session | None = None,
) -> int:
    """Print the answer as it comes, or one JSON object. Returns the exit code.

    What the model thinks before it answers is not printed; the object has it as `thinking`.

    With a `session` the message goes on with that conversation, and is taken back if nothing is
    answered. Raises KeyboardInterrupt when `interrupted` says so, ChatError when the session
    cannot be saved.
    """
    if session is None:
        turn = None
        messages = Conversation(system or "", [Message("user", message)]).prompt()
    else:
        turn = _Turn(session, message, system)
        model = model or session.model
        messages = session.conversation.prompt()
    engine = Engine(options)
    engine.start()
    status = _Status()
    channels = Channels()
    parts: dict[Channel, list[str]] = {"thought": [], "answer": []}
    # A terminal would obey control characters that the model writes.
    shown = clean if sys.stdout.isatty() else str
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The locale may lack characters that the model writes.
        sys.stdout.reconfigure(errors="replace")

    def tell(pieces: list[tuple[Channel, str]]) -> None:
        for channel, text in pieces:
            parts[channel].append(text)
            if channel == "thought":
                status.show("Thinking")
            elif not as_json:
                status.clear()
                sys.stdout.write(shown(text))
                sys.stdout.flush()

    try:
        if session is not None:
            engine.take_up(session.cache_folder)
        engine.load(model)
        engine.generate(messages, sampling, max_tokens)
        while not interrupted():
            # A signal does not end the wait, so it must not be endless.
            event = engine.wait(0.2)
            match event:
                case Loading(label, done, total):
                    status.show(f"{label}: {_percent(done, total)}")
                case Loaded(info):
                    status.clear()
                    if session is not None:
                        session.use_model(info.name)
                    for note in info.notes:
                        print(f"tqchat: {note}", file=sys.stderr)
                case Planned(seconds=float(seconds)) if seconds > LONG_S:
                    status.say(_announcement(event, seconds))
                case Prefilling(done=done, total=total):
                    status.show(f"Reading the prompt: {_percent(done, total)}")
                case Note(text):
                    status.clear()
                    print(f"tqchat: {text}", file=sys.stderr)
                case Token(text=text):
                    if turn is not None:
                        turn.stream(text)
                    tell(channels.feed(text))
                case Failed(_, reason, excess):
                    status.clear()
                    if excess:
                        reason += " Give a shorter text, or choose a model with a larger context."
                    if excess and session is not None:
                        reason += " Or begin a new conversation: leave out --continue or --resume."
                    print(f"tqchat: {reason}", file=sys.stderr)
                    return 2
                case Finished(text=text):
                    tell(channels.finish())
                    status.clear()
                    said, thought = "".join(parts["answer"]), "".join(parts["thought"]).strip()
                    _report(event, said, thought, as_json, stats)
                    if turn is not None:
                        turn.finish(text)
                        status.show("Saving the conversation's cache")
                    return 0
        status.clear()
        raise KeyboardInterrupt
    finally:
        # Some calls, such as reading a tokenizer, hear of no stop; nobody who pressed Ctrl-C waits
        # for them. The thread cannot be left behind either: it would abort the process.
        if not engine.close(GRACE_S if interrupted() else None):
            status.clear()
            os._exit(130)
        status.clear()
        if turn is not None:
            turn.end()
        # What there is to say about the saving.
        for event in engine.events:
            if isinstance(event, Note):
                print(f"tqchat: {event.message}", file=sys.stderr)


class _Turn:
    """A question and its answer in a session on disk."""

    def __init__(self, session: Session, message: str, system: str | None) -> None:
        self._session = session
        messages = session.conversation.messages
        # A question that a crash left without an answer is asked again, with this one.
        self._start = len(messages) - session.unanswered
        self._before = messages[self._start :]
        self._answered = False
        if system not in (None, session.conversation.system):
            session.set_system(system)
        if self._before:
            session.replace(self._start)
        session.add_user("\n\n".join([*(m.content for m in self._before), message]))

    def stream(self, text: str) -> None:
        self._session.stream(text)
        self._answered = self._answered or bool(text)

    def finish(self, text: str) -> None:
        self._session.finish(text)
        self._answered = True

    def end(self) -> None:
        """However it ended: what was answered stays."""
        if not self._answered:
            self._session.replace(self._start, messages=self._before)


def _report(finished: Finished, text: str, thought: str, as_json: bool, stats: bool) -> None:
    usage = dataclasses.asdict(finished.usage)
    cache = dataclasses.asdict(finished.cache)
    figures = {
        **usage,
        **{key: cache[key] for key in ("kv_bytes", "kv_bytes_allocated", "kv_bytes_fp16")},
        "headroom_bytes": finished.memory.free,
        "finish_reason": finished.reason,
    }
    if as_json:
        thinking = {"thinking": thought} if thought else {}
        print(json.dumps({"text": text, **thinking, **figures}))
    else:
        print()
        if thought and not text:
            why = "The model thought and did not answer; --json shows what it thought."
            print(f"tqchat: {why}", file=sys.stderr)
        if finished.reason == "repetition":
            why = "Stopped, it only repeated itself. --repetition-penalty 1.1 may help."
            print(f"tqchat: {why}", file=sys.stderr)
    if stats:
        print(
            f"{usage['prompt_tokens']} prompt tokens ({usage['cached_tokens']} cached), "
            f"{usage['prefill_tps']:.1f} tok/s; {usage['completion_tokens']} tokens, "
            f"{usage['decode_tps']:.1f} tok/s; first after {usage['ttft_s']:.2f} s; "
            f"KV {cache['kv_bytes'] / 2**20:.1f} MiB of {cache['kv_bytes_fp16'] / 2**20:.1f} "
            f"in fp16; {finished.memory.free / 2**30:.1f} GiB free; {finished.reason}",
            file=sys.stderr,
        )


def _announcement(plan: Planned, seconds: float) -> str:
    return (
        f"Reading {plan.tokens:,} tokens takes about {seconds_text(seconds)} and "
        f"{bytes_text(plan.peak)} of memory at most; {bytes_text(plan.free)} stays free."
    )


def _percent(done: int, total: int) -> str:
    return f"{100 * done // total}%" if total else f"{done / 2**20:.0f} MiB"


class _Status:
    """One line on stderr that is written over, if stderr is a terminal."""

    def __init__(self) -> None:
        self._shown = False
        self._terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = True

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._terminal:
            self.clear()
            sys.stderr.write(f"{text}\n")

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
