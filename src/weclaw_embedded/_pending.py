"""What can't be answered yet: it is looked again when there is a reason to.

Role: how the call of a thread waits. It runs an operation with a waiter, which that registers under
the lock where there is nothing yet; sleeps when the lock is given back; and runs it again. Tasks
wait by `_io`, with the same operations: one that may have to be run again gets the waiter as its
second argument, and returns a `Pending` or raises NoRoom then; without a waiter it is the last try.

Invariant: whoever leaves here, answered, too late or interrupted, leaves no waiter behind.

It must not know what is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ._delivery import new_waiter
from ._engine import Engine
from ._options import check_timeout
from ._putting import NoBytes, NoRoom
from ._session import Session
from ._shared import SETTLED
from ._upkeep import MakingRoom
from ._wake import Waiter
from .errors import ClosedError, Full

T = TypeVar("T")

# A wait on the monotonic clock is not lengthened by more than this when the machine sleeps.
_LONGEST_SLEEP_S: Final = 60.0
# Room also comes of itself, when a message runs out.
LOOK_FOR_ROOM_S: Final = 0.5


class Pending:
    """What an operation returns that has to be tried again: when something was settled, and in
    `look_in_s` seconds if it may have come to its end by then with nobody writing.
    """

    __slots__ = ("look_in_s",)

    def __init__(self, look_in_s: float | None = None) -> None:
        self.look_in_s = look_in_s


PENDING: Final = Pending()


def pending_until(session: Session, look_again_us: int | None) -> Pending:
    """To be tried again at that moment, in queue time."""
    if look_again_us is None:
        return PENDING
    return Pending(_at_most_long((look_again_us - session.now_us) / 1e6))


def look_at(engine: Engine, look_again_us: int | None) -> float | None:
    """time.monotonic() at that moment, in queue time; None for none."""
    if look_again_us is None:
        return None
    return time.monotonic() + _at_most_long((look_again_us - engine.now_us()) / 1e6)


def _at_most_long(ahead_s: float) -> float:
    return min(max(ahead_s, 0.0), _LONGEST_SLEEP_S)


def deadline_of(block: bool, timeout: float | None) -> float | None:
    """time.monotonic() at which to give up: None never, 0.0 at once."""
    if block is not True and block is not False:
        raise TypeError(f"block must be True or False, not {block!r}; nothing was changed")
    seconds = None if timeout is None else check_timeout("timeout", timeout)
    if not block:
        return 0.0
    if seconds is None:
        return None
    return time.monotonic() + seconds if seconds > 0 else 0.0


def is_over(until_s: float | None) -> bool:
    """Whether it is time to give up."""
    return until_s is not None and time.monotonic() >= until_s


class Waits:
    """What `Handle` inherits to wait."""

    _closed: bool

    def _sleep(
        self, engine: Engine, waiter: Waiter, look_at_s: float | None, until_s: float | None
    ) -> None:
        """Sleep until there is a reason to look again; `look_at_s` or `until_s` (time.monotonic) is
        one. The waiter is registered no more. Raises ClosedError if the queue was closed.
        """
        if look_at_s is None or (until_s is not None and until_s < look_at_s):
            look_at_s = until_s
        engine.wait(waiter, look_at_s)
        if self._closed:
            engine.stop_waiting()
            raise ClosedError("the queue was closed while this call waited; nothing was changed")

    def _once_settled(
        self, engine: Engine, until_s: float | None, operation: Callable[..., Any], *args: Any
    ) -> Any:
        """What `operation(session, waiter, *args)` answers, run again whenever something was
        settled while it returns a `Pending`; what it returns at last, when the time is over.
        """
        while not is_over(until_s):
            waiter = new_waiter(SETTLED)
            try:
                found = engine.run(operation, waiter, *args)
                if not isinstance(found, Pending):
                    return found
                look_in_s = found.look_in_s
                look_at_s = None if look_in_s is None else time.monotonic() + look_in_s
                self._sleep(engine, waiter, look_at_s, until_s)
            finally:
                engine.waker.discard(waiter)
        return engine.run(operation, None, *args)

    def _once_room(
        self,
        engine: Engine,
        until_s: float | None,
        attempt: Callable[[Waiter | None], T],
        refused: NoRoom,
    ) -> T:
        """What `attempt(waiter)` answers, a put that was refused at first: tried again whenever
        something was settled. Raises Full when the time is over.
        """
        waiter: Waiter | None = None
        making = MakingRoom(engine)  # settled space is freed before anything is refused
        try:
            while True:
                if isinstance(refused, NoBytes) and making.step():
                    pass
                elif until_s == 0.0 or is_over(until_s):
                    raise Full(str(refused)) from None
                elif waiter is None:
                    # Only now: most puts find room. What happened before it is registered is seen
                    # by the next try, which is made before sleeping.
                    waiter = new_waiter(SETTLED)
                else:
                    look_at_s = time.monotonic() + LOOK_FOR_ROOM_S
                    self._sleep(engine, waiter, look_at_s, until_s)
                    waiter, making = None, MakingRoom(engine)
                try:
                    return attempt(waiter)
                except NoRoom as error:
                    # Without the frame that holds it: only a collection would end that.
                    refused = error.with_traceback(None)
        finally:
            engine.waker.discard(waiter)
