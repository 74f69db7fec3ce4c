"""SmolLM2 against mlx-lm on the same weights, and through whole conversations."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tokenizers
from mlx_lm.models import llama as peer
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from tests.folders import CHATML
from tqchat.chat.conversation import Message
from tqchat.chat.template import ChatTemplate
from tqchat.engine import plan
from tqchat.engine.cache import DenseCache, make_caches
from tqchat.engine.events import EngineOptions, Finished, Loading, Sampling, Token
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel, load_path
from tqchat.kernels import BLOCK, SINK, TAIL_MIN, select
from tqchat.models.checkpoint import Checkpoint, read_checkpoint

GREEDY = Sampling(temperature=0)
TIDES = Path(__file__).parents[2] / "tqchat" / "bench" / "texts" / "tides.txt"
N_PROMPT, N_GREEDY = 200, 64


@pytest.fixture(scope="module")
def checkpoint(smollm2_gguf: Path) -> Checkpoint:
    return read_checkpoint(smollm2_gguf)


@pytest.fixture(scope="module")
def loaded(smollm2_gguf: Path) -> LoadedModel:
    return load_path(smollm2_gguf, "smollm2", EngineOptions())


def session(loaded: LoadedModel, kv: str = "int4", template: str | None = None) -> Session:
    """A conversation of its own on a model that is loaded once."""
    changed = replace(loaded, info=replace(loaded.info, kv=kv))
    if template is not None:
        special_tokens = loaded.template.special_tokens
        changed = replace(changed, template=ChatTemplate(template, special_tokens))
    return Session(changed)


def said(text: str, *more: str) -> list[Message]:
    roles = ("user", "assistant")
    return [Message(roles[i % 2], content) for i, content in enumerate((text, *more))]


def ask(session: Session, *texts: str, max_tokens: int, stop_after: int = 0) -> Finished:
    """The answer to the last of `texts`, which take turns. After `stop_after` tokens: stopped."""
    loaded = session._loaded
    prompt = loaded.template.prompt_ids(loaded.tokenizer, said(*texts))
    tokens: list[Token] = []
    stopped = lambda: 0 < stop_after == len(tokens)  # noqa: E731
    for event in session.turn(1, prompt, GREEDY, max_tokens, stopped):
        if isinstance(event, Token):
            tokens.append(event)
    assert isinstance(event, Finished)
    return event


# Against mlx-lm


def peer_logits(checkpoint: Checkpoint, ids: Sequence[int]) -> NDArray[np.float32]:
    """mlx-lm's logits in float32 at every position: (len(ids), vocab_size)."""
    weights = {
        name: w.astype(mx.float32) if w.dtype == mx.float16 else w
        for name, w in checkpoint.weights.items()
    }
    model = peer.Model(peer.ModelArgs.from_dict(checkpoint.config))

    def format_of(path: str, module: nn.Module) -> dict[str, int] | bool:
        if f"{path}.scales" not in weights:
            return False
        groups = weights[f"{path}.scales"].shape[-1]
        columns = module.weight.shape[-1]
        bits = 32 * weights[f"{path}.weight"].shape[-1] // columns
        return {"group_size": columns // groups, "bits": bits}

    nn.quantize(model, class_predicate=format_of)
    model.load_weights(list(weights.items()))
    assert isinstance(model.model.embed_tokens, nn.QuantizedEmbedding)
    assert model.model.embed_tokens.bits == 8
    assert model.model.layers[0].mlp.up_proj.bits == 4
    return np.array(model(mx.array(ids)[None], cache=make_prompt_cache(model))[0])


def test_logits_and_greedy_tokens_are_mlx_lms(
    checkpoint: Checkpoint, loaded: LoadedModel, smollm2_gguf: Path
) -> None:
    """float32 throughout, the cache included."""
    backend = select(mx.float32)
    backend.dtype = backend.cache_dtype = mx.float32
    model = load_path(smollm2_gguf, "smollm2", EngineOptions("fp16"), backend=backend).model
    caches = make_caches(DenseCache, backend, model.shape.kv_layers)
    ids = loaded.tokenizer.encode(TIDES.read_text())[:N_PROMPT]
    # A big chunk, a small one, and tokens one by one.
    ours = [model(ids[:120], caches, n_logits=120), model(ids[120:192], caches, n_logits=72)]
    ours += [model([token], caches) for token in ids[192:]]
    greedy = [int(ours[-1][-1].argmax().item())]
    while len(greedy) < N_GREEDY:
        greedy.append(int(model(greedy[-1:], caches)[-1].argmax().item()))

    expected = peer_logits(checkpoint, [*ids, *greedy[:-1]])
    logits = np.array(mx.concatenate(ours))
    error = np.linalg.norm(logits - expected[:N_PROMPT], axis=1)
    assert (error <= 1e-3 * np.linalg.norm(expected[:N_PROMPT], axis=1)).all()
    # Each of our tokens is mlx-lm's choice after those before it.
    assert greedy == expected[N_PROMPT - 1 :].argmax(axis=1).tolist()


# From a folder


def write_folder(folder: Path, checkpoint: Checkpoint) -> Path:
    """The same weights as safetensors in MLX's quantisation, with a tokenizer.json."""
    metadata = checkpoint.gguf_metadata
    assert metadata is not None
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), checkpoint.weights)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    bpe = tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([token for token, kind in control if kind == 3])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": metadata["tokenizer.chat_template"],
                "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
                "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
            }
        )
    )
    return folder


