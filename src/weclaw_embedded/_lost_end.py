"""The end of a log whose slots have lost both their headers: found by its frames, labelled anew.

Role: a segment is known by its slot's headers alone. One in the middle that has lost both is
missed, for there is one behind it; of the last one nothing would be left to tell that it ever was.
Its frames do tell: the checksum of the first gives the salt away, if the one behind it agrees, and
a commit point that lies in the segment says that it was on stable storage once.

Invariants: nothing comes back that was cut off, or that a power cut took before it was durable: its
frames know of no commit point beyond the end of what was kept. And nothing that somebody wrote into
a body passes for a segment: only what stands where a slot's first frame does is looked at.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from zlib import crc32

from . import _files
from ._finding import find_segments
from ._format import (
    CHECKPOINT_FRAME,
    FIRST,
    KNOWN_FLAGS,
    PART,
    PART_BYTES,
    SLOT_BYTES,
    SlotHeader,
    pack_slot,
    part_checksum,
    unseed,
)
from ._scan import BadPartError, Budget, check_part
from ._segments import CHECKPOINT, FREE, HEAD, LAST, Segments

__all__ = ["SEGMENT_LABELLED", "SEGMENT_LOST", "find_lost", "label_lost"]

SEGMENT_LABELLED: Final = (
    "both headers of the last segment were damaged; they were made anew from what stands in it"
)
SEGMENT_LOST: Final = (
    "both headers of the last segment are damaged; opening the file to write makes them anew from "
    "what stands in it"
)
_PIECE = 64 << 10
_MOST_BYTES = 64 << 20  # of a slot, so many are looked at
_MASK = 0xFFFFFFFF
# Flags and the highest byte of the time: what hardly varies in the header of a part.
_HEADER = re.compile(rb"(?s)(?=[\1-\77].{13}[\0-\37]\0)")


class _Frames(NamedTuple):
    """What is known of a slot without headers from the frames in it."""

    seed: int  # what the checksum of the first begins with: the salt and its offset, added
    time_us: int
    highest: int  # the highest commit point that they know
    lowest_base: int  # the segment begins here or later: no commit point is above its own frame


def label_lost(log: Segments) -> list[int]:
    """Write the headers of lost segments at the end of the log anew, and find the segments again;
    return which they are.
    """
    labelled = []
    while (lost := find_lost(log)) is not None:
        slot, header = lost
        copy = pack_slot(header, log.header.store_id)
        position = log.slot_position(slot)
        for at in (position, position + log.segment_bytes - SLOT_BYTES):
            _files.write_at(log.fd, [copy], at)
        _files.sync_data(log.fd)
        labelled.append(header.segment)
        find_segments(log)
    return labelled


def find_lost(log: Segments) -> tuple[int, SlotHeader] | None:
    """The slot of the segment behind the last, and the header it should have, if there was one and
    it was on stable storage; None if not. The segments must have been found.
    """
    words = log.state.words
    segment = words[LAST] + 1
    base = segment << log.bits
    for slot, entry in enumerate(log.table()):
        if not entry & FREE:
            continue
        frames = _frames_in(log, slot)
        if frames is None or not frames.lowest_base <= base < frames.highest - SLOT_BYTES:
            continue
        salt = (frames.seed - base - SLOT_BYTES) & _MASK
        if not salt:
            continue
        end, checkpoint = _end_of(log, segment - 1)
        return slot, SlotHeader(
            segment=segment,
            salt=salt,
            prev_salt=log.place(segment - 1)[1],
            prev_end=end,
            head=words[HEAD],
            epoch=log.header.epoch,
            checkpoint=checkpoint,
            created_us=frames.time_us,
        )
    return None


def _frames_in(log: Segments, slot: int) -> _Frames | None:
    """What the frames say in a slot that has no header; None if it has one, or holds none."""
    position = log.slot_position(slot)
    size = min(log.segment_bytes - 2 * SLOT_BYTES, _MOST_BYTES)
    # (What can't be read in a slot that is free is nobody's loss.)
    data, _ = _files.read_around(log.fd, min(size, _PIECE), position + SLOT_BYTES)
    if not data[:PART_BYTES].strip(b"\0") or log.read_slot(slot) is not None:
        return None
    data += _files.read_around(log.fd, size - len(data), position + SLOT_BYTES + len(data))[0]
    if log.read_slot(slot) is not None:
        return None  # somebody has begun it meanwhile
    if len(data) < PART_BYTES:
        return None
    crc, length, _, time_us = PART.unpack_from(data)
    end = PART_BYTES + length
    if not length or end > len(data):
        return None
    seed = unseed(crc32(data[4:end]), crc, end - 4)
    if not _is_part(data, end, seed):
        return None  # nobody agrees that this is the salt
    budget = Budget()
    highest = lowest_base = at = 0
    while at >= 0:
        _, length, commit_flags, _ = PART.unpack_from(data, at)
        highest = max(highest, commit_flags >> 8)
        lowest_base = max(lowest_base, (commit_flags >> 8) - SLOT_BYTES - at)
        at = _next_part(data, at + PART_BYTES + length, seed, budget)
    return _Frames(seed, time_us, highest, lowest_base)


def _is_part(data: bytes, at: int, seed: int) -> bool:
    """Whether a valid part stands there, of the slot whose first one's checksum has this seed."""
    if at + PART_BYTES > len(data):
        return False
    crc, length, commit_flags, _ = PART.unpack_from(data, at)
    end = at + PART_BYTES + length
    if not length or end > len(data) or commit_flags & 0xFF & ~KNOWN_FLAGS:
        return False
    return bool(part_checksum(data[at + 4 : end], seed, at) == crc)


def _next_part(data: bytes, at: int, seed: int, budget: Budget) -> int:
    """Where the next valid part begins from there on; -1 if there is none."""
    if _is_part(data, at, seed):
        return at
    if not data[at : at + PART_BYTES].strip(b"\0") and not data[at:].strip(b"\0"):
        return -1
    for match in _HEADER.finditer(data, at + 8):
        begin = match.start() - 8
        length = PART.unpack_from(data, begin)[1] if begin + PART_BYTES <= len(data) else 0
        if begin + PART_BYTES + length > len(data):
            continue
        if not budget.spend(length):
            return -1
        if _is_part(data, begin, seed):
            return begin
    return -1


def _end_of(log: Segments, segment: int) -> tuple[int, int]:
    """(where the frames of the last segment that was found end, the latest checkpoint by then)."""
    at, limit = (segment << log.bits) + SLOT_BYTES, log.limit(segment)
    checkpoint = log.state.words[CHECKPOINT]
    try:
        while at < limit:
            commit_flags, _, part = check_part(log, at, limit)
            if commit_flags & FIRST and commit_flags & CHECKPOINT_FRAME:
                checkpoint = at + PART_BYTES
            at += len(part)
    except BadPartError:
        if log.bytes_at(limit - at, at + log.place(segment)[0]).strip(b"\0"):
            at = limit  # what is bad there is found by whoever reads it
    return at, checkpoint
