"""One question, one answer, no screen."""

import dataclasses
import io
import json
import sys
from collections.abc import Callable

from tqchat.chat.conversation import Message
from tqchat.engine.engine import Engine
from tqchat.engine.events import (
    EngineOptions,
    Failed,
    Finished,
    Loaded,
    Loading,
    Prefilling,
    Sampling,
    Token,
)
from tqchat.tui.text import clean


def answer(
    model: str | None,
    message: str,
    system: str | None,
    options: EngineOptions,
    sampling: Sampling,
    max_tokens: int | None,
    as_json: bool,
    stats: bool,
    interrupted: Callable[[], bool],
) -> int:
    """Print the answer as it comes, or one JSON object. Returns the exit code.

    Raises KeyboardInterrupt when `interrupted` says so.
    """
    messages = [Message("system", system)] if system else []
    messages.append(Message("user", message))
    engine = Engine(options)
    engine.start()
    status = _Status()
    # A terminal would obey control characters that the model writes.
    shown = clean if sys.stdout.isatty() else str
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The locale may lack characters that the model writes.
        sys.stdout.reconfigure(errors="replace")
    try:
        engine.load(model)
        engine.generate(messages, sampling, max_tokens)
        while not interrupted():
            # A signal does not end the wait, so it must not be endless.
            event = engine.wait(0.2)
            match event:
                case Loading(label, done, total):
                    status.show(f"{label}: {_percent(done, total)}")
                case Loaded(info):
                    status.clear()
                    for note in info.notes:
                        print(f"tqchat: {note}", file=sys.stderr)
                case Prefilling(done=done, total=total):
                    status.show(f"Reading the prompt: {_percent(done, total)}")
                case Token(text=text) if not as_json:
                    status.clear()
                    sys.stdout.write(shown(text))
                    sys.stdout.flush()
                case Failed(_, reason):
                    status.clear()
                    print(f"tqchat: {reason}", file=sys.stderr)
                    return 2
                case Finished():
                    status.clear()
                    _report(event, as_json, stats)
                    return 0
        status.clear()
        raise KeyboardInterrupt
    finally:
        engine.close()


def _report(finished: Finished, as_json: bool, stats: bool) -> None:
    usage = dataclasses.asdict(finished.usage)
    cache = dataclasses.asdict(finished.cache)
    figures = {
        **usage,
        **{key: cache[key] for key in ("kv_bytes", "kv_bytes_allocated", "kv_bytes_fp16")},
        "headroom_bytes": finished.memory.free,
        "finish_reason": finished.reason,
    }
    if as_json:
        print(json.dumps({"text": finished.text, **figures}))
    else:
        print()
    if stats:
        print(
            f"{usage['prompt_tokens']} prompt tokens ({usage['cached_tokens']} cached), "
            f"{usage['prefill_tps']:.1f} tok/s; {usage['completion_tokens']} tokens, "
            f"{usage['decode_tps']:.1f} tok/s; first after {usage['ttft_s']:.2f} s; "
            f"KV {cache['kv_bytes'] / 2**20:.1f} MiB of {cache['kv_bytes_fp16'] / 2**20:.1f} "
            f"in fp16; {finished.memory.free / 2**30:.1f} GiB free; {finished.reason}",
            file=sys.stderr,
        )


def _percent(done: int, total: int) -> str:
    return f"{100 * done // total}%" if total else f"{done / 2**20:.0f} MiB"


class _Status:
    """One line on stderr that is written over, if stderr is a terminal."""

    def __init__(self) -> None:
        self._shown = False
        self._terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
