"""The fold: what each record of the log does to the index.

`apply` is deterministic: the same records in the same order give the same answers, whenever and by
whomever they are folded, in one transaction or in many.  What a record says of a message that is
not known, because it was freed or damage took it, is passed over; what damage took between two
records is made up for so that a message comes once more rather than never.

Nothing here reads the clock or the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, TypeAlias

import lmdb

from . import _records as rec
from ._index_keep import Keep
from ._index_rows import (
    LEASED,
    NOTHING,
    ONCE,
    RESULT,
    ROW_DELIVERY,
    ROW_FLAGS,
    ROW_KEYED,
    ROW_SIZE,
    U64,
    Picks,
    Row,
    key_u64_u64,
)
from ._index_topics import CHUNK_ENTRIES, NARROW, GroupState, TopicState
from ._records import (
    ACK,
    ACK_HEAD,
    DELIVER,
    DELIVER_HEAD,
    DELIVER_ITEM,
    FROM_QUEUE,
    GROUP_BIT,
    LAPSED,
    MAX_FAILURES,
    META_DUE_US,
    META_EXPIRY_US,
    META_ID,
    META_KEY,
    NACK,
    NO_KEY,
    PRIORITIES,
    PUT,
    STATE_DEAD,
    Failure,
    Readable,
    key_hash,
    one_more,
    split_put,
    unpack_meta,
)

# Offset, time of the frame, parts of the record.
Told: TypeAlias = tuple[int, int, Sequence[Readable]]

# The records that are most of a log, without what their heads say to nobody here: a PUT, a DELIVER,
# one of a single message with it, and an ACK.
_unpack_put: Final = Struct("<xBHI").unpack_from
_unpack_deliver: Final = Struct("<2xHIQQQ").unpack_from
_unpack_deliver_one: Final = Struct("<2xH4xQQQQB").unpack
_unpack_ack: Final = Struct("<8xQQ").unpack_from
_unpack_acks: Final = Struct("<8xQQ").iter_unpack
_ACK_SIZE: Final = ACK_HEAD.size
_DELIVER_SIZE: Final = DELIVER_HEAD.size
_ONE_SIZE: Final = _DELIVER_SIZE + DELIVER_ITEM.size


class Fold(Keep):
    """Applies records; what it cannot read is noted as damage and passed over."""

    def apply(self, told: Iterable[Told], *, is_all: bool = True) -> None:
        """Fold records; leases wait in memory for those that follow unless that `is_all`.

        Raises:
            IndexFullError: the transaction is over, nothing of it is in the index.
        """
        groups, changed = self._groups, self._changed_groups
        try:
            for offset, time_us, parts in told:
                record = parts[0] if len(parts) == 1 else b"".join(parts)
                kind = record[0] if record else 0
                if kind == ACK and len(record) >= _ACK_SIZE:
                    gid, message = _unpack_ack(record)
                    group = groups.get(gid)
                    if group is None or group.fresh.pop(message, None) is None:
                        group = self._settle(gid, message, time_us)
                        if group is None:
                            continue
                    group.settled += 1
                    changed[gid] = group
                    if len(record) > _ACK_SIZE:
                        self._put(key_u64_u64(RESULT, gid, message), U64.pack(offset))
                elif kind == DELIVER:
                    self._deliver(offset, time_us, record)
                elif kind == PUT:
                    self._put_message(offset, time_us, record)
                else:
                    self._write_leases()  # it may look for them; the group may be gone then
                    self._apply_rare(offset, time_us, record)
            if self._in_use and is_all:
                self._write_leases()
        except lmdb.Error as error:
            raise self._failed(error) from error

    def apply_own(self, told: list[Told]) -> None:
        """`apply` several records that this process has just written: often the ACKs of many
        messages of one group, and nothing else, which are read at one stroke.
        """
        _, times, parts = zip(*told, strict=True)
        records = [*map(b"".join, parts)]
        data = b"".join(records)
        if {*map(len, records)} != {_ACK_SIZE} or data[::_ACK_SIZE] != bytes((ACK,)) * len(told):
            self.apply(told)
            return
        gids, messages = zip(*_unpack_acks(data), strict=True)
        gid = gids[0]
        group = self._groups.get(gid)
        if group is None or gids.count(gid) < len(gids):
            self.apply(told)
            return
        begun = [*map(group.fresh.pop, messages, repeat(None))]
        group.settled += len(begun)
        self._changed_groups[gid] = group
        if all(begun):
            return
        try:
            for lease, message, time_us in zip(begun, messages, times, strict=True):
                if lease is None and self._settle(gid, message, time_us) is None:
                    group.settled -= 1
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _apply_rare(self, offset: int, time_us: int, record: Readable) -> None:
        """Fold one record of those that are not most of a log."""
        try:
            said = rec.unpack(record)
        except ValueError as error:
            self._reject(offset, str(error))
            return
        fold = _FOLD.get(type(said))
        if fold is not None:
            self._plain.clear()
            fold(self, said, offset, time_us)

    def _reject(self, offset: int, reason: str) -> None:
        """Pass a record over and say so: its checksum held, and the rest must flow all the same."""
        self.note_damage(offset, reason)

    # Put

    def _put_message(self, offset: int, time_us: int, record: Readable) -> None:
        try:
            packed, meta_size, tid = _unpack_put(record)
        except struct_error:
            self._reject(offset, "a PUT that is too short")
            return
        priority = packed >> 4
        if priority >= PRIORITIES:
            self._reject(offset, f"a PUT with priority {priority}")
            return
        meta: dict[int, Any] | None = None
        if meta_size:
            try:
                meta = unpack_meta(split_put(record)[0])
            except ValueError as error:
                self._reject(offset, str(error))
                return
        topic = self._topics.get(tid) or self._topic(tid)
        topic.puts += 1
        topic.put_bytes += len(record)
        self._changed_topics[tid] = topic
        if not meta:
            self._append(topic, priority, offset)
            return
        given = meta.get(META_ID)
        if given is not None:
            self._give_id(tid, given, offset, priority)
        key = meta.get(META_KEY)
        due_us: int = meta.get(META_DUE_US, 0)
        expiry_us: int = meta.get(META_EXPIRY_US, 0)
        if key is None and not due_us and not expiry_us:
            self._append(topic, priority, offset)
            return
        if not topic.used >> priority & 1:
            topic.use(priority)
        keyhash = key_hash(key) if key is not None else NO_KEY
        for group in (self.template(tid), *self.groups(tid)):
            row = Row(
                priority,
                offset,
                deadline=due_us,
                expiry_us=expiry_us,
                keyhash=keyhash,
                size=min(len(record), NARROW),
            )
            self._enter(group, offset, row, time_us)

    # Deliver

    def _deliver(self, offset: int, time_us: int, record: Readable) -> None:
        """Lease messages, as a record of the log says."""
        if len(record) == _ONE_SIZE:
            count, gid, owner, deadline_ns, message, flag = _unpack_deliver_one(record)
            known = self._groups.get(gid)
            if count == 1 and known is not None and gid >= GROUP_BIT:
                if flag == known.lane and not known.skipped:
                    # Most often: one message, and the next one of the queue that is at hand.
                    priority = flag >> 4
                    index = known.cursor[priority]
                    place = index - known.part_start
                    part = known.part
                    if place < len(part.deltas) and part.base + part.deltas[place] == message:
                        known.cursor[priority] = index + 1
                        known.fresh[message] = (priority, owner, deadline_ns)
                        known.picks += 1
                        if deadline_ns < known.next_deadline_ns:
                            known.next_deadline_ns = deadline_ns
                        self._changed_groups[gid] = known
                        return
                self._lease_all(known, [message], [flag], owner, deadline_ns)
                return
        elif len(record) < _DELIVER_SIZE:
            self._reject(offset, "a DELIVER that is too short")
            return
        count, tid, gid, owner, deadline_ns = _unpack_deliver(record)
        if len(record) != _DELIVER_SIZE + count * DELIVER_ITEM.size:
            self._reject(offset, "a DELIVER that does not hold what it says")
            return
        if gid < GROUP_BIT:
            self._reject(offset, f"a DELIVER to {gid}, which is no group")
            return
        group = self._groups.get(gid) or self._reader(tid, gid, offset, time_us)
        items = [*DELIVER_ITEM.iter_unpack(record[_DELIVER_SIZE:])]
        messages, flags = [one for one, _ in items], [flag for _, flag in items]
        self._lease_all(group, messages, flags, owner, deadline_ns)

    def lease(self, group: GroupState, picks: Picks, owner: int, deadline_ns: int) -> None:
        """Do what a DELIVER of what was just picked does: whoever has written one knows what it
        says, and need not have it applied. Raises as `apply` does.
        """
        offsets, flags, _, in_line = picks
        try:
            if in_line:
                lane = flags[0]
                n = len(offsets)
                lease = (lane >> 4, owner, deadline_ns)
                group.cursor[lane >> 4] += n
                if n == 1:
                    group.fresh[offsets[0]] = lease
                else:
                    group.fresh.update(dict.fromkeys(offsets, lease))
                group.picks += n
                if deadline_ns < group.next_deadline_ns:
                    group.next_deadline_ns = deadline_ns
                self._changed_groups[group.gid] = group
            else:
                self._lease_all(group, offsets, flags, owner, deadline_ns)
            if self._in_use:
                self._write_leases()
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _lease_all(
        self, group: GroupState, messages: list[int], flags: list[int], owner: int, deadline_ns: int
    ) -> None:
        """Lease messages: those that are next in a queue in memory, to be written later."""
        self._changed_groups[group.gid] = group
        n = len(messages)
        group.picks += n
        if deadline_ns < group.next_deadline_ns:
            group.next_deadline_ns = deadline_ns
        topic = self._topics.get(group.tid) or self._topic(group.tid)
        at = 0
        while at < n:
            priority = flags[at] >> 4
            is_queued = flags[at] & FROM_QUEUE and priority < PRIORITIES
            end = self._hand_out(group, topic, messages, flags, at) if is_queued else at
            if end > at:
                lease = (priority, owner, deadline_ns)
                group.fresh.update(dict.fromkeys(messages[at:end], lease))
                self._changed_groups[group.gid] = group  # leases may have been written since
                at = end
            else:
                self._write_leases()
                self._deliver_other(group, topic, messages[at], priority, owner, deadline_ns)
                at += 1

    def _hand_out(
        self, group: GroupState, topic: TopicState, messages: list[int], flags: list[int], at: int
    ) -> int:
        """Move a group's cursor past these messages from `at` on, as far as they are what is next
        in a part of one queue; return where that ends.
        """
        flag = flags[at]
        priority = flag >> 4
        part = self._part(group, topic, priority)
        place = group.cursor[priority] % CHUNK_ENTRIES
        most = 1 if group.skipped else len(messages) - at
        base = part.base
        following = [base + delta for delta in part.deltas[place : place + most]]
        end = at + len(following)
        if following != messages[at:end] or flags.count(flag) < len(flags):
            end = at
            for one in following:
                if one != messages[end] or flags[end] != flag:
                    break
                end += 1
        if end > at and group.skipped and self._skips(topic, messages[at]):
            return at
        group.cursor[priority] += end - at
        return end

    def _deliver_other(
        self,
        group: GroupState,
        topic: TopicState,
        offset: int,
        priority: int,
        owner: int,
        deadline_ns: int,
    ) -> None:
        """Lease a message that is not the next of the queue."""
        self._plain.clear()
        row = self.row(group.gid, offset)
        if row is None:
            if priority >= PRIORITIES or not self._consume(group, topic, priority, offset):
                return
            row = Row(priority, offset)
        elif row.state == STATE_DEAD:
            return
        else:
            self._unlink(group, offset, row)
        row.owner = owner
        row.deadline = deadline_ns
        row.delivery = one_more(row.delivery)
        self._lease(group, offset, row)

    # Settling

    def _settle(self, gid: int, message: int, time_us: int) -> GroupState | None:
        """Take out a message whose lease is none of the fresh; return the group, None if there is
        nothing to be settled.
        """
        group = self._groups.get(gid) or self.group(gid)
        if group is None:
            return None
        key = key_u64_u64(LEASED, gid, message)
        plain = self._plain.get(gid)
        if plain is not None and message in plain:
            plain.discard(message)
            self._delete(key)
        elif (value := self._pop(key)) is not None:
            if (
                value[ROW_DELIVERY] != ONCE
                or value[ROW_SIZE] != NOTHING
                or value[ROW_FLAGS] & ROW_KEYED
                or message < group.start
            ):
                row = Row.unpack(value)
                self._note_deliveries(group, message, row.delivery)
                if row.keyed:
                    self._leave_key(group, row, time_us)
        else:
            return group if self._settle_unleased(group, message, time_us) else None
        group.n_lease_rows -= 1
        return group

    def _settle_unleased(self, group: GroupState, offset: int, time_us: int) -> bool:
        """Take out a message whose delivery damage took; False if it is not there to be settled."""
        row = self._take(group, offset)
        if row is None:
            return False
        if row.keyed:
            self._leave_key(group, row, time_us)
        if row.delivery:
            self._note_deliveries(group, offset, one_more(row.delivery))
        return True

    def _take(self, group: GroupState, offset: int) -> Row | None:
        """Take a message that is not dead from where it stands; its place behind its key stays."""
        if group.is_template:
            return None
        row = self.row(group.gid, offset)
        if row is not None:
            if row.state == STATE_DEAD:
                return None
            self._unlink(group, offset, row)
            return row
        topic = self._topic(group.tid)
        place = self._find(topic, offset)
        if place is None or not self._consume(group, topic, place[0], offset):
            return None
        return Row(place[0], offset)

    def _return(self, said: rec.Return, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        row = self._take(group, said.offset) if group is not None else None
        if group is None or row is None:
            return
        if said.kind in (NACK, LAPSED) and said.retry > row.retry:
            group.retries += 1
        row.delivery, row.retry, row.crash = said.delivery, said.retry, said.crash
        row.deadline = said.due_us
        _tell(row, said.failure)
        self._come_back(group, said.offset, row, time_us)

    def _die(self, said: rec.Dead, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        row = self._take(group, said.offset) if group is not None else None
        if group is None or row is None:
            return
        if row.keyed:
            self._leave_key(group, row, time_us)
        row.retry, row.crash = said.retry, said.crash
        row.reason, row.died_us = said.reason, said.died_us
        _tell(row, said.failure)
        self._bury(group, said.offset, row)

    def _extend(self, said: rec.Extend, offset: int, time_us: int) -> None:
        group = self.group(said.gid)
        key = key_u64_u64(LEASED, said.gid, said.offset)
        value = self._get(key)
        if group is None or value is None:
            return
        row = Row.unpack(value)
        row.deadline = said.deadline_ns
        if row.deadline < group.next_deadline_ns:
            group.next_deadline_ns = row.deadline
        self._put(key, row.pack())
        self._changed_groups[said.gid] = group


def _tell(row: Row, failure: Failure | None) -> None:
    if failure is not None:
        row.failures.append(failure)
        del row.failures[:-MAX_FAILURES]


_FOLD: Final[dict[type, Callable[[Any, Any, int, int], None]]] = {
    rec.Return: Fold._return,
    rec.Dead: Fold._die,
    rec.Extend: Fold._extend,
    rec.Redrive: Fold._redrive,
    rec.Cancel: Fold._cancel_all,
    rec.Purge: Fold._purge,
    rec.PurgeDead: Fold._purge_dead,
    rec.Topic: Fold._name_topic,
    rec.Group: Fold._begin_group,
    rec.GroupDrop: Fold._drop_group,
    rec.Pause: Fold._pause,
    rec.Replay: Fold._replay,
    rec.Option: Fold._option,
    rec.Checkpoint: Fold._checkpoint,
    rec.Carry: Fold._carry,
    rec.Void: Fold._void,
    rec.Owner: Fold._name_owner,
    rec.Damaged: Fold._set_aside,
}
