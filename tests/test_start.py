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


HEAVY = {"mlx", "numpy", "tokenizers", "jinja2", "markdown_it", "pygments", "huggingface_hub"}


def test_nothing_heavy_is_imported_before_the_first_frame() -> None:
    """From the command to the frame; the engine is opened after that."""
    code = (
        "import argparse, asyncio, sys\n"
        "import tqchat.cli, tqchat.tui.app as app\n"
        "from tqchat.settings import Settings\n"
        "heavy = []\n"
        "def open_engine(name):\n"
        f"    heavy.append({HEAVY} & sys.modules.keys())\n"
        "    raise RuntimeError\n"
        "def run(settings, session, choose):\n"
        "    async def show():\n"
        "        chat = app.ChatApp(open_engine, settings, session)\n"
        "        async with chat.run_test():\n"
        "            while not heavy:\n"
        "                await asyncio.sleep(0.01)\n"
        "        chat.close_engine()\n"
        "    asyncio.run(show())\n"
        "    return 0\n"
        "app.run = run\n"
        "tqchat.cli._screen(argparse.Namespace(resume=None, newest=False), Settings())\n"
        "assert heavy == [set()], heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
