"""What an operator asks of an open file, beyond what a program needs: every topic, every result
kept, who holds what and for how long, which deaths there were, what arrives, whether a copy is one;
and how far it is with what takes long.

Role: for the command line. What changes something is a public method, here with its progress; the
rest only reads. Answers come from the index under the lock, bodies from the log after it was given
back. Nothing here is promised to users under these names.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from . import _clock, _delivery, _mend, _records
from ._file_options import of_another
from ._message import Content, Place, to_datetime
from ._records import NEVER
from .errors import CorruptError, SerializationError
from .wal import TAIL

if TYPE_CHECKING:
    from ._session import Session
    from ._store import Store
    from .dlq import DeadLetter
    from .queue import Queue

#: Called with completed= and total=, in bytes.
Update = Callable[..., None]

_DIFFERENCES: Final = 100


def topics(store: Store) -> list[str]:
    """The name of every topic that was put into, those that no group has read too."""
    return sorted(name for name, number in puts(store).items() if number)


def puts(store: Store) -> dict[str, int]:
    """Of each topic, how many messages were ever put into it."""

    def look(session: Session) -> dict[str, int]:
        return {topic.name: topic.puts for topic in session.tx.topics()}

    return store._run(look)


def pauses(store: Store) -> dict[tuple[str, str], tuple[float, str]]:
    """(seconds left, reason) of each topic and group that is paused."""

    def look(session: Session) -> dict[tuple[str, str], tuple[float, str]]:
        names = {topic.tid: topic.name for topic in session.tx.topics()}
        return {
            (names.get(group.tid, f"#{group.tid}"), group.name or f"#{group.gid}"): (
                (group.paused_until_us - session.now_us) / 1e6,
                group.pause_reason,
            )
            for group in session.tx.groups(None)
            if group.paused_until_us > session.now_us
        }

    return store._run(look)


def replica_of(store: Store) -> str | Sequence[str] | None:
    """Where the file has its replica, as it records it: a path, a command, None without one."""
    recorded = _recorded(store)
    if of_another(recorded, store._engine.header.store_id):
        return None  # a backup: what it records is its original's
    return recorded.get("replica") or None


def lost_its_replica(store: Store) -> bool:
    """Whether this is a backup of a file that had a replica, and was given none of its own."""
    return of_another(_recorded(store), store._engine.header.store_id)


def _recorded(store: Store) -> dict[str, Any]:
    def look(session: Session) -> dict[str, Any]:
        return session.options()

    return store._run(look)


def consumers(queue: Queue) -> dict[str, int]:
    """How many messages of the group each consumer has in hand, by name."""

    def look(session: Session) -> dict[str, int]:
        group = queue._swept(session)
        if group is None:
            return {}
        names = [session.tx.owner_name(row.owner) for _, row in session.tx.leases(group.gid)]
        return dict(sorted(collections.Counter(names).items()))

    return queue._look(look)


def results(queue: Queue, after: int, n: int) -> list[tuple[int, str, Any, Exception | None]]:
    """(offset, id, result, None) of the next `n` messages beyond that offset whose result is kept;
    of a result that can't be read the last says why.
    """

    def look(session: Session) -> list[tuple[int, int, tuple[int, int]]]:
        group = queue._swept(session)
        if group is None:
            return []
        places = []
        for offset, at in session.tx.results(group.gid, after, n):
            with contextlib.suppress(LookupError):  # the message is no longer kept
                places.append((offset, at, _delivery.place(session, offset)))
        return places

    found: list[tuple[int, str, Any, Exception | None]] = []
    for offset, ack_at, place in queue._look(look):
        content = queue._read(offset, *place)
        if content is not None:
            result, damage = None, None
            try:
                result = queue._result_at(queue._engine, ack_at)
            except LookupError:  # no longer kept, since we looked
                continue
            except (CorruptError, SerializationError) as error:
                damage = error
            found.append((offset, content.id, result, damage))
    return found


class Held(NamedTuple):
    """A message in somebody's hands."""

    content: Content
    consumer: str
    delivery_count: int
    left_s: float | None
    """Until the lease runs out; None: it lasts as long as its process."""


def held(queue: Queue, n: int) -> list[Held]:
    """The first `n` leases of the group, by the order of their puts."""

    def look(session: Session) -> list[tuple[int, tuple[int, int], str, int, int]]:
        group = queue._swept(session)
        if group is None:
            return []
        rows = session.tx.leases(group.gid)[:n]
        return [
            (
                offset,
                _delivery.place(session, offset),
                session.tx.owner_name(row.owner),
                row.delivery,
                row.deadline,
            )
            for offset, row in rows
        ]

    found = []
    for offset, place, consumer, delivery, deadline_ns in queue._look(look):
        content = queue._read(offset, *place)
        if content is not None:
            left_s = None
            if deadline_ns < NEVER:
                left_s = max(0.0, (deadline_ns - _clock.monotonic_ns()) / 1e9)
            found.append(Held(content, consumer, delivery, left_s))
    return found


