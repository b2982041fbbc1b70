"""What a record can say: types, numbers and limits.  Data only.

`_records` packs and unpacks them, gives these names on, and is where the layouts are told.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from ._format import MAX_OFFSET as MAX_OFFSET

Record = tuple[bytes, ...]  # the pieces of one record, in order
Readable = bytes | memoryview
Failure = tuple[int, str, str]  # when (us), reason, consumer

PUT: Final = 1
DELIVER: Final = 2
ACK: Final = 3
RETURN: Final = 4
DEAD: Final = 5
EXTEND: Final = 6
REDRIVE: Final = 7
CANCEL: Final = 8
PURGE: Final = 9
PURGE_DEAD: Final = 10
TOPIC: Final = 11
GROUP: Final = 12
GROUP_DROP: Final = 13
PAUSE: Final = 14
REPLAY: Final = 15
OPTION: Final = 16
CHECKPOINT: Final = 17
CARRY: Final = 18
CLEAN: Final = 19
VOID: Final = 20
OWNER: Final = 21
DAMAGED: Final = 22
SKIPPABLE: Final = 64  # types from here on may be passed over by a reader that does not know them

CODEC_MSGPACK: Final = 0
CODEC_JSON: Final = 1
CODEC_RAW: Final = 2
CODEC_PICKLE: Final = 3
CODEC_OTHER: Final = 4  # its name stands in the meta

META_KEY: Final = 1
META_ID: Final = 2
META_DUE_US: Final = 3
META_EXPIRY_US: Final = 4
META_HEADERS: Final = 5
META_CODEC: Final = 6
META_SKEW_US: Final = 7
META_DELAY_US: Final = 8
META_TTL_US: Final = 9

# Why a leased message came back.
NACK: Final = 0
LAPSED: Final = 1
DIED: Final = 2
RELEASE: Final = 3
UNDO: Final = 4  # a delivery nobody ever saw

# Where a carried message stands in a group.
STATE_READY: Final = 1
STATE_SUSPECT: Final = 2  # ready, and in a crash before: handed out alone
STATE_WAITING: Final = 3
STATE_PARKED: Final = 4  # behind an earlier message of its key
STATE_LEASED: Final = 5
STATE_DEAD: Final = 6

PRIORITIES: Final = 10
NEVER: Final = 2**63 - 1  # the deadline of a lease that only its settling or a death ends

# Limits: what is beyond them is no record. With `MAX_OFFSET`, for whatever names a place of the
# log, they leave room to count and add on in the 64 bits that the index has for a number.
MAX_DELIVER: Final = 0xFFFF  # messages in one DELIVER
MAX_FAILURES: Final = 20  # kept of one message
MAX_COUNT: Final = 2**32 - 1  # deliveries, retries, crashes of one message: counting stops there
MAX_TOTAL: Final = 2**62  # messages and bytes that a topic or a group has counted
MAX_WAIT_US: Final = 2**62  # a delay or a time to live as it was asked for
MAX_TIME_US: Final = 2**58  # queue time of a frame; with any wait added it is below NEVER

# What is carried of a result that can't be read any more: no msgpack begins with it.
LOST_RESULT: Final = b"\xc1"

FROM_QUEUE: Final = 1  # flag of a delivery: taken from the position queue, at the cursor
KEY_HASH_BYTES: Final = 8
NO_KEY: Final = bytes(KEY_HASH_BYTES)
GROUP_BIT: Final = 1 << 63


def one_more(count: int) -> int:
    """A count of one message and one more, as far as it is counted."""
    return min(count + 1, MAX_COUNT)


PUT_HEAD: Final = struct.Struct("<BBHI")
DELIVER_HEAD: Final = struct.Struct("<BBHIQQQ")
DELIVER_ITEM: Final = struct.Struct("<QB")
ACK_HEAD: Final = struct.Struct("<BBHIQQ")


class Put(NamedTuple):
    """A message: `body` are the bytes its codec made, `meta` what was said besides."""

    priority: int
    codec: int
    tid: int
    meta: dict[int, Any]
    body: Readable


class Deliver(NamedTuple):
    """Messages leased to one owner; items are (offset, priority, from the position queue)."""

    tid: int
    gid: int
    owner: int
    deadline_ns: int
    items: list[tuple[int, int, bool]]


class Ack(NamedTuple):
    """A message done in a group, with the packed result."""

    tid: int
    gid: int
    offset: int
    result: Readable


class Return(NamedTuple):
    """A lease that ended without an end of the message; counters are those that hold now."""

    gid: int
    offset: int
    kind: int
    due_us: int
    delivery: int
    retry: int
    crash: int
    failure: Failure | None


class Dead(NamedTuple):
    """A message moved to the dead letters of a group."""

    gid: int
    offset: int
    reason: str
    died_us: int
    retry: int
    crash: int
    failure: Failure | None


class Extend(NamedTuple):
    """A lease with a new deadline."""

    gid: int
    offset: int
    deadline_ns: int


class Redrive(NamedTuple):
    """Dead letters that are ready again; items are (offset, expiry_us or 0)."""

    gid: int
    items: list[tuple[int, int]]


class Cancel(NamedTuple):
    """Messages taken out of every group of a topic."""

    tid: int
    offsets: list[int]


class Purge(NamedTuple):
    """All that was ready or delayed in a group, gone."""

    gid: int


class PurgeDead(NamedTuple):
    """Dead letters of a group, gone."""

    gid: int
    offsets: list[int]


class Topic(NamedTuple):
    """The name of a topic."""

    tid: int
    name: str


class Group(NamedTuple):
    """A group begins; `start` is "earliest", "latest" or an offset."""

    tid: int
    gid: int
    name: str
    start: str | int


class GroupDrop(NamedTuple):
    """A group and all it knows, gone."""

    gid: int


class Pause(NamedTuple):
    """No deliveries until then; 0: resumed."""

    gid: int
    until_us: int
    reason: str


class Replay(NamedTuple):
    """Settled messages that flow again; items are (offset, priority, key hash, expiry_us)."""

    gid: int
    items: list[tuple[int, int, bytes, int]]


class Option(NamedTuple):
    """Settings that belong to the file; a value of None forgets one."""

    values: dict[str, Any]


class CheckpointTopic(NamedTuple):
    """A topic at a checkpoint: how many messages, and bytes of records, were ever put."""

    tid: int
    name: str
    puts: int
    put_bytes: int


class CheckpointGroup(NamedTuple):
    """A group at a checkpoint.

    `start` is the offset before which the group owns nothing, `created` that of its GROUP record.
    `cursors` are, for each priority, the offset below which the position queue has been handed
    out; offsets and not indices, so that they hold whatever has been freed by then.
    """

    tid: int
    gid: int
    name: str
    start: int
    created: int
    cursors: list[int]
    settled: int
    retries: int
    picks: int
    paused_until_us: int
    pause_reason: str


class Checkpoint(NamedTuple):
    """What is not a message and must outlive the segment it was said in.

    `purged` are (gid, priority, start, end): messages of that priority in [start, end) were
    purged from the position queue of that group.
    """

    topics: list[CheckpointTopic]
    groups: list[CheckpointGroup]
    options: dict[str, Any]
    purged: list[tuple[int, int, int, int]]


class CarriedRow(NamedTuple):
    """Where a carried message stands in one group (gid == tid: in the topic's template).

    `deadline` is that of the lease (ns) when leased, otherwise when it is due (us, 0 now).
    `reason` and `died_us` are those of a dead letter.
    """

    gid: int
    state: int
    owner: int
    deadline: int
    order: int
    expiry_us: int
    delivery: int
    retry: int
    crash: int
    redrive: int
    failures: list[Failure]
    reason: str
    died_us: int


class Carry(NamedTuple):
    """One live message moved up, whole: the bytes of its PUT and all that groups know of it.

    `results` are (gid, packed result) of groups that are done with it, `purged` the groups that
    purged it, `deliveries` are (gid, count) of groups that had it and are done with it.
    """

    offset: int
    salt: int
    time_us: int
    put: bytes
    rows: list[CarriedRow]
    results: list[tuple[int, bytes]]
    purged: list[int]
    deliveries: list[tuple[int, int]]


class Clean(NamedTuple):
    """Nothing is said; written at a clean close to vouch for all before."""


class Void(NamedTuple):
    """Puts taken back before anyone was told of them."""

    offsets: list[int]


class Owner(NamedTuple):
    """The name of a consumer, for the failures of what it leases under this token."""

    token: int
    name: str


class Damaged(NamedTuple):
    """Messages whose bytes cannot be read, set aside; items are (offset, reason).

    `repaired` are offsets of which nothing is to be told any more: a repair is done with them.
    """

    items: list[tuple[int, str]]
    repaired: list[int]


class Unknown(NamedTuple):
    """A record of a later version that may be passed over."""

    type: int


AnyRecord = (
    Put
    | Deliver
    | Ack
    | Return
    | Dead
    | Extend
    | Redrive
    | Cancel
    | Purge
    | PurgeDead
    | Topic
    | Group
    | GroupDrop
    | Pause
    | Replay
    | Option
    | Checkpoint
    | Carry
    | Clean
    | Void
    | Owner
    | Damaged
    | Unknown
)
