"""Waiting without polling: one pipe and one waking thread a process, made when first needed.

Role: a waiter that found nothing is registered while the write lock is held; whoever writes what
it waits for takes the process's mark out of the shared page, also under the lock, and pokes the
process's pipe after giving the lock back. A poke stays in the pipe until it is read, so none is
lost between the two. (One pipe shared by all processes loses pokes: whoever reads first takes
them away from the others.)

It must not know what is waited for: it wakes everybody of the kind, and they look again.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from . import _files

READY_BYTE: Final = b"r"
SETTLED_BYTE: Final = b"s"
REPLICATED_BYTE: Final = b"p"
FEED_BYTE: Final = b"f"
_STOP_BYTE: Final = b"q"


class Waiter:
    """One thread's or task's wait. `wake` may come from any thread, any number of times."""

    __slots__ = ("_callback", "_lock", "kind")

    def __init__(self, kind: bytes, callback: Callable[[], None] | None = None) -> None:
        self.kind = kind
        self._callback = callback
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        if self._callback is not None:
            self._callback()
            return
        with contextlib.suppress(RuntimeError):  # woken twice: it looks again once
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Block until woken or the time is over; Ctrl-C gets through. True when woken."""
        return self._lock.acquire(timeout=max(0.0, timeout_s))


class Waker:
    """The pipes of one scratch folder, as one process sees them."""

    def __init__(self, directory: str, slot: int, like_fd: int) -> None:
        self._directory = directory
        self._slot = slot
        self._like_fd = like_fd
        self._waiters: set[Waiter] = set()
        self._lock = threading.Lock()
        self._fd = -1
        self._outgoing: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    def _path(self, slot: int) -> str:
        return os.path.join(self._directory, f"wake-{slot}")

    def add(self, waiter: Waiter) -> None:
        """Register a waiter; to be called while the write lock is held, before giving it back."""
        with self._lock:
            if self._thread is None:
                self._start()
            self._waiters.add(waiter)

    def discard(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiters.discard(waiter)

    def _start(self) -> None:
        path = self._path(self._slot)
        try:
            _files.make_fifo(path)
            _files.match_owner_and_mode(path, self._like_fd)
        except FileExistsError:
            pass  # of a process that was killed; the slot is ours now
        # Opened for both directions: the pipe then never reports an end of file when the last
        # writer goes, and opening it does not wait for one.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(self._fd,), name="weclaw-wake", daemon=True
        )
        self._thread.start()

    def _run(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            poll.poll()
            try:
                got = os.read(fd, 65536)
            except BlockingIOError:
                continue
            except OSError:
                return
            if _STOP_BYTE in got:
                return
            with self._lock:
                woken = [w for w in self._waiters if w.kind in got]
            for waiter in woken:
                waiter.wake()

    def poke(self, slots: list[int], kind: bytes) -> None:
        """Wake the processes in these slots. Called without the write lock."""
        for slot in slots:
            if slot == self._slot and self._fd >= 0:
                self._write(self._fd, kind)
                continue
            with self._lock:
                fd = self._outgoing.get(slot, -1)
            if fd < 0:
                try:
                    fd = os.open(self._path(slot), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError as error:
                    if error.errno in (errno.ENXIO, errno.ENOENT):
                        continue  # it died; nobody waits there any more
                    raise
                with self._lock:
                    fd = self._keep(slot, fd)
            if not self._write(fd, kind):
                with self._lock:
                    if self._outgoing.pop(slot, -1) == fd:
                        os.close(fd)

    def _keep(self, slot: int, fd: int) -> int:
        other = self._outgoing.get(slot)
        if other is not None:
            os.close(fd)
            return other
        self._outgoing[slot] = fd
        return fd

    @staticmethod
    def _write(fd: int, kind: bytes) -> bool:
        try:
            os.write(fd, kind)
        except BlockingIOError:
            return True  # the pipe is full of pokes: it will wake anyway
        except OSError:
            return False
        return True

    def wake_all(self) -> None:
        """Make every waiter of this process look again (the store closes or has failed)."""
        with self._lock:
            woken = list(self._waiters)
        for waiter in woken:
            waiter.wake()

    def close(self) -> None:
        self.wake_all()
        with self._lock:
            thread, self._thread = self._thread, None
            fd, self._fd = self._fd, -1
            outgoing, self._outgoing = self._outgoing, {}
        if thread is not None:
            self._write(fd, _STOP_BYTE)
            if thread is not threading.current_thread():
                thread.join()
        self._close_fds(fd, outgoing)
        with contextlib.suppress(OSError):
            os.unlink(self._path(self._slot))

    def abandon(self) -> None:
        """Close the descriptors a forked child inherited; the parent's stay as they are."""
        self._close_fds(self._fd, self._outgoing)
        self._fd = -1
        self._outgoing = {}
        self._thread = None

    @staticmethod
    def _close_fds(fd: int, outgoing: dict[int, int]) -> None:
        for one in (fd, *outgoing.values()):
            if one >= 0:
                with contextlib.suppress(OSError):
                    os.close(one)


class Timer:
    """One thread that calls functions at given times; started with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_at(self, when_s: float, function: Callable[[], None]) -> None:
        """Call `function` at `time.monotonic() == when_s` or soon after."""
        with self._condition:
            if self._closed or sys.is_finalizing():
                return
            self._count += 1
            heapq.heappush(self._heap, (when_s, self._count, function))
            if self._thread is None:
                # Known only once it runs: Ctrl-C may come between any two of these lines.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            elif self._heap[0][1] == self._count:
                self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed:
                    if not self._heap:
                        self._condition.wait()
                        continue
                    ahead_s = self._heap[0][0] - time.monotonic()
                    if ahead_s <= 0:
                        break
                    self._condition.wait(min(ahead_s, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                function = heapq.heappop(self._heap)[2]
            function()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
