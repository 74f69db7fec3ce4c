"""Facts in a long document: int4 finds those that the 16-bit cache finds, and reads it once."""

import random
from itertools import pairwise
from pathlib import Path

from benchmarks.needle import DEPTHS, KINDS, Reader, document, needles
from tqchat.engine.events import EngineOptions
from tqchat.engine.loading import load_path

SEED, N_TOKENS = 3, 6000
# What a template puts around a question, and the tokens of the question itself.
SHORT = 40


def test_int4_finds_what_fp16_finds(smollm2_gguf: Path) -> None:
    loaded = load_path(smollm2_gguf, "smollm2", EngineOptions())
    rng = random.Random(SEED)
    hidden = needles(rng, DEPTHS)
    text = document(rng, loaded.tokenizer, N_TOKENS, hidden)
    found = {}
    for kv in KINDS:
        reader = Reader(loaded, kv)
        reader.read(text)
        outcomes = [reader.ask(needle) for needle in hidden]
        found[kv] = {
            needle.depth for needle, one in zip(hidden, outcomes, strict=True) if one.found
        }
        assert outcomes[0].cached_tokens == 0
        assert outcomes[0].prompt_tokens > N_TOKENS
        for before, one in pairwise(outcomes):
            assert before.prompt_tokens <= one.cached_tokens
            assert one.prompt_tokens - one.cached_tokens < SHORT
    # This small model may miss one, but the test must find something to compare.
    assert len(found["fp16"]) >= 2
    assert found["fp16"] <= found["int4"]
