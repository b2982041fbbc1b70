"""What stands in the index, row by row: keys, values and the objects made of them.  Pure.

The index is derived and lives on one machine, so that its numbers are in the machine's own order
and its layout may change with any release.  Keys are big endian, so that they sort as the numbers
do.  The rows written by every commit come first in the key space and stand together: a commit
costs what it costs in pages.

    HEAD                                    applied, checksum, sequence, shape, last frame
    META                                    what the store remembers of the index
    OPTIONS                                 what the log says of the file
    GROUP      gid                          GroupState
    TOPIC      tid                          TopicState
    LEASED     gid offset                   Row          a message that is neither merely in the
    OTHER      gid offset                   Row          queue nor done has exactly one of these
    DEAD       gid offset                   Row          three in a group
    BACK       gid 9-priority order         offset       ready again
    SUSPECT    gid 9-priority order         offset       ready again, was in a crash
    WAIT       gid due offset                            not before
    KEY        gid keyhash order            offset       all of that key that is not done
    EXPIRY     gid expiry offset                         not leased, dead from then on
    QUEUE      tid priority number          Chunk        the plain messages, in put order
    SKIP       tid offset                   priority, why  not to be taken from the queue
    RESULT     gid offset                   offset of the record that holds the result
    DELIVERED  gid offset                   how often, of one that is done and was not merely
                                            delivered once from the queue
    PURGED     gid priority offset          end of the range (priority 255: that message alone)
    ID         tid idhash                   offset, priority
    ID_OF      offset                       tid, idhash
    MOVED      offset                       Location of a carried message
    MOVED_TO   offset of the CARRY          offset of the message
    NAME       hash of a topic's name       tid
    OWNER_NAME token                        name of the consumer
    DAMAGE     offset                       why it could not be read
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from ._records import (
    NEVER,
    NO_KEY,
    PRIORITIES,
    STATE_DEAD,
    STATE_LEASED,
    Failure,
)

HEAD: Final = b"\x01"
META: Final = b"\x02"
OPTIONS: Final = b"\x02o"
GROUP: Final = b"\x03"
TOPIC: Final = b"\x04"
LEASED: Final = b"\x05"
OTHER: Final = b"\x06"
BACK: Final = b"\x07"
SUSPECT: Final = b"\x08"
WAIT: Final = b"\x09"
KEY: Final = b"\x0a"
EXPIRY: Final = b"\x0b"
DEAD: Final = b"\x0c"
QUEUE: Final = b"\x0d"
SKIP: Final = b"\x0e"
RESULT: Final = b"\x0f"
PURGED: Final = b"\x10"
ID: Final = b"\x11"
ID_OF: Final = b"\x12"
MOVED: Final = b"\x13"
MOVED_TO: Final = b"\x14"
NAME: Final = b"\x15"
DELIVERED: Final = b"\x16"
OWNER_NAME: Final = b"\x17"
DAMAGE: Final = b"\x18"

OF_GROUP: Final = (
    LEASED,
    OTHER,
    BACK,
    SUSPECT,
    WAIT,
    KEY,
    EXPIRY,
    DEAD,
    RESULT,
    DELIVERED,
    PURGED,
)  # prefixes whose next eight bytes are a gid

key_u32 = struct.Struct(">cI").pack
key_u64 = struct.Struct(">cQ").pack
key_u64_u64 = struct.Struct(">cQQ").pack  # LEASED, OTHER, DEAD, WAIT, EXPIRY, RESULT, DELIVERED
key_ranked = struct.Struct(">cQBQ").pack  # BACK, SUSPECT, PURGED
key_key = struct.Struct(">cQ8sQ").pack
key_queue = struct.Struct(">cIBQ").pack
key_tid_u64 = struct.Struct(">cIQ").pack
U32: Final = struct.Struct(">I")
U64: Final = struct.Struct(">Q")
HEAD_ROW: Final = struct.Struct("<QIQIQ")
ID_ROW: Final = struct.Struct(">QB")
MOVED_ROW: Final = struct.Struct("<QQQIB")

FORGOTTEN_TO: Final = "forgotten_to"  # in META: what stood below that offset may be missing
ALONE: Final = 255  # in PURGED and SKIP: a message that is not in a position queue
CANCELLED: Final = 0  # why an entry of the queue is skipped
CARRIED: Final = 1


def id_hash(message_id: str) -> bytes:
    """Return the 16 bytes an id given by the caller is found by."""
    return hashlib.blake2b(message_id.encode(), digest_size=16).digest()


def name_key(name: str) -> bytes:
    """Return the key of the row that finds a topic by its name."""
    return NAME + hashlib.blake2b(name.encode(), digest_size=16).digest()


class Location(NamedTuple):
    """Where a carried message stands now, and the salt and time it was put with."""

    offset: int
    salt: int
    time_us: int
    tid: int
    priority: int


class Picks(NamedTuple):
    """Messages to deliver next, in that order: column by column, as hundreds are taken at once.

    `flags` are what the items of a DELIVER say of each, its priority and whether it is from the
    queue. `rows` has, by offset, what is known of those that were delivered before or have a key.
    `in_line`: they are what follows in one queue, from the group's cursor on.
    """

    offsets: list[int]
    flags: list[int]
    rows: dict[int, Row]
    in_line: bool = False


class Pick(NamedTuple):
    """One of them, as long as it is looked for among others."""

    offset: int
    priority: int
    from_queue: bool
    row: Row | None


def picks_of(picks: Sequence[Pick]) -> Picks:
    """Return what was found one by one."""
    return Picks(
        [pick.offset for pick in picks],
        [pick.priority << 4 | pick.from_queue for pick in picks],
        {pick.offset: pick.row for pick in picks if pick.row is not None},
    )


# Messages that are neither merely in the queue nor done

ROW: Final = struct.Struct("<BBBxIQQQQIIII8s")
ROW_KEYED: Final = 1
_FLAG_TOLD: Final = 2
ROW_FLAGS: Final = 2  # the byte of a packed row that says whether it has a key
ROW_SIZE: Final = slice(4, 8)  # those that say its size
ROW_DELIVERY: Final = slice(40, 44)  # and how often it was delivered
NOTHING: Final = bytes(4)
ONCE: Final = (1).to_bytes(4, "little")
NO_OWNER: Final = 0


class Row:
    """One message in one group.

    `deadline` is that of the lease in ns while leased, otherwise when it is due in us (0: now).
    `order` is what it is sorted by inside its priority and its key.
    """

    __slots__ = (
        "crash",
        "deadline",
        "delivery",
        "died_us",
        "expiry_us",
        "failures",
        "keyhash",
        "order",
        "owner",
        "priority",
        "reason",
        "redrive",
        "retry",
        "size",
        "state",
    )

    def __init__(
        self,
        priority: int,
        order: int,
        *,
        deadline: int = 0,
        expiry_us: int = 0,
        keyhash: bytes = NO_KEY,
        size: int = 0,
    ) -> None:
        self.state = 0
        self.priority = priority
        self.size = size
        self.owner = NO_OWNER
        self.deadline = deadline
        self.order = order
        self.expiry_us = expiry_us
        self.delivery = 0
        self.retry = 0
        self.crash = 0
        self.redrive = 0
        self.keyhash = keyhash
        self.failures: list[Failure] = []
        self.reason = ""
        self.died_us = 0

    @property
    def keyed(self) -> bool:
        """Whether the message has a key."""
        return self.keyhash != NO_KEY

    def pack(self) -> bytes:
        """Return the row's value."""
        flags = ROW_KEYED if self.keyhash != NO_KEY else 0
        told = b""
        if self.state == STATE_DEAD:
            told = msgpack.packb([self.failures, self.reason, self.died_us])
        elif self.failures:
            told = msgpack.packb([self.failures])
        fixed = ROW.pack(
            self.state,
            self.priority,
            flags | _FLAG_TOLD if told else flags,
            self.size,
            self.owner,
            self.deadline,
            self.order,
            self.expiry_us,
            self.delivery,
            self.retry,
            self.crash,
            self.redrive,
            self.keyhash,
        )
        return fixed + told if told else fixed

    @classmethod
    def unpack(cls, value: bytes) -> Row:
        """Return the row a value says."""
        row = cls.__new__(cls)
        (
            row.state,
            row.priority,
            flags,
            row.size,
            row.owner,
            row.deadline,
            row.order,
            row.expiry_us,
            row.delivery,
            row.retry,
            row.crash,
            row.redrive,
            row.keyhash,
        ) = ROW.unpack_from(value)
        row.failures = []
        row.reason = ""
        row.died_us = 0
        if flags & _FLAG_TOLD:
            told = msgpack.unpackb(value[ROW.size :])
            row.failures = [(when, reason, consumer) for when, reason, consumer in told[0]]
            if row.state == STATE_DEAD:
                row.reason, row.died_us = told[1], told[2]
        return row


