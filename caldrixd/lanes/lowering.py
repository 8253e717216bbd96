"""Turns a plan into the program of the CPU interpreter: fused stages over an address table.

The interpreter keeps one residual, one normed buffer, and fuses what reads them:

    q, k, v linears + ropes + writing state   HEADS
    attention                                 ATTENTION
    gate, up linears + silu_mul               LINEAR with SILU_MUL, rows interleaved 16 and 16
    linear + add to the residual              LINEAR with ADD
    the last linear                           LINEAR with STORE, into the logits
    gather of the residual or the attended    GATHER into a buffer of its own

A plan that has none of these shapes is refused before its weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import PANEL, round_up
from caldrix_protocol.refusals import Refused
from caldrixd.plan.plan import Op, Plan

RESIDUAL, QUERIES, ATTENDED, HIDDEN, LOGITS, ROPE = (
    "residual",
    "queries",
    "attended",
    "hidden",
    "logits",
    "rope",
)
WANTED_RESIDUAL, WANTED_ATTENDED = "wanted residual", "wanted attended"
# Stands at index 0 of every address table, see step.layout.
NORMED = "normed"
# Where the wanted rows of a buffer go.
WANTED = {RESIDUAL: WANTED_RESIDUAL, ATTENDED: WANTED_ATTENDED}
# A few floats beyond each row keep rows of 4 KiB multiples out of the same cache sets.
ROW_PADDING = 16


@dataclass(frozen=True)
class Segment:
    """`count` rows of a packed matrix: rows of `tensor` from `first` on, or zero rows (tensor None)."""

    tensor: str | None
    first: int
    count: int


@dataclass(frozen=True)
class Packed:
    """A matrix in panels. `columns` are stored in the checkpoint; each tensor may have a bias."""

    segments: tuple[Segment, ...]
    columns: int
    biases: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(segment.count for segment in self.segments)


@dataclass(frozen=True)
class Lowered:
    """A program and what must stand behind its address table.

    `names` gives each address index its name. `packed`, `gains` and `tables` say what the names of
    weights hold; `strides` has the row stride in bytes of each buffer,
    `state_block` the bytes of a block of positions in all layers.
    """

    program: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    names: tuple[str, ...]
    packed: Mapping[str, Packed]
    gains: Mapping[str, str]
    tables: Mapping[str, str]
    strides: Mapping[str, int]
    head_dim: int
    group: int
    kv_heads: int
    state_block: int


class _Lowering:
    """The state of one pass over a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.producer = {op.output: op for op in plan.ops}
        self.names = [NORMED]
        self.rows: list[dict[int, int]] = []
        self.packed: dict[str, Packed] = {}
        self.gains: dict[str, str] = {}
        self.tables: dict[str, str] = {}
        self.strides: dict[str, int] = {}
        self.widths = {weight.name: weight.shape for weight in plan.weights}
        self.buffers: dict[str, str] = {}  # what the plan calls a buffer -> what the lane calls it
        self.residual = ""
        self.normed = ""
        self.gathered = False
        self.fused: set[str] = set()
        self.state_offset = 0
        self.attention: tuple[int, int, int] | None = None

    def index(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def stride(self, name: str, width: int) -> int:
        bytes_ = (round_up(width, PANEL) + ROW_PADDING) * 4
        self.strides[name] = max(bytes_, self.strides.get(name, 0))
        return self.strides[name]

    def refuse(self, op: Op) -> Refused:
        return Refused("lane/unsupported-op", lane="cpu", op=op.kind)

    def linear_behind(self, buffer: str, source: str, op: Op) -> Op:
        """The linear that made `buffer` from `source`; it is fused into `op`."""
        linear = self.producer[buffer]
        if linear.kind != "linear" or linear.inputs != (source,):
            raise self.refuse(op)
        self.fused.add(linear.output)
        return linear

    def pack(self, name: str, segments: list[Segment], linears: list[Op]) -> dict[int, int]:
        """Register a packed matrix; returns the fields of a row that reads it."""
        columns = self.widths[linears[0].weights[0]][1]
        biases = {op.weights[0]: op.weights[1] for op in linears if len(op.weights) > 1}
        packed = Packed(tuple(segments), columns, biases)
        self.packed[name] = packed
        return {
            at.WEIGHT: self.index(name),
            at.BIAS: self.index(f"bias of {name}") if biases else 0,
            at.COLUMNS: round_up(columns, PANEL),
            at.ITEMS: packed.rows // PANEL,
        }

    def plain(self, linear: Op) -> tuple[str, list[Segment]]:
        weight = linear.weights[0]
        rows = self.widths[weight][0]
        return weight, [Segment(weight, 0, rows), Segment(None, 0, round_up(rows, PANEL) - rows)]

    def emit(self, op: int, fields: dict[int, int]) -> None:
        self.rows.append({at.OP: op, at.DOMAIN: int(self.gathered), **fields})

    # --- one method an op -----------------------------------------------------------------------

    def embed(self, op: Op) -> None:
        table = op.weights[0]
        head = self.plan.ops[-1]
        tied = head.kind == "linear" and head.weights[0] == table
        if not tied:
            self.tables[table] = table
        width = self.plan.widths[op.output]
        self.residual = op.output
        self.buffers[op.output] = RESIDUAL
        self.emit(
            at.EMBED,
            {
                at.TARGET: self.index(RESIDUAL),
                at.TARGET_STRIDE: self.stride(RESIDUAL, width),
                at.COLUMNS: round_up(width, PANEL),
                at.TRUE_WIDTH: width,
                at.WEIGHT: self.index(table),
                at.PANELLED: int(tied),
            },
        )

    def gather(self, op: Op) -> None:
        source = self.buffers.get(op.inputs[0], "")
        if source not in WANTED:
            raise self.refuse(op)
        target = self.buffers[op.output] = WANTED[source]
        self.strides[target] = self.strides[source]
        self.gathered = True
        if source == RESIDUAL:
            self.residual = op.output
        self.emit(
            at.GATHER,
            {
                at.SOURCE: self.index(source),
                at.SOURCE_STRIDE: self.strides[source],
                at.TARGET: self.index(target),
                at.TARGET_STRIDE: self.strides[target],
            },
        )

    def checked(self, op: Op, name: str, *allowed: str) -> str:
        """The lane's buffer behind a plan's, which must be an allowed one and hold the rows that go on."""
        buffer = self.buffers.get(name, "")
        if buffer not in allowed or (self.gathered and buffer in WANTED):
            raise self.refuse(op)
        return buffer

    def rmsnorm(self, op: Op) -> None:
        if op.inputs != (self.residual,):
            raise self.refuse(op)
        source = self.checked(op, self.residual, RESIDUAL, WANTED_RESIDUAL)
        width = self.plan.widths[op.output]
        self.normed = op.output
        self.gains[op.weights[0]] = op.weights[0]
        self.emit(
            at.NORM,
            {
                at.SOURCE: self.index(source),
                at.SOURCE_STRIDE: self.strides[source],
                at.TARGET: at.NORMED,
                at.TARGET_STRIDE: self.stride(NORMED, width),
                at.COLUMNS: round_up(width, PANEL),
                at.TRUE_WIDTH: width,
                at.WEIGHT: self.index(op.weights[0]),
                at.EPSILON: int(np.float32(op.params["eps"]).view(np.uint32)),
            },
        )

    def linear(self, op: Op) -> None:
        """Fused into what reads it, but for the last one, which makes the logits."""
        if op is not self.plan.ops[-1]:
            return
        if op.inputs != (self.normed,):
            raise self.refuse(op)
        self.fused.add(op.output)
        name, segments = self.plain(op)
        self.emit(
            at.LINEAR,
            {
                at.SOURCE: at.NORMED,
                at.SOURCE_STRIDE: self.strides[NORMED],
                at.TARGET: self.index(LOGITS),
                at.TARGET_STRIDE: round_up(self.plan.vocab_size, PANEL) * 4,
                at.EPILOGUE: at.STORE,
                **self.pack(name, segments, [op]),
            },
        )

    def rope(self, op: Op) -> None:
        """Fused into the attention that reads it."""

    def attend(self, op: Op) -> None:
        heads, kv_heads = int(op.params["heads"]), int(op.params["kv_heads"])
        head_dim = int(op.params["head_dim"])
        ropes = [self.producer[name] for name in op.inputs[:2]]
        shape = (head_dim, heads // kv_heads, kv_heads)
        if (
            op.params["window"]
            or any(rope.kind != "rope" for rope in ropes)
            or self.attention not in (None, shape)
        ):
            raise self.refuse(op)
        self.attention = shape
        buffers = [*(rope.inputs[0] for rope in ropes), op.inputs[2]]
        linears = [self.linear_behind(buffer, self.normed, op) for buffer in buffers]
        padding = round_up(head_dim, PANEL) - head_dim
        segments = []
        for linear, count in zip(linears, (heads, kv_heads, kv_heads), strict=True):
            for head in range(count):
                segments += [Segment(linear.weights[0], head * head_dim, head_dim), Segment(None, 0, padding)]
        geometry = {
            at.Q_HEADS: heads,
            at.KV_HEADS: kv_heads,
            at.HEAD_DIM: head_dim,
            at.STATE_OFFSET: self.state_offset,
        }
        self.strides[QUERIES] = round_up(head_dim, 16) * 4
        packing = self.pack("qkv of " + linears[0].weights[0], segments, linears)
        self.emit(
            at.HEADS,
            {
                **packing,
                **geometry,
                at.SOURCE: at.NORMED,
                at.SOURCE_STRIDE: self.strides[NORMED],
                at.TARGET: self.index(QUERIES),
                at.TARGET_STRIDE: self.strides[QUERIES],
                at.ITEMS: heads + 2 * kv_heads,
                at.ROTARY_DIM: self.plan.rope.rotary_dim,
                at.ROPE_TABLE: self.index(ROPE),
                at.SCALE: int(np.float32(op.params["scale"]).view(np.uint32)),
            },
        )
        self.emit(
            at.ATTENTION,
            {
                **geometry,
                at.SOURCE: self.index(QUERIES),
                at.SOURCE_STRIDE: self.strides[QUERIES],
                at.TARGET: self.index(ATTENDED),
                at.TARGET_STRIDE: self.stride(ATTENDED, heads * head_dim),
            },
        )
        self.buffers[op.output] = ATTENDED
        self.state_offset += at.state_bytes(kv_heads, head_dim)

    def silu_mul(self, op: Op) -> None:
        gate, up = (self.linear_behind(buffer, self.normed, op) for buffer in op.inputs)
        width = self.plan.widths[op.output]
        segments = []
        half = PANEL // 2
        for first in range(0, width, half):
            count = min(half, width - first)
            for linear in (gate, up):
                segments += [Segment(linear.weights[0], first, count), Segment(None, 0, half - count)]
        self.buffers[op.output] = HIDDEN
        self.emit(
            at.LINEAR,
            {
                at.SOURCE: at.NORMED,
                at.SOURCE_STRIDE: self.strides[NORMED],
                at.TARGET: self.index(HIDDEN),
                at.TARGET_STRIDE: self.stride(HIDDEN, width),
                at.EPILOGUE: at.SILU_MUL,
                **self.pack("gate and up of " + gate.weights[0], segments, [gate, up]),
            },
        )

    def add(self, op: Op) -> None:
        residual, branch = op.inputs
        inputs = self.producer[branch].inputs
        if residual != self.residual or not inputs:
            raise self.refuse(op)
        source = self.checked(op, inputs[0], ATTENDED, WANTED_ATTENDED, HIDDEN)
        target = self.checked(op, residual, RESIDUAL, WANTED_RESIDUAL)
        linear = self.linear_behind(branch, inputs[0], op)
        self.residual = op.output
        self.buffers[op.output] = target
        name, segments = self.plain(linear)
        self.emit(
            at.LINEAR,
            {
                at.SOURCE: self.index(source),
                at.SOURCE_STRIDE: self.strides[source],
                at.TARGET: self.index(target),
                at.TARGET_STRIDE: self.strides[target],
                at.EPILOGUE: at.ADD,
                **self.pack(name, segments, [linear]),
            },
        )


_LOWER = {
    "embed": _Lowering.embed,
    "gather": _Lowering.gather,
    "rmsnorm": _Lowering.rmsnorm,
    "linear": _Lowering.linear,
    "rope": _Lowering.rope,
    "attention": _Lowering.attend,
    "silu_mul": _Lowering.silu_mul,
    "add": _Lowering.add,
}


def lower(plan: Plan) -> Lowered:
    """The program for `plan`. Refused "lane/unsupported-op" for a shape the interpreter does not know."""
    lowering = _Lowering(plan)
    for op in plan.ops:
        if op.kind not in _LOWER:
            raise lowering.refuse(op)
        _LOWER[op.kind](lowering, op)
    for op in plan.ops:
        if op.kind == "linear" and op.output not in lowering.fused:
            raise lowering.refuse(op)
    program = np.zeros((len(lowering.rows), at.ROW_WORDS), np.int64)
    for row, fields in zip(program, lowering.rows, strict=True):
        row[list(fields)] = list(fields.values())
    head_dim, group, kv_heads = lowering.attention or (0, 1, 1)
    return Lowered(
        program=program,
        names=tuple(lowering.names),
        packed=lowering.packed,
        gains=lowering.gains,
        tables=lowering.tables,
        strides=lowering.strides,
        head_dim=head_dim,
        group=group,
        kv_heads=kv_heads,
        state_block=lowering.state_offset,
    )
