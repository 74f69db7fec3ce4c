"""Shell completions: what the shells themselves make of the scripts."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tqchat.cli import SUBCOMMANDS, parsers
from tqchat.completion import script


def bash(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    given = " ".join(f"'{word}'" for word in words)
    asked = (
        f"{script('bash', parsers())}\nCOMP_WORDS=({given}); COMP_CWORD={len(words) - 1}\n"
        '_tqchat; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", asked], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def fish(line: str, folder: Path) -> list[str]:
    asked = f"{script('fish', parsers())}\ncomplete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked], cwd=folder, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return [found.split("\t")[0] for found in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", [bash, fish])
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tqchat --kv ", ["fp16", "int3", "int4"]),
        ("tqchat smollm2 --te", ["--temperature"]),
        ("tqchat config ", ["edit", "path", "show"]),
        ("tqchat completion b", ["bash"]),
        ("tqchat bench dec", ["decode"]),
        ("tqchat bench decode --prof", ["--profile"]),
        ("tqchat plan --mem", ["--memory"]),
        ("tqchat models --te", []),
        ("tqchat sm", ["smollm2"]),
        ("tqchat pull mlx-community/Llama-3.3", ["mlx-community/Llama-3.3-70B-Instruct-4bit"]),
        ("tqchat --theme tq-1", ["tq-16"]),
    ],
)
def test_what_is_offered(shell, line: str, offered: list[str], tmp_path: Path) -> None:
    if not shutil.which(shell.__name__):
        pytest.skip(f"{shell.__name__} is not installed")
    assert sorted(shell(line, tmp_path)) == offered


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize("line", ["tqchat model-f", "tqchat -f model-f"])
def test_models_may_be_folders(line: str, tmp_path: Path) -> None:
    (tmp_path / "model-folder").mkdir()
    assert fish(line, tmp_path) == ["model-folder/"]


def test_subcommands_come_first(tmp_path: Path) -> None:
    assert set(SUBCOMMANDS) <= set(bash("tqchat ", tmp_path))


def test_every_option_of_every_parser_is_in_every_script() -> None:
    options = {
        name
        for parser in parsers().values()
        for action in parser._actions
        for name in action.option_strings
    }
    for shell, dashes in (("bash", "--"), ("zsh", "--"), ("fish", "-l ")):
        made = script(shell, parsers())
        for name in options:
            if name.startswith("--"):
                assert dashes + name[2:] in made, (shell, name)


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    file = tmp_path / "_tqchat"
    file.write_text(script("zsh", parsers()))
    subprocess.run(["zsh", "-n", str(file)], check=True)
