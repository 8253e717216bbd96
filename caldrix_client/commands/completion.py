"""`caldrix completion`: how bash, zsh or fish complete command lines, from the records of all flags."""

from __future__ import annotations

from caldrix_client.commands.help import COMMANDS
from caldrix_client.context import Context
from caldrix_client.parse import Completion
from caldrix_protocol.option import Option
from caldrix_protocol.options import is_accepted, options_of

MODEL = "<model>"  # in the spelling of a command that takes one
DIRECTORY = "DIR"  # in the name of a value that is one


def execute(command: Completion, context: Context) -> int:
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[command.shell]()
    context.terminal.result(script)
    return 0


def _choices(option: Option) -> tuple[str, ...]:
    """The values of a flag that has a list of them, as its metavar shows: `auto|hip|metal|cpu`."""
    metavar = option.metavar or ""
    return tuple(metavar.split("|")) if metavar and metavar == metavar.lower() else ()


def _flags(command: str) -> list[Option]:
    return [option for option in options_of(command) if is_accepted(option)]


def _spellings(option: Option) -> tuple[str, ...]:
    return (*option.aliases, option.name)


def _words(command: str) -> tuple[str, ...]:
    """What may follow a command that is written with a list of words: `bash|zsh|fish`."""
    spelled = COMMANDS[command].spelled
    return tuple(spelled.split("|")) if spelled[:1].isalpha() else ()


def _takes_model(command: str) -> bool:
    return MODEL in COMMANDS[command].spelled


BASH = """\
# Completion of caldrix for bash: eval "$(caldrix completion bash)"
_caldrix_offer() {{
    local word
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen "$@" -- "$current")
}}
_caldrix() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}
    COMPREPLY=()
    [[ $current == '=' ]] && current=
    [[ $before == '=' ]] && before=${{COMP_WORDS[COMP_CWORD - 2]}}
    if ((COMP_CWORD == 1)); then
        _caldrix_offer -W '{commands}'
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    case "${{COMP_WORDS[1]}} $current" in
{flags}
    esac
}}
complete -F _caldrix caldrix"""

FILES = "compopt -o filenames 2> /dev/null; _caldrix_offer -d"


def _bash() -> str:
    values = []
    flags = []
    for command in COMMANDS:
        for option in _flags(command):
            if option.metavar is None:
                continue
            names = " | ".join(f"'{command} {name}'" for name in _spellings(option))
            choices = f"_caldrix_offer -W '{' '.join(_choices(option))}'; " if _choices(option) else ""
            offer = f"{FILES}; " if DIRECTORY in option.metavar else choices
            values.append(f"        {names}) {offer}return ;;")
        if spelled := [name for option in _flags(command) for name in _spellings(option)]:
            flags.append(f"        '{command} -'*) _caldrix_offer -W '{' '.join(spelled)}' ;;")
        if _words(command):
            offer = f"_caldrix_offer -W '{' '.join(_words(command))}'"
            flags.append(f"        '{command} '*) ((COMP_CWORD == 2)) && {offer} ;;")
        elif _takes_model(command):
            flags.append(f"        '{command} '*) ((COMP_CWORD == 2)) && {{ {FILES}; }} ;;")
    return BASH.format(commands=" ".join(COMMANDS), values="\n".join(values), flags="\n".join(flags))


ZSH = """\
#compdef caldrix
# Completion of caldrix for zsh: caldrix completion zsh > "${{fpath[1]}}/_caldrix"
_caldrix() {{
    local -a commands
    commands=(
{commands}
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT -= 1))
    case $command in
{arguments}
    esac
}}
if [[ $funcstack[1] == _caldrix ]]; then
    _caldrix "$@"
else
    compdef _caldrix caldrix
fi"""


def _zsh() -> str:
    commands = [f"        '{name}:{_quoted(command.doc)}'" for name, command in COMMANDS.items()]
    arguments = []
    for name in COMMANDS:
        specs = [spec for option in _flags(name) for spec in _zsh_specs(option)]
        if _words(name):
            specs.append(f"'1:{COMMANDS[name].spelled}:({' '.join(_words(name))})'")
        elif _takes_model(name):
            specs.append("'1:model:_directories'")
        if specs:
            lines = " \\\n                ".join(specs)
            arguments.append(f"        {name})\n            _arguments \\\n                {lines} ;;")
    return ZSH.format(commands="\n".join(commands), arguments="\n".join(arguments))


def _zsh_specs(option: Option) -> list[str]:
    doc = _quoted(option.doc).replace("[", "\\[").replace("]", "\\]")
    if option.metavar is None:
        return [f"'{name}[{doc}]'" for name in _spellings(option)]
    what = option.metavar.replace(":", "\\:")
    choices = f"({' '.join(_choices(option))})" if _choices(option) else ""
    action = "_directories" if DIRECTORY in option.metavar else choices
    many = "*" if option.many > 1 else ""
    return [
        f"'{many}{name}{'=' if name.startswith('--') else '+'}[{doc}]:{what}:{action}'"
        for name in _spellings(option)
    ]


FISH = """\
# Completion of caldrix for fish: caldrix completion fish > ~/.config/fish/completions/caldrix.fish
complete -c caldrix -f
"""


def _fish() -> str:
    lines = []
    for name, command in COMMANDS.items():
        lines.append(f"complete -c caldrix -n __fish_use_subcommand -a {name} -d '{_quoted(command.doc)}'")
        within = f"complete -c caldrix -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{within} {_fish_flag(option)} -d '{_quoted(option.doc)}'" for option in _flags(name)]
        if _words(name):
            lines.append(f"{within} -a '{' '.join(_words(name))}'")
        elif _takes_model(name):
            lines.append(f"{within} -a '(__fish_complete_directories)'")
    return FISH + "\n".join(lines)


def _fish_flag(option: Option) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in _spellings(option)
    )
    if option.metavar is None:
        return names
    if DIRECTORY in option.metavar:
        return f"{names} -x -a '(__fish_complete_directories)'"
    choices = _choices(option)
    return f"{names} -x -a '{' '.join(choices)}'" if choices else f"{names} -x"


def _quoted(text: str) -> str:
    """The text as it stands between single quotes in these shells; a typographic mark needs no quoting."""
    return text.replace("\\", "\\\\").replace("'", "’")
