"""Runs a plan op by op with the numpy references: the truth that every lane is compared with.

Slow and simple, and it checks what a lane may take for granted. A row's bits do not depend on the
other rows of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caldrix_kernels.add.reference import add
from caldrix_kernels.attention.reference import attention
from caldrix_kernels.embed.reference import embed
from caldrix_kernels.formats import narrow_bf16, widen, widen_bf16
from caldrix_kernels.gather.reference import gather
from caldrix_kernels.linear.reference import linear
from caldrix_kernels.rmsnorm.reference import rmsnorm
from caldrix_kernels.rope.reference import cos_sin, inverse_frequencies, rope
from caldrix_kernels.silu_mul.reference import silu_mul
from caldrixd.lanes.lane import Report, Rows, Snapshot, StepCancelled
from caldrixd.plan.plan import Op, Plan, Tensor

Float32 = npt.NDArray[np.float32]
MAX_ROWS = 512


def load(
    plan: Plan, tensors: Mapping[str, Tensor], *, threads: int = 0, report: Report | None = None
) -> Program:
    """A program of the plan's own weights, widened to float32. KeyError for a tensor that is absent."""
    weights = {}
    for weight in plan.weights:
        tensor = tensors[weight.name]
        weights[weight.name] = widen(tensor.data, tensor.dtype, weight.shape)
    return Program(plan, weights)


@dataclass
class _Slot:
    """One sequence. keys[layer] and values[layer] are float32[ctx, kv_heads, head_dim]."""

    ctx: int
    keys: dict[int, Float32]
    values: dict[int, Float32]
    length: int = 0
    written: int = 0


@dataclass(frozen=True)
class _Step:
    """What the ops of one step share. `members` maps a slot to the indices of its rows."""

    rows: Rows
    members: Mapping[int, list[int]]
    cosines: Float32
    sines: Float32
    dtype: str


class Program:
    """lanes.lane.Program in numpy; `weights` maps tensor names to float32 arrays."""

    def __init__(self, plan: Plan, weights: Mapping[str, Float32]) -> None:
        self.plan = plan
        self.max_rows = MAX_ROWS
        self.settings = "numpy, float32"
        self.size = sum(weight.nbytes for weight in weights.values())
        self._weights = weights
        kind = plan.rope
        self._frequencies = inverse_frequencies(
            kind.kind,
            kind.theta,
            kind.rotary_dim,
            kind.factor,
            kind.low_freq_factor,
            kind.high_freq_factor,
            kind.original_context,
        )
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0
        self._cancelled = threading.Event()

    def allocate(self, ctx: int) -> int:
        def empty() -> dict[int, Float32]:
            return {
                state.layer: np.zeros((ctx, state.kv_heads, state.head_dim), np.float32)
                for state in self.plan.states
            }

        slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = _Slot(ctx, empty(), empty())
        return slot

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def commit(self, slot: int, length: int) -> None:
        state = self._slots[slot]
        if not state.length <= length <= state.written:
            raise ValueError(f"commit to {length}: {state.length} committed, {state.written} written")
        state.length = length

    def rewind(self, slot: int, length: int) -> None:
        state = self._slots[slot]
        if not 0 <= length <= state.length:
            raise ValueError(f"rewind to {length}: {state.length} committed")
        state.length = state.written = length

    def snapshot(self, slot: int) -> Snapshot:
        return Snapshot(self._slots[slot].length)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        self.rewind(slot, snapshot.length)

    def close(self) -> None:
        self._slots.clear()

    def cancel(self) -> None:
        self._cancelled.set()

    def step(self, rows: Rows, *, threads: int = 0, dtype: str = "f32") -> Float32:
        self._cancelled.clear()
        members = self._members(rows)
        cosines, sines = cos_sin(self._frequencies, rows.positions)
        step = _Step(rows, members, cosines, sines, dtype)
        buffers: dict[str, Float32] = {}
        for op in self.plan.ops:
            if self._cancelled.is_set():
                raise StepCancelled
            buffers[op.output] = _RUN[op.kind](self, op, buffers, step)
        for slot, indices in members.items():
            self._slots[slot].written = rows.positions[indices[-1]] + 1
        return buffers[self.plan.ops[-1].output]

    def _members(self, rows: Rows) -> dict[int, list[int]]:
        """Row indices by slot. ValueError for rows that no lane can run."""
        if not 0 < len(rows.tokens) <= self.max_rows:
            raise ValueError(f"{len(rows.tokens)} rows in a step")
        if not all(0 <= token < self.plan.vocab_size for token in rows.tokens):
            raise ValueError("a token outside the vocabulary")
        members: dict[int, list[int]] = {}
        for row, slot in enumerate(rows.slots):
            members.setdefault(slot, []).append(row)
        for slot, indices in members.items():
            positions = [rows.positions[i] for i in indices]
            state = self._slots[slot]
            if positions != list(range(positions[0], positions[0] + len(positions))):
                raise ValueError(f"positions {positions} of one slot")
            if not 0 <= positions[0] <= state.length or positions[-1] >= state.ctx:
                raise ValueError(f"positions {positions}: {state.length} of {state.ctx} committed")
        return members

    def _embed(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return embed(self._weights[op.weights[0]], step.rows.tokens, step.rows.embeddings)

    def _rmsnorm(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return rmsnorm(buffers[op.inputs[0]], self._weights[op.weights[0]], eps=op.params["eps"])

    def _linear(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        x = buffers[op.inputs[0]]
        if step.dtype == "bf16":
            x = widen_bf16(narrow_bf16(x))
        return linear(x, *(self._weights[name] for name in op.weights))

    def _rope(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        heads, head_dim = int(op.params["heads"]), int(op.params["head_dim"])
        return rope(buffers[op.inputs[0]], step.cosines, step.sines, heads=heads, head_dim=head_dim)

    def _attention(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        q, k, v = (buffers[name] for name in op.inputs)
        layer = int(op.params["layer"])
        y = np.empty_like(q)
        for slot, indices in step.members.items():
            keys, values = self._slots[slot].keys[layer], self._slots[slot].values[layer]
            own = [step.rows.positions[i] for i in indices]
            keys[own] = k[indices].reshape(-1, *keys.shape[1:])
            values[own] = v[indices].reshape(-1, *values.shape[1:])
            y[indices] = attention(
                q[indices], keys, values, own, scale=op.params["scale"], window=int(op.params["window"])
            )
        return y

    def _silu_mul(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return silu_mul(buffers[op.inputs[0]], buffers[op.inputs[1]])

    def _add(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return add(buffers[op.inputs[0]], buffers[op.inputs[1]])

    def _gather(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return gather(buffers[op.inputs[0]], step.rows.wanted)


_Run = Callable[[Program, Op, Mapping[str, Float32], _Step], Float32]
_RUN: Mapping[str, _Run] = {
    "embed": Program._embed,
    "rmsnorm": Program._rmsnorm,
    "linear": Program._linear,
    "rope": Program._rope,
    "attention": Program._attention,
    "silu_mul": Program._silu_mul,
    "add": Program._add,
    "gather": Program._gather,
}
