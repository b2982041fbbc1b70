"""The life of a slot of the file: free, zeroed, in use by a segment, free again.

Role: what changes the slot table of `_segments`, and the file's size with it: the spare that a full
disk is worked off with, the reserve, giving space back.

Invariants:

* All of it is done under the write lock of the caller.
* A slot that was freed is overwritten, even with zeros, in three steps, each on stable storage
  before the next: the records that freed it; the file's head record, which says that its segment
  isn't missing but gone; the zeros.  Its entry holds the offset that the commit point must have
  reached.  Without the second step a power cut could bring back a segment that is half zeroed,
  and that would be reported as damage.
* A slot is given to a segment only when it holds nothing but zeros.

It must not know what frames look like, nor why a segment is freed.
"""

from __future__ import annotations

import contextlib
import re
import sys

from . import _files
from ._format import (
    END_RECORD_AT,
    HEAD_RECORD_AT,
    SLOT_BYTES,
    FileHeader,
    SlotHeader,
    pack_end,
    pack_head,
    pack_slot,
)
from ._segments import (
    ANNOUNCED,
    COMMIT,
    FREE,
    HEAD,
    LAST,
    PUNCHED,
    RESERVE,
    RESERVE_EACH,
    SAFE,
    SLOTS,
    SPARES,
    TAIL,
    WRITING,
    ZEROED,
    LogState,
    Segments,
)
from .errors import DiskFullError

__all__ = ["Slots"]

_FREE_BYTE = re.compile(b"[\x80-\xff]")  # the highest byte of a free one
_HIGH_BYTE = 7 if sys.byteorder == "little" else 0
_NEEDS = (1 << 60) - 1  # the commit point at which the next step may be taken


class Slots(Segments):
    """The slots of one open file.  See the module."""

    def __init__(
        self, fd: int, header: FileHeader, state: LogState, *, readonly: bool = False
    ) -> None:
        super().__init__(fd, header, state, readonly=readonly)
        self.taken: set[int] = set()  # slots given to segments that are not written yet

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
        begin, end = self.header_positions(slot)
        if data is not None:
            _files.write_at(self.fd, [data], begin + SLOT_BYTES)
        packed = pack_slot(header, self.header.store_id)
        _files.write_at(self.fd, [packed], end)
        _files.write_at(self.fd, [packed], begin)
        self.state.slots[slot] = header.segment + 1
        self.forget()
        self.count_spares()

    def give_back(self, slot: int) -> None:
        """Zero a slot that was begun for nothing, and free it."""
        self.state.slots[slot] = FREE | SAFE
        with contextlib.suppress(DiskFullError):
            _files.zero_fill(self.fd, self.slot_position(slot), self.segment_bytes)
            self.state.slots[slot] = FREE | ZEROED | SAFE

    def free_bytes(self) -> int:
        """Bytes of the file that wait to be used again or given back."""
        free = sum(1 for entry in self.table() if entry & FREE and not entry & PUNCHED)
        return free * self.segment_bytes
