"""The GGUF reader against mx.load, NumPy arithmetic, and files that lie."""

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.models import gguf_file as g
from tqchat.models import gguf
from tqchat.models.checkpoint import read_checkpoint
from tqchat.models.errors import ModelError


def read(path: Path) -> dict[str, mx.array]:
    return gguf.read_tensors(path, gguf.read_header(path))


def same(a: mx.array, b: mx.array) -> bool:
    """Same bits: NaN included."""
    a8, b8 = (np.array(mx.view(x, mx.uint8)) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and bool((a8 == b8).all())


def test_smollm2_reads_as_mlx_reads_it(smollm2_gguf: Path) -> None:
    ours, (theirs, metadata) = (
        read(smollm2_gguf),
        mx.load(str(smollm2_gguf), return_metadata=True),
    )
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert same(ours[name], theirs[name]), name
    header = gguf.read_header(smollm2_gguf)
    assert header.metadata.keys() == metadata.keys()
    for key, value in metadata.items():
        value = value.tolist() if isinstance(value, mx.array) else value
        assert header.metadata[key] == value, key


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_types_read_as_mlx_reads_them(tmp_path: Path, kind: str) -> None:
    file = g.GGUF(tensors={"x.weight": g.random_tensor(kind, (3, 64))})
    path = file.write(tmp_path / "x.gguf")
    ours, theirs = read(path), mx.load(str(path))
    assert ours.keys() == theirs.keys() == {"x.weight", "x.scales", "x.biases"}
    assert all(same(ours[name], theirs[name]) for name in theirs)


def test_many_blocks_read_as_mlx_reads_them(tmp_path: Path) -> None:
    """More blocks than are decoded at a time, the last time fewer."""
    file = g.GGUF(tensors={"x.weight": g.random_tensor("Q4_1", (gguf._CHUNK // 2 + 5, 96))})
    path = file.write(tmp_path / "x.gguf")
    ours, theirs = read(path), mx.load(str(path))
    assert all(same(ours[name], theirs[name]) for name in theirs)


def test_q8_0_is_what_the_format_says(tmp_path: Path) -> None:
    kind, shape, data = g.random_tensor("Q8_0", (2, 64))
    path = g.GGUF(tensors={"x.weight": (kind, shape, data)}).write(tmp_path / "x.gguf")
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
    scales = blocks.view("<f2")[:, :1].astype(np.float64)
    expected = (scales * blocks[:, 2:].view(np.int8)).reshape(shape)
    w = read(path)
    values = mx.dequantize(
        w["x.weight"], w["x.scales"].astype(mx.float32), w["x.biases"].astype(mx.float32), 32, 8
    )
    np.testing.assert_allclose(np.array(values), expected, atol=1e-5)


def test_q6_k_is_what_the_format_says(tmp_path: Path) -> None:
    """Element by element, as ggml's comments describe the block."""
    kind, shape, data = g.random_tensor("Q6_K", (2, 512))
    path = g.GGUF(tensors={"output.weight": (kind, shape, data)}).write(tmp_path / "x.gguf")
    expected = []
    for block in np.frombuffer(data, np.uint8).reshape(-1, 210):
        d = float(block[208:].view("<f2")[0])
        for i in range(256):
            half, j = divmod(i, 128)
            low = int(block[64 * half + j % 64]) >> (4 * (j // 64)) & 15
            high = int(block[128 + 32 * half + j % 32]) >> (2 * (j // 32)) & 3
            scale = int(block[192:208].view(np.int8)[i // 16])
            expected.append(d * scale * ((low | high << 4) - 32))
    values = read(path)["output.weight"]
    assert values.dtype == mx.float16
    np.testing.assert_allclose(np.array(values).ravel(), np.float16(expected), rtol=2e-3, atol=1e-7)


def test_plain_types(tmp_path: Path) -> None:
    numbers = np.array([[1.5, -2.0, 3e38], [0.1, -0.0, 65504.0]], np.float32)
    bf16 = (numbers.view(np.uint32) >> 16).astype("<u2")
    file = g.GGUF(
        tensors={
            "f32": ("F32", (2, 3), numbers.tobytes()),
            "f16": ("F16", (3,), np.float16([1, 2, 3]).tobytes()),
            "bf16": ("BF16", (2, 3), bf16.tobytes()),
            "i32": ("I32", (2,), np.int32([-5, 7]).tobytes()),
        },
        version=2,
    )
    w = read(file.write(tmp_path / "x.gguf"))
    assert w["f32"].tolist() == numbers.tolist()
    assert w["f16"].tolist() == [1, 2, 3]
    assert w["f16"].dtype == mx.float16
    assert w["bf16"].dtype == mx.bfloat16
    truncated = (bf16.astype(np.uint32) << 16).view(np.float32)
    assert w["bf16"].astype(mx.float32).tolist() == truncated.tolist()
    assert w["i32"].tolist() == [-5, 7]


def test_metadata_of_every_type(tmp_path: Path) -> None:
    metadata: dict[str, tuple[int, Any]] = {
        "u8": (g.U8, 255), "i8": (g.I8, -1), "u16": (g.U16, 65535), "i16": (g.I16, -2),
        "u32": (g.U32, 2**32 - 1), "i32": (g.I32, -3), "f32": (g.F32, 0.5), "bool": (g.BOOL, 1),
        "string": (g.STRING, "né\n"), "u64": (g.U64, 2**64 - 1), "i64": (g.I64, -4),
        "f64": (g.F64, 0.1), "strings": (g.ARRAY, (g.STRING, ["", "a"])),
        "floats": (g.ARRAY, (g.F64, [0.1, 0.2])), "bools": (g.ARRAY, (g.BOOL, [0, 1])),
        "none": (g.ARRAY, (g.U8, [])),
    }  # fmt: skip
    path = g.GGUF(metadata).write(tmp_path / "x.gguf")
    read = gguf.read_header(path).metadata
    for key, (kind, value) in metadata.items():
        assert read[key] == (value[1] if kind == g.ARRAY else value), key
    assert read["bool"] is True
    assert read["bools"] == [False, True]


def broken(**changes: Any) -> g.GGUF:
    file = g.tiny_llama()
    for name, value in changes.items():
        setattr(file, name, value)
    return file


def with_metadata(**values: tuple[int, Any]) -> g.GGUF:
    file = g.tiny_llama()
    file.metadata |= {key.replace("__", "."): value for key, value in values.items()}
    return file


def with_tensor(name: str, tensor: tuple[str, Any, bytes]) -> g.GGUF:
    file = g.tiny_llama()
    file.tensors[name] = tensor
    return file


BLOCK = bytes(18)
CASES: dict[str, tuple[g.GGUF | bytes, str]] = {
    "empty": (b"", "empty"),
    "short": (b"GG", "cut short"),
    "no magic": (b"safetensors here" * 4, "not a GGUF file"),
    "version 1": (broken(version=1), "version 1"),
    "big endian": (broken(version=3 << 24), "version 50331648"),
    "huge tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "cut short"),
    "huge value count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "cut short"),
    "huge string": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "cut short"),
    "huge array": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + g.string("a") + struct.pack("<IIQ", 9, 4, 2**61),
        "cut short",
    ),
    "huge array of strings": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + g.string("a") + struct.pack("<IIQ", 9, 8, 2**61),
        "cut short",
    ),
    "nested array": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + g.string("a") + struct.pack("<IIQ", 9, 9, 1),
        "arrays of arrays",
    ),
    "unknown value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + g.string("a") + struct.pack("<IQ", 99, 0),
        "unknown type 99",
    ),
    "bool of 2": (with_metadata(a=(g.BOOL, 2)), "truth value"),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (g.string("a") + struct.pack("<IB", 0, 1)),
        "'a' appears twice",
    ),
    "not UTF-8": (with_metadata(a=(g.STRING, b"\xff")), "not UTF-8"),
    "alignment 0": (with_metadata(general__alignment=(g.U32, 0)), "alignment 0"),
    "alignment true": (with_metadata(general__alignment=(g.BOOL, 1)), "alignment True"),
    "split": (with_metadata(split__count=(g.U16, 3)), "one of 3 parts"),
    "K quant": (with_tensor("x.weight", ("Q4_K", (1, 256), bytes(144))), "Q4_K"),
    "Q6_K in a layer": (with_tensor("x.weight", ("Q6_K", (1, 256), bytes(210))), "Q6_K"),
    "no dimensions": (with_tensor("x.weight", ("F32", (), bytes(4))), "0 dimensions"),
    "too many dimensions": (with_tensor("x", ("F32", (1,) * 5, bytes(4))), "5 dimensions"),
    "dimension 0": (with_tensor("x", ("F32", (0, 1), b"")), "dimensions [1, 0]"),
    "huge dimension": (with_tensor("x", ("F32", (2**31,), b"")), "dimensions"),
    "product overflows": (with_tensor("x", ("F32", (2**30,) * 4, b"")), "cut short"),
    "row is no whole block": (with_tensor("x.weight", ("Q4_0", (2, 16), BLOCK)), "[16, 2]"),
    "quantised bias": (with_tensor("x.bias", ("Q4_0", (1, 32), BLOCK)), "no weight"),
    "name of a scale": (with_tensor("token_embd.scales", ("F32", (1,), bytes(4))), "same name"),
    "overlap": (with_tensor("x", ("F32", (2**20,), b"")), "cut short"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    content, message = CASES[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(content) if isinstance(content, bytes) else content.write(path)
    with pytest.raises(ModelError) as error:
        read_checkpoint(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("offset", [0, 4, 128, 2**40, 2**64 - 32])
def test_an_offset_that_lies(tmp_path: Path, offset: int) -> None:
    """Of the second tensor, which belongs at 256: overlapping, unaligned, past the end."""
    tensor = g.float_tensor(np.ones(64))
    file = g.GGUF(tensors={"a": tensor, "b": tensor})
    before = file.header().rstrip(b"\0")
    assert before.endswith(struct.pack("<IH", 0, 256))
    content = before[:-2] + struct.pack("<Q", offset)
    content += bytes(-len(content) % 32) + file.data()
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"wrong offset|cut short"):
        gguf.read_header(tmp_path / "x.gguf")


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    ones, twos = np.ones(3), np.full(5, 2)
    file = g.GGUF({"general.alignment": (g.U32, 64)}, alignment=64)
    file.tensors = {"a": g.float_tensor(ones), "b": g.float_tensor(twos)}
    w = read(file.write(tmp_path / "x.gguf"))
    assert w["a"].tolist() == ones.tolist()
    assert w["b"].tolist() == twos.tolist()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    header = len(TINY.header())
    for size in [*range(0, header, 7), header, len(SOUND) - 257, len(SOUND) - 1]:
        (tmp_path / "x.gguf").write_bytes(SOUND[:size])
        with pytest.raises(ModelError):
            read_checkpoint(tmp_path / "x.gguf")


TINY = g.tiny_llama()
SOUND = TINY.header() + TINY.data()


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(TINY.header()) + 64), st.integers(0, 255)), max_size=4
    ),
    words=st.lists(
        st.tuples(
            st.integers(0, len(TINY.header()) // 4 - 2),
            st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 8, 2**64 - 1]),
        ),
        max_size=2,
    ),
    size=st.integers(0, len(SOUND)) | st.just(len(SOUND)),
)
@example(flips=[], words=[], size=len(SOUND))
def test_whatever_the_bytes_it_reads_or_says_why(
    tmp_path_factory: pytest.TempPathFactory,
    flips: list[tuple[int, int]],
    words: list[tuple[int, int]],
    size: int,
) -> None:
    content = bytearray(SOUND)
    for position, value in flips:
        content[position] = value
    for position, word in words:
        content[4 * position : 4 * position + 8] = struct.pack("<Q", word)
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(content[:size])
    try:
        checkpoint = read_checkpoint(path)
    except ModelError as error:
        assert str(error).isprintable()  # noqa: PT017
        return
    mx.eval(checkpoint.weights)
    assert sum(w.nbytes for w in checkpoint.weights.values()) == checkpoint.weights_bytes
    assert size == len(SOUND)


def test_reading_can_be_ended_between_tensors(tmp_path: Path) -> None:
    path = g.tiny_llama().write(tmp_path / "x.gguf")
    heard = []

    def progress(done: int, total: int) -> None:
        heard.append((done, total))
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_checkpoint(path, progress)
    assert len(heard) == 3
    assert 0 < heard[0][0] < heard[1][0] < heard[2][0] < heard[2][1]


def test_a_file_that_may_only_be_read(tmp_path: Path) -> None:
    path = g.tiny_llama().write(tmp_path / "x.gguf")
    path.chmod(0o400)
    before = path.stat().st_mtime_ns
    assert read_checkpoint(path).weights
    assert path.stat().st_mtime_ns == before
