"""After a crash: where the log ends, what of it is damaged, and making sure it stays so.

Role: `recover` finds the state of a log from its bytes alone, `heal` finishes or undoes what one
process left half done while others go on, `verify` looks and changes nothing.

Invariants:

* The log is a prefix: everything before its end was written before everything after it.
* A bad frame that a later one vouches for (its commit point is past it) was on stable storage
  once: that is damage, reported and passed over.  A bad frame that none vouches for is where the
  writing ended: cut there, quietly.
* What lies beyond a cut can't come back: it is zeroed and the log goes on in a new segment.
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
from ._finding import (
    HEADER_HEALED,
    count_slots,
    erase_header,
    find_segments,
    find_spares,
    restore_copies,
)
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
    unpack_slot,
)
from ._lost_end import SEGMENT_LABELLED, label_lost
from ._scan import BadPartError, Frame, collect, stretches, walk
from ._segments import (
    CHECKPOINT,
    COMMIT,
    FREE,
    HEAD,
    LAST,
    SAFE,
    TAIL,
    UNKNOWN,
    WRITING,
    Segments,
)
from ._slots import Slots
from .errors import CorruptError, DiskFullError, WeclawError

__all__ = [
    "HEADER_HEALED",
    "SEGMENT_LABELLED",
    "Follow",
    "Recovery",
    "heal",
    "is_whole",
    "last_checkpoint",
    "look_at_copy",
    "recover",
    "recover_copy",
    "verify",
]
# What goes along with recovery while it looks at all that is kept.
Follow: TypeAlias = Callable[[Iterator[Stretch | Frame]], None]


_PIECE = 1 << 20
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
    last_time_us: int = 0

    @property
    def ends_vouched(self) -> bool:
        """Whether it goes on right after a frame that vouches, so that another says no more."""
        return self.is_vouched and self.cut is None and not self.is_end_damaged


def recover(
    log: Slots,
    *,
    commit: int,
    cache_is_true: bool,
    whole: bool,
    failed: bool,
    near: int,
    begin_segment: Callable[[int], None],
    complete: Callable[[], bool] | None = None,
    follow: Follow | None = None,
) -> Recovery:
    """See `Log.recover`.  `begin_segment(prev_end)` makes the log go on in a new one."""
    if not log.readonly:
        if failed:
            _write_again(log, commit)
        if failed or not cache_is_true:
            # The cache may hold what the disk never got: look at the disk.
            _files.sync_data(log.fd)
    if failed or not cache_is_true:
        _files.drop_cache(log.fd, 0, 0)
    log.is_overwritten = False
    find_segments(log)
    labelled = [] if log.readonly else label_lost(log)
    recovery = _find_end(log, commit, near, whole=whole, follow=follow)
    if (
        complete is not None
        and (recovery.is_short if cache_is_true else not recovery.is_vouched)
        and complete()
    ):
        find_segments(log)
        recovery = _find_end(log, commit, 0, whole=True)
    words = log.state.words
    words[TAIL] = max(recovery.tail, (words[LAST] << log.bits) + SLOT_BYTES)
    words[COMMIT] = min(commit, words[TAIL]) if cache_is_true else words[TAIL]
    words[WRITING] = 0
    if recovery.cut is not None:
        words[TAIL] = words[COMMIT] = recovery.cut
    if not log.readonly:
        recovery.healed = restore_copies(log, slots=recovery.whole or not cache_is_true)
        recovery.healed += [(segment << log.bits, SEGMENT_LABELLED) for segment in labelled]
        if recovery.cut is not None:
            _cut(log, recovery.cut)
            _go_on(log, recovery.cut, begin_segment)
        elif recovery.is_end_damaged:
            # What is damaged stays where it is, to be reported by whoever looks.
            end = log.limit(words[LAST])
            words[TAIL] = words[COMMIT] = end
            _go_on(log, end, begin_segment)
            if log.known_end > words[TAIL]:
                log.record_end(words[TAIL])  # what is missing is told of by where it would stand
        find_spares(log, words[TAIL] + 1 if cache_is_true else 0)
    recovery.tail = words[TAIL]
    return recovery


def recover_copy(log: Slots) -> None:
    """Find where a replica's copy ends, and cut off what is torn.

    Nothing is begun and nothing vouched for: what follows comes from the file it is a copy of. A
    last segment with nothing in it yet goes too; it comes again.
    """
    _files.sync_data(log.fd)
    _files.drop_cache(log.fd, 0, 0)
    if look_at_copy(log):
        _cut(log, log.state.words[TAIL])
    log.state.words[WRITING] = 0
    find_spares(log, 0)


def look_at_copy(log: Segments) -> bool:
    """Find where a replica's copy ends; True when something torn follows there, or an empty
    segment. Changes nothing in the file if the log is readonly.
    """
    find_segments(log)
    words = log.state.words
    segment = words[LAST]
    while segment > words[HEAD] and not _begins_a_frame(log, segment):
        segment -= 1
    recovery, _ = _walk_to_end(log, segment << log.bits, 0)
    end = words[TAIL] = words[COMMIT] = recovery.tail
    is_torn = recovery.cut is not None or recovery.is_end_damaged
    return is_torn or (end - 1) >> log.bits < words[LAST]


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


def _begins_a_frame(log: Segments, segment: int) -> bool:
    try:
        shift, _ = log.place(segment)
    except CorruptError:
        return False
    data = log.bytes_at(PART_BYTES, (segment << log.bits) + SLOT_BYTES + shift)
    return len(data) == PART_BYTES and bool(PART.unpack(data)[2] & FIRST)


def _write_again(log: Segments, commit: int) -> None:
    """Write once more what the failed sync was to bring to the disk, from the cache.

    The kernel holds these pages for clean although the disk lacks them.
    """
    for slot in range(count_slots(log)):
        header = log.read_slot(slot)
        if header is None or header.segment < commit >> log.bits:
            continue
        position = log.slot_position(slot)
        for at in range(0, log.segment_bytes, _PIECE):
            n = min(_PIECE, log.segment_bytes - at)
            piece = _files.read_at(log.fd, n, position + at)
            if piece:
                _files.write_at(log.fd, [piece], position + at)


def _find_end(
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


class _Walk:
    """The way to the end of a log, and what is seen there."""

    def __init__(self, log: Segments, start: int, commit: int) -> None:
        words = log.state.words
        self._log = log
        self._start = start
        self._commit = commit
        self.bad: list[tuple[int, str]] = []
        # Of each run of good frames: how many bad spots are before it, where it ends, the time of
        # its last frame, the latest checkpoint by then.
        self.runs: list[tuple[int, int, int, int]] = []
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
        n_bad = time_us = 0
        for found in stretches(
            log,
            self._start,
            log.limit(log.state.words[LAST]),
            on_damage=lambda offset, reason: bad.append((offset, reason)),
            open_end=True,
            on_commit=self._vouch,
        ):
            if len(bad) != n_bad:
                self.runs.append((n_bad, self.end, time_us, checkpoint))
                n_bad = len(bad)
            end = self.end = found.end
            self.last_flags = found.flags
            if isinstance(found, Stretch):
                time_us = found.time_us(found.places[-1])
                self.is_boundary |= found.base <= commit <= end and found.is_boundary(commit)
            else:
                time_us = found.time_us
                self.is_boundary |= commit in (found.offset, end)
                if found.flags & CHECKPOINT_FRAME and found.records:
                    checkpoint = found.records[0][0]
            self.vouched = max(self.vouched, found.commit)
            yield found
        self.runs.append((n_bad, self.end, time_us, checkpoint))

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
    _, _, recovery.last_time_us, words[CHECKPOINT] = last
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


def _cut(log: Segments, cut: int) -> None:
    """Make the log end at `cut` for good.

    Each step is on stable storage before the next, and dying between any two leads here again.
    """
    words = log.state.words
    segment = cut >> log.bits
    shift, _ = log.place(segment)  # first: where there is none nothing is to be touched
    for n in reversed([n for n in log.segments() if n > segment]):
        # From the last one down, so that what is left is always a log without a gap.
        erase_header(log, log.slot_of(n))
        _files.sync_data(log.fd)
        log.state.slots[log.slot_of(n)] = FREE | SAFE
    words[LAST] = segment
    log.forget()
    _zero(log, cut, log.limit(segment), shift)
    _files.sync_data(log.fd)


def _go_on(log: Slots, end: int, begin_segment: Callable[[int], None]) -> None:
    """Begin a new segment after the end of the log."""
    words = log.state.words
    log.count_spares()
    try:
        begin_segment(max(end, (words[LAST] << log.bits) + SLOT_BYTES))
    except DiskFullError:
        # Then it goes on where it was cut: that space was zeroed, and synced.  (Where there was
        # nothing to cut, the segment counts as full and the next append finds the disk full.)
        log.forget()


def _zero(log: Segments, begin: int, end: int, shift: int) -> None:
    """Zero a range of the log, as far as it isn't."""
    for at in range(begin, end, _PIECE):
        n = min(_PIECE, end - at)
        used = len(log.bytes_at(n, at + shift).rstrip(b"\0"))
        if used:
            _files.zero_fill(log.fd, at + shift, used)


