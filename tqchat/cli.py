"""Arguments to the screen, one answer, or a subcommand."""

import argparse
import difflib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module, metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from tqchat import paths
from tqchat.engine.events import EngineOptions, Sampling

if TYPE_CHECKING:
    from tqchat.chat.sessions import Session

INTERRUPTED = 130
BAD_INPUT = 2

SUBCOMMANDS = {
    "models": "list the models on this machine",
    "pull": "fetch a model without chatting",
    "plan": "show what memory a model needs at each context length",
    "bench": "measure speed and memory on this machine",
    "doctor": "check the device and the kernels, and say what to do about faults",
}

NO_MLX = (
    "MLX has no backend here. Install one: pip install 'tqchat[cpu]', or 'tqchat[cuda13]' "
    "('tqchat[cuda12]' with an older driver) for an NVIDIA GPU."
)


def main(argv: Sequence[str] | None = None) -> int:
    """The `tqchat` command. Returns the exit code: 2 for bad input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    ctrl_c = _CtrlC()
    try:
        _log_to_file()
        if arguments and arguments[0] in SUBCOMMANDS:
            ctrl_c.raise_again()
            return _subcommand(arguments[0], arguments[1:])
        return _chat(_parser().parse_args(arguments), ctrl_c)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain at exit when flushing.
        sys.stdout = None
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        sys.stdout = None
        print(f"tqchat: The answer cannot be written: {error.strerror}.", file=sys.stderr)
        return BAD_INPUT


def _open_missing_streams() -> None:
    """A process may be started without standard streams; Python then has None for them."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _chat(options: argparse.Namespace, ctrl_c: "_CtrlC") -> int:
    disk_budget = int(options.disk_budget * 2**30)
    engine_options = EngineOptions(
        options.kv, options.context, options.threads, disk_budget, options.wire
    )
    sampling = Sampling(
        options.temperature,
        options.top_p,
        options.top_k,
        options.min_p,
        options.repetition_penalty,
        options.seed,
    )
    if options.model is not None:
        _check_name(options.model)
    piped = not sys.stdin.isatty()
    if options.prompt is None and not piped and not options.file:
        if not sys.stdout.isatty():
            fail("The output is not a terminal: ask with -p, or pipe a question in.")
        from tqchat.supervisor import supervise

        ctrl_c.raise_again()
        return supervise(lambda: _screen(options, engine_options, sampling))
    from tqchat.chat.documents import LARGEST_BYTES, decode, read_document, with_documents
    from tqchat.chat.errors import ChatError

    # What is piped in may take as long as it likes to come.
    ctrl_c.raise_again()
    try:
        documents = [read_document(Path(path).expanduser()) for path in options.file]
        if piped:
            given = decode("Input", "The input", sys.stdin.buffer.read(LARGEST_BYTES + 1))
            if given.text.strip():
                documents.insert(0, given)
        for document in documents:
            if document.note:
                print(f"tqchat: {document.note}", file=sys.stderr)
        if options.prompt is None and not options.file:
            question = documents.pop(0).text.strip() if documents else ""
        else:
            question = (options.prompt or "").strip()
            if options.prompt is not None and not question:
                fail("The question is empty: write it after -p.")
    except ChatError as error:
        fail(str(error))
    if not question and not documents:
        fail("There is no question: write it after -p, or pipe it in.")
    ctrl_c.hold()
    _require_mlx()
    from tqchat.headless import answer

    try:
        with _session(options) or nullcontext() as session:
            return answer(
                model=options.model,
                message=with_documents(question, documents),
                system=options.system,
                options=engine_options,
                sampling=sampling,
                max_tokens=options.max_tokens,
                as_json=options.json,
                stats=options.stats,
                interrupted=lambda: ctrl_c.pressed,
                session=session,
            )
    except ChatError as error:
        fail(str(error))


def _check_name(model: str) -> None:
    """A name that can be no model ends here, on the terminal it was typed in."""
    from tqchat.models.errors import ModelError
    from tqchat.models.find import resolve

    try:
        resolve(model)
    except ModelError as error:
        close = difflib.get_close_matches(model, SUBCOMMANDS, n=1)
        fail(f"{error} Or did you mean: tqchat {close[0]}" if close else str(error))


def _screen(options: argparse.Namespace, engine: EngineOptions, sampling: Sampling) -> int:
    ctrl_c = _CtrlC()
    _require_mlx()
    from tqchat.chat.errors import ChatError
    from tqchat.tui.app import run
    from tqchat.tui.dialogue import Settings

    ctrl_c.raise_again()
    choose = options.resume == ""
    try:
        session = None if choose else _session(options)
    except ChatError as error:
        fail(str(error))
    settings = Settings(options.system, sampling, options.max_tokens)
    return run(options.model, engine, settings, session, choose)


