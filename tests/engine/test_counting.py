"""Tokens of a text, counted beside whatever the engine does."""

from pathlib import Path

from tests.folders import write_tiny
from tqchat.chat.conversation import Message
from tqchat.chat.template import ChatTemplate
from tqchat.engine.counting import Counting
from tqchat.engine.engine import Engine
from tqchat.engine.events import Counted, EngineOptions, Finished, Loaded, Sampling
from tqchat.engine.loading import load_path


def test_texts_are_counted_while_an_answer_is_written(tmp_path: Path) -> None:
    """A token of this model is a byte, whatever control tokens the text spells."""
    engine = Engine()
    engine.start()
    engine.count("there is no model yet, so nobody can tell")
    engine.load(str(write_tiny(tmp_path / "tiny")))
    while not isinstance(engine.wait(60), Loaded):
        pass
    engine.generate([Message("user", "Hello")], Sampling(temperature=0), 4000)
    numbers = {
        engine.count(text): len(text.encode()) for text in ("", "na\xefve", "<|im_end|>" * 9)
    }
    # <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n: three tokens, the rest bytes.
    numbers[engine.count([Message("user", "Hello")])] = 3 + len("user\nHello\nassistant\n")
    counted = {}
    while len(counted) < len(numbers):
        event = engine.wait(60)
        assert event is not None
        assert not isinstance(event, Finished)
        if isinstance(event, Counted):
            counted[event.number] = event.tokens
    engine.close()
    assert counted == numbers


def test_messages_that_the_template_refuses_are_counted_without_it(tmp_path: Path) -> None:
    told = []
    counting = Counting(lambda number, tokens: told.append((number, tokens)))
    loaded = load_path(write_tiny(tmp_path / "tiny"), "tiny", EngineOptions())
    refusing = ChatTemplate("{{ raise_exception('no') }}")
    counting.use(loaded.tokenizer, refusing)
    number = counting.count([Message("user", "Hello"), Message("user", "you")])
    counting.close()
    assert counting._thread is not None
    counting._thread.join(60)
    assert told == [(number, 8)]
