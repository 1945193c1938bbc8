"""``ambiseg completion``: tab completion for bash, zsh and fish, generated from the parsers and the list of settings.

The scripts hold every word themselves: pressing tab starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ambiseg._util.shipped import shipped
from ambiseg.cli.options import known_settings
from ambiseg.cli.train import AUTO

SHELLS = {
    "bash": 'eval "$(ambiseg completion bash)"                            in ~/.bashrc',
    "zsh": 'eval "$(ambiseg completion zsh)"                             in ~/.zshrc, after compinit',
    "fish": "ambiseg completion fish > ~/.config/fish/completions/ambiseg.fish     once",
}
EXAMPLES = "\n".join(["how to use it:", *(f"  {line}" for line in SHELLS.values())])
_FILES = {
    "FILE",
    "DIR",
    "PATH",
    "RUN",
    "IMAGE",
    "SOURCE",
    "RECIPE",
    "DATA",
    "STUDY",
    "ROOT",
}  # metavars that are files or folders


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``completion``."""
    made = commands.add_parser(
        "completion",
        help="print a script for tab completion",
        description="Print a script that completes commands, options, settings and their values when tab is pressed.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    made.add_argument("shell", choices=tuple(SHELLS), help="which shell")
    made.set_defaults(run=_completion, light=True)


def _completion(arguments: argparse.Namespace) -> int:
    from ambiseg.cli import SETTING, parser

    tree = list(_walk(parser(), ""))
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](tree, SETTING), end="")
    return 0


class Word(NamedTuple):
    """An option or an argument: its names, its meaning, the words that may follow, and whether files may."""

    names: tuple[str, ...]
    meaning: str
    words: tuple[str, ...] = ()
    files: bool = False
    takes_value: bool = True


class Command(NamedTuple):
    """A command by its path, such as ``data check``."""

    path: str
    below: dict[str, str]
    options: list[Word]
    arguments: list[Word]


def _walk(parser: Any, path: str) -> Iterator[Command]:
    """A parser and those of its commands."""
    below: dict[str, Any] = {}
    about: dict[str, str] = {}
    options, arguments = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            about = {one.dest: one.help or "" for one in action._choices_actions}
            continue
        words = tuple(map(str, action.choices or ()))
        name = action.metavar if isinstance(action.metavar, str) else ""
        word = Word(
            tuple(action.option_strings),
            (action.help or "").replace("%%", "%"),
            words or _named(action.option_strings[-1] if action.option_strings else name),
            files=name in _FILES and not words,
            takes_value=action.nargs != 0 and action.option_strings[:1] != ["--json"],
        )
        (options if word.names else arguments).append(word)
    yield Command(path, about, options, arguments)
    for name, one in below.items():
        yield from _walk(one, f"{path} {name}".strip())


def _named(argument: str) -> tuple[str, ...]:
    """What can be named for an option or an argument that takes other words as well."""
    known = known_settings()
    return {
        "RECIPE": (AUTO, *_stems("recipes")),
        "--base": (AUTO, *_stems("recipes")),
        "STUDY": _stems("studies/tables"),
        "RUN": tuple(shipped()),
        "DATA": tuple(known["data.name"]),
        "--protocol": tuple(known["evaluation.protocol"]),
        "--device": ("cpu", "cuda", "mps"),
        "--split": ("train", "val", "test"),
    }.get(argument, ())


def _stems(folder: str) -> tuple[str, ...]:
    """Names of the YAML files in a folder of the package."""
    return tuple(path.stem for path in sorted((Path(__file__).parents[1] / folder).glob("*.yaml")))


# -- bash and zsh ------------------------------------------------------------------------------------------------------


