"""The rows of a step as words that compiled code reads (caldrix_kernels.step.layout)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caldrix_kernels.step import layout as at
from caldrixd.lanes.lane import Rows
from caldrixd.lanes.lowered import Attention
from caldrixd.lanes.pool import Words

# Partial attention results of split steps; beyond it attention is done run by run, with the same bits.
PARTS_BYTES = 64 << 20


class StepRows:
    """Arrays for up to `max_rows` rows, and the words of the step block that describe them."""

    def __init__(self, max_rows: int, attention: Attention) -> None:
        self._max_rows = max_rows
        self._attention = attention
        (
            self._tokens,
            self._slots,
            self._positions,
            self._embeddings,
            self._wanted,
            self._run_rows,
            self._run_lengths,
            self._numbers,
            self._sequence_rows,
            self._sequence_lengths,
        ) = np.zeros((10, max_rows), np.int64)

    def addresses(self) -> dict[int, int]:
        """Words of the step block that never change."""
        arrays = {
            at.TOKENS: self._tokens,
            at.SLOTS: self._slots,
            at.POSITIONS: self._positions,
            at.EMBEDDINGS: self._embeddings,
            at.WANTED_ROWS: self._wanted,
            at.RUN_ROWS: self._run_rows,
            at.RUN_LENGTHS: self._run_lengths,
            at.ROW_NUMBERS: self._numbers,
            at.SEQUENCE_ROWS: self._sequence_rows,
            at.SEQUENCE_LENGTHS: self._sequence_lengths,
        }
        return {word: array.ctypes.data for word, array in arrays.items()}

    def fill(self, rows: Rows, block: Words, *, hidden_size: int, vocab_size: int) -> list[tuple[int, int]]:
        """Describe `rows` in the step block. ValueError for rows that no lane can run.

        Returns (first row, length) of each slot's rows, which must stand together.
        """
        count = len(rows.tokens)
        if not 0 < count <= self._max_rows:
            raise ValueError(f"a step takes 1 to {self._max_rows} rows, got {count}")
        self._tokens[:count], self._slots[:count] = rows.tokens, rows.slots
        self._positions[:count] = rows.positions
        self._fill_embeddings(rows, hidden_size)
        if self._tokens[:count].min() < 0 or self._tokens[:count].max() >= vocab_size:
            raise ValueError("a token id is outside the vocabulary")
        if any(not 0 <= row < count for row in rows.wanted):
            raise ValueError("a wanted row is not in the step")
        self._wanted[: len(rows.wanted)] = rows.wanted
        block[at.ROWS], block[at.WANTED] = count, len(rows.wanted)
        self._fill_attention_runs(rows, block)
        sequences = runs(rows.slots, rows.positions, count)
        if len({rows.slots[first] for first, _ in sequences}) < len(sequences):
            raise ValueError("the rows of a slot do not stand together in rising positions")
        for number, (first, length) in enumerate(sequences):
            self._sequence_rows[number], self._sequence_lengths[number] = first, length
            self._numbers[first : first + length] = np.arange(length)
        block[at.SEQUENCES] = len(sequences)
        return sequences

    def _fill_embeddings(self, rows: Rows, hidden_size: int) -> None:
        self._embeddings[: len(rows.tokens)] = 0
        # Kept alive until the next step: compiled code reads them by address.
        self._given = {
            row: np.ascontiguousarray(value, np.float32) for row, value in (rows.embeddings or {}).items()
        }
        for row, value in self._given.items():
            if value.shape != (hidden_size,):
                raise ValueError(f"an embedding has shape {value.shape}")
            self._embeddings[row], self._tokens[row] = value.ctypes.data, 0

    def _fill_attention_runs(self, rows: Rows, block: Words) -> None:
        """Group rows for attention: neighbouring positions of one slot share the reading of its keys."""
        shape, count = self._attention, len(rows.tokens)
        blocks = max(rows.positions) // at.BLOCK + 1
        parts = count * shape.kv_heads * blocks * shape.group * at.partial_bytes(shape.head_dim)
        split = count <= at.SPLIT_ROWS and parts <= PARTS_BYTES
        longest = 1 if split else max(1, at.RUN_QUERIES // shape.group)
        found = runs(rows.slots, rows.positions, longest)
        self._run_rows[: len(found)] = [first for first, _ in found]
        self._run_lengths[: len(found)] = [length for _, length in found]
        block[at.RUNS], block[at.SPLIT], block[at.BLOCKS] = len(found), int(split), blocks


def runs(slots: Sequence[int], positions: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """(first row, length) of the runs of up to `longest` neighbouring positions of one slot."""
    found: list[tuple[int, int]] = []
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if found:
            first, length = found[-1]
            follows = slots[first] == slot and positions[first] + length == position
            if follows and length < longest:
                found[-1] = (first, length + 1)
                continue
        found.append((row, 1))
    return found
