"""What is asked of messages and groups, and what steers them, under the write lock.

Role: status, results and counts, answered from the index; cancel, purge, pause, replay and the end
of a group, each a record or none. Each function is an operation for `Engine.run`. What ended by
itself (leases run out, deaths, expiries) is judged first, so that an answer is true at the moment
it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from . import _delivery, _records, _taking
from ._delivery import Address, TellDead, place
from ._index import GroupState
from ._records import META_EXPIRY_US, META_KEY, META_TTL_US, STATE_DEAD, STATE_LEASED, key_hash
from ._session import SYNC, Session
from ._shared import LEASES_SEQ, mask_of
from ._wake import Waiter
from .errors import CorruptError

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Stats(NamedTuple):
    """One moment's truth about a topic as one group sees it; see `Queue.stats`."""

    ready: int
    """May be delivered now; leases of dead processes are among them."""
    delayed: int
    """Wait for their time, a retry, or an earlier message of their key."""
    leased: int
    dead: int
    """Dead letters."""
    settled: int
    """Acks since the group began, which never become fewer: a replayed message counts at each."""
    oldest_age_s: float
    """Age of the oldest message not settled; 0.0 when there is none."""
    retries: int
    """Retries burnt since the group began: failed deliveries (a nack, a lease that ran out) that
    are tried again. One that makes a dead letter, `nack(count=False)` and the death of a consumer
    are not among them.
    """
    replica_lag: int | None
    """Bytes the replica is behind; 0 when level, None without a replica."""
    file_bytes: int
    """The size of the file. What was given back to the file system are holes in it, which count:
    it may take less of the disk (`du`).
    """
    reclaimable_bytes: int
    """Space of the file that is free for reuse, and still taken from the disk."""
    damaged: int
    """Places of the file that could not be read and were set aside, whatever number of messages
    stood in each; those that somebody has come upon. `verify` finds them all.
    """


class GroupInfo(NamedTuple):
    """One group of a file; see `Store.groups`."""

    topic: str
    group: str
    ready: int
    delayed: int
    leased: int
    dead: int
    settled: int
    """As in `Stats`."""
    offset: int
    """Everything before it is settled in this group."""
    paused: bool


def is_dead(session: Session, gid: int, offset: int) -> bool:
    row = session.tx.row(gid, offset)
    return row is not None and row.state == STATE_DEAD


def swept(session: Session, address: Address, tell_dead: TellDead) -> GroupState | None:
    """The group, or the template of one not begun yet, with all judged that ended by itself. See
    `_taking.sweep_all`.
    """
    group = session.tx.group(address.gid)
    if group is None:
        return _imagined(session, address)
    session.engine.bury(session, session.engine.dead_owners(everyone=True))
    _taking.sweep_all(session, session.tx, group, address.retry, tell_dead)
    return group


def imagining(
    session: Session, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]
) -> T:
    """What `operation` would answer if all that it judges could be written."""
    session.imagine()
    return operation(session, *args)


def _imagined(session: Session, address: Address) -> GroupState | None:
    """What the group would be if it began now. Looking begins none: one that nobody reads would
    keep everything for ever.
    """
    topic = session.tx.topic(address.topic)
    if topic is None:
        return None
    if address.start != "earliest":
        tx = session.imagine()
        session.judge([_delivery.group_record(topic.tid, address)])
        group = tx.group(address.gid)
        assert group is not None, "a GROUP record makes the group"
        _taking.sweep_all(session, session.tx, group, address.retry, None)
        return group
    template = session.tx.template(topic.tid)
    if session.tx.expired(template, session.now_us, 1):
        tx = session.imagine()
        template = tx.template(topic.tid)
        tx.bury_expired(template, session.now_us, _taking.EXPIRY_REASON)
    session.tx.move_due(template, session.now_us)
    return template


def stats(session: Session, address: Address, tell_dead: TellDead) -> Stats:
    group = swept(session, address, tell_dead)
    log = session.log
    tx = session.tx
    file_bytes, free_bytes = log.file_bytes(), log.free_bytes()
    common = (
        session.engine.replica_lag(),
        file_bytes,
        free_bytes,
        len(tx.damage()),
    )
    if group is None:
        return Stats(0, 0, 0, 0, 0, 0.0, 0, *common)
    return Stats(
        tx.ready_count(group),
        group.n_wait + group.n_parked,
        group.n_leased,
        group.n_dead,
        group.settled,
        _oldest_age_s(session, group),
        group.retries,
        *common,
    )


