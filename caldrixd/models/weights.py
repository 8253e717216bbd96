"""The tensors of a model directory, mapped, and whether they are those of the plan."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import open_regular, reason_of
from caldrixd.models.files import weight_files
from caldrixd.models.header import Entry, read_header
from caldrixd.plan.plan import Plan, Tensor

MAX_TENSORS = 200_000
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: a file's mapped bytes and its header entry."""

    file: str
    data: npt.NDArray[np.uint8]
    entry: Entry


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, as views of the mapped files; each view is aligned to its item size."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        data = place.data[place.entry.begin : place.entry.end]
        if data.size and data.ctypes.data % ITEM_BYTES.get(place.entry.dtype, 1):
            # The format allows any offset; kernels do not.
            data = data.copy()
            data.flags.writeable = False
        return Tensor(place.entry.dtype, place.entry.shape, data)

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

    def check(
        self, plan: Plan, ignored: Sequence[str] = (), *, architecture: str = "this architecture"
    ) -> None:
        """Every weight of the plan is there in its shape and a known dtype, and no tensor is left over.

        Tensors whose names end in one of `ignored` may be left over. Refused "weights/...".
        """
        needed = {weight.name: weight.shape for weight in plan.weights}
        for name, shape in needed.items():
            entry = self.entries.get(name)
            if entry is None:
                raise Refused("weights/missing-tensor", name=name)
            if entry.dtype not in ITEM_BYTES:
                raise Refused("weights/dtype", name=name, dtype=entry.dtype)
            if entry.shape != shape:
                raise Refused("weights/shape", name=name, shape=list(entry.shape), expected=list(shape))
        for name in self.entries:
            if name not in needed and not name.endswith(tuple(ignored)):
                raise Refused("weights/unknown-tensor", name=name, architecture=architecture)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read every header and map every file. Refused "weights/..." and what `weight_files` refuses."""
    places: dict[str, _Place] = {}
    for name in weight_files(directory):
        entries, data = _open(directory / name)
        for tensor, entry in entries.items():
            if tensor in places:
                other = places[tensor].file
                raise Refused("weights/duplicate-tensor", name=tensor, file=other, other=name)
            places[tensor] = _Place(name, data, entry)
        if len(places) > MAX_TENSORS:
            raise Refused("weights/header", file=name, reason=f"there are over {MAX_TENSORS} tensors")
    size = sum(place.entry.end - place.entry.begin for place in places.values())
    return Checkpoint(Tensors(places), {name: place.entry for name, place in places.items()}, size)


def _open(path: Path) -> tuple[dict[str, Entry], npt.NDArray[np.uint8]]:
    """The header and the data section of one file, from one descriptor."""
    if not path.name.isascii() or not path.name.isprintable():
        raise Refused("weights/header", file=ascii(path.name)[:200], reason="its name is not plain ASCII")
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start, entries = read_header(file, path.name, size)
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    except OSError as error:
        if error.errno == errno.ENOMEM:  # no room to map a file says nothing about the file
            raise MemoryError from None
        raise Refused("weights/header", file=path.name, reason=reason_of(error)) from None
    return entries, np.frombuffer(mapped, np.uint8)[start:]
