"""The probe process: `python -m caldrixd.lanes.drivers.probe LANE` writes the lane's finding to stdout."""

from __future__ import annotations

import os
import sys

from caldrixd.lanes.drivers import child, cpu, hip

_PROBES = {"hip": hip.probe, "cpu": cpu.probe}


def main(arguments: list[str]) -> int:
    (name,) = arguments
    finding = _PROBES[name](os.environ)
    sys.stdout.flush()
    os.write(1, child.encode(finding))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
