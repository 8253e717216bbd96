// Work sharing without a leader; see schedule/numba_cpu.py, which this follows function by function.
#include "stages.h"

#include <immintrin.h>

enum { IDLE_SPIN = 2000, EVERYONE = 1 << 30 };

// How many items a claim at `item` takes: a 1/share part of the rest, at least `chunk`.
int64_t claim_size(int64_t item, int64_t end, int64_t chunk, int64_t share)
{
    return smaller(larger(chunk, (end - item) / share), end - item);
}

// The first item of a claim in the stage [base, end), or -1. Its size is `claim_size` of the same.
//
// Who takes a stage's first item also reads the cancel word and names this stage as the last: nobody
// leaves it before that item is finished, so all threads see the same decision.
int64_t claim(int64_t step, int64_t base, int64_t end, int64_t chunk, int64_t share)
{
    int64_t control = word(step, AT_CONTROL);
    for (;;) {
        int64_t item = atomic_load(control + AT_NEXT);
        if (item >= end) return -1;
        int64_t size = claim_size(item, end, chunk, share);
        if (compare_exchange(control + AT_NEXT, item, item + size) != item) continue;
        if (item == base && atomic_load(control + AT_CANCEL) != 0) {
            atomic_store(control + AT_STOPPED + 8, end);
            atomic_store(control + AT_STOPPED, word(step, AT_BASE) + 1);
        }
        return item;
    }
}

void finish(int64_t step, int64_t end, int64_t count)
{
    int64_t control = word(step, AT_CONTROL);
    if (atomic_add(control + AT_FINISHED, count) + count == end
        && atomic_load(control + AT_FINISHED_SLEEPERS) > 0)
        futex(control + AT_FINISHED, FUTEX_WAKE_PRIVATE, EVERYONE);
}

void wait_finished(int64_t step, int64_t end)
{
    int64_t control = word(step, AT_CONTROL), spin = word(step, AT_SPIN), rounds = 0;
    for (;;) {
        int64_t seen = atomic_load(control + AT_FINISHED);
        if (seen >= end) return;
        if (++rounds < spin) {
            _mm_pause();
            continue;
        }
        atomic_add(control + AT_FINISHED_SLEEPERS, 1);
        futex(control + AT_FINISHED, FUTEX_WAIT_PRIVATE, seen);
        atomic_add(control + AT_FINISHED_SLEEPERS, -1);
    }
}

// Thread 0: copy the step block to where the pool reads it, wake the pool, run the step.
//
// The command word is odd while the block is written, so that a thread waking late never uses a torn copy.
EXPORTED void publish_and_run(int64_t staged, int64_t published)
{
    int64_t control = word(staged, AT_CONTROL);
    atomic_add(control + AT_COMMAND, 1);
    for (int64_t i = 0; i < AT_STEP_WORDS; i++) atomic_store(published + 8 * i, word(staged, i));
    atomic_add(control + AT_COMMAND, 1);
    if (atomic_load(control + AT_COMMAND_SLEEPERS) > 0)
        futex(control + AT_COMMAND, FUTEX_WAKE_PRIVATE, EVERYONE);
    ((kernel_2)kernel_at(staged, AT_RUN_STEP))(staged, 0);
}

static void wait_command(int64_t control, int64_t seen)
{
    int64_t rounds = 0;
    while (atomic_load(control + AT_COMMAND) == seen) {
        if (++rounds < IDLE_SPIN) {
            _mm_pause();
            continue;
        }
        atomic_add(control + AT_COMMAND_SLEEPERS, 1);
        futex(control + AT_COMMAND, FUTEX_WAIT_PRIVATE, seen);
        atomic_add(control + AT_COMMAND_SLEEPERS, -1);
    }
}

// A pool thread's life: wait for a command newer than `seen`, take a whole copy of the block, run it.
EXPORTED void pool_thread(int64_t published, int64_t own, int64_t control, int64_t thread, int64_t seen)
{
    for (;;) {
        wait_command(control, seen);
        int64_t command = atomic_load(control + AT_COMMAND);
        if (command & 1) {
            _mm_pause();
            continue;
        }
        for (int64_t i = 0; i < AT_STEP_WORDS; i++) store_i64(own + 8 * i, atomic_load(published + 8 * i));
        if (atomic_load(control + AT_COMMAND) != command) continue;
        seen = command;
        if (word(own, AT_QUIT) != 0) return;
        if (thread < word(own, AT_THREADS)) ((kernel_2)kernel_at(own, AT_RUN_STEP))(own, thread);
    }
}
