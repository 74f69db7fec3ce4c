"""Writes small GGUF files, sound ones and others."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q",
    I64: "q", F64: "d",
}  # fmt: skip
TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30}
TYPE_NUMBERS |= {"Q4_K": 12, "I32": 26}


@dataclass
class GGUF:
    """What goes into a file. A tensor is (type, shape, bytes), its shape rows first."""

    metadata: dict[str, tuple[int, Any]] = field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def header(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        for key, (kind, value) in self.metadata.items():
            head += string(key) + struct.pack("<I", kind) + pack(kind, value)
        offset = 0
        for name, (kind, shape, data) in self.tensors.items():
            head += string(name) + struct.pack("<I", len(shape))
            head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
            head += struct.pack("<IQ", TYPE_NUMBERS[kind], offset)
            offset += len(data) + -len(data) % self.alignment
        return head + bytes(-len(head) % self.alignment)

    def data(self) -> bytes:
        return b"".join(
            data + bytes(-len(data) % self.alignment) for _, _, data in self.tensors.values()
        )

    def write(self, path: Path) -> Path:
        path.write_bytes(self.header() + self.data())
        return path


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        element, values = value
        head = struct.pack("<IQ", element, len(values))
        return head + b"".join(pack(element, v) for v in values)
    return struct.pack(f"<{_FORMATS[kind]}", value)


def float_tensor(values: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", values.shape, values.astype("<f4").tobytes()


def random_tensor(kind: str, shape: tuple[int, ...], seed: int = 0) -> tuple[str, Any, bytes]:
    """Quantised blocks whose codes are random and whose scales are sensible."""
    rng = np.random.default_rng(seed)
    block, nbytes, scales = {
        "Q4_0": (32, 18, [0]), "Q4_1": (32, 20, [0, 1]), "Q8_0": (32, 34, [0]),
        "Q6_K": (256, 210, [104]),
    }[kind]  # fmt: skip
    n_blocks = int(np.prod(shape)) // block
    blocks = rng.integers(0, 256, (n_blocks, nbytes)).astype(np.uint8)
    for column in scales:
        blocks.view("<f2")[:, column] = rng.normal(size=n_blocks) * 0.01
    return kind, shape, blocks.tobytes()


LLAMA: Mapping[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.embedding_length": (U32, 64),
    "llama.block_count": (U32, 1),
    "llama.feed_forward_length": (U32, 96),
    "llama.attention.head_count": (U32, 2),
    "llama.attention.head_count_kv": (U32, 1),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.context_length": (U32, 2048),
    "llama.rope.freq_base": (F32, 10000.0),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "b", "c"])),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [1, 1, 1])),
    "tokenizer.ggml.add_bos_token": (BOOL, 0),
}


def tiny_llama(kind: str = "Q4_0") -> GGUF:
    """One layer of random weights: 2 heads and 1 KV head of 32."""
    norm = float_tensor(np.ones(64))
    shapes = {
        "token_embd": (128, 64), "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96),
    }  # fmt: skip
    tensors = {
        f"{name}.weight": random_tensor(kind, shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    return GGUF(dict(LLAMA), tensors | {f"{name}.weight": norm for name in norms})
