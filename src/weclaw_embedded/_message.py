"""A leased message as its handler sees it.

Role: bodies are read and decoded here, lazily and outside every lock; settling goes to
`_delivery` under the lock. A message keeps the bytes of its record, not a place in the file: what
became of the file's space is nothing to it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

from . import _clock, _codecs, _delivery, _records, _settling, _values
from ._records import (
    CODEC_MSGPACK,
    META_CODEC,
    META_HEADERS,
    META_ID,
    META_KEY,
    META_SKEW_US,
    NEVER,
    NO_META,
    PLAIN_BYTES,
    PLAIN_PUTS,
    PUT_BYTES,
    NoRecordError,
)
from ._session import BATCH, Session, spread
from .errors import ClosedError, DiskFullError, LeaseLostError, SerializationError

if TYPE_CHECKING:
    from ._delivery import Lease
    from ._index import Row
    from .queue import Queue

T = TypeVar("T")
What = TypeVar("What")
M = TypeVar("M", bound="Message")
_new: Final = object.__new__
MAX_RESULT_BYTES: Final = 1 << 30
_NOTHING: Final = (b"", 0)  # where no record could be read
# How often a lease is renewed while it lasts.
_RENEWALS: Final = 3
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST_US: Final = (datetime.min.replace(tzinfo=timezone.utc) - _EPOCH) // _MICROSECOND
_LAST_US: Final = (datetime.max.replace(tzinfo=timezone.utc) - _EPOCH) // _MICROSECOND


def to_datetime(us: int) -> datetime:
    """Microseconds since 1970 as an aware datetime in UTC, the nearest there is."""
    return _EPOCH + timedelta(microseconds=min(max(us, _FIRST_US), _LAST_US))


def describe(error: BaseException) -> str:
    """An exception as the reason of a failure: its type and text."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as failed:  # noqa: BLE001  the user's code, which must not hide the failure
        text = f"(its text can't be told: its __str__ raised {type(failed).__name__})"
    return f"{name}: {text}" if text else name


def clip(reason: str | None, default: str) -> str:
    """A reason within its limit, and writable as UTF-8."""
    if reason is None:
        return default
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a str or None, not {reason!r}; nothing was changed")
    raw = reason.encode("utf-8", "backslashreplace")
    return raw[: _delivery.MAX_REASON_BYTES].decode("utf-8", "ignore")


def pack_result(result: Any) -> bytes:
    """A result as it is kept, within its limit. Raises SerializationError."""
    packed = _values.pack_value(result, "result")
    if len(packed) > MAX_RESULT_BYTES:
        raise SerializationError(
            f"the result has {len(packed)} bytes once encoded, more than {MAX_RESULT_BYTES}; "
            "nothing was changed; keep it elsewhere, and give where as the result"
        )
    return packed


class _Unread:
    """In the place of a body that nobody has asked for; a class stays itself when pickled."""


class Place(NamedTuple):
    """Where a message was put; a lease knows that, too."""

    offset: int
    salt: int


class Told:
    """What a message and a dead letter both tell: what was put, which never changes.

    It is made of the bytes of a Put, which are checked at once and taken apart when something is
    asked. Raises ValueError when they are none.
    """

    __slots__ = ("_at", "_body", "_meta", "_record", "_time_us")

    def __init__(self, record: bytes | memoryview, time_us: int, at: Place | Lease) -> None:
        self._meta = _records.meta_of_put(record)
        self._record = record
        self._time_us = time_us
        self._at = at
        self._body: Any = _Unread

    @property
    def id(self) -> str:
        given: str | None = self._meta.get(META_ID)
        at = self._at
        return _delivery.own_id(at.offset, at.salt) if given is None else given

    @property
    def key(self) -> str | None:
        return self._meta.get(META_KEY)

    @property
    def headers(self) -> dict[str, Any]:
        """What was given at put; `{}` when nothing was."""
        packed = self._meta.get(META_HEADERS)
        return _values.unpack_value(packed) if packed else {}

    @property
    def priority(self) -> int:
        return _records.kind_of_put(self._record)[0]

    @property
    def offset(self) -> int:
        """The message's place in the log, for ever; grows with every put to the file."""
        return self._at.offset

    @property
    def enqueued_at(self) -> datetime:
        """When it was put, in UTC."""
        return to_datetime(self._time_us + self._meta.get(META_SKEW_US, 0))

    def _decoded(self, codec: _codecs.AnyCodec) -> Any:
        """The body, decoded once. Raises SerializationError."""
        body = self._body
        if body is _Unread:
            record = self._record
            if self._meta is NO_META:  # as of most, whose body is all that is behind the head
                number, data = record[1] & 15, record[PUT_BYTES:]
            else:
                number, data = _records.body_of_put(record)
            if number == CODEC_MSGPACK:
                body = _values.unpack_value(data)
            else:
                body = _codecs.decode(number, self._meta.get(META_CODEC), data, codec=codec)
            self._body = body
        return body


