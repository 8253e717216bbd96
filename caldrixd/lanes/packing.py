"""Fills the weight arena: panels packed in parallel at memory speed, gains and biases widened to float32."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caldrix_kernels.formats import widen
from caldrix_kernels.step.layout import FORMAT_BYTES, FORMATS, PANEL, panel_bytes, round_up
from caldrixd.lanes import holding
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.lowered import Lowered, Packed, Small
from caldrixd.plan.plan import Tensor

PANELS_A_TASK = 64
# Matrices that are prepared while others are packed.
AHEAD = 8
# No tensor has this name.
ZERO = ""


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


def _bias(packed: Packed, tensors: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
    parts = []
    for segment in packed.segments:
        name = packed.biases.get(segment.tensor or "")
        if name is None:
            parts.append(np.zeros(segment.count, np.float32))
        else:
            parts.append(_float32(tensors[name])[segment.first : segment.first + segment.count])
    return np.concatenate(parts)


def _row_addresses(
    packed: Packed, sources: Mapping[str, npt.NDArray[np.uint8]], row_bytes: int
) -> npt.NDArray[np.int64]:
    """Where each packed row is stored. `sources`: the tensors' bytes, in one format, and of a zero row."""
    begins = {name: source.ctypes.data for name, source in sources.items()}
    firsts = [begins[segment.tensor or ZERO] + segment.first * row_bytes for segment in packed.segments]
    steps = [row_bytes if segment.tensor else 0 for segment in packed.segments]
    counts = np.array([segment.count for segment in packed.segments])
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows: npt.NDArray[np.int64] = np.repeat(firsts, counts) + np.repeat(steps, counts) * within
    return rows


def pack_weights(
    lowered: Lowered, tensors: Mapping[str, Tensor], pack: Callable[..., None], threads: int
) -> Weights:
    """Everything the program reads, in one arena of huge pages."""
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: dtype for name, (dtype, _) in stored.items()}
    formats = holding.formats(lowered, dtypes)
    sizes = holding.weight_sizes(lowered, dtypes, {name: shape for name, (_, shape) in stored.items()})
    small = {name: _small(held, tensors[held.tensor]) for name, held in lowered.small.items()}
    offsets: dict[str, int] = {}
    total = 0
    for name, size in sizes.items():
        offsets[name] = total
        total = round_up(total + size, holding.ALIGNMENT)
    arena = Arena(total, huge=True)
    weights = Weights(arena, {name: arena.address + at for name, at in offsets.items()}, formats)

    def put(name: str, data: npt.NDArray[np.uint8]) -> None:
        arena.bytes[offsets[name] : offsets[name] + data.size] = data

    for name, packed in lowered.packed.items():
        if packed.biases:
            put(holding.bias_of(name), _bias(packed, tensors).view(np.uint8))
    for name, values in small.items():
        put(name, values.view(np.uint8))
    for name in lowered.tables:
        put(name, tensors[name].data.reshape(-1))
        weights.row_bytes[name] = tensors[name].data.size // tensors[name].shape[0]
        tensors[name].release()
    with ThreadPoolExecutor(threads) as pool:
        begun: deque[_Packing] = deque()
        for name, packed in lowered.packed.items():
            begun.append(_begin(packed, formats[name], weights.addresses[name], tensors, pack, pool))
            most = AHEAD if begun[-1].mapped else holding.READ_AT_ONCE
            while len(begun) > most:
                begun.popleft().finish()
        for packing in begun:
            packing.finish()
    return weights


@dataclass(frozen=True)
class _Packing:
    """A matrix that is being packed. `sources` and `rows` are the memory that is read; `mapped`: of files,
    not copied."""

    tasks: Sequence[Future[None]]
    tensors: Sequence[Tensor]
    mapped: bool
    sources: Mapping[str, npt.NDArray[np.uint8]]
    rows: npt.NDArray[np.int64]

    def finish(self) -> None:
        for task in self.tasks:
            task.result()
        for tensor in self.tensors:
            tensor.release()


def _begin(
    packed: Packed,
    form: int,
    target: int,
    tensors: Mapping[str, Tensor],
    pack: Callable[..., None],
    pool: ThreadPoolExecutor,
) -> _Packing:
    stored = {name: tensors[name] for name in packed.tensors}
    same = all(FORMATS[tensor.dtype] == form for tensor in stored.values())
    sources = {
        name: tensor.data.reshape(-1) if same else _float32(tensor).view(np.uint8).reshape(-1)
        for name, tensor in stored.items()
    }
    row_bytes = packed.columns * FORMAT_BYTES[form]
    sources[ZERO] = np.zeros(row_bytes, np.uint8)
    rows = _row_addresses(packed, sources, row_bytes)
    panels = packed.rows // PANEL
    padded = round_up(packed.columns, PANEL)
    tasks = [
        pool.submit(
            pack,
            form,
            rows.ctypes.data,
            first,
            min(first + PANELS_A_TASK, panels),
            packed.columns,
            padded,
            target,
            panel_bytes(form, padded),
        )
        for first in range(0, panels, PANELS_A_TASK)
    ]
    return _Packing(tasks, list(stored.values()), same, sources, rows)
