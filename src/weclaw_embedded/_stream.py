"""The stream between a queue file's feeder and its replica's receiver: bytes and what they mean.

Pure: no input or output. Both directions are sequences of messages:

    message    I length of the rest, I crc32(the rest, number of the message in its direction),
               then the rest: B type and the fields of that type

The checksum begins from the message's number, so one that was lost, repeated or moved is noticed
like one whose bytes were changed. The feeder begins with HELLO, who only reads with LOOK; the
receiver answers with STATE or REFUSED; what follows is in docs/format.md, section 14.

It must not know where the bytes come from, nor what is in a frame.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from .errors import WeclawError

VERSION: Final = 1
MAGIC: Final = b"wqstream"

# From the feeder.
HELLO, BEGIN, SEGMENT, DATA, HEAD, SYNC, FETCH, LOOK, READ = range(1, 10)
# From the receiver (SEGMENT and DATA too, after FETCH and READ).
STATE, ACK, REFUSED, END = range(16, 20)

# Why a receiver refuses.
BUSY, OTHER_STORE, HIGHER_EPOCH, DIVERGED, NOT_A_COPY, FAILED, OTHER_VERSION = range(1, 8)

MAX_DATA: Final = 256 << 10
SYNC_EVERY: Final = 8 << 20  # bytes sent between two confirmations while catching up
UNSURE_BYTES: Final = SYNC_EVERY + MAX_DATA  # so much at its end a copy may have that is not synced
MAX_MESSAGE: Final = MAX_DATA + 1024

# What a STATE says of the copy beside numbers.
ALIVE, DAMAGED = 1, 2

_HEAD: Final = Struct("<II")
_HELLO: Final = Struct("<8sI16sIQQ")
_STATE: Final = Struct("<8sI16sIQQBBQQQQI")
_BEGIN: Final = Struct("<BQ")
_DATA: Final = Struct("<QB")
_OFFSET: Final = Struct("<Q")
_REFUSED: Final = Struct("<BQ")
_END: Final = Struct("<QQ")
_READ: Final = Struct("<QI")


class StreamError(WeclawError):
    """The other side sent what is no message of this stream."""


class VersionError(StreamError):
    """The other side speaks another version of this stream."""


class Hello(NamedTuple):
    """What the feeder says of its file; all zeros from one that only wants to fetch."""

    store_id: bytes
    segment_bytes: int
    epoch: int
    created_us: int


class State(NamedTuple):
    """What the receiver says of its copy; a store_id of zeros: there is none."""

    store_id: bytes
    segment_bytes: int
    epoch: int
    created_us: int
    role: int  # as in the role record of the file
    flags: int  # ALIVE, DAMAGED
    head: int  # first segment kept
    tail: int  # where it goes on
    last: int  # where its last frame begins
    last_end: int  # where that ends; 0: it has none
    last_crc: int  # the checksum of that frame

    @property
    def exists(self) -> bool:
        return any(self.store_id)

    @property
    def is_alive(self) -> bool:
        """Whether another process has it open, as a queue or as its receiver."""
        return bool(self.flags & ALIVE)

    @property
    def is_damaged(self) -> bool:
        """Whether a segment is missing in it, or something at its end can't be read."""
        return bool(self.flags & DAMAGED)


def message(number: int, kind: int, *pieces: bytes | memoryview) -> bytes:
    """One message, the `number`-th of its direction."""
    rest = b"".join((bytes((kind,)), *pieces))
    return _HEAD.pack(len(rest), crc32(rest, number & 0xFFFFFFFF)) + rest


def pack_hello(hello: Hello) -> bytes:
    """The fields of HELLO and LOOK."""
    return _HELLO.pack(MAGIC, VERSION, *hello)


def pack_state(state: State) -> bytes:
    return _STATE.pack(MAGIC, VERSION, *state)


def pack_begin(anew: bool, offset: int) -> bytes:
    return _BEGIN.pack(anew, offset)


def pack_data(offset: int, sync: bool) -> bytes:
    """What stands before the bytes of a DATA message."""
    return _DATA.pack(offset, sync)


def pack_offset(offset: int) -> bytes:
    """The fields of HEAD (a segment), SYNC and ACK."""
    return _OFFSET.pack(offset)