def heal(log: Slots) -> None:
    """See `Log.heal`."""
    words = log.state.words
    accept = words[WRITING] == 1
    tail = words[TAIL]
    segment = tail >> log.bits
    log.forget()
    log.free_below_head()
    begun: dict[int, int] = {}
    for slot, entry in enumerate(log.table()):
        if 0 < entry < FREE and entry - 1 <= segment:
            continue
        header = log.read_slot(slot)
        if header is not None and header.segment > segment:
            begun[header.segment] = slot
        elif UNKNOWN < entry < FREE:  # given to a segment whose header was never written
            log.give_back(slot)
    if accept:
        last = segment
        while last + 1 in begun:
            last += 1
            log.state.slots[begun[last]] = last + 1
        words[LAST] = last
        tail = _accept(log, tail)
    for n, slot in begun.items():
        if n > tail >> log.bits:
            log.give_back(slot)
    words[LAST] = tail >> log.bits
    log.forget()
    shift, _ = log.place(tail >> log.bits)
    _zero(log, tail, log.limit(tail >> log.bits), shift)
    words[TAIL] = tail
    log.count_spares()
    words[WRITING] = 0


def _accept(log: Segments, tail: int) -> int:
    """Take the whole frames from the tail on; return where they end."""
    bad: list[int] = []
    for _, end, _, flags, _, records in walk(
        log,
        tail,
        log.limit(log.state.words[LAST]),
        on_damage=lambda offset, _: bad.append(offset),
        open_end=True,
    ):
        if bad:
            break
        tail = end
        if flags & CHECKPOINT_FRAME and records:
            log.state.words[CHECKPOINT] = records[0][0]
    return tail


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
            position = log.slot_position(log.slot_of(segment))
        except KeyError:
            continue  # freed while we looked; one that lost its headers is found below
        for name, at in (("first", 0), ("second", log.segment_bytes - SLOT_BYTES)):
            data = log.bytes_at(SLOT_BYTES, position + at)
            header = unpack_slot(data, log.header.store_id, log.segment_bytes)
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
