"""What tasks ask of the I/O threads: calls, and the turns they are put into.

Role: plain things without a will of their own. `_io` makes turns of calls, runs them and answers.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextvars import Context, copy_context
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from . import _putting
from ._delivery import Encoded, Lease, Taken, Terms
from ._engine import Engine
from ._pending import Pending
from ._session import SYNC, Job, Session
from ._wake import Waiter
from .errors import ClosedError

if TYPE_CHECKING:
    from ._upkeep import MakingRoom
    from .queue import Queue


MAKE_ROOM: Final = Pending()  # again as soon as the space of settled messages was freed


class Source(Protocol):
    """Where takes come from: what stands for an `AsyncQueue` or a drop-in here."""

    def ended(self) -> BaseException | None:
        """What whoever still waits is told when nothing more will come; None: it may come."""
        ...

    def look(self, session: Session, n: int, visibility_s: float | None, waiter: Waiter) -> Taken:
        """Lease up to `n`; with none, register the waiter. Under the write lock."""
        ...

    def made(self, engine: Engine, leases: list[Lease]) -> list[tuple[Lease, Any]]:
        """What a caller gets for each lease; fewer when some turn out to be damaged."""
        ...

    def tell_dead(self, offsets: list[int]) -> None:
        """These became dead letters while looking."""
        ...

    def tell_waiting(self) -> None:
        """A look found nothing, and somebody waits on."""
        ...

    def nothing(self) -> BaseException:
        """What a caller is told who got nothing in time."""
        ...


class Call:
    """Something one task waits for. What few have stands in the class: making calls is half of what
    a put costs the loop. What nearly all get is set when one is made: an attribute that is new to
    the class when many of them are there would cost each a dict of its own.

    It is awaited itself. To its task it is a future, by the names that tasks know futures by; but
    when it is answered the task runs on at once, in the callback that answers the whole group, and
    not by a callback of its own in the next round of the loop.
    """

    leases: list[Lease] | None = None
    # Called with the value, when the task was cancelled meanwhile.
    unwanted: Callable[[Any], None] | None = None
    merges: Queue | None = None  # one with neighbours that put into the same
    n_bytes = 0  # to be written, about
    refused = ""  # why there was no room for it, when it was tried last
    watched = False  # its end is noted
    # What a put has put, to be taken back if a replica does not confirm it in time.
    puts: list[int] | None = None
    since_s = 0.0  # when it began to wait for the replica
    _ended_by: BaseException | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop | None, until_s: float | None) -> None:
        self._loop = loop  # None: nobody awaits it
        self.until_s = until_s  # None: for ever; 0.0: no waiting
        self.value: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.over = False  # answered, or given up in the I/O thread
        self.runs_on = False  # its task does, or will in the next round of the loop
        self.wakeup: Callable[[Any], object] | None = None  # none while no task waits for it

    # What a task asks of a future. On the loop. (It asks for `_loop`, too.)

    _asyncio_future_blocking = True  # until the task has seen it
    context: Context

    def __await__(self) -> Generator[Any, None, Any]:
        yield self
        if self.error is not None or self._ended_by is not None:
            self._raise()
        if not self.runs_on:
            raise RuntimeError(
                "a coroutine of this queue was run on before what it awaits was done"
            )
        return self.value

    def add_done_callback(
        self, wakeup: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        """Of the task, once, when it begins to wait."""
        self.wakeup = wakeup
        self.context = copy_context() if context is None else context
        if self.runs_on:  # not a task: those ask in the step that yields
            self.wake_soon()

    def result(self) -> None:
        """Nothing to a task: where it awaits it is told the answer, also if it is an exception."""

    def _raise(self) -> None:
        error = self.error if self._ended_by is None else self._ended_by
        assert error is not None
        # It must not hold the exception that holds its frame: only a collection would end that.
        self._ended_by = None
        try:
            raise error
        finally:
            del error

    def done(self) -> bool:
        return self.runs_on

    def cancel(self, msg: Any = None) -> bool:
        """The task was cancelled. False when it runs on already."""
        return self.end(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))

    def end(self, error: BaseException | None) -> bool:
        """End the wait, with an exception or without. False when the task runs on already."""
        if self.runs_on:
            return False
        self._ended_by = error
        self.wake_soon()
        return True

    def wake_soon(self) -> None:
        """Let the task run on, in the next round of the loop."""
        assert self._loop is not None
        self.runs_on = True
        if self.wakeup is not None:
            self._loop.call_soon(self.wakeup, self, context=self.context)

    @property
    def hurries(self) -> bool:
        """Whether it is to be run while a sync is under way, not after it."""
        return True

    def claim(self) -> bool:
        """True for the first who asks: he gives back what was leased."""
        mine = object()
        return self.__dict__.setdefault("_claimed_by", mine) is mine


class Op(Call):
    """An operation under the write lock: `operation(session, waiter, *args)`.

    It returns a `Pending` (or raises NoRoom) with the waiter registered when it has to be tried
    again.
    `late` is the exception for one whose time is over; `finish` makes the answer from the result,
    outside the lock. Those of one `room` are let in in the order they came. The end of `queue`
    ends the wait.
    """

    args: tuple[Any, ...] = ()
    late: Callable[[], BaseException] | None = None
    finish: Callable[[Any], Any] | None = None
    room: object = None
    queue: Queue | None = None
    look_at_s: float | None = None  # when to try again by itself, while it is parked
    making: MakingRoom | None = None  # is made before it waits for bytes, or is refused

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        operation: Callable[..., Any],
        *args: Any,
        until_s: float | None = 0.0,
        late: Callable[[], BaseException] | None = None,
        finish: Callable[[Any], Any] | None = None,
        room: object = None,
        queue: Queue | None = None,
    ) -> None:
        super().__init__(loop, until_s)
        self._operation = operation
        self.args = args
        self.late = late
        self.finish = finish
        self.room = room
        self.queue = queue

    def attempt(self, session: Session, waiter: Waiter | None) -> Any:
        """Run it. Under the write lock."""
        return self._operation(session, waiter, *self.args)


class PutCall(Op):
    """A put of one message: those that have no condition of their own become one frame."""

    queue: Queue
    n = 1  # how many messages

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: Queue,
        body: bytes,
        terms: Terms | None,
        until_s: float | None,
    ) -> None:
        self._loop = loop
        self.until_s = until_s
        self.queue = queue
        self.body = body
        self.terms = terms
        self.n_bytes = len(body)
        if queue.maxsize <= 0 and (terms is None or terms.id is None):
            self.merges = queue
        # As in `Call`.
        self.value = None
        self.error = None
        self.cancelled = False
        self.over = False
        self.runs_on = False
        self.wakeup = None

    @property
    def room(self) -> object:  # type: ignore[override]  # nobody sets it
        return self.queue

    @property
    def messages(self) -> Sequence[Encoded]:
        """What it puts."""
        assert self.terms is not None, "of one message it is said what is to be said"
        return [([self.body], self.terms)]

    @property
    def hurries(self) -> bool:
        """Not if it waits for the next sync anyway, which can't begin before this one has ended."""
        return self.until_s is not None or self.queue._policy < SYNC

    def attempt(self, session: Session, waiter: Waiter | None) -> list[str]:
        """Put, or raise NoRoom with the waiter registered. Under the write lock."""
        queue = self.queue
        what = (queue._address, self.messages, queue._policy, queue.maxsize, waiter)
        return _putting.put(session, (*what, queue._remember_dead))


