"""What is to be written: frames laid out behind the log's tail, and their writing.

    append(records) ─► pending ── write() ─► in the file, TAIL moved
                          └─ discard()

Role: where the next frame goes, what is pending, and the moment in which it becomes part of the
log. Most often that is one frame of one small record, which is kept and written by itself.

Invariants: nothing shared is touched before `write`; TAIL is moved after the bytes are in the file;
WRITING stands while somebody is between the two. All of it under the write lock of the caller.

It must not know what is in a record, nor when what was written is synced.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypeAlias
from zlib import crc32

from . import _files
from ._format import (
    CHECKPOINT_FRAME,
    ENVELOPE_BYTES,
    MAX_FRAME_BYTES,
    MAX_OFFSET,
    PART_BYTES,
    PART_TAIL,
    POLICY_SHIFT,
    SLOT_BYTES,
    WHOLE,
    FileHeader,
    SlotHeader,
    pack_slot,
)
from ._layout import JOIN_BYTES, NO_BYTES, SMALL_BYTES, Layout, Record, bytes_of
from ._reading import Reading
from ._segments import (
    ANNOUNCED,
    CHECKPOINT,
    COMMIT,
    HEAD,
    LAST,
    LAST_FRAME,
    SPARES,
    TAIL,
    WRITING,
    LogState,
)
from ._slots import Slots
from .errors import DiskFullError, StorageError

__all__ = ["Appending", "new_salt"]

_ALONE_BYTES = PART_BYTES + ENVELOPE_BYTES  # what stands before the only record of a frame
_SMALLEST_CUT = PART_BYTES + ENVELOPE_BYTES + 1
_DOING, _UNDOING = 1, 2  # values of WRITING

# Where the next frame goes, saved: the file position of its run and its offset, the segment's end
# and salt, and the checkpoint and the last frame that are pending.
_Place: TypeAlias = tuple[int, int, int, int, int, tuple[int, int, int]]


class Appending(Slots, Reading):
    """One process's hands on the end of the log. See the module."""

    heal: Callable[[], None]

    def __init__(
        self, fd: int, header: FileHeader, state: LogState, *, readonly: bool = False
    ) -> None:
        super().__init__(fd, header, state, readonly=readonly)
        # What is pending: nearly always one frame of one small record, else finished runs of bytes
        # with their file positions, the run under way, which that frame is the last of, and the
        # segments begun for them: (number, slot, slot header).
        self._frame = b""
        self._runs: list[tuple[int, list[_files.Bytes]]] = []
        self._buffers: list[_files.Bytes] = []
        self._run_at = 0
        self._begun: list[tuple[int, int, SlotHeader]] = []
        self._checkpoint = 0
        # Where the next frame goes; right only while TAIL is `_tail`. And the one frame of a small
        # record that ends there, if this process wrote it.
        self._tail = -1
        self._wrote = b""
        self._end = 0
        self._limit = 0
        self._salt = 0
        # As `_last`, of what is pending in runs.
        self._pending_last = (0, 0, 0)

    @property
    def pending_tail(self) -> int:
        """Where the tail will be once what is pending is written."""
        if self._tail != self.state.words[TAIL]:
            self._resume()
        return self._end

    def salt(self, offset: int) -> int:
        """The salt of the segment that `offset` is in, which may only be pending."""
        segment = offset >> self.bits
        known = self._places.get(segment)
        if known is not None and segment >= self.state.words[HEAD]:
            return known[1]
        for number, _, header in self._begun:
            if number == segment:
                return header.salt
        return super().salt(offset)

    @property
    def room(self) -> int:
        """Bytes that the segment of the pending tail still has room for."""
        end = self.pending_tail
        return max(0, self._limit - end)

    def append(
        self,
        records: Sequence[Record],
        policy: int,
        time_us: int,
        flags: int = 0,
        spare: bool = False,
    ) -> list[int]:
        """Lay out one frame of these records, to be written by `write`; return their offsets.

        `policy` is what the frame is promised, `flags` of CHECKPOINT_FRAME and VOUCH.  `spare`
        allows the last free slot to be used, which is kept so that work can be finished on a
        full disk.  Raises DiskFullError; then nothing of this frame is pending.
        """
        if len(records) == 1 and not flags:
            record = records[0]
            if record and len(record[-1]) <= SMALL_BYTES and (body := b"".join(record)):
                return [self.append_one(body, policy, time_us, spare)]
        self._get_ready(len(records), spare)
        return self._append_any(records, policy, time_us, flags, spare)

    def append_one(self, record: bytes, policy: int, time_us: int, spare: bool = True) -> int:
        """`append` one record in one piece, as nearly all frames are; return its offset."""
        words = self.state.words
        offset = words[TAIL]
        if offset != self._end or not (spare or words[SPARES]):
            self._get_ready(1, spare)
            offset = self._end
        n = len(record)
        end = offset + _ALONE_BYTES + n
        if end > self._limit:
            return self._append_any([(record,)], policy, time_us, 0, spare)[0]
        commit_flags = words[COMMIT] << 8 | policy << POLICY_SHIFT | WHOLE
        part = PART_TAIL.pack(n + ENVELOPE_BYTES, commit_flags, time_us, n, PART_BYTES) + record
        # (crc32 takes the value it begins with modulo 2**32, as the format does.)
        self._frame = crc32(part, self._salt + offset).to_bytes(4, "little") + part
        self._end = end
        return offset + PART_BYTES

    def _get_ready(self, n_records: int, spare: bool) -> None:
        """See to what any frame needs: the place where the tail is now, behind what is pending, and
        a free slot behind it.
        """
        words = self.state.words
        if words[TAIL] != self._tail:
            self._resume()
        elif self._frame:
            self._queue_frame()
        if not (spare or words[SPARES]):
            self.prepare_spare(n_records)

    def _queue_frame(self) -> None:
        """The one frame is pending among others."""
        frame, self._frame = self._frame, b""
        self._buffers.append(frame)
        self._pending_last = self._end, self._end - len(frame), int.from_bytes(frame[:4], "little")

    def _resume(self) -> None:
        """Take up where the tail is now: others may have moved it."""
        assert not self._frame, "the tail moved under a pending frame"
        assert not self._buffers, "the tail moved under pending frames"
        tail = self.state.words[TAIL]
        segment = tail >> self.bits
        if segment == self._tail >> self.bits:
            # As most often: further on in the same segment, of which the rest is known.
            self._run_at += tail - self._tail
        else:
            shift, self._salt = self.place(segment)
            self._limit = self.limit(segment)
            self._run_at = tail + shift
        self._end = self._tail = tail
        self._wrote = b""

    def _append_any(
        self, records: Sequence[Record], policy: int, time_us: int, flags: int, spare: bool
    ) -> list[int]:
        """Append what isn't one small record: several, flagged ones, or more than fits here."""
        payload = bytes_of(records) + ENVELOPE_BYTES * len(records)
        if not payload:
            raise ValueError(NO_BYTES)
        if payload > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {payload} bytes; the limit is {MAX_FRAME_BYTES}")
        buffers = self._buffers
        pending = len(self._runs), len(buffers), len(self._begun)
        place = (
            self._run_at,
            self._end,
            self._limit,
            self._salt,
            self._checkpoint,
            self._pending_last,
        )
        try:
            room = self._limit - self._end
            if payload + PART_BYTES > room:
                whole_room = self.segment_bytes - 2 * SLOT_BYTES
                worth_it = room > self.segment_bytes >> 4 or payload + PART_BYTES > whole_room
                if not worth_it or room < _SMALLEST_CUT:
                    self._begin_segment(time_us, spare)
            layout = Layout(self, policy, time_us, flags, spare)
            offsets = layout.place(records, payload)
            self._pending_last = (self._end, *layout.first)
        except BaseException:
            self._go_back(place, buffers, *pending)
            raise
        if flags & CHECKPOINT_FRAME:
            self._checkpoint = offsets[0]
        return offsets

    def _go_back(
        self, place: _Place, buffers: list[_files.Bytes], n_runs: int, n_buffers: int, n_begun: int
    ) -> None:
        """Take back an append that failed: the next goes to where this one was to go, and what is
        pending is what was before.
        """
        del self._runs[n_runs:]
        del buffers[n_buffers:]
        del self._begun[n_begun:]
        self.taken = {slot for _, slot, _ in self._begun}
        self._buffers = buffers
        (
            self._run_at,
            self._end,
            self._limit,
            self._salt,
            self._checkpoint,
            self._pending_last,
        ) = place

    def roll(self, time_us: int) -> None:
        """Go on in the next segment, be the last free slot the one for it; to be written by
        `write`. Raises DiskFullError.
        """
        self._get_ready(0, spare=True)
        if not self._buffers:
            self._pending_last = self._tail, *self.last_frame
        self._begin_segment(time_us, spare=True)

    def _begin_segment(self, time_us: int, spare: bool) -> None:
        """Seal the segment that the pending end is in, and go on in the next one."""
        slot = self.take_slot(spare=spare)
        words = self.state.words
        number = (self._end - 1 >> self.bits) + 1
        if (number + 2) << self.bits > MAX_OFFSET:
            raise ValueError(f"the log is at its largest offset, {MAX_OFFSET}")
        header = SlotHeader(
            segment=number,
            salt=new_salt(),
            prev_salt=self._salt,
            prev_end=self._end,
            head=words[ANNOUNCED],
            epoch=self.header.epoch,
            checkpoint=self._checkpoint or words[CHECKPOINT],
            created_us=time_us,
        )
        packed = pack_slot(header, self.header.store_id)
        position = self.slot_position(slot)
        if self._buffers:
            self._runs.append((self._run_at, self._buffers))
        self._runs.append((position + self.segment_bytes - SLOT_BYTES, [packed]))
        self._begun.append((number, slot, header))
        self._buffers = [packed]
        self._run_at = position
        self._salt = header.salt
        end = self._end = (number << self.bits) + SLOT_BYTES
        self._pending_last = (end, *self._pending_last[1:])
        self._limit = self.limit(number)

    def write(self) -> int:
        """Write what is pending into the file and move the tail; return the new tail.

        Raises DiskFullError or OSError; then nothing of it is in the log.
        """
        frame = self._frame
        if self._buffers or not frame:
            return self._write_runs()
        words = self.state.words
        words[WRITING] = _DOING
        try:
            written = _files.write_at(self.fd, (frame,), self._run_at)
        except BaseException as error:
            self._undo(error)
            raise
        self._wrote = frame
        self._frame = b""
        self._run_at += written
        words[LAST_FRAME] = self._tail
        words[TAIL] = self._tail = tail = self._end
        words[WRITING] = 0
        return tail

    def _write_runs(self) -> int:
        """`write` what isn't one small frame."""
        words = self.state.words
        if self._frame:
            self._queue_frame()
        buffers = self._buffers
        if not buffers:
            return self._tail if self._tail >= 0 else words[TAIL]
        words[WRITING] = _DOING
        try:
            if self._begun:
                for position, run in self._runs:
                    _files.write_at(self.fd, run, position)
            if len(buffers) > 1 and self._end - self._tail <= JOIN_BYTES:
                buffers = [b"".join(buffers)]
            written = _files.write_at(self.fd, buffers, self._run_at)
            if self._begun:
                self._publish_begun()
        except BaseException as error:
            self._undo(error)
            raise
        if self._checkpoint:
            words[CHECKPOINT] = self._checkpoint
            self._checkpoint = 0
        self._buffers = []
        self._wrote = b""
        self._run_at += written
        tail, last_frame, _ = self._last = self._pending_last
        words[TAIL] = self._tail = tail
        words[LAST_FRAME] = last_frame
        words[WRITING] = 0
        return tail

    def _publish_begun(self) -> None:
        state = self.state
        for number, slot, header in self._begun:
            state.slots[slot] = number + 1
            self._slot_of[number] = slot
            place = (self.slot_position(slot) - (number << self.bits), header.salt)
            self._places[number] = place
            self._prev_ends[number] = header.prev_end
        state.words[LAST] = self._begun[-1][0]
        self._begun = []
        self._runs = []
        self.taken.clear()
        self.count_spares()

    def _undo(self, error: BaseException) -> None:
        """Take back a write that failed. One that was interrupted is taken back or finished, so
        that whoever was knows by the tail what became of it.
        """
        if isinstance(error, OSError | DiskFullError):
            self.state.words[WRITING] = _UNDOING
        try:
            self.heal()
        except (OSError, StorageError):
            # Left to whoever has the lock next, who finds WRITING set.
            self.discard()

    def discard(self) -> None:
        """Drop what is pending and wasn't written."""
        self._frame = self._wrote = b""
        self._runs = []
        self._buffers = []
        self._begun = []
        self.taken.clear()
        self._checkpoint = 0
        self._tail = self._end = -1

    def _find_last(self, tail: int) -> tuple[int, int]:
        """Of its own there is no need to search."""
        frame = self._wrote
        if frame and tail == self._tail:
            return tail - len(frame), int.from_bytes(frame[:4], "little")
        return super()._find_last(tail)


def new_salt() -> int:
    """A salt that nobody knows; never 0, which no segment has."""
    return secrets.randbits(32) or 1
