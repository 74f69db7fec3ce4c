"""Arguments to the screen, one answer, or a subcommand."""

import argparse
import difflib
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tqchat import paths, settings
from tqchat.engine.events import EngineOptions, Sampling
from tqchat.settings import Check, Settings, SettingsError, Switch, sampling

if TYPE_CHECKING:
    from tqchat.chat.sessions import Session

INTERRUPTED = 130
BAD_INPUT = 2

SUBCOMMANDS = {
    "models": "list the models on this machine",
    "pull": "fetch a model without chatting",
    "plan": "show what memory a model needs at each context length",
    "bench": "measure speed and memory on this machine",
    "doctor": "check the device and the kernels",
    "config": "show or edit the settings file",
    "completion": "print what makes a shell complete tqchat's arguments",
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
    try:
        chosen = Settings.of(vars(options), settings.read())
    except SettingsError as error:
        fail(f"{error} `tqchat config edit` opens the file.")
    if chosen.model is not None:
        _check_name(chosen.model)
    if "theme" in options:
        _check_theme(options.theme)
    piped = not sys.stdin.isatty()
    if options.prompt is None and not piped and not options.file:
        if not sys.stdout.isatty():
            fail("The output is not a terminal: ask with -p, or pipe a question in.")
        from tqchat.supervisor import supervise

        ctrl_c.raise_again()
        return supervise(lambda: _screen(options, chosen))
    from tqchat.chat.documents import LARGEST_BYTES, decode, read_document, with_documents
    from tqchat.chat.errors import ChatError
    from tqchat.tui.text import clean_line

    # What is piped in may take as long as it likes to come.
    ctrl_c.raise_again()
    try:
        documents = [read_document(Path(os.path.expanduser(path))) for path in options.file]
        if piped:
            given = decode("Input", "The input", sys.stdin.buffer.read(LARGEST_BYTES + 1))
            if given.text.strip():
                documents.insert(0, given)
        for document in documents:
            if document.note:
                print(f"tqchat: {clean_line(document.note)}", file=sys.stderr)
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
            chosen = _as_it_was(options, chosen, session)
            if session is not None:
                chosen = replace(chosen, **sampling(session.conversation.sampling))
            return answer(
                model=chosen.model,
                message=with_documents(question, documents),
                system=chosen.system,
                options=EngineOptions.of(chosen),
                sampling=Sampling.of(chosen),
                max_tokens=chosen.max_tokens,
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
        close = difflib.get_close_matches(model, SUBCOMMANDS, n=1, cutoff=0.75)
        fail(f"{error} Or did you mean: tqchat {close[0]}" if close else str(error))


def _check_theme(name: str) -> None:
    from tqchat.tui import themes
    from tqchat.tui.text import clean_line

    folder = paths.config_dir() / "themes"
    if name not in (known := themes.names(folder)):
        faults = [one for one in themes.all_themes(folder)[1] if f" {name}.toml:" in one]
        close = difflib.get_close_matches(name, known, n=1)
        instead = f"Did you mean {close[0]}?" if close else "/theme in the chat lists them."
        fail(clean_line(faults[0]) if faults else f"There is no theme {name!r}. {instead}")


def _screen(options: argparse.Namespace, chosen: Settings) -> int:
    # Until the first frame: what is imported stays, so looking through it is in vain.
    gc.disable()
    ctrl_c = _CtrlC()
    if not _finds_mlx():
        _require_mlx()
    from tqchat.chat.errors import ChatError
    from tqchat.tui.app import run

    ctrl_c.raise_again()
    as_it_was = partial(_as_it_was, options, chosen)
    choose = options.resume == ""
    try:
        session = None if choose else _session(options)
    except ChatError as error:
        fail(str(error))
    return run(as_it_was(session), session, as_it_was if choose else None)


def _as_it_was(
    options: argparse.Namespace, chosen: Settings, session: "Session | None"
) -> Settings:
    """What a conversation was held with comes before the file, after the command line."""
    if session is None:
        return chosen
    said, own = vars(options), session.conversation.sampling
    if own.keys() & said.keys():
        session.set_sampling({name: own[name] for name in own if name not in said})
    held = {"system": session.conversation.system, "model": session.model or chosen.model}
    return Settings.of(said, held, asdict(chosen))


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
    options = _subparser(name).parse_args(arguments)
    if name == "config":
        from tqchat import config

        return config.main(options.action)
    _require_mlx()
    if name == "completion":
        from tqchat.completion import script

        print(script(options.shell, parsers()), end="")
        return 0
    if name == "doctor":
        from tqchat import doctor

        return doctor.main()
    from tqchat import library

    return library.pull(options.model) if name == "pull" else library.show()


def _subparser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"tqchat {name}", description=SUBCOMMANDS[name])
    if name == "pull":
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    elif name == "config":
        parser.add_argument(
            "action",
            choices=("path", "edit", "show"),
            help="print where it is; open it in $EDITOR; print what is in force",
        )
    elif name == "completion":
        parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each subcommand, and under "" that of the chat. Needs MLX."""
    from tqchat import plan
    from tqchat.bench import command as bench

    others = {name: _subparser(name) for name in SUBCOMMANDS if name not in ("plan", "bench")}
    return {"": _parser(), **others, "plan": plan.parser(), "bench": bench.parser()}


MODEL_HELP = "a folder, a .gguf file, a Hugging Face id, or smollm2 (built in)"


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  tqchat {name:<10} {text}" for name, text in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tqchat",
        description="Chat with a local model about very long documents.",
        epilog=f"other commands:\n{listed}\n\nsettings file: {paths.settings_file()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"{MODEL_HELP}; default: the last one used",
    )
    add = parser.add_argument
    add("-p", "--prompt", metavar="TEXT", help="answer this on stdout, without the screen")
    add("-f", "--file", action="append", default=[], help="a text file to ask about; repeatable")
    either = parser.add_mutually_exclusive_group().add_argument
    text = "go on with the newest conversation"
    either("--continue", dest="newest", action="store_true", help=text)
    either("--resume", nargs="?", const="", metavar="ID", help="go on with a saved conversation")
    text = "sampling (default: as the model suggests, else these)"
    sampling = parser.add_argument_group(text)
    for name, one in settings.TABLE.items():
        if name != "model":
            group = sampling if one.metadata["group"] == "sampling" else parser
            check, text = one.metadata["check"], one.metadata["help"]
            how: dict[str, Any] = {"type": _typed(check), "metavar": check.metavar}
            if isinstance(check, Switch):
                how = {"action": argparse.BooleanOptionalAction}
            group.add_argument(settings.option(name), default=argparse.SUPPRESS, help=text, **how)
    group = parser.add_argument_group("without the screen")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--stats", action="store_true", help="print figures to stderr")
    parser.add_argument("--version", action=_Version, help="print the version")
    return parser


def _typed(check: Check) -> Callable[[str], object]:
    def parse(text: str) -> object:
        try:
            return check.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


class _Version(argparse.Action):
    """Reads the version only when it is asked for: that takes a while."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"tqchat {version('tqchat')}")
        parser.exit()


def _finds_mlx() -> bool:
    """Whether MLX and a backend's library lie where they usually do: to look takes less time than
    to import them, and the first frame waits for it."""
    found = find_spec("mlx")
    places = found.submodule_search_locations or [] if found else []
    return any(list(Path(place, "lib").glob("libmlx.*")) for place in places)


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
        file = paths.log_file()
        file.touch(0o600)
        logging.basicConfig(filename=file, level=logging.WARNING, force=True)
    except OSError:
        logging.basicConfig(handlers=[logging.NullHandler()], force=True)
