"""One turn of the I/O threads: what has come in is run; each is told, parked, or left to a sync.

Role: the part of `_io.Io` that the thread that serves runs. It makes jobs of calls, runs them in
one turn of the engine, and says what becomes of each: answered at once, answered after the next
sync, tried again when something changes, given up when its time is over.

Invariants:

* Calls are run in the order they came; takes of one turn after all else of it. So what a
  cancelled take gives back is back before the next take of that task looks.
* A turn that fails has written nothing, and everybody whose turn it was is told.

It must not know of threads, bells and loops, nor what is put or taken: operations and their parts
come from the callers.
"""

from __future__ import annotations

import heapq
import select
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import Any, Final, cast

from . import _putting
from ._delivery import Lease, Taken, taken_of
from ._engine import Engine
from ._io_calls import (
    MAKE_ROOM,
    Call,
    Op,
    PutCall,
    SyncCall,
    TakeCall,
    Takes,
    Turn,
    closed_error,
    copy_of,
    messages_of,
)
from ._pending import LOOK_FOR_ROOM_S, PENDING, Pending, look_at
from ._putting import NoBytes, NoRoom
from ._session import BATCH, Job, MoreEnded, Session
from ._shared import FAILED, SYNC_HIGH
from ._upkeep import MakingRoom
from ._waiting import DEATH_CHECK_S
from ._wake import Waiter
from .errors import DiskFullError, Full, StoreFailedError
from .wal import COMMIT, TAIL

# What one turn takes at most, so that nobody waits long for the lock, or for Python's own; but
# that of one call whole.
MAX_CALLS: Final = 256
MAX_BYTES: Final = 4 << 20

_bytes_of = attrgetter("n_bytes")
_merging = attrgetter("merges")


