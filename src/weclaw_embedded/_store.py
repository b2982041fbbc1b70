"""`Store`: one open file as its user holds it. Options of the file, its queues, its upkeep.

Role: a handle. What it opens is shared by all handles of the process (`_engine`); closing one
leaves the others. Options that belong to the file are recorded in the log and seen by everybody.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from . import _queries, _records, _registry
from ._engine import Engine
from ._format import DEFAULT_SEGMENT_BYTES
from ._mend import backup, repair
from ._options import (
    UNSET,
    StoreOptions,
    Unset,
    check_name,
    queue_options,
    store_options,
)
from ._paths import full_path, typed_errors
from ._queries import GroupInfo
from ._restore import end_of, refuse_itself, restore_damaged, restore_missing
from ._session import POLICIES
from .errors import ClosedError, CorruptError, NotAQueueError, StorageError, StoreFailedError
from .queue import Queue

if TYPE_CHECKING:
    from ._codecs import AnyCodec
    from ._options import RetryPolicy

T = TypeVar("T")


def open(
    path: str | os.PathLike[str],
    *,
    flush: str | Unset = UNSET,
    flush_interval_ms: float | Unset = UNSET,
    flush_messages: int | Unset = UNSET,
    retention: float | Unset | None = UNSET,
    retention_bytes: int | Unset | None = UNSET,
    max_bytes: int | Unset | None = UNSET,
    max_message_bytes: int | Unset = UNSET,
    segment_bytes: int | Unset | None = UNSET,
    codec: AnyCodec | Unset = UNSET,
    replica: Any = UNSET,
    sync_replica: bool | Unset = UNSET,
    replica_timeout: float | Unset = UNSET,
    readonly: bool | Unset = UNSET,
    consumer: str | Unset | None = UNSET,
) -> Store:
    """Open the file at `path`, making it if there is none or an empty one.

    An argument goes before the environment, that before what the file records, that before the
    default. Opening a file again in one process shares what is open.

    Args:
        flush: When a put is answered: "sync" (the default) on stable storage; "batch" written,
            synced within `flush_interval_ms` or `flush_messages`; "os" written, synced when the
            system does. All survive kill -9.
        flush_interval_ms: Of "batch": synced after so many milliseconds, by default 500.
        flush_messages: Of "batch": synced after so many messages, by default 1000.
        retention: Seconds that settled messages and results are kept, by default 48 hours; None: no
            limit by age. Recorded in the file, as are the next four.
        retention_bytes: Bytes of them that are kept, by default 256 MiB; None: no limit by size.
        max_bytes: Size of the file at which `put` waits for room; None (the default): no limit.
        max_message_bytes: Largest body, and largest headers, once encoded, for all openers; by
            default 16 MiB. It does not hold for results, which may have 1 GiB.
        segment_bytes: Of a new file: a power of two from 64 KiB to 1 GiB; by default 1 MiB.
        codec: How this handle writes bodies: "msgpack" (the default), "json", "raw", "pickle", or
            an object with encode and decode.
        replica: Where a second, complete copy is kept: a path on another disk, or a command as a
            list, such as ["ssh", "host", "weclawctl", "replica", "FILE"]; False forgets the one
            that is recorded, which is the default; a new file has none. Recorded.
        sync_replica: Whether a put waits until the replica has it, too; by default it does.
            Recorded.
        replica_timeout: Seconds a put waits for the replica before `ReplicaUnavailableError`, by
            default 5.
        readonly: Look only; works on a read-only mount and makes no file; default False.
        consumer: A name shown in failures, `weclawctl stats` and `peek --leased`; by default
            host:pid.

    Raises:
        ValueError, TypeError: bad or conflicting options; no file was made.
        NotAQueueError, FormatVersionError: not ours, or newer than this release; not touched.
        LockedError, StoreFailedError: others have the file open in a way that excludes this.
        StorageError, DiskFullError: it can't be opened or made.
    """
    arguments = {
        name: value for name, value in locals().items() if name != "path" and value is not UNSET
    }
    return Store(path, store_options(arguments), arguments)


class Store:
    """One open file; made by `open`. Any thread may use it; see `Queue` for forks."""

    _needs_closing = True  # False: that of a drop-in, which nobody is told to close

    def __init__(
        self, path: str | os.PathLike[str], options: StoreOptions, arguments: dict[str, Any]
    ) -> None:
        self._closed = True  # until it is open, for __del__
        self._closing = threading.Lock()  # taken by the one call that closes it
        self.path = full_path(path)
        self._options = options
        self._arguments = arguments
        self.readonly = options.readonly
        self._queues: weakref.WeakValueDictionary[int, Queue] = weakref.WeakValueDictionary()
        self._shared = self._open()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Store {self.path}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a store can't be pickled; open the path {self.path!r} in the other process (a Queue "
            "can be pickled, and does so)"
        )

    def _open(self) -> Engine:
        # Here, because a child has a name of its own.
        self._consumer = self._options.consumer or f"{socket.gethostname()}:{os.getpid()}"
        engine = None
        try:
            with typed_errors(self.path):
                engine = self._open_engine()
        except BaseException:
            if engine is not None:  # Ctrl-C: nobody has it who would give it back
                _registry.release(engine)
            raise
        return engine

    def _open_engine(self) -> Engine:
        refuse_itself(self.path, self._options)
        if self.readonly:
            from ._readonly import open_readonly

            looking = open_readonly(self.path, self._options)
            try:
                _registry.keep(looking)
            except BaseException:  # Ctrl-C: nobody has it who would close it
                looking.close()
                raise
            return looking
        options = self._options
        restore_missing(self.path, options)
        given = (options.segment_bytes, DEFAULT_SEGMENT_BYTES, options.replica)
        end = end_of(self.path, options)
        try:
            engine = _registry.acquire(self.path, *given, end)
        except (CorruptError, NotAQueueError) as error:
            if not restore_damaged(self.path, options, error):
                raise
            engine = _registry.acquire(self.path, *given, end)
        try:
            engine.adopt(self._options, self._consumer)
        except BaseException:
            _registry.release(engine)
            raise
        return engine

    @property
    def _engine(self) -> Engine:
        if self._closed:
            raise ClosedError(f"{self.path} is closed; nothing was changed; open it again")
        engine = self._shared
        if engine.forked:
            # This is a child: what it inherited is closed, so it opens the file for itself.
            # (One of its threads does; a second would count a handle that nobody gives back.)
            with _registry.opening():
                engine = self._shared
                if engine.forked:
                    engine = self._shared = self._open()
        return engine

    def _run(self, operation: Callable[..., T], *args: Any) -> T:
        """Run what only looks; see `Handle._look`."""
        engine = self._engine
        try:
            return engine.run(operation, *args)
        except StoreFailedError as error:
            return engine.last_look(error).run(operation, *args)

    def queue(
        self,
        topic: str = "default",
        *,
        group: str | Unset = UNSET,
        maxsize: int | Unset = UNSET,
        visibility_timeout: float | Unset | None = UNSET,
        retry: RetryPolicy | Unset = UNSET,
        on_dead: Callable[..., Any] | Unset | None = UNSET,
        start: str | int | Unset = UNSET,
    ) -> Queue:
        """A topic of this file as one group sees it; arguments as for `Queue`."""
        arguments = {name: value for name, value in locals().items() if name != "self"}
        options = queue_options(arguments)
        self._engine  # noqa: B018  a closed store says so
        queue = Queue._of(self, options)
        self._queues[id(queue)] = queue
        return queue

    def _forget(self, queue: Queue) -> None:
        self._queues.pop(id(queue), None)

    def _open_queues(self) -> list[Queue]:
        """Those that this store has open now."""
        # By one call: to iterate fails when another thread opens one meanwhile.
        found = [ref() for ref in self._queues.valuerefs()]
        return [queue for queue in found if queue is not None]

    def groups(self) -> list[GroupInfo]:
        """Every group of every topic, sorted by topic and name."""
        return self._run(_queries.groups)

    def drop_group(self, name: str, topic: str = "default") -> bool:
        """Forget a group with its position and dead letters; it no longer keeps anything from
        being freed. False if there is none. What its consumers hold is lost to them.

        A topic without groups keeps everything for its first one. So when this was the topic's
        only group, all that is kept of the topic waits for the next group that begins, what was
        settled or purged before, too. To throw an only group's backlog away, `Queue.purge` it.
        """
        gid = _records.group_id(check_name("topic", topic), check_name("name", name))
        return self._writable().run(_queries.drop_group, gid, POLICIES[self._options.flush])

    def _writable(self) -> Engine:
        engine = self._engine
        if self.readonly:
            raise StorageError(
                f"{self.path} was opened with readonly=True; nothing was changed; open it without"
            )
        return engine

    def flush(self) -> None:
        """Everything written so far is on stable storage when this returns."""
        self._engine.flush()

    def verify(self) -> list[tuple[int, str]]:
        """Check every byte that is kept: a list of (offset, reason), empty when all is good.
        Writes nothing; takes as long as reading the file.
        """
        engine = self._engine
        try:
            return engine.verify()
        except StoreFailedError as error:
            return engine.last_look(error).verify()

    def repair(self) -> list[tuple[int, str]]:
        """Set aside what `verify` finds, so that it finds nothing any more; returns what it was.
        The messages that stood there are gone; everything else is kept. Processes may go on
        working meanwhile, but wait while it writes.
        """
        return repair(self._writable())

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the file to `path` while it is in use: a queue of its own, as of this moment.

        Only reads, so one that was opened readonly can be copied too; others don't wait for that.
        So can one that was deleted or replaced while it was open, by each process that has it.

        Raises StorageError if `path` exists, or readonly if others give space back faster than it
        is copied; DiskFullError; then there is no file.
        """
        backup(self._engine, full_path(path))

    def close(self) -> None:
        """Close this handle and its queues. The last handle of the process hands leases back
        uncounted and flushes. Closing twice does nothing. Raises StoreFailedError when that fails
        and no call has said so before; all is closed then, too. Nothing after a failure.
        """
        if not self._closing.acquire(blocking=False):
            return  # two threads that close at once are one closing
        try:
            self._shared.judge_late(self._is_mine)
            for queue in self._open_queues():
                queue._tell_untold()
                queue._closed = True
            self._closed = True
            if not self._shared.forked:
                self._shared.waker.wake_all()
                self._shared.hand_back(self._is_mine)
        finally:
            self._closed = True
            self._shared.forsake(self._options)
            _registry.release(self._shared)

    def _is_mine(self, holder: object) -> bool:
        return getattr(holder, "store", None) is self

    def _drop(self) -> None:
        """Close what was dropped open, from a thread that holds no lock: the garbage collector
        may run in the middle of anything.
        """
        if not self._closing.acquire(blocking=False):
            return
        self._closed = True
        engine, options = self._shared, self._options

        def close() -> None:
            engine.forsake(options)
            try:
                _registry.release(engine)
            except StorageError as error:
                engine.tell_log(error)

        # At the end of the interpreter no thread can be started; what is open is closed there.
        if not engine.forked and not sys.is_finalizing():
            engine.timer.call_at(0.0, close)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            if self._needs_closing:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._drop()
