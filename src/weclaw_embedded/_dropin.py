"""What the drop-in queues of `aio` and `threads` have in common.

Role: a durable queue behind the interface of the standard library's: what `task_done` settles, what
counts as unfinished, and what a shutdown means. The file is the truth about what waits and what is
held; what only a process can know is whose an item is, which `_handed_out` finds, and whether it
was shut down.

Invariants:

* An item that was handed out is leased until it is settled or the process dies, so a process that
  is killed loses none. Leases have no deadline.
* unfinished = ready + delayed + leased of the file, less the calls of `task_done` that no item
  could be found for; after an immediate shutdown only what is handed out counts.

It must not wait: `aio` and `threads` do, each in its way.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Hashable, Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from . import _codecs, _delivery, _putting, _records, _settling, _taking
from ._delivery import Lease, Taken, Terms, taken_of
from ._engine import Engine
from ._handed_out import Done, HandedOut
from ._io_calls import closed_error
from ._message import Message
from ._options import QUEUE_NAMES, UNSET, check_names, queue_options
from ._order import Entry, Newest, Order
from ._pending import PENDING, Pending
from ._session import Session
from ._store import open as open_store
from ._wake import Waiter
from .dlq import DeadLetter
from .errors import Empty, LeaseLostError, SerializationError, ShutDown

logger = logging.getLogger("weclaw_embedded")

T = TypeVar("T")

FIFO: Final = "fifo"
PRIORITY: Final = "priority"
LIFO: Final = "lifo"

# What a subclass of a queue of the standard library may override, and none of these.
_HOOKS: Final = ("_init", "_put", "_get", "_qsize")

# Calls of task_done that have settled nothing yet, from where on that is worth a word.
_MANY_COUNTED: Final = 100

_QUEUE_OPTIONS: Final = ("group", "retry", "on_dead", "start")


class _Undecoded(Message):
    """A message that becomes an item if it can be decoded."""

    __slots__ = ()

    def _died(self) -> None:
        # `on_dead` is nothing for a loop, nor for the thread that takes for all of them.
        self._queue._remember_dead([self.offset])


class Core:
    """The shared half of a drop-in queue."""

    def __init__(
        self,
        kind: str,
        maxsize: float,
        path: str | os.PathLike[str],
        options: dict[str, Any],
    ) -> None:
        self.closed = True  # until it is open, for __del__
        if "visibility_timeout" in options:
            raise TypeError(
                "visibility_timeout is no option of a drop-in queue: an item is held until "
                "task_done() or the death of its process"
            )
        limit_of(maxsize)
        check_names("Queue", options, QUEUE_NAMES)
        chosen: dict[str, Any] = {
            name: options.pop(name) for name in _QUEUE_OPTIONS if name in options
        }
        chosen["topic"] = options.pop("topic", "default")
        if chosen.get("on_dead") is None or chosen["on_dead"] is UNSET:
            chosen["on_dead"] = _teller(path, chosen)
        queue_options(chosen)  # before there is a file
        self.store = open_store(path, **options)
        # Of a cycle that is dropped the garbage collector may end the store before this.
        self.store._needs_closing = False
        try:
            self.queue = self.store.queue(visibility_timeout=None, **chosen)
        except BaseException:
            self.store.close()
            raise
        self.closed = False
        self.maxsize = maxsize
        self.is_shutdown = False
        self.immediate = False
        self.hands = HandedOut()
        self.paused = ""  # at the last look
        self.is_held_back = False  # so was the last look
        self._is_told_so = False
        self._is_told_of_counted = False
        self.order: Order | None = None
        if kind == PRIORITY:
            self.order = Order(Entry, self._item_of)
        elif kind == LIFO:
            self.order = Order(Newest, None)

    def __del__(self) -> None:
        # The queues that this one stands in for need no closing, so neither does it.
        if not getattr(self, "closed", True):
            self.closed = True
            self.queue._drop()

    @property
    def engine(self) -> Engine:
        return self.queue._engine

    @property
    def writable(self) -> Engine:
        """The engine, for a put or a get. Raises StorageError when the file is readonly."""
        return self.queue._writable()

    @property
    def limit(self) -> int:
        """How many may wait; 0: any number."""
        return limit_of(self.maxsize)

    def _item_of(self, put: Any) -> Any:
        try:
            return _codecs.decode(
                put.codec,
                put.meta.get(_records.META_CODEC),
                put.body,
                codec=self.queue._codec,
            )
        except SerializationError:
            return None  # told to whoever takes it

    # -- put and take, under the write lock ------------------------------------------------------

    def encode(self, engine: Engine, item: Any) -> tuple[bytes, Terms]:
        data, terms = self.queue._encoder.one(item)
        limit = engine.option("max_message_bytes")
        if len(data) > limit:
            _putting.check_size([([data], terms)], limit)
        return data, terms

    def put(
        self,
        session: Session,
        what: tuple[Waiter | None, tuple[bytes, Terms], int, int],
    ) -> list[str]:
        """Put an item, or raise NoRoom with the waiter registered."""
        if self.is_shutdown:
            raise shut_down()
        waiter, (data, terms), policy, limit = what
        queue = self.queue
        messages = [([data], terms)]
        return _putting.put(
            session, (queue._address, messages, policy, limit, waiter, queue._remember_dead)
        )

    def try_put(
        self, engine: Engine, message: tuple[bytes, Terms], waiter: Waiter | None = None
    ) -> list[str]:
        """Put in a turn that threads share."""
        return engine.run_together(self.put, (waiter, message, self.queue._policy, self.limit))

    def look(
        self, session: Session, n: int, visibility_s: float | None, waiter: Waiter | None
    ) -> Taken:
        """Take up to `n` in the order of this queue."""
        if self.immediate:
            return taken_of([], [])
        choose = None if self.order is None else self.order.choose
        taken = _taking.take(session, (self.queue._address, n, None, waiter), choose)
        self.paused = taken.paused
        self.is_held_back = taken.is_held_back
        return taken

    def made(self, engine: Engine, leases: list[Lease]) -> list[tuple[Lease, Any]]:
        """The items, with their leases. One that can't be decoded goes to the dead letters."""
        found: list[tuple[Lease, Any]] = []
        for message in self.queue._messages_of(engine, leases, _Undecoded):
            lease = message._held()
            try:
                found.append((lease, (lease, message.body)))
            except SerializationError as error:
                self._bury(message, error)
        return found

    @staticmethod
    def _bury(message: Message, error: SerializationError) -> None:
        try:
            message.fail(f"SerializationError: {error}")
        except LeaseLostError:
            pass

    def tell_dead(self, offsets: list[int]) -> None:
        self.queue._remember_dead(offsets)

    def tell_waiting(self) -> None:
        """Say once why a get finds nothing, where that ends only by what the program does. Not
        under the write lock: whoever logs may take his time.
        """
        if self.is_held_back and not self._is_told_so:
            self._is_told_so = True
            logger.warning(
                "%s: items that were in hand when a process died are handed out one at a time, so "
                "that one which kills its process harms no other; one is in hand, and a get finds "
                "none of the rest before task_done() is called for it: a program that takes "
                "several before it is done with the first waits for ever",
                self.store.path,
            )

    def tell_counted(self) -> None:
        """Say once that calls of `task_done` settle nothing: of a program that always has something
        in hand they never do, and nothing else shows it before it is started again.
        """
        counted = self.hands.counted
        if counted >= _MANY_COUNTED and not self._is_told_of_counted:
            self._is_told_of_counted = True
            logger.warning(
                "%s: %d calls of task_done() came from where nothing was got, and have settled "
                "nothing yet: which items they mean shows only when as many have come as items are "
                "out; call it in the task or thread that got the item, or hand on its context, as "
                "by pool.submit(contextvars.copy_context().run, work, item)",
                self.store.path,
                counted,
            )

    def ended(self) -> BaseException | None:
        """What whoever still waits is told when nothing more will come; None: it may come."""
        if self.is_shutdown:
            return shut_down()
        return closed_error(self.store.path) if self.closed else None

    def nothing(self) -> Empty:
        """What who takes is told when there was nothing in time."""
        if self.paused:
            return _taking.nothing_ready(self.queue._address, self.paused)
        if self.is_held_back:
            return Empty(
                f"what waits in {self.store.path} was in hand when a process died, and is handed "
                "out one at a time; nothing was taken; call task_done() for the one in hand first"
            )
        return Empty(f"nothing waits in {self.store.path}")

    # -- counting, under the write lock ------------------------------------------------------------

    def waiting(self, session: Session) -> int:
        """What `qsize` says."""
        if self.immediate:
            return 0
        group = self.queue._swept(session)
        return 0 if group is None else _delivery.waiting_in(session.tx, group)

    def unfinished(
        self, session: Session, waiter: Waiter | None = None, *, is_judged: bool = False
    ) -> int:
        """What `join` waits for; with some left the waiter is registered. `is_judged`: what ended
        by itself was, in this turn.
        """
        if self.immediate:
            left = len(self.hands.out)
            tid = -1
        else:
            queue = self.queue
            group = (
                _delivery.seen_by(session, queue._address) if is_judged else queue._swept(session)
            )
            left = 0
            if group is not None:
                left = _delivery.unfinished_in(session.tx, group)
                tid = group.tid
        left = max(0, left - self.hands.counted)
        if left and waiter is not None:
            _delivery.wait_settled(session, tid, waiter)
        return left

    def all_done(self, session: Session, waiter: Waiter | None) -> Pending | None:
        """What `join` runs until it is no `Pending`."""
        return PENDING if self.unfinished(session, waiter) else None

    # -- handing out and settling --------------------------------------------------------------

    def hand_out(self, engine: Engine, taken: Taken, owner: Hashable | None) -> list[Any]:
        """The item that was taken, now this owner's; none where there is none, or it turns out to
        be damaged.
        """
        if taken.dead:
            self.tell_dead(taken.dead)
        made = self.made(engine, taken.leases) if taken.leases else []
        for lease, _ in made:
            self.hands.got(self.hands.asked(), lease, owner)
        return [body for _, (_, body) in made]

    def give_back_unseen(self, engine: Engine, taken: Taken) -> None:
        """The get that took this was interrupted: nobody has seen it, and it was no delivery."""
        engine.give_back_unseen(taken.leases)
        self.hands.unseen(taken.leases)

    def settle(self, session: Session, done: Done) -> None:
        """Ack all that it settles, in this turn."""
        for lease in done.leases:
            try:
                record = _records.ack_of(lease.tid, lease.gid, lease.offset)
                _settling.end(session, (lease, record, self.queue._policy))
            except LeaseLostError:
                pass  # its group was dropped, or the file was closed in between: not ours any more

    # -- the end -----------------------------------------------------------------------------------

    def shut(self, immediate: bool) -> None:
        self.is_shutdown = True
        self.immediate = self.immediate or immediate

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.store.close()