def _core(tree: list[Command], setting: tuple[str, ...]) -> str:
    """A function that both shells understand: of ``$at``, ``$prev`` and ``$cur`` to ``$found`` and ``$files``."""
    settings = known_settings()
    lines = ["_ambiseg_words() {", "  found= files=", '  case "$prev" in']
    lines += [
        f"    --{key}) found={shlex.quote(' '.join(words))}; return;;" for key, words in settings.items() if words
    ]
    lines += ["    --*.*) files=1; return;;", "  esac", '  case "$at $prev" in']
    for command in tree:
        for word in command.options:
            if word.takes_value:
                names = "|".join(f'"{command.path} {name}"' for name in word.names)
                lines.append(
                    f"    {names}) found={shlex.quote(' '.join(word.words))} files={int(word.files)}; return;;"
                )
    lines += ["  esac", '  case "$cur" in', "    -*)", '      case "$at" in']
    for command in tree:
        names = " ".join(name for word in command.options for name in word.names)
        lines.append(f"        {shlex.quote(command.path)}) found={shlex.quote(names)};;")
    lines += ["      esac", '      case "$at" in']
    keys = shlex.quote(" " + " ".join(f"--{key}" for key in settings))
    lines += [f"        {'|'.join(setting)}) found=$found{keys};;", "      esac;;", "    *)", '      case "$at" in']
    for command in tree:
        words = [*command.below, *(one for word in command.arguments for one in word.words)]
        files = int(any(word.files for word in command.arguments))
        lines.append(f"        {shlex.quote(command.path)}) found={shlex.quote(' '.join(words))} files={files};;")
    lines += ["      esac;;", "  esac", "}"]
    paths = "|".join(shlex.quote(command.path) for command in tree if command.path)
    lines += ["_ambiseg_path() {", "  local word", "  at=", '  for word in "$@"; do']
    lines += ['    case "${at:+$at }$word" in', f'      {paths}) at="${{at:+$at }}$word";;', "    esac"]
    lines += ["  done", "}"]
    return "\n".join(lines) + "\n"


def _bash(tree: list[Command], setting: tuple[str, ...]) -> str:
    return f"""# Tab completion of ambiseg for bash: {SHELLS["bash"].split("  ")[0]}
{_core(tree, setting)}_ambiseg() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} at found files IFS=$' \\t\\n'
  if [ "$cur" = "=" ]; then cur=  # bash divides --key=value into three words
  elif [ "$prev" = "=" ]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  _ambiseg_path "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"
  _ambiseg_words
  COMPREPLY=($(compgen -W "$found" -- "$cur"))
  if [ "$files" = 1 ]; then
    IFS=$'\\n'
    COMPREPLY+=($(compgen -f -- "$cur"))
    compopt -o filenames 2>/dev/null
  fi
}}
complete -F _ambiseg ambiseg
"""


def _zsh(tree: list[Command], setting: tuple[str, ...]) -> str:
    return f"""#compdef ambiseg
# Tab completion of ambiseg for zsh: {SHELLS["zsh"].split("  ")[0]}
{_core(tree, setting)}_ambiseg() {{
  local cur=$words[CURRENT] prev=$words[CURRENT-1] at found files
  if [[ $cur == --*=* ]]; then
    prev=${{cur%%=*}} cur=${{cur#*=}}
    compset -P '*='
  elif [[ $prev == --*=* ]]; then prev=; fi
  _ambiseg_path "${{(@)words[2,CURRENT-1]}}"
  _ambiseg_words
  [[ -n $found ]] && compadd -- ${{=found}}
  [[ $files == 1 ]] && _files
  return 0
}}
compdef _ambiseg ambiseg
"""


# -- fish --------------------------------------------------------------------------------------------------------------


def _fish(tree: list[Command], setting: tuple[str, ...]) -> str:
    paths = " ".join(shlex.quote(command.path) for command in tree if command.path)
    lines = [
        f"# Tab completion of ambiseg for fish: {SHELLS['fish'].split('     ')[0]}",
        "function __ambiseg_at --description 'Whether the command so far is this one'",
        "    set -l path ''",
        "    for word in (commandline -opc)[2..]",
        '        set -l longer (string trim -- "$path $word")',
        f"        contains -- $longer {paths}",
        "        and set path $longer",
        "    end",
        "    contains -- $path $argv",
        "end",
        "complete -c ambiseg -f",
    ]

    def line(path: str, *parts: str) -> None:
        lines.append(" ".join(["complete -c ambiseg -n", _quoted(f"__ambiseg_at {_quoted(path)}"), *parts]))

    for command in tree:
        for name, meaning in command.below.items():
            line(command.path, "-a", name, "-d", _quoted(meaning))
        for word in command.options:
            names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in word.names]
            line(command.path, *names, *_values(word), "-d", _quoted(word.meaning))
        for word in command.arguments:
            if word.files:
                line(command.path, "-F")
            if word.words:
                line(command.path, "-a", _quoted(" ".join(word.words)))
    for key, words in known_settings().items():
        both = f"__ambiseg_at {' '.join(setting)}"
        value = f"-x -a {_quoted(' '.join(words))}" if words else "-r -F"
        lines.append(f"complete -c ambiseg -n {_quoted(both)} -l {key} {value} -d setting")
    return "\n".join(lines) + "\n"


def _values(word: Word) -> list[str]:
    if not word.takes_value:
        return []
    if word.files:
        return ["-r -F", *(["-a", _quoted(" ".join(word.words))] if word.words else [])]
    return ["-x", *(["-a", _quoted(" ".join(word.words))] if word.words else [])]


def _quoted(text: str) -> str:
    """As fish quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
