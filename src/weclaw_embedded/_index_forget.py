"""What reclaim asks before it frees a part of the log, and what is forgotten when that is gone.

A message that some group still needs is live: it is to be carried (`_index_keep`) before its bytes
go.  What stood below the log's new head and was not carried is forgotten by `drop_below`, some
rows at a time; before the first of them goes, `forgotten_to` says up to where some may be missing.

No record says any of this, so nothing here is folded: reclaim, repair and opening call it.
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from ._index_keep import Keep
from ._index_rows import (
    ALONE,
    CANCELLED,
    DEAD,
    DELIVERED,
    FORGOTTEN_TO,
    ID_OF,
    LEASED,
    MOVED,
    MOVED_TO,
    OTHER,
    OWNER_AT,
    OWNER_NAME,
    OWNER_OF,
    PURGED,
    QUEUE,
    RESULT,
    SKIP,
    U32,
    U64,
    Row,
    key_queue,
    key_ranked,
    key_tid_u64,
    key_u64,
    key_u64_u64,
)
from ._index_topics import CHUNK_ENTRIES, GroupState, TopicState
from ._records import STATE_READY, STATE_SUSPECT


class Forget(Keep):
    """Says what is live; forgets what is gone."""

    # What is live

    def live_in(self, start: int, end: int, limit: int = 2**31) -> list[int]:
        """Return messages whose bytes stand in [start, end) and that some group still needs.

        In a topic that nobody reads the template is who needs them.  At most `limit` of them, in
        ascending order, those that were carried there first.
        """
        live = [message for message in self._carried_in(start, end) if self._needed(message)]
        found: set[int] = set()
        for topic in self.topics():
            owners = self._owners(topic.tid)
            for group in owners:
                for kind in (LEASED, OTHER, DEAD):
                    prefix = kind + U64.pack(group.gid)
                    for key, _ in self._scan(
                        prefix, prefix + U64.pack(start), prefix + U64.pack(end)
                    ):
                        message = U64.unpack(key[9:])[0]
                        if self._get(key_u64(MOVED, message)) is None:
                            found.add(message)
                        if len(found) >= limit:
                            break
            for message in self._unread(topic, owners, start, end):
                found.add(message)
                if len(found) >= limit:
                    break
        return (live + sorted(found))[:limit]

    def has_ready(self, start: int, end: int) -> bool:
        """Whether in [start, end) stands a message that some group may be given now."""
        for topic in self.topics():
            owners = self._owners(topic.tid)
            if next(self._unread(topic, owners, start, end), None) is not None:
                return True
            for group in owners:
                prefix = OTHER + U64.pack(group.gid)
                for _, value in self._scan(
                    prefix, prefix + U64.pack(start), prefix + U64.pack(end)
                ):
                    if Row.unpack(value).state in (STATE_READY, STATE_SUSPECT):
                        return True
        return False

    def _carried_in(self, start: int, end: int) -> list[int]:
        rows = self._scan(MOVED_TO, key_u64(MOVED_TO, start), key_u64(MOVED_TO, end))
        return [U64.unpack(value)[0] for _, value in rows]

    def _needed(self, offset: int) -> bool:
        """Whether a message that was carried has a row in a group that counts."""
        location = self.location(offset)
        assert location is not None
        return any(self.row(group.gid, offset) for group in self._owners(location.tid))

    def _unread(
        self, topic: TopicState, owners: list[GroupState], start: int, end: int
    ) -> Iterator[int]:
        """Yield what stands in the queues in [start, end) and some group has not come to."""
        skips = any(group.skipped for group in owners)
        for priority in topic.order:
            low = max(
                self._index_of(topic, priority, start),
                min(group.cursor[priority] for group in owners),
            )
            for index in range(low, self._index_of(topic, priority, end)):
                offset = self._entry(topic, priority, index)
                if not (skips and self._skips(topic, offset)):
                    yield offset

    # What may be forgotten

    @property
    def forgotten_to(self) -> int:
        """What stood below this offset, and was not carried, may be unknown here: the log begins
        there, or later.
        """
        offset = self.meta.get(FORGOTTEN_TO, 0)
        assert isinstance(offset, int), "as `drop_below` wrote it"
        return offset

    def drop_below(self, offset: int, limit: int = 10_000) -> bool:
        """Forget what stood below an offset and was not carried; True when nothing is left to do.

        Takes about `limit` rows at a time, so that no one waits long for it. Raises IndexFullError.
        """
        try:
            return self._drop_below(offset, limit)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _drop_below(self, offset: int, left: int) -> bool:
        if offset > self.forgotten_to:
            self.meta = {**self.meta, FORGOTTEN_TO: offset}
        for topic in self.topics():
            left -= self._drop_queues(topic, offset)
            if left > 0 and self.groups(topic.tid):
                left -= self._drop_template(topic, offset, left)
            left -= self._drop_skips(topic.tid, offset, left)
        left -= self._drop_moved(offset, left)
        left -= self._drop_ids(offset, left)
        left -= self._drop_names(offset, left)
        for group in self.groups():
            left -= self._drop_of_done(RESULT, group.gid, offset, left)
            left -= self._drop_of_done(DELIVERED, group.gid, offset, left)
            left -= self._drop_purged(group.gid, offset, left)
        self._must_commit()
        return left > 0

    def _drop_queues(self, topic: TopicState, offset: int) -> int:
        """Forget the entries of the queues below an offset; return how many chunks went."""
        firsts = {
            priority: index
            for priority in topic.order
            if (index := self._index_of(topic, priority, offset)) > topic.firsts[priority]
        }
        if not firsts:
            return 0
        skips: dict[int, list[int]] = {priority: [] for priority in firsts}
        prefix = SKIP + U32.pack(topic.tid)
        for key, value in self._scan(prefix, None, prefix + U64.pack(offset)):
            if value[0] in skips:
                place = self._index_of(topic, value[0], U64.unpack(key[5:])[0])
                if place < firsts[value[0]]:
                    skips[value[0]].append(place)
        for group in (self.template(topic.tid), *self.groups(topic.tid)):
            for priority, first in firsts.items():
                cursor = group.cursor[priority]
                if cursor < first:
                    group.skipped -= sum(cursor <= place for place in skips[priority])
                    group.cursor[priority] = first
                    self._changed_groups[group.gid] = group
        gone = 0
        for priority, first in firsts.items():
            for number in range(topic.firsts[priority] // CHUNK_ENTRIES, first // CHUNK_ENTRIES):
                self._delete(key_queue(QUEUE, topic.tid, priority, number))
                self._chunks.pop((topic.tid, priority, number), None)
                gone += 1
            topic.firsts[priority] = first
        self._changed_topics[topic.tid] = topic
        return gone

    def _drop_template(self, topic: TopicState, offset: int, limit: int) -> int:
        """A new group of a topic that has groups gets what is kept, and not what was."""
        prefix = OTHER + U64.pack(topic.tid)
        gone = 0
        for key, _ in self._scan(prefix, None, prefix + U64.pack(offset)):
            if gone >= limit:
                break
            self._leave_template(topic.tid, U64.unpack(key[9:])[0], 0)
            gone += 1
        return gone

    def _drop_skips(self, tid: int, offset: int, limit: int) -> int:
        prefix = SKIP + U32.pack(tid)
        gone = 0
        for key, value in self._scan(prefix, None, prefix + U64.pack(offset)):
            if gone >= limit:
                break
            # That a carried message was cancelled stays known as long as the message.
            if value[1] != CANCELLED or self._get(MOVED + key[5:]) is None:
                self._delete(key)
                gone += 1
        return gone

    def _drop_moved(self, offset: int, limit: int) -> int:
        """Forget the carried messages whose CARRY stood below an offset."""
        gone = 0
        for key, value in self._scan(MOVED_TO, None, key_u64(MOVED_TO, offset)):
            if gone >= limit:
                break
            self._delete(key)
            message = U64.unpack(value)[0]
            where = self.location(message)
            assert where is not None
            self._delete(key_u64(MOVED, message))
            self._delete(key_tid_u64(SKIP, where.tid, message))
            self._free_id(message)
            for group in self.groups(where.tid):
                self._delete(key_u64_u64(RESULT, group.gid, message))
                self._delete(key_u64_u64(DELIVERED, group.gid, message))
                self._delete(key_ranked(PURGED, group.gid, ALONE, message))
            gone += 1
        return gone

    def _drop_ids(self, offset: int, limit: int) -> int:
        gone = 0
        for key, _ in self._scan(ID_OF, None, key_u64(ID_OF, offset)):
            if gone >= limit:
                break
            message = U64.unpack(key[1:])[0]
            if self._get(key_u64(MOVED, message)) is None:
                self._free_id(message)
                gone += 1
        return gone

    def _drop_names(self, offset: int, limit: int) -> int:
        """Forget the names of owners who have no leases. Who lives introduces himself again when
        he takes something: what said it is gone.
        """
        last = dict(self._named_below(offset))
        leased = self._lessees([*last.values()])
        gone = 0
        for key, value in self._scan(OWNER_OF, None, key_u64(OWNER_OF, offset)):
            if gone >= limit:
                break
            token = last.get(U64.unpack(key[1:])[0])
            if token in leased:
                continue
            if token is not None:
                self._delete(OWNER_NAME + value)
                self._delete(OWNER_AT + value)
            self._delete(key)
            gone += 1
        return gone

    def _drop_of_done(self, kind: bytes, gid: int, offset: int, limit: int) -> int:
        """Forget what is kept of messages that are done: their results, how often delivered."""
        prefix = kind + U64.pack(gid)
        gone = 0
        for key, _ in self._scan(prefix, None, prefix + U64.pack(offset)):
            if gone >= limit:
                break
            if self._get(MOVED + key[9:]) is None:
                self._delete(key)
                gone += 1
        return gone

    def _drop_purged(self, gid: int, offset: int, limit: int) -> int:
        gone = 0
        for key, value in self._scan(PURGED + U64.pack(gid)):
            if gone >= limit:
                break
            end = U64.unpack(value)[0] if value else U64.unpack(key[10:])[0] + 1
            if end <= offset and (value or self._get(MOVED + key[10:]) is None):
                self._delete(key)
                gone += 1
        return gone
