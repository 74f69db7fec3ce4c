"""Runs chat templates, in a process of its own: `python -m tqchat.chat.render_worker SECONDS`.

A template is a program from a stranger. Jinja's sandbox keeps it from Python's insides, but not
from looping for ever or filling the memory, and neither can be stopped from within a thread. Here
the kernel stops it: memory is limited, and so is the processor time of each request, to SECONDS.

One JSON object a line comes on stdin and one goes out on stdout; the end of stdin ends it.
Request: template, variables, alphabet, messages (role and content). Reply: `text`, in which the
characters of `alphabet` that come from message contents are sealed; or `refused`, what the
template itself raised; or `error`.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tqchat.chat.renderer import decode_line, encode_line
from tqchat.chat.sealed import SealedStr, seal

_MEMORY = 1 << 30
_LONGEST_TEXT = 1 << 20


class TemplateRefusedError(Exception):
    """The template raised an error on purpose, for example over a role it does not know."""


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training: the text as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(Namespace):
    """Jinja's own takes attributes such as `__class__`, a known way out of the sandbox."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Also joins what a macro writes, which may be looked into again."""
        return SealedStr.join_all(parts)


def _raise_exception(message: str) -> None:
    raise TemplateRefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Set up as transformers does, which is what templates are written for."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def render(
    template: str, variables: dict[str, Any], messages: list[dict[str, str]], alphabet: str
) -> str:
    """Raises TemplateRefusedError, or whatever a template can raise."""
    return _compile(template).render(
        messages=[
            {
                "role": message["role"],
                "content": SealedStr(seal(message["content"], alphabet), message["content"]),
            }
            for message in messages
        ],
        **{"tools": None, "documents": None} | variables,
    )


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        text = render(**request)
    except TemplateRefusedError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    given = sum(len(message["content"]) for message in request["messages"])
    if len(text) > _LONGEST_TEXT + 2 * given:
        return {"error": "it writes too much"}
    return {"text": text}


def _main(seconds: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # macOS knows the limit and does not hold it: there, memory is limited by the time to fill it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = encode_line(_answer(decode_line(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
