"""The CPU lane: a plan lowered to the compiled interpreter, on a pool of threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from caldrix_kernels.rope.reference import cos_sin, inverse_frequencies
from caldrix_kernels.step import layout as at
from caldrix_protocol.refusals import Refused
from caldrixd.lanes import packing
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.lanes.lane import Logits, Report, Rows, Snapshot, StepCancelled
from caldrixd.lanes.lowering import (
    LOGITS,
    QUERIES,
    ROPE,
    lower,
)
from caldrixd.plan.plan import Plan, Tensor

name = "cpu"

MAX_ROWS = 512
MAX_SLOTS = 256
# Partial attention results of split steps; beyond it attention is done run by run, with the same bits.
PARTS_BYTES = 64 << 20
# Pauses before a waiting thread parks: on a busy machine a long spin takes the core from whoever works.
SPIN = 300
Words = npt.NDArray[np.int64]


class CpuProgram:
    """A plan on the CPU lane; see lanes.lane.Program.

    The arrays of the class are the memory that the compiled interpreter reads (step.layout). A step
    is published to the pool threads by the caller's thread, which takes part as thread 0.
    """

    max_rows = MAX_ROWS

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor], threads: int) -> None:
        # Compiles, or reads the compiled code from the cache: seconds, so not at module import.
        from caldrix_kernels.intrinsics.vector import ACT_BF16, ACT_F32, ACT_ROUNDED
        from caldrix_kernels.linear.numba_cpu import HAS_BF16_DOT, pack_panels
        from caldrix_kernels.schedule.numba_cpu import pool_thread, publish_and_run
        from caldrix_kernels.step.numba_cpu import kernel_table

        self.plan = plan
        self._publish_and_run, self._pool_thread = publish_and_run, pool_thread
        self._kernels: Words = kernel_table()
        self._lowered = lower(plan)
        self._threads = threads or default_threads()
        self._weights = packing.pack_weights(self._lowered, tensors, pack_panels.ctypes, default_threads())
        all_bf16 = all(self._weights.formats[packed] == at.BF16 for packed in self._lowered.packed)
        self._acts = {"f32": ACT_F32, "bf16": ACT_BF16 if HAS_BF16_DOT and all_bf16 else ACT_ROUNDED}
        self._pool: list[threading.Thread] = []
        self._slots: dict[int, Arena] = {}
        self._lengths: dict[int, int] = {}
        self._contexts: dict[int, int] = {}
        self._allocate_memory()
        self._rope_positions = 0
        self._last_act = ACT_F32
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
        self._control = Arena(at.CONTROL_BYTES)
        self._cancel = self._control.bytes[at.CANCEL : at.CANCEL + 8].view(np.int64)
        self._stopped = self._control.bytes[at.STOPPED : at.STOPPED + 8].view(np.int64)
        self._command = self._control.bytes[at.COMMAND : at.COMMAND + 8].view(np.int64)
        self._rows = np.zeros((7, MAX_ROWS), np.int64)
        self._slot_table = np.zeros(MAX_SLOTS, np.int64)
        self._parts = Arena(PARTS_BYTES)
        self._part_counts = np.zeros(at.SPLIT_ROWS * max(lowered.kv_heads, 1), np.int64)
        self._block = np.zeros(at.STEP_WORDS, np.int64)
        self._published = np.zeros(at.STEP_WORDS, np.int64)
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
        self._per_thread_memory(max(self._threads, 1))
        self._fill_block()

    def _per_thread_memory(self, threads: int) -> None:
        lowered = self._lowered
        self._scratch_bytes = at.scratch_bytes(lowered.head_dim, lowered.group)
        self._private_bytes = at.round_up(at.SMALL_ROWS * lowered.strides.get("normed", 0), 4096)
        self._scratch = Arena(threads * self._scratch_bytes)
        self._private = Arena(threads * self._private_bytes)
        self._copies = np.zeros((threads, at.STEP_WORDS), np.int64)

    def _fill_block(self) -> None:
        names = ("tokens", "slots", "positions", "embeddings", "wanted", "run_rows", "run_lengths")
        row_address = {row: int(self._rows[i].ctypes.data) for i, row in enumerate(names)}
        lowered = self._lowered
        words = {
            at.CONTROL: self._control.address,
            at.ADDRESSES: self._addresses.ctypes.data,
            at.PROGRAM: self._program.ctypes.data,
            at.END: len(self._program),
            at.SPIN: SPIN,
            at.TOKENS: row_address["tokens"],
            at.SLOTS: row_address["slots"],
            at.POSITIONS: row_address["positions"],
            at.EMBEDDINGS: row_address["embeddings"],
            at.WANTED_ROWS: row_address["wanted"],
            at.RUN_ROWS: row_address["run_rows"],
            at.RUN_LENGTHS: row_address["run_lengths"],
            at.SLOT_TABLE: self._slot_table.ctypes.data,
            at.STATE_BLOCK: lowered.state_block,
            at.SCRATCH: self._scratch.address,
            at.SCRATCH_BYTES: self._scratch_bytes,
            at.PRIVATE: self._private.address,
            at.PRIVATE_BYTES: self._private_bytes,
            at.PARTS: self._parts.address,
            at.PART_COUNTS: self._part_counts.ctypes.data,
            at.MAX_ROWS: MAX_ROWS,
            at.KERNELS: self._kernels.ctypes.data,
        }
        self._block[list(words)] = list(words.values())

    def _resize_logits(self, rows: int) -> None:
        width = at.round_up(self.plan.vocab_size, at.PANEL)
        self._logits = np.zeros((rows, width), np.float32)
        self._addresses[self._lowered.names.index(LOGITS)] = self._logits.ctypes.data

    @property
    def settings(self) -> str:
        """Stored formats and kernels, for the status line."""
        formats = sorted({_FORMAT_NAMES[self._weights.formats[packed]] for packed in self._lowered.packed})
        return f"weights {'+'.join(formats)}, kernels numba"

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
        threads = threads or self._threads
        self._cancel[0] = 0
        self._fill_rows(rows)
        self._use_act(self._acts[dtype])
        self._start_pool(threads)
        block = self._block
        block[at.THREADS] = threads
        block[at.BEGIN], block[at.END] = ops or (0, len(self._program))
        ticket = int(block[at.BASE]) + 1
        self._publish_and_run(block.ctypes.data, self._published.ctypes.data)
        if self._stopped[0] == ticket:
            raise StepCancelled
        return self._logits[: len(rows.wanted), : self.plan.vocab_size]

    def cancel(self) -> None:
        self._cancel[0] = 1

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
        self._block[at.ROWS], self._block[at.WANTED] = count, len(rows.wanted)

    def _fill_runs(self, rows: Rows, run_rows: Words, run_lengths: Words) -> None:
        """Group rows for attention: neighbouring positions of one slot share the reading of its keys."""
        lowered, count = self._lowered, len(rows.tokens)
        blocks = max(rows.positions) // at.BLOCK + 1
        parts = count * lowered.kv_heads * blocks * lowered.group * at.partial_bytes(lowered.head_dim)
        split = count <= at.SPLIT_ROWS and parts <= PARTS_BYTES
        longest = 1 if split else max(1, at.TILE_ROWS // lowered.group)
        runs = _runs(rows.slots, rows.positions, longest)
        run_rows[: len(runs)] = [first for first, _ in runs]
        run_lengths[: len(runs)] = [length for _, length in runs]
        block = self._block
        block[at.RUNS], block[at.SPLIT], block[at.BLOCKS] = len(runs), int(split), blocks

    def _use_act(self, act: int) -> None:
        if act != self._last_act:
            # Padding columns must be zero in the new form: half a float32 read as bfloat16 may be NaN.
            for buffer in (*self._buffers.values(), self._private):
                buffer.clear()
            self._last_act = act
        self._block[at.ACT] = act

    # --- the pool ---------------------------------------------------------------------------------

    def _start_pool(self, threads: int) -> None:
        """Have at least `threads` - 1 pool threads; those beyond a step's number sleep through it."""
        if threads <= len(self._pool) + 1:
            return
        if threads > len(self._copies):
            self._end_pool()
            self._per_thread_memory(threads)
            self._fill_block()
        seen = int(self._command[0])
        for number in range(len(self._pool) + 1, threads):
            arguments = (
                self._published.ctypes.data,
                self._copies[number].ctypes.data,
                self._control.address,
                number,
                seen,
            )
            thread = threading.Thread(target=self._pool_thread, args=arguments, daemon=True)
            thread.start()
            self._pool.append(thread)

    def _end_pool(self) -> None:
        if self._pool:
            self._block[at.QUIT], self._block[at.BEGIN], self._block[at.END] = 1, 0, 0
            self._publish_and_run(self._block.ctypes.data, self._published.ctypes.data)
            for thread in self._pool:
                thread.join()
            self._pool.clear()
            self._block[at.QUIT] = 0

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
    lower(plan)
    try:
        from caldrixd.lanes.drivers.compiler import compile_kernels

        compile_kernels(report)
    except ImportError as error:
        raise Refused("lane/cpu-numba", reason=error) from None
    return CpuProgram(plan, tensors, threads)
