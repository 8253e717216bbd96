"""The commands of a chat, each with a value, `off`, nothing and nonsense, against a scripted daemon."""

from __future__ import annotations

import os

import pytest

from caldrix_client.chat import ACTIONS, KNOBS
from caldrix_client.slash import COMMANDS, help_text
from caldrix_protocol.messages import Done, Generate, Message, Refusal
from tests.support.cli import Home, Screen
from tests.support.peer import TIMINGS, Model, Peer, Talk, say, texts


def conversations(peer: Peer) -> list[list[tuple[str, str]]]:
    return [texts(request) for request in peer.requests if type(request) is Generate]


def chat(home: Home, model: Model, *lines: str, flags: tuple[str, ...] = ()) -> tuple[Peer, int, str, str]:
    """A chat of these lines through a pipe: the daemon's end, the status, stdout and stderr."""
    with Peer(home.address, model) as peer:
        result = home.caldrix("run", "demo", *flags, typed="".join(f"{line}\n" for line in lines).encode())
    return peer, *result


def said(*sentences: str) -> str:
    return "".join(f"caldrix: {text}\n" for text in sentences)


def test_every_command_has_its_action_and_its_line_in_the_help() -> None:
    obeyed = {name for name, command in COMMANDS.items() if command.refused is None}
    assert obeyed == {*ACTIONS, *KNOBS}
    assert all(f"\n{name} " in help_text() for name in obeyed)
    assert "/image" not in help_text()
    assert max(map(len, help_text().splitlines())) < 78, "with what it is indented by"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/reset it", "/reset takes nothing, got it"),
        ("/clear it", "/clear takes nothing, got it"),
        ("/undo 2", "/undo takes nothing, got 2"),
        ("/undo", "nothing was said yet"),
        ("/regen", "nothing was said yet"),
        ("/image cat.png", "/image is not available yet in this version"),
        (
            "/temprature 1",
            "unknown command /temprature; the nearest is /temperature, /help lists all, and // begins a "
            "message with a slash",
        ),
        (
            "/Reset",
            "unknown command /Reset; the nearest is /reset, /help lists all, and // begins a message with a "
            "slash",
        ),
        ("/system @nowhere", "/system cannot read nowhere: No such file or directory"),
        ("/system @a\0b", "/system cannot read a\\x00b: embedded null byte"),
        ("/top-p 2", "/top-p must be a number over 0 and at most 1, got 2"),
        ("/top-k many", f"/top-k must be an integer from 0 to {2**31 - 1}, got many"),
    ],
)
def test_a_command_that_cannot_be_obeyed_is_not_sent_and_the_chat_goes_on(
    home: Home, line: str, words: str
) -> None:
    peer, status, out, err = chat(home, Model("fine"), line, "hi")
    assert (status, out, err) == (1, "fine\n", said(words))
    assert conversations(peer) == [[("user", "hi")]]


def test_two_slashes_begin_a_message_with_one(home: Home) -> None:
    peer, status, _, _ = chat(home, Model("a"), "//etc is a directory")
    assert status == 0
    assert conversations(peer) == [[("user", "/etc is a directory")]]


def test_reset_clears_the_conversation_and_keeps_system_and_sampling(home: Home) -> None:
    peer, _, _, err = chat(
        home, Model("one", "two"), "/temperature 0.5", "a", "/reset", "b", flags=("--system", "S")
    )
    assert err == said("temperature 0.5", "the conversation is cleared")
    assert conversations(peer)[1] == [("system", "S"), ("user", "b")]
    assert peer.requests[-1].temperature == 0.5


def test_undo_takes_the_last_exchange_back(home: Home) -> None:
    peer, status, _, err = chat(home, Model("A", "B", "C"), "a", "b", "/undo", "c", "/undo", "/undo")
    words = "the last message and its answer are taken back; exchanges left: {}"
    assert (status, err) == (0, said(*map(words.format, (1, 1, 0))))
    assert conversations(peer)[2] == [("user", "a"), ("assistant", "A"), ("user", "c")]


def test_regen_answers_the_last_message_again(home: Home) -> None:
    peer, _, out, _ = chat(home, Model("A", "B", "B2", "C"), "a", "b", "/regen", "c")
    assert out == "A\nB\nB2\nC\n"
    assert conversations(peer)[2] == conversations(peer)[1]
    assert conversations(peer)[3][2:] == [("user", "b"), ("assistant", "B2"), ("user", "c")]


def test_regen_keeps_the_answer_that_no_other_replaces(home: Home) -> None:
    def refuse(talk: Talk, request: Message) -> None:
        talk.send(Refusal("x/y", "message", "no", {}))

    def silent(talk: Talk, request: Message) -> None:
        talk.send(Done("stop"))

    peer, *_ = chat(home, Model("A", refuse, silent, "C"), "a", "/regen", "/regen", "c")
    assert conversations(peer)[3] == [("user", "a"), ("assistant", "A"), ("user", "c")]


def test_system_is_set_shown_and_taken_away(home: Home) -> None:
    file = home.path / "system"
    file.write_text("from a file\n")
    peer, status, _, err = chat(
        home,
        Model("A", "B", "C"),
        "/system",
        "/system  be brief ",
        "a",
        f"/system @{file}",
        "b",
        "/system off",
        "c",
    )
    assert (status, err) == (
        0,
        said("system off", "system be brief", "system from a file", "system off"),
    )
    assert [spoken[0] for spoken in conversations(peer)] == [
        ("system", "be brief"),
        ("system", "from a file"),
        ("user", "a"),
    ]


def _one_turn_and_out(screen: Screen) -> None:
    """The chat still answers, and ends with status 0."""
    screen.press("hi\n")
    screen.expect("ok\r\n")
    screen.ready()
    screen.press("\x04")
    assert screen.end() == 0


