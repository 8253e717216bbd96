"""`pull` and `models` as processes against a scripted daemon: what they send, and what they show."""

from __future__ import annotations

import signal
import threading

import pytest

from caldrix_client.parse import Command, Help, Models, Pull, parse
from caldrix_protocol.connection import as_refusal, as_status
from caldrix_protocol.messages import Done, Known, Message, Plan, Removal, Remove, Verdict
from caldrix_protocol.messages import Pull as PullRequest
from caldrix_protocol.refusals import Refused
from tests.support.cli import SECONDS, Home, Screen, finish
from tests.support.peer import Peer, Script, Talk

MIB = 1 << 20
VERDICT = Verdict(
    "demo",
    "cpu",
    2048,
    8192,
    600 * MIB,
    8,
    1230 * MIB,
    900 * MIB,
    256 * MIB,
    1,
    257 * MIB,
    54 * MIB,
    90 * MIB,
    5 * MIB,
    0,
    MIB,
)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (["pull", "m"], Pull("m", False, False)),
        (["pull", "--plain", "m", "-q"], Pull("m", True, True)),
        (["pull", "--help"], Help("pull")),
        (["models", "list"], Models("list")),
        (["models", "pin"], Models("pin")),
        (["models", "-h"], Help("models")),
        (["models", "list", "-h"], Help("models list")),
        (["models", "plan", "m"], Models("plan", "m")),
        (
            ["models", "plan", "m", "--ctx=9", "--backend", "cpu", "--threads", "2", "--dtype", "bf16"],
            Models("plan", "m", 9, "cpu", 2, dtype="bf16"),
        ),
        (["models", "rm", "m"], Models("rm", "m")),
        (["models", "rm", "-y", "m"], Models("rm", "m", yes=True)),
    ],
)
def test_a_command_line_means(line: list[str], command: Command) -> None:
    parsed = parse(line)
    assert type(parsed) is type(command)
    assert parsed == command


def sending(*messages: Message) -> Script:
    return lambda talk, request: talk.send(*messages)


def test_pull_shows_what_the_daemon_says(home: Home) -> None:
    said = as_status("status/downloaded", file="a\x1b", size="3 MB")
    with Peer(home.address, sending(said, Done())) as peer:
        result = home.caldrix("pull", "a/b", HF_HOME="/data/hf")
    assert result == (0, "", "caldrix: downloaded a\\x1b (3 MB)\n")
    (request,) = peer.requests
    assert (type(request), request.model) == (PullRequest, "a/b")
    assert request.environment["HF_HOME"] == "/data/hf"


def test_ctrl_c_ends_a_pull(home: Home) -> None:
    asked = threading.Event()
    with Peer(home.address, lambda talk, request: asked.set()) as peer:
        process = home.start("pull", "a/b")
        assert asked.wait(SECONDS)
        process.send_signal(signal.SIGINT)
        assert finish(process).status == 130
        assert peer.gone.wait(SECONDS)


def test_a_plan_is_a_table_of_the_verdict(home: Home) -> None:
    with Peer(home.address, sending(VERDICT, Done())) as peer:
        result = home.caldrix("models", "plan", "demo", "--ctx", "2048")
    assert result == (
        0,
        "verdict       fits         on the cpu lane\n"
        "context       2048 tokens  the largest that would fit is 8192\n"
        "memory        629 MB       944 MB are free\n"
        "  at once     1.29 GB      for 8 conversations, each with a full context\n"
        "  weights     269 MB       as the lane holds them\n"
        "  state       94.4 MB      of a full context\n"
        "  buffers     5.24 MB      of a step\n"
        "  loading     56.6 MB      before state and buffers, in their place\n"
        "  vocabulary  1 B\n"
        "  process     268 MB       of a worker without a model, and its encoder\n"
        "disk          0 B          to come; 1.05 MB are free\n",
        "",
    )
    assert peer.requests == [Plan("demo", peer.requests[0].environment, ctx=2048)]


