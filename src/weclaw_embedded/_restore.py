"""From the replica back: a primary that is lost, whole or in part, before it is opened.

Role: see whether a file is missing, empty or unreadable though its replica has data, and get it
back; see to it that what is missing at its end comes back. Damage within it is `_healing`'s.

Invariants: nothing is ever made over data. A file that can't be read is moved aside, not removed.
A file is begun anew only when the replica has said that it has no data, or nobody named one.

It must not know what messages are.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from . import _clock, _files, _locks, _stream
from ._channel import (
    Address,
    Channel,
    LinkDownError,
    NotStartedError,
    RefusedError,
    describe,
    normal,
)
from ._copy import Copy, is_same_file, role_of
from ._file_options import recorded_replica
from ._format import COPY, PRIMARY, FileHeader
from ._healing import NOBODY, complete, patience_of, replica_of
from ._opening import IN_USE, Complete
from ._options import StoreOptions
from ._paths import check_path, is_new, lacks_folder, refuse_left
from ._stream import BUSY, DATA, END, HELLO, SEGMENT, STATE, Hello, State, StreamError
from .errors import LockedError, NotAQueueError, StorageError, WeclawError

logger = logging.getLogger("weclaw_embedded")

_ANSWER_S: Final = 30.0  # between two messages, once it has begun to send
_FIRST_PAUSE_S: Final = 0.2
_OTHERS_S: Final = 10.0  # how long another process that restores the same file is waited for


def refuse_itself(path: str, options: StoreOptions) -> None:
    """Raise ValueError if the argument `replica` is the file at `path`, by whatever links. It must
    be seen first: once it is recorded, the place of a good replica is forgotten.
    """
    address = normal(options.replica) if "replica" in options.given else None
    if isinstance(address, str) and is_same_file(address, path):
        raise ValueError(
            f"replica={address!r} is the file itself; nothing was opened or recorded; name another "
            "place"
        )


def restore_missing(path: str, options: StoreOptions) -> None:
    """Get the file back from its replica, if it is missing or empty and the replica has data.

    Raises StorageError or LockedError when it has, or may have, and that is not possible now.
    """
    path = os.path.realpath(path)
    check_path(path)  # a device and a pipe have no bytes either, and are not to be replaced
    refuse_left(path)
    address = replica_of(path, options) if is_new(path) else None
    if address is not None:
        patience_s = patience_of(options.replica_timeout)
        why = "is missing" if not os.path.exists(path) else "is empty"
        _restore(path, address, why, patience_s, moves_aside=False)


def end_of(path: str, options: StoreOptions) -> Complete | None:
    """What gets back what the file at `path` lacks at its end; None where no replica is wanted."""
    path = os.path.realpath(path)
    named = replica_of(path, options)
    if named is None and options.chosen("replica"):
        return None  # there is to be none
    patience_s = patience_of(options.replica_timeout)

    def get(fd: int, header: FileHeader, recorded: Mapping[str, Any]) -> bool:
        # Where nothing is noted beside the file, the file says where it is.
        address = named or recorded_replica(recorded, header)
        return address is not None and complete(path, fd, header, address, patience_s)

    return get


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
        if not _locks.try_lock(fd, IN_USE, True):
            return False
        patience_s = patience_of(options.replica_timeout)
        why = f"is damaged beyond use ({error})"
        return _restore(path, address, why, patience_s, moves_aside=True)
    finally:
        _files.close(fd)


def _has_data(address: Address) -> bool:
    if not isinstance(address, str):
        return True  # it may have
    try:
        return role_of(address)[1] == COPY
    except (OSError, WeclawError):
        return False


def _restore(
    path: str, address: Address, why: str, patience_s: float, *, moves_aside: bool
) -> bool:
    """Get it from the replica; False when that has no data. One that does not answer is asked
    again until the time is over.

    `moves_aside` what is at `path`, which the caller has for himself. Without it a file that comes
    to be there meanwhile is the one to open: another process has restored it, or asked before the
    replica had anything, and works with it.
    """
    try:
        if isinstance(address, str) and (is_new(address) or is_same_file(address, path)):
            lacks = lacks_folder(os.path.realpath(address))
            if lacks is None or moves_aside:
                return False  # that replica is still to be made
            # Its disk may only not be mounted.
            raise StorageError(
                f"{path} {why}, and whether its replica {address} has data can't be seen: {lacks}; "
                "nothing was made; make the folder first, or check the path; without a replica, "
                "begin with replica=False"
            )
    except OSError as error:
        raise StorageError(
            f"{path} {why}, and whether its replica has data can't be seen: {error}; nothing was "
            "made; name another place for the replica, or begin with replica=False"
        ) from None
    until_s = time.monotonic() + patience_s
    pause_s = _FIRST_PAUSE_S
    while moves_aside or is_new(path):
        try:
            return _restore_once(path, address, why, until_s, moves_aside)
        except RefusedError as refused:
            # The receiver of one who has just died may still end.
            if refused.why != BUSY or time.monotonic() + pause_s >= until_s:
                kind = LockedError if refused.why == BUSY else StorageError
                raise kind(
                    f"{path} {why}, and its replica refuses to restore it: {refused}; nothing was "
                    "made"
                ) from None
        except (LinkDownError, StreamError) as error:
            if time.monotonic() + pause_s >= until_s or isinstance(error, NotStartedError):
                raise StorageError(
                    f"{path} {why}, and its replica {describe(address)}, which may have its data, "
                    f"can't be asked: {error}; nothing was made; open it when the replica can be "
                    "reached, or once with replica=False to begin anew, if it never had data"
                ) from None
        time.sleep(pause_s)
        pause_s *= 2
    return True


def _restore_once(path: str, address: Address, why: str, until_s: float, moves_aside: bool) -> bool:
    channel = Channel(address, None)
    try:
        return _fetch(path, address, why, channel, until_s, moves_aside)
    finally:
        channel.close()


def _fetch(
    path: str, address: Address, why: str, channel: Channel, until_s: float, moves_aside: bool
) -> bool:
    channel.send(HELLO, _stream.pack_hello(NOBODY))
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
        if moves_aside and not is_new(path):
            aside = f"{path}.damaged-{_clock.wall_us()}"
            os.rename(path, aside)
            why += f"; what is left of it is now {aside}"
        copy.sync()
        tail = copy.tail
    except StorageError:
        if moves_aside or is_new(path):
            raise
        return True  # it came to be there meanwhile
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
