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

from typing import Final

from . import _files
from ._finding import find_segments
from ._format import CHECKPOINT_FRAME, FIRST, PART_BYTES, SLOT_BYTES, SlotHeader, pack_slot
from ._lost_slot import frames_in
from ._scan import BadPartError, check_part
from ._segments import CHECKPOINT, FREE, HEAD, LAST, Segments

__all__ = ["SEGMENT_LABELLED", "SEGMENT_LOST", "find_lost", "label_lost"]

SEGMENT_LABELLED: Final = (
    "both headers of the last segment were damaged; they were made anew from what stands in it"
)
SEGMENT_LOST: Final = (
    "both headers of the last segment are damaged; opening the file to write makes them anew from "
    "what stands in it"
)
_MASK = 0xFFFFFFFF


def label_lost(log: Segments) -> list[int]:
    """Write the headers of lost segments at the end of the log anew, and find the segments again;
    return which they are.
    """
    labelled = []
    while (lost := find_lost(log)) is not None:
        slot, header = lost
        copy = pack_slot(header, log.header.store_id)
        for at in log.header_positions(slot):
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
        frames = frames_in(log, slot)
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
