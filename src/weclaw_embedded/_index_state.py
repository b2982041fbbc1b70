"""The open transaction: what is known of the index in memory, and how it gets to LMDB.

One `State` lives as long as its index and is armed anew for each transaction, so that topics,
groups and the chunks at the ends of queues stay in memory between them.  They are trusted only if
the sequence number in the head row is the one this process saw last; otherwise another process has
written, and they are read again when needed, or brought on by the little of the log that the other
one had more (`join`).  Chunks that are full never change.

Topics, groups and queue ends are written at commit and not before, so that folding a thousand
records writes each of them once.  Between commits the memory may be ahead of LMDB, where all
processes count their commits in a shared word: then one look at it says whether what is known
still holds, and the leases of plain messages stay in memory, too, until a row is asked for.  Who
dies meanwhile leaves an index that is a little behind the log, as one who only puts does.

What stands above reads and writes rows through it.  It does not know how topics, groups and
queues are found and changed, which `_index_queues` does, nor what may happen to a message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

import lmdb
import msgpack

from ._index_rows import (
    GROUP,
    HEAD,
    HEAD_ROW,
    LEASED,
    META,
    QUEUE,
    TOPIC,
    first_lease,
    key_queue,
    key_u32,
    key_u64,
    key_u64_u64,
)
from ._index_topics import CHUNK_ENTRIES, Chunk, GroupState, TopicState
from .errors import DiskFullError

_BATCH: Final = 512  # rows read at a time by a long scan
# In the place of the word that counts commits where there is none: nobody ever knew this count.
UNCOUNTED: Final = memoryview(array("q", (-2,)))
# So many bytes of the log the memory may be ahead of LMDB: others have to read and fold them.
_MOST_AHEAD_BYTES: Final = 64 << 10
_MOST_PLAIN: Final = 50_000  # leases of a group that are known to be plain, 60 bytes each


class IndexFullError(DiskFullError):
    """The index could not be written, most likely for want of space on the disk.

    Nothing of the transaction is in it, and the transaction is over.  The log has what it has: its
    records are applied again when there is room.
    """


class BehindError(Exception):
    """A row is wanted of LMDB while it is not to be had: another process has it there as of later
    than what is in memory, or may just be writing. Internal: what is in memory is given up then.
    """


class State:
    """What is in memory, and the rows of LMDB, within one transaction."""

    room: Any  # what begins transactions, given by the index; never the index itself: see `Index`

    def __init__(self) -> None:
        self._commits = UNCOUNTED  # counts those of all processes
        self._known_commits = -1
        # What LMDB gets when a row is asked for (None: to be deleted), besides the fresh leases of
        # groups. And the leases of plain messages that it has, as far as they are known.
        self._behind: dict[bytes, bytes | None] = {}
        self._plain: dict[int, set[int]] = {}
        self.stored = 0  # so far LMDB has it
        self._has_no_lock = False  # of all processes; see `ahead`
        # From `Index.write` to the last step of `keep`, `commit` or `abort`. Ctrl-C may break off
        # any of them, and what is in memory then is what nobody knows: whoever finds it armed must
        # begin with `abort`.
        self.armed = False
        self._before = -1, -1
        # As in the head row: what another process has brought LMDB to, while memory is behind it.
        self.leader: tuple[int, int, int, int] | None = None
        self._wait()
        self._topics: dict[int, TopicState] = {}
        self._groups: dict[int, GroupState] = {}
        self._chunks: dict[tuple[int, int, int], Chunk] = {}
        self._readers: dict[int, list[int]] | None = None
        self._changed_topics: dict[int, TopicState] = {}
        # Those since leases were last written, of which some may have fresh ones, and the others.
        self._changed_groups: dict[int, GroupState] = {}
        self._level_groups: dict[int, GroupState] = {}
        self._meta: dict[str, object] | None = None
        self._touched = False
        self._known_sequence = -1
        self._known_shape = -1
        self._sequence = 0
        self._shape = 0
        self.applied = 0
        self.last_crc = 0
        self.last_frame = 0

    # The transaction

    def abort(self) -> None:
        """Take back all of it; what is known in memory is read again. May be called again, as where
        it was broken off.
        """
        # Before it is forgotten: while it is open, nobody in any process begins another.
        self.end_txn()
        self._wait()
        self._forget()
        self._chunks.clear()
        self.armed = False

    def _failed(self, error: lmdb.Error) -> IndexFullError:
        """Give the transaction up after an error of LMDB; return what to raise."""
        self.abort()
        if isinstance(error, lmdb.MapFullError):
            self.room.map_full = True  # the next transaction begins with a larger one
        else:
            self.room.disk_full = True  # or may be: LMDB says "input/output error" of it
        return IndexFullError(
            f"the index could not be written ({error}), most likely for want of space; the log has "
            "all that was confirmed, and the index follows when there is room"
        )

    def _arm(self) -> None:
        """Be ready for one transaction when others may have committed; LMDB's own begins when
        something is asked of it.
        """
        self._has_no_lock = False
        self._recall()
        if self._commits is UNCOUNTED:
            self._use_rows()
        else:
            self._known_commits = self._commits[0]

    def _wait(self) -> None:
        """No transaction of LMDB is open, and no row in use."""
        self._txn: lmdb.Transaction[bytes] | None = None
        # Ends that, if there is one, before Ctrl-C can come. No thread can but the one that began
        # it: whoever gives up a turn calls this before anything else that may be broken off.
        self.end_txn: Callable[[], object] = int
        self._seen: lmdb.Cursor[bytes] | None = None
        self._in_use = False
        self._may_keep()
        for name in ("_get", "_put", "_pop", "_delete"):
            self.__dict__.pop(name, None)

    def _open(self) -> lmdb.Transaction[bytes]:
        txn = self._txn
        if txn is None:
            if self.leader is not None or self._has_no_lock:
                raise BehindError
            try:
                txn = self._txn = self.room.begin()
                self.end_txn = txn.abort
            except lmdb.Error as error:
                raise self._failed(error) from error
        return txn

    def _look(self, key: bytes) -> bytes | None:
        """Return a row that is of no message."""
        if key in self._behind:
            return self._behind[key]
        return (self._txn or self._open()).get(key)

    def _use_rows(self) -> lmdb.Transaction[bytes]:
        """Rows of messages are read and written from now on: LMDB gets what is not yet there."""
        txn = self._open()
        self._in_use = True
        self._keep_to = -1
        # From now on the methods are LMDB's own, until `_wait`.
        self.__dict__.update(_get=txn.get, _put=txn.put, _pop=txn.pop, _delete=txn.delete)
        try:
            for key, value in self._behind.items():
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, value)
            self._behind.clear()
            self._write_leases()
        except lmdb.Error as error:
            raise self._failed(error) from error
        return txn

    def _get(self, key: bytes) -> bytes | None:
        return self._use_rows().get(key)

    def _put(self, key: bytes, value: bytes) -> bool:
        self._behind[key] = value
        return True

    def _pop(self, key: bytes) -> bytes | None:
        return self._use_rows().pop(key)

    def _delete(self, key: bytes) -> bool:
        self._behind[key] = None
        return True

    def _write_leases(self) -> None:
        """Write the leases that were kept out of LMDB. It looks at no group twice unless that
        changed in between: a log can have thousands, each of which calls this when it begins.
        """
        changed = self._changed_groups
        for gid, group in changed.items():
            fresh = group.fresh
            if not fresh:
                continue
            for message, (priority, owner, deadline_ns) in fresh.items():
                self._put(
                    key_u64_u64(LEASED, gid, message),
                    first_lease(priority, message, owner, deadline_ns),
                )
            plain = self._plain.setdefault(gid, set())
            if len(plain) > _MOST_PLAIN:
                plain.clear()
            plain.update(fresh)
            group.n_lease_rows += len(fresh)
            fresh.clear()
        self._level_groups.update(changed)
        changed.clear()

    def _recall(self) -> None:
        """See whether what is known still holds; all of it is forgotten if not."""
        before = self.applied
        head = self._look(HEAD)
        if head is None:
            self.applied = self.last_crc = self._sequence = self._shape = self.last_frame = 0
            self.stored = 0
            self._may_keep()
            self._forget()
            return
        (
            self.applied,
            self.last_crc,
            self._sequence,
            self._shape,
            self.last_frame,
        ) = HEAD_ROW.unpack(head)
        self.stored = self.applied
        self._may_keep()
        if self._sequence != self._known_sequence or self.applied != before:
            self._forget()
            self._known_sequence = self._sequence
            self._known_shape = self._shape

    def stay(self) -> bool:
        """See whether what is known still holds, or can be brought to where another process has
        brought LMDB by folding the little that is between: then `leader` says where that is, and
        `join` is to be called there. False if it must be read anew.
        """
        commits = self._commits
        if self._known_sequence < 0 or commits is UNCOUNTED:
            return False
        head = self._look(HEAD)
        if head is None:
            return False
        applied, crc, sequence, shape, last_frame = HEAD_ROW.unpack(head)
        if sequence == self._known_sequence:
            self._known_commits = commits[0]  # whoever counted it did not live to commit it
        elif shape == self._known_shape and 0 <= applied - self.applied <= _MOST_AHEAD_BYTES:
            self.leader = applied, crc, last_frame, sequence
        else:
            return False
        self.end_txn()
        self._wait()
        return True

    def ahead(self) -> bool:
        """Whether what is in memory holds and may be told more without the lock of all processes,
        for as long as that asks LMDB for nothing. It counts for nothing until `told_ahead`.
        """
        commits = self._commits
        if self.armed or commits is UNCOUNTED or commits[0] != self._known_commits:
            return False
        self._has_no_lock = True
        self._before = self._known_commits, self._known_sequence
        self._known_commits = self._known_sequence = -1
        return True

    def told_ahead(self, applied: int) -> None:
        """What was told is all that stands before `applied`, the next frame to apply."""
        self._has_no_lock = False
        self.applied = applied
        self._known_commits, self._known_sequence = self._before

    def join(self) -> None:
        """Memory has all that the leader had: what another process wrote of it to LMDB is as if
        this one had.
        """
        assert self.leader is not None, "it said so"
        assert not self._touched, "else the shape is another one"
        for topic in self._changed_topics.values():
            topic.changed = 0
        self._write_leases()
        self._behind.clear()
        applied, crc, last_frame, self._sequence = self.leader
        self.leader = None
        self._done(applied, crc, last_frame)
        self._may_keep()

    def keep(self, applied: int) -> bool:
        """Leave what was learned in memory alone, if that will do for now; False if it is to be
        committed. `applied` is the next frame to apply.
        """
        if applied > self._keep_to:
            return False
        if self._txn is not None:
            self.end_txn()  # it was only looked at
            self._wait()
        self.applied = applied
        self.armed = False
        return True

    def _may_keep(self) -> None:
        """From here on memory may be ahead of LMDB, so far; not at all where nobody could tell."""
        self._keep_to = self.stored + _MOST_AHEAD_BYTES if self._commits is not UNCOUNTED else -1

    def _must_commit(self) -> None:
        """What changed must not be left in memory alone, and what other processes know is over:
        topics or groups came or went, or it is nothing that the log says.
        """
        self._touched = True
        self._keep_to = -1
        self._shape = (self._shape + 1) % 2**32

    def _forget(self) -> None:
        """Drop what is known of the index, full chunks excepted."""
        self._topics.clear()
        self._groups.clear()
        self._changed_topics.clear()
        self._changed_groups.clear()
        self._level_groups.clear()
        self._readers = None
        self._meta = None
        self._touched = False
        self._behind.clear()
        self._plain.clear()
        self.leader = None
        self._has_no_lock = False
        self._known_sequence = -1
        self._known_shape = -1
        self._known_commits = -1

    def _flush(self, applied: int, last_crc: int, last_frame: int) -> bool:
        """Write what changed; return whether anything did."""
        if not (
            self._changed_groups
            or self._level_groups
            or self._changed_topics
            or self._touched
            or applied != self.stored
            or last_crc != self.last_crc
        ):
            return False
        if self._in_use:
            self._write_leases()
        else:
            self._use_rows()
        put = self._put
        for topic in self._changed_topics.values():
            tid = topic.tid
            bits = topic.changed
            priority = 0
            while bits:
                if bits & 1:
                    chunk = topic.tail[priority]
                    if chunk is not None and chunk.deltas:
                        number = topic.tails[priority] // CHUNK_ENTRIES
                        put(key_queue(QUEUE, tid, priority, number), chunk.pack())
                bits >>= 1
                priority += 1
            topic.changed = 0
            put(key_u32(TOPIC, tid), topic.pack())
        for group in self._level_groups.values():
            put(key_u64(GROUP, group.gid), group.pack())
        self._sequence += 1
        put(HEAD, HEAD_ROW.pack(applied, last_crc, self._sequence, self._shape, last_frame))
        return True

    def _done(self, applied: int, last_crc: int, last_frame: int) -> None:
        """What was written is in: what is in memory is what the index has."""
        self._changed_topics.clear()
        self._changed_groups.clear()
        self._level_groups.clear()
        self._touched = False
        self._known_sequence = self._sequence
        self._known_shape = self._shape
        if self._commits is not UNCOUNTED:
            self._known_commits = self._commits[0]
        self.applied = self.stored = applied
        self.last_crc = last_crc
        self.last_frame = last_frame

    # What the store remembers

    @property
    def meta(self) -> dict[str, object]:
        """What the store remembers of this index; set it whole."""
        if self._meta is None:
            value = self._get(META)
            self._meta = msgpack.unpackb(value) if value is not None else {}
        return self._meta

    @meta.setter
    def meta(self, values: dict[str, object]) -> None:
        self._meta = values
        self._must_commit()
        self._put(META, msgpack.packb(values))

    # Rows of LMDB

    def _cursor(self) -> lmdb.Cursor[bytes]:
        if self._seen is None:
            self._seen = self._use_rows().cursor()
        return self._seen

    def _first(self, prefix: bytes, start: bytes | None = None) -> tuple[bytes, bytes] | None:
        """Return the first row with that prefix, from `start` on if given."""
        cursor = self._cursor()
        if cursor.set_range(prefix if start is None else start):
            key, value = cursor.item()
            if key.startswith(prefix):
                return key, value
        return None

    def _scan(
        self, prefix: bytes, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows with that prefix in [start, end).

        They are read some at a time, so that the caller may write in between; a row it changes
        may still come as it was.  Few at first: often the first is all that is wanted.
        """
        seek = prefix if start is None else start
        size = 1
        while True:
            cursor = self._cursor()
            batch: list[tuple[bytes, bytes]] = []
            found = cursor.set_range(seek)
            while found and len(batch) < size:
                key, value = cursor.item()
                if not key.startswith(prefix) or (end is not None and key >= end):
                    break
                batch.append((key, value))
                found = cursor.next()
            yield from batch
            if len(batch) < size:
                return
            seek = batch[-1][0] + b"\0"
            size = min(8 * size, _BATCH)

    def _clear(self, prefix: bytes) -> None:
        """Delete all rows with that prefix."""
        for key, _ in self._scan(prefix):
            self._delete(key)
