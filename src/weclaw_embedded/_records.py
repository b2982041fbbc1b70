"""The log's vocabulary: what one record says, as bytes and back.  Pure, no I/O.

A record is a handful of bytes whose first byte is its type.  The log stores it, checks it and
gives it back without knowing what it means; the index folds it.  `PUT`, `DELIVER` and `ACK` are
most of all records and have fixed layouts, so that they are packed and read without msgpack;
every other record is its type byte and one msgpack array.  PUT, which is read a piece at a time,
has a room of its own, `_record_put`.

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

import functools
import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ._record_put import *  # noqa: F403  one vocabulary, in three rooms
from ._record_types import *  # noqa: F403

# ruff: noqa: F405  the names of those stars

_DELIVER_ONE: Final = struct.Struct(DELIVER_HEAD.format + DELIVER_ITEM.format[1:])


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


def pack_deliver(
    tid: int,
    gid: int,
    owner: int,
    deadline_ns: int,
    offsets: Sequence[int],
    flags: Sequence[int],
) -> Record:
    """Return a DELIVER of messages; `flags`, of each, are its priority << 4 | FROM_QUEUE."""
    n = len(offsets)
    if n == 1:
        one, flag = offsets[0], flags[0]
        return (_DELIVER_ONE.pack(DELIVER, 0, 1, tid, gid, owner, deadline_ns, one, flag),)
    head = DELIVER_HEAD.pack(DELIVER, 0, n, tid, gid, owner, deadline_ns)
    return (b"".join([head, *map(DELIVER_ITEM.pack, offsets, flags)]),)


# An ACK without a result, of a topic, a group and an offset.
ack_of: Final = functools.partial(ACK_HEAD.pack, ACK, 0, 0)


def pack_ack(tid: int, gid: int, offset: int, result: bytes = b"") -> Record:
    """Return an ACK; `result` is packed already, empty for None."""
    head = ack_of(tid, gid, offset)
    return (head, result) if result else (head,)


def pack_acks(acks: Iterable[tuple[Any, bytes]]) -> list[Record]:
    """Return the ACKs of what has a tid, a gid and an offset, each with its result."""
    return [
        (ack_of(one.tid, one.gid, one.offset), result)
        if result
        else (ack_of(one.tid, one.gid, one.offset),)
        for one, result in acks
    ]


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
    """Return a CARRY; deliveries are left out when there are none to tell."""
    fields = list(state)
    return _pack(CARRY, fields if state.deliveries else fields[:-1])


def pack_clean() -> Record:
    """Return a CLEAN."""
    return _pack(CLEAN, [])


def pack_void(offsets: Iterable[int]) -> Record:
    """Return a VOID."""
    return _pack(VOID, [list(offsets)])


def pack_owner(token: int, name: str) -> Record:
    """Return an OWNER."""
    return _pack(OWNER, [token, name])


def pack_damaged(items: Iterable[tuple[int, str]], repaired: Sequence[int] = ()) -> Record:
    """Return a DAMAGED of (offset, reason); what is repaired is left out when there is none."""
    return _pack(DAMAGED, [list(items), list(repaired)] if repaired else [list(items)])


def _pack(kind: int, fields: list[Any]) -> Record:
    return (bytes((kind,)) + packb(fields),)


# Unpacking


def unpack(record: Readable) -> AnyRecord:
    """Return what a record says.

    Raises:
        ValueError: these bytes are not one whole record of a type known here.
    """
    if not record:
        raise NoRecordError("an empty record")
    kind = record[0]
    if kind == PUT:
        return unpack_put(record)
    if kind == DELIVER:
        return _unpack_deliver(record)
    if kind == ACK:
        return _unpack_ack(record)
    layout = _FIELDS.get(kind)
    if layout is not None:
        said, checks = layout
        fields = _fields(record, len(checks), _LEFT_OUT.get(kind, []))
        record_said = said(*[check(field) for check, field in zip(checks, fields, strict=True)])
        if isinstance(record_said, Carry):
            _check_carry(record_said)
        return record_said
    if kind >= SKIPPABLE:
        return Unknown(kind)
    raise NoRecordError(f"a record of unknown type {kind}")


def _unpack_deliver(record: Readable) -> Deliver:
    if len(record) < DELIVER_HEAD.size:
        raise NoRecordError("a DELIVER that is too short")
    _, _, count, tid, gid, owner, deadline_ns = DELIVER_HEAD.unpack_from(record)
    if len(record) != DELIVER_HEAD.size + count * DELIVER_ITEM.size:
        raise NoRecordError("a DELIVER that does not hold what it says")
    items = [
        (offset, flags >> 4, bool(flags & FROM_QUEUE))
        for offset, flags in DELIVER_ITEM.iter_unpack(record[DELIVER_HEAD.size :])
    ]
    if any(priority >= PRIORITIES for _, priority, _ in items):
        raise NoRecordError("a DELIVER with a priority above 9")
    return Deliver(tid, gid, owner, deadline_ns, items)


def _unpack_ack(record: Readable) -> Ack:
    if len(record) < ACK_HEAD.size:
        raise NoRecordError("an ACK that is too short")
    _, _, _, tid, gid, offset = ACK_HEAD.unpack_from(record)
    return Ack(tid, gid, offset, record[ACK_HEAD.size :])


def _fields(record: Readable, count: int, left_out: list[Any]) -> list[Any]:
    """Return the `count` fields of a msgpack record; a later version may have added more.

    `left_out` are the last ones as they are when they are not said.
    """
    fields = unpackb(record[1:])
    least = count - len(left_out)
    if type(fields) is not list or len(fields) < least:
        raise NoRecordError(f"a record of type {record[0]} without its {least} fields")
    return [*fields, *left_out[len(fields) - least :]][:count]


# What one field must be

Check = Callable[[Any], Any]


def _up_to(most: int, what: str) -> Check:
    """Return what checks a number from 0 to `most`."""

    def checked(value: Any) -> Any:
        if type(value) is not int or not 0 <= value <= most:
            raise NoRecordError(f"a record with {value!r:.40} for {what}")
        return value

    return checked


_place: Final = _up_to(MAX_OFFSET, "an offset")
_count: Final = _up_to(MAX_COUNT, "a count")
_total: Final = _up_to(MAX_TOTAL, "a total")
_time: Final = _up_to(NEVER, "a time")
_u32: Final = _up_to(2**32 - 1, "a number of 32 bits")
_u64: Final = _up_to(2**64 - 1, "a number of 64 bits")


def _gid(value: Any) -> int:
    if type(value) is not int or not GROUP_BIT <= value < 2 * GROUP_BIT:
        raise NoRecordError(f"a record with {value!r:.40} for a group")
    return value


def _priority(value: Any) -> int:
    if type(value) is not int or not 0 <= value < PRIORITIES:
        raise NoRecordError(f"a record with priority {value!r}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise NoRecordError(f"a record with {type(value).__name__} for a text")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise NoRecordError(f"a record with {type(value).__name__} for bytes")
    return value


def _key_hash(value: Any) -> bytes:
    if len(_bytes(value)) not in (0, KEY_HASH_BYTES):
        raise NoRecordError("a record with a key hash of another length")
    return value or NO_KEY


def _kind(value: Any) -> int:
    if value not in (NACK, LAPSED, DIED, RELEASE, UNDO):
        raise NoRecordError(f"a RETURN of kind {value!r}")
    return int(value)


def _state(value: Any) -> int:
    if type(value) is not int or not STATE_READY <= value <= STATE_DEAD:
        raise NoRecordError(f"a carried message in state {value!r}")
    return value


def _start(value: Any) -> str | int:
    start: str | int = value if value in ("earliest", "latest") else _place(value)
    return start


def _put(value: Any) -> bytes:
    unpack_put(_bytes(value))
    return _bytes(value)


def _cursors(value: Any) -> list[int]:
    cursors: list[int] = _each_place(value)
    if len(cursors) != PRIORITIES:
        raise NoRecordError("a checkpoint whose group has not one cursor a priority")
    return cursors


def _options(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise NoRecordError("a record whose options are no map of names")
    for option in value.values():
        for one in option if type(option) is list else (option,):
            if type(one) not in _OPTION_TYPES:
                raise NoRecordError(f"a record with an option that is a {type(one).__name__}")
    return value


def _failure(value: Any) -> Failure | None:
    if value is None:
        return None
    failure: Failure = _told(value)
    return failure


def _failures(value: Any) -> list[Failure]:
    if type(value) is not list:
        raise NoRecordError("a record with something else than failures")
    return [_told(one) for one in value[-MAX_FAILURES:]]


def _check_carry(said: Carry) -> None:
    """No group is told of twice, and of the template only what can be."""
    rows = [row.gid for row in said.rows]
    results, deliveries = [gid for gid, _ in said.results], [gid for gid, _ in said.deliveries]
    for told in (rows, results, said.purged, deliveries):
        if len(set(told)) != len(told):
            raise NoRecordError("a carried message that is twice in one group")
    tid = U32.unpack_from(said.put, 4)[0]
    for row in said.rows:
        if row.gid < GROUP_BIT and (row.gid != tid or row.state in (STATE_LEASED, STATE_DEAD)):
            raise NoRecordError(f"a carried message in state {row.state} of {row.gid}, no group")


def _each(check: Check) -> Check:
    """Return what checks a list."""

    def checked(value: Any) -> Any:
        if type(value) is not list:
            raise NoRecordError("a record with something else than a list")
        return [check(item) for item in value]

    return checked


def _row(*checks: Check, of: Callable[..., Any] = lambda *fields: fields) -> Check:
    """Return what checks one item of several fields; a later version may have added more."""

    def checked(value: Any) -> Any:
        if type(value) is not list or len(value) < len(checks):
            raise NoRecordError("a record with an item that is too short")
        return of(*[check(field) for check, field in zip(checks, value, strict=False)])

    return checked


_OPTION_TYPES: Final = frozenset({type(None), bool, int, float, str, bytes})
_each_place: Final = _each(_place)
_told: Final = _row(_time, _text, _text)
_FIELDS: Final[dict[int, tuple[Callable[..., AnyRecord], tuple[Check, ...]]]] = {
    RETURN: (Return, (_gid, _place, _kind, _time, _count, _count, _count, _failure)),
    DEAD: (Dead, (_gid, _place, _text, _time, _count, _count, _failure)),
    EXTEND: (Extend, (_gid, _place, _time)),
    REDRIVE: (Redrive, (_gid, _each(_row(_place, _time)))),
    CANCEL: (Cancel, (_u32, _each_place)),
    PURGE: (Purge, (_gid,)),
    PURGE_DEAD: (PurgeDead, (_gid, _each_place)),
    TOPIC: (Topic, (_u32, _text)),
    GROUP: (Group, (_u32, _gid, _text, _start)),
    GROUP_DROP: (GroupDrop, (_gid,)),
    PAUSE: (Pause, (_gid, _time, _text)),
    REPLAY: (Replay, (_gid, _each(_row(_place, _priority, _key_hash, _time)))),
    OPTION: (Option, (_options,)),
    CHECKPOINT: (
        Checkpoint,
        (
            _each(_row(_u32, _text, _total, _total, of=CheckpointTopic)),
            _each(
                _row(
                    *(_u32, _gid, _text, _place, _place, _cursors),
                    *(_total, _total, _total, _time, _text),
                    of=CheckpointGroup,
                )
            ),
            _options,
            _each(_row(_gid, _priority, _place, _place)),
        ),
    ),
    CARRY: (
        Carry,
        (
            *(_place, _u32, _time, _put),
            _each(
                _row(
                    *(_u64, _state, _u64, _time, _place, _time, _count, _count, _count, _count),
                    *(_failures, _text, _time),
                    of=CarriedRow,
                )
            ),
            _each(_row(_gid, _bytes)),
            _each(_gid),
            _each(_row(_gid, _count)),
        ),
    ),
    CLEAN: (Clean, ()),
    VOID: (Void, (_each_place,)),
    OWNER: (Owner, (_u64, _text)),
    DAMAGED: (Damaged, (_each(_row(_place, _text)), _each_place)),
}
# What the last fields of a record are when they are left out.
_LEFT_OUT: Final[dict[int, list[Any]]] = {CARRY: [[]], DAMAGED: [[]]}
