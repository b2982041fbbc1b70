"""Orders other than first in, first out, for `PriorityQueue` and `LifoQueue`.

Role: the log keeps the messages, as it does for every queue; which of those that are ready goes
next is decided here, from a heap that this process builds when it first looks and keeps level by
reading what was written to the log since. So the order holds within the process; the heap is
memory only and nothing is lost with it, and whoever takes from the same file by other means sees
plain first in, first out.

Everything here happens under the write lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

from . import _delivery, _records
from ._index import GroupState, Pick, Picks, picks_of
from ._records import META_DUE_US, META_EXPIRY_US, META_KEY
from ._session import Session
from .errors import CorruptError
from .wal import TAIL

_ALL: Final = 1 << 62
# Records that make no message ready or, if they do, only through the clock.
_HARMLESS: Final = frozenset(
    (
        _records.ACK,
        _records.CARRY,
        _records.CHECKPOINT,
        _records.CLEAN,
        _records.DEAD,
        _records.EXTEND,
        _records.GROUP,
        _records.OPTION,
        _records.OWNER,
        _records.PAUSE,
        _records.TOPIC,
    )
)


class Entry:
    """A message that is ready, with what it is sorted by. Equal ones keep the order of puts."""

    __slots__ = ("item", "offset", "priority")

    def __init__(self, item: Any, offset: int, priority: int) -> None:
        self.item = item
        self.offset = offset
        self.priority = priority

    def __lt__(self, other: Entry) -> bool:
        try:
            if self.item < other.item:
                return True
            if other.item < self.item:
                return False
        except TypeError:
            # None is refused at its put: other handles put what they like, and then it would hang
            # on who looks first. They must not stop the others: each kind by itself.
            mine, its = type(self.item).__name__, type(other.item).__name__
            if mine != its:
                return mine < its
        return self.offset < other.offset


class Newest(Entry):
    """Last in, first out: the item itself is not looked at."""

    __slots__ = ()

    def __lt__(self, other: Entry) -> bool:
        return self.offset > other.offset


class Order:
    """The ready messages of one topic and group in an order of their own.

    `item_of(record)` decodes the body of a Put; None where the item does not matter.
    """

    def __init__(self, kind: type[Entry], item_of: Callable[[Any], Any] | None) -> None:
        self._kind = kind
        self._item_of = item_of
        self._heap: list[Entry] = []
        self._entries: dict[int, Entry] = {}
        self._level = -1  # up to where the log is known; -1: not begun
        self._engine: Any = None
        self._is_sound = True  # False: it was interrupted, or what it chose was not written

    def choose(
        self,
        session: Session,
        group: GroupState,
        n: int,
        *,
        visible: int,
        now_us: int,
        suspects: int,
    ) -> Picks:
        """What to deliver next; for `_taking.take`."""
        if not self._is_sound:
            self._level = -1
        self._is_sound = False
        self._learn(session, group, now_us)
        tx = session.tx
        heap, entries = self._heap, self._entries
        picks: list[Pick] = []
        not_now: list[Entry] = []
        while heap and len(picks) < n:
            entry = heapq.heappop(heap)
            if entries.get(entry.offset) is not entry:
                continue  # taken meanwhile
            row = tx.row(group.gid, entry.offset)
            if row is None:
                ready = self._is_ready(session, group, entry)
                later = entry.offset >= visible
                pick = Pick(entry.offset, entry.priority, True, None)
            else:
                ready = row.state in (_records.STATE_READY, _records.STATE_SUSPECT)
                # One that was in a crash is handed out alone.
                later = bool(row.crash and suspects) or (
                    entry.offset >= visible and not row.delivery
                )
                pick = Pick(entry.offset, row.priority, False, row)
            if ready and later:
                not_now.append(entry)
                continue
            del entries[entry.offset]
            if ready:
                suspects += bool(row is not None and row.crash)
                picks.append(pick)
        for entry in not_now:
            heapq.heappush(heap, entry)
        if picks:
            session.when_written(self._written)  # else they are still to be had
        else:
            self._written()
        return picks_of(picks)

    def _written(self) -> None:
        self._is_sound = True

    @staticmethod
    def _is_ready(session: Session, group: GroupState, entry: Entry) -> bool:
        return session.tx.state(group, entry.offset, lambda _: entry.priority) == "ready"

    def _learn(self, session: Session, group: GroupState, now_us: int) -> None:
        """Follow what was written since the last look."""
        if session.engine is not self._engine:
            self._engine = session.engine  # also after a fork
            self._level = -1
        tail = session.page.words[TAIL]
        if self._level < session.log.head_offset or not self._follow(session, group, tail):
            self._begin(session, group, now_us)
        elif session.log.pending_tail == tail and session.tx.ready_count(group) != len(
            self._entries
        ):
            self._begin(session, group, now_us)  # what became ready by itself
        self._level = tail

    def _begin(self, session: Session, group: GroupState, now_us: int) -> None:
        tail = session.page.words[TAIL]
        old = self._entries
        self._entries = {}
        self._heap = []
        for offset in session.tx.peek(group, _ALL, now_us):
            if offset >= tail:
                continue  # of this very turn: the next look finds it in the log
            entry = old.get(offset)
            if entry is None:
                self._add(session, offset)
            else:
                self._entries[offset] = entry
                self._heap.append(entry)
        heapq.heapify(self._heap)

    def _add(self, session: Session, offset: int, record: Any = None) -> None:
        try:
            if record is None:
                record = session.engine.put_and_time(_delivery.place(session, offset)[0])[0]
            put = _records.unpack_put(record)
        except (LookupError, CorruptError, _records.NoRecordError):
            priority, item = 0, None  # whoever takes it finds the damage
        else:
            priority = put.priority
            item = None if self._item_of is None else self._item_of(put)
        entry = self._kind(item, offset, priority)
        self._entries[offset] = entry
        heapq.heappush(self._heap, entry)

    def _follow(self, session: Session, group: GroupState, tail: int) -> bool:
        """Read the log from where we are to its tail. False when only a new beginning helps."""
        if self._level == tail:
            return True
        damage: list[Any] = []
        for frame in session.log.frames(
            self._level, tail, on_damage=lambda *what: damage.append(what)
        ):
            for offset, record in frame[5]:
                if not self._follow_one(session, group, offset, record):
                    return False
        return not damage

    def _follow_one(self, session: Session, group: GroupState, offset: int, record: Any) -> bool:
        kind = record[0]
        if kind == _records.PUT:
            put = _records.unpack_put(record)
            if put.tid == group.tid:
                meta = put.meta
                if META_KEY in meta or META_DUE_US in meta or META_EXPIRY_US in meta:
                    return False
                if offset not in self._entries:
                    self._add(session, offset, record)
            return True
        if kind in _HARMLESS:
            return True
        said = _records.unpack(record)
        if isinstance(said, _records.Deliver):
            if said.gid == group.gid:
                for one, _, _ in said.items:
                    self._entries.pop(one, None)
            return True
        if isinstance(said, _records.Return):
            back = said.gid == group.gid and not said.due_us
            if back and said.offset not in self._entries:
                self._add(session, said.offset)
            return True
        return False
