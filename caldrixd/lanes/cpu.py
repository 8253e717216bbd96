"""The CPU lane: a plan lowered to the compiled interpreter, on a pool of threads of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from caldrix_kernels.rope.reference import cos_sin, inverse_frequencies
from caldrix_kernels.step import layout as at
from caldrixd.lanes import packing
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.lanes.holding import MAX_ROWS
from caldrixd.lanes.kernels import Kernels
from caldrixd.lanes.lane import Logits, Report, Rows, Snapshot, StepCancelled, Variant
from caldrixd.lanes.lowered import LIKELIEST, LOGITS, NORMED, ROPE, ROUTES, Lowered
from caldrixd.lanes.lowering import lower
from caldrixd.lanes.pool import StepPool
from caldrixd.lanes.rows import PARTS_BYTES, StepRows
from caldrixd.lanes.slots import Slots
from caldrixd.lanes.variant import load_kernels
from caldrixd.plan.plan import Plan, Tensor

name = "cpu"

NATIVE = Variant()

_FORMAT_NAMES = {at.BF16: "bf16", at.F16: "f16", at.FLOAT32: "f32"}


class CpuProgram:
    """A plan on the CPU lane; see lanes.lane.Program.

    The arrays of the class are the memory that the compiled interpreter reads (step.layout). A step
    is published to the pool threads by the caller's thread, which takes part as thread 0.
    """

    max_rows = MAX_ROWS
    block = at.BLOCK

    def __init__(
        self, lowered: Lowered, plan: Plan, tensors: Mapping[str, Tensor], kernels: Kernels, threads: int
    ) -> None:
        self.plan = plan
        self._kernels = kernels
        self._lowered = lowered
        self._threads = threads or default_threads()
        attention = lowered.attention
        self._pool = StepPool(
            kernels.publish_and_run,
            kernels.pool_thread,
            scratch_bytes=at.scratch_bytes(attention.head_dim, attention.group),
            private_bytes=at.round_up(at.SMALL_ROWS * lowered.strides.get(NORMED, 0), 4096),
            threads=self._threads,
        )
        # Without `close` too the pool's threads end before the memory they read.
        self._end_pool = weakref.finalize(self, self._pool.close)
        self._weights = packing.pack_weights(lowered, tensors, kernels.pack_panels, default_threads())
        all_bf16 = all(self._weights.formats[packed] == at.BF16 for packed in lowered.packed)
        self._acts = {
            "f32": at.ACT_F32,
            "bf16": at.ACT_BF16 if kernels.bf16_dot and all_bf16 else at.ACT_ROUNDED,
        }
        self._slots = Slots(lowered.state_block, lowered.recurrent_bytes)
        self._rows = StepRows(MAX_ROWS, attention)
        self._allocate_memory()
        self._rope_positions = 0
        self._last_act = at.ACT_F32
        self.size = self._weights.arena.size

    def _allocate_memory(self) -> None:
        lowered = self._lowered
        self._program = np.array(lowered.program, np.int64)
        self._addresses = np.zeros(len(lowered.names), np.int64)
        self._buffers = {
            buffer: Arena(MAX_ROWS * lowered.copies.get(buffer, 1) * stride)
            for buffer, stride in lowered.strides.items()
        }
        routing = lowered.routing
        routes = Arena(at.WORD * at.route_words(MAX_ROWS, routing.top_k, routing.experts))
        self._buffers[ROUTES] = routes
        self._parts = Arena(PARTS_BYTES)
        self._part_counts = np.zeros(at.SPLIT_ROWS * max(lowered.attention.kv_heads, 1), np.int64)
        self._resize_logits(8)
        for index, name_ in enumerate(lowered.names):
            if name_ in self._buffers:
                self._addresses[index] = self._buffers[name_].address
            elif name_ in self._weights.addresses:
                self._addresses[index] = self._weights.addresses[name_]
        for row in self._program:
            weight = lowered.names[row[at.WEIGHT]]
            form = row[at.FORMAT] = self._weights.formats.get(weight, at.FLOAT32)
            row[at.STEP_BYTES] = at.TILE_STEP[form]
            row[at.PANEL_BYTES] = at.panel_bytes(form, int(row[at.COLUMNS]))
            row[at.ROW_BYTES] = self._weights.row_bytes.get(weight, 0)
        words = self._rows.addresses() | {
            at.ADDRESSES: self._addresses.ctypes.data,
            at.PROGRAM: self._program.ctypes.data,
            at.END: len(self._program),
            at.SLOT_TABLE: self._slots.states.ctypes.data,
            at.RECURRENT: self._slots.recurrent.ctypes.data,
            at.RECURRENT_NEXT: self._slots.recurrent_next.ctypes.data,
            at.STATE_BLOCK: lowered.state_block,
            at.PARTS: self._parts.address,
            at.PART_COUNTS: self._part_counts.ctypes.data,
            at.MAX_ROWS: MAX_ROWS,
            at.KERNELS: self._kernels.table.ctypes.data,
        }
        self._pool.block[list(words)] = list(words.values())

    def _resize_logits(self, rows: int) -> None:
        width = at.round_up(self.plan.vocab_size, at.PANEL)
        self._logits, self._likeliest = np.zeros((rows, width), np.float32), np.zeros(rows, np.int64)
        names = self._lowered.names
        self._addresses[names.index(LOGITS)] = self._logits.ctypes.data
        self._addresses[names.index(LIKELIEST)] = self._likeliest.ctypes.data

    @property
    def settings(self) -> str:
        """Stored formats and kernels, for the status line."""
        formats = sorted({_FORMAT_NAMES[self._weights.formats[packed]] for packed in self._lowered.packed})
        return f"weights {'+'.join(formats)}, kernels {self._kernels.name}"

    # --- state ------------------------------------------------------------------------------------

    def allocate(self, ctx: int) -> int:
        slot = self._slots.allocate(ctx)
        self._extend_rope(at.round_up(ctx, at.BLOCK))
        return slot

    def _extend_rope(self, positions: int) -> None:
        """Cosines and sines for all positions a slot can have: float32[position][cos | sin]."""
        if positions <= self._rope_positions or ROPE not in self._lowered.names:
            return
        fields = asdict(self.plan.rope)
        scale = fields.pop("attention_factor")
        cos, sin = cos_sin(inverse_frequencies(**fields), np.arange(positions), scale)
        self._rope_table = np.ascontiguousarray(np.concatenate([cos, sin], axis=1), np.float32)
        self._addresses[self._lowered.names.index(ROPE)] = self._rope_table.ctypes.data
        self._rope_positions = positions

    def release(self, slot: int) -> None:
        self._slots.release(slot)

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def commit(self, slot: int, length: int) -> None:
        self._slots.commit(slot, length)

    def rewind(self, slot: int, length: int) -> None:
        self._slots.rewind(slot, length)

    def snapshot(self, slot: int) -> Snapshot:
        return self._slots.snapshot(slot)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        self._slots.restore(slot, snapshot)

    # --- the step ---------------------------------------------------------------------------------

    def step(
        self, rows: Rows, *, threads: int, dtype: str = "f32", ops: tuple[int, int] | None = None
    ) -> Logits:
        """Run the program, or the range `ops` of its stages; see lanes.lane.Program.step."""
        block = self._pool.block
        plan = self.plan
        sequences = self._rows.fill(rows, block, hidden_size=plan.hidden_size, vocab_size=plan.vocab_size)
        ends = {rows.slots[row]: (rows.positions[row], rows.positions[row] + n) for row, n in sequences}
        for slot, (first, end) in ends.items():
            self._slots.check(slot, first, end - 1)
        if len(rows.wanted) > len(self._logits):
            self._resize_logits(len(rows.wanted))
        self._use_act(self._acts[dtype])
        block[at.BEGIN], block[at.END] = ops or (0, len(self._program))
        if not self._pool.run(threads or self._threads):
            raise StepCancelled
        for slot, (_, end) in ends.items():
            self._slots.wrote(slot, end)
        wanted = len(rows.wanted)
        return Logits(self._logits[:wanted, : plan.vocab_size], self._likeliest[:wanted])

    def cancel(self) -> None:
        self._pool.cancel()

    def _use_act(self, act: int) -> None:
        if act != self._last_act:
            # Padding columns must be zero in the new form: half a float32 read as bfloat16 may be NaN.
            for buffer in self._buffers.values():
                buffer.clear()
            self._pool.clear_private()
            self._last_act = act
        self._pool.block[at.ACT] = act

    def close(self) -> None:
        self._end_pool()
        self._slots.clear()


def load(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    *,
    report: Report,
    threads: int = 0,
    variant: Variant = NATIVE,
    environment: Mapping[str, str] | None = None,
) -> CpuProgram:
    """The plan with its weights on this lane; `threads` 0 means one a core. Refused "lane/..."."""
    lowered = lower(plan)
    kernels = load_kernels(variant, environment or {}, report)
    return CpuProgram(lowered, plan, tensors, kernels, threads)
