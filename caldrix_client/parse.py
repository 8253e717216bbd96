"""argv to a command, as a value. Nothing here acts: no file is looked at and nothing is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from caldrix_client.sampling import Sampling
from caldrix_protocol import options
from caldrix_protocol.options import HELP_FLAGS
from caldrix_protocol.refusals import Refused

DEFAULT_CTX = 2048
DEFAULT_BATCH = 8
SHELLS = ("bash", "zsh", "fish")
ACTIONS = ("list", "plan", "rm", "pin")  # of `caldrix models`
# What a command is called elsewhere -> what it is here.
MEANT = {
    **dict.fromkeys(("ls", "list"), "models list"),
    **dict.fromkeys(("plan", "show", "info"), "models plan"),
    **dict.fromkeys(("rm", "remove", "delete"), "models rm"),
    **dict.fromkeys(("chat", "start", "ask", "generate"), "run"),
    **dict.fromkeys(("download", "get", "fetch"), "pull"),
    **dict.fromkeys(("unload", "kill"), "stop"),
    **dict.fromkeys(("-v", "-V"), "version"),
    "pin": "models pin",
    "status": "ps",
}


class Run(NamedTuple):
    """`caldrix run`; the fields are the keys of its options."""

    model: str
    prompt: str | None
    stdin: bool
    system: str | None
    think: bool | None
    max_tokens: int | None
    ctx: int | None
    backend: str
    threads: int | None
    cpu_isa: str | None
    cpu_kernels: str | None
    max_batch: int | None
    max_context: int | None
    sampler: str
    dtype: str
    raw: bool
    plain: bool
    quiet: bool
    no_history: bool
    stats: bool
    json: bool
    draft_model: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]

    @property
    def sampling(self) -> Sampling:
        """The knobs of sampling at the start of the run."""
        return Sampling(*[getattr(self, name) for name in Sampling._fields])


class Pull(NamedTuple):
    """`caldrix pull`; the fields are the keys of its options."""

    model: str
    plain: bool
    quiet: bool


class Models(NamedTuple):
    """`caldrix models` list, plan, rm or pin; plan and rm are of a model and have flags."""

    action: str
    model: str = ""
    ctx: int | None = None
    backend: str = "auto"
    threads: int | None = None
    cpu_isa: str | None = None
    cpu_kernels: str | None = None
    max_batch: int | None = None
    max_context: int | None = None
    dtype: str = "f32"
    yes: bool = False


class Ps(NamedTuple):
    """`caldrix ps`."""


class Stop(NamedTuple):
    """`caldrix stop`: one model, all of them (None), or the daemon."""

    model: str | None
    daemon: bool


class Doctor(NamedTuple):
    """`caldrix doctor`."""


class Completion(NamedTuple):
    """`caldrix completion`, for one of SHELLS."""

    shell: str


class Version(NamedTuple):
    """`caldrix version`."""


class Help(NamedTuple):
    """`caldrix help`: of one command (`run`, `models plan`) or program, or of all of them."""

    topic: str | None = None


Command = Run | Pull | Models | Ps | Stop | Doctor | Completion | Version | Help


def load_fields(command: Run | Models) -> dict[str, Any]:
    """The fields that Open and Plan have in common, but for the model and the environment."""
    return {
        "backend": command.backend,
        "ctx": command.max_context if is_bounded(command) else command.ctx,
        "dtype": command.dtype,
        "threads": command.threads or 0,
        "max_batch": command.max_batch or DEFAULT_BATCH,
        "cpu_isa": command.cpu_isa or "native",
        "cpu_kernels": command.cpu_kernels or "auto",
    }


def raise_unless_bounded(refused: Refused, command: Run | Models) -> None:
    """Raise what refused a load, unless that was a bound of --max-context, which asks for no context.

    A model made for less than the bound has the context of its own then.
    """
    if refused.code != "run/ctx-too-long" or not is_bounded(command):
        raise refused
    if command.ctx is not None:
        raise Refused(refused.code, **refused.fields | {"ctx": command.ctx})


def is_bounded(command: Run | Models) -> bool:
    """Whether --max-context leaves less than --ctx, or the daemon's default, would have been."""
    return command.max_context is not None and command.max_context < (command.ctx or DEFAULT_CTX)


_BARE: dict[str, Command] = {
    "ps": Ps(),
    "doctor": Doctor(),
    "version": Version(),
    "--version": Version(),
}


def parse(arguments: list[str]) -> Command:
    """The command of `arguments` (argv without the program). Raises Refused for anything it cannot mean."""
    name, *rest = arguments or ["help"]
    if name in _WITH_ARGUMENTS:
        return _WITH_ARGUMENTS[name](rest)
    if name in _BARE:
        return _bare(name, rest)
    raise _no_command(name)


