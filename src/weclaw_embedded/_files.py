"""The only door to the operating system's files: read, write, sync.

Everything that is easy to get wrong about a file is dealt with in here, so that it is never the
caller's business: short reads and writes, interrupted calls, buffers past IOV_MAX, F_FULLFSYNC,
the sync of a directory after a name changed in it, and the several ways of saying "full".

Invariants:

* A full disk, quota or file size limit is `DiskFullError`, which says that nothing has happened;
  every other failure is the plain `OSError`, and what that means (a store that has failed) is for
  the layer above to say.  A sync that fails is never the first kind, whatever its number: bytes
  that were written have not reached the disk.
* Call these as `_files.write_at(...)`: tests put doubles in their place, to fill the disk, fail
  a sync or lose what wasn't synced.

It must not know what is in the files.  Their locks are `_locks`', their names `_names`'.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from .errors import DiskFullError

__all__ = [
    "FULL",
    "Bytes",
    "allocate",
    "begin_sync",
    "close",
    "drop_cache",
    "duplicate",
    "has_hole",
    "libc",
    "may_write",
    "name_of",
    "open_ro",
    "open_rw",
    "punch",
    "read_all",
    "read_around",
    "read_at",
    "room_bytes",
    "size",
    "sync_all",
    "sync_data",
    "sync_dir",
    "truncate",
    "write_at",
    "write_pipe",
    "zero_fill",
]

Bytes: TypeAlias = bytes | bytearray | memoryview

logger = logging.getLogger("weclaw_embedded")

# Every way of the system to say that there is no room.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_IOV_MAX = 1024
_PAGE = 4096  # what a device fails to read, it fails to read as a page
_UNREADABLE = b"\xff"
_ZEROS = bytes(1 << 20)


def _fail(error: OSError, what: str, fd: int) -> NoReturn:
    """Raise DiskFullError for every way of saying full, and `error` itself for the rest."""
    if error.errno in FULL:
        limit = (
            "the limit on the size of files is reached"
            if error.errno == errno.EFBIG
            else "the disk or the quota is full"
        )
        raise DiskFullError(
            f"there is no room for more in {name_of(fd)}: {limit} ({error.strerror}, {what}); "
            "nothing was put or changed, and what the file held is still there; make room and try "
            "again"
        ) from error
    raise error


def name_of(fd: int) -> str:
    """The name of an open file, for messages."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return f"descriptor {fd}"


# Opening ------------------------------------------------------------------------------------


def may_write(path: str) -> bool:
    """Whether the file may be read and written."""
    # By who opens it, where that can be asked, and not by who has begun the process.
    effective = os.access in os.supports_effective_ids
    return os.access(path, os.R_OK | os.W_OK, effective_ids=effective)


def open_rw(path: str) -> int:
    """Open an existing file to read and write; the descriptor isn't inherited."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def open_ro(path: str) -> int:
    """Open an existing file to read; the descriptor isn't inherited."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def duplicate(fd: int) -> int:
    """Another descriptor of the same open file; it isn't inherited."""
    return os.dup(fd)


# Closes a descriptor and with it releases its locks. The system's own, with nothing around it:
# Ctrl-C is noticed where a function of ours begins, and would leave open what was to be closed.
close = os.close


# Reading and writing ------------------------------------------------------------------------


def read_at(fd: int, n: int, offset: int) -> bytes:
    """Read `n` bytes at `offset`; fewer only where the file ends. Raises OSError."""
    data = os.pread(fd, n, offset)
    if len(data) == n or not data:
        return data
    pieces = [data]
    got = len(data)
    while got < n:
        data = os.pread(fd, n - got, offset + got)
        if not data:
            break
        pieces.append(data)
        got += len(data)
    return b"".join(pieces)


def read_around(fd: int, n: int, offset: int) -> tuple[bytes, list[tuple[int, int]]]:
    """`read_at`, and (begin, end) of each place that the device can't read.

    What stands there comes as bytes which are neither valid nor zero, so that what stands around
    it is read. Whether such a place is damage or a moment's failure is not known in here.
    """
    try:
        return read_at(fd, n, offset), []
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    half = offset + n // 2
    half -= half % _PAGE
    if half <= offset:
        half += _PAGE
    if half < offset + n:
        first, unread = read_around(fd, half - offset, offset)
        if len(first) < half - offset:
            return first, unread
        second, more = read_around(fd, offset + n - half, half)
        return first + second, unread + more
    there = max(0, min(n, size(fd) - offset))
    if not there:
        return b"", []
    logger.warning("%s: %d bytes at %d can't be read (EIO)", name_of(fd), there, offset)
    return _UNREADABLE * there, [(offset, offset + there)]


def read_all(fd: int) -> bytes:
    """Read what a non-blocking descriptor has to say now."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return b""


def write_at(fd: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Write all of `buffers`, one after the other, at `offset`; return how many bytes that was.

    Raises DiskFullError when there is no room, OSError otherwise; part may have been written.
    """
    try:
        if len(buffers) == 1:
            buffer = buffers[0]
            written = os.pwrite(fd, buffer, offset)
            if written == len(buffer):
                return written
        else:
            written = 0
        return _write_rest(fd, buffers, offset, written)
    except OSError as error:
        _fail(error, "writing", fd)


