"""The table of docs/run.md, "Pipes and scripts": every stdin with every stdout and every kind of prompt.

Real processes and a real pseudo-terminal; the daemon is scripted, so that what reaches the model is seen.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from caldrix_protocol.messages import Delta, Generate, Message, Notice, Open, Progress, Status
from tests.support.cli import COMMAND, IMPORTS, SECONDS, Home, Screen, finish
from tests.support.peer import Model, Peer, Talk, say, texts

TYPED = "one\ntwö\n"
LINES = ["one", "twö"]
ALL = "one\ntwö"
EMPTY = "caldrix: {}: standard input is empty"

STDIN = ("terminal", "pipe", "file", "/dev/null", "closed")
STDOUT = ("terminal", "pipe")
NOTHING = ("/dev/null", "closed")


class Outcome(NamedTuple):
    """The exit status, the messages that reach the model, and what stderr says."""

    status: int
    messages: list[str]
    words: str = ""


# Arguments -> what happens with a stdin that has text, and with one that has none.
TABLE: dict[tuple[str, ...], tuple[Outcome, Outcome]] = {
    ("-p", "TEXT"): (Outcome(0, ["TEXT"]), Outcome(0, ["TEXT"])),
    ("-p", "-"): (Outcome(0, [ALL]), Outcome(2, [], EMPTY.format("-p -"))),
    ("-p", "TEXT", "--stdin"): (Outcome(0, [f"TEXT\n\n{ALL}"]), Outcome(2, [], EMPTY.format("--stdin"))),
    (): (Outcome(0, LINES), Outcome(0, [])),
}


@contextmanager
def stdin_of(kind: str, home: Home) -> Iterator[int | None]:
    """A descriptor for Screen; None for its terminal, -1 for a closed stdin."""
    if kind in ("terminal", "closed"):
        yield {"terminal": None, "closed": -1}[kind]
        return
    if kind == "pipe":
        descriptor, writing = os.pipe()
        os.write(writing, TYPED.encode())
        os.close(writing)
    elif kind == "file":
        (home.path / "typed").write_text(TYPED)
        descriptor = os.open(home.path / "typed", os.O_RDONLY)
    else:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def type_in(screen: Screen, arguments: tuple[str, ...]) -> None:
    """What a person types: lines at the editor's prompts, or the text of `-` in a terminal without one."""
    if arguments:
        screen.press(TYPED + "\x04")
        return
    for line in LINES:
        screen.ready()
        screen.press(f"{line}\n")
    screen.ready()
    screen.press("\x04")


@pytest.mark.parametrize("arguments", TABLE, ids=lambda arguments: " ".join(arguments) or "none")
@pytest.mark.parametrize("stdout", STDOUT)
@pytest.mark.parametrize("stdin", STDIN)
def test_a_cell_of_the_table(home: Home, stdin: str, stdout: str, arguments: tuple[str, ...]) -> None:
    expected = TABLE[arguments][stdin in NOTHING]
    answers = [f"{number}\x1b answer" for number in range(len(expected.messages))]
    reading, writing = os.pipe()
    with stdin_of(stdin, home) as typed, Peer(home.address, Model(*answers)) as peer:
        out = writing if stdout == "pipe" else None
        with Screen(home, "run", "demo", *arguments, typed=typed, out=out) as screen:
            if stdin == "terminal" and arguments != ("-p", "TEXT"):
                type_in(screen, arguments)
            status = screen.end()
    os.close(writing)
    piped = os.read(reading, 1 << 16).decode()
    os.close(reading)
    assert status == expected.status
    assert [texts(r)[-1][1] for r in peer.requests if type(r) is Generate] == expected.messages
    assert piped == ("".join(f"{answer}\n" for answer in answers) if stdout == "pipe" else "")
    if stdout == "terminal":
        assert all(answer.replace("\x1b", "\\x1b") + "\r\n" in screen.shown for answer in answers)
    assert expected.words in screen.shown
    if stdin != "terminal":
        shown = "".join(f"{answer}\n" for answer in answers).replace("\x1b", "\\x1b").replace("\n", "\r\n")
        words = f"{expected.words}\r\n" if expected.words else ""
        assert screen.shown == (shown if stdout == "terminal" else "") + words


@pytest.mark.parametrize("arguments", [("-p", "-"), ("-p", "TEXT", "--stdin")])
def test_bytes_that_are_no_text_are_refused_before_a_daemon_is_asked(
    home: Home, arguments: tuple[str, ...]
) -> None:
    result = home.caldrix("run", "demo", *arguments, typed=b"\x7fELF\x02\xff")
    assert result == (2, "", "caldrix: standard input is not valid UTF-8\n")
    assert not home.log.exists()


