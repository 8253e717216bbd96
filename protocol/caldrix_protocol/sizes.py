"""Bytes and seconds as people read them."""

from __future__ import annotations

MB = 10**6
_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", MB), ("kB", 10**3))


def size(count: int) -> str:
    """Bytes in decimal units, with three digits: "17.2 GB"."""
    for unit, scale in _UNITS:
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count // scale} {unit}"
    return f"{count} B"


def duration(seconds: float) -> str:
    """Whole seconds, minutes or hours: "44 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
