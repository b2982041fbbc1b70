"""Messages, transactions and dead letters as a task of an event loop sees them.

Role: what settles is written at once, on the loop, and never synced there; what comes back may be
awaited, which waits for the disk. What only looks goes to a small pool of threads. Only where a
full disk would have it refused is room made there and then, with the syncs that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from . import _putting, _records, _settling
from ._engine import Engine
from ._io import Written, io_of
from ._io_calls import Op
from ._message import Message
from ._pending import deadline_of
from ._pool import in_pool
from ._session import BATCH, SYNC, Job
from ._transaction import Transaction
from .dlq import DeadLetter, DeadLetterQueue
from .errors import ClosedError

if TYPE_CHECKING:
    import os

    from ._session import Session
    from .queue import Queue

T = TypeVar("T")
What = TypeVar("What")


class AsyncMessage(Message):
    """One delivery of one message, leased to this process, for asyncio.

    `ack`, `nack`, `fail`, `release` and `extend` are in effect when they return: written, so that
    they survive kill -9, and `LeaseLostError` is raised there. Awaiting what they return waits
    until it is as durable as `flush` promises; without that it is made so right after. `async with
    msg` acks on a clean exit, nacks with the exception on an `Exception`, releases on cancellation;
    it renews the lease meanwhile, off the loop.
    """

    __slots__ = ("_until",)

    # The results may be awaited; to whoever does not, they are the None of the base class.

    def ack(self, result: Any = None) -> Written:  # type: ignore[override]  # see above
        """Done: never delivered again in this group. See `Message.ack`."""
        lease = self._held()
        if result is not None:
            super().ack(result)
            return self._written()
        engine = lease.engine
        policy = self._queue._policy
        record = _records.ack_of(lease.tid, lease.gid, lease.offset)
        tail = engine.end(lease, record, policy, waits=False)
        if tail < 0:
            self._run(_settling.end, (lease, record, policy))
        else:
            self._until = _begin_sync(engine, self._queue, tail, policy >= SYNC)
        return self._written()

    def nack(  # type: ignore[override]  # see above
        self, backoff: float | None = None, reason: str | None = None, *, count: bool = True
    ) -> Written:
        """Failed: again later, or to the dead letters. See `Message.nack`."""
        super().nack(backoff, reason, count=count)
        return self._written()

    def fail(self, reason: str | None = None) -> Written:  # type: ignore[override]  # see above
        """Straight to the dead letters. See `Message.fail`."""
        super().fail(reason)
        return self._written()

    def release(self) -> Written:  # type: ignore[override]  # see above
        """Ready for the next consumer at once, uncounted. See `Message.release`."""
        super().release()
        return self._written()

    def extend(self, seconds: float | None = None) -> Written:  # type: ignore[override]
        """Count the lease anew from now. See `Message.extend`."""
        super().extend(seconds)
        return self._written()

    def _written(self) -> Written:
        lease = self._lease
        assert lease is not None, "it was settled"
        return Written(lease.engine, self._until)

    def _run(self, operation: Callable[[Session, What], T], what: What) -> T:
        done: T
        lease = self._held()
        if lease.engine.forked:
            raise _settling.lost(lease)
        try:
            done, self._until = write_now(lease.engine, self._queue, operation, what)
        except ClosedError:
            if lease.over:
                raise _settling.lost(lease) from None
            raise
        return done

    def _died(self) -> None:
        self._queue._remember_dead([self.offset])  # `on_dead` is nothing for a loop

    async def __aenter__(self) -> AsyncMessage:
        super().__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_settled():
            return
        if error is None:
            await self.ack()
        else:
            self._ended_by(error)


def write_now(
    engine: Engine, queue: Queue, operation: Callable[..., T], *args: Any
) -> tuple[T, int]:
    """Run an operation at once, without waiting for the disk: its result, and the offset below
    which all must be synced for it to be durable (0: it need not be). The sync is begun.
    """
    job = Job(operation, *args)
    tail = engine.run_job(job)
    if job.error is not None:
        raise job.error
    return job.result, _begin_sync(engine, queue, tail, job.must_sync)


def _begin_sync(engine: Engine, queue: Queue, tail: int, must_sync: bool) -> int:
    """Begin the sync that a write which ends at `tail` wants: the offset `write_now` returns."""
    if must_sync:
        io_of(engine).sync_soon(tail)
        return tail
    if queue._policy == BATCH and engine.flush_later(queue._store._options, 1):
        io_of(engine).sync_soon(tail)
    return 0


class AsyncTransaction(Transaction):
    """`async with q.transaction() as tx`: acks, results and puts as one step, durable at its end.

    Cancelled while it ends, it is done whole or not at all.
    """

    _enter = "async with"

    async def __aenter__(self) -> AsyncTransaction:
        self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        if error is None:
            self.ids = await self._commit_by_io()

    async def _commit_by_io(self) -> list[str]:
        """`_commit`, by the I/O thread."""
        queue, puts = self._queue, self._puts
        engine = queue._writable()
        what = self._what(engine)
        maxsizes = what[3]
        call = Op(
            asyncio.get_running_loop(),
            _putting.transact,
            *what,
            until_s=deadline_of(self._block, self._timeout) if puts else 0.0,
            # What waits for room in another topic does not hold up those who put into this one.
            room=queue if {queue.topic} >= {*maxsizes} else object(),
            queue=queue,
        )
        ids: list[str] = await io_of(engine).wait(call)
        if queue._policy == BATCH and engine.flush_later(queue._store._options, len(puts)):
            await in_pool(queue.flush)
        return ids

    def __enter__(self) -> Transaction:
        raise TypeError("a transaction of an AsyncQueue is entered with `async with`")


class AsyncDeadLetterQueue:
    """The dead letters of one topic and group: `AsyncQueue.dlq`; see `DeadLetterQueue`.

    `len()` looks at once; all else is awaited.
    """

    def __init__(self, letters: DeadLetterQueue) -> None:
        self._letters = letters

    def __len__(self) -> int:
        return len(self._letters)

    def __bool__(self) -> bool:
        return True

    async def count(self) -> int:
        """How many letters there are."""
        return await in_pool(len, self._letters)

    async def __aiter__(self) -> AsyncIterator[DeadLetter]:
        after: int | None = None
        while True:
            found, after = await in_pool(self._letters._load, after, 100)
            for letter in found:
                yield letter
            if after is None:
                return

    async def peek(self, n: int = 1) -> list[DeadLetter]:
        """The first `n` letters; nothing is changed."""
        return await in_pool(self._letters.peek, n)

    async def get(self, id: str) -> DeadLetter:
        """The letter with this id. Raises `KeyError` if there is none."""
        return await in_pool(self._letters.get, id)

    async def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """Make letters ready again. See `DeadLetterQueue.redrive`."""
        return await in_pool(lambda: self._letters.redrive(ids, limit=limit))

    async def purge(self, ids: Iterable[str] | None = None) -> int:
        """Throw letters away for good. See `DeadLetterQueue.purge`."""
        return await in_pool(self._letters.purge, ids)

    async def export(self, path: str | os.PathLike[str], format: str = "jsonl") -> int:
        """Write every letter to `path`. See `DeadLetterQueue.export`."""
        return await in_pool(self._letters.export, path, format)
