"""Which lanes this machine can use, and which one a run takes.

A probe returns its refusals as values, so that `doctor`, `--backend auto` and a lane named by the user
all say the same words. All functions block: `probe` runs a child process that loads the lane's libraries,
`choose` does so only for a lane that it is about to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import cpu, hip, metal
from caldrixd.lanes.drivers.child import run_probe
from caldrixd.lanes.drivers.finding import Finding

# `auto` takes the first usable one.
ORDER = ("metal", "hip", "cpu")
_GLANCES = {"metal": metal.glance, "hip": hip.glance, "cpu": cpu.glance}


@dataclass(frozen=True)
class Probe:
    """One lane: why it cannot be used (nothing, when it can) and what else was found, as sentences."""

    name: str
    reasons: tuple[Refused, ...]
    details: tuple[str, ...] = ()
    images: bool = False
    speculation: bool = False

    @property
    def usable(self) -> bool:
        return not self.reasons


def probe(name: str, environment: Mapping[str, str]) -> Probe:
    """Look at one lane with everything it needs loaded for real, in a child process with `environment`."""
    finding = _glance(name, environment)
    if finding.complete:
        return Probe(name, finding.reasons, finding.details)
    found = run_probe(name, environment)
    return Probe(name, found.reasons, found.details)


def probe_all(environment: Mapping[str, str]) -> tuple[Probe, ...]:
    """Every lane, in the order in which `auto` tries them."""
    return tuple(probe(name, environment) for name in ORDER)


def choose(backend: str, environment: Mapping[str, str]) -> str:
    """The lane for `backend` (a lane's name or "auto").

    Raises Refused "lane/none-usable" or "lane/unusable" with every reason. A lane that can be taken is
    known from a glance: a few small files read, nothing started.
    """
    if backend != "auto":
        if _glance(backend, environment).reasons:
            reasons = probe(backend, environment).reasons
            raise Refused("lane/unusable", lane=backend, reason="; ".join(reason.text for reason in reasons))
        return backend
    for name in ORDER:
        if not _glance(name, environment).reasons:
            return name
    raise Refused("lane/none-usable", reasons=_listed(probe_all(environment)))


def _glance(name: str, environment: Mapping[str, str]) -> Finding:
    return _GLANCES[name](environment)


def _listed(probes: tuple[Probe, ...]) -> str:
    return "\n".join(f"{found.name}: {reason.text}" for found in probes for reason in found.reasons)
