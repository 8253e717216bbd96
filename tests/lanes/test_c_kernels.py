"""The kernels in C: numba's bits at every level of x86-64, and a library that is loaded only whole."""

from __future__ import annotations

import functools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import c_compiler
from caldrixd.lanes.drivers.c_compiler import c_kernels
from caldrixd.lanes.drivers.compiler import compile_kernels
from caldrixd.lanes.drivers.cpu import cpu_flags, isa_level
from caldrixd.lanes.kernels import Kernels
from tests.support import kernel_cases, models
from tests.support.daemon import ROOT, await_end

LEVELS = [level for level in ("x86-64-v2", "x86-64-v3", "x86-64-v4") if level <= isa_level(cpu_flags())]
ENVIRONMENT = dict(os.environ)


def silent(code: str, fields: dict[str, object]) -> None:
    """Takes status lines and drops them."""


@pytest.fixture(scope="module")
def numba() -> Kernels:
    return compile_kernels(silent)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernels]:
    """The kernels of a level, compiled without a warning."""

    @functools.cache
    def build(level: str) -> Kernels:
        library = tmp_path_factory.mktemp(level) / "kernels.so"
        flags = (*c_compiler.FLAGS, f"-march={level}", "-Wall", "-Wextra", "-Werror")
        c_compiler.build("cc", flags, ENVIRONMENT, library)
        return c_compiler.load(library)

    return build


@pytest.fixture(params=[*LEVELS, "native"])
def in_c(request: pytest.FixtureRequest, built: Callable[[str], Kernels]) -> Kernels:
    return built(request.param)


# --- every kernel -------------------------------------------------------------------------------------


def test_both_tables_are_whole(numba: Kernels, in_c: Kernels) -> None:
    assert len(in_c.table) == len(numba.table)
    assert np.all(in_c.table != 0)


@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_numba_bits(numba: Kernels, in_c: Kernels, name: str) -> None:
    if name in kernel_cases.DOT_CASES and not (numba.bf16_dot and in_c.bf16_dot):
        return
    expected, got = (kernel_cases.run(kernels, name) for kernels in (numba, in_c))
    assert len(got) == len(expected) > 0
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.tobytes() == other.tobytes(), number


# --- whole steps --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numba_steps(numba: Kernels) -> Callable[[str, str], list[bytes]]:
    return functools.cache(lambda name, dtype: kernel_cases.steps(numba, name, dtype))


@pytest.mark.parametrize("name", models.TINY)
def test_whole_steps_give_numba_bits(
    numba: Kernels, in_c: Kernels, numba_steps: Callable[[str, str], list[bytes]], name: str
) -> None:
    assert kernel_cases.steps(in_c, name, "f32") == numba_steps(name, "f32")
    if in_c.bf16_dot == numba.bf16_dot:
        assert kernel_cases.steps(in_c, name, "bf16") == numba_steps(name, "bf16")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_rounded_activations_do_not_depend_on_the_level(built: Callable[[str], Kernels], name: str) -> None:
    """`--dtype bf16` where no level has the dot product instruction."""
    assert not any(built(level).bf16_dot for level in LEVELS)
    results = [kernel_cases.steps(built(level), name, "bf16") for level in LEVELS]
    assert all(result == results[0] for result in results)


# --- the library --------------------------------------------------------------------------------------


# Compiles at once, and has what the loader looks for.
SMALL = """
#include <stdint.h>
#include "layout.h"
#include "small.h"
#define EXPORTED __attribute__((visibility("default")))
EXPORTED const int64_t kernel_count = 1, has_bf16_dot = AT_PANEL - 32;
EXPORTED void publish_and_run(void) {}
EXPORTED void pool_thread(void) {}
EXPORTED void pack_panels(void) {}
EXPORTED void (*const kernel_table[])(void) = {pack_panels};
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of sources, small ones."""
    sources = tmp_path / "sources"
    for name, text in (("op/cpu.c", SMALL), ("include/small.h", "#pragma once\n")):
        (sources / name).parent.mkdir(parents=True)
        (sources / name).write_text(text, "ascii")
    monkeypatch.setattr(c_compiler, "SOURCES", sources)
    return sources


