"""`bench memory`: what it says against what numpy and MLX give out."""

import pytest

from tests.folders import write_tiny
from tqchat.bench import memory
from tqchat.engine.events import EngineOptions
from tqchat.engine.loading import LoadedModel, load_path
from tqchat.models.errors import ModelError


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return load_path(folder, "tiny", EngineOptions())


def test_the_plan_and_the_allocators_agree(loaded: LoadedModel) -> None:
    rows = memory.measure(loaded, [1024, 4096]).rows
    assert [(row.kv, row.context) for row in rows] == [
        (kv, n) for kv in ("fp16", "int4", "int3") for n in (1024, 4096)
    ]
    for row in rows:
        # What Python itself takes for the caches is a few kilobytes.
        assert row.allocated <= row.in_use <= row.allocated + 64_000
        assert row.held <= row.allocated
        assert row.in_use == pytest.approx(row.planned, rel=0.02)
    # 3 layers, K and V of 2 heads of 32: 16 bits, or 5 or 4 past the first 4 and the newest.
    assert rows[1].held == 4096 * 3 * 2 * 2 * 32 * 2
    sealed = (4096 - 4 - 64) // 32 * 32
    for row, bits in ((rows[3], 5), (rows[5], 4)):
        assert row.held == 3 * 2 * 2 * 32 * (sealed * bits // 8 + (4096 - sealed) * 2)


def test_what_does_not_fit_is_not_tried(loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match="ask for shorter --contexts"):
        memory.measure(loaded, [10**12])


def test_lengths_end_at_the_models_own(loaded: LoadedModel) -> None:
    assert memory.contexts(loaded) == [1024, 4096, 8192]