def deaths(queue: Queue) -> list[tuple[int, int]]:
    """(offset, time of death in us) of every dead letter; together they name one death.

    Where nothing is written (the file may only be looked at, or no group has begun) only what is
    written already is told: a death that the look itself judges would be told again later.
    """

    def look(session: Session) -> list[tuple[int, int]]:
        if session.may_write and session.tx.group(queue._address.gid) is not None:
            group = queue._swept(session)
        else:
            group = _delivery.seen_by(session, queue._address)
        if group is None:
            return []
        return [(row[0], row[3]) for row in session.tx.dead(group.gid)]

    return queue._run(look)


def letter_at(queue: Queue, offset: int, died_us: int) -> DeadLetter | None:
    """The letter of that death; None if it was redriven or purged since."""
    try:
        letter = queue.dlq._at(offset)
    except KeyError:
        return None
    return letter if letter._died_us == died_us else None


# -- what arrives ----------------------------------------------------------------------------------


def end(store: Store) -> int:
    """The offset below which every put is as durable as was promised."""

    def look(session: Session) -> int:
        page = session.engine.page
        return page.visible(session.log.pending_tail)

    return store._run(look)


def arrived(store: Store, start: int, until: int) -> Iterator[tuple[str, Content]]:
    """(topic, message) of each put from `start` up to `until`, as `end` gave it, in their order.

    What is damaged, or freed before we come to it, is passed over.
    """
    engine = store._engine
    log = engine.log
    names = store._run(lambda session: {topic.tid: topic.name for topic in session.tx.topics()})
    at = max(start, log.head_offset)
    while at < until:
        try:
            for frame in log.frames(log.boundary_before(at), until, on_damage=lambda *_: None):
                for offset, record in frame[5]:
                    if offset >= at and record[0] == _records.PUT:
                        with contextlib.suppress(ValueError):
                            tid = _records.unpack_put(record).tid
                            content = Content(record, frame[2], Place(offset, log.salt(offset)))
                            yield names.get(tid, f"#{tid}"), content
                at = max(at, frame[1])
            return
        except LookupError:  # it was freed under us
            at = max(at + 1, log.head_offset)


def before(store: Store, n: int, until: int, topic: str | None = None) -> int:
    """The offset from which on there are the last `n` puts (of a topic) before `until`; of all that
    is kept, if there are not so many.
    """
    if not n:
        return until
    log = store._engine.log
    segments = log.segments()
    wanted = 1
    while segments:
        start = segments[-min(wanted, len(segments))] << log.bits
        offsets = [
            content.offset
            for name, content in arrived(store, start, until)
            if topic in (None, name)
        ]
        if len(offsets) >= n:
            return offsets[-n]
        if wanted >= len(segments):
            break
        wanted *= 4
    return log.head_offset


# -- what takes long -------------------------------------------------------------------------------


def verify(store: Store, update: Update) -> list[tuple[int, str]]:
    """`Store.verify`, telling how far it is."""
    return store._engine.verify(_telling(update))


def set_aside_in(store: Store, places: list[int]) -> int:
    """How many messages are set aside of those that stand in these places, which can't be read."""

    def look(session: Session) -> list[int]:
        return session.tx.aside()

    found = set(places)
    log = store._engine.log.at_rest()
    return sum(
        offset not in found and log.bad_place(offset) in found for offset in store._run(look)
    )


def backup(store: Store, path: str, update: Update) -> None:
    """`Store.backup`, telling how far it is."""
    _mend.backup(store._engine, path, _telling(update))


def replay(queue: Queue, update: Update, **chosen: Any) -> tuple[int, int]:
    """`Queue.replay`, telling how far it is; also how many of the `ids`, or what stands at how many
    places, can't be read.
    """
    return queue._replay(
        _telling(update), chosen.get("offset"), chosen.get("since"), chosen.get("ids")
    )


class Gone(NamedTuple):
    """A place that can't be read, and what `repair` takes away with it."""

    offset: int
    reason: str
    size_bytes: int | None
    """0 where no message is gone: a header, of which there is another copy, or what is healed. None
    where that is not known any more: its segment was given back since.
    """
    healed: bool
    """The replica had it: nothing is gone."""
    after: datetime | None
    before: datetime | None
    """It was written between these times: those of what can be read around it."""


