"""The log's vocabulary: what one record says, as bytes and back.  Pure, no I/O.

A record is a handful of bytes whose first byte is its type.  The log stores it, checks it and
gives it back without knowing what it means; the index folds it.  `PUT`, `DELIVER` and `ACK` are
most of all records and have fixed layouts, so that they are packed and read without msgpack;
every other record is its type byte and one msgpack array.

    PUT      <BBHI     type, priority << 4 | codec, length of meta, topic; meta; body
    DELIVER  <BBHIQQQ  type, 0, n, topic, group, owner, deadline; n times <QB offset, flags
    ACK      <BBHIQQ   type, 0, 0, topic, group, offset; the result (empty: None)

A message is named by the offset of its PUT for ever.  `*_us` is queue time in microseconds,
`*_ns` the monotonic clock of the boot that wrote it.  A type below 64 that is not known here is
an error; one from 64 on may be passed over, which is the room for later versions.

Packing returns a record as a tuple of pieces, so that a large body is never copied.  Unpacking
raises `ValueError` for anything that is not exactly one record; it never takes more memory than
the bytes it is given warrant, and does not know at which offset they stood.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgpack

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
MAX_DELIVER: Final = 0xFFFF  # messages in one DELIVER
MAX_FAILURES: Final = 20  # kept of one message
NEVER: Final = 2**63 - 1  # the deadline of a lease that only its settling or a death ends
FROM_QUEUE: Final = 1  # flag of a delivery: taken from the position queue, at the cursor
KEY_HASH_BYTES: Final = 8
NO_KEY: Final = bytes(KEY_HASH_BYTES)
GROUP_BIT: Final = 1 << 63

PUT_HEAD: Final = struct.Struct("<BBHI")
DELIVER_HEAD: Final = struct.Struct("<BBHIQQQ")
DELIVER_ITEM: Final = struct.Struct("<QB")
ACK_HEAD: Final = struct.Struct("<BBHIQQ")
_LONG_META: Final = 0xFFFF
_U32: Final = struct.Struct("<I")
_MAX_U32: Final = 2**32 - 1
_MAX_U64: Final = 2**64 - 1

_META_TYPES: Final[dict[int, type]] = {
    META_KEY: str,
    META_ID: str,
    META_DUE_US: int,
    META_EXPIRY_US: int,
    META_HEADERS: bytes,
    META_CODEC: str,
    META_SKEW_US: int,
    META_DELAY_US: int,
    META_TTL_US: int,
}


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
    purged it.
    """

    offset: int
    salt: int
    time_us: int
    put: bytes
    rows: list[CarriedRow]
    results: list[tuple[int, bytes]]
    purged: list[int]


class Clean(NamedTuple):
    """Nothing is said; written at a clean close and after recovery to vouch for all before."""


class Void(NamedTuple):
    """Puts taken back before anyone was told of them."""

    offsets: list[int]


class Owner(NamedTuple):
    """The name of a consumer, for the failures of what it leases under this token."""

    token: int
    name: str


class Damaged(NamedTuple):
    """Messages whose bytes cannot be read, set aside; items are (offset, reason)."""

    items: list[tuple[int, str]]


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


# Names as numbers


def topic_id(name: str) -> int:
    """Return the number a topic has unless another topic has it already; "default" is 0."""
    if name == "default":
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") or 1


def group_id(topic: str, group: str) -> int:
    """Return the number of a group; its top bit is set, which no topic's is."""
    digest = hashlib.blake2b(f"{topic}\0{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") | GROUP_BIT


def key_hash(key: str) -> bytes:
    """Return the eight bytes that stand for a key; never `NO_KEY`."""
    digest = hashlib.blake2b(key.encode(), digest_size=KEY_HASH_BYTES).digest()
    return digest if digest != NO_KEY else b"\1" * KEY_HASH_BYTES


# Packing


def pack_meta(
    *,
    key: str | None = None,
    id: str | None = None,
    due_us: int | None = None,
    expiry_us: int | None = None,
    headers: bytes | None = None,
    codec: str | None = None,
    skew_us: int | None = None,
    delay_us: int | None = None,
    ttl_us: int | None = None,
) -> bytes:
    """Return the packed meta of a PUT: only what is given, nothing at all for a plain message."""
    meta: dict[int, Any] = {}
    if key is not None:
        meta[META_KEY] = key
    if id is not None:
        meta[META_ID] = id
    if due_us:
        meta[META_DUE_US] = due_us
    if expiry_us:
        meta[META_EXPIRY_US] = expiry_us
    if headers:
        meta[META_HEADERS] = headers
    if codec is not None:
        meta[META_CODEC] = codec
    if skew_us:
        meta[META_SKEW_US] = skew_us
    if delay_us:
        meta[META_DELAY_US] = delay_us
    if ttl_us:
        meta[META_TTL_US] = ttl_us
    return _packb(meta) if meta else b""


