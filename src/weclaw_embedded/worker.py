"""`Worker`: runs a handler over a queue until told to stop.

Role: takes as many messages as it may work on and no more, keeps their leases alive off the loop,
settles each by what became of its handler, and stops in an orderly way. Several workers, in one
process or many, share a queue; none knows of the others.

Invariants:

* A message is settled once: by its handler, or by what the handler returned or raised, or when
  its time is over.
* A lease is renewed from a thread that does nothing else, so that neither a handler that blocks
  the loop nor an `on_dead` that takes its time lets it run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import queue as stdlib_queue
import signal
import threading
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from ._async import AsyncMessage
from ._async_queue import AsyncQueue
from ._io import Written, io_of
from ._message import Message, Renewal, clip, describe, messages_of
from ._options import check_count, check_seconds
from .errors import ClosedError, DiskFullError, LeaseLostError, StorageError
from .queue import Queue

logger = logging.getLogger("weclaw_embedded")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# After an error of the queue itself, such as a full disk.
_PATIENCE_S: Final = 1.0


class RetryLater(Exception):
    """Raised by a handler: not now, again in `seconds`. No failure, no retry burnt."""

    def __init__(self, seconds: float = 5.0, reason: str | None = None) -> None:
        self.seconds = check_seconds("seconds", seconds)
        self.reason = clip(reason, f"again in {self.seconds:g} s")
        super().__init__(seconds, reason)

    def __str__(self) -> str:
        return self.reason


class Discard(Exception):
    """Raised by a handler: no retry would help; straight to the dead letters with `reason`."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = clip(reason, "discarded")
        super().__init__(reason)

    def __str__(self) -> str:
        return self.reason


