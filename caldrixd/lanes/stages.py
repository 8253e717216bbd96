"""A program of the CPU interpreter while it is made: stages, and the tables behind them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import PANEL, round_up
from caldrix_protocol.refusals import Refused
from caldrixd.lanes.lowered import (
    ATTENDED,
    NORMED,
    RESIDUAL,
    WANTED_ATTENDED,
    WANTED_RESIDUAL,
    Attention,
    Lowered,
    Packed,
    Routing,
    Segment,
    Small,
)
from caldrixd.plan.plan import Op, Plan

# Where the wanted rows of a buffer go.
WANTED = {RESIDUAL: WANTED_RESIDUAL, ATTENDED: WANTED_ATTENDED}
# A few floats beyond each row keep rows of 4 KiB multiples out of the same cache sets.
ROW_PADDING = 16
VECTOR = 16
# Rows of a gate, and the rows that they are multiplied with, side by side in a panel.
GATED = PANEL // 2

Fields = dict[int, int]


@dataclass(frozen=True)
class Projection:
    """Rows of a linear's weight: `count` from `first` on in each of `groups` equal parts."""

    linear: Op
    groups: int
    size: int
    first: int
    count: int

    @property
    def weight(self) -> str:
        return self.linear.weights[0]

    def heads(self, heads: int, head_dim: int, turn: int) -> list[Segment] | None:
        """The rows of the heads, each filled to whole turns, or None where they do not lie like that."""
        if self.groups == 1 and self.count == heads * head_dim:
            apart = head_dim
        elif self.groups == heads and self.count == head_dim:
            apart = self.size
        else:
            return None
        weight = (self.weight,)
        if apart == head_dim and head_dim % turn == 0:
            return [Segment(weight, self.first, heads * head_dim, turn)]
        return [Segment(weight, self.first + head * apart, head_dim, turn) for head in range(heads)]


def float_bits(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _words(fields: Fields) -> tuple[int, ...]:
    words = [0] * at.ROW_WORDS
    for word, value in fields.items():
        words[word] = value
    return tuple(words)


class Stages:
    """The stages made so far of one plan, and the tables they refer to. Refused as `refuse` says."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.producer = {op.output: op for op in plan.ops}
        self.shapes = {weight.name: weight.shape for weight in plan.weights}
        self.names: dict[str, int] = {NORMED: 0}
        self.rows: list[Fields] = []
        self.packed: dict[str, Packed] = {}
        self.small: dict[str, Small] = {}
        self.tables: list[str] = []
        self.strides: dict[str, int] = {}
        self.copies: dict[str, int] = {}
        self.buffers: dict[str, str] = {}  # what the plan calls a buffer -> what the lane calls it
        self.residual = ""
        self.normed = ""
        self.gathered = False
        self.fused: set[str] = set()
        self.state_offset = 0
        self.attention: Attention | None = None
        self.routing = Routing()
        self.recurrent_offsets = [0]
        for state in plan.recurrent:
            self.recurrent_offsets.append(self.recurrent_offsets[-1] + 4 * math.prod(state.shape))

    # --- tables -----------------------------------------------------------------------------------

    def index(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def stride(self, name: str, width: int) -> int:
        bytes_ = (round_up(width, PANEL) + ROW_PADDING) * 4
        self.strides[name] = max(bytes_, self.strides.get(name, 0))
        return self.strides[name]

    def held(self, tensor: str, offset: float = 0.0) -> int:
        """The address index of a small tensor."""
        if self.small.setdefault(tensor, Small(tensor, offset)).offset != offset:
            raise ValueError(f"{tensor} is used with two offsets")
        return self.index(tensor)

    def pack(self, name: str, segments: list[Segment], linears: list[Op], experts: int = 1) -> Fields:
        """Register a packed matrix; the fields of a row that reads it."""
        columns = self.shapes[linears[0].weights[0]][1]
        biases = {op.weights[0]: op.weights[1] for op in linears if len(op.weights) > 1}
        packed = Packed(tuple(segments), columns, biases)
        self.packed[name] = packed
        return {
            at.WEIGHT: self.index(name),
            at.BIAS: self.index(f"bias of {name}") if biases else 0,
            at.COLUMNS: round_up(columns, PANEL),
            at.ITEMS: packed.rows // PANEL // experts,
        }

    def source(self, buffer: str) -> Fields:
        return {at.SOURCE: self.index(buffer), at.SOURCE_STRIDE: self.strides[buffer]}

    def target(self, buffer: str, width: int) -> Fields:
        return {at.TARGET: self.index(buffer), at.TARGET_STRIDE: self.stride(buffer, width)}

    def emit(self, op: int, *fields: Fields) -> None:
        row = {at.OP: op, at.DOMAIN: int(self.gathered)}
        for part in fields:
            row |= part
        self.rows.append(row)

    # --- what stands behind a buffer -----------------------------------------------------------------

    def refuse(self, op: Op) -> Refused:
        return Refused("lane/unsupported-op", lane="cpu", op=op.kind)

    def made_by(self, buffer: str, kind: str, op: Op) -> Op:
        producer = self.producer[buffer]
        if producer.kind != kind:
            raise self.refuse(op)
        return producer

    def linear_behind(self, buffer: str, source: str, op: Op) -> Op:
        """The linear that made `buffer` from `source`; it is fused into `op`."""
        linear = self.made_by(buffer, "linear", op)
        if linear.inputs != (source,):
            raise self.refuse(op)
        self.fused.add(linear.output)
        return linear

    def whole(self, linear: Op) -> Segment:
        """All rows of its weight."""
        weight = linear.weights[0]
        return Segment((weight,), 0, self.shapes[weight][0])

    def projection(self, buffer: str, op: Op) -> Projection:
        """The linear of the normed rows behind `buffer`, or the part of it that a slice leaves."""
        producer = self.producer[buffer]
        if producer.kind != "slice":
            linear = self.linear_behind(buffer, self.normed, op)
            rows = self.shapes[linear.weights[0]][0]
            return Projection(linear, 1, rows, 0, rows)
        linear = self.linear_behind(producer.inputs[0], self.normed, op)
        groups = int(producer.params["groups"])
        size = self.shapes[linear.weights[0]][0] // groups
        return Projection(linear, groups, size, int(producer.params["first"]), int(producer.params["count"]))

    def buffer_of(self, op: Op, name: str, *allowed: str) -> str:
        """The lane's buffer behind a plan's, which must be an allowed one and hold the rows that go on."""
        buffer = self.buffers.get(name, "")
        if buffer not in allowed or (self.gathered and buffer in WANTED):
            raise self.refuse(op)
        return buffer

    def finish(self) -> Lowered:
        return Lowered(
            program=tuple(_words(fields) for fields in self.rows),
            names=tuple(self.names),
            packed=self.packed,
            small=self.small,
            tables=tuple(self.tables),
            strides=self.strides,
            copies=self.copies,
            attention=self.attention or Attention(),
            routing=self.routing,
            state_block=self.state_offset,
            recurrent_bytes=self.recurrent_offsets[-1],
        )
