"""The Metal lane's place in `doctor`: there is no such lane in this version."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers.finding import Finding


def glance(environment: Mapping[str, str]) -> Finding:
    """All there is to say, without loading anything."""
    code = "lane/metal-unbuilt" if sys.platform == "darwin" else "lane/metal-macos"
    return Finding((Refused(code),), complete=True)
