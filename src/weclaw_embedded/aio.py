"""Durable queues for asyncio: `AsyncQueue`, and stand-ins for `asyncio.Queue` and its kin.

An existing program changes one line and says where the file is:

    from weclaw_embedded import aio as asyncio_queues     # was: import asyncio
    queue = asyncio_queues.Queue(path="tasks.wq")         # was: asyncio.Queue()

What was put is still there after a kill -9, and an item that was got but not yet `task_done()`
comes back. The items are those of `weclaw.Queue("tasks.wq")`, so the command line and other
processes see them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from . import _dropin, _queries
from ._async import write_now
from ._async_queue import AsyncQueue
from ._delivery import Taken, Terms
from ._dropin import LIFO, PRIORITY, Core, StandIn
from ._handed_out import Item
from ._io import io_of
from ._io_calls import Call, Op, PutCall, TakeCall
from ._putting import NoBytes, NoRoom
from ._session import BATCH, OS, SYNC, Job, Session
from ._upkeep import MakingRoom
from ._wake import Waiter
from .errors import ClosedError, Empty, Full, ShutDown

__all__ = [
    "AsyncQueue",
    "LifoQueue",
    "PriorityQueue",
    "Queue",
    "QueueEmpty",
    "QueueFull",
    "QueueShutDown",
]

QueueEmpty = Empty
QueueFull = Full
QueueShutDown = ShutDown

T = TypeVar("T")


class Queue(StandIn[T]):
    """`asyncio.Queue`, kept in a file. Its methods mean what they mean there, in Python 3.13.

    `await put()` is durable on return. `put_nowait()` returns when the item is written, so that
    it survives kill -9, and it is synced right after. An item that was got is held until
    `task_done()` settles it or the process dies; then it is there again. `task_done()` settles the
    oldest item that the calling task got; else the one that its context inherited (child tasks,
    `asyncio.to_thread`); else it only counts, and when as many calls have come as items are out,
    all of them are settled: elsewhere, a program that always has something in hand settles nothing.
    What is found at opening counts as unfinished, as does what other
    processes put. After `shutdown(immediate=True)` the items stay on disk for the next open.

    Unlike `asyncio.Queue` it may be used from several loops and threads. Items are what `codec`
    takes (by default what MessagePack can give back equal). One that can't be decoded goes to the
    dead letters. `close()` is not needed, but gives the file back at once.

    An item is done with `task_done()`: what a program never says that of, it gets again at each
    start, and the file keeps it. What comes back is a copy, not the same object; and this is no
    subclass of `asyncio.Queue`. What was in hand when its process died comes back one at a time, so
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
        self._getters: set[Call] = set()
        self._putters: dict[Call, list[bool]] = {}
        self._joiners: set[Call] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {id(self):#x} {self._describe()}>"

    def __str__(self) -> str:
        return f"<{type(self).__name__} {self._describe()}>"

    def _describe(self) -> str:
        core = self._core
        told = f"maxsize={core.maxsize!r} path={core.store.path!r}"
        return f"{told} shutdown" if core.is_shutdown else told

    # -- put -------------------------------------------------------------------------------------

    async def put(self, item: T) -> None:
        """Put an item, waiting for room; it is durable on return. Cancelled, nothing was put,
        unless somebody has got it already.

        Raises `QueueShutDown`, `SerializationError` and the errors of `weclaw_embedded.Queue.put`.
        """
        core = self._core
        if core.is_shutdown:
            raise _dropin.shut_down()
        engine = core.writable
        message = core.encode(engine, item)
        io = io_of(engine)
        loop = io.loop()
        if core.limit == 0 and core.order is None:
            plain = PutCall(loop, core.queue, *message, None)
            plain.unwanted = self._take_back
            await io.wait(plain)
            return
        state: list[bool] = []
        call = Op(
            loop, self._put_in_turn, message, state, until_s=None, room=core, queue=core.queue
        )
        call.unwanted = self._take_back
        self._putters[call] = state
        try:
            await io.wait(call)
        finally:
            self._putters.pop(call, None)

    def _put_in_turn(
        self,
        session: Session,
        waiter: Waiter | None,
        message: tuple[bytes, Terms],
        state: list[bool],
    ) -> list[str]:
        core = self._core
        ids = core.put(session, (waiter, message, core.queue._policy, core.limit))
        state.append(True)
        return ids

    def _take_back(self, ids: list[str]) -> None:
        """The task was cancelled while its item was written: out with it, if nobody has it."""
        queue = self._core.queue

        def cancel(session: Session, waiter: Waiter | None) -> None:
            for id in ids:
                _queries.cancel(session, queue._address, id, OS, queue._remember_dead)

        with contextlib.suppress(ClosedError):
            io_of(self._core.engine).submit(Op(None, cancel))

    def put_nowait(self, item: T) -> None:
        """Put an item without waiting: it is written on return and synced right after.

        Raises `QueueFull`, `QueueShutDown`.
        """
        core = self._core
        if core.is_shutdown:
            raise _dropin.shut_down()
        engine = core.writable
        # Promised to be written, not synced: so whoever gets need not wait for the sync.
        policy = min(BATCH, core.queue._policy)
        job = Job(core.put, (None, core.encode(engine, item), policy, core.limit))
        tail = engine.run_job(job)
        making = None
        while isinstance(job.error, NoBytes):
            making = making or MakingRoom(engine)
            if not making.step():
                break
            tail = engine.run_job(job)
        if isinstance(job.error, NoRoom):
            raise Full(str(job.error))
        if job.error is not None:
            raise job.error
        if (
            core.queue._policy >= SYNC
            or job.must_sync
            or (core.queue._policy == BATCH and engine.flush_later(core.store._options, 1))
        ):
            io_of(engine).sync_soon(tail)

    # -- get -------------------------------------------------------------------------------------

    def get(self) -> Coroutine[Any, Any, T]:
        """Take the next item, waiting for one. Cancelled, nothing is lost.

        Raises `QueueShutDown` when the queue was shut down and is empty, or at once.
        """
        # Not a coroutine function: whoever calls is whose item it will be, also where something
        # like `wait_for` runs the coroutine in a task of its own.
        return self._take(self._core.hands.asked(), _calling_task())

    async def _take(self, item: Item, owner: asyncio.Task[Any] | None) -> T:
        core = self._core
        try:
            if core.immediate:
                raise _dropin.shut_down()
            io = io_of(core.writable)
            call = TakeCall(io.loop(), core, 1, None, None)
            self._getters.add(call)
            try:
                [(lease, body)] = await io.wait(call)
            finally:
                self._getters.discard(call)
        except BaseException:
            item.settled = True  # there is none
            raise
        core.hands.got(item, lease, owner or _calling_task())
        found: T = body
        return found

    def get_nowait(self) -> T:
        """Take the next item if there is one. Raises `QueueEmpty`, `QueueShutDown`."""
        core = self._core
        engine = core.writable
        while True:
            job = Job(self._look_now)
            try:
                engine.run_job(job)
                if job.error is not None:
                    raise job.error
                taken, waiting = job.result
                found: list[T] = core.hand_out(engine, taken, _calling_task())
            except BaseException:
                if job.result is not None:
                    core.give_back_unseen(engine, job.result[0])
                raise
            if found:
                return found[0]
            if taken.leases or taken.has_more:
                continue
            # A put that is not synced yet may be before what was put without waiting.
            if waiting and engine.settle_promises():
                continue
            core.tell_waiting()
            raise _dropin.shut_down() if core.is_shutdown else core.nothing()

    def _look_now(self, session: Session) -> tuple[Taken, int]:
        taken = self._core.look(session, 1, None, None)
        return taken, 0 if taken.leases or taken.has_more else self._core.waiting(session)

    # -- done ------------------------------------------------------------------------------------

    def task_done(self) -> None:
        """An item that was got is done with: it never comes back. See the class for which one.

        To be called by the task that got it, or by what inherits its context: tasks made after the
        `get`, `asyncio.to_thread`, callbacks of asyncio. Not so in `run_in_executor`, nor in tasks
        that were there before: let these get, work and call this themselves, or hand on a
        `contextvars.copy_context()` of who got it.

        Raises `ValueError` when called more often than there were items.
        """
        core = self._core

        def run(operation: Callable[..., int], *args: Any) -> int:
            return write_now(core.engine, core.queue, operation, *args)[0]

        if self._task_done(_calling_task(), run) == 0:
            self._finish_joins()

    async def join(self) -> None:
        """Wait until nothing is unfinished."""
        core = self._core
        if core.engine.run(core.unfinished) == 0:
            return
        if core.store.readonly:
            from ._readonly import LOOK_AGAIN_S

            while core.engine.run(core.unfinished):
                await asyncio.sleep(LOOK_AGAIN_S)  # who only looks is woken by nobody
            return
        call = Op(asyncio.get_running_loop(), core.all_done, until_s=None, queue=core.queue)
        self._joiners.add(call)
        try:
            await io_of(core.engine).wait(call)
        finally:
            self._joiners.discard(call)

    def _finish_joins(self) -> None:
        for call in list(self._joiners):
            _answer_now(call, None)

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self, immediate: bool = False) -> None:
        """No more puts; gets raise `QueueShutDown` once the queue is empty, or at once if
        `immediate`; then `join` waits only for what was got. Nothing is taken off the disk.
        """
        core = self._core
        waiting, left, late = core.engine.run(self._shut, immediate)
        for call in late:
            _answer_now(call, _dropin.shut_down())
        if core.immediate or waiting == 0:
            for call in list(self._getters):
                _answer_now(call, _dropin.shut_down())
        if left == 0:
            self._finish_joins()
        if core.engine.io is not None:  # else nobody waits
            core.engine.io.look_again()

    def _shut(self, session: Session, immediate: bool) -> tuple[int, int, list[Call]]:
        core = self._core
        core.shut(immediate)
        # Under the lock, so that none of these is put any more.
        late = [call for call, state in list(self._putters.items()) if not state]
        return core.waiting(session), core.unfinished(session), late


class PriorityQueue(Queue[T]):
    """`asyncio.PriorityQueue`, kept in a file: the lowest item first.

    The order is kept by this process, in memory, from what the file holds: at the first `get`
    all waiting items are read. Items that can't be compared are taken, too: those of one kind in
    the order they were put, and in which order kinds come is not defined. Other processes that
    take from the same file by `weclaw_embedded.Queue` get the oldest first.
    """

    _kind = PRIORITY


class LifoQueue(Queue[T]):
    """`asyncio.LifoQueue`, kept in a file: the newest item first. The order is kept by this
    process, as for `PriorityQueue`.
    """

    _kind = LIFO


def _calling_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def _answer_now(call: Call, answer: BaseException | None) -> None:
    """Answer a call that waits, if nobody has yet; at once where its loop is the running one."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    assert call._loop is not None
    if call._loop is running:
        _set(call, answer)
        return
    try:
        call._loop.call_soon_threadsafe(_set, call, answer)
    except RuntimeError:
        pass  # its loop is closed: nobody waits


def _set(call: Call, answer: BaseException | None) -> None:
    if call.end(answer):
        call.cancelled = True  # the I/O thread need not go on with it
