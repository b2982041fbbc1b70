"""Looking at a file without changing anything: not the file, not what lies beside it.

Role: an engine for `readonly=True`. Its index is its own, in a temporary folder, folded from the
log; it follows the file when others write to it. Works on a read-only mount, and needs none of
the scratch folder, which it reads only to learn whose leases are those of living processes.

What it judges (leases run out, deaths, expiries) is judged in a transaction that is dropped, so
its answers are what a writer would say at that moment, and nothing of it stays.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from . import _clock, _files
from ._engine import Engine
from ._index import Index, Tx
from ._opening import OWNER, attach_page, check_path, is_new, read_header
from ._options import StoreOptions
from ._scratch import PAGE_NAME, scratch_of
from ._session import Record, Session
from ._shared import DEAD_SEQ, SHIFT
from ._wake import Timer, Waiter, Waker
from ._watch import asker_of
from .errors import ClosedError, StorageError
from .wal import TAIL, Log, LogState

T = TypeVar("T")
Args = TypeVarTuple("Args")
_WORDS = 512
LOOK_AGAIN_S = 0.25


class _Page(LogState):
    """What a looker knows of the shared page: private words, and the owners that live."""

    def __init__(self) -> None:
        super().__init__()
        self.words = memoryview(bytearray(8 * _WORDS)).cast("Q")
        self.living: list[tuple[int, int]] = []

    def owners(self) -> Iterator[tuple[int, int]]:
        return iter(self.living)

    def visible(self, tail: int) -> int:
        return tail

    def wait_for(self, slot: int, kind: int, mask: int, gid: int = 0) -> None:
        """Nobody is told that a looker waits."""

    def close(self) -> None:
        """Nothing is held."""


class _Waker(Waker):
    """A looker is not woken: it makes no pipe, and looks again by itself."""

    def add(self, waiter: Waiter) -> None:
        """It will sleep, and nobody will wake it."""
        waiter.arm()


class _Session(Session):
    """A session that can only look."""

    __slots__ = ()
    may_write = False

    def append(self, records: Sequence[Record], policy: int = 0, **_: Any) -> list[int]:
        raise StorageError(
            f"{self.engine.path} was opened with readonly=True; nothing was changed; open it "
            "without to change it"
        )

    def judge(self, records: Sequence[Record]) -> None:
        tail = self.page.words[TAIL]
        self.tx.apply([(tail, self.now_us, record) for record in records])

    @property
    def tx(self) -> Tx:
        assert self._tx is not None, "opened by execute"
        return self._tx


class ReadonlyEngine(Engine):
    """See the module. Offers what looking needs of `Engine`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.directory = scratch_of(path)
        self.fd = _files.open_ro(path)
        try:
            self.header = read_header(self.fd, path)
            # No lock: one that only looks must not keep the first who writes after a reboot from
            # having the file for himself.
            self._looked = _Page()
            self.page = self._looked  # type: ignore[assignment]  # the part of it that looking needs
            self.log = Log(self.fd, self.header, self._looked, readonly=True)
            self._own = tempfile.mkdtemp(prefix="weclaw-")
        except BaseException:
            _files.close(self.fd)
            raise
        self.index = Index.open(self._own, create=True)
        self.timer = self.renewals = Timer("weclaw-timer")
        self.held = set()
        self.healed = []
        self.suspects = set()
        self._written = []
        self._written_from = self._written_to = -1
        self._watch_fd = -1
        self._has_moved = asker_of(-1)
        self.handles = 1
        self.slot = -1
        self.waker = _Waker(self.directory, self.slot, self.fd)
        self.token = 0
        self.forked = self.closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._head = -1
        self._adopted = []
        self.known_options = {}
        self.effective = {}
        self.options_seen = -1

    def execute(self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Run `operation` on what the file says now, and drop what it judged."""
        with self._lock:
            if self.closed:
                raise ClosedError(f"{self.path} is closed; open it again")
            self._follow()
            session = _Session(self)
            session._tx = self.index.write()
            try:
                return operation(session, *args)
            finally:
                session._tx.abort()
                session._tx = None

    def _follow(self) -> None:
        """Find the end of the log as it is now and fold what is new into the index."""
        words = self._looked.words
        before = words[TAIL]
        self.log.recover(commit=before, cache_is_true=True, whole=self._head < 0, failed=False)
        self._look_at_owners()
        head = self.log.head_offset
        tx = self.index.write()
        try:
            if tx.applied and (tx.applied < head or words[TAIL] < before):
                tx.abort()
                self._begin_anew()
                tx = self.index.write()
            self.catch_up(tx)
            tx.commit(words[TAIL], 0)
        except BaseException:
            tx.abort()
            raise
        self._head = head

    def _begin_anew(self) -> None:
        self.index.close(sync=False)
        shutil.rmtree(self._own)
        os.mkdir(self._own)
        self.index = Index.open(self._own, create=True)

    def _look_at_owners(self) -> None:
        words = self._looked.words
        words[DEAD_SEQ] += 1  # look through all leases each time
        self._looked.living = []
        self.shift = max(_clock.wall_us(), self.log.last_time_us()) - _clock.boottime_us()
        if not os.access(os.path.join(self.directory, PAGE_NAME), os.R_OK):
            return
        page = attach_page(self.directory, self.fd, self.header, writable=False)
        if page is None:
            return
        self.shift = page.shift
        words[SHIFT] = page.words[SHIFT]
        self._looked.living = [
            (slot, token)
            for slot, token in page.owners()
            if _files.is_locked(self.fd, OWNER + slot)
        ]
        page.close()

    def look_with(self, options: StoreOptions) -> None:
        """Take in the handle's options; nothing is recorded."""
        self._adopted = [options]
        self.know_options(self.known_options)

    def dead_owners(self, everyone: bool) -> list[int]:
        return []

    def bury(self, session: Session, slots: list[int]) -> None:
        """The dead are simply not among the living here."""

    def wait(self, waiter: Waiter, until_s: float | None) -> None:
        """Sleep a while, `until_s` (time.monotonic) at most; then look again."""
        left_s = LOOK_AGAIN_S if until_s is None else min(LOOK_AGAIN_S, until_s - time.monotonic())
        waiter.wait(left_s)

    def flush(self) -> None:
        """Nothing is written, so nothing is to be flushed."""

    def hand_back(self, belongs: Callable[[Any], bool]) -> None:
        """Nothing is held."""

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self.timer.close()
            self.index.close(sync=False)
            shutil.rmtree(self._own, ignore_errors=True)
            _files.close(self.fd)

    def abandon(self) -> None:
        """In a forked child."""
        self.forked = self.closed = True
        self.index.close(sync=False)
        _files.close(self.fd)


def open_readonly(path: str) -> ReadonlyEngine:
    """Open the file to look at it. Raises StorageError if there is none, NotAQueueError and
    FormatVersionError as the other way of opening does.
    """
    real = os.path.realpath(path)
    try:
        check_path(real)
        os.stat(real)
    except FileNotFoundError:
        raise StorageError(
            f"{path} does not exist; nothing was made, because of readonly=True"
        ) from None
    if is_new(real):
        raise StorageError(
            f"{path} is empty: a queue is still to be made of it, and readonly=True makes nothing; "
            "it was not touched; open it without readonly, or when there is something to look at"
        )
    return ReadonlyEngine(real)
