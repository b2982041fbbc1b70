"""Dead letters: what a topic and group have given up, kept until somebody decides.

Role: look, redrive, purge, export. A letter is the message itself with its history; the log keeps
its body for as long as it is a letter, whatever retention says. The move to the dead letters is
made in `_settling` and `_taking`; here they are looked at and come out again.
"""

from __future__ import annotations

import csv
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from . import _delivery, _names, _records
from ._jsonable import dumps, jsonable
from ._message import Bodied, Content, to_datetime
from ._options import check_count
from ._paths import name_of, names_folder
from ._queries import is_dead
from ._records import META_TTL_US
from ._session import SYNC
from ._shared import mask_of
from .errors import CorruptError, StorageError

if TYPE_CHECKING:
    from ._index import GroupState, Row
    from ._session import Session
    from .queue import Queue

logger = logging.getLogger("weclaw_embedded")

# Letters of one REDRIVE or PURGE_DEAD record, so that a frame stays small.
_BATCH: Final = 10_000
# Letters that a warning names.
_NAMED: Final = 10
_FIELDS: Final = (
    "id",
    "topic",
    "group",
    "key",
    "priority",
    "reason",
    "retry_count",
    "delivery_count",
    "crash_count",
    "redrive_count",
    "enqueued_at",
    "died_at",
    "headers",
    "failures",
    "body",
)


class Failure(NamedTuple):
    """One failed delivery: when (UTC), why, and the name of the consumer that had it."""

    time: datetime
    reason: str
    consumer: str


