"""Which slot of the file each segment of the log lives in: the slot table, free slots, spares.

Role: the map from log offsets to file positions, shared by the processes that have the file
open through a `LogState`, and the life of a slot: free, zeroed, in use, free again.

Invariants:

* All changes are made under the write lock of the caller; look-ups may be made at any time.
* A segment keeps its slot and its salt for as long as it lives, and no number is used twice, so
  what was looked up once holds for every segment from HEAD on.  Nothing else is believed without
  looking at the shared words again.
* A slot that was freed is overwritten, even with zeros, in three steps, each on stable storage
  before the next: the records that freed it; the file's head record, which says that its segment
  isn't missing but gone; the zeros.  Its entry holds the offset that the commit point must have
  reached.  Without the second step a power cut could bring back a segment that is half zeroed,
  and that would be reported as damage.
* A slot is given to a segment only when it holds nothing but zeros.
* What the device fails to read is no damage as long as it may be readable at another time. Only who
  looks at the log at rest reads around it and calls it damage; in a store at work the call fails,
  but for places that the opening could not read either. Nothing that could not be read is written
  over, except by who has been told to repair it or has its bytes from a copy.

It must not know what frames look like.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys

from . import _files
from ._format import (
    END_RECORD_AT,
    HEAD_RECORD_AT,
    HEADER_BYTES,
    SLOT_BYTES,
    FileHeader,
    SlotHeader,
    pack_end,
    pack_head,
    pack_slot,
    unpack_slot,
)
from .errors import CorruptError, DiskFullError, StorageError

__all__ = [
    "ANNOUNCED",
    "CHECKPOINT",
    "COMMIT",
    "HEAD",
    "LAST",
    "LAST_FRAME",
    "READ_AGAIN",
    "RESERVE",
    "RESERVE_EACH",
    "SLOTS",
    "SPARES",
    "TAIL",
    "WORDS",
    "WRITING",
    "LogState",
    "MissingSegmentError",
    "Segments",
]

# Words of a LogState.  WRITING: 1 while frames are being written, 2 when they have to be undone.
# SPARES: free slots that are zeroed, which is what a full disk is worked off with; 0 also while
# there is a RESERVE, so that each put looks.  ANNOUNCED: the HEAD that the file itself records.
# LAST_FRAME: where the last frame begins.  RESERVE: bytes of free slots that must be left for
# work to be finished with, 0 while the disk has room enough; RESERVE_EACH: how many more with each
# record that is put.  READ_AGAIN: 1 once something could not be read, or what was made of the log
# may not be believed: whoever opens the file next looks at all of it.
TAIL, COMMIT, HEAD, LAST, WRITING, SLOTS, CHECKPOINT, SPARES, ANNOUNCED, LAST_FRAME = range(10)
RESERVE, RESERVE_EACH, READ_AGAIN = 10, 11, 12
WORDS = 16  # what a LogState must have room for; the others are kept for later

# An entry of the slot table: segment number + 1 of a slot in use; else free, or one of which nobody
# could read what is in it.
UNKNOWN = 0
FREE = 1 << 63
ZEROED = 1 << 62
PUNCHED = 1 << 61
SAFE = 1 << 60  # the file's head record is past the segment that was here
_FREE_BYTE = re.compile(b"[\x80-\xff]")  # the highest byte of a free one
_HIGH_BYTE = 7 if sys.byteorder == "little" else 0
_NEEDS = (1 << 60) - 1  # the commit point at which the next step may be taken


class MissingSegmentError(CorruptError):
    """A segment that should be there has no slot; internal."""


class LogState:
    """What the processes with one file open share of its log; here in private memory.

    `words` and `slots` are memoryviews of unsigned 64-bit integers.  Both may be replaced when
    the table grows: always go through the attribute.
    """

    words: memoryview
    slots: memoryview

    def __init__(self) -> None:
        self.words = memoryview(bytearray(8 * WORDS)).cast("Q")
        self.slots = memoryview(bytearray(8 * 64)).cast("Q")

    def grow_slots(self, n: int) -> None:
        """Make room for at least `n` slots."""
        if n > len(self.slots):
            grown = bytearray(8 * max(n, 2 * len(self.slots)))
            grown[: 8 * len(self.slots)] = self.slots.cast("B")
            self.slots = memoryview(grown).cast("Q")

    def refresh_slots(self) -> None:
        """Follow the growth that another process made."""

    def unread(self) -> list[tuple[int, int]]:
        """(begin, end) in the file of what the opening could not read, as others have noted it."""
        return []

    def has_let_go(self, log: Segments, segment: int) -> bool:
        """Whether a segment was let go of by now; HEAD says so then."""
        return segment < self.words[HEAD]


class Segments:
    """The slots of one open file.  See the module."""

    is_at_rest = True  # until a store begins its work with it

    def __init__(
        self, fd: int, header: FileHeader, state: LogState, *, readonly: bool = False
    ) -> None:
        self.fd = fd
        self.header = header
        self.state = state
        self.readonly = readonly
        self.segment_bytes = header.segment_bytes
        self.bits = header.segment_bytes.bit_length() - 1
        self._slot_of: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._prev_ends: dict[int, int] = {}
        # What was seen when the segments were found: the end that the file records, and two slots
        # with one and the same header, so that one of them was written over.
        self.known_end = 0
        self.is_overwritten = False
        self.taken: set[int] = set()  # slots given to segments that are not written yet
        # (begin, end) in the file of what could not be read by who looked at it at rest.
        self.unread: list[tuple[int, int]] = []

    # Reading -----------------------------------------------------------------------------

    def bytes_at(self, n: int, position: int) -> bytes:
        """Read `n` bytes at a position of the file; fewer only where it ends.

        At rest what can't be read comes as bytes that are neither valid nor zero, and is in
        `unread` then. In a store at work StorageError, unless the opening could not read it either.
        """
        try:
            return _files.read_at(self.fd, n, position)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return self._read_around(n, position, error)

    def _read_around(self, n: int, position: int, error: OSError) -> bytes:
        self.state.words[READ_AGAIN] = 1
        data, unread = _files.read_around(self.fd, n, position)
        if not self.is_at_rest:
            self.unread += [place for place in self.state.unread() if place not in self.unread]
            for place in unread:
                if not self.is_known_unread(place):
                    raise self.cannot_read(place[0], place[1] - place[0]) from error
        self.unread += [place for place in unread if place not in self.unread]
        return data

    def is_known_unread(self, place: tuple[int, int]) -> bool:
        """Whether all of a place is in one that could not be read at rest."""
        return any(begin <= place[0] and place[1] <= end for begin, end in self.unread)

    def is_unread(self, position: int, n: int) -> bool:
        """Whether some of these bytes of the file could not be read at rest."""
        return any(begin < position + n and position < end for begin, end in self.unread)

    def cannot_read(self, position: int, n: int) -> StorageError:
        """What to raise where the device does not read what must be known."""
        return StorageError(
            f"{_files.name_of(self.fd)}: {n} bytes at {position} could not be read "
            "(Input/output error); nothing was changed, and nothing is lost that the disk still "
            "has; look at the disk, close the file in every process and open it again: what can't "
            "be read then is set aside as damage, and the rest flows"
        )

    # Looking up --------------------------------------------------------------------------

    def place(self, segment: int) -> tuple[int, int]:
        """(file position minus log offset, salt) of a segment.

        Raises LookupError below HEAD, MissingSegmentError when it has no readable slot.
        """
        if segment < self.state.words[HEAD]:
            raise LookupError(f"segment {segment} is no longer kept")
        try:
            return self._places[segment]
        except KeyError:
            return self._look_up(segment)

    def is_gone(self, segment: int) -> bool:
        """Whether a segment was let go of, for who found something bad in it: what stands there
        then is anybody's, and no damage.
        """
        return self.state.has_let_go(self, segment)

    def _look_up(self, segment: int) -> tuple[int, int]:
        slot = self._find_slot(segment)
        header = None if slot is None else self.read_slot(slot)
        lacks = slot is None or header is None or header.segment != segment
        if self.is_gone(segment) if lacks else segment < self.state.words[HEAD]:
            raise LookupError(f"segment {segment} is no longer kept")  # freed while we looked
        if slot is None or header is None or lacks:
            self._slot_of.pop(segment, None)
            raise MissingSegmentError(segment << self.bits, f"segment {segment} has no slot header")
        place = (self.slot_position(slot) - (segment << self.bits), header.salt)
        self._places[segment] = place
        self._prev_ends[segment] = header.prev_end
        return place

    def _find_slot(self, segment: int) -> int | None:
        """The slot of a segment, by what is remembered or else by the table."""
        slot = self._slot_of.get(segment)
        # Not from the attribute again: another thread may have it all forgotten by then.
        return self._read_table().get(segment) if slot is None else slot

    def _read_table(self) -> dict[int, int]:
        """Take over the slot table: which segments there are, and forget those freed."""
        head = self.state.words[HEAD]
        in_use = ((entry - 1, slot) for slot, entry in enumerate(self.table()))
        slots = {n: slot for n, slot in in_use if head <= n < FREE - 1}
        self._slot_of = slots
        for cache in (self._places, self._prev_ends):
            for segment in list(cache):  # in one step: other threads may look up meanwhile
                if segment < head:
                    cache.pop(segment, None)
        return slots

    def forget(self) -> None:
        """Drop everything remembered, after segments were moved or cut under us."""
        self._slot_of = {}
        self._places = {}
        self._prev_ends = {}

    def table(self) -> list[int]:
        """The slot table as it is now."""
        state = self.state
        n = state.words[SLOTS]
        if n > len(state.slots):
            state.refresh_slots()
        return state.slots[:n].tolist()

    def slot_position(self, slot: int) -> int:
        """Where a slot begins in the file."""
        return HEADER_BYTES + (slot << self.bits)

    def slot_of(self, segment: int) -> int:
        """The slot of a segment. Raises KeyError when it has none (any more)."""
        slot = self._find_slot(segment)
        if slot is None:
            raise KeyError(segment)
        return slot

    def limit(self, segment: int) -> int:
        """The offset at which no part of the segment can go on."""
        return ((segment + 1) << self.bits) - SLOT_BYTES

    def next_present(self, segment: int) -> int | None:
        """The first segment after this one that has a slot; None after the last."""
        last = self.state.words[LAST]
        if segment >= last:
            return None
        if segment + 1 in self._slot_of:
            return segment + 1
        return min((n for n in self._read_table() if n > segment), default=None)

    def frames_end(self, segment: int) -> int | None:
        """Where the frames of a segment end; None when that isn't known, for want of the next."""
        if segment >= self.state.words[LAST]:
            return None
        if segment + 1 not in self._prev_ends:
            try:
                self.place(segment + 1)
            except MissingSegmentError:
                return None
        return self._prev_ends.get(segment + 1)

    def read_slot(self, slot: int) -> SlotHeader | None:
        """The header of a slot, from whichever end of it has one; None: none there."""
        position = self.slot_position(slot)
        data = self.bytes_at(SLOT_BYTES, position)
        header = unpack_slot(data, self.header.store_id, self.segment_bytes)
        if header is None:
            data = self.bytes_at(SLOT_BYTES, position + self.segment_bytes - SLOT_BYTES)
            header = unpack_slot(data, self.header.store_id, self.segment_bytes)
        return header

    def segments(self) -> list[int]:
        """The segments kept, oldest first."""
        return sorted(self._read_table())

    def bytes_used(self) -> int:
        """Bytes of the file that the segments kept and the header take."""
        return HEADER_BYTES + len(self.segments()) * self.segment_bytes

    # Free slots --------------------------------------------------------------------------

    def take_slot(self, *, spare: bool) -> int:
        """Take a zeroed slot for a new segment, leaving the reserve behind unless `spare`.

        It is in `taken` from then on, until it is in the table.  Raises DiskFullError.
        """
        zeroed = self._zeroed()
        if len(zeroed) < (1 if spare else 2):
            # The last one is what a full disk is worked off with.
            self.make_zeroed()
            zeroed = self._zeroed()
        if not spare:
            self.hold(1 + self.reserve())
        self.taken.add(zeroed[0])
        return zeroed[0]

    def prepare_spare(self, n_puts: int = 0) -> None:
        """See to it that there is one zeroed free slot, and the reserve, also for what is put now.

        Raises DiskFullError.
        """
        if not self._zeroed():
            self.make_zeroed()
        words = self.state.words
        if words[RESERVE]:
            wanted = words[RESERVE] + n_puts * words[RESERVE_EACH]
            self.hold(self._slots_for(wanted))
            words[RESERVE] = wanted
        else:
            self.count_spares()

    def count_spares(self) -> int:
        """Count the zeroed free slots, and note for all what of them is there for any use."""
        n = len(self._zeroed())
        self.state.words[SPARES] = 0 if self.state.words[RESERVE] else n
        return n

    def reserve(self) -> int:
        """How many free slots are to be left for work to be finished with."""
        return self._slots_for(self.state.words[RESERVE])

    def _slots_for(self, n_bytes: int) -> int:
        return max(1, -(-n_bytes // (self.segment_bytes - 2 * SLOT_BYTES)))

    def holding(self) -> int:
        """Count the free slots that have their space."""
        return sum(1 for _, entry in self._free_slots() if not entry & PUNCHED)

    def hold(self, n: int) -> None:
        """See to it that `n` free slots have their space, unwritten.  Raises DiskFullError."""
        lacking = n - self.holding()
        if lacking <= 0:
            return
        state = self.state
        for slot, entry in self._free_slots():
            if lacking and entry & PUNCHED and self._is_reusable(entry):
                _files.allocate(self.fd, self.slot_position(slot), self.segment_bytes)
                state.slots[slot] = FREE | SAFE
                lacking -= 1
        for _ in range(lacking):
            slot = state.words[SLOTS]
            _files.allocate(self.fd, self.slot_position(slot), self.segment_bytes)
            self._add_slot(slot, FREE | SAFE)

    def release(self) -> bool:
        """Give the space of one free slot back to the file system; False when there is none but
        the last.
        """
        n = sum(
            1 for _, entry in self._free_slots() if not entry & PUNCHED and self._is_reusable(entry)
        )
        return n > 1 and self.trim(n - 1) > 0

    def _free_slots(self) -> list[tuple[int, int]]:
        """(slot, entry) of each that is free and not taken: few, however many there are."""
        state = self.state
        n = state.words[SLOTS]
        if n > len(state.slots):
            state.refresh_slots()
        slots = state.slots
        high_bytes = bytes(slots[:n].cast("B"))[_HIGH_BYTE::8]
        found = (match.start() for match in _FREE_BYTE.finditer(high_bytes))
        return [(slot, slots[slot]) for slot in found if slot not in self.taken]

    def _zeroed(self) -> list[int]:
        return [slot for slot, entry in self._free_slots() if entry & ZEROED]

    def make_zeroed(self) -> None:
        """Make one zeroed slot more, of a free one or at the end.  Raises DiskFullError."""
        self._announce()
        slot = self._reusable()
        if slot is None:
            self._extend()
            return
        _files.zero_fill(self.fd, self.slot_position(slot), self.segment_bytes)
        self.state.slots[slot] = FREE | ZEROED | SAFE
        self.count_spares()

    def _extend(self) -> None:
        slot = self.state.words[SLOTS]
        _files.zero_fill(self.fd, self.slot_position(slot), self.segment_bytes)
        self._add_slot(slot, FREE | ZEROED | SAFE)
        self.count_spares()

    def _add_slot(self, slot: int, entry: int) -> None:
        state = self.state
        state.grow_slots(slot + 1)
        state.slots[slot] = entry
        state.words[SLOTS] = slot + 1

    def _is_reusable(self, entry: int) -> bool:
        return bool(entry & SAFE and entry & _NEEDS <= self.state.words[COMMIT])

    def _reusable(self) -> int | None:
        """A free slot that may be overwritten by now; one that has its space, if possible."""
        punched = None
        for slot, entry in self._free_slots():
            if entry & ZEROED or not self._is_reusable(entry):
                continue
            if not entry & PUNCHED:
                return slot
            if punched is None:
                punched = slot
        return punched

    def free(self, segment: int, needs: int | None = None) -> None:
        """Let go of every segment up to this one.

        Their slots are used again once the log up to `needs` (all of it, if not given) is on
        stable storage.
        """
        words = self.state.words
        head = words[HEAD]
        if not head <= segment < words[LAST]:
            raise ValueError(f"segment {segment} can't be freed: kept are {head} to {words[LAST]}")
        self._announce()
        following = self.next_present(segment)
        assert following is not None
        leaving = range(head, segment + 1)
        if len(self._slot_of) < len(leaving) or any(n not in self._slot_of for n in leaving):
            self._read_table()
        leaving_slots = [slot for n, slot in self._slot_of.items() if head <= n < following]
        # Dying in here leaves WRITING set, and `heal` frees what is before HEAD.
        words[WRITING] = 1
        words[HEAD] = following  # first, so that no reader trusts a slot that is being reused
        for slot in leaving_slots:
            self.state.slots[slot] = FREE | (words[TAIL] if needs is None else needs)
        words[WRITING] = 0
        self._read_table()

    def free_below_head(self) -> None:
        """Free what a process that died in `free` had let go of."""
        words = self.state.words
        for slot, entry in enumerate(self.table()):
            if 0 < entry <= words[HEAD]:
                self.state.slots[slot] = FREE | words[TAIL]

    def _announce(self) -> None:
        """Record HEAD in the file, once the records that moved it there are on stable storage."""
        words = self.state.words
        head = words[HEAD]
        if words[ANNOUNCED] >= head or self.readonly:
            return
        waiting = [(slot, entry) for slot, entry in self._free_slots() if not entry & SAFE]
        if any(entry & _NEEDS > words[COMMIT] for _, entry in waiting):
            return
        _files.write_at(self.fd, [pack_head(head, self.header.store_id)], HEAD_RECORD_AT)
        words[ANNOUNCED] = head
        for slot, _ in waiting:
            # Past the tail: it takes a sync that began after this write to get there.
            self.state.slots[slot] = FREE | SAFE | (words[TAIL] + 1)

    def waiting(self) -> bool:
        """Whether a free slot waits for a sync before it may be overwritten."""
        return any(not self._is_reusable(entry) for _, entry in self._free_slots())

    def record_end(self, end: int) -> None:
        """Record in the file how far the log is on stable storage, for whoever finds less of it."""
        _files.write_at(self.fd, [pack_end(end, self.header.store_id)], END_RECORD_AT)

    def announce(self) -> int:
        """Take the step that needs no sync; return what `settled` takes after one."""
        self._announce()
        return self.state.words[TAIL] + 1

    def settled(self, announced: int) -> None:
        """A sync that began after `announce` returned this number has succeeded."""
        for slot, entry in self._free_slots():
            if entry & SAFE and entry & _NEEDS <= announced:
                self.state.slots[slot] = entry & ~_NEEDS

    def trim(self, keep: int = 1) -> int:
        """Give what free slots take back to the file system; return the bytes given back.

        The free slots at the end of the file are cut off, the others get holes; `keep` of the
        free ones (the zeroed first) keep their space.  What still waits for a sync is left as it
        is: no lock is held over one, so that is the caller's to do before.
        """
        self._announce()
        free = [(slot, entry) for slot, entry in self._free_slots() if self._is_reusable(entry)]
        holding = [(not entry & ZEROED, slot) for slot, entry in free if not entry & PUNCHED]
        unwanted = {slot for _, slot in sorted(holding)[keep:]}
        punched = {slot for slot, entry in free if entry & PUNCHED}
        given = self._cut_off(unwanted, punched)
        for slot in unwanted:
            # Marked first: a hole must never be taken for zeros that have their space.
            self.state.slots[slot] = FREE | SAFE | PUNCHED
            if _files.punch(self.fd, self.slot_position(slot), self.segment_bytes):
                given += self.segment_bytes
            else:
                self.state.slots[slot] = FREE | SAFE
        self.count_spares()
        return given

    def _cut_off(self, unwanted: set[int], punched: set[int]) -> int:
        """Shorten the file by the slots at its end that are in one of the sets."""
        words = self.state.words
        given = 0
        end = before = words[SLOTS]
        while end - 1 in unwanted or end - 1 in punched:
            end -= 1
            if end in unwanted:
                unwanted.discard(end)
                given += self.segment_bytes
        if end < before:
            words[SLOTS] = end
            for slot in range(end, before):
                self.state.slots[slot] = 0
            _files.truncate(self.fd, self.slot_position(end))
        return given

    def put_in_slot(self, header: SlotHeader, slot: int, data: bytes | None) -> None:
        """Make a slot that of a segment which can't be found any more: write `data` (all that
        follows the header; None: it is there) and then the headers. It is in no other slot.
        """
        # Not taken for zeroed by anybody, should we die in here.
        self.state.slots[slot] = FREE | SAFE
        self.taken.discard(slot)
        position = self.slot_position(slot)
        if data is not None:
            _files.write_at(self.fd, [data], position + SLOT_BYTES)
        packed = pack_slot(header, self.header.store_id)
        _files.write_at(self.fd, [packed], position + self.segment_bytes - SLOT_BYTES)
        _files.write_at(self.fd, [packed], position)
        self.state.slots[slot] = header.segment + 1
        self.forget()
        self.count_spares()

    def give_back(self, slot: int) -> None:
        """Zero a slot that was begun for nothing, and free it."""
        self.state.slots[slot] = FREE | SAFE
        with contextlib.suppress(DiskFullError):
            _files.zero_fill(self.fd, self.slot_position(slot), self.segment_bytes)
            self.state.slots[slot] = FREE | ZEROED | SAFE

    # Sizes and ages ----------------------------------------------------------------------

    def file_bytes(self) -> int:
        """Size of the file."""
        return _files.size(self.fd)

    def free_bytes(self) -> int:
        """Bytes of the file that wait to be used again or given back."""
        free = sum(1 for entry in self.table() if entry & FREE and not entry & PUNCHED)
        return free * self.segment_bytes

    def bytes_with(self, n: int, room: int) -> int:
        """Bytes the file takes with `n` more in the log, of which `room` fit where the log is."""
        each = self.segment_bytes - 2 * SLOT_BYTES - 64
        more = 0 if n <= room else -(-(n - room) // each)
        # One spare belongs to the file at all times.
        return self.bytes_used() + (more + 1) * self.segment_bytes

    def end_time_us(self, segment: int) -> int:
        """When the log went on from this segment to the next one; 0 when that can't be read."""
        slot = self._find_slot(segment + 1)
        header = None if slot is None else self.read_slot(slot)
        return 0 if header is None else header.created_us
