"""Runs a plan op by op with the numpy references: the truth that every lane is compared with.

Slow and simple, and it checks what a lane may take for granted. A row's bits do not depend on the
other rows of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from caldrix_kernels.add.reference import add
from caldrix_kernels.argmax.reference import argmax
from caldrix_kernels.attention.reference import attention
from caldrix_kernels.causal_conv.reference import causal_conv
from caldrix_kernels.delta_rule.reference import delta_rule
from caldrix_kernels.embed.reference import embed
from caldrix_kernels.experts.reference import experts
from caldrix_kernels.formats import narrow_bf16, widen, widen_bf16
from caldrix_kernels.gated_rmsnorm.reference import gated_rmsnorm
from caldrix_kernels.gather.reference import gather
from caldrix_kernels.linear.reference import linear
from caldrix_kernels.rmsnorm.reference import rmsnorm
from caldrix_kernels.rope.reference import cos_sin, inverse_frequencies, rope
from caldrix_kernels.sigmoid_mul.reference import sigmoid_mul
from caldrix_kernels.silu_mul.reference import silu_mul
from caldrix_kernels.slice.reference import slice_columns
from caldrixd.lanes.lane import Logits, Report, Rows, Snapshot, StepCancelled
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
    """One sequence. keys[layer] and values[layer] are float32[ctx, kv_heads, head_dim].

    `recurrent` is the committed state of each recurrent op, `following` what the last step made of it.
    """

    ctx: int
    keys: dict[int, Float32]
    values: dict[int, Float32]
    recurrent: list[Float32]
    following: list[Float32] | None = None
    length: int = 0
    written: int = 0


@dataclass(frozen=True)
class _Step:
    """What the ops of one step share. `members` maps a slot to the indices of its rows, `following` to
    the recurrent state that the step writes."""

    rows: Rows
    members: Mapping[int, list[int]]
    following: Mapping[int, list[Float32]]
    cosines: Float32
    sines: Float32
    dtype: str

    def rounded(self, x: Float32) -> Float32:
        """What a matrix product reads of its input."""
        return widen_bf16(narrow_bf16(x)) if self.dtype == "bf16" else x


class Program:
    """lanes.lane.Program in numpy; `weights` maps tensor names to float32 arrays."""

    def __init__(self, plan: Plan, weights: Mapping[str, Float32]) -> None:
        self.plan = plan
        self.max_rows = MAX_ROWS
        self.block = 1
        self.settings = "numpy, float32"
        self.size = sum(weight.nbytes for weight in weights.values())
        self._weights = weights
        rope = asdict(plan.rope)
        del rope["attention_factor"]  # scales the cosines and sines
        self._frequencies = inverse_frequencies(**rope)
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
        self._slots[slot] = _Slot(ctx, empty(), empty(), self._zeros())
        return slot

    def _zeros(self) -> list[Float32]:
        return [np.zeros(state.shape, np.float32) for state in self.plan.recurrent]

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def commit(self, slot: int, length: int) -> None:
        state = self._slots[slot]
        if not state.length <= length <= state.written:
            raise ValueError(f"commit to {length}: {state.length} committed, {state.written} written")
        if self.plan.recurrent and length != state.written:
            raise ValueError(f"commit to {length}: recurrent state is at {state.written}")
        state.length = length
        if state.following is not None:
            state.recurrent, state.following = state.following, None

    def rewind(self, slot: int, length: int) -> None:
        state = self._slots[slot]
        if not 0 <= length <= state.length:
            raise ValueError(f"rewind to {length}: {state.length} committed")
        if self.plan.recurrent and length not in (0, state.length):
            raise ValueError(f"rewind to {length}: recurrent state is at {state.length}")
        if length == 0:
            state.recurrent = self._zeros()
        state.length = state.written = length
        state.following = None

    def snapshot(self, slot: int) -> Snapshot:
        state = self._slots[slot]
        if not self.plan.recurrent:
            return Snapshot(state.length)
        return Snapshot(state.length, np.concatenate([part.reshape(-1) for part in state.recurrent]))

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        state = self._slots[slot]
        if snapshot.length > state.length:
            raise ValueError(f"restore to {snapshot.length}: {state.length} committed")
        state.length = state.written = snapshot.length
        state.following = None
        if snapshot.recurrent is not None:
            ends = np.cumsum([part.size for part in state.recurrent])
            parts = np.split(snapshot.recurrent, ends[:-1])
            shapes = [part.shape for part in state.recurrent]
            state.recurrent = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def close(self) -> None:
        self._slots.clear()

    def cancel(self) -> None:
        self._cancelled.set()

    def step(self, rows: Rows, *, threads: int = 0, dtype: str = "f32") -> Logits:
        self._cancelled.clear()
        members = self._members(rows)
        following = {slot: list(self._slots[slot].recurrent) for slot in members}
        cosines, sines = cos_sin(self._frequencies, rows.positions, self.plan.rope.attention_factor)
        step = _Step(rows, members, following, cosines, sines, dtype)
        buffers: dict[str, Float32] = {}
        for op in self.plan.ops:
            if self._cancelled.is_set():
                raise StepCancelled
            buffers[op.output] = RUN[op.kind](self, op, buffers, step)
        for slot, indices in members.items():
            self._slots[slot].written = rows.positions[indices[-1]] + 1
            if self.plan.recurrent:
                self._slots[slot].following = following[slot]
        values = buffers[self.plan.ops[-1].output]
        return Logits(values, argmax(values))

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
            if self.plan.recurrent and positions[0] != state.length:
                raise ValueError(f"positions {positions}: recurrent state is at {state.length}")
        return members

    def _embed(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return embed(self._weights[op.weights[0]], step.rows.tokens, step.rows.embeddings)

    def _rmsnorm(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return rmsnorm(
            buffers[op.inputs[0]],
            self._weights[op.weights[0]],
            eps=op.params["eps"],
            groups=int(op.params["groups"]),
            offset=op.params["offset"],
        )

    def _linear(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        x = step.rounded(buffers[op.inputs[0]])
        return linear(x, *(self._weights[name] for name in op.weights))

    def _slice(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        groups, first, count = (int(op.params[name]) for name in ("groups", "first", "count"))
        return slice_columns(buffers[op.inputs[0]], groups=groups, first=first, count=count)

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
                q[indices],
                keys,
                values,
                own,
                scale=op.params["scale"],
                window=int(op.params["window"]),
                rounded=step.rounded,
            )
        return y

    def _silu_mul(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return silu_mul(buffers[op.inputs[0]], buffers[op.inputs[1]])

    def _sigmoid_mul(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return sigmoid_mul(buffers[op.inputs[0]], buffers[op.inputs[1]])

    def _add(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return add(buffers[op.inputs[0]], buffers[op.inputs[1]])

    def _gather(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        return gather(buffers[op.inputs[0]], step.rows.wanted)

    def _experts(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        x, scores = (buffers[name] for name in op.inputs)
        return experts(
            x,
            scores,
            [self._weights[name] for name in op.weights],
            top_k=int(op.params["top_k"]),
            normalise=bool(op.params["normalise"]),
            rounded=step.rounded,
        )

    def _causal_conv(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        x = buffers[op.inputs[0]]
        weight = self._weights[op.weights[0]]
        y = np.empty_like(x)
        for slot, indices in step.members.items():
            states, state = step.following[slot], int(op.params["state"])
            y[indices], states[state] = causal_conv(x[indices], states[state], weight)
        return y

    def _delta_rule(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        qkv, a, b = (buffers[name] for name in op.inputs)
        a_log, dt_bias = (self._weights[name] for name in op.weights)
        key_heads, key_dim, state = (int(op.params[name]) for name in ("key_heads", "key_dim", "state"))
        y = np.empty((len(qkv), self.plan.widths[op.output]), np.float32)
        for slot, indices in step.members.items():
            states = step.following[slot]
            y[indices], states[state] = delta_rule(
                qkv[indices],
                a[indices],
                b[indices],
                states[state],
                a_log,
                dt_bias,
                key_heads=key_heads,
                key_dim=key_dim,
            )
        return y

    def _gated_rmsnorm(self, op: Op, buffers: Mapping[str, Float32], step: _Step) -> Float32:
        x, z = (buffers[name] for name in op.inputs)
        gain = self._weights[op.weights[0]]
        return gated_rmsnorm(x, z, gain, op.params["eps"], groups=int(op.params["groups"]))


_Run = Callable[[Program, Op, Mapping[str, Float32], _Step], Float32]
RUN: Mapping[str, _Run] = {
    "embed": Program._embed,
    "rmsnorm": Program._rmsnorm,
    "linear": Program._linear,
    "slice": Program._slice,
    "rope": Program._rope,
    "attention": Program._attention,
    "silu_mul": Program._silu_mul,
    "sigmoid_mul": Program._sigmoid_mul,
    "add": Program._add,
    "gather": Program._gather,
    "experts": Program._experts,
    "causal_conv": Program._causal_conv,
    "delta_rule": Program._delta_rule,
    "gated_rmsnorm": Program._gated_rmsnorm,
}
