"""What a bench prints: one JSON line a figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

Measure = Callable[[], float]


@dataclass(frozen=True)
class Figure:
    """`ours` and `peer` are medians; `ratio` is the median of ours / peer over the pairs of one run."""

    name: str
    ours: float
    peer: float | None
    ratio: float | None
    unit: str
    threads: int
    rounds: int

    def line(self) -> str:
        return json.dumps(asdict(self))


def figure(
    name: str, ours: Sequence[float], peer: Sequence[float], *, unit: str, threads: int, digits: int = 1
) -> Figure:
    """The figure of paired results; `peer` is empty where there is none."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)] if peer else []
    return Figure(
        name,
        round(statistics.median(ours), digits),
        round(statistics.median(peer), digits) if peer else None,
        round(statistics.median(ratios), 3) if ratios else None,
        unit,
        threads,
        len(ours),
    )


def interleaved(ours: Measure, peer: Measure | None, rounds: int) -> tuple[list[float], list[float]]:
    """A B A B ..., after one of each that does not count. Without a peer the second list is empty."""
    results: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for measure, kept in zip((ours, peer), results, strict=True):
            if measure is not None:
                result = measure()
                if number:
                    kept.append(result)
    return results
