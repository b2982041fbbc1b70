"""Finding the segments of a file by what its slots say of themselves, and mending what they say.

Role: after a crash nothing is known of a file but its bytes. Here the slot table, HEAD and LAST are
filled from them; copies of headers that are damaged are written anew from the others; and of what
is free it is said what may be used at once.

It must not know what frames are, but for the first part by which two doubles are told apart.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from . import _files
from ._format import (
    COPY,
    HEAD_RECORD_AT,
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    PART,
    PART_BYTES,
    SLOT_BYTES,
    SlotHeader,
    has_head,
    pack_head,
    pack_header,
    pack_slot,
    part_checksum,
    unpack_end,
    unpack_head,
    unpack_role,
)
from ._lost_slot import frames_in
from ._segments import (
    ANNOUNCED,
    CHECKPOINT,
    FREE,
    HEAD,
    LAST,
    PUNCHED,
    SAFE,
    SLOTS,
    TAIL,
    UNKNOWN,
    ZEROED,
    Segments,
)
from ._slots import Slots
from .errors import CorruptError, DiskFullError

__all__ = [
    "HEADER_HEALED",
    "begins_with_part",
    "count_slots",
    "erase_header",
    "find_segments",
    "find_spares",
    "recorded_head",
    "restore_copies",
]

# How often the slots are looked at when all that was found is let go of meanwhile.
_LOOKS: Final = 16

HEADER_HEALED = "a copy of the header block was damaged; it was written anew from the other"
HEADER_REBUILT = "the header block was lost; it was written anew from what the slots say"


def count_slots(log: Segments) -> int:
    """How many slots the file has, the last one perhaps in part."""
    return max(0, -(-(_files.size(log.fd) - HEADER_BYTES) // log.segment_bytes))


def find_segments(log: Segments) -> None:
    """Fill the slot table, HEAD and LAST from the slot headers and the head record."""
    words = log.state.words
    look = _look_at_slots(log)
    if log.readonly:
        # Others may write meanwhile.
        look = _look_until_sure(log, look)
    n_slots, headers, recorded, head, last = look
    unread = _unread_slots(log, look) if log.unread else []
    if len(unread) > look.n_missing():
        # It may be a later segment that they hold: to go on without it would be to lose it.
        raise log.cannot_read(log.slot_position(unread[0]), SLOT_BYTES)
    if head > last:
        # What is there, if anything, was let go of long ago: to believe it would bring back what
        # was settled.
        raise CorruptError(
            head << log.bits,
            "no segment can be found",
            "no segment that is still needed can be found in the file "
            f"{_files.name_of(log.fd)}: their slots are damaged or were cut off; nothing was "
            "touched; restore from a backup or promote the replica",
        )
    chosen = _chosen(log, headers, head)
    # Salts are drawn anew: who has begun a segment twice has not given it the same.
    log.is_overwritten |= len(chosen) < len(headers) and any(
        slot != (other := chosen.get(one.segment)) and other is not None and headers[other] == one
        for slot, one in headers.items()
    )
    log.state.grow_slots(n_slots)
    log.forget()
    table = log.state.slots
    entries = [FREE | SAFE] * n_slots + [0] * (len(table) - n_slots)
    for segment, slot in chosen.items():
        entries[slot] = segment + 1
    for slot in unread:
        entries[slot] = UNKNOWN
    table[:] = array("Q", entries)
    if (recorded < head or (not recorded and _has_lost_head(log))) and not log.readonly:
        # Known from a slot that may be cut off just now: what was let go of must not come back.
        record = pack_head(head, log.header.store_id)
        _files.write_at(log.fd, [record], HEAD_RECORD_AT)
        _files.sync_data(log.fd)
        recorded = head
    log.known_end = unpack_end(_files.read_at(log.fd, HEADER_BYTES, 0), log.header.store_id)
    words[SLOTS] = n_slots
    words[HEAD] = head
    words[ANNOUNCED] = recorded
    words[LAST] = last
    words[TAIL] = 0
    words[CHECKPOINT] = headers[chosen[last]].checkpoint
    if words[CHECKPOINT] >> log.bits < words[HEAD]:
        words[CHECKPOINT] = 0
    if not log.readonly:
        _complete_last_slot(log, n_slots)
        for slot in headers.keys() - chosen.values():
            if headers[slot].segment >= head:
                # Another one's double, which must not be taken for it the next time.
                erase_header(log, slot)


class _Look(NamedTuple):
    """What was found at one look at all slots."""

    n_slots: int
    headers: dict[int, SlotHeader]
    recorded: int  # what the head record says, read after the slots
    head: int
    last: int  # -1: none

    def last_missing(self) -> int:
        """The last segment from the head on that has no slot, though a later one has; else -1."""
        numbers = {header.segment for header in self.headers.values()}
        missing = self.last
        while missing in numbers:
            missing -= 1
        return missing if missing >= self.head else -1

    def n_missing(self) -> int:
        """How many segments from the head to the last have no slot. Counted without going through
        them: a slot may claim any number.
        """
        numbers = {header.segment for header in self.headers.values()}
        return len(range(self.head, self.last + 1)) - sum(n >= self.head for n in numbers)

    def until(self, segment: int) -> _Look:
        """The same without what begins later."""
        headers = {slot: one for slot, one in self.headers.items() if one.segment <= segment}
        last = max((header.segment for header in headers.values()), default=-1)
        return self._replace(headers=headers, last=last)


def _look_at_slots(log: Segments) -> _Look:
    n_slots = count_slots(log)
    headers = _slot_headers(log, n_slots)
    recorded = recorded_head(log)
    last = max((header.segment for header in headers.values()), default=-1)
    head = max([recorded, *(header.head for header in headers.values())])
    if not recorded and _has_lost_head(log):
        # The slots say what it was when the last of them began. What is missing behind that was
        # given back, or is in a slot that has lost both its headers, too.
        kept = {header.segment for header in headers.values() if header.segment >= head}
        first = min(kept, default=head)
        if first > head:
            n_missing = last + 1 - first - len(kept)
            headless = set(range(n_slots)) - headers.keys()
            head = max(head, first - _n_lost_before(log, first, headless, n_missing))
    return _Look(n_slots, headers, recorded, head, last)


def _has_lost_head(log: Segments) -> bool:
    block = _files.read_at(log.fd, HEADER_BYTES, 0)
    store_id = log.header.store_id
    return not has_head(block, store_id) and unpack_role(block, store_id)[0] != COPY


def _n_lost_before(log: Segments, first: int, headless: set[int], n_missing: int) -> int:
    """How many of the slots that have no header may be of segments before the first that was found:
    they hold something, and no commit point behind it is known in them. `n_missing` are missing
    behind it.
    """
    n_before = n_behind = 0
    for slot in headless:
        data, _ = _files.read_around(log.fd, log.segment_bytes, log.slot_position(slot))
        if not data.strip(b"\0"):
            continue  # free, and zeroed
        frames = frames_in(log, slot)
        if frames is not None and frames.highest > first << log.bits:
            n_behind += 1
        else:
            n_before += 1
    return max(0, n_before - max(0, n_missing - n_behind))


def _look_until_sure(log: Segments, look: _Look) -> _Look:
    """Look again where a segment is missing: it may have begun in a slot that was read before, or
    been let go of.

    A segment that was seen before a look began is found by it, or the head record, which is
    written before a slot is overwritten and read after the slots, says that it is gone.
    """
    for _ in range(_LOOKS):
        if look.head <= look.last and look.last_missing() < 0:
            break
        before, look = look, _look_at_slots(log)
        known = look.until(before.last)
        if known.head <= known.last:
            return known
        if look.recorded == before.recorded:
            break  # nothing was let go of, and still nothing is there
    return look


def _unread_slots(log: Segments, look: _Look) -> list[int]:
    """The slots of which the disk reads no header, so that nobody knows what is in them."""
    found = []
    for slot in range(look.n_slots):
        copies = log.header_positions(slot)
        if slot not in look.headers and all(log.is_unread(at, SLOT_BYTES) for at in copies):
            found.append(slot)
    return found


def recorded_head(log: Segments) -> int:
    """The head that the file records; 0 when it records none that is whole."""
    return unpack_head(_files.read_at(log.fd, HEADER_BYTES, 0), log.header.store_id)


def _slot_headers(log: Segments, n_slots: int) -> dict[int, SlotHeader]:
    """The header of each slot that has one.  Thousands at each opening, so without detours."""
    headers = {}
    fd, segment_bytes = log.fd, log.segment_bytes
    read_at, unpack = _files.read_at, log.unpack_slot
    end = HEADER_BYTES + n_slots * segment_bytes
    for slot, position in enumerate(range(HEADER_BYTES, end, segment_bytes)):
        try:
            header = unpack(read_at(fd, SLOT_BYTES, position))
        except OSError:
            header = None
        if header is None:
            header = log.read_slot(slot)  # at the other end, too, and around what can't be read
        if header is not None:
            headers[slot] = header
    return headers


def _chosen(log: Segments, headers: dict[int, SlotHeader], head: int) -> dict[int, int]:
    """The slot of each segment from the head on, where several claim one the best of them."""
    chosen: dict[int, int] = {}
    lives: set[tuple[int, int]] = set()  # of segments, once two slots claim one
    for slot, header in headers.items():
        if header.segment < head:
            continue
        other = chosen.get(header.segment)
        if other is not None:
            lives = lives or {(one.segment, one.salt) for one in headers.values()}
            if _rank(log, header, slot, lives) <= _rank(log, headers[other], other, lives):
                continue
        chosen[header.segment] = slot
    return chosen


def _rank(
    log: Segments, header: SlotHeader, slot: int, lives: set[tuple[int, int]]
) -> tuple[bool, int, bool, int]:
    """Which of two slots with the same segment is the real one: the greater."""
    linked = (header.segment - 1, header.prev_salt) in lives
    begin = (header.segment << log.bits) + SLOT_BYTES
    data = _files.read_at(
        log.fd, log.segment_bytes - 2 * SLOT_BYTES, log.slot_position(slot) + SLOT_BYTES
    )
    begins = begins_with_part(data, header.salt, begin)
    return begins, header.epoch, linked, header.created_us


def begins_with_part(data: bytes, salt: int, offset: int) -> bool:
    """Whether these bytes, which would stand at `offset`, begin with a valid part of that life."""
    crc, length, _, _ = PART.unpack_from(data.ljust(PART_BYTES, b"\0"))
    if not 0 < length <= len(data) - PART_BYTES:
        return False
    return bool(part_checksum(data[4 : PART_BYTES + length], salt, offset) == crc)


def erase_header(log: Segments, slot: int) -> None:
    """Make a slot one that is in no use, at both its ends."""
    for at in log.header_positions(slot):
        _files.zero_fill(log.fd, at, SLOT_BYTES)


def _complete_last_slot(log: Segments, n_slots: int) -> None:
    """Give the last slot its full size again, if the file was cut."""
    size = _files.size(log.fd)
    missing = log.slot_position(n_slots) - size
    if missing <= 0:
        return
    try:
        _files.zero_fill(log.fd, size, missing)
    except DiskFullError:
        if log.state.slots[n_slots - 1] & FREE:
            log.state.slots[n_slots - 1] = 0
            log.state.words[SLOTS] = n_slots - 1


def restore_copies(log: Segments, *, slots: bool) -> list[tuple[int, str]]:
    """Write damaged copies of headers (of slots too, if wanted) anew, from the good ones."""
    healed = []
    block, _ = _files.read_around(log.fd, HEADER_BYTES, 0)
    packed = pack_header(log.header)
    bad = [
        at
        for at in (0, HEADER_BYTES // 2)
        if block[at : at + HEADER_COPY_BYTES] != packed[at : at + HEADER_COPY_BYTES]
    ]
    for at in bad:
        _files.write_at(log.fd, [packed[at : at + HEADER_COPY_BYTES]], at)
    if bad:
        healed.append((0, HEADER_HEALED if len(bad) == 1 else HEADER_REBUILT))
    # The last one always: whoever began it may have been killed between its two headers.
    for segment in log.segments() if slots else log.segments()[-1:]:
        slot = log.slot_of(segment)
        header = log.read_slot(slot)
        if header is None:
            continue
        copy = pack_slot(header, log.header.store_id)
        for at in log.header_positions(slot):
            if log.bytes_at(SLOT_BYTES, at) != copy:
                _files.write_at(log.fd, [copy], at)
                healed.append((segment << log.bits, "a copy of the slot header was damaged"))
    return healed


def find_spares(log: Slots, needs: int) -> None:
    """Say of the free slots which are zeroed, and what the others wait for."""
    # If the head record may only be in the cache, they wait for a sync, like any just freed.
    n_zeroed = 0
    for slot, entry in enumerate(log.table()):
        if not entry & FREE or entry & ZEROED:
            continue
        position = log.slot_position(slot)
        if _files.has_hole(log.fd, position, log.segment_bytes):
            log.state.slots[slot] = FREE | SAFE | PUNCHED | needs  # it may have no space
            continue
        if n_zeroed < 2:
            data, _ = _files.read_around(log.fd, log.segment_bytes, position)
            if not data.strip(b"\0"):
                log.state.slots[slot] = FREE | SAFE | ZEROED
                n_zeroed += 1
                continue
        log.state.slots[slot] = FREE | SAFE | needs
    log.count_spares()
