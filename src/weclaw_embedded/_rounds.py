"""Rounds: the replica is brought to the commit point, for all who wait for that.

    put: append ─► write ─► sync ─► COMMIT ─► round: send, the replica syncs ─► REPLICATED ─► answer
                             └─► send, already ──┘

Role: what `Replication` inherits for those who wait. In the process that feeds, whoever waits leads
the next round himself, for all who wait meanwhile; in another one he is woken when the feeder has
told the shared page. What was synced is sent by whoever has synced it, if nobody is at a round.

Invariants:

* REPLICATED is raised only by the holder of the FEEDER lock, under the write lock, to a commit
  point that the receiver has confirmed. It never goes back.
* Lock order: the round lock, then the engine's. The waiters' lock is innermost.

It must not know how a receiver is started, nor what messages are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ._channel import LinkDownError, RefusedError
from ._feeder import Link
from ._shared import (
    FAILED,
    FENCED_BY,
    IS_FENCED,
    REPLICA_AT,
    REPLICA_PIN,
    REPLICA_WAIT_HIGH,
    REPLICATED,
    REPLICATION,
    SYNC_WANTED,
    SharedPage,
)
from ._wake import READY_BYTE, REPLICATED_BYTE, Waiter
from .errors import FencedError
from .wal import ANNOUNCED, COMMIT

if TYPE_CHECKING:
    from ._engine import Engine

logger = logging.getLogger("weclaw_embedded")

ROUND_S: Final = 0.25  # who leads or waits for a round looks again after that


def fenced_error(engine: Engine, done: str = "nothing was written") -> FencedError:
    epoch = engine.page.words[FENCED_BY]
    return FencedError(
        f"{engine.path}: its copy was promoted over it (epoch {epoch}, this file has "
        f"{engine.header.epoch}); {done}, what is here can be read; go on with the promoted file, "
        "and look here for what it lacks"
    )


class Rounds:
    """What `Replication` inherits to be waited for. Any thread may wait."""

    _engine: Engine
    _page: SharedPage
    _link: Link | None
    _round: threading.RLock  # which only the thread that has it can release
    _waiting: list[tuple[int, threading.Lock]]
    _waiting_lock: threading.Lock
    _stopping: bool
    _said: str
    _lost: Callable[[BaseException], None]
    _waker_hook: Waiter

    def _listen(self) -> None:
        """Have this process told by whoever feeds the replica what that has. Where its pipe can't
        be made nobody can: who waits looks by himself then, and tries again.
        """
        waker = self._engine.waker
        if not waker.has(self._waker_hook):
            try:
                waker.add(self._waker_hook)
            except OSError as error:
                path = self._engine.path
                logger.warning("%s: who waits for its replica is not woken: %s", path, error)

    def wait(self, until: int, until_s: float) -> bool:
        """Wait until the replica has everything below `until`; False when the time is over.

        Raises StoreFailedError, FencedError.
        """
        words = self._page.words
        while words[REPLICATED] < until:
            mode = words[REPLICATION]
            if mode & IS_FENCED:
                raise fenced_error(
                    self._engine,
                    "what was written just now may be only here",
                )
            if words[FAILED]:
                raise self._engine._failed()
            if not mode & SYNC_WANTED or self._stopping:
                return not mode & SYNC_WANTED
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._lead(until_s):
                continue
            self._listen()
            waiter = threading.Lock()
            waiter.acquire()
            with self._waiting_lock:
                self._waiting.append((until, waiter))
            if words[REPLICATED] < until:
                waiter.acquire(timeout=min(left_s, ROUND_S))
            with self._waiting_lock, contextlib.suppress(ValueError):
                self._waiting.remove((until, waiter))
        return True

    def _lead(self, until_s: float) -> bool:
        """Do a round, if this process feeds and nobody else is at it."""
        if self._link is None:
            return False
        leads = False
        try:
            leads = self._round.acquire(blocking=False)
            return leads and self._do_round(until_s)
        finally:
            # Ctrl-C may come when it is taken and before that is known.
            try:
                self._round.release()
            except RuntimeError:
                pass  # only who has it can release it
            if leads:
                self._wake(0)

    def _do_round(self, until_s: float) -> bool:
        """One round; the caller holds the round lock. False when there is no link (any more)."""
        link = self._link
        if link is None:
            return False
        words = self._page.words
        announced = words[ANNOUNCED]  # before the commit point: its reasons are durable by now
        target = words[COMMIT]
        try:
            done = link.pump(target, announced, until_s)
        except (LinkDownError, RefusedError, LookupError, OSError) as error:
            self._lost(error)
            return False
        if done:
            self._said = ""
        self._publish(target if done else 0, link.acked)
        return True

    def send(self, target: int) -> None:
        """What is before `target` was synced just now: send it, so that the replica's disk works
        while that is told to everybody here. Waits for nothing. Whoever has the round does without.
        """
        words = self._page.words
        if self._link is None or not words[REPLICATION] & SYNC_WANTED or words[FAILED]:
            return
        try:
            if self._round.acquire(blocking=False) and self._link is not None:
                self._link.send(target)
        except (LinkDownError, RefusedError, LookupError, OSError) as error:
            self._lost(error)
        finally:
            try:
                self._round.release()
            except RuntimeError:
                pass  # as in `_lead`

    def _publish(self, target: int, acked: int) -> None:
        """What the replica has, for all to see. `target`: a commit point it has reached, or 0."""
        engine = self._engine
        words = self._page.words
        ready: list[int] = []
        waiting: list[int] = []
        with engine._lock:
            try:
                engine._lock_file()
                words[REPLICA_AT] = acked
                if acked:
                    words[REPLICA_PIN] = ((acked - 1) >> engine.log.bits) + 1
                before = words[REPLICATED]
                if before < target:
                    words[REPLICATED] = target
                    ready = self._page.take_seen()
                    if words[REPLICA_WAIT_HIGH] > before:
                        waiting = self._page.take_replica_waiting(before)
            finally:
                engine._unlock_file()
        self._wake(target)
        if ready:
            engine.wake(ready, READY_BYTE)
        if waiting:
            engine.waker.poke([slot for slot in waiting if slot != engine.slot], REPLICATED_BYTE)

    def _wake(self, target: int) -> None:
        """Let those go who have what they wait for, and one more, who may lead the next round."""
        if not self._waiting:  # whoever comes to wait now looks once more after that
            return
        with self._waiting_lock:
            waiting, self._waiting = self._waiting, []
            leader_found = bool(target)
            for until, waiter in waiting:
                if until <= target or not leader_found:
                    leader_found = leader_found or until > target
                    waiter.release()
                else:
                    self._waiting.append((until, waiter))

    def _on_replicated(self) -> None:
        """Another process's feeder says that the replica has more."""
        self._wake(self._page.words[REPLICATED])
