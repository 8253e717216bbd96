"""The command `caldrix`: argv to a command, a command to its exit status. The status is set here only."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # importing typing for it would cost more than this module
if TYPE_CHECKING:
    from typing import NoReturn

    from caldrix_client.context import Context
    from caldrix_client.parse import Command
    from caldrix_client.terminal import Terminal
    from caldrix_protocol.refusals import Refused

GARBAGE = 100_000  # objects between two looks for garbage: imports make none, but would be looked through
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # what a shell reports of a program that died of SIGPIPE


def main() -> NoReturn:
    """The program: run the command in sys.argv and end with its status.

    The interpreter is not given the time to take itself down: that is a tenth of what a warm answer takes.
    Nothing is lost, for what is written here goes to its descriptor at once.
    """
    os._exit(run())


def run() -> int:
    """Run the command in sys.argv and return its exit status."""
    gc.set_threshold(GARBAGE)
    try:
        _hold_standard_descriptors()
        from caldrix_client.terminal import Terminal

        return _guarded(sys.argv[1:], Terminal(os.environ.get("TERM", "")))
    except KeyboardInterrupt:
        return INTERRUPTED


def _guarded(arguments: list[str], terminal: Terminal) -> int:
    from caldrix_client.context import Context
    from caldrix_client.parse import parse
    from caldrix_client.terminal import OutputClosed
    from caldrix_protocol.refusals import EXIT_STATUS, Refused

    try:
        return _execute(parse(arguments), Context(os.environ, terminal))
    except OutputClosed:
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        terminal.leave()
        return INTERRUPTED
    except SystemExit as ending:  # SIGTERM or SIGHUP, with its status
        terminal.clear()
        return int(ending.code or 0)
    except Refused as refused:
        shown = _blamed(refused)
        terminal.say(shown.text)
        return EXIT_STATUS.get(shown.kind, 1)
    except Exception as error:
        terminal.say(_reason(error))
        return 1


def _execute(command: Command, context: Context) -> int:
    """The table of commands. Each is imported when it runs: `version` must not pay for `run`."""
    from caldrix_client import parse

    match command:
        case parse.Run():
            from caldrix_client.commands import run

            return run.execute(command, context)
        case parse.Ps():
            from caldrix_client.commands import ps

            return ps.execute(context)
        case parse.Stop():
            from caldrix_client.commands import stop

            return stop.execute(command, context)
        case parse.Doctor():
            from caldrix_client.commands import doctor

            return doctor.execute(context)
        case parse.Pull():
            from caldrix_client.commands import pull

            return pull.execute(command, context)
        case parse.Models():
            from caldrix_client.commands import models

            return models.execute(command, context)
        case parse.Completion():
            from caldrix_client.commands import completion

            return completion.execute(command, context)
        case parse.Version():
            from caldrix_client.commands import version

            return version.execute(context)
        case parse.Help():
            from caldrix_client.commands import help as usage

            return usage.execute(command, context)


def _hold_standard_descriptors() -> None:
    """Fill closed descriptors 0 to 2, so that no socket becomes one: input is empty then, output fails."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)


def _blamed(refused: Refused) -> Refused:
    """What no file could be opened for is not refused for what it is."""
    if refused.__context__ is None:
        return refused
    from caldrix_protocol.limits import behind

    found = behind(refused, "caldrix")
    return refused if found is refused else Refused("client/limit", **found.fields)


def _reason(error: Exception) -> str:
    """The sentence for a failure that nothing else knew."""
    from caldrix_protocol.limits import exhausted
    from caldrix_protocol.refusals import sentence

    limited = exhausted(error, "caldrix")
    if limited is not None:
        return sentence("client/limit", **limited.fields)
    return sentence("client/internal", reason=_described(error))


def _described(error: Exception) -> str:
    """The error in one line, after the place it comes from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return f"{type(error).__name__}: {error}"
    file = os.path.basename(trace.tb_frame.f_code.co_filename)
    return f"{file}:{trace.tb_lineno}: {type(error).__name__}: {error}"
