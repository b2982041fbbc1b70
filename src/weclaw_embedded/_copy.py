"""A replica's copy of a queue file: the same frames at the same offsets, written from outside.

Role: the file as the receiver has it: found and cut where it is torn, written segment by segment
and byte by byte, let go of segments as the primary did, durable when it says so. It also builds
the file that a lost primary is restored to.

Invariants:

* What is written follows exactly what is there; nothing below the end is ever changed.
* A copy that is made (anew) is a temporary file beside its place until all the primary had is in
  it and synced. Only then does it take the place, so an older copy stays whole until then.
* Nothing is confirmed that stands in a file which has lost its name.
* Whoever has a `Copy` to write holds the RECEIVER lock of its file; those who have the file open as
  a queue hold it shared.

It must not know where the bytes come from.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final

from . import _files, _locks, _names
from ._format import (
    COPY,
    FENCED,
    HEAD_RECORD_AT,
    HEADER_BYTES,
    PRIMARY,
    ROLE_AT,
    SLOT_BYTES,
    FileHeader,
    pack_head,
    pack_header,
    pack_role,
    pack_slot,
    unpack_role,
)
from ._log_end import is_whole, look_at_copy
from ._opening import IN_USE, RECEIVER
from ._recovery import recover_copy
from ._stream import ALIVE, DAMAGED, MAX_DATA, UNSURE_BYTES, Hello, State, StreamError
from ._watch import asker_of, watch_names
from .errors import CorruptError, LockedError, StorageError
from .wal import ANNOUNCED, COMMIT, HEAD, LAST, TAIL, Log, LogState, read_file_header

_NO_STORE: Final = bytes(16)


def lock_copy(fd: int, path: str, patience_s: float) -> None:
    """Take the RECEIVER lock for the caller alone. Raises LockedError, also when the file of this
    name is another by then: whoever had the lock may have made the copy anew.
    """
    until_s = time.monotonic() + patience_s
    while not _locks.try_lock(fd, RECEIVER, True):
        if time.monotonic() >= until_s:
            raise LockedError(
                f"{path} is in use: a replica's receiver writes it, or it is open as a queue; "
                "nothing was changed; end that first"
            )
        time.sleep(0.02)
    if not is_in_place(fd, path):
        raise LockedError(
            f"{path} was moved, deleted or made anew just now; nothing was changed; try again"
        )


def is_in_place(fd: int, path: str) -> bool:
    """Whether this name is still that of the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def read_role(fd: int, header: FileHeader) -> tuple[int, int]:
    """(role, epoch) of an open file."""
    return unpack_role(_files.read_at(fd, HEADER_BYTES, 0), header.store_id)


def write_role(fd: int, header: FileHeader, role: int, epoch: int = 0) -> None:
    """Record what the file is, durably."""
    _files.write_at(fd, [pack_role(role, epoch, header.store_id)], ROLE_AT)
    _files.sync_data(fd)


