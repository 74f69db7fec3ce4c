"""ruff and mypy --strict hold for everything that ships."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*arguments: str, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", ".")


def test_ruff_would_change_nothing() -> None:
    run("ruff", "format", "--check", ".")


def test_mypy_strict_finds_nothing(tmp_path: Path) -> None:
    """On the layout that is installed, where kernels and themes lie inside the package."""
    package = tmp_path / "tqchat"
    package.mkdir()
    for source in [*(ROOT / "tqchat").iterdir(), ROOT / "kernels", ROOT / "themes"]:
        if source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    config = str(ROOT / "pyproject.toml")
    cache = str(ROOT / ".mypy_cache")
    run("mypy", "--config-file", config, "--cache-dir", cache, "-p", "tqchat", cwd=tmp_path)
