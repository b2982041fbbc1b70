"""PUT: the record that a log is mostly made of, as bytes and back.  Pure, no I/O.

It is the one that is read a piece at a time: what it says besides (its meta) without its body, its
body without what it says.  `_records` has the others, tells the layouts, and gives these names on,
for they are one vocabulary.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack

from ._record_types import *  # noqa: F403  one vocabulary, in three rooms

# ruff: noqa: F405  the names of that star

_LONG_META: Final = 0xFFFF
PLAIN_BYTES: Final = 4  # of a PUT without meta, up to its topic
PUT_BYTES: Final = PUT_HEAD.size  # before its body
# How those begin, all that there are: most PUTs are known by that, without taking them apart.
PLAIN_PUTS: Final = frozenset(
    PUT_HEAD.pack(PUT, priority << 4 | codec, 0, 0)[:PLAIN_BYTES]
    for priority in range(PRIORITIES)
    for codec in range(CODEC_OTHER + 1)
)
NO_META: Final[dict[int, Any]] = {}  # what `meta_of_put` has for those
U32: Final = struct.Struct("<I")

packb: Callable[[Any], bytes] = msgpack.packb


class NoRecordError(ValueError):
    """These bytes are not what they should be: one whole record of a type known here. Nothing else
    raises it, so that an error of ours is not taken for damage.
    """


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
_META_LIMITS: Final[dict[int, int]] = {
    META_DUE_US: NEVER,
    META_EXPIRY_US: NEVER,
    META_DELAY_US: MAX_WAIT_US,
    META_TTL_US: MAX_WAIT_US,
}


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
    return packb(meta) if meta else b""


def pack_put(priority: int, codec: int, tid: int, meta: bytes, body: bytes) -> Record:
    """Return a PUT; `meta` comes from `pack_meta`, `body` is stored as it is."""
    size = len(meta)
    if not size:
        return (PUT_HEAD.pack(PUT, priority << 4 | codec, 0, tid), body)
    if size < _LONG_META:
        return (PUT_HEAD.pack(PUT, priority << 4 | codec, size, tid) + meta, body)
    head = PUT_HEAD.pack(PUT, priority << 4 | codec, _LONG_META, tid)
    return (head + U32.pack(size), meta, body)


@functools.lru_cache(maxsize=256)
def plain_start(codec: int, tid: int) -> Record:
    """Return what comes before the body of a PUT of which nothing is said."""
    return pack_put(0, codec, tid, b"", b"")[:-1]


# Unpacking


def unpack_put(record: Readable) -> Put:
    """Return a PUT; the body is a slice of what was given, not a copy when that is a view."""
    if len(record) < PUT_HEAD.size:
        raise NoRecordError("a PUT that is too short")
    kind, packed, size, tid = PUT_HEAD.unpack_from(record)
    if kind == PUT and not size:
        meta: Readable = b""
        body = record[PUT_HEAD.size :]
    else:
        meta, body = split_put(record)
    priority, codec = packed >> 4, packed & 15
    if priority >= PRIORITIES or codec > CODEC_OTHER:
        raise NoRecordError(f"a PUT with priority {priority} and codec {codec}")
    return Put(priority, codec, tid, unpack_meta(meta) if meta else {}, body)


def meta_of_put(record: Readable) -> dict[int, Any]:
    """Return the meta of a PUT, not to be changed. Raises ValueError as `unpack_put` does: what
    this takes can be given to `split_put`, `kind_of_put` and `body_of_put`.
    """
    if record[:PLAIN_BYTES] in PLAIN_PUTS and len(record) >= PUT_BYTES:
        return NO_META
    return unpack_put(record).meta


def kind_of_put(record: Readable) -> tuple[int, int]:
    """Return the priority and the codec of a PUT."""
    return record[1] >> 4, record[1] & 15


def body_of_put(record: Readable) -> tuple[int, Readable]:
    """Return the codec and the body of a PUT."""
    if record[:PLAIN_BYTES] in PLAIN_PUTS:
        return record[1] & 15, record[PUT_BYTES:]
    return record[1] & 15, split_put(record)[1]


def split_put(record: Readable) -> tuple[Readable, Readable]:
    """Return the packed meta and the body of a PUT, as slices."""
    if len(record) < PUT_HEAD.size or record[0] != PUT:
        raise NoRecordError("a PUT that is too short")
    size = record[2] | record[3] << 8
    start = PUT_HEAD.size
    if size == _LONG_META:
        if len(record) < start + 4:
            raise NoRecordError("a PUT that ends within the length of its meta")
        size = U32.unpack_from(record, start)[0]
        start += 4
    if size > len(record) - start:
        raise NoRecordError("a PUT whose meta is longer than itself")
    return record[start : start + size], record[start + size :]


def unpack_meta(meta: Readable) -> dict[int, Any]:
    """Return the meta of a PUT; what it holds and is not known here is left in it."""
    values = unpackb(meta)
    if type(values) is not dict:
        raise NoRecordError("a PUT whose meta is no map")
    for name, value in values.items():
        if type(name) is not int:
            raise NoRecordError("a PUT whose meta has a name that is no number")
        expected = _META_TYPES.get(name)
        if expected is not None and type(value) is not expected:
            raise NoRecordError(f"a PUT whose meta {name} is of type {type(value).__name__}")
    for name, most in _META_LIMITS.items():
        if name in values and not 0 <= values[name] <= most:
            raise NoRecordError(f"a PUT whose meta {name} is {values[name]}")
    return values


def unpackb(data: Readable) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:  # a TypeError: an unhashable map key
        raise NoRecordError(f"not msgpack: {error}") from None