def test_a_plan_asks_with_the_flags_of_a_run(home: Home) -> None:
    flags = "--ctx=9 --backend cpu --dtype=bf16 --threads=1 --max-batch 1 --cpu-isa=x86-64-v3 --cpu-kernels=c"
    with Peer(home.address, sending(VERDICT._replace(max_batch=1), Done())) as peer:
        result = home.caldrix("models", "plan", "demo", *flags.split())
        assert home.caldrix("models", "plan", "demo", "--max-context", "9").status == 0
    assert "  at once     1.29 GB      for 1 conversation\n" in result.out
    environment = peer.requests[0].environment
    assert peer.requests == [
        Plan("demo", environment, "cpu", 9, "bf16", 1, 1, "x86-64-v3", "c"),
        Plan("demo", environment, ctx=9),
    ]


@pytest.mark.parametrize(
    ("flags", "contexts", "status"),
    [((), [64, None], 0), (("--ctx", "100"), [64], 1), (("--ctx", "40"), [40], 1)],
)
def test_a_bound_of_a_plan_asks_for_no_context(
    home: Home, flags: tuple[str, ...], contexts: list[int], status: int
) -> None:
    def made_for_32(talk: Talk, request: Plan) -> None:
        if request.ctx is None:
            talk.send(VERDICT, Done())
        else:
            talk.send(as_refusal(Refused("run/ctx-too-long", ctx=request.ctx, limit=32)))

    with Peer(home.address, made_for_32) as peer:
        result = home.caldrix("models", "plan", "m", "--max-context", "64", *flags)
    assert [request.ctx for request in peer.requests] == contexts
    assert result.status == status
    if flags:
        assert result.err == f"caldrix: --ctx {flags[1]} is over the 32 tokens this model was made for\n"


def test_a_list_is_a_table(home: Home) -> None:
    known = (
        Known("one", "a/b", "0123456789abcdef0123456789abcdef01234567", "MIT", 269_000_000, "whole"),
        Known("two", "a/c", "main", "", 5_000_000, "part"),
        Known("", "a/\x1bd", "", "", 0, ""),
    )
    with Peer(home.address, sending(*known, Done())):
        result = home.caldrix("models", "list")
    assert result == (
        0,
        "ALIAS  REPO     REVISION         CACHE              LICENCE\n"
        "one    a/b      0123456789ab     269 MB             MIT\n"
        "two    a/c      main (unpinned)  5 MB (incomplete)  -\n"
        "-      a/\\x1bd  -                -                  -\n",
        "",
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/cache/models--a--b", "a/b: /cache/models--a--b has 3 MB, with all revisions of the repo\r"),
        ("/cache/models/smollm2", "a/b: /cache/models/smollm2 has 3 MB\r"),
    ],
)
def test_rm_says_what_it_removes(home: Home, path: str, words: str) -> None:
    with (
        Peer(home.address, sending(Removal(path, 3_000_000), Done())),
        Screen(home, "models", "rm", "a/b") as screen,
    ):
        screen.expect(words)
        screen.press("\r")
        screen.expect("nothing was removed")


def removal(talk: Talk, request: Message) -> None:
    talk.send(Removal("/cache/models--a--b", 3_000_000), Done())


@pytest.mark.parametrize(("typed", "sent"), [("y\r", [False, True]), ("n\r", [False]), ("\x04", [False])])
def test_rm_asks_in_a_terminal(home: Home, typed: str, sent: list[bool]) -> None:
    with Peer(home.address, removal) as peer, Screen(home, "models", "rm", "a/b") as screen:
        screen.expect("a/b: /cache/models--a--b has 3 MB, with all revisions of the repo")
        screen.expect("remove it? [y/N]")
        screen.ready()
        screen.press(typed)
        screen.expect("removed; 3 MB are free again" if True in sent else "nothing was removed")
        assert screen.end() == 0
    assert [request.really for request in peer.requests] == sent
    assert all(type(request) is Remove for request in peer.requests)


def test_yes_is_not_asked_for(home: Home) -> None:
    with Peer(home.address, removal) as peer:
        result = home.caldrix("models", "rm", "a/b", "--yes")
    assert result == (0, "", "caldrix: a/b: removed; 3 MB are free again\n")
    assert [request.really for request in peer.requests] == [False, True]