def pack_put(priority: int, codec: int, tid: int, meta: bytes, body: bytes) -> Record:
    """Return a PUT; `meta` comes from `pack_meta`, `body` is stored as it is."""
    size = len(meta)
    if not size:
        return (PUT_HEAD.pack(PUT, priority << 4 | codec, 0, tid), body)
    if size < _LONG_META:
        return (PUT_HEAD.pack(PUT, priority << 4 | codec, size, tid) + meta, body)
    head = PUT_HEAD.pack(PUT, priority << 4 | codec, _LONG_META, tid)
    return (head + _U32.pack(size), meta, body)


def pack_deliver(
    tid: int, gid: int, owner: int, deadline_ns: int, items: Sequence[Sequence[Any]]
) -> Record:
    """Return a DELIVER of items that begin with offset, priority, from_queue."""
    head = DELIVER_HEAD.pack(DELIVER, 0, len(items), tid, gid, owner, deadline_ns)
    pack = DELIVER_ITEM.pack
    if len(items) == 1:
        item = items[0]
        return (head + pack(item[0], item[1] << 4 | item[2]),)
    return (head + b"".join([pack(item[0], item[1] << 4 | item[2]) for item in items]),)


def pack_ack(tid: int, gid: int, offset: int, result: bytes = b"") -> Record:
    """Return an ACK; `result` is packed already, empty for None."""
    head = ACK_HEAD.pack(ACK, 0, 0, tid, gid, offset)
    return (head, result) if result else (head,)


def pack_return(
    gid: int,
    offset: int,
    kind: int,
    *,
    due_us: int = 0,
    delivery: int,
    retry: int,
    crash: int,
    failure: Failure | None = None,
) -> Record:
    """Return a RETURN: the lease is over, ready again at `due_us` (0: now)."""
    return _pack(RETURN, [gid, offset, kind, due_us, delivery, retry, crash, failure])


def pack_dead(
    gid: int,
    offset: int,
    reason: str,
    died_us: int,
    *,
    retry: int,
    crash: int,
    failure: Failure | None = None,
) -> Record:
    """Return a DEAD: the last failure and the move to the dead letters in one step."""
    return _pack(DEAD, [gid, offset, reason, died_us, retry, crash, failure])


def pack_extend(gid: int, offset: int, deadline_ns: int) -> Record:
    """Return an EXTEND."""
    return _pack(EXTEND, [gid, offset, deadline_ns])


def pack_redrive(gid: int, items: Iterable[tuple[int, int]]) -> Record:
    """Return a REDRIVE of (offset, expiry_us or 0)."""
    return _pack(REDRIVE, [gid, list(items)])


def pack_cancel(tid: int, offsets: Iterable[int]) -> Record:
    """Return a CANCEL."""
    return _pack(CANCEL, [tid, list(offsets)])


def pack_purge(gid: int) -> Record:
    """Return a PURGE."""
    return _pack(PURGE, [gid])


def pack_purge_dead(gid: int, offsets: Iterable[int]) -> Record:
    """Return a PURGE_DEAD."""
    return _pack(PURGE_DEAD, [gid, list(offsets)])


def pack_topic(tid: int, name: str) -> Record:
    """Return a TOPIC."""
    return _pack(TOPIC, [tid, name])


def pack_group(tid: int, gid: int, name: str, start: str | int = "earliest") -> Record:
    """Return a GROUP that begins at "earliest", "latest" or an offset."""
    return _pack(GROUP, [tid, gid, name, start])


def pack_group_drop(gid: int) -> Record:
    """Return a GROUP_DROP."""
    return _pack(GROUP_DROP, [gid])


def pack_pause(gid: int, until_us: int, reason: str = "") -> Record:
    """Return a PAUSE; `until_us` 0 resumes."""
    return _pack(PAUSE, [gid, until_us, reason])


def pack_replay(gid: int, items: Iterable[tuple[int, int, bytes, int]]) -> Record:
    """Return a REPLAY of (offset, priority, key hash or b"", expiry_us or 0)."""
    return _pack(REPLAY, [gid, list(items)])


