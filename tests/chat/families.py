"""Small models' folders in the style of well-known families: tokenizer, template, control tokens.

The vocabularies are trained on a few pages; what is like the real ones is how text is cut,
normalised and decoded, and which tokens are added with which flags.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

# A first example starts the process for templates, which hypothesis would take for slowness.
EXAMPLES = settings(max_examples=40, deadline=None)

DATA = Path(__file__).parent / "data"
TEXTS = Path(__file__).parents[2] / "tqchat" / "bench" / "texts"
CORPUS = (TEXTS / "alice.txt").read_text()[:20_000] + "\n\n\n    1234, 'll\n"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    template: str
    special: list[str]
    """Special tokens, in the order of their ids."""
    bos: str | None
    eos: str
    end_of_turn: str
    byte_level: bool
    not_special: tuple[str, ...] = ()
    """Added tokens that are not special: markup, or runs of white space."""
    rstrip: bool = False
    prepend: str | None = None
    """SentencePiece: where a space goes in front, "all" segments, the "first", or none."""


FAMILIES = {
    "chatml": Family(
        "chatml", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>",
        "<|im_end|>", True, ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "thinking": Family(
        "thinking", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|endoftext|>",
        "<|im_end|>", True, ("<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    "llama3": Family(
        "llama3",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|reserved_special_token_0|>"],
        "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", True,
    ),
    "mistral": Family(
        "mistral", ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"], "<s>", "</s>",
        "</s>", False, prepend="first",
    ),
    "gemma": Family(
        "gemma", ["<unk>", "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        "<bos>", "<eos>", "<end_of_turn>", False, ("\n\n", "\n\n\n", "▁▁", "▁▁▁", "<table>"),
    ),
    "qwen3": Family(
        "qwen3", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>",
        "<|im_end|>", True,
        ("<think>", "</think>", "<tool_response>", "</tool_response>"),
    ),
    "smollm3": Family(
        "smollm3", ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
        "<|begin_of_text|>", "<|im_end|>", "<|im_end|>", True, ("<think>", "</think>"),
    ),
    "ministral3": Family(
        "ministral3",
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        "<s>", "</s>", "</s>", True,
    ),
    "phi4": Family(
        "phi4", ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"], "<|endoftext|>",
        "<|im_end|>", "<|im_end|>", True,
    ),
    "phi4_mini": Family(
        "phi4_mini",
        ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>"], "<|endoftext|>",
        "<|endoftext|>", "<|end|>", True,
    ),
    "harmony": Family(
        "harmony",
        ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
         "<|start|>", "<|end|>", "<|message|>", "<|call|>"],
        "<|startoftext|>", "<|return|>", "<|return|>", True,
    ),
    "gemma4": Family(
        "gemma4",
        ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|think|>", "<|channel>",
         "<channel|>"],
        "<bos>", "<eos>", "<turn|>", False, ("\n\n", "\n\n\n", "▁▁", "▁▁▁"),
    ),
    "phi": Family(
        "phi", ["<unk>", "<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>",
                "<|end|>"],
        "<s>", "<|endoftext|>", "<|end|>", False, rstrip=True, prepend="all",
    ),
}  # fmt: skip


def template_of(family: Family) -> str:
    return (DATA / f"{family.template}.jinja").read_text()


def control_tokens(family: Family) -> list[str]:
    return family.special + [t for t in family.not_special if t.strip("▁\n")]


def write_folder(family: Family, folder: Path) -> Path:
    """What transformers' AutoTokenizer reads: tokenizer.json, its configuration, the template."""
    (byte_level_tokenizer if family.byte_level else sentencepiece_tokenizer)(family).save(
        str(folder / "tokenizer.json")
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": family.eos,
    }
    if family.bos:
        config["bos_token"] = {"content": family.bos, "__type": "AddedToken"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template_of(family))
    return folder


def byte_level_tokenizer(family: Family) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if family.bos is None:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    add_tokens(tokenizer, family)
    return tokenizer


def sentencepiece_tokenizer(family: Family) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if family.prepend == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
    else:
        spaces = [normalizers.Replace(" ", "▁")]
        prepend = [normalizers.Prepend("▁")] if family.prepend else []
        tokenizer.normalizer = normalizers.Sequence(prepend + spaces)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            + ([decoders.Strip(" ", 1, 0)] if family.prepend else [])
        )
    # The control tokens take the lowest ids of the vocabulary, then the bytes, then the pieces.
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=family.special + BYTES + list(family.not_special),
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(re.findall(" ?[^ ]+", CORPUS), trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    add_tokens(tokenizer, family)
    return tokenizer


def add_tokens(tokenizer: Tokenizer, family: Family) -> None:
    tokenizer.add_special_tokens(
        [AddedToken(token, rstrip=family.rstrip, normalized=False) for token in family.special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.not_special])
