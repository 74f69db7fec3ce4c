"""`tqchat doctor` tells sound kernels from broken ones."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from tests.emulator import EmulatedKernel, why_not
from tqchat import doctor
from tqchat.kernels import Backend, KVView
from tqchat.kernels.metal.backend import Metal


def test_this_machine_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "attention, long, head_dim 128" in printed
    assert "attention, long, head_dim 128, int3" in printed
    assert "WRONG" not in printed
    assert printed.endswith("\nAll well.\n")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_metal_kernels_are_sound() -> None:
    kernels = Metal(
        make_kernel=partial(EmulatedKernel, checked=False), cores=8, compile_ahead=False
    )
    findings = list(doctor.check_kernels(kernels, 64))
    findings += doctor.check_kernels(kernels, 64, k_is_v=True)
    assert len(findings) == 14
    assert not any(finding.is_wrong for finding in findings)


class Broken(Backend):
    """Attends to half as much, cannot prefill, and seals V into K's place, or upside down."""

    def seal(self, k: Any, v: Any) -> Any:
        return super().seal(v, k)

    def seal_values(self, v: Any) -> Any:
        return super().seal_values(-v)

    def attend(self, q: Any, view: KVView, scale: float, **options: Any) -> Any:
        return super().attend(q, view, scale / 2, **options)

    def attend_chunk(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel\nand a stack trace")


def test_broken_kernels_are_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "select", lambda dtype, kv_bits=4: Broken(mx.float32))
    assert doctor.main() == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert lines[-1].startswith("Not well: ")
    assert "prefill, head_dim 64" in lines[-1]
    assert len(wrong) % 6 == 0  # of seven kernels one is sound: unsealing
    assert "WRONG  prefill, head_dim 64: no such kernel" in wrong
    assert len([line for line in wrong if "head_dim 512, V alone" in line]) == 6
