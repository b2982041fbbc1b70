"""Walking the log: frame after frame, over segments, past damage.

Role: the one reader of frames.  Applying them to the index, recovery, healing and verifying all
go through `stretches`, so that they can't disagree about what is valid; `walk` makes single frames
of what it finds.

Invariants: a frame is handed out whole and checked, or it is reported; nothing is skipped
silently.  Every search for the next good frame has a budget, so that no bytes whatever can make
a walk take longer than a few times reading them.

It must not know what records mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from struct import Struct
from typing import NamedTuple, TypeAlias
from zlib import crc32

from ._format import (
    ENVELOPE_BYTES,
    ENVELOPE_WITH_HEAD,
    FIRST,
    KNOWN_FLAGS,
    LAST_PART,
    MAX_FRAME_BYTES,
    ONLY_ENVELOPE,
    PART,
    PART_BYTES,
    PART_WITH_ENVELOPE,
    REST,
    SLOT_BYTES,
    UNUSUAL,
    WHOLE,
    Stretch,
    envelopes,
    part_checksum,
)
from ._segments import HEAD, LAST, MissingSegmentError, Segments
from .errors import CorruptError

__all__ = [
    "BadPartError",
    "Budget",
    "Frame",
    "OnDamage",
    "check_part",
    "collect",
    "stretch_of",
    "stretches",
    "walk",
]

OnDamage: TypeAlias = Callable[[int, str], object]
OnCommit: TypeAlias = Callable[[int], object]

_WINDOW = 256 << 10  # so that it stays in the processor's cache while it is gone through
_PIECE = 64 << 20  # what a search has in memory at once
_BEHIND = SLOT_BYTES  # of a slot, so many bytes stand behind the last frame
_MASK = 0xFFFFFFFF
# A part, its first envelope as one number, and the first bytes of the record.
_ALONE = Struct("<IIQ8xQQ")
_SMALLEST = PART_BYTES + ENVELOPE_BYTES + 1  # a frame of one record of one byte
_ZERO_HEADER = bytes(PART_BYTES)
_UNREADABLE = "the disk can't read it"


class Frame(NamedTuple):
    """One frame, whole and checked."""

    offset: int
    end: int  # in a later segment, if it goes over several
    time_us: int
    flags: int
    commit: int  # the commit point when it was written
    records: list[tuple[int, bytes]]  # (offset, bytes) of each


class Budget:
    """How much a walk may spend on searching, in bytes of checksums; shared by its searches."""

    def __init__(self, n: int = 256 << 20) -> None:
        self.left = n

    def spend(self, n: int) -> bool:
        """Take `n` (and something for the trouble) out of it; False once it is used up."""
        self.left -= n + 512
        return self.left > 0


class BadPartError(Exception):
    """The bytes at `offset` are not a valid part; `end`: where it would end, as far as known."""

    def __init__(self, offset: int, reason: str, end: int = 0) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason
        self.end = end


def check_part(
    log: Segments, offset: int, stop: int, *, check: bool = True
) -> tuple[int, int, bytes]:
    """Read the part at `offset`, which must end by `stop`: (commit and flags, time, its bytes)."""
    shift, salt = log.place(offset >> log.bits)
    head = log.bytes_at(PART_BYTES, offset + shift)
    if len(head) < PART_BYTES:
        raise BadPartError(offset, "the file ends here")
    crc, length, commit_flags, time_us = PART.unpack(head)
    end = offset + PART_BYTES + length
    if not length:
        raise BadPartError(offset, "no frame here" if head == _ZERO_HEADER else "length 0")
    if end > stop:
        is_unread = log.unread and log.is_unread(offset + shift, PART_BYTES)
        reason = _UNREADABLE if is_unread else f"a length of {length} that doesn't fit"
        raise BadPartError(offset, reason)
    part = head + log.bytes_at(length, offset + shift + PART_BYTES)
    if len(part) < PART_BYTES + length:
        raise BadPartError(offset, "the file ends within the frame")
    if check and part_checksum(part[4:], salt, offset) != crc:
        is_unread = log.unread and log.is_unread(offset + shift, PART_BYTES + length)
        raise BadPartError(offset, _UNREADABLE if is_unread else "the checksum is wrong", end)
    if commit_flags & 0xFF & ~KNOWN_FLAGS or commit_flags >> 8 > offset:
        raise BadPartError(offset, "flags or commit point make no sense", end)
    return commit_flags, time_us, part


def collect(log: Segments, offset: int, stop: int, *, check: bool = True) -> Frame:
    """Read the frame that begins at `offset` through all its parts, up to segments that follow.

    `offset` may be that of a later part, if the parts before it are gone with their segments.
    """
    commit_flags, time_us, part = check_part(log, offset, stop, check=check)
    parts = [(offset, part)]
    total = len(part)
    flags = commit_flags & 0xFF
    at, current = offset, commit_flags
    while not current & LAST_PART:
        segment = (at >> log.bits) + 1
        if segment > log.state.words[LAST]:
            raise BadPartError(at, "the frame's last parts are missing", at + len(parts[-1][1]))
        ends = log.frames_end(segment - 1)
        if ends is not None and ends != at + len(parts[-1][1]):
            raise BadPartError(at, "the frame isn't continued", at + len(parts[-1][1]))
        at = (segment << log.bits) + SLOT_BYTES
        try:
            current, other_time, part = check_part(log, at, log.limit(segment), check=check)
        except MissingSegmentError:
            raise BadPartError(at, "a segment is missing within the frame") from None
        total += len(part)
        if current & FIRST or other_time != time_us or (current ^ commit_flags) & ~WHOLE:
            raise BadPartError(at, "the frame isn't continued")
        if total > MAX_FRAME_BYTES:
            raise BadPartError(at, "the frame is too large")
        parts.append((at, part))
    try:
        records = _records(parts, bool(flags & FIRST))
    except ValueError as error:
        raise BadPartError(offset, str(error), at + len(part)) from None
    return Frame(offset, at + len(part), time_us, flags | LAST_PART, commit_flags >> 8, records)


def _records(parts: list[tuple[int, bytes]], first: bool) -> list[tuple[int, bytes]]:
    """The records that begin in these parts of one frame, in `first` or in a later one of it."""
    records: list[tuple[int, bytes]] = []
    cut: list[bytes] = []  # of the record that goes on in the next part
    cut_at = -1  # its offset; negative: it began before these parts
    missing = 0
    for i, (offset, part) in enumerate(parts):
        is_first = first and i == 0
        if not is_first:
            begin = PART_BYTES + REST.size
            rest = REST.unpack_from(part, PART_BYTES)[0] if len(part) >= begin else -1
            if i == 0:
                missing = rest
            if rest != missing:
                raise ValueError("a record isn't continued")
            if missing:
                piece = part[begin : begin + missing]
                cut.append(piece)
                missing -= len(piece)
                if not missing and cut_at >= 0:
                    records.append((cut_at, b"".join(cut)))
        for at, length in envelopes(part, is_first).items():
            piece = part[at + ENVELOPE_BYTES : at + ENVELOPE_BYTES + length]
            if len(piece) == length:
                records.append((offset + at, piece))
            else:
                cut, missing, cut_at = [piece], length - len(piece), offset + at
    if missing:
        raise ValueError("a record is cut")
    return records


def walk(
    log: Segments,
    start: int,
    end: int,
    *,
    check: bool = True,
    on_damage: OnDamage | None = None,
    open_end: bool = False,
) -> Iterator[Frame]:
    """Yield the frames that `stretches` finds, one by one."""
    for found in stretches(log, start, end, check=check, on_damage=on_damage, open_end=open_end):
        if isinstance(found, Stretch):
            yield from _frames(found)
        else:
            yield found


def _frames(stretch: Stretch) -> Iterator[Frame]:
    """The frames of a stretch."""
    base, data, _, places, ends, _ = stretch
    new = tuple.__new__  # twice as fast as calling the class
    records: list[tuple[int, bytes]] = []
    begin = frame_end = time_us = commit_flags = 0
    for place, end in zip(places, ends, strict=True):
        _, _, other_flags, other_us, _, back = PART_WITH_ENVELOPE.unpack_from(
            data, place - PART_BYTES
        )
        if back == PART_BYTES:  # the first record of a frame
            if records:
                yield new(
                    Frame,
                    (begin, frame_end, time_us, commit_flags & 255, commit_flags >> 8, records),
                )
            records = []
            begin, time_us, commit_flags = base + place - PART_BYTES, other_us, other_flags
        records.append((base + place, data[place + ENVELOPE_BYTES : end]))
        frame_end = base + end
    yield new(Frame, (begin, frame_end, time_us, commit_flags & 255, commit_flags >> 8, records))


def stretches(
    log: Segments,
    start: int,
    end: int,
    *,
    check: bool = True,
    on_damage: OnDamage | None = None,
    open_end: bool = False,
    on_commit: OnCommit | None = None,
) -> Iterator[Stretch | Frame]:
    """Yield all frames from `start` (a boundary, or the beginning of a segment) up to `end`: many
    at once where they stand whole in one segment, one alone that goes over several.

    Damage is told to `on_damage(offset, reason)` and passed over; without it CorruptError is
    raised.  LookupError when the place was freed.  With `open_end` zeros in the last segment are
    the end of the log, and nothing is known of what comes behind. `on_commit` is told the commit
    points of good parts of frames that are passed over: they are as true as those of whole frames.
    """
    bits = log.bits
    words = log.state.words
    first_kept = words[HEAD]
    budget = Budget()
    # Later parts are passed over if their frame was reported as damaged, or began before `start`.
    broken = start >> bits > first_kept and start & (log.segment_bytes - 1) <= SLOT_BYTES
    offset = start
    while offset < end:
        segment = offset >> bits
        begin = segment << bits
        try:
            shift, salt = log.place(segment)
        except MissingSegmentError as error:
            _report(log, on_damage, offset, error.reason)
            following = log.next_present(segment)
            if following is None:
                return
            offset, broken = following << bits, True
            continue
        if offset - begin < SLOT_BYTES:
            offset = begin + SLOT_BYTES
        known_end = log.frames_end(segment)
        stop = min(end, log.limit(segment) if known_end is None else known_end)
        next_segment = (segment + 1) << bits
        room = _WINDOW
        while offset < stop and offset >> bits == segment:
            # What stands behind is read too, so that a record can be unpacked before its size is
            # looked at.
            wanted = min(stop - offset, room)
            data = log.bytes_at(wanted + _BEHIND, offset + shift)
            base, at, room = offset, 0, _WINDOW
            while at < wanted:
                stretch = stretch_of(base, data, salt, at, check)
                if stretch.places:
                    broken = False
                    yield stretch
                    at = stretch.ends[-1]
                    offset = base + at
                    if at >= wanted:
                        break
                room = _cut_by(data, at, wanted, stop - base)
                if room:
                    break
                try:
                    frame = collect(log, offset, stop, check=check)
                    if not frame[3] & FIRST and not (
                        segment == first_kept and offset == begin + SLOT_BYTES
                    ):
                        raise BadPartError(offset, "a frame without its beginning", frame[1])
                except BadPartError as bad:
                    if on_commit is not None:
                        on_commit(_commit_at(log, offset, stop))
                    offset = _pass_over(
                        log, bad, offset, stop, shift, salt, on_damage, open_end, budget, broken
                    )
                    broken = True
                    if offset < 0:
                        return
                    break
                broken = False
                yield frame
                offset = frame[1]
                at = offset - base
        if offset >> bits == segment:
            offset = next_segment


def _cut_by(data: bytes, at: int, size: int, limit: int) -> int:
    """How large a window must be that holds the part at `at`, if it is only for the end of this
    one that it isn't whole; else 0.
    """
    if size >= limit or len(data) < size:
        return 0
    if at + PART_BYTES > size:
        return _WINDOW
    end = at + PART_BYTES + int(PART.unpack_from(data, at)[1])
    return max(_WINDOW, end - at) if size < end <= limit else 0


def stretch_of(base: int, data: bytes, salt: int, at: int = 0, check: bool = True) -> Stretch:
    """As many frames as are whole and valid in `data` from `at` on, but for `_BEHIND` bytes at its
    end.  Everything out of the ordinary is left to `collect`, and what a Checkpoint begins.
    """
    unpack = _ALONE.unpack_from
    unpack_next = ENVELOPE_WITH_HEAD.unpack_from
    heads: list[int] = []
    places: list[int] = []
    ends: list[int] = []
    add_head, add_place, add_end = heads.append, places.append, ends.append
    seed = salt + base & _MASK
    size = len(data) - _BEHIND
    last = size - _SMALLEST
    highest = 0
    while at <= last:
        crc, length, commit_flags, envelope, head = unpack(data, at)
        place = at + PART_BYTES
        end = place + length
        if end > size or commit_flags & UNUSUAL != WHOLE:
            break
        if commit_flags > highest and commit_flags >> 8 > base + at:
            break
        # (crc32 takes the value it begins with modulo 2**32, as the format does.)
        if check and crc32(data[at + 4 : end], seed + at) != crc:
            break
        if envelope == length + ONLY_ENVELOPE and length >= 16:
            add_head(head)
            add_place(place)
            add_end(end)
        else:
            known = len(places)
            while place < end - ENVELOPE_BYTES:
                n, back, head = unpack_next(data, place)
                record_end = place + ENVELOPE_BYTES + n
                if back != place - at or not n or record_end > end:
                    break
                add_head(head if n >= 8 else -1)
                add_place(place)
                add_end(record_end)
                place = record_end
            if place != end:
                del heads[known:], places[known:], ends[known:]
                break
        if commit_flags > highest:
            highest = commit_flags
        at = end
    return Stretch(base, data, heads, places, ends, highest >> 8)


def _report(log: Segments, on_damage: OnDamage | None, offset: int, reason: str) -> None:
    if log.is_gone(offset >> log.bits):
        raise LookupError(f"offset {offset} is no longer kept")
    if on_damage is None:
        raise CorruptError(offset, reason)
    on_damage(offset, reason)


def _pass_over(
    log: Segments,
    bad: BadPartError,
    offset: int,
    stop: int,
    shift: int,
    salt: int,
    on_damage: OnDamage | None,
    open_end: bool,
    budget: Budget,
    broken: bool,
) -> int:
    """Report bad bytes and return where to go on; -1 at the end of an open-ended log."""
    segment = offset >> log.bits
    if bad.offset >> log.bits != segment:
        # The frame begins well here and breaks in a later segment: go on where it broke.
        _report(log, on_damage, offset, f"{bad.reason} (at {bad.offset})")
        return bad.offset >> log.bits << log.bits
    next_segment = (segment + 1) << log.bits
    is_last = segment == log.state.words[LAST]
    may_end = log.frames_end(segment) is None and (open_end or not is_last)
    if may_end and all(not data.strip(b"\0") for _, data in _pieces(log, offset, stop, shift)):
        return -1 if is_last else next_segment
    orphan_end = _orphan_end(log, offset, stop) if broken else 0
    if orphan_end:
        return orphan_end
    found = _search(log, bad, offset, stop, shift, salt, budget)
    _report(log, on_damage, offset, bad.reason)
    return next_segment if found is None else found


def _pieces(log: Segments, offset: int, stop: int, shift: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of what stands there, in pieces that overlap by more than a part's header."""
    while offset < stop:
        data = log.bytes_at(min(stop - offset, _PIECE), offset + shift)
        yield offset, data
        if len(data) < _PIECE:
            return
        offset += _PIECE - 2 * PART_BYTES