def _no_command(name: str) -> Refused:
    """The refusal of a first argument that is no command; a model, or a flag of run, lacks the `run`."""
    from caldrix_protocol.aliases import ALIASES  # only for a mistake

    if name in ALIASES or "/" in name:
        return Refused("usage/misspelt-command", command=name, nearest=f"run {name}")
    flag = name.partition("=")[0]
    if any(flag in (option.name, *option.aliases) for option in options.options_of("run")):
        return Refused("usage/model-first", flag=flag)
    return unknown(name, (*_WITH_ARGUMENTS, *_BARE))


def unknown(name: str, names: Iterable[str]) -> Refused:
    """The refusal of a command that is none of `names`; one that is to come is said to be."""
    if name == "serve":
        return Refused("usage/not-available", what="caldrix serve")
    nearest = MEANT.get(name) or options.near(name, [known for known in names if not known.startswith("-")])
    if nearest is None:
        return Refused("usage/unknown-command", command=name)
    return Refused("usage/misspelt-command", command=name, nearest=nearest)


def unknown_of_models(action: str) -> Refused:
    """The refusal of what `caldrix models` does not do."""
    nearest = options.near(action, ACTIONS)
    elsewhere = action if action in _WITH_ARGUMENTS else None
    meant = MEANT.get(action, elsewhere) if nearest is None else f"models {nearest}"
    if meant is None:
        return Refused("usage/models-command", given=action)
    return Refused("usage/misspelt-command", command=f"models {action}", nearest=meant)


def _bare(name: str, arguments: list[str]) -> Command:
    if arguments and arguments[0] in HELP_FLAGS:
        return Help(name.lstrip("-"))
    if arguments:
        raise Refused("usage/takes-no-arguments", command=name, argument=arguments[0])
    return _BARE[name]


def _help(arguments: list[str]) -> Help:
    if arguments and arguments[0] in HELP_FLAGS:
        return Help("help")
    return Help(" ".join(arguments) if arguments else None)


def _run(arguments: list[str]) -> Run | Help:
    if not arguments or not arguments[0]:
        raise Refused("usage/model-required")
    if arguments[0] in HELP_FLAGS:
        return Help("run")
    if arguments[0].startswith("-"):
        raise Refused("usage/model-first", flag=arguments[0].partition("=")[0])
    read = _flags("run", arguments[1:])
    if read is None:
        return Help("run")
    values, others = read
    if others:
        raise Refused("usage/bare-prompt", argument=others[0])
    options.check_together(values)
    if values["raw"] and values["system"] is not None:
        raise Refused("usage/system-raw", name="--system")
    if values["stdin"] and values["prompt"] in (None, "-"):
        raise Refused("usage/stdin-alone")
    return Run(model=arguments[0], **values)


def _stop(arguments: list[str]) -> Stop | Help:
    read = _flags("stop", arguments)
    if read is None:
        return Help("stop")
    values, models = read
    if len(models) > 1:
        raise Refused("usage/extra-argument", command="stop", argument=models[1])
    if models and values["daemon"]:
        raise Refused("usage/stop-both")
    return Stop(models[0] if models else None, **values)


def _models(arguments: list[str]) -> Pull | Models | Help:
    action, *rest = arguments or ["list"]
    if action in HELP_FLAGS:
        return Help("models")
    if action not in ACTIONS:
        raise unknown_of_models(action)
    if action in ("plan", "rm"):
        return _of_one_model(f"models {action}", partial(Models, action), rest)
    if rest and rest[0] in HELP_FLAGS:
        return Help(f"models {action}")
    if rest:
        raise Refused("usage/takes-no-arguments", command=f"models {action}", argument=rest[0])
    return Models(action)


def _pull(arguments: list[str]) -> Pull | Models | Help:
    return _of_one_model("pull", Pull, arguments)


def _of_one_model(
    command: str, make: Callable[..., Pull | Models], arguments: list[str]
) -> Pull | Models | Help:
    read = _flags(command, arguments)
    if read is None:
        return Help(command)
    values, models = read
    if not models or not models[0]:
        raise Refused("usage/model-needed", command=command)
    if len(models) > 1:
        raise Refused("usage/extra-argument", command=command, argument=models[1])
    options.check_together(values)
    return make(models[0], **values)


def _completion(arguments: list[str]) -> Completion | Help:
    if arguments and arguments[0] in HELP_FLAGS:
        return Help("completion")
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise Refused("usage/completion", given=" ".join(arguments) or "nothing")
    return Completion(arguments[0])


def _flags(command: str, arguments: list[str]) -> tuple[dict[str, Any], list[str]] | None:
    """Option values by key, and the arguments that are no flags; None when help is asked for instead."""
    values = options.defaults(command)
    others: list[str] = []
    for option, value in options.walk(command, arguments):
        if option is not None:
            options.put(values, option, value)
        elif value in HELP_FLAGS:
            return None
        else:
            others.append(value)
    return values, others


_WITH_ARGUMENTS: dict[str, Callable[[list[str]], Command]] = {
    "run": _run,
    "pull": _pull,
    "models": _models,
    "stop": _stop,
    "completion": _completion,
    "help": _help,
    "--help": _help,
    "-h": _help,
}
