"""Shell completions, made of the parsers' own tables: scripts that start no Python.

The grammar is that of the program: a subcommand as the first word, else the chat's options.
"""

import argparse
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tqchat import paths
from tqchat.models.find import BUILTIN
from tqchat.models.recommended import recommended
from tqchat.tui import themes

Parsers = Mapping[str, argparse.ArgumentParser]


@dataclass(frozen=True, slots=True)
class _Option:
    """`values`: what may follow; None: nothing does, (): a file or a word."""

    names: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class _Table:
    """What may come after the words of `path`: subcommands or choices, then options."""

    path: tuple[str, ...]
    words: dict[str, str]
    options: list[_Option]
    takes_files: bool


def script(shell: str, parsers: Parsers) -> str:
    """For "bash", "zsh" or "fish". `parsers`: "" is the chat's, the others are subcommands'."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](_tables(parsers))


def _tables(parsers: Parsers) -> list[_Table]:
    commands = {name: one.description or "" for name, one in parsers.items() if name}
    first, *others = (
        table for name, one in parsers.items() for table in _of(one, (name,) if name else ())
    )
    return [_Table((), {**commands, **first.words}, first.options, True), *others]


def _of(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> list[_Table]:
    """The parser's table, and those of its own subcommands."""
    words: dict[str, str] = {}
    options, below, takes_files = [], [], False
    for action in parser._actions:
        text = (action.help or "") % {"choices": "", "default": action.default, "prog": ""}
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            words |= {name: helps.get(name, "") for name in action.choices}
            for name, one in action.choices.items():
                below += _of(one, (*path, name))
        elif action.option_strings:
            values = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
            if action.dest == "theme":
                values = tuple(themes.names(paths.config_dir() / "themes"))
            elif values == () and isinstance(action.metavar, str) and action.metavar[0] == "{":
                values = tuple(action.metavar.strip("{}").split(","))
            if text != argparse.SUPPRESS:
                options.append(_Option(tuple(action.option_strings), text, values))
        elif action.choices:
            words |= {str(choice): "" for choice in action.choices}
        else:
            takes_files = True
            if action.metavar == "MODEL":
                words |= _models()
    return [_Table(path, words, options, takes_files), *below]


def _models() -> dict[str, str]:
    """Those that have a name wherever this is."""
    return {BUILTIN: "built in", **{one.id: one.about for one in recommended()}}


def _bash(tables: list[_Table]) -> str:
    """For bash 3.2 and newer. Where nothing of this fits, bash offers files."""
    cases, values = [], []
    for table in tables:
        names = [name for option in table.options for name in option.names]
        key = _bash_key(table.path)
        cases.append(f"    {key}) words={_quoted(table.words)} options={_quoted(names)} ;;")
        for option in table.options:
            if option.values is not None:
                patterns = "|".join(_bash_key(table.path, name) for name in option.names)
                values.append(f"    {patterns}) words={_quoted(option.values)} ;;")
    known = "|".join(_bash_key(table.path) for table in tables if table.path)
    return f"""# tqchat completion bash > ~/.local/share/bash-completion/completions/tqchat
_tqchat() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local path= words= options= index
  for (( index = 1; index < COMP_CWORD; index++ )); do
    case "$path/${{COMP_WORDS[index]}}" in
      {known}) path+="/${{COMP_WORDS[index]}}" ;;
      *) break ;;
    esac
  done
  case "$path" in
{chr(10).join(cases)}
  esac
  [[ $word == -* ]] && words=$options
  case "$path:$before" in
{chr(10).join(values)}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tqchat tqchat
"""


def _bash_key(path: tuple[str, ...], option: str = "") -> str:
    key = "".join(f"/{word}" for word in path)
    return shlex.quote(f"{key}:{option}" if option else key)


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _zsh(tables: list[_Table]) -> str:
    functions = []
    for table in tables:
        lines = [f"{_function(table)}() {{", "  _arguments -s -S \\"]
        for option in table.options:
            for name in option.names:
                rest = "" if option.values is None else f":value:{_zsh_values(option.values)}"
                lines.append(f"    {shlex.quote(f'{name}[{_zsh_text(option.help)}]{rest}')} \\")
        if table.words:
            lines.append(f"    '1: :{_function(table)}_words' \\")
            below = any(len(one.path) == len(table.path) + 1 for one in tables)
            lines.append("    '*:: :->rest'" if below else "    '*: :_files'")
        else:
            lines.append("    '*: :_files'" if table.takes_files else "    '*: : '")
        names = [one for one in tables if one.path[:-1] == table.path and one.path]
        if names:
            lines.append('  [[ $state == rest ]] && case "$words[1]" in')
            lines += [f"    {one.path[-1]}) {_function(one)} ;;" for one in names]
            lines += ["    *) _files ;;", "  esac"]
        functions.append("\n".join([*lines, "}"]))
        if table.words:
            entries = " ".join(
                shlex.quote(f"{word.replace(':', chr(92) + ':')}:{text}")
                for word, text in table.words.items()
            )
            files = "; _files" if table.takes_files else ""
            functions.append(
                f"{_function(table)}_words() {{\n  local -a found=({entries})\n"
                f"  _describe word found{files}\n}}"
            )
    body = "\n\n".join(functions)
    return f"""#compdef tqchat
# tqchat completion zsh > a file _tqchat in a folder of $fpath

{body}

if [ "$funcstack[1]" = _tqchat ]; then _tqchat "$@"; else compdef _tqchat tqchat; fi
"""


def _function(table: _Table) -> str:
    return "_" + "_".join(("tqchat", *table.path))


def _zsh_text(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", "\\:")


def _zsh_values(values: tuple[str, ...]) -> str:
    return f"({' '.join(values)})" if values else "_files"


_FISH = "complete -c tqchat -n"


def _fish(tables: list[_Table]) -> str:
    commands = " ".join(table.path[0] for table in tables if len(table.path) == 1)
    lines = [
        "# tqchat completion fish > ~/.config/fish/completions/tqchat.fish",
        "function __tqchat_at --description 'the words after tqchat begin with these'",
        "  set -l words (commandline -opc)[2..]",
        "  test (count $words) -ge (count $argv); or return 1",
        "  test (count $argv) -eq 0; and return 0",
        "  test (string join -- / $words[1..(count $argv)]) = (string join -- / $argv)",
        "end",
        "function __tqchat_next --description 'the next word is the one after these'",
        "  __tqchat_at $argv; and test (count (commandline -opc)) -eq (math (count $argv) + 1)",
        "end",
        "function __tqchat_chat --description 'no subcommand was given'",
        "  set -l words (commandline -opc)[2..] ''",
        f"  not contains -- $words[1] {commands}",
        "end",
    ]
    for table in tables:
        at = f"__tqchat_at {' '.join(table.path)}" if table.path else "__tqchat_chat"
        for word, text in table.words.items():
            next_ = f"__tqchat_next {' '.join(table.path)}".strip()
            lines.append(
                f"complete -c tqchat -n {_fish_text(next_)} -a {word} -d {_fish_text(text)}"
            )
        if table.path and not table.takes_files:
            lines.append(f"{_FISH} {_fish_text(at)} -f")
        for option in table.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            values = ""
            if option.values is not None:
                values = f" -x -a {_fish_text(' '.join(option.values))}" if option.values else " -r"
            lines.append(f"{_FISH} {_fish_text(at)} {names}{values} -d {_fish_text(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
