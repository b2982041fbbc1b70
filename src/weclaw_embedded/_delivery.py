"""What putting, taking and settling share: addresses, messages on their way in, leases.

Role: the values these operations pass around, and the few things each of them does: find or begin
the topic and group, find where a message lies, register who waits.

Invariants: a message leaves only by ack, cancel, the dead letters or purge. Everything a user sees
after a restart is decided in these operations and written down.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

from . import _clock, _records
from ._engine import Engine
from ._index import GroupState, Location, Row, Tx
from ._options import RetryPolicy
from ._records import NEVER, RELEASE, UNDO
from ._session import ALL, Session
from ._shared import LEASES_SEQ, READY, SETTLED, mask_of
from ._wake import READY_BYTE, SETTLED_BYTE, Waiter, waiter_for
from .errors import CorruptError

MAX_REASON_BYTES: Final = 4096
_OWN_ID_DIGITS: Final = 22
_HEX: Final = frozenset("0123456789abcdef")
# What ends or is due sooner is told to all who wait: by themselves they would look too late.
SOON_S: Final = 2.5


@dataclass(frozen=True)
class Address:
    """A topic and group as an operation needs them."""

    topic: str
    group: str
    gid: int
    retry: RetryPolicy
    holder: object = None  # whose leases are handed back together: the queue's, so its store's
    start: str | int = "earliest"  # where the group begins if it does not exist


class Terms:
    """What is said of a message besides its body. Messages of one handle of which nothing is said
    but how their bodies are written share one.
    """

    __slots__ = (
        "codec",
        "codec_name",
        "delay_us",
        "headers",
        "id",
        "key",
        "plain",
        "priority",
        "ttl_us",
    )

    def __init__(self, codec: int, codec_name: str | None) -> None:
        self.codec = codec
        self.codec_name = codec_name
        self.plain = codec_name is None  # a PUT of it has no meta
        self.priority = 0
        self.key: str | None = None
        self.id: str | None = None
        self.delay_us = 0
        self.ttl_us: int | None = None
        self.headers: bytes | None = None


# Messages ready to be put, of which the same is said: everything but what only the lock can tell
# (offset, time). Of those that were given an id there is one.
Encoded: TypeAlias = tuple[Sequence[bytes], Terms]
# Called with the offsets of new dead letters.
TellDead: TypeAlias = Callable[[list[int]], None]


class Lease:
    """What this process knows of a message it holds; begun by `_taking`. Changed only under the
    write lock.
    """

    # One is made for each delivery. What every one of them is asked for has a place of its own, and
    # is set as it is made; of most messages no more is to be said than stands in the class.
    __slots__ = (
        "__dict__",
        "deadline_ns",
        "engine",
        "gid",
        "holder",
        "length_s",
        "location",
        "mask",
        "offset",
        "over",
        "salt",
        "tid",
        "unblocks",
        "visibility_s",
    )
    engine: Engine
    holder: object
    tid: int
    mask: int  # of the topic, of whom is told when it ends
    gid: int
    offset: int
    location: int  # where the message stands, which may have been carried there
    salt: int  # of the segment it was put into
    deadline_ns: int
    visibility_s: float | None  # as it was taken
    length_s: float | None  # the same; once it was extended, as that was last
    over: bool
    unblocks: bool  # when it ends, another may go: the next of its key, or the next suspect
    lost = False  # it is over, and nobody here has ended it
    handed_back = False  # that is why: its queue was closed
    retry = crash = 0
    delivery = 1
    renewal: Any = None  # what extends it while a `with` lasts
    given_id: str | None = None  # of the message, by whoever put it

    @property
    def id(self) -> str:
        """Of the message."""
        return own_id(self.offset, self.salt) if self.given_id is None else self.given_id

    def know(self, row: Row) -> None:
        """Take over what is known of a message that was delivered before, or has a key."""
        self.retry = row.retry
        self.crash = row.crash
        self.delivery = _records.one_more(row.delivery)
        self.unblocks = bool(row.keyed or row.crash)

    def release_record(self, undo: bool = False) -> bytes:
        """Hand it back uncounted. `undo`: a delivery that nobody ever saw is none."""
        return _records.pack_return(
            self.gid,
            self.offset,
            UNDO if undo else RELEASE,
            delivery=self.delivery - 1 if undo else self.delivery,
            retry=self.retry,
            crash=self.crash,
        )[0]


class Taken:
    """What a take found, or when it is worth looking again."""

    leases: list[Lease]
    dead: list[int]  # offsets that became dead letters meanwhile
    look_again_us: int | None = None  # queue time
    paused = ""  # until when, and why, if that is why nothing was found
    has_more = False  # has ended by itself and was not judged yet: to be looked again at once
    is_held_back = False  # nothing was found, but for suspects while this process has one in hand


def taken_of(leases: list[Lease], dead: list[int]) -> Taken:
    """What a take found."""
    taken = Taken()
    taken.leases = leases
    taken.dead = dead
    return taken


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


def group_of(session: Session, address: Address) -> GroupState:
    """The group, begun now if it does not exist yet."""
    group = session.tx.group(address.gid)
    return group if group is not None and group.name else begin_group(session, address)


def begin_group(session: Session, address: Address) -> GroupState:
    """Begin a group that does not exist, or lost its name to damage."""
    tid, records = topic_of(session, address.topic)
    session.append([*records, group_record(tid, address)])
    found = session.tx.group(address.gid)
    assert found is not None, "a GROUP record makes the group"
    return found


def group_record(tid: int, address: Address) -> _records.Record:
    return _records.pack_group(tid, address.gid, address.group, address.start)


def seen_by(session: Session, address: Address) -> GroupState | None:
    """The group; before its first get, the template that shows what it would get, None when that
    is nothing.
    """
    tx = session.tx
    group = tx.group(address.gid)
    if group is not None or address.start == "latest":
        return group
    topic = tx.topic(address.topic)
    return None if topic is None else tx.group(topic.tid)


def waiting_in(tx: Tx, group: GroupState) -> int:
    """Ready + delayed."""
    return tx.ready_count(group) + group.n_wait + group.n_parked


def unfinished_in(tx: Tx, group: GroupState) -> int:
    """Ready + delayed + leased: what `join` waits for, and what may still have to be settled."""
    return tx.ready_count(group) + group.n_wait + group.n_parked + group.n_leased


def own_id(offset: int, salt: int) -> str:
    """The id we make: where the Put is, and a digest of its segment's salt, so that an offset
    that a power cut took back is not answered for. The salt itself stays unknown to whoever
    writes bodies: with it, bytes inside a body could pass for a frame.
    """
    return f"{offset:014x}{digest_of(salt)}"


@lru_cache(maxsize=4096)
def digest_of(salt: int) -> str:
    return hashlib.blake2b(
        salt.to_bytes(8, "little"), digest_size=4, person=b"weclaw id"
    ).hexdigest()


class GoneError(LookupError):
    """The message at `offset` is kept no more."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the message at offset {offset} is no longer kept")
        self.offset = offset


