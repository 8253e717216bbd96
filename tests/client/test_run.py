"""`caldrix run` as a process against a scripted daemon on a real socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from caldrix_protocol.connection import as_refusal
from caldrix_protocol.messages import (
    Delta,
    Done,
    Generate,
    Hello,
    Message,
    Notice,
    Open,
    Progress,
    Refusal,
    Status,
    Welcome,
)
from caldrix_protocol.refusals import Refused, sentence
from tests.support.cli import COMMAND, SECONDS, Home, finish
from tests.support.peer import TIMINGS, Model, Peer, Script, Talk, say, texts


def opened(peer: Peer) -> Open:
    request: Open = peer.requests[0]
    return request


def generated(peer: Peer) -> list[Generate]:
    return [request for request in peer.requests if type(request) is Generate]


def test_the_answer_alone_is_on_stdout(home: Home) -> None:
    with Peer(home.address, Model(["The capital ", "is Paris."])) as peer:
        result = home.caldrix("run", "demo", "-p", "Where?", "--system", "Be brief")
    assert result == (0, "The capital is Paris.\n", "")
    assert texts(generated(peer)[0]) == [("system", "Be brief"), ("user", "Where?")]
    assert generated(peer)[0].max_tokens is None


@pytest.mark.parametrize(
    ("pieces", "out"),
    [(["ends\n"], "ends\n"), (["two\n\n"], "two\n\n"), ([], "\n"), (["\x1b[31m\r\x00"], "\x1b[31m\r\x00\n")],
)
def test_an_answer_ends_with_a_newline_and_a_pipe_gets_it_untouched(
    home: Home, pieces: list[str], out: str
) -> None:
    with Peer(home.address, Model(pieces)):
        assert home.caldrix("run", "demo", "-p", "x").out.encode() == out.encode()


def test_flags_and_environment_travel_with_open(home: Home) -> None:
    flags = ("--ctx", "64", "--backend", "cpu", "--threads", "2", "--dtype", "bf16", "--max-tokens", "5")
    cpu = ("--max-batch", "1", "--cpu-isa", "x86-64-v3", "--cpu-kernels", "c")
    with Peer(home.address, Model("x")) as peer:
        home.caldrix("run", "demo", "-p", "hi", *flags, *cpu, HF_HOME="/hf", SECRET="no")
    request = opened(peer)
    assert request[0] == "demo"
    assert request[2:] == ("cpu", 64, "bf16", 2, 1, "x86-64-v3", "c")
    assert request.environment["HF_HOME"] == "/hf"
    assert "SECRET" not in request.environment
    assert generated(peer)[0].max_tokens == 5


def of_version_1_0(talk: Talk, greeting: Hello) -> None:
    talk.send(Welcome((1, 0), "0.1.0", os.getpid()))


def test_an_older_daemon_is_asked_what_it_knows(home: Home) -> None:
    with Peer(home.address, Model("x"), of_version_1_0) as peer:
        assert home.caldrix("run", "demo", "-p", "hi", "--ctx", "64").status == 0
        result = home.caldrix("run", "demo", "-p", "hi", "--max-batch", "1")
    assert (opened(peer).ctx, len(generated(peer))) == (64, 1)
    assert result == (
        1,
        "",
        "caldrix: caldrixd speaks protocol 1.0 and this client 1.1; "
        "run `caldrix stop --daemon` and try again\n",
    )


def test_status_lines_go_to_stderr_and_progress_to_terminals_only(home: Home) -> None:
    def load(talk: Talk, request: Message) -> None:
        if type(request) is Open:
            talk.send(
                Status("status/backend", "backend cpu (auto; `caldrix doctor` shows why)", {}),
                Progress("weights", 1, 2),
                Notice("notice/x", "two\nlines \x1b[2J", {}),
            )
        Model("yes")(talk, request)

    with Peer(home.address, load):
        result = home.caldrix("run", "demo", "-p", "hi")
    assert result == (
        0,
        "yes\n",
        "caldrix: backend cpu (auto; `caldrix doctor` shows why)\ncaldrix: two\n  lines \\x1b[2J\n",
    )


def test_a_directory_wins_and_travels_as_an_absolute_path(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.path / "demo").mkdir()
    monkeypatch.chdir(home.path)
    with Peer(home.address, Model("a", "b")) as peer:
        home.caldrix("run", "demo", "-p", "x")
        home.caldrix("run", "./demo/../demo", "-p", "x")
    assert [request.model for request in peer.requests if type(request) is Open] == [
        os.path.join(os.getcwd(), "demo")
    ] * 2


def test_a_path_that_is_no_directory_is_refused_without_the_daemon(home: Home) -> None:
    with Peer(home.address, Model()) as peer:
        for name in ("./nope", "../nope", "/nope", "~nope"):
            assert home.caldrix("run", name, "-p", "x") == (1, "", f"caldrix: {name}: no such directory\n")
    assert peer.requests == []


def test_the_client_reads_the_system_file(home: Home) -> None:
    file = home.path / "system.txt"
    file.write_bytes("Sei knapp. é\n\n".encode())
    with Peer(home.address, Model("a", "b")) as peer:
        home.caldrix("run", "demo", "-p", "x", "--system", f"@{file}")
        home.caldrix("run", "demo", "-p", "x", "--system", "@@literal")
    assert [texts(request)[0] for request in generated(peer)] == [
        ("system", "Sei knapp. é\n"),
        ("system", "@literal"),
    ]


def test_a_system_file_that_is_no_text_is_a_usage_error(home: Home) -> None:
    file = home.path / "x"
    missing = home.caldrix("run", "demo", "-p", "x", "--system", f"@{file}")
    assert missing == (2, "", f"caldrix: --system cannot read {file}: No such file or directory\n")
    file.write_bytes(b"\xff")
    assert home.caldrix("run", "demo", "-p", "x", "--system", f"@{file}") == (
        2,
        "",
        f"caldrix: {file} is not valid UTF-8\n",
    )
    assert not home.log.exists()


def test_raw_sends_plain_text(home: Home) -> None:
    with Peer(home.address, Model("x")) as peer:
        home.caldrix("run", "demo", "-p", "<|im_start|>hi", "--raw")
    request = generated(peer)[0]
    assert request.turns is None
    assert request.raw == ({"type": "text", "text": "<|im_start|>hi"},)
    assert request.max_tokens is None


def test_a_model_without_a_template_gets_plain_text_and_a_limit(home: Home) -> None:
    with Peer(home.address, Model("x", "y", template=False)) as peer:
        result = home.caldrix("run", "demo", "-p", "hi", "--system", "S")
        home.caldrix("run", "demo", "-p", "hi", "--max-tokens", "9")
    assert result.err == (
        f"caldrix: {sentence('notice/no-template')}\ncaldrix: {sentence('notice/no-system')}\n"
    )
    assert generated(peer)[0].raw == ({"type": "text", "text": "hi"},)
    assert [request.max_tokens for request in generated(peer)] == [256, 9]


def test_json_is_one_object(home: Home) -> None:
    def answer(talk: Talk, request: Message) -> None:
        say(talk, "é\x1b", "!", ids=(4, 5), prompt_ids=(1, 2), dropped_turns=2)

    with Peer(home.address, Model(answer)):
        result = home.caldrix("run", "demo", "-p", "x", "--json")
    assert result.out.count("\n") == 1
    assert "\x1b" not in result.out
    assert json.loads(result.out) == {
        "text": "é\x1b!",
        "ids": [4, 5],
        "prompt_ids": [1, 2],
        "finish_reason": "stop",
        "dropped_turns": 2,
        "seed": None,
        "timings": TIMINGS._replace(load_seconds=1.5)._asdict(),
    }
    assert result.err == f"caldrix: {sentence('notice/dropped-turns', count=2)}\n"


def test_stats_are_one_line_on_stderr(home: Home) -> None:
    with Peer(home.address, Model("x")):
        result = home.caldrix("run", "demo", "-p", "x", "--stats")
    assert result == (
        0,
        "x\n",
        "caldrix: load 1.50 s; prompt 10 tokens (2 cached), 16.0 tokens/s; "
        "reply 20 tokens, 9.5 tokens/s; first token after 0.250 s\n",
    )


def refusing(code: str, kind: str, *before: str) -> Script:
    def answer(talk: Talk, request: Message) -> None:
        talk.send(*map(Delta, before), Refusal(code, kind, "it will \x1b not", {}))

    return answer


@pytest.mark.parametrize(("kind", "status"), [("run", 1), ("message", 1), ("image", 2), ("usage", 2)])
def test_the_kind_of_a_refusal_decides_the_status_even_of_an_unknown_row(
    home: Home, kind: str, status: int
) -> None:
    with Peer(home.address, Model(refusing("new/row", kind))):
        assert home.caldrix("run", "demo", "-p", "x") == (status, "", "caldrix: it will \\x1b not\n")


def test_a_refusal_after_some_text_ends_the_line_first(home: Home) -> None:
    with Peer(home.address, Model(refusing("worker/died", "run", "half an ans"))):
        assert home.caldrix("run", "demo", "-p", "x") == (1, "half an ans\n", "caldrix: it will \\x1b not\n")


def test_a_refused_open_ends_the_run(home: Home) -> None:
    def refuse(talk: Talk, request: Message) -> None:
        talk.send(as_refusal(Refused("config/missing", field="hidden_size")))

    with Peer(home.address, refuse):
        assert home.caldrix("run", "demo", "-p", "x") == (1, "", "caldrix: config.json lacks hidden_size\n")


def test_a_daemon_that_vanishes_mid_answer_is_one_sentence(home: Home) -> None:
    def vanish(talk: Talk, request: Message) -> None:
        talk.send(Delta("half"))
        talk.stream.shutdown(2)

    with Peer(home.address, Model(vanish)):
        assert home.caldrix("run", "demo", "-p", "x") == (
            1,
            "half\n",
            "caldrix: caldrixd closed the connection before the request ended\n",
        )


def test_bytes_that_are_no_protocol_are_one_sentence(home: Home) -> None:
    def babble(talk: Talk, request: Message) -> None:
        talk.stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with Peer(home.address, babble):
        result = home.caldrix("run", "demo", "-p", "x")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("caldrix: the peer sent a frame that cannot be read: ")
    assert result.err.count("\n") == 1


class Endless:
    """Answers with one word, then waits for the cancel."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.heard: list[Message | None] = []

    def __call__(self, talk: Talk, request: Message) -> None:
        talk.send(Delta("word"))
        self.asked.set()
        self.heard.append(talk.receive())
        talk.send(Delta(" last"), Done("cancelled"))


