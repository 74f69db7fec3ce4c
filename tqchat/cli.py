"""Arguments to the screen, one answer, or a subcommand."""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
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
    try:
        _log_to_file()
        if arguments and arguments[0] in SUBCOMMANDS:
            return _subcommand(arguments[0], arguments[1:])
        return _chat(_parser().parse_args(arguments))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain at exit when flushing.
        sys.stdout = None
        return 1


def _chat(options: argparse.Namespace) -> int:
    disk_budget = int(options.disk_budget * 2**30)
    engine_options = EngineOptions(options.kv, options.context, options.threads, disk_budget)
    sampling = Sampling(
        options.temperature,
        options.top_p,
        options.top_k,
        options.min_p,
        options.repetition_penalty,
        options.seed,
    )
    piped = not sys.stdin.isatty()
    if options.prompt is None and not piped and not options.file:
        if not sys.stdout.isatty():
            fail("The output is not a terminal: ask with -p, or pipe a question in.")
        from tqchat.supervisor import supervise

        return supervise(lambda: _screen(options, engine_options, sampling))
    from tqchat.chat.documents import decode, read_document, with_documents
    from tqchat.chat.errors import ChatError

    try:
        documents = [read_document(Path(path).expanduser()) for path in options.file]
        if piped:
            given = decode("Input", "The input", sys.stdin.buffer.read())
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
    ctrl_c = _CtrlC()
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


def _screen(options: argparse.Namespace, engine: EngineOptions, sampling: Sampling) -> int:
    ctrl_c = _CtrlC()
    _require_mlx()
    from tqchat.chat.errors import ChatError
    from tqchat.tui.app import Settings, run

    ctrl_c.raise_again()
    try:
        session = _session(options)
    except ChatError as error:
        fail(str(error))
    settings = Settings(options.system, sampling, options.max_tokens)
    return run(options.model, engine, settings, session)


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
    add("--threads", type=_positive, metavar="N", help="CPU threads (all that it may use)")
    add("--max-tokens", type=_positive, metavar="N", help="most tokens of one answer")
    add("--continue", dest="newest", action="store_true", help="go on with the newest conversation")
    add("--resume", nargs="?", const="", metavar="ID", help="go on with a saved conversation")
    text = "most disk that saved KV caches take, in GiB; 0: none is saved"
    _number(add, "--disk-budget", EngineOptions().disk_budget / 2**30, 0, 1e6, text)
    defaults = Sampling()
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    _number(add, "--temperature", defaults.temperature, 0, 100, "0 takes the likeliest token")
    _number(add, "--top-p", defaults.top_p, 0, 1, "1 switches it off")
    add("--top-k", type=_natural, default=defaults.top_k, metavar="N", help="0 switches it off (0)")
    _number(add, "--min-p", defaults.min_p, 0, 1, "0 switches it off")
    _number(add, "--repetition-penalty", defaults.repetition_penalty, 0.01, 100, "1: none")
    add("--seed", type=_natural, metavar="N", help="repeat the same random choices")
    group = parser.add_argument_group("without the screen")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--stats", action="store_true", help="print figures to stderr")
    version = f"tqchat {metadata.version('tqchat')}"
    parser.add_argument("--version", action="version", version=version)
    return parser


def _number(add, name: str, default: float, low: float, high: float, text: str) -> None:  # type: ignore[no-untyped-def]
    def parse(value: str) -> float:
        number = float(value)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return number

    add(name, type=parse, default=default, metavar="X", help=f"{text} ({default})")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


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