def _oldest_age_s(session: Session, group: GroupState) -> float:
    offset = session.tx.oldest(group)
    if offset is None:
        return 0.0
    try:
        put_us = session.engine.put_and_time(place(session, offset)[0])[1]
    except (LookupError, CorruptError):
        # Given back or damaged under our eyes: what is kept begins about there.
        log = session.log
        kept = log.frames(log.head_offset, log.pending_tail, on_damage=lambda *_: None)
        put_us = next((frame[2] for frame in kept), session.now_us)
    return max(0.0, (session.now_us - put_us) / 1e6)


def status(session: Session, address: Address, id: str, tell_dead: TellDead) -> str:
    """One of "ready delayed leased done dead unknown"."""
    topic = session.tx.topic(address.topic)
    group = None if topic is None else swept(session, address, tell_dead)
    if topic is None or group is None:
        return "unknown"
    try:
        return _look_up(session, group, id)[1]
    except CorruptError as error:
        if session.tx.is_aside(error.offset):
            return "unknown"
        raise


def _look_up(session: Session, group: GroupState, id: str) -> tuple[int, str]:
    """(offset, state) of the message with this id, as `status` says it. Raises CorruptError where
    that can't be known any more, because the message can't be read.
    """
    tx = session.tx
    offset: int | None = None
    try:
        offset = _delivery.find_sound(session, group.tid, id)
        return (-1, "unknown") if offset is None else (offset, state_of(session, group, offset))
    except CorruptError as error:
        damage = error
    if offset is None:
        offset = damage.offset
    row = tx.row(group.gid, offset)
    if row is not None and row.state == STATE_LEASED:
        return offset, "leased"  # whoever has it has read it
    if tx.result_at(group.gid, offset) is not None:
        return offset, "done"
    raise CorruptError(offset, damage.reason)


def state_of(session: Session, group: GroupState, offset: int) -> str:
    state = _state(session, group, offset)
    return state if state in ("ready", "delayed", "leased", "done", "dead") else "unknown"


def _state(session: Session, group: GroupState, offset: int) -> str:
    """As `Tx.state` says it; "unknown": kept no more."""

    def priority_of(offset: int) -> int:
        return session.engine.put_at(place(session, offset)[0]).priority

    try:
        return session.tx.state(group, offset, priority_of)
    except LookupError:
        return "unknown"


class Outcome(NamedTuple):
    state: str
    offset: int
    ack_at: int | None
    look_again_us: int | None = None  # queue time; when it may have changed with nobody writing


def outcome(
    session: Session, address: Address, id: str, tell_dead: TellDead, waiter: Waiter | None
) -> Outcome:
    """What `result` needs: the state, and where the ACK with the result is. `waiter` is
    registered when the message is not settled yet.
    """
    topic = session.tx.topic(address.topic)
    group = None if topic is None else swept(session, address, tell_dead)
    if topic is None or group is None:
        return Outcome("unknown", -1, None)
    offset, state = _look_up(session, group, id)
    ack_at = session.tx.result_at(group.gid, offset) if state == "done" else None
    if waiter is None or state not in ("ready", "delayed", "leased"):
        return Outcome(state, offset, ack_at)
    _delivery.wait_settled(session, group.tid, waiter)
    return Outcome(state, offset, ack_at, _taking.next_look(session, group))


def cancel(
    session: Session, address: Address, id: str, policy: int, tell_dead: TellDead | None = None
) -> bool:
    """Without `tell_dead` what ended by itself is not judged first."""
    topic = session.tx.topic(address.topic)
    if tell_dead is not None and session.tx.group(address.gid) is not None:
        swept(session, address, tell_dead)  # what the group holds no more is not held
    offset = None if topic is None else _delivery.find(session, topic.tid, id)
    if topic is None or offset is None:
        return False
    tx = session.tx
    template = tx.template(topic.tid)
    states = {
        _state(session, group, offset)
        for group in tx.groups(topic.tid) or [template]
        if tx.row(group.gid, offset) is not None or tx.deliveries(group, offset)
        # else it began later and never had the message
    }
    if _state(session, template, offset) == "cancelled" or states == {"purged"}:
        return False  # it is in no group already
    if not states <= {"ready", "delayed", "purged"}:
        return False
    session.append([_records.pack_cancel(topic.tid, [offset])], policy)
    session.must_sync |= policy >= SYNC
    session.settled |= mask_of(topic.tid)
    session.ready |= mask_of(topic.tid)
    return True


def purge(session: Session, address: Address, policy: int, tell_dead: TellDead) -> int:
    group = _delivery.group_of(session, address)
    swept(session, address, tell_dead)
    count = _delivery.waiting_in(session.tx, group)
    if count:
        session.append([_records.pack_purge(group.gid)], policy)
        session.must_sync |= policy >= SYNC
        session.settled |= mask_of(group.tid)
        session.ready |= mask_of(group.tid)
    return count


