"""What stands in the index, row by row: all keys, and the values of messages' rows.  Pure.

The objects of GROUP, TOPIC and QUEUE are in `_index_topics`, because they stay in memory.

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
    OWNER_AT   token                        offset of the OWNER that said it last
    OWNER_OF   offset of an OWNER           token
    DAMAGE     offset                       why it could not be read
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgpack

from ._records import (
    NO_KEY,
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
OWNER_AT: Final = b"\x19"
OWNER_OF: Final = b"\x1a"

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
