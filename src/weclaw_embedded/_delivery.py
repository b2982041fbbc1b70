"""Put, take, settle: what happens to a message under the write lock.

Role: each function here is one operation for `Engine.execute`; it gets the session and decides,
from the index and the clocks, what to append. Everything a user sees after a restart is decided
here and written down with absolute numbers (counters, due times), so that folding the log never
has to decide anything again.

Invariants: a message leaves only by ack, cancel, the dead letters or purge. A lease that ended
without its holder (its time ran out, the process died) is judged by whoever looks next, with his
own retry policy, before anything is handed out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from . import _clock, _records
from ._engine import Engine
from ._index import GroupState, Pick, Row, Tx
from ._options import RetryPolicy
from ._records import DIED, LAPSED, NACK, NEVER, RELEASE, UNDO
from ._session import ALL, SYNC, Session
from ._shared import DEAD_SEQ, READY, SETTLED, mask_of
from ._wake import READY_BYTE, SETTLED_BYTE, Waiter
from .errors import Full, LeaseLostError, MessageTooLargeError

MAX_PUT_MANY_BYTES: Final = 1 << 30
MAX_REASON_BYTES: Final = 4096
_SKEW_NOTED_US: Final = 1_000_000
LAPSE_REASON: Final = "lease ran out"
DEATH_REASON: Final = "consumer died"
EXPIRY_REASON: Final = "expired"


@dataclass(frozen=True)
class Address:
    """A topic and group as an operation needs them."""

    topic: str
    group: str
    gid: int
    retry: RetryPolicy
    holder: object = None  # whose leases are handed back together: the queue's, so its store's


@dataclass(slots=True)
class Encoded:
    """A message ready to be put: everything but what only the lock can tell (offset, time)."""

    codec: int
    codec_name: str | None
    body: bytes
    priority: int = 0
    key: str | None = None
    id: str | None = None
    delay_us: int = 0
    ttl_us: int | None = None
    headers: bytes | None = None
    plain: bool = False  # nothing is said besides the body and the priority


class Lease:
    """What this process knows of a message it holds. Changed only under the write lock."""

    __slots__ = (
        "crash",
        "deadline_ns",
        "delivery",
        "engine",
        "gid",
        "holder",
        "keyed",
        "location",
        "offset",
        "over",
        "priority",
        "redrive",
        "retry",
        "salt",
        "tid",
        "visibility_s",
    )

    def __init__(self, engine: Engine, tid: int, gid: int, offset: int, priority: int) -> None:
        self.engine = engine
        self.tid = tid
        self.gid = gid
        self.offset = offset
        self.priority = priority
        self.over = False
        self.retry = self.crash = self.redrive = 0
        self.delivery = 1
        self.keyed = False
        self.location = offset
        self.salt = 0
        self.deadline_ns = NEVER
        self.visibility_s: float | None = None
        self.holder: object = None

    def release_record(self) -> bytes:
        """Hand it back uncounted."""
        return _records.pack_return(
            self.gid,
            self.offset,
            RELEASE,
            delivery=self.delivery,
            retry=self.retry,
            crash=self.crash,
        )[0]


@dataclass(slots=True)
class Taken:
    """What a take found, or when it is worth looking again."""

    leases: list[Lease] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)  # offsets that became dead letters meanwhile
    look_again_us: int | None = None  # queue time


# -- topics and groups ---------------------------------------------------------------------------


def topic_of(session: Session, name: str) -> tuple[int, list[_records.Record]]:
    """The number of a topic, and the record that must go before its first Put, if any."""
    engine = session.engine
    tid = engine.topics.get(name)
    if tid is not None:
        return tid, []
    tx = session.tx
    topic = tx.topic(name)
    if topic is not None:
        engine.topics[name] = topic.tid
        return topic.tid, []
    tid = _records.topic_id(name)
    while True:
        other = tx.topic_by_id(tid)
        # One without a name is ours, whose name was lost to damage.
        if tid and (other is None or not other.name):
            return tid, [_records.pack_topic(tid, name)]
        tid = (tid + 1) & 0xFFFFFFFF


def group_of(session: Session, address: Address, start: str | int = "earliest") -> GroupState:
    """The group, begun now if it does not exist yet."""
    group = session.tx.group(address.gid)
    if group is not None and group.name:
        return group
    tid, records = topic_of(session, address.topic)
    session.append([*records, _records.pack_group(tid, address.gid, address.group, start)])
    found = session.tx.group(address.gid)
    assert found is not None, "a GROUP record makes the group"
    return found


def seen_by(session: Session, address: Address) -> GroupState | None:
    """The group; before its first get, the template that shows what it would get."""
    tx = session.tx
    group = tx.group(address.gid)
    if group is not None:
        return group
    topic = tx.topic(address.topic)
    return None if topic is None else tx.group(topic.tid)


# -- put -----------------------------------------------------------------------------------------


class NoRoom(Full):
    """Not now; the caller may wait for room."""


class NoBytes(NoRoom):
    """The file is as large as it may be; space of settled messages may be freed for it."""


def put(
    session: Session,
    address: Address,
    messages: Sequence[Encoded],
    policy: int,
    maxsize: int,
    waiter: Waiter | None = None,
) -> list[str]:
    """Append the messages as one frame; their ids, in order. `NoRoom` when there is none now, with
    `waiter` registered before the lock is given back.
    """
    try:
        return _put(session, address, messages, policy, maxsize)
    except NoRoom:
        if waiter is not None:
            wait_settled(session, -1, waiter)
        raise


def _put(
    session: Session, address: Address, messages: Sequence[Encoded], policy: int, maxsize: int
) -> list[str]:
    tid, records = topic_of(session, address.topic)
    ids: list[str | None] = []
    fresh: Sequence[Encoded] = messages
    for message in messages:
        if message.id is not None:
            fresh, ids = _without_known(session, tid, messages)
            break
    if fresh:
        if maxsize > 0:
            _check_room(session, address, len(fresh), maxsize)
        first = len(records)
        skew_us = _skew_us(session)
        records += [_put_record(session, tid, message, skew_us) for message in fresh]
        offsets = _append_puts(session, records, policy)[first:]
        if not ids:
            made = _ids_of(session, offsets)
        else:
            made = _ids_of(
                session,
                [o for o, message in zip(offsets, fresh, strict=True) if message.id is None],
            )
    else:
        made = []
    session.must_sync |= policy >= session.sync_from
    session.ready |= mask_of(tid)
    if not ids:
        return made
    rest = iter(made)
    return [known if known is not None else next(rest) for known in ids]


def _without_known(
    session: Session, tid: int, messages: Sequence[Encoded]
) -> tuple[list[Encoded], list[str | None]]:
    """Leave out what is already kept under its id, in the file or earlier in this very put."""
    tx = session.tx
    fresh: list[Encoded] = []
    ids: list[str | None] = []
    seen: set[str] = set()
    for message in messages:
        given = message.id
        if given is None:
            ids.append(None)
            fresh.append(message)
            continue
        ids.append(given)
        if given not in seen and tx.find_id(tid, given) is None:
            fresh.append(message)
        seen.add(given)
    return fresh, ids


def _skew_us(session: Session) -> int:
    """How far the wall clock is from queue time, when that is worth a note."""
    skew_us = _clock.wall_us() - session.now_us
    return 0 if -_SKEW_NOTED_US < skew_us < _SKEW_NOTED_US else skew_us


def _put_record(session: Session, tid: int, message: Encoded, skew_us: int) -> _records.Record:
    if message.plain and not skew_us:
        return _records.pack_put(message.priority, message.codec, tid, b"", message.body)
    now_us = session.now_us
    ttl_us = message.ttl_us
    meta = b""
    if (
        skew_us
        or message.key is not None
        or message.id is not None
        or message.delay_us
        or ttl_us is not None
        or message.headers
        or message.codec_name is not None
    ):
        meta = _records.pack_meta(
            key=message.key,
            id=message.id,
            due_us=now_us + message.delay_us if message.delay_us else None,
            expiry_us=None if ttl_us is None else now_us + ttl_us,
            headers=message.headers,
            codec=message.codec_name,
            skew_us=skew_us,
            delay_us=message.delay_us,
            ttl_us=ttl_us,
        )
    return _records.pack_put(message.priority, message.codec, tid, meta, message.body)


def _check_room(session: Session, address: Address, n: int, maxsize: int) -> None:
    if n > maxsize:
        raise Full(
            f"{n} messages can never fit a queue of maxsize {maxsize}; nothing was put; put fewer"
        )
    group = seen_by(session, address)
    waiting = 0 if group is None else waiting_in(session.tx, group)
    if waiting + n > maxsize:
        raise NoRoom(
            f"topic {address.topic!r} has {waiting} of at most {maxsize} messages waiting in group "
            f"{address.group!r}; nothing was put; take some, or wait for room"
        )


def waiting_in(tx: Tx, group: GroupState) -> int:
    """Ready + delayed."""
    return tx.ready_count(group) + group.n_wait + group.n_parked


def _append_puts(session: Session, records: list[_records.Record], policy: int) -> list[int]:
    limit = session.option("max_bytes")
    if limit is not None:
        _check_bytes(session, records, limit)
    return session.append(records, policy, puts=True, spare=False)


def _check_bytes(session: Session, records: list[_records.Record], limit: int) -> None:
    log = session.log
    total = sum(len(piece) for record in records for piece in record) + 64 * len(records)
    grown = log.bytes_with(total, log.room)
    if grown <= limit:
        return
    if 2 * log.segment_bytes + total > limit:
        raise Full(
            f"{total} bytes can never fit a file of max_bytes={limit}; nothing was put; put less, "
            "or open the file with a larger limit"
        )
    raise NoBytes(
        f"the file would grow to {grown} bytes, more than max_bytes={limit}; nothing was put; "
        "settle some messages, or wait for room"
    )


def _ids_of(session: Session, offsets: Sequence[int]) -> list[str]:
    log = session.log
    bits = log.bits
    segment, digest = session.engine.last_digest
    ids = []
    for offset in offsets:
        if offset >> bits != segment:
            segment, digest = offset >> bits, _digest(log.salt(offset))
        ids.append(f"{offset:014x}{digest}")
    session.engine.last_digest = (segment, digest)
    return ids


def own_id(offset: int, salt: int) -> str:
    """The id we make: where the Put is, and a digest of its segment's salt, so that an offset
    that a power cut took back is not answered for. The salt itself stays unknown to whoever
    writes bodies: with it, bytes inside a body could pass for a frame.
    """
    return f"{offset:014x}{_digest(salt)}"


@lru_cache(maxsize=4096)
def _digest(salt: int) -> str:
    return hashlib.blake2b(
        salt.to_bytes(8, "little"), digest_size=4, person=b"weclaw id"
    ).hexdigest()


def check_size(messages: Sequence[Encoded], limit: int) -> None:
    """Refuse what is too large before anything is written."""
    total = 0
    for message in messages:
        size = len(message.body)
        total += size
        if size > limit:
            raise MessageTooLargeError(
                f"the message has {size} bytes once encoded, more than max_message_bytes={limit}; "
                "nothing was put; put less, or open the file with a larger limit"
            )
    if total > MAX_PUT_MANY_BYTES:
        raise MessageTooLargeError(
            f"the messages have {total} bytes together, more than {MAX_PUT_MANY_BYTES}; nothing "
            "was put; put them in several steps"
        )


# -- take ----------------------------------------------------------------------------------------


def take(
    session: Session,
    address: Address,
    n: int,
    visibility_s: float | None,
    waiter: Waiter | None,
    choose: Callable[..., list[Pick]] | None = None,
) -> Taken:
    """Lease up to `n` messages. With none, `waiter` is registered before the lock is given back,
    so that no wake-up falls between looking and waiting. `choose(session, group, n, visible=…,
    now_us=…, suspects=…)` is for an order other than the index's.
    """
    engine = session.engine
    group = group_of(session, address)
    taken = Taken()
    if group.paused_until_us <= session.now_us:
        engine.bury(session, engine.dead_owners(everyone=False))
        picks = _look(session, group, address.retry, n, taken.dead, choose)
        if not picks:
            dead = engine.dead_owners(everyone=True)
            if dead:
                engine.bury(session, dead)
                picks = _look(session, group, address.retry, n, taken.dead, choose)
        if picks:
            _lease(session, address, group, picks, visibility_s, taken.leases)
            session.settled |= mask_of(group.tid)  # ready is less now: there may be room
            return taken
        taken.look_again_us = _next_look(session, group)
    else:
        taken.look_again_us = group.paused_until_us
    if waiter is not None:
        engine.waker.add(waiter)
        session.page.wait_for(engine.slot, READY, mask_of(group.tid))
    return taken


def _look(
    session: Session,
    group: GroupState,
    retry: RetryPolicy,
    n: int,
    dead: list[int],
    choose: Callable[..., list[Pick]] | None,
) -> list[Pick]:
    sweep(session, group, retry, dead)
    suspects = session.engine.suspects_held()
    visible = session.page.visible(session.log.pending_tail)
    now_us = session.now_us
    if choose is not None:
        return choose(session, group, n, visible=visible, now_us=now_us, suspects=suspects)
    return session.tx.pick(group, n, visible=visible, now_us=now_us, suspects=suspects)


def _lease(
    session: Session,
    address: Address,
    group: GroupState,
    picks: list[Pick],
    visibility_s: float | None,
    leases: list[Lease],
) -> None:
    engine = session.engine
    deadline_ns = deadline_of(visibility_s)
    head = session.log.head_offset
    for pick in picks:
        lease = Lease(engine, group.tid, group.gid, pick.offset, pick.priority)
        row: Row | None = pick.row
        if row is not None:
            lease.retry = row.retry
            lease.crash = row.crash
            lease.redrive = row.redrive
            lease.delivery = row.delivery + 1
            lease.keyed = row.keyed
        lease.deadline_ns = deadline_ns
        lease.visibility_s = visibility_s
        lease.holder = address.holder
        if pick.offset >= head:
            lease.salt = session.log.salt(pick.offset)
        else:
            lease.location, lease.salt = place(session, pick.offset)
        leases.append(lease)
    session.append(
        [
            *engine.owner_records(),
            _records.pack_deliver(
                group.tid,
                group.gid,
                engine.token,
                deadline_ns,
                [(pick.offset, pick.priority, pick.from_queue) for pick in picks],
            ),
        ]
    )
    for lease in leases:
        engine.hold(lease)


def place(session: Session, offset: int) -> tuple[int, int]:
    """(location of the record, salt) of a message. Raises LookupError when it is kept no more."""
    if offset >= session.log.head_offset:
        return offset, session.log.salt(offset)
    carried = session.tx.location(offset)
    if carried is None:
        raise LookupError(f"the message at offset {offset} is no longer kept")
    return carried.offset, carried.salt


def deadline_of(visibility_s: float | None) -> int:
    if visibility_s is None:
        return NEVER
    return _clock.monotonic_ns() + int(visibility_s * 1e9)


def _next_look(session: Session, group: GroupState) -> int | None:
    """When something may be ready without anybody writing, in queue time."""
    tx = session.tx
    soonest = tx.next_due(group)
    deadline_ns = tx.next_deadline(group)
    if deadline_ns is not None and deadline_ns < NEVER:
        ahead_us = max(0, (deadline_ns - _clock.monotonic_ns()) // 1000)
        lapse_us = session.now_us + ahead_us + 1
        soonest = lapse_us if soonest is None else min(soonest, lapse_us)
    return soonest


def sweep(session: Session, group: GroupState, retry: RetryPolicy, dead: list[int]) -> None:
    """Judge what ended by itself: owners' deaths, leases run out, messages expired; then make
    ready what is due. Offsets of new dead letters are added to `dead`.
    """
    tx = session.tx
    seq = session.page.words[DEAD_SEQ]
    if group.dead_seen != seq:
        living = {token for _, token in session.page.owners()}
        gone = [(o, row) for o, row in tx.leases(group.gid) if row.owner not in living]
        _return_all(
            session, group, [_judge_death(session, group, o, r, retry, dead) for o, r in gone]
        )
        group.dead_seen = seq
        tx.touch(group)
    now_ns = _clock.monotonic_ns()
    lapsed = tx.lapsed(group, now_ns)
    if lapsed:
        for offset, _ in lapsed:
            session.engine.let_go((group.gid, offset))
        _return_all(
            session,
            group,
            [_judge_lapse(session, group, o, r, retry, now_ns, dead) for o, r in lapsed],
        )
    if not (group.n_back or group.n_suspect or group.n_wait or group.n_parked):
        return  # nothing that could expire or be due
    expired = tx.expired(group, session.now_us)
    if expired:
        dead.extend(offset for offset, _ in expired)
        _return_all(
            session, group, [_die(session, group, o, r, EXPIRY_REASON, None) for o, r in expired]
        )
    tx.move_due(group, session.now_us)


def _return_all(session: Session, group: GroupState, records: list[_records.Record]) -> None:
    if records:
        session.judge(records)
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
    crash = row.crash + 1
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
        retry=row.retry + 1,
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


def backoff_us(retry: RetryPolicy, retry_number: int) -> int:
    """The wait before that retry, in microseconds, with its jitter drawn."""
    return int(retry.delay(retry_number) * 1e6)


# -- settle --------------------------------------------------------------------------------------


def hold(session: Session, lease: Lease) -> None:
    """Raise LeaseLostError unless this process holds the lease now.

    No look-up: before its deadline, and under the lock, nobody else can have it.
    """
    key = (lease.gid, lease.offset)
    if lease.over or session.engine.held.get(key) is not lease:
        raise LeaseLostError(
            f"message at offset {lease.offset} was settled already, or its lease was taken back; "
            "nothing was changed"
        )
    if _clock.monotonic_ns() >= lease.deadline_ns:
        raise LeaseLostError(
            f"the lease of {lease.visibility_s} s on the message at offset {lease.offset} ran out "
            "before it was settled; nothing was changed, the message is delivered again; use a "
            "longer visibility_timeout, extend() or `with msg`"
        )


def let_go(session: Session, lease: Lease) -> None:
    lease.over = True
    session.engine.let_go((lease.gid, lease.offset))
    mask = mask_of(lease.tid)
    session.settled |= mask
    if lease.keyed or lease.crash:
        session.ready |= mask  # the next of its key, or the next suspect, may go


def ack(session: Session, lease: Lease, result: bytes, policy: int) -> None:
    hold(session, lease)
    session.append([_records.pack_ack(lease.tid, lease.gid, lease.offset, result)], policy)
    session.must_sync |= policy >= SYNC
    let_go(session, lease)


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
    hold(session, lease)
    failure = (session.now_us, reason, consumer) if count else None
    dies = count and lease.retry >= retry.max_retries
    if dies:
        record = _dead_of(session, lease, reason, failure)
    else:
        n = lease.retry + 1
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
    session.append([record], policy)
    session.must_sync |= policy >= SYNC
    let_go(session, lease)
    session.ready |= mask_of(lease.tid)
    return dies


def fail(session: Session, lease: Lease, reason: str, consumer: str, policy: int) -> None:
    """Straight to the dead letters."""
    hold(session, lease)
    failure = (session.now_us, reason, consumer)
    session.append([_dead_of(session, lease, reason, failure)], policy)
    session.must_sync |= policy >= SYNC
    let_go(session, lease)


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
    hold(session, lease)
    session.append(
        [
            _records.pack_return(
                lease.gid,
                lease.offset,
                UNDO if undo else RELEASE,
                delivery=lease.delivery - 1 if undo else lease.delivery,
                retry=lease.retry,
                crash=lease.crash,
            )
        ]
    )
    let_go(session, lease)
    session.ready |= mask_of(lease.tid)


def extend(session: Session, lease: Lease, seconds: float | None) -> None:
    """Count the lease anew from now."""
    hold(session, lease)
    deadline_ns = deadline_of(seconds)
    session.append([_records.pack_extend(lease.gid, lease.offset, deadline_ns)])
    lease.deadline_ns = deadline_ns
    lease.visibility_s = seconds


def transact(
    session: Session,
    acks: Sequence[tuple[Lease, bytes]],
    puts: Sequence[tuple[Address, Encoded]],
    policy: int,
) -> list[str]:
    """Acks and puts over topics of the file as one frame: all or none, also after a crash."""
    for lease, _ in acks:
        hold(session, lease)
    if len({(lease.gid, lease.offset) for lease, _ in acks}) < len(acks):
        raise LeaseLostError("a message was acked twice in one transaction; nothing was changed")
    records: list[_records.Record] = [
        _records.pack_ack(lease.tid, lease.gid, lease.offset, result) for lease, result in acks
    ]
    skew_us = _skew_us(session)
    topics: dict[str, int] = {}
    ids: list[str | None] = []
    places: list[int] = []
    given: set[tuple[int, str]] = set()
    for address, message in puts:
        tid = topics.get(address.topic)
        if tid is None:
            tid, first = topic_of(session, address.topic)
            topics[address.topic] = tid
            records.extend(first)
        if message.id is not None:
            ids.append(message.id)
            if (tid, message.id) in given or session.tx.find_id(tid, message.id) is not None:
                continue
            given.add((tid, message.id))
        else:
            ids.append(None)
            places.append(len(records))
        records.append(_put_record(session, tid, message, skew_us))
        session.ready |= mask_of(tid)
    if records:
        offsets = (
            _append_puts(session, records, policy) if puts else session.append(records, policy)
        )
        session.must_sync |= policy >= SYNC
    for lease, _ in acks:
        let_go(session, lease)
    made = iter(_ids_of(session, [offsets[place] for place in places]))
    return [known if known is not None else next(made) for known in ids]


def wait_settled(session: Session, tid: int, waiter: Waiter) -> None:
    """Register a waiter for room, results or the end of all work in a topic."""
    session.engine.waker.add(waiter)
    session.page.wait_for(session.engine.slot, SETTLED, mask_of(tid) if tid >= 0 else ALL)


def new_waiter(kind: int) -> Waiter:
    return Waiter(READY_BYTE if kind == READY else SETTLED_BYTE)


def set_aside(session: Session, offset: int, reason: str) -> None:
    """A message whose bytes are damaged: out of every group, told of in `verify` and `stats`."""
    session.append([_records.pack_damaged([(offset, clipped(reason))])])
    for key in [key for key in session.engine.held if key[1] == offset]:
        session.engine.let_go(key).over = True
    session.settled = ALL


def clipped(reason: str) -> str:
    return reason.encode("utf-8", "backslashreplace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