class PutManyCall(PutCall):
    """A put of several messages, all or none."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: Queue,
        messages: Sequence[Encoded],
        n_bytes: int,
        until_s: float | None,
    ) -> None:
        super().__init__(loop, queue, b"", None, until_s)
        self._messages = messages
        self.n_bytes = n_bytes
        self.n = sum(len(bodies) for bodies, _ in messages)
        if any(terms.id is not None for _, terms in messages):
            self.merges = None

    @property
    def messages(self) -> Sequence[Encoded]:
        return self._messages


_body_of = attrgetter("body")
_terms_of = attrgetter("terms")


def messages_of(puts: Sequence[PutCall]) -> Sequence[Encoded]:
    """What several put; the same as one where the same is said of all, as nearly always."""
    terms = [*map(_terms_of, puts)]
    first = terms[0]
    if first is not None and terms.count(first) == len(terms):
        return [([*map(_body_of, puts)], first)]
    return _putting.together([one for put in puts for one in put.messages])


class TakeCall(Call):
    """A take of up to `n` messages, at least one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: Source,
        n: int,
        visibility_s: float | None,
        until_s: float | None,
    ) -> None:
        super().__init__(loop, until_s)
        self.source = source
        self.n = n
        self.visibility_s = visibility_s


class SyncCall(Call):
    """A wait for the disk: everything below `until`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, until: int) -> None:
        super().__init__(loop, None)
        self.until = until

    @property
    def hurries(self) -> bool:
        """It waits for the next sync, as such puts do."""
        return False


class Takes:
    """Takes that wait for the same: of one source, with leases of one length."""

    __slots__ = ("calls", "look_at_s", "source", "visibility_s")

    def __init__(self, source: Source, visibility_s: float | None) -> None:
        self.source = source
        self.visibility_s = visibility_s
        self.calls: deque[TakeCall] = deque()
        self.look_at_s: float | None = None

    def are_of(self, call: TakeCall) -> bool:
        """Whether this one waits for the same."""
        return call.source is self.source and call.visibility_s == self.visibility_s

    def drop_finished(self) -> None:
        if any(call.cancelled or call.over for call in self.calls):
            self.calls = deque(c for c in self.calls if not (c.cancelled or c.over))


class Turn:
    """What one turn runs, and who is answered after it."""

    __slots__ = ("again", "answers", "blocked", "jobs", "owners", "short", "takes")

    def __init__(self) -> None:
        self.again: list[Call] = []  # to be run in the next turn, before those that came later
        self.jobs: list[Job] = []
        self.owners: list[list[Call] | Takes] = []
        self.takes: list[Takes] = []
        self.blocked: set[int] = set()  # ids of rooms that are full in this turn
        self.answers: list[Call] = []
        self.short: list[Op] = []  # to be tried again when room was made for them

    def add(self, job: Job, owner: list[Call] | Takes) -> None:
        self.jobs.append(job)
        self.owners.append(owner)


def closed_error(path: str) -> ClosedError:
    """What those who waited are told at a close."""
    return ClosedError(
        f"{path} or this queue of it was closed while this call waited; nothing was changed"
    )


def copy_of(error: BaseException) -> BaseException:
    """Each task gets an exception of its own: raising writes into it."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001  any class may be there
        return error