def pack_option(values: dict[str, Any]) -> Record:
    """Return an OPTION."""
    return _pack(OPTION, [values])


def pack_checkpoint(state: Checkpoint) -> Record:
    """Return a CHECKPOINT."""
    return _pack(CHECKPOINT, list(state))


def pack_carry(state: Carry) -> Record:
    """Return a CARRY."""
    return _pack(CARRY, list(state))


def pack_clean() -> Record:
    """Return a CLEAN."""
    return _pack(CLEAN, [])


def pack_void(offsets: Iterable[int]) -> Record:
    """Return a VOID."""
    return _pack(VOID, [list(offsets)])


def pack_owner(token: int, name: str) -> Record:
    """Return an OWNER."""
    return _pack(OWNER, [token, name])


def pack_damaged(items: Iterable[tuple[int, str]]) -> Record:
    """Return a DAMAGED of (offset, reason)."""
    return _pack(DAMAGED, [list(items)])


def _pack(kind: int, fields: list[Any]) -> Record:
    return (bytes((kind,)) + _packb(fields),)


_packb: Callable[[Any], bytes] = msgpack.packb


# Unpacking


def unpack(record: Readable) -> AnyRecord:
    """Return what a record says.

    Raises:
        ValueError: these bytes are not one whole record of a type known here.
    """
    if not record:
        raise ValueError("an empty record")
    kind = record[0]
    known = _UNPACK.get(kind)
    if known is not None:
        return known(record)
    if kind >= SKIPPABLE:
        return Unknown(kind)
    raise ValueError(f"a record of unknown type {kind}")


def unpack_put(record: Readable) -> Put:
    """Return a PUT; the body is a slice of what was given, not a copy when that is a view."""
    meta, body = split_put(record)
    packed = record[1]
    if packed >> 4 >= PRIORITIES or packed & 15 > CODEC_OTHER:
        raise ValueError(f"a PUT with priority {packed >> 4} and codec {packed & 15}")
    tid = _U32.unpack_from(record, 4)[0]
    return Put(packed >> 4, packed & 15, tid, unpack_meta(meta) if meta else {}, body)


def split_put(record: Readable) -> tuple[Readable, Readable]:
    """Return the packed meta and the body of a PUT, as slices."""
    if len(record) < PUT_HEAD.size or record[0] != PUT:
        raise ValueError("a PUT that is too short")
    size = record[2] | record[3] << 8
    start = PUT_HEAD.size
    if size == _LONG_META:
        if len(record) < start + 4:
            raise ValueError("a PUT that ends within the length of its meta")
        size = _U32.unpack_from(record, start)[0]
        start += 4
    if size > len(record) - start:
        raise ValueError("a PUT whose meta is longer than itself")
    return record[start : start + size], record[start + size :]


def unpack_meta(meta: Readable) -> dict[int, Any]:
    """Return the meta of a PUT; what it holds and is not known here is left in it."""
    values = _unpackb(meta)
    if type(values) is not dict:
        raise ValueError("a PUT whose meta is no map")
    for name, value in values.items():
        if type(name) is not int:
            raise ValueError("a PUT whose meta has a name that is no number")
        expected = _META_TYPES.get(name)
        if expected is not None and type(value) is not expected:
            raise ValueError(f"a PUT whose meta {name} is of type {type(value).__name__}")
    for name in (META_DUE_US, META_EXPIRY_US, META_DELAY_US, META_TTL_US):
        if name in values and not 0 <= values[name] <= NEVER:
            raise ValueError(f"a PUT whose meta {name} is {values[name]}")
    return values


def _unpack_deliver(record: Readable) -> Deliver:
    if len(record) < DELIVER_HEAD.size:
        raise ValueError("a DELIVER that is too short")
    _, _, count, tid, gid, owner, deadline_ns = DELIVER_HEAD.unpack_from(record)
    if len(record) != DELIVER_HEAD.size + count * DELIVER_ITEM.size:
        raise ValueError("a DELIVER that does not hold what it says")
    items = [
        (offset, flags >> 4, bool(flags & FROM_QUEUE))
        for offset, flags in DELIVER_ITEM.iter_unpack(record[DELIVER_HEAD.size :])
    ]
    if any(priority >= PRIORITIES for _, priority, _ in items):
        raise ValueError("a DELIVER with a priority above 9")
    return Deliver(tid, gid, owner, deadline_ns, items)


