"""After a crash: finding the end of the log, and making sure it stays so.

Role: `recover` finds the state of a log from its bytes alone and cuts off what is torn;
`recover_copy` does so for a replica's copy; `heal` finishes or undoes what one process left half
done while others go on.  Where the end is, `_log_end` says; here the file is changed.

Invariants:

* What lies beyond a cut can't come back: it is zeroed and the log goes on in a new segment.
* Each step of a cut is on stable storage before the next; dying between any two leads here again.

It must not know what records mean.
"""

from __future__ import annotations

from collections.abc import Callable

from . import _files
from ._finding import (
    count_slots,
    erase_header,
    find_segments,
    find_spares,
    restore_copies,
)
from ._format import (
    CHECKPOINT_FRAME,
    SLOT_BYTES,
)
from ._log_end import Follow, Recovery, find_end, look_at_copy
from ._lost_end import SEGMENT_LABELLED, label_lost
from ._scan import walk
from ._segments import (
    CHECKPOINT,
    COMMIT,
    FREE,
    LAST,
    SAFE,
    TAIL,
    UNKNOWN,
    WRITING,
    Segments,
)
from ._slots import Slots
from .errors import DiskFullError

__all__ = ["heal", "recover", "recover_copy"]

_PIECE = 1 << 20


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
        _files.drop_cache(log.fd)
    log.is_overwritten = False
    find_segments(log)
    labelled = [] if log.readonly else label_lost(log)
    recovery = find_end(log, commit, near, whole=whole, follow=follow)
    if (
        complete is not None
        and (recovery.is_short if cache_is_true else not recovery.is_vouched)
        and complete()
    ):
        find_segments(log)
        recovery = find_end(log, commit, 0, whole=True)
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
        if words[COMMIT] > max(log.known_end, (words[LAST] << log.bits) + SLOT_BYTES):
            # Until something is written there is no frame that would vouch for the last one.
            log.record_end(words[COMMIT])
        find_spares(log, words[TAIL] + 1 if cache_is_true else 0)
    recovery.tail = words[TAIL]
    return recovery


def recover_copy(log: Slots) -> None:
    """Find where a replica's copy ends, and cut off what is torn.

    Nothing is begun and nothing vouched for: what follows comes from the file it is a copy of. A
    last segment with nothing in it yet goes too; it comes again.
    """
    _files.sync_data(log.fd)
    _files.drop_cache(log.fd)
    if look_at_copy(log):
        _cut(log, log.state.words[TAIL])
    log.state.words[WRITING] = 0
    find_spares(log, 0)


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
