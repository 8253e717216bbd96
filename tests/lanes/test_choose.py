import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.lanes import choose
from caldrixd.lanes.drivers import cpu

V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3", "fpu", "sse2"}
V3 = V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the HIP and CPU lanes are for Linux")

NO_COMPILER = "no C compiler: the CPU lane links its kernels with cc at load, and cc is not on PATH"

# A HIP runtime with two devices; its behaviour is set by macros.
FAKE_RUNTIME = """
#include <stdlib.h>
#include <string.h>
int hipGetDeviceCount(int *count) { *count = DEVICES; return COUNT_STATUS; }
const char *hipGetErrorString(int status) { return status == 700 ? "an illegal memory access" : "other"; }
int PROPERTIES(char *properties, int device) {
    if (CRASH) abort();
    strcpy(properties, "AMD Instinct");
    strcpy(properties + 1160, ARCHITECTURE ":sramecc+:xnack-");
    return device < DEVICES ? 0 : 101;
}
"""
DEFAULTS = {
    "DEVICES": "1",
    "COUNT_STATUS": "0",
    "CRASH": "0",
    "ARCHITECTURE": '"gfx942"',
    "PROPERTIES": "hipGetDevicePropertiesR0600",
}

Build = Callable[..., dict[str, str]]


@pytest.fixture
def build_rocm(tmp_path: Path) -> Build:
    """Builds a ROCm directory with a fake runtime; the environment that leads a probe to it."""

    def build(**macros: str) -> dict[str, str]:
        libraries = tmp_path / "rocm" / "lib"
        libraries.mkdir(parents=True)
        source = tmp_path / "hip.c"
        source.write_text(FAKE_RUNTIME)
        defines = [f"-D{name}={value}" for name, value in {**DEFAULTS, **macros}.items()]
        command = ["cc", "-shared", "-fPIC", "-o", str(libraries / "libamdhip64.so"), *defines, str(source)]
        subprocess.run(command, check=True)
        return environment(ROCM_PATH=str(tmp_path / "rocm"))

    return build


def environment(**variables: str) -> dict[str, str]:
    python_path = os.pathsep.join(path for path in sys.path if path)
    return {"PATH": "/nowhere", "PYTHONPATH": python_path, **variables}


def reasons(probe: choose.Probe) -> list[str]:
    return [reason.code for reason in probe.reasons]


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@linux_only
def test_hip_without_anything_says_every_reason(tmp_path: Path) -> None:
    probe = choose.probe("hip", environment(ROCM_PATH=str(tmp_path)))
    assert reasons(probe) == ["lane/hip-runtime", "lane/hip-blaslt", "lane/hip-lld", "lane/hip-not-yet"]
    assert probe.reasons[0].text.startswith("the HIP runtime did not load: libamdhip64.so: cannot open")
    assert probe.reasons[1].text == f"libhipblaslt.so* not found under {tmp_path}/lib"
    assert probe.reasons[2].text == "ld.lld not found beside caldrix, in INFERNO_LLD or on PATH"
    assert not probe.usable
    assert probe.details == (f"ROCm is looked for in {tmp_path}/lib (ROCM_PATH of the daemon's environment)",)


@linux_only
def test_hip_looks_under_opt_when_rocm_path_is_unset() -> None:
    details = choose.probe("hip", environment()).details
    assert "ROCm is looked for in /opt/rocm/lib (the daemon's environment has no ROCM_PATH)" in details


@linux_only
@pytest.mark.parametrize("name", ["hipGetDevicePropertiesR0600", "hipGetDeviceProperties"])
def test_hip_with_everything_is_only_not_yet_there(tmp_path: Path, build_rocm: Build, name: str) -> None:
    found = build_rocm(PROPERTIES=name, DEVICES="2")
    (tmp_path / "rocm/lib/libhipblaslt.so.0.12").touch()
    lld = executable(tmp_path / "elsewhere/ld.lld")
    probe = choose.probe("hip", {**found, "INFERNO_LLD": str(lld)})
    assert reasons(probe) == ["lane/hip-not-yet"]
    assert probe.details[-1] == "devices: gfx942, gfx942"


@linux_only
def test_lld_is_found_on_path(tmp_path: Path, build_rocm: Build) -> None:
    found = build_rocm()
    executable(tmp_path / "bin/ld.lld")
    probe = choose.probe("hip", {**found, "PATH": str(tmp_path / "bin")})
    assert reasons(probe) == ["lane/hip-blaslt", "lane/hip-not-yet"]


@linux_only
@pytest.mark.parametrize(
    ("macros", "text"),
    [
        ({"DEVICES": "0"}, "HIP loaded and reported no device"),
        ({"DEVICES": "0", "COUNT_STATUS": "100"}, "HIP loaded and reported no device"),
        ({"COUNT_STATUS": "700"}, "a HIP call failed: hipGetDeviceCount: an illegal memory access (700)"),
        (
            {"ARCHITECTURE": '"gfx1100"'},
            "a HIP call failed: the device is gfx1100, and the lane is made for gfx942",
        ),
    ],
)
def test_a_hip_runtime_without_a_usable_device(build_rocm: Build, macros: dict[str, str], text: str) -> None:
    probe = choose.probe("hip", build_rocm(**macros))
    assert probe.reasons[0].text == text
    assert reasons(probe)[1:] == ["lane/hip-blaslt", "lane/hip-lld", "lane/hip-not-yet"]


