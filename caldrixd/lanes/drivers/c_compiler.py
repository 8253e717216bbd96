"""The kernels in C: compiled by cc for one x86-64 level, and where the library is kept.

A library's name is a digest of its sources, the compiler, the flags and the processor. What is found under
that name is loaded only from a directory that nobody else can write, and only whole: a library ends with
the digest of its own bytes, which a loader does not look at.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import caldrix_kernels
from caldrix_kernels.step import layout
from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import group, kernel_cache
from caldrixd.lanes.drivers.compiler import LIBRARIES, host_cpu
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.lanes.drivers.cpu import find_compiler
from caldrixd.lanes.kernels import Kernels
from caldrixd.lanes.lane import Report

SOURCES = Path(caldrix_kernels.__file__).parent
# Nothing that could change a bit: no contraction of products and sums, no reordering.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fPIC",
)
LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "native")
LAYOUT = "layout.h"
DIGEST_BYTES = 32
# Ten times what it takes on a slow machine.
COMPILER_SECONDS = 120.0


def c_kernels(level: str, cache: Path, environment: Mapping[str, str], report: Report) -> Kernels:
    """The kernels for `level`, x86-64-v2, x86-64-v3, x86-64-v4 or native; cc is looked for on the
    PATH of `environment` and runs with it.

    A library that is missing or damaged in `cache` is compiled, with status lines. Refused
    "lane/cpu-no-compiler", "lane/cpu-compiler", "lane/cpu-cache" or "lane/cpu-cache-open".
    """
    compiler = find_compiler(environment)
    if compiler is None:
        raise Refused("lane/cpu-no-compiler")
    directory = cache / LIBRARIES
    try:
        _make_private(directory)
        version = _run([compiler, "--version"], environment, time.monotonic() + COMPILER_SECONDS).stdout
        library = directory / _name(version, level)
        if not (kernel_cache.hold(library) and _whole(library)):
            started = time.monotonic()
            report("status/compiling", {})
            _install(compiler, level, environment, library)
            kernel_cache.hold(library)
            kernel_cache.prune(directory, {_name(version, each) for each in LEVELS})
            report("status/compiled", {"seconds": round(time.monotonic() - started, 1)})
        return load(library)
    except OSError as error:
        raise Refused("lane/cpu-cache", path=directory, reason=error.strerror or error) from None


def build(compiler: str, flags: Sequence[str], environment: Mapping[str, str], target: Path) -> None:
    """Compile all sources into the shared library `target`. Refused "lane/cpu-compiler" in cc's words."""
    place, until = target.parent, time.monotonic() + COMPILER_SECONDS
    (place / LAYOUT).write_text(layout_header(), "ascii")
    cc = [compiler, *flags]
    variables = {**environment, "LC_ALL": "C", "TMPDIR": str(place)}
    objects = {str(place / f"{number}.o"): path for number, path in enumerate(_sources("**/cpu.c"))}
    includes = [f"-I{SOURCES / 'include'}", f"-I{place}"]
    compilations = [[*cc, *includes, "-c", "-o", name, str(path)] for name, path in objects.items()]
    pool = ThreadPoolExecutor(default_threads())
    try:
        for done in pool.map(lambda command: _run(command, variables, until), compilations):
            _require(done)
    finally:
        pool.shutdown(cancel_futures=True)
    _require(_run([*cc, "-shared", "-o", str(target), *objects, "-lm"], variables, until))


def _run(
    command: Sequence[str], environment: Mapping[str, str], until: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler, at most to a time of time.monotonic."""
    try:
        return group.run(command, environment, max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        reason = f"{command[0]} did not end within {COMPILER_SECONDS:g} s and was stopped"
    except OSError as error:
        reason = f"{command[0]}: {error.strerror}"
    raise Refused("lane/cpu-compiler", reason=reason)


def _require(done: subprocess.CompletedProcess[bytes]) -> None:
    if done.returncode != 0:
        raise Refused("lane/cpu-compiler", reason=_first_error(done))


def load(library: Path) -> Kernels:
    """The kernels in a library that `build` made; OSError when it does not load."""
    loaded = ctypes.CDLL(str(library))
    count = ctypes.c_int64.in_dll(loaded, "kernel_count").value
    table = (ctypes.c_int64 * count).in_dll(loaded, "kernel_table")

    def function(name: str, arguments: int) -> Callable[..., None]:
        found: ctypes._NamedFuncPointer = getattr(loaded, name)
        found.argtypes, found.restype = [ctypes.c_int64] * arguments, None
        return found

    return Kernels(
        name="C",
        table=np.array(table, np.int64),
        pack_panels=function("pack_panels", 8),
        publish_and_run=function("publish_and_run", 2),
        pool_thread=function("pool_thread", 5),
        bf16_dot=bool(ctypes.c_int64.in_dll(loaded, "has_bf16_dot").value),
    )


def layout_header() -> str:
    """The integers of step.layout for C, `AT_` before each name."""
    numbers = {name: value for name, value in vars(layout).items() if name.isupper() and type(value) is int}
    lines = [f"    AT_{name} = {value}," for name, value in numbers.items()]
    return "\n".join(["#pragma once", "enum {", *lines, "};", ""])


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


def _name(version: bytes, level: str) -> str:
    """The file name of the library that a compiler of this version makes for a level."""
    parts = [version, "\0".join(_flags(level)).encode(), layout_header().encode(), host_cpu().encode()]
    for path in _sources("**/cpu.c", "include/*.h"):
        parts += [str(path.relative_to(SOURCES)).encode(), path.read_bytes()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{digest.hexdigest()[:32]}.so"


def _flags(level: str) -> tuple[str, ...]:
    return (*FLAGS, f"-march={level}")


def _make_private(directory: Path) -> None:
    """Refused "lane/cpu-cache-open" when somebody else owns the directory or can write there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or stat.S_IMODE(found.st_mode) & 0o022:
        raise Refused("lane/cpu-cache-open", path=directory)


def _whole(library: Path) -> bool:
    """Whether the file is there as `_install` left it. A loader may crash on a damaged one."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _install(compiler: str, level: str, environment: Mapping[str, str], library: Path) -> None:
    """Build beside the final place and rename: nobody finds half a library."""
    with kernel_cache.building(library.parent) as directory:
        target = directory / library.name
        build(compiler, _flags(level), environment, target)
        with target.open("ab") as file:
            file.write(hashlib.sha256(target.read_bytes()).digest())
        target.replace(library)


def _first_error(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if "error" in line]
    return (errors or lines or [f"status {done.returncode}"])[0]