class DeadLetter(Bodied):
    """A message that was given up, with its history. A value: it does not follow later changes."""

    __slots__ = ("_codec", "_died_us", "_failures", "_row", "group", "reason", "topic")

    def __init__(self, queue: Queue, content: Content, row: Row, reason: str, died_us: int) -> None:
        self._codec = queue._codec
        super().__init__(content._record, content._time_us, content._at)
        self._row = row
        self._failures = tuple(Failure(to_datetime(t), why, who) for t, why, who in row.failures)
        self._died_us = died_us
        self.reason = reason
        self.topic = queue.topic
        self.group = queue.group

    def __repr__(self) -> str:
        return f"<DeadLetter {self.id} of {self.topic!r}: {self.reason}>"

    @property
    def body(self) -> Any:
        """The whole body. Raises `SerializationError` if it can't be decoded."""
        return self._decoded(self._codec)

    @property
    def retry_count(self) -> int:
        """Retries it had since it was put or last redriven."""
        return self._row.retry

    @property
    def delivery_count(self) -> int:
        return self._row.delivery

    @property
    def crash_count(self) -> int:
        return self._row.crash

    @property
    def redrive_count(self) -> int:
        return self._row.redrive

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The last 20 failed deliveries, oldest first."""
        return self._failures

    @property
    def died_at(self) -> datetime:
        return to_datetime(self._died_us)

    def to_dict(self) -> dict[str, Any]:
        """Everything as values that JSON can write: bytes as {"base64": …}, times in ISO 8601."""
        values = {name: jsonable(getattr(self, name)) for name in _FIELDS if name != "body"}
        try:
            values["body"] = jsonable(self.body)
        except ValueError as error:
            values["body"] = None
            values["body_error"] = str(error)
        return values


class DeadLetterQueue:
    """The dead letters of one topic and group: `Queue.dlq`. Any thread may use it."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def __repr__(self) -> str:
        return f"<DeadLetterQueue of {self._queue!r}>"

    def __len__(self) -> int:
        def count(session: Session) -> int:
            group = self._queue._swept(session)
            return 0 if group is None else group.n_dead

        return self._queue._look(count)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[DeadLetter]:
        """Every letter, in the order of their puts. Letters that come or go meanwhile may or may
        not be among them.
        """
        return self._letters(None)

    def _letters(self, damage: list[CorruptError] | None) -> Iterator[DeadLetter]:
        after: int | None = None
        while True:
            found, after = self._load(after, 100, damage)
            yield from found
            if after is None:
                return

    def peek(self, n: int = 1) -> list[DeadLetter]:
        """The first `n` letters; nothing is changed."""
        return list(islice(self, check_count("n", n, 0)))

    def get(self, id: str) -> DeadLetter:
        """The letter with this id. Raises `KeyError` if there is none, `CorruptError` if it
        can't be read.
        """
        if not isinstance(id, str):
            raise TypeError(f"an id is a str, not {id!r}; nothing was changed")
        queue = self._queue

        def find(session: Session) -> int | None:
            group = queue._swept(session)
            if group is None:
                return None
            try:
                offset = _delivery.find_sound(session, group.tid, id)
            except CorruptError as error:
                offset = error.offset
                if session.tx.is_aside(offset):
                    raise
            return offset if offset is not None and is_dead(session, group.gid, offset) else None

        offset = queue._look(find)
        if offset is None:
            raise self._no_letter(f"{id!r}")
        return self._at(offset)

    def _no_letter(self, which: str) -> KeyError:
        topic, group = self._queue.topic, self._queue.group
        return KeyError(
            f"there is no dead letter {which} in topic {topic!r}, group {group!r}, or not any "
            "more: it was redriven or purged, or never died there; nothing was changed; `status` "
            "of the queue says where a message is"
        )

    def _at(self, offset: int) -> DeadLetter:
        """The letter at an offset. Raises as `get` does."""
        damage: list[CorruptError] = []
        found, _ = self._load(offset - 1, 1, damage)
        if damage and damage[0].offset == offset:
            raise damage[0]
        if not found or found[0].offset != offset:
            raise self._no_letter(f"at offset {offset}")
        return found[0]

    def _load(
        self, after: int | None, n: int, damage: list[CorruptError] | None = None
    ) -> tuple[list[DeadLetter], int | None]:
        """The readable ones of the next `n` letters, and the last of them if there may be more.
        What can't be read is added to `damage`, with the offset of the letter.
        """
        queue = self._queue

        def look(session: Session) -> list[tuple[Any, ...]]:
            group = queue._swept(session)
            if group is None:
                return []
            rows = islice(session.tx.dead(group.gid, after), n)
            return [(_delivery.place_of_live(session, row[0]), *row) for row in list(rows)]

        letters = []
        rows = queue._look(look)
        for place, offset, row, reason, died_us in rows:
            try:
                content = None if place is None else queue._content(offset, *place)
            except CorruptError as error:
                content = None
                if damage is not None:
                    damage.append(CorruptError(offset, error.reason))
            if content is not None:
                letters.append(DeadLetter(queue, content, row, reason, died_us))
        return letters, rows[-1][1] if len(rows) == n else None

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """Make letters ready again: these, or all, at most `limit`. Returns how many.

        A redriven message keeps its id and history, has its retries and crashes anew, a `ttl`
        counted from now, and goes to the end of the queue and of its key. Ids that are no letters
        are passed over; so are letters that can't be read, and a warning in the log says which.
        """
        damage: list[CorruptError] = []
        done = self._redrive(ids, limit, damage)
        self._tell(damage, "were not redriven")
        return done

    def _redrive(
        self, ids: Iterable[str] | None, limit: int | None, damage: list[CorruptError]
    ) -> int:
        """`redrive`; what can't be read is added to `damage`, with the offset of the letter."""
        wanted = _as_ids(ids)
        if limit is not None:
            limit = check_count("limit", limit, 0)
        queue = self._queue
        policy = queue._policy
        done = 0
        # Each letter once: what is redriven may be dead again at once.
        offsets = self._offsets(wanted)
        while limit is None or done < limit:
            batch = [*islice(offsets, _BATCH if limit is None else min(_BATCH, limit - done))]
            if not batch:
                break
            known = ((offset, self._ttl_us(offset, damage)) for offset in batch)
            ttls = {offset: ttl for offset, ttl in known if ttl is not None}

            def redrive(session: Session, ttls: dict[int, int] = ttls) -> int:
                group = _delivery.group_of(session, queue._address)
                queue._swept(session)
                items = [
                    (offset, session.now_us + ttl if ttl else 0)
                    for offset, ttl in ttls.items()
                    if is_dead(session, group.gid, offset)
                ]
                if items:
                    session.append([_records.pack_redrive(group.gid, items)], policy)
                    session.must_sync |= policy >= SYNC
                    session.ready |= mask_of(group.tid)
                    session.settled |= mask_of(group.tid)
                return len(items)

            done += queue._change(redrive)
        return done

    def _ttl_us(self, offset: int, damage: list[CorruptError]) -> int | None:
        """What a letter was given; None when it can't be read."""
        try:
            return int(self._at(offset)._meta.get(META_TTL_US, 0))
        except KeyError:
            return None  # somebody was quicker
        except CorruptError as error:
            damage.append(error)
            return None

    def _tell(self, damage: list[CorruptError], how: str) -> None:
        """Say in the log which letters can't be read, and what became of them."""
        if damage:
            at = ", ".join(str(one.offset) for one in damage[:_NAMED])
            logger.warning(
                "%s: %d dead letters can't be read and %s, those at offset %s",
                self._queue._store.path,
                len(damage),
                how,
                at + (", …" if len(damage) > _NAMED else ""),
            )

    def _offsets(self, wanted: list[str] | None) -> Iterator[int]:
        """Where letters are, these or all, each once, whether they can be read or not. Those that
        come or go meanwhile may or may not be among them.
        """
        queue = self._queue

        def named(session: Session, ids: list[str]) -> list[int]:
            group = queue._swept(session)
            if group is None:
                return []
            found = dict.fromkeys(self._find(session, group, one) for one in ids)
            return [at for at in found if at is not None and is_dead(session, group.gid, at)]

        def following(session: Session, after: int | None) -> list[int]:
            group = queue._swept(session)
            if group is None:
                return []
            return [row[0] for row in islice(session.tx.dead(group.gid, after), _BATCH)]

        if wanted is not None:
            rest = iter(dict.fromkeys(wanted))
            while ids := [*islice(rest, _BATCH)]:
                yield from queue._look(named, ids)
            return
        after: int | None = None
        while some := queue._look(following, after):
            yield from some
            after = some[-1]

    def _find(self, session: Session, group: GroupState, id: str) -> int | None:
        """Where the letter with this id is, if it is one, though it may be damaged."""
        try:
            return _delivery.find_sound(session, group.tid, id)
        except CorruptError as error:
            return error.offset

    def purge(self, ids: Iterable[str] | None = None) -> int:
        """Throw letters away for good: these, or all. Returns how many; their ids are free."""
        wanted = _as_ids(ids)
        queue = self._queue
        policy = queue._policy
        done = 0
        offsets = self._offsets(wanted)
        while batch := [*islice(offsets, _BATCH)]:

            def purge(session: Session, batch: list[int] = batch) -> int:
                group = _delivery.group_of(session, queue._address)
                queue._swept(session)
                gone = [offset for offset in batch if is_dead(session, group.gid, offset)]
                if gone:
                    session.append([_records.pack_purge_dead(group.gid, gone)], policy)
                    session.must_sync |= policy >= SYNC
                    session.settled |= mask_of(group.tid)
                return len(gone)

            done += queue._change(purge)
        return done

    def export(self, path: str | os.PathLike[str], format: str = "jsonl") -> int:
        """Write every letter to `path` ("jsonl": one JSON object a line; "csv"). Returns how many.

        The file appears whole, under its name only when it is complete, and takes the place of one
        that was there. Letters that can't be read are left out, and a warning in the log
        says which.

        Raises:
            StorageError: what has that name is a folder, a pipe, a device, or the queue itself, or
                no file can be made there; nothing was replaced.
            ValueError: it is no path, or `format` is neither.
            DiskFullError: there was no room for it; then there is no file.
        """
        damage: list[CorruptError] = []
        letters = self._letters(damage)
        done = write_letters(letters, path, format, self._queue._store.path)
        self._tell(damage, f"were left out of {os.fsdecode(path)}")
        return done


