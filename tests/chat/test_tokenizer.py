"""Token ids and text, against transformers and the tokenizers library."""

import json
import os
import random
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.chat.families import EXAMPLES, FAMILIES, control_tokens
from tqchat.chat.errors import ChatError
from tqchat.chat.tokenizer import Tokenizer

HARD_TEXT: dict[str, str] = json.loads((Path(__file__).parent / "data/hard_text.json").read_text())
HARD_TEXT["ten_thousand_spaces"] = " " * 10_000 + "x"
HARD_TEXT["ten_thousand_letters"] = "a" * 10_000
HARD_TEXT["all"] = "\n".join(HARD_TEXT.values())

FolderOf = Callable[[str], Path]
TokenizerOf = Callable[[str], Tokenizer]
ReferenceOf = Callable[[str], PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The pipeline of the tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct, by hand."""
    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    tokenizer = Reference(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(m.split()) for m in smollm2_metadata["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:17])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", HARD_TEXT)
def test_smollm2_gives_the_ids_that_transformers_gives(
    smollm2: Tokenizer, smollm2_reference: PreTrainedTokenizerFast, name: str
) -> None:
    ids = smollm2.encode(HARD_TEXT[name])
    assert ids == smollm2_reference.encode(HARD_TEXT[name], add_special_tokens=False)
    assert smollm2.decode(ids) == HARD_TEXT[name]


def test_smollm2_knows_its_control_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.stop_ids == {2}
    assert smollm2.vocab_size == 49152
    assert smollm2.special_tokens["<|im_end|>"] == 2
    assert len(smollm2.special_tokens) == 17


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_ids_that_transformers_gives(
    tokenizer_of: TokenizerOf, reference_of: ReferenceOf, family: str
) -> None:
    tokenizer, reference = tokenizer_of(family), reference_of(family)
    for name, text in HARD_TEXT.items():
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == ids, name
        assert tokenizer.decode(ids) == reference.decode(ids), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_control_token_in_text_is_ordinary_characters(
    tokenizer_of: TokenizerOf, family: str
) -> None:
    tokenizer = tokenizer_of(family)
    assert set(tokenizer.special_tokens) == set(control_tokens(FAMILIES[family]))
    for token in tokenizer.special_tokens:
        for text in (token, f"a{token}b", f"{token} {token}\n{token[:2]}{token}"):
            ids = tokenizer.encode(text)
            assert not set(ids) & set(tokenizer.special_tokens.values())
            assert tokenizer.decode(ids) == text


def test_a_control_token_cannot_come_of_merging(tmp_path: Path, folder_of: FolderOf) -> None:
    """A vocabulary where ordinary merges lead to `<s>`, and whole words are looked up first."""
    spec = json.loads((folder_of("llama3") / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab |= {"<s": len(vocab) + 50, "<s>": len(vocab) + 51}
    spec["model"]["merges"] += [["<", "s"], ["<s", ">"]]
    spec["model"]["ignore_merges"] = True
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                             "trim_offsets": True}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer.from_folder(tmp_path).encode("<s>") == [vocab["<s>"]]

    spec["added_tokens"].append(spec["added_tokens"][0] | {"content": "<s>", "id": vocab["<s>"]})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<s>") == [vocab["<s"], vocab[">"]]
    assert tokenizer.encode_prompt("<s>") == [vocab["<s>"]]


def test_added_words_and_white_space_still_spell_text(folder_of: FolderOf) -> None:
    path = folder_of("gemma")
    known = Reference.from_file(str(path / "tokenizer.json")).token_to_id("\n\n")
    assert known in Tokenizer.from_folder(path).encode("a\n\nb")


def test_lone_surrogates_are_replaced(tokenizer_of: TokenizerOf) -> None:
    """A command line that is not UTF-8 has them, and UTF-8 cannot."""
    tokenizer = tokenizer_of("llama3")
    assert tokenizer.decode(tokenizer.encode("a\udcffb\ud800")) == "a\ufffdb\ufffd"


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data())
def test_a_stream_shows_what_the_whole_decodes_to(
    tokenizer_of: TokenizerOf, reference_of: ReferenceOf, family: str, data: st.DataObject
) -> None:
    """Any ids at all, against transformers where it does not drop spaces."""
    tokenizer = tokenizer_of(family)
    special = {tokenizer.special_tokens[token] for token in FAMILIES[family].special}
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    stream = tokenizer.stream()
    shown = "".join([*map(stream.add, ids), stream.finish()])
    assert shown == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == tokenizer.decode([i for i in ids if i not in special])
    if FAMILIES[family].byte_level:
        assert shown == reference_of(family).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\ufffd")))
def test_a_stream_never_shows_part_of_a_character(
    tokenizer_of: TokenizerOf, family: str, text: str
) -> None:
    tokenizer = tokenizer_of(family)
    stream = tokenizer.stream()
    shown = ""
    for token in tokenizer.encode(text):
        shown += stream.add(token)
        assert "\ufffd" not in shown
    assert stream.finish() == ""
    assert shown == tokenizer.decode(tokenizer.encode(text))


def test_a_character_that_stays_incomplete_shows_at_the_end(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("llama3")
    *start, _ = tokenizer.encode("𪚥")
    stream = tokenizer.stream()
    assert "".join(map(stream.add, start)) == ""
    assert stream.finish() == "\ufffd"


def test_markup_that_is_not_special_is_shown(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("thinking")
    ids = tokenizer.encode_prompt("<think>hm</think><|im_end|>")
    assert len(ids) == len(tokenizer.encode("hm")) + 3
    assert tokenizer.decode(ids) == "<think>hm</think>"


def test_ids_that_do_not_exist_are_no_text(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("llama3")
    assert tokenizer.decode([-1, tokenizer.vocab_size, 10**6]) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_what_ends_an_answer(tmp_path: Path, folder_of: FolderOf, family: str) -> None:
    kind = FAMILIES[family]
    for file in folder_of(family).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ids = Tokenizer.from_folder(tmp_path).special_tokens
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9, 100000]}')
    assert Tokenizer.from_folder(tmp_path).stop_ids == {
        7, 8, 9, ids[kind.eos], ids[kind.end_of_turn],
    }  # fmt: skip


def test_the_fingerprint_tells_vocabularies_and_templates_apart(
    tmp_path: Path, folder_of: FolderOf
) -> None:
    seen = {Tokenizer.from_folder(folder_of(family)).fingerprint for family in FAMILIES}
    assert len(seen) == len(FAMILIES)
    assert Tokenizer.from_folder(folder_of("phi")).fingerprint in seen
    for file in folder_of("phi").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.from_folder(tmp_path).fingerprint not in seen


def test_tokenizer_config_adds_tokens(tmp_path: Path, folder_of: FolderOf) -> None:
    for file in folder_of("chatml").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tool = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": False,
            "single_word": False, "normalized": False}  # fmt: skip
    config["added_tokens_decoder"] = {"707": tool}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens["<|tool|>"] == 707
    assert tokenizer.encode_prompt("<|tool|>") == [707]
    assert tokenizer.encode_prompt("<|tool|>") == AutoTokenizer.from_pretrained(tmp_path).encode(
        "<|tool|>"
    )
    assert 707 not in tokenizer.encode("<|tool|>")


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(ChatError, match=r"no tokenizer\.json.*mlx-community.*\.gguf"):
        Tokenizer.from_folder(tmp_path)


def test_damaged_files_are_chat_errors(tmp_path: Path, folder_of: FolderOf) -> None:
    """Whatever is changed or cut off: an error of ours, or a tokenizer."""
    good = (folder_of("llama3") / "tokenizer.json").read_text()
    spec = json.loads(good)
    bad = ["", "[]", "{", "[" * 100_000, '{"model": 3}', '{"model": {"vocab": {}}}']
    for key in spec:
        for value in (None, 3, "x", [], {}, [3], {"type": "Nothing"}):
            bad.append(json.dumps(spec | {key: value}))
    for key in spec["model"]:
        for value in (None, 3, "x", [], {}, [3], {"a": "b"}):
            bad.append(json.dumps(spec | {"model": spec["model"] | {key: value}}))
    for key in spec["added_tokens"][0]:
        for value in (None, 3, "x", "", [], {}):
            bad.append(
                json.dumps(spec | {"added_tokens": [spec["added_tokens"][0] | {key: value}]})
            )
    # What the library panics over.
    bad.append(
        json.dumps(spec | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}})
    )
    bad.append(json.dumps(spec | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}))
    bad.append(json.dumps(spec | {"model": spec["model"] | {"continuing_subword_prefix": "#" * 9}}))
    rng = random.Random(7)
    bad += [good[: rng.randrange(len(good))] for _ in range(10)]
    errors = []
    for text in bad:
        (tmp_path / "tokenizer.json").write_text(text)
        try:
            Tokenizer.from_folder(tmp_path).encode("text")
        except ChatError as error:
            errors.append(str(error))
    assert len(errors) > len(bad) / 2
    assert not any("\n" in error for error in errors)


def test_too_many_added_tokens(tmp_path: Path, folder_of: FolderOf) -> None:
    spec = json.loads((folder_of("llama3") / "tokenizer.json").read_text())
    first = 1000 + max(token["id"] for token in spec["added_tokens"])
    spec["added_tokens"] += [
        spec["added_tokens"][0] | {"id": first + i, "content": f"<|r{i}|>"} for i in range(32_768)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ChatError, match="at most 32,768 are supported"):
        Tokenizer.from_folder(tmp_path)


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def precompiled(characters: bytes) -> dict[str, Any]:
    """SentencePiece's table, of one empty unit, and what it makes of characters."""
    data = (4).to_bytes(4, "little") + bytes(4) + characters
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(data).decode()}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


