"""How far a long step is, as one line: a percentage, then also a bar, the rate and the time left."""

from __future__ import annotations

from caldrix_protocol.refusals import sentence
from caldrix_protocol.sizes import duration, size

WIDTH = 20  # of the bar, in characters
SETTLED = 1.0  # seconds after which a rate means something


class Meter:
    """Measures the step that runs; another name begins another step."""

    def __init__(self) -> None:
        self._what = ""
        self._began = (0.0, 0)  # seconds, units

    def text(self, what: str, done: int, total: int, unit: str, now: float) -> str:
        """The line for `done` of `total` units (0: unknown) at the time `now` in seconds."""
        if what != self._what or done < self._began[1]:
            self._what, self._began = what, (now, done)
        if not total:
            return sentence("status/progress-open", what=what, done=done, unit=unit)
        done = min(done, total)
        percent = 100 * done // total
        seconds, gained = now - self._began[0], done - self._began[1]
        if unit != "bytes" or seconds < SETTLED or gained <= 0:
            return sentence("status/progress", what=what, percent=percent)
        rate = gained / seconds
        return sentence(
            "status/progress-rate",
            what=what,
            bar=("#" * (WIDTH * done // total)).ljust(WIDTH, "."),
            percent=percent,
            size=size(total),
            rate=size(round(rate)),
            left=duration((total - done) / rate),
        )
