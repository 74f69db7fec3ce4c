"""Colour themes: one TOML file each. A file that does not work is named and skipped."""

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path

from textual.color import Color, ColorParseError
from textual.theme import BUILTIN_THEMES, Theme

import tqchat.themes

DARK = "tq-dark"
LIGHT = "tq-light"
SIXTEEN = "tq-16"

VARIABLES = {
    "code": "$surface",
    "user": "$surface",
    "track": "$foreground 15%",
    "rule": "$foreground 25%",
    "quote": "$primary 60%",
    "marker": "$primary",
    "inline-code": "$accent",
    "syntax-keyword": "$secondary",
    "syntax-string": "$success",
    "syntax-number": "$warning",
    "syntax-name": "$primary",
    "memory-weights": "$primary",
    "memory-kv": "$accent",
    "memory-other": "$secondary",
    "memory-elsewhere": "$foreground 35%",
}
"""The colours that the screen uses beside Textual's own; a theme's [variables] may set any."""


def complete(colours: dict[str, str]) -> dict[str, str]:
    """Adds what is missing of VARIABLES, made of the colours that are there."""
    made = {}
    for name, value in VARIABLES.items():
        source, _, strength = value.removeprefix("$").partition(" ")
        made[name] = f"{colours[source]} {strength}".rstrip()
    return {**made, **colours}


_FIELDS = {field.name for field in dataclasses.fields(Theme)}
_COLOURS = (
    "primary",
    "secondary",
    "warning",
    "error",
    "success",
    "accent",
    "foreground",
    "background",
    "surface",
    "panel",
    "boost",
)


class ThemeError(ValueError):
    """A theme file that cannot be used; the message names the file and what is wrong in it."""


def read(file: Path, check: bool = True) -> Theme:
    """One theme. Raises ThemeError. `check`: whether its colours are looked at as well."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ThemeError(f"theme {file.name}: {error}") from error
    if unknown := sorted(values.keys() - _FIELDS):
        raise ThemeError(f"theme {file.name}: unknown key {unknown[0]!r}")
    values.setdefault("name", file.name.removesuffix(".toml"))
    try:
        if values.get("ansi"):
            # What Textual's own style sheets refer to in a theme of the terminal's colours.
            base = BUILTIN_THEMES["ansi-dark" if values.get("dark", True) else "ansi-light"]
            values["variables"] = {**base.variables, **values.get("variables", {})}
        theme = Theme(**values)
        if check:
            _check_colours(theme)
    except (TypeError, ValueError, AttributeError) as error:
        raise ThemeError(f"theme {file.name}: {error}") from error
    return theme


def _check_colours(theme: Theme) -> None:
    """Raises ValueError, TypeError or AttributeError."""
    for name in _COLOURS:
        _check_colour(name, getattr(theme, name))
    for name in VARIABLES.keys() & theme.variables.keys():
        _check_colour(name, theme.variables[name])
    complete({**theme.to_color_system().generate(), **theme.variables})


def _check_colour(name: str, value: object) -> None:
    """A colour as CSS writes it, perhaps with a strength: "#8ab4f8 60%". Raises ValueError."""
    if value is None:
        return
    try:
        Color.parse(str(value).split()[0])
    except (ColorParseError, IndexError):
        raise ValueError(f"{name} = {value!r} is not a colour") from None


def read_all(folder: Path, check: bool = True) -> tuple[list[Theme], Sequence[str]]:
    """The themes of a folder, and what was wrong with the files that are none."""
    themes: list[Theme] = []
    faults: list[str] = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            try:
                themes.append(read(file, check))
            except ThemeError as error:
                faults.append(str(error))
    return themes, faults


def shipped() -> tuple[list[Theme], Sequence[str]]:
    """The themes that come with the program, which was tested with them."""
    return read_all(Path(tqchat.themes.__path__[0]), check=False)


def default(color_system: str | None) -> str:
    """The theme where none is chosen. `color_system`: what Rich makes of the terminal."""
    return SIXTEEN if color_system in ("standard", "windows") else DARK


def all_themes(folder: Path) -> tuple[list[Theme], list[str]]:
    """Those that come with the program and the user's own in `folder`, which go before them."""
    found, faults = shipped()
    own: list[Theme] = []
    own_faults: Sequence[str] = []
    if folder.is_dir():
        own, own_faults = read_all(folder)
    return list({theme.name: theme for theme in [*found, *own]}.values()), [*faults, *own_faults]


def names(folder: Path) -> list[str]:
    """What may be chosen: those of `all_themes`, and Textual's."""
    return [*(theme.name for theme in all_themes(folder)[0]), *BUILTIN_THEMES]
