"""Put: what is checked and appended under the write lock for a message to be there.

Role: operations for `Engine.run` that put, also as part of a transaction. What can be refused
is refused before anything is appended; ids that are known are answered and not stored again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

from . import _clock, _records
from ._delivery import (
    SOON_S,
    Address,
    Encoded,
    Lease,
    TellDead,
    Terms,
    digest_of,
    is_kept,
    seen_by,
    topic_of,
    wait_settled,
    waiting_in,
)
from ._session import SYNC, Session
from ._settling import hold_all, let_go_all
from ._shared import EVERYBODY, OPTIONS_SEQ, mask_of
from ._taking import sweep_all
from ._wake import Waiter
from .errors import Full, LeaseLostError, MessageTooLargeError
from .wal import Alike, bytes_of

MAX_PUT_MANY_BYTES: Final = 1 << 30
_SKEW_NOTED_US: Final = 1_000_000
_SOON_US: Final = int(SOON_S * 1e6)


class NoRoom(Full):
    """Not now; the caller may wait for room."""


class NoBytes(NoRoom):
    """The file is as large as it may be; space of settled messages may be freed for it."""


def together(messages: Sequence[Encoded]) -> Sequence[Encoded]:
    """The same as one, where the same is said of all of them: so what is done to each is done to
    their bodies in one step.
    """
    bodies, terms = zip(*messages, strict=True)
    if terms.count(terms[0]) < len(terms):
        return messages
    return [([*chain.from_iterable(bodies)], terms[0])]


def put(
    session: Session,
    what: tuple[Address, Sequence[Encoded], int, int, Waiter | None, TellDead | None],
) -> list[str]:
    """Append the messages as one frame; their ids, in order. `NoRoom` when there is none now, with
    `waiter` registered before the lock is given back. `tell_dead` is called, once that is written,
    with the offsets of messages that ran out and so made room, be it enough or not.
    """
    address, messages, policy, maxsize, waiter, tell_dead = what
    if not session.may_write:
        session.check_writable()
    tid, records = topic_of(session, address.topic)
    ids: list[str | None] = []
    fresh = messages
    for _, terms in messages:
        if terms.id is not None:
            fresh, ids = _without_known(session, tid, messages)
            break
    offsets: Sequence[int] = ()
    if fresh:
        first = len(records)
        try:
            if maxsize > 0:
                n = sum(len(bodies) for bodies, _ in fresh)
                _check_room(session, address, n, maxsize, tell_dead)
            puts = _put_records(session, tid, fresh)
            offsets = _append_puts(session, [*records, *puts] if first else puts, policy)
        except NoRoom:
            if waiter is not None:
                wait_settled(session, -1, waiter)
            raise
        if first:
            offsets = offsets[first:]
    if policy >= session.sync_from:
        session.must_sync = True
    if not ids:
        if len(offsets) > 1:
            session.answer = _ids_later(session, offsets)
            session.is_plain = False
            return []
        return _ids_of(session, offsets)
    said = chain.from_iterable([terms.id] * len(bodies) for bodies, terms in fresh)
    made = iter(
        _ids_of(session, [offset for offset, id in zip(offsets, said, strict=True) if id is None])
    )
    return [known if known is not None else next(made) for known in ids]


def _without_known(
    session: Session, tid: int, messages: Sequence[Encoded]
) -> tuple[list[Encoded], list[str | None]]:
    """Leave out what is already kept under its id, in the file or earlier in this very put."""
    fresh: list[Encoded] = []
    ids: list[str | None] = []
    seen: set[str] = set()
    for message in messages:
        given = message[1].id
        if given is None:
            ids += [None] * len(message[0])
            fresh.append(message)
            continue
        ids.append(given)
        if given not in seen and not is_kept(session, tid, given):
            fresh.append(message)
        seen.add(given)
    return fresh, ids


def _put_records(
    session: Session, tid: int, messages: Sequence[Encoded]
) -> Sequence[_records.Record]:
    """The records of messages; has as many getters woken. All but the body is the same in those
    that stand together.
    """
    session.put_to |= mask_of(tid)
    skew_us = _clock.wall_us() - session.now_us
    if -_SKEW_NOTED_US < skew_us < _SKEW_NOTED_US:
        skew_us = 0  # not worth a note
    records: list[_records.Record] = []
    for bodies, terms in messages:
        n = len(bodies)
        session.put_n += n
        if terms.plain and not skew_us:
            start = _records.plain_start(terms.codec, tid)
        else:
            if 0 < terms.delay_us < _SOON_US:
                session.put_n = EVERYBODY  # so that they know when it is due
            meta = _pack_meta(terms, session.now_us, skew_us)
            start = _records.pack_put(terms.priority, terms.codec, tid, meta, b"")[:-1]
        if n == 1:
            records.append((*start, bodies[0]))
        elif len(messages) == 1:
            return Alike(b"".join(start), bodies)
        else:
            records += Alike(b"".join(start), bodies)
    return records


def _pack_meta(terms: Terms, now_us: int, skew_us: int) -> bytes:
    ttl_us = terms.ttl_us
    return _records.pack_meta(
        key=terms.key,
        id=terms.id,
        due_us=now_us + terms.delay_us if terms.delay_us else None,
        expiry_us=None if ttl_us is None else now_us + ttl_us,
        headers=terms.headers,
        codec=terms.codec_name,
        skew_us=skew_us,
        delay_us=terms.delay_us,
        ttl_us=ttl_us,
    )


def _check_room(
    session: Session,
    address: Address,
    n: int,
    maxsize: int,
    tell_dead: TellDead | None,
) -> None:
    if n > maxsize:
        raise Full(
            f"{n} messages can never fit a queue of maxsize {maxsize}; nothing was put; put fewer"
        )
    group = seen_by(session, address)
    waiting = 0 if group is None else waiting_in(session.tx, group)
    if group is not None:
        is_full = waiting + n > maxsize
        if group.is_template:
            if is_full:
                waiting -= len(session.tx.expired(group, session.now_us, waiting))
        # What has run out meanwhile makes room; a lease that has, takes some.
        elif is_full or (
            waiting + n + group.n_leased > maxsize
            and group.next_deadline_ns <= _clock.monotonic_ns()
        ):
            sweep_all(session, session.tx, group, address.retry, tell_dead)
            waiting = waiting_in(session.tx, group)
    if waiting + n > maxsize:
        raise NoRoom(
            f"topic {address.topic!r} has {waiting} of at most {maxsize} messages waiting in group "
            f"{address.group!r}; nothing was put; take some, or wait for room"
        )


def _append_puts(session: Session, records: Sequence[_records.Record], policy: int) -> list[int]:
    engine = session.engine
    if engine.options_seen != session.page.words[OPTIONS_SEQ]:
        session.options()
    limit = engine.effective["max_bytes"]
    if limit is not None:
        _check_bytes(session, records, limit)
    return session.append(records, policy, True)


def _check_bytes(session: Session, records: Sequence[_records.Record], limit: int) -> None:
    log = session.log
    total = bytes_of(records) + 64 * len(records)
    grown = log.bytes_with(total, log.room)
    if grown <= limit:
        return
    if 2 * log.segment_bytes + total > limit:
        raise Full(
            f"{total} bytes can never fit a file of max_bytes={limit}; nothing was put; put less, "
            "or open the file with a larger limit"
        )
    raise NoBytes(
        f"the file would grow to {grown} bytes, more than max_bytes={limit}; nothing was put; "
        "settle some messages, or wait for room"
    )


def _ids_of(session: Session, offsets: Sequence[int]) -> list[str]:
    """The ids we make of messages at these offsets, which rise."""
    if len(offsets) == 1:
        return [_form_of(session, offsets[0]) % offsets[0]]
    return _ids_later(session, offsets)()


def _ids_later(session: Session, offsets: Sequence[int]) -> Callable[[], list[str]]:
    """What makes these ids when it is called, also after the turn and without its lock."""
    bits = session.log.bits
    forms: list[str] = []
    start = 0
    while start < len(offsets):
        first = offsets[start]
        end = bisect_left(offsets, (first >> bits) + 1 << bits, start)
        # In one step for all of a segment: put_many lives here.
        forms.append((_form_of(session, first) + " ") * (end - start))
        start = end
    return lambda: ("".join(forms) % (*offsets,)).split()


def _form_of(session: Session, offset: int) -> str:
    """How the id of a message at this offset is written."""
    engine = session.engine
    segment = offset >> session.log.bits
    last, form = engine.last_ids
    if last != segment:
        form = f"%014x{digest_of(session.log.salt(offset))}"
        engine.last_ids = (segment, form)
    return form


def check_size(messages: Sequence[Encoded], limit: int) -> int:
    """Refuse what is too large before anything is written; how many bytes it is together."""
    total = 0
    for bodies, _ in messages:
        total += sum(map(len, bodies)) if len(bodies) > 1 else len(bodies[0])
    if total <= limit <= MAX_PUT_MANY_BYTES:
        return total
    sizes = [len(body) for bodies, _ in messages for body in bodies]
    size = max(sizes)
    if size > limit:
        which = "the message"
        if len(sizes) > 1:
            n, size = next((n, size) for n, size in enumerate(sizes) if size > limit)
            which = f"message {n} of {len(sizes)} (the first is 0)"
        raise MessageTooLargeError(
            f"{which} has {size} bytes once encoded, more than max_message_bytes={limit}; "
            "nothing was put; put less, or open the file with a larger limit"
        )
    if total > MAX_PUT_MANY_BYTES:
        raise MessageTooLargeError(
            f"the messages have {total} bytes together, more than {MAX_PUT_MANY_BYTES}; nothing "
            "was put; put them in several steps"
        )
    return total


def check_headers(packed: bytes | None, limit: int) -> None:
    """Refuse headers that are too large, before anything is written."""
    if packed is not None and len(packed) > limit:
        raise MessageTooLargeError(
            f"the headers have {len(packed)} bytes once encoded, more than "
            f"max_message_bytes={limit}; nothing was put; put it into the body, or put less"
        )


def transact(
    session: Session,
    waiter: Waiter | None,
    acks: Sequence[tuple[Lease, bytes]],
    puts: Sequence[tuple[Address, Encoded]],
    policy: int,
    maxsizes: Mapping[str, int],
    tell_dead: Callable[[str, list[int]], None],
) -> list[str]:
    """Acks and puts over topics of the file as one frame: all or none, also after a crash. The ids
    of what was put. `maxsizes` are those of topics that have one; `tell_dead` is given the topic
    as well; else as `put`.
    """
    session.check_writable()
    leases = list(dict(acks))
    if len(leases) < len(acks):
        raise LeaseLostError("a message was acked twice in one transaction; nothing was changed")
    if leases and leases[0].engine is not session.engine:
        raise LeaseLostError("the messages are held by the parent process; nothing was changed")
    hold_all(session, leases)
    records = _records.pack_acks(acks)
    topics: dict[str, int] = {}
    ids: list[str | None] = []
    places: list[int] = []
    given: set[tuple[int, str]] = set()
    fresh: dict[str, list[Address]] = {}
    for address, message in puts:
        tid = topics.get(address.topic)
        if tid is None:
            tid, first = topic_of(session, address.topic)
            topics[address.topic] = tid
            records.extend(first)
        id = message[1].id
        if id is not None:
            ids.append(id)
            if (tid, id) in given or is_kept(session, tid, id):
                continue
            given.add((tid, id))
        else:
            ids.append(None)
            places.append(len(records))
        records += _put_records(session, tid, [message])
        fresh.setdefault(address.topic, []).append(address)
    try:
        for topic, addresses in fresh.items():
            if maxsizes.get(topic, 0) > 0:
                tell = partial(tell_dead, topic)
                _check_room(session, addresses[0], len(addresses), maxsizes[topic], tell)
        if maxsizes:
            hold_all(session, leases)  # looking for room judges what lapsed, and time went by
        if records:
            offsets = (
                _append_puts(session, records, policy) if puts else session.append(records, policy)
            )
            session.must_sync |= policy >= SYNC
    except NoRoom:
        if waiter is not None:
            wait_settled(session, -1, waiter)
        raise
    let_go_all(session, leases)
    made = iter(_ids_of(session, [offsets[place] for place in places]))
    return [known if known is not None else next(made) for known in ids]
