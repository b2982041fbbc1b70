"""Locks on an open file: taken, waited for, given back, asked about.

Role: the other half of the door to the operating system's files, beside `_files`, which knows how
they are read and written.  Who may take which byte, and in which order, is for those above to say.

Invariants:

* Locks are open-file-description locks: they belong to the descriptor's open file, not to the
  process or thread, die with it, and need no pids.  One byte each, but for the one that is taken
  most (`bound_lock`), which is the open file's, too, but not a byte's.  On systems without them
  (macOS) POSIX record locks stand in: there, closing *any* descriptor of the file in the process
  drops them, and `is_locked` can't see locks of its own process.
* Call these as `_locks.lock(...)`: tests put doubles in their place.

It must not know what a byte's lock means.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import struct
import sys
from collections.abc import Callable, Sequence

__all__ = [
    "bound_lock",
    "is_locked",
    "lock",
    "question",
    "try_lock",
    "unlock",
    "unlocked",
]

_OFD = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8
_F_OFD_GETLK, _F_OFD_SETLK, _F_OFD_SETLKW = 36, 37, 38
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid (must be 0)
_UNLOCKED = struct.pack("h", fcntl.F_UNLCK)  # as what is asked of a lock answers
_BUSY = frozenset({errno.EAGAIN, errno.EACCES})


@functools.lru_cache(maxsize=1024)
def _request(kind: int, start: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0)


def try_lock(fd: int, start: int, exclusive: bool) -> bool:
    """Lock the byte at `start` if nobody else's lock is in the way; say whether it worked.

    A lock this descriptor already has there is changed to the kind asked for.
    """
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        if _OFD:
            fcntl.fcntl(fd, _F_OFD_SETLK, _request(kind, start))
        else:
            operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
            fcntl.lockf(fd, operation | fcntl.LOCK_NB, 1, start)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def lock(fd: int, start: int, exclusive: bool) -> None:
    """Lock the byte at `start`, waiting for those in the way.

    A signal's handler runs while it waits; if that raises (Ctrl-C), the lock isn't taken.
    """
    if _OFD:
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        fcntl.fcntl(fd, _F_OFD_SETLKW, _request(kind, start))
    else:
        fcntl.lockf(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, 1, start)


def unlock(fd: int, start: int) -> None:
    """Release the byte at `start`."""
    if _OFD:
        fcntl.fcntl(fd, _F_OFD_SETLK, _request(fcntl.F_UNLCK, start))
    else:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, start)


def bound_lock(fd: int, start: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """What takes the one exclusive lock of a file that is taken thousands of times a second, and
    what gives it back: as `lock` and `unlock` do, but it is kept apart from the locks of bytes and
    shuts out only those who take it by this function.
    """
    if _OFD:
        # As much of the open file as those of a byte, at 0.8 µs a pair to their 1.4.
        return (
            functools.partial(fcntl.flock, fd, fcntl.LOCK_EX),
            functools.partial(fcntl.flock, fd, fcntl.LOCK_UN),
        )
    # There, the lock of the whole file would be in the way of the locks of bytes.
    return (
        functools.partial(fcntl.lockf, fd, fcntl.LOCK_EX, 1, start),
        functools.partial(fcntl.lockf, fd, fcntl.LOCK_UN, 1, start),
    )


def question(start: int) -> tuple[int, bytes]:
    """What `unlocked` is to ask of the byte at `start`, prepared."""
    return start, _request(fcntl.F_WRLCK, start)


def unlocked(fd: int, asked: Sequence[tuple[int, bytes]]) -> list[int]:
    """Those of the bytes on which nobody else's open file holds a lock, by their `question`."""
    if _OFD:
        ask = fcntl.fcntl
        return [one for one, what in asked if ask(fd, _F_OFD_GETLK, what)[:2] == _UNLOCKED]
    return [one for one, _ in asked if not is_locked(fd, one)]


def is_locked(fd: int, start: int) -> bool:
    """Whether somebody else's open file holds any lock on the byte at `start`."""
    if _OFD:
        return not unlocked(fd, [question(start)])
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
    except OSError as error:
        if error.errno in _BUSY:
            return True
        raise
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, start)
    return False