@linux_only
def test_a_runtime_that_crashes_takes_only_the_probe_with_it(build_rocm: Build) -> None:
    probe = choose.probe("hip", build_rocm(CRASH="1"))
    assert [reason.text for reason in probe.reasons] == ["the probe of the hip lane failed: SIGABRT"]


@linux_only
def test_a_probe_that_cannot_start_says_why(tmp_path: Path) -> None:
    probe = choose.probe("hip", {"PYTHONHOME": str(tmp_path)})
    assert reasons(probe) == ["lane/probe-failed"]


@linux_only
def test_the_cpu_lane_is_usable_here() -> None:
    probe = choose.probe("cpu", environment())
    assert probe.reasons == ()
    assert probe.usable
    level, processors = probe.details[0].split(", ")
    assert level == cpu.isa_level(cpu.cpu_flags())
    assert processors == f"{os.cpu_count()} processors"
    assert probe.details[1:] == (f"kernels numba {numba.__version__}, which compiles here",)


BROKEN = {
    "raise ImportError('needs another numpy')": "ImportError: needs another numpy",
    "__version__ = '9'\ndef njit(f): raise RuntimeError('no\\nmemory to write and run')": (
        "RuntimeError: no memory to write and run"
    ),
}


@linux_only
@pytest.mark.parametrize(("source", "reason"), BROKEN.items())
def test_where_numba_fails_the_kernels_are_those_of_cc(tmp_path: Path, source: str, reason: str) -> None:
    (tmp_path / "numba.py").write_text(source)
    paths = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    cc = executable(tmp_path / "bin/cc")
    probe = choose.probe("cpu", environment(PYTHONPATH=paths, PATH=str(cc.parent)))
    assert probe.usable
    assert probe.details[1:] == (f"kernels C by {cc}, because numba cannot be used: {reason}",)
    without = choose.probe("cpu", environment(PYTHONPATH=paths))
    assert [reason.text for reason in without.reasons] == [NO_COMPILER]


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (V4, "x86-64-v4"),
        (V4 - {"avx512vl"}, "x86-64-v3"),
        (V3, "x86-64-v3"),
        (V3 - {"fma"}, "x86-64-v2"),
        (V4 - {"fma"}, "x86-64-v2"),
        (V2, "x86-64-v2"),
        (V2 - {"sse4_2"}, "x86-64"),
        (set[str](), "x86-64"),
    ],
)
def test_isa_levels(flags: set[str], level: str) -> None:
    assert cpu.isa_level(flags) == level


def test_flags_are_those_of_the_kernels_list(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu sse2  avx\nvmx flags\t: ept\n\nprocessor\t: 1\n"
    )
    assert cpu.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "sse2", "avx"}
    assert cpu.cpu_flags(tmp_path / "absent") == frozenset()
    with pytest.raises(OSError):
        cpu.cpu_flags(tmp_path)  # what cannot be read says nothing about the processor


@pytest.mark.parametrize(
    ("flags", "texts"),
    [(V2 - {"popcnt"}, ["this host is below x86-64-v2; the CPU lane cannot run here"]), (V2, []), (V3, [])],
)
@linux_only
def test_an_old_processor_is_refused(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], texts: list[str]
) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(flags))
    assert [reason.text for reason in cpu.glance(environment()).reasons] == texts


@linux_only
def test_a_processor_without_fused_multiply_add_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(V2))
    found = cpu.probe(environment())
    assert found.reasons == ()
    assert found.details[:2] == (
        f"x86-64-v2, {os.cpu_count()} processors",
        "without fused multiply-add, so it is emulated, which is slow",
    )


@linux_only
def test_neither_numba_nor_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "find_numba", lambda: False)
    (refused,) = cpu.glance(environment(PATH="")).reasons
    assert refused.text == NO_COMPILER
    cc = executable(tmp_path / "bin/cc")
    assert cpu.glance(environment(PATH=str(cc.parent))).reasons == ()


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu.glance(environment()).reasons[0].text == (
        "the CPU lane runs on x86-64 only in this version; this machine is aarch64"
    )


def test_on_macos_no_lane_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Refused) as caught:
        choose.choose("auto", environment())
    assert caught.value.text == (
        "no usable lane (metal: this caldrix was built without the metal feature\n"
        "hip: the AMD lane runs on Linux only\n"
        "cpu: the CPU lane is built for Linux only)"
    )


@linux_only
def test_auto_takes_the_cpu_here() -> None:
    assert choose.choose("auto", environment()) == "cpu"
    assert choose.choose("cpu", environment()) == "cpu"


@linux_only
def test_a_named_lane_is_refused_with_all_its_reasons(tmp_path: Path) -> None:
    found = environment(ROCM_PATH=str(tmp_path))
    with pytest.raises(Refused) as caught:
        choose.choose("hip", found)
    assert caught.value.text == "the hip lane cannot run here: " + "; ".join(
        reason.text for reason in choose.probe("hip", found).reasons
    )


@linux_only
def test_metal_is_refused_outside_macos() -> None:
    assert [reason.text for reason in choose.probe("metal", environment()).reasons] == [
        "the Metal lane exists on macOS only"
    ]
    assert [probe.name for probe in choose.probe_all(environment())] == ["metal", "hip", "cpu"]