def test_ctrl_c_cancels_and_ends_with_130(home: Home) -> None:
    endless = Endless()
    with Peer(home.address, Model(endless)):
        process = home.start("run", "demo", "-p", "x", "--json")
        assert endless.asked.wait(SECONDS)
        process.send_signal(signal.SIGINT)
        result = finish(process)
    assert [type(message).__name__ for message in endless.heard] == ["Cancel"]
    assert result.status == 130
    assert json.loads(result.out)["text"] == "word last"
    assert json.loads(result.out)["finish_reason"] == "cancelled"
    assert result.err == ""


def test_ctrl_c_while_loading_cancels_and_ends_with_130(home: Home) -> None:
    def load(talk: Talk, request: Message) -> None:
        talk.send(Status("status/loading", "loading", {}))
        assert type(talk.receive()).__name__ == "Cancel"
        talk.send(Done("cancelled"))

    with Peer(home.address, load):
        process = home.start("run", "demo", "-p", "x")
        assert process.stderr is not None
        assert process.stderr.readline() == b"caldrix: loading\n"
        process.send_signal(signal.SIGINT)
        assert finish(process) == (130, "", "")


def test_a_second_ctrl_c_does_not_wait_for_the_daemon(home: Home) -> None:
    def deaf(talk: Talk, request: Message) -> None:
        talk.send(Delta("word\n"))
        talk.receive()
        talk.send(Delta("cancelling\n"))
        talk.receive()

    with Peer(home.address, Model(deaf)) as peer:
        process = home.start("run", "demo", "-p", "x")
        assert process.stdout is not None
        assert process.stdout.readline() == b"word\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"cancelling\n"
        process.send_signal(signal.SIGINT)
        assert finish(process) == (130, "", "")
        assert peer.gone.wait(SECONDS)


