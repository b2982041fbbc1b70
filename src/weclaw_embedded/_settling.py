"""Settle: how a lease ends by its holder's word, under the write lock.

Role: operations for `Engine.run` that ack, nack, fail, release and extend. None needs to look
anything up: before its deadline, and under the lock, nobody else can have the lease.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from . import _clock, _records
from ._delivery import (
    SOON_S,
    Lease,
    backoff_us,
    deadline_of,
)
from ._options import RetryPolicy
from ._records import NACK
from ._session import SYNC, Session
from ._shared import LEASES_SEQ
from .errors import LeaseLostError

# A lease, the record that ends it, and what that is promised; without a policy nothing.
Ending: TypeAlias = tuple[Lease, bytes, int | None]


def hold_all(session: Session, leases: Iterable[Lease]) -> None:
    """Raise LeaseLostError unless this process, whose they are, holds these leases now.

    No look-up: before its deadline, and under the lock, nobody else can have one, unless leases
    were taken away meanwhile.
    """
    if session.page.words[LEASES_SEQ] != session.engine.leases_seen:
        session.engine.forget_taken(session)
    now_ns = _clock.monotonic_ns()
    for lease in leases:
        if lease.over or now_ns >= lease.deadline_ns:
            raise lost(lease)


def lost(lease: Lease) -> LeaseLostError:
    """Why it can be neither settled nor extended."""
    name = f"message {lease.id}"
    if lease.engine.forked:
        return LeaseLostError(f"{name} is held by the parent process; nothing was changed")
    if lease.over and not lease.lost:
        return LeaseLostError(f"{name} was settled already; nothing was changed")
    if lease.handed_back:
        return LeaseLostError(
            f"{name} was handed back, uncounted, when its queue was closed; it was not settled, "
            "and is delivered again; settle before the queue is closed"
        )
    if _clock.monotonic_ns() >= lease.deadline_ns:
        return LeaseLostError(
            f"the lease of {lease.length_s} s on {name} ran out before it was settled; nothing was "
            "changed, it counts as a failed delivery; use a longer visibility_timeout, extend() or "
            "`with msg`"
        )
    return LeaseLostError(
        f"{name} was taken away: its group was dropped, or it is damaged and was set aside; "
        "nothing was changed"
    )


def end(session: Session, what: Ending) -> None:
    """Append what ends a lease, an ACK for one, if this process holds it now; see `hold_all`."""
    lease, record, policy = what
    engine = session.engine
    if session.page.words[LEASES_SEQ] != engine.leases_seen:
        engine.forget_taken(session)
    if lease.over or _clock.monotonic_ns() >= lease.deadline_ns:
        raise lost(lease)
    if policy is None:
        session.append_one(record)
    else:
        session.append_one(record, policy)
        if policy >= SYNC:
            session.must_sync = True
    session.ended += (lease,)  # before the rest, which is taken back if this turn is none
    lease.over = True
    engine.held.discard(lease)
    session.settled |= lease.mask
    if lease.unblocks:
        engine.suspects.discard(lease)
        session.ready |= lease.mask  # the next of its key, or the next suspect, may go


def ack_with(session: Session, what: tuple[Lease, bytes, int]) -> None:
    """Append an ACK with its result, which may be long, as `end` does one without."""
    lease, result, policy = what
    hold_all(session, (lease,))
    session.append([_records.pack_ack(lease.tid, lease.gid, lease.offset, result)], policy)
    session.must_sync |= policy >= SYNC
    let_go_all(session, (lease,))


def let_go_all(session: Session, leases: Sequence[Lease]) -> None:
    """What was appended in this turn ends these leases."""
    session.ended += tuple(leases)
    session.engine.let_go(leases)
    mask = 0
    for lease in leases:
        if lease.mask != mask:
            mask = lease.mask
            session.settled |= mask
        if lease.unblocks:
            session.ready |= mask


def nack(
    session: Session,
    lease: Lease,
    retry: RetryPolicy,
    backoff_s: float | None,
    reason: str,
    count: bool,
    consumer: str,
    policy: int,
) -> bool:
    """A failed delivery. True when it was the last one and the message is dead."""
    failure = (session.now_us, reason, consumer) if count else None
    dies = count and lease.retry >= retry.max_retries
    if dies:
        record = _dead_of(session, lease, reason, failure)
    else:
        n = _records.one_more(lease.retry)
        wait_us = int(backoff_s * 1e6) if backoff_s is not None else backoff_us(retry, n)
        record = _records.pack_return(
            lease.gid,
            lease.offset,
            NACK,
            due_us=session.now_us + wait_us if wait_us > 0 else 0,
            delivery=lease.delivery,
            retry=n if count else lease.retry,
            crash=lease.crash,
            failure=failure,
        )
    end(session, (lease, record[0], policy))
    session.ready |= lease.mask
    return dies


def fail(session: Session, lease: Lease, reason: str, consumer: str, policy: int) -> None:
    """Straight to the dead letters."""
    failure = (session.now_us, reason, consumer)
    end(session, (lease, _dead_of(session, lease, reason, failure)[0], policy))


def _dead_of(
    session: Session, lease: Lease, reason: str, failure: _records.Failure | None
) -> _records.Record:
    return _records.pack_dead(
        lease.gid,
        lease.offset,
        reason,
        session.now_us,
        retry=lease.retry,
        crash=lease.crash,
        failure=failure,
    )


def release(session: Session, lease: Lease, undo: bool = False) -> None:
    """Ready again now, uncounted. `undo`: a delivery that nobody ever saw is none."""
    end(session, (lease, lease.release_record(undo), None))
    session.ready |= lease.mask


def put_off(session: Session, offset: int, wait_s: float) -> None:
    """What this process has leased of a message that can't be read now goes back, uncounted, for so
    long. Nobody has seen it.
    """
    if not session.may_write:
        return
    due_us = session.now_us + int(wait_s * 1e6)
    for lease in [lease for lease in session.engine.held if lease.offset == offset]:
        record = _records.pack_return(
            lease.gid,
            lease.offset,
            NACK,
            due_us=due_us,
            delivery=lease.delivery - 1,
            retry=lease.retry,
            crash=lease.crash,
        )
        with contextlib.suppress(LeaseLostError):  # it has run out: then others judge it
            end(session, (lease, record[0], None))
        session.ready |= lease.mask


def extend(session: Session, lease: Lease, seconds: float | None) -> None:
    """Count the lease anew from now."""
    hold_all(session, (lease,))
    deadline_ns = deadline_of(seconds)
    session.append([_records.pack_extend(lease.gid, lease.offset, deadline_ns)])
    if seconds is not None and seconds < SOON_S:
        session.ready |= lease.mask  # so that they know when it ends
    lease.deadline_ns = deadline_ns
    lease.length_s = seconds


def renew(session: Session, lease: Lease) -> None:
    """Extend it by the length it has now: its holder may just have given it another."""
    extend(session, lease, lease.length_s)