def place(session: Session, offset: int) -> tuple[int, int]:
    """(location of the record, salt) of a message. Raises GoneError when it is kept no more."""
    if offset >= session.log.head_offset:
        return offset, session.log.salt(offset)
    carried = carried_to(session, offset)
    if carried is None:
        raise GoneError(offset)
    return carried.offset, carried.salt


def place_of_live(session: Session, offset: int) -> tuple[int, int] | None:
    """The place of a message that the index has; None when it is kept no more, as where damage hit
    what carried it up: it is set aside.
    """
    try:
        return place(session, offset)
    except GoneError as gone:
        set_aside(session, offset, str(gone))
        return None


def carried_to(session: Session, offset: int) -> Location | None:
    """Where a message was carried to, if it was and stands there still: the index forgets a little
    later than the log.
    """
    carried = session.tx.location(offset)
    if carried is None or carried.offset < session.log.head_offset:
        return None
    return carried


def find(session: Session, tid: int, id: str) -> int | None:
    """The offset of the message with this id, given by the caller or made by us, while it is kept
    in the topic.
    """
    try:
        return find_sound(session, tid, id)
    except CorruptError:
        return None


def find_sound(session: Session, tid: int, id: str) -> int | None:
    """`find`. Raises CorruptError where there was a message of this id that can't be read now; of
    this topic or another one.
    """
    tx = session.tx
    offset = tx.find_id(tid, id)
    if offset is not None:
        kept = offset >= session.log.head_offset or carried_to(session, offset) is not None
        return offset if kept else None
    if len(id) != _OWN_ID_DIGITS or not _HEX.issuperset(id):
        return None
    offset = int(id[:14], 16)
    log = session.log
    if offset >= log.pending_tail:
        return None
    if offset < log.head_offset:
        carried = carried_to(session, offset)
        if carried is None or carried.tid != tid or own_id(offset, carried.salt) != id:
            return None
    else:
        try:
            if own_id(offset, log.salt(offset)) != id or not _is_put(
                session.engine.put_and_time(offset)[0], tid
            ):
                return None
        except CorruptError as error:
            raise CorruptError(offset, error.reason) from error
        except (LookupError, _records.NoRecordError):
            return None
        if not tx.knows(tid, offset):
            raise CorruptError(offset, "the frame it was put in can't be read to its end")
    return offset


