"""What a queue is made of below its names: its engine, its address, and how it waits.

Role: what `Queue` inherits to run operations: on an engine that is opened anew after a fork, with
letters that were made on the way told of after the lock is given back. And the checks of what
several calls are given.

It must not know what is put, taken or asked.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from . import _delivery, _queries, _registry, _settling
from ._delivery import Address
from ._engine import Engine
from ._message import Content, Place
from ._options import QueueOptions
from ._pending import Waits
from ._records import NoRecordError
from ._session import BATCH, Session
from ._shared import FAILED
from ._wake import Timer
from .dlq import DeadLetterQueue
from .errors import ClosedError, CorruptError, DiskFullError, StoreFailedError

if TYPE_CHECKING:
    from ._store import Store

T = TypeVar("T")
logger = logging.getLogger("weclaw_embedded")


class Holder:
    """Whose leases are handed back together: those of a queue, and with it of its store."""

    __slots__ = ("_queue", "store")

    def __init__(self, store: Store, queue: Handle) -> None:
        self.store = store
        self._queue = weakref.ref(queue)  # a lease keeps no queue that its user has dropped

    def judge(self, session: Session) -> None:
        """Count what ran out, by the queue's own retry policy."""
        queue = self._queue()
        if queue is not None:
            queue._swept(session)


class _Untold:
    """Letters that `on_dead` has not been called with yet. It is called by a thread of its own,
    since it may take its time, or by whoever closes the queue before.
    """

    def __init__(self, engine: Engine, tell: Callable[[list[int]], None]) -> None:
        self.engine = engine
        self._tell = tell
        self._offsets: deque[int] = deque()
        self._telling = threading.RLock()  # `on_dead` may close the queue
        self._timer = Timer("weclaw-on-dead")
        self._over = False
        _registry.tell_at_end(self)

    def add(self, offsets: list[int]) -> None:
        # Each once, though a turn that found no room was taken again.
        self._offsets.extend(dict.fromkeys(offsets))
        self._timer.call_at(0.0, self._work)

    def _work(self) -> None:
        while self._offsets:
            try:
                self._tell_all()
            except BaseException:
                # `sys.exit()` in an `on_dead`, say: the end of this thread would be that of the
                # others' calls.
                logger.exception("%s: on_dead raised what ends a thread", self.engine.path)

    def _tell_all(self) -> None:
        with self._telling:
            while self._offsets:
                self._tell([self._offsets.popleft()])

    def wait_told(self, until_s: float) -> None:
        """At the end of the interpreter: its thread may take until then (time.monotonic)."""
        if self._over or self.engine.forked:
            return
        # No Event: broken off by Ctrl-C, it could keep its lock, and that thread never come back.
        told = threading.Lock()
        told.acquire()
        self._timer.call_at(0.0, told.release)
        if not told.acquire(timeout=max(0.0, until_s - time.monotonic())):
            logger.warning(
                "%s: the program ends while on_dead is at work; for %d more letters it is not "
                "called; all are in the dead letters",
                self.engine.path,
                len(self._offsets),
            )

    def close(self) -> None:
        self._tell_all()
        self._over = True
        self._timer.close()

    def close_then(self, function: Callable[[], None]) -> None:
        """Have `function` called once all are told of, by the same thread; waits for nothing."""
        self._timer.call_at(0.0, functools.partial(self._end, function))

    def _end(self, function: Callable[[], None]) -> None:
        try:
            self.close()
        finally:
            function()

    def __del__(self) -> None:
        # Of a queue that was dropped: its thread goes, too. (Not waited for: the garbage collector
        # may run in the middle of anything.) The lock of what a fork, or the interpreter's end, has
        # cut off may be held for ever.
        if not (self.engine.forked or sys.is_finalizing()):
            self._timer.stop()