def test_text_from_stdin_is_the_prompt_to_the_last_byte_but_one_newline(home: Home) -> None:
    text = "\ufeff  a\r\n\tb \x00\n\n"
    with Peer(home.address, Model("x")) as peer:
        assert home.caldrix("run", "demo", "-p", "-", typed=text.encode()).status == 0
    assert texts(peer.requests[-1])[-1] == ("user", text.removesuffix("\n"))


@pytest.mark.parametrize("arguments", [("--stdin",), ("--stdin", "-p", "-")])
def test_stdin_is_appended_to_a_text_only(home: Home, arguments: tuple[str, ...]) -> None:
    result = home.caldrix("run", "demo", *arguments, typed=b"x")
    assert result == (2, "", "caldrix: --stdin needs -p TEXT, which it appends to\n")


def test_an_input_without_an_end_is_refused(home: Home) -> None:
    with open("/dev/zero", "rb") as endless:
        process = subprocess.Popen(
            (*COMMAND, "run", "demo", "-p", "-"),
            stdin=endless,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=home.environment,
        )
        result = finish(process)
    assert result == (
        1,
        "",
        f"caldrix: standard input has over {64 << 20} bytes, and no message can be longer\n",
    )


def test_ctrl_c_while_the_prompt_is_read_ends_with_130(home: Home) -> None:
    process = home.start("run", "demo", "-p", "-")
    assert process.stdin is not None
    process.stdin.write(b"x" * (1 << 20))  # more than a pipe holds, so that the client has read some of it
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    process.stdin.close()
    process.stdin = None
    assert finish(process) == (130, "", "")


