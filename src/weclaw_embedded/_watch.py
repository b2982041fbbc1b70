"""Whether a file still has its name, without asking the file system each time.

Role: the system is asked to say when a name may have come to be another file's, or somebody else
has opened a file (inotify), and what it has to say is a look at a descriptor, which costs a system
call that touches no file. Where it offers no such thing the answer is always "perhaps", and whoever
asks looks for himself.

Invariant: never a no where the name has moved; a yes may be for less (a changed mode, say).

It must not know what the names are for, nor what is done when one has moved.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence

from . import _files

_IN_ATTRIB, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x4, 0x400, 0x800
_IN_CLOSE_WRITE, _IN_OPEN = 0x8, 0x20


def watch_names(paths: Sequence[str], *, opened: str | None = None) -> int:
    """Return a descriptor that becomes readable when one of these is deleted, moved or replaced
    (and now and then for less), or -1 where the system offers no such thing: then look yourself.

    Also when the one of these that is `opened` is, by which it may be cut, or is closed by one who
    could write to it. That it is written to is not asked for: those do it whom it is watched for.
    """
    start, add = _files.libc("inotify_init1"), _files.libc("inotify_add_watch")
    if start is None or add is None:
        return -1
    fd = start(os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        return -1
    wanted = _IN_ATTRIB | _IN_DELETE_SELF | _IN_MOVE_SELF
    for path in paths:
        more = _IN_OPEN | _IN_CLOSE_WRITE if path == opened else 0
        if add(fd, os.fsencode(path), wanted | more) < 0:
            _files.close(fd)
            return -1
    return fd


def poll_of(fd: int) -> select.poll | None:
    """What waits until a descriptor has something to say; None for -1."""
    if fd < 0:
        return None
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll


def _may_have_moved(wait_s: int) -> bool:
    return True


def asker_of(fd: int) -> Callable[[int], object]:
    """What says, when called with 0 (s to wait), whether a name that `fd` watches may have changed
    its file; always, where the system watches none.
    """
    if fd < 0:
        return _may_have_moved
    # Where there is inotify there is this, too, which costs a third less than `poll`.
    asker = select.epoll()
    asker.register(fd, select.EPOLLIN)
    return asker.poll