def first_lease(priority: int, offset: int, owner: int, deadline_ns: int) -> bytes:
    """Return the value of a plain message's first lease, without an object in between."""
    return ROW.pack(STATE_LEASED, priority, 0, 0, owner, deadline_ns, offset, 0, 1, 0, 0, 0, NO_KEY)


# The position queue

CHUNK_ENTRIES: Final = 1018  # with its base exactly one page of LMDB
NARROW: Final = 2**32 - 1  # so far may an entry be from the first one, at four bytes
_WIDE: Final = 1 << 63
_BASE: Final = struct.Struct("=Q")


class Chunk:
    """Part of a position queue: ascending offsets, four bytes each (eight when far apart)."""

    __slots__ = ("base", "deltas")

    def __init__(self) -> None:
        self.base = 0
        self.deltas: array[int] = array("I")

    def add(self, offset: int) -> None:
        """Append an offset, which is larger than all before it."""
        deltas = self.deltas
        if not deltas:
            self.base = offset
        try:
            deltas.append(offset - self.base)
        except OverflowError:
            self.deltas = array("Q", deltas)
            self.deltas.append(offset - self.base)

    def part(self, start: int, end: int) -> Chunk:
        """Return some of its entries as a chunk of their own."""
        chunk = Chunk()
        deltas = self.deltas[start:end]
        first = deltas[0]
        chunk.base = self.base + first
        is_narrow = deltas[-1] - first <= NARROW
        chunk.deltas = array("I" if is_narrow else "Q", [delta - first for delta in deltas])
        return chunk

    def pack(self) -> bytes:
        """Return the chunk's value."""
        base = self.base if self.deltas.itemsize == 4 else self.base | _WIDE
        return _BASE.pack(base) + self.deltas.tobytes()

    @classmethod
    def unpack(cls, value: bytes) -> Chunk:
        """Return the chunk a value says."""
        chunk = cls()
        base = _BASE.unpack_from(value)[0]
        if base & _WIDE:
            base ^= _WIDE
            chunk.deltas = array("Q")
        chunk.base = base
        chunk.deltas.frombytes(value[_BASE.size :])
        return chunk


