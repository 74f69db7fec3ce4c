"""What all tests share: the built-in model, and folders that are not the user's own."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tqchat.models import builtin

# A shell that starts the tests in the background has them ignore Ctrl-C, and so what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same terminal, locale and lack of an editor and a clipboard on every machine.
for name in (
    *("LC_ALL", "LC_CTYPE", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"),
    *("VISUAL", "EDITOR", "DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"),
):
    os.environ.pop(name, None)
os.environ |= {"LANG": "C.UTF-8", "TERM": "xterm-256color", "COLORTERM": "truecolor"}

# The same examples on every machine, however slow. To search for new ones instead:
# pytest --hypothesis-profile=search
settings.register_profile("search", max_examples=2000, deadline=None)
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The built-in model, fetched once into the user's cache as the program does it."""
    return builtin.fetch(lambda progress: None, lambda: False)


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings, conversations and memory of a test, and of what it starts, lie in a new folder."""
    home = tmp_path_factory.mktemp("home")
    for kind in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(home / kind.lower()))
    return home
