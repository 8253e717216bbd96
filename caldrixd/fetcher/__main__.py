"""The fetcher process: fetches one model into a cache and tells of it in event frames on stdout.

The last frame is `done` or `refused`. After `planned` it waits for a byte on stdin. End of file there means
the daemon is gone or nobody wants the model any more: the fetch stops.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from caldrix_protocol import codec, framing, limits
from caldrix_protocol.connection import as_refusal
from caldrix_protocol.messages import Done, Message
from caldrix_protocol.refusals import Refused
from caldrixd import log
from caldrixd.fetcher import demo
from caldrixd.models.hub import DEFAULT_ENDPOINT, Repo, offline_variable


def main(arguments: list[str]) -> int:
    """`demo CACHE`, `hub CACHE MODEL REPO REVISION SECONDS` or `commits CACHE SECONDS REPO...`.

    0 when the last frame was sent.
    """
    log.start("fetcher")
    logging.getLogger().setLevel(logging.WARNING)  # libraries tell of addresses, which may be signed
    wanted = threading.Event()
    with _frames() as output:

        def send(message: Message) -> None:
            output.write(framing.frame(codec.encode(message)))
            output.flush()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        threading.Thread(target=_listen, args=(wanted,), daemon=True).start()
        try:
            send(_last(arguments, send, wanted))
        except (KeyboardInterrupt, BrokenPipeError):
            return 1
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of stdin has nothing to stop any more
    return 0


def _last(arguments: list[str], send: demo.Send, wanted: threading.Event) -> Message:
    """Fetch, and what is to be said at the end. Raises BrokenPipeError."""
    who = "the downloading process"
    try:
        _fetch(arguments, send, wanted)
    except Refused as refused:
        return as_refusal(limits.behind(refused, who))
    except BrokenPipeError:
        raise
    except Exception as error:
        limited = limits.exhausted(error, who)
        return as_refusal(limited or Refused("daemon/internal", id=log.incident(error)))
    return Done()


def _fetch(arguments: list[str], send: demo.Send, wanted: threading.Event) -> None:
    kind, cache, *rest = arguments
    if kind == demo.ALIAS:
        demo.fetch(Path(cache), os.environ, send)
        return
    # They bring huggingface_hub, which the demo does without.
    from caldrixd.fetcher import commits, snapshot
    from caldrixd.fetcher.transfer import Patience

    endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    if kind == "commits":
        seconds, *names = rest
        commits.look_up(names, Path(cache), endpoint, float(seconds), send)
        return
    model, repo, revision, seconds = rest
    snapshot.fetch(
        snapshot.Job(
            model=model,
            repo=Repo(repo, revision),
            cache=Path(cache),
            endpoint=endpoint,
            patience=Patience(float(seconds)),
            send=send,
            proceed=wanted.wait,
            offline=offline_variable(os.environ),
        )
    )


def _frames() -> BinaryIO:
    """stdout for frames alone: what a library prints goes to stderr, the daemon's log."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def _listen(wanted: threading.Event) -> None:
    """A byte on stdin is the word to go on, its end the word to stop."""
    while os.read(0, 1):
        wanted.set()
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