def check_is_file(path: str) -> None:
    """Raise StorageError for a folder, a device or a pipe: opening one may block or do harm. A
    missing file is none of these.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise StorageError(
            f"a part of {path} is a file, not a folder; it was not touched; check the path"
        ) from None
    if not stat.S_ISREG(mode):
        raise StorageError(f"{path} is not a file; it was not touched; name another place")


def is_alive(fd: int) -> bool:
    """Whether another descriptor than this holds the file open, as a queue or as a receiver."""
    return _locks.is_locked(fd, IN_USE) or _locks.is_locked(fd, RECEIVER)


def is_same_file(path: str, other: str) -> bool:
    """Whether both names are one file's, by whatever links. A missing file is the same as none but
    its own name.
    """
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


class Copy:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        path: str,
        fd: int,
        header: FileHeader,
        temporary: str | None,
        *,
        readonly: bool = False,
    ) -> None:
        self.path = path
        self.fd = fd
        self.header = header
        self.log = Log(fd, header, LogState(), readonly=readonly)
        self.temporary = temporary  # the name it has until it takes its place
        self.empty = temporary is not None  # no segment yet
        self.old: Copy | None = None  # what it will take the place of
        self._prepared = False  # for the next segment
        self._watch_fd = -1
        # Asks, with 0 (ms to wait), whether it may have lost its name; None: not watched yet.
        self._has_moved: Callable[[int], object] | None = None

    @classmethod
    def open(cls, path: str, patience_s: float) -> Copy | None:
        """The copy at `path`, found and cut where it is torn; None if there is none, or a file of
        no bytes. Raises LockedError, and what reading a queue file raises.
        """
        try:
            fd = _files.open_rw(path)
        except FileNotFoundError:
            return None
        try:
            if not _files.size(fd):
                _files.close(fd)
                return None
            header = read_file_header(fd, path)
            copy = cls(path, fd, header, None)
            lock_copy(fd, path, patience_s)
            recover_copy(copy.log)
        except BaseException:
            with contextlib.suppress(OSError):
                _files.close(fd)
            raise
        return copy

    @classmethod
    def look(cls, path: str) -> Copy | None:
        """The copy at `path`, only to be read, whoever may be writing it; nothing is locked or
        changed. None if there is none, or a file of no bytes.
        """
        try:
            fd = _files.open_ro(path)
        except FileNotFoundError:
            return None
        try:
            if not _files.size(fd):
                _files.close(fd)
                return None
            copy = cls(path, fd, read_file_header(fd, path), None, readonly=True)
            copy.look_again()
        except BaseException:
            with contextlib.suppress(OSError):
                _files.close(fd)
            raise
        return copy

    @classmethod
    def create(cls, path: str, hello: Hello, role: int, old: Copy | None = None) -> Copy:
        """Begin a new copy, to take its place (that of `old`) with `finish`."""
        directory, name = os.path.split(path)
        temporary = os.path.join(directory or ".", f".{name}.receiving")
        fd = _begin(temporary)
        try:
            header = FileHeader(
                hello.segment_bytes, hello.store_id, hello.epoch, 1, hello.created_us
            )
            block = bytearray(pack_header(header))
            record = pack_role(role, 0, header.store_id)
            block[ROLE_AT : ROLE_AT + len(record)] = record
            _files.write_at(fd, [bytes(block)], 0)
        except BaseException:
            _files.close(fd)
            raise
        copy = cls(path, fd, header, temporary)
        copy.old = old
        return copy

    def close(self) -> None:
        """Close it; one that has not taken its place is gone."""
        if self.temporary is not None:
            _names.unlink(self.temporary)
        _files.close(self.fd)
        if self._watch_fd >= 0:
            _files.close(self._watch_fd)
        if self.old is not None:
            self.old.close()

    def look_again(self) -> None:
        """Find where it ends, without changing anything."""
        look_at_copy(self.log)

    # -- what it has -----------------------------------------------------------------------------

    @property
    def tail(self) -> int:
        """Where it goes on."""
        return int(self.log.state.words[TAIL])

    def state(self, *, check: bool = False) -> State:
        """What the primary must know to go on, or to refuse; with `check`, which reads the last
        8 MiB and must be the only one to use the file, also whether it is damaged.
        """
        header = self.header
        flags = ALIVE if is_alive(self.fd) else 0
        if check and not is_whole(self.log, self.tail, UNSURE_BYTES):
            # Of what was not synced when the power failed a later part may be there, and not an
            # earlier one. To go on behind that would be to confirm what is not here.
            flags |= DAMAGED
        last, end, crc = self.last_frame()
        return State(
            header.store_id,
            header.segment_bytes,
            header.epoch,
            header.created_us,
            read_role(self.fd, header)[0],
            flags,
            self.log.state.words[HEAD],
            self.tail,
            last,
            end,
            crc,
        )

    def last_frame(self) -> tuple[int, int, int]:
        """(offset, end, checksum) of the last frame; zeros when there is none."""
        found = self.log.find_last(self.tail)
        if found is None:
            return 0, 0, 0
        return found.offset, found.end, self.log.checksum(found.offset)

    def segments(self) -> Iterator[tuple[int, bytes, int]]:
        """(segment, its packed header, where its frames end) of each that is kept."""
        log = self.log
        for segment in log.segments():
            slot = log.read_slot(log.slot_of(segment))
            if slot is not None:
                end = self.tail if segment == self.tail >> log.bits else log.frames_end(segment)
                yield segment, pack_slot(slot, self.header.store_id), end or log.limit(segment)

    def read(self, offset: int, end: int) -> bytes:
        """Some of the log's bytes from `offset` on, of one segment, as they are."""
        shift, _ = self.log.place(offset >> self.log.bits)
        # What can't be read must not come to the other side as something else.
        return _files.read_at(self.fd, min(MAX_DATA, end - offset), offset + shift)

    def read_slot(self, segment: int) -> bytes:
        """The packed header of a segment; nothing if it has none."""
        log = self.log
        try:
            log.place(segment)
            slot = log.read_slot(log.slot_of(segment))
        except (LookupError, CorruptError):
            return b""
        return b"" if slot is None else pack_slot(slot, self.header.store_id)

    def read_kept(self, offset: int, n: int) -> bytes:
        """At most `n` of the log's bytes from `offset` on, as far as the copy has them in this
        segment.
        """
        try:
            end = min(offset + n, self.tail, self.log.limit(offset >> self.log.bits))
            return self.read(offset, end) if end > offset else b""
        except (LookupError, CorruptError):
            return b""

    # -- writing ---------------------------------------------------------------------------------

    def go_on(self, epoch: int) -> None:
        """Take it for a copy of the primary with this epoch."""
        if read_role(self.fd, self.header)[0] != COPY:
            write_role(self.fd, self.header, COPY)
        if epoch > self.header.epoch:
            self.header = self.log.write_header(epoch=epoch)

    def begin_segment(self, packed: bytes) -> None:
        """A further segment begins, with this header."""
        log = self.log
        words = log.state.words
        header = log.unpack_slot(packed)
        if header is None or not (self.empty or header.segment > words[LAST]):
            raise StreamError("a segment began that can't follow what the copy has")
        number = header.segment
        if not self.empty and number == words[LAST] + 1:
            # Where segments are missing in the primary, so they are here, and nothing can be said.
            salt = log.place(words[LAST])[1]
            if (header.prev_end, header.prev_salt) != (words[TAIL], salt):
                raise StreamError("a segment began before all of the one before it had come")
        if self.empty:
            words[HEAD] = words[ANNOUNCED] = number
            _files.write_at(self.fd, [pack_head(number, self.header.store_id)], HEAD_RECORD_AT)
            self.empty = False
        slot = log.take_slot(spare=True)
        for at in reversed(log.header_positions(slot)):
            _files.write_at(self.fd, [packed], at)
        log.state.slots[slot] = number + 1
        log.taken.discard(slot)
        self._prepared = False
        words[LAST] = number
        words[TAIL] = (number << log.bits) + SLOT_BYTES
        log.forget()
        log.count_spares()

    def write(self, offset: int, data: memoryview) -> None:
        """The log's next bytes."""
        log = self.log
        words = log.state.words
        segment = offset >> log.bits
        end = offset + len(data)
        if self.empty or offset != words[TAIL] or end > log.limit(segment):
            raise StreamError(f"bytes for offset {offset} came, but the copy ends elsewhere")
        _files.write_at(self.fd, (data,), offset + log.place(segment)[0])
        words[TAIL] = end

    def sync(self) -> None:
        """All of it is on stable storage, and in its place, when this returns. Raises StorageError
        when its place is no longer its own.
        """
        _files.sync_data(self.fd)
        if self._may_have_moved() and not is_in_place(self.fd, self.temporary or self.path):
            # Else puts would be confirmed that nobody can find again.
            raise StorageError(
                f"{self.temporary or self.path} was moved, deleted or replaced while it was "
                "written; nothing is confirmed any more; it is looked for anew"
            )
        words = self.log.state.words
        words[COMMIT] = words[TAIL]
        if self.temporary is not None and not self.empty:
            self.finish()

    def _may_have_moved(self) -> bool:
        """Whether the system says so, or can't. To look each time would cost nearly a sync more:
        the write after a look makes the file system note its time.
        """
        if self._has_moved is None:
            self._watch_fd = watch_names([self.temporary or self.path])
            self._has_moved = asker_of(self._watch_fd)
            return True  # it may have been another one's name by then
        if not self._has_moved(0):
            return False
        if self._watch_fd >= 0:
            _files.read_all(self._watch_fd)
        return True

    def finish(self) -> None:
        """Take the place it was made for. The caller has synced."""
        assert self.temporary is not None, "it has its place"
        self.log.prepare_spare()
        _files.sync_all(self.fd)
        if self.old is None:
            try:
                _names.place(self.temporary, self.path)
            except FileExistsError:
                raise StorageError(
                    f"{self.path} came to be meanwhile; it was left alone; choose another place"
                ) from None
        else:
            _names.replace(self.temporary, self.path)
            self.old.close()
            self.old = None
        self.temporary = None

    def prepare(self) -> None:
        """Have a zeroed slot ready, so that a segment begins without waiting for one."""
        if self._prepared or self.empty:
            return
        self._prepared = True
        if not self.log.count_spares():
            self.log.prepare_spare()
            _files.sync_data(self.fd)

    def let_go(self, head: int) -> None:
        """Segments before `head` are gone; their space is used again or given back."""
        words = self.log.state.words
        if self.empty or not words[HEAD] < head <= words[LAST]:
            return
        self.sync()
        self.log.free(head - 1, words[TAIL])
        announced = self.log.announce()
        _files.sync_data(self.fd)
        self.log.settled(announced)
        self.log.trim(1)


def _begin(temporary: str) -> int:
    """An empty file of this name, locked by whoever makes a copy."""
    while True:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock_copy(fd, temporary, 0.0)
            if os.fstat(fd).st_nlink == 1:
                _files.truncate(fd, 0)
                return fd
            # Whoever made it died when it had just got its place, and is not to be written to.
            _names.unlink(temporary)
        except BaseException:
            _files.close(fd)
            raise
        _files.close(fd)


def role_of(path: str) -> tuple[FileHeader, int, int]:
    """(header, role, epoch of the role record) of a queue file, without opening it as one."""
    check_is_file(path)
    fd = _files.open_ro(path)
    try:
        header = read_file_header(fd, path)
        return (header, *read_role(fd, header))
    finally:
        _files.close(fd)


ROLE_NAMES: Final = {PRIMARY: "primary", COPY: "copy", FENCED: "fenced"}
EMPTY_STATE: Final = State(_NO_STORE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
