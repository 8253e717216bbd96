"""One file by byte ranges, and the borders that a hub on loopback cannot show."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import library, snapshot, transfer
from caldrixd.fetcher.library import LEAST_RATE, File, Hub, NetworkError, Slow
from caldrixd.models.hub import Repo

DATA = bytes(range(256)) * 40
FILE = File("model.safetensors", len(DATA), hashlib.sha256(DATA).hexdigest())
PATIENCE = transfer.Patience(seconds=0.0, attempts=3)


class Answers:
    """A source whose answers are (status, headers, body) in their order; None is a broken connection."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes] | None) -> None:
        self.answers = list(answers)
        self.offsets: list[int] = []

    @contextmanager
    def stream(self, name: str, commit: str, offset: int) -> Iterator[Any]:
        self.offsets.append(offset)
        answer = self.answers.pop(0)
        if answer is None:
            raise NetworkError("broken")
        status, headers, body = answer
        request = SimpleNamespace(url=SimpleNamespace(host="hub"))
        pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
        yield SimpleNamespace(
            status_code=status, headers=headers, request=request, iter_raw=lambda: iter(pieces)
        )

    def refuse_status(self, response: Any) -> None:
        raise Refused("hub/status", model="m", host="hub", status=response.status_code)

    def failed(self, error: Exception) -> Refused:
        return Refused("hub/unreachable", model="m", host="hub", reason=error)


def part(start: int, stop: int = len(DATA), total: str = str(len(DATA))) -> tuple[int, dict[str, str], bytes]:
    return 206, {"content-range": f"bytes {start}-{stop - 1}/{total}"}, DATA[start:stop]


def whole(length: int = len(DATA)) -> tuple[int, dict[str, str], bytes]:
    return 200, {"content-length": str(length)}, DATA[:length]


def fetch(path: Path, *answers: tuple[int, dict[str, str], bytes] | None) -> tuple[Answers, list[int]]:
    source, reports = Answers(*answers), list[int]()
    transfer.fetch(source, FILE, "0" * 40, path, PATIENCE, reports.append)
    return source, reports


@pytest.mark.parametrize(
    ("answers", "offsets"),
    [
        ([whole()], [0]),
        ([whole(5000), part(5000)], [0, 5000]),
        ([whole(5000), None, part(5000)], [0, 5000, 5000]),
        ([None, None, whole(100), None, None, part(100)], [0, 0, 0, 100, 100, 100]),
        ([whole(5000), whole()], [0, 5000]),  # a host without ranges
        ([whole(5000), part(5000, 6000), part(6000, total="*")], [0, 5000, 6000]),
        ([whole(5000), part(4000), part(5000)], [0, 5000, 5000]),  # another part than was asked for
        ([whole(5000), (416, {}, b""), whole()], [0, 5000, 0]),
        ([(503, {}, b""), (429, {}, b""), whole()], [0, 0, 0]),
    ],
)
def test_a_file_is_put_together(tmp_path: Path, answers: list[Any], offsets: list[int]) -> None:
    path = tmp_path / "blob"
    source, reports = fetch(path, *answers)
    assert path.read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [path]
    assert source.offsets == offsets
    assert reports[-1] == len(DATA)


@pytest.mark.parametrize(
    ("answers", "code", "left"),
    [
        ([None, None, None], "hub/stalled", 0),
        ([whole(100), whole(0), whole(0), whole(0)], "hub/stalled", 100),
        ([whole(100), (500, {}, b"")] + [(500, {}, b"")] * 2, "hub/stalled", 100),
        ([(200, {"content-length": str(len(DATA) + 1)}, DATA)], "hub/size", 0),
        ([(200, {}, DATA + b"x")], "hub/size", 10_000),
        ([whole(100), (206, {"content-range": f"bytes 100-200/{len(DATA) - 1}"}, b"x")], "hub/size", 100),
        ([(404, {}, b"")], "hub/status", 0),
        ([(200, {}, bytes(len(DATA)))], "hub/digest", None),
    ],
)
def test_what_is_refused(tmp_path: Path, answers: list[Any], code: str, left: int | None) -> None:
    """What came before the fault is kept, unless it is wrong."""
    with pytest.raises(Refused) as caught:
        fetch(tmp_path / "blob", *answers)
    assert caught.value.code == code
    kept = [path.read_bytes() for path in tmp_path.iterdir()]
    assert kept == ([] if left is None else [DATA[:left]])


def test_a_disk_that_fills_up_keeps_what_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, path = os.pwrite, tmp_path / "blob"

    def on_a_small_disk(descriptor: int, data: memoryview, offset: int) -> int:
        if offset >= 2500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: 2500 - offset], offset)

    monkeypatch.setattr(os, "pwrite", on_a_small_disk)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 0))
    with pytest.raises(Refused) as caught:
        fetch(path, whole())
    assert caught.value.code == "hub/disk-full"
    assert (caught.value.fields["needed"], caught.value.fields["free"]) == (1, 0)
    monkeypatch.setattr(os, "pwrite", write)
    source, _ = fetch(path, part(2500))
    assert source.offsets == [2500]
    assert path.read_bytes() == DATA


def test_where_there_are_no_links_the_file_itself_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, pointer = tmp_path / "blob", tmp_path / "pointer"
    blob.write_bytes(DATA)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    snapshot._link(blob, pointer)
    assert pointer.read_bytes() == DATA
    assert not pointer.is_symlink()


