"""What happens before anything else: little is imported, and a machine without MLX is told so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.terminal import Terminal

ROOT = Path(__file__).parent.parent


@pytest.fixture
def without_backend(tmp_path: Path) -> dict[str, str]:
    """An environment where MLX is as `pip install mlx` leaves it on Linux: with no library."""
    core = tmp_path / "packages" / "mlx" / "core.py"
    core.parent.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    core.write_text(
        'raise ImportError("libmlx.so: cannot open shared object file: No such file or directory")'
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}


@pytest.mark.parametrize("arguments", [["-p", "Hello"], ["smollm2", "-p", "Hello", "--json"]])
def test_mlx_without_a_backend(without_backend: dict[str, str], arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tqchat", *arguments],
        stdin=subprocess.DEVNULL,
        env=without_backend,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "tqchat[cpu]" in done.stderr
    assert "tqchat[cuda13]" in done.stderr


def test_mlx_without_a_backend_in_a_terminal(without_backend: dict[str, str]) -> None:
    with Terminal([sys.executable, "-m", "tqchat"], without_backend) as terminal:
        assert terminal.wait_for_exit() == 2
        terminal.assert_sane()
        assert "tqchat[cpu]" in " ".join(terminal.text.split())
        assert b"Traceback" not in terminal.output
        assert b"\x1b[?1049h" not in terminal.output


@pytest.mark.parametrize("arguments", [["models"], ["pull", "./nowhere"]])
def test_subcommands_without_a_backend(
    without_backend: dict[str, str], arguments: list[str]
) -> None:
    """They work, or say what is missing."""
    done = subprocess.run(
        [sys.executable, "-m", "tqchat", *arguments],
        env=without_backend,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    expected = {"models": 0, "pull": 2}[arguments[0]]
    assert done.returncode == expected or "tqchat[cpu]" in done.stderr


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_little_is_imported_for_a_short_answer(option: str) -> None:
    code = (
        "import sys\n"
        "from tqchat.cli import main\n"
        "try:\n"
        f"    main([{option!r}])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "heavy = {'mlx', 'numpy', 'textual', 'tokenizers', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "tqchat" in done.stdout


def test_the_screen_comes_before_the_engine(without_backend: dict[str, str]) -> None:
    """What is imported to show the first frame has nothing of MLX in it."""
    code = "import tqchat.tui.app, sys; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=without_backend, check=True)
