"""argv to a command, as a value. Nothing here acts: no file is looked at and nothing is printed."""

from __future__ import annotations

from typing import Any, NamedTuple

from caldrix_client.sampling import Sampling
from caldrix_protocol import options
from caldrix_protocol.options import HELP_FLAGS
from caldrix_protocol.refusals import Refused

DEFAULT_CTX = 2048


class Run(NamedTuple):
    """`caldrix run`; the fields are the keys of its options."""

    model: str
    prompt: str | None
    system: str | None
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

    @property
    def bounded_ctx(self) -> int | None:
        """--ctx within --max-context; None leaves it to the daemon, whose default is DEFAULT_CTX at most."""
        if self.max_context is None or self.max_context >= (self.ctx or DEFAULT_CTX):
            return self.ctx
        return self.max_context


class Ps(NamedTuple):
    """`caldrix ps`."""


class Stop(NamedTuple):
    """`caldrix stop`: one model, all of them (None), or the daemon."""

    model: str | None
    daemon: bool


class Doctor(NamedTuple):
    """`caldrix doctor`."""


class Version(NamedTuple):
    """`caldrix version`."""


class Help(NamedTuple):
    """`caldrix help`."""


Command = Run | Ps | Stop | Doctor | Version | Help

_BARE: dict[str, Command] = {
    "ps": Ps(),
    "doctor": Doctor(),
    "version": Version(),
    "--version": Version(),
    "help": Help(),
    "--help": Help(),
    "-h": Help(),
}


def parse(arguments: list[str]) -> Command:
    """The command of `arguments` (argv without the program). Raises Refused for anything it cannot mean."""
    if not arguments:
        return Help()
    name, *rest = arguments
    if name == "run":
        return _run(rest)
    if name == "stop":
        return _stop(rest)
    if name == "serve":
        raise Refused("usage/not-available", what="caldrix serve")
    if name not in _BARE:
        raise Refused("usage/unknown-command", command=name)
    if rest and rest[0] in HELP_FLAGS:
        return Help()
    if rest:
        raise Refused("usage/takes-no-arguments", command=name, argument=rest[0])
    return _BARE[name]


def _run(arguments: list[str]) -> Run | Help:
    if not arguments or not arguments[0]:
        raise Refused("usage/model-required")
    if arguments[0] in HELP_FLAGS:
        return Help()
    if arguments[0].startswith("-"):
        raise Refused("usage/model-first", flag=arguments[0].partition("=")[0])
    read = _flags("run", arguments[1:])
    if read is None:
        return Help()
    values, others = read
    if others:
        raise Refused("usage/extra-argument", command="run", argument=others[0])
    options.check_together(values)
    if values["raw"] and values["system"] is not None:
        raise Refused("usage/system-raw")
    return Run(model=arguments[0], **values)


def _stop(arguments: list[str]) -> Stop | Help:
    read = _flags("stop", arguments)
    if read is None:
        return Help()
    values, models = read
    if len(models) > 1:
        raise Refused("usage/extra-argument", command="stop", argument=models[1])
    if models and values["daemon"]:
        raise Refused("usage/stop-both")
    return Stop(models[0] if models else None, **values)


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
