"""What a warm run imports: the start of the client is on every answer's path."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.cli import SECONDS, Home
from tests.support.peer import Model, Peer

MODULES = """\
import json, sys
before = set(sys.modules) - {"json"}
sys.argv[0] = "caldrix"
from caldrix_client.main import run
status = run()
print(json.dumps([status, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""
SLOW = {
    "argparse",
    "asyncio",
    "ctypes",
    "dataclasses",
    "importlib.metadata",
    "inspect",
    "logging",
    "pathlib",
    "random",
    "readline",
    "shutil",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "traceback",
    "typing_extensions",
}


def imported(home: Home, *arguments: str) -> set[str]:
    """The modules a command imports beyond the interpreter's own and json."""
    done = subprocess.run(
        (sys.executable, "-c", MODULES, *arguments),
        env=home.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0, done.stderr
    return set(modules)


@pytest.mark.parametrize("arguments", [("run", "demo", "-p", "hi"), ("run", "demo"), ("ps",)])
def test_a_warm_command_imports_the_standard_library_msgpack_and_the_protocol(
    home: Home, arguments: tuple[str, ...]
) -> None:
    with Peer(home.address, Model("x")):
        modules = imported(home, *arguments)
    packages = {module.partition(".")[0] for module in modules}
    others = {
        name for name in packages - sys.stdlib_module_names if "cython" not in name
    }  # msgpack is Cython
    assert others == {"caldrix_client", "caldrix_protocol", "msgpack"}
    assert modules & SLOW == set()


def test_a_warm_run_stays_small(home: Home) -> None:
    with Peer(home.address, Model("x")):
        assert len(imported(home, "run", "demo", "-p", "hi")) < 90


def test_version_does_not_import_the_protocol_machinery(home: Home) -> None:
    modules = imported(home, "version")
    assert not {"msgpack", "socket", "caldrix_protocol.messages"} & modules
