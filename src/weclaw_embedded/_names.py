"""Names of files: made whole, replaced, removed, each durably where that is promised.

Role: the third part of the door to the operating system's files, beside `_files` and `_locks`: what
changes a directory, and whose a file is.

Invariants:

* A new file appears under its name whole and durable, or not at all; nobody's file is replaced
  that was not meant.
* A full disk is `DiskFullError`, which says that nothing was made or replaced; it names the file
  that was wanted, never the temporary one.
* Call these as `_names.create_whole(...)`: tests put doubles in their place.

It must not know what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from typing import NoReturn

from . import _files, _locks
from .errors import DiskFullError

__all__ = [
    "create_whole",
    "make_beside",
    "make_fifo",
    "match_owner_and_mode",
    "place",
    "remove_folder",
    "replace",
    "unlink",
]

_STALE_TEMPORARY_S = 3600.0


def create_whole(
    path: str,
    content_writer: Callable[[int], object],
    mode: int | None = 0o600,
    *,
    replace_empty: bool = False,
    replace_file: bool = False,
) -> None:
    """Make a new file that appears under its name whole and durable, or not at all.

    `content_writer` is called with the descriptor of a temporary file beside it.  Without a mode
    it has that of the process's other new files.  Raises FileExistsError when the name is taken;
    with `replace_empty` a file of no bytes is not in the way, with `replace_file` no regular file.
    """
    directory, name = os.path.split(path)
    directory = directory or "."
    _remove_stale_temporaries(directory, name)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, 0o666 if mode is None else mode)
    except OSError as error:
        if error.errno in _files.FULL:
            _fail_to_create(error, path)
        # Of the file that was wanted, not of a name that nobody knows.
        raise OSError(error.errno, error.strerror, path) from error
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        content_writer(fd)
        _files.sync_all(fd)
        if replace_file:
            replace(temporary, path)
        elif not (replace_empty and _replace_empty_file(temporary, path)):
            _link_into_place(temporary, path)
        _files.sync_dir(directory)
    except OSError as error:
        if error.errno in _files.FULL:
            _fail_to_create(error, path)
        raise
    except DiskFullError as error:  # of the temporary file, a name that nobody knows
        _fail_to_create(error, path)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _replace_empty_file(temporary: str, path: str) -> bool:
    """Move over a file of no bytes, if that is what has the name."""
    try:
        fd = _files.open_rw(path)
    except FileNotFoundError:
        return False
    try:
        # Two creators may have found it empty.  Who comes second through this lock finds that
        # the name has another file, and must not replace that.
        _locks.lock(fd, 0, exclusive=True)
        ours, named = os.fstat(fd), os.stat(path)
        if not os.path.samestat(ours, named) or named.st_size or not stat.S_ISREG(named.st_mode):
            return False
        os.replace(temporary, path)
        return True
    finally:
        os.close(fd)


def _link_into_place(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    # No hard links here (FAT, some FUSE).  Claim the name, then move over our own claim: after
    # a crash between the two an empty file is left, which counts as new.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    os.replace(temporary, path)


def _remove_stale_temporaries(directory: str, name: str) -> None:
    """Remove what a creator that was killed left behind, long enough ago to be sure."""
    pattern = re.compile(re.escape(f".{name}.") + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory):
            if pattern.fullmatch(entry):
                leftover = os.path.join(directory, entry)
                with contextlib.suppress(OSError):
                    if time.time() - os.stat(leftover).st_mtime > _STALE_TEMPORARY_S:
                        os.unlink(leftover)


def place(source: str, path: str) -> None:
    """Give a file its name, durably, which nobody's file may have but one of no bytes: else raises
    FileExistsError. Whoever dies in between may leave it both names.
    """
    if not _replace_empty_file(source, path):
        _link_into_place(source, path)
        unlink(source)
    _files.sync_dir(os.path.dirname(path))


def replace(source: str, path: str) -> None:
    """Move a file over another's name, durably.

    Raises FileExistsError when that is no regular file's: root may move one over a device, which
    would then be gone for everybody.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "what has this name is no regular file", path)
    os.replace(source, path)
    _files.sync_dir(os.path.dirname(path))


def unlink(path: str) -> None:
    """Remove a name if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: str) -> None:
    """Remove a folder in which there are only files."""
    # By hand: Ctrl-C in `shutil.rmtree` makes that close a descriptor twice.
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)


def make_fifo(path: str, mode: int = 0o600) -> None:
    """Make a named pipe with exactly this mode."""
    os.mkfifo(path, mode)
    os.chmod(path, mode)


def make_beside(path: str, like: str | int) -> None:
    """Make an empty file with the owner and mode of ours, as far as we may, where nothing has that
    name; what has it stays as it is. Its owner can write it also where ours may only be read.
    """
    # By its descriptor from then on: a link put in its place meanwhile would be followed.
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            match_owner_and_mode(fd, like)
            os.chmod(fd, stat.S_IMODE(os.stat(fd).st_mode) | stat.S_IWUSR)
        finally:
            os.close(fd)


def match_owner_and_mode(path: str | int, like: str | int) -> None:
    """Give a file or directory beside ours the owner and mode of ours, as far as we may; both by
    their paths or descriptors.

    A directory can be entered by whoever can read the file.
    """
    ours = os.stat(like)
    have = os.stat(path)
    if (have.st_uid, have.st_gid) != (ours.st_uid, ours.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(path, ours.st_uid, ours.st_gid)
    mode = stat.S_IMODE(ours.st_mode) & 0o777
    if stat.S_ISDIR(have.st_mode):
        mode |= (mode & 0o444) >> 2
    if stat.S_IMODE(have.st_mode) != mode:
        with contextlib.suppress(PermissionError):
            os.chmod(path, mode)


def _fail_to_create(error: OSError | DiskFullError, path: str) -> NoReturn:
    cause = error if isinstance(error, OSError) else error.__cause__
    why = f" ({cause.strerror})" if isinstance(cause, OSError) else ""
    raise DiskFullError(
        f"there is no room for {path}{why}; nothing was made or replaced; make room, or choose "
        "another place"
    ) from error
