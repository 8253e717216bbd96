"""The line that says how far a download is."""

from __future__ import annotations

import pytest

from caldrix_client.meter import Meter
from caldrix_protocol import sizes

MB = 10**6


def test_the_rate_is_that_since_the_step_began() -> None:
    meter = Meter()
    assert meter.text("download", 100 * MB, 988 * MB, "bytes", 5.0) == "download: 10 %"
    assert meter.text("download", 110 * MB, 988 * MB, "bytes", 5.9) == "download: 11 %"
    assert meter.text("download", 200 * MB, 988 * MB, "bytes", 9.0) == (
        "download: [####................] 20 % of 988 MB, 25 MB/s, 32 s left"
    )
    assert meter.text("download", 988 * MB, 988 * MB, "bytes", 9.0).startswith(
        "download: [####################] 100 % of 988 MB, "
    )


def test_another_step_is_measured_anew() -> None:
    meter = Meter()
    meter.text("download", 0, 100, "bytes", 0.0)
    assert meter.text("weights", 50, 100, "bytes", 8.0) == "weights: 50 %"
    assert meter.text("weights", 10, 100, "bytes", 16.0) == "weights: 10 %"


def test_what_cannot_be_measured() -> None:
    meter = Meter()
    assert meter.text("prompt", 1, 0, "tokens", 0.0) == "prompt: 1 tokens"
    assert meter.text("prompt", 5, 10, "tokens", 9.0) == "prompt: 50 %"
    assert meter.text("stalled", 5, 10, "bytes", 0.0) == "stalled: 50 %"
    assert meter.text("stalled", 5, 10, "bytes", 9.0) == "stalled: 50 %"
    assert "] 100 % of 10 B" in meter.text("stalled", 50, 10, "bytes", 9.1)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (240_288, "240 kB"),
        (999_499, "999 kB"),
        (999_999, "999 kB"),
        (269_060_552, "269 MB"),
        (17_179_869_184, "17.2 GB"),
        (10**15, "1000 TB"),
    ],
)
def test_sizes(count: int, shown: str) -> None:
    assert sizes.size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (99, "99 s"), (720, "12 min"), (12_600, "3.5 h")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert sizes.duration(seconds) == shown
