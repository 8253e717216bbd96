"""What the machine itself can do: how fast memory is read, and how fast float32 is multiplied and added."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: allow-any-generics, no-check-untyped-defs

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.memory import store_f32
from caldrix_kernels.linear.numba_cpu import WIDE
from caldrixd.lanes.arena import Arena

READ_BYTES = 1 << 30
LINE = 64
# Independent chains: enough to hide the latency of an addition, few enough for sixteen 256-bit registers.
CHAINS = 12 if WIDE else 6
BURST = 20_000_000


@intrinsic
def _read(typing, address, rounds):
    """The sum of `rounds` * CHAINS cache lines from `address` on."""

    def codegen(context, builder, signature, arguments):
        address, rounds = arguments

        def body(index, sums):
            line = builder.add(address, builder.mul(index, v.const(CHAINS * LINE)))
            return [
                builder.fadd(total, v.load(builder, v.offset(builder, line, LINE * i), v.VF, LINE))
                for i, total in enumerate(sums)
            ]

        return _one_number(builder, v.counted_loop(builder, rounds, body, [v.lanes(0.0)] * CHAINS))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def _multiply(typing, rounds):
    """CHAINS fused multiply-adds in every lane, `rounds` times."""

    def codegen(context, builder, signature, arguments):
        def body(index, sums):
            factor = v.broadcast(builder, builder.sitofp(index, v.F32), v.VF)
            return [v.fma(builder, factor, factor, total) for total in sums]

        start = [v.lanes(float(i)) for i in range(CHAINS)]
        return _one_number(builder, v.counted_loop(builder, arguments[0], body, start))

    return types.float32(types.int64), codegen


def _one_number(builder, vectors):
    """Something that depends on all lanes, so that none of the work is dropped."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = builder.fadd(total, vector)
    return v.reduce(builder, total, builder.fadd)


def _read_part(address, rounds, result):
    store_f32(result, _read(address, rounds))


def _multiply_part(rounds, result):
    store_f32(result, _multiply(rounds))


def read_bandwidth(threads: int) -> Callable[[], float]:
    """Measures GB/s of `threads` threads that each read their part of 1 GiB of huge pages once."""
    part = READ_BYTES // threads // (CHAINS * LINE)
    memory = Arena(READ_BYTES, huge=True)
    memory.clear()
    result = Arena(threads * LINE)
    read = njit("void(int64, int64, int64)", nogil=True)(_read_part)
    size = part * CHAINS * LINE
    tasks = [(memory.address + i * size, part, result.address + i * LINE) for i in range(threads)]
    return lambda: threads * size / _seconds(read, tasks, keep=(memory, result)) / 1e9


def multiply_peak(threads: int) -> Callable[[], float]:
    """Measures GFLOP/s of `threads` threads; a multiply-add counts as two."""
    result = Arena(threads * LINE)
    multiply = njit("void(int64, int64)", nogil=True)(_multiply_part)
    operations = 2 * v.LANES * CHAINS * BURST * threads
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
