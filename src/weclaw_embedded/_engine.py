"""The engine: one open file in one process. Log, index and owners as one durable state.

Role: run operations under the write lock, write what they append, make it durable, wake those who
wait for it. The one commit sentence, and the function that says each part of it:

    append (`Session.append`) -> write (`Session.finish`) -> sync, publish the commit point
    (`Durability._sync_once`) -> answer (`Engine.execute` returns); applying to the index is done
    in the same session when the index is open, else by whoever opens it next (`Session.tx`).

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
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from . import _clock, _files, _records
from ._durability import Durability
from ._file_options import FileOptions
from ._folding import Folding
from ._format import FENCED, VOUCH
from ._index import Index
from ._opening import IN_USE, OWNER, WRITE, Opened
from ._options import DEFAULTS, StoreOptions
from ._scratch import INDEX_NAME, PAGE_NAME, write_clean_mark
from ._session import ALL, Appended, Job, Session
from ._shared import (
    CLEAN_AT,
    DEAD_SEQ,
    FAILED,
    FENCED_BY,
    FOR_SETTLED,
    INDEX_SEQ,
    INDEX_SYNCED,
    IS_COPY,
    IS_FENCED,
    LEASES_SEQ,
    OWNERS_SEQ,
    READY,
    REPLICA_AT,
    REPLICA_HIGH,
    REPLICATED,
    REPLICATION,
    SETTLED,
    SYNC_HIGH,
    SYNC_WANTED,
    WAITERS,
    WANTED,
    SharedPage,
)
from ._together import Together
from ._wake import READY_BYTE, SETTLED_BYTE, Timer, Waiter, Waker
from ._watch import asker_of, watch_names
from .errors import (
    ClosedError,
    DiskFullError,
    FencedError,
    ReplicaUnavailableError,
    StoreFailedError,
)
from .wal import (
    COMMIT,
    HEAD,
    HEADER_HEALED,
    LAST,
    RESERVE,
    SPARES,
    TAIL,
    WRITING,
    Log,
)

T = TypeVar("T")
Args = TypeVarTuple("Args")

logger = logging.getLogger("weclaw_embedded")

# How long a waiter sleeps before it looks whether the owner of a lease has died.
DEATH_CHECK_S: Final = 0.4
# The same while no other process has the file open, whose death could matter.
ALONE_CHECK_S: Final = 2.0
# How long after something was settled space is looked for that can be given back.
UPKEEP_S: Final = 0.1
# How long a frame waits for its sync before one who was only passing by does it.
_LEFT_S: Final = 0.05
# How often, while a segment is filled, it is seen to that a full disk could be worked off.
_LOOKS: Final = 32
# How long a replica that could not be asked to heal something is left alone.
HEAL_PAUSE_S: Final = 30.0
_FEW_HELD: Final = 1024  # leases
_LAST_ROUNDS: Final = 64  # of upkeep when the file is closed, a few segments each


def _keep_reserve(session: Session) -> None:
    from ._reclaim import keep_reserve

    keep_reserve(session)


def _prepare_spare(session: Session) -> None:
    _keep_reserve(session)
    session.log.prepare_spare()


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


class Engine(Folding, Together, Durability, FileOptions):
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
        self.index.share(self.page.words[INDEX_SEQ : INDEX_SEQ + 1])
        self.slot = opened.slot
        self.token = opened.token
        self.recovery = opened.recovery
        # What was damaged and could be made good. (Not slot headers: power may fail between two.)
        healed = [] if opened.recovery is None else opened.recovery.healed
        self.healed = [found for found in healed if found[1] == HEADER_HEALED]
        self.shift = self.page.shift
        self.handles = 0
        self.forked = False
        self.closed = False
        self.waker = Waker(self.directory, self.slot, self.fd)
        self.timer = Timer("weclaw-timer")
        # Apart from the timer, whose thread may be busy with a slow disk or a user's callback.
        self.renewals = Timer("weclaw-renewals")
        self.io: Any = None  # what serves event loops, made by `_io` when first needed
        self.held: set[Any] = set()  # the leases of this process
        self.suspects: set[Any] = set()  # those of them that were in a crash
        self._most_held = _FEW_HELD  # with more it is looked which of them have run out
        self.last_ids = (-1, "")  # how the ids we make are written in a segment, the last one
        self.topics: dict[str, int] = {}  # whose TOPIC record is known to be in the log
        self._lock = threading.Lock()
        self._lock_file, self._unlock_file = _files.bound_lock(self.fd, WRITE)
        self._lead_lock = threading.Lock()
        self._led = False
        self._waiting: deque[Job] = deque()
        self._sync_lock = threading.Lock()
        self._syncing = False
        self._sync_waiters: list[tuple[int, threading.Lock]] = []
        self._failure: str | None = None
        self.synced = self.puts_to = 0
        self.is_late = False
        self._identity = _files.identity(self.fd)[:2]
        self._watch_fd = watch_names(
            [self.path, self.directory, os.path.join(self.directory, PAGE_NAME)]
        )
        self._has_moved = asker_of(self._watch_fd)
        self.flush_is_due = False
        self._unsynced = 0
        # What this process wrote last, from one offset to another, and is not in the index yet.
        self._written: list[Appended] = []
        self._written_from = self._written_to = -1
        self.folded_to = self._tail_seen = 0
        self._next_probe = 0
        self._owners_seen = -1
        self._others: list[tuple[int, bytes]] = []  # of the owners seen then, but for our own
        self._last_segment = self.page.words[LAST]
        self._upkeep_due = False
        self._upkept_at = -1  # the last segment at the last upkeep that was due
        self._upkeepers: set[int] = set()  # threads that are at it
        self._room_lock = threading.Lock()
        self._room_maker = 0  # the thread that has it
        # From this offset on it is looked whether there is space enough.
        self._look_at = self.page.words[TAIL] + self.log.segment_bytes // _LOOKS
        self.pins: list[int] = []  # the first segment that each backup under way reads
        # What groups in the way of reclaim had done, and when that last changed (queue time).
        self.progress: tuple[list[tuple[int, int, int]], int] = ([], 0)
        self.known_options: dict[str, Any] = {}
        self.effective: dict[str, Any] = {}
        self.options_seen = -1
        self.leases_seen = self.page.words[LEASES_SEQ]
        self.consumer = ""
        self.introduced = False  # it is written who this owner is
        self._adopted: list[StoreOptions] = []
        self.replication: Any = None  # this process's part in feeding the replica, if there is one
        self.making = threading.Lock()  # held to make it
        self._settle_again_s = 0.0  # before that it is seen to already: see `settle_left`
        self._heal_again_s = 0.0  # before that (time.monotonic) the replica is not asked for bytes
        try:
            opened.taken = True
            self._begin_work(opened, replica)
        except BaseException:
            # Nobody will have this engine to close it.
            self.closed = True
            self._stop_threads()
            self.index.close(sync=False)
            self._close_files()
            raise

    def _begin_work(self, opened: Opened, replica: object) -> None:
        """What an opening has left to the engine: healing, telling, and the index anew."""
        if opened.role:
            self._take_role(opened)
        if self.recovery is not None:
            if self.recovery.damaged:
                self.heal(self.log.head_offset, self.page.words[TAIL], replica)
            self._report(self.recovery)
        if opened.rebuild:
            self.execute(lambda session: session.tx)
        if not self.page.words[REPLICATION] & (IS_COPY | IS_FENCED):
            if self.look_every_s < ALONE_CHECK_S:
                self.execute(_tell_everybody)  # whoever waits is no longer alone
            self._look_for_space(self.page.words[TAIL])

    # -- sessions ------------------------------------------------------------------------------

    def execute(self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Run `operation(session, …)` under the write lock and make it as durable as it asks.

        Blocks for the lock, and for a sync when the operation set `must_sync`. Raises what the
        operation raises, then nothing was written. Where the disk is full, settled space is freed
        before anything is refused.
        """
        session = None
        words = self.page.words
        try:
            with self._lock:
                if self.closed:
                    self._check_open()
                try:
                    self._lock_file()
                    if words[FAILED] or words[WRITING] or words[REPLICATION] or self._has_moved(0):
                        session = self._begin()
                    else:
                        session = Session(self)
                    if self.is_late:
                        session.woken = self.publish()
                    result = operation(session, *args)
                    session.finish()
                    waiters = words[WAITERS]
                    if session.woken or (waiters and (session.ready or waiters >= FOR_SETTLED)):
                        self._take_pokes(session)
                except BaseException as error:
                    if session is not None:
                        session.abort(error)
                    raise
                finally:
                    # Also when the lock was not reached: releasing what is not held does nothing.
                    self._unlock_file()
        except DiskFullError:
            if session is None or not session.may_make_room or not self.make_room():
                raise
            return self.turn(operation, *args)
        if session.tail >= self._look_at or not session.is_plain:
            self._after(session)
        if session.settled and not self._upkeep_due:
            self._upkeep_soon()
        if session.must_sync:
            self.durable(session.tail)
            if session.replicated:
                session.confirm(session.tail, session.take_puts())
        return result

    def turn(self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """`execute`, once, with the space there is."""
        return self.execute(_without_making_room, operation, *args)

    def _begin(self) -> Session:
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
        return _session_maker()(self, mode) if mode else Session(self)

    def _after(self, session: Session) -> None:
        """What is not plain about a turn, after it, with the lock given back."""
        for kind, slots in session.pokes:
            self.wake(slots, kind)
        if session.tail >= self._look_at:
            self._look_for_space(session.tail)
        if self.index.room.is_short:
            self._feed_index()

    def _look_for_space(self, tail: int) -> None:
        """See to it that there is space for what comes: now and then, and when a segment begins, be
        it another process that began it.
        """
        words = self.page.words
        last = words[LAST]
        log = self.log
        makes_room = self._room_maker == threading.get_ident()
        if not makes_room:
            self._look_at = min((last + 1) << log.bits, tail + log.segment_bytes // _LOOKS)
        if last != self._last_segment:
            # At once, so that space is used again as fast as it is used up.
            self._last_segment = last
            self._upkeep(busy=True)
            self._upkeep_soon()
        if makes_room:
            return  # the rest would wait for it; it is the next turn's
        if not words[SPARES]:
            self._keep_spare()
        self._look_after_reserve()

    def _look_after_reserve(self) -> None:
        from ._reclaim import is_short

        words = self.page.words
        if words[RESERVE] or is_short(self.log):
            with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError, FencedError):
                self.turn(_keep_reserve)

    def _feed_index(self) -> None:
        """Give the index space that the log has kept back: the reserve is for both."""
        # A failure is in the shared page by now; a full disk leaves it as it is.
        with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError, FencedError):
            self.index.room.is_short = False
            if self.turn(lambda session: session.log.release()):
                self.index.look_for_room()

    def _keep_spare(self) -> None:
        """Have a spare slot again; where there is no room for one, free what is settled while there
        is still a little to do it with.
        """
        # A failure is in the shared page by now; without room it is tried again further on.
        with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError, FencedError):
            try:
                self.turn(_prepare_spare)
            except DiskFullError:
                if self.make_room():
                    self.turn(_prepare_spare)

    def make_room(self) -> bool:
        """Free settled segments that only retention holds. False when nothing is free by now."""
        from ._reclaim import make_room

        with self._room_lock:
            self._room_maker = threading.get_ident()
            try:
                return make_room(self)
            finally:
                self._room_maker = 0

    def _check_open(self) -> None:
        # Before the lock: the descriptor may be somebody else's by now.
        if self.closed:
            raise ClosedError(f"{self.path} is closed; nothing was changed; open it again")

    def _take_pokes(self, session: Session) -> None:
        """Note whom to wake when the lock is given back."""
        pokes: list[tuple[bytes, Sequence[int]]] = []
        if session.woken:
            pokes.append((READY_BYTE, session.woken))
        if session.ready:
            pokes.append((READY_BYTE, self.page.take_waiting(READY, session.ready)))
        if session.settled:
            pokes.append((SETTLED_BYTE, self.page.take_waiting(SETTLED, session.settled)))
        session.pokes = pokes
        session.is_plain = False

    def wake(self, slots: Sequence[int], kind: bytes) -> None:
        """Wake the processes in these slots. If one of them has died, all others that wait: what
        it was to be woken for is theirs now.
        """
        if not self.waker.poke(slots, kind):
            # What was done before stays done, also if the file fails just now.
            with contextlib.suppress(StoreFailedError, ClosedError, FencedError, DiskFullError):
                self.turn(lambda session: self.bury(session, self.dead_owners(everyone=True)))

    # -- owners -------------------------------------------------------------------------------

    def dead_owners(self, everyone: bool) -> list[int]:
        """Slots whose owner has died. Asks the kernel about one owner in turn, or about all."""
        others = self._other_owners()
        if not everyone and len(others) > 1:
            self._next_probe = probe = (self._next_probe + 1) % len(others)
            others = others[probe : probe + 1]
        dead = _files.unlocked(self.fd, others)
        return [start - OWNER for start in dead] if dead else dead

    def _other_owners(self) -> list[tuple[int, bytes]]:
        """What to ask of the locks of the other owners."""
        seq = self.page.words[OWNERS_SEQ]
        if seq != self._owners_seen:
            others = self.page.others(self.slot)
            self._owners_seen = seq
            self._others = [_files.question(OWNER + slot) for slot in others]
        return self._others

    def bury(self, session: Session, slots: list[int]) -> None:
        """Take the tokens of the dead out of the page: their leases name nobody now, and every
        group looks through its leases once because `DEAD_SEQ` has changed.
        """
        for slot in slots:
            self.page.set_token(slot, 0)
        if slots:
            self.page.words[DEAD_SEQ] += 1
            session.ready = ALL

    def stop_waiting(self) -> None:
        """Somebody here leaves who waited, without having looked once more: what he may have been
        woken for is told to the others.
        """

        def leave(session: Session) -> None:
            self.unmark()
            session.ready = ALL

        # Who is told that the file failed or is closed needs no telling.
        with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError):
            self.execute(leave)

    def unmark(self) -> None:
        """Have this process not woken for messages while nobody in it waits for any: another one
        would sleep on. Called under the write lock.
        """
        if self.page.waits(self.slot, READY) and not self.waker.has_any(READY_BYTE):
            self.page.wait_no_more(self.slot, READY)

    def wait(self, waiter: Waiter, until_s: float | None) -> None:
        """Sleep until woken, `until_s` (time.monotonic), a death, or a promise left behind.

        The caller looks again then. One who is interrupted does not: that is told to the others.
        """
        try:
            self._sleep(waiter, until_s)
            self.waker.discard(waiter)
        except BaseException:
            self.waker.discard(waiter)
            self.stop_waiting()
            raise

    def _sleep(self, waiter: Waiter, until_s: float | None) -> None:
        tail = self.page.words[TAIL]
        while True:
            now_s = time.monotonic()
            left_s = self.look_every_s
            if until_s is not None:
                left_s = min(left_s, until_s - now_s)
            if self.waker.wait(waiter, left_s) or self.closed or self.page.words[FAILED]:
                return
            if until_s is not None and time.monotonic() >= until_s:
                return
            if self.dead_owners(everyone=True):
                return
            words = self.page.words
            if words[TAIL] != tail:
                # Somebody else was woken for that. He may be stopped, and his lease may run out.
                return
            if words[SYNC_HIGH] > words[COMMIT]:
                # So long without a sync: whoever wrote this may have died before it.
                self.durable(words[TAIL])
                return
            self._check_place()

    @property
    def look_every_s(self) -> float:
        """How long whoever waits sleeps before he looks for what nobody tells."""
        if self._other_owners():
            return DEATH_CHECK_S
        return max(DEATH_CHECK_S, ALONE_CHECK_S)

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

    def suspects_held(self) -> int:
        """Messages of this process that were in a crash before; one at a time is handed out."""
        if not self.suspects:
            return 0
        now_ns = _clock.monotonic_ns()
        return sum(1 for lease in self.suspects if lease.deadline_ns > now_ns)

    def hold(self, leases: Sequence[Any]) -> None:
        """Note that this process has these leases. Called under the write lock."""
        held = self.held
        held.update(leases)
        if len(held) > self._most_held:
            # Some may have run out and been judged by others, who do not tell: nobody settles them.
            now_ns = _clock.monotonic_ns()
            held.difference_update([lease for lease in held if lease.deadline_ns <= now_ns])
            self._most_held = max(_FEW_HELD, 2 * len(held))

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
        """What says who this owner is, to be written before its first lease."""
        self.introduced = True
        return _records.pack_owner(self.token, self.consumer)

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
        if words[COMMIT] < until and self.synced < until:
            return False
        return not words[REPLICATION] & SYNC_WANTED or bool(words[REPLICATED] >= until)

    def on_replica(self, until: int, until_s: float) -> bool:
        """Wait until the replica has everything below; False when the time is over."""
        from ._replicated import wait

        return wait(self, until, until_s)

    def take_back(self, until: int, puts: Sequence[int]) -> ReplicaUnavailableError | None:
        """Take back puts that the replica did not confirm; what to raise. None: it has them."""
        from ._replicated import take_back

        return take_back(self, until, puts)

    def _configure_replica(self) -> None:
        words = self.page.words
        if self.option("replica") or words[REPLICATION] or words[REPLICA_HIGH]:
            from ._replicated import configure

            configure(self)

    def heal(self, start: int, end: int, replica: object = None, *, insist: bool = False) -> bool:
        """Put what the replica has in the place of what can't be read between two offsets; True
        when something can be read again. Blocks while the replica is asked, and holds no lock then.

        One that can't be asked is not asked again for a while, except if `insist`: then that raises
        StorageError.
        """
        from ._feeder import normal
        from ._healing import UnreachableError, heal, patience_of, replica_of

        chosen = self._adopted[-1] if self._adopted else None
        address = normal(replica) or replica_of(self.path, chosen)
        if address is None or (time.monotonic() < self._heal_again_s and not insist):
            return False
        try:
            healed = heal(self, address, start, end, patience_of(self.replica_timeout))
        except UnreachableError as error:
            if insist:
                raise
            self._heal_again_s = time.monotonic() + HEAL_PAUSE_S
            logger.warning("%s: damage is not healed: %s", self.path, error)
            return False
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

    def verify(self, seen: Callable[[int, int], None] | None = None) -> list[tuple[int, str]]:
        """Check all that is kept, and name what was set aside before, or was found damaged and made
        good when the file was opened; in order, each once.
        """
        found = dict(self.healed)
        found.update(self.execute(lambda session: session.tx.damage()))
        found.update(self.log.verify(seen))
        return sorted(found.items())

    # -- upkeep ----------------------------------------------------------------------------------

    def _upkeep_soon(self) -> None:
        if not self._upkeep_due:
            self._upkeep_due = True
            self.timer.call_at(time.monotonic() + UPKEEP_S, self._upkeep)

    def _upkeep(self, *, busy: bool = False) -> None:
        from ._reclaim import maintain

        me = threading.get_ident()
        if me in self._upkeepers:
            return  # in a turn of the upkeep itself, which goes on: not one inside the other
        last = self.page.words[LAST]
        calm = not busy and last == self._upkept_at
        if not busy:
            self._upkeep_due = False
            self._upkept_at = last
        # What it could not do now is done by the next call; a failure is in the shared page.
        with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError, FencedError):
            self._upkeepers.add(me)
            try:
                wait_s = None if self.closed else maintain(self, busy=busy, calm=calm)
            finally:
                self._upkeepers.discard(me)
            if wait_s is not None and not self._upkeep_due:
                self._upkeep_due = True
                self.timer.call_at(time.monotonic() + wait_s, self._upkeep)
        if not (busy or calm or self.closed):
            self._upkeep_soon()  # to give back what is kept while segments begin

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
                    self._last_upkeep()
                    self.execute(self._leave)
                    self.flush()
        finally:
            if self.replication is not None:
                self.replication.close()
            self._stop_threads()
            with self._lock:
                self.closed = True
                self._give_up()

    def _stop_threads(self) -> None:
        self.timer.close()
        self.renewals.close()
        self.waker.close()

    def _last_upkeep(self) -> None:
        """What a timer would have given back soon: there will be no timer."""
        from ._reclaim import maintain

        for _ in range(_LAST_ROUNDS):
            wait_s = maintain(self)
            if wait_s is None or wait_s > UPKEEP_S:
                return

    def hand_back(self, belongs: Callable[[Any], bool]) -> None:
        """Release, uncounted, what was leased by holders of which `belongs(holder)` is true, and
        flush. Raises nothing after a failure, nor when the file was fenced.
        """
        if self.closed or self.page.words[FAILED] or self._failure:
            return
        with contextlib.suppress(StoreFailedError, ClosedError, DiskFullError, FencedError):
            self.execute(self._release, belongs)
            self.flush()

    def _release(self, session: Session, belongs: Callable[[Any], bool]) -> None:
        leases = [lease for lease in self.held if belongs(lease.holder)]
        # The last lease of each message; the ones before ran out.
        last = {
            (lease.gid, lease.offset): lease
            for lease in sorted(leases, key=lambda lease: lease.delivery)
        }
        # What ran out may be somebody else's by now: only the index knows.
        records = [
            (lease.release_record(),)
            for lease in last.values()
            if session.tx.is_leased_to(lease.gid, lease.offset, self.token)
        ]
        if records:
            session.append(records)
            session.ready = ALL
        self.let_go(leases)

    def _leave(self, session: Session) -> None:
        self._release(session, lambda holder: True)
        self.page.set_token(self.slot, 0)
        session.ready = ALL  # what this process was woken for, and did not take, is the others'

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
            # As it was found is as it was synced, if nobody has committed anything since.
            changed = words[INDEX_SEQ] or not words[INDEX_SYNCED]
            self.index.close(sync=clean and bool(changed))
            if clean:
                with contextlib.suppress(OSError, DiskFullError):
                    write_clean_mark(os.path.join(self.directory, INDEX_NAME))
        finally:
            self._close_files()

    def _close_files(self) -> None:
        self.page.close()
        _files.close(self.fd)
        if self._watch_fd >= 0:
            self._has_moved = asker_of(-1)
            _files.close(self._watch_fd)
            self._watch_fd = -1

    def _vouch(self) -> bool:
        """Append the frame that says: everything before me was synced."""
        words = self.page.words
        session = Session(self)
        try:
            session.append([_records.pack_clean()], flags=VOUCH)
            session.tx  # noqa: B018  applied here, so that the index is level when it closes
            session.must_index = session.is_special = True
            session.finish()
            self.sync_file()
        except (StoreFailedError, DiskFullError) as error:
            session.abort(error)
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
