"""The leases that this process has: noted as they begin, ended, let go, handed back at last.

Role: the part of the engine that knows which messages are in this process's hands, so that settling
needs no look-up, a close hands back what is held, and what was in a crash is handed out alone.

Invariant: changed only under the write lock. A lease that others took away is noticed by the word
that they change, before it is believed again.

It must not know what a holder does with a message.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import _clock, _records
from ._opening import Opened
from ._part import Part
from ._session import ALL, SYNC, Session
from ._shared import (
    FAILED,
    FOR_SETTLED,
    LEASES_SEQ,
    REPLICATION,
    SYNC_HIGH,
    WAITERS,
)
from .errors import ClosedError, DiskFullError, FencedError, StorageError, StoreFailedError
from .wal import COMMIT, READ_AGAIN, TAIL, WRITING

_FEW_HELD: Final = 1024  # leases


class Holding(Part):
    """What `Engine` inherits to know the leases of its process."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self.held: set[Any] = set()  # the leases of this process
        self.suspects: set[Any] = set()  # those of them that were in a crash
        self.most_held = 0  # with more it is looked which of them have run out
        self.leases_seen = self.page.words[LEASES_SEQ]
        self.introduced_in = -1  # the segment in which it is written who this owner is

    def end(self, lease: Any, record: bytes, policy: int, waits: bool = True) -> int:
        """A turn that only ends a lease by one record: what `run` makes of `_settling.end`, without
        the session, in which there would be nothing: that is a third of what the turn costs, and
        half of all turns are such. Returns the log's tail behind it. -1 where the turn is not as
        plain as that, and nothing was done: `run` is to do it, or to say why it can't be done.

        Blocks as `run` does, for a sync only if it `waits`. Raises StoreFailedError.
        """
        words = self.page.words
        log = self.log
        start = -1  # where the log ends, once all is well
        shares = False  # another process is at a sync, and may do the next, too
        with self._lock:
            if self.closed or self.is_late:
                return -1
            try:
                self._lock_file()
                if (
                    (words[FAILED] or words[WRITING] or words[REPLICATION] or self._has_moved(0))
                    or words[LEASES_SEQ] != self.leases_seen
                    or words[WAITERS] >= FOR_SETTLED
                    or (lease.over or lease.unblocks)
                    or _clock.monotonic_ns() >= lease.deadline_ns
                ):
                    return -1
                now_us = _clock.boottime_us() + self.shift
                start = words[TAIL]
                # Before the write: Ctrl-C after it must not leave what is over in our hands.
                lease.over = True
                self.held.discard(lease)
                told = (log.append_one(record, policy, now_us), now_us, (record,))
                tail = log.write()
                if start == self._written_to and tail <= self._written_until:
                    self._written.append(told)
                    self._written_to = tail
                else:
                    self.remember_written(start, tail, [told])
                if policy >= SYNC and waits and words[SYNC_HIGH] > words[COMMIT]:
                    shares = self.share_sync(tail)
            except BaseException as error:
                if start >= 0:
                    try:
                        self._not_ended(lease, start)
                    except BaseException:  # Ctrl-C, again: it must not leave a frame pending
                        self._not_ended(lease, start)
                        raise
                if isinstance(error, DiskFullError):
                    return -1  # there may be room once it is made
                if isinstance(error, OSError):
                    raise self.fail(f"writing failed: {error}") from error
                raise
            finally:
                # Also when the lock was not reached: releasing what is not held does nothing.
                self._unlock_file()
        if tail >= self._look_at:
            self._look_for_space(tail)
        if not self._upkeep_due:
            self._upkeep_soon()
        if policy >= SYNC and waits:
            if shares:
                self.await_anothers(tail)
            self.durable(tail)
        return tail

    def _not_ended(self, lease: Any, start: int) -> None:
        """`end` has failed, or was interrupted: if nothing of it is in the log, which ended at
        `start`, the lease goes on. Under the write lock; may be done again.
        """
        self.log.discard()
        self._written_to = -1
        if self.page.words[TAIL] == start and not self.page.words[WRITING]:
            lease.over = False
            self.held.add(lease)

    def suspects_held(self) -> int:
        """Messages of this process that were in a crash before; one at a time is handed out."""
        if not self.suspects:
            return 0
        now_ns = _clock.monotonic_ns()
        return sum(1 for lease in self.suspects if lease.deadline_ns > now_ns)

    def forget_lapsed(self) -> None:
        """Look which of its leases have run out: others may have judged them, who do not tell, and
        nobody settles them. Called under the write lock, when there are more than `most_held`.
        """
        held = self.held
        now_ns = _clock.monotonic_ns()
        held.difference_update([lease for lease in held if lease.deadline_ns <= now_ns])
        self.most_held = max(_FEW_HELD, 2 * len(held))

    def let_go(self, leases: Sequence[Any]) -> None:
        """Note that it has these no more: they are over."""
        for lease in leases:
            lease.over = True
        self.held.difference_update(leases)
        if self.suspects:
            self.suspects.difference_update(leases)

    def lose(self, leases: Sequence[Any]) -> None:
        """Note that it has these no more, though none of its holders ended them."""
        for lease in leases:
            lease.lost = True
        self.let_go(leases)

    def forget_taken(self, session: Session) -> None:
        """Let go of what was taken away by another process: its group was dropped, say."""
        tx = session.tx
        self.lose(
            [
                lease
                for lease in self.held
                if not tx.is_leased_to(lease.gid, lease.offset, self.token)
            ]
        )
        self.leases_seen = self.page.words[LEASES_SEQ]

    def owner_record(self) -> _records.Record:
        """What says who this owner is, to be written before its first lease, and again where it
        was given back: see `introduced`.
        """
        return _records.pack_owner(self.token, self.consumer)

    def introduced(self, segment: int) -> None:
        """Note the segment in which that is written by now."""
        self.introduced_in = segment

    def judge_late(self, belongs: Callable[[Any], bool]) -> None:
        """Before a close: have counted what ran out by holders of which `belongs(holder)` is true,
        and nobody noticed. Handed back it would burn no retry, so that what overruns its lease in
        one short-lived process after the other would never be dead.
        """
        if self.closed or self.forked or self.page.words[FAILED] or self._failure:
            return
        now_ns = _clock.monotonic_ns()
        holders = {one.holder for one in [*self.held] if one.deadline_ns <= now_ns}
        for holder in filter(belongs, holders):
            try:
                self.run(holder.judge)
            except StoreFailedError:
                self.failed_quietly = True  # the end of the close tells it
            except (StorageError, ClosedError):
                pass  # met again by the hand-back, which tells what is to be told

    def hand_back(self, belongs: Callable[[Any], bool]) -> None:
        """Release, uncounted, what was leased by holders of which `belongs(holder)` is true, and
        flush. Raises what fails here first, nothing after a failure, nor when the file was fenced.
        """
        if self.closed or self.page.words[FAILED] or self._failure:
            return
        untold = self.leave_with(lambda session: self._release(session, self._held_by(belongs)))
        if untold is not None:
            raise untold

    def leave_with(self, release: Callable[[Session], object]) -> StorageError | None:
        """Hand back and flush, each whatever becomes of the other; what failed that is to be told:
        no full disk, which had no room for it, nor a fenced file, and nothing that was told before.
        """
        is_read_told = self.page.words[READ_AGAIN]
        untold: StorageError | None = None
        for step in (functools.partial(self.run, release), self.flush):
            try:
                step()
            except (ClosedError, DiskFullError, FencedError):
                pass
            except StorageError as error:
                if not is_read_told or isinstance(error, StoreFailedError):
                    untold = untold or error
        return untold

    def _held_by(self, belongs: Callable[[Any], bool]) -> list[Any]:
        return [lease for lease in self.held if belongs(lease.holder)]

    def give_back_unseen(self, leases: Sequence[Any]) -> None:
        """The call that leased these was interrupted behind its write, so that nobody has seen
        them: ready again, as if they had not been delivered.
        """
        unseen = [lease for lease in leases if not lease.over]
        if unseen:
            # What fails here is met again by the next call; they are handed back at the close.
            with contextlib.suppress(StorageError, ClosedError):
                self.run(lambda session: self._release(session, unseen, undo=True))

    def _release(self, session: Session, leases: Sequence[Any], undo: bool = False) -> None:
        # The last lease of each message; the ones before ran out.
        last = {
            (lease.gid, lease.offset): lease
            for lease in sorted(leases, key=lambda lease: lease.delivery)
        }
        # What ran out may be somebody else's by now: only the index knows.
        ours = [
            lease
            for lease in last.values()
            if session.tx.is_leased_to(lease.gid, lease.offset, self.token)
        ]
        if ours:
            session.append([(lease.release_record(undo),) for lease in ours])
            session.ready = ALL
        for lease in ours:
            lease.handed_back = not undo
        self.lose(leases)
