"""An answer that was cut goes on as if it had not been."""

from pathlib import Path

from tqchat.chat.conversation import Message
from tqchat.engine.events import EngineOptions, Finished, Sampling
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel, load_path

QUESTION = Message("user", "Name the planets of the solar system.")


def answered(
    loaded: LoadedModel, session: Session, max_tokens: int, *messages: Message
) -> Finished:
    prompt = loaded.template.prompt_ids(loaded.tokenizer, messages)
    turn = session.turn(1, prompt, Sampling(temperature=0), max_tokens, lambda: False)
    *_, last = turn
    assert isinstance(last, Finished)
    return last


def test_a_cut_answer_goes_on(smollm2_gguf: Path) -> None:
    loaded = load_path(smollm2_gguf, "smollm2", EngineOptions())
    whole = answered(loaded, Session(loaded), 40, QUESTION)
    session = Session(loaded)
    begun = answered(loaded, session, 16, QUESTION)
    assert begun.reason == "length"
    assert whole.text.startswith(begun.text)
    rest = answered(loaded, session, 24, QUESTION, Message("assistant", begun.text))
    assert begun.text + rest.text == whole.text
    # What was read and written stays; the last token was not yet in the cache.
    assert rest.usage.prompt_tokens - rest.usage.cached_tokens <= 2
