"""The engine: one open file in one process. Log, index and owners as one durable state.

Role: run operations under the write lock, write what they append, make it durable, wake those who
wait for it. The one commit sentence, and the function that says each part of it:

    append (`Session.append`) -> write (`Session.finish`) -> sync, publish the commit point
    (`Durability._sync_once`) -> answer (`Engine.run` returns); applying to the index is done
    in the same session when the index is open, else by whoever opens it next (`Session.tx`).

Operations are run, under the lock and with the session of their turn, by one verb:

    run           in a turn of its own, as durable as it asks when this returns; where the disk is
                  full, space is freed and it is run again
    run_with      the same, of one argument, which costs less than to hand on several
    run_once      the same, with the space there is
    run_together  `run_with`, in one turn and with one sync for all threads that come meanwhile
    run_jobs      several in one turn, to each its own outcome; the caller has them synced

A turn that does nothing but end a lease is the same without a session: `Holding.end`.

Invariants:

* Lock order: the thread lock, then the write lock of the file, then LMDB's own (inside `Index`).
  The sync lock is never held together with them. No lock is held over a sync, but at the close.
* A session that fails leaves nothing: what it appended is discarded before it was written. One
  that is interrupted in the middle of a write heals the log before it gives the lock back. One
  whose process dies there leaves the *writing* word set; the next session (anybody's) reads the
  log again from the tail.
* After one failed write or sync nothing is promised any more until all have closed.

It must not know what the records mean, beyond handing them to the index.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from itertools import chain
from typing import Final, TypeVar, cast

from typing_extensions import TypeVarTuple, Unpack

from . import _clock, _files, _locks, _records
from ._damage import Damage
from ._durability import Durability
from ._file_options import FileOptions
from ._folding import Folding
from ._format import VOUCH
from ._holding import Holding
from ._opening import IN_USE, Opened
from ._scratch import INDEX_NAME, write_clean_mark
from ._session import ALL, MoreEnded, Session, begin, spread
from ._shared import (
    CLEAN_AT,
    FAILED,
    FOR_SETTLED,
    INDEX_SEQ,
    INDEX_SYNCED,
    INDEX_TIME,
    IS_COPY,
    IS_FENCED,
    REPLICATION,
    WAITERS,
)
from ._together import Together
from ._upkeep import MakingRoom, Upkeep
from ._waiting import ALONE_CHECK_S, Waiting
from ._wake import READY_BYTE
from ._with_replica import WithReplica
from .errors import (
    ClosedError,
    CorruptError,
    DiskFullError,
    StorageError,
)
from .wal import (
    COMMIT,
    HEAD,
    HEADER_HEALED,
    HEADER_REBUILT,
    READ_AGAIN,
    SEGMENT_LABELLED,
    TAIL,
    WRITING,
)

T = TypeVar("T")
What = TypeVar("What")
Args = TypeVarTuple("Args")
# What an opening found and made good, and nothing was lost by.
_HEALED: Final = frozenset((HEADER_HEALED, HEADER_REBUILT, SEGMENT_LABELLED))


@functools.cache
def _session_maker() -> Callable[[Engine, int], Session]:
    from ._replicated import session_of

    return session_of


def _without_making_room(
    session: Session, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]
) -> T:
    session.may_make_room = False
    return operation(session, *args)


def _tell_everybody(session: Session) -> None:
    """Have all who wait look again."""
    session.ready = session.settled = ALL


def _said_by(record: bytes, location: int, kind: type[T]) -> T:
    """What a record says. Raises CorruptError where these bytes are none of that kind."""
    try:
        said = _records.unpack(record)
    except _records.NoRecordError as error:
        raise CorruptError(location, str(error)) from None
    assert isinstance(said, kind), "its first byte says so"
    return said


def _another(location: int, wanted: str) -> LookupError:
    return LookupError(f"offset {location} holds no {wanted}: repair has written over it")


def _unless_more(session: Session, operation: Callable[[Session, What], T], what: What) -> object:
    """What the operation returns; the class MoreEnded where it is to be run anew."""
    try:
        return operation(session, what)
    except MoreEnded:
        return MoreEnded


class Engine(
    Upkeep, Waiting, Holding, WithReplica, Folding, Damage, Together, Durability, FileOptions
):
    """See the module. Made and ended by `_registry`, shared by all handles of a process. Any thread
    may call any method.
    """

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._begin(opened)

    def _begin(self, opened: Opened) -> None:
        """Take what was opened, and do with it what is to be done before anybody works."""
        words = self.page.words
        self.index.share(words[INDEX_SEQ : INDEX_SEQ + 1], words[INDEX_TIME : INDEX_TIME + 2])
        try:
            opened.taken = True
            self._watch_place()
            self._begin_work(opened)
        except BaseException:
            # Nobody will have this engine to close it.
            self.closed = True
            self._stop_threads()
            self.index.close(sync=False)
            self._close_files()
            raise

    def _begin_work(self, opened: Opened) -> None:
        """What an opening has left to the engine: telling, the index anew, and healing."""
        if opened.role:
            self._take_role(opened)
        if opened.recovery is not None:
            # Not slot headers: power may fail between two of them.
            healed = opened.recovery.healed
            self.healed = [one for one in healed if one[1] in _HEALED]
            self._report(opened.recovery)
        if opened.rebuild:
            self.run(lambda session: session.tx)
        # Before anything can be given back.
        self.heal_met()
        self.log.is_at_rest = False
        if self.log.unread:
            self.page.share_unread(self.log.unread)
        if not self.page.words[REPLICATION] & (IS_COPY | IS_FENCED):
            if self.look_every_s < ALONE_CHECK_S:
                self.run(_tell_everybody)  # whoever waits is no longer alone
            self._look_for_space(self.page.words[TAIL])

    # -- sessions ------------------------------------------------------------------------------

    def run(self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """`run_with`, of `operation(session, *args)`."""
        return self.run_with(spread, (operation, args))

    def run_with(self, operation: Callable[[Session, What], T], what: What) -> T:
        """Run `operation(session, what)` under the write lock and make it as durable as it asks.

        Blocks for the lock, and for a sync when the operation set `must_sync`. Raises what the
        operation raises, then nothing was written; StoreFailedError when the disk refuses. Where
        the disk is full, settled space is freed before anything is refused.
        """
        # (One argument, because to hand on several costs a fortieth of a turn each time.)
        session = None
        has_more = False
        words = self.page.words
        try:
            with self._lock:
                if self.closed:
                    self._check_open()
                try:
                    self._lock_file()
                    if words[FAILED] or words[WRITING] or words[REPLICATION] or self._has_moved(0):
                        session = self._begin_turn()
                    else:
                        session = begin(Session, self)
                    if self.is_late:
                        self.publish(session)
                    try:
                        result = operation(session, what)
                    except MoreEnded:
                        has_more = True
                    session.finish()
                    waiters = words[WAITERS]
                    if session.woken or (waiters and (session.ready or waiters >= FOR_SETTLED)):
                        self._take_pokes(session)
                except BaseException as error:
                    self.index.tx.end_txn()
                    if session is not None:
                        try:
                            session.abort(error)
                        except BaseException:  # Ctrl-C, again: it must not leave a frame pending
                            session.abort(error)
                            raise
                    if isinstance(error, OSError):
                        raise self.fail(f"writing failed: {error}") from error
                    raise
                finally:
                    # Also when the lock was not reached: releasing what is not held does nothing.
                    self._unlock_file()
        except BaseException as error:
            if session is not None and session.woken:
                # For what others put. They are marked no more, whatever became of this turn.
                self.wake(session.woken, READY_BYTE)
            if session is not None and session.begun:
                self.give_back_unseen([*chain.from_iterable(session.begun)])
            if not (
                isinstance(error, DiskFullError) and session is not None and session.may_make_room
            ):
                raise
            return self._run_in_room_made(operation, what)
        if has_more:
            return self._again(session, operation, what)
        try:
            if session.tail >= self._look_at or not session.is_plain:
                result = self._after(session, result)
            if not self._upkeep_due and session.settled:
                self._upkeep_soon()
            if session.must_sync:
                if session.shares_sync:
                    self.await_anothers(session.tail)
                self.durable(session.tail)
                if session.replicated:
                    session.confirm(session.tail, session.take_puts())
        except BaseException:
            if session.begun:
                self.give_back_unseen([*chain.from_iterable(session.begun)])
            raise
        return result

    def _run_in_room_made(self, operation: Callable[[Session, What], T], what: What) -> T:
        """`run_with`, after a turn that found no room on the disk."""
        making = MakingRoom(self)
        while True:
            making.step()
            try:
                return self.run_once(operation, what)
            except DiskFullError:
                if making.is_over:
                    raise

    def _again(self, session: Session, operation: Callable[[Session, What], T], what: What) -> T:
        """`run_with`, after a turn that judged only a part of what had ended by itself."""
        self._after(session, None)
        while True:
            result = self.run(_unless_more, operation, what)
            if result is not MoreEnded:
                return cast("T", result)

    def run_once(self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """`run`, once, with the space there is."""
        return self.run(_without_making_room, operation, *args)

    def _begin_turn(self) -> Session:
        """What is not plain about a turn, before it."""
        words = self.page.words
        if words[FAILED]:
            raise self._failed()
        if self._has_moved(0):
            self._look_at_place()
        if words[WRITING]:
            # Its holder died, or was interrupted, in the middle of a write.
            self.log.heal()
            self.page.forget_promises()
        mode = words[REPLICATION]
        return _session_maker()(self, mode) if mode else begin(Session, self)

    def _after(self, session: Session, result: T) -> T:
        """What is not plain about a turn, after it, with the lock given back. Its result."""
        if session.is_long:
            self.log.begin_sync()
        for kind, slots in session.pokes:
            self.wake(slots, kind)
        if session.tail >= self._look_at:
            self._look_for_space(session.tail)
        if self.index.room.is_short:
            self._feed_index()
        return result if session.answer is None else cast("T", session.answer())

    def _check_open(self) -> None:
        # Before the lock: the descriptor may be somebody else's by now.
        if self.closed:
            raise ClosedError(f"{self.path} is closed; nothing was changed; open it again")

    # -- reading -----------------------------------------------------------------------------------

    def now_us(self) -> int:
        """Queue time."""
        return _clock.boottime_us() + self.shift

    def put_and_time(self, location: int) -> tuple[bytes | memoryview, int]:
        """The bytes of a Put and the time it was put, from where it was put or carried to.

        Raises CorruptError, and LookupError when that segment is no longer kept, or the message was
        damaged and repair has put another record there.
        """
        record, time_us = self.log.read_with_time(location)
        kind = record[0]
        if kind == _records.CARRY:
            carry = _said_by(record, location, _records.Carry)
            return carry.put, carry.time_us
        if kind != _records.PUT:
            raise _another(location, "message")
        return record, time_us

    def put_at(self, location: int) -> _records.Put:
        """What a Put says, from where it was put or carried to. Raises as `put_and_time` does."""
        record, _ = self.put_and_time(location)
        try:
            return _records.unpack_put(record)
        except _records.NoRecordError as error:
            raise CorruptError(location, str(error)) from None

    def result_bytes(self, location: int, gid: int) -> bytes:
        """The packed result that an ACK, or a CARRY of its message, holds. Raises as `put_and_time`
        does.
        """
        record = self.log.read(location)
        if record[0] == _records.CARRY:
            return dict(_said_by(record, location, _records.Carry).results).get(gid, b"")
        if record[0] != _records.ACK:
            raise _another(location, "result")
        return bytes(_said_by(record, location, _records.Ack).result)

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

    def verify(self, seen: Callable[[int, int], None] | None = None) -> list[tuple[int, str]]:
        """Check all that is kept, and name what was set aside before, or was found damaged and made
        good when the file was opened; in order, each once: not a message beside the place in which
        it stands.
        """
        noted = self.run(lambda session: session.tx.damage())
        found = dict(self.healed)
        found.update(self.log.verify(seen))
        look = self.log.at_rest()
        for offset, reason in noted:
            if offset not in found and look.bad_place(offset) not in found:
                found[offset] = reason
        return sorted(found.items())

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand leases back, flush, give everything back. Raises what nobody was told of yet, a
        failure that is met here first, when all is closed; nothing after one that was told.
        """
        if self.closed:
            return
        untold: StorageError | None = None
        try:
            if self.io is not None:
                self.io.close()
            untold = self._take_leave()
        finally:
            if self.replication is not None:
                self.replication.close()
            self._stop_threads()
            with self._lock:
                self.closed = True
                self._give_up()
        if untold is not None:
            raise untold

    def _take_leave(self) -> StorageError | None:
        """Do what is to be done before the end; what of it failed and is to be told."""
        words = self.page.words
        if words[FAILED] or self._failure:
            return self._failed() if self.failed_quietly else None
        # What upkeep could not do is done by whoever comes next.
        with contextlib.suppress(StorageError):
            self._last_upkeep()
        return self.leave_with(self._leave)

    def _stop_threads(self) -> None:
        self.timer.close()
        self.renewals.close()
        self.waker.close()

    def _leave(self, session: Session) -> None:
        self._release(session, [*self.held])
        self.page.set_token(self.slot, 0)
        session.ready = ALL  # what this process was woken for, and did not take, is the others'

    def _give_up(self) -> None:
        words = self.page.words
        # The conversion keeps the shared lock when it fails: then others are still there.
        last = _locks.try_lock(self.fd, IN_USE, True)
        clean = last and not (words[FAILED] or self._failure)
        untouched = words[REPLICATION] & (IS_COPY | IS_FENCED)
        try:
            if clean and words[TAIL] != words[CLEAN_AT] and not untouched:
                clean = self._vouch()
            if self.replication is not None:
                self.replication.finish(last)
            # As it was found is as it was synced, if nobody has committed anything since.
            changed = words[INDEX_SEQ] or not words[INDEX_SYNCED]
            clean = clean and not words[READ_AGAIN]
            if not self.index.close(sync=clean and bool(changed)):
                # The kernel takes its pages for clean by now, though the disk lacks them.
                clean = False
                words[READ_AGAIN] = 1
            if clean:
                with contextlib.suppress(OSError, DiskFullError):
                    write_clean_mark(os.path.join(self.directory, INDEX_NAME))
        finally:
            self._close_files()

    def _close_files(self) -> None:
        if self.last_looker is not None:
            self.last_looker.leave(self.forked)
        self.page.close()
        _files.close(self.fd)
        self._watch_no_more()

    def _vouch(self) -> bool:
        """Append the frame that says: everything before me was synced."""
        words = self.page.words
        session = begin(Session, self)
        try:
            session.append([_records.pack_clean()], flags=VOUCH)
            session.tx  # noqa: B018  applied here, so that the index is level when it closes
            session.must_index = session.is_special = True
            session.finish()
            self.sync_file()
            self._record_end(words[TAIL])
        except StorageError as error:
            session.abort(error)
            return False
        words[COMMIT] = words[CLEAN_AT] = words[TAIL]
        return True

    def _record_end(self, end: int) -> None:
        """Say in the file how far it is on stable storage. Without a sync: it may come to the disk
        late, but never before what it says is there.
        """
        try:
            self.log.record_end(end)
        except OSError as error:
            raise self.fail(f"writing failed: {error}") from error

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