class Turns:
    """What `Io` inherits to run turns, and what it keeps between them."""

    _engine: Engine
    _inbox: deque[Call]
    _lock: threading.Lock  # guards the next three
    _to_sync: list[Call]
    _to_retry: list[Call]
    _sync_until: int
    _ready: Waiter
    _settled: Waiter
    _look_ready: bool
    _look_settled: bool
    # Only the thread that serves touches these.
    _takes: dict[tuple[int, float | None], Takes]
    _parked: list[Op]
    _late: list[tuple[float, int, Call]]
    _count: int
    _next_tick_s: float
    _moved: select.poll | None
    _seen: int
    undo: Callable[[Sequence[Lease]], None]
    sync_soon: Callable[[int], None]
    _give_back: Callable[[Call], None]
    _answer: Callable[[Sequence[Call]], None]
    _fail: Callable[[list[Call], BaseException | None], None]

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
            wanted = _wanted_by(takes.calls)
            if wanted:
                turn.add(Job(self._look, takes, wanted), takes)
        waker = self._engine.waker
        looking = len(self._takes)
        if len(turn.takes) == looking:
            waker.discard(self._ready)  # whoever finds nothing registers it again
        if turn.jobs:
            tail = self._run_jobs(turn.jobs)
            self._after(turn, tail)
        for key in [key for key, takes in self._takes.items() if not takes.calls]:
            del self._takes[key]
        self._answer(turn.answers)
        if turn.short:
            self._make_room(turn.short)
        if turn.takes and len(turn.takes) == looking:
            self._seen = self._ready.seen
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
                self._take_each_in(turn, alive)
            elif alive:
                messages = messages_of(cast("list[PutCall]", alive))
                what = (queue._address, messages, queue._policy, 0, None, None)
                put = Job(_putting.put, what)
                turn.add(put, alive)

    def _take_each_in(self, turn: Turn, calls: list[Call]) -> None:
        takes: Takes | None = None
        syncs: list[SyncCall] = []
        for call in calls:
            if isinstance(call, TakeCall):
                if takes is None or not takes.are_of(call):
                    takes = self._takes_of(turn, call)
                takes.calls.append(call)
            elif isinstance(call, SyncCall):
                syncs.append(call)
            elif isinstance(call, Op):
                self._attempt_later(turn, call)
        if syncs:
            with self._lock:
                self._to_sync += syncs
                self._sync_until = max(self._sync_until, *[call.until for call in syncs])

    def _takes_of(self, turn: Turn, call: TakeCall) -> Takes:
        """Those that wait for the same as this one; they look in this turn."""
        key = (id(call.source), call.visibility_s)
        takes = self._takes.get(key)
        if takes is None:
            takes = self._takes[key] = Takes(call.source, call.visibility_s)
        if takes not in turn.takes:
            turn.takes.append(takes)
        return takes

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
            if isinstance(error, NoBytes) and not (call.making and call.making.is_over):
                return MAKE_ROOM
            call.making = None
            call.refused = str(error)
            if not waits:
                raise Full(str(error)) from None
            return Pending(LOOK_FOR_ROOM_S)

    def _look(self, session: Session, takes: Takes, wanted: int) -> Taken:
        """Take until nothing is found, so that whoever is left waits with a waiter registered."""
        found = taken_of([], [])
        while len(found.leases) < wanted:
            n = wanted - len(found.leases)
            taken = takes.source.look(session, n, takes.visibility_s, self._ready)
            found.dead.extend(taken.dead)
            found.look_again_us = taken.look_again_us
            found.has_more = taken.has_more
            if not taken.leases:
                break
            found.leases.extend(taken.leases)
        return found

    def _run_jobs(self, jobs: list[Job]) -> int:
        """Run the jobs in one turn, or one by one when the disk is too full for all of them."""
        try:
            return self._engine.run_jobs(jobs)
        except DiskFullError as error:
            if len(jobs) == 1:
                self._undone(jobs[0], error)
                return 0
        except BaseException as error:  # noqa: BLE001  told to everybody whose turn it was
            for job in jobs:
                self._undone(job, error)
            return 0
        tail = 0
        left: BaseException | None = None
        for job in jobs:
            self._undone(job, left)
            job.must_sync = False
            if left is None:
                tail = max(tail, self._run_jobs([job]))
                if isinstance(job.error, MoreEnded):
                    left = job.error  # also of those behind it, which stay there
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
        if turn.again:
            self._inbox.extendleft(reversed(turn.again))
        if to_sync:
            with self._lock:
                self._to_sync.extend(to_sync)
                self._sync_until = max(self._sync_until, tail)

    def _after_op(self, turn: Turn, job: Job, calls: list[Call], to_sync: list[Call]) -> None:
        error = job.error
        if error is not None and self._runs_again(turn, error, calls):
            return
        result = job.result
        if len(calls) == 1:
            call = calls[0]
            assert isinstance(call, Op)
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
            if call.cancelled:
                self._give_back(call)
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
        must_sync = job.must_sync
        if error is None and isinstance(first, PutCall) and first.queue._policy == BATCH:
            must_sync |= self._engine.flush_later(first.queue._store._options, len(result)) > 0
        for call in calls if job.puts is not None else ():
            call.puts = job.puts
        (to_sync if must_sync and error is None else turn.answers).extend(calls)

    def _runs_again(self, turn: Turn, error: BaseException, calls: list[Call]) -> bool:
        """Whether calls that came to nothing are run in another turn; then they are seen to."""
        if isinstance(error, MoreEnded):
            for call in calls:
                if call.merges is None and call.until_s != 0.0:
                    # It may have waited, for a time, and before others.
                    self._park(cast("Op", call))
                    self._look_settled = True
                else:
                    turn.again.append(call)
            return True
        if len(calls) > 1 or isinstance(error, NoRoom):
            # One of them may be the reason: each is told its own.
            for call in calls:
                call.merges = None
            turn.again += calls
            return True
        return False

    def _after_take(self, turn: Turn, job: Job, takes: Takes, tail: int) -> None:
        calls = takes.calls
        if job.error is not None:
            if isinstance(job.error, MoreEnded):
                self._look_ready = True  # in the next turn
                return
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
        if taken.leases or taken.has_more:
            # Some were damaged, or more were wanted, or ended by themselves, than a turn does.
            self._look_ready = True
            return
        takes.look_at_s = look_at(self._engine, taken.look_again_us)
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
            call.error = takes.source.nothing() if ended is None else copy_of(ended)
            turn.answers.append(call)
            self._engine.settle_left()
        takes.source.tell_waiting()
        for call in calls:
            self._watch(call)

    def _hand_out(self, turn: Turn, calls: deque[TakeCall], made: list[tuple[Lease, Any]]) -> None:
        at = 0
        while calls and at < len(made):
            call = calls.popleft()
            if call.cancelled or call.over:
                continue
            mine = made[at : at + call.n]
            at += len(mine)
            leases, values = zip(*mine, strict=True)
            call.leases = [*leases]
            call.value = [*values]
            call.over = True
            if call.cancelled:
                self._give_back(call)  # type: ignore[unreachable]  # its loop may say so any time
            else:
                turn.answers.append(call)
        if at < len(made):
            self.undo([lease for lease, _ in made[at:]])

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
        """Free what only retention holds for the first of these, and try them again, before those
        that came later.
        """
        fresh = MakingRoom(self._engine)
        for call in calls:
            call.making = call.making or fresh
        try:
            (calls[0].making or fresh).step()
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

    def _tick_s(self) -> float:
        """How long until it is looked for what nobody tells: deaths, and queues that were closed
        while a put of theirs waits for room.
        """
        return DEATH_CHECK_S if self._parked else self._engine.look_every_s

    def _why_no_room(self, call: Call) -> str:
        """As it was told at its last try, or at that of one before it."""
        others = (one for one in self._parked if one.room is getattr(call, "room", None))
        told = (one.refused for one in (call, *others) if one.refused)
        return next(told, "there was no room in time; nothing was put; try again later")

    def _tick(self, turn: Turn, now_s: float) -> None:
        """What has to be noticed without being told: time, deaths, closed queues, failures."""
        while self._late and self._late[0][0] <= now_s:
            call = heapq.heappop(self._late)[2]
            if call.over or call.cancelled:
                continue
            call.over = True
            if isinstance(call, TakeCall):
                call.error = call.source.nothing()
            elif isinstance(call, Op) and call.late is not None:
                call.error = call.late()
            else:
                call.error = Full(self._why_no_room(call))
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
        if engine.page.visible(words[TAIL]) != self._seen:
            self._look_ready = True  # somebody else was woken for that, who may be stopped
        if words[FAILED] or engine.closed or engine.dead_owners(everyone=True):
            self._look_ready = self._look_settled = True
        if words[SYNC_HIGH] > words[COMMIT]:
            # So long without a sync: whoever wrote this may have died before it.
            self.sync_soon(words[SYNC_HIGH])
        try:
            if self._moved is None or self._moved.poll(0):
                engine.look_at_place()
        except StoreFailedError:
            self._look_ready = self._look_settled = True


def _wanted_by(calls: Iterable[TakeCall]) -> int:
    """How many messages one turn takes for these calls: so many, but for each that gets some as
    many as it wants, as a thread's `get_many` gets them.
    """
    wanted = 0
    for call in calls:
        wanted += call.n
        if wanted >= MAX_CALLS:
            break
    return wanted
