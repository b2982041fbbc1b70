"""Waiting for what others do, and waking those who wait: other owners, living and dead.

Role: the part of the engine that knows the other processes with the file open. It notes whom a turn
wakes, and wakes them when the lock is given back; it sleeps until there is a reason to look again,
and finds out who has died.

Invariants: whoever leaves without having looked once more hands on what he may have been woken for;
whoever sleeps also looks for what nobody tells: a death, a lease that ran out, a sync that somebody
has left behind.

It must not know what is waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from . import _clock, _locks
from ._opening import OWNER, Opened
from ._part import Part
from ._session import ALL, Session
from ._shared import (
    DEAD_SEQ,
    FAILED,
    OWNERS_SEQ,
    READY,
    SETTLED,
    SYNC_HIGH,
)
from ._wake import READY_BYTE, SETTLED_BYTE, Waiter
from .errors import ClosedError, StorageError
from .wal import COMMIT, TAIL

# How long a waiter sleeps before it looks whether the owner of a lease has died.
DEATH_CHECK_S: Final = 0.4
# The same while no other process has the file open, whose death could matter.
ALONE_CHECK_S: Final = 2.0
# How long it is not asked who has died where that would give back no lease.
_ASK_AGAIN_NS: Final = 100_000_000


class Waiting(Part):
    """What `Engine` inherits to wait, to wake and to see who has died."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._owners_seen = -1
        # What to ask of the locks of the owners seen then, but for our own.
        self.others: list[tuple[int, bytes]] = []
        self._next_probe = 0  # which of them is asked next
        self.ask_again_ns = 0  # until then nobody need be asked for who holds no lease (monotonic)

    def _take_pokes(self, session: Session) -> None:
        """Note whom to wake when the lock is given back."""
        pokes = [*session.pokes]
        if session.woken:
            pokes.append((READY_BYTE, session.woken))
        if session.ready:
            pokes.append((READY_BYTE, self.page.take_waiting(READY, session.ready)))
        if session.settled:
            pokes.append((SETTLED_BYTE, self.page.take_waiting(SETTLED, session.settled)))
        session.pokes = pokes
        session.is_plain = False

    def wake(self, slots: Sequence[int], kind: bytes) -> None:
        """Wake the processes in these slots. If one of them has died, all others that wait: what
        it was to be woken for is theirs now.
        """
        if not self.waker.poke(slots, kind):
            # What was done before stays done, also if the file fails just now.
            with contextlib.suppress(StorageError, ClosedError):
                self.run_once(lambda session: self.bury(session, self.dead_owners(everyone=True)))

    def dead_owners(self, everyone: bool) -> list[int]:
        """Slots whose owner has died. Asks the kernel about one owner in turn, or about all."""
        others = self._other_owners()
        if not everyone and len(others) > 1:
            self._next_probe = probe = (self._next_probe + 1) % len(others)
            others = others[probe : probe + 1]
        dead = _locks.unlocked(self.fd, others)
        # Who is found dead is asked for again by the turn that buries him.
        self.ask_again_ns = 0 if dead else _clock.monotonic_ns() + _ASK_AGAIN_NS
        return [start - OWNER for start in dead] if dead else dead

    def _other_owners(self) -> list[tuple[int, bytes]]:
        """What to ask of the locks of the other owners."""
        seq = self.page.words[OWNERS_SEQ]
        if seq != self._owners_seen:
            others = self.page.others(self.slot)
            self._owners_seen = seq
            self.others = [_locks.question(OWNER + slot) for slot in others]
        return self.others

    def bury(self, session: Session, slots: list[int]) -> None:
        """Take the tokens of the dead out of the page: their leases name nobody now, and every
        group looks through its leases once because `DEAD_SEQ` has changed.
        """
        for slot in slots:
            self.page.set_token(slot, 0)
        if slots:
            self.page.words[DEAD_SEQ] += 1
            session.ready = ALL

    def stop_waiting(self) -> None:
        """Somebody here leaves who waited, without having looked once more: what he may have been
        woken for is told to the others.
        """

        def leave(session: Session) -> None:
            self.unmark()
            session.ready = ALL

        # Who is told that the file failed or is closed needs no telling.
        with contextlib.suppress(StorageError, ClosedError):
            self.run(leave)

    def unmark(self) -> None:
        """Have this process not woken for messages while nobody in it waits for any: another one
        would sleep on. Called under the write lock.
        """
        if self.page.waits(self.slot, READY) and not self.waker.has_any(READY_BYTE):
            self.page.wait_no_more(self.slot, READY)

    def wait(self, waiter: Waiter, until_s: float | None) -> None:
        """Sleep until woken, `until_s` (time.monotonic), a death, or a promise left behind.

        The caller looks again then. One who is interrupted does not: that is told to the others.
        """
        try:
            self._sleep(waiter, until_s)
            self.waker.discard(waiter)
        except BaseException:
            self.waker.discard(waiter)
            self.stop_waiting()
            raise

    def _sleep(self, waiter: Waiter, until_s: float | None) -> None:
        page = self.page
        # As it was when he looked: what came since, or is on stable storage only since then, may
        # be what another one was woken for.
        seen = page.visible(page.words[TAIL]) if waiter.seen < 0 else waiter.seen
        while True:
            now_s = time.monotonic()
            left_s = self.look_every_s
            if until_s is not None:
                left_s = min(left_s, until_s - now_s)
            if self.waker.wait(waiter, left_s) or self.closed or self.page.words[FAILED]:
                return
            if until_s is not None and time.monotonic() >= until_s:
                return
            if self.dead_owners(everyone=True):
                return
            words = page.words
            if page.visible(words[TAIL]) != seen:
                # Somebody else was woken for that. He may be stopped, and his lease may run out.
                return
            if words[SYNC_HIGH] > words[COMMIT]:
                # So long without a sync: whoever wrote this may have died before it.
                self.durable(words[TAIL])
                return
            self._check_place()
            self.check_size()

    @property
    def look_every_s(self) -> float:
        """How long whoever waits sleeps before he looks for what nobody tells."""
        return DEATH_CHECK_S if self._other_owners() else ALONE_CHECK_S
