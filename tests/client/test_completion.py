"""The completion scripts, and bash completing command lines with its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from caldrix_client.commands.help import COMMANDS
from caldrix_client.parse import SHELLS
from caldrix_protocol.options import is_accepted, options_of
from tests.support.cli import SECONDS, Home

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
    assert completed("models", "plan", "") == []
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
