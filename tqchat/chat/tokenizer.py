"""Text to token ids and back."""

import hashlib
import json
import os
import re
import secrets
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import tokenizers

from tqchat.chat.detokenizer import Detokenizer, Spelling
from tqchat.chat.errors import ChatError
from tqchat.chat.files import read_json
from tqchat.chat.gguf_vocabulary import Json, tokenizer_json
from tqchat.chat.marks import END_OF_THOUGHT, THINK, Marks, TokenStream, Told
from tqchat.chat.sealed import alphabet_of, unseal, well_formed
from tqchat.chat.template import ChatTemplate, token_text

# The library's panics are told as errors of ours.
os.environ["RUST_BACKTRACE"] = "0"

_MOST_ADDED_TOKENS = 32_768
_MOST_STEPS = 64
# NFKC writes U+FDFA in 33 bytes, which is the most that a step of a sound tokenizer does.
_MOST_GROWTH = 256

# Within the tokenizers library control tokens are spelled with this, so no text can spell them.
_SECRET = secrets.token_hex(16)


class Tokenizer:
    """A model's vocabulary, and which of its tokens mean something to the chat.

    A *control token* is one that the model takes as a mark and not as text: every added token of
    tokenizer.json, special or not (`<think>`, `<tool_call>`), but for those of white space, and
    those that are not special and have only letters and digits: they spell text in fewer tokens.
    """

    special_tokens: Mapping[str, int]
    """The control tokens as they are spelled, with their ids."""
    marks: Marks | None
    """Of what the model thinks, where they are special tokens."""
    alphabet: str
    """The characters that set control tokens apart from text (sealed.py says how)."""
    vocab_size: int
    """One more than the highest token id. A model's embedding may have more rows."""
    fingerprint: str
    """Hash of vocabulary and chat template: under another one, ids mean something else."""

    def __init__(self, spec: Json, template: ChatTemplate, eos: Iterable[str | int]) -> None:
        """From the contents of a tokenizer.json, which is altered.

        `eos` are tokens or ids; those that do not exist are left out. Raises ChatError for a
        tokenizer that is damaged or of a kind not known here.
        """
        self._template = template
        with _damage_as_chat_error():
            self._build(spec)
        self._eos = frozenset(token for name in eos if (token := self._id(name)) is not None)

    def _build(self, spec: Json) -> None:
        tokens = [token for token in spec.get("added_tokens", []) if token["content"]]
        added = {token["content"]: token for token in tokens}
        if len(added) > _MOST_ADDED_TOKENS:
            raise ChatError(
                f"The model's tokenizer has {len(added):,} added tokens, and at most "
                f"{_MOST_ADDED_TOKENS:,} are supported: use another model."
            )
        _check_growth(spec)
        control = [content for content, token in added.items() if _is_control(token)]
        secret = {content: f"\ue000{_SECRET}{i}\ue001" for i, content in enumerate(control)}
        ids: dict[str, int] = {content: token["id"] for content, token in added.items()}
        self._spelling = Spelling.from_json(spec.get("decoder"))
        respelled = json.dumps(_respelled(spec, list(added.values()), secret))
        self._tokenizer = tokenizers.Tokenizer.from_str(respelled)
        for content, token_id in ids.items():
            if self._tokenizer.token_to_id(secret.get(content, content)) != token_id:
                raise ValueError(f"{content} has another id in the vocabulary")
        named = self._template.source + respelled.replace(_SECRET, "")
        self.fingerprint = hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()
        self.special_tokens = MappingProxyType({content: ids[content] for content in control})
        self.marks = Marks.of(self.special_tokens)
        self.alphabet = alphabet_of(control)
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self._secret = secret
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._bytes = {
            ids[content]: b""
            if token.get("special") and content not in (THINK, END_OF_THOUGHT)
            else self._spelling.bytes_of_added(content)
            for content, token in added.items()
        }

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """From tokenizer.json and its companions in a model's folder. Raises ChatError."""
        spec = read_json(path / "tokenizer.json")
        if not spec:
            raise ChatError(
                f"{path} has no tokenizer.json, and a SentencePiece tokenizer.model alone is not "
                "supported. Use a conversion of the model that has one (mlx-community), or a .gguf."
            )
        config = read_json(path / "tokenizer_config.json")
        with _damage_as_chat_error():
            _add_tokens(spec, config)
        template = ChatTemplate.from_folder(path)
        eos: list[str | int] = [
            token
            for name in ("config.json", "generation_config.json")
            for token in _ids(read_json(path / name).get("eos_token_id"))
        ]
        eos.append(template.special_tokens.get("eos_token", ""))
        return cls(spec, template, eos)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """From a GGUF file's metadata. Raises ChatError."""

        def token(name: str) -> list[int]:
            return _ids(metadata.get(f"tokenizer.ggml.{name}_token_id"))

        return cls(
            tokenizer_json(metadata),
            ChatTemplate.from_gguf(metadata),
            token("eos") + token("eot") + token("eom"),
        )

    def encode(self, text: str) -> list[int]:
        """Ids for `text` as it is: nothing is added, and no control token comes of it.

        (But for the one that stands for unknown characters, in a vocabulary without bytes.) Raises
        ChatError if the vocabulary turns out to be damaged.
        """
        with _damage_as_chat_error():
            # A batch, because others may run meanwhile: for a single text the library keeps
            # Python's lock, for seconds if it is a book.
            batch = [well_formed(text)]
            return list(self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)[0].ids)

    def count(self, text: str) -> int:
        """How many tokens `text` takes, as it is. Any thread may ask."""
        return len(self.encode(text))

    def encode_prompt(self, sealed: str) -> list[int]:
        """Ids for a rendered template whose messages are sealed (ChatTemplate.render_sealed).

        The whole is encoded in one go, so that text merges across the borders of messages as it
        did in training.
        """
        spelled = self._control.sub(lambda match: self._secret[match[0]], sealed)
        return self.encode(unseal(spelled, self.alphabet))

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens. Ids that do not exist are left out."""
        stream = self.stream()
        return "".join([*map(stream.add, ids), stream.finish()])

    def stream(self) -> TokenStream:
        """A new text; what a model thinks is in it, between <think> and </think>."""
        stream = Detokenizer(self._bytes_of, self._spelling.strip_first_space)
        return stream if self.marks is None else Told(stream, self.marks)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer.

        What config.json, generation_config.json and tokenizer_config.json, or the GGUF file, name,
        and what the chat template puts after an answer. Raises ChatError as the template does.
        """
        end_of_turn = self._template.end_of_turn(self._control)
        stops = self._eos | ({self.special_tokens[end_of_turn]} if end_of_turn else set())
        return stops - self.marks.within_an_answer if self.marks else stops

    def _id(self, token: str | int) -> int | None:
        if isinstance(token, str):
            known = self.special_tokens.get(token)
            return self._tokenizer.token_to_id(token) if known is None else known
        return token if 0 <= token < self.vocab_size else None

    def _bytes_of(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            piece = self._tokenizer.id_to_token(token) if token >= 0 else None
            known = self._bytes[token] = self._spelling.bytes_of(piece or "")
        return known


@contextmanager
def _damage_as_chat_error() -> Iterator[None]:
    try:
        yield
    except ChatError:
        raise
    except BaseException as error:
        # The library raises Exception itself, and panics are not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ChatError(
            f"The model's tokenizer cannot be used ({type(error).__name__}: {error}): fetch the "
            "model again, or use another one."
        ) from None