def _orphan_end(log: Segments, offset: int, stop: int) -> int:
    """Where a part ends that is good but not the first of its frame; 0 if this is none."""
    try:
        commit_flags, _, part = check_part(log, offset, stop)
    except BadPartError:
        return 0
    return 0 if commit_flags & FIRST else offset + len(part)


def _commit_at(log: Segments, offset: int, stop: int) -> int:
    """The commit point that a part known to be of no whole frame tells; 0 if none stands there."""
    try:
        return check_part(log, offset, stop)[0] >> 8
    except BadPartError:
        return 0


def _search(
    log: Segments, bad: BadPartError, offset: int, stop: int, shift: int, salt: int, budget: Budget
) -> int | None:
    """Find the next part after `offset` and before `stop` that is valid and begins a frame."""

    def is_good(at: int, begin: int, data: bytes) -> bool:
        """Whether one stands at an offset; of what stands from `begin` on there is some at hand."""
        head = data[at - begin : at - begin + PART_BYTES]
        if len(head) < PART_BYTES:
            head = log.bytes_at(PART_BYTES, at + shift)
            if len(head) < PART_BYTES:
                return False
        crc, length, commit_flags, _ = PART.unpack(head)
        end = at + PART_BYTES + length
        flags = commit_flags & 0xFF
        if not length or end > stop or flags & ~KNOWN_FLAGS or not flags & FIRST:
            return False
        if commit_flags >> 8 > at or not budget.spend(length):
            return False
        part = data[at - begin + 4 : end - begin]
        if len(part) < end - at - 4:
            part = log.bytes_at(end - at - 4, at + shift + 4)
        return bool(part_checksum(part, salt, at) == crc)

    # If only the body or the checksum is hit, the length still says where the next one begins.
    if bad.end and (bad.end == stop or is_good(bad.end, bad.end, b"")):
        return bad.end
    # Else look for anything that could be a header, by the few bytes of it that hardly vary:
    # the high bytes of length and commit point, the flags, and of the time the years it can be.
    high_length = (log.segment_bytes - 1) >> 24
    high_commit = stop >> 48
    pattern = re.compile(
        b"(?s)(?=[\\0-" + _in_class(high_length) + b"][\\1-\\77].{6}[\\0-" + _in_class(high_commit)
        + b"].{6}[\\0-\\37]\\0)"
    )  # fmt: skip
    for begin, data in _pieces(log, offset, stop, shift):
        for match in pattern.finditer(data, 8):
            at = begin + match.start() - 7
            if is_good(at, begin, data):
                return at
            if budget.left <= 0:
                return None
    return None


def _in_class(byte: int) -> bytes:
    return re.escape(bytes([byte])) if byte else b"\\0"