_NO_PART: Final = Chunk()

# Topics and groups

# Leases that are not written yet, by offset: (priority, owner, deadline).
Leases: TypeAlias = dict[int, tuple[int, int, int]]

_TOPIC_ROW: Final = struct.Struct(f"<{PRIORITIES}Q{PRIORITIES}QQQH")
_GROUP_ROW: Final = struct.Struct(f"<I4x{PRIORITIES}Q7Q8Q")


class TopicState:
    """A topic: how far its position queues reach.

    `tails` and `firsts` are, for each priority, the index after the last entry and that of the
    first one kept.  `puts` and `put_bytes` count all messages ever put.
    """

    __slots__ = (
        "changed",
        "firsts",
        "name",
        "order",
        "put_bytes",
        "puts",
        "tail",
        "tails",
        "tid",
        "used",
    )

    def __init__(self, tid: int, name: str) -> None:
        self.tid = tid
        self.name = name
        self.tails = [0] * PRIORITIES
        self.firsts = [0] * PRIORITIES
        self.puts = 0
        self.put_bytes = 0
        self.used = 0
        self.order: tuple[int, ...] = ()  # priorities in use, highest first
        self.tail: list[Chunk | None] = [None] * PRIORITIES  # loaded when needed
        self.changed = 0  # bits of the priorities whose last chunk is not written yet

    def use(self, priority: int) -> None:
        """Note that a priority is in use."""
        self.used |= 1 << priority
        self.order = tuple(p for p in range(PRIORITIES - 1, -1, -1) if self.used >> p & 1)

    def pack(self) -> bytes:
        """Return the topic's value."""
        return (
            _TOPIC_ROW.pack(
                *self.tails,
                *self.firsts,
                self.puts,
                self.put_bytes,
                self.used,
            )
            + self.name.encode()
        )

    @classmethod
    def unpack(cls, tid: int, value: bytes) -> TopicState:
        """Return the topic a value says."""
        topic = cls(tid, value[_TOPIC_ROW.size :].decode())
        fields = _TOPIC_ROW.unpack_from(value)
        topic.tails = list(fields[:PRIORITIES])
        topic.firsts = list(fields[PRIORITIES : 2 * PRIORITIES])
        topic.puts, topic.put_bytes, used = fields[2 * PRIORITIES :]
        topic.used = used
        topic.order = tuple(p for p in range(PRIORITIES - 1, -1, -1) if used >> p & 1)
        return topic


