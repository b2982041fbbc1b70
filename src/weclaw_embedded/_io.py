"""The I/O threads of one engine: all that tasks of event loops wait for is done here, in groups.

Role: calls come in from any loop and thread, are run in turns (one write, one index transaction
a turn), synced together, and answered with one `call_soon_threadsafe` a loop and group. What
finds nothing is parked and tried again when it may find something.

Two threads, two roles: one *serves* (takes what has come in and runs it), the other sleeps.
Whoever has served what must be synced *syncs* it himself: no hand-over lies between a write and its
sync. Meanwhile he keeps the serving as long as all that comes in waits for the next sync anyway;
else the other is woken and serves, so that a sync holds up only those who wait for it. Tasks that
only put keep one thread busy, which is woken once a group.

Invariants:

* Calls are run in the order they came; takes of one turn after all else of it. So what a
  cancelled take gives back is back before the next take of that task looks.
* What was leased for a call is either handed to a task that runs on, or given back: whoever
  notices first that nobody will get it `claim`s it.
* Nothing here runs on a loop, but setting the results of futures.

It must not know what is put or taken: operations and their parts come from the callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

from . import _putting, _settling
from ._delivery import Lease, Taken
from ._engine import Engine
from ._io_calls import (
    MAKE_ROOM,
    PENDING,
    Call,
    Op,
    Pending,
    PutCall,
    SyncCall,
    TakeCall,
    Takes,
    Turn,
    closed_error,
    copy_of,
)
from ._putting import NoBytes, NoRoom
from ._session import BATCH, Job, Session
from ._shared import FAILED, SYNC_HIGH
from ._waiting import DEATH_CHECK_S
from ._wake import READY_BYTE, SETTLED_BYTE, Waiter
from ._watch import poll_of
from .errors import ClosedError, DiskFullError, Full, LeaseLostError, StoreFailedError
from .wal import COMMIT, TAIL

T = TypeVar("T")
logger = logging.getLogger("weclaw_embedded")

# What one turn takes at most, so that nobody waits long for the lock, or for Python's own.
MAX_CALLS: Final = 256
MAX_BYTES: Final = 4 << 20
_LONGEST_SLEEP_S: Final = 60.0
_LOOK_FOR_ROOM_S: Final = 0.5  # room also comes of itself, when a message runs out
_GATHER_S: Final = 0.0005  # how long those wait who came before many that were just answered
_ROUND_S: Final = 0.002  # how long it is waited for the end of a loop's round
_SMALL_POOL: Final = 8

# What `Io.woken` is while no task is run on: no thread has this id.
NOWHERE: Final = (0, cast(asyncio.AbstractEventLoop, None))
_bytes_of = attrgetter("n_bytes")
_merging = attrgetter("merges")


class Written(Awaitable[None]):
    """In effect already; awaiting it waits for the disk, and raises StoreFailedError."""

    __slots__ = ("_engine", "_until")

    def __init__(self, engine: Engine, until: int) -> None:
        self._engine = engine
        self._until = until

    def __await__(self) -> Generator[Any, None, None]:
        if self._until and not self._engine.is_durable(self._until):
            call = SyncCall(asyncio.get_running_loop(), self._until)
            io = io_of(self._engine)
            io.submit(call)
            try:
                yield from call.__await__()
            except BaseException:
                io.abandon(call)
                raise


class Io:
    """See the module. One for each engine; made by `io_of`. Any thread may submit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[Call] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._asleep = False
        self._round = False  # what waits for a sync waits for the loop's round to end, too
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
        self._ready = Waiter(READY_BYTE, self._on_ready)
        self._settled = Waiter(SETTLED_BYTE, self._on_settled)
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
        self._seen_tail = -1  # how far the log was when it was looked for messages

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

    def _tick_s(self) -> float:
        """How long until it is looked for what nobody tells: deaths, and queues that were closed
        while a put of theirs waits for room.
        """
        return DEATH_CHECK_S if self._parked else self._engine.look_every_s

    # -- a turn ------------------------------------------------------------------------------------

    def _run_turn(self, turn: Turn) -> None:
        now_s = time.monotonic()
        if self._takes or self._parked:
            self._tick(turn, now_s)
        else:
            self._next_tick_s = now_s + self._tick_s()
        look_settled, self._look_settled = self._look_settled, False
        look_ready, self._look_ready = self._look_ready, False
        if look_settled:
            self._retry_parked(turn)
        self._take_in(turn)
        for takes in self._takes.values():
            due = takes.look_at_s is not None and takes.look_at_s <= now_s
            if (look_ready or due) and takes not in turn.takes:
                turn.takes.append(takes)
        for takes in turn.takes:
            takes.drop_finished()
            wanted = min(sum(call.n for call in takes.calls), MAX_CALLS)
            if wanted:
                turn.add(Job(self._look, takes, wanted), takes)
        waker = self._engine.waker
        if len(turn.takes) == len(self._takes):
            waker.discard(self._ready)  # whoever finds nothing registers it again
        if turn.jobs:
            tail = self._execute(turn.jobs)
            self._after(turn, tail)
        for key in [key for key, takes in self._takes.items() if not takes.calls]:
            del self._takes[key]
        self._answer(turn.answers)
        if turn.short:
            self._make_room(turn.short)
        if turn.takes:
            self._seen_tail = self._engine.page.words[TAIL]
        if not self._takes and waker.has(self._ready):
            waker.discard(self._ready)
            self._engine.stop_waiting()

    def _take_in(self, turn: Turn) -> None:
        """Make jobs of what has come in; neighbouring plain puts become one."""
        inbox = self._inbox
        calls = [inbox.popleft() for _ in range(min(len(inbox), MAX_CALLS))]
        if sum(map(_bytes_of, calls)) > MAX_BYTES:
            n = bisect_right(list(accumulate(map(_bytes_of, calls))), MAX_BYTES) + 1
            inbox.extendleft(reversed(calls[n:]))
            del calls[n:]
        for queue, run in groupby(calls, _merging):
            alive = [call for call in run if not call.cancelled]
            if queue is None:
                for call in alive:
                    self._take_one_in(turn, call)
            elif alive:
                puts = cast("list[PutCall]", alive)
                messages = _putting.together([one for call in puts for one in call.messages])
                put = Job(_putting.put, queue._address, messages, queue._policy, 0)
                turn.add(put, alive)

    def _take_one_in(self, turn: Turn, call: Call) -> None:
        if isinstance(call, Op):
            self._attempt_later(turn, call)
        elif isinstance(call, TakeCall):
            key = (id(call.source), call.visibility_s)
            takes = self._takes.get(key)
            if takes is None:
                takes = self._takes[key] = Takes(call.source, call.visibility_s)
            takes.calls.append(call)
            if takes not in turn.takes:
                turn.takes.append(takes)
        elif isinstance(call, SyncCall):
            with self._lock:
                self._to_sync.append(call)
                self._sync_until = max(self._sync_until, call.until)

    def _attempt_later(self, turn: Turn, call: Op) -> None:
        waits = call.until_s != 0.0
        if waits and call.room is not None:
            for other in self._parked:
                if other.room is call.room and not (other.cancelled or other.over):
                    self._park(call)  # behind those who wait for the same room
                    return
        turn.add(Job(self._attempt, call, turn.blocked), [call])

    def _attempt(self, session: Session, call: Op, blocked: set[int]) -> Any:
        waits = call.until_s != 0.0
        if call.room is not None and id(call.room) in blocked and waits:
            return PENDING
        try:
            return call.attempt(session, self._settled if waits else None)
        except NoRoom as error:
            if waits:
                blocked.add(id(call.room))
            if isinstance(error, NoBytes) and call.may_reclaim:
                call.may_reclaim = False
                return MAKE_ROOM
            call.may_reclaim = True
            if not waits:
                raise Full(str(error)) from None
            return Pending(_LOOK_FOR_ROOM_S)

    def _look(self, session: Session, takes: Takes, wanted: int) -> Taken:
        """Take until nothing is found, so that whoever is left waits with a waiter registered."""
        found = Taken([], [])
        while len(found.leases) < wanted:
            n = wanted - len(found.leases)
            taken = takes.source.look(session, n, takes.visibility_s, self._ready)
            found.dead.extend(taken.dead)
            found.look_again_us = taken.look_again_us
            if not taken.leases:
                break
            found.leases.extend(taken.leases)
        return found

    def _execute(self, jobs: list[Job]) -> int:
        """Run the jobs in one turn, or one by one when the disk is too full for all of them."""
        try:
            return self._engine.execute_many(jobs)
        except DiskFullError as error:
            if len(jobs) == 1:
                self._undone(jobs[0], error)
                return 0
        except BaseException as error:  # noqa: BLE001  told to everybody whose turn it was
            for job in jobs:
                self._undone(job, error)
            return 0
        tail = 0
        for job in jobs:
            self._undone(job, None)
            job.must_sync = False
            tail = max(tail, self._execute([job]))
        return tail

    def _undone(self, job: Job, error: BaseException | None) -> None:
        """The turn failed: nothing of this job was written."""
        job.result = None
        job.error = error  # type: ignore[assignment]  # not only Exceptions: all are told

    # -- after the turn ----------------------------------------------------------------------------

    def _after(self, turn: Turn, tail: int) -> None:
        to_sync: list[Call] = []
        for job, owner in zip(turn.jobs, turn.owners, strict=True):
            if isinstance(owner, Takes):
                self._after_take(turn, job, owner, tail)
            else:
                self._after_op(turn, job, owner, to_sync)
        for queue, n in turn.puts.items():
            self._engine.flush_later(queue._store._options, n)
        if to_sync:
            with self._lock:
                self._to_sync.extend(to_sync)
                self._sync_until = max(self._sync_until, tail)

    def _after_op(self, turn: Turn, job: Job, calls: list[Call], to_sync: list[Call]) -> None:
        error = job.error
        if error is not None and len(calls) > 1:
            # One of them may be the reason: each is told its own.
            for call in reversed(calls):
                call.merges = None
                self._inbox.appendleft(call)
            return
        result = job.result
        if len(calls) == 1:
            call = calls[0]
            assert isinstance(call, Op)
            if isinstance(error, NoRoom):
                call.merges = None
                self._inbox.appendleft(call)
                return
            if result is MAKE_ROOM:
                turn.short.append(call)
                return
            if isinstance(result, Pending):
                if not call.over:
                    look_in_s = result.look_in_s
                    call.look_at_s = None if look_in_s is None else time.monotonic() + look_in_s
                    self._park(call)
                return
            if error is not None:
                call.error = error
            elif call.finish is not None:
                try:
                    call.value = call.finish(result)
                except Exception as failed:  # noqa: BLE001  the caller's own
                    call.error = failed
            else:
                call.value = result
            call.over = True
            self._if_cancelled(call)
        else:
            values: Iterable[Sequence[str]] = zip(result, strict=True)
            if len(result) > len(calls):  # not one message each
                ids = iter(result)
                values = [list(islice(ids, call.n)) for call in cast("list[PutCall]", calls)]
            for call, value in zip(calls, values, strict=True):
                call.value = value
                call.over = True
                if call.cancelled:
                    self._give_back(call)
        first = calls[0]
        if error is None and isinstance(first, PutCall) and first.queue._policy == BATCH:
            turn.puts[first.queue] = turn.puts.get(first.queue, 0) + len(result)
        for call in calls if job.puts is not None else ():
            call.puts = job.puts
        (to_sync if job.must_sync and error is None else turn.answers).extend(calls)

    def _after_take(self, turn: Turn, job: Job, takes: Takes, tail: int) -> None:
        calls = takes.calls
        if job.error is not None:
            for call in calls:
                call.error = copy_of(job.error)
                call.over = True
            turn.answers.extend(calls)
            calls.clear()
            return
        taken: Taken = job.result
        if taken.dead:
            takes.source.tell_dead(taken.dead)
        made: list[tuple[Lease, Any]] = []
        if taken.leases:
            try:
                made = takes.source.made(self._engine, taken.leases)
            except Exception as error:  # noqa: BLE001  told to whoever would have got them
                self.undo(taken.leases)
                for call in calls:
                    call.error = copy_of(error)
                    call.over = True
                turn.answers.extend(calls)
                calls.clear()
                return
        self._hand_out(turn, calls, made)
        takes.look_at_s = None
        if not calls:
            return
        if taken.leases:
            self._look_ready = True  # some were damaged, or more were wanted than a turn gives
            return
        if taken.look_again_us is not None:
            ahead_s = (taken.look_again_us - self._engine.now_us()) / 1e6
            takes.look_at_s = time.monotonic() + min(max(ahead_s, 0.0), _LONGEST_SLEEP_S)
        words = self._engine.page.words
        behind = words[SYNC_HIGH] > words[COMMIT]
        ended = takes.source.ended()
        for call in [call for call in calls if call.until_s == 0.0 or ended is not None]:
            calls.remove(call)
            if ended is not None and behind:
                # It may wait: what was put before the end may be there but for a sync.
                with self._lock:
                    self._to_retry.append(call)
                    self._sync_until = max(self._sync_until, tail)
                continue
            call.over = True
            call.error = call.empty() if ended is None else copy_of(ended)
            turn.answers.append(call)
            self._engine.settle_left()
        for call in calls:
            self._watch(call)

    def _hand_out(self, turn: Turn, calls: deque[TakeCall], made: list[tuple[Lease, Any]]) -> None:
        at = 0
        while calls and at < len(made):
            call = calls[0]
            if call.cancelled or call.over:
                calls.popleft()
                continue
            mine = made[at : at + call.n]
            at += len(mine)
            calls.popleft()
            call.value = [what for _, what in mine]
            call.leases = [lease for lease, _ in mine]
            call.over = True
            self._hand_over(turn, call)
        if at < len(made):
            self.undo([lease for lease, _ in made[at:]])

    def _if_cancelled(self, call: Call) -> None:
        if call.cancelled:
            self._give_back(call)

    def _hand_over(self, turn: Turn, call: TakeCall) -> None:
        if call.cancelled:
            self._give_back(call)
        else:
            turn.answers.append(call)

    # -- what waits --------------------------------------------------------------------------------

    def _park(self, call: Op) -> None:
        self._parked.append(call)
        self._watch(call)

    def _watch(self, call: Call) -> None:
        """Remember when the call's time is over."""
        if call.until_s is not None and not call.watched:
            call.watched = True
            self._count += 1
            heapq.heappush(self._late, (call.until_s, self._count, call))

    def _make_room(self, calls: list[Op]) -> None:
        """Free what only retention holds, and try these again, before those that came later."""
        try:
            self._engine.make_room()
        except Exception as error:  # noqa: BLE001  told to everybody who needed it
            self._fail(list(calls), error)
            return
        self._parked[:0] = calls
        for call in calls:
            if call.until_s:
                self._watch(call)
        self._look_settled = True

    def _retry_parked(self, turn: Turn) -> None:
        parked, self._parked = self._parked, []
        for call in parked:
            if not (call.cancelled or call.over):
                turn.add(Job(self._attempt, call, turn.blocked), [call])

    def _tick(self, turn: Turn, now_s: float) -> None:
        """What has to be noticed without being told: time, deaths, closed queues, failures."""
        while self._late and self._late[0][0] <= now_s:
            call = heapq.heappop(self._late)[2]
            if call.over or call.cancelled:
                continue
            call.over = True
            if isinstance(call, TakeCall):
                call.error = call.empty()
            elif isinstance(call, Op) and call.late is not None:
                call.error = call.late()
            else:
                call.error = Full("there was no room in time; nothing was put; try again later")
            turn.answers.append(call)
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + self._tick_s()
        engine = self._engine
        for call in self._parked:
            if call.queue is not None and call.queue._closed and not call.over:
                call.over = True
                call.error = closed_error(engine.path)
                turn.answers.append(call)
        self._parked = [call for call in self._parked if not (call.cancelled or call.over)]
        if len(self._late) > MAX_CALLS:
            self._late = [late for late in self._late if not (late[2].cancelled or late[2].over)]
            heapq.heapify(self._late)
        for takes in self._takes.values():
            takes.drop_finished()
            if takes.source.ended() is not None:
                self._look_ready = True
        if any(call.look_at_s is not None and call.look_at_s <= now_s for call in self._parked):
            self._look_settled = True
        words = engine.page.words
        if words[TAIL] != self._seen_tail:
            self._look_ready = True  # somebody else was woken for that, who may be stopped
        if words[FAILED] or engine.closed or engine.dead_owners(everyone=True):
            self._look_ready = self._look_settled = True
        if words[SYNC_HIGH] > words[COMMIT]:
            # So long without a sync: whoever wrote this may have died before it.
            self.sync_soon(words[SYNC_HIGH])
        try:
            if self._moved is None or self._moved.poll(0):
                engine._look_at_place()
        except StoreFailedError:
            self._look_ready = self._look_settled = True

    # -- going out ---------------------------------------------------------------------------------

    def _answer(self, calls: Sequence[Call]) -> None:
        """One call into each loop."""
        loops = {call.loop for call in calls}
        for loop in loops:
            some = calls if len(loops) == 1 else [call for call in calls if call.loop is loop]
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
_executor: ThreadPoolExecutor | None = None


def io_of(engine: Engine) -> Io:
    """The I/O threads of an engine."""
    io: Io | None = engine.io
    if io is None:
        with _making:
            io = engine.io
            if io is None:
                io = engine.io = Io(engine)
    return io


def small_pool() -> ThreadPoolExecutor:
    """Threads for what is rare and short: questions, upkeep, opening and closing."""
    global _executor
    with _making:
        if _executor is None:
            _executor = ThreadPoolExecutor(_SMALL_POOL, thread_name_prefix="weclaw-ask")
        return _executor


async def in_pool(function: Callable[..., T], *args: Any) -> T:
    """Run a short blocking function off the loop. Cancelled, it may still be done, whole."""
    return await asyncio.get_running_loop().run_in_executor(small_pool(), function, *args)


def _after_fork_in_child() -> None:
    # Threads don't survive a fork.
    global _executor, _making
    _making = threading.Lock()
    _executor = None


os.register_at_fork(after_in_child=_after_fork_in_child)