class Content(Told):
    """What a Put says, in nobody's hands."""

    __slots__ = ()

    def body(self, codec: _codecs.AnyCodec) -> Any:
        """The decoded body, decoded once. Raises SerializationError."""
        return self._decoded(codec)


class Bodied(Told):
    """What a message and a dead letter have in common for whoever reads the body."""

    __slots__ = ()

    @property
    def body(self) -> Any:
        """The body, equal to what was put. Raises `SerializationError`."""
        raise NotImplementedError

    def __getitem__(self, key: Any) -> Any:
        """`msg["prompt"]` is `msg.body["prompt"]`."""
        return self.body[key]

    def __contains__(self, key: Any) -> bool:
        """`"prompt" in msg` is `"prompt" in msg.body`."""
        return key in self.body

    def __iter__(self) -> NoReturn:
        # Else Python asks for [0], [1] and so on, and a dict of a body answers with KeyError: 0.
        raise TypeError(f"{self!r} can't be iterated; nothing was changed; iterate its .body")


class Message(Bodied):
    """One delivery of one message, leased to this process.

    Any thread may read it and settle it; the first settling wins. `ack`, `nack` and `fail` return
    when they are as durable as the handle's `flush` promises, `release` and `extend` when they are
    written. All of them raise `LeaseLostError` when the lease is over, and then change nothing;
    `StoreFailedError` leaves a settling in doubt.
    """

    __slots__ = ("__weakref__", "_lease", "_queue")

    _lease: Lease | None
    _queue: Queue

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.topic!r}, delivery {self.delivery_count}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a message can't be pickled: it is held by this process; pickle its body, or have the "
            "other process open the queue (a Queue can be pickled) and get it there"
        )

    # -- what it is ------------------------------------------------------------------------------

    @property
    def body(self) -> Any:
        """The body, equal to what was put. Raises `SerializationError` if it can't be decoded; the
        message can be settled all the same.
        """
        return self._decoded(self._queue._codec)

    @property
    def topic(self) -> str:
        return self._queue.topic

    @property
    def retry_count(self) -> int:
        """Failed deliveries before this one."""
        counts = self._counts
        return 0 if counts is None else counts.retry

    @property
    def delivery_count(self) -> int:
        """Times it was handed over, this one included."""
        counts = self._counts
        return 0 if counts is None else counts.delivery

    @property
    def crash_count(self) -> int:
        """Deliveries that ended with the death of their process."""
        counts = self._counts
        return 0 if counts is None else counts.crash

    @property
    def _counts(self) -> Lease | Row | None:
        """What tells how often it was tried."""
        return self._lease

    @property
    def lease_expires_at(self) -> datetime | None:
        """When the lease runs out, in UTC; None when it does not or there is none."""
        lease = self._lease
        if lease is None or lease.deadline_ns >= NEVER:
            return None
        ahead_ns = lease.deadline_ns - _clock.monotonic_ns()
        return to_datetime(_clock.wall_us() + ahead_ns // 1000)

    # -- settling ----------------------------------------------------------------------------------

    def ack(self, result: Any = None) -> None:
        """Done: never delivered again in this group. `result` is kept with it in the same step,
        for `Queue.result`; `max_message_bytes` does not hold for it. Raises `SerializationError`
        for a result that msgpack can't keep, or over 1 GiB; then the message is still held.
        """
        lease = self._lease or self._held()
        queue = self._queue
        policy = queue._policy
        if result is not None:
            self._run(_settling.ack_with, (lease, pack_result(result), policy))
            return
        engine = lease.engine
        record = _records.ack_of(lease.tid, lease.gid, lease.offset)
        if engine.end(lease, record, policy) < 0:
            self._run(_settling.end, (lease, record, policy))
        elif policy == BATCH and not engine.flush_is_due:
            engine.flush_later(queue._store._options, 0)

    def nack(
        self, backoff: float | None = None, reason: str | None = None, *, count: bool = True
    ) -> None:
        """Failed: delivered again after `backoff` seconds (None: what the retry policy says), or
        moved to the dead letters when that was the last retry. `count=False` waits the same and
        burns no retry.
        """
        from ._options import check_seconds

        if backoff is not None:
            backoff = check_seconds("backoff", backoff)
        if not isinstance(count, bool):
            raise TypeError(f"count must be True or False, not {count!r}; nothing was changed")
        queue = self._queue
        died = self._settle(
            _settling.nack,
            queue._address.retry,
            backoff,
            clip(reason, "nack"),
            count,
            queue._store._consumer,
            queue._policy,
        )
        if died:
            self._died()

    def fail(self, reason: str | None = None) -> None:
        """Straight to the dead letters, whatever retries are left."""
        queue = self._queue
        consumer = queue._store._consumer
        self._settle(_settling.fail, clip(reason, "failed"), consumer, queue._policy)
        self._died()

    def release(self) -> None:
        """Not now: ready for the next consumer at once, no retry counted."""
        self._settle(_settling.release)

    def extend(self, seconds: float | None = None) -> None:
        """Count the lease anew from now, for `seconds` (None: those of the `visibility_timeout` it
        was taken with). What renews it, `with` or a worker, goes on with as many.
        """
        from ._options import check_seconds

        lease = self._held()
        if seconds is None:
            seconds = lease.visibility_s
        else:
            seconds = check_seconds("seconds", seconds, positive=True)
        self._settle(_settling.extend, seconds)
        if lease.renewal is not None:
            lease.renewal = lease.renewal.anew()

    def _held(self) -> Lease:
        lease = self._lease
        if lease is None:
            raise LeaseLostError(
                f"message {self.id} was only looked at, not taken; nothing was changed; get() it"
            )
        return lease

    def _settle(self, operation: Callable[..., T], *args: Any) -> T:
        return self._run(spread, (operation, (self._held(), *args)))

    def _run(self, operation: Callable[[Session, What], T], what: What) -> T:
        """Run what settles this message, as `Engine.run` does."""
        lease = self._lease or self._held()
        engine = lease.engine
        try:
            result = engine.run_with(operation, what)
        except ClosedError:
            if lease.over or engine.forked:
                raise _settling.lost(lease) from None
            raise
        if not engine.flush_is_due and self._queue._policy == BATCH:
            engine.flush_later(self._queue._store._options, 0)
        return result

    def _died(self) -> None:
        """It became a dead letter by this very call."""
        self._queue._tell_dead([self.offset])

    # -- with --------------------------------------------------------------------------------------

    def __enter__(self) -> Message:
        lease = self._held()
        if lease.renewal is None:
            lease.renewal = Renewal(lease)
        return self

    def _stop_renewal(self) -> Lease:
        lease = self._held()
        renewal, lease.renewal = lease.renewal, None
        if renewal is not None:
            renewal.stop()
        return lease

    def _is_settled(self) -> bool:
        """Whether the block has settled it, at the end of a `with`. One whose lease was lost
        meanwhile is not: `ack` says so.
        """
        lease = self._stop_renewal()
        return lease.over and not lease.lost

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_settled():
            return
        if error is None:
            self.ack()
        else:
            self._ended_by(error)

    def _ended_by(self, error: BaseException) -> None:
        """An exception has ended the `with`."""
        try:
            if isinstance(error, Exception):
                self.nack(reason=describe(error))
            else:
                self.release()
        except (LeaseLostError, ClosedError):
            # The error that ended the block is the one to be seen; the message comes back anyway.
            return


def _read_of(
    queue: Queue, lease: Lease, record: bytes | memoryview, time_us: int
) -> tuple[bytes | memoryview, int, dict[int, Any]] | None:
    """What was leased, as `messages_of` needs it; None when it is gone or damaged."""
    if record:
        with contextlib.suppress(NoRecordError):
            return record, time_us, _records.meta_of_put(record)
    # Carried up, now or before; or damaged.
    content = queue._read(lease.offset, lease.location, lease.salt)
    return None if content is None else (content._record, content._time_us, content._meta)


def messages_of(
    kind: type[M],
    queue: Queue,
    leases: Sequence[Lease],
    found: Sequence[tuple[bytes | memoryview, int] | None],
) -> list[M]:
    """What was leased, as messages of this kind, made of what was `found` at their places (record
    and time; None where nothing could be read); without what is gone or damaged.
    """
    messages: list[M] = []
    for lease, one in zip(leases, found, strict=True):
        record, time_us = one or _NOTHING
        if record[:PLAIN_BYTES] in PLAIN_PUTS and len(record) >= PUT_BYTES:
            meta = NO_META  # as `meta_of_put` has it, whose call costs as much as all the rest
        else:
            other = _read_of(queue, lease, record, time_us)
            if other is None:
                continue
            record, time_us, meta = other
            lease.given_id = meta.get(META_ID)
        # One is made for each delivery: by `__init__` it would cost twice as much until 3.13.
        message = _new(kind)
        message._meta = meta
        message._record = record
        message._time_us = time_us
        message._body = _Unread
        message._queue = queue
        message._at = message._lease = lease
        messages.append(message)
    return messages


class Seen(Message):
    """A message that was only looked at: it is nobody's here, and can't be settled."""

    __slots__ = ("_row",)

    def __init__(self, queue: Queue, content: Content, row: Row | None) -> None:
        Told.__init__(self, content._record, content._time_us, content._at)
        self._queue = queue
        self._lease = None
        self._row = row

    @property
    def _counts(self) -> Lease | Row | None:
        return self._row


class Renewal:
    """Extends a lease at each third of its length, as that was last given, until stopped: from a
    thread of the engine's that does nothing else. Not past `until_s` (`time.monotonic`).
    """

    def __init__(self, lease: Lease, until_s: float = math.inf) -> None:
        self._lease = lease
        self._until_s = until_s
        self._stopped = False
        self._number = 0  # of the call that is planned
        self._plan()

    def _plan(self) -> None:
        length_s = self._lease.length_s
        if length_s is not None:
            when_s = time.monotonic() + length_s / _RENEWALS
            if when_s < self._until_s:
                self._number = self._lease.engine.renewals.call_at(when_s, self._renew)

    def _renew(self) -> None:
        if self._stopped:
            return
        try:
            self._lease.engine.run(_settling.renew, self._lease)
        except DiskFullError:
            pass  # tried again in a third of the lease
        except Exception:  # noqa: BLE001  lost, closed or failed: whoever settles it is told
            return
        self._plan()

    def anew(self) -> Renewal:
        """Another one in its place, which counts from now: the lease has another length."""
        self.stop()
        return Renewal(self._lease, self._until_s)

    def without_end(self) -> Renewal:
        """Another one in its place, for as long as it takes: what was limited is over."""
        self.stop()
        return Renewal(self._lease)

    def stop(self) -> None:
        self._stopped = True
        if self._number:
            self._lease.engine.renewals.cancel(self._number)
