"""Wired memory, on Macs that are made up: how much, how often, and that it ends."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.test_engine import until
from tests.folders import write_tiny
from tqchat.engine.engine import Engine
from tqchat.engine.events import EngineOptions, Failed, Loaded
from tqchat.engine.wired import Wiring

GIB = 1 << 30


def mac(memory: int, recommended: int) -> dict[str, int]:
    return {"memory_size": memory * GIB, "max_recommended_working_set_size": recommended * GIB}


class System:
    """MLX's side: refuses more than is recommended, and remembers all limits set."""

    def __init__(self, device: Mapping[str, int], limit: int = 0) -> None:
        self.device = device
        self.limit = limit
        self.set: list[int] = []

    def set_limit(self, limit: int) -> int:
        if limit > self.device.get("max_recommended_working_set_size", 0):
            raise ValueError("larger than the recommended working set")
        self.set.append(limit)
        before, self.limit = self.limit, limit
        return before

    def wiring(self) -> Wiring:
        return Wiring(self.set_limit, lambda: self.device)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (mac(64, 48), 48),
        (mac(64, 60), 56),  # raised with sysctl as far as it goes
        (mac(16, 11), 8),
        (mac(8, 5), 0),
        ({"total_memory": 80 * GIB}, 0),  # CUDA
        ({}, 0),  # a CPU
    ],
)
def test_it_stays_within_what_is_recommended_and_leaves_the_system_its_part(
    device: dict[str, int], expected: int
) -> None:
    system = System(device)
    wiring = system.wiring()
    for _ in range(2):
        wiring.wire()
    assert system.set == [expected * GIB] * bool(expected)
    for _ in range(2):
        wiring.restore()
    assert system.set == [expected * GIB, 0] * bool(expected)


def test_the_limit_there_was_comes_back() -> None:
    system = System(mac(64, 48), limit=5 * GIB)
    wiring = system.wiring()
    wiring.wire()
    wiring.restore()
    assert system.limit == 5 * GIB


def test_an_older_system_is_left_alone() -> None:
    def refuse(limit: int) -> int:
        raise RuntimeError("needs macOS 15")

    wiring = Wiring(refuse, lambda: mac(64, 48))
    wiring.wire()
    wiring.restore()


def test_this_machine_has_nothing_to_say() -> None:
    wiring = Wiring()
    wiring.wire()
    wiring.restore()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("ends", ["well", "failing to load", "dying"])
@pytest.mark.parametrize("wire", [True, False])
def test_the_engine_wires_at_load_and_restores_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, wire: bool
) -> None:
    system = System(mac(64, 48))
    monkeypatch.setattr("tqchat.engine.engine.Wiring", system.wiring)
    engine = Engine(EngineOptions(wire=wire))
    engine.start()
    folder = write_tiny(tmp_path / "tiny")
    engine.load(str(folder))
    assert isinstance(until(engine, Loaded, Failed)[-1], Loaded)
    assert system.set == [48 * GIB] * wire
    if ends == "failing to load":
        engine.load(str(tmp_path / "nowhere"))
        assert isinstance(until(engine, Loaded, Failed)[-1], Failed)
    if ends == "dying":

        def die(job: object) -> None:
            raise SystemExit

        monkeypatch.setattr(engine, "_run", die)
        engine.clear()
        engine._thread.join()
    engine.close()
    assert system.set == [48 * GIB, 0] * wire
