"""Waiting without polling: one pipe a process, read by one of those who wait.

Role: a waiter that found nothing is registered while the write lock is held; whoever writes what
it waits for takes the process's mark out of the shared page, also under the lock, and pokes the
process's pipe after giving the lock back. A poke stays in the pipe until it is read, so none is
lost between the two. (One pipe shared by all processes loses pokes: whoever reads first takes
them away from the others.)

The pipe is read by the first thread that waits: no other thread stands between a poke and the
thread that it is for, and none runs in a process where nobody waits. When that thread leaves,
another one that waits takes its place. Who waits without a thread of his own, a task of an event
loop, needs one that reads for him; it is begun with the first of those.

It must not know what is waited for: it wakes everybody of the kind, and they look again.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from . import _files, _names
from .errors import DiskFullError, StorageError

logger = logging.getLogger("weclaw_embedded")

READY_BYTE: Final = b"r"
SETTLED_BYTE: Final = b"s"
REPLICATED_BYTE: Final = b"p"
FEED_BYTE: Final = b"f"
SYNCED_BYTE: Final = b"y"
_NUDGE_BYTE: Final = b"n"
_NO_BYTE: Final = b"-"  # that nobody sends
_MOST_CANCELLED: Final = 64  # calls of a timer that are kept beside as many that are not
_LONG_S: Final = 3600.0
_READ_BYTES: Final = 256


class Waiter:
    """One thread's or task's wait. `wake` may come from any thread, any number of times.

    Most are made for nothing, as something is there at once: it costs little until it is added.
    See `waiter_for`.
    """

    kind = READY_BYTE
    woken = False
    seen = -1  # up to where messages were visible when it was registered by one who wants some
    callback: Callable[[], None] | None = None
    _lock: threading.Lock | None = None  # to sleep on; none before it is armed

    def arm(self) -> None:
        """Get ready to sleep, beside who reads the pipe. One that was woken before won't."""
        if self._lock is not None:
            return
        lock = threading.Lock()
        lock.acquire()
        self._lock = lock
        if self.woken:
            self.stir()

    def wake(self) -> None:
        if self.callback is not None:
            self.callback()
            return
        self.woken = True
        if self._lock is not None:
            self.stir()

    def stir(self) -> None:
        """End its sleep, without a reason to look again."""
        lock = self._lock
        if lock is not None:
            with contextlib.suppress(RuntimeError):  # stirred twice: it stirs once
                lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Block until woken or the time is over; Ctrl-C gets through. True when woken."""
        lock = self._lock
        assert lock is not None, "it was added before"
        lock.acquire(timeout=max(0.0, timeout_s))
        return self.woken


def waiter_for(kind: bytes, callback: Callable[[], None] | None = None) -> Waiter:
    """One that waits for this, and calls `callback` instead of waking a thread, if there is one."""
    waiter = Waiter()
    waiter.kind = kind
    waiter.callback = callback
    return waiter


def pipe_path(directory: str, slot: int) -> str:
    """Where the pipe of who has this slot is."""
    return os.path.join(directory, f"wake-{slot}")


def open_pipe(directory: str, slot: int, like_fd: int) -> int:
    """Open the pipe of a slot, to be read by who has the slot; made if need be."""
    path = pipe_path(directory, slot)
    # One that is there is of a process that was killed; the slot is ours now.
    with contextlib.suppress(FileExistsError):
        _names.make_fifo(path)
        _names.match_owner_and_mode(path, like_fd)
    # Opened for both directions: the pipe then never reports an end of file when the last writer
    # goes, and opening it does not wait for one.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class Waker:
    """The pipes of one scratch folder, as one process sees them."""

    def __init__(self, directory: str, slot: int, like_fd: int) -> None:
        self._directory = directory
        self._slot = slot
        self._like_fd = like_fd
        self._waiters: set[Waiter] = set()
        # A signal's handler that closes may come while its own thread has this.
        self._lock = threading.RLock()
        self._fd = -1
        self._poll = select.poll()
        self._reader = 0  # the ident of the thread that reads the pipe
        self._outgoing: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, waiter: Waiter) -> None:
        """Register a waiter; to be called while the write lock is held, before giving it back, or
        before looking once more.
        """
        with self._lock:
            if self._fd < 0:
                self._open(waiter.kind)
            if waiter.callback is not None and self._thread is None:
                self._start()
            self._waiters.add(waiter)

    def discard(self, waiter: Waiter | None) -> None:
        """Forget a waiter, if there is one; whoever waited calls this. If the pipe has no reader
        now, another one who waits stirs and becomes it.
        """
        if waiter is None:
            return
        with self._lock:
            self._waiters.discard(waiter)
            if not self._reader:
                for other in self._waiters:
                    if other.callback is None and not other.woken:
                        other.stir()
                        break

    def has(self, waiter: Waiter) -> bool:
        """Whether it is registered."""
        return waiter in self._waiters

    @property
    def is_open(self) -> bool:
        """Whether somebody in this process has waited before, so that there is a pipe."""
        return self._fd >= 0

    def has_any(self, kind: bytes) -> bool:
        """Whether somebody in this process waits for this."""
        with self._lock:
            return any(waiter.kind == kind for waiter in self._waiters)

    def _open(self, kind: bytes) -> None:
        try:
            self._fd = open_pipe(self._directory, self._slot, self._like_fd)
        except OSError as error:
            if kind == REPLICATED_BYTE:
                raise  # who waits for the replica may have put already, and can do without
            # The turn of all others is taken back.
            what = f"a pipe to be woken by can't be made in {self._directory}: {error.strerror}"
            if error.errno in _files.FULL:
                raise DiskFullError(
                    f"{what}; nothing was taken or put; make room, or call without waiting"
                ) from error
            raise StorageError(
                f"{what}; nothing was taken or put; close files that are not needed, or call "
                "without waiting"
            ) from error
        self._poll.register(self._fd, select.POLLIN)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="weclaw-wake", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            waiter = waiter_for(_NO_BYTE)  # it only takes its turn to read
            with self._lock:
                self._waiters.add(waiter)
            self.wait(waiter, _LONG_S)
            self.discard(waiter)

    def wait(self, waiter: Waiter, timeout_s: float) -> bool:
        """Block until the waiter is woken or the time is over; Ctrl-C gets through. True when it
        was woken.
        """
        left_s = timeout_s
        until_s = time.monotonic() + left_s
        while left_s > 0 and not (waiter.woken or self._closed):
            reads = 0
            try:
                with self._lock:
                    if not self._reader:
                        # In this order: Ctrl-C in between must not leave a reader that isn't.
                        reads = self._reader = threading.get_ident()
                    else:
                        waiter.arm()
                if reads:
                    self._read(left_s)
                else:
                    waiter.wait(left_s)
            finally:
                if reads:
                    self._reader = 0
                    if self._is_closed():
                        self._close_fds()
            if not waiter.woken:
                left_s = until_s - time.monotonic()
        return waiter.woken

    def _is_closed(self) -> bool:
        # Another thread may have closed it since: a type checker would go by the last look.
        return self._closed

    def _read(self, timeout_s: float) -> None:
        """Sleep until the pipe has something, and wake those it is for."""
        # Rounded up, so as not to wake just before the time and then spin.
        if not self._poll.poll(math.ceil(timeout_s * 1000)) or self._is_closed():
            return  # if closed, the descriptor may be somebody else's by now
        try:
            # Most often one byte; if it is more than that, there will be no sleep before the rest.
            got = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        with self._lock:
            woken = [waiter for waiter in self._waiters if waiter.kind in got]
        for waiter in woken:
            waiter.wake()

    def poke(self, slots: Sequence[int], kind: bytes) -> bool:
        """Wake the processes in these slots; False when one of them has died. Called without the
        write lock.
        """
        all_live = True
        for slot in slots:
            # One at a time, so that no descriptor is written to after another thread has closed
            # it: by then it may be a file of somebody else's. A pipe never blocks.
            with self._lock:
                all_live &= self._poke_own(kind) if slot == self._slot else self._poke(slot, kind)
        return all_live

    def _poke_own(self, kind: bytes) -> bool:
        return self._fd >= 0 and self._write(self._fd, kind)

    def _poke(self, slot: int, kind: bytes) -> bool:
        fd = self._outgoing.get(slot, -1)
        if fd >= 0:
            if self._write(fd, kind):
                return True
            # Whoever had the slot is gone. Another process may have it by now, with its own pipe.
            del self._outgoing[slot]
            os.close(fd)
        try:
            fd = os.open(
                pipe_path(self._directory, slot), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):
                return False
            # No descriptor left, say: no reason for a put to fail that is written. Who waits looks
            # by himself before long, because the log has moved.
            logger.warning("a process that waits can't be woken at once: %s", error)
            return True
        self._outgoing[slot] = fd
        return self._write(fd, kind)

    @staticmethod
    def _write(fd: int, kind: bytes) -> bool:
        try:
            _files.write_pipe(fd, kind)
        except BlockingIOError:
            return True  # the pipe is full of pokes: it will wake anyway
        except OSError:
            return False
        return True

    def wake(self, waiters: Iterable[Waiter]) -> None:
        """Make these of this process look again."""
        for waiter in waiters:
            waiter.wake()
        with self._lock:
            self._poke_own(_NUDGE_BYTE)  # whoever reads is woken by the pipe only

    def wake_all(self) -> None:
        """Make every waiter of this process look again (the store closes or has failed)."""
        with self._lock:
            waiters = list(self._waiters)
        self.wake(waiters)

    def close(self) -> None:
        self._closed = True
        self.wake_all()
        with self._lock:
            thread, self._thread = self._thread, None
        # A signal handler may have come here while its own thread reads, or waits to.
        if thread is not None and self._reader != threading.get_ident():
            thread.join()
        if not self._reader:
            self._close_fds()  # otherwise the reader does when it leaves, which is now
        with contextlib.suppress(OSError):
            os.unlink(pipe_path(self._directory, self._slot))

    def abandon(self) -> None:
        """Close the descriptors a forked child inherited; the parent's stay as they are."""
        self._lock = threading.RLock()  # the parent's may have been held
        self._thread = None
        self._close_fds()

    def _close_fds(self) -> None:
        with self._lock:
            fds = [self._fd, *self._outgoing.values()]
            self._fd = -1
            self._outgoing = {}
        for fd in fds:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)