@pytest.mark.parametrize(
    "steps",
    [
        [replace("l", "l" * 1000)],
        [replace("l", "l" * 10)] * 3,
        [{"pattern": {"String": "l"}, "content": "l" * 1000}],
        [replace("", "l" * 300)],
        [replace("(?=.)", "l", "Regex")] * 9,
        [precompiled(b"l" * 1000)],
        [precompiled(b""), precompiled(b"a\0" + b"l" * 20 + b"\0b"), replace("l", "l" * 20)],
        [{"type": "Prepend", "prepend": "l" * 1000}],
        [{"type": "ByteLevel"}] * 9,
        [{"type": "Lowercase"}] * 100,
        [{"type": "Sequence", "normalizers": [replace("l", "l" * 20)]}] * 2,
    ],
)
def test_text_that_a_tokenizer_blows_up(
    tmp_path: Path, folder_of: FolderOf, steps: list[dict[str, Any]]
) -> None:
    spec = json.loads((folder_of("llama3") / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ChatError, match="makes text far longer"):
        Tokenizer.from_folder(tmp_path)


def test_pre_tokenizers_that_blow_text_up(tmp_path: Path, folder_of: FolderOf) -> None:
    spec = json.loads((folder_of("llama3") / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ChatError, match="makes text far longer"):
        Tokenizer.from_folder(tmp_path)


def test_what_well_known_models_do_to_text(tmp_path: Path, folder_of: FolderOf) -> None:
    """T5's and ALBERT's steps together, and more."""
    spec = json.loads((folder_of("llama3") / "tokenizer.json").read_text())
    spec["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            replace("``", '"'),
            replace("\n", "<n>"),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            replace(" {2,}", "▁", "Regex"),
            {"type": "Prepend", "prepend": "▁"},
            replace(" ", "▁"),
        ],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer.from_folder(tmp_path).encode("text")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_pipes_are_not_opened(tmp_path: Path, folder_of: FolderOf, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder_of("phi") / "tokenizer.json").read_bytes())
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ChatError, match=f"{name} is not a regular file"):
        Tokenizer.from_folder(tmp_path)


def test_a_panic_prints_no_backtrace() -> None:
    spec = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    spec["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    code = (
        "from tqchat.chat.template import ChatTemplate\n"
        "from tqchat.chat.tokenizer import Tokenizer\n"
        "try:\n"
        f"    Tokenizer({spec}, ChatTemplate(''), []).encode('a')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RUST_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PanicException" in ran.stdout
    assert "stack backtrace" not in ran.stderr


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_damaged_companions_are_named(tmp_path: Path, folder_of: FolderOf, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder_of("phi") / "tokenizer.json").read_bytes())
    for damage in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(ChatError, match=name):
            Tokenizer.from_folder(tmp_path)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path, folder_of: FolderOf) -> None:
    for file in folder_of("chatml").iterdir():
        mark = b"\xef\xbb\xbf" if file.name == "tokenizer_config.json" else b""
        (tmp_path / file.name).write_bytes(mark + file.read_bytes())
    marked, plain = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(folder_of("chatml"))
    assert marked.fingerprint == plain.fingerprint
