"""What is offered to choose from: the list's figures are the public ones, and what fits is true."""

from pathlib import Path

import pytest

from tests.folders import write_tiny
from tqchat import library, plan
from tqchat.models.checkpoint import describe
from tqchat.models.find import Installed
from tqchat.models.recommended import recommended
from tqchat.models.registry import architecture
from tqchat.units import bytes_text

GIB = 1 << 30

# Billions of parameters and gigabytes of the 4-bit weights, as published.
PUBLIC = {
    "Llama-3.2-1B-Instruct-4bit": (1.24, 0.70),
    "Llama-3.2-3B-Instruct-4bit": (3.21, 1.81),
    "Mistral-7B-Instruct-v0.3-4bit": (7.25, 4.08),
    "Meta-Llama-3.1-8B-Instruct-4bit": (8.03, 4.52),
    "Llama-3.3-70B-Instruct-4bit": (70.6, 39.7),
}


def test_the_recommended_have_their_public_figures() -> None:
    found = {one.id.partition("/")[2]: one for one in recommended()}
    for name, (parameters, size) in PUBLIC.items():
        config = found[name].config
        shape = architecture(config).parse(config)
        assert shape.n_parameters / 1e9 == pytest.approx(parameters, rel=0.01)
        assert plan.weights_bytes(config, shape) / 1e9 == pytest.approx(size, rel=0.01)


def test_every_recommended_model_can_be_offered() -> None:
    sizes = []
    for one in recommended():
        shape = architecture(one.config).parse(one.config)
        sizes.append(plan.weights_bytes(one.config, shape))
        assert one.licence
        assert one.about
    assert sizes == sorted(sizes)


def test_what_fits_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    broken = tmp_path / "broken"
    broken.mkdir()
    here = [
        Installed("org/tiny", "hub", folder, 1234),
        Installed("org/broken", "hub", broken, 0),
    ]
    monkeypatch.setattr(library, "installed", lambda: here)
    monkeypatch.setattr(plan, "device", lambda: plan.Limit(6 * GIB, 60 * GIB))
    offers = {offer.name: offer for offer in library.offers("int4")}
    assert list(offers)[:2] == ["org/tiny", "org/broken"]
    assert offers["org/tiny"].is_here
    assert offers["org/tiny"].context > 0
    assert offers["org/broken"].context == 0
    assert "config.json" in offers["org/broken"].about
    # 4.5 GB of weights and 20 KiB a token and layer group in 6 GiB; 39.7 GB do not fit.
    eight = offers["mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"]
    assert not eight.is_here
    assert 20_000 < eight.context < 60_000
    assert offers["mlx-community/Llama-3.2-1B-Instruct-4bit"].context == 131_072
    assert offers["mlx-community/Llama-3.3-70B-Instruct-4bit"].context == 0
    dense = {offer.name: offer for offer in library.offers("fp16")}
    assert dense[eight.name].context < eight.context


def test_the_list_has_what_is_here_and_what_could_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(plan, "device", lambda: plan.Limit(6 * GIB, 60 * GIB))
    monkeypatch.setattr(library, "installed", lambda: [])
    assert library.show() == 0
    assert "No model yet" in capsys.readouterr().out
    here = [Installed("org/tiny", "hub", write_tiny(tmp_path / "tiny"), 1234)]
    monkeypatch.setattr(library, "installed", lambda: here)
    assert library.show() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["org/tiny", "llama"] in [line[:2] for line in lines]
    # What lies in the file, not what the list of files said: as /model and /plan have it.
    listed = next(line for line in lines if line[:1] == ["org/tiny"])
    offered = next(one for one in library.offers("int4") if one.name == "org/tiny")
    assert listed[-3:-1] == bytes_text(offered.size).split()
    assert offered.size == describe(tmp_path / "tiny").weights_bytes
    largest = next(
        line for line in lines if line and line[0].endswith("Llama-3.3-70B-Instruct-4bit")
    )
    assert largest[1:] == ["37.0", "GiB", "-", "Llama", "3.3"]


def test_pulling_what_is_here_says_so_and_shows_no_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "tiny")
    assert library.pull(str(folder)) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{folder}\n"
    assert printed.err.strip() == "It is on this machine already:"


def test_getting_what_is_here_and_what_is_no_model(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    assert library.get(str(folder), lambda *_: None, lambda: False) == (str(folder), "")
    name, fault = library.get("nonsense", lambda *_: None, lambda: False)
    assert name == ""
    assert "There is no model 'nonsense'" in fault
    assert "nonsense" in library.plan_text("nonsense", "int4")
