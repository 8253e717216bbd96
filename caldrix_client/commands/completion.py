"""`caldrix completion`: how bash, zsh or fish complete command lines, from the records of all flags."""

from __future__ import annotations

from typing import NamedTuple

from caldrix_client.commands.help import COMMANDS, MODELS
from caldrix_client.commands.ps import TITLES
from caldrix_client.context import Context
from caldrix_client.parse import SHELLS, Completion
from caldrix_protocol.aliases import ALIASES
from caldrix_protocol.option import Option
from caldrix_protocol.options import is_accepted, options_of


class Offer(NamedTuple):
    """What may stand in a place: one of some words, a directory, or a model that is loaded."""

    words: tuple[str, ...] = ()
    directories: bool = False
    loaded: bool = False


DIRECTORY = "DIR"  # in the name of a value that may be one
ALIAS = "ALIAS"
# The first argument of a command; of one with subcommands, their list.
ARGUMENTS = {
    "run": Offer(ALIASES, directories=True),
    "pull": Offer(ALIASES),
    "models": Offer(tuple(name.removeprefix("models ") for name in MODELS)),
    "models plan": Offer(ALIASES, directories=True),
    "models rm": Offer(ALIASES),
    "stop": Offer(loaded=True),
    "completion": Offer(SHELLS),
    "help": Offer(tuple(COMMANDS)),
}
GROUP = "models"
# The first column of `ps`, which starts no daemon, without its title. The others are taken away from the end,
# since a path may have two spaces.
MODELS_OF_PS = f"sed -E '1d; s/(  +[^ ]+( [^ ]+)*){{{len(TITLES) - 1}}}$//'"


def execute(command: Completion, context: Context) -> int:
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[command.shell]()
    context.terminal.result(script)
    return 0


def _value(option: Option) -> Offer:
    """What may be the value of a flag, as its metavar shows: `auto|hip|metal|cpu`, `DIR|ALIAS|REPO`."""
    metavar = option.metavar or ""
    if metavar and metavar == metavar.lower():
        return Offer(tuple(metavar.split("|")))
    return Offer(ALIASES if ALIAS in metavar else (), DIRECTORY in metavar)


def _flags(command: str) -> list[Option]:
    return [option for option in options_of(command) if is_accepted(option)]


def _spellings(option: Option) -> tuple[str, ...]:
    return (*option.aliases, option.name)


BASH = """\
# Completion of caldrix for bash: eval "$(caldrix completion bash)"
_caldrix_words() {{
    local word
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$1" -- "$current")
}}
_caldrix_directories() {{
    local word
    compopt -o filenames 2> /dev/null
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -d -- "$current")
}}
_caldrix_loaded() {{
    local word
    compopt -o filenames 2> /dev/null
    while IFS= read -r word; do
        [[ $word == "$current"* ]] && COMPREPLY+=("$word")
    done < <("${{COMP_WORDS[0]}}" ps 2> /dev/null | {models})
}}
_caldrix() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}
    local command=${{COMP_WORDS[1]}} first=2
    COMPREPLY=()
    [[ $current == '=' ]] && current=
    [[ $before == '=' ]] && before=${{COMP_WORDS[COMP_CWORD - 2]}}
    if ((COMP_CWORD == 1)); then
        _caldrix_words '{commands}'
        return
    fi
    if [[ $command == {group} ]] && ((COMP_CWORD > 2)); then
        command+=" ${{COMP_WORDS[2]}}" first=3
    fi
    case "$command $before" in
{values}
    esac
    case "$command $current" in
{flags}
    esac
    ((COMP_CWORD == first)) || return
    case $command in
{arguments}
    esac
}}
complete -F _caldrix caldrix"""


def _bash() -> str:
    values, flags = [], []
    for command in (*COMMANDS, *MODELS):
        for option in _flags(command):
            if option.metavar is not None:
                names = " | ".join(f"'{command} {name}'" for name in _spellings(option))
                values.append(f"        {names}) {_bash_offer(_value(option))}return ;;")
        if spelled := [name for option in _flags(command) for name in _spellings(option)]:
            flags.append(f"        '{command} -'*) _caldrix_words '{' '.join(spelled)}'; return ;;")
    arguments = [f"        '{command}') {_bash_offer(offer)};;" for command, offer in ARGUMENTS.items()]
    return BASH.format(
        models=MODELS_OF_PS,
        commands=" ".join(COMMANDS),
        group=GROUP,
        values="\n".join(values),
        flags="\n".join(flags),
        arguments="\n".join(arguments),
    )


