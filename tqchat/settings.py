"""The settings file: one table of settings, their defaults and their checks.

The same table makes the options of the command line and what `/set` understands. A setting is
looked for on the command line, then in the file, then here.
"""

import contextlib
import difflib
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, Self

from tqchat import paths


class SettingsError(Exception):
    """`str()` names the file, the line and the key, and says what would be right, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message))


class Check(Protocol):
    """What a setting may be. Both raise ValueError with what is wrong."""

    @property
    def metavar(self) -> str: ...

    def parse(self, text: str) -> Any:
        """From words that were typed."""

    def check(self, value: Any) -> Any:
        """From the file."""


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    metavar: str = "X"

    _kind: ClassVar[type[int] | type[float]] = float

    def parse(self, text: str) -> float:
        try:
            return self.check(self._kind(text))
        except ValueError:
            raise ValueError(f"{text!r} is not {self._wanted}") from None

    def check(self, value: Any) -> float:
        # A bool is an int to Python.
        if isinstance(value, bool) or not isinstance(value, (int, self._kind)):
            raise ValueError(f"{value!r} is not {self._wanted}")
        if not self.low <= value <= self.high:
            raise ValueError(f"{value!r} is not {self._wanted}")
        return value

    @property
    def _wanted(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Integer(Number):
    metavar: str = "N"

    _kind = int

    @property
    def _wanted(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Text:
    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        return text

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is not a text: put it in quotes")
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    choices: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.choices) + "}"

    def parse(self, text: str) -> str:
        return self.check(text)

    def check(self, value: Any) -> str:
        if str(value) not in self.choices:
            raise ValueError(f"{value!r} is none of {', '.join(self.choices)}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Switch:
    metavar: str = "on|off"

    def parse(self, text: str) -> bool:
        if text not in ("on", "off"):
            raise ValueError(f"{text!r} is neither on nor off")
        return text == "on"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value


Group = Literal["chat", "machine", "sampling"]


def _setting(default: Any, check: Check, help: str, group: Group = "chat") -> Any:
    return field(default=default, metadata={"check": check, "help": help, "group": group})


_NATURAL = Integer(0, 2**31 - 1)
_POSITIVE = Integer(1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Settings:
    """None: whatever the program or the model would choose."""

    model: str | None = _setting(
        None, Text("MODEL"), "the model to chat with (the last one used)", "machine"
    )
    system: str | None = _setting(None, Text(), "the system prompt")
    max_tokens: int | None = _setting(None, _POSITIVE, "most tokens of one answer")
    theme: str | None = _setting(None, Text("NAME"), "the colours of the screen")
    kv: Literal["int4", "int3", "fp16"] = _setting(
        "int4", Choice(("int4", "int3", "fp16")), "how the KV cache is stored (int4)", "machine"
    )
    context: int | None = _setting(
        None, _POSITIVE, "most tokens a conversation may take", "machine"
    )
    threads: int | None = _setting(
        None, Integer(1, 1024), "CPU threads (all that it may use)", "machine"
    )
    disk_budget: float = _setting(
        20,
        Number(0, 1e6),
        "most disk that saved KV caches take, in GiB (20); 0: none is saved",
        "machine",
    )
    wire: bool = _setting(
        True, Switch(), "on a Mac, keep the model in memory while it is not used (on)", "machine"
    )
    quantize: Literal["4", "8"] | None = _setting(
        None, Choice(("4", "8")), "make a model in 16 bits into one of 4 or 8, once", "machine"
    )
    think: bool | None = _setting(
        None, Switch(), "think before answering, where a model can be told", "sampling"
    )
    temperature: float | None = _setting(
        None, Number(0, 100), "0.7; 0 takes the likeliest token", "sampling"
    )
    top_p: float | None = _setting(None, Number(0, 1), "0.95; 1 switches it off", "sampling")
    top_k: int | None = _setting(None, _NATURAL, "0, which switches it off", "sampling")
    min_p: float | None = _setting(None, Number(0, 1), "0, which switches it off", "sampling")
    repetition_penalty: float | None = _setting(
        None, Number(0.01, 100), "1, which is none", "sampling"
    )
    seed: int | None = _setting(
        None, Integer(0, 2**64 - 1), "repeat the same random choices", "sampling"
    )

    @classmethod
    def of(cls, *sources: Mapping[str, Any]) -> Self:
        """What the first of `sources` that has it says."""
        merged: dict[str, Any] = {}
        for source in reversed(sources):
            merged |= {name: value for name, value in source.items() if name in TABLE}
        return cls(**merged)


TABLE: dict[str, Field[Any]] = {one.name: one for one in fields(Settings)}

# What can change while a conversation runs.
CHANGEABLE = [
    *(name for name, one in TABLE.items() if one.metadata["group"] == "sampling"),
    "max_tokens",
]


def sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a conversation's saved settings that are sound."""
    sound = {}
    for name in CHANGEABLE:
        with contextlib.suppress(KeyError, ValueError):
            sound[name] = TABLE[name].metadata["check"].check(values[name])
    return sound


