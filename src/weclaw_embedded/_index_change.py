"""What records do that speak of topics, groups and many messages at once.

Each function is the whole meaning of one record.  What they say of messages, groups or topics that
are not known is passed over.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

import msgpack

from ._index_moves import Moves
from ._index_rows import (
    ALONE,
    BACK,
    CANCELLED,
    DEAD,
    DELIVERED,
    EXPIRY,
    GROUP,
    ID,
    ID_OF,
    ID_ROW,
    KEY,
    MOVED,
    MOVED_ROW,
    OF_GROUP,
    OPTIONS,
    OTHER,
    PURGED,
    RESULT,
    SKIP,
    SUSPECT,
    U32,
    U64,
    WAIT,
    Row,
    key_key,
    key_ranked,
    key_tid_u64,
    key_u64,
    key_u64_u64,
    name_key,
)
from ._index_topics import GroupState, TopicState
from ._records import (
    Cancel,
    Group,
    GroupDrop,
    Option,
    Pause,
    Purge,
    PurgeDead,
    Redrive,
    Replay,
    Topic,
    Void,
    one_more,
)


class Change(Moves):
    """Folds the records that change topics, groups and sets of messages."""

    # Topics and groups

    def _name_topic(self, said: Topic, offset: int, time_us: int) -> None:
        topic = self._topic(said.tid)
        if not topic.name:
            topic.name = said.name
            self._changed_topics[topic.tid] = topic
            self._put(name_key(said.name), U32.pack(topic.tid))
            self._must_commit()

    def _begin_group(self, said: Group, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        if group is not None:
            if not group.name:  # made by a delivery whose GROUP record was damaged
                group.name = said.name
                self.touch(group)
                self._must_commit()
            return
        if said.start == "earliest":
            start = 0
        else:
            start = offset if isinstance(said.start, str) else said.start
        self._make_group(said.tid, said.gid, said.name, start, offset, time_us)

    def _make_group(
        self, tid: int, gid: int, name: str, start: int, created: int, time_us: int
    ) -> GroupState:
        """Make a group that owns what the topic keeps from an offset on."""
        topic = self._topic(tid)
        group = self._groups[gid] = GroupState(tid, gid, name, start, created)
        for priority in topic.order:
            group.cursor[priority] = self._index_of(topic, priority, start)
        group.skipped = self._skipped_ahead(group, topic)
        self.touch(group)
        self._put(key_u64(GROUP, gid), group.pack())  # so that a scan of groups finds it
        if self._readers is not None:
            insort(self._readers.setdefault(tid, []), gid)
        prefix = OTHER + U64.pack(tid)
        for key, value in self._scan(prefix, prefix + U64.pack(start)):
            self._enter(group, U64.unpack(key[9:])[0], Row.unpack(value), time_us)
        if self._first(MOVED) is not None:
            # What was carried for want of a group is now carried for this one, not for later ones.
            for key, _ in self._scan(prefix):
                if self._get(MOVED + key[9:]) is not None:
                    self._leave_template(tid, U64.unpack(key[9:])[0], time_us)
        self._must_commit()
        return group

    def _reader(self, tid: int, gid: int, offset: int, time_us: int) -> GroupState:
        """Return a group; one that damage took the record of is made again, without a name."""
        return self.group(gid) or self._make_group(tid, gid, "", 0, offset, time_us)

    def _leave_template(self, tid: int, offset: int, time_us: int) -> None:
        """Take a message out of what a new group would get."""
        template = self.template(tid)
        row = self.row(tid, offset)  # read now: another's leaving may have let it go on
        if row is not None:
            self._remove(template, offset, row, time_us)

    def _skipped_ahead(self, group: GroupState, topic: TopicState) -> int:
        """Count the entries at or beyond a group's cursors that are not to be delivered.

        The template's count is none to go by: it is of those beyond its own cursors, which a look
        moves past what is to be skipped.
        """
        ahead = 0
        for key, value in self._scan(SKIP + U32.pack(topic.tid)):
            place = self._find(topic, U64.unpack(key[5:])[0]) if value[0] != ALONE else None
            ahead += place is not None and group.cursor[place[0]] <= place[1]
        return ahead

    def _drop_group(self, said: GroupDrop, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        if group is None or group.is_template:
            return
        gid = U64.pack(said.gid)
        for kind in OF_GROUP:
            self._clear(kind + gid)
        self._delete(GROUP + gid)
        del self._groups[said.gid]
        self._changed_groups.pop(said.gid, None)
        self._level_groups.pop(said.gid, None)
        if self._readers is not None:
            self._readers[group.tid].remove(said.gid)
        self._must_commit()

    def _pause(self, said: Pause, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        if group is not None:
            group.paused_until_us, group.pause_reason = said.until_us, said.reason
            self.touch(group)

    # What belongs to the file

    @property
    def options(self) -> dict[str, Any]:
        """The settings the log says belong to the file."""
        value = self._get(OPTIONS)
        return dict(msgpack.unpackb(value)) if value is not None else {}

    def _set_options(self, values: dict[str, Any]) -> None:
        self._must_commit()
        self._put(OPTIONS, msgpack.packb(values))

    def _option(self, said: Option, offset: int, time_us: int) -> None:
        values = self.options
        values.update(said.values)
        self._set_options({name: value for name, value in values.items() if value is not None})

    # Messages taken out

    def _void(self, said: Void, offset: int, time_us: int) -> None:
        for message in said.offsets:
            for topic in self.topics():
                if self._cancel(topic, message, time_us):
                    break

    def _cancel_all(self, said: Cancel, offset: int, time_us: int) -> None:
        topic = self.topic_by_id(said.tid)
        if topic is not None:
            for message in said.offsets:
                self._cancel(topic, message, time_us)

    def _cancel(self, topic: TopicState, offset: int, time_us: int) -> bool:
        """Take a message out of every group; return whether it was there."""
        key = key_tid_u64(SKIP, topic.tid, offset)
        why = self._get(key)
        if why is not None and why[1] == CANCELLED:
            return False
        # One that was carried is skipped in the queues already and lives in rows alone.
        place = self._find(topic, offset) if why is None else None
        known = place is not None or self._get(key_u64(MOVED, offset)) is not None
        for group in (self.template(topic.tid), *self.groups(topic.tid)):
            row = self.row(group.gid, offset)
            if row is not None:
                known = True
                self._remove(group, offset, row, time_us)
            elif place is not None and group.cursor[place[0]] <= place[1]:
                group.skipped += 1
                self._changed_groups[group.gid] = group
        if known:
            priority = why[0] if why is not None else place[0] if place is not None else ALONE
            self._put(key, bytes((priority, CANCELLED)))
            self._changed_topics[topic.tid] = topic
            self._free_id(offset)
        return known

    def _free_id(self, offset: int) -> None:
        """The id the caller gave a message may be given again."""
        name = self._pop(key_u64(ID_OF, offset))
        if name is not None:
            value = self._get(ID + name)
            if value is not None and ID_ROW.unpack(value)[0] == offset:
                self._delete(ID + name)

    def _purge(self, said: Purge, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        if group is None or group.is_template:
            return
        topic = self._topic(group.tid)
        gid = U64.pack(said.gid)
        for priority in topic.order:
            tail = topic.tails[priority]
            if group.cursor[priority] < tail:
                start = self._entry(topic, priority, group.cursor[priority])
                end = self._entry(topic, priority, tail - 1) + 1
                self._put(key_ranked(PURGED, said.gid, priority, start), U64.pack(end))
                group.cursor[priority] = tail
        group.skipped = 0
        for key, value in self._scan(OTHER + gid):
            row = Row.unpack(value)
            if row.keyed:
                self._delete(key_key(KEY, said.gid, row.keyhash, row.order))
            self._put(PURGED + gid + bytes((ALONE,)) + key[9:], b"")
            self._delete(key)
        for kind in (BACK, SUSPECT, WAIT, EXPIRY):
            self._clear(kind + gid)
        group.n_back = group.n_suspect = group.n_wait = group.n_parked = 0
        self._changed_groups[said.gid] = group

    def _purge_dead(self, said: PurgeDead, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        if group is None:
            return
        for message in said.offsets:
            if self._pop(key_u64_u64(DEAD, said.gid, message)) is not None:
                group.n_dead -= 1
                self._put(key_ranked(PURGED, said.gid, ALONE, message), b"")
        self._changed_groups[said.gid] = group

    def purged(self, gid: int, offset: int, priority: int) -> bool:
        """Whether a group purged a message of that priority."""
        if self._get(key_ranked(PURGED, gid, ALONE, offset)) is not None:
            return True
        prefix = key_ranked(PURGED, gid, priority, 0)[:-8]
        cursor = self._cursor()
        found = cursor.set_range(prefix + U64.pack(offset + 1))
        if not (cursor.prev() if found else cursor.last()):
            return False
        key, value = cursor.item()
        if not key.startswith(prefix) or offset >= U64.unpack(value)[0]:
            return False
        # A range is of the position queue. Of what lies between, the messages that were never in
        # it, or were carried out of it, were noted alone if they were purged.
        group = self.group(gid)
        if group is None or self._get(key_u64(MOVED, offset)) is not None:
            return False
        topic = self._topic(group.tid)
        index = self._index_of(topic, priority, offset)
        return index < topic.tails[priority] and self._entry(topic, priority, index) == offset

    def deliveries(self, group: GroupState, offset: int) -> int:
        """Return how often a group was handed a message it is done with; 0: it never had it."""
        value = self._get(key_u64_u64(DELIVERED, group.gid, offset))
        return int(U32.unpack(value)[0]) if value is not None else self._usual(group, offset)

    def _usual(self, group: GroupState, offset: int) -> int:
        """Return how often a group was handed a message it is done with if nothing is noted."""
        # A group may have begun before a message was carried, or after it.
        return int(offset >= group.start and self._get(key_u64(MOVED, offset)) is None)

    def _note_deliveries(self, group: GroupState, offset: int, count: int) -> None:
        """Remember how often a message that is done was handed over, for a replay."""
        if count != self._usual(group, offset):
            self._put(key_u64_u64(DELIVERED, group.gid, offset), U32.pack(count))

    # Messages that flow again

    def _redrive(self, said: Redrive, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        if group is None:
            return
        for place, (message, expiry_us) in enumerate(said.items):
            value = self._get(key_u64_u64(DEAD, said.gid, message))
            if value is None:
                continue
            row = Row.unpack(value)
            self._unlink(group, message, row)
            row.retry = row.crash = 0
            row.redrive = one_more(row.redrive)
            row.expiry_us = expiry_us
            row.order = offset + place  # an item takes more than a byte: no other order is the same
            row.reason, row.died_us = "", 0
            self._enter(group, message, row, time_us)

    def _replay(self, said: Replay, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        if group is None or group.is_template:
            return
        topic = self._topic(group.tid)
        for message, priority, keyhash, expiry_us in said.items:
            if not self._is_settled(group, topic, message, priority):
                continue
            if not topic.used >> priority & 1:
                topic.use(priority)
                self._changed_topics[topic.tid] = topic
            row = Row(priority, message, keyhash=keyhash, expiry_us=expiry_us)
            # Retries begin anew, hand-overs go on.
            row.delivery = self.deliveries(group, message)
            self._enter(group, message, row, time_us)
            self._delete(key_u64_u64(RESULT, said.gid, message))
            self._delete(key_u64_u64(DELIVERED, said.gid, message))

    def _is_settled(self, group: GroupState, topic: TopicState, offset: int, priority: int) -> bool:
        """Whether a message is known and this group is done with it."""
        if self.row(group.gid, offset) is not None or self.purged(group.gid, offset, priority):
            return False
        why = self._get(key_tid_u64(SKIP, topic.tid, offset))
        if why is not None and why[1] == CANCELLED:
            return False
        moved = self._get(key_u64(MOVED, offset))
        if moved is not None:
            return MOVED_ROW.unpack(moved)[3:] == (topic.tid, priority)
        index = self._index_of(topic, priority, offset)
        if index < topic.tails[priority] and self._entry(topic, priority, index) == offset:
            return index < group.cursor[priority]
        return self._get(key_u64_u64(OTHER, topic.tid, offset)) is not None
