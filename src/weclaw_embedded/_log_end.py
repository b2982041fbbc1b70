"""Where the log ends and what of it is damaged, found by looking: nothing in the file is changed.

Role: `find_end` walks to the end of a log for recovery, `look_at_copy` to that of a replica's copy,
`last_checkpoint` finds where to begin before the end is known; `verify` and `is_whole` look at all
that is kept, or at the last of it.  Whoever recovers or only looks may call them.

Invariants:

* The log is a prefix: everything before its end was written before everything after it.
* A bad frame that a later one vouches for (its commit point is past it) was on stable storage
  once: that is damage, reported and passed over.  A bad frame that none vouches for is where the
  writing ended: to be cut there, quietly.
* What can't be read may be readable another time: nothing is cut where it would go, too, and what
  is torn there is reported with it.
* Time is bounded by reading the file a few times, whatever its bytes.

It must not know what records mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from . import _files
from ._finding import find_segments
from ._format import (
    CHECKPOINT_FRAME,
    FIRST,
    HEADER_BYTES,
    PART,
    PART_BYTES,
    SLOT_BYTES,
    VOUCH,
    Stretch,
    unpack_header,
)
from ._scan import BadPartError, Frame, collect, stretches
from ._segments import CHECKPOINT, COMMIT, HEAD, LAST, TAIL, Segments
from .errors import CorruptError, WeclawError

# What goes along with recovery while it looks at all that is kept.
Follow: TypeAlias = Callable[[Iterator[Stretch | Frame]], None]

_WALK_TAIL_SEGMENT = 4 << 20  # segments up to this size are walked whole to find the tail


@dataclass
class Recovery:
    """What recovery found.  `damaged`: (offset, reason) of what was passed over."""

    tail: int = 0
    torn_bytes: int = 0
    damaged: list[tuple[int, str]] = field(default_factory=list)
    cut: int | None = None  # where what was torn was cut off
    is_end_damaged: bool = False
    is_short: bool = False  # it ends before the commit point
    is_vouched: bool = False  # it ends with a frame that vouches: nothing is missing
    healed: list[tuple[int, str]] = field(default_factory=list)  # from a second copy
    whole: bool = True  # all that is kept was looked at, not only the end

    @property
    def ends_vouched(self) -> bool:
        """Whether it goes on right after a frame that vouches, so that another says no more."""
        return self.is_vouched and self.cut is None and not self.is_end_damaged


def find_end(
    log: Segments, commit: int, near: int, *, whole: bool, follow: Follow | None = None
) -> Recovery:
    """Walk to the end of the log; set aside damage; say where to cut."""
    words = log.state.words
    first, last = words[HEAD], words[LAST]
    start = first << log.bits
    if not whole and _is_frame(log, near):
        recovery, _ = _walk_to_end(log, near, commit)
        recovery.whole = False
        return recovery
    if not whole and log.segment_bytes <= _WALK_TAIL_SEGMENT:
        # Only the segment of the commit point: a frame must end exactly there, or the commit
        # point isn't one of this log.
        segment = commit >> log.bits
        if first < segment <= last:
            start = segment << log.bits
            if commit - start <= SLOT_BYTES:
                start -= log.segment_bytes
    whole = start == first << log.bits
    recovery, is_boundary = _walk_to_end(log, start, commit, follow if whole else None)
    if not whole and not is_boundary:
        recovery, _ = _walk_to_end(log, first << log.bits, commit)
        whole = True
    recovery.whole = whole
    return recovery


def _is_frame(log: Segments, offset: int) -> bool:
    """Whether a whole frame begins there."""
    segment = offset >> log.bits
    if not log.state.words[HEAD] <= segment <= log.state.words[LAST] or not offset:
        return False
    try:
        collect(log, offset, log.limit(segment))
    except (BadPartError, LookupError, CorruptError):
        return False
    return True


class _Walk:
    """The way to the end of a log, and what is seen there."""

    def __init__(self, log: Segments, start: int, commit: int) -> None:
        words = log.state.words
        self._log = log
        self._start = start
        self._commit = commit
        self.bad: list[tuple[int, str]] = []
        # Of each run of good frames: how many bad spots are before it, where it ends, the latest
        # checkpoint by then.
        self.runs: list[tuple[int, int, int]] = []
        self.end = start if start & (log.segment_bytes - 1) else start + SLOT_BYTES
        self.vouched = max(commit, log.known_end)
        self.last_flags = 0
        # An empty last segment is an end of the log, too.
        self.is_boundary = commit == (words[LAST] << log.bits) + SLOT_BYTES
        self._found = self._look(words[CHECKPOINT])

    def good(self) -> Iterator[Stretch | Frame]:
        """What is found up to the first bad spot."""
        return takewhile(lambda _: not self.bad, self._found)

    def finish(self) -> None:
        """Look at what is left."""
        for _ in self._found:
            pass

    def _look(self, checkpoint: int) -> Iterator[Stretch | Frame]:
        log, commit, bad = self._log, self._commit, self.bad
        n_bad = 0
        for found in stretches(
            log,
            self._start,
            log.limit(log.state.words[LAST]),
            on_damage=lambda offset, reason: bad.append((offset, reason)),
            open_end=True,
            on_commit=self._vouch,
        ):
            if len(bad) != n_bad:
                self.runs.append((n_bad, self.end, checkpoint))
                n_bad = len(bad)
            end = self.end = found.end
            self.last_flags = found.flags
            if isinstance(found, Stretch):
                self.is_boundary |= found.base <= commit <= end and found.is_boundary(commit)
            else:
                self.is_boundary |= commit in (found.offset, end)
                if found.flags & CHECKPOINT_FRAME and found.records:
                    checkpoint = found.records[0][0]
            self.vouched = max(self.vouched, found.commit)
            yield found
        self.runs.append((n_bad, self.end, checkpoint))

    def _vouch(self, commit: int) -> None:
        self.vouched = max(self.vouched, commit)


def _walk_to_end(
    log: Segments, start: int, commit: int, follow: Follow | None = None
) -> tuple[Recovery, bool]:
    walk = _Walk(log, start, commit)
    if follow is not None:
        follow(walk.good())
    walk.finish()
    words = log.state.words
    bad, end, runs = walk.bad, walk.end, walk.runs
    last_begin = (words[LAST] << log.bits) + SLOT_BYTES
    recovery = Recovery()
    cut: int | None = None
    last = runs[-1]
    for i, (offset, _) in enumerate(bad):
        if offset >= walk.vouched:
            last = max(run for run in runs if run[0] <= i)
            # Where a whole segment is missing, the log ends with the frames before it.
            cut = offset if offset & (log.segment_bytes - 1) else last[1]
            if _is_unread_from(log, cut):
                # What the disk may read another time, or what says that it was there, is not torn.
                cut, last = None, runs[-1]
            break
    recovery.damaged = [spot for spot in bad if cut is None or spot[0] < cut]
    words[CHECKPOINT] = last[2]
    recovery.tail = end
    if cut is not None:
        recovery.cut = recovery.tail = cut
        recovery.torn_bytes = _bytes_beyond(log, cut)
    else:
        recovery.is_vouched = bool(walk.last_flags & VOUCH) and not (bad and bad[-1][0] >= end)
        known_end = max(commit, log.known_end)
        if max(end, last_begin) < known_end and not (bad and bad[-1][0] >= end):
            # The end of the log isn't there any more, although it was on stable storage.
            recovery.damaged.append((end, f"nothing is left up to the commit point {known_end}"))
        recovery.is_end_damaged = any(offset >= end for offset, _ in recovery.damaged)
        if log.is_overwritten and not (commit or recovery.is_vouched or recovery.is_end_damaged):
            recovery.damaged.append((end, "a slot was written over with a copy of another one's"))
            recovery.is_end_damaged = True
    recovery.is_short = max(recovery.tail, last_begin) < commit or recovery.is_end_damaged
    return recovery, walk.is_boundary


def _is_unread_from(log: Segments, cut: int) -> bool:
    """Whether something at or beyond a place of the log could not be read."""
    for segment in log.segments():
        shift, _ = log.place(segment)
        begin, end = max(cut, segment << log.bits), (segment + 1) << log.bits
        if begin < end and log.unread and log.is_unread(begin + shift, end - begin):
            return True
    return False


def _bytes_beyond(log: Segments, cut: int) -> int:
    """How many bytes that are not zero at the end lie beyond the cut."""
    total = 0
    for segment in log.segments():
        if segment < cut >> log.bits:
            continue
        shift, _ = log.place(segment)
        begin = max(cut, (segment << log.bits) + SLOT_BYTES)
        data = log.bytes_at(log.limit(segment) - begin, begin + shift)
        total += len(data.rstrip(b"\0"))
    return total


def last_checkpoint(log: Segments) -> tuple[int, bytes]:
    """(offset, record) of the latest checkpoint, as far as can be seen before the end of the log is
    known; (0, b"") when there is none.
    """
    words = log.state.words
    found = (0, b"")
    offset = words[CHECKPOINT]
    if offset:
        segment = offset >> log.bits
        with contextlib.suppress(BadPartError, LookupError, CorruptError):
            found = collect(log, offset - PART_BYTES, log.limit(segment)).records[0]
    begin, limit = words[LAST] << log.bits, log.limit(words[LAST])
    for one in stretches(log, begin, limit, on_damage=lambda *_: None, open_end=True):
        # (What a checkpoint begins is in no stretch.)
        if not isinstance(one, Stretch) and one.flags & CHECKPOINT_FRAME:
            found = one.records[0]
    return found


def look_at_copy(log: Segments) -> bool:
    """Find where a replica's copy ends; True when something torn follows there, or an empty
    segment. Changes nothing in the file if the log is readonly.
    """
    find_segments(log)
    words = log.state.words
    segment = words[LAST]
    while segment > words[HEAD] and not _begins_a_frame(log, segment):
        segment = log.before(segment)
    recovery, _ = _walk_to_end(log, segment << log.bits, 0)
    end = words[TAIL] = words[COMMIT] = recovery.tail
    is_torn = recovery.cut is not None or recovery.is_end_damaged
    return is_torn or (end - 1) >> log.bits < words[LAST]


def _begins_a_frame(log: Segments, segment: int) -> bool:
    try:
        shift, _ = log.place(segment)
    except CorruptError:
        return False
    data = log.bytes_at(PART_BYTES, (segment << log.bits) + SLOT_BYTES + shift)
    return len(data) == PART_BYTES and bool(PART.unpack(data)[2] & FIRST)


def is_whole(log: Segments, end: int, n: int) -> bool:
    """Whether no segment is missing in a log, and all can be read of its last `n` bytes before
    `end`. Raises LookupError when it was freed meanwhile.
    """
    kept = log.segments()
    if not kept or kept[-1] - kept[0] + 1 != len(kept):
        return not kept
    bad: list[int] = []
    start = max(kept[0], (end - n) >> log.bits) << log.bits
    for _ in stretches(log, start, end, on_damage=lambda offset, _: bad.append(offset)):
        if bad:
            break
    return not bad


def verify(log: Segments, seen: Callable[[int, int], None] | None = None) -> list[tuple[int, str]]:
    """See `Log.verify`; `log` is one at rest."""
    found: list[tuple[int, str]] = []
    words = log.state.words
    block, _ = _files.read_around(log.fd, HEADER_BYTES, 0)
    for name, at in (("first", 0), ("second", HEADER_BYTES // 2)):
        try:
            unpack_header(block[at : at + HEADER_BYTES // 2])
        except WeclawError:
            found.append((0, f"the {name} copy of the header block is damaged"))
    head, tail = words[HEAD], words[TAIL]
    for segment in log.segments():
        try:
            copies = log.header_positions(log.slot_of(segment))
        except KeyError:
            continue  # freed while we looked; one that lost its headers is found below
        for name, at in zip(("first", "second"), copies, strict=True):
            header = log.unpack_slot(log.bytes_at(SLOT_BYTES, at))
            if (header is None or header.segment != segment) and not log.is_gone(segment):
                found.append((segment << log.bits, f"the {name} slot header is damaged"))

    def note(offset: int, reason: str) -> None:
        # What was freed while we looked may be half zeroed by now, and is no damage.
        if not log.is_gone(offset >> log.bits):
            found.append((offset, reason))

    start = head << log.bits
    told = 0
    while True:
        try:
            for one in stretches(log, start, tail, on_damage=note):
                if seen is not None and one.end >= told:
                    seen(one.end - (head << log.bits), tail - (head << log.bits))
                    told = one.end + log.segment_bytes
        except LookupError:  # freed while we looked: go on with what is kept
            start = max(start + 1, words[HEAD] << log.bits)
            continue
        return found
