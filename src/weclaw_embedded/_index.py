"""The index: LMDB, derived from the log and never the truth.

One environment in a folder, opened without sync: a commit costs microseconds and survives the
death of every process, not that of the machine.  Whether an index left behind may be believed is
the store's to judge, before it is opened.

All access of a process is serialised by its caller, and writers of all processes by the write
lock; a transaction lives within one call of the store.  The map grows with no transaction open,
early enough that it is never full in one.  Some room behind the last page is kept allocated, so
that acks and gets go on when the disk is full.

The parts: `_index_rows` and `_index_topics` are what is stored, `_index_state` the open
transaction, `_index_queues` topics, groups and queues in it, `_index_moves` how a message moves,
`_index_change`, `_index_notes`, `_index_keep` and `_index_fold` what records do, `_index_many` what
many of them do, `_index_ask` what may be asked, `_index_forget` what may go.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from typing import Any, Final

import lmdb

from . import _files
from ._index_ask import Ask
from ._index_forget import Forget
from ._index_many import Frame, Many
from ._index_rows import Location, Pick, Picks, Row, picks_of
from ._index_state import UNCOUNTED, BehindError, IndexFullError
from ._index_topics import GroupState, TopicState
from .errors import DiskFullError

logger = logging.getLogger("weclaw_embedded")

__all__ = [
    "BehindError",
    "Frame",
    "GroupState",
    "Index",
    "IndexFullError",
    "Location",
    "Pick",
    "Picks",
    "Row",
    "TopicState",
    "Tx",
    "picks_of",
]

FILE_NAME: Final = "index.mdb"
LOCK_NAME: Final = "index.mdb-lock"  # LMDB derives it from the other
MAP_BYTES: Final = 16 * 2**30  # of address space, not of disk or memory
MIN_MAP_BYTES: Final = 2**28  # where address space is short
MAX_READERS: Final = 1024
LOCK_BYTES: Final = 73728  # what LMDB needs for so many, rounded up
RESERVE_BYTES: Final = 256 * 2**10
CHECK_EVERY: Final = 64  # commits between looks at the map and the reserve


class Tx(Many, Ask, Forget):
    """One transaction, to read and to write; begun by `Index.write`."""

    main: Any = None  # LMDB's handle of the one database

    def clear(self) -> None:
        """Empty the index, to be folded anew: what it had is of no use any more."""
        self._use_rows().drop(self.main, delete=False)
        self._forget()
        self._chunks.clear()
        self._seen = None
        self.applied = self.stored = self.last_crc = self.last_frame = 0
        self._must_commit()

    def commit(self, applied: int, last_crc: int, last_frame: int = 0) -> None:
        """Make it so; `applied` is the next frame to apply, `last_frame` and `last_crc` are the
        offset and the checksum of the one before it.

        Raises:
            IndexFullError: nothing of this transaction is in the index.
        """
        try:
            changed = self._flush(applied, last_crc, last_frame)
            txn = self._txn
            if changed:
                assert txn is not None, "what changed is written"
                if self._commits is not UNCOUNTED:
                    # Before it is so: who dies in between makes others look in vain, no more.
                    self._commits[0] += 1
                self.room.begin_change()
                txn.commit()
                self.room.end_change()
                self._done(applied, last_crc, last_frame)
            elif txn is not None:
                txn.abort()
        except lmdb.Error as error:
            raise self._failed(error) from error
        except BaseException:
            self.abort()
            raise
        self._wait()
        self.armed = False


class Room:
    """The environment and the space it has: begins transactions that can't be short of either."""

    def __init__(self, env: lmdb.Environment, reserve_fd: int) -> None:
        self.env = env
        self.reserve_fd = reserve_fd
        self._map_bytes = env.info()["map_size"]
        self._page_bytes = env.stat()["psize"]
        self.begun = 0
        self.map_full = False  # the last transaction ended for that
        self.disk_full = False
        self.is_short = False  # it wanted space that the disk does not have
        self.seen: memoryview[int] | None = None  # see `Index.share`

    def begin_change(self) -> None:
        """The file is about to change: how it looked last says no more of it."""
        if self.seen is not None:
            self.seen[0] = 0

    def end_change(self) -> None:
        """Note how the file looks now."""
        if self.seen is not None:
            time_ns, self.seen[1] = self.looks()
            self.seen[0] = time_ns

    def looks(self) -> tuple[int, int]:
        """When the file was changed last, in ns, and its size."""
        found = os.fstat(self.reserve_fd)
        return found.st_mtime_ns, found.st_size

    def begin(self) -> lmdb.Transaction[bytes]:
        """Begin a transaction of LMDB; nobody in this process has one."""
        if self.begun % CHECK_EVERY == 0 or self.map_full:
            self._make_room(grow=self.map_full)
            self.map_full = False
        self.begun += 1
        if self.disk_full:
            self.is_short, self.disk_full = True, False
        try:
            return self.env.begin(write=True)
        except lmdb.MapResizedError:  # another process let the map grow
            self.env.set_mapsize(0)
            self._map_bytes = self.env.info()["map_size"]
            return self.env.begin(write=True)

    def _make_room(self, *, grow: bool) -> None:
        """See that for a while neither map nor disk can be full; no transaction is open."""
        info = self.env.info()
        self._map_bytes = info["map_size"]
        used = (info["last_pgno"] + 1) * self._page_bytes
        if grow or used > self._map_bytes // 2:
            self._map_bytes *= 2
            self.env.set_mapsize(self._map_bytes)
        # Even a delete needs pages.  Without room the reserve is what is left of it.
        for n in (RESERVE_BYTES, RESERVE_BYTES // 4):
            try:
                if os.fstat(self.reserve_fd).st_size < used + RESERVE_BYTES // 2:
                    self.begin_change()
                    _files.allocate(self.reserve_fd, used, n)
                return
            except DiskFullError:
                self.is_short = True


class Index:
    """One open index; made by `Index.open`.  Not for two threads at once.

    Nothing it refers to refers to it: LMDB refuses a second environment of a file in a process, so
    one that Ctrl-C kept from being closed must be gone at once, without the garbage collector.
    """

    def __init__(self, env: lmdb.Environment, reserve_fd: int) -> None:
        self.room = Room(env, reserve_fd)
        #: What is known, in memory and of LMDB; to be changed between `write` and its end, and with
        #: no transaction begun as `State.ahead` says.
        self.tx = Tx()
        self.tx.main = env.open_db(None)
        self.tx.room = self.room

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, create: bool, mode: int = 0o600) -> Index:
        """Open the index in a folder, made there when missing if `create`.

        One that was torn when the machine died can abort the process here: the caller knows
        whether it may be opened.

        Raises:
            FileNotFoundError: there is none, and it was not to be created.
            OSError: what is there is not an index of LMDB, or cannot be opened.
        """
        path = Path(directory) / FILE_NAME
        if create:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        elif not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no index", str(path))
        _allocate_lock_file(path.with_name(LOCK_NAME))
        env = _environment(path, create, mode)
        fd = -1
        try:
            env.reader_check()
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            return cls(env, fd)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            env.close()
            raise

    @staticmethod
    def delete(directory: str | os.PathLike[str]) -> None:
        """Delete the index in a folder, unopened; nobody may have it open."""
        for name in (FILE_NAME, LOCK_NAME):
            with contextlib.suppress(FileNotFoundError):
                (Path(directory) / name).unlink()

    def write(self, may_follow: bool = False) -> Tx:
        """Begin the transaction; the caller holds the write lock and no other of this process is.

        The same object comes every time, armed anew. With `may_follow` it may have a `leader`, to
        where the caller then brings it.
        """
        tx = self.tx
        if tx.armed:
            tx.abort()  # Ctrl-C broke off whoever had it, and whoever was to take it back
        tx.armed = True
        if tx._commits[0] != tx._known_commits:
            try:
                if not (may_follow and tx.stay()):
                    tx._arm()
            except BaseException:
                tx.abort()
                raise
        return tx

    def share(self, commits: memoryview[int], seen: memoryview[int] | None = None) -> None:
        """Count commits in a word that all processes share, each under the write lock: what is
        known in memory holds while it stands still.

        `seen`, two more words, say how the file `looks` since the last change, the first of them 0
        while one is under way: who finds it otherwise, once all are dead, knows that something else
        has written to it.
        """
        self.tx._commits = commits
        self.room.seen = seen

    def looks(self) -> tuple[int, int]:
        """When the file was changed last, in ns, and its size."""
        return self.room.looks()

    def look_for_room(self) -> None:
        """There is space now: have it before the next transaction."""
        self.room.begun = 0

    def sync(self) -> None:
        """Have all of it on stable storage when this returns."""
        self.room.env.sync(True)

    def close(self, *, sync: bool = False) -> bool:
        """Close it; an open transaction is taken back. False when it was to be synced and could not
        be: it may not be believed then.

        In a forked child this is safe for the parent; nothing may be synced there.
        """
        try:
            self.tx.abort()
            if self.tx._commits is not UNCOUNTED:
                self.tx._commits.release()
                self.tx._commits = UNCOUNTED
            if self.room.seen is not None:
                self.room.seen.release()
                self.room.seen = None
            if sync:
                self.room.env.sync(True)
        except lmdb.Error as error:
            logger.warning("the index was not synced, and is made anew: %s", error)
            return False
        else:
            return True
        finally:
            fd, self.room.reserve_fd = self.room.reserve_fd, -1
            if fd >= 0:  # else Ctrl-C broke off who closed it before
                os.close(fd)
            self.room.env.close()


