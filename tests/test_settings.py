"""The settings file: what is right is taken, what is wrong is named by line and key."""

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqchat import config, settings
from tqchat.chat.sessions import Session
from tqchat.settings import TABLE, Settings, SettingsError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "settings.toml"
    monkeypatch.setattr("tqchat.paths.settings_file", lambda: path)
    return path


def test_the_template_sets_nothing_and_names_everything() -> None:
    text = settings.template()
    assert settings.parse(text, "template") == {}
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line]
    found = settings.parse("\n".join(lines), "template")
    assert found.keys() == TABLE.keys()
    for name, value in found.items():
        if (default := TABLE[name].default) is not None:
            assert value == default


def test_what_is_said_first_counts() -> None:
    chosen = Settings.of({"top_k": 3, "file": []}, {"top_k": 4, "kv": "fp16"})
    assert chosen == Settings(top_k=3, kv="fp16")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\n\ntemprature = 1\n", 3, ("temprature", "Did you mean temperature?")),
        ("# a\ntop_p = 1.5\n", 2, ("top_p", "1.5", "from 0 to 1")),
        ("top_p = nan", 1, ("top_p", "from 0 to 1")),
        ('top_k = "3"', 1, ("top_k", "whole number")),
        ("top_k = true", 1, ("top_k", "whole number")),
        ("top_k = 2.0", 1, ("top_k", "whole number")),
        ('kv = "int2"', 1, ("kv", "int4", "fp16")),
        ("wire = 1", 1, ("wire", "true")),
        ("system = 5", 1, ("system", "quotes")),
        ('system = """\ntop_p = 7\n"""\n\n# b\ntop_p = 8', 6, ("top_p", "8")),
        ("[sampling]\ntop_p = 1", 1, ("sampling",)),
        ("kv = 'int4'\ntop_p = \n", 2, ("top_p",)),
        ("top_p = 1\ntop_p = 1\n", 2, ("top_p",)),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, line: int, words: tuple[str, ...]) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        settings.read()
    assert f"{file}, line {line}: " in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_bytes_that_are_no_text_are_named(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"# fine\nsystem = '\xff'\n")
    with pytest.raises(SettingsError, match="line 2: this is not text in UTF-8"):
        settings.read()


@pytest.mark.parametrize(
    "text",
    [f"top_k = {'9' * 5000}", f"top_k = 0x{'f' * 9000}", '"a\\u001b[31mb" = 1', "a='\x1b[31m'"],
)
def test_a_message_is_one_line_that_is_safe_to_print(file: Path, text: str) -> None:
    with pytest.raises(SettingsError) as error:
        settings.parse(text, "file\x1b[31m")
    assert str(error.value).isprintable()


def test_what_is_no_regular_file_is_not_opened(file: Path) -> None:
    file.parent.mkdir()
    os.mkfifo(file)
    with pytest.raises(SettingsError, match="not a regular file"):
        settings.read()


def test_a_fault_in_a_long_file_is_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '# a\nsystem = """\na"""\n' + "\n# b" * 2000 + "\nkv = 1\n"
    parsed: list[int] = []

    def loads(part: str) -> dict[str, Any]:
        parsed.append(len(part))
        return original(part)

    original = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", loads)
    with pytest.raises(SettingsError, match="line 2005: kv"):
        settings.parse(text, "file")
    assert sum(parsed) < 3 * len(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(SettingsError):
        assert settings.parse(text, "file").keys() <= TABLE.keys()


@given(st.text(), st.text(alphabet="ab# =\n\u2028", max_size=30))
def test_one_setting_is_stored_and_all_else_stays(value: str, comment: str) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.toml"
        patch.setattr("tqchat.paths.settings_file", lambda: path)
        around = "".join(f"# {line}\n" for line in comment.split("\n"))
        path.write_text(f"{around}theme = '''\nold\n'''\n{around}top_k = 3", "utf-8", newline="")
        settings.store("theme", value)
        text = path.read_bytes().decode()
        assert text.startswith(f"{around}theme = ")
        assert text.endswith(f"{around}top_k = 3\n")
        assert settings.read() == {"theme": value, "top_k": 3}


def test_a_file_is_begun_from_the_template_and_is_private(file: Path) -> None:
    settings.store("theme", "tq-light")
    assert settings.read() == {"theme": "tq-light"}
    assert file.read_text().startswith(settings.template())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_show_says_where_a_value_comes_from(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings.store("system", 'Say "yes".\n')
    assert config.main("show") == 0
    out = capsys.readouterr().out
    values = tomllib.loads("\n".join(line for line in out.splitlines() if "not set" not in line))
    expected = {**asdict(Settings()), "system": 'Say "yes".\n'}
    assert values == {name: value for name, value in expected.items() if value is not None}
    said = [line.split()[0] for line in out.splitlines() if line.endswith("# file")]
    assert said == ["system"]


def test_edit_makes_the_file_and_checks_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\necho 'kv = 4' >> \"$1\"\n")
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    assert config.main("edit") == 2
    lines = settings.template().count("\n")
    assert f"line {lines + 1}: kv: 4 is none of int4, int3, fp16" in capsys.readouterr().err
    monkeypatch.setenv("VISUAL", "no-such-editor")
    assert config.main("edit") == 2
    assert "$EDITOR" in capsys.readouterr().err
    monkeypatch.setattr("tqchat.paths.settings_file", lambda: editor / "settings.toml")
    assert config.main("edit") == 2
    assert f"{editor}/settings.toml cannot be written: " in capsys.readouterr().err
    monkeypatch.setattr("tqchat.paths.settings_file", lambda: file)
    assert config.main("path") == 0
    assert capsys.readouterr().out == f"{file}\n"


def test_a_conversation_goes_on_as_it_was_held(file: Path) -> None:
    """The file is for new ones; the command line is for all."""
    from tqchat.cli import _as_it_was, _parser

    said = Settings(model="other", system="Be brief.", top_k=3)
    with Session.create("org/model", "Be kind.") as session:
        options = _parser().parse_args([])
        went_on = _as_it_was(options, said, session)
        assert went_on == Settings(model="org/model", system="Be kind.", top_k=3)
        options = _parser().parse_args(["smollm2", "--system", "Be loud."])
        went_on = _as_it_was(options, Settings.of(vars(options), asdict(said)), session)
        assert went_on == Settings(model="smollm2", system="Be loud.", top_k=3)
    assert _as_it_was(options, said, None) is said


def test_little_is_imported_to_read_settings() -> None:
    code = (
        "import sys, tqchat.settings\n"
        "assert not {'mlx', 'numpy', 'textual', 'argparse'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
