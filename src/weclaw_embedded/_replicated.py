"""Turns in a file that has a replica, is one, or was replaced by one.

Role: what a synchronous replica means to the operations of a process: whatever they promise, they
promise the replica, and what it does not confirm in time is taken back. Also who takes part in
feeding it, as the file's options say.

Invariants: a put is taken back under the write lock, only if it is still not replicated then: so
it was visible to nobody, and nobody is told both. Settling is never taken back. A fenced file is
only looked at.

It must not know how the replica is fed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _names, _records
from ._channel import RECORD_NAME, normal, read_record, write_record
from ._copy import is_same_file, write_role
from ._format import PRIMARY
from ._replication import Replication
from ._rounds import fenced_error
from ._session import ALL, OS, REPLICA, Session, begin
from ._shared import (
    IS_COPY,
    IS_FENCED,
    REPLICA_AT,
    REPLICA_HIGH,
    REPLICA_PIN,
    REPLICATED,
    REPLICATION,
    SYNC_WANTED,
    VOIDS,
    WANTED,
)
from .errors import ClosedError, DiskFullError, ReplicaUnavailableError
from .wal import HEAD, TAIL

if TYPE_CHECKING:
    from ._engine import Engine

logger = logging.getLogger("weclaw_embedded")


class ReplicatedSession(Session):
    """A turn in a file with a synchronous replica: whatever was promised anything is promised the
    replica. What was promised nothing (a lease, a judgement) comes without a policy.
    """

    sync_from = 0
    replicated = True
    puts: list[int] | None = None
    settles = False
    voids: int  # as they were when it began

    def append(
        self,
        records: Any,
        policy: int = -1,
        puts: bool = False,
        flags: int = 0,
        apply: bool = True,
    ) -> list[int]:
        if policy < 0:
            return super().append(records, OS, puts, flags, apply)
        offsets = super().append(records, REPLICA, puts, flags, apply)
        self.must_sync = True
        if puts and len(offsets) == 1 and self.puts is None:
            self.puts = offsets
        elif puts and records[0][0][0] != _records.ACK:  # acks go before the puts they belong to
            made = [
                offset
                for offset, record in zip(offsets, records, strict=True)
                if record[0][0] == _records.PUT
            ]
            self.puts = made if self.puts is None else self.puts + made
        else:
            self.settles = True
        return offsets

    def append_one(self, record: bytes, policy: int = -1, apply: bool = True) -> None:
        self.append([(record,)], policy, apply=apply)

    def finish(self) -> None:
        if self._appended:
            end = self.log.pending_tail
            if self._sync_from:
                self.page.promise_replica(self._sync_from, end)
            replication = self.engine.replication
            if self.must_sync and not (replication is not None and replication.is_feeder):
                self.page.await_replica(self.engine.slot, end)
        super().finish()

    def confirm(self, until: int, puts: list[int] | None, until_s: float = 0.0) -> None:
        """Wait for the replica as one call must: a put is taken back when that takes too long, and
        what settles is done all the same. Raises ReplicaUnavailableError, StoreFailedError.
        """
        engine = self.engine
        timeout_s = engine.replica_timeout
        if not wait(engine, until, until_s or time.monotonic() + timeout_s):
            if puts is None:
                logger.warning(
                    "%s: the replica did not confirm within %s s; what was settled is settled here",
                    engine.path,
                    timeout_s,
                )
                return
            refused = take_back(engine, until, puts)
            if refused is not None:
                raise refused
        if puts is not None and not puts and engine.page.words[VOIDS] != self.voids:
            # What was there under the id may have been taken back while this call waited.
            raise unavailable(engine)

    def take_puts(self) -> list[int] | None:
        """Offsets of what this job put, to be taken back if need be; None for what is done
        whatever the replica says. Empty: it put nothing, because somebody had put it already.
        """
        puts, settles = self.puts, self.settles
        self.puts, self.settles = None, False
        return puts if puts is not None else None if settles else []


class FencedSession(Session):
    """A turn in a file over which its copy was promoted: it can only be looked at."""

    __slots__ = ()
    may_write = False

    def check_writable(self) -> None:
        raise fenced_error(self.engine)

    def append(self, *_: Any, **__: Any) -> list[int]:
        raise fenced_error(self.engine)

    append_one = append  # type: ignore[assignment]  # it never returns

    def finish(self) -> None:
        self.abort()


class CopySession(Session):
    """A turn in a replica's copy that was opened as it is: it stays a copy until it is changed."""

    __slots__ = ()

    def append(self, *what: Any, **how: Any) -> list[int]:
        self._take_over()
        return super().append(*what, **how)

    def append_one(self, record: bytes, policy: int = OS, apply: bool = True) -> None:
        self._take_over()
        super().append_one(record, policy, apply)

    def _take_over(self) -> None:
        engine = self.engine
        logger.warning(
            "%s is a replica's copy and was not promoted; it is changed now, so it is a queue of "
            "its own, and its primary will refuse it as one that went its own way; use only this "
            "one from now on, or only the primary, with another place for its replica; taking over "
            "is done by `weclawctl promote`, before anything is changed",
            engine.path,
        )
        write_role(engine.fd, engine.header, PRIMARY)
        self.page.words[REPLICATION] &= ~IS_COPY