if TYPE_CHECKING:

    class _Generic(Generic[T]):
        pass

else:

    class _Generic:
        __class_getitem__ = classmethod(GenericAlias)


class StandIn(_Generic[T]):
    """What a user sees alike of the queues of `aio` and of `threads`."""

    _kind = FIFO
    _core: Core
    _joiners: set[Any]  # who waits in `join`

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        hooks = [name for name in _HOOKS if hasattr(cls, name)]
        if hooks:
            raise TypeError(
                f"{cls.__qualname__} has {', '.join(hooks)}, with which a queue of the standard "
                "library keeps its items otherwise; here they are kept in a file, and that would "
                "never be called; leave it out, and say what is put and got in put() and get()"
            )

    def __reduce__(self) -> NoReturn:
        kind = type(self)
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} can't be pickled: what it handed out belongs "
            f"to threads and tasks of this process; open the path {self._core.store.path!r} in the "
            "other process (a weclaw_embedded.Queue, which has the same items, can be pickled)"
        )

    @property
    def maxsize(self) -> float:
        """How many items may wait."""
        return self._core.maxsize

    @property
    def unfinished_tasks(self) -> int:
        """How many items were put and not yet settled by `task_done`."""
        return self._core.engine.run(self._core.unfinished)

    def qsize(self) -> int:
        """How many items wait."""
        return self._core.engine.run(self._core.waiting)

    def empty(self) -> bool:
        """True when none waits."""
        return self.qsize() == 0

    def full(self) -> bool:
        """True when `maxsize` items wait; never without one."""
        limit = self._core.limit
        return 0 < limit <= self.qsize()

    def _task_done(
        self, owner: Hashable | None, run: Callable[[Callable[[Session, Done], int], Done], int]
    ) -> int:
        """A call of `task_done`, whose turn is taken by `run`; how many are left for who joins."""
        done = Done(owner)
        failed = True
        try:
            self._core.hands.choose(done)
            left = run(self._done, done)
            failed = False
        finally:
            self._core.hands.look_at_end(done, failed)
        if done.is_counted:
            self._core.tell_counted()
        return left

    def _done(self, session: Session, done: Done) -> int:
        """Settle what a `task_done` has found, or count it; how many are left for who joins."""
        core = self._core
        has_none = not (done.items or done.is_counted)
        # Before anything is settled: that is not to be done anew where much has ended.
        left = core.unfinished(session) if has_none or self._joiners else -1
        if has_none:
            if left <= 0:
                raise ValueError("task_done() called too many times")
            core.hands.count(done)
        core.settle(session, done)
        return core.unfinished(session, is_judged=True) if self._joiners else -1

    def close(self) -> None:
        """Give the file back now; items that were got and not settled are there for the next."""
        self._core.close()