def repair(store: Store, update: Update) -> list[Gone]:
    """`Store.repair`, telling how far it is, and what was where it found something."""
    engine = store._writable()
    log = engine.log.at_rest()
    places: dict[int, int] = {}
    for start, end, _ in _mend.unreadable(log, log.head_offset, end_of_log(store)):
        places[start] = end - start
    around = _times_around(store, sorted(places))
    noted = dict(store._run(lambda session: session.tx.damage()))
    head = log.head_offset
    lost: dict[int, int] = {}
    found = []
    for offset, reason in _mend.repair(engine, _telling(update), lost):
        end = offset + places.get(offset, 0)
        size: int | None = sum(n for start, n in lost.items() if offset <= start < end)
        healed = offset in places and not size
        if offset < head and noted.get(offset) == reason:
            size = None
        found.append(Gone(offset, reason, size, healed, *around.get(offset, (None, None))))
    return found


def _times_around(
    store: Store, places: list[int]
) -> dict[int, tuple[datetime | None, datetime | None]]:
    """For each of these offsets the times of the good frame before it and of the next one."""
    log = store._engine.log
    found: dict[int, tuple[datetime | None, datetime | None]] = {}
    if not places:
        return found
    before: datetime | None = None
    waiting = list(places)
    for frame in log.frames(log.head_offset, end_of_log(store), on_damage=lambda *_: None):
        now = to_datetime(frame[2])
        while waiting and waiting[0] < frame[0]:
            found[waiting.pop(0)] = (before, now)
        if not waiting:
            break
        before = now
    found.update((offset, (before, None)) for offset in waiting)
    return found


def end_of_log(store: Store) -> int:
    """The offset behind the last thing that was written."""
    return int(store._engine.log.state.words[TAIL])


def epoch(store: Store) -> int:
    """How often the queue was taken over from a copy, + 1."""
    return int(store._engine.log.header.epoch)


def _telling(update: Update) -> Callable[[int, int], None]:
    return lambda done, total: update(completed=done, total=total)


# -- is the copy one? ------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """How a file and a copy of it compare."""

    frames: int
    """Frames that are the same."""
    behind: int
    """Bytes of the log that the copy does not have yet."""
    differences: list[tuple[int, str]]
    """(offset, what) of what is not the same; the first hundred."""


def compare(store: Store, other: Store, until: int) -> Comparison:
    """Hold every frame of `store` below `until` against the one at the same offset of `other`."""
    log, copy = store._engine.log, other._engine.log
    known = end(other)
    differences: list[tuple[int, str]] = []
    if log.header.store_id != copy.header.store_id:
        return Comparison(0, 0, [(0, "the other file is of another queue, not a copy")])
    if log.bits != copy.bits:
        return Comparison(0, 0, [(0, "the files have segments of different sizes")])
    start = max(log.head_offset, copy.head_offset)
    stop = min(until, known)
    ours = _frames(store, start, stop)
    theirs = _frames(other, start, stop)
    same = 0
    mine, its = next(ours, None), next(theirs, None)
    while (mine is not None or its is not None) and len(differences) < _DIFFERENCES:
        if its is None or (mine is not None and mine[0] < its[0]):
            assert mine is not None
            differences.append((mine[0], mine[1] or "the copy lacks this frame"))
            mine = next(ours, None)
        elif mine is None or its[0] < mine[0]:
            differences.append((its[0], f"the copy: {its[1] or 'a frame that is not here'}"))
            its = next(theirs, None)
        else:
            if mine == its and not mine[1]:
                same += 1
            else:
                what = mine[1] or (f"the copy: {its[1]}" if its[1] else "other bytes in the copy")
                differences.append((mine[0], what))
            mine, its = next(ours, None), next(theirs, None)
    return Comparison(same, max(0, until - max(known, start)), differences)


def _frames(store: Store, start: int, stop: int) -> Iterator[tuple[int, str, Any]]:
    """(offset, reason, contents) of each frame, or each place that holds none, up to `stop`."""
    log = store._engine.log
    bad: list[tuple[int, str]] = []
    at = start
    last = max(stop, end(store))  # a frame that begins before may end behind
    while at < stop:
        try:
            for frame in log.frames(
                log.boundary_before(at), last, on_damage=lambda *where: bad.append(where)
            ):
                yield from ((offset, reason, None) for offset, reason in bad if offset < stop)
                bad.clear()
                if frame[0] >= stop:
                    return
                if frame[0] >= at:
                    yield frame[0], "", tuple(frame[1:])
                at = max(at, frame[1])
            break
        except (LookupError, CorruptError):
            at = max(at + 1, log.head_offset)
    yield from ((offset, reason, None) for offset, reason in bad if offset < stop)
