"""The second copy of a file on another disk or machine: receiving it, and making it the first.

Role: what is called by name: `receive`, the whole of a receiver process; `promote`; and what a
file is, `node`. The feeding is done by the processes that have the primary open (`_replication`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

from . import _files, _locks, _registry
from ._channel import describe
from ._copy import ROLE_NAMES, is_alive, lock_copy, read_role, role_of, write_role
from ._format import DEFAULT_SEGMENT_BYTES, FENCED, PRIMARY
from ._healing import ask
from ._opening import RECEIVER
from ._options import store_options
from ._paths import check_path, full_path, typed_errors
from ._receiver import serve
from ._recovery import recover_copy
from ._shared import IS_COPY, REPLICATION
from .errors import FencedError, StorageError
from .wal import Log, LogState, read_file_header

__all__ = ["Node", "node", "node_behind", "promote", "receive"]

logger = logging.getLogger("weclaw_embedded")


class Node(NamedTuple):
    """One file of a queue that has two."""

    path: str
    role: str
    """"primary", "copy", or "fenced": a copy was promoted over it."""
    epoch: int
    """Raised by each promotion."""
    alive: bool
    """Whether a process has it open: as a queue, or as the receiver of a copy."""
    queue: str
    """Which queue it is of: the same of a file and its copies, another of a backup."""


def node(path: str | os.PathLike[str]) -> Node:
    """What the file at `path` is. Opens it only to look; raises FileNotFoundError, NotAQueueError,
    FormatVersionError, CorruptError, StorageError.
    """
    name = full_path(path)
    header, role, _ = role_of(name)
    fd = _files.open_ro(name)
    try:
        return Node(name, ROLE_NAMES[role], header.epoch, is_alive(fd), header.store_id.hex())
    finally:
        _files.close(fd)


def node_behind(command: Sequence[str], timeout: float = 5.0) -> Node:
    """The same of the file behind a command, as `replica=[…]` names it: the command is run and
    asked, for `timeout` seconds. Raises StorageError when it does not answer, FileNotFoundError
    when it has no file.
    """
    address = tuple(command)
    state = ask(address, timeout)
    if not state.exists:
        raise FileNotFoundError(f"there is no file behind {describe(address)}")
    role = ROLE_NAMES[state.role]
    return Node(describe(address), role, state.epoch, state.is_alive, state.store_id.hex())


def receive(path: str | os.PathLike[str], stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Be the receiver of the copy at `path`: read the stream from `stdin`, answer on `stdout`.

    Returns when the stream ends: 0, or 1 when it was refused. Both must be open files.
    """
    # The file itself, so that a link to another disk is not replaced by a file on this one.
    return serve(os.path.realpath(full_path(path)), stdin, stdout)


def promote(path: str | os.PathLike[str]) -> int:
    """Make the copy at `path` a primary without a replica; returns its new epoch.

    Raises LockedError while a receiver still writes it or a process has it open as a queue, and
    StorageError when it is no copy, FencedError when its own copy was promoted over it: nothing was
    changed then. Once this has returned the primary it was a copy of is fenced off at its next
    contact. Interrupted in the middle, call it again.
    """
    name = os.path.realpath(full_path(path))
    with typed_errors(name):
        check_path(name)
        return _promote(name)


def _promote(name: str) -> int:
    try:
        fd = _files.open_rw(name)
    except FileNotFoundError:  # said only where it is known
        raise StorageError(
            f"there is no file at {name}; nothing was changed; check the path"
        ) from None
    try:
        header = read_file_header(fd, name)
        lock_copy(fd, name, 0.0)
        role, fenced_by = read_role(fd, header)
        if role == PRIMARY:
            raise StorageError(
                f"{name} is no copy but a queue in its own right; nothing was changed; there is "
                "nothing to promote: use it, or, if it can't be opened, restore it"
            )
        if role == FENCED:
            # Else both would take puts, each as the one that counts.
            raise FencedError(
                f"{name} is no copy: its own copy was promoted and is in its place (epoch "
                f"{fenced_by}, this file has {header.epoch}); nothing was changed; go on with the "
                "promoted file; should that be lost for good, `weclawctl backup` makes a queue of "
                "its own of what is here"
            )
        log = Log(fd, header, LogState())
        recover_copy(log)
        # The epoch first: from here on the old primary is refused, whatever happens to us.
        epoch = log.write_header(epoch=header.epoch + 1).epoch
        # Shared, as those hold it who have a queue open: no receiver comes in between.
        _locks.try_lock(fd, RECEIVER, False)
        _forget_replica(name)
        # Last: one who finds this undone promotes it again, and the copy's own address, which the
        # log has from its primary, is never taken for that of a replica.
        write_role(fd, header, PRIMARY)
    finally:
        _files.close(fd)
    logger.info("%s was promoted: it is a primary now, with epoch %d", name, epoch)
    return epoch


def _forget_replica(path: str) -> None:
    """Record in the file that it has no replica."""
    engine = _registry.acquire(path, None, DEFAULT_SEGMENT_BYTES)
    try:
        engine.page.words[REPLICATION] &= ~IS_COPY
        engine.adopt(store_options({"replica": False}), "promote")
        engine.flush()
    finally:
        _registry.release(engine)


def main() -> None:
    """Be the receiver that `replica=PATH` starts; the path is the first argument."""
    # Whatever prints must not print into the stream.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    sys.exit(receive(sys.argv[1], sys.stdin.buffer, out))


if __name__ == "__main__":
    main()