class Timer:
    """One thread that calls functions at given times; started with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Taken by itself: on the way into a condition, and out of it, Ctrl-C may leave it locked.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._cancelled: set[int] = set()  # numbers of calls that nobody wants any more
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_at(self, when_s: float, function: Callable[[], None]) -> int:
        """Call `function` at `time.monotonic() == when_s` or soon after; the number of this call,
        for `cancel`.
        """
        with self._lock:
            if self._closed or sys.is_finalizing():
                return 0
            # In this order, since Ctrl-C may come between any two of these lines: what is due has a
            # thread that looks at it, which it does when this one gives the lock back.
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # known only once it runs
            elif not self._heap or when_s < self._heap[0][0]:
                # All, though one waits: who was broken off in here may have left it in the list
                # as one that waits still, and it would be told in the place of the real one.
                self._condition.notify_all()
            self._count = number = self._count + 1
            heapq.heappush(self._heap, (when_s, number, function))
            return number

    def call_by(self, when_s: float, function: Callable[[], None]) -> None:
        """Have `function` called at `time.monotonic() == when_s`, unless it is called before that
        anyhow: so what many want soon is done once for all of them. Whether it is due is known here
        alone, so that Ctrl-C leaves nothing that is taken for due and never comes.
        """
        with self._lock:
            if self.next_s(function) > when_s:
                self.call_at(when_s, function)

    def next_s(self, function: Callable[[], None]) -> float:
        """When `function` is called next (time.monotonic); infinity where it is not due."""
        with self._lock:
            return min(
                (when_s for when_s, _, due in self._heap if due == function), default=math.inf
            )

    def cancel(self, number: int) -> None:
        """This call is not wanted any more. It may come all the same, but nothing of it is kept
        until it is due.
        """
        self._cancelled.add(number)
        # Once for as many as are left, so that each costs the same however many there are.
        if len(self._cancelled) > max(_MOST_CANCELLED, len(self._heap) // 2):
            with self._lock:
                cancelled, self._cancelled = self._cancelled, set()
                kept = [one for one in self._heap if one[1] not in cancelled]
                heapq.heapify(kept)
                self._heap = kept

    def _run(self) -> None:
        me = threading.current_thread()
        with self._lock:
            # Whoever started it was perhaps interrupted before he could note it.
            if self._thread is None:
                self._thread = me
        while self._thread is me:
            with self._lock:
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
            try:
                function()
            except Exception:
                # Of one of many who count on this thread: the others are called all the same.
                logger.exception("%s: what was due has failed", self._name)
            # While this thread sleeps it keeps nobody alive who was dropped.
            del function

    def stop(self) -> None:
        """Call nothing any more; the thread ends by itself."""
        with self._lock:
            self._closed = True
            self._heap.clear()
            self._condition.notify_all()

    def close(self) -> None:
        """`stop`, and wait until the thread has ended."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
