"""Runs a lane's probe in a child process: a library that crashes or hangs takes only the probe with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import group
from caldrixd.lanes.drivers.finding import Finding

PROBE_SECONDS = 60.0


def run_probe(name: str, environment: Mapping[str, str]) -> Finding:
    """The finding of `python -m caldrixd.lanes.drivers.probe NAME`, run with `environment` alone."""
    command = [sys.executable, "-P", "-m", "caldrixd.lanes.drivers.probe", name]
    try:
        done = group.run(command, environment, PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return _failed(name, f"no answer within {PROBE_SECONDS:.0f} s")
    except OSError as error:
        return _failed(name, error.strerror or str(error))
    if done.returncode != 0:
        return _failed(name, _how_it_ended(done))
    try:
        return decode(done.stdout)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return _failed(name, f"{type(error).__name__}: {error}")


def encode(finding: Finding) -> bytes:
    """One line of JSON."""
    reasons = [[reason.code, reason.fields] for reason in finding.reasons]
    return json.dumps({"reasons": reasons, "details": finding.details}).encode() + b"\n"


def decode(output: bytes) -> Finding:
    """The finding in the last line of a probe's output; a library may have printed lines before it."""
    found = json.loads(output.splitlines()[-1])
    reasons = tuple(Refused(code, **fields) for code, fields in found["reasons"])
    return Finding(reasons, tuple(found["details"]), complete=True)


def _failed(name: str, reason: str) -> Finding:
    return Finding((Refused("lane/probe-failed", lane=name, reason=reason),), complete=True)


def _how_it_ended(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return signal.Signals(-done.returncode).name
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"
