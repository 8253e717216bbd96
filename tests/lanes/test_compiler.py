"""Compiled kernels are found again only for the very sources they were compiled from."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import caldrix_kernels
from caldrixd.lanes.drivers.compiler import source_digest, worker_environment

SOURCES = Path(caldrix_kernels.__file__).parent
CODE = """
import numpy as np
from caldrix_kernels.silu_mul.numba_cpu import silu_mul_tile
tile, out = np.ones((1, 32), np.float32), np.zeros((1, 16), np.float32)
silu_mul_tile.ctypes(0, tile.ctypes.data, 128, out.ctypes.data, 64, 1)
print(out[0, 0], silu_mul_tile.cache_hits)
"""


def run(kernels: Path, cache: Path) -> list[str]:
    """silu(1) * 1, and whether it came from the cache."""
    variables = {
        "PYTHONPATH": str(kernels.parent),
        "NUMBA_CACHE_DIR": str(cache / source_digest(kernels, "cpu")),
    }
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_change_of_an_intrinsic_is_seen(tmp_path: Path) -> None:
    """numba's own cache would miss it: it looks at the kernel's file, not at the modules behind it."""
    kernels = tmp_path / "caldrix_kernels"
    shutil.copytree(SOURCES, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(kernels, tmp_path) == ["0.7310586", "0"]
    assert run(kernels, tmp_path) == ["0.7310586", "1"]
    vector = kernels / "intrinsics" / "vector.py"
    text = vector.read_text("utf-8")
    assert text.count("lanes(88.0)") == 1
    vector.write_text(text.replace("lanes(88.0)", "lanes(-2.0)"), "utf-8")
    assert run(kernels, tmp_path) == ["0.880797", "0"]


def test_the_digest_covers_names_sources_and_cpu(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n", "utf-8")
    first = source_digest(tmp_path, "cpu")
    assert source_digest(tmp_path, "cpu") == first
    assert source_digest(tmp_path, "other") != first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert source_digest(tmp_path, "cpu") != first


def test_the_directory_is_private(tmp_path: Path) -> None:
    directory = Path(worker_environment(tmp_path)["NUMBA_CACHE_DIR"])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.parent == tmp_path / "kernels"


# A kernel that compiles quickly stands for the interpreter; prints the status lines and how it ended.
COMPILE = """
import resource, sys
from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import compiler
compiler.INTERPRETER = "caldrix_kernels.silu_mul.numba_cpu"
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
try:
    compiler.import_kernels(lambda code, fields: print(code))
    print(sys.modules[compiler.INTERPRETER].silu_mul_tile.cache_hits)
except Refused as refused:
    print(refused.code, refused.fields["reason"], sep=":")
"""


def compiled(cache: Path, *limit: str) -> list[str]:
    command = [sys.executable, "-c", COMPILE, *limit]
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    fresh = ["status/compiling", "status/compiled", "0"]
    assert compiled(tmp_path) == fresh
    assert compiled(tmp_path) == ["1"]
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(b"")
    assert compiled(tmp_path) == fresh
    assert compiled(tmp_path) == ["1"]


def test_an_interrupted_compilation_is_announced_again(tmp_path: Path) -> None:
    compiled(tmp_path)
    (tmp_path / "complete").unlink()
    assert compiled(tmp_path) == ["status/compiling", "status/compiled", "1"]


def test_no_room_for_compiled_kernels(tmp_path: Path) -> None:
    assert compiled(tmp_path, "no file over a byte") == ["status/compiling", "lane/cpu-cache:File too large"]