class Handle(Waits):
    """One topic of one open file, as one group sees it. See `Queue`."""

    topic: str
    maxsize: int
    dlq: DeadLetterQueue
    _store: Store
    _options: QueueOptions
    _policy: int
    _address: Address
    _closed: bool
    _untold: dict[Engine, _Untold]  # in a child, that of the parent may be there, too

    @property
    def _engine(self) -> Engine:
        if self._closed:
            raise ClosedError(
                f"this queue of {self._store.path} is closed; nothing was changed; open it again"
            )
        return self._store._engine

    def _change(self, operation: Callable[..., T], *args: Any) -> T:
        engine = self._writable()
        result = engine.run(operation, *args)
        if self._policy == BATCH:
            self._flush_later(engine, 0)
        return result

    def _writable(self) -> Engine:
        """The engine, for a change. Raises StorageError when the file was opened to look only."""
        store = self._store
        engine = store._shared
        if self._closed or store._closed or store.readonly or engine.forked:
            self._engine  # noqa: B018  a closed queue says so first
            return store._writable()
        return engine

    def _flush_later(self, engine: Engine, n: int) -> None:
        """See to it that `n` messages are synced as `flush="batch"` says, which may be now."""
        until = engine.flush_later(self._store._options, n)
        if until:
            engine.durable(until)

    def _run(self, operation: Callable[..., T], *args: Any) -> T:
        return self._engine.run(operation, *args)

    def _look(self, operation: Callable[..., T], *args: Any) -> T:
        """Run what only looks. Where there is no room to write down what ended by itself, it is
        told as if that had been written; so it is of a file that was deleted or replaced, which
        takes no more writes.
        """
        try:
            return self._run(operation, *args)
        except StoreFailedError as error:
            return self._store._shared.last_look(error).run(operation, *args)
        except DiskFullError:
            return self._engine.run_once(_queries.imagining, operation, *args)

    def _swept(self, session: Session) -> Any:
        return _queries.swept(session, self._address, self._remember_dead)

    def _remember_dead(self, dead: list[int]) -> None:
        """Letters made on the way; told of after the lock is given back, by another thread."""
        if dead and self._options.on_dead is not None:
            engine = self._store._shared
            untold = self._untold.get(engine)
            if untold is None:
                # Of two threads that come here at once, both take the one that is kept.
                untold = self._untold.setdefault(engine, _Untold(engine, self._tell_dead))
            untold.add(dead)

    def _tell_untold(self) -> None:
        """`on_dead` is called for what was remembered before there is nobody to call it."""
        untold = self._untold.get(self._store._shared)
        if untold is not None and not untold.engine.forked:
            untold.close()

    def _drop(self) -> None:
        """Close what was dropped open, once `on_dead` was called for what was remembered. Waits for
        nothing: see `Store._drop`.
        """
        untold = self._untold.get(self._store._shared)
        if untold is None or untold.engine.forked or sys.is_finalizing():
            self._drop_now()
        else:
            untold.close_then(self._drop_now)

    def _drop_now(self) -> None:
        self._closed = True
        self._store._drop()

    def _find(self, session: Session, id: str) -> int | None:
        topic = session.tx.topic(self.topic)
        return None if topic is None else _delivery.find(session, topic.tid, id)

    def _read(self, offset: int, location: int, salt: int) -> Content | None:
        """The message itself; None when it is gone, or damaged: see `_content`."""
        try:
            return self._content(offset, location, salt)
        except CorruptError:
            return None

    def _content(self, offset: int, location: int, salt: int) -> Content | None:
        """The message itself; None when it is gone. Raises CorruptError when it is damaged, which
        sets it aside, or puts it off while a replica that may have it can't be asked.
        """
        engine = self._engine
        asked = -1
        while True:
            try:
                record, time_us = engine.put_and_time(location)
                return Content(record, time_us, Place(offset, salt))
            except LookupError as error:
                # Carried up and its segment freed since we were told the place.
                before = location
                try:
                    location, salt = self._run(_delivery.place, offset)
                except LookupError:
                    return None
                if location == before:
                    # It is said to be there, and is not.
                    raise self._set_aside(offset, location, str(error)) from error
            except (CorruptError, NoRecordError) as error:
                if not isinstance(error, CorruptError):
                    raise self._set_aside(offset, location, str(error)) from error
                wait_s = engine.heal_pause_s()
                if wait_s > 0:
                    # The replica may have it, and can't be asked now: it is not set aside for good.
                    self._run(_settling.put_off, offset, wait_s)
                    raise
                if asked != location:
                    asked = location
                    self._is_healed(location)
                    continue  # also where it was not: another thread may have, since it was read
                raise self._set_aside(offset, location, error.reason) from error

    def _met(self, damage: CorruptError) -> bool:
        """A message that was asked for can't be read: heal it, or note it and say so in the log.
        True when it can be read again.
        """
        if self._engine.heal_pause_s() > 0:
            return False  # the replica may have it, and can't be asked now
        if self._is_healed(damage.offset):
            return True
        if self._engine.heal_pause_s() <= 0:
            self._set_aside(damage.offset, damage.offset, damage.reason)
        return False

    def _is_healed(self, location: int) -> bool:
        """Whether a replica had what can't be read there."""
        engine = self._engine
        return not engine.page.words[FAILED] and engine.heal(location, location + 1)

    def _set_aside(self, offset: int, location: int, reason: str) -> CorruptError:
        """Note a message that can't be read, and say so in the log; returns the error to raise."""
        engine = self._store._shared
        place: int | None = location
        try:
            place = self._run(_delivery.set_aside, offset, reason, location)
        except StoreFailedError:
            if not engine.is_lost():  # else it is only looked at
                raise
        if place is not None:
            engine.tell_damage(place, reason)
        return CorruptError(offset, reason)

    def _unknown(self, id: str) -> KeyError:
        """Why there is no result to wait for."""
        return KeyError(
            f"message {id!r} is not known in topic {self.topic!r}, or not any more: it was never "
            "put there, was cancelled or purged, or its retention is over; nothing was changed; "
            "check the id and the topic, or ask sooner"
        )

    def _tell_dead(self, offsets: Iterable[int]) -> None:
        on_dead = self._options.on_dead
        if on_dead is None:
            return
        for offset in offsets:
            name = f"at offset {offset}"
            try:
                try:
                    letter = self.dlq._at(offset)
                except (KeyError, CorruptError):
                    continue  # somebody was quicker, and redrove or purged it
                name = letter.id
                on_dead(letter)
            except Exception:
                logger.exception("on_dead failed for message %s", name)


# What several calls are given -------------------------------------------------------------------


def check_text(name: str, value: Any, limit_bytes: int | None = None) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}; nothing was changed")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"{name} can't be written in UTF-8; nothing was changed") from None
    if limit_bytes is not None and not 1 <= size <= limit_bytes:
        raise ValueError(
            f"{name} must have 1 to {limit_bytes} bytes in UTF-8, not {size}; nothing was changed"
        )
    return value


def us_until(eta: datetime) -> int:
    """Microseconds until then, by the wall clock at this moment."""
    return max(0, -us_since(eta, "eta"))


def us_since(moment: datetime, name: str = "since") -> int:
    if not isinstance(moment, datetime):
        raise TypeError(f"{name} must be a datetime, not {moment!r}; nothing was changed")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise ValueError(f"{name} must be aware (have a time zone); nothing was changed")
    passed = datetime.now(timezone.utc) - moment
    return (passed.days * 86400 + passed.seconds) * 1_000_000 + passed.microseconds
