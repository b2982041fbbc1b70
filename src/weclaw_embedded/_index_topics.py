"""Topics, groups and the parts of position queues: what of the index stays in memory.  Pure.

The objects of the rows TOPIC, GROUP and QUEUE, which are read once and written at commit, while
the rows of messages (`_index_rows`) are read and written one by one.  Each packs itself to the
value of its row and is unpacked from it.  They count and remember; who changes their fields sees
to it that they are written, as `_index_state` says.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any, Final, TypeAlias

import msgpack

from ._records import NEVER, PRIORITIES

# The position queue

CHUNK_ENTRIES: Final = 1018  # with its base exactly one page of LMDB
NARROW: Final = 2**32 - 1  # so far may an entry be from the first one, at four bytes
_WIDE: Final = 1 << 63
_BASE: Final = struct.Struct("=Q")


class Chunk:
    """Part of a position queue: ascending offsets, four bytes each (eight when far apart)."""

    __slots__ = ("base", "deltas")

    def __init__(self) -> None:
        self.base = 0
        self.deltas: array[int] = array("I")

    def add(self, offset: int) -> None:
        """Append an offset, which is larger than all before it."""
        deltas = self.deltas
        if not deltas:
            self.base = offset
        try:
            deltas.append(offset - self.base)
        except OverflowError:
            self.deltas = array("Q", deltas)
            self.deltas.append(offset - self.base)

    def part(self, start: int, end: int) -> Chunk:
        """Return some of its entries as a chunk of their own."""
        chunk = Chunk()
        deltas = self.deltas[start:end]
        first = deltas[0]
        chunk.base = self.base + first
        is_narrow = deltas[-1] - first <= NARROW
        chunk.deltas = array("I" if is_narrow else "Q", [delta - first for delta in deltas])
        return chunk

    def pack(self) -> bytes:
        """Return the chunk's value."""
        base = self.base if self.deltas.itemsize == 4 else self.base | _WIDE
        return _BASE.pack(base) + self.deltas.tobytes()

    @classmethod
    def unpack(cls, value: bytes) -> Chunk:
        """Return the chunk a value says."""
        chunk = cls()
        base = _BASE.unpack_from(value)[0]
        if base & _WIDE:
            base ^= _WIDE
            chunk.deltas = array("Q")
        chunk.base = base
        chunk.deltas.frombytes(value[_BASE.size :])
        return chunk


_NO_PART: Final = Chunk()

# Topics and groups

# Leases that are not written yet, by offset: (priority, owner, deadline).
Leases: TypeAlias = dict[int, tuple[int, int, int]]

_TOPIC_ROW: Final = struct.Struct(f"<{PRIORITIES}Q{PRIORITIES}QQQH")
_GROUP_ROW: Final = struct.Struct(f"<I4x{PRIORITIES}Q7Q8Q")


class TopicState:
    """A topic: how far its position queues reach.

    `tails` and `firsts` are, for each priority, the index after the last entry and that of the
    first one kept.  `puts` and `put_bytes` count all messages ever put.
    """

    __slots__ = (
        "changed",
        "firsts",
        "name",
        "order",
        "put_bytes",
        "puts",
        "tail",
        "tails",
        "tid",
        "used",
    )

    def __init__(self, tid: int, name: str) -> None:
        self.tid = tid
        self.name = name
        self.tails = [0] * PRIORITIES
        self.firsts = [0] * PRIORITIES
        self.puts = 0
        self.put_bytes = 0
        self.used = 0
        self.order: tuple[int, ...] = ()  # priorities in use, highest first
        self.tail: list[Chunk | None] = [None] * PRIORITIES  # loaded when needed
        self.changed = 0  # bits of the priorities whose last chunk is not written yet

    def use(self, priority: int) -> None:
        """Note that a priority is in use."""
        self.used |= 1 << priority
        self.order = tuple(p for p in range(PRIORITIES - 1, -1, -1) if self.used >> p & 1)

    def pack(self) -> bytes:
        """Return the topic's value."""
        return (
            _TOPIC_ROW.pack(
                *self.tails,
                *self.firsts,
                self.puts,
                self.put_bytes,
                self.used,
            )
            + self.name.encode()
        )

    @classmethod
    def unpack(cls, tid: int, value: bytes) -> TopicState:
        """Return the topic a value says."""
        topic = cls(tid, value[_TOPIC_ROW.size :].decode())
        fields = _TOPIC_ROW.unpack_from(value)
        topic.tails = list(fields[:PRIORITIES])
        topic.firsts = list(fields[PRIORITIES : 2 * PRIORITIES])
        topic.puts, topic.put_bytes, used = fields[2 * PRIORITIES :]
        topic.used = used
        topic.order = tuple(p for p in range(PRIORITIES - 1, -1, -1) if used >> p & 1)
        return topic