class Worker:
    """Runs `handler(msg)` for each message of a queue.

    A handler may be a function, which runs in a thread of its own, or a coroutine function. What
    it returns becomes the result of the message; an exception is a failed delivery, retried as the
    queue's `retry` says; `RetryLater(seconds)` defers without burning a retry; `Discard(reason)`
    sends the message to the dead letters. One that settles its message itself has done so. On a
    full disk what came of a handler waits for room, and its message is leased meanwhile.

    Args:
        q: A `Queue` or an `AsyncQueue`. It is not closed by the worker.
        handler: Called with the message: a `Message`; for a coroutine function an `AsyncMessage`.
        concurrency: How many messages are worked on at once. No more than these are taken.
        max_run_time: Seconds a handler may take (None: any). When they are over the delivery has
            failed: a coroutine is cancelled, and what a function does from then on has no effect
            on the message.
        grace: Seconds that running handlers get after SIGTERM, SIGINT or `stop()`. What is not
            done by then is handed back uncounted; coroutines are cancelled, functions can't be.
        pause_after: After so many failures in a row the queue is paused for all its consumers
            (0: never) …
        pause_for: … for so many seconds.

    Pauses are for a provider that is down. Where the retries of many messages that always fail come
    together they are most of the time; `pause_after=0` leaves them out.

    A worker runs once; `done`, `failed` and `pauses` count what it did.
    """

    def __init__(
        self,
        q: Queue | AsyncQueue,
        handler: Callable[[Any], Any],
        *,
        concurrency: int = 1,
        max_run_time: float | None = None,
        grace: float = 30.0,
        pause_after: int = 5,
        pause_for: float = 15.0,
    ) -> None:
        if not isinstance(q, (Queue, AsyncQueue)):
            raise TypeError(f"a worker takes a Queue or an AsyncQueue, not {q!r}")
        if not callable(handler):
            raise TypeError(f"handler must be callable, not {handler!r}")
        self._queue = q if isinstance(q, AsyncQueue) else AsyncQueue._over(q)
        self._handler = handler
        self._awaits = _is_coroutine_function(handler)
        self._concurrency = check_count("concurrency", concurrency, 1)
        self._max_run_s = (
            None
            if max_run_time is None
            else check_seconds("max_run_time", max_run_time, positive=True)
        )
        self._grace_s = check_seconds("grace", grace)
        self._pause_after = check_count("pause_after", pause_after, 0)
        self._pause_for_s = check_seconds("pause_for", pause_for)
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: asyncio.Future[None] | None = None
        self._hurried: asyncio.Future[None] | None = None
        self._running: dict[AsyncMessage, _Run] = {}
        self._threads = _Threads()
        self._in_a_row = 0
        self.done = 0
        """Deliveries whose handler returned, however it had settled them."""
        self.failed = 0
        """Deliveries whose handler raised, or took too long."""
        self.pauses = 0
        """How often it paused the queue."""

    def __repr__(self) -> str:
        return f"<Worker of {self._queue!r}>"

    # -- running -------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or `stop()`; returns normally when all is handed back.

        Signals are taken in the main thread only. A second one cuts `grace` short.

        Raises what made working impossible, such as `StoreFailedError`.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not None:
            raise RuntimeError("run() blocks, and a loop is running here; use `await run_async()`")
        asyncio.run(self.run_async())

    async def run_async(self) -> None:
        """`run` inside a loop. Cancelled, it hands back at once and is cancelled."""
        if self._loop is not None:
            raise RuntimeError("a worker runs once; make another")
        self._loop = asyncio.get_running_loop()
        self._told = told = self._loop.create_future()
        self._hurried = hurried = self._loop.create_future()
        if self._stopping:
            self._tell()
        else:
            self._queue._queue._engine  # noqa: B018  a closed queue says so
        with self._signals(self._loop):
            slots = {asyncio.create_task(self._slot(told)) for _ in range(self._concurrency)}
            try:
                await self._supervise(slots, told, hurried)
            finally:
                await self._end(slots)
                self._threads.close()

    async def _supervise(
        self,
        slots: set[asyncio.Task[None]],
        told: asyncio.Future[None],
        hurried: asyncio.Future[None],
    ) -> None:
        """Wait until told to stop or one of them is broken, then for those who run."""
        await asyncio.wait({*slots, told}, return_when=asyncio.FIRST_COMPLETED)
        self._tell()
        until_s = time.monotonic() + self._grace_s
        while not hurried.done():
            working = {slot for slot in slots if not slot.done()}
            left_s = until_s - time.monotonic()
            if not working or left_s <= 0:
                return
            await asyncio.wait(
                {*working, hurried}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )

    async def _end(self, slots: set[asyncio.Task[None]]) -> None:
        """Hand back what still runs, and raise what broke a slot."""
        for msg, run in list(self._running.items()):
            run.over = True
            with contextlib.suppress(LeaseLostError, ClosedError, StorageError):
                msg.release()
        for slot in slots:
            slot.cancel()
        ended = await asyncio.gather(*slots, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    def stop(self) -> None:
        """Stop taking, as SIGTERM does. May be called from any thread, and before `run`."""
        self._stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self._told is not None and not self._told.done():
            self._told.set_result(None)

    def _signalled(self) -> None:
        told_before = self._told is not None and self._told.done()
        if told_before and self._hurried is not None and not self._hurried.done():
            self._hurried.set_result(None)
        self._tell()

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                if handler is not None:
                    signal.signal(number, handler)

    # -- one of `concurrency` ----------------------------------------------------------------------

    async def _slot(self, told: asyncio.Future[None]) -> None:
        while not told.done():
            try:
                msg = await self._next(told)
                if msg is None:
                    return
                await self._work(msg)
            except ClosedError:
                return  # whoever closed the queue wants no more of it
            except DiskFullError as error:  # from taking: what was taken is settled by now
                logger.warning("%s: %s", self._name(), error)
                await asyncio.sleep(_PATIENCE_S)

    async def _next(self, told: asyncio.Future[None]) -> AsyncMessage | None:
        """The next message; None when told to stop. One that nobody works on was not delivered."""
        getting = asyncio.ensure_future(self._queue.get())
        either: set[asyncio.Future[Any]] = {getting, told}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                return getting.result()
        except asyncio.CancelledError:
            self._leave(getting)
            raise
        self._leave(getting)
        return None

    @staticmethod
    def _leave(getting: asyncio.Future[AsyncMessage]) -> None:
        if not getting.done():
            getting.cancel()
        elif not getting.cancelled() and getting.exception() is None:
            lease = getting.result()._held()
            with contextlib.suppress(ClosedError):
                io_of(lease.engine).undo([lease])

    async def _work(self, msg: AsyncMessage) -> None:
        run = _Run(self, msg)
        self._running[msg] = run
        try:
            result = await run.result()
        except RetryLater as later:
            if run.settles():
                await self._settle(msg, msg.nack, later.seconds, later.reason, count=False)
        except Discard as reason:
            if run.settles():
                await self._settle(msg, msg.fail, reason.reason)
        except asyncio.CancelledError:
            if run.settles():
                with contextlib.suppress(LeaseLostError):
                    msg.release()
            raise
        except Exception as failed:  # noqa: BLE001  the handler is the user's code
            error = _cause_of(failed)
            if run.settles():
                await self._settle(msg, msg.nack, reason=describe(error))
            await self._failure(msg, error)
        else:
            await self._success(msg, run, result)
        finally:
            run.end()
            del self._running[msg]

    async def _success(self, msg: AsyncMessage, run: _Run, result: Any) -> None:
        if run.settles():
            try:
                if not await self._settle(msg, msg.ack, result):
                    return
            except ValueError as error:  # a result that can't be kept
                await self._settle(msg, msg.nack, reason=describe(error))
                await self._failure(msg, error)
                return
        self._in_a_row = 0
        self.done += 1

    async def _settle(
        self, msg: AsyncMessage, settle: Callable[..., Written], *args: Any, **options: Any
    ) -> bool:
        """False when the message was no longer held: its lease was over (this process was stopped
        for longer, say), or its group dropped. That is no reason to take no more.

        On a full disk it is tried until there is room, with the lease kept: what the handler made
        may have taken a minute and cost money.
        """
        is_told = False
        while True:
            try:
                await settle(*args, **options)
            except LeaseLostError as error:
                logger.warning("message %s was lost while its handler ran: %s", msg.id, error)
                return False
            except DiskFullError as error:
                if not is_told:
                    logger.warning(
                        "message %s can't be settled yet, and is kept until it can: %s",
                        msg.id,
                        error,
                    )
                    is_told = True
                    lease = msg._held()
                    lease.renewal = lease.renewal.without_end()
                await asyncio.sleep(_PATIENCE_S)
            else:
                return True

    async def _failure(self, msg: Message, error: BaseException) -> None:
        self.failed += 1
        self._in_a_row += 1
        logger.warning(
            "message %s of %s failed: %s",
            msg.id,
            self._name(),
            describe(error),
            exc_info=error,
        )
        if self._pause_after and self._in_a_row >= self._pause_after and self._pause_for_s:
            n, self._in_a_row = self._in_a_row, 0
            reason = f"{n} failures in a row, the last: {describe(error)}"
            logger.error(
                "%s is paused for %g s: %s; pause_after=0 (of `weclawctl work`: --pause-after 0) "
                "leaves such pauses out",
                self._name(),
                self._pause_for_s,
                reason,
            )
            self.pauses += 1
            await self._queue.pause(self._pause_for_s, reason)

    def _name(self) -> str:
        """The queue as a person knows it who reads the log."""
        queue = self._queue
        return f"topic {queue.topic!r}, group {queue.group!r}, of {queue._queue._store.path}"


class _Run:
    """One handler at work on one message: its lease kept alive, its time kept."""

    def __init__(self, worker: Worker, msg: AsyncMessage) -> None:
        self._worker = worker
        self._msg = msg
        self.over = False  # settled by the worker before the handler came to its end
        limit_s = worker._max_run_s
        self._until_s = math.inf if limit_s is None else time.monotonic() + limit_s
        lease = msg._held()
        lease.renewal = Renewal(lease, self._until_s)

    def settles(self) -> bool:
        """Whether the worker is to settle the message: nobody has yet."""
        return not self.over and not self._msg._held().over

    async def result(self) -> Any:
        """What the handler returns. Raises what it raises, and TimeoutError after its time."""
        worker = self._worker
        if worker._awaits:
            working: asyncio.Future[Any] = asyncio.ensure_future(
                _outcome(worker._handler(self._msg))
            )
        else:
            msg = self._msg
            read = [(msg._record, msg._time_us)]
            plain = messages_of(Message, msg._queue, [msg._held()], read)[0]
            working = worker._threads.start(worker._handler, plain)
        result = await self._in_time(working)
        if inspect.isawaitable(result):
            result = await self._in_time(asyncio.ensure_future(_outcome(result)))
        return result

    async def _in_time(self, working: asyncio.Future[Any]) -> Any:
        left_s = None
        if self._until_s < math.inf:
            left_s = max(0.0, self._until_s - time.monotonic())
        try:
            await asyncio.wait({working}, timeout=left_s)
        except asyncio.CancelledError:
            working.cancel()
            if self._worker._awaits:
                await asyncio.wait({working})
            raise
        if working.done():
            try:
                return working.result()
            except BaseException as failed:
                if isinstance(failed, Exception):
                    raise
                raise _EndedError(failed) from failed  # it ends a delivery, not us
        error = TimeoutError(f"the handler ran longer than {self._worker._max_run_s:g} s")
        if self.settles():
            # On a full disk: once it has ended, and as often as it takes.
            with contextlib.suppress(DiskFullError):
                with contextlib.suppress(LeaseLostError):
                    self._msg.nack(reason=describe(error))
                self.over = True
        # A coroutine is waited for. A function can't be stopped; its place is free all the same.
        working.cancel()
        await asyncio.wait({working})
        raise error

    def end(self) -> None:
        self._msg._stop_renewal()


class _Threads:
    """Threads for handlers that are plain functions. Daemons: one that hangs holds up no exit."""

    def __init__(self) -> None:
        self._jobs: stdlib_queue.SimpleQueue[Any] = stdlib_queue.SimpleQueue()
        self._idle = 0
        self._n = 0
        self._lock = threading.Lock()

    def start(self, function: Callable[[Any], Any], argument: Any) -> asyncio.Future[Any]:
        """Run it in a thread. Cancelling the future leaves the thread to itself."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._n += 1
                name = f"weclaw-worker-{self._n}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._jobs.put((loop, future, function, argument))
        return future

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            loop, future, function, argument = job
            result, error = None, None
            try:
                result = function(argument)
            except BaseException as failed:  # noqa: BLE001  goes to whoever waits
                error = failed
            if isinstance(error, (StopIteration, KeyboardInterrupt, SystemExit, CancelledError)):
                # A future can't carry the first; the others would end the loop or its task, not
                # the handler.
                error = _EndedError(error)
            with self._lock:
                self._idle += 1
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_finish, future, result, error)
            del job, future, function, argument, result, error

    def close(self) -> None:
        """Threads end when they have nothing to do."""
        for _ in range(self._n):
            self._jobs.put(None)


async def _outcome(working: Awaitable[Any]) -> Any:
    """What a handler's coroutine comes to. `sys.exit()` in one ends a delivery: it would end the
    loop, and the message would be handed back uncounted, to end the next worker.
    """
    try:
        return await working
    except SystemExit as error:
        raise _EndedError(error) from error


class _EndedError(Exception):
    """Stands for what has ended a handler where that itself would end more than the delivery."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(describe(cause))
        self.cause = cause


def _cause_of(error: Exception) -> BaseException:
    """What the handler raised."""
    if isinstance(error, _EndedError):
        return error.cause
    cause = error.__cause__
    if isinstance(cause, StopIteration) and str(error) == "coroutine raised StopIteration":
        return cause  # so Python says it
    return error


def _finish(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _is_coroutine_function(handler: Any) -> bool:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004  an object whose call is a coroutine
    )
