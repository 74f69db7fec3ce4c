"""Theme files."""

from pathlib import Path

import pytest
from textual.color import Color
from textual.theme import Theme

from tests.tui.conftest import chat, make_app
from tests.tui.fake_engine import FakeEngine
from tqchat import paths
from tqchat.settings import Settings
from tqchat.tui import themes
from tqchat.tui.app import ChatApp

SHIPPED = {theme.name: theme for theme in themes.shipped()[0]}


def test_shipped_themes_are_whole() -> None:
    found, faults = themes.read_all(Path(themes.__file__).parents[2] / "themes")
    assert not faults
    assert found == themes.shipped()[0]
    assert {themes.DARK, themes.LIGHT, themes.SIXTEEN} <= {theme.name for theme in found}
    assert len(found) >= 6
    assert {theme.dark for theme in found} == {True, False}
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


def test_the_terminals_colours_are_chosen_where_it_has_no_others() -> None:
    assert themes.default("standard") == themes.SIXTEEN
    assert themes.default("truecolor") == themes.default("256") == themes.DARK


def contrast(one: str, other: str) -> float:
    """As WCAG 2.2 defines it."""

    def luminance(colour: str) -> float:
        parts = [part / 255 for part in Color.parse(colour).rgb]
        red, green, blue = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [t for t in SHIPPED.values() if not t.ansi], ids=lambda t: t.name)
def test_text_can_be_read(theme: Theme) -> None:
    colours = themes.complete({**theme.to_color_system().generate(), **theme.variables})
    least = 7.0 if theme.name == "tq-contrast" else 4.5
    written = {
        "background": ["foreground", "text-muted", "primary", "accent", "error", "inline-code"],
        "surface": ["foreground", "text-muted", "primary"],
        "user": ["foreground", "text-muted"],
        "code": [name for name in themes.VARIABLES if name.startswith("syntax-")],
    }
    for behind, names in written.items():
        for name in names:
            assert contrast(colours[name], colours[behind]) >= least, f"{name} on {behind}"


@pytest.mark.parametrize("name", SHIPPED)
async def test_every_theme_draws_the_screen(engine: FakeEngine, name: str) -> None:
    app = make_app(engine, name)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert app.theme == name


async def test_the_users_own_themes_are_there_and_broken_ones_named(engine: FakeEngine) -> None:
    folder = paths.private_dir(paths.config_dir() / "themes")
    (folder / "mine.toml").write_text('primary = "#123456"')
    (folder / "terminal.toml").write_text('ansi = true\nprimary = "ansi_red"')
    (folder / "bad.toml").write_text("primary = ")
    for name in ("mine", "terminal"):
        app = ChatApp(engine.open, Settings(theme=name))
        async with app.run_test(size=(100, 40)):
            assert app.theme == name
    async with chat(engine) as screen:
        await screen.shows("theme bad.toml")
