"""The CUDA backend's order of tiles, in plain MLX: needs no GPU."""

import mlx.core as mx
import numpy as np
import pytest

from tqchat.kernels import codec
from tqchat.kernels.cuda.backend import CUDA


def canonical_tiles(head_dim: int, heads: int = 2, blocks: int = 3, kv_bits: int = 4) -> mx.array:
    rng = np.random.default_rng(head_dim)
    k, v = rng.normal(size=(2, heads, 32 * blocks, head_dim)).astype(np.float32)
    return codec.seal(mx.array(k), mx.array(v), kv_bits)


@pytest.mark.parametrize("kv_bits", [3, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 512])
def test_there_and_back(head_dim: int, kv_bits: int) -> None:
    backend = CUDA(kv_bits=kv_bits)
    tiles = canonical_tiles(head_dim, kv_bits=kv_bits)
    ordered = backend.from_canonical(tiles)
    assert ordered.shape == tiles.shape
    assert not mx.array_equal(ordered, tiles)
    assert mx.array_equal(backend.to_canonical(ordered), tiles)


def test_where_codes_and_parameters_lie() -> None:
    """Against attention.cuh's description, word by word, at head_dim 64."""
    dim, groups = 64, 2
    tiles = canonical_tiles(dim, heads=1, blocks=1)
    canonical, ordered = np.array(tiles[0, 0]), np.array(CUDA().from_canonical(tiles)[0, 0])
    halves = ordered.view(np.uint16)

    def k_code(token: int, channel: int) -> int:
        return int(canonical[token * dim // 8 + channel // 8] >> (4 * (channel % 8))) & 15

    def v_code(token: int, channel: int) -> int:
        at = 5 * dim + token * dim // 8 + channel // 8
        return int(canonical[at] >> (4 * (channel % 8))) & 15

    for group in range(groups):
        for lane in range(32):
            g, j = divmod(lane, 4)
            for i in range(4):
                word = int(ordered[(group * 32 + lane) * 4 + i])
                for n in range(8):
                    expected = k_code(g + 8 * i, group * 32 + 8 * j + n)
                    assert (word >> (4 * n)) & 15 == expected
                word = int(ordered[5 * dim + (group * 32 + lane) * 4 + i])
                for n in range(8):
                    token, channel = 8 * i + 2 * j + n // 4, group * 32 + 4 * g + n % 4
                    assert (word >> (4 * n)) & 15 == v_code(token, channel)
        for j in range(4):
            for p in range(4):
                for high in range(2):
                    at = 2 * ((group * 4 + j) * 4 + p) + high
                    word = int(canonical[4 * dim + group * 32 + 8 * j + 4 * high + p])
                    assert halves[2 * 4 * dim + at] == word & 0xFFFF
                    assert halves[2 * 4 * dim + dim + at] == word >> 16
                    word = int(canonical[9 * dim + (8 * p + 2 * j + high) * groups + group])
                    assert halves[2 * 9 * dim + at] == word & 0xFFFF
                    assert halves[2 * 9 * dim + dim + at] == word >> 16