class Lines:
    """Collects the codes of status lines."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def __call__(self, code: str, fields: dict[str, object]) -> None:
        self.codes.append(code)


def compiled(cache: Path, environment: Mapping[str, str] = ENVIRONMENT) -> list[str]:
    """The status lines of getting the kernels."""
    lines = Lines()
    c_kernels("x86-64-v2", cache, environment, lines)
    return lines.codes


def refused(cache: Path, environment: Mapping[str, str] = ENVIRONMENT) -> Refused:
    with pytest.raises(Refused) as caught:
        compiled(cache, environment)
    return caught.value


def pretend_cc(directory: Path, script: str) -> dict[str, str]:
    """An environment whose cc answers --version and else runs `script`."""
    directory.mkdir()
    cc = directory / "cc"
    cc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{script}\n', "ascii")
    cc.chmod(0o755)
    return {**ENVIRONMENT, "PATH": f"{directory}{os.pathsep}{ENVIRONMENT['PATH']}"}


FRESH = ["status/compiling", "status/compiled"]
# Says the ids of a compiler and of what it runs, which then never ends.
HUNG = "sleep 10000 & echo $$ $! > {fifo}; wait"
IN_A_WORKER = (
    "import os, sys; from pathlib import Path; from caldrixd.lanes.drivers import c_compiler;"
    "c_compiler.SOURCES = Path('{sources}');"
    "c_compiler.c_kernels('x86-64-v2', Path(sys.argv[1]), dict(os.environ), lambda code, fields: None)"
)
PATHS = os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", "."))


def test_a_library_is_compiled_once_and_again_when_it_is_damaged(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert compiled(cache) == FRESH
    assert compiled(cache) == []
    (library,) = cache.rglob("*.so")
    whole = library.read_bytes()
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    for damaged in (b"", whole[:4096], whole[:-1], whole[:5000] + b"\xff" + whole[5001:], whole + b"\0"):
        library.unlink()
        library.write_bytes(damaged)
        assert compiled(cache) == FRESH
    assert compiled(cache) == []
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_a_change_of_a_source_is_seen(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert compiled(cache) == FRESH
    for source in small.rglob("*.[ch]"):
        source.write_text(source.read_text("ascii") + "\n", "ascii")
        assert compiled(cache) == FRESH
        assert compiled(cache) == []


def test_libraries_of_old_versions_are_removed(small: Path, tmp_path: Path) -> None:
    """But for the last. Where nothing held them: a worker holds its own for as long as it lives."""
    cache = tmp_path / "cache"
    header = small / "include" / "small.h"
    for version in range(4):
        header.write_text(f"// {version}\n", "ascii")
        command = [sys.executable, "-c", IN_A_WORKER.format(sources=small), str(cache)]
        subprocess.run(command, env={**ENVIRONMENT, "PYTHONPATH": PATHS}, check=True)
    assert len(list(cache.rglob("*.so"))) == 2
    assert compiled(cache) == []


def test_a_level_has_a_library_of_its_own(small: Path, tmp_path: Path) -> None:
    lines = Lines()
    for level in (*LEVELS, "native"):
        c_kernels(level, tmp_path / "cache", ENVIRONMENT, lines)
    assert lines.codes == FRESH * (len(LEVELS) + 1)


def test_an_interrupted_compilation_leaves_no_library(small: Path, tmp_path: Path) -> None:
    compiles = 'for word; do [ "$word" = -c ] && exit 0; done; '
    links = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; kill -9 $PPID; sleep 10000'
    environment = pretend_cc(tmp_path / "bin", compiles + links)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", IN_A_WORKER.format(sources=small), str(cache)]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": PATHS})
    assert done.returncode == -signal.SIGKILL
    assert [path.read_text() for path in cache.rglob("build-*/*.so")] == ["half\n"]
    assert list((cache / "c").glob("*.so")) == []
    assert compiled(cache) == FRESH


def test_a_compiler_that_hangs_is_stopped_with_all_it_runs(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_compiler, "COMPILER_SECONDS", 10.0)
    environment = pretend_cc(tmp_path / "bin", HUNG.format(fifo=tmp_path / "ids"))
    failed = refused(tmp_path / "cache", environment)
    assert (failed.code, failed.fields["reason"]) == (
        "lane/cpu-compiler",
        f"{tmp_path}/bin/cc did not end within 10 s and was stopped",
    )
    for pid in (tmp_path / "ids").read_text().split():
        await_end(int(pid))
    assert list((tmp_path / "cache" / "c").iterdir()) == []


def test_a_compiler_ends_with_the_worker_that_runs_it(small: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ids")
    environment = pretend_cc(tmp_path / "bin", HUNG.format(fifo=tmp_path / "ids"))
    command = [sys.executable, "-c", IN_A_WORKER.format(sources=small), str(tmp_path / "cache")]
    with subprocess.Popen(command, env={**environment, "PYTHONPATH": PATHS}) as worker:
        pids = (tmp_path / "ids").read_text().split()
        worker.kill()
    assert len(pids) == 2
    for pid in pids:
        await_end(int(pid))


def test_a_compiler_that_cannot_be_run_is_refused_by_its_name(small: Path, tmp_path: Path) -> None:
    environment = pretend_cc(tmp_path / "bin", "")
    (tmp_path / "bin" / "cc").write_text("#!/nowhere\n", "ascii")
    failed = refused(tmp_path / "cache", environment)
    assert failed.text == f"cc cannot compile the kernels: {tmp_path}/bin/cc: No such file or directory"


def test_refusals(small: Path, tmp_path: Path) -> None:
    assert refused(tmp_path, {"PATH": str(tmp_path)}).code == "lane/cpu-no-compiler"
    script = "echo 'In file x:' >&2; echo 'x.c:3: error: no such thing' >&2; exit 1"
    failing = pretend_cc(tmp_path / "bin", script)
    failed = refused(tmp_path / "cache", failing)
    assert (failed.code, failed.fields["reason"]) == ("lane/cpu-compiler", "x.c:3: error: no such thing")
    assert list((tmp_path / "cache").rglob("*.so")) == []
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file").code == "lane/cpu-cache"


def test_a_directory_that_others_can_write_is_not_loaded_from(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert compiled(cache) == FRESH
    (cache / "c").chmod(0o770)
    assert refused(cache).code == "lane/cpu-cache-open"
    (cache / "c").chmod(0o700)
    assert compiled(cache) == []
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "c").symlink_to(cache / "c")
    assert refused(tmp_path / "linked").code == "lane/cpu-cache-open"
