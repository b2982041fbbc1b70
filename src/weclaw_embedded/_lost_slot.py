"""What the frames say in a slot that has lost both its headers: whose it may have been.

Role: a segment is known by its slot's headers alone. The checksum of the first frame gives the salt
away, if the one behind it agrees, and the commit points that the frames know say where in the log
they stood.

It reads, and writes nothing. It must not know which segments the log has.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from zlib import crc32

from . import _files
from ._format import (
    KNOWN_FLAGS,
    PART,
    PART_BYTES,
    SLOT_BYTES,
    part_checksum,
    unseed,
)
from ._scan import Budget
from ._segments import Segments

__all__ = ["Frames", "frames_in"]

_PIECE = 64 << 10
_MOST_BYTES = 64 << 20  # of a slot, so many are looked at
# Flags and the highest byte of the time: what hardly varies in the header of a part.
_HEADER = re.compile(rb"(?s)(?=[\1-\77].{13}[\0-\37]\0)")


class Frames(NamedTuple):
    """What is known of a slot without headers from the frames in it."""

    seed: int  # what the checksum of the first begins with: the salt and its offset, added
    time_us: int
    highest: int  # the highest commit point that they know
    lowest_base: int  # the segment begins here or later: no commit point is above its own frame


def frames_in(log: Segments, slot: int) -> Frames | None:
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
    return Frames(seed, time_us, highest, lowest_base)


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