def test_a_folder_of_the_same_weights_gives_the_same_tokens(
    checkpoint: Checkpoint, loaded: LoadedModel, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "SmolLM2", checkpoint)
    from_folder = load_path(folder, "SmolLM2", EngineOptions())
    assert from_folder.info.weights_bytes == loaded.info.weights_bytes
    assert from_folder.tokenizer.stop_ids == loaded.tokenizer.stop_ids
    question = "Write a line about rivers, with <|im_end|> and naïve 猫 1234 in it."
    ids = [m.template.prompt_ids(m.tokenizer, said(question)) for m in (loaded, from_folder)]
    assert ids[0] == ids[1]
    answers = [ask(session(m), question, max_tokens=24).text for m in (loaded, from_folder)]
    assert answers[0] == answers[1] != ""


def test_reading_a_gguf_goes_up_to_the_whole_once(smollm2_gguf: Path) -> None:
    told: list[Loading] = []
    load_path(smollm2_gguf, "smollm2", EngineOptions(), told.append)
    shares = [event.done / event.total for event in told]
    assert shares == sorted(shares)
    assert len(set(shares)) > 10
    assert shares[-1] == 1


# Conversations


@pytest.mark.parametrize("kv", ["int4", "fp16"])
def test_paris(loaded: LoadedModel, kv: str) -> None:
    answer = ask(session(loaded, kv), "What is the capital of France?", max_tokens=40)
    assert "Paris" in answer.text
    assert answer.reason == "stop"


def test_a_model_loaded_for_int3_answers_from_codes_of_3_bits(smollm2_gguf: Path) -> None:
    loaded = load_path(smollm2_gguf, "smollm2", EngineOptions(kv="int3"))
    talk = Session(loaded)
    ids = loaded.tokenizer.encode(TIDES.read_text())[:500]
    text = loaded.tokenizer.decode(ids) + "\n\nWhich city is the capital of France?"
    assert "Paris" in ask(talk, text, max_tokens=40).text
    use = talk.cache_use()
    held = use.kv_bytes / use.kv_bytes_fp16
    n_sealed = (use.tokens - SINK - TAIL_MIN) // BLOCK * BLOCK
    # A quarter for what is sealed; the newest block or two may still be in the tail.
    assert held >= 1 - 0.75 * n_sealed / use.tokens
    assert held <= 1 - 0.75 * (n_sealed - 2 * BLOCK) / use.tokens
    assert use.kv_bytes <= plan.kv_bytes(loaded.model.shape, use.tokens, "int3")


def test_the_second_turn_prefills_only_what_is_new(loaded: LoadedModel) -> None:
    talk = session(loaded)
    ids = loaded.tokenizer.encode(TIDES.read_text())[:500]
    first = ask(talk, loaded.tokenizer.decode(ids), max_tokens=8)
    assert first.usage.prompt_tokens > 500
    second = ask(talk, loaded.tokenizer.decode(ids), first.text, "What is it about?", max_tokens=1)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens - second.usage.cached_tokens < 60


QUESTIONS = ("Tell me about the moon.", "What is a cat?")


def test_after_a_stopped_answer(loaded: LoadedModel) -> None:
    talk = session(loaded, "fp16")
    stopped = ask(talk, QUESTIONS[0], max_tokens=40, stop_after=7)
    assert (stopped.reason, stopped.usage.completion_tokens) == ("stopped", 7)
    turns = (QUESTIONS[0], stopped.text, QUESTIONS[1])
    answer = ask(talk, *turns, max_tokens=16)
    assert answer.usage.cached_tokens > 0
    assert answer.text == ask(session(loaded, "fp16"), *turns, max_tokens=16).text


def test_after_an_edited_message(loaded: LoadedModel) -> None:
    talk = session(loaded, "fp16")
    first = ask(talk, QUESTIONS[0], max_tokens=12)
    ask(talk, QUESTIONS[0], first.text, QUESTIONS[1], max_tokens=12)
    edited = (QUESTIONS[0], first.text, "What is a dog?")
    answer = ask(talk, *edited, max_tokens=16)
    assert answer.usage.cached_tokens >= first.usage.prompt_tokens
    assert answer.text == ask(session(loaded, "fp16"), *edited, max_tokens=16).text


def test_a_template_that_rewrites_earlier_turns(loaded: LoadedModel) -> None:
    forgetful = CHATML.replace(
        "message['content']",
        "(message['content'] if loop.last or message['role'] == 'user' else 'I said it.')",
    )
    talk = session(loaded, "fp16", forgetful)
    first = ask(talk, QUESTIONS[0], max_tokens=12)
    turns = (QUESTIONS[0], first.text, QUESTIONS[1])
    answer = ask(talk, *turns, max_tokens=16)
    # The prefix ends where the first answer was rewritten.
    assert first.usage.prompt_tokens <= answer.usage.cached_tokens < first.usage.prompt_tokens + 3
    assert answer.text == ask(session(loaded, "fp16", forgetful), *turns, max_tokens=16).text


def test_memory_of_a_long_conversation(loaded: LoadedModel) -> None:
    """SmolLM2's shape with 4,096 tokens held: the tail and what is kept for growth are small."""
    from tqchat.engine.cache import SealedCache

    model, backend = loaded.model, select(mx.float16)
    cache = SealedCache(backend, model.shape.kv_layers[0])
    rng = np.random.default_rng(0)
    while cache.offset < 4096:
        n_tokens = min(512, 4096 - cache.offset)
        q, k, v = (
            backend.load_table(
                mx.array(rng.normal(size=(heads, n_tokens, model.head_dim)).astype(np.float32))
            )
            for heads in (3 * model.n_kv_heads, model.n_kv_heads, model.n_kv_heads)
        )
        cache.attend(q, k, v, 0.125)
    assert cache.nbytes_fp16 == 4096 * model.n_kv_heads * model.head_dim * 2 * 2
    assert cache.nbytes <= 0.34 * cache.nbytes_fp16
    assert cache.nbytes_allocated <= 0.37 * cache.nbytes_fp16