def _allocate_lock_file(path: Path) -> None:
    """Give LMDB's lock file its space: LMDB maps it, and a page of it that the disk has no room for
    would end the process.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _files.allocate(fd, 0, LOCK_BYTES)
    finally:
        os.close(fd)


def _environment(path: Path, create: bool, mode: int) -> lmdb.Environment:
    map_bytes = MAP_BYTES
    while True:
        try:
            return lmdb.open(
                os.fsencode(path),  # of a str it takes only what is UTF-8
                map_size=map_bytes,
                subdir=False,
                create=create,
                mode=mode,
                sync=False,
                metasync=False,
                readahead=False,
                meminit=False,
                max_readers=MAX_READERS,
            )
        except (lmdb.MemoryError, MemoryError) as error:
            map_bytes //= 4
            if map_bytes < MIN_MAP_BYTES:
                raise OSError(errno.ENOMEM, "no address space for the index", str(path)) from error
        except lmdb.Error as error:
            said = getattr(error, "code", 0)
            if said == errno.ENOMEM and map_bytes // 4 >= MIN_MAP_BYTES:
                map_bytes //= 4
                continue
            code = errno.ENOSPC if isinstance(error, lmdb.DiskError) else errno.EIO
            if said in (errno.EMFILE, errno.ENFILE):
                code = said  # which says nothing against the disk
            raise OSError(code, f"the index could not be opened ({error})", str(path)) from error
