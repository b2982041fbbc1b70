"""Moving a message from one place of a group to another.

What stays true in every group, whatever is moved:
- a message has one row, in LEASED, OTHER or DEAD, or none: then it is in the queue or done;
- of one key at most one message is leased, ready or waiting, the first in order unless the first
  came back (replay) while another was leased; all others are parked;
- the counters of the group say how many rows there are of each kind.

It does not know records; those are `_index_change`'s, `_index_keep`'s and `_index_fold`'s.
"""

from __future__ import annotations

from ._index_queues import Queues
from ._index_rows import (
    BACK,
    DEAD,
    EXPIRY,
    KEY,
    LEASED,
    OTHER,
    SUSPECT,
    U64,
    WAIT,
    Row,
    key_key,
    key_ranked,
    key_u64_u64,
)
from ._index_topics import GroupState, TopicState
from ._records import (
    STATE_DEAD,
    STATE_LEASED,
    STATE_PARKED,
    STATE_READY,
    STATE_SUSPECT,
    STATE_WAITING,
)


class Moves(Queues):
    """Moves messages; keeps rows, keys and counters true."""

    def _consume(self, group: GroupState, topic: TopicState, priority: int, offset: int) -> bool:
        """Move a group's cursor past a message; False if it was past it or must not have it.

        What stands in between and is not to be skipped goes back as ready: only damage can have
        taken the record that delivered it.
        """
        index = self._index_of(topic, priority, offset)
        cursor = group.cursor[priority]
        if index < cursor or index >= topic.tails[priority]:
            return False
        if self._entry(topic, priority, index) != offset:
            return False
        for between in range(cursor, index):
            passed = self._entry(topic, priority, between)
            if group.skipped and self._skips(topic, passed):
                group.skipped -= 1
            else:
                self._place(group, passed, Row(priority, passed), 0)
        group.cursor[priority] = index + 1
        self._changed_groups[group.gid] = group
        if group.skipped and self._skips(topic, offset):
            group.skipped -= 1
            return False
        return True

    # Rows of messages

    def row(self, gid: int, offset: int) -> Row | None:
        """Return what a group knows of a message that is leased, delayed, ready again or dead."""
        for kind in (LEASED, OTHER, DEAD):
            value = self._get(key_u64_u64(kind, gid, offset))
            if value is not None:
                return Row.unpack(value)
        return None

    def _unlink(self, group: GroupState, offset: int, row: Row) -> None:
        """Take a message out of where it stands; its place behind its key stays."""
        gid = group.gid
        state = row.state
        self._changed_groups[gid] = group
        if state == STATE_LEASED:
            group.n_lease_rows -= 1
            self._delete(key_u64_u64(LEASED, gid, offset))
            return
        if state == STATE_DEAD:
            group.n_dead -= 1
            self._delete(key_u64_u64(DEAD, gid, offset))
            return
        self._unrank(group, offset, row)
        if row.expiry_us:
            self._delete(key_u64_u64(EXPIRY, gid, row.expiry_us) + U64.pack(offset))
        self._delete(key_u64_u64(OTHER, gid, offset))

    def _unrank(self, group: GroupState, offset: int, row: Row) -> None:
        """Take a message out of the ready, the waiting or the parked ones."""
        gid = group.gid
        state = row.state
        if state == STATE_READY:
            group.n_back -= 1
            self._delete(key_ranked(BACK, gid, 9 - row.priority, row.order))
        elif state == STATE_SUSPECT:
            group.n_suspect -= 1
            self._delete(key_ranked(SUSPECT, gid, 9 - row.priority, row.order))
        elif state == STATE_WAITING:
            group.n_wait -= 1
            self._delete(key_u64_u64(WAIT, gid, row.deadline) + U64.pack(offset))
        else:
            group.n_parked -= 1

    def _rank(self, group: GroupState, offset: int, row: Row, now_us: int) -> None:
        """Put a message that may be delivered among the ready or the waiting ones."""
        gid = group.gid
        if row.deadline > now_us:
            row.state = STATE_WAITING
            group.n_wait += 1
            self._put(key_u64_u64(WAIT, gid, row.deadline) + U64.pack(offset), b"")
        elif row.crash:
            row.state = STATE_SUSPECT
            group.n_suspect += 1
            self._put(key_ranked(SUSPECT, gid, 9 - row.priority, row.order), U64.pack(offset))
        else:
            row.state = STATE_READY
            group.n_back += 1
            self._put(key_ranked(BACK, gid, 9 - row.priority, row.order), U64.pack(offset))
        self._put(key_u64_u64(OTHER, gid, offset), row.pack())
        self._changed_groups[gid] = group

    def _place(self, group: GroupState, offset: int, row: Row, now_us: int) -> None:
        """Give a message that has no row one: ready or waiting."""
        row.owner = 0
        if row.expiry_us:
            self._put(key_u64_u64(EXPIRY, group.gid, row.expiry_us) + U64.pack(offset), b"")
        self._rank(group, offset, row, now_us)

    def _park(self, group: GroupState, offset: int, row: Row) -> None:
        """Give a message that has no row one: parked behind another of its key."""
        row.owner = 0
        row.state = STATE_PARKED
        group.n_parked += 1
        if row.expiry_us:
            self._put(key_u64_u64(EXPIRY, group.gid, row.expiry_us) + U64.pack(offset), b"")
        self._put(key_u64_u64(OTHER, group.gid, offset), row.pack())
        self._changed_groups[group.gid] = group

    def _lease(self, group: GroupState, offset: int, row: Row) -> None:
        """Give a message that has no row one: leased."""
        row.state = STATE_LEASED
        group.n_lease_rows += 1
        if row.deadline < group.next_deadline_ns:
            group.next_deadline_ns = row.deadline
        self._put(key_u64_u64(LEASED, group.gid, offset), row.pack())
        self._changed_groups[group.gid] = group

    def _bury(self, group: GroupState, offset: int, row: Row) -> None:
        """Give a message that has no row one: among the dead letters."""
        row.state = STATE_DEAD
        row.owner = row.deadline = 0
        group.n_dead += 1
        self._put(key_u64_u64(DEAD, group.gid, offset), row.pack())
        self._changed_groups[group.gid] = group

    # Keys

    def _first_of_key(self, gid: int, keyhash: bytes) -> int | None:
        """Return the first message of a key that is not done."""
        found = self._first(KEY + U64.pack(gid) + keyhash)
        return U64.unpack(found[1])[0] if found is not None else None

    def _join_key(self, group: GroupState, offset: int, row: Row, *, leased: bool = False) -> bool:
        """Line a message up behind its key; return whether it is the one to go now."""
        first = self._first_of_key(group.gid, row.keyhash)
        self._put(key_key(KEY, group.gid, row.keyhash, row.order), U64.pack(offset))
        if first is None:
            return True
        value = self._get(key_u64_u64(OTHER, group.gid, first))
        if value is None:  # leased: the key is taken
            return False
        other = Row.unpack(value)
        if other.state == STATE_PARKED or (other.order < row.order and not leased):
            return False
        self._unrank(group, first, other)  # it had not been handed out: put order comes first
        other.state = STATE_PARKED
        group.n_parked += 1
        self._put(key_u64_u64(OTHER, group.gid, first), other.pack())
        return True

    def _leave_key(self, group: GroupState, row: Row, now_us: int) -> None:
        """A message is done or dead or gone: the next of its key may go if it was this one's."""
        self._delete(key_key(KEY, group.gid, row.keyhash, row.order))
        if row.state != STATE_PARKED:
            self._promote(group, row.keyhash, now_us)

    def _promote(self, group: GroupState, keyhash: bytes, now_us: int) -> None:
        """Let the first message of a key go."""
        first = self._first_of_key(group.gid, keyhash)
        if first is None:
            return
        value = self._get(key_u64_u64(OTHER, group.gid, first))
        if value is None:
            return
        row = Row.unpack(value)
        if row.state == STATE_PARKED:
            group.n_parked -= 1
            self._rank(group, first, row, now_us)

    def _enter(self, group: GroupState, offset: int, row: Row, now_us: int) -> None:
        """Give a message that has neither row nor place behind its key both."""
        if row.keyed and not self._join_key(group, offset, row):
            self._park(group, offset, row)
        else:
            self._place(group, offset, row, now_us)

    def _come_back(self, group: GroupState, offset: int, row: Row, now_us: int) -> None:
        """Give a message that was leased and still lines up behind its key its row."""
        if row.keyed and self._first_of_key(group.gid, row.keyhash) != offset:
            self._park(group, offset, row)
            self._promote(group, row.keyhash, now_us)
        else:
            self._place(group, offset, row, now_us)

    def _remove(self, group: GroupState, offset: int, row: Row, now_us: int) -> None:
        """Take a message out of a group, its place behind its key too."""
        self._unlink(group, offset, row)
        if row.keyed and row.state != STATE_DEAD:
            self._leave_key(group, row, now_us)
