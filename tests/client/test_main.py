"""The way out of the program: what no command handles itself, and odd descriptors."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from caldrix_protocol.messages import Message
from tests.support.cli import COMMAND, SECONDS, Home, finish
from tests.support.peer import Model, Peer, Talk, say

BROKEN = """\
import sys
from caldrix_client.commands import version
from caldrix_client.main import main

def execute(context):
    raise {error}

version.execute = execute
sys.argv = ["caldrix", "version"]
main()
"""


def run(home: Home, *command: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command,
        env=home.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            "ValueError('no \\x1b luck')",
            1,
            "caldrix: an internal error ended caldrix: <string>:6: ValueError: no \\x1b luck\n",
        ),
        ("MemoryError", 1, "caldrix: an internal error ended caldrix: <string>:6: MemoryError: \n"),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_nothing_ends_in_a_traceback(home: Home, error: str, status: int, said: str) -> None:
    assert run(home, sys.executable, "-c", BROKEN.format(error=error)) == (status, "", said)


@pytest.mark.parametrize("limit", range(5, 10))
@pytest.mark.parametrize(
    "arguments", ["version", "ps", "stop x", "pull demo", "models list", "run demo -p x", "run demo"]
)
def test_too_few_open_files_are_named(home: Home, limit: int, arguments: str) -> None:
    """With fewer no interpreter starts."""
    command = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *COMMAND, *arguments.split())
    said = (
        f"caldrix: caldrix could not get another open file: it runs under ulimit -n {limit}; "
        "raise that and try again\n"
    )
    with Peer(home.address, Model("answer")):
        assert run(home, *command)[::2] in ((0, ""), (1, said))
    if not arguments.startswith(("version", "ps", "stop")) and limit < 8:
        assert run(home, *command)[::2] == (1, said)


def redirected(home: Home, redirection: str, *arguments: str) -> tuple[int, str, str]:
    return run(home, "sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *arguments)


@pytest.mark.parametrize("redirection", ["<&-", "< /dev/null"])
def test_no_input_is_a_chat_without_messages(home: Home, redirection: str) -> None:
    with Peer(home.address, Model()):
        assert redirected(home, redirection, "run", "demo") == (0, "", "")


def test_a_closed_stdout_is_a_sentence(home: Home) -> None:
    with Peer(home.address, Model("x")):
        assert redirected(home, ">&-", "run", "demo", "-p", "hi") == (
            1,
            "",
            "caldrix: standard output cannot be written: Bad file descriptor\n",
        )


def test_a_closed_stderr_does_not_cost_the_answer(home: Home) -> None:
    with Peer(home.address, Model("x", template=False)):
        assert redirected(home, "2>&-", "run", "demo", "-p", "hi") == (0, "x\n", "")


def test_all_descriptors_closed_still_ends(home: Home) -> None:
    with Peer(home.address, Model("x", template=False)) as peer:
        assert redirected(home, "<&- >&- 2>&-", "run", "demo", "-p", "hi") == (1, "", "")
        assert peer.gone.wait(SECONDS)


def test_where_ctrl_c_is_ignored_it_stays_ignored(home: Home) -> None:
    asked, interrupted = threading.Event(), threading.Event()

    def answer(talk: Talk, request: Message) -> None:
        asked.set()
        assert interrupted.wait(SECONDS)
        say(talk, "unmoved")

    command = ("sh", "-c", 'trap "" INT; exec "$@"', "sh", *COMMAND, "run", "demo", "-p", "hi")
    with Peer(home.address, Model(answer)):
        process = subprocess.Popen(
            command,
            env=home.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert asked.wait(SECONDS)
        process.send_signal(signal.SIGINT)
        interrupted.set()
        assert finish(process) == (0, "unmoved\n", "")
