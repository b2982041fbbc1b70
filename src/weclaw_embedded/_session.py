"""One turn under the write lock: what an operation sees, appends and asks for.

    append (`Session.append`) -> write (`Session.finish`); the sync, the commit point and the answer
    follow in `Engine.run`. Applying to the index is done in the same session when the index is
    open, else by whoever opens it next (`Session.tx`).

A session that fails leaves nothing: what it appended is discarded before it was written. It must
not know what the records mean, beyond handing them to the index.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, TypeVar

from . import _clock
from ._format import BATCH as BATCH
from ._format import OS as OS
from ._format import REPLICA as REPLICA
from ._format import SYNC as SYNC
from ._index import IndexFullError, Tx
from ._shared import OPTIONS_SEQ, SYNC_HIGH
from .errors import DiskFullError, Full
from .wal import COMMIT, TAIL, WRITING

if TYPE_CHECKING:
    from ._engine import Engine
    from ._shared import SharedPage
    from .wal import Log

T = TypeVar("T")
S = TypeVar("S", bound="Session")

logger = logging.getLogger("weclaw_embedded")

POLICIES: Final = {"os": OS, "batch": BATCH, "sync": SYNC}
ALL: Final = (1 << 64) - 1

# From here on it is worth a call of the system to have the disk begin before the sync.
_LONG_BYTES: Final = 8 << 10

Record = Sequence[bytes | memoryview]
Appended = tuple[int, int, Record]  # offset, time, record


class MoreEnded(Exception):
    """So much has ended by itself that the turn is over before all of it is judged. What was judged
    stays, and the operation is run anew: others have the lock in between.
    """


class Several:
    """The records of one frame, told one by one only if the index learns them from here: what
    `put_many` puts is nearly always folded later, from the log.
    """

    def __init__(self, offsets: Sequence[int], time_us: int, records: Sequence[Record]) -> None:
        self._offsets = offsets
        self._time_us = time_us
        self._records = records

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[Appended]:
        return zip(self._offsets, repeat(self._time_us), self._records, strict=False)


class Session:
    """One turn under the write lock, made by `begin`. Operations get it as their first argument."""

    # One is made for each turn. What every turn looks at has a place of its own, which `begin`
    # sets: to find the default of what was not set in the class takes four times as long.
    __slots__ = (
        "__dict__",
        "_appended",
        "_tx",
        "ended",
        "engine",
        "is_plain",
        "is_special",
        "log",
        "must_sync",
        "now_us",
        "page",
        "put_to",
        "ready",
        "settled",
        "start",
        "tail",
        "woken",
    )
    engine: Engine
    log: Log
    page: SharedPage
    now_us: int  # queue time
    start: int  # where the log ends
    tail: int  # the same; once the turn is finished, with what was appended
    ready: int  # topics whose getters may find something now
    put_to: int  # topics whose getters may when the puts are visible
    woken: Sequence[int]  # slots of those of them who may now
    settled: int  # topics whose putters, joiners and result waiters may
    must_sync: bool
    is_plain: bool  # nothing but what each turn does is to be done after it
    is_special: bool  # at its end it is looked for `must_index` and `imagined`, and for steps
    ended: tuple[Any, ...]  # leases that this turn ends: only so if it is written
    _tx: Tx | None
    _appended: list[Appended] | Several | None
    # The rest is rarely another than here.
    may_write = True  # else it can only look: what it does to the index is dropped
    sync_from = SYNC  # what is promised this or more is waited for
    replicated = False  # and for the replica too
    put_n = 0  # how many getters of each group are to be woken for what is put
    pokes: Sequence[tuple[bytes, Sequence[int]]] = ()  # kinds and slots of all who are woken
    shares_sync = False  # another process is at one, and may do the next, too
    may_make_room = True  # where the disk is full
    is_long = False  # the disk is to begin with it at once; then not `is_plain`
    # Makes the rest of the operation's result, while the disk works; then not `is_plain`.
    answer: Callable[[], Any] | None = None
    must_index = False  # what the index learned must be in LMDB, not in memory alone
    imagined = False  # what is done to the index is dropped; see `imagine`
    begun: tuple[Sequence[Any], ...] = ()  # leases this turn begins, as `ended`
    _steps: tuple[tuple[Callable[[], None], bool], ...] = ()  # see `when_written`
    _sync_from = 0

    @property
    def tx(self) -> Tx:
        """The index, with everything in the log up to this moment applied."""
        return self._tx or self._open()

    def _open(self) -> Tx:
        tx = self._tx = self.engine.index.write(True)
        try:
            self.engine.catch_up(tx)
        except BaseException:
            # It knows a part of what is new, and there may be others in this turn who look.
            tx.abort()
            self._tx = None
            raise
        if self._appended:
            tx.apply(self._appended)
        return tx

    def visible(self) -> int:
        """Puts below this offset may be delivered, those of this turn with them."""
        return self.page.visible(self.log.pending_tail if self._appended else self.start)

    def append(
        self,
        records: Sequence[Record],
        policy: int = OS,
        puts: bool = False,
        flags: int = 0,
        apply: bool = True,
    ) -> list[int]:
        """Append one frame; returns the records' offsets. Raises DiskFullError, then nothing of it
        is left. `puts`: messages are among them, so that the space kept for a full disk to be
        worked off is not used for it. `apply`: have the open index learn it; else the caller does.
        """
        now_us = self.now_us
        offsets = self.log.append(records, policy, now_us, flags, not puts)
        if puts and policy >= SYNC and not self._sync_from:
            self._sync_from = offsets[0]
        fresh: Several | list[Appended]
        if len(offsets) == 1:
            fresh = [(offsets[0], now_us, records[0])]
        else:
            fresh = Several(offsets, now_us, records)
        if self._appended:
            self._rows().extend(fresh)
        else:
            self._appended = fresh
        if apply and self._tx is not None:
            self._tx.apply(fresh)  # at once: the next look must see it
        return offsets

    def append_one(self, record: bytes, policy: int = OS, apply: bool = True) -> None:
        """`append` one record that puts nothing, as what takes or settles nearly always is."""
        now_us = self.now_us
        told = (self.log.append_one(record, policy, now_us), now_us, (record,))
        if self._appended is None:
            self._appended = [told]
        else:
            self._rows().append(told)
        if apply and self._tx is not None:
            self._tx.apply((told,))  # at once: the next look must see it

    def _rows(self) -> list[Appended]:
        """What was appended, in a list that more can be added to."""
        rows = self._appended
        if not isinstance(rows, list):
            rows = self._appended = [*rows] if rows else []
        return rows

    def check_writable(self) -> None:
        """Raise when nothing can be written here any more: what is waited for would never come."""

    def confirm(self, until: int, puts: list[int] | None, until_s: float = 0.0) -> None:
        """Wait for the replica, if there is one that is waited for; `puts` from `take_puts`. Not
        longer than `until_s` (time.monotonic), which is 0 for who waits from now on.
        """

    def take_puts(self) -> list[int] | None:
        """What the operation put, if that has to be taken back when a replica does not confirm."""
        return None

    def judge(self, records: Sequence[Record]) -> None:
        """Append what ended by itself (a lease run out, a death, an expiry). Where nothing is to be
        written, the index learns it as if it stood at the end, until it is dropped.
        """
        if self.may_write and not self.imagined:
            self.append(records)
            return
        end = self.log.pending_tail if self._appended else self.start
        self.tx.apply([(end, self.now_us, record) for record in records])

    def when_written(self, step: Callable[[], None], *, indexed: bool = False) -> None:
        """Call `step` when what was appended is written, still under the lock; an operation that
        fails after it may be one of several of a turn, whose records stay. `indexed`: only when
        LMDB has it, too, which it then gets at once.
        """
        self.is_special = True
        self.must_index |= indexed
        self._steps += ((step, indexed),)

    def imagine(self) -> Tx:
        """The index, to answer what would be so: what is done to it from here on is dropped when
        the operation ends, and what is judged is not written.
        """
        tx = self.tx
        if self.may_write and not self.imagined:
            if not self._appended:
                # What was folded for this is kept, or it would be folded again at each question.
                self._commit(tx)  # as what is in memory is dropped
                self._tx = None
            self.imagined = self.is_special = True
        return self.tx

    def forget_imagined(self) -> None:
        """The operation that imagined something has ended."""
        if self._tx is not None:
            self._tx.abort()
            self._tx = None
        self.imagined = False

    def _commit(self, tx: Tx) -> bool:
        """Write what the index learned; False when there is no room for it."""
        engine = self.engine
        is_indexed = True
        try:
            frame, checksum = self.log.last_frame
            tx.commit(self.tail, checksum, frame)
            engine.folded_to = self.tail
        except IndexFullError as error:
            # The log has it all. Whoever looks next applies it again.
            logger.debug("index not written, the log is ahead of it: %s", error)
            is_indexed = False
        if engine.index.room.is_short:
            self.is_plain = False
        return is_indexed

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

    def amend(self, change: Callable[[Tx], object]) -> None:
        """Change the index once more, in a step of `when_written` that wants it `indexed`.

        Where there is no room for it nothing changes, and nothing is raised.
        """
        try:
            tx = self.engine.index.write()
            change(tx)
        except IndexFullError as error:
            logger.debug("index not written: %s", error)
        else:
            self._commit(tx)

    def finish(self) -> None:
        """Write what was appended and keep what the index learned."""
        appended = self._appended
        if appended is not None:
            if self.put_to and self._sync_from:
                # Before the write, so that no moment exists in which it could be delivered.
                self.engine.puts_to = end = self.log.pending_tail
                self.page.promise_sync(self._sync_from, end)
                if end - self.start >= _LONG_BYTES:
                    self.is_long = True
                    self.is_plain = False
            try:
                self.tail = self.log.write()
            except DiskFullError:
                raise
            except OSError as error:
                raise self.engine.fail(f"writing failed: {error}") from error
            if self.put_to:
                self.woken = [*self.woken, *self.page.note_puts(self.put_to, self.put_n)]
            elif self.must_sync and self.page.words[SYNC_HIGH] > self.page.words[COMMIT]:
                self.shares_sync = self.engine.share_sync(self.tail)
        tx = self._tx
        if self.is_special:
            self._finish_special(appended)
        elif tx is not None:
            if not tx.keep(self.tail):
                self._commit(tx)
            # Not before: when Ctrl-C comes here, `abort` is to end it.
            self._tx = None
        elif appended is not None:
            self.engine.remember_written(self.start, self.tail, appended)

    def _finish_special(self, appended: list[Appended] | Several | None) -> None:
        if self.imagined:
            self.forget_imagined()
        is_indexed = True
        tx = self._tx
        if tx is not None:
            if self.must_index or not tx.keep(self.tail):
                is_indexed = self._commit(tx)
            # Not before: when Ctrl-C comes here, `abort` is to end it.
            self._tx = None
        elif appended is not None:
            self.engine.remember_written(self.start, self.tail, appended)
        for step, indexed in self._steps:
            # The index must never be behind the log's head, and never forget what is above it.
            if is_indexed or not indexed:
                step()

    def abort(self, error: BaseException | None = None) -> None:
        self.log.discard()
        words = self.page.words
        if words[TAIL] == self.start and not words[WRITING]:
            for lease in self.ended:
                lease.over = False
                if lease.crash:
                    self.engine.suspects.add(lease)
            self.engine.held.update(self.ended)
            for leases in self.begun:
                self.engine.let_go(leases)
        if self._appended:
            self.engine._written_to = -1  # Ctrl-C may have come while it was remembered
            if not words[WRITING]:
                self.page.forget_promises()  # else it is done by whoever heals
        tx = self._tx
        if tx is None:
            return
        # Who only was refused changed nothing, and others need not fold again what he did.
        refused = isinstance(error, Full) and not (self._appended or self.imagined)
        if not (refused and tx.keep(words[TAIL])):
            tx.abort()
        # Not before: when Ctrl-C comes here, this is called again.
        self._tx = None


def begin(kind: type[S], engine: Engine) -> S:
    """Begin a turn of this kind."""
    # One is made for each turn: by `__init__` that would cost twice as much until Python 3.13.
    session = kind()
    session.engine = engine
    session.log = engine.log
    page = session.page = engine.page
    session.now_us = _clock.boottime_us() + engine.shift
    session.start = session.tail = page.words[TAIL]
    session._tx = session._appended = None
    session.put_to = session.ready = session.settled = 0
    session.must_sync = session.is_special = False
    session.woken = session.ended = ()
    session.is_plain = True
    return session


def spread(session: Session, what: tuple[Callable[..., T], tuple[Any, ...]]) -> T:
    """The operation that runs another one, with as many arguments as that takes."""
    operation, args = what
    return operation(session, *args)


class Job:
    """One operation among several of a turn; see `_together`."""

    result: Any = None
    answer: Callable[[], Any] | None = None  # makes the result, after the turn; see `Session`
    error: Exception | None = None
    must_sync = False
    puts: list[int] | None = None  # to be taken back if the replica does not confirm
    session: Session | None = None  # the turn it was run in, if there is a replica
    until_s = 0.0  # how long it may wait for the replica (time.monotonic), if it waits already
    tail: int | None = None  # what must be synced for it, once it was run by another thread
    leads = False  # whether its thread is to run what others want, too
    wakes: list[Job] | None = None  # whom its thread wakes when it is woken
    passes_on = False  # whether its thread lets the next one lead when it is woken

    def __init__(self, operation: Callable[..., Any], *args: Any) -> None:
        self.operation = operation
        self.args = args
        self.turn = threading.Lock()  # for whoever waits until it is done
