"""From the replica back: a lost primary is restored, damaged frames are healed.

Role: before a file is opened, see whether it is missing though its replica has data, and get it
back; for a file that is open, put good bytes from the copy in the place of unreadable ones.

Invariants: nothing is ever made over data. A file that can't be read is moved aside, not removed;
what is healed are only bytes that are no valid frame, with those that the copy has at the same
offsets of the same life of the segment.

It must not know what messages are.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from . import _clock, _files, _stream
from ._copy import Copy, read_role, role_of
from ._feeder import Address, Channel, LinkDownError, RefusedError, describe, normal, read_record
from ._format import COPY, PRIMARY
from ._mend import unreadable
from ._opening import IN_USE, is_new, read_header, scratch_of
from ._options import StoreOptions
from ._recovery import find_segments
from ._stream import BUSY, DATA, END, HELLO, SEGMENT, STATE, Hello, State, StreamError
from .errors import (
    CorruptError,
    LockedError,
    NotAQueueError,
    StorageError,
    WeclawError,
)
from .wal import LAST, TAIL, Log, LogState

logger = logging.getLogger("weclaw_embedded")

_ANSWER_S: Final = 30.0
_OTHERS_S: Final = 10.0  # how long another process that restores the same file is waited for
_NOBODY: Final = Hello(bytes(16), 0, 0, 0)


class _UnreachableError(StorageError):
    """The replica can't be asked whether it has data."""


def replica_of(path: str, options: StoreOptions | None) -> Address | None:
    """Where the replica of a file that can't be asked is: the argument, the environment, or what
    was noted beside the file.
    """
    if options is not None and options.chosen("replica"):
        return normal(options.replica)
    return read_record(scratch_of(path))


def restore_missing(path: str, options: StoreOptions) -> None:
    """Get the file back from its replica, if it is missing or empty and the replica has data.

    Raises StorageError or LockedError when it has, or may have, and that is not possible now.
    """
    path = os.path.realpath(path)
    address = replica_of(path, options) if is_new(path) else None
    if address is None:
        return
    try:
        _restore(path, address, "was missing" if not os.path.exists(path) else "was empty")
    except _UnreachableError as error:
        if not options.sync_replica or read_record(scratch_of(path)) is not None:
            raise
        # It was never here, as far as can be seen, and no put is confirmed before the replica has
        # been asked: if it has data after all, it refuses, and every put says so.
        logger.warning("%s; as it is new here, it is begun anew", error)


def restore_damaged(path: str, options: StoreOptions, error: WeclawError) -> bool:
    """Get a file that can't be opened back from its replica; the damaged one is moved aside. False
    when that is not possible, with the error raised that says what is.
    """
    path = os.path.realpath(path)
    address = replica_of(path, options)
    if address is None:
        return False
    if isinstance(error, NotAQueueError):
        if _has_data(address):
            raise NotAQueueError(
                f"{error}; its replica {describe(address)} has data: if this is what is left of "
                "the queue, move it away and open again, and it is restored from there"
            ) from error
        return False
    fd = _files.open_rw(path)
    try:
        if not _files.try_lock(fd, IN_USE, True):
            return False
        return _restore(path, address, f"was damaged beyond use ({error})")
    finally:
        _files.close(fd)


def _has_data(address: Address) -> bool:
    if not isinstance(address, str):
        return True  # it may have
    try:
        return role_of(address)[1] == COPY
    except (OSError, WeclawError):
        return False


def _restore(path: str, address: Address, why: str) -> bool:
    if isinstance(address, str) and (
        is_new(address) or os.path.realpath(address) == os.path.realpath(path)
    ):
        return False  # that replica is still to be made
    try:
        channel = Channel(address, None)
        try:
            return _fetch(path, address, why, channel)
        finally:
            channel.close()
    except RefusedError as refused:
        kind = LockedError if refused.why == BUSY else StorageError
        raise kind(f"{path} {why}, and its replica refuses to restore it: {refused}") from None
    except (LinkDownError, StreamError) as error:
        raise _UnreachableError(
            f"{path} {why}, and its replica {describe(address)}, which may have its data, can't be "
            f"asked: {error}; open it when the replica can be reached, or begin anew with "
            "replica=False"
        ) from None


