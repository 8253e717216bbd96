"""Work sharing without a leader.

Work is cut into items with one global number over all steps, claimed by compare-and-swap. A stage is over
when all its items are finished, not when all threads have arrived: a thread that the machine has
preempted holds up the others only while it owns an item, and one that wakes late finds nothing to claim
and touches nothing. Waiting threads spin briefly, then park on a futex.
"""

from caldrix_kernels.intrinsics.jit import call, entry, routine
from caldrix_kernels.intrinsics.memory import (
    FUTEX_WAIT_PRIVATE,
    FUTEX_WAKE_PRIVATE,
    atomic_add,
    atomic_load,
    atomic_store,
    compare_exchange,
    futex,
    load_i64,
    pause,
    store_i64,
)
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import (
    CANCEL,
    COMMAND,
    COMMAND_SLEEPERS,
    FINISHED,
    FINISHED_SLEEPERS,
    NEXT,
    STEP_WORDS,
    STOPPED,
)

IDLE_SPIN = 2000
EVERYONE = 1 << 30


@routine("int64(int64, int64)")
def word(block, index):
    return load_i64(block + 8 * index)


@routine("int64(int64, int64)")
def address(step, index):
    """The address table's entry."""
    return load_i64(word(step, at.ADDRESSES) + 8 * index)


@routine("int64(int64, int64)")
def kernel_at(step, index):
    """The kernel table's entry."""
    return load_i64(word(step, at.KERNELS) + 8 * index)


@routine("int64(int64, int64, int64, int64)")
def claim_size(item, end, chunk, share):
    """How many items a claim at `item` takes: a 1/share part of the rest, at least `chunk`."""
    return min(max(chunk, (end - item) // share), end - item)


@routine("int64(int64, int64, int64, int64, int64)")
def claim(step, base, end, chunk, share):
    """The first item of a claim in the stage [base, end), or -1. Its size is `claim_size` of the same.

    Who takes a stage's first item also reads the cancel word and names this stage as the last: nobody
    leaves it before that item is finished, so all threads see the same decision.
    """
    control = word(step, at.CONTROL)
    while True:
        item = atomic_load(control + NEXT)
        if item >= end:
            return -1
        size = claim_size(item, end, chunk, share)
        if compare_exchange(control + NEXT, item, item + size) == item:
            if item == base and atomic_load(control + CANCEL) != 0:
                atomic_store(control + STOPPED + 8, end)
                atomic_store(control + STOPPED, word(step, at.BASE) + 1)
            return item


@routine("void(int64, int64, int64)")
def finish(step, end, count):
    control = word(step, at.CONTROL)
    if atomic_add(control + FINISHED, count) + count == end and atomic_load(control + FINISHED_SLEEPERS) > 0:
        futex(control + FINISHED, FUTEX_WAKE_PRIVATE, EVERYONE)


@routine("void(int64, int64)")
def wait_finished(step, end):
    control = word(step, at.CONTROL)
    spin = word(step, at.SPIN)
    rounds = 0
    while True:
        seen = atomic_load(control + FINISHED)
        if seen >= end:
            return
        rounds += 1
        if rounds < spin:
            pause()
        else:
            atomic_add(control + FINISHED_SLEEPERS, 1)
            futex(control + FINISHED, FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF)
            atomic_add(control + FINISHED_SLEEPERS, -1)


@entry("void(int64, int64)")
def publish_and_run(staged, published):
    """Thread 0: copy the step block to where the pool reads it, wake the pool, run the step.

    The command word is odd while the block is written, so that a thread waking late never uses a torn copy.
    """
    control = word(staged, at.CONTROL)
    atomic_add(control + COMMAND, 1)
    for i in range(STEP_WORDS):
        atomic_store(published + 8 * i, load_i64(staged + 8 * i))
    atomic_add(control + COMMAND, 1)
    if atomic_load(control + COMMAND_SLEEPERS) > 0:
        futex(control + COMMAND, FUTEX_WAKE_PRIVATE, EVERYONE)
    call(kernel_at(staged, at.RUN_STEP), (staged, 0))


@routine("void(int64, int64)")
def wait_command(control, seen):
    rounds = 0
    while atomic_load(control + COMMAND) == seen:
        rounds += 1
        if rounds < IDLE_SPIN:
            pause()
        else:
            atomic_add(control + COMMAND_SLEEPERS, 1)
            futex(control + COMMAND, FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF)
            atomic_add(control + COMMAND_SLEEPERS, -1)


@entry("void(int64, int64, int64, int64, int64)")
def pool_thread(published, own, control, thread, seen):
    """A pool thread's life: wait for a command newer than `seen`, take a whole copy of the block, run it."""
    while True:
        wait_command(control, seen)
        command = atomic_load(control + COMMAND)
        if command & 1:
            pause()
            continue
        for i in range(STEP_WORDS):
            store_i64(own + 8 * i, atomic_load(published + 8 * i))
        if atomic_load(control + COMMAND) != command:
            continue
        seen = command
        if word(own, at.QUIT) != 0:
            return
        if thread < word(own, at.THREADS):
            call(kernel_at(own, at.RUN_STEP), (own, thread))
