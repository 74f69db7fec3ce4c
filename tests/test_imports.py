"""Imports point one way: tui -> engine -> models -> kernels; chat and paths know none of them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What a part may import of the others. Data that crosses (engine.events) is the engine's.
ALLOWED = {
    "kernels": set(),
    "paths": set(),
    "settings": {"paths"},
    "chat": {"paths", "settings"},
    "models": {"kernels", "paths", "settings"},
    "engine": {"models", "kernels", "chat", "paths", "settings"},
    "tui": {"engine", "chat", "paths", "settings", "themes"},
    "themes": set(),
}
FOREIGN = {"chat": {"mlx", "textual"}, "models": {"textual"}, "engine": {"textual"}}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def files(part: str) -> list[Path]:
    folder = ROOT / part if part in ("kernels", "themes") else ROOT / "tqchat" / part
    single = folder.with_suffix(".py")
    return [single] if single.exists() else sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part: str) -> None:
    for path in files(part):
        for name in imported(path):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if package == "tqchat" and target in ALLOWED and target != part:
                assert target in ALLOWED[part], f"{path} imports {name}"
            assert package not in FOREIGN.get(part, set()), f"{path} imports {name}"


def test_the_screen_reads_only_the_engines_face() -> None:
    """The screen knows the engine by its events; the class itself is imported late, by name."""
    for path in files("tui"):
        for name in imported(path):
            if name.startswith("tqchat.engine"):
                assert name.startswith(("tqchat.engine.events", "tqchat.engine.engine")), path
