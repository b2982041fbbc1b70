"""Making durable: one sync for all who wait, and what a sync that failed means for everybody.

Role: the part of the engine that calls fdatasync, publishes the commit point and answers. No lock
is held over a sync; one sync answers everybody whose frames were written before it began. What
nobody else waits for, an ack, is published by the next turn, which has the lock anyhow. After
one failed write or sync nothing is promised any more until all have closed, and the same goes for
a file or scratch folder that is not where it was opened, or that somebody else has cut.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from . import _disk, _files
from ._opening import Opened
from ._options import StoreOptions
from ._part import Part
from ._scratch import PAGE_NAME
from ._shared import (
    DISK_FAILED,
    FAILED,
    FEED_PIPE,
    FEEDER_SLEEPS,
    FILE_CUT,
    FILE_MOVED,
    REPLICATION,
    SCRATCH_MOVED,
    SYNC_HIGH,
    SYNC_WANTED,
    UNSEEN,
)
from ._wake import FEED_BYTE, READY_BYTE, SYNCED_BYTE, waiter_for
from ._watch import asker_of, watch_names
from .errors import ClosedError, StorageError, StoreFailedError
from .wal import COMMIT, TAIL, WRITING

if TYPE_CHECKING:
    from ._engine import Engine
    from ._readonly import ReadonlyEngine
    from ._session import Session

logger = logging.getLogger("weclaw_embedded")

# How long a frame waits for its sync before one who was only passing by does it.
_LEFT_S: Final = 0.05
# How long what settles waits for another process's sync before it does its own.
_SHARED_S: Final = 0.002
# When none has come in that time, so much of the log is written before one is waited for again.
_SHARE_PAUSE_BYTES: Final = 4 << 10


_TAKEN: Final = {
    FILE_CUT: "the file was cut or written over while open, by something else than this library",
    FILE_MOVED: "the file was deleted, moved or replaced while open",
    SCRATCH_MOVED: "the scratch folder was deleted, moved or replaced while in use",
}


_HAS_PROC: Final = sys.platform == "linux"
# Where what is open has no name that leads to it.
_NAMELESS: Final = (
    "it has no name any more, so that what was confirmed is there only as long as a process has it "
    "open"
)
_REPLACED: Final = (
    "another file has its name now, and what was confirmed is in the one that is open, which has "
    "another name, or may lose it"
)


def failure_of(why: int) -> str:
    """What has happened to the file, as far as the processes with it open tell each other."""
    return _TAKEN.get(why, "a write or sync failed in another process")


class Durability(Part):
    """What `Engine` inherits to sync, and to stop when that fails."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._sync_lock = threading.Lock()  # guards the next two
        self._syncing = False
        self._sync_waiters: list[tuple[int, threading.Lock]] = []
        self.puts_to = 0  # where the last frame of it with puts that were promised a sync ends
        self._share_from = 0  # nobody is waited for before the log's tail is there
        self._unsynced = 0  # messages put with `batch`
        self._flush_to = 0  # so far a sync of them was begun
        self._settle_again_s = 0.0  # before that it is seen to already: see `settle_left`
        self.failed_quietly = False  # in a thread of our own, and nobody was told yet
        self.last_looker: ReadonlyEngine | None = None  # see `last_look`
        self._identity: tuple[int, ...] = ()  # of the file
        self._watch_fd = -1

    def _watch_place(self) -> None:
        """Have the system say when the file, or the scratch folder, may have been moved, or the
        file cut.
        """
        self._identity = _disk.identity(self.fd)[:2]
        self._watch_fd = watch_names(
            [self.path, self.directory, os.path.join(self.directory, PAGE_NAME)],
            opened=self.path,
        )
        self._has_moved = asker_of(self._watch_fd)

    def _watch_no_more(self) -> None:
        if self._watch_fd >= 0:
            self._has_moved = asker_of(-1)
            _files.close(self._watch_fd)
            self._watch_fd = -1

    def durable(self, until: int) -> None:
        """Return once everything below `until` is on stable storage. Shared by all who wait.

        Raises StoreFailedError. Holds no lock while it syncs; one sync answers everybody whose
        frames were written before it began.
        """
        words = self.page.words
        while True:
            if words[FAILED] or self._failure:
                raise self._failed()
            if words[COMMIT] >= until or self.synced >= until:
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
                if waiter is None:
                    self._sync_once()
                else:
                    waiter.acquire()
            except BaseException:
                if waiter is not None:
                    self._wait_no_more((until, waiter))
                raise
            finally:
                if leads:
                    # Before any call, since Ctrl-C is noticed at calls: it must not leave a sync
                    # that nobody does. Who leads the next one meanwhile is left alone.
                    self._syncing = False
                    try:
                        self._end_sync()
                    except BaseException:
                        self._end_sync()
                        raise

    def _wait_no_more(self, who: tuple[int, threading.Lock]) -> None:
        """Ctrl-C while waiting: the next sync must not be left to one who is gone."""
        with self._sync_lock:
            if who in self._sync_waiters:
                self._sync_waiters.remove(who)
            elif self._sync_waiters and not self._syncing:
                self._sync_waiters.pop(0)[1].release()

    def _end_sync(self) -> None:
        """Answer those who are served, and let one of the others do the next sync. What Ctrl-C
        breaks off can be done again.
        """
        with self._sync_lock:
            if not self._sync_waiters:
                return
            commit = max(self.page.words[COMMIT], self.synced)
            failed = self.page.words[FAILED] or self._failure
            left: list[tuple[int, threading.Lock]] = []
            leader_found = False
            for until, waiter in self._sync_waiters:
                if until <= commit or failed or not leader_found:
                    leader_found = leader_found or (until > commit and not failed)
                    if waiter.locked():
                        waiter.release()
                else:
                    left.append((until, waiter))
            self._sync_waiters = left

    def _sync_once(self) -> None:
        """fdatasync, then publish the commit point under the lock and wake who waited for it; or
        leave that to the next turn if others wait for nothing of it.
        """
        words = self.page.words
        n = self._unsynced  # before the tail is read: all that are counted stand below it
        target = words[TAIL]
        self.sync_file()
        self._unsynced -= n
        if self.replication is not None:
            self.replication.send(target)
        pokes: Sequence[int] = ()
        shared: Sequence[int] = ()
        with self._lock:
            if self.closed:
                # The descriptors may be somebody else's by now. Whoever closed has synced, too.
                if max(words[COMMIT], self.synced) < target:
                    raise self._closed_meanwhile()
                return
            if self.puts_to <= words[COMMIT] and not words[REPLICATION]:
                if words[FAILED]:
                    raise self._failed()
                # In this order: a turn that takes the mark away finds what it stands for.
                self.synced = target
                self.is_late = True
                return
            try:
                self._lock_file()
                if words[FAILED]:
                    raise self._failed()
                before = words[COMMIT]
                if before < target:
                    words[COMMIT] = target
                    shared = self.page.take_sharing(before)
                    if words[UNSEEN]:
                        pokes = self.page.take_seen()
                feeder = words[FEEDER_SLEEPS]
            finally:
                self._unlock_file()
        if shared:
            self.wake(shared, SYNCED_BYTE)
        if pokes:
            self.wake(pokes, READY_BYTE)
        # Where whoever waits for the replica leads the round himself, nobody else is woken for it.
        if feeder and not (feeder == self.slot + 1 and words[REPLICATION] & SYNC_WANTED):
            words[FEEDER_SLEEPS] = 0
            self.waker.poke([FEED_PIPE], FEED_BYTE)

    def publish(self, session: Session) -> None:
        """Raise the commit point to what this process has synced and not published, in a turn that
        then wakes who waits for that. The caller holds the write lock.
        """
        self.is_late = False
        words = self.page.words
        before = words[COMMIT]
        if before >= self.synced:
            return
        words[COMMIT] = self.synced
        if words[UNSEEN]:
            session.woken = self.page.take_seen()
        shared = self.page.take_sharing(before)
        if shared:
            session.pokes = [(SYNCED_BYTE, shared)]
            session.is_plain = False

    def share_sync(self, until: int) -> bool:
        """Whether to wait for another process that is at a sync, and by all appearances will soon
        be at the next one: two at once take about twice as long. The caller holds the write lock.
        """
        words = self.page.words
        if (
            self.puts_to > words[COMMIT]  # it is this process that is at it
            or until < self._share_from
            or words[REPLICATION]
            or not self.waker.is_open
        ):
            return False
        self.page.share_sync(self.slot, until)
        return True

    def await_anothers(self, until: int) -> None:
        """Wait a moment for what `share_sync` has counted on. Whether it has come is for `durable`
        to see.
        """
        words = self.page.words
        waker = self.waker
        waiter = waiter_for(SYNCED_BYTE)
        left_s = _SHARED_S
        until_s = time.monotonic() + left_s
        try:
            with self._lock:
                if self.closed:
                    return
                waker.add(waiter)
            # The poke may have come before; or it is one for what was given up earlier.
            while words[COMMIT] < until:
                if not waker.wait(waiter, left_s):
                    self._share_from = words[TAIL] + _SHARE_PAUSE_BYTES
                    return
                waiter.woken = False
                left_s = until_s - time.monotonic()
        finally:
            waker.discard(waiter)

    def sync_file(self) -> None:
        """fdatasync, and nothing else. Raises StoreFailedError, and then every process stops."""
        try:
            self.log.sync()
        except OSError as error:
            if self.closed and error.errno == errno.EBADF:
                raise self._closed_meanwhile() from None
            raise self.fail(f"a sync failed: {error}") from error

    def _closed_meanwhile(self) -> ClosedError:
        return ClosedError(
            f"{self.path} was closed while this call waited for its sync; what it wrote is in "
            "doubt; open it again, and put again with the same id"
        )

    def flush(self) -> None:
        """Everything written so far is on stable storage when this returns."""
        with self._lock:
            may_have_moved = not self.closed and self._has_moved(0)
        if may_have_moved:
            # As each turn does before it writes; this may come without one.
            self.look_at_place()
        self.durable(self.page.words[TAIL])

    def settle_left(self) -> None:
        """Have frames that still wait for a sync made durable soon, if nobody does, and wait for
        nothing. For who looks once and goes: whoever wrote them may have died before the sync.
        """
        words = self.page.words
        until = words[SYNC_HIGH]
        if until > words[COMMIT] and time.monotonic() >= self._settle_again_s:
            due_s = time.monotonic() + _LEFT_S
            self.timer.call_at(due_s, functools.partial(self._settle, until))
            self._settle_again_s = due_s

    def _settle(self, until: int) -> None:
        if not self.closed and self.page.words[COMMIT] < until:
            self._flush_quietly()

    def settle_promises(self) -> bool:
        """Do the sync that frames still wait for, if any; True when there was one to do. Whoever
        wrote them may have died before it.
        """
        words = self.page.words
        if words[SYNC_HIGH] <= words[COMMIT]:
            return False
        self.durable(words[TAIL])
        return True

    def flush_later(self, options: StoreOptions, n: int) -> int:
        """Promise of `batch`: what was written, `n` messages among it, is forced to disk after
        `flush_interval_ms` or `flush_messages` of the handle's options, whichever is first.

        It is begun at half as many messages, so that nobody has to wait where the disk keeps up.
        Where it does not, the offset up to which whoever has put the last of `flush_messages` waits
        for it (`durable`) is returned; else 0.
        """
        self._unsynced += n
        until = 0
        if n and 2 * self._unsynced >= options.flush_messages:
            words = self.page.words
            is_full = self._unsynced >= options.flush_messages
            if self._flush_to <= max(words[COMMIT], self.synced):  # none is under way
                self._flush_to = words[TAIL]
                if not is_full:
                    self.timer.call_at(0.0, self._flush_quietly)
            if is_full:
                until = self._flush_to
        # In any case: the one that is under way may have begun before this was written.
        if not self.flush_is_due:
            try:
                # First: whoever is adopted behind it takes it back.
                self.flush_is_due = True
                # By the shortest of all, since those who find it due count on it.
                others = [one.flush_interval_ms for one in self._adopted if one.flush == "batch"]
                wait_s = min([options.flush_interval_ms, *others]) / 1000
                self.timer.call_by(time.monotonic() + wait_s, self._timed_flush)
            except BaseException:  # Ctrl-C: the next one is to see to it
                self.flush_is_due = False
                raise
        return until

    def _timed_flush(self) -> None:
        self.flush_is_due = False
        self._flush_quietly()

    def _flush_quietly(self) -> None:
        is_known = self.page.words[FAILED] or self._failure
        try:
            if not self.closed:
                self.flush()
        except ClosedError:
            pass
        except StoreFailedError:
            # The failure is in the shared page by now: every later call says it, the last of all.
            self.failed_quietly = not is_known

    # -- failure ------------------------------------------------------------------------------

    def fail(self, what: str, why: int = DISK_FAILED) -> StoreFailedError:
        """Stop every process that has the file open; returns the error to raise. The log says it
        once, however often it is met.
        """
        is_said, self._failure = self._failure == what, what
        self.page.words[FAILED] = self.page.words[FAILED] or why
        self.waker.wake_all()
        if not is_said:
            lost = self.is_lost()
            logger.error("%s: %s", self.path, f"{what}; {lost}; {self._rescue()}" if lost else what)
        return self._failed()

    def tell_log(self, error: StorageError) -> None:
        """What failed where nobody is who could be told: a line in the log, if `fail` has not said
        it there.
        """
        if not (isinstance(error, StoreFailedError) and self._failure):
            logger.error("%s", error)

    def is_lost(self) -> str:
        """In words, that closing what is open may be to lose it: it was deleted, or another file
        stands at its name. "" while neither is so; one that was only moved has a name.
        """
        try:
            found = os.fstat(self.log.fd)
        except OSError:
            return ""  # closed meanwhile
        if not found.st_nlink:
            return _NAMELESS
        try:
            there = os.stat(self.path)
        except OSError:
            return ""
        return "" if os.path.samestat(found, there) else _REPLACED

    def last_look(self, error: StoreFailedError) -> Engine:
        """Who looks at the file once this engine has stopped because the file was deleted, or
        another one stands at its name: what is open may be all there is of it, and is to be read
        and saved. Raises `error` where that is not so. It is closed with the engine.
        """
        from ._readonly import look_at_open

        with self._lock:
            if self.closed or not self.is_lost():
                raise error
            if self.last_looker is None:
                self.last_looker = look_at_open(self.whole)
            return self.last_looker

    def _rescue(self) -> str:
        by_hand = f", or copy /proc/{os.getpid()}/fd/{self.log.fd}" if _HAS_PROC else ""
        return (
            "keep it open, save it with the backup() of its store (of a queue q: "
            "q.store.backup(path)), which still works"
            f"{by_hand}; then close it in every process and open what was saved"
        )

    def _failed(self) -> StoreFailedError:
        self.failed_quietly = False
        what = self._failure or failure_of(self.page.words[FAILED])
        if lost := self.is_lost():
            return StoreFailedError(
                f"{self.path}: {what}; {lost}, what was under way is in doubt; {self._rescue()}"
            )
        if self.page.words[FAILED] == FILE_CUT:
            return StoreFailedError(
                f"{self.path}: {what}; what was confirmed before may be lost with what stood in "
                "it, and what was under way is in doubt; nothing more is written; close it in "
                "every process, and restore it from its replica or a backup, or open it again to "
                "see what is left"
            )
        safe = "everything confirmed before is safe"
        if any(options.flush != "sync" for options in self._adopted):
            safe = (
                "everything synced before is safe; what was written since, by flush='batch' or "
                "'os', is there as long as the power is"
            )
        return StoreFailedError(
            f"{self.path}: {what}; {safe}, what was under way is in "
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
            raise self.fail(_TAKEN[FILE_MOVED], FILE_MOVED)
        if not self.page.is_in_place():
            raise self.fail(_TAKEN[SCRATCH_MOVED], SCRATCH_MOVED)

    def check_content(self) -> None:
        """Stop when somebody else has cut the file or written over it. Under the write lock."""
        if self.log.is_cut() or (not self.page.words[WRITING] and self.log.holds_another()):
            raise self.fail(_TAKEN[FILE_CUT], FILE_CUT)

    def check_size(self) -> None:
        """The same as far as the size shows it, for who does not have the lock."""
        with self._lock:
            may_be_cut = not self.closed and self.log.is_cut()
        if may_be_cut:  # or space was given back while it was looked
            self.run(lambda _: self.check_content())

    def _look_at_place(self) -> None:
        """Look at both where there is a reason to: the system has said so, or can't. Under the
        write lock.
        """
        self._check_place()
        if self._watch_fd < 0:
            return  # it is done at each turn
        _files.read_all(self._watch_fd)
        # Again, for what came between the two.
        self._check_place()
        self.check_content()

    def look_at_place(self) -> None:
        """The same for who does not have the lock."""
        with self._lock:
            if self.closed:
                return
            try:
                self._lock_file()
                self._look_at_place()
            finally:
                self._unlock_file()
