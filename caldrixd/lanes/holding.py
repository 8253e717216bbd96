"""What the CPU lane holds of a program, from shapes and stored formats alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import FLOAT32, FORMAT_BYTES, FORMATS, PANEL, panel_bytes, round_up
from caldrixd.lanes.lowered import (
    LOGITS,
    NORMED,
    ROPE,
    WANTED_ATTENDED,
    WANTED_RESIDUAL,
    Lowered,
    Packed,
)
from caldrixd.lanes.lowering import lower
from caldrixd.plan.memory import Cost
from caldrixd.plan.plan import Plan

ALIGNMENT = 64
VECTOR = 16
HUGE_PAGE = 2 << 20
MAX_ROWS = 512
# Matrices that are read at a time while weights are packed.
READ_AT_ONCE = 2
# Float64 and integer numbers that stand for each angle while a rope table is made.
ANGLE_BYTES = 80

Shapes = Mapping[str, tuple[int, ...]]


def costs(plan: Plan, dtypes: Mapping[str, str], *, threads: int, arithmetic: str) -> Callable[[int], Cost]:
    """What one sequence of so many tokens costs, filled to its end by replies in `arithmetic`.

    `dtypes` are the stored formats of the plan's weights, by name. Refused as `lower` does.
    """
    lowered = lower(plan)
    shapes = {weight.name: weight.shape for weight in plan.weights}
    sizes = weight_sizes(lowered, dtypes, shapes)
    weights = _huge(sum(round_up(size, ALIGNMENT) for size in sizes.values()))
    reading = _most_read(lowered, sizes, dtypes, shapes)
    return lambda ctx: Cost(
        weights=weights,
        passing=max(reading, _angles(plan, lowered, ctx)),
        state=_state_bytes(lowered, ctx),
        activations=_buffer_bytes(plan, lowered, ctx, threads, arithmetic),
    )


def formats(lowered: Lowered, dtypes: Mapping[str, str]) -> dict[str, int]:
    """The stored format of each matrix and table; tensors of different formats meet in float32, exactly."""
    found = {}
    for name, packed in lowered.packed.items():
        stored = {FORMATS[dtypes[tensor]] for tensor in packed.tensors}
        found[name] = stored.pop() if len(stored) == 1 else FLOAT32
    return found | {name: FORMATS[dtypes[name]] for name in lowered.tables}


def mixed(packed: Packed, dtypes: Mapping[str, str]) -> bool:
    """Whether tensors of different formats meet in it."""
    return len({dtypes[tensor] for tensor in packed.tensors}) > 1


def weight_sizes(lowered: Lowered, dtypes: Mapping[str, str], shapes: Shapes) -> dict[str, int]:
    """Bytes of everything in the weight arena, in its order."""
    stored = formats(lowered, dtypes)
    sizes: dict[str, int] = {}
    for name, packed in lowered.packed.items():
        sizes[name] = packed.rows // PANEL * panel_bytes(stored[name], round_up(packed.columns, PANEL))
        if packed.biases:
            sizes[bias_of(name)] = packed.rows * 4
    for name, small in lowered.small.items():
        shape = shapes[small.tensor]
        rows, width = (shape[2], shape[0]) if len(shape) == 3 else (1, math.prod(shape))
        sizes[name] = round_up(rows * round_up(width, VECTOR) * 4, PANEL * 4)
    for name in lowered.tables:
        sizes[name] = _stored(name, dtypes, shapes)
    return sizes


def bias_of(name: str) -> str:
    """What the biases of a packed matrix are called in the address table."""
    return f"bias of {name}"


def _stored(tensor: str, dtypes: Mapping[str, str], shapes: Shapes) -> int:
    return math.prod(shapes[tensor]) * FORMAT_BYTES[FORMATS[dtypes[tensor]]]


def _most_read(lowered: Lowered, sizes: Mapping[str, int], dtypes: Mapping[str, str], shapes: Shapes) -> int:
    """The most bytes that packing holds beyond all packed weights: files are mapped matrix by matrix."""
    to_come = sum(sizes[name] for name in lowered.packed)
    tables = [_stored(name, dtypes, shapes) - to_come for name in lowered.tables]
    most = max([0, *tables])
    read: list[int] = []
    for name, packed in lowered.packed.items():
        read = [*read, sum(_sources(packed, dtypes, shapes))][-READ_AT_ONCE:]
        to_come -= sizes[name]
        most = max(most, sum(read) - to_come)
    return most


def _sources(packed: Packed, dtypes: Mapping[str, str], shapes: Shapes) -> Iterator[int]:
    """Bytes that are read of each tensor; where formats differ, also those of its float32 copy."""
    copied = mixed(packed, dtypes)
    for tensor in packed.tensors:
        yield _stored(tensor, dtypes, shapes) + (4 * math.prod(shapes[tensor]) if copied else 0)


def _state_bytes(lowered: Lowered, ctx: int) -> int:
    """Keys and values by block, and the recurrent state: two copies, and one saved at the prompt's end."""
    blocks = round_up(ctx, at.BLOCK) // at.BLOCK
    return _huge(lowered.state_block * blocks) + _huge(2 * lowered.recurrent_bytes) + lowered.recurrent_bytes


def _buffer_bytes(plan: Plan, lowered: Lowered, ctx: int, threads: int, arithmetic: str) -> int:
    """Rows are touched as steps use them, up to all at once; bf16 arithmetic clears every row first."""
    rows = MAX_ROWS if arithmetic == "bf16" else min(MAX_ROWS, ctx)
    total = 0
    for buffer, stride in lowered.strides.items():
        one = buffer in (WANTED_RESIDUAL, WANTED_ATTENDED) and arithmetic != "bf16"
        total += stride * lowered.copies.get(buffer, 1) * (1 if one else rows)
    shape, routing = lowered.attention, lowered.routing
    blocks = round_up(ctx, at.BLOCK) // at.BLOCK
    total += shape.kv_heads * shape.group * blocks * at.partial_bytes(shape.head_dim)
    total += at.WORD * at.route_words(rows, routing.top_k, routing.experts)
    own = round_up(at.SMALL_ROWS * lowered.strides.get(NORMED, 0), 4096)
    total += threads * (at.scratch_bytes(shape.head_dim, shape.group) + own)
    if LOGITS in lowered.names:
        total += 2 * 4 * round_up(plan.vocab_size, PANEL)
    return total + _rope_bytes(plan, lowered, ctx)


def _rope_bytes(plan: Plan, lowered: Lowered, ctx: int) -> int:
    return round_up(ctx, at.BLOCK) * plan.rope.rotary_dim * 4 if ROPE in lowered.names else 0


def _angles(plan: Plan, lowered: Lowered, ctx: int) -> int:
    """What making the rope table takes for a moment."""
    return _rope_bytes(plan, lowered, ctx) // 8 * ANGLE_BYTES


def _huge(size: int) -> int:
    """What an arena of huge pages costs: of its last page half, on average."""
    return size + HUGE_PAGE // 2 if size else 0