def pause(session: Session, address: Address, seconds: float, reason: str, policy: int) -> None:
    """`seconds` 0 resumes."""
    group = _delivery.group_of(session, address)
    until_us = session.now_us + int(seconds * 1e6) if seconds else 0
    session.append([_records.pack_pause(group.gid, until_us, reason)], policy)
    session.must_sync |= policy >= SYNC
    session.ready |= mask_of(group.tid)


def groups(session: Session) -> list[GroupInfo]:
    tx = session.tx
    found = []
    for group in tx.groups(None):
        topic = tx.topic_by_id(group.tid)
        found.append(
            GroupInfo(
                topic.name if topic is not None else f"#{group.tid}",
                group.name or f"#{group.gid}",
                tx.ready_count(group),
                group.n_wait + group.n_parked,
                group.n_leased,
                group.n_dead,
                group.settled,
                tx.first_unsettled(group),
                group.paused_until_us > session.now_us,
            )
        )
    return sorted(found)


def drop_group(session: Session, gid: int, policy: int) -> bool:
    """Forget a group; what its consumers hold is lost to them. False if there is none."""
    group = session.tx.group(gid)
    if group is None:
        return False
    session.append([_records.pack_group_drop(gid)], policy)
    session.must_sync |= policy >= SYNC
    session.settled |= mask_of(group.tid)
    engine = session.engine
    engine.lose([lease for lease in engine.held if lease.gid == gid])
    session.page.words[LEASES_SEQ] += 1  # for those whom other processes hold
    return True


class Candidate(NamedTuple):
    """A kept message that a replay may choose."""

    offset: int
    priority: int
    keyhash: bytes
    ttl_us: int

    def priority_of(self, offset: int) -> int:
        """What the index asks for when it has no row."""
        return self.priority


def put_of(at: int, time_us: int, record: Any) -> tuple[int, int, Any]:
    """(offset, time, Put) of the message that a record of the log brings, in its Put or carried up
    since; the Put is None when it brings none.
    """
    if record[0] == _records.PUT:
        return at, time_us, record
    if record[0] == _records.CARRY:
        with contextlib.suppress(_records.NoRecordError):  # one the index passed over, too
            said = _records.unpack(record)
            assert isinstance(said, _records.Carry)
            return said.offset, said.time_us, said.put
    return at, time_us, None


def candidate(offset: int, record: Any, tid: int, keyhash_of: Any) -> Candidate | None:
    """What a replay needs of a record of the log; None unless it is a Put of the topic."""
    try:
        put = _records.unpack_put(record)
    except _records.NoRecordError:
        return None
    if put.tid != tid:
        return None
    key = put.meta.get(META_KEY)
    ttl = put.meta.get(META_TTL_US, 0) if META_EXPIRY_US in put.meta else 0
    return Candidate(offset, put.priority, keyhash_of(key) if key is not None else b"", ttl)


def replay(session: Session, address: Address, candidates: list[Candidate], policy: int) -> int:
    """Make those of the candidates flow again that are settled in the group."""
    group = _delivery.group_of(session, address)
    items = [
        (one.offset, one.priority, one.keyhash, session.now_us + one.ttl_us if one.ttl_us else 0)
        for one in candidates
        if session.tx.state(group, one.offset, one.priority_of) == "done"
    ]
    if items:
        session.append([_records.pack_replay(group.gid, items)], policy)
        session.must_sync |= policy >= SYNC
        session.ready |= mask_of(group.tid)
    return len(items)


def replay_ids(
    session: Session,
    address: Address,
    ids: list[str],
    policy: int,
    damage: dict[str, int],
    passes_over: bool,
) -> int | None:
    """`replay` of the messages with these ids. Those that can't be read are added to `damage`, with
    where their records stand, and unless it `passes_over` them nothing is written then, and None
    returned.
    """
    topic = session.tx.topic(address.topic)
    if topic is None:
        return 0
    chosen = []
    for id in ids:
        location: int | None = None
        try:
            offset = _delivery.find_sound(session, topic.tid, id)
            if offset is None:
                continue
            location = _delivery.place(session, offset)[0]
            record, _ = session.engine.put_and_time(location)
        except LookupError:  # damaged, and repair has written over it
            continue
        except CorruptError as error:
            damage[id] = error.offset if location is None else location
            continue
        one = candidate(offset, record, topic.tid, key_hash)
        if one is not None:
            chosen.append(one)
    if damage and not passes_over:
        return None
    return replay(session, address, sorted(chosen), policy)