def pack_refused(why: int, epoch: int, text: str) -> bytes:
    return _REFUSED.pack(why, epoch) + text.encode("utf-8", "replace")[:4096]


def pack_end(head: int, tail: int) -> bytes:
    return _END.pack(head, tail)


def pack_read(offset: int, n: int) -> bytes:
    return _READ.pack(offset, n)


def _unpack(form: Struct, body: bytes, *, exact: bool = True) -> tuple[int, ...]:
    try:
        fields = form.unpack_from(body, 1)
    except struct.error:
        raise StreamError("a message is too short") from None
    if exact and len(body) != 1 + form.size:
        raise StreamError("a message is too long")
    return fields


def unpack_hello(body: bytes) -> Hello:
    magic, version, *fields = _unpack(_HELLO, body)
    _check_greeting(magic, version)
    return Hello(*fields)  # type: ignore[arg-type]  # the form says which are bytes


def unpack_state(body: bytes) -> State:
    magic, version, *fields = _unpack(_STATE, body)
    _check_greeting(magic, version)
    return State(*fields)  # type: ignore[arg-type]  # the form says which are bytes


def _check_greeting(magic: object, version: int) -> None:
    if magic != MAGIC:
        raise StreamError("the other side does not speak this stream")
    if version != VERSION:
        raise VersionError(
            f"the other side speaks version {version} of the stream, this release version "
            f"{VERSION}; use the same release on both sides"
        )


def unpack_begin(body: bytes) -> tuple[bool, int]:
    anew, offset = _unpack(_BEGIN, body)
    return bool(anew), offset


def unpack_data(body: bytes) -> tuple[int, bool, memoryview]:
    """(offset, whether to sync after it, the bytes)."""
    try:
        offset, sync = _DATA.unpack_from(body, 1)
    except struct.error:
        raise StreamError("a message is too short") from None
    return offset, bool(sync), memoryview(body)[1 + _DATA.size :]


def unpack_offset(body: bytes) -> int:
    if len(body) == 1 + _OFFSET.size:
        return int(_OFFSET.unpack_from(body, 1)[0])
    return _unpack(_OFFSET, body)[0]


def unpack_refused(body: bytes) -> tuple[int, int, str]:
    why, epoch = _unpack(_REFUSED, body, exact=False)
    return why, epoch, body[1 + _REFUSED.size :].decode("utf-8", "replace")


def unpack_end(body: bytes) -> tuple[int, int]:
    head, tail = _unpack(_END, body)
    return head, tail


def unpack_read(body: bytes) -> tuple[int, int]:
    """(offset, how many bytes)."""
    offset, n = _unpack(_READ, body)
    if not n <= MAX_DATA:
        raise StreamError(f"{n} bytes are more than may be asked for at once")
    return offset, n


class Incoming:
    """Cuts what comes in into messages. Nothing is handed out before its checksum held."""

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""  # what came; more is added to a bytearray only
        self._at = 0  # all before is handed out
        self._number = 0

    def add(self, data: bytes) -> None:
        if self._at < len(self._data):
            rest = bytearray(self._data) if isinstance(self._data, bytes) else self._data
            del rest[: self._at]
            rest += data
            self._data = rest
        else:
            self._data = data
        self._at = 0

    def next(self) -> bytes | None:
        """The next message from its type on; None while it is not all there. StreamError when
        what came in is no message.
        """
        data = self._data
        start = self._at + _HEAD.size
        if len(data) < start:
            return None
        length, crc = _HEAD.unpack_from(data, self._at)
        if not 1 <= length <= MAX_MESSAGE:
            begin = bytes(data[self._at : self._at + 64])
            raise StreamError(f"what came is no message of the stream: it begins {begin!r}")
        end = start + length
        if len(data) < end:
            return None
        body = bytes(memoryview(data)[start:end])
        if crc32(body, self._number & 0xFFFFFFFF) != crc:
            raise StreamError(f"message {self._number} came garbled: its checksum is wrong")
        self._at = end
        self._number += 1
        return body

    @property
    def is_cut(self) -> bool:
        """Whether the stream, if it ends here, ends within a message."""
        return self._at < len(self._data)
