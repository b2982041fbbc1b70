"""What stands at a path, before it is opened: what can be no queue is refused, a new one is made.

Role: looks at names and kinds of files, and says in our words what the system says in its own. Who
opens a file, to work with it, to look at it, as a copy or to restore it, asks here first.

Invariant: nothing is touched but by `create`, which replaces nothing.

It must not know what is done with an open file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from typing import Final

from . import _clock, _disk, _files, _lost_header
from ._format import FileHeader
from ._scratch import PAGE_NAME, scratch_of
from ._shared import SharedPage
from .errors import (
    CorruptError,
    DiskFullError,
    LockedError,
    NotAQueueError,
    StorageError,
    StoreFailedError,
)
from .wal import TAIL, Log, read_file_header

logger = logging.getLogger("weclaw_embedded")

_MASK: Final = (1 << 64) - 1
# A log that ends before that holds no message.
_EMPTY_BYTES: Final = 128


@contextlib.contextmanager
def typed_errors(path: str) -> Iterator[None]:
    """Errors of the disk while a file is opened as those that users are told of."""
    try:
        yield
    except OSError as error:
        if error.errno in _files.FULL:
            raise DiskFullError(
                f"opening {path} failed: {error.strerror}; nothing was lost; make room and open it "
                "again"
            ) from error
        if error.errno == errno.EIO:
            raise StoreFailedError(
                f"opening {path} failed: {error.strerror}; what was confirmed is safe if the disk "
                "has kept it; look at the disk, and open it again"
            ) from error
        advice = "open it again when that is mended"
        if error.errno == errno.ENAMETOOLONG:  # and what is made beside it has a longer one
            advice = "choose a name of at most 200 bytes"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "open it as its owner, or, if it may be read, with readonly=True"
            if error.errno == errno.EROFS:
                advice = "if it is to be read there, open it with readonly=True"
            elif _files.may_write(path):
                # Not the file, then, but what belongs beside it.
                advice = (
                    f"the file itself can be written, but not its scratch folder {scratch_of(path)}"
                    ", or that can't be made beside it: do it as who may write there, or open it "
                    "with readonly=True"
                )
            if _is_missing(path):
                advice = (
                    "there is no such file, and none can be made in its folder: choose another "
                    "place, or do it as who may write there"
                )
        raise StorageError(
            f"opening {path} failed: {error.strerror or error}; nothing was changed; {advice}"
        ) from error


def _is_missing(path: str) -> bool:
    """Whether there certainly is no such file: a folder that may not be searched says nothing."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def name_of(path: str | os.PathLike[str]) -> str:
    """A path as it was given. Raises ValueError for what can be none."""
    name = os.fsdecode(path)
    if not name:
        raise ValueError("the path is empty; nothing was opened or made; name a file")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        is_path = False
    else:
        is_path = "\0" not in name
    if not is_path:
        raise ValueError(f"{name!r} is no path; nothing was opened or made; name a file")
    return name


def names_folder(name: str) -> bool:
    """Whether it can only be a folder's, which the absolute path would not show any more."""
    return os.path.basename(name) in ("", ".", "..")


def full_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a file, there or not. Raises as `name_of`, and NotAQueueError where a
    folder is named.
    """
    name = name_of(path)
    if names_folder(name):
        raise NotAQueueError(
            f"{name} is the name of a folder, and a queue is a file; nothing was opened or made; "
            "check the path"
        )
    return os.path.abspath(name)


def check_path(path: str) -> None:
    """Refuse what can be no queue, before anything is made or waits for it."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        lacks = lacks_folder(path)
        if lacks is not None:
            raise StorageError(
                f"{lacks}, so there can be no queue {path}; nothing was made; make the folder "
                "first, or check the path"
            ) from None
    except NotADirectoryError:
        raise StorageError(
            f"a part of {path} is a file, not a folder; nothing was made; check the path"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        raise StorageError(
            f"{path} can be no file: {error.strerror}; nothing was made; check the path"
        ) from None
    else:
        if not stat.S_ISREG(mode):
            raise NotAQueueError(
                f"{path} is {_kind(mode)}, and a queue is a file; it wasn't touched; check the path"
            )


def lacks_folder(path: str) -> str | None:
    """What a path lacks at which no file is: the words for a folder that is not there, or None."""
    parent = os.path.dirname(path) or "."
    return None if os.path.isdir(parent) else f"the folder {parent} does not exist"


def _kind(mode: int) -> str:
    for check, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if check(mode):
            return name
    return "a device"


def refuse_left(path: str) -> None:
    """Refuse a path whose file was taken away from processes that still have it open: they would go
    on in one file, and the caller in another.
    """
    user = SharedPage.user_of(os.path.join(scratch_of(path), PAGE_NAME))
    there = current_identity(path)
    if user is not None and user != (None if there is None else tuple(n & _MASK for n in there)):
        raise LockedError(
            f"{path} was moved, deleted or replaced while processes have it open; what they "
            "confirmed is in the file they have, and nothing was made or touched here; move that "
            "one back, and open it again; if it has no name any more it goes when they close: save "
            "it first, with the backup() of a store that one of them has open"
        )


def tell_of_another(path: str) -> None:
    """Say in the log that a file is made where the scratch folder knows of one that held something:
    it may have been deleted by mistake.
    """
    try:
        page = SharedPage(os.path.join(scratch_of(path), PAGE_NAME), writable=False)
    except (OSError, ValueError):
        return
    tail = page.words[TAIL]
    page.close()
    if tail > _EMPTY_BYTES:
        logger.warning(
            "%s is missing or empty and is made anew, though its scratch folder is that of a queue "
            "which held something (its log ended at offset %d); if it was moved or deleted by "
            "mistake, close this one, and put that one, its backup or its replica's copy in its "
            "place",
            path,
            tail,
        )


def refuse_network(path: str) -> None:
    if _disk.is_network_file_system(os.path.dirname(path) or "."):
        raise StorageError(
            f"{path} is on a network file system, where locks and shared memory do not hold; "
            "nothing was touched; use a local disk, or open it with readonly=True"
        )


def is_new(path: str) -> bool:
    """True for a missing or an empty file."""
    try:
        return os.stat(path).st_size == 0
    except (FileNotFoundError, NotADirectoryError):
        return True


def create(path: str, segment_bytes: int) -> None:
    """Make a new queue file whole; somebody else's, if he was first, is left alone."""
    with contextlib.suppress(FileExistsError):
        Log.create(
            path,
            segment_bytes=segment_bytes,
            store_id=secrets.token_bytes(16),
            created_us=_clock.wall_us(),
        )


def find_header(fd: int, path: str, to_write: bool) -> FileHeader:
    """`read_file_header`; where that is lost, what it must have been. To write, only where the
    scratch folder knows whose file it was: else it may be a replica's copy.
    """
    try:
        return read_file_header(fd, path)
    except (NotAQueueError, CorruptError):
        store_id = SharedPage.store_id_at(os.path.join(scratch_of(path), PAGE_NAME))
        header = _lost_header.rebuilt(fd, store_id)
        if header is None:
            raise
        if to_write and header.store_id != store_id:
            raise CorruptError(
                0,
                "the header block is lost",
                f"the first 4096 bytes of {path} are lost, and what they said of it besides what "
                "it holds: whether it was a queue or a replica's copy; nothing was touched; all "
                "else may be there: open it with readonly=True, or make a queue of what it holds "
                "by `weclawctl backup --readonly` to another name",
            ) from None
        return header


def current_identity(path: str) -> tuple[int, int, int] | None:
    try:
        return _disk.identity(path)
    except OSError:
        return None
