"""What the machine itself can do: how fast memory is read, and how fast numbers are multiplied and added."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: allow-any-generics, no-check-untyped-defs

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.memory import atomic_add, store_f32, store_u32
from caldrix_kernels.intrinsics.vector import WIDE
from caldrixd.lanes.arena import Arena

LINE = 64
# Independent chains: enough to hide the latency of an addition, few enough for sixteen 256-bit registers.
CHAINS = 12 if WIDE else 6
BLOCK = 1024 * CHAINS * LINE
# What one measurement reads; memory that is smaller is read several times over, as decode does.
READ_BYTES = 2 << 30
BURST = 20_000_000


@intrinsic
def _read(typing, address, rounds):
    """Something made of `rounds` * CHAINS cache lines from `address` on."""

    def codegen(context, builder, signature, arguments):
        address, rounds = arguments

        def body(index, found):
            line = builder.add(address, builder.mul(index, v.const(CHAINS * LINE)))
            return [
                builder.xor(bits, v.load(builder, v.offset(builder, line, LINE * i), v.VI, LINE))
                for i, bits in enumerate(found)
            ]

        found = v.counted_loop(builder, rounds, body, [v.int_lanes(0)] * CHAINS)
        return _one_number(builder, found, builder.xor)

    return types.uint32(types.int64, types.int64), codegen


def _make_multiply(dot):
    @intrinsic
    def multiply(typing, rounds):
        """CHAINS fused multiply-adds in every lane, or dots of two bfloat16, `rounds` times."""

        def codegen(context, builder, signature, arguments):
            number = v.broadcast(builder, builder.trunc(arguments[0], v.I32), v.VI)
            factor = builder.bitcast(number, v.VBF if dot else v.VF)
            accumulate = v.dot if dot else (lambda builder, total, a, b: v.fma(builder, a, b, total))

            def body(index, sums):
                return [accumulate(builder, total, factor, factor) for total in sums]

            start = [v.lanes(float(i)) for i in range(CHAINS)]
            sums = v.counted_loop(builder, arguments[0], body, start)
            return _one_number(builder, sums, builder.fadd)

        return types.float32(types.int64), codegen

    return multiply


_multiply, _dot = _make_multiply(False), _make_multiply(True)


def _one_number(builder, vectors, combine):
    """Something that depends on all lanes, so that none of the work is dropped."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = combine(total, vector)
    return v.reduce(builder, total, combine)


def _read_part(address, blocks, count, claimed, result):
    while True:
        block = atomic_add(claimed, 1)
        if block >= count:
            return
        store_u32(result, _read(address + block % blocks * BLOCK, BLOCK // (CHAINS * LINE)))


def _multiply_part(rounds, result):
    store_f32(result, _multiply(rounds))


def _dot_part(rounds, result):
    store_f32(result, _dot(rounds))


def filled(size: int) -> Arena:
    """Huge pages in which no two are alike, for `read_bandwidth`; at least one block."""
    memory = Arena(max(size, BLOCK), huge=True)
    words = memory.bytes[: memory.size // 8 * 8].view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64)
    return memory


def read_bandwidth(memory: Arena, threads: int) -> Callable[[], float]:
    """Measures GB/s of `threads` threads that read all of `memory`, over and over.

    Each thread takes the next block when it is done with one, so none waits for a slower one.
    """
    blocks = memory.size // BLOCK
    count = max(1, READ_BYTES // memory.size) * blocks
    control = Arena((threads + 1) * LINE)
    read = njit("void(int64, int64, int64, int64, int64)", nogil=True)(_read_part)
    tasks = [
        (memory.address, blocks, count, control.address, control.address + (i + 1) * LINE)
        for i in range(threads)
    ]

    def measure() -> float:
        control.clear()
        return count * BLOCK / _seconds(read, tasks, keep=(memory, control)) / 1e9

    return measure


def multiply_peak(threads: int, *, dot: bool = False) -> Callable[[], float]:
    """Measures GFLOP/s of `threads` threads, of float32 or bfloat16 pairs; a multiply-add counts as two."""
    result = Arena(threads * LINE)
    multiply = njit("void(int64, int64)", nogil=True)(_dot_part if dot else _multiply_part)
    operations = (4 if dot else 2) * v.LANES * CHAINS * BURST * threads
    tasks = [(BURST, result.address + i * LINE) for i in range(threads)]
    return lambda: operations / _seconds(multiply, tasks, keep=(result,)) / 1e9


def _seconds(work: Callable[..., None], tasks: Sequence[tuple[int, ...]], keep: tuple[Any, ...]) -> float:
    """Wall time of all tasks side by side. `keep` is the memory whose addresses they hold."""
    assert keep
    with ThreadPoolExecutor(len(tasks)) as pool:
        started = time.perf_counter()
        for running in [pool.submit(work, *task) for task in tasks]:
            running.result()
        return time.perf_counter() - started
