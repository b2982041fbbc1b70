"""Reading records by their offset, and what else can be asked of a log without changing it.

Invariants: a record is handed out only from a part whose checksum holds, and only at an offset
where a record really begins: bytes inside a body are never taken for one.  What is remembered
between calls are copies of checked bytes, which stay true for as long as their segment is kept.

It must not know what records mean.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import NoReturn, TypeAlias
from zlib import crc32

from . import _files
from ._format import (
    ENVELOPE,
    ENVELOPE_BYTES,
    FIRST,
    MAX_FRAME_BYTES,
    ONLY_ENVELOPE,
    PART,
    PART_AND_ENVELOPE,
    PART_BYTES,
    REST,
    SLOT_BYTES,
    UNUSUAL,
    WHOLE,
    Stretch,
    envelopes,
)
from ._scan import (
    BadPartError,
    Frame,
    OnDamage,
    check_part,
    collect,
    stretch_of,
    stretches,
    walk,
)
from ._segments import CHECKPOINT, HEAD, TAIL, MissingSegmentError, Segments
from .errors import CorruptError

__all__ = ["Reading"]

_SMALL_WINDOW = 4096
_LARGE_WINDOW = 64 << 10

# A window of the file: (offset of the first record that may be in it, of the last one, the bytes
# of one segment from the frame of the first one on, what a checksum there starts from less the
# record's offset).  The frame of the last one was below the tail when it was read.
_Window: TypeAlias = tuple[int, int, bytes, int]
_NO_WINDOW: _Window = (1, 0, b"", 0)
# A checked part: (its offset, its bytes, position of each envelope -> length of the record, its
# time, position of the envelope whose record goes on in the next part or 0).
_Part: TypeAlias = tuple[int, bytes, dict[int, int], int, int]
_NO_PART: _Part = (0, b"", {}, 0, 0)
_ALONE_BYTES = PART_BYTES + ENVELOPE_BYTES  # what stands before the only record of a frame
_REST_END = PART_BYTES + REST.size  # where the rest of a record begins in a part that goes on


class Reading(Segments):
    """The part of a log that only looks."""

    _window = _NO_WINDOW
    _window_bytes = _SMALL_WINDOW
    # The last part with more than one record, or larger than the window, that was checked, and the
    # one before: whoever looks at messages and their results goes to and fro between two.
    _part = _older = _NO_PART
    # Where the log was last known to end, and offset and checksum of the frame that ends there.
    _last: tuple[int, int, int] = (-1, 0, 0)

    def forget_read(self) -> None:
        """Drop what is remembered of the bytes, after they were changed under us."""
        self._window = _NO_WINDOW
        self._part = self._older = _NO_PART

    def at_rest(self) -> Reading:
        """The same log for who looks at all of it, and reads around what can't be read."""
        return Reading(self.fd, self.header, self.state, readonly=self.readonly)

    def read(self, offset: int) -> bytes:
        """The bytes of the record at `offset`, checked. Raises as `read_with_time` does."""
        return self.read_with_time(offset)[0]

    def read_with_time(self, offset: int) -> tuple[bytes, int]:
        """The bytes of the record at `offset`, checked, and the time (us) of its frame.

        Raises LookupError when no record begins there or it is no longer kept, CorruptError when
        it is damaged, StorageError when it can't be read just now.
        """
        begin, data, lengths, time_us, _ = self._part
        at = offset - begin
        length = lengths.get(at)
        if length is not None and offset >> self.bits >= self.state.words[HEAD]:
            at += ENVELOPE_BYTES
            return data[at : at + length], time_us
        first, last, window, seed = self._window
        if first <= offset <= last:
            at = offset - first
            crc, length, commit_flags, time_us, envelope = PART_AND_ENVELOPE.unpack_from(window, at)
            end = at + PART_BYTES + length
            if (
                envelope == length + ONLY_ENVELOPE
                and commit_flags & FIRST
                and end <= len(window)
                and crc32(window[at + 4 : end], seed + offset) == crc
                and offset >> self.bits >= self.state.words[HEAD]
            ):
                return window[at + _ALONE_BYTES : end], time_us
        return self._read_elsewhere(offset)

    def read_each(self, offsets: Iterable[int]) -> list[tuple[bytes, int] | None]:
        """Return what `read_with_time` does for each, None where it would raise: what was put
        together is read together.
        """
        records: list[tuple[bytes, int] | None] = []
        begin, data, lengths, time_us, _ = self._part
        if begin >> self.bits < self.state.words[HEAD]:
            begin, data, lengths, time_us, _ = _NO_PART
        for offset in offsets:
            at = offset - begin
            length = lengths.get(at)
            if length is not None:
                at += ENVELOPE_BYTES
                records.append((data[at : at + length], time_us))
                continue
            try:
                records.append(self.read_with_time(offset))
            except (LookupError, CorruptError):
                records.append(None)
            else:
                begin, data, lengths, time_us, _ = self._part
        return records

    def _read_elsewhere(self, offset: int) -> tuple[bytes, int]:
        """`read_with_time` of what is not at hand."""
        segment = offset >> self.bits
        if segment < self.state.words[HEAD]:
            self._gone(offset)
        part, older = self._part, self._older
        if older[0] < offset < older[0] + len(older[1]):
            part, older = older, part
        elif not part[0] < offset < part[0] + len(part[1]):
            found = self._read_ahead(offset)
            if found is not None:
                return found
            part, older = self._load_part(offset), part
        self._part, self._older = part, older
        return self._record(offset, part), part[3]

    def _read_ahead(self, offset: int) -> tuple[bytes, int] | None:
        """Fill the window from a record's place on; None if that isn't one alone in its frame."""
        segment = offset >> self.bits
        begin = offset - PART_BYTES
        if begin < (segment << self.bits) + SLOT_BYTES or offset + 8 >= self.state.words[TAIL]:
            return None
        try:
            shift, salt = self.place(segment)
        except MissingSegmentError as error:
            raise CorruptError(offset, error.reason) from None
        if 0 <= offset - self._window[1] + 480 < 1024:
            # Read on where the last window ended: somebody goes through the log.
            self._window_bytes = min(2 * self._window_bytes, _LARGE_WINDOW)
        else:
            self._window_bytes = _SMALL_WINDOW
        stop = min(self.limit(segment), self.state.words[TAIL])
        try:
            data = _files.read_at(self.fd, min(self._window_bytes, stop - begin), begin + shift)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return None  # it may be what follows that can't be read
        if len(data) < _ALONE_BYTES:
            return None
        crc, length, commit_flags, time_us, envelope = PART_AND_ENVELOPE.unpack_from(data)
        end = PART_BYTES + length
        if envelope != length + ONLY_ENVELOPE or not commit_flags & FIRST or end > len(data):
            return None
        if crc32(data[4:end], salt + begin) != crc:
            return None
        self._open_window(begin, len(data), data, salt)
        return data[_ALONE_BYTES:end], time_us

    def _open_window(self, begin: int, n: int, data: bytes, salt: int) -> None:
        """Make a window of the first `n` bytes of the data, which begin at an offset."""
        self._window = (begin + PART_BYTES, begin + n - ENVELOPE_BYTES, data, salt - PART_BYTES)

    def alone(self, start: int, tail: int) -> list[tuple[int, int, tuple[bytes]]] | None:
        """Of each record from `start`, where a frame begins, to the tail its offset, the time of
        its frame, and its bytes as the only part; and what `keep_at_hand` does. None unless they
        are few, each alone in its frame, and in one segment, as what others wrote since the last
        turn most often is: of these `few` would make more than there is to be told.
        """
        size = tail - start
        segment = start >> self.bits
        if not 0 < size <= _SMALL_WINDOW or (tail - 1) >> self.bits != segment:
            return None
        try:
            shift, salt = self.place(segment)
        except (LookupError, MissingSegmentError):
            return None
        data = self.bytes_at(size, start + shift)
        if len(data) != size:
            return None
        unpack = PART_AND_ENVELOPE.unpack_from
        records: list[tuple[int, int, tuple[bytes]]] = []
        at = crc = 0
        offset = start
        while at <= size - _ALONE_BYTES:
            crc, length, commit_flags, time_us, envelope = unpack(data, at)
            offset = start + at
            body = at + _ALONE_BYTES
            end = at + PART_BYTES + length
            if (
                envelope != length + ONLY_ENVELOPE
                or commit_flags & UNUSUAL != WHOLE
                or commit_flags >> 8 > offset
                or not body < end <= size
                or crc32(data[at + 4 : end], salt + offset) != crc
            ):
                return None
            records.append((offset + PART_BYTES, time_us, (data[body:end],)))
            at = end
        if at != size:
            return None
        self._last = tail, offset, crc
        self._open_window(start, size, data, salt)
        return records

    def few(self, start: int, tail: int) -> Stretch | None:
        """All frames from `start`, where one begins, to the tail, if they are few and whole in one
        segment; and what `keep_at_hand` does with them.
        """
        segment = start >> self.bits
        size = tail - start
        if size > _LARGE_WINDOW or start & (self.segment_bytes - 1) < SLOT_BYTES:
            return None
        if tail - 1 >> self.bits != segment:
            return None
        try:
            shift, salt = self.place(segment)
        except (LookupError, MissingSegmentError):
            return None  # freed meanwhile, or damaged, which the walk reports
        found = stretch_of(start, self.bytes_at(size + SLOT_BYTES, start + shift), salt)
        if not found.places or found.end != tail:
            return None
        self._last = found.last_of(tail)
        self._open_window(start, size, found.data, salt)
        return found

    def keep_at_hand(self, found: Stretch | Frame | None) -> None:
        """Remember what is wanted next of what was just read up to the log's tail: which frame is
        the last, and if they are few all of them.
        """
        tail = self.state.words[TAIL]
        if not isinstance(found, Stretch):
            if found is not None and found.end == tail:
                self.remember_last(tail, found.offset)
            return
        base, data, _, _, ends, _ = found
        if base + ends[-1] == tail:
            self._last = found.last_of(tail)
        if len(data) <= _LARGE_WINDOW:
            self._open_window(base, ends[-1], data, self.place(base >> self.bits)[1])

    def _load_part(self, offset: int) -> _Part:
        """Read and check the part in which the record at `offset` begins."""
        segment = offset >> self.bits
        first = (segment << self.bits) + SLOT_BYTES
        if offset + ENVELOPE_BYTES >= self.state.words[TAIL]:
            raise LookupError(f"offset {offset} is beyond the end of the log")
        try:
            shift, _ = self.place(segment)
            data = self.bytes_at(ENVELOPE_BYTES, offset + shift)
            if len(data) < ENVELOPE_BYTES or offset < first:
                raise LookupError(f"no record begins at offset {offset}")
            length, back = ENVELOPE.unpack(data)
            begin = offset - back
            if not length or length > MAX_FRAME_BYTES or begin < first or back < PART_BYTES:
                self._no_record(offset)
            commit_flags, time_us, part = check_part(self, begin, self.limit(segment))
            lengths = envelopes(part, bool(commit_flags & FIRST))
        except MissingSegmentError as error:
            raise CorruptError(offset, error.reason) from None
        except (BadPartError, ValueError):
            self._no_record(offset)
        if segment < self.state.words[HEAD]:
            self._gone(offset)
        if offset - begin not in lengths:
            raise LookupError(f"no record begins at offset {offset}")
        last, length = lengths.popitem()
        if last + ENVELOPE_BYTES + length > len(part):
            return begin, part, lengths, time_us, last
        lengths[last] = length
        return begin, part, lengths, time_us, 0

    def _record(self, offset: int, loaded: _Part) -> bytes:
        begin, part, lengths, time_us, cut = loaded
        at = offset - begin
        begin = at + ENVELOPE_BYTES
        if at in lengths:
            return part[begin : begin + lengths[at]]
        if at != cut:
            raise LookupError(f"no record begins at offset {offset}")
        pieces = [part[begin:]]
        missing = ENVELOPE.unpack_from(part, at)[0] - len(pieces[0])
        segment = offset >> self.bits
        try:
            while missing:
                segment += 1
                following = (segment << self.bits) + SLOT_BYTES
                commit_flags, other_us, part = check_part(self, following, self.limit(segment))
                rest = REST.unpack_from(part, PART_BYTES)[0] if len(part) > _REST_END else -1
                if commit_flags & FIRST or other_us != time_us or rest != missing:
                    raise BadPartError(following, "the record isn't continued")
                piece = part[_REST_END : _REST_END + missing]
                pieces.append(piece)
                missing -= len(piece)
        except BadPartError as bad:
            if self.is_gone(offset >> self.bits):  # freed while we looked
                self._gone(offset)
            raise CorruptError(offset, f"{bad.reason} (at {bad.offset})") from None
        except MissingSegmentError as error:
            raise CorruptError(offset, error.reason) from None
        return b"".join(pieces)

    def _gone(self, offset: int) -> NoReturn:
        raise LookupError(f"offset {offset} is no longer kept")

    def _no_record(self, offset: int) -> NoReturn:
        """Say why there is no record at `offset`: damage, or none ever began there."""
        segment = offset >> self.bits
        if self.is_gone(segment):
            self._gone(offset)
        spots: list[tuple[int, str]] = []
        last_end = segment << self.bits
        for frame in walk(
            self,
            last_end,
            self.state.words[TAIL],
            on_damage=lambda offset, reason: spots.append((offset, reason)),
        ):
            if frame[0] <= offset < frame[1]:
                raise LookupError(f"no record begins at offset {offset}")
            if frame[0] > offset:
                break
            last_end = frame[1]
        for spot, reason in spots:
            if last_end <= spot <= offset:
                raise CorruptError(offset, reason)
        raise LookupError(f"no record begins at offset {offset}")

    def bad_place(self, offset: int) -> int | None:
        """The offset at which what can't be read begins that something at `offset` stood in; None
        where all can be read, or is no longer kept.
        """
        span = self.bad_span(offset)
        return None if span is None else span[0]

    def bad_span(self, offset: int) -> tuple[int, int] | None:
        """`bad_place`, and where what can be read, or another such place, begins again."""
        if offset < self.head_offset:
            return None
        bad: list[int] = []
        end = self.state.words[TAIL]
        try:
            for frame in self.frames(
                self.boundary_before(offset),
                self.state.words[TAIL],
                on_damage=lambda place, _: bad.append(place),
            ):
                if frame[1] > offset:
                    if frame[0] <= offset:
                        return None
                    end = frame[0]
                    break
                bad.clear()
        except LookupError:  # freed while we looked
            return None
        before = [place for place in bad if place <= offset]
        if not before:
            return None
        return max(before), min([end, *(place for place in bad if place > offset)])

    def salt(self, offset: int) -> int:
        """The salt of the segment that `offset` is in; where that has lost its headers, what the
        one behind it says, and 0 if that is lost too: nothing can be read there anyhow.
        """
        segment = offset >> self.bits
        try:
            return self.place(segment)[1]
        except MissingSegmentError:
            try:
                self.place(segment + 1)
                following = self.read_slot(self.slot_of(segment + 1))
            except (MissingSegmentError, LookupError):
                following = None
            return 0 if following is None else following.prev_salt

    def frames(self, start: int, end: int, *, on_damage: OnDamage | None = None) -> Iterator[Frame]:
        """Yield the frames, each checked and whole.

        From `start`, a frame's offset or the beginning of a segment, up to `end`.  Damage is told
        to `on_damage(offset, reason)` and passed over; without it, CorruptError.  LookupError
        when `start` is no longer kept.
        """
        return walk(self, start, end, on_damage=on_damage)

    def stretches(self, start: int, end: int, *, on_damage: OnDamage) -> Iterator[Stretch | Frame]:
        """Yield what `frames` does, many at once where they stand whole in one segment: to go
        through millions of records without making anything of each.
        """
        return stretches(self, start, end, on_damage=on_damage)

    def boundary_before(self, offset: int) -> int:
        """The beginning of a kept segment from which on every frame is met that holds or follows
        `offset`: `frames` can start there.
        """
        segment = max(offset >> self.bits, self.state.words[HEAD])
        while segment > self.state.words[HEAD]:
            try:
                shift, _ = self.place(segment)
            except MissingSegmentError:
                break  # what stood there is gone, whatever it belonged to
            first = (segment << self.bits) + SLOT_BYTES
            head = self.bytes_at(PART_BYTES, first + shift)
            if len(head) < PART_BYTES or PART.unpack(head)[2] & FIRST:
                break
            segment -= 1  # its frame began in the segment before
        return segment << self.bits

    @property
    def head_offset(self) -> int:
        """Where what is kept begins; `frames` can start there."""
        return self.state.words[HEAD] << self.bits

    def checkpoint(self) -> int:
        """The offset of the latest Checkpoint frame's first record; 0 when there is none."""
        offset = self.state.words[CHECKPOINT]
        return offset if offset >= self.head_offset else 0

    @property
    def last_frame(self) -> tuple[int, int]:
        """(offset, checksum) of the frame that ends at the tail; (0, 0) in an empty log."""
        tail = self.state.words[TAIL]
        if self._last[0] != tail:
            self._last = (tail, *self._find_last(tail))
        return self._last[1:]

    def _find_last(self, tail: int) -> tuple[int, int]:
        frame = self.find_last(tail)
        return (0, 0) if frame is None else (frame.offset, self.checksum(frame.offset))

    def find_last(self, tail: int) -> Frame | None:
        """The last frame that begins before `tail`, by a search; None in an empty log."""
        segment = max(0, tail - 1) >> self.bits
        while True:
            begin = segment << self.bits
            end = min(tail, begin + self.segment_bytes)
            found = None
            for frame in walk(self, begin, end, check=False, on_damage=lambda *_: None):
                found = frame
            if found is not None or segment <= self.state.words[HEAD]:
                return found
            segment = self.before(segment)

    def checksum(self, offset: int) -> int:
        shift, _ = self.place(offset >> self.bits)
        return int.from_bytes(self.bytes_at(4, offset + shift), "little")

    def last_time_us(self) -> int:
        """The time of the last frame; 0 in an empty log."""
        offset, _ = self.last_frame
        if not offset:
            return 0
        shift, _ = self.place(offset >> self.bits)
        return int(PART.unpack(self.bytes_at(PART_BYTES, offset + shift))[3])

    def remember_last(self, tail: int, offset: int, checksum: int | None = None) -> None:
        """Take note that the frame at `offset`, with this checksum, ends at `tail`: whoever knows
        spares others the search through its segment.
        """
        if self._last[0] != tail:
            if checksum is None:
                checksum = self.checksum(offset)
            self._last = (tail, offset, checksum)

    def ends_with(self, end: int, offset: int, checksum: int) -> bool:
        """Whether a valid frame with this checksum begins at `offset` and ends at `end`.

        With a checksum of 0: whether the log begins at `end`, with nothing before it.
        """
        if not checksum:
            return end <= SLOT_BYTES and self.state.words[HEAD] == 0
        if not self.head_offset <= offset < end <= self.state.words[TAIL]:
            return False
        try:
            if self.checksum(offset) != checksum:
                return False
            frame = collect(self, offset, self.limit(offset >> self.bits))
        except (BadPartError, LookupError, CorruptError):
            return False
        return frame[1] == end