def _bash_offer(offer: Offer) -> str:
    words = f"_caldrix_words '{' '.join(offer.words)}'; " if offer.words else ""
    directories = "_caldrix_directories; " if offer.directories else ""
    return words + directories + ("_caldrix_loaded; " if offer.loaded else "")


ZSH = """\
#compdef caldrix
# Completion of caldrix for zsh: caldrix completion zsh > "${{fpath[1]}}/_caldrix"
_caldrix_model() {{
    _alternative 'aliases:alias:({aliases})' 'directories:directory:_directories'
}}
_caldrix_loaded() {{
    local -a loaded
    loaded=(${{(f)"$("$service" ps 2> /dev/null | {models})"}})
    compadd -a loaded
}}
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
    if [[ $command == {group} ]] && ((CURRENT > 2)); then
        command+=" $words[2]"
        shift words
        ((CURRENT -= 1))
    fi
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
    for name in (*COMMANDS, *MODELS):
        specs = [spec for option in _flags(name) for spec in _zsh_specs(option)]
        if name in ARGUMENTS:
            specs.append(f"'1:argument:{_zsh_offer(ARGUMENTS[name])}'")
        if specs:
            lines = " \\\n                ".join(specs)
            arguments.append(f"        '{name}')\n            _arguments \\\n                {lines} ;;")
    return ZSH.format(
        aliases=" ".join(ALIASES),
        models=MODELS_OF_PS,
        commands="\n".join(commands),
        group=GROUP,
        arguments="\n".join(arguments),
    )


def _zsh_offer(offer: Offer) -> str:
    if offer.loaded:
        return "_caldrix_loaded"
    if offer.directories:
        return "_caldrix_model" if offer.words else "_directories"
    return f"({' '.join(offer.words)})" if offer.words else ""


def _zsh_specs(option: Option) -> list[str]:
    doc = _quoted(option.doc).replace("[", "\\[").replace("]", "\\]")
    if option.metavar is None:
        return [f"'{name}[{doc}]'" for name in _spellings(option)]
    what = option.metavar.replace(":", "\\:")
    many = "*" if option.many > 1 else ""
    return [
        f"'{many}{name}{'=' if name.startswith('--') else '+'}[{doc}]:{what}:{_zsh_offer(_value(option))}'"
        for name in _spellings(option)
    ]


FISH = """\
# Completion of caldrix for fish: caldrix completion fish > ~/.config/fish/completions/caldrix.fish
function __caldrix_in
    set -l words (commandline -opc)
    set -l last (math 1 + (count $argv))
    test "$words[2..$last]" = "$argv"
end
function __caldrix_next
    test (count (commandline -opc)) -eq (math 1 + (count $argv)); and __caldrix_in $argv
end
function __caldrix_loaded
    set -l words (commandline -opc)
    $words[1] ps 2> /dev/null | {models}
end
complete -c caldrix -f
"""


def _fish() -> str:
    lines = [
        f"complete -c caldrix -n __fish_use_subcommand -a {name} -d '{_quoted(command.doc)}'"
        for name, command in COMMANDS.items()
    ]
    for name in (*COMMANDS, *MODELS):
        within = f"complete -c caldrix -n '__caldrix_in {name}'"
        lines += [f"{within} {_fish_flag(option)} -d '{_quoted(option.doc)}'" for option in _flags(name)]
        if name in ARGUMENTS:
            after = f"complete -c caldrix -n '__caldrix_next {name}'"
            lines.append(f"{after} -a '{_fish_offer(ARGUMENTS[name])}'")
    return FISH.format(models=MODELS_OF_PS) + "\n".join(lines)


def _fish_flag(option: Option) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in _spellings(option)
    )
    if option.metavar is None:
        return names
    offer = _fish_offer(_value(option))
    return f"{names} -x -a '{offer}'" if offer else f"{names} -x"


def _fish_offer(offer: Offer) -> str:
    directories = ("(__fish_complete_directories)",) if offer.directories else ()
    loaded = ("(__caldrix_loaded)",) if offer.loaded else ()
    return " ".join((*offer.words, *directories, *loaded))


def _quoted(text: str) -> str:
    """The text as it stands between single quotes in these shells; a typographic mark needs no quoting."""
    return text.replace("\\", "\\\\").replace("'", "’")
