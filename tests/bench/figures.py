"""What a bench prints: one JSON line a figure, with what is promised of it and whether that holds."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

Measure = Callable[[], float]
Series = dict[str, list[float]]


@dataclass(frozen=True)
class Target:
    """A bound on a figure's ratio to `over`, or on its own value where that is ""."""

    over: str
    bound: float
    most: bool = False

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.most else value >= self.bound


@dataclass(frozen=True)
class Case:
    """What was measured: `weights` names their stored format; "" where a word does not apply."""

    model: str
    weights: str
    arithmetic: str
    threads: int


@dataclass(frozen=True)
class Verdict:
    """A target beside what was found."""

    over: str
    value: float
    target: str
    holds: bool


@dataclass(frozen=True)
class Figure:
    """`ours` and `others` are medians; a ratio is the median of ours / other over the rounds."""

    name: str
    model: str
    weights: str
    arithmetic: str
    threads: int
    unit: str
    ours: float
    others: Mapping[str, float]
    ratios: Mapping[str, float]
    rounds: int
    targets: Sequence[Verdict] = field(default=())

    def line(self) -> str:
        return json.dumps(asdict(self))


def figure(
    name: str,
    case: Case,
    ours: Sequence[float],
    others: Mapping[str, Sequence[float]] | None = None,
    *,
    unit: str = "tokens/s",
    digits: int = 1,
    targets: Sequence[Target] = (),
) -> Figure:
    """The figure of series that were measured round by round; a target without its ratio is left out."""
    others = {label: series for label, series in (others or {}).items() if series}
    median = round(statistics.median(ours), digits)
    ratios = {
        label: round(statistics.median(a / b for a, b in zip(ours, series, strict=True)), 3)
        for label, series in others.items()
        if all(series)
    }
    values = {"": median, **ratios}
    return Figure(
        name,
        **asdict(case),
        unit=unit,
        ours=median,
        others={label: round(statistics.median(series), digits) for label, series in others.items()},
        ratios=ratios,
        rounds=len(ours),
        targets=[
            Verdict(target.over, values[target.over], _words(target, unit), target.holds(values[target.over]))
            for target in targets
            if target.over in values
        ],
    )


def _words(target: Target, unit: str) -> str:
    return f"at {'most' if target.most else 'least'} {target.bound:g} {'x' if target.over else unit}"


def table(figures: Sequence[Figure]) -> str:
    """The targets of all figures, one a line."""
    rows = [("figure", "weights", "arithmetic", "threads", "over", "value", "target", "")]
    for found in figures:
        for verdict in found.targets:
            rows.append(
                (
                    f"{found.model} {found.name}",
                    found.weights,
                    found.arithmetic,
                    str(found.threads),
                    verdict.over or found.unit,
                    f"{verdict.value:g}",
                    verdict.target,
                    "holds" if verdict.holds else "MISSED",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def interleaved(measures: Mapping[str, Measure], rounds: int, seconds: float, *, warm: bool = True) -> Series:
    """A B C A B C ..., after one round that does not count if `warm`.

    At least one round; no further one is begun that would end after `seconds`.
    """
    results: Series = {label: [] for label in measures}
    started = begun = time.perf_counter()
    for number in range(rounds + warm):
        now = time.perf_counter()
        if number > warm and now - started + (now - begun) > seconds:
            break
        begun = now
        for label, measure in measures.items():
            result = measure()
            if number >= warm:
                results[label].append(result)
    return results
