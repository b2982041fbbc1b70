"""Topics, groups and position queues as they are now, read from the index when first asked for.

A `Queues` is a `State` that knows its way about: it finds or makes a topic and a group, puts an
offset at the end of a queue, and finds an entry by its index and an index by its offset.  Only the
last chunk of a queue ever changes; it is written at commit, or when it is full.

What is asked here may be asked by everything above that is folded into or asked of the index.  It
does not know what may happen to a message, nor when a transaction begins or ends; `_index_moves`
and `_index_state` do.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from ._index_rows import (
    GROUP,
    QUEUE,
    SKIP,
    TOPIC,
    U32,
    U64,
    key_queue,
    key_tid_u64,
    key_u32,
    key_u64,
    name_key,
)
from ._index_state import State
from ._index_topics import CHUNK_ENTRIES, GROUP_TID, Chunk, GroupState, TopicState
from ._records import FROM_QUEUE

_MAX_CHUNKS: Final = 64  # full chunks kept in memory, 4 KiB each


class Queues(State):
    """Finds and makes topics and groups; adds to the position queues and finds in them."""

    # Topics and groups

    def topic_by_id(self, tid: int) -> TopicState | None:
        """Return a topic; that of number 0, "default", is always there."""
        topic = self._topics.get(tid)
        if topic is None:
            value = self._look(key_u32(TOPIC, tid))
            if value is not None:
                topic = self._topics[tid] = TopicState.unpack(tid, value)
            elif tid == 0:
                topic = self._new_topic(0, "default")
        return topic

    def topic(self, name: str) -> TopicState | None:
        """Return the topic of that name."""
        if name == "default":
            return self.topic_by_id(0)
        tid = self._look(name_key(name))
        return self.topic_by_id(U32.unpack(tid)[0]) if tid is not None else None

    def topics(self) -> list[TopicState]:
        """Return all topics."""
        self.topic_by_id(0)
        tids = [U32.unpack(key[1:])[0] for key, _ in self._scan(TOPIC)]
        return [topic for topic in map(self.topic_by_id, tids) if topic is not None]

    def group(self, gid: int) -> GroupState | None:
        """Return a group, or the template of a topic for its number."""
        group = self._groups.get(gid)
        if group is None:
            value = self._look(key_u64(GROUP, gid))
            if value is not None:
                group = self._groups[gid] = GroupState.unpack(gid, value)
        return group

    def template(self, tid: int) -> GroupState:
        """Return what a new group of a topic would be."""
        group = self.group(tid)
        if group is None:
            self._new_topic(tid, "default" if tid == 0 else "")
            group = self._groups[tid]
        return group

    def groups(self, tid: int | None = None) -> list[GroupState]:
        """Return the groups of a topic, or of all; templates are none."""
        gids = self._gids()
        wanted = gids.get(tid, ()) if tid is not None else [g for row in gids.values() for g in row]
        return [group for group in map(self.group, wanted) if group is not None]

    def touch(self, group: GroupState) -> None:
        """Have a group written whose fields the caller changed."""
        group.text = None
        self._changed_groups[group.gid] = group

    def _gids(self) -> dict[int, list[int]]:
        """Return the groups of each topic, without its template."""
        if self._readers is None:
            self._readers = {}
            for key, value in self._scan(GROUP):
                gid = U64.unpack(key[1:])[0]
                tid = GROUP_TID.unpack_from(value)[0]
                if gid != tid:
                    self._readers.setdefault(tid, []).append(gid)
        return self._readers

    def _new_topic(self, tid: int, name: str) -> TopicState:
        topic = self._topics[tid] = TopicState(tid, name)
        self._changed_topics[tid] = topic
        if name:
            self._put(name_key(name), U32.pack(tid))
        self._put(key_u32(TOPIC, tid), topic.pack())
        template = self._groups[tid] = GroupState(tid, tid, "")
        self._changed_groups[tid] = template
        self._put(key_u64(GROUP, tid), template.pack())
        self._must_commit()
        return topic

    def _topic(self, tid: int) -> TopicState:
        """Return a topic, made without a name when nothing is known of it."""
        topic = self._topics.get(tid)
        return topic or self.topic_by_id(tid) or self._new_topic(tid, "")

    # Position queues

    def _tail(self, topic: TopicState, priority: int) -> Chunk:
        """Return the chunk that the next entry goes to."""
        chunk = topic.tail[priority]
        if chunk is None:
            number = topic.tails[priority] // CHUNK_ENTRIES
            value = self._look(key_queue(QUEUE, topic.tid, priority, number))
            chunk = topic.tail[priority] = Chunk() if value is None else Chunk.unpack(value)
        return chunk

    def _append(self, topic: TopicState, priority: int, offset: int) -> None:
        """Put an offset at the end of a queue."""
        (topic.tail[priority] or self._tail(topic, priority)).add(offset)
        tail = topic.tails[priority] = topic.tails[priority] + 1
        if not topic.used >> priority & 1:
            topic.use(priority)
        if tail % CHUNK_ENTRIES:
            topic.changed |= 1 << priority
        else:
            self._seal(topic, priority)

    def _seal(self, topic: TopicState, priority: int) -> None:
        """Write the last chunk, which is full, and begin another."""
        chunk = topic.tail[priority]
        assert chunk is not None
        number = topic.tails[priority] // CHUNK_ENTRIES - 1
        self._put(key_queue(QUEUE, topic.tid, priority, number), chunk.pack())
        topic.tail[priority] = Chunk()
        topic.changed &= ~(1 << priority)

    def _split(self, topic: TopicState, priority: int) -> None:
        """Write what the last chunk has too much as chunks of their own."""
        whole = topic.tail[priority]
        assert whole is not None
        if len(whole.deltas) < CHUNK_ENTRIES:
            return
        number = (topic.tails[priority] - len(whole.deltas)) // CHUNK_ENTRIES
        for start in range(0, len(whole.deltas), CHUNK_ENTRIES):
            chunk = whole.part(start, start + CHUNK_ENTRIES)
            if len(chunk.deltas) == CHUNK_ENTRIES:
                self._put(key_queue(QUEUE, topic.tid, priority, number), chunk.pack())
                number += 1
                chunk = Chunk()
        topic.tail[priority] = chunk
        if not chunk.deltas:
            topic.changed &= ~(1 << priority)

    def _chunk(self, topic: TopicState, priority: int, number: int) -> Chunk:
        """Return a chunk of a queue by its number."""
        if number == topic.tails[priority] // CHUNK_ENTRIES:
            return self._tail(topic, priority)
        name = (topic.tid, priority, number)
        chunk = self._chunks.get(name)
        if chunk is None:
            value = self._look(key_queue(QUEUE, *name))
            assert value is not None, f"chunk {number} of topic {topic.tid} is missing"
            if len(self._chunks) >= _MAX_CHUNKS:
                self._chunks.clear()
            chunk = self._chunks[name] = Chunk.unpack(value)
        return chunk

    def _part(self, group: GroupState, topic: TopicState, priority: int) -> Chunk:
        """Return the part of a queue that a group's cursor is in, and have it at hand."""
        number = group.cursor[priority] // CHUNK_ENTRIES
        part = self._chunk(topic, priority, number)
        if not group.is_template:  # to whom nothing is delivered
            group.lane = priority << 4 | FROM_QUEUE
            group.part = part
            group.part_start = number * CHUNK_ENTRIES
            group.topic = topic
            group.order = topic.order if len(topic.order) == 1 else None
        return part

    def _entry(self, topic: TopicState, priority: int, index: int) -> int:
        """Return the offset at an index of a queue."""
        number, place = divmod(index, CHUNK_ENTRIES)
        chunk = self._chunk(topic, priority, number)
        return chunk.base + chunk.deltas[place]

    def _index_of(self, topic: TopicState, priority: int, offset: int) -> int:
        """Return the index of the first kept entry of a queue that is not below an offset."""
        first, tail = topic.firsts[priority], topic.tails[priority]
        if first >= tail:
            return tail
        low, high = first // CHUNK_ENTRIES, (tail - 1) // CHUNK_ENTRIES
        if self._chunk(topic, priority, high).base <= offset:  # most are asked for near the end
            low = high
        while low < high:  # the last chunk that begins at or below the offset
            middle = (low + high + 1) // 2
            if self._chunk(topic, priority, middle).base <= offset:
                low = middle
            else:
                high = middle - 1
        chunk = self._chunk(topic, priority, low)
        place = bisect_left(chunk.deltas, offset - chunk.base)
        return min(max(low * CHUNK_ENTRIES + place, first), tail)

    def _find(self, topic: TopicState, offset: int) -> tuple[int, int] | None:
        """Return (priority, index) of a message in the position queues, if it is there."""
        for priority in topic.order:
            index = self._index_of(topic, priority, offset)
            if index < topic.tails[priority] and self._entry(topic, priority, index) == offset:
                return priority, index
        return None

    def _skips(self, topic: TopicState, offset: int) -> bool:
        """Whether an entry of the queue is not to be delivered."""
        return self._get(key_tid_u64(SKIP, topic.tid, offset)) is not None