def _teller(
    path: str | os.PathLike[str], chosen: Mapping[str, Any]
) -> Callable[[DeadLetter], None]:
    """What tells of an item that died where the user has no `on_dead`: a program of the standard
    library's queues knows no dead letters, so it would be gone without a word.
    """
    given = {"topic": chosen["topic"]} if chosen["topic"] != "default" else {}
    given |= {"group": chosen["group"]} if "group" in chosen else {}

    def tell(letter: DeadLetter) -> None:
        name = os.fspath(path)
        logger.warning(
            "%s: item %s is a dead letter (%s), and no get will find it; it is kept in "
            "weclaw_embedded.Queue(%s).dlq, whose redrive() brings it back",
            name,
            letter.id,
            letter.reason,
            ", ".join([repr(name), *(f"{key}={value!r}" for key, value in given.items())]),
        )

    return tell


def shut_down() -> ShutDown:
    return ShutDown("the queue was shut down; what it holds stays in the file")


def limit_of(maxsize: float) -> int:
    """`maxsize` as a number of items: the standard library takes 1.3 for "until there are 2"."""
    try:
        return max(0, math.ceil(maxsize))
    except OverflowError:
        return 0  # never reached
    except (TypeError, ValueError) as error:
        raise type(error)(f"maxsize must be a number, not {maxsize!r}") from None