def test_a_reader_that_stops_ends_the_run_quietly(home: Home) -> None:
    def pour(talk: Talk, request: Message) -> None:
        while True:
            talk.send(Delta("line\n" * 1000))

    with Peer(home.address, Model(pour)) as peer:
        process = home.start("run", "demo", "-p", "x")
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        assert finish(process).status == 141
        assert peer.gone.wait(SECONDS)


def test_a_full_disk_is_a_sentence(home: Home) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with Peer(home.address, Model("x")), full.open("wb") as out:
        process = home.start("run", "demo", "-p", "x", out=out.fileno())
        result = finish(process)
    assert (result.status, result.err) == (
        1,
        "caldrix: standard output cannot be written: No space left on device\n",
    )


def test_piped_lines_are_messages_of_one_conversation(home: Home) -> None:
    with Peer(home.address, Model("one", "two\n", "three")) as peer:
        result = home.caldrix("run", "demo", typed="first\r\n\n   \nsécond\n/reset\nthird".encode())
    assert result == (0, "one\ntwo\nthree\n", "caldrix: the conversation is cleared\n")
    assert [texts(request) for request in generated(peer)] == [
        [("user", "first")],
        [("user", "first"), ("assistant", "one"), ("user", "sécond")],
        [("user", "third")],
    ]


