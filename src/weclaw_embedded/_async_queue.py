"""`AsyncQueue`: a queue for asyncio. Everything `Queue` has, with `await`.

Role: arguments are checked and bodies encoded here, on the loop; puts, gets and all that waits go
to the engine's I/O threads (`_io`), questions to a small pool. It never waits for a disk on a loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import datetime
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from . import _putting, _taking
from ._async import AsyncDeadLetterQueue, AsyncMessage, AsyncTransaction
from ._delivery import Lease, Taken
from ._encoding import check_many
from ._engine import Engine
from ._handle import check_text
from ._io import Io, io_of
from ._io_calls import Op, PutCall, PutManyCall, TakeCall, closed_error
from ._options import UNSET, Unset, check_count, check_names
from ._pending import deadline_of
from ._pool import in_pool
from ._queries import Outcome, Stats
from ._session import Session
from ._wake import Waiter
from .errors import ClosedError, CorruptError, DeadLetterError, Empty, StoreFailedError
from .queue import Queue

if TYPE_CHECKING:
    from ._message import Message
    from ._options import RetryPolicy
    from ._store import Store

T = TypeVar("T")
# From here on bodies are encoded off the loop.
_MANY: Final = 200


class _Source:
    """A queue as the I/O threads take from it: see `_io_calls.Source`."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._paused = ""  # at the last look

    def ended(self) -> BaseException | None:
        return closed_error(self._queue._store.path) if self._queue._closed else None

    def look(self, session: Session, n: int, visibility_s: float | None, waiter: Waiter) -> Taken:
        taken = _taking.take(session, (self._queue._address, n, visibility_s, waiter))
        self._paused = taken.paused
        return taken

    def made(self, engine: Engine, leases: list[Lease]) -> list[tuple[Lease, Any]]:
        messages = self._queue._messages_of(engine, leases, AsyncMessage)
        return [(message._held(), message) for message in messages]

    def tell_dead(self, offsets: list[int]) -> None:
        self._queue._remember_dead(offsets)

    def tell_waiting(self) -> None:
        pass  # it goes on by itself

    def nothing(self) -> Empty:
        return _taking.nothing_ready(self._queue._address, self._paused)


class _GoneSinceError(Exception):
    """What `result` has found was carried up, redriven or purged before it was read."""

    def __init__(self, ack_at: int | None) -> None:
        super().__init__()
        self.ack_at = ack_at


class _TimeIsOver(Exception):
    """A join that waited long enough."""


