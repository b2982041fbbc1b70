"""Looking at a file without changing anything: not the file, not what lies beside it.

Role: an engine for `readonly=True`. Its index is its own, in a temporary folder (or in shared
memory), folded from the log; it follows the file when others write to it. Works on a read-only
mount, and needs none of the scratch folder, which it reads only to learn whose leases are those of
living processes.

What it judges (leases run out, deaths, expiries) is judged in a transaction that is dropped, so
its answers are what a writer would say at that moment, and nothing of it stays.

It has no lock, so others write and give space back while it reads. It calls nothing damage of which
it can't be sure: what stands in a segment that the file's head record says is gone is none, and
where that was met, or may have been, it looks again. Why what is left is sure: below the end that
was found all frames are whole before they are read once more to be folded, and space is overwritten
only after the head record says so.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from . import _files, _locks, _names
from ._engine import Engine
from ._finding import recorded_head
from ._format import FIRST, SLOT_BYTES
from ._index import Index, Tx
from ._lost_end import SEGMENT_LOST, find_lost
from ._opening import OWNER, Opened, attach_page, new_shift
from ._options import StoreOptions
from ._paths import check_path, find_header, is_new
from ._scan import BadPartError, collect
from ._scratch import PAGE_NAME, scratch_of
from ._segments import Segments
from ._session import Session, begin
from ._shared import DEAD_SEQ, FAILED, SHIFT
from ._wake import Waiter, Waker
from .errors import ClosedError, CorruptError, StorageError
from .wal import COMMIT, HEAD, LAST, TAIL, Log, LogState

if TYPE_CHECKING:
    from ._shared import SharedPage

T = TypeVar("T")
What = TypeVar("What")
_WORDS = 512
LOOK_AGAIN_S = 0.25
# How often it looks anew when what it reads is given back meanwhile.
_LOOKS: Final = 50
_SHARED_MEMORY: Final = "/dev/shm"
_READS: Final = 3  # of a record that may be half written


class _Page(LogState):
    """What a looker knows of the shared page: private words, and the owners that live."""

    shift = 0

    def __init__(self) -> None:
        super().__init__()
        self.words = memoryview(bytearray(8 * _WORDS)).cast("Q")
        self.living: list[tuple[int, int]] = []

    def owners(self) -> Iterator[tuple[int, int]]:
        return iter(self.living)

    def has_let_go(self, log: Segments, segment: int) -> bool:
        """Asks the file, for nobody tells a looker. As long as what it has come upon is still kept,
        HEAD is left where it was found: the index is of that moment.
        """
        for _ in range(_READS):
            head = recorded_head(log)
            if head:
                if segment < head:
                    self.words[HEAD] = max(self.words[HEAD], head)
                break
        return segment < self.words[HEAD]

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

    def append(self, *_: Any, **__: Any) -> list[int]:
        raise StorageError(
            f"{self.engine.path} was opened with readonly=True; nothing was changed; open it "
            "without to change it"
        )

    append_one = append  # type: ignore[assignment]  # it never returns

    @property
    def tx(self) -> Tx:
        assert self._tx is not None, "opened by `run_with`"
        return self._tx


class ReadonlyEngine(Engine):
    """See the module. Offers what looking needs of `Engine`."""

    def __init__(self, path: str, fd: int) -> None:
        """`fd`: of the file; closed with the engine, and by who makes it if this raises."""
        header = find_header(fd, path, to_write=False)
        # No lock: one that only looks must not keep the first who writes after a reboot from
        # having the file for himself.
        self._looked = _Page()
        log = Log(fd, header, self._looked, readonly=True)
        # Where the log ended that is in the index; offset and checksum of its last frame.
        self._folded = (0, 0, 0)
        self._confirmed = 0  # as far as the page says, whether somebody lives or not
        self._shift: int | None = None  # what those who write add to the clock
        self._is_doubtful = False  # the index may say what the log does not
        self._left: list[tuple[str, Index]] = []  # that it goes by no more
        page = cast("SharedPage", self._looked)  # the part of it that looking needs
        scratch = scratch_of(path)
        self._own, index = _own_index()
        try:
            super().__init__(
                Opened(path, fd, header, scratch, page, log, index, -1, 0, None, False)
            )
            self.waker = _Waker(self.directory, self.slot, self.fd)
            self.handles = 1
        except BaseException:
            index.close(sync=False)
            _remove(self._own)
            raise

    def _begin(self, opened: Opened) -> None:
        """Nothing is watched, told of, or healed."""

    def run_with(self, operation: Callable[[Session, What], T], what: What) -> T:
        """Run `operation(session, what)` on what the file says now, and drop what it judged."""
        words = self._looked.words
        gone: LookupError | None = None
        with self._lock:
            for _ in range(_LOOKS):
                self._follow()
                head = words[HEAD]
                session = begin(_Session, self)
                session._tx = self.index.write()
                try:
                    result = operation(session, what)
                    if words[HEAD] == head:
                        return result
                except LookupError as error:
                    if words[HEAD] == head:
                        raise
                    gone = error
                finally:
                    session._tx.end_txn()
                    session._tx.abort()
                    session._tx = None
                # It came upon what was let go of since: its answer may be that of no moment.
            raise self._too_fast() from gone

    def _follow(self) -> None:
        """Bring the index level with the log as it is now."""
        if self.closed:
            raise ClosedError(f"{self.path} is closed; open it again")
        gone: LookupError | None = None
        for _ in range(_LOOKS):
            try:
                self._find_end(self._look_at_page())
                self._fold()
                return
            except LookupError as error:  # it was let go of while it was read
                gone = error
        raise self._too_fast() from gone

    def _too_fast(self) -> StorageError:
        return StorageError(
            f"{self.path} was looked at {_LOOKS} times, and each time what was to be read was "
            "settled, and its space used again, before it was read; nothing is wrong with it, and "
            "nothing was changed; look again, or open it without readonly"
        )

    def _find_end(self, whole_to: int) -> None:
        """Find the end of the log. Raises LookupError if that is gone before it is known."""
        log = self.log
        words = self._looked.words
        tail, last, checksum = self._folded
        log.recover(commit=max(tail, whole_to), cache_is_true=True, whole=not tail, failed=False)
        if log.is_gone(words[LAST]):
            # Its zeros would have passed for the end.
            raise LookupError(f"segment {words[LAST]} is no longer kept")
        # Those who write go on from there, whatever can't be read before it.
        words[TAIL] = max(words[TAIL], whole_to)
        if last and last >> log.bits >= words[HEAD] and log.checksum(last) != checksum:
            self._is_doubtful = True  # cut off after a power cut or a failed sync: it went on anew
        if self._shift is None:
            self.shift = new_shift(log)
        else:
            self.shift = self._shift

    def _fold(self) -> None:
        """Fold what is new into the index."""
        log = self.log
        tail = self._looked.words[TAIL]
        tx = self.index.write()
        try:
            fits = log.head_offset <= tx.applied <= tail and not self._is_doubtful
            if tx.applied and not (fits and not self._is_mended(tx)):
                tx.abort()
                self._begin_anew()
                tx = self.index.write()
            self._is_doubtful = False
            self.catch_up(tx)
            tx.commit(tail, 0)
        except BaseException:
            tx.end_txn()
            tx.abort()
            raise
        self._folded = (tail, *log.last_frame)

    def _is_mended(self, tx: Tx) -> bool:
        """Whether something can be read by now that was passed over as damaged."""
        return any(_is_readable(self.log, offset) for offset, _ in tx.damage())

    def heal(self, start: int, end: int, *, insist: bool = False) -> bool:
        """A looker mends nothing; what it could not read it says of the whole file anew."""
        self._is_doubtful = True
        return False

    def damage_met(self) -> None:
        """It is told of, and left to those who write."""

    def verify(self, seen: Callable[[int, int], None] | None = None) -> list[tuple[int, str]]:
        """See `Engine.verify`. What is found is looked at once more: it may just be mended."""
        found = self._faults(seen)
        if found:
            again = self._faults(None)
            found = [one for one in again if one in found]
        return found

    def _faults(self, seen: Callable[[int, int], None] | None) -> list[tuple[int, str]]:
        """What `verify` finds at one look, and what whoever opens the file would find missing at
        its end.
        """
        found = super().verify(seen)
        log = self.log
        with self._lock:
            tail = self._looked.words[TAIL]
            end = max(log.known_end, self._confirmed)
            lost = find_lost(log)
            if lost is not None:
                found.append((lost[1].segment << log.bits, SEGMENT_LOST))
            elif tail < end:
                found.append((tail, f"nothing is left up to the commit point {end}"))
        return found

    def _begin_anew(self) -> None:
        own, index = _own_index()
        # At one stroke: whoever breaks this off leaves an index that is open.
        left = [*self._left, (self._own, self.index)]
        self._left, self._own, self.index = left, own, index
        self._close_left()

    def _close_left(self) -> None:
        """Close what was left behind, by who broke that off, too."""
        while self._left:
            own, index = self._left[-1]
            index.close(sync=False)
            _remove(own)
            self._left.pop()

    def _look_at_page(self) -> int:
        """Learn who lives, and what time it is. Returns how far the log is whole for certain, by
        those who write; 0 where nobody says.
        """
        words = self._looked.words
        words[DEAD_SEQ] += 1  # look through all leases each time
        self._looked.living = []
        self._shift = None
        self._confirmed = 0
        if not os.access(os.path.join(self.directory, PAGE_NAME), os.R_OK):
            return 0
        page = attach_page(self.directory, self.fd, self.header, writable=False)
        if page is None:
            return 0
        try:
            self._shift = page.shift
            words[SHIFT] = page.words[SHIFT]
            # The end first: should all die then, it is still as far as they had come.
            end = page.words[COMMIT if page.words[FAILED] else TAIL]
            self._confirmed = page.words[COMMIT]
            self._looked.living = [
                (slot, token)
                for slot, token in page.owners()
                if _locks.is_locked(self.fd, OWNER + slot)
            ]
        finally:
            page.close()
        return end if self._looked.living else 0

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

    def judge_late(self, belongs: Callable[[Any], bool]) -> None:
        """Nothing is leased by who only looks."""

    def hand_back(self, belongs: Callable[[Any], bool]) -> None:
        """Nothing is held."""

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            try:
                self.timer.close()
                self._left.append((self._own, self.index))
                self._close_left()
            finally:
                _files.close(self.fd)

    def leave(self, forked: bool) -> None:
        """End with the engine that it looks for."""
        if forked:
            self.abandon()
        else:
            self.close()

    def abandon(self) -> None:
        """In a forked child."""
        self.forked = self.closed = True
        self.index.close(sync=False)
        _files.close(self.fd)


def _own_index() -> tuple[str, Index]:
    """An index of its own, and the folder that it is in."""
    try:
        own = tempfile.mkdtemp(prefix="weclaw-")
    except FileNotFoundError:
        # No folder for what is temporary may be written where all of a system is read-only, as in
        # a container. Shared memory may, even there.
        if not os.path.isdir(_SHARED_MEMORY):
            raise
        own = tempfile.mkdtemp(prefix="weclaw-", dir=_SHARED_MEMORY)
    try:
        return own, Index.open(own, create=True)
    except BaseException:
        _remove(own)
        raise


def _remove(own: str) -> None:
    with contextlib.suppress(OSError):
        _names.remove_folder(own)


def _is_readable(log: Log, offset: int) -> bool:
    """Whether a frame begins at an offset, or a segment."""
    segment = offset >> log.bits
    try:
        if offset & (log.segment_bytes - 1) < SLOT_BYTES:
            log.place(segment)
            return True
        frame = collect(log, offset, log.frames_end(segment) or log.limit(segment))
    except (BadPartError, LookupError, CorruptError):
        return False
    return bool(frame.flags & FIRST)


def look_at_open(engine: Engine) -> ReadonlyEngine:
    """Who looks at the file that an engine has open, whether a name leads to it or not."""
    # A file of its own where there can be one: locks are of the open file, and it asks which of
    # them others have.
    try:
        fd = _files.open_ro(f"/proc/self/fd/{engine.fd}")
    except OSError:
        fd = _files.duplicate(engine.fd)
    looker = None
    try:
        looker = ReadonlyEngine(engine.path, fd)
        looker._adopted = list(engine._adopted)
        looker.know_options(looker.known_options)
    except BaseException:
        _give_up(looker, fd)
        raise
    return looker


def _give_up(looker: ReadonlyEngine | None, fd: int) -> None:
    """Close a file that nobody gets to look at."""
    if looker is not None:
        looker.close()
    else:
        _files.close(fd)


def open_readonly(path: str, options: StoreOptions) -> ReadonlyEngine:
    """Open the file to look at it, with the handle's options. Raises StorageError if there is none,
    NotAQueueError and FormatVersionError as the other way of opening does.
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
    looker = None
    fd = _files.open_ro(real)
    try:
        looker = ReadonlyEngine(real, fd)
        looker.look_with(options)
    except BaseException:
        _give_up(looker, fd)
        raise
    return looker
