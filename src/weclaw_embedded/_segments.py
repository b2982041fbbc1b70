"""Which slot of the file each segment of the log lives in: the slot table, looked up and read.

Role: the map from log offsets to file positions, shared by the processes that have the file
open through a `LogState`.  What changes it is in `_slots`.

Invariants:

* Look-ups may be made at any time, under any lock or none; nothing in here changes the file.
* A segment keeps its slot and its salt for as long as it lives, and no number is used twice, so
  what was looked up once holds for every segment from HEAD on.  Nothing else is believed without
  looking at the shared words again.
* What the device fails to read is no damage as long as it may be readable at another time. Only who
  looks at the log at rest reads around it and calls it damage; in a store at work the call fails,
  but for places that the opening could not read either. Nothing that could not be read is written
  over, except by who has been told to repair it or has its bytes from a copy.

It must not know what frames look like.
"""

from __future__ import annotations

import errno

from . import _files
from ._format import HEADER_BYTES, SLOT_BYTES, FileHeader, SlotHeader, slot_unpacker
from .errors import CorruptError, StorageError

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

# Words of a LogState:
#   TAIL          the offset where the log ends: the next frame goes there
#   COMMIT        the commit point, an offset
#   HEAD, LAST    the first segment that is kept, and the last
#   WRITING       1 while frames are being written, 2 when they have to be undone
#   SLOTS         how many slots the file has
#   CHECKPOINT    where the last checkpoint's frame begins; 0: none is kept
#   SPARES        free slots that are zeroed, which is what a full disk is worked off with; 0 also
#                 while there is a RESERVE, so that each put looks
#   ANNOUNCED     the HEAD that the file itself records
#   LAST_FRAME    where the last frame begins
#   RESERVE       bytes of free slots that must be left for work to be finished with; 0 while the
#                 disk has room enough
#   RESERVE_EACH  how many more with each record that is put
#   READ_AGAIN    1 once something could not be read, or what was made of the log may not be
#                 believed: whoever opens the file next looks at all of it
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
# Below these, of a free one: the commit point at which the next step may be taken.


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
    """Where the segments of one open file are.  See the module."""

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
        self.unpack_slot = slot_unpacker(header.store_id, header.segment_bytes)
        self._slot_of: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._prev_ends: dict[int, int] = {}
        # What was seen when the segments were found: the end that the file records, and two slots
        # with one and the same header, so that one of them was written over.
        self.known_end = 0
        self.is_overwritten = False
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

    def header_positions(self, slot: int) -> tuple[int, int]:
        """Where a slot has its header in the file, and its copy."""
        position = self.slot_position(slot)
        return position, position + self.segment_bytes - SLOT_BYTES

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

    def before(self, segment: int) -> int:
        """The last segment before this one that has a slot; HEAD where there is none. A hostile
        header may leave a gap that nobody could count through.
        """
        if segment - 1 in self._slot_of:
            return segment - 1
        return max((n for n in self._read_table() if n < segment), default=self.state.words[HEAD])

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
        begin, end = self.header_positions(slot)
        header = self.unpack_slot(self.bytes_at(SLOT_BYTES, begin))
        return header or self.unpack_slot(self.bytes_at(SLOT_BYTES, end))

    def segments(self) -> list[int]:
        """The segments kept, oldest first."""
        return sorted(self._read_table())

    def bytes_used(self) -> int:
        """Bytes of the file that the segments kept and the header take."""
        return HEADER_BYTES + len(self.segments()) * self.segment_bytes

    # Sizes and ages ----------------------------------------------------------------------

    def file_bytes(self) -> int:
        """Size of the file."""
        return _files.size(self.fd)

    def is_cut(self) -> bool:
        """Whether the file lacks slots that it should have: somebody else has made it shorter. Sure
        only under the write lock, since space is given back meanwhile.
        """
        # The last one may be there in part, where a full disk let nobody complete it.
        return _files.size(self.fd) < self.slot_position(max(0, self.state.words[SLOTS] - 1))

    def bytes_with(self, n: int, room: int) -> int:
        """Bytes the file takes with `n` more in the log, of which `room` fit where the log is."""
        each = self.segment_bytes - 2 * SLOT_BYTES - 64
        more = 0 if n <= room else -(-(n - room) // each)
        # One spare belongs to the file at all times.
        return self.bytes_used() + (more + 1) * self.segment_bytes

    def end_time_us(self, segment: int) -> int:
        """When the log went on from this segment to the next one, or, where that can't be read, to
        the first one after it that says so: what is kept for a time is then kept for longer.
        """
        following = self.next_present(segment)
        while following is not None:
            slot = self._find_slot(following)
            header = None if slot is None else self.read_slot(slot)
            if header is not None:
                return header.created_us
            following = self.next_present(following)
        return 0