def option(name: str) -> str:
    """A setting's name on the command line."""
    return "--" + name.replace("_", "-")


def read() -> dict[str, Any]:
    """What the file says; {} if there is none. Raises SettingsError."""
    path = paths.settings_file()
    try:
        # A pipe would wait when it is opened, a device might never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise SettingsError(f"{path} is not a regular file, so it is not read.")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SettingsError(f"{path}, line {line}: this is not text in UTF-8.") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> dict[str, Any]:
    """The settings in a file's text. Raises SettingsError, which calls the file `name`."""
    try:
        values = tomllib.loads(text)
    # Python reads no integer of thousands of digits: a ValueError, as tomllib's own are.
    except (ValueError, RecursionError) as error:
        raise SettingsError(_broken(text, name, str(error))) from None
    found = {}
    for key, value in values.items():
        try:
            found[key] = _checked(key, value)
        except ValueError as error:
            line = _lines(text, key).start + 1
            raise SettingsError(f"{name}, line {line}: {error}") from None
    return found


def _checked(key: str, value: Any) -> Any:
    """Raises ValueError."""
    if key not in TABLE:
        close = difflib.get_close_matches(key, TABLE, n=1)
        instead = f"Did you mean {close[0]}?" if close else "`tqchat config show` lists them."
        raise ValueError(f"there is no setting {key}. {instead}")
    try:
        return TABLE[key].metadata["check"].check(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}.") from None


def _broken(text: str, name: str, error: str) -> str:
    """What is wrong with a text that is not TOML; tomllib says where, but not in what."""
    if not (match := re.search(r" \(at line (\d+), column \d+\)", error)):
        return f"{name}: this is not TOML: {error}."
    number = int(match[1])
    line = text.split("\n")[number - 1].strip()
    shown = "".join(c for c in line if c.isprintable())[:60]
    return f"{name}, line {number}: {shown}: {error.replace(match[0], '')}."


def _lines(text: str, key: str) -> range:
    """The lines, from 0, by which a key of the top level comes into a TOML text.

    tomllib does not tell them: they are the first that are TOML by themselves and have the key.
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    start = 0
    for end in range(1, len(lines) + 1):
        try:
            values = tomllib.loads("".join(lines[start:end]))
        except tomllib.TOMLDecodeError:
            continue
        if key in values:
            return range(start, end)
        start = end
    return range(start, len(lines))


def store(key: str, value: str) -> None:
    """Put one setting into the file and leave all else in it as it is. Raises OSError,
    SettingsError."""
    read()
    path = paths.settings_file()
    text = path.read_bytes().decode("utf-8-sig") if path.exists() else template()
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    place = _lines(text, key) if key in tomllib.loads(text) else range(len(lines), len(lines))
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    lines[place.start : place.stop] = [f"{key} = {_toml(value)}\n"]
    paths.write_private(path, "".join(lines))


def template() -> str:
    """A file that says what there is and changes nothing."""
    parts = [
        "# tqchat's settings. Take away the # of a line to set it; what the command line says\n"
        "# comes before what is said here. `tqchat config show` tells what is in force.\n"
    ]
    headings = {"chat": "Chatting", "machine": "The model and the machine", "sampling": "Sampling"}
    for group, heading in headings.items():
        parts.append(f"\n# {heading}\n\n")
        for one in TABLE.values():
            if one.metadata["group"] == group:
                example = one.default if one.default is not None else _EXAMPLES[one.name]
                parts.append(f"# {one.name} = {_toml(example)}  # {one.metadata['help']}\n")
    return "".join(parts)


_EXAMPLES: dict[str, Any] = {
    "model": "smollm2",
    "system": "Answer briefly.",
    "max_tokens": 1000,
    "theme": "tq-dark",
    "context": 32768,
    "threads": 4,
    "quantize": 4,
    "think": False,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 1,
}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def shown(settings: Settings, said: Sequence[str]) -> list[tuple[str, str, str]]:
    """Every setting, its value as TOML, and where that comes from; `said`: those in the file."""
    return [
        (name, "not set" if value is None else _toml(value), "file" if name in said else "default")
        for name, value in asdict(settings).items()
    ]
