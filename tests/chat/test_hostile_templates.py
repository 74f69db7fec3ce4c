"""A chat template comes from a stranger: it may fail, and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tqchat.chat import template as template_module
from tqchat.chat.conversation import Message
from tqchat.chat.errors import ChatError
from tqchat.chat.renderer import Renderer
from tqchat.chat.template import ChatTemplate

MESSAGES = [Message("user", "Hi")]
GOOD = ChatTemplate("{{ messages[0].content }}")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Renderer]:
    renderer = Renderer(seconds=1)
    monkeypatch.setattr(template_module, "RENDERER", renderer)
    yield renderer
    renderer._stop()


HANGS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one_operation": "{{ 9 ** (9 ** (messages | length + 8)) }}",
    "when_compiled": "{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}


@pytest.mark.parametrize("source", HANGS.values(), ids=HANGS)
def test_a_template_that_never_ends(source: str) -> None:
    with pytest.raises(ChatError, match="cannot be used: its process broke off, after 1 seconds"):
        ChatTemplate(source).render(MESSAGES)
    assert GOOD.render(MESSAGES) == "Hi"


BOMBS = {
    "repeat": "{{ 'x' * 10 ** 11 }}",
    "list": "{{ ([0] * 10 ** 10) | length }}",
    "format": "{{ '%999999999999d' % 1 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(50) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "replace": "{% set a = 'x' * 999999 %}{{ a.replace('x', a) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "centre": "{{ 'x' | center(10 ** 11) }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_template_that_grows_without_end(source: str) -> None:
    with pytest.raises(ChatError, match="cannot be used"):
        ChatTemplate(source).render(MESSAGES)
    assert GOOD.render(MESSAGES) == "Hi"


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "method": "{{ messages[0].content.strip.__func__.__globals__ }}",
    "plain": "{{ messages[0].content._plain.x }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}set",
    "namespace_call": "{{ namespace(__class__=1) and 'made' }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_that_reaches_out(source: str) -> None:
    try:
        shown = ChatTemplate(source).render(MESSAGES)
    except ChatError:
        shown = ""
    assert shown == ""


@pytest.mark.parametrize("source", ["{% for", "{{ x | nothing }}", "{{ 1 / 0 }}", "{{ a.b.c }}"])
def test_a_template_with_a_mistake(source: str) -> None:
    with pytest.raises(ChatError, match=r"cannot be used: .*Error: "):
        ChatTemplate(source).render(MESSAGES)


def test_what_a_template_says_is_one_printable_line() -> None:
    with pytest.raises(ChatError) as told:
        ChatTemplate("{{ raise_exception('a\x1b[2J\nb' ~ 'c' * 10000) }}").render(MESSAGES)
    assert str(told.value).isprintable()
    assert len(str(told.value)) <= 600


def test_a_process_that_was_killed_is_replaced(impatient: Renderer) -> None:
    assert GOOD.render(MESSAGES) == "Hi"
    process = impatient._process
    assert process is not None
    process.kill()
    process.wait()
    assert GOOD.render(MESSAGES) == "Hi"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_the_process_is_told_no_secrets(
    monkeypatch: pytest.MonkeyPatch, impatient: Renderer
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    GOOD.render(MESSAGES)
    assert impatient._process is not None
    environment = Path(f"/proc/{impatient._process.pid}/environ").read_bytes()
    assert b"PYTHONPATH=" in environment
    assert b"hf_secret" not in environment


def test_ctrl_c_in_the_middle_leaves_no_answer_behind(impatient: Renderer) -> None:
    GOOD.render(MESSAGES)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ChatTemplate(HANGS["loops"]).render(MESSAGES)
    assert GOOD.render([Message("user", "Next")]) == "Next"


def test_threads_get_their_own_answers() -> None:
    wrong = []

    def ask(name: str) -> None:
        for i in range(20):
            text = f"{name}{i}"
            if GOOD.render([Message("user", text)]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_process_outlives_us(tmp_path: Path) -> None:
    """Not even one that is killed."""
    script = (
        "import time\n"
        "from tqchat.chat.renderer import RENDERER\n"
        "from tqchat.chat.template import ChatTemplate\n"
        "ChatTemplate('x').render([])\n"
        "print(RENDERER._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not lives(child):
            return
        time.sleep(0.02)
    pytest.fail("the process that renders templates lives on")


def lives(pid: int) -> bool:
    """Not gone, nor a zombie, as an orphan stays in a container without an init."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and ") Z " in stat.read_text())
