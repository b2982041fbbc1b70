"""Giving space back: free the oldest segments, carrying up the few messages that still live there.

Role: one step frees at most one segment; `maintain` takes a few at a time, and more on the timer,
where nobody waits for it. It happens with no call from the user: when a segment is begun, soon
after messages were settled, when the file is opened, and when a put finds no room.

Invariants:

* Oldest first, never the segment of the tail, never one that a backup or the replica still reads.
* Nothing is lost: a live message goes to the end of the log whole (CARRY), what is not a message
  (groups, pauses, options) stands in a CHECKPOINT later than the segment that is freed, and who
  holds something is named again (OWNER). All are written before the segment is freed, and are on
  stable storage before its slot is used again (`_slots`).
* What is freed, what is carried up and what is left says one rule, `_reclaim_rule`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
from typing import Final

from . import _files, _records
from ._delivery import place, set_aside, unfinished_in
from ._engine import Engine
from ._format import CHECKPOINT_FRAME, ENVELOPE_BYTES, PART_BYTES
from ._index import Tx
from ._reclaim_rule import AHEAD, Does, decide
from ._records import LOST_RESULT
from ._session import Session
from ._upkeep import OFTEN_S, UPKEEP_S
from .errors import CorruptError, DiskFullError
from .wal import HEAD, LAST, RESERVE, RESERVE_EACH, TAIL, Log

logger = logging.getLogger("weclaw_embedded")

_STEPS: Final = AHEAD
# Where nobody waits for it: with what is written in a second by who puts messages of many MiB it
# has to keep up, and each round has syncs at its end.
_MANY_STEPS: Final = 64
# How many messages are carried up in one turn there, because others wait for it: that is 0.1 s
# where 25 000 live in a segment, and was 0.8 to 1.1 s with all of them in one turn.
_AT_ONCE: Final = 2_000
_MORE_S: Final = 0.01  # the pause after a round, where more can be freed
_ROUNDS: Final = 4
# What a delivery and its ack take in the log, about.
_SETTLING_BYTES: Final = 160
# What is held for a message that waits, so that its delivery and whatever ends it have room in the
# log and in the index: 130 + 40 bytes for an ack with a small result, 220 + 230 for a dead letter
# with a reason of 30 characters.
_RESERVED_BYTES: Final = 512
# And so that it may fail as often as the default policy lets it, each time with a reason of 80
# characters: 740 in the log and 1 000 in the index. Not for more than so much together, because
# what is held is taken from others, and not all of a long backlog fails.
_RETRY_BYTES: Final = 1536
_MOST_FOR_RETRIES: Final = 128 << 20
# A file system is short that has less than this beside what would have to be held.
_SHORT_BYTES: Final = 256 << 20
# A group that has taken nothing for so long is not about to take the oldest.
_STALLED_S: Final = 5.0
_FEW_GROUPS: Final = 100
# How many messages are looked at to know what carrying them all takes.
_SAMPLES: Final = 16
# What a CARRY says besides the message, and what is around it.
_CARRIED_BYTES: Final = 200 + ENVELOPE_BYTES + PART_BYTES
_INDEXED_BYTES: Final = 256  # and what one that has no row yet takes in the index, in each group


def take_step(engine: Engine, force: bool) -> float | None:
    """Free the oldest segment if nothing needs it. `force`: retention does not hold it. What can't
    be read there, and the replica doesn't have, stays behind. While the replica can't be asked,
    nothing that it may have is freed, not for a full disk either.

    Returns 0.0 when it was freed, or some of what lives there, where that is much and it is no
    `force`, was carried up, so that another step may be worth it; the seconds until
    retention, or the wait for the replica, lets go of it, or the index may be asked whether it
    does; None when that is not a matter of time.
    """
    harmed = False
    for _ in range(_ROUNDS):
        try:
            return engine.run_once(step, force, harmed)
        except CorruptError as error:
            engine.heal_met()
            bits = engine.log.bits
            segment = error.offset >> bits
            harmed = not engine.heal(segment << bits, (segment + 1) << bits)
            if engine.heal_pause_s() > 0:
                return engine.heal_pause_s()
    return UPKEEP_S  # it is healed over and over: whoever writes there is at it still


def step(session: Session, force: bool, harmed: bool) -> float | None:
    """One step in one turn. Raises CorruptError, unless what is `harmed` is to be left behind; for
    what a replica may have and was not asked for, in any case.
    """
    log = session.log
    session.engine.pin()  # as it is now: Ctrl-C may have ended a backup before it said so
    oldest = _Oldest(session, force, harmed)
    decision = decide(oldest)
    logger.debug("segment %d: %s; %s", oldest.segment, decision.does.value, decision.why)
    if decision.does is Does.LEAVE:
        return decision.wait_s
    segment = oldest.segment
    tx = session.tx
    records = oldest.carries() if decision.does is Does.CARRY else []
    if oldest.has_more:
        # The rest in turns of their own. Carried is carried, though the segment is freed later.
        if records:
            session.append(records)
        return 0.0
    checkpoint = log.checkpoint()
    if not checkpoint or checkpoint >> log.bits <= segment or len(tx.groups()) <= _FEW_GROUPS:
        # In a frame of its own, which begins with it: that is how a rebuild finds it. Needed only
        # when the one before goes; written each time while it is small, because records about
        # messages that are gone no longer count in a rebuild, and it states the counts.
        session.append([_records.pack_checkpoint(tx.checkpoint_state())], flags=CHECKPOINT_FRAME)
    if records:
        session.append(records)
    names = tx.names_below((segment + 1) << log.bits)
    if names:
        # For people only, so that a full disk is no less made room on.
        with contextlib.suppress(DiskFullError):
            session.append([_records.pack_owner(token, name) for token, name in names])
    session.when_written(lambda: _let_go(session, segment), indexed=True)
    return 0.0


def _let_go(session: Session, segment: int) -> None:
    """Give a segment up, and have the index forget what stood there: in this order, because as long
    as the log keeps a message the index must know of it all that the log says.
    """
    log = session.log
    log.free(segment)
    session.amend(lambda tx: tx.drop_below(log.head_offset))


class _Oldest:
    """The oldest segment, as the rule asks about it; all of it within one turn."""

    def __init__(self, session: Session, force: bool, harmed: bool) -> None:
        self.session = session
        self.log = session.log
        self.segment = self.log.state.words[HEAD]
        self.segment_bytes = self.log.segment_bytes
        self.is_forced = force
        self.is_short = bool(self.log.state.words[RESERVE])
        self._harmed = harmed
        # The index takes its part of the same disk, and never shrinks.
        self._beside_bytes = _CARRIED_BYTES + (_INDEXED_BYTES if self.is_short else 0)
        self._lost: list[tuple[int, str]] = []
        self._at_once = sys.maxsize if force else _AT_ONCE

    def is_last(self) -> bool:
        return self.segment >= self.log.state.words[LAST]

    def is_pinned(self) -> bool:
        # A replica that falls behind never makes a put fail: then its copy is made anew.
        page = self.session.page
        return page.pinned(self.segment_bytes, replica=not self.is_forced) <= self.segment

    def retained_s(self) -> float | None:
        end = self.log.frames_end(self.segment) or self._span(0)[1]
        return _retained_s(self.session, self.segment, end)

    def n_segments(self) -> int:
        return self.log.state.words[LAST] - self.segment

    def n_live(self, number: int) -> int:
        return len(self._live(number) if number else self._here)

    def has_ready(self, number: int) -> bool:
        return self.session.tx.has_ready(*self._span(number))

    def getting_on_s(self) -> float:
        return _getting_on_s(self.session, self.session.tx, self._span(0)[1])

    def can_be_settled(self) -> bool:
        return self.log.holding() > 1 or self.log.room >= len(self._here) * _SETTLING_BYTES

    def carried_bytes(self) -> int:
        n_bytes = sum(len(put) + self._beside_bytes for _, put, _ in self._puts)
        if self.has_more:  # the others are taken to be as these
            n_bytes = n_bytes * len(self._here) // self._at_once
        return n_bytes

    @property
    def has_more(self) -> bool:
        """Whether more lives in it than is carried in one turn."""
        return len(self._here) > self._at_once

    def each_bytes(self) -> int:
        return _average(self.session.tx) + self._beside_bytes

    def room_bytes(self) -> int:
        log = self.log
        return log.room + max(0, log.holding() - 1) * log.segment_bytes

    def kept_bytes(self) -> int:
        return self.log.pending_tail - self.log.head_offset

    def all_bytes(self) -> tuple[int, int]:
        tx = self.session.tx
        if self.is_short:
            all_bytes = tx.live_bytes(_told_bytes(self.session, tx, self._here))
            all_bytes += tx.count_without_row() * _INDEXED_BYTES
        else:
            all_bytes = tx.live_bytes(_CARRIED_BYTES)
        n_live = tx.live_bytes(1) - tx.live_bytes()
        return all_bytes, all_bytes // max(1, n_live)

    def carries(self) -> list[_records.Record]:
        """The records that carry up what lives in it, or as much as is done in one turn. What can't
        be read is set aside.
        """
        session = self.session
        puts = self._puts
        for offset, reason in self._lost:
            # There is nothing to carry, and nobody could come upon it any more.
            set_aside(session, offset, reason)
        return [_carry(session, session.tx, *put, self._harmed) for put in puts]

    def _span(self, number: int) -> tuple[int, int]:
        start = (self.segment + number) << self.log.bits
        return start, start + self.segment_bytes

    def _live(self, number: int) -> list[int]:
        return self.session.tx.live_in(*self._span(number))

    @functools.cached_property
    def _here(self) -> list[int]:
        """The messages that live in it. Raises CorruptError for what the replica may have, and was
        not asked for.
        """
        start, end = self._span(0)
        for offset, reason in self.session.engine.unanswered(self.session, start, end):
            raise CorruptError(offset, reason)
        tx = self.session.tx
        if tx.forgotten_to < start:
            tx.drop_below(start)  # who let go of it died, or had no room, before that
        return self._live(0)

    @functools.cached_property
    def _puts(self) -> list[tuple[int, bytes, int]]:
        """(offset, put, its time) of each of those for this turn that can be read. Raises
        CorruptError for what can't, unless it is known to be harmed.
        """
        puts = []
        for offset in self._here[: self._at_once]:
            try:
                record, time_us = self.session.engine.put_and_time(place(self.session, offset)[0])
            except CorruptError as error:
                if not self._harmed:
                    raise
                self._lost.append((offset, error.reason))
            except LookupError as error:  # repair has written over it
                self._lost.append((offset, str(error)))
            else:
                puts.append((offset, bytes(record), time_us))
        return puts


def _told_bytes(session: Session, tx: Tx, live: list[int]) -> int:
    """Bytes that a carried message takes more than it was put with, as some of those that would
    come first do: the history of what failed often is longer than many a message.
    """
    told = []
    for offset in live[:: len(live) // _SAMPLES + 1]:
        with contextlib.suppress(CorruptError, LookupError):
            record, time_us = session.engine.put_and_time(place(session, offset)[0])
            put = bytes(record)
            carry = _carry(session, tx, offset, put, time_us)
            told.append(sum(map(len, carry)) - len(put))
    most = sum(told) // len(told) if told else 0
    return max(_CARRIED_BYTES, most + ENVELOPE_BYTES + PART_BYTES)


def _average(tx: Tx) -> int:
    """Bytes of a message, about."""
    topics = tx.topics()
    return sum(topic.put_bytes for topic in topics) // max(1, sum(topic.puts for topic in topics))


def _retained_s(session: Session, segment: int, end: int) -> float | None:
    """How long retention still wants the settled messages of the segment: 0.0 no more, None as
    long as there is room. The index is asked only when it matters how much still lives, and when
    it is not far behind: whoever only puts would have to fold all of that for it, in one go. Then
    it is asked again soon, when it may have followed.
    """
    age_s, size_bytes = session.option("retention"), session.option("retention_bytes")
    left_s = None
    if age_s is not None:
        left_s = max(0.0, age_s - (session.now_us - session.log.end_time_us(segment)) / 1e6)
    if left_s == 0.0 or size_bytes is None:
        return left_s
    kept_after = session.log.pending_tail - end
    if kept_after <= size_bytes:
        return left_s
    if session.engine.is_far_behind():
        return OFTEN_S if left_s is None else min(left_s, OFTEN_S)
    return left_s if kept_after <= size_bytes + session.tx.live_bytes() else 0.0


def _getting_on_s(session: Session, tx: Tx, end: int) -> float:
    """Seconds to wait for groups that are getting on with what stands below `end`; 0.0 when they
    have stood still for long.
    """
    engine = session.engine
    done = [
        (group.gid, group.picks, group.settled)
        for topic in tx.topics()
        for group in tx.groups(topic.tid) or [tx.template(topic.tid)]
        if (oldest := tx.oldest(group)) is not None and oldest < end
    ]
    if done != engine.progress[0]:
        engine.progress = (done, session.now_us)
    return max(0.0, _STALLED_S - (session.now_us - engine.progress[1]) / 1e6)


def _carry(
    session: Session, tx: Tx, offset: int, put: bytes, time_us: int, harmed: bool = False
) -> _records.Record:
    engine = session.engine

    def result(gid: int, location: int) -> bytes:
        try:
            return engine.result_bytes(location, gid)
        except CorruptError:
            if not harmed:
                raise
            return LOST_RESULT
        except LookupError:  # repair has written over it
            return LOST_RESULT

    return _records.pack_carry(
        tx.carried_state(
            offset,
            put=put,
            salt=place(session, offset)[1],
            time_us=time_us,
            result=result,
        )
    )


def maintain(engine: Engine, *, busy: bool = False, calm: bool = True) -> float | None:
    """Free what can be freed, give space back, and have the index follow, a bounded amount. Unless
    it is `calm` a slot more is kept: what is given back now is wanted again at the next segment.
    Returns the seconds after which another call is worth it; None when that is no matter of time.
    """
    wait_s: float | None = 0.0
    freed = 0
    while freed < (_STEPS if busy else _MANY_STEPS) and wait_s == 0.0:
        wait_s = take_step(engine, False)
        freed += wait_s == 0.0
    if freed:
        _make_reusable(engine)
    keep = 1 if calm else 2
    if engine.run_once(_trim, keep):
        _make_reusable(engine)
        engine.run_once(_trim, keep)
    engine.fold_behind(busy=busy)
    if wait_s == 0.0:
        return _MORE_S
    return None if wait_s is None else max(wait_s, UPKEEP_S)


def _trim(session: Session, keep: int) -> bool:
    """Give back what `keep` free slots leave over; whether some of it waits for a sync."""
    log = session.log
    keep_reserve(session)
    log.trim(max(keep, log.reserve()))
    log.count_spares()
    return log.waiting()


def keep_reserve(session: Session) -> None:
    """Where the disk gets short, hold what the messages that wait may need to be settled, and say
    so: puts are refused before they take of it.

    Not before: a reserve of a third of the file would be taken from a disk that has plenty.
    """
    log = session.log
    words = log.state.words
    need = each = 0
    if words[RESERVE] or is_short(log):
        need, each = _reserved_bytes(session)
        held_bytes = log.holding() * log.segment_bytes
        if _disk_bytes(log) + held_bytes > _SHORT_BYTES + need:
            need = each = 0
    words[RESERVE], words[RESERVE_EACH] = need, each
    if need:
        # What is lacking now may be there later; until then nothing is put.
        with contextlib.suppress(DiskFullError):
            log.hold(log.reserve())
    log.count_spares()


def is_short(log: Log) -> bool:
    """Whether the disk may have too little room left; quick, and rather once too often."""
    words = log.state.words
    kept_bytes: int = words[TAIL] - (words[HEAD] << log.bits)
    return _disk_bytes(log) < _SHORT_BYTES + 8 * kept_bytes


def _disk_bytes(log: Log) -> float:
    """Bytes the log may still grow by. A file system that can't say is taken to be as it was when
    it last could: that is no reason for any call to fail, and what it lacks is met in writing.
    """
    try:
        return _files.room_bytes(log.fd)
    except OSError as error:
        logger.debug("it can't be asked how much room the disk has: %s", error)
        return 0 if log.state.words[RESERVE] else math.inf


def _reserved_bytes(session: Session) -> tuple[int, int]:
    """(bytes that what waits may need to be settled, bytes for each message that is put)."""
    tx = session.tx
    waiting = 0
    most_groups = 1
    for topic in tx.topics():
        groups = tx.groups(topic.tid) or [tx.template(topic.tid)]
        most_groups = max(most_groups, len(groups))
        waiting += sum(unfinished_in(tx, group) for group in groups)
    for_retries = min(waiting * _RETRY_BYTES, _MOST_FOR_RETRIES)
    need = waiting * _RESERVED_BYTES + for_retries
    each = _RESERVED_BYTES + (_RETRY_BYTES if for_retries < _MOST_FOR_RETRIES else 0)
    limit = session.option("max_bytes")
    if limit is not None:
        need = min(need, max(0, limit - session.log.bytes_used()))
    return max(1, need), most_groups * each


def make_room(engine: Engine, at_most: int = 0) -> int:
    """Free settled segments that only retention holds, for a put that found no room: so many, or a
    few if that is less. How many they were.
    """
    # What was freed before, and only waits for a sync, comes first: carrying needs a slot, too.
    if engine.run_once(lambda session: session.log.waiting()):
        _make_reusable(engine)
    freed = 0
    # Where even that has no room, what was freed until then has to do.
    with contextlib.suppress(DiskFullError):
        while freed < max(_STEPS, at_most) and take_step(engine, True) == 0.0:
            freed += 1
        if not freed and engine.run_once(_leave_tail):
            freed += take_step(engine, True) == 0.0
    if engine.run_once(lambda session: session.log.waiting()):
        _make_reusable(engine)
    else:
        engine.run_once(keep_reserve)
    return freed


def _leave_tail(session: Session) -> bool:
    """Where all there is is one segment, full and settled, go on in the spare one, so that its slot
    becomes free. True when it was done.
    """
    log = session.log
    words = log.state.words
    segment = words[LAST]
    start, end = segment << log.bits, (segment + 1) << log.bits
    if words[HEAD] != segment or log.room > log.segment_bytes // 2:
        return False
    if session.tx.live_in(start, end, 1):
        return False
    log.roll(session.now_us)
    session.append(
        [_records.pack_checkpoint(session.tx.checkpoint_state())], flags=CHECKPOINT_FRAME
    )
    return True


def _make_reusable(engine: Engine) -> None:
    """Take freed slots through the steps of `_slots`, with the syncs between them done here,
    outside the lock.
    """
    for _ in range(_ROUNDS):
        engine.flush()
        announced = engine.run_once(lambda session: session.log.announce())
        engine.sync_file()
        # Again for what another process freed between the steps.
        if not engine.run_once(_settled, announced):
            return


def _settled(session: Session, announced: int) -> bool:
    """The last step; whether slots still wait."""
    session.log.settled(announced)
    keep_reserve(session)
    return session.log.waiting()
