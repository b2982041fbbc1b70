"""One turn under the write lock: what an operation sees, appends and asks for.

    append (`Session.append`) -> write (`Session.finish`); the sync, the commit point and the answer
    follow in `Engine.execute`. Applying to the index is done in the same session when the index is
    open, else by whoever opens it next (`Session.tx`).

A session that fails leaves nothing: what it appended is discarded before it was written. It must
not know what the records mean, beyond handing them to the index.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from . import _clock
from ._index import IndexFullError, Tx
from ._shared import OPTIONS_SEQ
from .errors import DiskFullError, Full
from .wal import TAIL, WRITING

if TYPE_CHECKING:
    from ._engine import Engine

logger = logging.getLogger("weclaw_embedded")

# Flush policies, as frames carry them.
OS, BATCH, SYNC, REPLICA = range(4)
POLICIES: Final = {"os": OS, "batch": BATCH, "sync": SYNC}
ALL: Final = (1 << 64) - 1

Record = Sequence[bytes | memoryview]


class Session:
    """One turn under the write lock. Operations get it as their first argument."""

    # The defaults stand in the class: a session is made for each turn.
    may_write = True
    sync_from = SYNC  # what is promised this or more is waited for
    replicated = False  # and for the replica too
    ready = 0  # topics whose getters may find something now
    put_to = 0  # topics whose getters may when the puts are visible
    put_n = 0  # how many getters of each group
    woken: Sequence[int] = ()  # slots of those of them who may now
    settled = 0  # topics whose putters, joiners and result waiters may
    must_sync = False
    must_index = False  # what the index learned must be in LMDB, not in memory alone
    imagined = False  # what is done to the index is dropped; see `imagine`
    told: Sequence[Callable[[], None]] = ()  # called when all is written; see `when_written`
    _tx: Tx | None = None
    _applied = 0
    _sync_from = 0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.log = engine.log
        self.page = engine.page
        self.now_us = _clock.boottime_us() + engine.shift
        self._tail: int = self.page.words[TAIL]
        self.begun: list[Any] = []  # leases this turn begins and ends: only so if it is written
        self.ended: list[Any] = []
        self.after_write: list[Callable[[], None]] = []
        self._appended: list[tuple[int, int, Record]] = []  # offset, time, record

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
        tx.apply(self._appended[self._applied :] if self._applied else self._appended)
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
        if len(offsets) == 1:
            self._appended.append((offsets[0], self.now_us, records[0]))
        else:
            self._appended.extend(zip(offsets, repeat(self.now_us), records))
        if self._tx is not None:
            self._apply(self._tx)  # at once: the next look must see it
        return offsets

    def check_writable(self) -> None:
        """Raise when nothing can be written here any more: what is waited for would never come."""

    def confirm(self, until: int, puts: list[int] | None) -> None:
        """Wait for the replica, if there is one that is waited for; `puts` from `take_puts`."""

    def take_puts(self) -> list[int] | None:
        """What the operation put, if that has to be taken back when a replica does not confirm."""
        return None

    def judge(self, records: Sequence[Record]) -> None:
        """Append what ended by itself (a lease run out, a death, an expiry)."""
        if not self.imagined:
            self.append(records)
            return
        self.tx.apply([(self.log.pending_tail, self.now_us, record) for record in records])

    def when_written(self, tell: Callable[[], None]) -> None:
        """Call `tell` when what was appended is written, still under the lock; an operation that
        fails after it may be one of several of a turn, whose records stay.
        """
        self.told = (*self.told, tell)

    def imagine(self) -> Tx:
        """The index, to answer what would be so: what is done to it from here on is dropped when
        the operation ends, and what is judged is not written.
        """
        tx = self.tx
        if self.may_write and not self.imagined:
            if not self._appended:
                # What was folded for this is kept, or it would be folded again at each question.
                self._tx = None
                self.must_index = True  # what is in memory is dropped
                self._keep(tx)
            self.imagined = True
        return self.tx

    def forget_imagined(self) -> None:
        """The operation that imagined something has ended."""
        tx, self._tx = self._tx, None
        if tx is not None:
            tx.abort()
        self._applied = 0
        self.imagined = False

    def _keep(self, tx: Tx) -> bool:
        """Keep what the index learned; False when it is to be committed and there is no room."""
        tail = self.page.words[TAIL]
        if not (self.must_index or self.after_write) and tx.keep(tail):
            return True
        try:
            frame, checksum = self.log.last_frame
            tx.commit(tail, checksum, frame)
            self.engine.folded_to = tail
        except IndexFullError as error:
            # The log has it all. Whoever looks next applies it again.
            logger.debug("index not written, the log is ahead of it: %s", error)
            return False
        return True

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
            if self.put_to:
                self.woken = self.page.note_puts(self.put_to, self.put_n)
        is_indexed = True
        try:
            if self.imagined:
                self.forget_imagined()
            tx = self._tx
            if tx is None:
                if self._appended:
                    engine.remember_written(self._tail, self._appended)
            else:
                if self._applied < len(self._appended):
                    self._apply(tx)
                is_indexed = self._keep(tx)
        except IndexFullError as error:
            # What was written is written, and must not be tried again as if it were not.
            logger.debug("index not written, the log is ahead of it: %s", error)
            is_indexed = False
        # Not before: when Ctrl-C comes here, `abort` is to end it.
        self._tx = None
        if is_indexed:
            # Not before the index has what it was told: it must never be behind the log's head.
            for step in self.after_write:
                step()
        for tell in self.told:
            tell()

    def abort(self, error: BaseException | None = None) -> None:
        self.log.discard()
        words = self.page.words
        if words[TAIL] == self._tail and not words[WRITING]:
            for lease in self.ended:
                lease.over = False
                if lease.crash:
                    self.engine.suspects.add(lease)
            self.engine.hold(self.ended)
            self.engine.let_go(self.begun)
        if self._appended and not self.page.words[WRITING]:
            self.page.forget_promises()  # else it is done by whoever heals
        tx, self._tx = self._tx, None
        if tx is None:
            return
        # Who only was refused changed nothing, and others need not fold again what he did.
        refused = isinstance(error, Full) and not (self._appended or self.imagined)
        if not (refused and tx.keep(words[TAIL])):
            tx.abort()


class Job:
    """One operation among several of a turn; see `_together`."""

    result: Any = None
    error: Exception | None = None
    must_sync = False
    puts: list[int] | None = None  # to be taken back if the replica does not confirm
    session: Session | None = None  # the turn it was run in, if there is a replica
    tail: int | None = None  # what must be synced for it, once it was run by another thread
    leads = False  # whether its thread is to run what others want, too
    wakes: list[Job] | None = None  # whom its thread wakes when it is woken

    def __init__(self, operation: Callable[..., Any], *args: Any) -> None:
        self.operation = operation
        self.args = args
        self.turn = threading.Lock()  # for whoever waits until it is done
