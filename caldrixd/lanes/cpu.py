"""The CPU lane: a plan lowered to the compiled interpreter, on a pool of threads of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from caldrix_kernels.rope.reference import cos_sin, inverse_frequencies
from caldrix_kernels.step import layout as at
from caldrix_protocol.refusals import Refused
from caldrixd.lanes import packing
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.drivers.compiler import compile_kernels
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.lanes.kernels import Kernels
from caldrixd.lanes.lane import Logits, Report, Rows, Snapshot, StepCancelled
from caldrixd.lanes.lowering import LOGITS, NORMED, QUERIES, ROPE, Lowered, lower
from caldrixd.lanes.pool import StepPool, Words
from caldrixd.plan.plan import Plan, Tensor

name = "cpu"

MAX_ROWS = 512
MAX_SLOTS = 256
# Partial attention results of split steps; beyond it attention is done run by run, with the same bits.
PARTS_BYTES = 64 << 20


class CpuProgram:
    """A plan on the CPU lane; see lanes.lane.Program.

    The arrays of the class are the memory that the compiled interpreter reads (step.layout). A step
    is published to the pool threads by the caller's thread, which takes part as thread 0.
    """

    max_rows = MAX_ROWS

    def __init__(
        self, lowered: Lowered, plan: Plan, tensors: Mapping[str, Tensor], kernels: Kernels, threads: int
    ) -> None:
        self.plan = plan
        self._kernels = kernels
        self._lowered = lowered
        self._threads = threads or default_threads()
        self._pool = StepPool(
            kernels.publish_and_run,
            kernels.pool_thread,
            scratch_bytes=at.scratch_bytes(lowered.head_dim, lowered.group),
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
        self._slots: dict[int, Arena] = {}
        self._lengths: dict[int, int] = {}
        self._contexts: dict[int, int] = {}
        self._allocate_memory()
        self._rope_positions = 0
        self._last_act = at.ACT_F32
        self.size = self._weights.arena.size

    def _allocate_memory(self) -> None:
        lowered = self._lowered
        self._program = lowered.program.copy()
        self._addresses = np.zeros(len(lowered.names), np.int64)
        self._buffers: dict[str, Arena] = {}
        for buffer, stride in lowered.strides.items():
            if buffer != QUERIES:
                self._buffers[buffer] = Arena(MAX_ROWS * stride)
        vectors = lowered.kv_heads * lowered.group * MAX_ROWS
        self._buffers[QUERIES] = Arena(vectors * lowered.strides.get(QUERIES, 0))
        self._rows = np.zeros((7, MAX_ROWS), np.int64)
        self._slot_table = np.zeros(MAX_SLOTS, np.int64)
        self._parts = Arena(PARTS_BYTES)
        self._part_counts = np.zeros(at.SPLIT_ROWS * max(lowered.kv_heads, 1), np.int64)
        self._resize_logits(8)
        for index, name_ in enumerate(lowered.names):
            if name_ in self._buffers:
                self._addresses[index] = self._buffers[name_].address
            elif name_ in self._weights.addresses:
                self._addresses[index] = self._weights.addresses[name_]
        for row in self._program:
            weight = lowered.names[row[at.WEIGHT]]
            row[at.FORMAT] = self._weights.formats.get(weight, at.FLOAT32)
            row[at.ROW_BYTES] = self._weights.row_bytes.get(weight, 0)
        self._fill_block()

    def _fill_block(self) -> None:
        names = ("tokens", "slots", "positions", "embeddings", "wanted", "run_rows", "run_lengths")
        row_address = {row: int(self._rows[i].ctypes.data) for i, row in enumerate(names)}
        lowered = self._lowered
        words = {
            at.ADDRESSES: self._addresses.ctypes.data,
            at.PROGRAM: self._program.ctypes.data,
            at.END: len(self._program),
            at.TOKENS: row_address["tokens"],
            at.SLOTS: row_address["slots"],
            at.POSITIONS: row_address["positions"],
            at.EMBEDDINGS: row_address["embeddings"],
            at.WANTED_ROWS: row_address["wanted"],
            at.RUN_ROWS: row_address["run_rows"],
            at.RUN_LENGTHS: row_address["run_lengths"],
            at.SLOT_TABLE: self._slot_table.ctypes.data,
            at.STATE_BLOCK: lowered.state_block,
            at.PARTS: self._parts.address,
            at.PART_COUNTS: self._part_counts.ctypes.data,
            at.MAX_ROWS: MAX_ROWS,
            at.KERNELS: self._kernels.table.ctypes.data,
        }
        self._pool.block[list(words)] = list(words.values())

    def _resize_logits(self, rows: int) -> None:
        width = at.round_up(self.plan.vocab_size, at.PANEL)
        self._logits = np.zeros((rows, width), np.float32)
        self._addresses[self._lowered.names.index(LOGITS)] = self._logits.ctypes.data

    @property
    def settings(self) -> str:
        """Stored formats and kernels, for the status line."""
        formats = sorted({_FORMAT_NAMES[self._weights.formats[packed]] for packed in self._lowered.packed})
        return f"weights {'+'.join(formats)}, kernels {self._kernels.name}"

    # --- state ------------------------------------------------------------------------------------

    def allocate(self, ctx: int) -> int:
        context = at.round_up(ctx, at.BLOCK)
        slot = next((slot for slot in range(MAX_SLOTS) if slot not in self._slots), None)
        if slot is None:
            raise Refused("run/slots", count=MAX_SLOTS)
        size = self._lowered.state_block * context // at.BLOCK
        try:
            arena = Arena(size, huge=True)
        except (OSError, MemoryError, OverflowError):
            raise Refused("run/state-memory", needed=size >> 20, ctx=ctx) from None
        self._slots[slot], self._lengths[slot], self._contexts[slot] = arena, 0, ctx
        self._slot_table[slot] = arena.address
        self._extend_rope(context)
        return slot

    def _extend_rope(self, positions: int) -> None:
        """Cosines and sines for all positions a slot can have: float32[position][cos | sin]."""
        if positions <= self._rope_positions:
            return
        rope = self.plan.rope
        frequencies = inverse_frequencies(
            rope.kind,
            rope.theta,
            rope.rotary_dim,
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            rope.original_context,
        )
        cos, sin = cos_sin(frequencies, np.arange(positions))
        self._rope_table = np.ascontiguousarray(np.concatenate([cos, sin], axis=1), np.float32)
        self._addresses[self._lowered.names.index(ROPE)] = self._rope_table.ctypes.data
        self._rope_positions = positions

    def release(self, slot: int) -> None:
        del self._slots[slot], self._lengths[slot], self._contexts[slot]

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def commit(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._contexts[slot]:
            raise ValueError(f"length {length} is outside the context")
        self._lengths[slot] = length

    def rewind(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(f"cannot rewind from {self._lengths[slot]} to {length}")
        self._lengths[slot] = length

    def snapshot(self, slot: int) -> Snapshot:
        return Snapshot(self._lengths[slot])

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        self.rewind(slot, snapshot.length)

    # --- the step ---------------------------------------------------------------------------------

    def step(
        self, rows: Rows, *, threads: int, dtype: str = "f32", ops: tuple[int, int] | None = None
    ) -> Logits:
        """Run the program, or the range `ops` of its stages; see lanes.lane.Program.step."""
        self._fill_rows(rows)
        self._use_act(self._acts[dtype])
        block = self._pool.block
        block[at.BEGIN], block[at.END] = ops or (0, len(self._program))
        if not self._pool.run(threads or self._threads):
            raise StepCancelled
        return self._logits[: len(rows.wanted), : self.plan.vocab_size]

    def cancel(self) -> None:
        self._pool.cancel()

    def _fill_rows(self, rows: Rows) -> None:
        count = len(rows.tokens)
        if not 0 < count <= MAX_ROWS:
            raise ValueError(f"a step takes 1 to {MAX_ROWS} rows, got {count}")
        tokens, slots, positions, embeddings, wanted, run_rows, run_lengths = self._rows
        tokens[:count], slots[:count], positions[:count] = rows.tokens, rows.slots, rows.positions
        embeddings[:count] = 0
        self._given = {
            row: np.ascontiguousarray(value, np.float32) for row, value in (rows.embeddings or {}).items()
        }
        for row, value in self._given.items():
            if value.shape != (self.plan.hidden_size,):
                raise ValueError(f"an embedding has shape {value.shape}")
            embeddings[row], tokens[row] = value.ctypes.data, 0
        if tokens[:count].min() < 0 or tokens[:count].max() >= self.plan.vocab_size:
            raise ValueError("a token id is outside the vocabulary")
        for slot, position in zip(rows.slots, rows.positions, strict=True):
            if not 0 <= position < self._contexts[slot]:
                raise ValueError(f"position {position} is outside the context of slot {slot}")
        if any(not 0 <= row < count for row in rows.wanted):
            raise ValueError("a wanted row is not in the step")
        if len(rows.wanted) > len(self._logits):
            self._resize_logits(len(rows.wanted))
        wanted[: len(rows.wanted)] = rows.wanted
        self._fill_runs(rows, run_rows, run_lengths)
        self._pool.block[at.ROWS], self._pool.block[at.WANTED] = count, len(rows.wanted)

    def _fill_runs(self, rows: Rows, run_rows: Words, run_lengths: Words) -> None:
        """Group rows for attention: neighbouring positions of one slot share the reading of its keys."""
        lowered, count = self._lowered, len(rows.tokens)
        blocks = max(rows.positions) // at.BLOCK + 1
        parts = count * lowered.kv_heads * blocks * lowered.group * at.partial_bytes(lowered.head_dim)
        split = count <= at.SPLIT_ROWS and parts <= PARTS_BYTES
        longest = 1 if split else max(1, at.RUN_QUERIES // lowered.group)
        runs = _runs(rows.slots, rows.positions, longest)
        run_rows[: len(runs)] = [first for first, _ in runs]
        run_lengths[: len(runs)] = [length for _, length in runs]
        block = self._pool.block
        block[at.RUNS], block[at.SPLIT], block[at.BLOCKS] = len(runs), int(split), blocks

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


_FORMAT_NAMES = {at.BF16: "bf16", at.F16: "f16", at.FLOAT32: "f32"}


def _runs(slots: Sequence[int], positions: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """(first row, length) of the attention runs."""
    runs: list[tuple[int, int]] = []
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if runs:
            first, length = runs[-1]
            follows = slots[first] == slot and positions[first] + length == position
            if follows and length < longest:
                runs[-1] = (first, length + 1)
                continue
        runs.append((row, 1))
    return runs


def load(plan: Plan, tensors: Mapping[str, Tensor], *, threads: int, report: Report) -> CpuProgram:
    """The plan with its weights on this lane. Refused "lane/unsupported-op" or "lane/cpu-numba"."""
    lowered = lower(plan)
    try:
        kernels = compile_kernels(report)
    except ImportError as error:
        raise Refused("lane/cpu-numba", reason=error) from None
    return CpuProgram(lowered, plan, tensors, kernels, threads)