def test_ctrl_c_while_the_system_message_is_waited_for_leaves_it_as_it_was(home: Home) -> None:
    os.mkfifo(home.path / "pipe")
    with Peer(home.address, Model("ok")) as peer, Screen(home, "run", "demo", "--system", "S") as screen:
        screen.ready()
        screen.press(f"/system @{home.path}/pipe\n")
        with open(home.path / "pipe", "wb"):  # once the command has opened it
            screen.press("\x03")
            screen.ready()
        _one_turn_and_out(screen)
    assert conversations(peer) == [[("system", "S"), ("user", "hi")]]


def test_system_where_none_is_sent_is_refused(home: Home) -> None:
    _, _, _, err = chat(home, Model(), "/system x", flags=("--raw",))
    assert err == said("/system needs the chat template, which --raw leaves out")
    _, _, _, err = chat(home, Model(template=False), "/system x")
    assert err.endswith(said("this model has no chat template; the system message is not sent"))


@pytest.mark.parametrize(
    ("name", "typed", "shown", "usual", "value"),
    [
        ("temperature", "0.7", "0.7", "0", 0.7),
        ("top-k", "40", "40", "0", 40),
        ("top-p", "0.9", "0.9", "1", 0.9),
        ("min-p", "0.05", "0.05", "0", 0.05),
        ("repetition-penalty", "1.1", "1.1", "1", 1.1),
        ("seed", "7", "7", "off", 7),
    ],
)
def test_a_knob_takes_a_value_off_or_nothing(
    home: Home, name: str, typed: str, shown: str, usual: str, value: float
) -> None:
    field = name.replace("-", "_")
    peer, status, _, err = chat(
        home, Model("A", "B", "C"), f"/{name}", "a", f"/{name} {typed}", f"/{name}", "b", f"/{name} off", "c"
    )
    assert (status, err) == (
        0,
        said(f"{name} {usual}", f"{name} {shown}", f"{name} {shown}", f"{name} {usual}"),
    )
    sent = [getattr(request, field) for request in peer.requests if type(request) is Generate]
    assert sent[1] == value
    assert sent[0] == sent[2] == Generate._field_defaults[field]


def test_sampling_shows_all_six_on_one_line(home: Home) -> None:
    _, _, _, err = chat(home, Model(), "/seed 5", "/sampling", flags=("--temperature", "1"))
    assert err.splitlines()[1:] == [
        "caldrix: temperature 1, top-k 0, top-p 1, min-p 0, repetition-penalty 1, seed 5"
    ]


def test_context_counts_used_reserved_and_free(home: Home) -> None:
    def answer(talk: Talk, request: Message) -> None:
        say(talk, "x", timings=TIMINGS._replace(prompt_tokens=30, reply_tokens=10))

    line = "the context holds 100 tokens: {} used, {} reserved for the answer, {} free"
    lines = ("/context", "a", "/context", "/undo", "/context")
    _, _, _, err = chat(home, Model(answer), *lines, flags=("--ctx", "100"))
    assert err.splitlines()[::2] == [
        "caldrix: " + line.format(0, 25, 75),
        "caldrix: the last message and its answer are taken back; exchanges left: 0",
    ]
    assert err.splitlines()[1] == "caldrix: " + line.format(40, 25, 35)
    _, _, _, err = chat(home, Model(), "/context", flags=("--ctx", "100", "--max-tokens", "80"))
    assert err == said(line.format(0, 50, 50))


def test_an_answer_that_fills_the_context_says_so(home: Home) -> None:
    def full(talk: Talk, request: Message) -> None:
        say(talk, "x", finish_reason="length", ids=(1, 2, 3))

    words = said(
        "the context of 64 tokens is full, so the answer ends here; a larger --ctx holds more, "
        "up to what the model was made for"
    )
    assert chat(home, Model(full), "a", flags=("--ctx", "64"))[3] == words
    assert chat(home, Model(full), "a", flags=("--ctx", "64", "--max-tokens", "9"))[3] == words
    assert chat(home, Model(full), "a", flags=("--ctx", "64", "--max-tokens", "3"))[3] == ""


def test_a_block_is_one_message_and_never_a_command(home: Home) -> None:
    peer, status, _, _ = chat(
        home, Model("A", "B", "C"), '"""', "one", "", "/reset", '"""', '"""/help"""', '"""two', 'lines"""  '
    )
    assert status == 0
    assert [spoken[-1] for spoken in conversations(peer)] == [
        ("user", "one\n\n/reset"),
        ("user", "/help"),
        ("user", "two\nlines"),
    ]


def test_a_block_that_is_refused_is_refused_whole(home: Home) -> None:
    with Peer(home.address, Model("A")) as peer:
        typed = b'"""\nline\n\xff\nline"""\nfine\n"""open\nlines\n'
        result = home.caldrix("run", "demo", typed=typed)
    assert result == (
        1,
        "A\n",
        said(
            "this line is not valid UTF-8, so it was not sent",
            'the input ended inside a """ block, so it was not sent',
        ),
    )
    assert conversations(peer) == [[("user", "fine")]]


def test_commands_at_a_terminal_leave_its_status_0(home: Home) -> None:
    with Peer(home.address, Model("ok")) as peer, Screen(home, "run", "demo") as screen:
        for line, words in (
            ("/help", "/reset "),
            ("/set", "caldrix: unknown command /set;"),
            ("/reset", "caldrix: the conversation is cleared\r\n"),
            ("/top-p 9", "caldrix: /top-p must be a number over 0"),
            ("", ""),
        ):
            screen.ready()
            screen.press(f"{line}\n")
            screen.expect(words)
        screen.ready()
        _one_turn_and_out(screen)
    assert conversations(peer) == [[("user", "hi")]]
