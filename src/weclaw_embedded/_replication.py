"""The replica as the processes that have the primary open see it: who feeds it.

Role: one `Replication` for each engine whose file has a replica. One process of all holds the
FEEDER lock and with it the receiver; when it dies the kernel drops the lock and another takes
over. Its thread starts the receiver and starts it again, and does the rounds (see `_rounds`) that
nobody leads who waits.

Invariant: fenced is for ever; it is recorded in the file before anybody is told.

It must not know what messages are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Final

from . import _files, _locks
from ._channel import (
    ERRORS_NAME,
    Address,
    Channel,
    LinkDownError,
    RefusedError,
    describe,
    normal,
    read_record,
)
from ._copy import write_role
from ._feeder import Link
from ._format import FENCED
from ._opening import FEEDER
from ._rounds import ROUND_S, Rounds
from ._session import ALL
from ._shared import (
    FAILED,
    FEED_PIPE,
    FEEDER_SLEEPS,
    FENCED_BY,
    IS_FENCED,
    OPTIONS_SEQ,
    READY,
    REPLICA_AT,
    REPLICATED,
    REPLICATION,
    SETTLED,
    SYNC_WANTED,
    WANTED,
)
from ._stream import DIVERGED, HIGHER_EPOCH, NOT_A_COPY, OTHER_STORE
from ._wake import (
    FEED_BYTE,
    READY_BYTE,
    REPLICATED_BYTE,
    SETTLED_BYTE,
    open_pipe,
    waiter_for,
)
from .errors import (
    DiskFullError,
    WeclawError,
)
from .wal import ANNOUNCED, COMMIT, TAIL

if TYPE_CHECKING:
    from ._engine import Engine

logger = logging.getLogger("weclaw_embedded")

_TAKE_OVER_S: Final = 0.5  # how often a process asks whether the feeder's lock is free
_SLEEP_S: Final = 0.5  # the feeder looks by itself as often as that
_LINGER_S: Final = 0.003  # rounds that nobody waits for are not done more often
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_REFUSED_PAUSE_S: Final = 10.0
_IDLE_SYNC_S: Final = 1.0
_CLOSE_STALL_S: Final = 1.0  # a close waits for the replica as long as it makes progress,
_CLOSE_S: Final = 10.0  # but no longer than this


class Replication(Rounds):
    """See the module. Any thread may wait; `start` and `close` are the engine's."""

    def __init__(self, engine: Engine, address: Address) -> None:
        self._engine = engine
        self._page = engine.page
        self.address = address
        self.is_feeder = False
        self._link: Link | None = None
        self._round = threading.RLock()  # which only the thread that has it can release
        self._waiting: list[tuple[int, threading.Lock]] = []
        self._waiting_lock = threading.Lock()
        self._stopping = False
        # The feeder's thread sleeps on it, until it is released. Who closes may be broken off by
        # Ctrl-C, which an Event does not stand: it could keep its own lock for ever.
        self._stop = threading.Lock()
        self._stop.acquire()
        self._pipe = -1
        self._reason = "it has not answered yet"
        self._said = ""
        self._options_seq = -1
        self._thread: threading.Thread | None = None
        self._waker_hook = waiter_for(REPLICATED_BYTE, self._on_replicated)

    def start(self) -> None:
        self._listen()
        threading.Thread(target=self._run, name="weclaw-feeder", daemon=True).start()

    # -- feeding ---------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._engine
        # Said here, so that Ctrl-C in `start` leaves no thread that nobody knows of.
        self._thread = threading.current_thread()
        try:
            while not self._stopping and not _locks.try_lock(engine.fd, FEEDER, True):
                self._pause(_TAKE_OVER_S)
            if self._stopping:
                return
            self.is_feeder = True
            self._feed()
        except (OSError, WeclawError) as error:
            if not self._stopping:
                logger.error("%s: feeding the replica ended: %s", engine.path, error)
        except Exception:
            logger.exception("%s: feeding the replica ended", engine.path)
        finally:
            if not self._stopping:
                # Given up, fenced or failed: whoever is to feed again begins anew.
                self._stopping = True
                self.is_feeder = False
                with self._round:
                    self.give_up()
                engine.waker.discard(self._waker_hook)
                if engine.replication is self:
                    engine.replication = None

    def _pause(self, wait_s: float) -> None:
        """Sleep, in the feeder's thread, unless it is to stop."""
        if not self._stopping:
            self._stop.acquire(timeout=wait_s)

    def _feed(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_over():
            self._look_where()
            began_s = time.monotonic()
            wait_s = pause_s
            refused = self._connect()
            if self._serve():
                # At once, unless it only just began.
                lived_s = time.monotonic() - began_s
                wait_s = 0.0 if lived_s > 2 * pause_s else pause_s
                pause_s = _FIRST_PAUSE_S if lived_s > 60 else min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                wait_s = _REFUSED_PAUSE_S if refused else pause_s
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._pause(wait_s)

    def _connect(self) -> bool:
        """Start a receiver and bring it level. True when it refuses."""
        engine = self._engine
        words = self._page.words
        # The copy may have what was sent by one who died before he raised the commit point to it.
        engine.flush()
        with self._round:
            channel = None
            try:
                # No fork in between, by which a child would inherit the far end of the pipes.
                with engine._lock:
                    channel = Channel(self.address, os.path.join(engine.directory, ERRORS_NAME))
                link = Link(channel, engine.fd, engine.header, self._page, lambda: self._stopping)
                anew = link.greet(words[COMMIT])
                if anew:
                    where = describe(self.address)
                    if link.replaces:
                        logger.warning("%s: the copy at %s is made anew", engine.path, where)
                    else:
                        logger.info("%s: a copy is made at %s", engine.path, where)
                self._link = link
            except (LinkDownError, RefusedError, LookupError, OSError) as error:
                if channel is not None:
                    channel.close()
                self._link = None
                self._note(error)
                return isinstance(error, RefusedError) and error.why in (
                    OTHER_STORE,
                    DIVERGED,
                    NOT_A_COPY,
                )
            self._publish(0, link.acked)
        return False

    def _serve(self) -> bool:
        """Do rounds until the link is down or the store closes. False when there was none."""
        words = self._page.words
        link = self._link
        served = link is not None
        pipe = self._open_pipe()
        idle_since_s = time.monotonic()
        while link is not None and not self._is_over():
            if words[OPTIONS_SEQ] != self._options_seq:
                self._look_where()
            if self._is_behind(link) or words[ANNOUNCED] > link.head:
                with self._round:
                    self._do_round(time.monotonic() + ROUND_S)
                self._wake(0)
                idle_since_s = time.monotonic()
                if not words[REPLICATION] & SYNC_WANTED:
                    self._pause(_LINGER_S)
            elif words[TAIL] > words[COMMIT] and time.monotonic() - idle_since_s > _IDLE_SYNC_S:
                # Nobody forces it to the disk: after a while it is done for the replica's sake.
                self._engine.durable(words[TAIL])
                idle_since_s = time.monotonic()
            else:
                self._sleep(pipe, link)
            link = self._link
        return served

    def _is_behind(self, link: Link) -> bool:
        """Whether there is something to send, or to say: the feeder before may have died, or Ctrl-C
        have come, between what the receiver confirmed and `_publish`.
        """
        words = self._page.words
        return words[COMMIT] > min(link.acked, words[REPLICATED])

    def _is_over(self) -> bool:
        words = self._page.words
        mode = words[REPLICATION]
        return self._stopping or bool(words[FAILED] or mode & IS_FENCED or not mode & WANTED)

    def _look_where(self) -> None:
        """Somebody changed an option of the file: perhaps where the replica is."""
        self._options_seq = self._page.words[OPTIONS_SEQ]
        address = normal(self._engine.option("replica")) or read_record(self._engine.directory)
        if address is not None and address != self.address:
            self.address = address
            with self._round:
                self._lost(LinkDownError("the file names another one now"))

    def _sleep(self, pipe: int, link: Link) -> None:
        """Sleep until something was committed, the receiver is gone, or for a while."""
        engine = self._engine
        words = self._page.words
        with engine._lock:
            try:
                engine._lock_file()
                if self._is_behind(link):
                    return
                words[FEEDER_SLEEPS] = engine.slot + 1
            finally:
                engine._unlock_file()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(link.channel.out_fd, 0)  # only its end
        found = poll.poll(_SLEEP_S * 1000)
        words[FEEDER_SLEEPS] = 0
        for fd, _ in found:
            if fd == pipe:
                _files.read_all(pipe)
            elif self._link is link:
                # A round would not notice: it only listens while there is something to wait for.
                with self._round:
                    if self._link is link:
                        try:
                            link.listen()
                        except (LinkDownError, RefusedError, OSError) as error:
                            self._lost(error)

    def _open_pipe(self) -> int:
        if self._pipe < 0:
            self._pipe = open_pipe(self._engine.directory, FEED_PIPE, self._engine.fd)
        return self._pipe

    def wake_feeder(self) -> None:
        """Something was committed, or the feeder is to stop."""
        self._engine.waker.poke([FEED_PIPE], FEED_BYTE)

    def _lost(self, error: BaseException) -> None:
        """The receiver is gone. The caller holds the round lock."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if not self._stopping:
            self._note(error)
            self.wake_feeder()

    def _note(self, error: BaseException) -> None:
        if self._stopping:
            return
        if isinstance(error, RefusedError) and error.why == HIGHER_EPOCH:
            self._fence(error.epoch)
            return
        self._reason = str(error)
        if self._reason != self._said:
            self._said = self._reason
            refused = isinstance(error, RefusedError)
            logger.log(
                logging.ERROR if refused else logging.WARNING,
                "%s: the replica %s %s: %s",
                self._engine.path,
                describe(self.address),
                "refuses" if refused else "is not there",
                self._reason,
            )

    def _fence(self, epoch: int) -> None:
        """A copy was promoted: nothing is written here any more, by no process."""
        engine = self._engine
        words = self._page.words
        try:
            write_role(engine.fd, engine.header, FENCED, epoch)
        except (OSError, DiskFullError) as error:
            # It holds while the machine runs, and whoever feeds after that is refused again.
            logger.warning("%s: that it is fenced can't be recorded: %s", engine.path, error)
        with engine._lock:
            try:
                engine._lock_file()
                words[FENCED_BY] = epoch
                words[REPLICATION] |= IS_FENCED
                kept = words[TAIL] - words[REPLICA_AT]
                at = words[REPLICA_AT]
                # They wait for what can't come any more.
                ready = self._page.take_waiting(READY, ALL)
                settled = self._page.take_waiting(SETTLED, ALL)
            finally:
                engine._unlock_file()
        logger.error(
            "%s: its copy %s was promoted (epoch %d): this file takes no more writes. %s",
            engine.path,
            describe(self.address),
            epoch,
            f"{kept} bytes of its log, from offset {at} on, were not confirmed by the copy and are "
            "only here"
            if at
            else "What was written since is only here",
        )
        self._wake(0)
        engine.waker.wake_all()
        engine.wake(ready, READY_BYTE)
        engine.wake(settled, SETTLED_BYTE)

    @property
    def reason(self) -> str:
        """Why it may not be there, to be put into a message."""
        return f" ({self._reason})" if self.is_feeder and self._link is None else ""

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop taking part. The receiver goes on to the end with `finish`. No lock is held."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # it was told before
            self._stop.release()
        self.wake_feeder()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        # For good: from here on the link is `finish`'s alone.
        self._round.acquire()
        self._engine.waker.discard(self._waker_hook)
        with self._waiting_lock:
            waiting, self._waiting = self._waiting, []
        for _, waiter in waiting:
            waiter.release()

    def finish(self, last: bool) -> None:
        """Bring the replica level while that makes progress, and end its receiver. The engine
        closes; `last`: no other process has the file open, so nobody else would.
        """
        engine = self._engine
        words = self._page.words
        try:
            if words[REPLICATION] & IS_FENCED or words[FAILED] or not words[REPLICATION] & WANTED:
                return
            if self._link is None and last and _locks.try_lock(engine.fd, FEEDER, True):
                self._connect_to_finish()
            link = self._link
            if link is None:
                return
            link._stopping = lambda: False
            give_up_s = time.monotonic() + _CLOSE_S
            while time.monotonic() < give_up_s:
                before = (link.acked, link.sent)
                if link.pump(
                    words[COMMIT], words[ANNOUNCED], time.monotonic() + _CLOSE_STALL_S
                ) or before == (link.acked, link.sent):
                    break
        except (LinkDownError, RefusedError, LookupError, OSError) as error:
            logger.debug("%s: the replica was not brought level: %s", engine.path, error)
        finally:
            link, self._link = self._link, None
            if link is not None:
                if self.is_feeder or last:
                    words[REPLICA_AT] = link.acked  # nobody else feeds before our lock is gone
                if link.is_greeted and link.acked < words[COMMIT]:
                    logger.warning(
                        "%s: closed with the replica %d bytes behind",
                        engine.path,
                        words[COMMIT] - link.acked,
                    )
                link.close()
            if self._pipe >= 0:
                os.close(self._pipe)
                self._pipe = -1

    def give_up(self) -> None:
        """End the receiver and let somebody else feed."""
        self.finish(False)
        _locks.unlock(self._engine.fd, FEEDER)

    def _connect_to_finish(self) -> None:
        engine = self._engine
        until_s = time.monotonic() + 3 * _CLOSE_STALL_S
        channel = Channel(self.address, os.path.join(engine.directory, ERRORS_NAME))
        link = Link(
            channel, engine.fd, engine.header, self._page, lambda: time.monotonic() > until_s
        )
        self._link = link
        link.greet(self._page.words[COMMIT])

    def abandon(self) -> None:
        """In a forked child: give back what was inherited."""
        self._stopping = True
        link, self._link = self._link, None
        if link is not None:
            link.abandon()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