def session_of(engine: Engine, mode: int) -> Session:
    """The kind of session for a file with this REPLICATION word."""
    if engine.replication is None:
        if mode & IS_FENCED:
            return begin(FencedSession, engine)
        if mode & IS_COPY:
            return begin(CopySession, engine)
        engine.timer.call_at(0.0, lambda: follow(engine))
    elif mode & IS_FENCED:
        return begin(FencedSession, engine)
    if not mode & SYNC_WANTED:
        return begin(Session, engine)
    session = begin(ReplicatedSession, engine)
    session.voids = engine.page.words[VOIDS]
    return session


def configure(engine: Engine) -> None:
    """A handle was opened: see what holds for the replica now, and take part in feeding it."""
    words = engine.page.words
    if words[REPLICATION] & (IS_COPY | IS_FENCED):
        return
    address = normal(engine.option("replica"))
    if address is None:
        if words[REPLICATION] & WANTED and engine.chose("replica"):
            _set_mode(engine, 0)
            _names.unlink(os.path.join(engine.directory, RECORD_NAME))
            stop(engine)
        if not words[REPLICATION] & WANTED:
            words[REPLICA_HIGH] = 0  # whoever promised a replica is gone, and so is that
        return
    if isinstance(address, str) and is_same_file(address, engine.path):
        # Nobody gave it as an argument (`_restore.refuse_itself`). The file or the environment
        # says it, as both do where a copy was opened in place of what it copies.
        logger.warning(
            "%s is named as its own replica (perhaps it was a copy once); it works without one: "
            "name another place with replica=, or give replica=False",
            engine.path,
        )
        return
    if engine.replication is not None and engine.replication.address != address:
        stop(engine)
    _set_mode(engine, WANTED | (SYNC_WANTED if engine.option("sync_replica") else 0))
    write_record(engine.directory, address, engine.fd)
    follow(engine)


def _set_mode(engine: Engine, mode: int) -> None:
    def change(session: Session) -> None:
        words = session.page.words
        if words[REPLICATION] & IS_FENCED:
            return
        words[REPLICATION] = mode
        if mode & WANTED and not words[REPLICA_PIN]:
            # Until it has said what it has, nothing it may need is freed.
            words[REPLICA_PIN] = words[HEAD] + 1
        if not mode & WANTED:
            words[REPLICA_PIN] = words[REPLICA_AT] = words[REPLICATED] = 0
        if not mode & SYNC_WANTED:
            words[REPLICA_HIGH] = 0
            session.ready = ALL  # what only waited for the replica is visible now

    if engine.page.words[REPLICATION] != mode:
        engine.run(change)


def follow(engine: Engine) -> None:
    """Take part in feeding, if this process knows where the replica is."""
    if engine.replication is not None or engine.closed:
        return
    address = normal(engine.option("replica")) or read_record(engine.directory)
    if address is None:
        return
    replication = Replication(engine, address)
    if engine.take_part(replication):
        try:
            replication.start()
        except BaseException:
            stop(engine)  # else every put would wait for one that never feeds
            raise


def stop(engine: Engine) -> None:
    """The replica was given up, or is another one now."""
    replication, engine.replication = engine.replication, None
    if replication is not None:
        replication.close()
        replication.give_up()


def wait(engine: Engine, until: int, until_s: float) -> bool:
    """Wait until the replica has everything below `until`; False when the time is over. Raises
    StoreFailedError, FencedError, ClosedError.
    """
    replication: Replication | None = engine.replication
    if replication is None:
        follow(engine)
        replication = engine.replication
    if replication is None:
        if not engine.replicates:
            return True
        raise ClosedError(
            f"{engine.path}: nobody is left here who feeds its replica; what was written is in "
            "doubt; open it again"
        )
    return replication.wait(until, until_s)


def take_back(engine: Engine, until: int, puts: Sequence[int]) -> ReplicaUnavailableError | None:
    """Take puts back that the replica did not confirm in time, for good: the error to raise. None
    if it has them by now.
    """

    def void(session: Session) -> bool:
        words = session.page.words
        if words[REPLICATED] >= until:
            return False
        if puts:
            session.append([_records.pack_void(puts)])
            words[VOIDS] += 1
            session.ready = session.settled = ALL
        return True

    try:
        if not engine.run(void):
            return None
    except DiskFullError:
        # Not as a full disk: whoever hears of one takes it that nothing was written, and repeats.
        return unavailable(
            engine, "there was no room to take the put back, so it is in doubt; keep its id"
        )
    if not puts:
        return unavailable(engine)
    engine.durable(engine.page.words[TAIL])
    return unavailable(engine, "the put was taken back and is delivered to nobody")


def unavailable(
    engine: Engine, what: str = "what was put before under this id is not confirmed yet"
) -> ReplicaUnavailableError:
    replication: Replication | None = engine.replication
    reason = "" if replication is None else replication.reason
    return ReplicaUnavailableError(
        f"the replica of {engine.path} did not confirm within {engine.replica_timeout} s{reason}; "
        f"{what}; put again later, or open the file with sync_replica=False"
    )
