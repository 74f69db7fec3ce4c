"""The vocabulary in a GGUF file's metadata, written as the tokenizer.json it was made from.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from collections.abc import Mapping
from typing import Any

from tqchat.chat.errors import ChatError

Json = dict[str, Any]

# Token types, as llama.h numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS: Json = {"type": "Digits", "individual_digits": True}


def _byte_level(use_regex: bool) -> Json:
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
        "use_regex": use_regex,
    }  # fmt: skip


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(regex: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return _sequence(split, _byte_level(use_regex=False))


_GPT_2_SPLIT = _byte_level(use_regex=True)
_DIGIT_SPLIT = _sequence(_DIGITS, _byte_level(use_regex=True))
_SPLITS = {
    "default": _GPT_2_SPLIT,
    "gpt-2": _GPT_2_SPLIT,
    "smollm": _DIGIT_SPLIT,
    "starcoder": _DIGIT_SPLIT,
    "refact": _DIGIT_SPLIT,
    "llama-bpe": _split(_LLAMA_3),
    "llama3": _split(_LLAMA_3),
    "llama-v3": _split(_LLAMA_3),
    "falcon3": _split(_LLAMA_3),
    "qwen2": _split(_QWEN_2),
    "deepseek-r1-qwen": _split(_QWEN_2),
    "tekken": _split(_TEKKEN),
}
"""How text is cut into words before merging, by `tokenizer.ggml.pre`."""

# These look a whole word up before they merge.
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}
_NORMALIZERS = {"qwen2": {"type": "NFC"}, "deepseek-r1-qwen": {"type": "NFC"}}


def tokenizer_json(metadata: Mapping[str, Any]) -> Json:
    """What tokenizer.json would hold. Raises ChatError for a kind of tokenizer not known here."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ChatError(
            f"The GGUF file has a tokenizer of the kind {model!r}, and tqchat reads 'gpt2' and "
            "'llama'. Use another model, or this one as a folder with a tokenizer.json."
        )
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise _damaged("tokens")
    built = (
        _byte_level_bpe(metadata, tokens)
        if model == "gpt2"
        else _sentencepiece_bpe(metadata, tokens, types)
    )
    return built | {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index, "content": token, "special": kind != _USER_DEFINED,
                "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            }
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ],
    }  # fmt: skip


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Json:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise ChatError(
            f"The GGUF file cuts text into words by rules called {pre!r}, which tqchat does not "
            "know. Use this model as a folder with a tokenizer.json."
        )
    merges = [merge.split(" ") for merge in _list(metadata, "merges", str)]
    return {
        "normalizer": _NORMALIZERS.get(pre),
        "pre_tokenizer": _SPLITS[pre],
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(tokens, merges, ignore_merges=pre in _IGNORE_MERGES),
    }


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Json:
    """SentencePiece merges the two neighbours that make the piece with the highest score.

    Written as merges: every way to cut a piece in two pieces, the highest score first. Of one
    piece's, the longest left side first, which is closest to SentencePiece's leftmost first.
    """
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise _damaged("scores")
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == _NORMAL
    }
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in sorted(normal, key=lambda piece: -normal[piece])
        for cut in reversed(range(1, len(piece)))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    space = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN]
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, *space] if prefix else space,
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *(strip if prefix else []),
            ],
        },
        "model": _bpe(
            tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=next(iter(unknown), None)
        ),
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> Json:
    vocab = {token: index for index, token in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges} | options


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise _damaged(name)
    return values


def _damaged(name: str) -> ChatError:
    return ChatError(
        f"The GGUF file's tokenizer is damaged (tokenizer.ggml.{name}): fetch the model again."
    )
