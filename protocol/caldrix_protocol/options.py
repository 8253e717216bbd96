"""Every command-line flag as a record. Parser, help text and the tables in the documentation come from here.

Reading a command line is `walk`, which calls `find` for each flag and `value` for what follows it, and
`check_together` at the end. They only raise `Refused`; nothing here acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from caldrix_protocol.refusals import ROWS, RUN, USAGE, Refused

BACKENDS = ("auto", "hip", "metal", "cpu")
DTYPES = ("f32", "bf16")
BATCHES = (1, 8)
ISAS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "native")
KERNELS = ("auto", "numba", "c")
# What only the CPU lane has: the keys of their values, None when the flag is absent.
CPU_ONLY = {"threads": "--threads", "cpu_isa": "--cpu-isa", "cpu_kernels": "--cpu-kernels"}
MAX_CTX = 1 << 20
MAX_THREADS = 256
MAX_SECONDS = 31_536_000

HELP_FLAGS = ("-h", "--help")

# The row that refuses a flag no record describes. Elsewhere every flag is caldrix's own.
UNKNOWN_FLAG = {"run": "run/unknown-flag"}


class Option(NamedTuple):
    """One flag of the commands `commands`.

    `metavar` None: a switch, whose value is True when given. `check` turns the text after the flag into its
    value or raises Refused with a row of kind `kind`. `refused` names the row that refuses the flag on sight,
    whatever its value. `absent` says in words what happens without the flag.
    """

    name: str
    metavar: str | None
    check: Callable[[str], Any]
    default: Any
    absent: str
    doc: str
    aliases: tuple[str, ...] = ()
    kind: str = USAGE
    commands: tuple[str, ...] = ("run",)
    refused: str | None = None

    @property
    def key(self) -> str:
        """The name of its value: `--max-tokens` is `max_tokens`."""
        return self.name.lstrip("-").replace("-", "_")


def _words(what: str) -> Callable[[str], str]:
    """Text as given; refused if the bytes on the command line were not UTF-8."""

    def check(text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused("usage/prompt-utf8", what=what) from None
        return text

    return check


def _prompt(text: str) -> str:
    if not text:
        raise Refused("usage/empty-prompt")
    return _words("-p")(text)


def _integer(code: str, high: int) -> Callable[[str], int]:
    """A decimal integer from 1 to `high`, refused with the row `code`."""

    def check(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
        if not 1 <= number <= high:
            raise Refused(code, value=text)
        return number

    return check


def _one_of(code: str, names: tuple[str, ...]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise Refused(code, value=text)
        return text

    return check


def _backend(text: str) -> str:
    if text == "host":
        raise Refused("usage/backend-host")
    return _one_of("usage/backend", BACKENDS)(text)


def _idle_seconds(text: str) -> float:
    """Seconds as a decimal number without an exponent."""
    parts = text.split(".")
    plain = text.isascii() and len(text) < 20 and len(parts) <= 2 and all(part.isdigit() for part in parts)
    if not plain or float(text) > MAX_SECONDS:
        raise Refused("usage/idle-unload", value=text)
    return float(text)


def _batch(text: str) -> int:
    if text not in map(str, BATCHES):
        raise Refused("run/max-batch", value=text)
    return int(text)


def _switch(text: str) -> NoReturn:
    raise TypeError("a switch has no text to check")


OPTIONS: tuple[Option, ...] = (
    Option("--prompt", "PROMPT", _prompt, None, "chat", "answer this prompt and exit", ("-p",)),
    Option(
        "--image",
        "IMAGE",
        str,
        None,
        "none",
        "attach a PNG, JPEG or WebP file to the first message",
        ("-i",),
        refused="usage/not-available",
    ),
    Option(
        "--system",
        "TEXT|@FILE",
        _words("--system"),
        None,
        "none",
        "the system message, as text or as @ and the name of a file that holds it",
    ),
    Option(
        "--max-tokens",
        "N",
        _integer("usage/max-tokens", 2**63 - 1),
        None,
        "until the end-of-sequence token or a full context; 256 tokens for a model without a chat template",
        "stop after N new tokens (a positive integer)",
    ),
    Option(
        "--ctx",
        "N",
        _integer("run/ctx", MAX_CTX),
        None,
        "2048, or what the model was made for if that is less",
        "the context length, in tokens",
        kind=RUN,
    ),
    Option(
        "--backend",
        "auto|hip|metal|cpu",
        _backend,
        "auto",
        "auto: the first usable of metal, hip, cpu",
        "the lane: AMD GPU, Apple GPU or CPU",
    ),
    Option(
        "--threads",
        "N",
        _integer("run/threads", MAX_THREADS),
        None,
        "one for each core",
        "threads of the CPU lane",
        kind=RUN,
    ),
    Option(
        "--cpu-isa",
        "x86-64-v2|x86-64-v3|x86-64-v4|native",
        _one_of("run/cpu-isa", ISAS),
        None,
        "native: all this processor has",
        "the instructions that the CPU lane uses; the reply in f32 is the same with all of them",
        kind=RUN,
    ),
    Option(
        "--cpu-kernels",
        "auto|numba|c",
        _one_of("run/cpu-kernels", KERNELS),
        None,
        "auto: numba, or a C compiler where numba cannot be used",
        "what compiles the CPU lane's kernels",
        kind=RUN,
    ),
    Option(
        "--max-batch",
        "N",
        _batch,
        8,
        "8",
        "the most replies of one model that are computed together, 1 or 8; none depends on the others",
        kind=RUN,
    ),
    Option(
        "--dtype",
        "f32|bf16",
        _one_of("run/dtype", DTYPES),
        "f32",
        "f32",
        "the arithmetic: f32, or bf16 to round activations, for a faster prefill where the processor has it",
        kind=RUN,
    ),
    Option(
        "--raw",
        None,
        _switch,
        False,
        "chat template",
        "send the prompt as plain text: no chat template, special tokens written in it count as such",
    ),
    Option(
        "--plain",
        None,
        _switch,
        False,
        "progress and line editing in a terminal",
        "no progress line and no line editing",
    ),
    Option(
        "--stats",
        None,
        _switch,
        False,
        "off",
        "print one line of times and token counts to stderr after each answer",
    ),
    Option("--json", None, _switch, False, "text", "print each answer as one JSON object"),
    Option(
        "--draft-model",
        "DIR|ALIAS|REPO",
        str,
        None,
        "none",
        "speculate with this draft model",
        refused="usage/not-available",
    ),
    Option(
        "--temperature",
        "T",
        str,
        0.0,
        "0",
        "sample the next token at temperature T (finite, >= 0; 0 picks the most likely token)",
        refused="usage/not-available",
    ),
    Option(
        "--top-k",
        "N",
        str,
        0,
        "0",
        "keep only the N most likely tokens (0 keeps all)",
        refused="usage/not-available",
    ),
    Option(
        "--top-p",
        "P",
        str,
        1.0,
        "1",
        "keep the smallest set of tokens whose probability adds up to P (0 < P <= 1; 1 keeps all)",
        refused="usage/not-available",
    ),
    Option(
        "--min-p",
        "M",
        str,
        0.0,
        "0",
        "drop tokens whose probability is below M times the most likely token's (0 <= M <= 1)",
        refused="usage/not-available",
    ),
    Option(
        "--repetition-penalty",
        "R",
        str,
        1.0,
        "1",
        "divide the score of each token in the last 64 tokens by R (finite, > 0; 1 is off)",
        refused="usage/not-available",
    ),
    Option(
        "--seed",
        "N",
        str,
        None,
        "fresh entropy per reply",
        "seed the random draw, so the same prompt gives the same reply on this machine and build",
        refused="usage/not-available",
    ),
    Option("--port", "PORT", str, None, "", "", refused="usage/no-http"),
    Option("--host", "HOST", str, None, "", "", refused="usage/no-http"),
    Option("--admin", None, _switch, False, "", "", refused="usage/no-http"),
    Option("--admin-port", "PORT", str, None, "", "", refused="usage/no-http"),
    Option("--model-dir", "DIR", str, None, "", "", refused="usage/model-dir"),
    Option(
        "--daemon",
        None,
        _switch,
        False,
        "models only",
        "end caldrixd itself, with all its models",
        commands=("stop",),
    ),
    Option(
        "--idle-unload",
        "SECONDS",
        _idle_seconds,
        900.0,
        "900",
        "unload a model after it was idle for this long",
        commands=("caldrixd",),
    ),
)


def options_of(command: str) -> tuple[Option, ...]:
    """The flags of one command (`run`, `stop`, `caldrixd`, ...), in the order of the documentation."""
    return tuple(option for option in OPTIONS if command in option.commands)


def defaults(command: str) -> dict[str, Any]:
    """Option.key -> value when the flag is absent, for the flags the command accepts."""
    return {option.key: option.default for option in options_of(command) if option.refused is None}


def walk(command: str, arguments: Sequence[str]) -> Iterator[tuple[Option | None, Any]]:
    """Each flag of a command line with its value; None with an argument that is none or asks for help."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument in ("-", *HELP_FLAGS):
            yield None, argument
            continue
        flag, attached, text = argument.partition("=")
        option = find(command, flag)
        follows = text if attached else next(rest, None) if option.metavar is not None else None
        yield option, value(option, flag, follows)


