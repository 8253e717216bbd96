"""The state of sequences: what may be run, committed, rewound, restored; what compiled code is told."""

from __future__ import annotations

import numpy as np
import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.slots import MAX_SLOTS, Slots

RECURRENT = 256


def test_keys_and_values_go_back_to_any_length() -> None:
    slots = Slots(1024, 0)
    slot = slots.allocate(100)
    slots.check(slot, 0, 9)
    slots.wrote(slot, 10)
    slots.commit(slot, 10)
    slots.rewind(slot, 3)
    slots.check(slot, 2, 99)  # positions that are there may be written again
    with pytest.raises(ValueError, match="context"):
        slots.check(slot, 3, 100)
    with pytest.raises(ValueError, match="rewind"):
        slots.rewind(slot, 4)
    slots.restore(slot, slots.snapshot(slot))
    assert slots[slot].length == 3


def test_a_context_is_held_in_whole_blocks() -> None:
    slots = Slots(1024, RECURRENT)
    assert slots[slots.allocate(128)].state.size == 1024
    assert slots[slots.allocate(129)].state.size == 2048
    assert slots[slots.allocate(129)].recurrent.size == 2 * RECURRENT


def test_recurrent_state_is_written_beside_the_committed_one() -> None:
    slots = Slots(1024, RECURRENT)
    slot = slots.allocate(100)
    start = slots[slot].recurrent.address
    assert (slots.recurrent[slot], slots.recurrent_next[slot]) == (0, start + RECURRENT)
    slots.wrote(slot, 5)
    assert slots.recurrent[slot] == 0  # not committed: the next step begins with zeros again
    slots.commit(slot, 5)
    assert (slots.recurrent[slot], slots.recurrent_next[slot]) == (start + RECURRENT, start)
    slots.commit(slot, 5)
    assert slots.recurrent[slot] == start + RECURRENT
    slots.wrote(slot, 6)
    slots.commit(slot, 6)
    assert (slots.recurrent[slot], slots.recurrent_next[slot]) == (start, start + RECURRENT)


def test_recurrent_state_is_only_extended() -> None:
    slots = Slots(1024, RECURRENT)
    slot = slots.allocate(100)
    slots.wrote(slot, 5)
    with pytest.raises(ValueError, match="5 tokens were written"):
        slots.commit(slot, 4)
    slots.commit(slot, 5)
    for first in (0, 4, 6):
        with pytest.raises(ValueError, match="does not follow"):
            slots.check(slot, first, 7)
    with pytest.raises(ValueError, match="cannot go back"):
        slots.rewind(slot, 4)
    slots.rewind(slot, 0)
    assert slots.recurrent[slot] == 0
    slots.check(slot, 0, 7)


def test_a_snapshot_brings_recurrent_state_back() -> None:
    slots = Slots(1024, RECURRENT)
    slot = slots.allocate(100)

    def committed() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        start = int(slots.recurrent[slot]) - slots[slot].recurrent.address
        return slots[slot].recurrent.bytes[start : start + RECURRENT].view(np.float32)

    slots.wrote(slot, 5)
    slots.commit(slot, 5)
    committed()[:] = 5
    snapshot = slots.snapshot(slot)
    assert snapshot.nbytes == RECURRENT
    slots.wrote(slot, 6)
    slots.commit(slot, 6)
    committed()[:] = 6
    slots.restore(slot, snapshot)
    assert slots[slot].length == 5
    assert (committed() == 5).all()
    committed()[:] = 7
    slots.restore(slot, snapshot)
    assert (committed() == 5).all()  # a copy, not a view


def test_slots_run_out() -> None:
    slots = Slots(0, 0)
    for _ in range(MAX_SLOTS):
        slots.allocate(1)
    with pytest.raises(Refused) as caught:
        slots.allocate(1)
    assert caught.value.code == "run/slots"
    slots.release(7)
    assert slots.allocate(1) == 7
