"""Fills the weight arena: panels packed in parallel at memory speed, gains and biases widened to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from caldrix_kernels.formats import widen
from caldrix_kernels.step.layout import FORMAT_BYTES, FORMATS, PANEL, panel_bytes, round_up
from caldrixd.lanes import holding
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.lowered import Lowered, Packed, Small
from caldrixd.plan.plan import Tensor

PANELS_A_TASK = 64

Item = TypeVar("Item", bound=np.generic)


class Weights:
    """The packed weights of a program: `addresses` and `formats` by name in the address table."""

    def __init__(self, arena: Arena, addresses: dict[str, int], formats: dict[str, int]) -> None:
        self.arena = arena
        self.addresses = addresses
        self.formats = formats
        self.row_bytes: dict[str, int] = {}


def _float32(tensor: Tensor) -> npt.NDArray[np.float32]:
    return widen(tensor.data, tensor.dtype, tensor.shape)


def _small(small: Small, tensor: Tensor) -> npt.NDArray[np.float32]:
    """In the lane's form: rows padded to whole vectors."""
    values = _float32(tensor) + np.float32(small.offset)
    rows = values[:, 0, :].T if values.ndim == 3 else values.reshape(1, -1)
    held = np.zeros((len(rows), round_up(rows.shape[1], holding.VECTOR)), np.float32)
    held[:, : rows.shape[1]] = rows
    return held.reshape(-1)


def _in_order(packed: Packed, of: Mapping[str, npt.NDArray[Item]], zero: Item) -> npt.NDArray[Item]:
    """For each packed row its item in `of`, where a tensor may have one a row, or else `zero`."""
    items = np.full(packed.rows, zero)
    begin = 0
    for segment in packed.segments:
        part = np.full((len(segment.tensors), segment.turns * segment.turn), zero)
        for tensor, own in zip(segment.tensors, part, strict=True):
            if tensor in of:
                own[: segment.count] = of[tensor][segment.first : segment.first + segment.count]
        turns = part.reshape(len(part), segment.turns, segment.turn).swapaxes(0, 1)
        items[begin : begin + part.size] = turns.reshape(-1)
        begin += part.size
    return items


def _bias(packed: Packed, tensors: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
    biases = {tensor: _float32(tensors[name]) for tensor, name in packed.biases.items()}
    return _in_order(packed, biases, np.float32(0))


def _bytes_in(form: int, tensor: Tensor) -> npt.NDArray[np.uint8]:
    """As they are stored, or, where the format is another one, a copy in float32."""
    data = tensor.data if FORMATS[tensor.dtype] == form else _float32(tensor).view(np.uint8)
    return data.reshape(-1)


def _addresses(data: npt.NDArray[np.uint8], row_bytes: int) -> npt.NDArray[np.int64]:
    """Where each row begins."""
    begin = data.ctypes.data
    return np.arange(begin, begin + data.size, row_bytes)


def pack_weights(
    lowered: Lowered, tensors: Mapping[str, Tensor], pack: Callable[..., None], threads: int
) -> Weights:
    """Everything the program reads, in one arena of huge pages."""
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: dtype for name, (dtype, _) in stored.items()}
    formats = holding.formats(lowered, dtypes)
    sizes = holding.weight_sizes(lowered, dtypes, {name: shape for name, (_, shape) in stored.items()})
    offsets: dict[str, int] = {}
    total = 0
    for name, size in sizes.items():
        offsets[name] = total
        total = round_up(total + size, holding.ALIGNMENT)
    arena = Arena(total, huge=True)
    weights = Weights(arena, {name: arena.address + at for name, at in offsets.items()}, formats)

    def put(name: str, data: npt.NDArray[np.uint8]) -> None:
        arena.bytes[offsets[name] : offsets[name] + data.size] = data

    for name in lowered.tables:
        put(name, tensors[name].data.reshape(-1))
        weights.row_bytes[name] = tensors[name].data.size // tensors[name].shape[0]
        tensors[name].release()
    line = _Line(
        _Matrix(packed, formats[name], weights.addresses[name], tensors)
        for name, packed in lowered.packed.items()
    )
    if any(holding.mixed(packed, dtypes) for packed in lowered.packed.values()):
        threads = min(threads, holding.READ_AT_ONCE)
    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(line.work, pack) for _ in range(threads)]
        for name, packed in lowered.packed.items():
            if packed.biases:
                put(holding.bias_of(name), _bias(packed, tensors).view(np.uint8))
        for name, small in lowered.small.items():
            put(name, _small(small, tensors[small.tensor]).view(np.uint8))
        for worker in workers:
            worker.result()
    return weights


class _Matrix:
    """A matrix that is being packed to the address `target`, and the memory that is read for it."""

    def __init__(self, packed: Packed, form: int, target: int, tensors: Mapping[str, Tensor]) -> None:
        self._form, self._target, self._columns = form, target, packed.columns
        self._tensors = {name: tensors[name] for name in packed.tensors}
        self._data = {name: _bytes_in(form, tensor) for name, tensor in self._tensors.items()}
        row_bytes = packed.columns * FORMAT_BYTES[form]
        self._zero = np.zeros(row_bytes, np.uint8)
        addresses = {name: _addresses(data, row_bytes) for name, data in self._data.items()}
        self._rows = _in_order(packed, addresses, np.int64(self._zero.ctypes.data))
        self.panels = packed.rows // PANEL
        self._tasks = -(-self.panels // PANELS_A_TASK)

    def pack(self, kernel: Callable[..., None], first: int) -> None:
        """The task that begins with panel `first`."""
        last = min(first + PANELS_A_TASK, self.panels)
        padded = round_up(self._columns, PANEL)
        size = panel_bytes(self._form, padded)
        rows = self._rows.ctypes.data
        kernel(self._form, rows, first, last, self._columns, padded, self._target, size)

    def end_task(self) -> None:
        """With the last one the memory that was read is given back, of files and of copies."""
        self._tasks -= 1
        if not self._tasks:
            self._data.clear()
            for tensor in self._tensors.values():
                tensor.release()
            self._tensors.clear()


class _Line:
    """Panels that threads take in turn. Who takes the first of a matrix makes it ready."""

    def __init__(self, matrices: Iterator[_Matrix]) -> None:
        self._lock = Lock()
        self._tasks = (
            (matrix, first) for matrix in matrices for first in range(0, matrix.panels, PANELS_A_TASK)
        )

    def work(self, kernel: Callable[..., None]) -> None:
        """Pack until nothing is left."""
        matrix = None
        while True:
            with self._lock:
                if matrix is not None:
                    matrix.end_task()
                task = next(self._tasks, None)
            if task is None:
                return
            matrix, first = task
            matrix.pack(kernel, first)
