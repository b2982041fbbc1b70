"""The fold of many records at once: catching up with a log, or all of it anew.

Most records of a log are puts of plain messages, deliveries of the next one and acks, and most are
about the same queue and the same group as the ones before.  These are known by their heads and
folded in one loop, which makes no object of them, counts what they did only when something else
comes, and keeps leases that begin and end within it out of LMDB.  Every other record goes through
`Fold`, and what it was about is at hand for those like it that follow.

The answers are those of `Fold.apply`, whichever record was folded by which of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, TypeAlias

import lmdb

from ._format import ENVELOPE_BYTES, Stretch
from ._index_fold import Fold
from ._index_rows import RESULT, U64, key_u64_u64
from ._index_topics import NARROW, Chunk, GroupState, Leases, TopicState
from ._records import (
    ACK,
    ACK_HEAD,
    DELIVER,
    DELIVER_HEAD,
    DELIVER_ITEM,
    PRIORITIES,
    PUT,
    Readable,
)

__all__ = ["Frame", "Many"]

Frame: TypeAlias = tuple[int, int, int, int, int, Sequence[tuple[int, Readable]]]

# A DELIVER of one message and an ACK, each from its envelope on.
_DELIVER_ONE: Final = Struct("<I12xQQQQB")
_ACK: Final = Struct("<I12xQQ")
_ONE_SIZE: Final = DELIVER_HEAD.size + DELIVER_ITEM.size
_ACK_SIZE: Final = ACK_HEAD.size
_NO_HEAD: Final = -2  # of no record
_HEAD_BYTES: Final = 8  # of a record, that say what it is
_FEW: Final = 4  # it doesn't pay to have anything at hand for so many
_MOST_FRESH: Final = 50_000  # leases that are kept in memory, some 200 bytes each


class _Filling:
    """A position queue that puts go to: its last chunk, which may grow too long for a while."""

    __slots__ = ("chunk", "known", "priority", "topic")

    def __init__(self, topic: TopicState, priority: int, chunk: Chunk) -> None:
        self.topic = topic
        self.priority = priority
        self.chunk = chunk
        self.known = len(chunk.deltas)  # of the entries, those that the topic knows of


class Many(Fold):
    """Folds whole stretches of a log."""

    def apply_many(self, found: Iterable[Stretch | Frame]) -> int:
        """Fold all records of stretches and frames in order; return where the last one ends, 0 if
        there was none.

        Raises:
            IndexFullError: the transaction is over, nothing of it is in the index.
        """
        end = 0
        try:
            for one in found:
                if not isinstance(one, Stretch):
                    end = one[1]
                    self._fold_frame(one)
                    continue
                end = one.end
                self._fold_stretch(one)
                if sum(len(group.fresh) for group in self._changed_groups.values()) > _MOST_FRESH:
                    self._write_leases()
            if self._in_use:
                self._write_leases()
        except lmdb.Error as error:
            raise self._failed(error) from error
        return end

    def apply_stretch(self, stretch: Stretch) -> None:
        """Fold all records of one stretch. Raises as `apply_many` does."""
        try:
            self._fold_stretch(stretch)
            if self._in_use:
                self._write_leases()
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _fold_stretch(self, stretch: Stretch) -> None:
        base, data, heads, places, ends, _ = stretch
        if len(places) <= _FEW:
            self.apply(stretch.told(), is_all=False)
            return
        unpack_deliver = _DELIVER_ONE.unpack_from
        unpack_ack = _ACK.unpack_from
        # At hand: the queue last put to,
        filling: _Filling | None = None
        put_head = _NO_HEAD
        append = heads.append
        near = size = 0
        # and the group last at work, with the part of a queue that it has at hand itself.
        reading: GroupState | None = None
        deliver_head = ack_head = _NO_HEAD
        at = lane = priority = begun = spot = first = settled = soonest = 0
        deltas: Sequence[int] = ()
        leases: Leases = {}
        for head, place, end in zip(heads, places, ends, strict=True):
            if head == put_head:
                append(place - near)
                size += end - place
                continue
            if head == deliver_head:
                n, gid, owner, deadline_ns, message, flags = unpack_deliver(data, place)
                if (
                    gid == at
                    and flags == lane
                    and n == _ONE_SIZE
                    and spot < len(deltas)
                    and deltas[spot] == message - first
                ):
                    spot += 1
                    leases[message] = (priority, owner, deadline_ns)
                    if deadline_ns < soonest:
                        soonest = deadline_ns
                    continue
            elif head == ack_head:
                n, gid, message = unpack_ack(data, place)
                if gid == at and leases.pop(message, None) is not None:
                    settled += 1
                    if n > _ACK_SIZE:
                        self._put(key_u64_u64(RESULT, gid, message), U64.pack(base + place))
                    continue
            # Everything else in the general way; then what it was about is at hand.
            if filling is not None and not self._level_queue(filling, size):
                filling, put_head = None, _NO_HEAD
            if reading is not None:
                self._level_group(reading, spot - begun, settled, soonest)
            size = settled = 0
            begun = spot
            record = data[place + ENVELOPE_BYTES : end]
            self.apply(((base + place, stretch.time_us(place), (record,)),), is_all=False)
            kind = head & 255
            if kind == PUT:
                filling, put_head = self._filling(head, stretch.end), _NO_HEAD
                if filling is not None:
                    put_head = head
                    append = filling.chunk.deltas.append
                    near = filling.chunk.base - base
                continue
            deliver_head = ack_head = _NO_HEAD
            if kind not in (DELIVER, ACK):
                filling, put_head, reading = None, _NO_HEAD, None
                continue
            reading = self._reading(data, place)
            if reading is not None:
                rest = head & ~0xFFFFFFFF  # the topic
                deliver_head, ack_head = rest | 1 << 16 | DELIVER, rest | ACK
                at, lane, leases = reading.gid, reading.lane, reading.fresh
                priority = lane >> 4
                deltas, first = reading.part.deltas, reading.part.base
                begun = spot = reading.cursor[priority] - reading.part_start
                soonest = reading.next_deadline_ns
        if filling is not None:
            self._level_queue(filling, size)
        if reading is not None:
            self._level_group(reading, spot - begun, settled, soonest)

    def _fold_frame(self, frame: Frame) -> None:
        """Fold a frame that goes over several segments. Those of `put_many` most often hold plain
        messages of one queue, which are added to it at one stroke.
        """
        _, end, time_us, _, _, records = frame
        told = [(offset, time_us, (record,)) for offset, record in records]
        heads = {bytes(record[:_HEAD_BYTES]) for _, record in records}
        # None where all that begins in it stood in segments that are given back.
        first = heads.pop() if heads else b""
        if heads or len(told) <= _FEW or len(first) < _HEAD_BYTES or first[0] != PUT:
            self.apply(told, is_all=False)
            return
        self.apply(told[:1], is_all=False)
        filling = self._filling(int.from_bytes(first, "little"), end)
        if filling is None:
            self.apply(told[1:], is_all=False)
            return
        near = filling.chunk.base
        filling.chunk.deltas.extend([offset - near for offset, _ in records[1:]])
        self._level_queue(filling, sum(ENVELOPE_BYTES + len(record) for _, record in records[1:]))

    def _filling(self, head: int, until: int) -> _Filling | None:
        """The queue that plain puts with that head go to, if more can simply be added to it."""
        priority, tid = head >> 12 & 15, head >> 32
        if priority >= PRIORITIES or head >> 16 & 0xFFFF:
            return None
        topic = self._topic(tid)
        chunk = self._tail(topic, priority)
        if not chunk.deltas or until - chunk.base > NARROW:
            return None
        return _Filling(topic, priority, chunk)

    def _level_queue(self, filling: _Filling, size: int) -> bool:
        """Have the topic know of what was added to one of its queues; whether more can be."""
        topic, priority = filling.topic, filling.priority
        added = len(filling.chunk.deltas) - filling.known
        if added:
            topic.puts += added
            topic.put_bytes += size - added * ENVELOPE_BYTES
            topic.tails[priority] += added
            topic.changed |= 1 << priority
            self._changed_topics[topic.tid] = topic
            self._split(topic, priority)
            filling.known += added
        return topic.tail[priority] is filling.chunk

    def _reading(self, data: bytes, place: int) -> GroupState | None:
        """The group that a DELIVER or an ACK was for, now that it is done, if more of both can
        simply be told of it.
        """
        group = self._groups.get(_ACK.unpack_from(data, place)[1])
        # Where some are skipped it may be one of these that is next.
        return group if group is not None and group.fresh and not group.skipped else None

    def _level_group(self, group: GroupState, taken: int, settled: int, soonest: int) -> None:
        """Have a group know of what it was handed out and what it settled."""
        if taken or settled:
            group.cursor[group.lane >> 4] += taken
            group.picks += taken
            group.settled += settled
            group.next_deadline_ns = soonest
            self._changed_groups[group.gid] = group