def _unpack_ack(record: Readable) -> Ack:
    if len(record) < ACK_HEAD.size:
        raise ValueError("an ACK that is too short")
    _, _, _, tid, gid, offset = ACK_HEAD.unpack_from(record)
    return Ack(tid, gid, offset, record[ACK_HEAD.size :])


def _unpack_return(record: Readable) -> Return:
    gid, offset, kind, due_us, delivery, retry, crash, failure = _fields(record, 8)
    if kind not in (NACK, LAPSED, DIED, RELEASE, UNDO):
        raise ValueError(f"a RETURN of kind {kind!r}")
    return Return(
        _u64(gid),
        _u64(offset),
        kind,
        _u64(due_us),
        _u32(delivery),
        _u32(retry),
        _u32(crash),
        _failure(failure),
    )


def _unpack_dead(record: Readable) -> Dead:
    gid, offset, reason, died_us, retry, crash, failure = _fields(record, 7)
    return Dead(
        _u64(gid),
        _u64(offset),
        _text(reason),
        _u64(died_us),
        _u32(retry),
        _u32(crash),
        _failure(failure),
    )


def _unpack_extend(record: Readable) -> Extend:
    return Extend(*map(_u64, _fields(record, 3)))


def _unpack_redrive(record: Readable) -> Redrive:
    gid, items = _fields(record, 2)
    pairs = [(_u64(offset), _u64(expiry_us)) for offset, expiry_us in _rows(items, 2)]
    return Redrive(_u64(gid), pairs)


def _unpack_cancel(record: Readable) -> Cancel:
    tid, offsets = _fields(record, 2)
    return Cancel(_u32(tid), _offsets(offsets))


def _unpack_purge(record: Readable) -> Purge:
    return Purge(_u64(_fields(record, 1)[0]))


def _unpack_purge_dead(record: Readable) -> PurgeDead:
    gid, offsets = _fields(record, 2)
    return PurgeDead(_u64(gid), _offsets(offsets))


def _unpack_topic(record: Readable) -> Topic:
    tid, name = _fields(record, 2)
    return Topic(_u32(tid), _text(name))


def _unpack_group(record: Readable) -> Group:
    tid, gid, name, start = _fields(record, 4)
    if start not in ("earliest", "latest"):
        start = _u64(start)
    return Group(_u32(tid), _u64(gid), _text(name), start)


def _unpack_group_drop(record: Readable) -> GroupDrop:
    return GroupDrop(_u64(_fields(record, 1)[0]))


def _unpack_pause(record: Readable) -> Pause:
    gid, until_us, reason = _fields(record, 3)
    return Pause(_u64(gid), _u64(until_us), _text(reason))


def _unpack_replay(record: Readable) -> Replay:
    gid, items = _fields(record, 2)
    return Replay(
        _u64(gid),
        [
            (_u64(offset), _priority(priority), _key_hash(keyhash), _u64(expiry_us))
            for offset, priority, keyhash, expiry_us in _rows(items, 4)
        ],
    )


def _unpack_option(record: Readable) -> Option:
    return Option(_options(_fields(record, 1)[0]))


def _unpack_checkpoint(record: Readable) -> Checkpoint:
    topics, groups, options, purged = _fields(record, 4)
    return Checkpoint(
        [
            CheckpointTopic(_u32(tid), _text(name), _u64(puts), _u64(put_bytes))
            for tid, name, puts, put_bytes in _rows(topics, 4)
        ],
        [_checkpoint_group(row) for row in _rows(groups, 11)],
        _options(options),
        [
            (_u64(gid), _priority(priority), _u64(start), _u64(end))
            for gid, priority, start, end in _rows(purged, 4)
        ],
    )


def _checkpoint_group(row: list[Any]) -> CheckpointGroup:
    tid, gid, name, start, created, cursors, settled, retries, picks, until_us, reason = row
    if len(_offsets(cursors)) != PRIORITIES:
        raise ValueError("a checkpoint whose group has not one cursor a priority")
    return CheckpointGroup(
        _u32(tid),
        _u64(gid),
        _text(name),
        _u64(start),
        _u64(created),
        cursors,
        _u64(settled),
        _u64(retries),
        _u64(picks),
        _u64(until_us),
        _text(reason),
    )


