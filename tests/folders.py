"""Model folders on disk, as tests need them: a tiny random Llama whose tokens are bytes."""

import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny import LLAMA, llama_weights

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# ChatML, but what the assistant said in earlier turns is cut to its first five characters, as
# reasoning models' templates cut out their thoughts.
FORGETFUL = CHATML.replace(
    "message['content']",
    "(message['content'][:5] if message['role'] == 'assistant' else message['content'])",
)


def byte_tokenizer(doublings: int = 0) -> Tokenizer:
    """One token per byte, and ChatML's control tokens.

    With `doublings`, 2, 4, 8 ... times the same small letter are a token too: long texts of few.
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        (letter * 2**n, letter * 2**n) for letter in ascii_lowercase for n in range(doublings)
    ]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL_TOKENS])
    return tokenizer


def write_tiny(
    folder: Path, template: str | None = CHATML, doublings: int = 0, **config: Any
) -> Path:
    """A model folder that never ends an answer by itself at temperature 0."""
    tokenizer = byte_tokenizer(doublings)
    n_tokens = tokenizer.get_vocab_size()
    values = {**LLAMA, "vocab_size": n_tokens, "eos_token_id": n_tokens - 1, **config}
    weights = llama_weights(values)
    # The mean of two rows: its logit is never above both of theirs.
    for row in (n_tokens - 2, n_tokens - 1):
        weights["lm_head.weight"][row] = weights["lm_head.weight"][65:67].mean(axis=0)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": CONTROL_TOKENS[1]}
    if template is not None:
        tokenizer_config["chat_template"] = template
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
