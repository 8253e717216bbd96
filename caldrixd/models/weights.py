"""The tensors of a model directory, mapped, and whether they are those of the plan."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import open_regular, reason_of
from caldrixd.models.changed import Identity, changed, identity
from caldrixd.models.files import weight_files
from caldrixd.models.header import Entry, read_header
from caldrixd.plan.plan import Plan, Tensor

if TYPE_CHECKING:
    # The daemon reads headers too and starts sooner without it.
    import numpy as np
    import numpy.typing as npt

MAX_TENSORS = 200_000
MAX_STACKED = 4096
NOT_STACKED: Mapping[str, Sequence[str]] = MappingProxyType({})
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: a file, mapped, where its data section starts, and the header entry."""

    file: str
    mapped: mmap.mmap
    start: int
    entry: Entry

    def data(self) -> npt.NDArray[np.uint8]:
        import numpy as np

        entry = self.entry
        return np.frombuffer(self.mapped, np.uint8, entry.end - entry.begin, self.start + entry.begin)

    def release(self) -> None:
        """Drop the pages that hold nothing but this tensor."""
        if hasattr(mmap, "MADV_DONTNEED"):
            begin = -(-(self.start + self.entry.begin) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (self.start + self.entry.end) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                self.mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, as views of the mapped files; each view is aligned to its item size."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        import numpy as np

        place = self._places[name]
        data = place.data()
        if data.size and data.ctypes.data % ITEM_BYTES.get(place.entry.dtype, 1):
            # The format allows any offset; kernels do not. The copy takes the place of the file's pages, and
            # goes back to the system as they do: what malloc has, it may keep.
            copy = np.frombuffer(mmap.mmap(-1, data.size), np.uint8)
            copy[:] = data
            data = copy
            place.release()
            data.flags.writeable = False
        return Tensor(place.entry.dtype, place.entry.shape, data, place.release)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model, mapped read-only. `size` is their bytes on disk."""

    tensors: Tensors
    entries: Mapping[str, Entry]
    size: int
    directory: Path
    files: Identity

    def check(
        self, plan: Plan, ignored: Sequence[str] = (), *, architecture: str = "this architecture"
    ) -> None:
        """Every weight of the plan is there in its shape and a known dtype, and no tensor is left over.

        Tensors whose names match one of `ignored` (`*` for anything) may be left over. Refused
        "weights/...".
        """
        check(self.entries, plan, ignored, architecture=architecture)

    def check_unchanged(self) -> None:
        """What was read of the tensors is one state of their files. Refused "weights/...", as in `lost`."""
        if changed(self.directory, self.files) is not None:
            raise lost(self.directory, self.files)


def open_checkpoint(directory: Path, stacked: Mapping[str, Sequence[str]] = NOT_STACKED) -> Checkpoint:
    """Read every header and map every file. Refused "weights/..." and what `weight_files` refuses.

    A tensor whose last name is in `stacked` is offered as the matrices it holds: of each expert, those
    parts in turn.
    """
    places: dict[str, _Place] = {}
    stands: dict[str, str] = {}
    files = _identity(directory)
    for file, *_ in files:
        start, entries, mapped = _open(directory / file)
        for tensor, entry in entries.items():
            for name, part in _matrices(tensor, entry, stacked).items():
                _place(stands, name, file)
                places[name] = _Place(file, mapped, start, part)
        _check_count(places, file)
    size = sum(place.entry.end - place.entry.begin for place in places.values())
    entries = {name: place.entry for name, place in places.items()}
    return Checkpoint(Tensors(places), entries, size, directory, files)


def _identity(directory: Path) -> Identity:
    names = weight_files(directory)
    try:
        return identity(directory, names)
    except OSError as error:
        raise Refused("model/not-readable", path=directory, reason=reason_of(error)) from None


def lost(directory: Path, before: Identity) -> Refused:
    """Why mapped weights could not be read to their end, or not as one state of their files.

    `before` is what the model's files were. A file that is none any more is refused as `read_entries` does.
    """
    try:
        read_entries(directory)
    except Refused as refused:
        return refused
    name = changed(directory, before)
    return Refused("weights/disk", path=directory) if name is None else Refused("weights/changed", file=name)


def check(
    entries: Mapping[str, Entry], plan: Plan, ignored: Sequence[str] = (), *, architecture: str
) -> None:
    """The same of tensors of which the headers are known alone."""
    needed = {weight.name: weight.shape for weight in plan.weights}
    used = {
        name: entry
        for name, entry in entries.items()
        if name in needed or not any(fnmatchcase(name, pattern) for pattern in ignored)
    }
    for name, entry in used.items():
        if entry.dtype not in ITEM_BYTES:
            raise Refused("weights/dtype", name=name, dtype=entry.dtype)
    for name in used:
        if name not in needed:
            raise Refused("weights/unknown-tensor", name=name, architecture=architecture)
    for name, shape in needed.items():
        if name not in used:
            raise Refused("weights/missing-tensor", name=name)
        if used[name].shape != shape:
            raise Refused("weights/shape", name=name, shape=list(used[name].shape), expected=list(shape))


def read_entries(directory: Path, stacked: Mapping[str, Sequence[str]] = NOT_STACKED) -> dict[str, Entry]:
    """Every tensor by name, from the headers alone. Refused as `open_checkpoint` does."""
    places: dict[str, str] = {}
    found: dict[str, Entry] = {}
    for file in weight_files(directory):
        for tensor, entry in _read_header(directory / file).items():
            for name, part in _matrices(tensor, entry, stacked).items():
                _place(places, name, file)
                found[name] = part
        _check_count(found, file)
    return found


def _place(places: dict[str, str], name: str, file: str) -> None:
    """Remember where a tensor stands. Refused "weights/duplicate-tensor"."""
    if name in places:
        raise Refused("weights/duplicate-tensor", name=name, file=places[name], other=file)
    places[name] = file


def _check_count(tensors: Sized, file: str) -> None:
    if len(tensors) > MAX_TENSORS:
        raise Refused("weights/header", file=file, reason=f"there are over {MAX_TENSORS} tensors")


def _matrices(name: str, entry: Entry, stacked: Mapping[str, Sequence[str]]) -> Mapping[str, Entry]:
    """A tensor as it is, or the matrices in it: "experts.down_proj" is "experts.0.down_proj.weight", ..."""
    stem, _, last = name.rpartition(".")
    parts = stacked.get(last)
    if parts is None or len(entry.shape) != 3:
        return {name: entry}
    experts, rows, columns = entry.shape
    size = (entry.end - entry.begin) // max(1, experts * len(parts))
    if not size or rows % len(parts) or experts > MAX_STACKED:
        return {name: entry}
    shape = (rows // len(parts), columns)
    names = [f"{stem}.{expert}.{part}.weight" for expert in range(experts) for part in parts]
    begins = range(entry.begin, entry.end, size)
    return {
        view: Entry(entry.dtype, shape, begin, begin + size)
        for view, begin in zip(names, begins, strict=False)
    }


def _open(path: Path) -> tuple[int, dict[str, Entry], mmap.mmap]:
    """Where the data section of one file starts, its header, and the whole file, from one descriptor."""
    with _opened(path) as (file, size):
        start, entries = read_header(file, path.name, size)
        try:
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        except ValueError:  # it is no longer as long
            raise Refused("weights/changed", file=path.name) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Read ahead by 2 MB, and map what the page cache holds in as few faults.
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return start, entries, mapped


def _read_header(path: Path) -> dict[str, Entry]:
    with _opened(path) as (file, size):
        return read_header(file, path.name, size)[1]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A weight file and its size in bytes."""
    if not path.name.isascii() or not path.name.isprintable():
        raise Refused("weights/header", file=ascii(path.name)[:200], reason="its name is not plain ASCII")
    try:
        with open_regular(path) as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno == errno.ENOMEM:  # no room to map a file says nothing about the file
            raise MemoryError from None
        raise Refused("weights/header", file=path.name, reason=reason_of(error)) from None
