"""Theme files."""

from pathlib import Path

import pytest

from tqchat.tui import themes


def test_shipped_themes_are_whole() -> None:
    found, faults = themes.shipped()
    assert not faults
    assert {themes.DARK, themes.LIGHT} <= {theme.name for theme in found}
    for theme in found:
        colours = themes.complete({**theme.to_color_system().generate(), **theme.variables})
        assert themes.VARIABLES.keys() <= colours.keys()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("primary = ", "Invalid value"),
        ('dark = true\nsecondary = "#fff"', "primary"),
        ('primary = "no colour"', "no colour"),
        ('primary = "#fff"\nglitter = 1', "glitter"),
        ("primary = 3", ""),
        ('primary = "#fff"\nvariables = "x"', ""),
        ('primary = "#fff"\n[variables]\ncode = 3', "code"),
        ('primary = "#fff"\n[variables]\ncode = "no colour"', "code"),
        ("\x00", ""),
    ],
)
def test_a_broken_file_is_named_and_skipped(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    (tmp_path / "good.toml").write_text('primary = "#123456"')
    (tmp_path / "notes.txt").write_text("no theme")
    found, faults = themes.read_all(tmp_path)
    assert [theme.name for theme in found] == ["good"]
    (message,) = faults
    assert "bad.toml" in message
    assert fault in message
