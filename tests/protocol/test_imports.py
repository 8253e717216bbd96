"""A warm run pays for every import of the client's path, so the protocol keeps to a few cheap ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROTOCOL = Path(__file__).parents[2] / "protocol"
CODE = """
import sys
before = set(sys.modules)
import caldrix_protocol.address, caldrix_protocol.connection, caldrix_protocol.options
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
COSTLY = {
    "anyio",
    "argparse",
    "asyncio",
    "dataclasses",
    "importlib",
    "inspect",
    "json",
    "logging",
    "pathlib",
    "platformdirs",
    "pwd",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
}


def test_the_protocol_imports_msgpack_and_nothing_costly() -> None:
    result = subprocess.run(
        (sys.executable, "-S", "-c", CODE),
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(PROTOCOL), *sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(result.stdout.split())
    assert imported & COSTLY == set()
    third_party = {name for name in imported - set(sys.stdlib_module_names) if "cython" not in name}
    assert third_party == {"caldrix_protocol", "msgpack"}
