"""`caldrixd`: the daemon's entry point."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from caldrix_protocol import limits, options
from caldrix_protocol.build import find_build
from caldrix_protocol.refusals import EXIT_STATUS, Refused, sentence
from caldrix_protocol.usage import daemon_help
from caldrix_protocol.version import VERSION
from caldrixd import config, daemon, log


def main() -> int:
    """`caldrixd [--idle-unload SECONDS] [--help] [--version]`; the exit status."""
    try:
        arguments = sys.argv[1:]
        if {*options.HELP_FLAGS, "--version"}.intersection(arguments):
            told = f"caldrixd {VERSION}" if "--version" in arguments else daemon_help()
            sys.stdout.write(f"{told}\n")
            return 0
        build = find_build(sys.path)
        values = parse(arguments)
        log.start("caldrixd")
        _end(daemon.run(config.read(os.environ, uid=os.geteuid(), pid=os.getpid(), build=build, **values)))
    except Refused as refused:
        sys.stderr.write(f"caldrixd: {refused.text}\n")
        return EXIT_STATUS[refused.kind]
    except Exception as error:
        limited = limits.exhausted(error, "caldrixd")
        if limited is None:
            logging.critical("%s", log.describe(error))
        else:
            sys.stderr.write(f"caldrixd: {sentence('client/limit', **limited.fields)}\n")
        _end(limits.exit_status(error))


def _end(status: int) -> NoReturn:
    """End the process at once: what is half made has nobody to complain to, what waits nobody to wait for."""
    logging.shutdown()
    os._exit(status)


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of caldrixd's flags, by the keys of `options.defaults`. Refused "usage/..."."""
    values = options.defaults("caldrixd")
    for option, value in options.walk("caldrixd", arguments):
        if option is None:
            raise Refused("usage/takes-no-arguments", command="caldrixd", argument=value)
        values[option.key] = value
    return values


if __name__ == "__main__":
    sys.exit(main())