class AsyncQueue:
    """One topic of a file as one consumer group sees it, for asyncio.

    Takes what `Queue` takes and has what it has, awaited. It may be made before any loop runs and
    used in several loops and threads; opening the file is done when it is made, so on a running
    loop with a slow disk use `await asyncio.to_thread(weclaw.AsyncQueue, path)`. No other call
    waits for a disk on the loop: all that waits at the same time shares one write and one sync.
    (But for settling on a disk so full that it would be refused: room is made first, on the loop.)

    A cancelled `get` loses nothing and is no delivery. A cancelled `put` may have happened, and
    never half; one that still waited for room has not. What else is cancelled may have happened.
    Settling a message is in effect when the call returns and may be awaited; see `AsyncMessage`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        topic: str = "default",
        *,
        group: str | Unset = UNSET,
        maxsize: int | Unset = UNSET,
        visibility_timeout: float | Unset | None = UNSET,
        retry: RetryPolicy | Unset = UNSET,
        on_dead: Callable[..., Any] | Unset | None = UNSET,
        start: str | int | Unset = UNSET,
        **options: Any,
    ) -> None:
        check_names(type(self).__name__, options)
        self._bind(
            Queue(
                path,
                topic,
                group=group,
                maxsize=maxsize,
                visibility_timeout=visibility_timeout,
                retry=retry,
                on_dead=on_dead,
                start=start,
                **options,
            )
        )

    @classmethod
    def _over(cls, queue: Queue) -> AsyncQueue:
        """The same queue, seen from a loop. Closing either closes both."""
        made = cls.__new__(cls)
        made._bind(queue)
        return made

    def _bind(self, queue: Queue) -> None:
        self._queue = queue
        self._source = _Source(queue)
        self.topic = queue.topic
        self.group = queue.group
        self.dlq = AsyncDeadLetterQueue(queue.dlq)

    def __repr__(self) -> str:
        return f"<AsyncQueue {self.topic!r}, group {self.group!r}, of {self._queue._store.path}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return AsyncQueue._over, (self._queue,)

    @property
    def maxsize(self) -> int:
        """`put` waits while so many messages are ready or delayed; 0: no limit."""
        return self._queue.maxsize

    @property
    def store(self) -> Store:
        """As `Queue.store`. Its methods block: call them in a thread."""
        return self._queue.store

    # -- put -----------------------------------------------------------------------------------

    async def put(
        self,
        body: Any,
        *,
        id: str | None = None,
        key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        eta: datetime | None = None,
        ttl: float | None = None,
        headers: Mapping[str, Any] | None = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> str:
        """Put a message; returns its id when it is as durable as `flush` promises. See
        `Queue.put` for the arguments and what is raised.
        """
        queue = self._queue
        data, terms = queue._encoder.one(body, id, key, priority, delay, eta, ttl, headers)
        until_s = None if block is True and timeout is None else deadline_of(block, timeout)
        engine = queue._writable()
        limit = engine.option("max_message_bytes")
        if len(data) > limit:
            _putting.check_size([([data], terms)], limit)
        # The same as `Io.loop` and `Io.wait`, written out: the way of most puts.
        io: Io = engine.io or io_of(engine)
        thread, loop = io.woken
        if thread != get_ident():
            loop = asyncio.get_running_loop()
        call = PutCall(loop, queue, data, terms, until_s)
        io.submit(call)
        try:
            ids: Sequence[str] = await call
        except BaseException:
            io.abandon(call)
            raise
        return ids[0]

    async def put_nowait(self, body: Any, **options: Any) -> str:
        """`put` that raises `Full` instead of waiting for room."""
        return await self.put(body, block=False, **options)

    async def put_many(
        self, bodies: Iterable[Any], *, block: bool = True, timeout: float | None = None
    ) -> list[str]:
        """Put bodies or `Put` objects, all or nothing; their ids in order. See `Queue.put_many`."""
        queue = self._queue
        check_many(bodies)
        many = list(bodies)
        if not many:
            deadline_of(block, timeout)  # refuses what makes no sense
            queue._engine  # noqa: B018  a closed queue says so
            return []
        messages = (
            queue._encoder.many(many)
            if len(many) < _MANY
            else await in_pool(queue._encoder.many, many)
        )
        engine = queue._writable()
        n_bytes = _putting.check_size(messages, engine.option("max_message_bytes"))
        io = io_of(engine)
        call = PutManyCall(io.loop(), queue, messages, n_bytes, deadline_of(block, timeout))
        return [*await io.wait(call)]

    async def cancel(self, id: str) -> bool:
        """Take a message out of every group. See `Queue.cancel`."""
        return await in_pool(self._queue.cancel, id)

    # -- get -------------------------------------------------------------------------------------

    async def get(
        self,
        *,
        block: bool = True,
        timeout: float | None = None,
        visibility_timeout: float | Unset | None = UNSET,
    ) -> AsyncMessage:
        """Lease the next message; waits for it. See `Queue.get`."""
        return (await self._take(1, block, timeout, visibility_timeout))[0]

    async def get_nowait(self) -> AsyncMessage:
        """`get` that raises `Empty` instead of waiting for a message."""
        return (await self._take(1, False, None, UNSET))[0]

    async def get_many(
        self,
        n: int,
        *,
        block: bool = True,
        timeout: float | None = None,
        visibility_timeout: float | Unset | None = UNSET,
    ) -> list[AsyncMessage]:
        """Lease up to `n` messages, at least one. See `Queue.get_many`."""
        return await self._take(check_count("n", n, 1), block, timeout, visibility_timeout)

    async def _take(
        self, n: int, block: bool, timeout: float | None, visibility_timeout: float | Unset | None
    ) -> list[AsyncMessage]:
        queue = self._queue
        engine = queue._engine
        visibility_s = queue._visibility(visibility_timeout)
        until_s = None if block is True and timeout is None else deadline_of(block, timeout)
        if queue._store.readonly:
            await in_pool(queue._take, n, block, timeout, visibility_timeout)
        io = io_of(engine)
        call = TakeCall(io.loop(), self._source, min(n, 0xFFFF), visibility_s, until_s)
        io.submit(call)  # from here on `Io.wait`, written out
        try:
            taken: list[AsyncMessage] = await call
        except BaseException:
            io.abandon(call)
            raise
        return taken

    def __aiter__(self) -> AsyncIterator[AsyncMessage]:
        """The next message, and the next, waiting for each, until the queue is closed."""
        return self

    async def __anext__(self) -> AsyncMessage:
        try:
            return await self.get()
        except ClosedError:
            raise StopAsyncIteration from None

    # -- transaction -------------------------------------------------------------------------------

    def transaction(self, *, block: bool = True, timeout: float | None = None) -> AsyncTransaction:
        """`async with q.transaction() as tx: tx.ack(msg, result=…); tx.put(body, topic="next")`.
        See `Queue.transaction`.
        """
        deadline_of(block, timeout)  # refuses what makes no sense
        return AsyncTransaction(self._queue, block, timeout)

    # -- results -----------------------------------------------------------------------------------

    async def result(self, id: str, timeout: float | None = 0.0) -> Any:
        """The result given at ack; waits up to `timeout` seconds. See `Queue.result`."""
        id = check_text("id", id)
        until_s = deadline_of(True, timeout)
        queue = self._queue
        if queue._store.readonly:
            return await in_pool(queue.result, id, timeout)
        engine = queue._engine
        before: int | None = None
        while True:
            call = Op(
                asyncio.get_running_loop(),
                queue._outcome,
                id,
                until_s=until_s,
                late=lambda: Empty(f"message {id} was not settled in time"),
                finish=lambda found: self._result_of(id, found),
                queue=queue,
            )
            try:
                return await io_of(engine).wait(call)
            except _GoneSinceError as gone:
                if gone.ack_at is not None and gone.ack_at == before:
                    raise queue._unknown(id) from None
                before = gone.ack_at
            except (CorruptError, StoreFailedError) as error:
                if isinstance(error, StoreFailedError) and not engine.is_lost():
                    raise
                # Which heals or notes what is damaged, and looks at what is open.
                return await in_pool(queue.result, id, timeout)

    def _result_of(self, id: str, found: Outcome) -> Any:
        queue = self._queue
        letter = None
        try:
            if found.state == "done":
                return queue._result_at(queue._engine, found.ack_at)
            if found.state == "dead":
                letter = queue.dlq._at(found.offset)
        except LookupError:
            raise _GoneSinceError(found.ack_at) from None
        raise queue._unknown(id) if letter is None else DeadLetterError(letter)

    async def status(self, id: str) -> str:
        """One of "ready" "delayed" "leased" "done" "dead" "unknown"."""
        return await in_pool(self._queue.status, id)

    # -- looking -----------------------------------------------------------------------------------

    async def qsize(self) -> int:
        """Messages ready or delayed in this group."""
        return await in_pool(self._queue.qsize)

    async def empty(self) -> bool:
        """True when nothing is ready or delayed."""
        return await in_pool(self._queue.empty)

    async def full(self) -> bool:
        """True when `maxsize` is reached; never without one."""
        return await in_pool(self._queue.full)

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing is ready, delayed or leased; False when the time is over first."""
        until_s = deadline_of(True, timeout)
        queue = self._queue
        if until_s == 0.0 or queue._store.readonly:
            return await in_pool(queue.join, timeout)
        call = Op(
            asyncio.get_running_loop(),
            queue._all_done,
            until_s=until_s,
            late=_TimeIsOver,
            queue=queue,
        )
        try:
            await io_of(queue._engine).wait(call)
        except _TimeIsOver:
            return False
        return True

    async def peek(self, n: int = 1) -> list[Message]:
        """The next `n` messages; takes nothing. See `Queue.peek`."""
        return await in_pool(self._queue.peek, n)

    async def stats(self) -> Stats:
        """Counts and sizes, all of one moment."""
        return await in_pool(self._queue.stats)

    @property
    def offset(self) -> Asked[int]:
        """To be awaited: everything before this offset is settled in this group."""
        return Asked(lambda: in_pool(lambda: self._queue.offset))

    # -- steering ----------------------------------------------------------------------------------

    async def purge(self) -> int:
        """Throw away all that is ready or delayed in this group; returns how many."""
        return await in_pool(self._queue.purge)

    async def pause(self, seconds: float, reason: str | None = None) -> None:
        """No deliveries from this topic and group for so long, in any process, over restarts."""
        await in_pool(self._queue.pause, seconds, reason)

    async def resume(self) -> None:
        """End a pause."""
        await in_pool(self._queue.resume)

    async def replay(
        self,
        *,
        offset: int | str | None = None,
        since: datetime | None = None,
        ids: Iterable[str] | None = None,
    ) -> int:
        """Let settled messages flow again through this group. See `Queue.replay`."""
        return await in_pool(lambda: self._queue.replay(offset=offset, since=since, ids=ids))

    # -- the end -----------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Everything written so far is on stable storage when this returns."""
        await in_pool(self._queue.flush)

    async def close(self) -> None:
        """Close this queue, and with it the file if the queue opened it. Whoever waits gets
        `ClosedError`. Closing twice does nothing.
        """
        await asyncio.shield(in_pool(self._close))

    def _close(self) -> None:
        queue = self._queue
        if queue._closed:
            return
        engine = queue._store._shared
        queue.close()
        io = getattr(engine, "io", None)
        if io is not None and not engine.closed:
            io.look_again()

    async def __aenter__(self) -> AsyncQueue:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class Asked(Awaitable[T]):
    """A question that is asked when it is awaited."""

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask

    def __await__(self) -> Generator[Any, None, T]:
        return self._ask().__await__()
