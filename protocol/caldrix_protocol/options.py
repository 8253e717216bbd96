"""Every command-line flag as a record. Parser, help text and the tables in the documentation come from here.

Reading a command line is `walk`, which calls `find` for each flag and `value` for what follows it, and
`check_together` at the end. They only raise `Refused`; nothing here acts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from caldrix_protocol.option import (
    MAX_STOPS,
    Option,
    backend,
    batch,
    byte_count,
    idle_seconds,
    integer,
    min_p,
    one_of,
    prompt,
    repetition_penalty,
    seed,
    some_words,
    stop,
    switch,
    temperature,
    think,
    top_k,
    top_p,
    words,
)
from caldrix_protocol.refusals import RUN, Refused

BACKENDS = ("auto", "hip", "metal", "cpu")
DTYPES = ("f32", "bf16")
BATCHES = (1, 8)
ISAS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "native")
KERNELS = ("auto", "numba", "c")
# What only the CPU lane has: the keys of their values, None when the flag is absent.
CPU_ONLY = {"threads": "--threads", "cpu_isa": "--cpu-isa", "cpu_kernels": "--cpu-kernels"}
# What only streamed weights have, but for --weight-budget, which asks for them.
STREAMING = ("--weight-", "--layout-dir")
MAX_CTX = 1 << 20
MAX_THREADS = 256
MAX_COUNT = 2**63 - 1

MARKS = "-/"  # before the name of a flag, or of a command of a chat
# What is taken for a mistyped name: its first letters, at least so many, or a text as like as this (0 to 1)
# and of much the same length: `set` is no mistyped `reset`.
LEAST_PREFIX = 3
LIKENESS = 0.65

HELP_FLAGS = ("-h", "--help")

# Commands whose unknown flags are the engine's, which refuses them; elsewhere every flag is caldrix's own.
ENGINES_FLAGS = ("run",)

# What flags of other programs that run models are here.
MEANT = {
    **dict.fromkeys(("-n", "--n-predict", "--num-predict", "--predict"), "--max-tokens"),
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx", "--context", "--context-length"), "--ctx"),
    **dict.fromkeys(("-v", "--verbose"), "--stats"),
    "-t": "--temperature or --threads",
    "-s": "--seed or --system",
    "--system-prompt": "--system",
    "--device": "--backend",
    "--format": "--json",
    "--silent": "--quiet",
}


OPTIONS: tuple[Option, ...] = (
    Option(
        "--prompt",
        "PROMPT",
        prompt,
        None,
        "chat",
        "answer this prompt and exit; - reads it from standard input",
        ("-p",),
    ),
    Option(
        "--stdin",
        None,
        switch,
        False,
        "standard input is a chat, or not read with -p",
        "append standard input to the prompt of -p, after an empty line",
    ),
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
        words("--system"),
        None,
        "none",
        "the system message, as text or as @ and the name of a file that holds it",
    ),
    Option(
        "--think",
        "on|off",
        think,
        None,
        "what the model does by itself",
        "ask a model that can think before it answers to do so or not; others are the same with it",
    ),
    Option(
        "--max-tokens",
        "N",
        integer("usage/max-tokens", MAX_COUNT),
        None,
        "until the end-of-sequence token or a full context; 256 tokens for a model without a chat template",
        "stop after N new tokens (a positive integer)",
    ),
    Option(
        "--ctx",
        "N",
        integer("run/ctx", MAX_CTX),
        None,
        "2048, or what the model was made for if that is less",
        "the context length, in tokens",
        kind=RUN,
        commands=("run", "models plan"),
    ),
    Option(
        "--backend",
        "auto|hip|metal|cpu",
        backend(BACKENDS),
        "auto",
        "auto: the first usable of metal, hip, cpu",
        "the lane: AMD GPU, Apple GPU or CPU",
        commands=("run", "models plan"),
    ),
    Option(
        "--threads",
        "N",
        integer("run/threads", MAX_THREADS),
        None,
        "one for each core",
        "threads of the CPU lane",
        kind=RUN,
        commands=("run", "models plan"),
    ),
    Option(
        "--cpu-isa",
        "x86-64-v2|x86-64-v3|x86-64-v4|native",
        one_of("run/cpu-isa", ISAS),
        None,
        "native: all this processor has",
        "the instructions that the CPU lane uses; the reply in f32 is the same with all of them",
        kind=RUN,
        commands=("run", "models plan"),
    ),
    Option(
        "--cpu-kernels",
        "auto|numba|c",
        one_of("run/cpu-kernels", KERNELS),
        None,
        "auto: numba, or a C compiler where numba cannot be used",
        "what compiles the CPU lane's kernels",
        kind=RUN,
        commands=("run", "models plan"),
    ),
    Option(
        "--max-batch",
        "N",
        batch(BATCHES),
        None,
        "8",
        "the most replies of one model that are computed together, 1 or 8; none depends on the others",
        kind=RUN,
        commands=("run", "models plan"),
    ),
    Option(
        "--dtype",
        "f32|bf16",
        one_of("run/dtype", DTYPES),
        "f32",
        "f32",
        "the arithmetic: f32, or bf16 to round activations, for a faster prefill where the processor has it",
        kind=RUN,
        commands=("run", "models plan"),
    ),
    Option(
        "--raw",
        None,
        switch,
        False,
        "chat template",
        "send the prompt as plain text: no chat template, special tokens written in it count as such",
    ),
    Option(
        "--plain",
        None,
        switch,
        False,
        "progress and line editing in a terminal",
        "no progress line and no line editing",
        commands=("run", "pull"),
    ),
    Option(
        "--quiet",
        None,
        switch,
        False,
        "status lines",
        "no status lines and no progress line",
        ("-q",),
        commands=("run", "pull"),
    ),
    Option(
        "--no-history",
        None,
        switch,
        False,
        "what is typed in a chat is kept",
        "keep nothing of what is typed in this chat, and offer nothing of earlier ones",
    ),
    Option(
        "--stats",
        None,
        switch,
        False,
        "off",
        "print one line of times and token counts to stderr after each answer",
    ),
    Option("--json", None, switch, False, "text", "print each answer as one JSON object"),
    Option(
        "--draft-model",
        "DIR|ALIAS|REPO",
        some_words("--draft-model"),
        None,
        "none",
        "speculate with this draft model (not available yet: the run goes on without it)",
    ),
    Option(
        "--temperature",
        "T",
        temperature,
        0.0,
        "0",
        "sample the next token at temperature T (finite, >= 0; 0 picks the most likely token)",
    ),
    Option("--top-k", "N", top_k, 0, "0", "keep only the N most likely tokens (0 keeps all)"),
    Option(
        "--top-p",
        "P",
        top_p,
        1.0,
        "1",
        "keep the smallest set of tokens whose probability adds up to P (0 < P <= 1; 1 keeps all)",
    ),
    Option(
        "--min-p",
        "M",
        min_p,
        0.0,
        "0",
        "drop tokens whose probability is below M times the most likely token's (0 <= M <= 1)",
    ),
    Option(
        "--repetition-penalty",
        "R",
        repetition_penalty,
        1.0,
        "1",
        "divide the score of each token already in the last 64 tokens of prompt and reply by R, or multiply "
        "it where it is negative (finite, > 0; 1 is off)",
    ),
    Option(
        "--seed",
        "N",
        seed,
        None,
        "fresh entropy per reply",
        "seed the random draw, so the same prompt gives the same reply on this machine and build",
    ),
    Option(
        "--stop",
        "TEXT",
        stop,
        (),
        "none",
        "end the reply before this text; may be given up to 16 times",
        many=MAX_STOPS,
    ),
    Option(
        "--max-context",
        "N",
        integer("run/max-context", MAX_COUNT),
        None,
        "--ctx alone",
        "the most tokens of any context, whatever --ctx says",
        kind=RUN,
        commands=("run", "models plan"),
    ),
    Option(
        "--sampler",
        "host",
        one_of("run/sampler", ("host",)),
        "host",
        "host",
        "what picks the token: host is the processor, on every lane",
        kind=RUN,
    ),
    Option(
        "--queue-depth",
        "N",
        integer("run/queue-depth", MAX_COUNT),
        None,
        "no bound",
        "the most requests that wait for one model",
        kind=RUN,
        later="run/not-available",
    ),
    Option(
        "--weight-budget",
        "BYTES",
        byte_count,
        None,
        "all weights are in memory",
        "stream the weights from disk through this much memory: bytes, or with m or g MiB or GiB",
        kind=RUN,
        later="run/not-available",
    ),
    Option(
        "--weight-ring",
        "N",
        integer("run/weight-ring", MAX_COUNT, 2),
        None,
        "2",
        "how many layers of streamed weights are in memory in turn (>= 2)",
        kind=RUN,
        later="run/not-available",
    ),
    *(
        Option(name, metavar, some_words(name), None, "none", doc, later="run/not-available")
        for name, metavar, doc in (
            ("--weight-pin", "NAMES", "streamed weights that stay in memory, by name"),
            ("--weight-pins", "FILE", "the same, from a file"),
            ("--weight-digest", "DIGEST", "what the streamed weights are checked against"),
            ("--weight-codec", "NAME", "how streamed weights are packed on disk"),
            ("--layout-dir", "DIR", "where streamed weights are kept as the lane lays them out"),
        )
    ),
    Option("--port", "PORT", str, None, "", "", refused="usage/no-http"),
    Option("--host", "HOST", str, None, "", "", refused="usage/no-http"),
    Option("--admin", None, switch, False, "", "", refused="usage/no-http"),
    Option("--admin-port", "PORT", str, None, "", "", refused="usage/no-http"),
    Option("--model-dir", "DIR", str, None, "", "", refused="usage/model-dir"),
    Option(
        "--yes",
        None,
        switch,
        False,
        "a question",
        "remove without asking",
        ("-y",),
        commands=("models rm",),
    ),
    Option(
        "--daemon",
        None,
        switch,
        False,
        "models only",
        "end caldrixd itself, with all its models",
        commands=("stop",),
    ),
    Option(
        "--idle-unload",
        "SECONDS",
        idle_seconds,
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
    return {option.key: option.default for option in options_of(command) if is_accepted(option)}


def is_accepted(option: Option) -> bool:
    """Whether a command line with this flag can be obeyed."""
    return option.refused is None and option.later is None


def put(values: dict[str, Any], option: Option, value: Any) -> None:
    """Note the value of a flag that was given. Refused "usage/too-often"."""
    if option.many == 1:
        values[option.key] = value
        return
    values[option.key] = (*values[option.key], value)
    if len(values[option.key]) > option.many:
        raise Refused("usage/too-often", flag=option.name, limit=option.many)


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
    raise _unknown(command, flag)


def _unknown(command: str, flag: str) -> Refused:
    accepted = [option for option in options_of(command) if is_accepted(option)]
    nearest = near(flag, [name for option in accepted for name in (option.name, *option.aliases)])
    engines = command in ENGINES_FLAGS
    if engines:
        nearest = MEANT.get(flag.replace("_", "-"), nearest)
    if nearest is None:
        return Refused("run/unknown-flag" if engines else "usage/unknown-flag", flag=flag)
    return Refused("run/misspelt-flag" if engines else "usage/misspelt-flag", flag=flag, nearest=nearest)


def near(typed: str, names: Sequence[str]) -> str | None:
    """Which of `names` was meant, if it can be guessed."""
    from difflib import get_close_matches  # only for a mistake: it costs more than this module

    written = {name.lstrip(MARKS): name for name in names}
    meant = typed.lstrip(MARKS).lower().replace("_", "-")
    longer = [name for name in written if name.startswith(meant) and len(meant) >= LEAST_PREFIX]
    alike = [name for name in written if abs(len(name) - len(meant)) <= len(meant) / 2]
    found = longer or get_close_matches(meant, alike, 1, LIKENESS)
    return written[found[0]] if found else None


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
    budget = values.get("weight_budget") is not None
    if budget and values["max_batch"] == max(BATCHES):
        raise Refused("run/streamed-batch")
    for option in OPTIONS:
        if values.get(option.key) is not None and option.later is not None:
            if option.name.startswith(STREAMING) and not budget:
                raise Refused("run/streamed-only-flag", flag=option.name)
            raise Refused(option.later, flag=option.name)