def find(command: str, flag: str) -> Option:
    """The record of a flag as written, without `=value`. Refused if it is unknown or refused on sight."""
    for option in options_of(command):
        if flag == option.name or flag in option.aliases:
            if option.refused is not None:
                raise Refused(option.refused, flag=flag, what=flag)
            return option
    raise Refused(UNKNOWN_FLAG.get(command, "usage/unknown-flag"), flag=flag)


def value(option: Option, flag: str, text: str | None) -> Any:
    """The value of a flag as written; `text` is what follows it or its `=`, None if nothing does.

    For a switch it is what stands after `=`. Refused if a value is missing, wrong, or given to a switch.
    """
    if option.metavar is None:
        if text is not None:
            raise Refused("usage/takes-no-value", flag=flag)
        return True
    if text is None:
        raise Refused("usage/needs-value", flag=flag)
    return option.check(text)


def check_together(values: Mapping[str, Any]) -> None:
    """Rules over all values of one command line, keyed as in `defaults`. Refused if one is broken."""
    for key, flag in CPU_ONLY.items():
        if values.get(key) is not None and values["backend"] not in ("cpu", "auto"):
            raise Refused("run/cpu-only-flag", flag=flag)


def documentation(command: str) -> str:
    """Markdown rows `| flag | meaning | default |` of the flags a command accepts or will accept."""
    rows = []
    for option in options_of(command):
        if option.refused not in (None, "usage/not-available"):
            continue
        meaning = option.doc if option.refused is None else f"{option.doc} (not available yet)"
        rows.append(f"| {_spelled(option)} | {_cell(meaning)} | {_cell(option.absent)} |")
    return "\n".join(rows)


def refused_documentation(command: str) -> str:
    """Markdown rows `| flag | what is said |` of the flags and values a command always refuses."""
    said = {"`--backend host`": ROWS["usage/backend-host"].text} if command == "run" else {}
    for option in options_of(command):
        if option.refused not in (None, "usage/not-available"):
            said[f"`{option.name}`"] = ROWS[option.refused].text.format(flag=option.name)
    return "\n".join(f"| {flag} | {_cell(text)} |" for flag, text in said.items())


def _spelled(option: Option) -> str:
    after = "" if option.metavar is None else f" {option.metavar}"
    return ", ".join(f"`{_cell(name + after)}`" for name in (*option.aliases, option.name))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
