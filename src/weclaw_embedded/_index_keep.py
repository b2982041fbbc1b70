"""What reclaim says again further on, and what that means to an index that reads it.

A log begins at its head and everything before is gone.  All records that speak of a message follow
its PUT, so that what is kept tells all of the messages that are kept.  Three things are told again:

- CHECKPOINT says what is not a message: topics, groups, settings, and what they counted.  To an
  index that folded everything it says nothing new.  Written with each move of the head, it makes
  a rebuild count exactly: what it missed was said before, of messages that are gone.
- CARRY says all of one live message, and where it stands in every group.  From there on it lives
  in rows: the queues skip it, and its location is that of the CARRY.
- What is neither kept nor carried is forgotten, by `_index_forget`.

Reclaim asks for what is to be said; `_index_fold` folds it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from ._index_notes import Notes
from ._index_rows import (
    ALONE,
    CARRIED,
    ID,
    ID_OF,
    ID_ROW,
    MOVED,
    MOVED_ROW,
    MOVED_TO,
    PURGED,
    RESULT,
    SKIP,
    U32,
    U64,
    Location,
    Row,
    id_hash,
    key_ranked,
    key_tid_u64,
    key_u64,
    key_u64_u64,
    name_key,
)
from ._index_topics import GroupState, TopicState
from ._records import (
    GROUP_BIT,
    META_ID,
    META_KEY,
    PRIORITIES,
    STATE_DEAD,
    STATE_LEASED,
    STATE_READY,
    CarriedRow,
    Carry,
    Checkpoint,
    CheckpointGroup,
    CheckpointTopic,
    key_hash,
    unpack_put,
)


class Keep(Notes):
    """Says and folds what reclaim moves."""

    # Checkpoints

    def checkpoint_state(self) -> Checkpoint:
        """Return what is not a message and must outlive the segments it was said in.

        Everything appended so far must be applied: the record that says it must be the next one.
        """
        topics = self.topics()
        return Checkpoint(
            [CheckpointTopic(t.tid, t.name, t.puts, t.put_bytes) for t in topics],
            [self._checkpoint_group(group) for group in self.groups()],
            self.options,
            [
                (U64.unpack(key[1:9])[0], key[9], U64.unpack(key[10:])[0], U64.unpack(value)[0])
                for key, value in self._scan(PURGED)
                if key[9] != ALONE
            ],
        )

    def _checkpoint_group(self, group: GroupState) -> CheckpointGroup:
        topic = self._topic(group.tid)
        cursors = [0] * PRIORITIES
        for priority in topic.order:
            cursor, tail = group.cursor[priority], topic.tails[priority]
            if cursor < tail:
                cursors[priority] = self._entry(topic, priority, cursor)
            elif topic.firsts[priority] < tail:
                cursors[priority] = self._entry(topic, priority, tail - 1) + 1
        return CheckpointGroup(
            group.tid,
            group.gid,
            group.name,
            group.start,
            group.created,
            cursors,
            group.settled,
            group.retries,
            group.picks,
            group.paused_until_us,
            group.pause_reason,
        )

    def seed(self, checkpoint: Checkpoint, head: int) -> None:
        """Begin an empty index with what a checkpoint knows from before the log's head.

        Groups made at or after the head are left to their own records.
        """
        for topic in checkpoint.topics:
            self._known_topic(topic)
        for said in checkpoint.groups:
            if said.created < head and self.group(said.gid) is None:
                self._make_group(said.tid, said.gid, said.name, said.start, said.created, 0)

    def _known_topic(self, said: CheckpointTopic) -> TopicState:
        topic = self._topic(said.tid)
        if not topic.name and said.name:
            topic.name = said.name
            self._put(name_key(said.name), U32.pack(said.tid))
            self._must_commit()
        self._changed_topics[said.tid] = topic
        return topic

    def _checkpoint(self, said: Checkpoint, offset: int, time_us: int) -> None:
        for told in said.topics:
            topic = self._known_topic(told)
            topic.puts, topic.put_bytes = told.puts, told.put_bytes
        for row in said.groups:
            self._checkpoint_met(row, time_us)
        if said.options != self.options:
            self._set_options(said.options)
        for gid, priority, start, end in said.purged:
            key = key_ranked(PURGED, gid, priority, start)
            end = min(end, offset)  # what comes later was not purged
            if start < end and self.group(gid) is not None and self._get(key) is None:
                self._put(key, U64.pack(end))

    def _checkpoint_met(self, said: CheckpointGroup, time_us: int) -> None:
        group = self.group(said.gid)
        if group is None:
            topic = self._topic(said.tid)
            group = self._make_group(
                said.tid, said.gid, said.name, said.start, said.created, time_us
            )
            for priority in topic.order:
                index = self._index_of(topic, priority, said.cursors[priority])
                group.cursor[priority] = max(group.cursor[priority], index)
            group.skipped = self._skipped_ahead(group, topic)
        if not group.name:
            group.name = said.name
            self._must_commit()
        group.start, group.created = said.start, said.created
        group.settled, group.retries, group.picks = said.settled, said.retries, said.picks
        group.paused_until_us, group.pause_reason = said.paused_until_us, said.pause_reason
        self.touch(group)

    # Carried messages

    def _owners(self, tid: int) -> list[GroupState]:
        """Return those a message must be kept for: the groups, or the template where none is."""
        return self.groups(tid) or [self.template(tid)]

    def carried_state(
        self,
        offset: int,
        *,
        put: bytes,
        salt: int,
        time_us: int,
        result: Callable[[int, int], bytes],
    ) -> Carry:
        """Return all of one message, to be said again at the end of the log.

        Args:
            offset: which message.
            put: the bytes of its PUT.
            salt: that of the segment the PUT was written in.
            time_us: that of the frame the PUT was written in.
            result: gives the packed result of (gid, location), the location as from `result_at`.
        """
        said = unpack_put(put)
        topic = self._topic(said.tid)
        place = self._find(topic, offset)
        skipped = self._skips(topic, offset)
        rows: list[CarriedRow] = []
        results: list[tuple[int, bytes]] = []
        for group in self._owners(said.tid):
            row = self.row(group.gid, offset)
            ahead = place is not None and group.cursor[place[0]] <= place[1]
            if row is None and ahead and not skipped:
                row = Row(said.priority, offset, size=len(put))
                row.state = STATE_READY
            if row is not None:
                rows.append(_carried_row(group.gid, row))
            location = self.result_at(group.gid, offset)
            if location is not None:
                results.append((group.gid, result(group.gid, location)))
        purged = [
            group.gid
            for group in self._owners(said.tid)
            if self.purged(group.gid, offset, said.priority)
        ]
        told = {row.gid for row in rows}.union(purged)
        deliveries = [
            (group.gid, count)
            for group in self.groups(said.tid)
            if group.gid not in told and (count := self.deliveries(group, offset))
        ]
        return Carry(offset, salt, time_us, put, rows, results, purged, deliveries)

    def _carry(self, said: Carry, offset: int, time_us: int) -> None:
        put = unpack_put(said.put)
        message = said.offset
        if message >= offset:
            self.note_damage(offset, f"a CARRY of a message at {message}, which comes after it")
            return
        topic = self._topic(put.tid)
        if not topic.used >> put.priority & 1:
            topic.use(put.priority)
        self._changed_topics[put.tid] = topic
        place = self._find(topic, message)
        skipped = self._skips(topic, message)
        for group in (self.template(put.tid), *self.groups(put.tid)):
            row = self.row(group.gid, message)
            if row is not None:
                self._remove(group, message, row, time_us)  # the next of its key goes, and back
            elif place is not None and not skipped and group.cursor[place[0]] <= place[1]:
                group.skipped += 1
                self._changed_groups[group.gid] = group
        if place is not None and not skipped:
            key = key_tid_u64(SKIP, put.tid, message)
            self._put(key, bytes((put.priority, CARRIED)))
        key_name = put.meta.get(META_KEY)
        keyhash = key_hash(key_name) if key_name is not None else None
        for told in said.rows:
            if told.gid >= GROUP_BIT:
                owner = self._reader(put.tid, told.gid, offset, time_us)
                if owner.tid != put.tid:
                    continue  # a group of another topic has no such message
            else:
                owner = self.template(put.tid)
            row = _told_row(told, put.priority, len(said.put), keyhash)
            self._settle_in(owner, message, row, told.state, time_us)
        for gid, _ in said.results:
            if self.group(gid) is not None:
                self._put(key_u64_u64(RESULT, gid, message), U64.pack(offset))
        for gid in said.purged:
            if self.group(gid) is not None:
                self._put(key_ranked(PURGED, gid, ALONE, message), b"")
        self._move(said, put.tid, put.priority, offset)
        for gid, count in said.deliveries:
            done = self.group(gid)
            if done is not None:
                self._note_deliveries(done, message, count)
        given = put.meta.get(META_ID)
        if given is not None:
            self._give_id(put.tid, given, message, put.priority)

    def _give_id(self, tid: int, given: str, offset: int, priority: int) -> None:
        """Let a message be found by the id its caller gave it, unless a later one has it."""
        name = U32.pack(tid) + id_hash(given)
        value = self._get(ID + name)
        if value is not None and ID_ROW.unpack(value)[0] > offset:
            return
        self._put(ID + name, ID_ROW.pack(offset, priority))
        self._put(key_u64(ID_OF, offset), name)

    def _settle_in(self, group: GroupState, offset: int, row: Row, state: int, now_us: int) -> None:
        """Give a carried message the row it had."""
        if state == STATE_DEAD:
            self._bury(group, offset, row)
        elif state == STATE_LEASED:
            if row.keyed:
                self._join_key(group, offset, row, leased=True)
            self._lease(group, offset, row)
        else:
            self._enter(group, offset, row, now_us)

    def _move(self, said: Carry, tid: int, priority: int, location: int) -> None:
        key = key_u64(MOVED, said.offset)
        old = self._get(key)
        if old is not None:
            self._delete(key_u64(MOVED_TO, MOVED_ROW.unpack(old)[0]))
        self._put(key, MOVED_ROW.pack(location, said.salt, said.time_us, tid, priority))
        self._put(key_u64(MOVED_TO, location), U64.pack(said.offset))

    def location(self, offset: int) -> Location | None:
        """Return where a message that was carried stands; None: where it was put."""
        value = self._get(key_u64(MOVED, offset))
        return Location(*MOVED_ROW.unpack(value)) if value is not None else None

    def result_at(self, gid: int, offset: int) -> int | None:
        """Return the offset of the ACK or CARRY that holds the result of a message."""
        value = self._get(key_u64_u64(RESULT, gid, offset))
        return U64.unpack(value)[0] if value is not None else None

    def results(self, gid: int, after: int, limit: int) -> list[tuple[int, int]]:
        """Return `limit` messages beyond `after` that have a result, each with `result_at`."""
        prefix = RESULT + U64.pack(gid)
        rows = self._scan(prefix, prefix + U64.pack(after + 1))
        return [(U64.unpack(key[9:])[0], U64.unpack(at)[0]) for key, at in islice(rows, limit)]


def _carried_row(gid: int, row: Row) -> CarriedRow:
    return CarriedRow(
        gid,
        row.state,
        row.owner,
        row.deadline,
        row.order,
        row.expiry_us,
        row.delivery,
        row.retry,
        row.crash,
        row.redrive,
        row.failures,
        row.reason,
        row.died_us,
    )


def _told_row(told: CarriedRow, priority: int, size: int, keyhash: bytes | None) -> Row:
    row = Row(priority, told.order, deadline=told.deadline, expiry_us=told.expiry_us, size=size)
    if keyhash is not None:
        row.keyhash = keyhash
    row.owner = told.owner
    row.delivery, row.retry = told.delivery, told.retry
    row.crash, row.redrive = told.crash, told.redrive
    row.failures = list(told.failures)
    row.reason, row.died_us = told.reason, told.died_us
    return row
