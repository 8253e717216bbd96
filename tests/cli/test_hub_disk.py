"""A disk that fills up in the middle of a download, from the command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hub
from tests.support.cli import IMPORTS, Home, finish
from tests.support.hub_cli import NAME, WEIGHTS, below, model, pull, refused, start

FILE = "model.safetensors"
FITS = 150_000  # bytes of the weights

# Of what caldrix itself writes the disk takes only so much, as long as the file is there.
FULL = """
import errno, os
write = os.pwrite

def pwrite(descriptor, data, offset):
    if not os.path.exists({full!r}):
        return write(descriptor, data, offset)
    if offset >= {fits}:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(descriptor, data[: {fits} - offset], offset)

os.pwrite = pwrite
"""


def test_a_disk_that_fills_up_is_refused_with_numbers_and_the_next_run_goes_on(
    home: Home, tmp_path: Path
) -> None:
    hooks, full = tmp_path / "hooks", tmp_path / "full"
    hooks.mkdir()
    full.touch()
    (hooks / "sitecustomize.py").write_text(FULL.format(full=str(full), fits=FITS))
    paths = {"PYTHONPATH": os.pathsep.join((str(hooks), IMPORTS))}
    with hub.serve({NAME: model()}) as server:
        for _ in range(2):
            result = pull(home, tmp_path, server, **paths)
            refused(result, FILE, "the disk is full at ", "1 MB are still to come and ", "MB are free")
            assert sum(path.name == FILE for path in below(tmp_path)) == 0
            (partial,) = [path for path in below(tmp_path) if path.name.endswith(".caldrix-partial")]
            assert partial.read_bytes() == WEIGHTS[:FITS]
        full.unlink()
        assert pull(home, tmp_path, server, **paths).status == 0
    ranges = [request.range for request in server.requests if request.host == "cdn"]
    assert ranges == [None, f"bytes={FITS}-", f"bytes={FITS}-"]
    (snapshot,) = (tmp_path / "hf/hub/models--tiny--llama/snapshots").iterdir()
    assert (snapshot / FILE).read_bytes() == WEIGHTS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "size=1m", "none", path), capture_output=True
    ).returncode:
        pytest.skip("only root can mount the small file system")
    try:
        yield path
    finally:
        subprocess.run(("umount", "--lazy", path), check=True)


def fill(directory: Path) -> None:
    """Take all that is left on a disk."""
    with (directory / "filled").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("name", ["tokenizer.json", FILE])
def test_a_small_disk(shared: Home, tmp_path: Path, small_disk: Path, name: str) -> None:
    """A real one, filled by somebody else while a small file or the weights come."""
    with hub.serve({NAME: model()}) as server:
        server.fail("stall", name, at=20_000, times=1)
        client = start(shared, small_disk, server, "pull", NAME)
        server.wait(lambda: server.sent(name) == 20_000)
        fill(small_disk)
        server.release()
        refused(finish(client), " 0 MB are free")
        refused(pull(shared, small_disk, server), " 0 MB are free")
        (small_disk / "filled").unlink()
        assert pull(shared, small_disk, server).status == 0
    (snapshot,) = (small_disk / "hf/hub/models--tiny--llama/snapshots").iterdir()
    assert (snapshot / FILE).read_bytes() == WEIGHTS