def _write_rest(fd: int, buffers: Sequence[Bytes], offset: int, written: int) -> int:
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    total = sum(len(view) for view in views)
    first = 0
    skip = written  # bytes of views[first:] that are written already
    while True:
        while first < len(views) and skip >= len(views[first]):
            skip -= len(views[first])
            first += 1
        if first == len(views):
            return total
        batch = views[first : first + _IOV_MAX]
        if skip:
            batch[0] = batch[0][skip:]
        got = os.pwritev(fd, batch, offset + written)
        if got == 0:
            raise OSError(errno.EIO, "a write of some bytes wrote none")
        written += got
        skip += got


# The bare one that CPython has underneath: what is in front of it makes an enumeration of the
# answer, which costs as much as the write.
_handler_of: Callable[[int], object] = getattr(signal, "_signal", signal).getsignal


def write_pipe(fd: int, data: Bytes) -> int:
    """Write as much as goes, once. When nobody reads any more that is BrokenPipeError and no
    signal, whatever the program has chosen for SIGPIPE.
    """
    if _handler_of(signal.SIGPIPE) == signal.SIG_IGN:  # as Python begins
        return os.write(fd, data)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))
        return os.write(fd, data)
    except BrokenPipeError:
        # It came for this thread and waits: it must be gone before it is let through again.
        if signal.SIGPIPE in signal.sigpending():
            signal.sigwait((signal.SIGPIPE,))
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def zero_fill(fd: int, offset: int, n: int) -> None:
    """Fill a range with real zeros, so that writing it later changes no metadata.

    When that fails while it extends the file, the file gets its old size back.
    """
    before = os.fstat(fd).st_size
    done = 0
    try:
        while done < n:
            step = min(n - done, len(_ZEROS))
            chunk = _ZEROS if step == len(_ZEROS) else memoryview(_ZEROS)[:step]
            done += os.pwrite(fd, chunk, offset + done)
    except BaseException as error:
        if offset + n > before:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, before)
        if isinstance(error, OSError):
            _fail(error, "filling with zeros", fd)
        raise


def allocate(fd: int, offset: int, n: int) -> None:
    """Take the space of a range from the file system without writing it; it reads as it did, as
    zeros past the end.  Where there is no such call what lies past the end is filled with zeros.

    Raises DiskFullError; a file that was to grow has its old size then.
    """
    before = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, offset, n)
    except AttributeError:  # macOS
        if offset + n > before:
            zero_fill(fd, max(offset, before), offset + n - max(offset, before))
    except OSError as error:
        if offset + n > before:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, before)
        _fail(error, "taking space", fd)


def room_bytes(fd: int) -> int:
    """How many bytes the file may still grow by: what its file system has free for us, and what
    the limit on the size of files leaves.
    """
    found = os.fstatvfs(fd)
    room = found.f_bavail * found.f_frsize
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        room = min(room, max(0, limit - os.fstat(fd).st_size))
    return room


def libc(name: str) -> Callable[..., int] | None:
    """A function of the C library that Python doesn't offer; None where there is none."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    return function


def punch(fd: int, offset: int, n: int) -> bool:
    """Give the space of a range back to the file system; it reads as zeros afterwards.

    False where the file system can't.
    """
    if sys.platform != "linux":
        return False
    keep_size_punch_hole = 0x01 | 0x02
    fallocate = libc("fallocate64") or libc("fallocate")
    if fallocate is None:
        return False
    wide = ctypes.c_longlong
    return bool(fallocate(fd, keep_size_punch_hole, wide(offset), wide(n)) == 0)


def truncate(fd: int, n: int) -> None:
    """Set the file's size."""
    try:
        os.ftruncate(fd, n)
    except OSError as error:
        _fail(error, "setting the size", fd)


def size(fd: int) -> int:
    """The file's size in bytes."""
    return os.fstat(fd).st_size


def has_hole(fd: int, offset: int, n: int) -> bool:
    """Whether a part of the range has no space of its own yet; True when that can't be told."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) < offset + n
    except (OSError, AttributeError):
        return True


# Durability ---------------------------------------------------------------------------------

# A sync can fail with ENOSPC or EDQUOT, too (a thin volume, btrfs), and by then the kernel takes
# the pages for clean: who made room and tried again would be told of a success that is none.

if sys.platform == "darwin":

    def sync_data(fd: int) -> None:
        """Return when the file's contents are on stable storage."""
        # fsync() there only hands the bytes to the drive.
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
            os.fsync(fd)

    sync_all = sync_data

else:

    def sync_data(fd: int) -> None:
        """Return when the file's contents are on stable storage. Raises OSError."""
        os.fdatasync(fd)

    def sync_all(fd: int) -> None:
        """Return when the file's contents and attributes are on stable storage. Raises OSError."""
        os.fsync(fd)


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    call = libc("sync_file_range") if sys.platform == "linux" else None
    if call is not None:
        wide = ctypes.c_longlong
        call.argtypes = [ctypes.c_int, wide, wide, ctypes.c_uint]  # type: ignore[attr-defined]
    return call


def begin_sync(fd: int) -> None:
    """Have the system begin to write to the disk what the next `sync_data` has to, and wait for
    nothing.  It promises nothing: where it can't, or the write fails, that sync does it, or says
    so.
    """
    call = _sync_file_range()
    if call is not None:
        just_write = 0x02
        call(fd, 0, 0, just_write)


def sync_dir(path: str) -> None:
    """Return when the names in a directory are on stable storage."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems have nothing to sync there and say so.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(fd)


def drop_cache(fd: int) -> None:
    """Ask the kernel to forget its cached copy of the file.

    So that the next read comes from the disk.  It forgets only what is clean: sync first.
    """
    if sys.platform == "linux":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