_NO_TOPIC: Final = TopicState(0, "")


class GroupState:
    """A group: how far it is in the position queues, and how many messages it has where.

    `cursor` is, for each priority, the index of the first entry of the position queue not handed
    out yet; `skipped` counts entries from there on that are not to be delivered.  `start` is the
    offset before which the group owns nothing, `created` that of the record that made it.
    `next_deadline_ns` is a lower bound of the deadlines of its leases.  `fresh` are leases of plain
    messages that have no row yet, which LMDB gets before the group.

    `part` is the part of a position queue that the group read last, which begins at the index
    `part_start`, and `lane` says of which queue: the priority and that it is from the queue, as the
    items of a DELIVER do.  Once it was right it stays so: entries are only ever added behind the
    last, and a part that is full never changes.  `topic` is that of the queue, and `order` what its
    order was if it had no other queue.
    """

    __slots__ = (
        "created",
        "cursor",
        "dead_seen",
        "fresh",
        "gid",
        "lane",
        "n_back",
        "n_dead",
        "n_lease_rows",
        "n_parked",
        "n_suspect",
        "n_wait",
        "name",
        "next_deadline_ns",
        "order",
        "part",
        "part_start",
        "pause_reason",
        "paused_until_us",
        "picks",
        "retries",
        "settled",
        "skipped",
        "start",
        "text",
        "tid",
        "topic",
    )

    def __init__(self, tid: int, gid: int, name: str, start: int = 0, created: int = 0) -> None:
        self.tid = tid
        self.gid = gid
        self.name = name
        self.start = start
        self.created = created
        self.cursor = [0] * PRIORITIES
        self.skipped = 0
        self.n_back = 0
        self.n_suspect = 0
        self.n_wait = 0
        self.n_parked = 0
        self.n_lease_rows = 0
        self.n_dead = 0
        self.settled = 0
        self.retries = 0
        self.picks = 0
        self.next_deadline_ns = NEVER
        self.dead_seen = 0
        self.paused_until_us = 0
        self.pause_reason = ""
        self.text: bytes | None = None  # name and reason, packed
        self._begin()

    def _begin(self) -> None:
        self.fresh: Leases = {}
        self.part = _NO_PART
        self.part_start = 0
        self.lane = -1
        self.topic: TopicState = _NO_TOPIC
        self.order: tuple[int, ...] | None = None

    @property
    def n_leased(self) -> int:
        """How many messages are leased."""
        return self.n_lease_rows + len(self.fresh)

    @property
    def is_template(self) -> bool:
        """Whether this stands for the group that a topic would give a new reader."""
        return self.gid == self.tid

    def pack(self) -> bytes:
        """Return the group's value."""
        assert not self.fresh, "leases are written before their group"
        text = self.text
        if text is None:
            text = self.text = msgpack.packb([self.name, self.pause_reason])
        return (
            _GROUP_ROW.pack(
                self.tid,
                *self.cursor,
                self.skipped,
                self.n_back,
                self.n_suspect,
                self.n_wait,
                self.n_parked,
                self.n_lease_rows,
                self.n_dead,
                self.settled,
                self.retries,
                self.picks,
                self.next_deadline_ns,
                self.dead_seen,
                self.paused_until_us,
                self.start,
                self.created,
            )
            + text
        )

    @classmethod
    def unpack(cls, gid: int, value: bytes) -> GroupState:
        """Return the group a value says."""
        group = cls.__new__(cls)
        group.gid = gid
        fields: tuple[Any, ...] = _GROUP_ROW.unpack_from(value)
        group.tid = fields[0]
        group.cursor = list(fields[1 : 1 + PRIORITIES])
        (
            group.skipped,
            group.n_back,
            group.n_suspect,
            group.n_wait,
            group.n_parked,
            group.n_lease_rows,
            group.n_dead,
            group.settled,
            group.retries,
            group.picks,
            group.next_deadline_ns,
            group.dead_seen,
            group.paused_until_us,
            group.start,
            group.created,
        ) = fields[1 + PRIORITIES :]
        group.text = value[_GROUP_ROW.size :]
        group.name, group.pause_reason = msgpack.unpackb(group.text)
        group._begin()
        return group


GROUP_TID: Final = struct.Struct("<I")  # a group's value begins with its topic
