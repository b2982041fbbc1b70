"""Transactions: acks, results and puts over topics of one file, as one step.

Role: what is to be done is collected while the block runs, and done at its end in one turn under
the write lock, or not at all; `_putting.transact` is that turn. What waits for room waits here, as
a put does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _putting
from ._delivery import Address
from ._message import Message, pack_result
from ._options import check_name
from ._pending import deadline_of
from ._putting import NoRoom
from ._records import group_id
from ._session import BATCH
from .errors import ClosedError

if TYPE_CHECKING:
    from ._delivery import Encoded, Lease
    from ._engine import Engine
    from ._wake import Waiter
    from .queue import Queue


class Transaction:
    """Acks, results and puts over topics of one file as one step; see `Queue.transaction`."""

    _enter = "with"

    def __init__(self, queue: Queue, block: bool, timeout: float | None) -> None:
        self._queue = queue
        self._engine = queue._engine  # a closed queue says so
        self._block = block
        self._timeout = timeout
        self._acks: list[tuple[Lease, bytes]] = []
        self._puts: list[tuple[Address, Encoded]] = []
        self._begun = False
        self._over = False
        self.ids: list[str] = []
        """The ids of what was put, in order, once the block has ended."""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self._queue!r}, {len(self._acks)} acks, "
            f"{len(self._puts)} puts>"
        )

    def ack(self, msg: Message, result: Any = None) -> None:
        """Settle `msg` when the block ends. Raises as `Message.ack` does, at the end for leases."""
        if not isinstance(msg, Message):
            raise TypeError(f"ack takes a Message, not {msg!r}; nothing was changed")
        lease = msg._lease or msg._held()
        if lease.engine is not self._engine:
            raise ValueError("the message is of another file; a transaction is within one file")
        packed = b"" if result is None else pack_result(result)
        self._check_open()
        self._acks.append((lease, packed))

    def put(
        self,
        body: Any,
        *,
        topic: str | None = None,
        id: str | None = None,
        key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        eta: datetime | None = None,
        ttl: float | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Put when the block ends; arguments as for `Queue.put`, `topic` defaults to the queue's.
        Returns the `id` that was given. One that is made says where the message stands, which is
        known when the block has ended: then all of them are in `ids`, and until then it is None.
        """
        queue = self._queue
        data, terms = queue._encoder.one(body, id, key, priority, delay, eta, ttl, headers)
        address = _address_of(queue, topic)
        self._check_open()
        self._puts.append((address, ([data], terms)))
        return terms.id

    def _check_open(self) -> None:
        if self._over:
            raise ClosedError("the transaction has ended; nothing was added; begin another")
        if not self._begun:
            raise ClosedError(
                "the transaction has not begun; nothing was changed; begin it with "
                f"`{self._enter} q.transaction() as tx:`, and add to it in that block"
            )

    def __enter__(self) -> Transaction:
        self._begin()
        return self

    def _begin(self) -> None:
        if self._over:
            self._check_open()
        self._begun = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        if error is None:
            self.ids = self._commit()

    def _commit(self) -> list[str]:
        queue = self._queue
        engine = queue._writable()
        what = self._what(engine)
        until_s = deadline_of(self._block, self._timeout)
        try:
            ids = self._try_commit(engine, what)
        except NoRoom as error:
            attempt = functools.partial(self._try_commit, engine, what)
            ids = queue._once_room(engine, until_s, attempt, error)
        if queue._policy == BATCH:
            queue._flush_later(engine, len(self._puts))
        return ids

    def _try_commit(
        self, engine: Engine, what: tuple[Any, ...], waiter: Waiter | None = None
    ) -> list[str]:
        """Do it all, or raise NoRoom with the waiter registered."""
        return engine.run(_putting.transact, waiter, *what)

    def _what(self, engine: Engine) -> tuple[Any, ...]:
        """What `_putting.transact` is given to do it all. Raises MessageTooLargeError."""
        queue, puts = self._queue, self._puts
        maxsizes = {}
        if puts:
            limit = engine.option("max_message_bytes")
            _putting.check_size([message for _, message in puts], limit)
            maxsizes = maxsizes_of(queue, puts)
        tell_dead = functools.partial(remember_dead, queue)
        return self._acks, puts, queue._policy, maxsizes, tell_dead


def _address_of(queue: Queue, topic: str | None) -> Address:
    if topic is None or topic == queue.topic:
        return queue._address
    topic = check_name("topic", topic)
    return Address(topic, queue.group, group_id(topic, queue.group), queue._address.retry)


def maxsizes_of(queue: Queue, puts: list[tuple[Address, Encoded]]) -> dict[str, int]:
    """What holds up puts of a transaction: by topic, where there is such a limit."""
    topics = {address.topic for address, _ in puts}
    found: dict[str, int] = {}
    if queue.topic in topics and queue.maxsize:
        found[queue.topic] = queue.maxsize
    topics.discard(queue.topic)
    for other in queue._store._open_queues() if topics else ():
        topic, limit = other.topic, other.maxsize
        if topic in topics and limit and other.group == queue.group and not other._closed:
            found[topic] = min(limit, found.get(topic, limit))
    return found


def remember_dead(queue: Queue, topic: str, dead: list[int]) -> None:
    """Letters of any topic that this store has open for the same group."""
    for other in [queue, *queue._store._open_queues()]:
        if other.topic == topic and other.group == queue.group and not other._closed:
            other._remember_dead(dead)
            return