def _is_control(token: Json) -> bool:
    content: str = token["content"].replace("▁", " ")
    if content.isspace():
        return False
    return bool(token.get("special")) or not all(c.isalnum() or c.isspace() for c in content)


def _check_growth(spec: Json) -> None:
    """Raises ChatError if what is done to text before it is cut into tokens may blow it up."""
    steps = [*_steps(spec.get("normalizer")), *_steps(spec.get("pre_tokenizer"))]
    if len(steps) > _MOST_STEPS or prod(max(1, _growth(step)) for step in steps) > _MOST_GROWTH:
        raise ChatError(
            "The model's tokenizer makes text far longer before it reads it: use another model."
        )


def _steps(step: Any) -> Iterator[Json]:
    """A normalizer or pre-tokenizer, and those that it is a sequence of."""
    if isinstance(step, dict):
        yield step
        for part in (*step.get("normalizers", []), *step.get("pretokenizers", [])):
            yield from _steps(part)


def _growth(step: Json) -> int:
    """How many times as long a text may be after a step. The library can do without its type."""
    match step:
        case {"precompiled_charsmap": str(charsmap)}:
            # The length of a table, the table, and what characters become, ended by zeros.
            data = b64decode(charsmap)
            return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
        case {"pattern": {"String": str(pattern)}, "content": str(content)}:
            return -(-len(content) // len(pattern)) if pattern else len(content) + 1
        case {"pattern": _, "content": str(content)}:
            # The pattern may match nothing, between any two characters.
            return len(content) + 1
        case {"prepend": str(prepend)}:
            return len(prepend)
        case {"type": str(kind)} if kind != "ByteLevel":
            return 1
    # Bytes are written as characters, half of which take two bytes.
    return 2


def _respelled(spec: Json, added: list[Json], secret: Mapping[str, str]) -> Json:
    """`spec` with other strings for tokens, under the same ids, and nothing but ids as output."""
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        if model.get("merges") and secret.keys() & vocab.keys():
            # A merge's parts and its result have to be in the vocabulary.
            model["merges"] = [
                [left, right]
                for left, right in map(_pair, model["merges"])
                if not (left in secret or right in secret or left + right in secret)
            ]
        for token in added:
            # The library counts on from the vocabulary's size unless it finds the token there.
            content = token["content"]
            vocab[secret.get(content, content)] = vocab.pop(content, token["id"])
    else:
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in secret:
        model["unk_token"] = secret[model["unk_token"]]
    respelled = [
        token | {"content": secret[token["content"]], "normalized": False, "single_word": False}
        if token["content"] in secret
        else token
        for token in added
    ]
    return spec | {
        "added_tokens": respelled, "post_processor": None, "truncation": None, "padding": None,
    }  # fmt: skip


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _add_tokens(spec: Json, config: Json) -> None:
    """Add what tokenizer_config.json says of added tokens, which wins, as in transformers."""
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return
    tokens = {token.get("content"): token for token in spec.get("added_tokens", [])}
    for index, token in decoder.items():
        if token_text(token) is not None:
            tokens[token["content"]] = {"id": int(index)} | token
    spec["added_tokens"] = sorted(tokens.values(), key=lambda token: token["id"])


def _ids(value: Any) -> list[int]:
    """Ids as config.json has them: one, or a list."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