def _fetch(path: str, address: Address, why: str, channel: Channel) -> bool:
    until_s = time.monotonic() + _ANSWER_S
    channel.send(HELLO, _stream.pack_hello(_NOBODY))
    body = channel.answer(until_s, lambda: False)
    if body[0] != STATE:
        raise LinkDownError("it did not say what it has")
    state = _stream.unpack_state(body)
    if not state.exists:
        return False
    if state.role != COPY:
        raise StorageError(
            f"{path} {why}, and {describe(address)}, named as its replica, is no copy but a queue "
            "in its own right (it was promoted, or changed); nothing was made; open that one, or "
            "begin anew with replica=False"
        )
    channel.send(_stream.FETCH)
    try:
        copy = Copy.create(path, _identity(state), PRIMARY)
    except LockedError:
        _wait_for_others(path)
        return True
    try:
        _fill(copy, channel)
        if copy.empty:
            raise LinkDownError("it has a file, but no segment of a log")
        if _files.size(copy.fd) and os.path.exists(path) and not is_new(path):
            aside = f"{path}.damaged-{_clock.wall_us()}"
            os.rename(path, aside)
            why += f"; what is left of it is now {aside}"
        copy.sync()
        tail = copy.tail
    finally:
        copy.close()
    logger.warning(
        "%s %s: RESTORED from its replica %s, which had everything up to offset %d",
        path,
        why,
        describe(address),
        tail,
    )
    return True


def _identity(state: State) -> Hello:
    # A higher epoch, so that the file that was lost is refused should it come back.
    return Hello(state.store_id, state.segment_bytes, state.epoch + 1, state.created_us)


def _fill(copy: Copy, channel: Channel) -> None:
    while True:
        body = channel.answer(time.monotonic() + _ANSWER_S, lambda: False)
        if body[0] == SEGMENT:
            copy.begin_segment(body[1:])
        elif body[0] == DATA:
            offset, _, data = _stream.unpack_data(body)
            copy.write(offset, data)
        elif body[0] == END:
            _, tail = _stream.unpack_end(body)
            if not copy.empty and tail != copy.tail:
                raise LinkDownError("what it sent ends elsewhere than it says")
            return
        else:
            raise LinkDownError("it sent something else than its copy")


def _wait_for_others(path: str) -> None:
    until_s = time.monotonic() + _OTHERS_S
    while is_new(path):
        if time.monotonic() >= until_s:
            raise LockedError(f"another process is restoring {path}; nothing was made; wait for it")
        time.sleep(0.05)


# -- healing -------------------------------------------------------------------------------------


def heal(log: Log, address: Address | None, start: int, end: int) -> list[int]:
    """Write what the copy has over what can't be read between two offsets; the caller holds the
    write lock. Returns the offsets that can be read again. Only a copy that is a file here is
    looked at.
    """
    if log.readonly or not isinstance(address, str):
        return []
    bad = unreadable(log, start, _end_of_segment(log, end - 1))
    if not bad:
        return []
    try:
        fd = _files.open_ro(address)
    except OSError:
        return []
    healed = []
    try:
        header = read_header(fd, address)
        if header.store_id != log.header.store_id or read_role(fd, header)[0] != COPY:
            return []
        copy = Log(fd, header, LogState(), readonly=True)
        find_segments(copy)
        for begin, stop, reason in bad:
            if _heal_one(log, copy, begin, stop):
                healed.append(begin)
                logger.warning(
                    "damage at offset %d (%s): healed from the replica %s", begin, reason, address
                )
    except (OSError, WeclawError) as error:
        logger.warning("damage can't be healed from the replica %s: %s", address, error)
    finally:
        _files.close(fd)
    return healed


def _heal_one(log: Log, copy: Log, begin: int, stop: int) -> bool:
    try:
        shift, salt = log.place(begin >> log.bits)
        its_shift, its_salt = copy.place(begin >> log.bits)
    except (LookupError, CorruptError):
        return False
    data = _files.read_at(copy.fd, stop - begin, begin + its_shift)
    if salt != its_salt or len(data) < stop - begin:
        return False
    before = _files.read_at(log.fd, stop - begin, begin + shift)
    _files.write_at(log.fd, [data], begin + shift)
    left = unreadable(log, begin, _end_of_segment(log, begin))
    if any(begin <= place < stop for place, _, _ in left):
        _files.write_at(log.fd, [before], begin + shift)  # no better there
        return False
    return True


def _end_of_segment(log: Log, offset: int) -> int:
    """The offset up to which its segment may hold frames."""
    words = log.state.words
    segment = offset >> log.bits
    return int(words[TAIL]) if segment >= words[LAST] else log.limit(segment)
