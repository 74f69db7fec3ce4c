"""An engine that answers from a script, on the caller's thread: tests move it on step by step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqchat.chat.conversation import Message
from tqchat.engine.events import (
    CacheUse,
    Counted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Loaded,
    Loading,
    Memory,
    ModelInfo,
    Planned,
    Prefilling,
    Sampling,
    Stats,
    TakenUp,
    Token,
    Usage,
)
from tqchat.tui.engine import Opened

GIB = 1024**3
MIB = 1024**2
CONTEXT = 8192

MODEL = ModelInfo(
    name="SmolLM2-135M-Instruct",
    architecture="llama",
    context=CONTEXT,
    weights_bytes=92 * MIB,
    device="cpu",
    backend="cpu",
    kv="int4",
)


@dataclass
class FakeEngine:
    """Records what it is asked for. Every `say_*` puts events where the screen will find them."""

    events: deque[Event] = field(default_factory=deque)
    alive: bool = True
    loads: list[str] = field(default_factory=list)
    turns: list[tuple[Message, ...]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    most_tokens: list[int | None] = field(default_factory=list)
    stops: int = 0
    clears: int = 0
    closed: bool = False
    folders: list[Path] = field(default_factory=list)
    texts: list[str | Sequence[Message]] = field(default_factory=list)
    tokens: int = 0

    def load(self, model: str) -> None:
        self.loads.append(model)

    def generate(
        self, messages: Sequence[Message], sampling: Sampling, max_tokens: int | None = None
    ) -> int:
        self.turns.append(tuple(messages))
        self.samplings.append(sampling)
        self.most_tokens.append(max_tokens)
        return len(self.turns)

    def stop(self) -> None:
        self.stops += 1

    def clear(self) -> None:
        self.clears += 1
        self.tokens = 0
        self.events.append(Stats(Usage(0, 0, 0, 0.0, 0.0, 0.0), self.cache, self.memory))

    def take_up(self, folder: Path) -> None:
        self.folders.append(folder)
        self.events.append(TakenUp(self.cache, self.memory))

    def count(self, text: str | Sequence[Message]) -> int:
        """A token is four characters long, the last one of a text perhaps less. The template puts
        five around a message."""
        self.texts.append(text)
        texts = [text] if isinstance(text, str) else [message.content for message in text]
        tokens = sum(-(-len(one) // 4) for one in texts)
        if not isinstance(text, str):
            tokens += 5 * len(text)
        self.events.append(Counted(len(self.texts), tokens))
        return len(self.texts)

    def close(self, timeout: float | None = None) -> bool:
        self.closed = True
        return True

    def open(self, model: str | None = None) -> Opened:
        return Opened(self, model or "smollm2")

    @property
    def turn(self) -> int:
        return len(self.turns)

    @property
    def cache(self) -> CacheUse:
        per_token = 30 * 3 * 64 * 2 * 2
        held = int(self.tokens * per_token * 0.34)
        return CacheUse(self.tokens, CONTEXT, held, held + 40_000, self.tokens * per_token)

    @property
    def memory(self) -> Memory:
        cache = self.cache.kv_bytes_allocated
        return Memory(92 * MIB, cache, 310 * MIB, 11 * GIB, 15 * GIB)

    @property
    def usage(self) -> Usage:
        return Usage(412, 380, 96, 1.27, 148.0, 21.4)

    def say_loading(self, label: str, done: int, total: int) -> None:
        self.events.append(Loading(label, done, total))

    def say_loaded(self, model: ModelInfo = MODEL) -> None:
        self.events.append(Loaded(model, self.cache, self.memory))

    def say_load_failed(self, message: str) -> None:
        self.events.append(Failed(None, message))

    def say_planned(self, tokens: int, seconds: float | None) -> None:
        self.events.append(Planned(self.turn, tokens, seconds, 3 * GIB, 8 * GIB))

    def say_prefilling(
        self, done: int, total: int, cached: int = 0, seconds_left: float | None = None
    ) -> None:
        self.events.append(Prefilling(self.turn, done, total, cached, seconds_left))

    def say(self, text: str) -> None:
        self.events.append(Token(self.turn, text))

    def say_stats(self, tokens: int) -> None:
        self.tokens = tokens
        self.events.append(Stats(self.usage, self.cache, self.memory))

    def say_finished(self, text: str, reason: FinishReason = "stop") -> None:
        self.events.append(Finished(self.turn, reason, text, self.usage, self.cache, self.memory))

    def say_failed(self, message: str, excess: int = 0) -> None:
        self.events.append(Failed(self.turn, message, excess))
