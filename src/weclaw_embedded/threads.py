"""Durable stand-ins for `queue.Queue` and its kin: change one import line, say where the file is.

    from weclaw_embedded import threads as queue     # was: import queue
    q = queue.Queue(path="tasks.wq")                 # was: queue.Queue()

What was put is still there after a kill -9, and an item that was got but not yet `task_done()`
comes back. The items are those of `weclaw.Queue("tasks.wq")`.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any, TypeVar

from . import _dropin, errors
from ._delivery import Taken, new_waiter
from ._dropin import LIFO, PRIORITY, Core, StandIn
from ._pending import deadline_of, is_over, look_at
from ._putting import NoRoom
from ._session import BATCH, Session
from ._shared import READY

__all__ = ["Empty", "Full", "LifoQueue", "PriorityQueue", "Queue", "ShutDown"]

Empty = errors.Empty
Full = errors.Full
ShutDown = errors.ShutDown

T = TypeVar("T")


class Queue(StandIn[T]):
    """`queue.Queue`, kept in a file. Its methods mean what they mean there, in Python 3.13.

    `put` is durable on return. An item that was got is held until `task_done()` settles it or the
    process dies; then it is there again. `task_done()` settles the oldest item that the calling
    thread got; else the one that its context inherited; else it only counts, and when as many
    calls have come as items are out, all of them are settled: elsewhere, a program that always has
    something in hand settles nothing. What is found at opening counts as unfinished, as does what
    other processes put. After `shutdown(immediate=True)` the items stay on disk for the next open.

    Items are what `codec` takes (by default what MessagePack can give back equal). One that can't
    be decoded goes to the dead letters. `close()` is not needed, but gives the file back at once.

    An item is done with `task_done()`: what a program never says that of, it gets again at each
    start, and the file keeps it. What comes back is a copy, not the same object; and this is no
    subclass of `queue.Queue`. What was in hand when its process died comes back one at a time, so
    `task_done()` is to be called before the next `get`; after more deaths than
    `retry=RetryPolicy(max_crashes=…)` allows it is a dead letter, which the log says unless
    `on_dead` is told.

    Args:
        maxsize: How many items may wait before `put` does; 0 or less: any number.
        path: The file.
        **options: Those of `weclaw_embedded.Queue`, without `visibility_timeout`.
    """

    def __init__(self, maxsize: float = 0, *, path: str | os.PathLike[str], **options: Any) -> None:
        self._core = Core(self._kind, maxsize, path, options)
        self._joiners: set[object] = set()

    def __repr__(self) -> str:
        core = self._core
        return f"<{type(self).__name__} maxsize={core.maxsize!r} path={core.store.path!r}>"

    # -- looking -------------------------------------------------------------------------------

    @property
    def maxsize(self) -> float:
        """How many items may wait; may be changed."""
        return self._core.maxsize

    @maxsize.setter
    def maxsize(self, value: float) -> None:
        _dropin.limit_of(value)
        self._core.maxsize = value

    @property
    def is_shutdown(self) -> bool:
        """Whether `shutdown` was called."""
        return self._core.is_shutdown

    # -- put -------------------------------------------------------------------------------------

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Put an item, waiting for room up to `timeout` seconds if `block`; durable on return.

        Raises `Full`, `ShutDown`, `SerializationError` and the errors of
        `weclaw_embedded.Queue.put`.
        """
        core = self._core
        until_s = deadline_of(bool(block), timeout if block else None)
        if core.is_shutdown:
            raise _dropin.shut_down()
        engine = core.writable
        message = core.encode(engine, item)
        try:
            core.try_put(engine, message)
        except NoRoom as error:
            attempt = partial(core.try_put, engine, message)
            core.queue._once_room(engine, until_s, attempt, error)
        if core.queue._policy == BATCH:
            core.queue._flush_later(engine, 1)

    def put_nowait(self, item: T) -> None:
        """`put` that raises `Full` instead of waiting for room."""
        self.put(item, block=False)

    # -- get -------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the next item, waiting for one up to `timeout` seconds if `block`.

        Raises `Empty`, `ShutDown`.
        """
        core = self._core
        until_s = deadline_of(bool(block), timeout if block else None)
        while True:
            engine = core.writable
            waiter = None if is_over(until_s) else new_waiter(READY)
            taken: Taken | None = None
            try:
                taken = engine.run(core.look, 1, None, waiter)
                found: list[T] = core.hand_out(engine, taken, threading.current_thread())
                if found:
                    return found[0]
                if taken.leases or taken.has_more:
                    continue
                if waiter is None or core.is_shutdown:
                    if waiter is not None:
                        engine.waker.discard(waiter)
                        engine.stop_waiting()
                    if engine.run(core.waiting) and engine.settle_promises():
                        continue  # it only waited for a sync
                    core.tell_waiting()
                    raise _dropin.shut_down() if core.is_shutdown else core.nothing()
                core.tell_waiting()
                core.queue._sleep(engine, waiter, look_at(engine, taken.look_again_us), until_s)
            except BaseException:
                engine.waker.discard(waiter)
                if taken is not None:
                    core.give_back_unseen(engine, taken)
                raise

    def get_nowait(self) -> T:
        """`get` that raises `Empty` instead of waiting."""
        return self.get(block=False)

    # -- done ------------------------------------------------------------------------------------

    def task_done(self) -> None:
        """An item that was got is done with: it never comes back. See the class for which one.

        To be called by the thread that got it. Where one thread gets and the threads of a pool do
        the work, let these get, work and call this themselves, or hand on the context of the `get`:
        `pool.submit(contextvars.copy_context().run, work, item)`.

        Raises `ValueError` when called more often than there were items.
        """
        core = self._core
        if self._task_done(threading.current_thread(), core.engine.run) == 0:
            core.engine.waker.wake_all()

    def join(self) -> None:
        """Wait until nothing is unfinished."""
        core = self._core
        joiner = object()
        try:
            self._joiners.add(joiner)
            core.queue._once_settled(core.engine, None, core.all_done)
        finally:
            self._joiners.discard(joiner)

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self, immediate: bool = False) -> None:
        """No more puts; gets raise `ShutDown` once the queue is empty, or at once if `immediate`;
        then `join` waits only for what was got. Nothing is taken off the disk.
        """
        core = self._core

        def shut(session: Session) -> None:
            core.shut(immediate)

        core.engine.run(shut)
        core.engine.waker.wake_all()


class PriorityQueue(Queue[T]):
    """`queue.PriorityQueue`, kept in a file: the lowest item first.

    The order is kept by this process, in memory, from what the file holds: at the first `get`
    all waiting items are read. Items that can't be compared are taken, too: those of one kind in
    the order they were put, and in which order kinds come is not defined. Other processes that
    take from the same file by `weclaw_embedded.Queue` get the oldest first.
    """

    _kind = PRIORITY


class LifoQueue(Queue[T]):
    """`queue.LifoQueue`, kept in a file: the newest item first. The order is kept by this
    process, as for `PriorityQueue`.
    """

    _kind = LIFO
