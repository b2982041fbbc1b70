"""The I/O threads of one engine: all that tasks of event loops wait for is done here, in groups.

Role: calls come in from any loop and thread, are run in turns (one write, one index transaction
a turn; see `_io_turns`), synced together, and answered with one `call_soon_threadsafe` a loop and
group.

Two threads, two roles: one *serves* (takes what has come in and runs it), the other sleeps.
Whoever has served what must be synced *syncs* it himself: no hand-over lies between a write and its
sync. Meanwhile he keeps the serving as long as all that comes in waits for the next sync anyway;
else the other is woken and serves, so that a sync holds up only those who wait for it. Tasks that
only put keep one thread busy, which is woken once a group.

Invariants:

* One thread at a time serves, and one at a time syncs.
* What was leased for a call is either handed to a task that runs on, or given back: whoever
  notices first that nobody will get it `claim`s it.
* Nothing here runs on a loop, but setting the results of futures.

It must not know what is put or taken, nor what a turn makes of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Final, cast

from . import _settling
from ._delivery import Lease
from ._engine import Engine
from ._io_calls import (
    Call,
    Op,
    PutCall,
    SyncCall,
    Takes,
    Turn,
    closed_error,
    copy_of,
)
from ._io_turns import Turns
from ._session import Session
from ._wake import READY_BYTE, SETTLED_BYTE, Waiter, waiter_for
from ._watch import poll_of
from .errors import ClosedError, LeaseLostError

logger = logging.getLogger("weclaw_embedded")

_GATHER_S: Final = 0.0005  # how long those wait who came before many that were just answered
_ROUND_S: Final = 0.002  # how long it is waited for the end of a loop's round

# What `Io.woken` is while no task is run on: no thread has this id.
NOWHERE: Final = (0, cast(asyncio.AbstractEventLoop, None))


class Written(Awaitable[None]):
    """In effect already; awaiting it waits for the disk, and raises StoreFailedError."""

    __slots__ = ("_engine", "_until")

    def __init__(self, engine: Engine, until: int) -> None:
        self._engine = engine
        self._until = until

    def __await__(self) -> Generator[Any, None, None]:
        if self._until and not self._engine.is_durable(self._until):
            io = io_of(self._engine)
            call = SyncCall(io.loop(), self._until)
            io.submit(call)
            try:
                yield from call.__await__()
            except BaseException:
                io.abandon(call)
                raise


class Io(Turns):
    """See the module. One for each engine; made by `io_of`. Any thread may submit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[Call] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._asleep = False
        self._round = False  # what waits for a sync waits for the loop's round to end, too
        self._unrung = False  # a put of tasks that are run on just now waits for the end of that
        self.woken = NOWHERE  # the thread in which tasks are run on just now, and their loop
        self._role = threading.Lock()
        self._lock = threading.Lock()  # guards the next eight
        self._threads: list[threading.Thread] = []
        self._syncing = False
        self._kept = False  # whoever syncs has the serving too: nobody needs it
        self._to_sync: list[Call] = []  # answered after the next sync
        self._to_retry: list[Call] = []  # tried again after it
        self._sync_soon = False  # though nobody waits for it
        self._sync_until = 0
        self._closed = False
        self._ready = waiter_for(READY_BYTE, self._on_ready)
        self._settled = waiter_for(SETTLED_BYTE, self._on_settled)
        self._look_ready = False
        self._look_settled = False
        # Only the thread that serves touches these.
        self._takes: dict[tuple[int, float | None], Takes] = {}
        self._parked: list[Op] = []
        self._late: list[tuple[float, int, Call]] = []
        self._count = 0
        self._next_tick_s = 0.0
        self._answered = 0  # after the last sync
        self._moved = poll_of(engine._watch_fd)
        self._seen = -1  # up to where messages were visible when all takes looked

    # -- coming in -----------------------------------------------------------------------------

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs in this thread. Up to Python 3.11 asyncio asks the kernel for the id
        of the process each time, a twelfth of what a put costs the loop; tasks that were woken by
        this know without.
        """
        thread, loop = self.woken
        return loop if thread == threading.get_ident() else asyncio.get_running_loop()

    async def wait(self, call: Call) -> Any:
        """Submit a call of the running loop and wait for its answer."""
        self.submit(call)
        try:
            return await call
        except BaseException:
            self.abandon(call)
            raise

    def submit(self, call: Call) -> None:
        self._inbox.append(call)
        if self._asleep:
            if type(call) is SyncCall:
                self._ring_after_round()
            elif type(call) is PutCall and call._loop is self.woken[1]:
                # Rung when all tasks of its group have run on: most of them put again, and whoever
                # serves them would only wait for Python's lock.
                self._unrung = True
            else:
                self._ring()
        elif self._kept and call.hurries:
            self._relieve()
        elif not self._threads:
            self._start()
        if self._closed:
            self._fail_inbox()

    def abandon(self, call: Call) -> None:
        """Nobody waits for this call any more. What it got is given back, uncounted."""
        call.cancelled = True
        self._give_back(call)

    def _give_back(self, call: Call) -> None:
        if not call.over or call.error is not None:
            return
        if call.leases and call.claim():
            self.undo(call.leases)
        elif call.unwanted is not None and call.claim():
            call.unwanted(call.value)

    def undo(self, leases: Sequence[Lease]) -> None:
        """Deliveries that nobody ever saw are none."""
        self.submit(Op(None, _undo, list(leases)))

    def sync_soon(self, until: int) -> None:
        """Force everything below `until` to the disk; nobody waits for it."""
        with self._lock:
            self._sync_soon = True
            self._sync_until = max(self._sync_until, until)
            syncing = self._syncing
        if self._asleep and not syncing:
            self._ring_after_round()
        elif not self._threads:
            self._start()

    def look_again(self) -> None:
        """Something changed for those who wait: try them all again."""
        self._look_ready = self._look_settled = True
        self._ring()

    def _on_ready(self) -> None:
        self._look_ready = True
        self._ring()

    def _on_settled(self) -> None:
        self._look_settled = True
        self._ring()

    def _ring(self) -> None:
        if self._kept:
            self._relieve()
        self._asleep = False
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def _ring_after_round(self) -> None:
        """Ring when the tasks of this round of the loop have settled what they settle: they share a
        sync, and whoever does it does not fight them for Python's lock at each of their turns.
        """
        if self._round:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._ring()
            return
        self._round = True
        loop.call_soon(self._end_round)
        self._ring()  # to look at the clock: the loop may end before the round does

    def _end_round(self) -> None:
        self._round = False
        self._ring()

    def _relieve(self) -> None:
        """Let the other thread serve while one syncs."""
        with self._lock:
            if self._kept:
                self._kept = False
                self._role.release()

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            threads = [
                threading.Thread(target=self._run, name=f"weclaw-io-{n}", daemon=True)
                for n in range(2)
            ]
            for thread in threads:
                thread.start()
            self._threads = threads

    # -- the two roles ---------------------------------------------------------------------------

    def _run(self) -> None:
        serves = False
        try:
            while True:
                if not serves:
                    self._role.acquire()
                serves = True
                if not self._serve():
                    return
                serves = False  # but for what `_kept` says
                serves = self._sync()
        except BaseException as error:
            # Whoever waits must not wait for ever for a thread that is no more.
            logger.exception("an I/O thread of %s has ended", self._engine.path)
            self._closed = True
            self._fail_all(error)
            self._relieve()
            raise
        finally:
            if serves:
                self._role.release()

    def _serve(self) -> bool:
        """Run what comes in. True when the caller is to sync, False when it is all over."""
        while True:
            closed = self._closed
            if closed:
                self._fail_all()
            else:
                self._sleep()
                turn = Turn()
                try:
                    self._run_turn(turn)
                except BaseException as error:
                    logger.exception("an I/O thread of %s failed", self._engine.path)
                    for owner in turn.owners:
                        self._fail(list(owner.calls if isinstance(owner, Takes) else owner), error)
                    self._fail_all(error)
            with self._lock:
                begins = self._wants_sync() and not self._syncing
                if begins:
                    self._syncing = self._kept = True
            if begins:
                if self._is_needed():
                    self._relieve()
                return True
            if closed:
                return False

    def _is_needed(self) -> bool:
        """Whether there is something to serve that must not wait for a sync."""
        return bool(
            (self._takes or self._parked or self._look_ready or self._look_settled)
            or self._closed
            or self._engine.replicates
            or (self._inbox and any(call.hurries for call in tuple(self._inbox)))
        )

    def _wants_sync(self) -> bool:
        return bool(self._to_sync or self._to_retry or self._sync_soon)

    def _sync(self) -> bool:
        """Sync for everybody who waits for it. True when this thread still has the serving."""
        while True:
            with self._lock:
                if not self._wants_sync():
                    self._syncing = False
                    kept, self._kept = self._kept, False
                    return kept
                calls, self._to_sync = self._to_sync, []
                again, self._to_retry = self._to_retry, []
                self._sync_soon = False
                until = self._sync_until
            try:
                self._engine.durable(until)
                if calls and self._engine.replicates:
                    calls = self._confirm(calls, until)
            except Exception as failed:  # noqa: BLE001  told to everybody who waits
                calls, again = calls + again, []
                for call in calls:
                    call.error = failed
            self._answer(calls)
            self._answered = len(calls)
            for call in again:
                self.submit(call)

    def _confirm(self, calls: list[Call], until: int) -> list[Call]:
        """Wait for the replica too. Those who may wait longer are queued again; the others are
        returned, puts that were taken back with their error.
        """
        engine = self._engine
        now_s = time.monotonic()
        for call in calls:
            call.since_s = call.since_s or now_s
        timeout_s = engine.replica_timeout
        late_s = min(call.since_s for call in calls) + timeout_s
        if engine.on_replica(until, late_s):
            return calls
        late = [call for call in calls if call.since_s + timeout_s <= time.monotonic()]
        puts = sorted({offset for call in late for offset in call.puts or ()})
        refused = engine.take_back(until, puts)
        for call in late:
            if refused is not None and call.puts is not None:
                call.error = copy_of(refused)
        others = [call for call in calls if call not in late]
        with self._lock:
            self._to_sync = others + self._to_sync
            self._sync_until = max(self._sync_until, until)
        return late

    def _sleep(self) -> None:
        self._asleep = True
        answered, self._answered = self._answered, 0
        due = self._sync_soon and not self._syncing
        if self._look_ready or self._look_settled or self._closed or due:
            self._asleep = False
            return
        if self._inbox:
            few = tuple(self._inbox) if len(self._inbox) < answered // 2 else ()
            if few and not any(call.hurries for call in few):
                # Those who were just answered are about to ask again. Whoever went before them
                # would have a sync for himself, and so would they, each time from then on.
                self._bell.acquire(timeout=_GATHER_S)
            self._asleep = False
            return
        wait_s = -1.0
        if self._takes or self._parked:
            now_s = time.monotonic()
            until_s = self._next_tick_s
            if self._late:
                until_s = min(until_s, self._late[0][0])
            for takes in self._takes.values():
                if takes.look_at_s is not None:
                    until_s = min(until_s, takes.look_at_s)
            wait_s = max(0.0, until_s - now_s)
        self._bell.acquire(timeout=wait_s)
        self._asleep = True
        if self._round:
            self._bell.acquire(timeout=_ROUND_S)
            self._round = False
        self._asleep = False

    # -- going out ---------------------------------------------------------------------------------

    def _answer(self, calls: Sequence[Call]) -> None:
        """One call into each loop."""
        loops = {call._loop for call in calls}
        for loop in loops:
            some = calls if len(loops) == 1 else [call for call in calls if call._loop is loop]
            if loop is None:
                for call in some:
                    if call.error is not None and not isinstance(call.error, ClosedError):
                        logger.debug("%s: %s", self._engine.path, call.error)
                continue
            try:
                # In the next round: the loop reads the pipe that it was woken by in this one, and
                # would after the tasks have to fight whoever serves them for Python's lock.
                loop.call_soon_threadsafe(loop.call_soon, self._wake_tasks, loop, some)
            except RuntimeError:  # the loop is closed
                for call in some:
                    self._give_back(call)

    def _wake_tasks(self, loop: asyncio.AbstractEventLoop, calls: Sequence[Call]) -> None:
        """On the loop: let the tasks run on, one after the other. One that was cancelled meanwhile
        gives back what it got.
        """
        waiting = iter(calls)
        self.woken = threading.get_ident(), loop
        try:
            for call in waiting:
                if not call.runs_on:
                    call.runs_on = True
                    # None: its coroutine was run by hand, and not by a task.
                    if call.wakeup is not None:
                        call.context.run(call.wakeup, call)
        except BaseException:
            # Ctrl-C in one of the tasks ends this round of the loop, and not the others.
            for call in waiting:
                call.end(None)
            raise
        finally:
            self.woken = NOWHERE
            if self._unrung:
                self._unrung = False
                if self._asleep:
                    self._ring()

    def _fail_all(self, error: BaseException | None = None) -> None:
        failed: list[Call] = list(self._parked)
        for takes in self._takes.values():
            failed.extend(takes.calls)
        self._parked.clear()
        self._takes.clear()
        self._late.clear()
        self._fail(failed, error)
        self._fail_inbox(error)

    def _fail_inbox(self, error: BaseException | None = None) -> None:
        failed: list[Call] = []
        with contextlib.suppress(IndexError):
            while True:
                failed.append(self._inbox.popleft())
        self._fail(failed, error)

    def _fail(self, calls: list[Call], error: BaseException | None) -> None:
        answers = []
        for call in calls:
            if not call.over and not call.cancelled:
                call.over = True
                call.error = closed_error(self._engine.path) if error is None else error
                answers.append(call)
        self._answer(answers)

    def close(self) -> None:
        """Everybody who waits is told that the file was closed; syncs under way are finished."""
        self._closed = True
        with self._lock:
            threads = self._threads
        self._ring()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


def _undo(session: Session, waiter: Waiter | None, leases: list[Lease]) -> None:
    for lease in leases:
        # Settled by a close, or lost with its group: then there is nothing to give back.
        with contextlib.suppress(LeaseLostError):
            _settling.release(session, lease, True)


# -- one for each engine ---------------------------------------------------------------------------

_making = threading.Lock()


def io_of(engine: Engine) -> Io:
    """The I/O threads of an engine."""
    io: Io | None = engine.io
    if io is None:
        with _making:
            io = engine.io
            if io is None:
                io = engine.io = Io(engine)
    return io


def _after_fork_in_child() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
