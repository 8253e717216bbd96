"""The completion scripts, and each shell completing command lines with its own."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from caldrix_client.commands.help import COMMANDS
from caldrix_client.parse import SHELLS
from caldrix_protocol.aliases import ALIASES
from caldrix_protocol.messages import Done, Loaded, Message
from caldrix_protocol.options import is_accepted, options_of
from caldrixd.models import aliases
from tests.support.cli import COMMAND, SECONDS, Home
from tests.support.peer import Peer, Script, Talk

# Completes the words given after the script, the last one being typed, and prints what it offers.
BASH = """\
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$(complete -p caldrix | sed 's/.*-F \\([^ ]*\\).*/\\1/') caldrix "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
Complete = Callable[..., list[str]]
bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def script(home: Home, shell: str) -> str:
    result = home.caldrix("completion", shell)
    assert (result.status, result.err) == (0, "")
    return result.out


@pytest.fixture
def completed(home: Home, tmp_path: Path) -> Complete:
    """Words of a command line to what bash offers for the last of them."""
    path = tmp_path / "completion"
    path.write_text(script(home, "bash"))
    (tmp_path / "model one").mkdir()
    (tmp_path / "modest").mkdir()
    (tmp_path / "model.txt").touch()

    def complete(*words: str) -> list[str]:
        done = subprocess.run(
            ("bash", "--norc", "-c", BASH, "bash", str(path), "caldrix", *words),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [line for line in done.stdout.splitlines() if line]

    return complete


@bash
def test_bash_completes_commands(completed: Complete) -> None:
    assert completed("") == list(COMMANDS)
    assert completed("ver") == ["version"]
    assert completed("completion", "") == list(SHELLS)
    assert completed("models", "p") == ["plan", "pin"]
    assert completed("models", "list", "") == []
    assert completed("version", "") == []


@bash
def test_bash_completes_flags_and_their_values(completed: Complete) -> None:
    assert completed("run", "demo", "--te") == ["--temperature"]
    assert completed("run", "demo", "--cpu-") == ["--cpu-isa", "--cpu-kernels"]
    assert completed("stop", "-") == ["--daemon"]
    assert completed("run", "demo", "--backend", "") == ["auto", "hip", "metal", "cpu"]
    assert completed("run", "demo", "--backend", "=", "m") == ["metal"]
    assert completed("run", "demo", "--backend", "=") == ["auto", "hip", "metal", "cpu"]
    assert completed("run", "demo", "--max-tokens", "") == []
    assert completed("run", "demo", "--port") == []


@bash
def test_bash_completes_directories(completed: Complete) -> None:
    assert sorted(completed("run", "mod")) == ["model one", "modest"]
    assert sorted(completed("run", "demo", "--draft-model", "mode")) == ["model one", "modest"]
    assert completed("run", "demo", "mod") == []


@bash
def test_bash_finds_no_fault_in_its_script(home: Home) -> None:
    done = subprocess.run(("bash", "-n"), input=script(home, "bash"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# A command line up to the cursor, and what every shell offers there.
LINES = {
    "caldrix ": {*COMMANDS},
    "caldrix run ": {*ALIASES, "model one", "modest"},
    "caldrix run mod": {"model one", "modest"},
    "caldrix run smollm2": {"smollm2", "smollm2-instruct"},
    "caldrix run modest ": set(),
    "caldrix run modest mod": set(),
    "caldrix run demo --te": {"--temperature"},
    "caldrix run demo --backend ": {"auto", "hip", "metal", "cpu"},
    "caldrix run demo --draft-model ": {*ALIASES, "model one", "modest"},
    "caldrix run demo --seed ": set(),
    "caldrix run stop --da": set(),
    "caldrix pull ": {*ALIASES},
    "caldrix pull demo --p": {"--plain"},
    "caldrix models ": {"list", "plan", "rm", "pin"},
    "caldrix models plan ": {*ALIASES, "model one", "modest"},
    "caldrix models plan demo --d": {"--dtype"},
    "caldrix models plan demo --dtype ": {"f32", "bf16"},
    "caldrix models rm ": {*ALIASES},
    "caldrix models rm demo --": {"--yes"},
    "caldrix models list ": set(),
    "caldrix stop ": {"smollm2", "owner/name@v1", "/mod els/one", "/two  spaces  cpu  idle"},
    "caldrix stop s": {"smollm2"},
    "caldrix stop /mod": {"/mod els/one"},
    "caldrix stop /two": {"/two  spaces  cpu  idle"},
    "caldrix stop demo": set(),
    "caldrix stop --": {"--daemon"},
    "caldrix completion ": {*SHELLS},
    "caldrix help mo": {"models"},
    "caldrix version ": set(),
}
# Writes what would be offered to a file, and then offers it.
ZSH = """\
PROMPT='READY ' LISTMAX=1000
autoload -U compinit; compinit -u -D
source "$SCRIPT"
compadd() {
    local -a found
    if (( ${@[(I)-[OAD]]} )); then builtin compadd "$@"; return; fi
    builtin compadd -O found "$@"
    print -rl -- ${(Q)found} >> "$OFFERS"
    builtin compadd "$@"
}
"""


def in_bash(script: Path, lines: Sequence[str]) -> list[list[str]]:
    offers = []
    for line in lines:
        command = ("bash", "--norc", "-c", BASH, "bash", str(script), *line.split(" "))
        done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=SECONDS)
        assert (done.returncode, done.stderr) == (0, "")
        offers.append(done.stdout.splitlines())
    return offers


def in_fish(script: Path, lines: Sequence[str]) -> list[list[str]]:
    offers = []
    for line in lines:
        command = ("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'")
        home = {"HOME": str(script.parent), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            command, cwd=script.parent, env=home, capture_output=True, text=True, timeout=SECONDS
        )
        assert (done.returncode, done.stderr) == (0, "")
        offers.append([offer.partition("\t")[0].rstrip("/") for offer in done.stdout.splitlines()])
    return offers


def in_zsh(script: Path, lines: Sequence[str]) -> list[list[str]]:
    """zsh completes for its line editor alone: it gets a terminal, and Tab."""
    path = script.parent / "offers"
    (script.parent / ".zshrc").write_text(ZSH)
    keys, terminal = pty.openpty()
    variables = {"ZDOTDIR": str(script.parent), "SCRIPT": str(script), "OFFERS": str(path), "TERM": "xterm"}
    shell = subprocess.Popen(
        ("zsh", "-i", "-d"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=script.parent,
        env=variables | {"HOME": str(script.parent), "PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    offers = []
    try:
        seen(keys, b"READY ")
        for number, line in enumerate(lines):
            path.write_text("")
            os.write(keys, f"{line}\t\x15print '<'{number}'>'\n".encode())
            seen(keys, f"<{number}>".encode(), b"READY ")
            offers.append(path.read_text().splitlines())
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
        os.close(keys)
    return offers


def seen(keys: int, *texts: bytes) -> None:
    """Wait until a terminal shows one text after the other."""
    shown = b""
    deadline = time.monotonic() + SECONDS
    for text in texts:
        while text not in shown:
            assert select.select([keys], [], [], deadline - time.monotonic())[0], shown
            shown += os.read(keys, 1 << 16)
        shown = shown.partition(text)[2]


def put_on_path(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have shells find the command, which runs in a home of its own."""
    programs = home.path / "programs"
    programs.mkdir()
    command = programs / "caldrix"
    values = " ".join(f"{name}={shlex.quote(value)}" for name, value in home.environment.items())
    command.write_text(f'#!/bin/sh\nexec env {values} {shlex.join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def holding(*models: str) -> Script:
    """A daemon that has loaded these."""

    def script(talk: Talk, request: Message) -> None:
        talk.send(*(Loaded(model, "cpu", "idle", 7, 1, 0, 0.0, "x86-64-v3") for model in models), Done())

    return script


@bash
def test_of_a_daemon_that_does_not_run_nothing_is_offered_and_none_is_started(
    home: Home, completed: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(home, monkeypatch)
    assert completed("stop", "") == []
    assert not home.log.exists()


@pytest.mark.parametrize(("shell", "offered"), [("bash", in_bash), ("zsh", in_zsh), ("fish", in_fish)])
def test_each_shell_completes_with_its_script(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shell: str,
    offered: Callable[[Path, Sequence[str]], list[list[str]]],
) -> None:
    """zsh offers flags also where none was begun; those are left out."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    path = tmp_path / f"completion.{shell}"
    path.write_text(script(home, shell))
    (tmp_path / "model one").mkdir()
    (tmp_path / "modest").mkdir()
    (tmp_path / "model.txt").touch()
    put_on_path(home, monkeypatch)
    with Peer(home.address, holding("smollm2", "owner/name@v1", "/mod els/one", "/two  spaces  cpu  idle")):
        offers_of = dict(zip(LINES, offered(path, list(LINES)), strict=True))
    found = {}
    for line, offers in offers_of.items():
        wanted = "-" in line.split(" ")[-1]
        found[line] = {offer for offer in offers if offer and (wanted or offer[0] != "-")}
    assert found == LINES


def test_the_aliases_are_those_of_the_daemon() -> None:
    assert ALIASES == aliases.NAMES


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_every_flag_is_in_every_script(home: Home, shell: str) -> None:
    text = script(home, shell)
    words = set(re.findall(r"[\w-]+", text))
    assert words >= COMMANDS.keys()
    for command in COMMANDS:
        for option in options_of(command):
            spelled = option.name.removeprefix("--") if shell == "fish" else option.name
            assert (spelled in words) or not is_accepted(option)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_quotes_are_balanced(home: Home, shell: str) -> None:
    if shutil.which(shell) is not None:
        done = subprocess.run((shell, "-n"), input=script(home, shell), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    for line in script(home, shell).splitlines():
        assert line.count("'") % 2 == 0, line


def test_a_shell_that_is_none_is_refused(home: Home) -> None:
    for given, words in (((), "nothing"), (("tcsh",), "tcsh"), (("bash", "zsh"), "bash zsh")):
        assert home.caldrix("completion", *given) == (
            2,
            "",
            f"caldrix: completion takes bash, zsh or fish, got {words}\n",
        )
