"""Copies and repairs of one open file: `Store.backup` and `Store.repair`.

Role: both work on the log as bytes, beside the processes that use it. A backup is the log's kept
segments as they are, under an identity of its own; a repair replaces what cannot be read by a
frame that says nothing, after the messages it held were set aside.

It must not know how messages are delivered.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable
from typing import Final

from . import _clock, _delivery, _files, _names, _records
from ._engine import Engine
from ._finding import begins_with_part, restore_copies
from ._format import (
    ENVELOPE,
    ENVELOPE_BYTES,
    HEAD_RECORD_AT,
    HEADER_BYTES,
    PART,
    PART_BYTES,
    SLOT_BYTES,
    WHOLE,
    FileHeader,
    SlotHeader,
    pack_head,
    pack_header,
    pack_slot,
    part_checksum,
)
from ._reading import Reading
from ._records import SKIPPABLE
from ._segments import FREE, UNKNOWN, ZEROED
from ._session import Session
from .errors import CorruptError, StorageError, StoreFailedError
from .wal import HEAD, LAST, TAIL, Log, new_salt

#: Told now and then how many bytes are done, and of how many.
Seen = Callable[[int, int], None]

# How often a file that is only looked at is copied anew.
_COPIES: Final = 5
_SMALLEST_BLANK: Final = PART_BYTES + ENVELOPE_BYTES + 1


# -- backup --------------------------------------------------------------------------------------


def backup(engine: Engine, path: str, seen: Seen | None = None) -> None:
    """Copy the log as it is at this moment to a new file, which appears whole."""
    if os.path.lexists(path):
        raise StorageError(f"{path} exists already; nothing was written; choose another name")
    try:
        if engine.log.readonly:
            _copy_what_stays(engine, path, seen)
            return
        try:
            _copy_pinned(engine, path, seen)
        except StoreFailedError as error:
            looker = engine.last_look(error)
            # There is one already if that was come upon at the very end.
            if not os.path.lexists(path):
                _copy_what_stays(looker, path, seen)
    except FileExistsError:
        raise StorageError(
            f"{path} came to be meanwhile; it was left alone; choose another name"
        ) from None
    except OSError as error:
        raise StorageError(
            f"the backup {path} can't be written: {error.strerror or error}; none was made, and "
            "the queue is as it was; choose another place"
        ) from error


def _copy_pinned(engine: Engine, path: str, seen: Seen | None) -> None:
    engine.flush()

    def copy(found: tuple[list[int], int]) -> None:
        _names.create_whole(path, functools.partial(_write_copy, engine.log, *found, seen))

    engine.pinned(_what_is_kept, copy)


def _what_is_kept(session: Session) -> tuple[list[int], int]:
    return session.log.segments(), session.log.state.words[TAIL]


def _copy_what_stays(engine: Engine, path: str, seen: Seen | None) -> None:
    """The same by who only looks: others don't wait for it, and where they gave back what was not
    copied yet it begins anew, a few times.
    """
    gone: LookupError | None = None
    for _ in range(_COPIES):
        segments, tail = engine.run(_what_is_kept)
        try:
            write = functools.partial(_write_copy, engine.log, segments, tail, seen)
            _names.create_whole(path, write)
            return
        except LookupError as error:
            gone = error
    raise StorageError(
        f"{engine.path} was copied {_COPIES} times, and each time others gave back space of it "
        f"before it was copied; nothing is wrong with it, and there is no file {path}; open it "
        "without readonly, so that they wait"
    ) from gone


def _write_copy(log: Log, segments: list[int], tail: int, seen: Seen | None, fd: int) -> None:
    store_id = secrets.token_bytes(16)
    old = log.header
    header = FileHeader(old.segment_bytes, store_id, 1, 1, _clock.wall_us())
    block = bytearray(pack_header(header).ljust(HEADER_BYTES, b"\0"))
    record = pack_head(segments[0], store_id)
    block[HEAD_RECORD_AT : HEAD_RECORD_AT + len(record)] = record
    size = log.segment_bytes
    is_empty = True
    for place, segment in enumerate(segments):
        at = HEADER_BYTES + place * size
        number = log.slot_of(segment)
        slot = log.read_slot(number)
        data = bytearray(log.bytes_at(size, log.slot_position(number)))
        if log.is_gone(segment):
            raise LookupError(f"segment {segment} is no longer kept")
        if slot is None:
            continue  # damaged: the copy lacks what the file lacks
        is_empty = False
        data = data.ljust(size, b"\0")
        beyond = max(SLOT_BYTES, min(size, tail - (segment << log.bits)))
        data[beyond:] = bytes(size - beyond)
        packed = pack_slot(slot, store_id)
        data[:SLOT_BYTES] = packed
        data[size - SLOT_BYTES :] = packed
        _files.write_at(fd, [data], at)
        if seen is not None:
            seen((place + 1) * size, len(segments) * size)
    if is_empty:
        raise CorruptError(
            segments[0] << log.bits,
            "no segment can be found",
            f"no segment of the log of {_files.name_of(log.fd)} can be read any more, so a backup "
            "would hold nothing; none was made; restore the file from an earlier backup or its "
            "replica",
        )
    _files.zero_fill(fd, HEADER_BYTES + len(segments) * size, size)
    # Last, so that what is half written is not taken for a queue.
    _files.write_at(fd, [bytes(block)], 0)


# -- repair --------------------------------------------------------------------------------------


def repair(
    engine: Engine, seen: Seen | None = None, lost: dict[int, int] | None = None
) -> list[tuple[int, str]]:
    """Set aside what cannot be read, so that `verify` is quiet; (offset, reason) of each place.
    The offsets of those that no replica made good, with their bytes, are added to `lost`.
    """
    # What is met now is healed here, and not by another thread at the same time, whose index would
    # follow a moment after what is written.
    with engine.healing:
        return _repair(engine, seen, lost)


def _repair(
    engine: Engine, seen: Seen | None = None, lost: dict[int, int] | None = None
) -> list[tuple[int, str]]:
    found = engine.verify(seen)
    if not found:
        return []
    # What a replica may still have is not written over because it can't be asked just now.
    is_healed = engine.heal(engine.log.head_offset, engine.page.words[TAIL], insist=True)

    def mend(session: Session) -> bool:
        log = session.log
        found_again = [_give_slot(session, segment) for segment in reversed(lost_segments(log))]
        before: list[tuple[int, int, str]] = []
        look = log.at_rest()
        # Others wait for this: what stands before the first that was found was good just now.
        first = found[0][0]
        spots = unreadable(look, first, log.state.words[TAIL])
        for place in look.unread:
            if not log.is_known_unread(place):
                raise log.cannot_read(place[0], place[1] - place[0])
        while spots and spots != before:
            for start, end, reason in spots:
                if lost is not None:
                    lost[start] = end - start
                for offset in session.tx.live_in(start, end):
                    if offset < end and offset >= start:
                        _delivery.set_aside(session, offset, reason)
                _blank(log, start, end)
            # What went on in the next segment was passed over with its beginning: now it stands
            # there alone.
            before, spots = spots, unreadable(look, first, log.state.words[TAIL])
        restore_copies(log, slots=True)
        return any(found_again)

    is_healed |= engine.run(mend)
    engine.sync_file()
    engine.healed = []
    left = dict(engine.log.verify())

    def forget(session: Session) -> None:
        if is_healed and session.tx.damage():
            # What was passed over when the index was made is there now.
            session.tx.clear()
            engine.catch_up(session.tx)
        known = [offset for offset in session.tx.aside() if offset not in left]
        session.tx.forget_damage(known)
        # What could not be read is written over, and nobody comes upon it again. What a record says
        # (a message that was set aside, a record that is none) would be noted by whoever folds the
        # log anew, so a record says that it is over. It stands behind these, and is kept longer.
        if known:
            session.append([_records.pack_damaged([], known)])

    engine.run(forget)
    engine.flush()
    return found


def has_slot(log: Log, segment: int) -> bool:
    """Whether a segment that is kept has a slot with a readable header."""
    try:
        log.place(segment)
        header = log.read_slot(log.slot_of(segment))
    except (LookupError, CorruptError):
        return False
    return header is not None and header.segment == segment


def lost_segments(log: Log) -> list[int]:
    """The segments that are kept and have no readable header."""
    words = log.state.words
    return [n for n in range(words[HEAD], words[LAST] + 1) if not has_slot(log, n)]


def find_slot(log: Log, header: SlotHeader) -> int | None:
    """The slot of a segment whose headers were lost: it begins with a valid part of this life."""
    begin = (header.segment << log.bits) + SLOT_BYTES
    for slot, entry in enumerate(log.table()):
        if entry == header.segment + 1:
            return slot
        if entry != UNKNOWN and (not entry & FREE or entry & ZEROED):
            continue
        data, _ = _files.read_around(
            log.fd, log.segment_bytes - 2 * SLOT_BYTES, log.slot_position(slot) + SLOT_BYTES
        )
        if begins_with_part(data, header.salt, begin):
            return slot
    return None


def _give_slot(session: Session, segment: int) -> bool:
    """Give a lost segment its slot again; True when that is its own. Its salt is known from the one
    behind it, so that it is recognised; else it gets another slot, which says nothing, and the
    messages that were in it are set aside.
    """
    log = session.log
    words = log.state.words
    begin, end = segment << log.bits, log.limit(segment)
    following = log.read_slot(log.slot_of(segment + 1)) if has_slot(log, segment + 1) else None
    header = SlotHeader(
        segment=segment,
        salt=following.prev_salt if following else new_salt(),
        prev_salt=new_salt(),
        prev_end=log.limit(segment - 1) if segment else 0,
        head=0,
        epoch=log.header.epoch,
        checkpoint=0,
        created_us=following.created_us if following else 0,
    )
    if segment > words[HEAD] and has_slot(log, segment - 1):
        before = segment - 1
        header = header._replace(
            prev_salt=log.place(before)[1], prev_end=_end_of_frames(log, before)
        )
    slot = find_slot(log, header)
    if slot is not None:
        log.put_in_slot(header, slot, None)
        return True
    for offset in session.tx.live_in(begin, end):
        if begin <= offset < end:
            _delivery.set_aside(session, offset, "its segment can't be found")
    log.put_in_slot(header, log.take_slot(spare=True), bytes(log.segment_bytes - 2 * SLOT_BYTES))
    _blank(log, begin + SLOT_BYTES, following.prev_end if following else end)
    return False


def _end_of_frames(log: Log, segment: int) -> int:
    """Where the frames of a segment end that is followed by a lost one."""
    begin, limit = segment << log.bits, log.limit(segment)
    end = begin + SLOT_BYTES
    bad: list[int] = []
    for frame in log.frames(begin, limit, on_damage=lambda offset, _: bad.append(offset)):
        end = frame[1]
    # What can't be read at its end is written over by a frame up to the limit.
    return limit if any(offset >= end for offset in bad) else end


def unreadable(log: Reading, first: int, last: int) -> list[tuple[int, int, str]]:
    """(start, end, reason) of what lies between good frames and is none, from the first of these
    offsets to the last. Who is to find what the disk can't read, too, looks at the log at rest.
    """
    bad: list[tuple[int, str]] = []
    found: list[tuple[int, int, str]] = []
    words = log.state.words

    def close(next_good: int) -> None:
        for place, (offset, reason) in enumerate(bad):
            segment = offset >> log.bits
            end = log.frames_end(segment) or log.limit(segment)
            if segment == words[LAST]:
                end = min(end, words[TAIL])
            follow = bad[place + 1][0] if place + 1 < len(bad) else next_good
            found.append((offset, min(end, max(follow, offset)), reason))
        bad.clear()

    for frame in log.frames(
        log.boundary_before(first),
        last,
        on_damage=lambda offset, reason: bad.append((offset, reason)),
    ):
        close(frame[0])
    close(last)
    return [one for one in found if one[1] - one[0] >= _SMALLEST_BLANK and one[1] > first]


def _blank(log: Log, start: int, end: int) -> None:
    """Put a frame that says nothing over [start, end) of one segment."""
    shift, salt = log.place(start >> log.bits)
    n = end - start - PART_BYTES
    length = n - ENVELOPE_BYTES
    body = ENVELOPE.pack(length, PART_BYTES) + bytes((SKIPPABLE,)) + bytes(length - 1)
    # Commit point 0: it vouches for nothing.
    after_crc = PART.pack(0, n, WHOLE, 0)[4:] + body
    crc = part_checksum(after_crc, salt, start)
    _files.write_at(log.fd, [crc.to_bytes(4, "little") + after_crc], start + shift)