def _unpack_carry(record: Readable) -> Carry:
    offset, salt, time_us, put, rows, results, purged = _fields(record, 7)
    unpack_put(_bytes(put))
    return Carry(
        _u64(offset),
        _u64(salt),
        _u64(time_us),
        put,
        [_carried_row(row) for row in _rows(rows, 13)],
        [(_u64(gid), _bytes(result)) for gid, result in _rows(results, 2)],
        _offsets(purged),
    )


def _carried_row(row: list[Any]) -> CarriedRow:
    gid, state, *numbers, failures, reason, died_us = row
    if type(state) is not int or not STATE_READY <= state <= STATE_DEAD:
        raise ValueError(f"a carried message in state {state!r}")
    owner, deadline, order, expiry_us, delivery, retry, crash, redrive = numbers
    told = [_failure(failure) for failure in _rows(failures, 3)]
    return CarriedRow(
        _u64(gid),
        state,
        _u64(owner),
        _u64(deadline),
        _u64(order),
        _u64(expiry_us),
        _u32(delivery),
        _u32(retry),
        _u32(crash),
        _u32(redrive),
        [failure for failure in told if failure is not None],
        _text(reason),
        _u64(died_us),
    )


def _unpack_clean(record: Readable) -> Clean:
    _fields(record, 0)
    return Clean()


def _unpack_void(record: Readable) -> Void:
    return Void(_offsets(_fields(record, 1)[0]))


def _unpack_owner(record: Readable) -> Owner:
    token, name = _fields(record, 2)
    return Owner(_u64(token), _text(name))


def _unpack_damaged(record: Readable) -> Damaged:
    items = _rows(_fields(record, 1)[0], 2)
    return Damaged([(_u64(offset), _text(reason)) for offset, reason in items])


_UNPACK: Final[dict[int, Callable[[Readable], AnyRecord]]] = {
    PUT: unpack_put,
    DELIVER: _unpack_deliver,
    ACK: _unpack_ack,
    RETURN: _unpack_return,
    DEAD: _unpack_dead,
    EXTEND: _unpack_extend,
    REDRIVE: _unpack_redrive,
    CANCEL: _unpack_cancel,
    PURGE: _unpack_purge,
    PURGE_DEAD: _unpack_purge_dead,
    TOPIC: _unpack_topic,
    GROUP: _unpack_group,
    GROUP_DROP: _unpack_group_drop,
    PAUSE: _unpack_pause,
    REPLAY: _unpack_replay,
    OPTION: _unpack_option,
    CHECKPOINT: _unpack_checkpoint,
    CARRY: _unpack_carry,
    CLEAN: _unpack_clean,
    VOID: _unpack_void,
    OWNER: _unpack_owner,
    DAMAGED: _unpack_damaged,
}


def _unpackb(data: Readable) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:  # a TypeError: an unhashable map key
        raise ValueError(f"not msgpack: {error}") from None


def _fields(record: Readable, count: int) -> list[Any]:
    """Return the `count` fields of a msgpack record; a later version may have added more."""
    fields = _unpackb(record[1:])
    if type(fields) is not list or len(fields) < count:
        raise ValueError(f"a record of type {record[0]} without its {count} fields")
    return fields[:count]


def _rows(value: Any, count: int) -> list[list[Any]]:
    if type(value) is not list:
        raise ValueError("a record with something else than a list")
    for row in value:
        if type(row) is not list or len(row) < count:
            raise ValueError("a record with an item that is too short")
    return [row[:count] for row in value]


def _u64(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_U64:
        raise ValueError(f"a record with {type(value).__name__} for a number")
    return value


def _u32(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_U32:
        raise ValueError("a record with a number that does not fit 32 bits")
    return value


def _priority(value: Any) -> int:
    if type(value) is not int or not 0 <= value < PRIORITIES:
        raise ValueError(f"a record with priority {value!r}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a record with {type(value).__name__} for a text")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError(f"a record with {type(value).__name__} for bytes")
    return value


def _key_hash(value: Any) -> bytes:
    if len(_bytes(value)) not in (0, KEY_HASH_BYTES):
        raise ValueError("a record with a key hash of another length")
    return value or NO_KEY


def _offsets(value: Any) -> list[int]:
    if type(value) is not list:
        raise ValueError("a record with something else than a list of offsets")
    return [_u64(offset) for offset in value]


def _options(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise ValueError("a record whose options are no map of names")
    return value


def _failure(value: Any) -> Failure | None:
    if value is None:
        return None
    if type(value) is not list or len(value) < 3:
        raise ValueError("a record with half a failure")
    return (_u64(value[0]), _text(value[1]), _text(value[2]))
