"""Vocabularies from GGUF metadata, against transformers' pipelines and SentencePiece."""

import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Reference
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.chat.families import CORPUS, EXAMPLES
from tests.chat.test_tokenizer import HARD_TEXT
from tqchat.chat.errors import ChatError
from tqchat.chat.template import ChatTemplate
from tqchat.chat.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

TEXT = st.text(
    st.one_of(st.sampled_from("aA1 \n\r\t'.é中٣sldtmrve"), st.characters(exclude_categories=["Cs"]))
)


@pytest.fixture(scope="module")
def metadata(folder_of: Callable[[str], Path]) -> dict[str, Any]:
    """A byte-level vocabulary, as a GGUF file would hold it."""
    spec = json.loads((folder_of("llama3") / "tokenizer.json").read_text())
    vocab: dict[str, int] = spec["model"]["vocab"]
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    tokens = sorted(vocab | added, key=(vocab | added).__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if t in added else NORMAL for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": added["<|begin_of_text|>"],
        "tokenizer.ggml.eos_token_id": added["<|end_of_text|>"],
        "tokenizer.ggml.eot_token_id": added["<|eot_id|>"],
        "tokenizer.chat_template": (folder_of("llama3") / "chat_template.jinja").read_text(),
    }


def by_regex(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])
SPLITS = {
    "default": GPT_2, "gpt-2": GPT_2, "smollm": DIGITS, "starcoder": DIGITS, "refact": DIGITS,
} | {
    pre: by_regex(GGUF_PRE_TOKENIZER_SPLITS[pre])
    for pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "qwen2", "deepseek-r1-qwen", "tekken")
}  # fmt: skip


@pytest.mark.parametrize("pre", SPLITS)
@EXAMPLES
@given(text=TEXT)
def test_words_are_cut_as_transformers_cuts_them(
    metadata: dict[str, Any], pre: str, text: str
) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    reference = Reference(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split()) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges="llama" in pre or pre in ("falcon3", "tekken"),
        )
    )
    reference.pre_tokenizer = SPLITS[pre]
    if "qwen" in pre:
        text = unicodedata.normalize("NFC", text)
    tokenizer = _tokenizer(metadata, pre)
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def _tokenizer(metadata: dict[str, Any], pre: str, **changes: Any) -> Tokenizer:
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre} | changes)


def test_a_folder_and_its_gguf_are_the_same_tokenizer(
    metadata: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    folder, gguf = Tokenizer.from_folder(folder_of("llama3")), _tokenizer(metadata, "llama-bpe")
    for name, text in HARD_TEXT.items():
        assert gguf.encode(text) == folder.encode(text), name
    assert gguf.special_tokens == folder.special_tokens
    assert gguf.vocab_size == folder.vocab_size
    assert gguf.stop_ids == folder.stop_ids
    assert ChatTemplate.from_gguf(metadata).special_tokens == {
        "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>",
    }  # fmt: skip


def test_ids_that_end_an_answer(metadata: dict[str, Any]) -> None:
    tokenizer = _tokenizer(metadata, "llama3", eos_token_id=5, eot_token_id=6, eom_token_id=7)
    assert tokenizer.stop_ids == {5, 6, 7, tokenizer.special_tokens["<|eot_id|>"]}
    assert 10**6 not in _tokenizer(metadata, "llama3", eos_token_id=10**6).stop_ids


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no_prefix"])
def sentencepiece_model(request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with byte fallback, as Llama 2's and Gemma's are."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<mark>", "\n\n"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(
    sentencepiece_model: sentencepiece.SentencePieceProcessor,
) -> Tokenizer:
    """The same from metadata, as llama.cpp's converter writes it."""
    sp = sentencepiece_model
    ids = range(sp.vocab_size())

    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return UNKNOWN
        if sp.is_control(i):
            return CONTROL
        if sp.is_byte(i):
            return BYTE
        return USER_DEFINED if sp.id_to_piece(i) in ("<mark>", "\n\n") else NORMAL

    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": [sp.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": [kind(i) for i in ids],
            "tokenizer.ggml.add_space_prefix": sp.encode("a", out_type=str)[0] == "▁a",
            "tokenizer.ggml.bos_token_id": sp.bos_id(),
            "tokenizer.ggml.eos_token_id": sp.eos_id(),
        }
    )


@EXAMPLES
@given(text=st.text(st.one_of(st.sampled_from("the and\n Alice'"), st.characters())))
def test_sentencepiece_ids_and_text(
    sentencepiece_model: sentencepiece.SentencePieceProcessor,
    sentencepiece_tokenizer: Tokenizer,
    text: str,
) -> None:
    text = re.sub("\n+", "\n", text.replace("\0", "")).encode(errors="replace").decode()
    ids = sentencepiece_tokenizer.encode(text)
    assert ids == sentencepiece_model.encode(text)
    assert sentencepiece_tokenizer.decode(ids) == sentencepiece_model.decode(ids)


def test_sentencepiece_text_of_some_length(
    sentencepiece_model: sentencepiece.SentencePieceProcessor, sentencepiece_tokenizer: Tokenizer
) -> None:
    text = re.sub("\n+", "\n", CORPUS)
    assert sentencepiece_tokenizer.encode(text) == sentencepiece_model.encode(text)


def test_sentencepiece_marks(sentencepiece_tokenizer: Tokenizer) -> None:
    tokenizer = sentencepiece_tokenizer
    assert set(tokenizer.special_tokens) == {"<unk>", "<s>", "</s>", "<mark>"}
    assert tokenizer.stop_ids == {2}
    for token, index in tokenizer.special_tokens.items():
        assert index not in tokenizer.encode(token)
        assert tokenizer.encode_prompt(token) == [index]
        assert tokenizer.decode(tokenizer.encode(token)) == token


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "bert"}, "kind 'bert'.*tokenizer.json"),
        ({"model": None}, "kind None"),
        ({"pre": "chameleon"}, "rules called 'chameleon'.*tokenizer.json"),
        ({"pre": ["gpt-2"]}, "rules called"),
        ({"tokens": []}, "damaged .tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "damaged .tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "damaged .tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "damaged .tokenizer.ggml.token"),
        ({"token_type": ["x"]}, "damaged .tokenizer.ggml.token_type"),
        ({"merges": [3]}, "damaged .tokenizer.ggml.merges"),
        ({"merges": ["a"]}, "cannot be used"),
        ({"merges": ["a b c"]}, "cannot be used"),
        ({"merges": ["not there"]}, "cannot be used"),
        ({"model": "llama"}, "damaged .tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.5]}, "damaged .tokenizer.ggml.scores"),
    ],
)
def test_a_vocabulary_that_cannot_be_used(
    metadata: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ChatError, match=said):
        _tokenizer(metadata, **({"pre": "gpt-2"} | changes))
