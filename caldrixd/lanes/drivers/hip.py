"""Looks for an AMD GPU and what its lane needs: the HIP runtime, a device, hipBLASLt and ld.lld.

`probe` loads the runtime, so it belongs into a process of its own. Nothing here launches a kernel.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from caldrix_protocol.refusals import Refused, sentence
from caldrixd.lanes.drivers.finding import Finding

RUNTIME = "libamdhip64.so"
DEFAULT_ROCM = "/opt/rocm"
SUPPORTED = "gfx942"
NO_DEVICE = 100  # hipErrorNoDevice
# hipDeviceProp_t is smaller than this in every release so far.
PROPERTIES_BYTES = 8192


def glance(environment: Mapping[str, str]) -> Finding:
    """What is known without looking: this version has no kernels for the lane."""
    if sys.platform != "linux":
        return Finding((Refused("lane/hip-linux"),), complete=True)
    return Finding((Refused("lane/hip-not-yet"),))


def probe(environment: Mapping[str, str]) -> Finding:
    """Every reason against the lane. `environment` gives ROCM_PATH, INFERNO_LLD and PATH."""
    named = environment.get("ROCM_PATH")
    libraries = Path(named or DEFAULT_ROCM) / "lib"
    details = [sentence("detail/rocm-path" if named else "detail/rocm-default", path=libraries)]
    reasons: list[Refused] = []
    try:
        details.append(sentence("detail/device", names=", ".join(_devices(libraries))))
    except Refused as refused:
        reasons.append(refused)
    if not any(libraries.glob("libhipblaslt.so*")):
        reasons.append(Refused("lane/hip-blaslt", path=libraries))
    if _find_lld(environment) is None:
        reasons.append(Refused("lane/hip-lld"))
    reasons.append(Refused("lane/hip-not-yet"))
    return Finding(tuple(reasons), tuple(details))


def _devices(libraries: Path) -> list[str]:
    """Architecture names of the devices, all of them supported. Raises Refused "lane/hip-..."."""
    runtime = _load(libraries)
    count = ctypes.c_int()
    status = runtime.hipGetDeviceCount(ctypes.byref(count))
    if status == NO_DEVICE or (status == 0 and count.value == 0):
        raise Refused("lane/hip-no-device")
    _check(runtime, "hipGetDeviceCount", status)
    names = [_architecture(runtime, index) for index in range(count.value)]
    if SUPPORTED not in names:
        raise Refused("lane/hip-architecture", names=", ".join(names), supported=SUPPORTED)
    return names


def _load(libraries: Path) -> ctypes.CDLL:
    """The HIP runtime as the loader finds it, else from under ROCm. Its loader's error is the first one's."""
    try:
        return ctypes.CDLL(RUNTIME)
    except OSError as error:
        first = error
    try:
        return ctypes.CDLL(str(libraries / RUNTIME))
    except OSError as error:
        reason = error if (libraries / RUNTIME).exists() else first
        raise Refused("lane/hip-runtime", reason=reason) from None


def _architecture(runtime: ctypes.CDLL, index: int) -> str:
    """The gfx name of a device. Its place in the properties differs between releases, its form does not."""
    name = "hipGetDevicePropertiesR0600"
    if not hasattr(runtime, name):
        name = "hipGetDeviceProperties"
    properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
    _check(runtime, name, getattr(runtime, name)(properties, ctypes.c_int(index)))
    found = re.search(rb"gfx[0-9a-f]+", properties.raw)
    return found[0].decode() if found else "gfx?"


def _check(runtime: ctypes.CDLL, call: str, status: int) -> None:
    if status != 0:
        runtime.hipGetErrorString.restype = ctypes.c_char_p
        text = runtime.hipGetErrorString(ctypes.c_int(status)) or b""
        raise Refused("lane/hip-call", reason=f"{call}: {text.decode('utf-8', 'replace')} ({status})")


def _find_lld(environment: Mapping[str, str]) -> str | None:
    beside = Path(sys.executable).parent / "ld.lld"
    for path in (beside, Path(environment.get("INFERNO_LLD") or beside)):
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return shutil.which("ld.lld", path=environment.get("PATH", os.defpath))
