"""Take: choosing what is delivered next, and judging first what ended by itself.

Role: operations for `Engine.run` that lease. A lease that ended without its holder (its time
ran out, the process died) is judged by whoever looks next, with his own retry policy, before
anything is handed out; what he decides is appended with absolute numbers (counters, due times),
so that folding the log never has to decide anything again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from . import _clock, _records
from ._delivery import (
    SOON_S,
    Address,
    GoneError,
    Lease,
    Taken,
    TellDead,
    backoff_us,
    begin_group,
    place,
    set_aside,
    taken_of,
)
from ._index import GroupState, Picks, Row, Tx
from ._options import RetryPolicy
from ._records import DIED, LAPSED, NEVER
from ._segments import SPARES
from ._session import MoreEnded, Session
from ._shared import DEAD_SEQ, OWNERS_HIGH, READY, WAITERS, mask_of
from ._wake import Waiter
from .errors import DiskFullError, Empty
from .wal import HEAD

LAPSE_REASON: Final = "lease ran out"
DEATH_REASON: Final = "consumer died"
EXPIRY_REASON: Final = "expired"
# So many are judged at a time: by who takes, and by who wants all judged.
_FEW: Final = 1000
_MANY: Final = 2000
# Of one frame: of all that ends at once it would be a huge one.
_RECORDS: Final = 1000
_ENDING_BYTES: Final = 256  # of log, for a lease to end in any way, with a reason of some length


def take(
    session: Session,
    what: tuple[Address, int, float | None, Waiter | None],
    choose: Callable[..., Picks] | None = None,
) -> Taken:
    """Lease up to `n` messages, for `visibility_s`. With none, `waiter` is registered before the
    lock is given back, so that no wake-up falls between looking and waiting; but not where the
    answer `has_more`. `choose(session, group, n, visible=…, now_us=…, suspects=…)` is for an order
    other than the index's.
    """
    address, n, visibility_s, waiter = what
    engine = session.engine
    page = session.page
    words = page.words
    if words[WAITERS]:
        engine.unmark()
    if not session.may_write:
        session.check_writable()
    tx = session._tx or session._open()  # as `session.tx`, whose call costs four times as much
    group = tx.group(address.gid)
    if group is None or not group.name:
        group = begin_group(session, address)
    dead: list[int] = []
    look_again_us: int | None = group.paused_until_us
    now_us = session.now_us
    suspects = 0
    if group.paused_until_us <= now_us:
        now_ns = _clock.monotonic_ns()
        # Where nothing is leased the dead have left nothing to be had: there it is asked rarely.
        asks = words[OWNERS_HIGH] > 1 and (
            group.fresh or group.n_lease_rows or now_ns >= engine.ask_again_ns
        )
        for everyone in (False, True):
            if asks and (slots := engine.dead_owners(everyone)):
                engine.bury(session, slots)
            elif everyone:
                break  # nobody has died, so there is nothing now either
            has_more = False
            if (
                now_ns >= group.next_deadline_ns
                or group.dead_seen != words[DEAD_SEQ]
                or (group.n_back or group.n_suspect or group.n_wait or group.n_parked)
            ):  # else nothing has ended by itself
                has_more = sweep(session, tx, group, address.retry, now_ns, dead, _FEW)
            visible = session.visible()
            while True:
                suspects = engine.suspects_held() if engine.suspects else 0
                if choose is None:
                    picks = tx.pick(group, n, visible, now_us, suspects)
                else:
                    picks = choose(
                        session, group, n, visible=visible, now_us=now_us, suspects=suspects
                    )
                if not picks[0]:
                    if has_more:
                        # They all died, say; there may be something among the others.
                        taken = taken_of([], dead)
                        taken.has_more = True
                        return taken
                    break
                if not words[SPARES]:
                    picks = _endable(session, picks)
                try:
                    leases = _lease(session, tx, address, group, picks, now_ns, visibility_s)
                except GoneError as gone:
                    # What carried it up was damaged: it must not be in the way of the others.
                    set_aside(session, gone.offset, str(gone))
                else:
                    return taken_of(leases, dead)
        look_again_us = next_look(session, group)
    if waiter is not None:
        engine.waker.add(waiter)
        waiter.seen = page.visible(session.log.pending_tail)
        page.wait_for(engine.slot, READY, mask_of(group.tid), group.gid)
    taken = taken_of([], dead)
    taken.look_again_us = look_again_us
    taken.is_held_back = bool(suspects and group.n_suspect)
    if group.paused_until_us > now_us:
        taken.paused = _pause_of(group, now_us)
    return taken


def _pause_of(group: GroupState, now_us: int) -> str:
    """In words: until when, and why."""
    end_s = (_clock.wall_us() + group.paused_until_us - now_us) / 1e6
    until = time.strftime("until %Y-%m-%d %H:%M:%S UTC", time.gmtime(end_s))
    return f"{until} ({group.pause_reason})" if group.pause_reason else until


def nothing_ready(address: Address, paused: str) -> Empty:
    """What who takes is told when there was nothing in time. `paused` is of the last look."""
    of = f"topic {address.topic!r}"
    if paused:
        return Empty(
            f"{of} is paused for {address.group!r} {paused}; nothing was taken; wait, or resume()"
        )
    return Empty(f"{of} has nothing ready for {address.group!r}")


def _endable(session: Session, picks: Picks) -> Picks:
    """What of `picks` may be leased where the disk is full: all that is leased must be able to end
    in what is left of the log's last segment. Raises DiskFullError when that is none.
    """
    log = session.log
    if log.holding():
        return picks
    tx = session.tx
    leased = sum(group.n_leased for topic in tx.topics() for group in tx.groups(topic.tid))
    n = log.room // _ENDING_BYTES - 1 - leased  # one is for the delivery itself
    if n >= len(picks.offsets):
        return picks
    # Only now, as it costs a call: there may be room by now, and nobody has looked since.
    with contextlib.suppress(DiskFullError):
        log.hold(1)
        return picks
    if n <= 0:
        raise DiskFullError(
            f"the disk is full, and the {log.room} bytes left in the log are for the {leased} "
            "messages in flight to be ended with; nothing was taken; settle them, or make room"
        )
    return picks._replace(offsets=picks.offsets[:n], flags=picks.flags[:n])


def _lease(
    session: Session,
    tx: Tx,
    address: Address,
    group: GroupState,
    picks: Picks,
    now_ns: int,
    visibility_s: float | None,
) -> list[Lease]:
    engine = session.engine
    log = session.log
    offsets, flags, rows, _ = picks
    tid, gid, holder = group.tid, group.gid, address.holder
    mask = mask_of(tid)
    session.settled |= mask  # ready is less now: there may be room
    if visibility_s is not None and visibility_s < SOON_S:
        session.ready |= mask  # so that they know when it ends
    deadline_ns = NEVER if visibility_s is None else now_ns + int(visibility_s * 1e9)
    bits = log.bits
    leases: list[Lease] = []
    salt, segment = 0, -1
    for offset in offsets:
        lease = Lease()
        lease.offset = lease.location = offset
        if offset >> bits != segment:
            segment = offset >> bits
            try:
                salt = log.salt(offset)
            except LookupError:  # carried up, and that segment was freed
                lease.location, salt = place(session, offset)
                segment = -1
        # Not by `__init__`, which would cost three times as much until Python 3.13.
        lease.engine = engine
        lease.holder = holder
        lease.tid = tid
        lease.mask = mask
        lease.gid = gid
        lease.salt = salt
        lease.deadline_ns = deadline_ns
        lease.visibility_s = lease.length_s = visibility_s
        lease.over = lease.unblocks = False
        leases.append(lease)
    if rows:
        for lease in leases:
            row = rows.get(lease.offset)
            if row is not None:
                lease.know(row)
    token = engine.token
    record = _records.pack_deliver(tid, gid, token, deadline_ns, offsets, flags)
    if engine.introduced_in >= session.page.words[HEAD]:
        session.append_one(record[0], apply=False)
        tx.lease(group, picks, token, deadline_ns)
    else:
        at = session.append([engine.owner_record(), record])[0]
        session.when_written(partial(engine.introduced, at >> bits))
    session.begun += (leases,)
    held = engine.held
    held.update(leases)
    if len(held) > engine.most_held:
        engine.forget_lapsed()
    if rows:
        engine.suspects.update([lease for lease in leases if lease.crash])
    return leases


def next_look(session: Session, group: GroupState) -> int | None:
    """When something may be ready without anybody writing, in queue time."""
    tx = session.tx
    soonest = tx.next_due(group)
    deadline_ns = tx.next_deadline(group)
    if deadline_ns is not None and deadline_ns < NEVER:
        ahead_us = max(0, (deadline_ns - _clock.monotonic_ns()) // 1000)
        lapse_us = session.now_us + ahead_us + 1
        soonest = lapse_us if soonest is None else min(soonest, lapse_us)
    return soonest


def sweep(
    session: Session,
    tx: Tx,
    group: GroupState,
    retry: RetryPolicy,
    now_ns: int,
    dead: list[int],
    limit: int,
) -> bool:
    """Judge what ended by itself: owners' deaths, leases run out, messages expired; then make
    ready what is due. Offsets of new dead letters are added to `dead`. Of leases and of expired
    messages `limit` at most: returns whether there may be more.
    """
    words = session.page.words
    if now_ns >= group.next_deadline_ns and words[OWNERS_HIGH] > 1:
        # All of them first: what the dead held ended with them, whatever its time is by now.
        session.engine.bury(session, session.engine.dead_owners(everyone=True))
    has_more = False
    seq = words[DEAD_SEQ]
    if group.dead_seen != seq:
        living = {token for _, token in session.page.owners()}
        gone, has_more = tx.leases_of_dead(group.gid, seq, living, limit)
        _return_all(
            session, group, [_judge_death(session, group, o, r, retry, dead) for o, r in gone]
        )
        if not has_more:
            group.dead_seen = seq
            tx.touch(group)
    # Not while there may be a lease of the dead among them.
    if (
        not has_more
        and now_ns >= group.next_deadline_ns
        and (lapsed := tx.lapsed(group, now_ns, limit))
    ):
        engine = session.engine
        offsets = {offset for offset, _ in lapsed}
        engine.lose([one for one in engine.held if one.gid == group.gid and one.offset in offsets])
        _return_all(
            session,
            group,
            [_judge_lapse(session, group, o, r, retry, now_ns, dead) for o, r in lapsed],
        )
        has_more = len(lapsed) == limit
    if not (group.n_back or group.n_suspect or group.n_wait or group.n_parked):
        return has_more  # nothing that could expire or be due
    if expired := tx.expired(group, session.now_us, limit):
        dead.extend(offset for offset, _ in expired)
        _return_all(
            session, group, [_die(session, group, o, r, EXPIRY_REASON, None) for o, r in expired]
        )
        has_more |= len(expired) == limit
    tx.move_due(group, session.now_us)
    return has_more


def sweep_all(
    session: Session,
    tx: Tx,
    group: GroupState,
    retry: RetryPolicy,
    tell_dead: TellDead | None,
) -> None:
    """`sweep`, for who counts: all of it. Where that is much it raises MoreEnded, and the rest is
    judged when the operation is run anew; so nothing may have been appended before. `tell_dead` is
    called with the offsets of new dead letters once they are written, be it that the operation
    fails after it, or is run anew; so with each letter once, and with none that is only imagined.
    """
    writes = session.may_write and not session.imagined
    dead: list[int] = []
    try:
        while sweep(session, tx, group, retry, _clock.monotonic_ns(), dead, _MANY):
            if writes:
                raise MoreEnded
    finally:
        if writes and dead and tell_dead is not None:
            session.when_written(partial(tell_dead, dead))


def _return_all(session: Session, group: GroupState, records: list[_records.Record]) -> None:
    if records:
        for at in range(0, len(records), _RECORDS):
            session.judge(records[at : at + _RECORDS])
        session.ready |= mask_of(group.tid)
        session.settled |= mask_of(group.tid)


def _judge_death(
    session: Session,
    group: GroupState,
    offset: int,
    row: Row,
    retry: RetryPolicy,
    dead: list[int],
) -> _records.Record:
    crash = _records.one_more(row.crash)
    failure = (session.now_us, DEATH_REASON, session.tx.owner_name(row.owner))
    if crash > retry.max_crashes:
        dead.append(offset)
        return _die(session, group, offset, row, DEATH_REASON, failure, crash=crash)
    return _records.pack_return(
        group.gid,
        offset,
        DIED,
        delivery=row.delivery,
        retry=row.retry,
        crash=crash,
        failure=failure,
    )


def _judge_lapse(
    session: Session,
    group: GroupState,
    offset: int,
    row: Row,
    retry: RetryPolicy,
    now_ns: int,
    dead: list[int],
) -> _records.Record:
    failure = (session.now_us, LAPSE_REASON, session.tx.owner_name(row.owner))
    if row.retry >= retry.max_retries:
        dead.append(offset)
        return _die(session, group, offset, row, LAPSE_REASON, failure)
    # Counted from the moment it ran out, however late somebody looks.
    late_us = max(0, (now_ns - row.deadline) // 1000)
    wait_us = backoff_us(retry, row.retry + 1)
    return _records.pack_return(
        group.gid,
        offset,
        LAPSED,
        due_us=session.now_us - late_us + wait_us if wait_us > late_us else 0,
        delivery=row.delivery,
        retry=_records.one_more(row.retry),
        crash=row.crash,
        failure=failure,
    )


def _die(
    session: Session,
    group: GroupState,
    offset: int,
    row: Row,
    reason: str,
    failure: _records.Failure | None,
    crash: int | None = None,
) -> _records.Record:
    return _records.pack_dead(
        group.gid,
        offset,
        reason,
        session.now_us,
        retry=row.retry,
        crash=row.crash if crash is None else crash,
        failure=failure,
    )