def _session(options: argparse.Namespace) -> "Session | None":
    """The saved conversation to go on with, if one is asked for. Raises ChatError."""
    from tqchat.chat import sessions

    if options.newest:
        if not (summaries := sessions.summaries()):
            fail("There is no saved conversation to go on with.")
        return sessions.Session.open(summaries[0].id)
    if options.resume == "":
        fail("Name the conversation after --resume, or go on with the newest: --continue.")
    if options.resume is not None:
        return sessions.Session.open(options.resume)
    return None


def _subcommand(name: str, arguments: Sequence[str]) -> int:
    if name in ("plan", "bench"):
        _require_mlx()
        module = import_module("tqchat.plan" if name == "plan" else "tqchat.bench.command")
        return int(module.main(arguments))
    parser = argparse.ArgumentParser(prog=f"tqchat {name}", description=SUBCOMMANDS[name])
    if name == "pull":
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    options = parser.parse_args(arguments)
    _require_mlx()
    if name == "doctor":
        from tqchat import doctor

        return doctor.main()
    from tqchat import library

    return library.pull(options.model) if name == "pull" else library.show()


MODEL_HELP = "a folder, a .gguf file, a Hugging Face id, or smollm2 (built in)"


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  tqchat {name:<8} {text}" for name, text in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tqchat",
        description="Chat with a local model about very long documents.",
        epilog=f"other commands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}; default: the last one used")
    add("-p", "--prompt", metavar="TEXT", help="answer this on stdout, without the screen")
    add("-f", "--file", action="append", default=[], help="a text file to ask about; repeatable")
    add("--system", metavar="TEXT", help="the system prompt")
    add("--kv", choices=("int4", "fp16"), default="int4", help="how the KV cache is stored (int4)")
    add("--context", type=_positive, metavar="N", help="most tokens a conversation may take")
    add("--threads", type=_threads, metavar="N", help="CPU threads (all that it may use)")
    add("--max-tokens", type=_positive, metavar="N", help="most tokens of one answer")
    add("--continue", dest="newest", action="store_true", help="go on with the newest conversation")
    add("--resume", nargs="?", const="", metavar="ID", help="go on with a saved conversation")
    text = "most disk that saved KV caches take, in GiB (20); 0: none is saved"
    _number(add, "--disk-budget", EngineOptions().disk_budget / 2**30, 0, 1e6, text)
    text = "let macOS page out the model while it is not used"
    add("--no-wire", dest="wire", action="store_false", help=text)
    text = "sampling (default: as the model suggests, else these)"
    add = parser.add_argument_group(text).add_argument
    _number(add, "--temperature", None, 0, 100, "0.7; 0 takes the likeliest token")
    _number(add, "--top-p", None, 0, 1, "0.95; 1 switches it off")
    add("--top-k", type=_natural, metavar="N", help="0, which switches it off")
    _number(add, "--min-p", None, 0, 1, "0, which switches it off")
    _number(add, "--repetition-penalty", None, 0.01, 100, "1, which is none")
    add("--seed", type=_seed, metavar="N", help="repeat the same random choices")
    group = parser.add_argument_group("without the screen")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--stats", action="store_true", help="print figures to stderr")
    version = f"tqchat {metadata.version('tqchat')}"
    parser.add_argument("--version", action="version", version=version)
    return parser


def _number(
    add: Callable[..., object], name: str, default: float | None, low: float, high: float, text: str
) -> None:
    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{value!r} is not a number from {low} to {high:g}")
        return number

    add(name, type=parse, default=default, metavar="X", help=text)


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(
                f"{value!r} is not a whole number from {low} to {high}"
            )
        return number

    return parse


_positive = _integer(1, 2**31 - 1)
_natural = _integer(0, 2**31 - 1)
_threads = _integer(1, 1024)
_seed = _integer(0, 2**64 - 1)


def _require_mlx() -> None:
    try:
        import mlx.core  # noqa: F401
    except ImportError:
        fail(NO_MLX)


class _CtrlC:
    """Remembers that Ctrl-C was pressed, from now on.

    As an exception it may get lost within an import, or come between taking a lock and the code
    that gives it back, and then the engine's thread waits for ever.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.hold()

    def hold(self) -> None:
        """From now on it is remembered."""
        signal.signal(signal.SIGINT, self._press)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True

    def raise_again(self) -> None:
        """From now on it is an exception; raises it if it was pressed before."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.pressed:
            raise KeyboardInterrupt


def fail(message: str) -> NoReturn:
    """One line on stderr and exit code 2."""
    print(f"tqchat: {message}", file=sys.stderr)
    raise SystemExit(BAD_INPUT)


def _log_to_file() -> None:
    """Faults go to a file: stderr is the screen."""
    try:
        logging.basicConfig(filename=paths.log_file(), level=logging.WARNING, force=True)
    except OSError:
        logging.basicConfig(handlers=[logging.NullHandler()], force=True)
