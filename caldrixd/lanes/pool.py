"""The threads of the CPU lane, and the step block they read (caldrix_kernels.step.layout)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from caldrix_kernels.step import layout as at
from caldrixd.lanes.arena import Arena

# Pauses before a waiting thread parks: on a busy machine a long spin takes the core from whoever works.
SPIN = 300

Words = npt.NDArray[np.int64]


class StepPool:
    """Runs the step that `block` describes: the caller is thread 0, pool threads are the others.

    `publish_and_run` and `pool_thread` are the compiled routines of the schedule. Each thread has
    `scratch_bytes` and `private_bytes` of its own. Calls come from one thread, but for `cancel`.
    """

    def __init__(
        self,
        publish_and_run: Callable[[int, int], None],
        pool_thread: Callable[[int, int, int, int, int], None],
        *,
        scratch_bytes: int,
        private_bytes: int,
        threads: int,
    ) -> None:
        self._publish_and_run, self._pool_thread = publish_and_run, pool_thread
        self._scratch_bytes, self._private_bytes = scratch_bytes, private_bytes
        self._threads: list[threading.Thread] = []
        control = self._control = Arena(at.CONTROL_BYTES)
        self._cancel, self._stopped, self._command = (
            control.bytes[offset : offset + at.WORD].view(np.int64)
            for offset in (at.CANCEL, at.STOPPED, at.COMMAND)
        )
        self.block: Words = np.zeros(at.STEP_WORDS, np.int64)
        self._published: Words = np.zeros(at.STEP_WORDS, np.int64)
        self.block[at.CONTROL], self.block[at.SPIN] = control.address, SPIN
        self._make_room(threads)

    def _make_room(self, threads: int) -> None:
        """Memory for so many threads. None but the caller's may be running."""
        self._scratch = Arena(threads * self._scratch_bytes)
        self._private = Arena(threads * self._private_bytes)
        self._copies: Words = np.zeros((threads, at.STEP_WORDS), np.int64)
        self.block[at.SCRATCH], self.block[at.SCRATCH_BYTES] = self._scratch.address, self._scratch_bytes
        self.block[at.PRIVATE], self.block[at.PRIVATE_BYTES] = self._private.address, self._private_bytes

    def run(self, threads: int) -> bool:
        """Run the step; False when it was cancelled. Threads beyond `threads` sleep through it."""
        self.block[at.THREADS] = self._start(threads)
        ticket = int(self.block[at.BASE]) + 1
        self._publish()
        stopped = bool(self._stopped[0] == ticket)
        if stopped:
            self._cancel[0] = 0
        return not stopped

    def _publish(self) -> None:
        self._publish_and_run(self.block.ctypes.data, self._published.ctypes.data)

    def cancel(self) -> None:
        """Stop the running step, from any thread; one that comes too late stops the next."""
        self._cancel[0] = 1

    def clear_private(self) -> None:
        self._private.clear()

    def _start(self, threads: int) -> int:
        """Have so many threads, or those that the system gives: the bits are the same. Their number."""
        if threads > len(self._copies):
            self.close()
            self._make_room(threads)
        seen = int(self._command[0])
        for number in range(len(self._threads) + 1, threads):
            published, own = self._published.ctypes.data, self._copies[number].ctypes.data
            arguments = (published, own, self._control.address, number, seen)
            thread = threading.Thread(target=self._pool_thread, args=arguments, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)
        return min(threads, len(self._threads) + 1)

    def close(self) -> None:
        """End the pool threads. They read this object's memory, so it may not go before them."""
        if not self._threads:
            return
        block = self.block
        kept = [int(block[word]) for word in (at.BEGIN, at.END)]
        block[at.QUIT], block[at.BEGIN], block[at.END] = 1, 0, 0
        self._publish()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        block[at.QUIT], block[at.BEGIN], block[at.END] = 0, *kept
