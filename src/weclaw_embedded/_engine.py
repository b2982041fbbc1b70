"""The engine: one open file in one process. Log, index and owners as one durable state.

Role: run operations under the write lock, write what they append, make it durable, wake those who
wait for it. The one commit sentence, and the function that says each part of it:

    append (`Session.append`) -> write (`Session.finish`) -> sync, publish the commit point
    (`Engine._sync_once`) -> answer (`Engine.execute` returns); applying to the index is done in
    the same session when the index is open, else by whoever opens it next (`Session.tx`).

Invariants:

* Lock order: the thread lock, then the write lock of the file, then LMDB's own (inside `Index`).
  The sync lock is never held together with them. No lock is held over a sync.
* A session that fails leaves nothing: what it appended is discarded before it was written. One
  that is stopped in the middle of a write leaves the *writing* word set; the next session
  (anybody's) reads the log again from the tail.
* After one failed write or sync nothing is promised any more until all have closed.

It must not know what the records mean, beyond handing them to the index.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Final, TypeVar

from typing_extensions import ParamSpec

from . import _clock, _files, _records
from ._format import FENCED, VOUCH
from ._index import Index, IndexFullError, Tx
from ._opening import (
    IN_USE,
    INDEX_NAME,
    OWNER,
    PAGE_NAME,
    WRITE,
    Opened,
    write_clean_mark,
)
from ._options import DEFAULTS, RECORDED_OPTIONS, StoreOptions
from ._shared import (
    CLEAN_AT,
    DEAD_SEQ,
    FAILED,
    FEED_PIPE,
    FEEDER_SLEEPS,
    FENCED_BY,
    IS_COPY,
    IS_FENCED,
    OPTIONS_SEQ,
    OWNERS_HIGH,
    READY,
    REPLICA_AT,
    REPLICATED,
    REPLICATION,
    SETTLED,
    SYNC_HIGH,
    SYNC_WANTED,
    WAITERS,
    WANTED,
    SharedPage,
)
from ._wake import FEED_BYTE, READY_BYTE, SETTLED_BYTE, Timer, Waiter, Waker
from .errors import (
    ClosedError,
    CorruptError,
    DiskFullError,
    FencedError,
    LockedError,
    ReplicaUnavailableError,
    StoreFailedError,
)
from .wal import COMMIT, HEAD, LAST, TAIL, WRITING, Frame, Log, Recovery

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger("weclaw_embedded")

# Flush policies, as frames carry them.
OS, BATCH, SYNC, REPLICA = range(4)
POLICIES: Final = {"os": OS, "batch": BATCH, "sync": SYNC}
ALL: Final = (1 << 64) - 1
# What is recorded beside the replica: the store whose replica it is.
REPLICA_OF: Final = "replica_of"
# What the file records for "no limit"; nothing at all stands for the default.
_NO_LIMIT: Final = "none"
# How long a waiter sleeps before it looks whether the owner of a lease has died.
DEATH_CHECK_S: Final = 0.25
# Of what a process wrote itself, so much is applied from memory instead of read back.
_MOST_REMEMBERED: Final = 64
_LARGEST_REMEMBERED: Final = 65536
# Bytes of the log that are folded in one transaction of the index.
_FOLD_BYTES: Final = 256 << 20
# How long after something was settled space is looked for that can be given back.
UPKEEP_S: Final = 0.1

Record = Sequence[bytes | memoryview]


class Session:
    """One turn under the write lock. Operations get it as their first argument."""

    __slots__ = (
        "_appended",
        "_applied",
        "_sync_from",
        "_tx",
        "after_write",
        "engine",
        "log",
        "must_sync",
        "now_us",
        "page",
        "ready",
        "settled",
    )
    may_write = True
    sync_from = SYNC  # what is promised this or more is waited for
    replicated = False  # and for the replica too

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.log = engine.log
        self.page = engine.page
        self.now_us = _clock.boottime_us() + engine.shift
        self.ready = 0  # topics whose getters may find something now
        self.settled = 0  # topics whose putters, joiners and result waiters may
        self.must_sync = False
        self.after_write: list[Callable[[], None]] = []
        self._tx: Tx | None = None
        self._appended: list[tuple[int, Record]] = []
        self._applied = 0
        self._sync_from = 0

    @property
    def tx(self) -> Tx:
        """The index, with everything in the log up to this moment applied."""
        if self._tx is None:
            self._tx = self.engine.index.write()
            self.engine.catch_up(self._tx)
        if self._applied < len(self._appended):
            self._apply(self._tx)
        return self._tx

    def _apply(self, tx: Tx) -> None:
        for offset, record in self._appended[self._applied :]:
            tx.apply(offset, self.now_us, record[0] if len(record) == 1 else b"".join(record))
        self._applied = len(self._appended)

    def append(
        self,
        records: Sequence[Record],
        policy: int = OS,
        *,
        puts: bool = False,
        spare: bool = True,
        flags: int = 0,
    ) -> list[int]:
        """Append one frame; returns the records' offsets. Raises DiskFullError, then nothing of it
        is left. `spare`: may use the space kept so that a full disk can be worked off.
        """
        offsets = self.log.append(records, policy, self.now_us, flags, spare=spare)
        if puts and policy >= SYNC and not self._sync_from:
            self._sync_from = offsets[0]
        self._appended.extend(zip(offsets, records, strict=True))
        if self._tx is not None:
            self._apply(self._tx)  # at once: the next look must see it
        return offsets

    def confirm(self, until: int) -> None:
        """Wait for the replica, if there is one that is waited for."""

    def take_puts(self) -> list[int] | None:
        """What the operation put, if that has to be taken back when a replica does not confirm."""
        return None

    def judge(self, records: Sequence[Record]) -> None:
        """Append what ended by itself (a lease run out, a death, an expiry)."""
        self.append(records)

    def option(self, name: str) -> Any:
        """An option of the file; see `Engine.option`."""
        engine = self.engine
        if engine.options_seen != self.page.words[OPTIONS_SEQ]:
            self.options()
        return engine.effective[name]

    def options(self) -> dict[str, Any]:
        """What the file records of its options, followed as any process changes it."""
        engine = self.engine
        seen = self.page.words[OPTIONS_SEQ]
        if engine.options_seen != seen:
            engine.know_options(self.tx.options, seen)
        return engine.known_options

    def finish(self) -> None:
        """Write what was appended and keep what the index learned."""
        engine = self.engine
        before = self.page.words[TAIL]
        if self._appended:
            if self._sync_from:
                # Before the write, so that no moment exists in which it could be delivered.
                self.page.promise_sync(self._sync_from, self.log.pending_tail)
            try:
                self.log.write()
            except DiskFullError:
                raise
            except OSError as error:
                raise engine.fail(f"writing failed: {error}") from error
        is_indexed = True
        tx = self._tx
        if tx is None:
            if self._appended:
                engine.remember_written(before, self.now_us, self._appended)
        else:
            if self._applied < len(self._appended):
                self._apply(tx)
            try:
                frame, checksum = self.log.last_frame
                tx.commit(self.page.words[TAIL], checksum, frame)
            except IndexFullError as error:
                # The log has it all. Whoever looks next applies it again.
                logger.debug("index not written, the log is ahead of it: %s", error)
                is_indexed = False
            # Not before: when Ctrl-C comes here, `abort` is to end it.
            self._tx = None
        if is_indexed:
            # Not before the index has what it was told: it must never be behind the log's head.
            for step in self.after_write:
                step()

    def abort(self) -> None:
        self.log.discard()
        tx, self._tx = self._tx, None
        if tx is not None:
            tx.abort()


class _Last:
    """Remembers the last frame that went by."""

    def __init__(self, enough: int) -> None:
        self.enough = enough  # frames that begin after this offset are left
        self.offset = 0
        self.end = 0

    def until_enough(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        for frame in frames:
            self.offset, self.end = frame[0], frame[1]
            yield frame
            if frame[1] > self.enough:
                return


class Job:
    """One operation among several of a turn; see `Engine.execute_many`."""

    __slots__ = ("args", "error", "must_sync", "operation", "puts", "result")

    def __init__(self, operation: Callable[..., Any], *args: Any) -> None:
        self.puts: list[int] | None = None  # to be taken back if the replica does not confirm
        self.operation = operation
        self.args = args
        self.result: Any = None
        self.error: Exception | None = None
        self.must_sync = False


@functools.cache
def _session_maker() -> Callable[[Engine, int], Session]:
    from ._replication import session_of

    return session_of


def _recorded(value: Any) -> Any:
    """An option as the log holds it."""
    if value is None:
        return _NO_LIMIT
    return list(value) if isinstance(value, tuple) else value


def _poll_of(fd: int) -> select.poll | None:
    if fd < 0:
        return None
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll


class Engine:
    """See the module. Made and ended by `_registry`, shared by all handles of a process. Any thread
    may call any method.
    """

    def __init__(self, opened: Opened, replica: object = None) -> None:
        self.path = opened.path
        self.fd = opened.fd
        self.header = opened.header
        self.directory = opened.directory
        self.page: SharedPage = opened.page
        self.log: Log = opened.log
        self.index: Index = opened.index
        self.slot = opened.slot
        self.token = opened.token
        self.recovery = opened.recovery
        self.shift = self.page.shift
        self.handles = 0
        self.forked = False
        self.closed = False
        self.waker = Waker(self.directory, self.slot, self.fd)
        self.timer = Timer("weclaw-timer")
        # Apart from the timer, whose thread may be busy with a slow disk or a user's callback.
        self.renewals = Timer("weclaw-renewals")
        self.io: Any = None  # what serves event loops, made by `_io` when first needed
        # Leases of this process: (gid, offset) -> the record that would hand it back.
        self.held: dict[tuple[int, int], Any] = {}
        self.suspects: dict[tuple[int, int], Any] = {}  # those of them that were in a crash
        self.last_digest = (-1, "")  # of the salt of a segment, for the ids we make
        self.topics: dict[str, int] = {}  # whose TOPIC record is known to be in the log
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._syncing = False
        self._sync_waiters: list[tuple[int, threading.Lock]] = []
        self._failure: str | None = None
        self._identity = _files.identity(self.fd)[:2]
        self._watch_fd = _files.watch_names(
            [self.path, self.directory, os.path.join(self.directory, PAGE_NAME)]
        )
        # Two, because a poll object is one thread's at a time: one under the lock, one for
        # whoever syncs.
        self._watch, self._sync_watch = _poll_of(self._watch_fd), _poll_of(self._watch_fd)
        self._flush_due = False
        self._unsynced = 0
        # What this process wrote last, from one offset to another, and is not in the index yet.
        self._written: list[tuple[int, int, bytes]] = []
        self._written_from = self._written_to = -1
        self._next_probe = 0
        self._last_segment = self.page.words[LAST]
        self._upkeep_due = False
        self.known_options: dict[str, Any] = {}
        self.effective: dict[str, Any] = {}
        self.options_seen = -1
        self.consumer = ""
        self._introduced = False
        self._adopted: list[StoreOptions] = []
        self.replication: Any = None  # this process's part in feeding the replica, if there is one
        self.making = threading.Lock()  # held to make it
        if opened.role:
            self._take_role(opened)
        if self.recovery is not None:
            if self.recovery.damaged:
                self.heal(self.log.head_offset, self.page.words[TAIL], replica)
            self._report(self.recovery)
        if opened.rebuild:
            self.execute(lambda session: session.tx)

    # -- sessions ------------------------------------------------------------------------------

    def execute(
        self,
        operation: Callable[Concatenate[Session, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `operation(session, …)` under the write lock and make it as durable as it asks.

        Blocks for the lock, and for a sync when the operation set `must_sync`. Raises what the
        operation raises, then nothing was written.
        """
        with self._lock:
            try:
                _files.lock(self.fd, WRITE, True)
                session = self._begin()
                try:
                    result = operation(session, *args, **kwargs)
                    session.finish()
                except BaseException:
                    session.abort()
                    raise
                tail = self.page.words[TAIL]
                pokes = self._take_pokes(session) if self.page.words[WAITERS] else None
            finally:
                # Also when the lock was not reached: releasing what is not held does nothing.
                _files.unlock(self.fd, WRITE)
        self._after(session, pokes)
        if session.must_sync:
            self.durable(tail)
            if session.replicated:
                session.confirm(tail)
        return result

    def execute_many(self, jobs: Sequence[Job]) -> int:
        """Run several operations in one turn: one write, one index transaction. Each gets its own
        result or error. Does not sync: jobs with `must_sync` are durable once
        `durable(returned offset)` has returned.

        Raises what makes the whole turn fail; then none of the jobs was done.
        """
        with self._lock:
            try:
                _files.lock(self.fd, WRITE, True)
                session = self._begin()
                try:
                    for job in jobs:
                        session.must_sync = False
                        try:
                            job.result = job.operation(session, *job.args)
                        except Exception as error:  # noqa: BLE001  each job's own, told to it
                            job.error = error
                        job.must_sync = session.must_sync
                        if session.replicated:
                            job.puts = session.take_puts()
                    session.finish()
                except BaseException:
                    session.abort()
                    raise
                tail = self.page.words[TAIL]
                pokes = self._take_pokes(session) if self.page.words[WAITERS] else None
            finally:
                _files.unlock(self.fd, WRITE)
        self._after(session, pokes)
        return tail

    def _after(self, session: Session, pokes: list[tuple[bytes, list[int]]] | None) -> None:
        """What follows a turn, with the lock given back."""
        if pokes is not None:
            for kind, slots in pokes:
                self.waker.poke(slots, kind)
        last = self.page.words[LAST]
        if last != self._last_segment:
            # At once, so that space is used again as fast as it is used up.
            self._last_segment = last
            self._upkeep(busy=True)
            self._upkeep_soon()
        elif session.settled:
            self._upkeep_soon()

    def _begin(self) -> Session:
        if self.closed:
            raise ClosedError(f"{self.path} is closed; nothing was changed; open it again")
        words = self.page.words
        if words[FAILED] or self._failure:
            raise self._failed()
        self._check_place_if_moved(self._watch)
        if words[WRITING]:
            # Its holder died, or was interrupted, in the middle of a write.
            self.log.heal()
            words[SYNC_HIGH] = min(words[SYNC_HIGH], words[TAIL])
        mode = words[REPLICATION]
        return _session_maker()(self, mode) if mode else Session(self)

    def _take_pokes(self, session: Session) -> list[tuple[bytes, list[int]]]:
        pokes = []
        if session.ready:
            pokes.append((READY_BYTE, self.page.take_waiting(READY, session.ready)))
        if session.settled:
            pokes.append((SETTLED_BYTE, self.page.take_waiting(SETTLED, session.settled)))
        return pokes

    def catch_up(self, tx: Tx) -> None:
        """Apply everything written and not yet applied. The caller holds the write lock."""
        applied = tx.applied
        tail = self.page.words[TAIL]
        if not applied or applied < self.log.head_offset:
            if applied:
                # An old one: what it never saw was given back meanwhile.
                tx.clear()
            self.fold_all(tx)
        elif applied == self._written_from and tail == self._written_to:
            # All that is new is our own: no need to read it back.
            for offset, time_us, record in self._written:
                tx.apply(offset, time_us, record)
        elif applied < tail:
            last = _Last(tail)
            frames = self.log.frames(applied, tail, on_damage=self._damage_noter(tx))
            tx.apply_many(last.until_enough(frames))
            if last.end == tail:
                self.log.remember_last(tail, last.offset)

    def remember_written(
        self, start: int, time_us: int, appended: Sequence[tuple[int, Record]]
    ) -> None:
        """Keep a little of what this process wrote and the index does not have yet."""
        if len(appended) > _MOST_REMEMBERED:
            self._written_to = -1
            return
        if start != self._written_to or len(self._written) >= _MOST_REMEMBERED:
            self._written = []
            self._written_from = start
        self._written_to = self.page.words[TAIL]
        for offset, record in appended:
            whole = bytes(record[0]) if len(record) == 1 else b"".join(record)
            if len(whole) > _LARGEST_REMEMBERED:
                self._written_to = -1
                return
            self._written.append((offset, time_us, whole))

    def fold_all(self, tx: Tx) -> None:
        """Apply the whole log, beginning with what a checkpoint knows of the time before what is
        kept. Commits now and then: a transaction of LMDB holds only so many pages, and whoever is
        killed meanwhile leaves a part that is true.
        """
        head = self.log.head_offset
        tail = self.page.words[TAIL]
        checkpoint = self.log.checkpoint()
        if checkpoint and not tx.applied:
            try:
                known = _records.unpack(self.log.read(checkpoint))
            except (CorruptError, ValueError) as error:
                # Groups from before what is kept begin anew: messages come twice, none is lost.
                tx.note_damage(checkpoint, str(error))
            else:
                assert isinstance(known, _records.Checkpoint), "the log marks its checkpoints"
                tx.seed(known, head)
        noter = self._damage_noter(tx)
        start = max(tx.applied, head)
        while start < tail:
            frames = self.log.frames(start, tail, on_damage=noter)
            last = _Last(start + _FOLD_BYTES)
            tx.apply_many(last.until_enough(frames))
            if not last.end:
                break
            start = last.end
            if start < tail:
                tx.commit(start, self.log.checksum(last.offset), last.offset)
                self.index.write()

    def _report(self, recovery: Recovery) -> None:
        if recovery.torn_bytes:
            logger.warning(
                "%s: the log ended in the middle of a frame; %d bytes after offset %d were cut, "
                "every complete record is kept",
                self.path,
                recovery.torn_bytes,
                recovery.cut,
            )

    def _damage_noter(self, tx: Tx) -> Callable[[int, str], None]:
        def note(offset: int, reason: str) -> None:
            logger.warning(
                "%s: damage at offset %d: %s; it is set aside, the rest flows",
                self.path,
                offset,
                reason,
            )
            tx.note_damage(offset, reason)

        return note

    # -- durability ------------------------------------------------------------------------------

    def durable(self, until: int) -> None:
        """Return once everything below `until` is on stable storage. Shared by all who wait.

        Raises StoreFailedError. Holds no lock while it syncs; one sync answers everybody whose
        frames were written before it began.
        """
        words = self.page.words
        while True:
            if words[FAILED] or self._failure:
                raise self._failed()
            if words[COMMIT] >= until:
                return
            waiter = None
            leads = False
            try:
                with self._sync_lock:
                    if self._syncing:
                        waiter = threading.Lock()
                        waiter.acquire()
                        self._sync_waiters.append((until, waiter))
                    else:
                        # In this order: Ctrl-C in between must not leave a sync that nobody does.
                        leads = self._syncing = True
                if leads:
                    self._sync_once()
            finally:
                if leads:
                    self._end_sync()
            if waiter is not None:
                waiter.acquire()

    def _end_sync(self) -> None:
        """Answer those who are served, and let one of the others do the next sync."""
        commit = self.page.words[COMMIT]
        failed = self.page.words[FAILED] or self._failure
        with self._sync_lock:
            self._syncing = False
            waiting, self._sync_waiters = self._sync_waiters, []
            leader_found = False
            for until, waiter in waiting:
                if until <= commit or failed or not leader_found:
                    leader_found = leader_found or (until > commit and not failed)
                    waiter.release()
                else:
                    self._sync_waiters.append((until, waiter))

    def _sync_once(self) -> None:
        """fdatasync, then publish the commit point under the lock and wake who waited for it."""
        words = self.page.words
        target = words[TAIL]
        self._unsynced = 0
        self.sync_file()
        self._check_place_if_moved(self._sync_watch)
        pokes: list[int] = []
        with self._lock:
            try:
                _files.lock(self.fd, WRITE, True)
                if words[FAILED]:
                    raise self._failed()
                if words[COMMIT] < target:
                    words[COMMIT] = target
                    if words[WAITERS]:
                        pokes = self.page.take_waiting(READY, ALL)
                feeder = words[FEEDER_SLEEPS]
            finally:
                _files.unlock(self.fd, WRITE)
        if pokes:
            self.waker.poke(pokes, READY_BYTE)
        # Where whoever waits for the replica leads the round himself, nobody else is woken for it.
        if feeder and not (feeder == self.slot + 1 and words[REPLICATION] & SYNC_WANTED):
            words[FEEDER_SLEEPS] = 0
            self.waker.poke([FEED_PIPE], FEED_BYTE)

    def sync_file(self) -> None:
        """fdatasync, and nothing else. Raises StoreFailedError, and then every process stops."""
        try:
            self.log.sync()
        except OSError as error:
            raise self.fail(f"a sync failed: {error}") from error

    def flush(self) -> None:
        """Everything written so far is on stable storage when this returns."""
        self.durable(self.page.words[TAIL])

    def flush_later(self, interval_ms: float, messages: int, count: int) -> None:
        """Promise of `batch`: a sync after `interval_ms` or `messages`, whichever is first."""
        self._unsynced += count
        if self._unsynced >= messages:
            self._unsynced = 0
            self.timer.call_at(0.0, self._flush_quietly)
        elif not self._flush_due:
            self._flush_due = True
            self.timer.call_at(time.monotonic() + interval_ms / 1000, self._timed_flush)

    def _timed_flush(self) -> None:
        self._flush_due = False
        self._flush_quietly()

    def _flush_quietly(self) -> None:
        # The failure is in the shared page by now: every later call says it.
        with contextlib.suppress(StoreFailedError, ClosedError):
            if not self.closed:
                self.flush()

    # -- failure ------------------------------------------------------------------------------

    def fail(self, what: str) -> StoreFailedError:
        """Stop every process that has the file open; returns the error to raise."""
        self._failure = what
        self.page.words[FAILED] = 1
        self.waker.wake_all()
        logger.error("%s: %s", self.path, what)
        return self._failed()

    def _failed(self) -> StoreFailedError:
        what = self._failure or "a write or sync failed in another process"
        return StoreFailedError(
            f"{self.path}: {what}; everything confirmed before is safe, what was under way is in "
            "doubt; close the file in every process and open it again, then put again with the "
            "same id"
        )

    def _check_place(self) -> None:
        """Stop when the file or the scratch folder is not where it was opened."""
        try:
            found = os.stat(self.path)
            there = (found.st_dev, found.st_ino) == self._identity
        except OSError:
            there = False
        if not there:
            raise self.fail("the file was deleted, moved or replaced while open")
        if not self.page.is_in_place():
            raise self.fail("the scratch folder was deleted, moved or replaced while in use")

    def _check_place_if_moved(self, watch: select.poll | None) -> None:
        """The same when there is a reason to: the system says so, or can't."""
        if watch is None or watch.poll(0):
            self._check_place()
            if watch is not None:
                _files.read_all(self._watch_fd)

    # -- owners -------------------------------------------------------------------------------

    def dead_owners(self, everyone: bool) -> list[int]:
        """Slots whose owner has died. Asks the kernel about one owner in turn, or about all."""
        if self.page.words[OWNERS_HIGH] <= 1:
            return []  # only ever one, which is us
        slots = [slot for slot, _ in self.page.owners() if slot != self.slot]
        if not everyone and slots:
            self._next_probe = (self._next_probe + 1) % len(slots)
            slots = [slots[self._next_probe]]
        return [slot for slot in slots if not _files.is_locked(self.fd, OWNER + slot)]

    def bury(self, session: Session, slots: list[int]) -> None:
        """Take the tokens of the dead out of the page: their leases name nobody now, and every
        group looks through its leases once because `DEAD_SEQ` has changed.
        """
        for slot in slots:
            self.page.set_token(slot, 0)
        if slots:
            self.page.words[DEAD_SEQ] += 1
            session.ready = ALL

    def wait(self, waiter: Waiter, until_s: float | None) -> None:
        """Sleep until woken, `until_s` (time.monotonic), a death, or a promise left behind."""
        while True:
            now_s = time.monotonic()
            left_s = DEATH_CHECK_S if until_s is None else min(DEATH_CHECK_S, until_s - now_s)
            if waiter.wait(left_s) or self.closed or self.page.words[FAILED]:
                return
            if until_s is not None and time.monotonic() >= until_s:
                return
            if self.dead_owners(everyone=True):
                return
            words = self.page.words
            if words[SYNC_HIGH] > words[COMMIT]:
                # A quarter second without a sync: whoever wrote this may have died before it.
                self.durable(words[TAIL])
                return
            self._check_place()

    def settle_promises(self) -> bool:
        """Do the sync that frames still wait for, if any; True when there was one to do. Whoever
        wrote them may have died before it.
        """
        words = self.page.words
        if words[SYNC_HIGH] <= words[COMMIT]:
            return False
        self.durable(words[TAIL])
        return True

    def suspects_held(self) -> int:
        """Messages of this process that were in a crash before; one at a time is handed out."""
        if not self.suspects:
            return 0
        now_ns = _clock.monotonic_ns()
        return sum(1 for lease in self.suspects.values() if lease.deadline_ns > now_ns)

    def hold(self, lease: Any) -> None:
        """Note that this process has a lease. Called under the write lock."""
        self.held[lease.gid, lease.offset] = lease
        if lease.crash:
            self.suspects[lease.gid, lease.offset] = lease

    def let_go(self, key: tuple[int, int]) -> Any:
        """Note that it has it no more; returns it, None when it was not held."""
        if self.suspects:
            self.suspects.pop(key, None)
        return self.held.pop(key, None)

    def owner_records(self) -> list[_records.Record]:
        """What says who this owner is, to be written before its first lease."""
        if self._introduced:
            return []
        self._introduced = True
        return [_records.pack_owner(self.token, self.consumer)]

    def replica_lag(self) -> int | None:
        """Bytes that the replica is behind; None without one."""
        words = self.page.words
        if not words[REPLICATION] & WANTED:
            return None
        return max(0, words[TAIL] - words[REPLICA_AT])

    @property
    def replica_timeout(self) -> float:
        """How many seconds a put waits for the replica."""
        for options in reversed(self._adopted):
            if "replica_timeout" in options.given:
                return options.replica_timeout
        return float(DEFAULTS["replica_timeout"])

    def chose(self, name: str, *, environment: bool = True) -> bool:
        """Whether a handle of this process gave the option, or its environment does."""
        return any(
            name in options.given or (environment and name in options.environment)
            for options in self._adopted
        )

    @property
    def replicates(self) -> bool:
        """Whether what is promised anything is promised the replica."""
        return bool(self.page.words[REPLICATION] & SYNC_WANTED)

    def is_durable(self, until: int) -> bool:
        """Whether everything below is on stable storage, and on the replica if that is wanted."""
        words = self.page.words
        if words[COMMIT] < until:
            return False
        return not words[REPLICATION] & SYNC_WANTED or bool(words[REPLICATED] >= until)

    def on_replica(self, until: int, until_s: float) -> bool:
        """Wait until the replica has everything below; False when the time is over."""
        from ._replication import wait

        return wait(self, until, until_s)

    def take_back(self, until: int, puts: Sequence[int]) -> ReplicaUnavailableError | None:
        """Take back puts that the replica did not confirm; what to raise. None: it has them."""
        from ._replication import take_back

        return take_back(self, until, puts)

    def heal(self, start: int, end: int, replica: object = None) -> bool:
        """Put what the replica has in the place of what can't be read between two offsets; True
        when something can be read again.
        """
        from ._feeder import normal
        from ._restore import heal, replica_of

        chosen = self._adopted[-1] if self._adopted else None
        address = normal(replica) or replica_of(self.path, chosen)
        if address is None:
            return False
        healed = self.execute(lambda session: heal(session.log, address, start, end))
        if healed:
            self.sync_file()
        return bool(healed)

    def take_part(self, replication: Any) -> bool:
        """Keep this as the process's part in feeding the replica; False if it has one."""
        with self.making:
            if self.closed or self.replication is not None:
                return False
            self.replication = replication
            return True

    def _take_role(self, opened: Opened) -> None:
        """The file is a replica's copy, or its copy was promoted over it."""
        words = self.page.words
        if opened.role == FENCED:
            words[FENCED_BY] = opened.role_epoch
            words[REPLICATION] |= IS_FENCED
        else:
            words[REPLICATION] |= IS_COPY

    # -- reading -----------------------------------------------------------------------------------

    def now_us(self) -> int:
        """Queue time."""
        return _clock.boottime_us() + self.shift

    def put_and_time(self, location: int) -> tuple[bytes | memoryview, int]:
        """The bytes of a Put and the time it was put, from where it was put or carried to.

        Raises CorruptError, and LookupError when that segment is no longer kept.
        """
        record, time_us = self.log.read_with_time(location)
        if record[0] == _records.CARRY:
            carry = _records.unpack(record)
            assert isinstance(carry, _records.Carry)
            return carry.put, carry.time_us
        return record, time_us

    def result_bytes(self, location: int, gid: int) -> bytes:
        """The packed result that an ACK, or a CARRY of its message, holds."""
        record = _records.unpack(self.log.read(location))
        if isinstance(record, _records.Carry):
            return dict(record.results).get(gid, b"")
        assert isinstance(record, _records.Ack), "the index names the record of the result"
        return bytes(record.result)

    def first_offset(self) -> int:
        """The offset of the first message kept; 0 while nothing was ever given back."""
        if not self.page.words[HEAD]:
            return 0
        tail = self.page.words[TAIL]
        for frame in self.log.frames(self.log.head_offset, tail, on_damage=lambda *_: None):
            for offset, record in frame[5]:
                if record[0] == _records.PUT:
                    return offset
        return tail

    def verify(self) -> list[tuple[int, str]]:
        """Check all that is kept, and name what was set aside before; in order, each once."""
        found = dict(self.execute(lambda session: session.tx.damage()))
        found.update(self.log.verify())
        return sorted(found.items())

    # -- options of the file ---------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """What the file records of its options, as last changed by any process."""
        if self.options_seen != self.page.words[OPTIONS_SEQ]:
            self.execute(Session.options)
        return self.known_options

    def adopt(self, options: StoreOptions, consumer: str) -> None:
        """Take in a new handle's options: record those given for the file.

        Raises ValueError for arguments that contradict those of a handle that is open.
        """
        for other in self._adopted:
            names = options.conflicts(other)
            if names:
                raise ValueError(
                    f"{self.path} is open in this process with another {', '.join(names)}; nothing "
                    "was changed; give the same, or leave it out"
                )
        given: dict[str, Any] = {
            name: _recorded(getattr(options, name))
            for name in RECORDED_OPTIONS
            if name in options.given
        }
        if "replica" in given:
            # So that a backup, which is another store, does not take it for its own.
            given[REPLICA_OF] = self.header.store_id
        if given:
            self.change_options(given, SYNC)
        self._adopted.append(options)
        self.know_options(self.known_options)
        self.consumer = self.consumer or consumer
        self._configure_replica()

    def _configure_replica(self) -> None:
        if self.option("replica") or self.page.words[REPLICATION]:
            from ._replication import configure

            configure(self)

    def forsake(self, options: StoreOptions) -> None:
        """A handle that was adopted has closed."""
        with contextlib.suppress(ValueError):
            self._adopted.remove(options)
            self.know_options(self.known_options)

    def option(self, name: str) -> Any:
        """An option of the file as it holds for this process: argument (which was recorded),
        environment, what the file records, default; in that order.
        """
        if self.options_seen != self.page.words[OPTIONS_SEQ]:
            self.execute(Session.options)
        return self.effective[name]

    def know_options(self, recorded: dict[str, Any], seen: int | None = None) -> None:
        """Take in what the file records, and with it what holds here."""
        self.known_options = recorded
        if seen is not None:
            self.options_seen = seen
        chosen = self._adopted[-1] if self._adopted else None
        effective: dict[str, Any] = {}
        if recorded.get(REPLICA_OF, self.header.store_id) != self.header.store_id:
            recorded = {name: value for name, value in recorded.items() if name != "replica"}
        for name in RECORDED_OPTIONS:
            if chosen is not None and name in chosen.environment:
                effective[name] = getattr(chosen, name)
            else:
                value = recorded.get(name, DEFAULTS[name])
                effective[name] = None if value == _NO_LIMIT else value
        self.effective = effective

    def change_options(self, values: Mapping[str, Any], policy: int) -> None:
        """Record options of the file."""

        def change(session: Session) -> None:
            known = session.options()
            new = {name: value for name, value in values.items() if known.get(name) != value}
            if new:
                session.append([_records.pack_option(new)], policy)
                session.must_sync |= policy >= SYNC
                session.page.words[OPTIONS_SEQ] += 1

        self.execute(change)

    # -- upkeep ----------------------------------------------------------------------------------

    def _upkeep_soon(self) -> None:
        if not self._upkeep_due:
            self._upkeep_due = True
            self.timer.call_at(time.monotonic() + UPKEEP_S, self._upkeep)

    def _upkeep(self, *, busy: bool = False) -> None:
        from ._reclaim import maintain

        if not busy:
            self._upkeep_due = False
        # What it could not do now is done by the next call; a failure is in the shared page.
        with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError):
            wait_s = None if self.closed else maintain(self, busy=busy)
            if wait_s is not None and not self._upkeep_due:
                self._upkeep_due = True
                self.timer.call_at(time.monotonic() + wait_s, self._upkeep)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand leases back, flush, give everything back. Raises nothing after a failure."""
        if self.closed:
            return
        try:
            if self.io is not None:
                self.io.close()
            if not (self.page.words[FAILED] or self._failure):
                with contextlib.suppress(StoreFailedError, DiskFullError, FencedError):
                    self.execute(self._leave)
                    self.flush()
        finally:
            if self.replication is not None:
                self.replication.close()
            self.timer.close()
            self.renewals.close()
            self.waker.close()
            with self._lock:
                self.closed = True
                self._give_up()

    def hand_back(self, belongs: Callable[[Any], bool]) -> None:
        """Release, uncounted, what was leased by holders of which `belongs(holder)` is true, and
        flush. Raises nothing after a failure.
        """
        if self.closed or self.page.words[FAILED] or self._failure:
            return
        with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError):
            self.execute(self._release, belongs)
            self.flush()

    def _release(self, session: Session, belongs: Callable[[Any], bool]) -> None:
        leases = [lease for lease in self.held.values() if belongs(lease.holder)]
        # What ran out may be somebody else's by now: only the index knows.
        records = [
            (lease.release_record(),)
            for lease in leases
            if session.tx.is_leased_to(lease.gid, lease.offset, self.token)
        ]
        if records:
            session.append(records)
            session.ready = ALL
        for lease in leases:
            lease.over = True
            self.let_go((lease.gid, lease.offset))

    def _leave(self, session: Session) -> None:
        self._release(session, lambda holder: True)
        self.page.set_token(self.slot, 0)

    def _give_up(self) -> None:
        words = self.page.words
        # The conversion keeps the shared lock when it fails: then others are still there.
        last = _files.try_lock(self.fd, IN_USE, True)
        clean = last and not (words[FAILED] or self._failure)
        untouched = words[REPLICATION] & (IS_COPY | IS_FENCED)
        try:
            if clean and words[TAIL] != words[CLEAN_AT] and not untouched:
                clean = self._vouch()
            if self.replication is not None:
                self.replication.finish(last)
            self.index.close(sync=clean)
            if clean:
                with contextlib.suppress(OSError, DiskFullError):
                    write_clean_mark(os.path.join(self.directory, INDEX_NAME))
        finally:
            self._close_files()

    def _close_files(self) -> None:
        self.page.close()
        _files.close(self.fd)
        if self._watch_fd >= 0:
            self._watch = self._sync_watch = None
            _files.close(self._watch_fd)
            self._watch_fd = -1

    def _vouch(self) -> bool:
        """Append the frame that says: everything before me was synced."""
        words = self.page.words
        session = Session(self)
        try:
            session.append([_records.pack_clean()], flags=VOUCH)
            session.tx  # noqa: B018  applied here, so that the index is level when it closes
            session.finish()
            self.log.sync()
        except (OSError, LockedError):
            session.abort()
            return False
        words[COMMIT] = words[CLEAN_AT] = words[TAIL]
        return True

    def abandon(self) -> None:
        """In a forked child: close what was inherited. Nothing is unlocked, written or waited
        for; locks belong to the open file, which the parent still has.
        """
        self.forked = True
        self.closed = True
        if self.replication is not None:
            self.replication.abandon()
        self.waker.abandon()
        self.index.close(sync=False)
        self._close_files()