def test_a_refused_line_does_not_end_the_chat_but_shows_in_the_status(home: Home) -> None:
    with Peer(home.address, Model(refusing("message/too-long", "message"), "fine")) as peer:
        result = home.caldrix("run", "demo", typed=b"long\n/what is it\n\xff\xfe\nshort\n")
    assert result == (
        1,
        "fine\n",
        "caldrix: it will \\x1b not\n"
        "caldrix: unknown command /what; /help lists all, and // begins a message with a slash\n"
        "caldrix: this line is not valid UTF-8, so it was not sent\n",
    )
    assert texts(generated(peer)[-1]) == [("user", "short")]


def test_dropped_turns_are_not_sent_again(home: Home) -> None:
    def drop(talk: Talk, request: Message) -> None:
        say(talk, "c", dropped_turns=2)

    with Peer(home.address, Model("a", "b", drop, "d")) as peer:
        result = home.caldrix("run", "demo", typed=b"1\n2\n3\n4\n")
    assert result.err == "caldrix: the conversation outgrew the context; the 2 oldest turns were dropped\n"
    assert texts(generated(peer)[-1]) == [
        ("user", "2"),
        ("assistant", "b"),
        ("user", "3"),
        ("assistant", "c"),
        ("user", "4"),
    ]


def test_a_daemon_that_says_it_dropped_turns_is_not_echoed(home: Home) -> None:
    def drop(talk: Talk, request: Message) -> None:
        talk.send(Notice("notice/dropped-turns", "gone", {}))
        say(talk, "c", dropped_turns=2)

    with Peer(home.address, Model(drop)):
        assert home.caldrix("run", "demo", "-p", "x").err == "caldrix: gone\n"


def test_a_notice_that_is_true_of_every_answer_is_said_once(home: Home) -> None:
    def noticed(talk: Talk, request: Message) -> None:
        talk.send(Notice("notice/system-in-user", sentence("notice/system-in-user"), {}))
        say(talk, "x")

    with Peer(home.address, Model(noticed, noticed)):
        result = home.caldrix("run", "demo", "--system", "S", typed=b"1\n2\n")
    assert result == (0, "x\nx\n", f"caldrix: {sentence('notice/system-in-user')}\n")


def test_an_end_of_input_without_a_line_answers_nothing(home: Home) -> None:
    with Peer(home.address, Model()):
        assert home.caldrix("run", "demo") == (0, "", "")


def test_a_huge_message_arrives_whole(home: Home) -> None:
    message = "wörd " * 400_000
    heard = []

    def hear(talk: Talk, request: Message) -> None:
        heard.append(talk.blobs[0].decode())
        say(talk, "ok")

    with Peer(home.address, Model(hear)):
        assert home.caldrix("run", "demo", typed=message.encode()).out == "ok\n"
    assert heard == [message]


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (("run", ".", "-p", "x"), {}, "."),
        (("stop", "."), {}, "."),
        (("run", "demo", "-p", "x"), {"HF_HOME": "cache"}, "cache"),
    ],
)
def test_nothing_is_named_from_a_deleted_working_directory(
    home: Home, arguments: tuple[str, ...], variables: dict[str, str], named: str
) -> None:
    gone = home.path / "gone"
    gone.mkdir()
    code = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
    command = [sys.executable, "-c", code, str(gone), *COMMAND, *arguments]
    with Peer(home.address, Model()):
        done = subprocess.run(
            command, env=home.environment | variables, capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"caldrix: {named}: no such directory\n"


@pytest.mark.parametrize(
    ("flags", "asked", "status"),
    [
        (("--max-context", "64"), [64, None], 0),
        (("--max-context", "64", "--ctx", "96"), [64], 1),
        (("--max-context", "96", "--ctx", "64"), [64], 1),
        (("--max-context", "4096"), [None], 0),
    ],
)
def test_max_context_asks_a_small_model_for_no_more_than_it_has(
    home: Home, flags: tuple[str, ...], asked: list[int | None], status: int
) -> None:
    def made_for_20(talk: Talk, request: Message) -> None:
        if type(request) is Open and request.ctx is not None:
            talk.send(as_refusal(Refused("run/ctx-too-long", ctx=request.ctx, limit=20)))
        else:
            Model("x")(talk, request)

    with Peer(home.address, made_for_20) as peer:
        result = home.caldrix("run", "demo", "-p", "x", *flags)
    assert [request.ctx for request in peer.requests if type(request) is Open] == asked
    assert result.status == status
    if status:
        wanted = flags[flags.index("--ctx") + 1]
        assert result.err == f"caldrix: {sentence('run/ctx-too-long', ctx=wanted, limit=20)}\n"