def write_letters(
    letters: Iterable[DeadLetter], path: str | os.PathLike[str], format: str, queue_path: str
) -> int:
    """What `DeadLetterQueue.export` does, for any choice of letters."""
    if format not in ("jsonl", "csv"):
        raise ValueError(f"format must be 'jsonl' or 'csv', not {format!r}; nothing was written")
    name = name_of(path)
    target = os.path.realpath(name)  # what a link leads to is replaced, and not the link
    done = 0

    def write(fd: int) -> None:
        nonlocal done
        # A lone surrogate, which pickle can bring, has an escape in JSON and none in UTF-8.
        with open(
            fd, "w", encoding="utf-8", errors="backslashreplace", newline="", closefd=False
        ) as file:
            done = stream_letters(letters, file, format)

    try:
        _refuse_to_replace(name, queue_path)
        _names.create_whole(target, write, None, replace_file=True)
    except OSError as error:
        raise StorageError(
            f"{name} can't be written: {error.strerror or error}; nothing was replaced, and the "
            "letters are where they were; choose another place"
        ) from error
    return done


def _refuse_to_replace(path: str, queue_path: str) -> None:
    """Raise StorageError for what must never be replaced; before anything is written."""
    # By the name that was given: what is made of it for a pipe of /dev/fd leads nowhere.
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not names_folder(path):
            return
        raise StorageError(
            f"{path} is the name of a folder, and is not there; nothing was written; name a file"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(
            f"{path} is no regular file; nothing was written, and it was left alone; name a file"
        )
    if os.path.samestat(found, os.stat(queue_path)):
        raise StorageError(
            f"{path} is the queue itself; nothing was written, and it is as it was; name another "
            "file"
        )


def stream_letters(letters: Iterable[DeadLetter], file: IO[str], format: str) -> int:
    """Write letters to an open text file; how many."""
    write = _csv_writer(file) if format == "csv" else _jsonl_writer(file)
    done = 0
    for letter in letters:
        write(letter.to_dict())
        done += 1
    return done


def _jsonl_writer(file: IO[str]) -> Any:
    def write(values: dict[str, Any]) -> None:
        file.write(dumps(values) + "\n")

    return write


def _csv_writer(file: IO[str]) -> Any:
    writer = csv.DictWriter(file, [*_FIELDS, "body_error"], restval="")
    writer.writeheader()

    def write(values: dict[str, Any]) -> None:
        for name in ("headers", "failures", "body"):
            values[name] = dumps(values[name])
        writer.writerow(values)

    return write


def _as_ids(ids: Iterable[str] | None) -> list[str] | None:
    if ids is None:
        return None
    if isinstance(ids, str):
        raise TypeError(f"ids takes several ids, not one str; nothing was changed; use [{ids!r}]")
    wanted = list(ids)
    for one in wanted:
        if not isinstance(one, str):
            raise TypeError(f"an id is a str, not {one!r}; nothing was changed")
    return wanted
