"""`Queue`: one topic of one file, seen by one consumer group.

Role: the names a user meets, and how messages are put and taken; what is asked besides is
`_asking`'s. Arguments are checked and bodies encoded (`_encoding`) before any lock; waiting
(`_pending`) happens after the lock is given back; everything between is an operation of `_putting`,
`_taking` or `_queries`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from . import _delivery, _putting, _queries, _taking
from ._asking import Asking
from ._delivery import Address, Encoded, Lease
from ._encoding import Encoder
from ._encoding import Put as Put
from ._engine import Engine
from ._handle import Holder, check_text
from ._message import Message, messages_of
from ._options import (
    UNSET,
    QueueOptions,
    Unset,
    check_count,
    check_names,
    check_seconds,
    queue_options,
)
from ._pending import deadline_of, is_over, look_at
from ._putting import NoRoom
from ._records import MAX_DELIVER, group_id
from ._session import BATCH, POLICIES
from ._transaction import Transaction
from ._wake import Waiter
from .dlq import DeadLetterQueue
from .errors import (
    ClosedError,
    CorruptError,
)

if TYPE_CHECKING:
    from ._options import RetryPolicy
    from ._store import Store

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Queue(Asking):
    """One topic of a file as one consumer group sees it.

    `Queue(path)` opens the file (made if it is missing) and the topic in one step; `Store.queue`
    opens further topics and groups of a file. All methods may be called from any thread and any
    process; none may be called from a signal handler. A forked child's queue opens itself anew on
    first use; a pickled one opens its path where it is unpickled.

    Args:
        path: The file. What lies beside it (`path` + ".d") is scratch.
        topic: Which messages, by default "default"; topics of a file share nothing but the file.
        group: Each group (by default "default") gets every message of the topic; its consumers
            share them.
        maxsize: `put` waits while so many messages are ready or delayed in this group; 0 (the
            default): no limit.
        visibility_timeout: Seconds a lease lasts, by default 60; None: until settled or the process
            dies. It is renewed in `with msg` and in workers only.
        retry: What happens after failed deliveries, by default `RetryPolicy()`: again after 5, 10
            and 20 s, then dead.
        on_dead: By default nothing is called. Called with each `DeadLetter` that this process makes
            of this queue, in whatever thread; `close` waits until it has been, the end of the
            interpreter 5 seconds at most.
        start: Where the group begins if it does not exist: "earliest" (default, on first get),
            "latest" or an offset; given explicitly, the group begins now.
        **options: Those of `weclaw_embedded.open`, which has them with their defaults: `flush`,
            `retention`, `max_bytes`, `codec`, `replica`, `readonly` and more.

    Raises:
        ValueError, TypeError: bad options; no file was made.
        NotAQueueError, FormatVersionError, LockedError, StorageError: the file can't be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        topic: str = "default",
        *,
        group: str | Unset = UNSET,
        maxsize: int | Unset = UNSET,
        visibility_timeout: float | Unset | None = UNSET,
        retry: RetryPolicy | Unset = UNSET,
        on_dead: Callable[..., Any] | Unset | None = UNSET,
        start: str | int | Unset = UNSET,
        **options: Any,
    ) -> None:
        from ._store import open as open_store

        self._closed = True  # until it is open, for __del__
        check_names(type(self).__name__, options)
        arguments = {
            "topic": topic,
            "group": group,
            "maxsize": maxsize,
            "visibility_timeout": visibility_timeout,
            "retry": retry,
            "on_dead": on_dead,
            "start": start,
        }
        chosen = queue_options(arguments)
        store = open_store(path, **options)
        try:
            self._bind(store, chosen, owns_store=True)
        except BaseException:
            store.close()
            raise

    @classmethod
    def _of(cls, store: Store, options: QueueOptions) -> Queue:
        queue = cls.__new__(cls)
        queue._closed = True
        queue._bind(store, options, owns_store=False)
        return queue

    def _bind(self, store: Store, options: QueueOptions, *, owns_store: bool) -> None:
        self._store = store
        self._options = options
        self._owns_store = owns_store
        self.topic = options.topic
        self.group = options.group
        self.maxsize = options.maxsize
        self._visibility_s = options.visibility_timeout
        self._codec = store._options.codec
        self._encoder = Encoder(store)
        self._policy = POLICIES[store._options.flush]
        self._holder = Holder(store, self)
        self._untold = {}
        self._address = Address(
            options.topic,
            options.group,
            group_id(options.topic, options.group),
            options.retry,
            self._holder,
            options.start,
        )
        self.dlq = DeadLetterQueue(self)
        self._closed = False
        if "start" in options.given and not store.readonly:
            self._run(_delivery.group_of, self._address)

    @property
    def store(self) -> Store:
        """The open file this is a queue of, for its backup, verify, groups and the like. It is
        closed with the queue, unless `Store.queue` made that.
        """
        return self._store

    def __repr__(self) -> str:
        return f"<Queue {self.topic!r}, group {self.group!r}, of {self._store.path}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _reopen,
            (
                self._store.path,
                self._store._arguments,
                {name: getattr(self._options, name) for name in self._options.given},
            ),
        )

    # -- put ---------------------------------------------------------------------------------------

    def put(
        self,
        body: Any,
        *,
        id: str | None = None,
        key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        eta: datetime | None = None,
        ttl: float | None = None,
        headers: Mapping[str, Any] | None = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> str:
        """Put a message; returns its id when it is as durable as `flush` promises.

        Args:
            body: What comes back equal: None, bool, int, float, str, bytes, list, tuple, dict,
                aware datetime; or whatever `codec` takes. What is a subclass of one of these (an
                Enum of str, a namedtuple, an OrderedDict) comes back as the plain value that it
                is equal to, or is refused where it is equal to none.
            id: Makes the put idempotent: while a message of this id is kept, nothing is stored. It
                is kept while it waits, is leased or is dead, and once settled for `retention`
                (within `retention_bytes`) and until its space is reused, so for a while even where
                retention is 0. What recurs needs a date in its id. At most 1024 bytes.
            key: Messages of one key are delivered in the order of their puts, one at a time. At
                most 64 KiB.
            priority: 0 to 9, higher first.
            delay: Not before so many seconds from now.
            eta: Not before that time (aware).
            ttl: Seconds after which it goes to the dead letters instead of to a worker.
            headers: A dict kept beside the body.
            block: Whether to wait for room.
            timeout: How many seconds at most; None for ever.

        Raises:
            SerializationError, MessageTooLargeError, Full, DiskFullError: nothing was written.
            StoreFailedError: in doubt; put again with the same `id` after opening again.
        """
        data, terms = self._encoder.one(body, id, key, priority, delay, eta, ttl, headers)
        return self._put([([data], terms)], block, timeout)[0]

    def put_nowait(self, body: Any, **options: Any) -> str:
        """`put` that raises `Full` instead of waiting for room."""
        return self.put(body, block=False, **options)

    def put_many(
        self, bodies: Iterable[Any], *, block: bool = True, timeout: float | None = None
    ) -> list[str]:
        """Put bodies or `Put` objects, all or nothing, up to 1 GiB together; their ids in order.

        Waits until all of them have room. Raises as `put` does.
        """
        messages = self._encoder.many(bodies)
        if not messages:
            deadline_of(block, timeout)  # refuses what makes no sense
            self._engine  # noqa: B018  a closed queue says so
            return []
        return self._put(messages, block, timeout)

    def _put(self, messages: Sequence[Encoded], block: bool, timeout: float | None) -> list[str]:
        engine = self._writable()
        _putting.check_size(messages, engine.option("max_message_bytes"))
        until_s = None if block is True and timeout is None else deadline_of(block, timeout)
        try:
            ids = self._try_put(engine, messages)
        except NoRoom as error:
            attempt = partial(self._try_put, engine, messages)
            ids = self._once_room(engine, until_s, attempt, error)
        if self._policy == BATCH:
            self._flush_later(engine, len(ids))
        return ids

    def _try_put(
        self, engine: Engine, messages: Sequence[Encoded], waiter: Waiter | None = None
    ) -> list[str]:
        """Put, or raise NoRoom with the waiter registered."""
        return engine.run_together(
            _putting.put,
            (self._address, messages, self._policy, self.maxsize, waiter, self._remember_dead),
        )

    def cancel(self, id: str) -> bool:
        """Take a message out of every group. False if it is unknown, or any group holds it or has
        settled it; then nothing is changed.
        """
        what = (self._address, check_text("id", id), self._policy, self._remember_dead)
        return self._change(_queries.cancel, *what)

    # -- get ---------------------------------------------------------------------------------------

    def get(
        self,
        *,
        block: bool = True,
        timeout: float | None = None,
        visibility_timeout: float | Unset | None = UNSET,
    ) -> Message:
        """Lease the next message.

        Waits up to `timeout` seconds (None: for ever) unless `block` is False; waiting uses no
        CPU to speak of, and Ctrl-C interrupts it. `visibility_timeout` overrides the queue's.

        Raises:
            Empty: there was none in time.
            ClosedError: the queue is, or was meanwhile, closed.
        """
        return self._take(1, block, timeout, visibility_timeout)[0]

    def get_nowait(self) -> Message:
        """`get` that raises `Empty` instead of waiting."""
        return self._take(1, False, None, UNSET)[0]

    def get_many(
        self,
        n: int,
        *,
        block: bool = True,
        timeout: float | None = None,
        visibility_timeout: float | Unset | None = UNSET,
    ) -> list[Message]:
        """Lease up to `n` messages, at least one, at most one of each key; waits as `get` does."""
        n = min(check_count("n", n, 1), MAX_DELIVER)
        return self._take(n, block, timeout, visibility_timeout)

    def _take(
        self, n: int, block: bool, timeout: float | None, visibility_timeout: float | Unset | None
    ) -> list[Message]:
        engine = self._writable()
        # What most calls give is looked at first.
        visibility_s = self._visibility_s
        if visibility_timeout is not UNSET:
            visibility_s = self._visibility(visibility_timeout)
        until_s = None if block is True and timeout is None else deadline_of(block, timeout)
        waiter = None if until_s == 0.0 else Waiter()
        while True:
            try:
                if engine.others:
                    engine.fold_ahead()
                taken = engine.run_with(_taking.take, (self._address, n, visibility_s, waiter))
                if taken.leases:
                    try:
                        if taken.dead:
                            self._remember_dead(taken.dead)
                        messages = self._messages_of(engine, taken.leases, Message)
                    except BaseException:
                        engine.give_back_unseen(taken.leases)
                        raise
                    if messages:
                        return messages
                    continue
                if taken.dead:
                    self._remember_dead(taken.dead)
                if taken.has_more:
                    continue
                if waiter is None:
                    engine.settle_left()
                    raise _taking.nothing_ready(self._address, taken.paused)
                self._sleep(engine, waiter, look_at(engine, taken.look_again_us), until_s)
            except BaseException:
                engine.waker.discard(waiter)
                raise
            waiter = None if is_over(until_s) else Waiter()

    def _visibility(self, given: float | Unset | None) -> float | None:
        if given is UNSET:
            return self._visibility_s
        if given is None:
            return None
        return check_seconds("visibility_timeout", given, positive=True)

    def _messages_of(self, engine: Engine, leases: list[Lease], kind: type[M]) -> list[M]:
        """What was taken, as messages of this kind; without what is gone or damaged."""
        found: list[tuple[bytes, int] | None]
        if len(leases) == 1:
            lease = leases[0]
            try:
                found = [engine.log.read_with_time(lease.location)]
            except (LookupError, CorruptError):
                found = [None]
        else:
            found = engine.log.read_each([lease.location for lease in leases])
        return messages_of(kind, self, leases, found)

    def __iter__(self) -> Iterator[Message]:
        """The next message, and the next, waiting for each, until the queue is closed."""
        while True:
            try:
                message = self.get()
            except ClosedError:
                return
            yield message

    # -- transaction -------------------------------------------------------------------------------

    def transaction(self, *, block: bool = True, timeout: float | None = None) -> Transaction:
        """`with q.transaction() as tx: tx.ack(msg, result=…); tx.put(body, topic="next")`: acks,
        results and puts over topics of the file, all or none, also after a crash. An exception in
        the block drops them all. Raises at its end as `ack` and `put` do; then none is done.

        Its end waits, as `put_many` does, until all that is put has room at once: in this topic by
        the queue's `maxsize`, in another by that of the queue this store has open there for the
        same group. `timeout` seconds at most (None: for ever), not at all unless `block`; leases
        are not renewed meanwhile. One that puts nothing never waits.
        """
        deadline_of(block, timeout)  # refuses what makes no sense
        return Transaction(self, block, timeout)

    # -- the end -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Everything written so far is on stable storage when this returns."""
        self._engine.flush()

    def close(self) -> None:
        """Close this queue, and with it the file if the queue opened it: leases are handed back
        uncounted, everything is flushed; a `with msg` that is under way ends with LeaseLostError.
        Closing twice does nothing. Raises StoreFailedError when that fails and no call has said so
        before; all is closed then, too.
        """
        if self._closed:
            return
        engine = self._store._shared
        engine.judge_late(lambda holder: holder is self._holder)
        self._tell_untold()
        self._closed = True
        if not (self._store._closed or engine.forked):
            engine.waker.wake_all()
        try:
            if not (self._store._closed or engine.forked):
                engine.hand_back(lambda holder: holder is self._holder)
        finally:
            if self._owns_store:
                self._store.close()
            else:
                self._store._forget(self)

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._owns_store:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._closed = True
            self._store._drop()


def _reopen(path: str, store: dict[str, Any], queue: dict[str, Any]) -> Queue:
    options = dict(queue)
    return Queue(path, options.pop("topic", "default"), **options, **store)
