"""Opening a file: create it, attach to those who have it open, or recover it for all to come.

Role: everything that happens once for each process, before the first message moves. The order is
always the same: the file, its *in use* lock, the shared page, the log, the index, an owner slot.

Invariants:

* Whoever gets *in use* exclusively is alone, and is the only one who may make the scratch folder,
  recover the log, or delete the index. Everybody else holds it shared and finds these ready.
* The first opener believes the log and nothing else. The page gives it the commit point and a
  failure, both of which only make it more careful; the index is used when nothing below it can
  have been lost, and is deleted unopened otherwise (opening a torn one can end the process).

It must not know what messages are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from . import _clock, _disk, _files, _locks, _names
from ._format import HEADER_BYTES, PRIMARY, FileHeader, unpack_role
from ._index import Index
from ._paths import (
    check_path,
    create,
    current_identity,
    find_header,
    is_new,
    refuse_left,
    refuse_network,
    tell_of_another,
)
from ._rebuild import Rebuild
from ._records import MAX_TIME_US
from ._scratch import (
    INDEX_NAME,
    PAGE_NAME,
    believable_index,
    make_directory,
    new_index,
    read_clean_mark,
    remove_pipes,
    scratch_of,
)
from ._shared import (
    CLEAN_AT,
    DEAD_SEQ,
    FAILED,
    FIRST_SYNC,
    INDEX_BYTES,
    INDEX_SYNCED,
    INDEX_TIME,
    MAX_OWNERS,
    SYNC_HIGH,
    SharedPage,
)
from .errors import (
    DiskFullError,
    LockedError,
    StoreFailedError,
)
from .wal import COMMIT, HEAD, LAST, LAST_FRAME, READ_AGAIN, TAIL, Log, Recovery

# Bytes past the largest offset of the log, so that no lock ever covers data.
LOCKS_AT: Final = 1 << 62
IN_USE: Final = LOCKS_AT
WRITE: Final = LOCKS_AT + 1  # taken by `_locks.bound_lock` alone
RECEIVER: Final = LOCKS_AT + 2  # a replica's receiver and promote; shared: who has a queue open
FEEDER: Final = LOCKS_AT + 3  # whoever feeds this file's replica
OWNER: Final = LOCKS_AT + 16

# How long two who came at once try again before the scratch folder counts as deleted.
_PATIENCE_S: Final = 2.0


# Called with the open file, its header and the options that what can be read of it records; True
# when it has written what the log lacked.
Complete: TypeAlias = Callable[[int, FileHeader, Mapping[str, Any]], bool]


@dataclass
class Opened:
    """What a store needs to work; all of it is closed by the store."""

    path: str
    fd: int
    header: FileHeader
    directory: str
    page: SharedPage
    log: Log
    index: Index
    slot: int
    token: int
    recovery: Recovery | None  # of the first opener
    rebuild: bool  # the index is empty and must be folded from the log
    role: int = PRIMARY  # what the file says it is
    role_epoch: int = 0
    replica: object = None  # what the first handle names as the replica; False: none
    taken: bool = False  # by a store that closes it, or by nobody any more

    def give_up(self) -> None:
        """Close all of it, unless a store has taken it."""
        if not self.taken:
            self.taken = True
            self.page.close()
            self.index.close(sync=False)
            _files.close(self.fd)


def open_shared(
    path: str,
    segment_bytes: int | None,
    default_segment_bytes: int,
    complete: Complete | None = None,
) -> Opened:
    """Open `path` to read and write, making it if there is none or an empty one. `complete` may
    write what the file turns out to lack at its end.

    Blocks while another process recovers the file. Raises what contract 2 and 9 name.
    """
    check_path(path)
    refuse_network(path)
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        refuse_left(path)
        if is_new(path):
            tell_of_another(path)
            create(path, segment_bytes or default_segment_bytes)
            complete = None  # whoever made it has seen that there was nothing
        fd = _files.open_rw(path)
        try:
            opened = _open_fd(path, fd, segment_bytes, time.monotonic() > give_up_s, complete)
        except BaseException:
            _files.close(fd)
            raise
        if opened is not None:
            return opened
        # The name got another file meanwhile, or two came at once to a file whose first opener
        # had just died: begin again.
        _files.close(fd)
        time.sleep(random.uniform(0.001, 0.02))


def _open_fd(
    path: str, fd: int, segment_bytes: int | None, last_try: bool, complete: Complete | None
) -> Opened | None:
    header = find_header(fd, path, to_write=True)
    if segment_bytes is not None and segment_bytes != header.segment_bytes:
        raise ValueError(
            f"segment_bytes={segment_bytes} but {path} was made with {header.segment_bytes}; "
            "nothing was changed; leave it out"
        )
    if not _locks.try_lock(fd, RECEIVER, False):
        raise LockedError(
            f"{path} is a replica's copy and its receiver is writing it; nothing was changed; open "
            "the primary, or look at this with readonly=True"
        )
    first = _locks.try_lock(fd, IN_USE, True)
    if not first:
        _locks.lock(fd, IN_USE, False)
    if current_identity(path) != _disk.identity(fd):
        return None
    refuse_left(path)
    directory = scratch_of(path)
    page = None if first else attach_page(directory, fd, header)
    if page is not None and not page.words[FAILED]:
        return _attach(path, fd, header, directory, page)
    failed = page is not None
    if page is not None:
        page.close()
    # Made only by one who is alone: others may still work with what was here before.
    if not first:
        # Not the conversion of the shared lock, which two could wait for at once.
        _locks.unlock(fd, IN_USE)
        if not _locks.try_lock(fd, IN_USE, True):
            if failed:
                raise StoreFailedError(
                    f"a write or sync of {path} has failed and processes still have it open; what "
                    "was confirmed before is safe; open it again once all of them have closed"
                )
            if last_try:
                raise LockedError(_no_scratch_of_theirs(path, fd, directory))
            return None
    return _open_first(path, fd, header, directory, complete)


def _no_scratch_of_theirs(path: str, fd: int, directory: str) -> str:
    """Why others can have the file open, and no scratch folder of theirs be beside this path."""
    names = os.fstat(fd).st_nlink
    if names > 1:  # the folder lies beside the name by which they opened it
        return (
            f"processes have {path} open, and not with the scratch folder {directory}: the file "
            f"has {names} names (hard links); if they opened it by another one, open it by that "
            "one, too; if the folder was deleted or replaced, open it again once they have closed; "
            "what they confirmed is in the file"
        )
    return (
        f"the scratch folder {directory} was deleted or replaced while processes have {path} open; "
        "what they confirmed is in the file; open it again once they have closed"
    )


def _attach(path: str, fd: int, header: FileHeader, directory: str, page: SharedPage) -> Opened:
    """Join those who have the file open and the page with it."""
    index: Index | None = None
    try:
        log = Log(fd, header, page)
        log.is_at_rest = False
        index = Index.open(os.path.join(directory, INDEX_NAME), create=False)
        role = unpack_role(_files.read_at(fd, HEADER_BYTES, 0), header.store_id)
        slot, token = take_owner_slot(fd, page)
    except BaseException:
        page.close()
        if index is not None:
            index.close(sync=False)
        raise
    return Opened(path, fd, header, directory, page, log, index, slot, token, None, False, *role)


def attach_page(
    directory: str, fd: int, header: FileHeader, *, writable: bool = True
) -> SharedPage | None:
    """The page of those who have the file open, or None when there is none that is theirs."""
    try:
        page = SharedPage(os.path.join(directory, PAGE_NAME), writable=writable)
    except (OSError, ValueError):
        return None
    if page.belongs_to(
        header.store_id, _clock.boot_id(), _disk.identity(fd), _disk.disk_sequence(fd)
    ):
        if writable:
            page.hold()
        return page
    page.close()
    return None


@dataclass(frozen=True)
class _Before:
    """What those who had the file open before us in this boot have left of their page."""

    same_boot: bool = False  # False: nothing, and all else is as it is here
    failed: bool = False  # a sync
    doubtful: bool = False  # something could not be read
    commit: int = 0
    near: int = 0  # where the last frame began
    shift: int | None = None  # of queue time
    replica: list[int] = field(default_factory=list)  # what was known of it
    index: tuple[int, int] | None = None  # how that looked

    @property
    def cache_is_true(self) -> bool:
        return self.same_boot and not self.failed


def _look_before(directory: str, fd: int, header: FileHeader) -> _Before:
    page = attach_page(directory, fd, header)
    if page is None:
        # Also when the one before us died over the page he was making.
        page_path = os.path.join(directory, PAGE_NAME)
        kept = SharedPage.read_kept(page_path, header.store_id, _clock.boot_id())
        return _Before(replica=kept)
    words = page.words
    before = _Before(
        True,
        bool(words[FAILED]),
        bool(words[READ_AGAIN]),
        words[COMMIT],
        words[LAST_FRAME],
        page.shift,
        page.replica_words(),
        (words[INDEX_TIME], words[INDEX_BYTES]) if words[INDEX_TIME] else None,
    )
    page.close()
    return before


def _open_first(
    path: str, fd: int, header: FileHeader, directory: str, complete: Complete | None
) -> Opened:
    """Recover the file for everybody. The caller holds *in use* exclusively."""
    before = _look_before(directory, fd, header)
    make_directory(directory, fd)
    kept = SharedPage.pack_kept(header.store_id, _clock.boot_id(), before.replica)
    page = SharedPage.create(os.path.join(directory, PAGE_NAME), fd, kept)
    index: Index | None = None
    try:
        remove_pipes(directory)
        log = Log(fd, header, page)
        role = unpack_role(_files.read_at(fd, HEADER_BYTES, 0), header.store_id)
        more = (
            functools.partial(complete, fd, header)
            if complete is not None and role[0] == PRIMARY
            else None
        )
        marked = read_clean_mark(os.path.join(directory, INDEX_NAME)) is not None
        index, recovery, rebuild = _recover(directory, log, before, more)
        page.share_unread(log.unread)
        # Who only looks has nothing to write or to sync at its end.
        page.words[INDEX_SYNCED] = marked and not rebuild
        page.words[INDEX_TIME], page.words[INDEX_BYTES] = index.looks()
        if recovery.ends_vouched:
            page.words[CLEAN_AT] = page.words[TAIL]
            page.words[LAST_FRAME] = log.last_frame[0]
        index_directory = os.path.join(directory, INDEX_NAME)
        for name in ("", *os.listdir(index_directory)):
            _names.match_owner_and_mode(os.path.join(index_directory, name), fd)
        # Within a boot the clock goes on as it was, whatever became of the wall clock.
        page.shift = new_shift(log) if before.shift is None else before.shift
        page.keep_replica_words(before.replica)
        slot, token = take_owner_slot(fd, page)
        if not before.same_boot:
            # Whoever made the file may have died, or not have come to it, before its name was on
            # stable storage: what is promised from now on must not go with the name.
            _sync_name(path)
        # Last of all: whoever finds the stamp takes the rest for true.
        _stamp(page, header, fd)
        _locks.lock(fd, IN_USE, False)
    except BaseException:
        if before.failed and before.shift is not None:
            # Whoever tries next must know, too, that the cache may have what the disk lacks.
            words = page.words
            words[COMMIT], words[LAST_FRAME], words[FAILED] = before.commit, before.near, 1
            page.shift = before.shift
            page.keep_replica_words(before.replica)
            _stamp(page, header, fd)
        page.close()
        if index is not None:
            index.close(sync=False)
        raise
    return Opened(
        path, fd, header, directory, page, log, index, slot, token, recovery, rebuild, *role
    )


def _stamp(page: SharedPage, header: FileHeader, fd: int) -> None:
    page.stamp(header.store_id, _clock.boot_id(), _disk.identity(fd), _disk.disk_sequence(fd))


def _sync_name(path: str) -> None:
    # Who may not read the directory can't sync it; whoever made the file in it could.
    with contextlib.suppress(PermissionError):
        _files.sync_dir(os.path.dirname(path))


def _recover(
    directory: str,
    log: Log,
    before: _Before,
    complete: Callable[[Mapping[str, Any]], bool] | None,
) -> tuple[Index, Recovery, bool]:
    """Find the log's end, and an index that may be believed; True if it is to be folded anew, which
    is begun here.
    """
    index = None
    # What could not be read may be readable by now, and what can't be by now is damage.
    if not before.doubtful:
        index = believable_index(
            os.path.join(directory, INDEX_NAME), before.cache_is_true, before.index
        )
    rebuild = None
    is_believed = index is not None
    if index is None:
        index = new_index(directory)
    try:
        if not is_believed:
            rebuild = Rebuild(index, log)
        recovery = log.recover(
            commit=before.commit,
            cache_is_true=before.cache_is_true,
            whole=rebuild is not None,
            failed=before.failed,
            near=before.near if before.cache_is_true else 0,
            complete=None if complete is None else functools.partial(_complete, complete, index),
            follow=None if rebuild is None else rebuild.follow,
        )
        words = log.state.words
        if words[COMMIT] < words[TAIL]:
            log.sync()
            words[COMMIT] = words[TAIL]
        words[SYNC_HIGH] = words[FIRST_SYNC] = 0
        if rebuild is not None:
            rebuild.finish()
            return index, recovery, True
        if _agree(index, log):
            return index, recovery, False
        if not recovery.whole:
            recovery = log.recover(commit=words[COMMIT], cache_is_true=True, whole=True)
    except BaseException:
        index.close(sync=False)
        raise
    index.close(sync=False)
    return new_index(directory), recovery, True


def _complete(complete: Callable[[Mapping[str, Any]], bool], index: Index) -> bool:
    """Have written what the log lacks, with what the index knows of its options by then."""
    tx = index.write()
    try:
        options = dict(tx.options)
    finally:
        tx.abort()
    return complete(options)


def _agree(index: Index, log: Log) -> bool:
    """Whether the index was folded from this very log, up to a place the log still knows. Then what
    it has forgotten is given up by the log, too: whoever did that may have died before the file
    said so, and of a message that is kept the index must know all.
    """
    try:
        tx = index.write()
    except (OSError, DiskFullError, struct.error):  # the last: of another release's layout
        return False
    try:
        begin = tx.forgotten_to >> log.bits
        agrees = begin <= log.state.words[LAST] and log.ends_with(
            tx.applied, tx.last_frame, tx.last_crc
        )
    finally:
        tx.abort()
    if agrees and log.state.words[HEAD] < begin:
        log.free(begin - 1)
    return agrees


def new_shift(log: Log) -> int:
    """Begin this boot's queue time: like the wall clock, but never before the last frame's."""
    last_us = min(log.last_time_us(), MAX_TIME_US)  # a hostile one must not end time
    return max(_clock.wall_us(), last_us) - _clock.boottime_us()


def take_owner_slot(fd: int, page: SharedPage) -> tuple[int, int]:
    """Lock a free owner slot and put a random token there."""
    token = secrets.randbits(63) | 1
    lock, unlock = _locks.bound_lock(fd, WRITE)
    lock()
    try:
        for want_free in (True, False):
            for slot in range(MAX_OWNERS):
                if bool(page.token(slot)) is want_free or not _locks.try_lock(
                    fd, OWNER + slot, True
                ):
                    continue
                if not want_free:
                    # Its last owner died and nobody noticed; whoever gets next will, by this.
                    page.words[DEAD_SEQ] += 1
                page.set_token(slot, token)
                return slot, token
    finally:
        unlock()
    raise LockedError(
        f"{MAX_OWNERS} processes have this file open, which is the limit; nothing was changed; "
        "close some of them"
    )
