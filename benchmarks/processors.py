"""How far apart two processors are: what it takes for a value to go over and back.

On a virtual machine the host decides, anew from minute to minute, whether the processors share a
cache. Work that goes to and fro between them (threads that put at once, tasks and their I/O
thread) is slower by a quarter to a third where they do not; what one thread does is not, and so
neither is the yardstick. Each row that depends on it says in its note what was measured.

    python benchmarks/processors.py
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

_ROUNDS: Final = 2000
_TRIES: Final = 9
_WORDS: Final = 16  # so that the two words are in cache lines of their own


class Apart:
    """How far apart they were in the turns of a row."""

    def __init__(self) -> None:
        self.measured_us: list[float] = []

    def beside(self, contender: Callable[[], float]) -> Callable[[], float]:
        """The same, measuring first how far apart they are. That takes 0.05 s."""

        def turn() -> float:
            if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
                # In a process of its own: this one may have threads, with which no fork is safe.
                told = subprocess.check_output([sys.executable, __file__], text=True)
                self.measured_us.append(float(told))
            return contender()

        return turn

    def __str__(self) -> str:
        if not self.measured_us:
            return "how far the processors are apart is not known"
        return f"processors {min(self.measured_us):.2f} to {max(self.measured_us):.2f} µs apart"


def _measured_us() -> float:
    """Microseconds over and back, Python's part in it included (0.1 to 0.2)."""
    ours, others = sorted(os.sched_getaffinity(0))[:2]
    words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
    rounds = _TRIES * _ROUNDS
    child = os.fork()
    signal.alarm(10)  # each by itself: neither spins for ever when the other is gone
    if not child:
        with contextlib.suppress(BaseException):
            os.sched_setaffinity(0, {others})
            for n in range(1, rounds + 1):
                while words[0] != n:
                    pass
                words[_WORDS] = n
        os._exit(0)
    os.sched_setaffinity(0, {ours})
    taken: list[float] = []
    n = 0
    for _ in range(_TRIES):
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            n += 1
            words[0] = n
            while words[_WORDS] != n:
                pass
        taken.append((time.perf_counter() - began) / _ROUNDS * 1e6)
    os.waitpid(child, 0)
    return statistics.median(taken)


if __name__ == "__main__":
    print(_measured_us())