class Pouring:
    """Answers without an end, and notes the client's cancel or its going."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __call__(self, talk: Talk, request: Message) -> None:
        talk.send(Delta("words " * 100))
        self.begun.set()
        while True:
            talk.send(Delta("words " * 1000))


def test_head_ends_the_run_quietly_and_cancels_it(home: Home) -> None:
    with Peer(home.address, Model(Pouring())) as peer:
        command = shlex.join((*COMMAND, "run", "demo", "-p", "x"))
        done = subprocess.run(
            ("bash", "-c", f'{command} | head -c 5; echo " ${{PIPESTATUS[0]}}"'),
            env=home.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert (done.stdout, done.stderr) == ("words 141\n", "")
        assert peer.gone.wait(SECONDS)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_sigterm_ends_the_run_with_143_and_cancels_it(home: Home, flags: tuple[str, ...]) -> None:
    asked = threading.Event()

    def silent(talk: Talk, request: Message) -> None:
        talk.send(Delta("half"))
        asked.set()
        assert talk.receive() is None

    with Peer(home.address, Model(silent)) as peer:
        process = home.start("run", "demo", "-p", "x", *flags)
        assert asked.wait(SECONDS)
        if not flags:
            assert process.stdout is not None
            assert process.stdout.read(4) == b"half"
        process.send_signal(signal.SIGTERM)
        result = finish(process)
        assert peer.gone.wait(SECONDS)
    assert result == (143, "" if flags else "\n", "")


@pytest.mark.parametrize("flags", [("-p", "x"), ()])
def test_a_terminal_that_is_closed_ends_the_run_and_cancels_it(home: Home, flags: tuple[str, ...]) -> None:
    def silent(talk: Talk, request: Message) -> None:
        talk.send(Delta("half"))
        assert talk.receive() is None

    with Peer(home.address, Model(silent)) as peer, Screen(home, "run", "demo", *flags) as screen:
        if not flags:
            screen.ready()
            screen.press("x\n")
        screen.expect("half")
        screen.hang_up()
        assert peer.gone.wait(SECONDS)
        assert screen.process.wait(SECONDS) == -signal.SIGHUP


def test_sigterm_while_a_model_is_loaded_takes_the_progress_line_away(home: Home) -> None:
    def load(talk: Talk, request: Message) -> None:
        talk.send(Progress("weights", 1, 2))
        talk.receive()

    with Peer(home.address, load), Screen(home, "run", "demo", "-p", "x") as screen:
        screen.expect("weights: 50 %")
        screen.process.terminate()
        assert screen.end() == 143
    assert screen.shown.endswith("weights: 50 %\r\x1b[K")


def test_where_sigterm_is_ignored_it_stays_ignored(home: Home) -> None:
    asked, signalled = threading.Event(), threading.Event()

    def answer(talk: Talk, request: Message) -> None:
        asked.set()
        assert signalled.wait(SECONDS)
        Model("unmoved")(talk, request)

    command = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh", *COMMAND, "run", "demo", "-p", "hi")
    pipe = subprocess.PIPE
    with Peer(home.address, Model(answer)):
        process = subprocess.Popen(command, env=home.environment, stdin=pipe, stdout=pipe, stderr=pipe)
        assert asked.wait(SECONDS)
        process.send_signal(signal.SIGTERM)
        signalled.set()
        assert finish(process) == (0, "unmoved\n", "")


def loading(talk: Talk, request: Message) -> None:
    if type(request) is Open:
        talk.send(Status("status/loading", "loading", {}), Progress("weights", 1, 2))
    Model("answer")(talk, request)


@pytest.mark.parametrize(
    ("flags", "variables", "animated"),
    [
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, True),
        ((), {"TERM": "dumb"}, False),
        ((), {"TERM": ""}, False),
        (("--plain",), {}, False),
    ],
)
def test_only_a_terminal_that_can_move_its_cursor_is_animated(
    home: Home, flags: tuple[str, ...], variables: dict[str, str], animated: bool
) -> None:
    with Peer(home.address, loading), Screen(home, "run", "demo", "-p", "x", *flags, **variables) as screen:  # type: ignore[arg-type]
        assert screen.end() == 0
    drawn = "\r\x1b[Kcaldrix: weights: 50 %\r\x1b[K" if animated else ""
    assert screen.shown == f"caldrix: loading\r\n{drawn}answer\r\n"


@pytest.mark.parametrize(
    ("piped", "shown"),
    [(False, "half\r\ncaldrix: by the way\r\n an answer\r\n"), (True, "caldrix: by the way\r\n")],
)
def test_a_notice_within_an_answer_has_a_line_of_its_own_where_both_are_on_the_screen(
    home: Home, piped: bool, shown: str
) -> None:
    def noticed(talk: Talk, request: Message) -> None:
        talk.send(Delta("half"), Notice("notice/x", "by the way", {}))
        say(talk, " an answer")

    reading, writing = os.pipe()
    out = writing if piped else None
    with Peer(home.address, Model(noticed)), Screen(home, "run", "demo", "-p", "x", out=out) as screen:
        assert screen.end() == 0
    os.close(writing)
    with open(reading, "rb") as answer:
        assert answer.read() == (b"half an answer\n" if piped else b"")
    assert screen.shown == shown


def test_a_redirected_stderr_is_not_animated(home: Home) -> None:
    errors = home.path / "errors"
    with (
        Peer(home.address, loading),
        errors.open("wb") as file,
        Screen(home, "run", "demo", "-p", "x", err=file.fileno()) as screen,
    ):
        assert screen.end() == 0
    assert (screen.shown, errors.read_text()) == ("answer\r\n", "caldrix: loading\n")


def test_quiet_drops_status_lines_and_no_refusal(home: Home) -> None:
    with Peer(home.address, loading), Screen(home, "run", "demo", "-p", "x", "--quiet") as screen:
        assert screen.end() == 0
    assert screen.shown == "answer\r\n"
    result = home.caldrix("run", "./nowhere", "-p", "x", "-q")
    assert result == (1, "", "caldrix: ./nowhere: no such directory\n")
    with Peer(home.address, Model("x", template=False)):
        notice = home.caldrix("run", "demo", "-p", "x", "-q").err
    assert notice.startswith("caldrix: this model has no chat template;")


def test_json_lines_of_a_piped_chat_can_be_read_one_by_one(home: Home) -> None:
    with Peer(home.address, Model("a\nb", "c")):
        result = home.caldrix("run", "demo", "--json", typed=b"1\n2\n")
    assert [json.loads(line)["text"] for line in result.out.splitlines()] == ["a\nb", "c"]


def test_a_name_from_a_file_system_cannot_act_on_a_terminal(home: Home) -> None:
    with Screen(home, "run", "./\x1b]52;c;QQ==\x07", "-p", "x") as screen:
        assert screen.end() == 1
    assert screen.shown == "caldrix: ./\\x1b]52;c;QQ==\\x07: no such directory\r\n"


def test_an_editor_is_not_imported_where_nobody_types(home: Home) -> None:
    code = (
        "import sys; from caldrix_client.main import run; sys.argv = ['caldrix', 'run', 'demo']\n"
        "run(); sys.exit('prompt_toolkit' in sys.modules)"
    )
    with Peer(home.address, Model("a")):
        done = subprocess.run(
            (sys.executable, "-c", code),
            env=home.environment | {"PYTHONPATH": IMPORTS},
            input=b"hi\n",
            capture_output=True,
        )
    assert (done.returncode, done.stdout) == (0, b"a\n")
