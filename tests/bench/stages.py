"""Where the time of a decode step goes: every stage of the program run by itself, in the program's order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from caldrix_kernels.step import layout as at
from caldrixd.lanes.lane import Rows
from tests.bench.contestants import Ours
from tests.bench.engine import WARM
from tests.bench.figures import Figure, figure
from tests.bench.loaded import Loaded

NAMES = {
    at.EMBED: "embed",
    at.NORM: "norm",
    at.LINEAR: "linear",
    at.HEADS: "heads",
    at.ATTENTION: "attention",
    at.GATHER: "gather",
    at.ROUTE: "route",
    at.DISPATCH: "dispatch",
    at.COMBINE: "combine",
    at.CONV: "convolution",
    at.DELTA: "delta",
    at.GATED_NORM: "gated-norm",
    at.ARGMAX: "argmax",
}
EPILOGUES = {at.STORE: "store", at.ADD: "add", at.SILU_MUL: "gate-up"}
EMPTY = (0, 0)


def stages(loaded: Loaded) -> Iterator[Figure]:
    """Microseconds a token by kind of stage; the cost of a call that runs nothing is taken off each.

    The sum exceeds a whole step a little: between stages the pool threads wait for a new command.
    """
    ours, tokens = loaded.ours["f32"], loaded.tokens
    ours.use(loaded.effort.threads)
    program = ours.program._lowered.program
    kinds = [_kind(int(row[at.OP]), int(row[at.EPILOGUE])) for row in program]
    ours.feed(tokens[:WARM], 0)
    rows = Rows([ours.slot], [WARM], tokens[WARM : WARM + 1], [0])
    spent: dict[str, list[float]] = {kind: [] for kind in ["whole", *dict.fromkeys(kinds)]}
    for _ in range(loaded.effort.rounds):
        nothing = statistics.median(_microseconds(ours, rows, EMPTY) for _ in range(20))
        spent["whole"].append(_microseconds(ours, rows, (0, len(kinds))) - nothing)
        sums = dict.fromkeys(kinds, 0.0)
        for number, kind in enumerate(kinds):
            sums[kind] += _microseconds(ours, rows, (number, number + 1)) - nothing
        for kind, total in sums.items():
            spent[kind].append(total)
    for kind, totals in spent.items():
        yield figure(f"stage-{kind}", loaded.case("f32", ours.threads), totals, unit="us/token")


def _kind(op: int, epilogue: int) -> str:
    return f"{NAMES[op]}-{EPILOGUES[epilogue]}" if op == at.LINEAR else NAMES[op]


def _microseconds(ours: Ours, rows: Rows, ops: tuple[int, int]) -> float:
    started = time.perf_counter()
    ours.program.step(rows, threads=ours.threads, ops=ops)
    return (time.perf_counter() - started) * 1e6
