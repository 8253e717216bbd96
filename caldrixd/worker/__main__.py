"""Entry point of the worker process: `python -m caldrixd.worker --fd N --parent PID`, started by caldrixd."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys

from caldrixd import log
from caldrixd.worker import protection
from caldrixd.worker.failures import broken_installation, refusal_for
from caldrixd.worker.pipe import Pipe


def main() -> int:
    parser = argparse.ArgumentParser("caldrixd.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log.start("worker")
    try:
        protection.die_with_parent(arguments.parent)
    except ChildProcessError as error:
        logging.warning("%s", error)
        return 1
    protection.offer_to_oom_killer()
    pipe = Pipe(socket.socket(fileno=arguments.fd))
    wanted = pipe.receive()
    if wanted is None:
        return 0
    try:
        from caldrixd.worker.main import serve
    except ImportError as error:
        logging.critical("%s", log.describe(error))
        pipe.send(broken_installation(error, wanted))
        return 1
    except Exception as error:
        pipe.send(refusal_for(error, wanted))
        return 1
    return serve(pipe, wanted, os.environ)


if __name__ == "__main__":
    sys.exit(main())