def asked(url: str) -> SimpleNamespace:
    return SimpleNamespace(url=url, headers={"authorization": "Bearer secret"}, method="GET", extensions={})


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(library, "set_client_factory", lambda factory: None)  # other tests have the usual one
    return Hub("https://hub.example", Repo("a/b", "main"), "a/b", tmp_path, 30.0)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://hub.example/a/b", True),
        ("https://HUB.example/a/b", True),
        ("https://hub.example:443/a/b", True),
        ("https://hub.example:444/a/b", False),
        ("https://cdn.hub.example/a", False),
        ("https://hub.example.evil.org/a", False),
        ("https://huggingface.co/a", False),
    ],
)
def test_the_token_is_for_the_endpoint_alone(secure: Hub, url: str, sent: bool) -> None:
    request = asked(url)
    secure._before(request)
    assert ("authorization" in request.headers) == sent


def test_no_way_leads_from_https_to_http(secure: Hub) -> None:
    with pytest.raises(Refused) as caught:
        secure._before(asked("http://hub.example/a"))
    assert caught.value.code == "hub/insecure"


def read_slowly(hub: Hub, pieces: list[bytes], pause: float) -> tuple[int, str]:
    """Read a body whose pieces come `pause` seconds after each other by the hub's clock.

    How many came, and what is said of the host.
    """
    now, got = 0.0, 0

    def slowly() -> Iterator[bytes]:
        nonlocal now
        for piece in pieces:
            now += pause
            yield piece

    hub._clock = lambda: now
    response = SimpleNamespace(
        status_code=200,
        headers={},
        iter_raw=slowly,
        request=SimpleNamespace(method="GET", url="https://cdn.example/a?X-Signature=secret"),
    )
    hub._after(response)
    try:
        for _ in response.iter_raw():
            got += 1
    except Slow as slow:
        return got, hub.failed(slow).text
    return got, ""


@pytest.mark.parametrize(
    ("pieces", "pause", "got"),
    [
        ([b"x"] * 9, 29.0, 2),  # a byte whenever the patience is nearly at its end: 87 s
        ([bytes(LEAST_RATE * 60 - 1)] + [b""] * 9, 60.0, 0),
        ([bytes(LEAST_RATE * 60)] * 9, 60.0, 9),
        ([bytes(1 << 30)] + [b"x"] * 9, 30.0, 3),  # fast, and then no more
        ([b"x"] * 9, 1.0, 9),
    ],
)
def test_a_host_that_sends_too_little_is_given_up(
    secure: Hub, pieces: list[bytes], pause: float, got: int
) -> None:
    said = "a/b: cdn.example sent less than 1024 bytes a second for 60 s" if got < len(pieces) else ""
    assert read_slowly(secure, pieces, pause) == (got, said)


def test_a_host_that_sends_a_byte_at_a_time_and_ends_is_given_up(tmp_path: Path) -> None:
    source = Answers(whole(5000), *[part(at, at + 1) for at in range(5000, 5009)])
    patience = transfer.Patience(seconds=0.5, attempts=3)
    with pytest.raises(Refused, match=r"stalled at 5003 of 10240 bytes: the host ended its answer early"):
        transfer.fetch(source, FILE, "0" * 40, tmp_path / "blob", patience, lambda done: None)


def test_a_slow_host_is_asked_again_and_then_named(tmp_path: Path) -> None:
    """The attempt that began well is worth another; those that bring a few bytes are not."""

    class Dripping(Answers):
        @contextmanager
        def stream(self, name: str, commit: str, offset: int) -> Iterator[Any]:
            with super().stream(name, commit, offset) as response:
                pieces = response.iter_raw()

                def raw() -> Iterator[bytes]:
                    yield from pieces
                    raise Slow("cdn.example", 60)

                response.iter_raw = raw
                yield response

        def failed(self, error: Exception) -> Refused:
            assert isinstance(error, Slow)
            return Refused("hub/slow", model="m", host=error.host, rate=1024, seconds=error.seconds)

    source = Dripping(whole(5000), *[part(at, at + 1) for at in range(5000, 5009)])
    patience = transfer.Patience(seconds=0.5, attempts=3)
    with pytest.raises(Refused) as caught:
        transfer.fetch(source, FILE, "0" * 40, tmp_path / "blob", patience, lambda done: None)
    assert caught.value.text == (
        "model.safetensors: the download stalled at 5003 of 10240 bytes: m: cdn.example sent less than 1024 "
        "bytes a second for 60 s; run the command again to go on from there"
    )
    assert source.offsets == [0, 5000, 5001, 5002]


@pytest.mark.parametrize(
    ("left", "there"),
    [((), 0), ((0,), 0), ((3, 5000, 7), 5000), ((len(DATA),), len(DATA) - 1), ((len(DATA) + 1,), 0)],
)
def test_what_is_there_is_what_the_next_attempt_goes_on_behind(
    tmp_path: Path, left: tuple[int, ...], there: int
) -> None:
    """A file that lacks its name alone is still to come, if only by a byte."""
    for number, length in enumerate(left):
        (tmp_path / f"{FILE.digest}.{number}{transfer.SUFFIX}").write_bytes(bytes(length))
    assert transfer.begun(tmp_path, FILE) == there
