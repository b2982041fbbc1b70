"""What is asked of a queue, and what steers it: results, counts, looks, pauses, replays.

Role: what `Queue` inherits for all that neither puts nor takes. Waiting for a result or for the
end of all work happens here, after the lock is given back; what is asked under it is an operation
of `_queries`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from . import _delivery, _queries, _taking, _values
from ._engine import Engine
from ._handle import Handle, check_text, us_since
from ._message import Message, Seen, clip
from ._options import check_count, check_seconds
from ._pending import Pending, deadline_of, pending_until
from ._queries import Outcome, Stats
from ._records import key_hash
from ._session import Session
from ._shared import FAILED
from ._wake import Waiter
from .errors import (
    CorruptError,
    DeadLetterError,
    Empty,
    OffsetTrimmedError,
    StoreFailedError,
)
from .wal import TAIL

if TYPE_CHECKING:
    from ._index import Row
    from .queue import Queue

logger = logging.getLogger("weclaw_embedded")

# Messages that a warning names.
_NAMED: Final = 10
_REPLAY_BATCH: Final = 50_000
# So far apart is told how far a replay has read.
_REPLAY_TOLD_BYTES: Final = 1 << 20

Kept: TypeAlias = tuple[int, int]  # where what is kept begins, and where it ends
Span: TypeAlias = tuple[int, int, str]  # from where to where nothing can be read, and why


class Asking(Handle):
    """What `Queue` can be asked, and told besides to put and to take."""

    # -- results -----------------------------------------------------------------------------------

    def result(self, id: str, timeout: float | None = 0.0) -> Any:
        """The result given at ack, waiting up to `timeout` seconds for it (None: for ever).

        Raises:
            Empty: not settled yet.
            DeadLetterError: it is dead; carries the letter.
            KeyError: unknown, cancelled, purged, or no longer kept.
            CorruptError, SerializationError: its bytes, or those of the message, are damaged, or
                were when it was carried.
        """
        id = check_text("id", id)
        until_s = deadline_of(True, timeout)
        engine = self._engine
        before: int | None = None
        while True:
            try:
                try:
                    found: Outcome = self._once_settled(engine, until_s, self._outcome, id)
                except StoreFailedError as error:
                    found = self._last_outcome(engine, error, until_s, id)
            except CorruptError as error:
                if self._met(error):
                    continue
                raise
            if found.state == "done":
                try:
                    return self._result_at(engine, found.ack_at)
                except CorruptError as error:
                    if not engine.heal(error.offset, error.offset + 1):
                        raise
                except LookupError:
                    if found.ack_at == before:
                        raise self._unknown(id) from None
                    before = found.ack_at  # carried up, and its segment freed, since we looked
            elif found.state == "dead":
                try:
                    letter = self.dlq._at(found.offset)
                except KeyError:
                    continue  # redriven or purged since we looked
                raise DeadLetterError(letter)
            else:
                raise self._unknown(id)

    def _last_outcome(
        self, engine: Engine, error: StoreFailedError, until_s: float | None, id: str
    ) -> Outcome:
        """How it has ended, of a file that was deleted or replaced while it was open."""
        looker = engine.last_look(error)
        try:
            found: Any = looker.run(self._outcome, None, id)
        except Empty:
            if until_s == 0.0:
                raise
            raise error from None  # nobody settles it any more
        return cast("Outcome", found)

    def _outcome(self, session: Session, waiter: Waiter | None, id: str) -> Outcome | Pending:
        """How a message has ended; what to wait for while it has not. Without a waiter that is
        `Empty`.
        """
        found = _queries.outcome(session, self._address, id, self._remember_dead, waiter)
        if found.state in ("done", "dead", "unknown"):
            return found
        if waiter is None:
            raise Empty(f"message {id} is not settled yet (it is {found.state})")
        return pending_until(session, found.look_again_us)

    def _result_at(self, engine: Engine, ack_at: int | None) -> Any:
        if ack_at is None:
            return None
        packed = engine.result_bytes(ack_at, self._address.gid)
        return _values.unpack_value(packed) if packed else None

    def status(self, id: str) -> str:
        """One of "ready" "delayed" "leased" "done" "dead" "unknown". One that can't be read is
        unknown, is counted as damage from then on, and a warning in the log says where.
        """
        id = check_text("id", id)
        while True:
            try:
                return self._look(_queries.status, self._address, id, self._remember_dead)
            except CorruptError as error:
                if not self._met(error):
                    return "unknown"

    # -- looking -----------------------------------------------------------------------------------

    def qsize(self) -> int:
        """Messages ready or delayed in this group."""

        def count(session: Session) -> int:
            group = self._swept(session)
            return 0 if group is None else _delivery.waiting_in(session.tx, group)

        return self._look(count)

    def empty(self) -> bool:
        """True when nothing is ready or delayed."""
        return self.qsize() == 0

    def full(self) -> bool:
        """True when `maxsize` is reached; never without one."""
        self._engine  # noqa: B018  a closed queue says so, with a limit and without
        return self.maxsize > 0 and self.qsize() >= self.maxsize

    def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing is ready, delayed or leased in this group; False when `timeout`
        seconds went by first.
        """
        until_s = deadline_of(True, timeout)
        engine = self._engine
        return self._once_settled(engine, until_s, self._all_done) is None

    def _all_done(self, session: Session, waiter: Waiter | None) -> Pending | None:
        """What `join` runs until it is no `Pending`."""
        group = self._swept(session)
        if group is None or not _delivery.unfinished_in(session.tx, group):
            return None
        if waiter is not None:
            _delivery.wait_settled(session, group.tid, waiter)
        return pending_until(session, _taking.next_look(session, group))

    def peek(self, n: int = 1) -> list[Message]:
        """The next `n` messages as they would be delivered; takes nothing, and they can't be
        settled.
        """
        n = check_count("n", n, 0)

        def look(session: Session, n: int) -> list[tuple[int, tuple[int, int] | None, Row | None]]:
            group = self._swept(session)
            if group is None:
                return []
            return [
                (
                    offset,
                    _delivery.place_of_live(session, offset),
                    session.tx.row(group.gid, offset),
                )
                for offset in list(session.tx.peek(group, n, session.now_us))
            ]

        wanted = n  # and as many as were found damaged, which may still be there
        damaged: set[int] = set()
        while True:
            found: list[Message] = []
            rows = self._look(look, wanted)
            for offset, place, row in rows:
                if len(found) < n and offset not in damaged:
                    content = None if place is None else self._read(offset, *place)
                    if content is not None:
                        found.append(Seen(cast("Queue", self), content, row))
                    else:
                        damaged.add(offset)
            if len(found) == n or len(rows) < wanted:
                return found
            wanted = n + 2 * len(damaged)

    def stats(self) -> Stats:
        """Counts and sizes, all of one moment."""
        return self._look(_queries.stats, self._address, self._remember_dead)

    @property
    def offset(self) -> int:
        """Everything before this offset is settled in this group."""

        def look(session: Session) -> int:
            group = self._swept(session)
            return session.log.head_offset if group is None else session.tx.first_unsettled(group)

        return self._look(look)

    # -- steering ----------------------------------------------------------------------------------

    def purge(self) -> int:
        """Throw away all that is ready or delayed in this group; returns how many. What is leased
        or dead stays.
        """
        return self._change(_queries.purge, self._address, self._policy, self._remember_dead)

    def pause(self, seconds: float, reason: str | None = None) -> None:
        """No deliveries from this topic and group for so long, in any process, over restarts."""
        seconds = check_seconds("seconds", seconds, positive=True)
        self._change(_queries.pause, self._address, seconds, clip(reason, ""), self._policy)

    def resume(self) -> None:
        """End a pause."""
        self._change(_queries.pause, self._address, 0.0, "", self._policy)

    def replay(
        self,
        *,
        offset: int | str | None = None,
        since: datetime | None = None,
        ids: Iterable[str] | None = None,
    ) -> int:
        """Let settled messages flow again through this group; returns how many.

        Exactly one of: `offset` (all from there; "earliest": all that is kept), `since` (all put
        from then on, aware), `ids`. Their retries begin anew and their old results are gone; dead
        letters stay, cancelled and purged ones are gone. What can't be read is passed over, and a
        warning in the log says which of the `ids`, or where.

        Raises `OffsetTrimmedError`, which carries the first offset still kept.
        """
        return self._replay(None, offset, since, ids)[0]

    def _replay(
        self,
        seen: Callable[[int, int], None] | None,
        offset: int | str | None,
        since: datetime | None,
        ids: Iterable[str] | None,
    ) -> tuple[int, int]:
        """`replay`; how many flow again, and how many, or what stands at how many places, can't
        be read. `seen` is told how many bytes were read, and of how many.
        """
        given = [
            name
            for name, v in (("offset", offset), ("since", since), ("ids", ids))
            if v is not None
        ]
        if len(given) != 1:
            raise TypeError("replay takes exactly one of offset, since, ids; nothing was changed")
        if isinstance(ids, str):
            raise TypeError(f"ids takes several ids, not one str; use [{ids!r}]")
        wanted = None if ids is None else [check_text("id", one) for one in ids]
        start: int | None = None  # all that is kept
        if isinstance(offset, str):
            if offset != "earliest":
                raise ValueError(f"offset must be a number or 'earliest', not {offset!r}")
        elif offset is not None:
            start = check_count("offset", offset, 0, 2**56 - 1)
        engine = self._writable()
        if wanted is not None:
            engine.run(_delivery.group_of, self._address)
            return self._replay_ids(wanted)
        since_us = 0 if since is None else engine.now_us() - us_since(since)

        def look(session: Session) -> Kept:
            return session.log.head_offset, session.log.state.words[TAIL]

        def replay(kept: Kept) -> tuple[int, int]:
            if start is not None and start < kept[0]:
                raise OffsetTrimmedError(engine.first_offset())
            engine.run(_delivery.group_of, self._address)
            return self._replay_from(engine, kept, start, since_us, seen)

        # What is read can't be given back meanwhile, whoever settles it or finds its time over.
        return engine.pinned(look, replay)

    def _replay_ids(self, ids: list[str]) -> tuple[int, int]:
        """What can't be read is passed over, once a replica was asked for it."""
        wanted = list(dict.fromkeys(ids))
        damage: dict[str, int] = {}
        choose = _queries.replay_ids
        done = self._change(choose, self._address, wanted, self._policy, damage, False)
        if done is None:
            met, damage = damage, {}
            for location in met.values():
                self._is_healed(location)
            # It is not set aside: it is in nobody's way, and its result may still be asked for.
            done = self._change(choose, self._address, wanted, self._policy, damage, True)
        if damage:
            named = ", ".join(map(repr, islice(damage, _NAMED)))
            logger.warning(
                "%s: %d messages can't be read and were not replayed, %s",
                self._store.path,
                len(damage),
                named + (", …" if len(damage) > _NAMED else ""),
            )
        return cast(int, done), len(damage)

    def _replay_from(
        self,
        engine: Engine,
        kept: Kept,
        start: int | None,
        since_us: int,
        seen: Callable[[int, int], None] | None,
    ) -> tuple[int, int]:
        """`replay` of what is kept, from one offset to another, which is pinned. What can't be read
        is passed over, once a replica was asked for it.
        """
        tid = engine.run(lambda session: _delivery.topic_of(session, self.topic)[0])
        begin, end = kept
        if start is not None:
            begin = engine.log.boundary_before(start)
        chosen = (tid, start or 0, since_us)
        met: list[Span] = []
        done = self._replay_span(engine, (begin, end), chosen, met, seen)
        left: list[Span] = []
        for span in met:
            if not engine.page.words[FAILED] and engine.heal(*span[:2]):
                done += self._replay_span(engine, span[:2], chosen, left, None)
            else:
                left.append(span)
        for place, _, reason in left:
            if engine.heal_pause_s() <= 0:  # else a replica may have it, and can't be asked now
                self._set_aside(place, place, reason)
        if left:
            named = ", ".join(str(span[0]) for span in left[:_NAMED])
            logger.warning(
                "%s: %d places can't be read, and what stood there was not replayed, those at "
                "offset %s",
                self._store.path,
                len(left),
                named + (", …" if len(left) > _NAMED else ""),
            )
        return done, len(left)

    def _replay_span(
        self,
        engine: Engine,
        span: tuple[int, int],
        chosen: tuple[int, int, int],
        damage: list[Span],
        seen: Callable[[int, int], None] | None,
    ) -> int:
        """`replay` of what stands from one offset to another: of a topic, from an offset on, and
        put since a time. What can't be read there, and may be of it, is added to `damage`.
        """
        begin, end = span
        tid, start, since_us = chosen
        log = engine.log
        done = 0
        batch: dict[int, _queries.Candidate] = {}  # by offset: one may have been carried twice
        told = begin
        met: list[tuple[int, str]] = []  # since the last frame

        def note(next_good: int) -> None:
            ends = [*(place for place, _ in met[1:]), next_good]
            for (place, reason), to in zip(met, ends, strict=True):
                if to > max(begin, start):
                    damage.append((place, to, reason))

        if seen is not None:
            seen(0, max(1, end - begin))
        for frame in log.frames(
            log.boundary_before(begin), end, on_damage=lambda *what: met.append(what)
        ):
            if met and frame[2] >= since_us:  # else what stood there was put before it, too
                note(frame[0])
            met.clear()
            if frame[0] < begin:
                continue
            for at, record in frame[5]:
                offset, time_us, put = _queries.put_of(at, frame[2], record)
                if put is None or time_us < since_us or offset < start:
                    continue
                candidate = _queries.candidate(offset, put, tid, key_hash)
                if candidate is not None:
                    batch[offset] = candidate
            if len(batch) >= _REPLAY_BATCH:
                done += self._replay_batch(batch)
                batch = {}
            # By what was read, too: what is to flow again may all be at the end.
            if seen is not None and frame[0] >= told + _REPLAY_TOLD_BYTES:
                told = frame[0]
                seen(told - begin, end - begin)
        if met:
            note(end)
        return done + self._replay_batch(batch)

    def _replay_batch(self, batch: dict[int, _queries.Candidate]) -> int:
        if not batch:
            return 0
        return self._change(_queries.replay, self._address, list(batch.values()), self._policy)
