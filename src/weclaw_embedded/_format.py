"""Bytes of the file and what they mean: pure functions, no input or output.

All integers are little-endian.  The full specification is docs/format.md; this is the summary
that a test holds equal to it.

    file       header block (4096 bytes), then slots of `segment_bytes` each
    header     16s magic, I version, I segment_bytes, 16s store_id, Q epoch, Q generation,
               Q created_us, I crc; twice: at 0 and at 2048
    head record  4s magic, I crc, Q head; at 1024: the first segment that is kept
    end record   4s magic, I crc, Q end; at 1088: how far it was on stable storage once
    role record  4s magic, I crc, Q role, Q epoch; at 1536: a replica's copy, or fenced off
    slot       slot header (64 bytes), frame parts, zeros, the slot header again (last 64 bytes)
    slot header  4s magic, I crc, Q segment, I salt, I prev_salt, Q prev_end, Q head, Q epoch,
               Q checkpoint, Q created_us
    part       I crc, I length, Q commit << 8 | flags, Q time_us, then `length` bytes of payload
    payload    I rest and `rest` bytes (at most) of the record that the part before cut, unless
               the part is FIRST; then records: I length, I back, the record's bytes

Segment number n holds the offsets from n * segment_bytes on; which slot it lives in is said by
the slot's header alone.  A part's checksum starts from its segment's salt and its offset, so
bytes in the wrong place or of a slot's earlier life never pass.  Nothing valid is all zeros.

This module must not know what records mean, nor where the bytes come from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from .errors import CorruptError, FormatVersionError, NotAQueueError

__all__ = [
    "BATCH",
    "CHECKPOINT_FRAME",
    "COPY",
    "DEFAULT_SEGMENT_BYTES",
    "END_RECORD_AT",
    "ENVELOPE",
    "ENVELOPE_BYTES",
    "ENVELOPE_WITH_HEAD",
    "FENCED",
    "FIRST",
    "HEADER_BYTES",
    "HEADER_COPY_BYTES",
    "HEAD_RECORD_AT",
    "LAST_PART",
    "MAGIC",
    "MAX_FRAME_BYTES",
    "MAX_OFFSET",
    "MAX_SEGMENT_BYTES",
    "MIN_SEGMENT_BYTES",
    "ONLY_ENVELOPE",
    "OS",
    "PART",
    "PART_AND_ENVELOPE",
    "PART_BYTES",
    "PART_TAIL",
    "PART_WITH_ENVELOPE",
    "POLICY_SHIFT",
    "PRIMARY",
    "REPLICA",
    "REST",
    "ROLE_AT",
    "SLOT_BYTES",
    "SYNC",
    "UNUSUAL",
    "VERSION",
    "VOUCH",
    "WHOLE",
    "FileHeader",
    "SlotHeader",
    "Stretch",
    "check_segment_bytes",
    "envelopes",
    "has_head",
    "pack_head",
    "pack_header",
    "pack_role",
    "pack_slot",
    "part_checksum",
    "slot_unpacker",
    "unpack_head",
    "unpack_header",
    "unpack_role",
]

MAGIC = b"weclaw queue\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 4096
_COPY_AT = 2048
_HEADER = Struct("<16sII16sQQQ")
_CRC = Struct("<I")
HEADER_COPY_BYTES = _HEADER.size + _CRC.size

HEAD_RECORD_AT = 1024  # in the header block
END_RECORD_AT = 1088
_HEAD_MAGIC = b"WQHD"
_END_MAGIC = b"WQEN"
_HEAD = Struct("<4sIQ")

ROLE_AT = 1536  # in the header block
_ROLE_MAGIC = b"WQRL"
_ROLE = Struct("<4sIQQ")
# What a file is: a queue, a replica's copy of one, or one that a promoted copy has replaced.
PRIMARY, COPY, FENCED = range(3)

SLOT_MAGIC = b"WQSG"
SLOT_BYTES = 64  # of a slot header; a slot has one at each end
_SLOT = Struct("<4sIQIIQQQQQ")
_SLOT_FIELDS = Struct("<QIIQQQQQ")  # the same without magic and crc

PART = Struct("<IIQQ")
PART_BYTES = PART.size
ENVELOPE = Struct("<II")
ENVELOPE_BYTES = ENVELOPE.size
REST = Struct("<I")
# The shapes the hot paths use: a part and its first envelope at once, the same with the envelope
# as one number, the same without the checksum, which covers all of it, and an envelope with the
# first bytes of its record.
PART_WITH_ENVELOPE = Struct("<IIQQII")
PART_AND_ENVELOPE = Struct("<IIQQQ")
PART_TAIL = Struct("<IQQII")
ENVELOPE_WITH_HEAD = Struct("<IIQ")
# What the envelope of the only record of a frame is as one number, less the part's length.
ONLY_ENVELOPE = (PART_BYTES << 32) - ENVELOPE_BYTES

# Flags of a part, the low eight bits beside the commit point.
FIRST = 1  # the first part of its frame
LAST_PART = 2  # the last one
WHOLE = FIRST | LAST_PART
POLICY_SHIFT = 2  # two bits: what the frame was promised before its writer was answered
CHECKPOINT_FRAME = 16  # a Checkpoint record begins the frame
VOUCH = 32  # all before this frame was on stable storage when it was written
KNOWN_FLAGS = 63
# Those that are as in WHOLE where a frame of one part is one that isn't begun by a Checkpoint.
UNUSUAL = 0xFF & ~KNOWN_FLAGS | WHOLE | CHECKPOINT_FRAME

# What a frame can be promised: the operating system has it, it is synced now and then, it is
# synced, it is on the replica too.
OS, BATCH, SYNC, REPLICA = range(4)

# Limits, checked on the way out and on the way in before any memory is taken.
MAX_OFFSET = 1 << 56  # the commit point is kept in 56 bits
MIN_SEGMENT_BYTES = 64 << 10
DEFAULT_SEGMENT_BYTES = 1 << 20
MAX_SEGMENT_BYTES = 1 << 30
MAX_FRAME_BYTES = (1 << 30) + (1 << 28)  # 1 GiB of messages and what goes with them


class FileHeader(NamedTuple):
    """What the file says about itself."""

    segment_bytes: int
    store_id: bytes
    epoch: int  # raised by each promotion of a replica
    generation: int  # raised by each rewriting of this header
    created_us: int
    version: int = VERSION


class SlotHeader(NamedTuple):
    """What a slot says about the segment that lives in it."""

    segment: int
    salt: int
    prev_salt: int  # of the segment before; 0 for the first one
    prev_end: int  # offset at which the frames of the segment before end
    head: int  # what the head record said when this segment began
    epoch: int
    checkpoint: int  # offset of the latest Checkpoint frame then; 0: none
    created_us: int


class Stretch(NamedTuple):
    """Whole frames of one segment, one after the other, checked, as they stand in the file.

    Nothing is made of a record but three numbers, so that going through millions is cheap: the
    place of its envelope in `data`, where the record ends there, and its head, which is its first
    eight bytes as one number; -1 if it has fewer.
    """

    base: int  # the offset of the first byte of `data`
    data: bytes  # goes on for SLOT_BYTES behind the last record, so that any can be unpacked
    heads: list[int]
    places: list[int]
    ends: list[int]
    commit: int  # the highest commit point that its frames know of

    @property
    def end(self) -> int:
        """The offset at which its last frame ends."""
        return self.base + self.ends[-1]

    @property
    def last(self) -> int:
        """The offset of its last frame."""
        return self.base + self._part_of(self.places[-1])

    def last_of(self, end: int) -> tuple[int, int, int]:
        """That `end`, at which its last frame ends, with offset and checksum of this frame."""
        at = self._part_of(self.places[-1])
        return end, self.base + at, int(PART.unpack_from(self.data, at)[0])

    @property
    def flags(self) -> int:
        """The flags of its last frame."""
        return int(PART.unpack_from(self.data, self._part_of(self.places[-1]))[2]) & 0xFF

    def is_boundary(self, offset: int) -> bool:
        """Whether one of its frames begins or ends at an offset."""
        if offset == self.end:
            return True
        place = offset - self.base + PART_BYTES
        index = bisect_left(self.places, place)
        found = index < len(self.places) and self.places[index] == place
        return found and self._part_of(place) == place - PART_BYTES

    def told(self) -> list[tuple[int, int, tuple[bytes]]]:
        """Of each record its offset, the time of its frame, and its bytes as the only part."""
        base, data, time_us = self.base, self.data, self.time_us
        return [
            (base + place, time_us(place), (data[place + ENVELOPE_BYTES : end],))
            for place, end in zip(self.places, self.ends, strict=True)
        ]

    def time_us(self, place: int) -> int:
        """The time of the frame that a record is in."""
        _, _, _, time_us, _, back = PART_WITH_ENVELOPE.unpack_from(self.data, place - PART_BYTES)
        if back != PART_BYTES:  # not the first of its part
            time_us = PART.unpack_from(self.data, place - back)[3]
        return int(time_us)

    def _part_of(self, place: int) -> int:
        """Where the part that a record begins in begins."""
        return place - int(ENVELOPE.unpack_from(self.data, place)[1])


_new = tuple.__new__  # twice as fast as `SlotHeader._make`; an opening reads thousands


def check_segment_bytes(n: int) -> int:
    """Return `n` if a file can have segments of that size; ValueError otherwise."""
    if not MIN_SEGMENT_BYTES <= n <= MAX_SEGMENT_BYTES or n & (n - 1):
        raise ValueError(
            f"segment_bytes must be a power of two from {MIN_SEGMENT_BYTES} to "
            f"{MAX_SEGMENT_BYTES}, not {n}"
        )
    return n


def pack_header(header: FileHeader) -> bytes:
    """The header block: both copies, and zeros between and after."""
    fields = _HEADER.pack(
        MAGIC,
        header.version,
        header.segment_bytes,
        header.store_id,
        header.epoch,
        header.generation,
        header.created_us,
    )
    copy = (fields + _CRC.pack(crc32(fields))).ljust(_COPY_AT, b"\0")
    return copy + copy.ljust(HEADER_BYTES - _COPY_AT, b"\0")


def unpack_header(block: bytes, name: str = "the file") -> FileHeader:
    """Read the header block of a file (what there is of its first 4096 bytes).

    Raises NotAQueueError when the magic is nowhere, FormatVersionError when the version (judged
    before any checksum) is newer, CorruptError when neither copy is whole.
    """
    best: FileHeader | None = None
    ours = False
    for at in (0, _COPY_AT):
        copy = block[at : at + HEADER_COPY_BYTES]
        if copy[:16] != MAGIC:
            continue
        ours = True
        version = int.from_bytes(copy[16:20], "little")
        if version > VERSION and best is None:
            raise FormatVersionError(
                f"{name} has format version {version}; this release reads up to {VERSION}; "
                f"nothing was touched; open it with a newer release of weclaw-embedded"
            )
        header = _unpack_copy(copy)
        if header is not None and (best is None or header.generation > best.generation):
            best = header
    if best is not None:
        return best
    if not ours:
        raise NotAQueueError(
            f"{name} isn't a weclaw queue (its first bytes are {bytes(block[:16])!r}); it wasn't "
            f"touched; check the path"
        )
    raise CorruptError(
        0,
        "the header block is damaged",
        f"the header block of {name} is damaged in both copies; nothing was touched; restore the "
        f"first 4096 bytes from a backup or promote the replica",
    )


def _unpack_copy(copy: bytes) -> FileHeader | None:
    if len(copy) < HEADER_COPY_BYTES:
        return None
    if _CRC.unpack_from(copy, _HEADER.size)[0] != crc32(copy[: _HEADER.size]):
        return None
    _, version, segment_bytes, store_id, epoch, generation, created_us = _HEADER.unpack_from(copy)
    try:
        check_segment_bytes(segment_bytes)
    except ValueError:
        return None
    if version != VERSION:
        return None
    return FileHeader(segment_bytes, store_id, epoch, generation, created_us, version)


def pack_head(head: int, store_id: bytes) -> bytes:
    """The head record: segments before `head` are gone, whatever is found of them."""
    return _pack_number(_HEAD_MAGIC, head, store_id)


def unpack_head(block: bytes, store_id: bytes) -> int:
    """The head that a header block records; 0 when it records none that is whole."""
    return _unpack_number(_HEAD_MAGIC, block[HEAD_RECORD_AT:], store_id) or 0


def has_head(block: bytes, store_id: bytes) -> bool:
    """Whether a header block records a head; every file's does but a copy's."""
    return _unpack_number(_HEAD_MAGIC, block[HEAD_RECORD_AT:], store_id) is not None


def pack_end(end: int, store_id: bytes) -> bytes:
    """The end record: everything below `end` was on stable storage once."""
    return _pack_number(_END_MAGIC, end, store_id)


def unpack_end(block: bytes, store_id: bytes) -> int:
    """The end that a header block records; 0 when it records none that is whole."""
    return _unpack_number(_END_MAGIC, block[END_RECORD_AT:], store_id) or 0


def _pack_number(magic: bytes, number: int, store_id: bytes) -> bytes:
    fields = number.to_bytes(8, "little")
    return magic + _CRC.pack(crc32(fields, crc32(store_id))) + fields


def _unpack_number(magic: bytes, data: bytes, store_id: bytes) -> int | None:
    if len(data) < _HEAD.size or data[:4] != magic:
        return None
    _, crc, number = _HEAD.unpack_from(data)
    return int(number) if crc == crc32(data[8 : _HEAD.size], crc32(store_id)) else None


def pack_role(role: int, epoch: int, store_id: bytes) -> bytes:
    """The role record: PRIMARY, COPY, or FENCED by a file of that epoch."""
    fields = role.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    return _ROLE_MAGIC + _CRC.pack(crc32(fields, crc32(store_id))) + fields


def unpack_role(block: bytes, store_id: bytes) -> tuple[int, int]:
    """(role, epoch) that a header block records; PRIMARY when it records none that is whole."""
    data = block[ROLE_AT : ROLE_AT + _ROLE.size]
    if len(data) < _ROLE.size or data[:4] != _ROLE_MAGIC:
        return PRIMARY, 0
    _, crc, role, epoch = _ROLE.unpack(data)
    if crc != crc32(data[8:], crc32(store_id)) or role > FENCED:
        return PRIMARY, 0
    return role, epoch


def pack_slot(slot: SlotHeader, store_id: bytes) -> bytes:
    """The 64 bytes that begin and end a slot in use."""
    fields = _SLOT.pack(SLOT_MAGIC, 0, *slot)[8:]
    return SLOT_MAGIC + _CRC.pack(crc32(fields, crc32(store_id))) + fields


def slot_unpacker(store_id: bytes, segment_bytes: int) -> Callable[[bytes], SlotHeader | None]:
    """What reads a slot header of one file, of which an opening reads thousands; it returns None
    for bytes that are none.
    """
    seed = crc32(store_id)
    most = MAX_OFFSET // segment_bytes - 2
    nearest, farthest = SLOT_BYTES - segment_bytes, -SLOT_BYTES

    def unpack(data: bytes) -> SlotHeader | None:
        if data[:4] != SLOT_MAGIC or len(data) < SLOT_BYTES:
            return None
        if int.from_bytes(data[4:8], "little") != crc32(data[8:SLOT_BYTES], seed):
            return None
        fields = _SLOT_FIELDS.unpack_from(data, 8)
        segment, salt, _, prev_end, head, _, checkpoint, _ = fields
        start = segment * segment_bytes
        if segment > most or head > segment or not salt:
            return None
        if segment == 0:
            return _new(SlotHeader, fields) if prev_end == 0 else None
        if not nearest <= prev_end - start <= farthest or checkpoint >= start:
            return None
        return _new(SlotHeader, fields)

    return unpack


def part_checksum(after_crc: bytes, salt: int, offset: int) -> int:
    """The checksum of a part: over all of it after the checksum itself."""
    return crc32(after_crc, (salt + offset) & 0xFFFFFFFF)


def unseed(from_zero: int, crc: int, size: int) -> int:
    """The value that a CRC-32 over `size` bytes was begun with that came to `crc`, and comes to
    `from_zero` when it is begun with 0: the two differ as the beginnings do, shifted through.
    """
    value = from_zero ^ crc
    back = [_one_back(1 << bit) for bit in range(32)]  # of one byte, for each bit; then of two, …
    while size:
        if size & 1:
            value = _sum_of(back, value)
        back = [_sum_of(back, one) for one in back]
        size >>= 1
    return value


def _one_back(state: int) -> int:
    """The state of a CRC-32 one zero byte before."""
    for _ in range(8):
        high = state >> 31
        state = (state ^ (0xEDB88320 if high else 0)) << 1 & 0xFFFFFFFF | high
    return state


def _sum_of(columns: list[int], value: int) -> int:
    total = 0
    for column in columns:
        if value & 1:
            total ^= column
        value >>= 1
    return total


def envelopes(part: bytes, first: bool) -> dict[int, int]:
    """The records that begin in a part (header included): position of the envelope -> length of
    each, in order.

    The last one may continue in the next part.  Raises ValueError when they don't fit together.
    """
    at = PART_BYTES
    end = len(part)
    if not first:
        if at + REST.size > end:
            raise ValueError("a continued part is too short")
        at += REST.size + min(REST.unpack_from(part, at)[0], end - at - REST.size)
    found = {}
    length = 0
    last = end - ENVELOPE_BYTES
    unpack = ENVELOPE.unpack_from
    while at <= last:
        length, back = unpack(part, at)
        if back != at or not length:
            raise ValueError("a record's envelope is wrong")
        found[at] = length
        at += ENVELOPE_BYTES + length
    if at < end:
        raise ValueError("a record's envelope is cut")
    if length > MAX_FRAME_BYTES:  # those before it are shorter than the part
        raise ValueError("a record's envelope is wrong")
    return found