_NO_TOPIC: Final = TopicState(0, "")


class GroupState:
    """A group: how far it is in the position queues, and how many messages it has where.

    `cursor` is, for each priority, the index of the first entry of the position queue not handed
    out yet; `skipped` counts entries from there on that are not to be delivered.  `start` is the
    offset before which the group owns nothing, `created` that of the record that made it.
    `next_deadline_ns` is a lower bound of the deadlines of its leases.  `fresh` are leases of plain
    messages that have no row yet, which LMDB gets before the group.

    `part` is the part of a position queue that the group read last, which begins at the index
    `part_start`, and `lane` says of which queue: the priority and that it is from the queue, as the
    items of a DELIVER do.  Once it was right it stays so: entries are only ever added behind the
    last, and a part that is full never changes.  `topic` is that of the queue, and `order` what its
    order was if it had no other queue.
    """

    __slots__ = (
        "created",
        "cursor",
        "dead_seen",
        "fresh",
        "gid",
        "lane",
        "n_back",
        "n_dead",
        "n_lease_rows",
        "n_parked",
        "n_suspect",
        "n_wait",
        "name",
        "next_deadline_ns",
        "order",
        "part",
        "part_start",
        "pause_reason",
        "paused_until_us",
        "picks",
        "retries",
        "settled",
        "skipped",
        "start",
        "text",
        "tid",
        "topic",
    )

    def __init__(self, tid: int, gid: int, name: str, start: int = 0, created: int = 0) -> None:
        self.tid = tid
        self.gid = gid
        self.name = name
        self.start = start
        self.created = created
        self.cursor = [0] * PRIORITIES
        self.skipped = 0
        self.n_back = 0
        self.n_suspect = 0
        self.n_wait = 0
        self.n_parked = 0
        self.n_lease_rows = 0
        self.n_dead = 0
        self.settled = 0
        self.retries = 0
        self.picks = 0
        self.next_deadline_ns = NEVER
        self.dead_seen = 0
        self.paused_until_us = 0
        self.pause_reason = ""
        self.text: bytes | None = None  # name and reason, packed
        self._begin()

    def _begin(self) -> None:
        self.fresh: Leases = {}
        self.part = _NO_PART
        self.part_start = 0
        self.lane = -1
        self.topic: TopicState = _NO_TOPIC
        self.order: tuple[int, ...] | None = None

    @property
    def n_leased(self) -> int:
        """How many messages are leased."""
        return self.n_lease_rows + len(self.fresh)

    @property
    def is_template(self) -> bool:
        """Whether this stands for the group that a topic would give a new reader."""
        return self.gid == self.tid

    def pack(self) -> bytes:
        """Return the group's value."""
        assert not self.fresh, "leases are written before their group"
        text = self.text
        if text is None:
            text = self.text = msgpack.packb([self.name, self.pause_reason])
        return (
            _GROUP_ROW.pack(
                self.tid,
                *self.cursor,
                self.skipped,
                self.n_back,
                self.n_suspect,
                self.n_wait,
                self.n_parked,
                self.n_lease_rows,
                self.n_dead,
                self.settled,
                self.retries,
                self.picks,
                self.next_deadline_ns,
                self.dead_seen,
                self.paused_until_us,
                self.start,
                self.created,
            )
            + text
        )

    @classmethod
    def unpack(cls, gid: int, value: bytes) -> GroupState:
        """Return the group a value says."""
        group = cls.__new__(cls)
        group.gid = gid
        fields: tuple[Any, ...] = _GROUP_ROW.unpack_from(value)
        group.tid = fields[0]
        group.cursor = list(fields[1 : 1 + PRIORITIES])
        (
            group.skipped,
            group.n_back,
            group.n_suspect,
            group.n_wait,
            group.n_parked,
            group.n_lease_rows,
            group.n_dead,
            group.settled,
            group.retries,
            group.picks,
            group.next_deadline_ns,
            group.dead_seen,
            group.paused_until_us,
            group.start,
            group.created,
        ) = fields[1 + PRIORITIES :]
        group.text = value[_GROUP_ROW.size :]
        group.name, group.pause_reason = msgpack.unpackb(group.text)
        group._begin()
        return group


GROUP_TID: Final = struct.Struct("<I")  # a group's value begins with its topic