def _is_put(record: Any, tid: int) -> bool:
    try:
        put = _records.unpack_put(record)
    except _records.NoRecordError:
        return False
    return put.tid == tid and _records.META_ID not in put.meta


def is_kept(session: Session, tid: int, id: str) -> bool:
    """Whether a put with this id has to store nothing."""
    offset = find(session, tid, id)
    if offset is None:
        return False
    if session.tx.find_id(tid, id) is not None:
        return True
    put = session.engine.put_at(place(session, offset)[0])  # the id is one of ours
    return not session.tx.is_free(tid, offset, put.priority)


def deadline_of(visibility_s: float | None) -> int:
    if visibility_s is None:
        return NEVER
    return _clock.monotonic_ns() + int(visibility_s * 1e9)


def backoff_us(retry: RetryPolicy, retry_number: int) -> int:
    """The wait before that retry, in microseconds, with its jitter drawn."""
    return int(retry._delay(retry_number) * 1e6)


def wait_settled(session: Session, tid: int, waiter: Waiter) -> None:
    """Register a waiter for room, results or the end of all work in a topic."""
    session.engine.waker.add(waiter)
    session.page.wait_for(session.engine.slot, SETTLED, mask_of(tid) if tid >= 0 else ALL)


def new_waiter(kind: int) -> Waiter:
    return waiter_for(READY_BYTE if kind == READY else SETTLED_BYTE)


# Messages of one place that are set aside at once.
_MOST_ASIDE: Final = 50_000


def set_aside(
    session: Session, offset: int, reason: str, location: int | None = None
) -> int | None:
    """A message whose bytes, which stand at `location`, are damaged: out of every group, told of in
    `verify` and `stats`; and with it all else in the place that can't be read, but for what is
    leased: whoever has that has read it. Who only looks leaves that to those who write. Returns
    where the place begins; None where it is noted already.
    """
    if session.may_write and session.tx.is_aside(offset):
        return None
    engine = session.engine
    location = offset if location is None else location
    span: tuple[int, int] | None = None
    if location == offset:
        span = engine.last_bad
        if not span[0] <= location < span[1]:
            span = session.log.at_rest().bad_span(location)
            engine.last_bad = span or (0, 0)
    place = location if span is None else span[0]
    if not session.may_write:
        return place
    items = [(offset, clipped(reason))]
    tx = session.tx
    if span is not None and tx.is_aside(place):
        items = [(offset, "")]  # one that was leased when its neighbours were set aside
    elif span is not None:
        others = [one for one in tx.live_in(*span, _MOST_ASIDE) if span[0] <= one < span[1]]
        groups = tx.groups(None)
        held = {one for group in groups for one, _ in tx.leases(group.gid)} if others else set()
        # Without a reason of their own: they are no more places, and are counted as none.
        items = [(place, items[0][1])]
        items += [(one, "") for one in others if one not in held and one not in (offset, place)]
        if offset != place:
            items.append((offset, ""))
    session.append([_records.pack_damaged(items)])
    engine.lose([lease for lease in engine.held if lease.offset == offset])
    session.page.words[LEASES_SEQ] += 1  # for those whom other processes hold
    session.settled = ALL
    return place


def clipped(reason: str) -> str:
    return reason.encode("utf-8", "backslashreplace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
