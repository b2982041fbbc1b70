"""Keeping space: a spare slot, what a full disk is worked off with, giving back what is settled.

Role: the part of the engine that sees to it that there is space for what comes: now and then while
a segment is filled, when one begins, soon after something was settled, and when a turn has found
none. What may be given back, and in what steps, is `_reclaim`'s.

Invariants: upkeep never fails the call that it comes after; what it could not do is done by the
next one, and a failure is in the shared page. It does not run inside itself. It syncs and zeroes,
so an event loop never does it, but leaves it to the timer's thread.

It must not know what the records mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from ._opening import Opened
from ._part import Part
from ._session import Session
from .errors import ClosedError, DiskFullError, StorageError
from .wal import HEAD, LAST, RESERVE, SPARES, TAIL

T = TypeVar("T")
U = TypeVar("U")

# How long after something was settled space is looked for that can be given back.
UPKEEP_S: Final = 0.1
# And how long where it was looked for before, and nothing is known to be over until later: as often
# as that while messages are settled.
OFTEN_S: Final = 1.0
# How often, while a segment is filled, it is seen to that a full disk could be worked off: where
# the disk is short, and where it has plenty.
LOOKS: Final = 32
_FEW_LOOKS: Final = 4
_LAST_ROUNDS: Final = 8  # of upkeep when the file is closed


def _keep_reserve(session: Session) -> None:
    from ._reclaim import keep_reserve

    keep_reserve(session)


def _prepare_spare(session: Session) -> None:
    _keep_reserve(session)
    session.log.prepare_spare()


def _on_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Pin:
    """From which segment on a backup or a replay under way reads."""

    segment = 0
    is_over = False


class MakingRoom:
    """The space that is freed for one call which found none: some at each step, after which the
    call is tried again, until it has room or all that was kept when it began was looked at once.
    """

    is_over = False  # nothing more will be freed: the next try is the last

    def __init__(self, engine: Part) -> None:
        self._engine = engine
        # Not beyond it: what is carried there might be carried round and round.
        self._last = engine.page.words[LAST]
        self._freed = 0

    def step(self) -> bool:
        """Free some, as much as before and a few segments at least: a try looks at all that is to
        be put, so there must not be one for each few segments of a large put. False when it was
        over before. Also when nothing was freed the call is to be tried again: others may have.
        """
        if self.is_over:
            return False
        freed = self._engine.make_room(self._freed)
        self._freed += freed
        self.is_over = not freed or self._engine.page.words[HEAD] > self._last
        return True


class Upkeep(Part):
    """What `Engine` inherits to keep space, and to give it back."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        words = self.page.words
        self._look_at = words[TAIL] + self.log.segment_bytes // LOOKS
        self._last_segment = words[LAST]  # when it was looked for space
        self._upkept_at = -1  # the last segment at the last upkeep that was due
        self._upkeepers: set[int] = set()  # threads that are at it
        self._room_lock = threading.Lock()
        self._room_maker = 0  # the thread that has it
        self.pins: list[Pin] = []
        # What groups in the way of reclaim had done, and when that last changed (queue time).
        self.progress: tuple[list[tuple[int, int, int]], int] = ([], 0)

    def _look_for_space(self, tail: int) -> None:
        """See to it that there is space for what comes: now and then, and when a segment begins, be
        it another process that began it.
        """
        if _on_loop():
            # In this order: after Ctrl-C in between it is called once too often, and not never.
            self.timer.call_at(0.0, self._look_for_loop)
            self._look_again(tail)
            return
        # A failure is in the shared page by then, and the next call says it.
        with contextlib.suppress(StorageError, ClosedError):
            self.check_size()
        last = self.page.words[LAST]
        makes_room = self.makes_room
        if not makes_room:
            self._look_again(tail)
        if last != self._last_segment:
            # At once, so that space is used again as fast as it is used up.
            self._last_segment = last
            self._upkeep(busy=True)
            self._upkeep_soon()
        if makes_room:
            return  # the rest would wait for it; it is the next turn's
        if not self.page.words[SPARES]:
            self._keep_spare()
        self._look_after_reserve()

    def _look_again(self, tail: int) -> None:
        """Say from where on it is looked for space the next time."""
        words = self.page.words
        log = self.log
        looks = LOOKS if words[RESERVE] else _FEW_LOOKS
        self._look_at = min((words[LAST] + 1) << log.bits, tail + log.segment_bytes // looks)

    def _look_for_loop(self) -> None:
        """Do what an event loop has left to the timer's thread."""
        if self.closed:
            return
        # First, since the rest may take syncs: should the next segment begin before there is a
        # spare, the loop zeroes one itself.
        if not self.page.words[SPARES]:
            self._keep_spare()
        self._look_for_space(self.page.words[TAIL])

    def _look_after_reserve(self) -> None:
        from ._reclaim import is_short

        words = self.page.words
        if words[RESERVE] or is_short(self.log):
            with contextlib.suppress(StorageError, ClosedError):
                self.run_once(_keep_reserve)

    def _feed_index(self) -> None:
        """Give the index space that the log has kept back: the reserve is for both."""
        if _on_loop():
            self.timer.call_at(0.0, self._feed_index)
            self.index.room.is_short = False
            return
        # A failure is in the shared page by now; a full disk leaves it as it is.
        with contextlib.suppress(StorageError, ClosedError):
            self.index.room.is_short = False
            if self.run_once(lambda session: session.log.release()):
                self.index.look_for_room()

    def _keep_spare(self) -> None:
        """Have a spare slot again; where there is no room for one, free what is settled while there
        is still a little to do it with.
        """
        # A failure is in the shared page by now; without room it is tried again further on.
        with contextlib.suppress(StorageError, ClosedError):
            try:
                self.run_once(_prepare_spare)
            except DiskFullError:
                self.make_room()
                self.run_once(_prepare_spare)

    def pinned(self, look: Callable[[Session], T], use: Callable[[T], U]) -> U:
        """What `use` returns, given what `look` found under the write lock: all that was kept at
        that moment is kept, by every process, until `use` is over.

        Raises what the two raise, and what a turn does; StoreFailedError where the file was cut.
        """
        mine = Pin()

        def begin(session: Session) -> T:
            self.check_content()
            mine.segment = self.page.words[HEAD]
            self.pins.append(mine)
            self.pin()
            return look(session)

        try:
            return use(self.run(begin))
        finally:
            # Before any call, since Ctrl-C is noticed at calls: where it ends the turn, upkeep goes
            # by this.
            mine.is_over = True
            try:
                self.run(lambda session: self.pin())
            except BaseException:
                self._upkeep_soon()
                raise

    def pin(self) -> None:
        """Have nobody free what the backups and replays of this process that are under way read,
        from the first segment of theirs on. Called under the write lock.
        """
        self.pins = [pin for pin in self.pins if not pin.is_over]
        self.page.pin(self.slot, min((pin.segment for pin in self.pins), default=None))

    def make_room(self, at_most: int = 0) -> int:
        """Free settled segments that only retention holds: so many, or a few if that is less. How
        many they were.
        """
        from ._reclaim import make_room

        if self.makes_room:
            return 0  # what is healed on the way finds no room, either: not one inside the other
        with self._room_lock:
            try:
                self._room_maker = threading.get_ident()
                return make_room(self.whole, at_most)
            finally:
                self._room_maker = 0

    @property
    def makes_room(self) -> bool:
        """Whether it is this thread that makes room just now."""
        return self._room_maker == threading.get_ident()

    def _upkeep_soon(self) -> None:
        is_due = self.timer.next_s(self._upkeep) < math.inf
        self._upkeep_within(OFTEN_S if is_due else UPKEEP_S)

    def _upkeep_within(self, wait_s: float) -> None:
        """Have upkeep called after so long, unless it is called before that. One that is due in
        two days, when retention is over, is no reason not to look when there is more to give back.
        """
        self.timer.call_by(time.monotonic() + wait_s, self._upkeep)
        # In this order: after Ctrl-C in between it is asked for once more, and not never.
        if wait_s <= OFTEN_S:
            self._upkeep_due = True

    def _upkeep(self, *, busy: bool = False) -> None:
        from ._reclaim import maintain

        me = threading.get_ident()
        if me in self._upkeepers:
            return  # in a turn of the upkeep itself, which goes on: not one inside the other
        last = self.page.words[LAST]
        calm = not busy and last == self._upkept_at
        if not busy:
            self._upkeep_due = self.timer.next_s(self._upkeep) <= time.monotonic() + OFTEN_S
            self._upkept_at = last
        # What it could not do now is done by the next call; a failure is in the shared page.
        with contextlib.suppress(StorageError, ClosedError):
            self._upkeepers.add(me)
            try:
                self.check_size()
                wait_s = None if self.closed else maintain(self.whole, busy=busy, calm=calm)
            finally:
                self._upkeepers.discard(me)
            if wait_s is not None:
                self._upkeep_within(wait_s)
        if not (busy or calm or self.closed):
            self._upkeep_soon()  # to give back what is kept while segments begin

    def _last_upkeep(self) -> None:
        """What a timer would have given back soon: there will be no timer."""
        from ._reclaim import maintain

        self.check_size()
        for _ in range(_LAST_ROUNDS):
            wait_s = maintain(self.whole)
            if wait_s is None or wait_s > UPKEEP_S:
                return
