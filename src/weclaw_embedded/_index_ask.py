"""The questions a store asks of the index.  None changes what the log would say.

What is ready is what stands in the position queues from a group's cursors on, and the messages
that came back.  A message that was never delivered is offered only below the visible point: what
its producer was promised may not be on disk yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from ._index_change import Change
from ._index_rows import (
    BACK,
    CANCELLED,
    DEAD,
    EXPIRY,
    ID,
    ID_ROW,
    LEASED,
    MOVED,
    OTHER,
    SKIP,
    SUSPECT,
    U32,
    U64,
    WAIT,
    Pick,
    Picks,
    Row,
    id_hash,
    key_tid_u64,
    key_u64,
    key_u64_u64,
    picks_of,
)
from ._index_topics import CHUNK_ENTRIES, GroupState, TopicState
from ._records import (
    FROM_QUEUE,
    NEVER,
    STATE_DEAD,
    STATE_LEASED,
    STATE_READY,
    STATE_SUSPECT,
)

FAIR: Final = 16  # one delivery in so many goes to the oldest message of any priority
ALL_SUSPECTS: Final = -1  # for a look, which hands nothing out
_LOOKED_FOR_ONE: Final = 10  # to look at a lease costs so much less than to end it, about
_SCAN_NS_A_LEASE: Final = 10_000  # a scan of n leases is not repeated within n times this

_new = tuple.__new__  # a third of what `Picks` costs
_NO_ROWS: Final[dict[int, Row]] = {}
_NO_PICKS: Final = Picks([], [], _NO_ROWS)


class _Back:
    """The messages that came back, of one kind, in the order of delivery."""

    def __init__(
        self, index: Ask, kind: bytes, group: GroupState, visible: int, now_us: int
    ) -> None:
        self._index = index
        self._kind = kind
        self._group = group
        self._visible = visible
        self._now_us = now_us
        self._taken: set[int] = set()
        self._rows = index._scan(kind + U64.pack(group.gid))
        self._next: Pick | None = None

    def head(self) -> Pick | None:
        """Return the first of the highest priority."""
        while self._next is None or self._next.offset in self._taken:
            found = next(self._rows, None)
            if found is None:
                return None
            self._next = self._offer(found)
        return self._next

    def head_of(self, priority: int) -> Pick | None:
        """Return the first of one priority."""
        prefix = self._kind + U64.pack(self._group.gid) + bytes((9 - priority,))
        for found in self._index._scan(prefix):
            pick = self._offer(found)
            if pick is not None and pick.offset not in self._taken:
                return pick
        return None

    def take(self, pick: Pick) -> None:
        """Go on to the next."""
        self._taken.add(pick.offset)

    def _offer(self, found: tuple[bytes, bytes]) -> Pick | None:
        offset = U64.unpack(found[1])[0]
        value = self._index._get(key_u64_u64(OTHER, self._group.gid, offset))
        assert value is not None, f"message {offset} is ready and has no row"
        row = Row.unpack(value)
        if not row.delivery and offset >= self._visible:
            return None
        if row.expiry_us and row.expiry_us <= self._now_us:
            return None
        return Pick(offset, row.priority, False, row)


class Ask(Change):
    """Answers questions about what is ready, held, delayed, dead and done."""

    def __init__(self) -> None:
        super().__init__()
        self._scanned: dict[int, int] = {}  # gid: no scan of its leases before (ns)
        # gid: which deaths it was looked for, and from which message on there may be more
        self._looked: dict[int, tuple[int, int]] = {}

    def abort(self) -> None:
        self._looked.clear()  # what was judged may still have to be
        super().abort()

    # What is ready

    def ready_count(self, group: GroupState) -> int:
        """Return how many messages are ready, visible or not."""
        topic = self._topics.get(group.tid) or self._topic(group.tid)
        queued = sum(topic.tails) - sum(group.cursor) - group.skipped
        return queued + group.n_back + group.n_suspect

    def live_bytes(self, extra: int = 0) -> int:
        """Estimate the bytes of messages that some group has not finished with, each taking `extra`
        more than what was put.
        """
        total = 0
        for topic in self.topics():
            if not topic.puts:
                continue
            groups = self.groups(topic.tid) or [self.template(topic.tid)]
            live = max(
                self.ready_count(group)
                + group.n_wait
                + group.n_parked
                + group.n_leased
                + group.n_dead
                for group in groups
            )
            total += live * (topic.put_bytes // topic.puts + extra)
        return total

    def count_without_row(self) -> int:
        """Return how many messages stand in position queues alone, counted for each group."""
        return sum(
            self.ready_count(group) - group.n_back - group.n_suspect
            for topic in self.topics()
            for group in self.groups(topic.tid) or [self.template(topic.tid)]
        )

    def move_due(self, group: GroupState, now_us: int) -> int:
        """Make ready what waited until now; return how many messages that are."""
        if not group.n_wait:
            return 0
        prefix = WAIT + U64.pack(group.gid)
        moved = 0
        for key, _ in self._scan(prefix, None, prefix + U64.pack(now_us + 1)):
            offset = U64.unpack(key[17:])[0]
            value = self._get(key_u64_u64(OTHER, group.gid, offset))
            assert value is not None, f"message {offset} waits and has no row"
            row = Row.unpack(value)
            self._unrank(group, offset, row)
            self._rank(group, offset, row, now_us)
            moved += 1
        if moved:
            self._must_commit()  # whoever only folds the log does not know of it
        return moved

    def pick(
        self,
        group: GroupState,
        n: int,
        visible: int,
        now_us: int = 0,
        suspects: int = 0,
    ) -> Picks:
        """Return up to `n` messages to deliver next; nothing is changed.

        The highest priority first, in order inside it; every sixteenth delivery of the group the
        oldest of any.  Call `move_due` before.

        Args:
            group: for whom.
            n: how many at most.
            visible: messages never delivered are offered below this offset only.
            now_us: the time, for messages that have run out meanwhile: they are not offered.
            suspects: how many messages that were in a crash the process holds now; another one is
                offered only if there is none, and then one.
        """
        if (
            n == 1
            and group.topic.order is group.order
            and not (group.n_back or group.n_suspect or group.skipped)
        ):
            # Most often: the next one of the only queue, in the part that is at hand.
            lane = group.lane
            part = group.part
            place = group.cursor[lane >> 4] - group.part_start
            if place < len(part.deltas):
                offset = part.base + part.deltas[place]
                if offset < visible:
                    return _new(Picks, ([offset], [lane], _NO_ROWS, True))
                return _NO_PICKS
        topic = self._topics.get(group.tid) or self._topic(group.tid)
        back = _Back(self, BACK, group, visible, now_us) if group.n_back else None
        suspect = None
        if group.n_suspect and suspects <= 0:
            suspect = _Back(self, SUSPECT, group, visible, now_us)
        cursor, tails = group.cursor, topic.tails
        queues = [p for p in topic.order if cursor[p] < tails[p]]
        if back is None and suspect is None and len(queues) <= 1:
            return self._pick_queue(group, topic, queues[0], n, visible) if queues else _NO_PICKS
        return picks_of(self._pick_merged(group, topic, n, visible, suspects, back, suspect))

    def _pick_queue(
        self, group: GroupState, topic: TopicState, priority: int, n: int, visible: int
    ) -> Picks:
        """Pick from one queue, when that is all there is."""
        picks: list[int] = []
        index, tail = group.cursor[priority], topic.tails[priority]
        if group.lane >> 4 != priority or index - group.part_start >= len(group.part.deltas):
            self._part(group, topic, priority)
        while len(picks) < n and index < tail:
            number, place = divmod(index, CHUNK_ENTRIES)
            chunk = self._chunk(topic, priority, number)
            base = chunk.base
            offsets = [base + delta for delta in chunk.deltas[place : place + n - len(picks)]]
            if offsets[-1] >= visible:
                del offsets[bisect_left(offsets, visible) :]
                tail = index + len(offsets)
            if not group.skipped:
                picks += offsets
                index += len(offsets)
                continue
            for offset in offsets:
                if self._skips(topic, offset):
                    self._pass(group, priority, index)
                else:
                    picks.append(offset)
                index += 1
        flags = [priority << 4 | FROM_QUEUE] * len(picks)
        return Picks(picks, flags, _NO_ROWS, not group.skipped)

    def _pass(self, group: GroupState, priority: int, index: int) -> None:
        """Move a cursor past an entry to be skipped, so that the next one does not look again."""
        # Not the template's: a new group begins at the first one kept, whoever looked before.
        if index == group.cursor[priority] and not group.is_template:
            group.cursor[priority] += 1
            group.skipped -= 1
            self._changed_groups[group.gid] = group

    def _pick_merged(
        self,
        group: GroupState,
        topic: TopicState,
        n: int,
        visible: int,
        suspects: int,
        back: _Back | None,
        suspect: _Back | None,
    ) -> list[Pick]:
        """Pick from all queues and what came back."""
        reach: dict[int, int] = {}  # priority: index in the queue
        picks: list[Pick] = []
        while len(picks) < n:
            fair = (group.picks + len(picks)) % FAIR == FAIR - 1
            best: Pick | None = None
            for priority in topic.order:
                if best is not None and not fair:
                    break
                pick = self._queue_head(group, topic, priority, reach, visible)
                if pick is not None and (best is None or pick.offset < best.offset):
                    best = pick
            for source in (back, suspect):
                if source is not None:
                    best = self._better(topic, best, source, fair)
            if best is None:
                break
            picks.append(best)
            if best.from_queue:
                reach[best.priority] += 1
            elif suspect is not None and best.row is not None and best.row.crash:
                suspect.take(best)
                if suspects != ALL_SUSPECTS:
                    suspect = None  # handed out alone
            elif back is not None:
                back.take(best)
        return picks

    def _better(
        self, topic: TopicState, best: Pick | None, source: _Back, fair: bool
    ) -> Pick | None:
        heads = [source.head_of(p) for p in topic.order] if fair else [source.head()]
        for pick in heads:
            if pick is None:
                continue
            if best is None or _rank_of(pick, fair) < _rank_of(best, fair):
                best = pick
        return best

    def _queue_head(
        self,
        group: GroupState,
        topic: TopicState,
        priority: int,
        reach: dict[int, int],
        visible: int,
    ) -> Pick | None:
        """Return the next one of a queue that is not to be skipped; `reach` follows."""
        index = reach.get(priority, group.cursor[priority])
        tail = topic.tails[priority]
        while index < tail:
            offset = self._entry(topic, priority, index)
            if offset >= visible:
                break
            if not (group.skipped and self._skips(topic, offset)):
                reach[priority] = index
                return Pick(offset, priority, True, None)
            self._pass(group, priority, index)
            index += 1
        reach[priority] = index
        return None

    def peek(self, group: GroupState, n: int, now_us: int) -> list[int]:
        """Return what would be delivered next, in that order, were all of it visible."""
        self.move_due(group, now_us)
        return self.pick(group, n, visible=NEVER, now_us=now_us, suspects=ALL_SUSPECTS).offsets

    # What is held or waits

    def leases(self, gid: int) -> list[tuple[int, Row]]:
        """Return all leases of a group."""
        return self._rows_of(LEASED, gid)

    def leases_of_dead(
        self, gid: int, deaths: int, living: set[int], limit: int
    ) -> tuple[list[tuple[int, Row]], bool]:
        """Return leases whose owner is not among the living, and whether there may be more. Of
        those and of all that are looked at so many at most; who asks again gets the following,
        while `deaths` is what it was, and nothing that was returned has become undone.
        """
        known, start = self._looked.get(gid, (deaths, 0))
        if known != deaths:
            start = 0
        gone: list[tuple[int, Row]] = []
        prefix = LEASED + U64.pack(gid)
        rows = self._scan(prefix, prefix + U64.pack(start))
        for looked, (key, value) in enumerate(rows, 1):
            row = Row.unpack(value)
            start = U64.unpack(key[9:])[0] + 1
            if row.owner not in living:
                gone.append((start - 1, row))
            if len(gone) >= limit or looked >= limit * _LOOKED_FOR_ONE:
                self._looked[gid] = deaths, start
                return gone, True
        self._looked.pop(gid, None)
        return gone, False

    def is_leased_to(self, gid: int, offset: int, owner: int) -> bool:
        """Whether a message is leased, and to this owner."""
        value = self._get(key_u64_u64(LEASED, gid, offset))
        return value is not None and Row.unpack(value).owner == owner

    def others(self, gid: int) -> list[tuple[int, Row]]:
        """Return what a group has back, waiting and parked."""
        return self._rows_of(OTHER, gid)

    def _rows_of(self, kind: bytes, gid: int) -> list[tuple[int, Row]]:
        return [
            (U64.unpack(key[9:])[0], Row.unpack(value))
            for key, value in self._scan(kind + U64.pack(gid))
        ]

    def lapsed(self, group: GroupState, now_ns: int, limit: int = 1000) -> list[tuple[int, Row]]:
        """Return leases whose deadline is over, `limit` at most.

        Looking at all leases costs; it is done only when one may have lapsed, and of many not
        too often.
        """
        if not group.n_leased or now_ns < group.next_deadline_ns:
            return []
        if now_ns < self._scanned.get(group.gid, 0):
            return []
        over: list[tuple[int, Row]] = []
        earliest = NEVER
        for key, value in self._scan(LEASED + U64.pack(group.gid)):
            row = Row.unpack(value)
            if row.deadline <= now_ns:
                over.append((U64.unpack(key[9:])[0], row))
                if len(over) >= limit:
                    return over
            elif row.deadline < earliest:
                earliest = row.deadline
        self._scanned[group.gid] = now_ns + group.n_leased * _SCAN_NS_A_LEASE
        if not over and group.next_deadline_ns != earliest:
            group.next_deadline_ns = earliest
            self._changed_groups[group.gid] = group
        return over

    def next_deadline(self, group: GroupState) -> int | None:
        """Return a lower bound of when the next lease runs out (ns); None: no lease does."""
        if not group.n_leased or group.next_deadline_ns == NEVER:
            return None
        return group.next_deadline_ns

    def expired(self, group: GroupState, now_us: int, limit: int = 1000) -> list[tuple[int, Row]]:
        """Return messages that are not leased and whose time to live is over."""
        prefix = EXPIRY + U64.pack(group.gid)
        over: list[tuple[int, Row]] = []
        for key, _ in self._scan(prefix, None, prefix + U64.pack(now_us + 1)):
            if len(over) >= limit:
                break
            offset = U64.unpack(key[17:])[0]
            value = self._get(key_u64_u64(OTHER, group.gid, offset))
            assert value is not None, f"message {offset} expires and has no row"
            over.append((offset, Row.unpack(value)))
        return over

    def bury_expired(self, template: GroupState, now_us: int, reason: str) -> None:
        """Make dead letters of what has run out before a group began, as one that begins would.

        For an answer alone: the transaction must not be committed.
        """
        while over := self.expired(template, now_us):
            for offset, _ in over:
                row = self.row(template.gid, offset)  # read now: another's leaving let it go on
                assert row is not None
                self._remove(template, offset, row, now_us)
                row.reason, row.died_us = reason, row.expiry_us
                self._bury(template, offset, row)

    def next_due(self, group: GroupState) -> int | None:
        """Return when something next gets ready or runs out (us); None: nothing waits."""
        if not (group.n_back or group.n_suspect or group.n_wait or group.n_parked):
            return None
        times = []
        for kind in (WAIT, EXPIRY):
            found = self._first(kind + U64.pack(group.gid))
            if found is not None:
                times.append(U64.unpack(found[0][9:17])[0])
        return min(times, default=None)

    # One message

    def find_id(self, tid: int, given: str) -> int | None:
        """Return the message that has an id given by its caller, if it is still kept.

        One that every group purged is not; a group that never had it has no say.
        """
        value = self._get(ID + U32.pack(tid) + id_hash(given))
        if value is None:
            return None
        offset, priority = ID_ROW.unpack(value)
        return None if self.is_free(tid, offset, priority) else int(offset)

    def knows(self, tid: int, offset: int) -> bool:
        """Whether the index has a message that is kept: not one that can be read itself, while the
        frame it was put in can't be read to its end and so brought none.
        """
        return (
            self._find(self._topic(tid), offset) is not None
            or self.row(tid, offset) is not None  # of the template, which has what is not plain
            or self._get(key_u64(MOVED, offset)) is not None
            or self._get(key_tid_u64(SKIP, tid, offset)) is not None
        )

    def is_free(self, tid: int, offset: int, priority: int) -> bool:
        """Whether the id of a message may be given again: it was cancelled, or all who had it
        purged it.
        """
        why = self._get(key_tid_u64(SKIP, tid, offset))
        if why is not None and why[1] == CANCELLED:
            return True
        groups = self.groups(tid)
        purged = [group for group in groups if self.purged(group.gid, offset, priority)]
        return bool(purged) and all(
            group in purged or not (self.deliveries(group, offset) or self.row(group.gid, offset))
            for group in groups
        )

    def state(self, group: GroupState, offset: int, priority_of: Callable[[int], int]) -> str:
        """Return where a message stands in a group.

        "ready", "leased", "delayed" (waits for its time or its key), "dead", "done" (or before
        what the group began with), "cancelled" or "purged".  `priority_of` gives the priority of a
        message; it is called only for one that has no row.  The message must be kept and applied.
        """
        row = self.row(group.gid, offset)
        if row is not None:
            if row.state == STATE_LEASED:
                return "leased"
            if row.state == STATE_DEAD:
                return "dead"
            return "ready" if row.state in (STATE_READY, STATE_SUSPECT) else "delayed"
        why = self._get(key_tid_u64(SKIP, group.tid, offset))
        if why is not None and why[1] == CANCELLED:
            return "cancelled"
        priority = priority_of(offset)
        if self.purged(group.gid, offset, priority):
            return "purged"
        if why is None and self._get(key_u64(MOVED, offset)) is None:
            topic = self._topic(group.tid)
            index = self._index_of(topic, priority, offset)
            ahead = group.cursor[priority] <= index < topic.tails[priority]
            if ahead and self._entry(topic, priority, index) == offset:
                return "ready"
        return "done"

    def dead(self, gid: int, after: int | None = None) -> Iterator[tuple[int, Row, str, int]]:
        """Yield the dead letters of a group as (offset, row, reason, died_us), by offset."""
        prefix = DEAD + U64.pack(gid)
        start = None if after is None else prefix + U64.pack(after + 1)
        for key, value in self._scan(prefix, start):
            row = Row.unpack(value)
            yield U64.unpack(key[9:])[0], row, row.reason, row.died_us

    def oldest(self, group: GroupState) -> int | None:
        """Return the first message that is ready, delayed or leased; None: there is none."""
        topic = self._topic(group.tid)
        found = []
        for priority in topic.order:
            pick = self._queue_head(group, topic, priority, {}, NEVER)
            if pick is not None:
                found.append(pick.offset)
        for kind in (LEASED, OTHER):
            row = self._first(kind + U64.pack(group.gid))
            if row is not None:
                found.append(U64.unpack(row[0][9:])[0])
        return min(found, default=None)

    def first_unsettled(self, group: GroupState) -> int:
        """Return the offset before which a group is done with everything."""
        oldest = self.oldest(group)
        return self.applied if oldest is None else oldest


def _rank_of(pick: Pick, fair: bool) -> tuple[int, int]:
    order = pick.offset if pick.row is None else pick.row.order
    return (0, order) if fair else (9 - pick.priority, order)
