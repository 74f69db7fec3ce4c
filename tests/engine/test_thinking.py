"""Models that think: the switch reaches the prompt, and a document is read once all the same."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.folders import write_tiny
from tqchat.chat.conversation import Message
from tqchat.engine.engine import Engine
from tqchat.engine.events import EngineOptions, Failed, Finished, Note, Sampling, Token, Usage

QWEN3 = Path(__file__).parent.parent / "chat" / "data" / "qwen3.jinja"
# As Qwen 3 Thinking, QwQ and DeepSeek-R1 have it: the prompt ends within the thought.
ASKED = "'<|im_start|>assistant\\n"
OPENED = "<think>\n"
DOCUMENT = "Sixteen letters." * 40
NO_THOUGHT = len("<think>\n\n</think>\n\n")  # The tiny model's tokens are bytes.


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "qwen3", QWEN3.read_text())
    engine = Engine(EngineOptions(context=2000))
    engine.start()
    engine.load(str(folder))
    yield engine
    engine.close()


@pytest.fixture
def ask(engine: Engine) -> Callable[[list[Message], bool | None], Usage]:
    def asked(messages: list[Message], think: bool | None) -> Usage:
        engine.generate(messages, Sampling(temperature=0, think=think), 5)
        while not isinstance(event := engine.wait(60), Finished):
            assert event is not None
            assert not isinstance(event, Failed), event.message
        return event.usage

    return asked


@pytest.mark.parametrize("think", [None, True, False])
def test_a_document_is_read_once_though_thoughts_are_dropped(
    engine: Engine, ask: Callable[[list[Message], bool | None], Usage], think: bool | None
) -> None:
    engine.clear()
    question = Message("user", DOCUMENT)
    first = ask([question], think)
    prompt = first.prompt_tokens - (NO_THOUGHT if think is False else 0)
    thought = Message("assistant", "<think>\nIt says sixteen.\n</think>\n\nSixteen.")
    second = ask([question, thought, Message("user", "Sure?")], think)
    assert second.cached_tokens >= prompt > len(DOCUMENT)
    again = ask([question], think)
    assert again.prompt_tokens == first.prompt_tokens


def test_the_switch_reaches_the_prompt(
    ask: Callable[[list[Message], bool | None], Usage],
) -> None:
    tokens = {think: ask([Message("user", "Hi")], think).prompt_tokens for think in (None, True)}
    assert tokens[None] == tokens[True]
    assert ask([Message("user", "Hi")], False).prompt_tokens == tokens[None] + NO_THOUGHT


def test_a_model_without_a_switch_is_named_once(tmp_path: Path) -> None:
    engine = Engine(EngineOptions(context=500))
    engine.start()
    try:
        engine.load(str(write_tiny(tmp_path / "tiny")))
        for _ in range(2):
            engine.generate([Message("user", "Hi")], Sampling(think=False), 1)
        events, finished = [], 0
        while finished < 2:
            event = engine.wait(60)
            assert event is not None
            finished += isinstance(event, Finished)
            events.append(event)
    finally:
        engine.close()
    assert [e.message for e in events if isinstance(e, Note)] == [
        "This model cannot be told to think or not."
    ]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    template = QWEN3.read_text()
    opening = template.replace(f"{{{{- {ASKED}' }}}}", f"{{{{- {ASKED}<think>\\n' }}}}")
    assert opening != template
    folder = write_tiny(tmp_path_factory.mktemp("models") / "thinker", opening)
    engine = Engine(EngineOptions(context=2000))
    engine.start()
    engine.load(str(folder))
    yield engine
    engine.close()


def told(engine: Engine, max_tokens: int, *messages: Message) -> tuple[list[str], Finished]:
    engine.generate(messages, Sampling(temperature=0), max_tokens)
    pieces = []
    while not isinstance(event := engine.wait(60), Finished):
        assert event is not None
        assert not isinstance(event, Failed), event.message
        if isinstance(event, Token):
            pieces.append(event.text)
    return pieces, event


def test_a_thought_that_the_prompt_opens_is_told_from_its_tag_on(thinker: Engine) -> None:
    thinker.clear()
    question = Message("user", DOCUMENT)
    pieces, first = told(thinker, 12, question)
    assert pieces[0].startswith(OPENED)
    assert "".join(pieces) == first.text
    assert first.usage.completion_tokens == 12
    begun = f"{OPENED}Hm, wh"
    pieces, rest = told(thinker, 7, question, Message("assistant", begun))
    assert "<" not in pieces[0]
    assert rest.usage.prompt_tokens == first.usage.prompt_tokens + len("Hm, wh")
    assert rest.usage.cached_tokens >= first.usage.prompt_tokens
    read = first.usage.prompt_tokens - len(OPENED)
    for answer in (begun, f"{begun}\n</think>\n\nSixteen."):
        _, second = told(thinker, 1, question, Message("assistant", answer), Message("user", "?"))
        assert second.usage.cached_tokens >= read > len(DOCUMENT)
        assert second.text.startswith(OPENED)
