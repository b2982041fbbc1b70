"""One engine for each file of this process, and what happens to them at a fork and at the end.

Role: handles ask here for the engine of a path and give it back here. LMDB and locks both break
when a process opens a file twice, so nobody else may make an engine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from typing import Final, Protocol

from ._engine import Engine
from ._opening import Complete, open_shared

_engines: dict[tuple[int, int], Engine] = {}
_lookers: weakref.WeakSet[Engine] = weakref.WeakSet()

# How long the end of the interpreter waits for what is still to be told.
_TELL_S: Final = 5.0


class Telling(Protocol):
    """What has something to tell before its file is closed."""

    def wait_told(self, until_s: float) -> None:
        """Return when it has, or at that time (time.monotonic)."""


_telling: weakref.WeakSet[Telling] = weakref.WeakSet()
_ends_as_a_child = False  # whether `_end_as_a_child` has seen to it in this process
_registry_lock = threading.RLock()


def acquire(
    path: str,
    segment_bytes: int | None,
    default_segment_bytes: int,
    replica: object = None,
    complete: Complete | None = None,
) -> Engine:
    """The engine of the file at `path`, opened if this process does not have it yet. What is
    damaged is healed from `replica`, if its address is given; `complete` writes what is missing at
    the end. Errors of the disk come as they are: see `typed_errors`.
    """
    real = os.path.realpath(path)
    with _registry_lock:
        with contextlib.suppress(OSError):
            found = os.stat(real)
            engine = _engines.get((found.st_dev, found.st_ino))
            if engine is not None and found.st_size:
                if segment_bytes not in (None, engine.header.segment_bytes):
                    raise ValueError(
                        f"segment_bytes={segment_bytes} but {path} was made with "
                        f"{engine.header.segment_bytes}; nothing was changed; leave it out"
                    )
                engine.handles += 1
                return engine
        opened = open_shared(real, segment_bytes, default_segment_bytes, complete)
        engine = None
        try:
            opened.replica = replica
            engine = Engine(opened)
            found = os.fstat(engine.fd)
            engine.handles = 1
            _engines[found.st_dev, found.st_ino] = engine
            _end_as_a_child()
        except BaseException:
            # Ctrl-C, too: what nobody has to close would keep this process from opening it again.
            opened.give_up()
            if engine is not None:
                _forget(engine)
                engine.close()
            raise
        return engine


def opening() -> threading.RLock:
    """To be held by who decides whether to open; a fork finds it free."""
    return _registry_lock


def keep(engine: Engine) -> None:
    """Have an engine that only looks closed at the end of the interpreter, if nobody else does."""
    _lookers.add(engine)
    with _registry_lock:
        _end_as_a_child()


def tell_at_end(telling: Telling) -> None:
    """Have the end of the interpreter wait a while for what is still to be told."""
    _telling.add(telling)


def release(engine: Engine) -> None:
    """Give one handle's share back; the last one closes the file."""
    with _registry_lock:
        engine.handles -= 1
        if engine.handles > 0 or engine.forked:
            return
        if not _forget(engine) and engine not in _lookers:
            return  # the end of the interpreter closes it, in another thread
        _lookers.discard(engine)
        engine.close()


def _forget(engine: Engine) -> bool:
    """Take an engine out of those that can be found; whether it was among them."""
    keys = [key for key, value in _engines.items() if value is engine]
    for key in keys:
        del _engines[key]
    return bool(keys)


@atexit.register
def _close_all() -> None:
    """A normal end of the interpreter waits for what is to be told, hands leases back, flushes."""
    with _registry_lock:
        engines = [*_engines.values()]
    for engine in engines:
        with contextlib.suppress(Exception):
            engine.judge_late(lambda holder: True)
    until_s = time.monotonic() + _TELL_S
    for telling in list(_telling):
        telling.wait_told(until_s)
    with _registry_lock:
        engines = [*_engines.values(), *_lookers]
        _engines.clear()
        _lookers.clear()
    for engine in engines:
        with contextlib.suppress(Exception):
            engine.close()


class _Beginning:
    """What multiprocessing has to know something by, to call it when a process begins."""


_beginning = _Beginning()


def _end_as_a_child() -> None:
    """Have `_close_all` called at the normal end of a process of multiprocessing, too.

    One that was forked ends by `os._exit`, without what was registered for the interpreter's end;
    before that it runs the finalizers of multiprocessing.
    """
    global _ends_as_a_child
    # What is not imported has not started us.
    if _ends_as_a_child or "multiprocessing.process" not in sys.modules:
        return
    from multiprocessing import parent_process, util

    _ends_as_a_child = True
    if parent_process() is not None:
        _finalize(_beginning)
    else:
        # When such a process begins it forgets what was to be called at its end; the file may have
        # been opened by then, with a queue that was handed to it.
        util.register_after_fork(_beginning, _finalize)


def _finalize(_: _Beginning) -> None:
    global _ends_as_a_child
    from multiprocessing import util

    _ends_as_a_child = True
    # Below zero: after its own children have been waited for.
    util.Finalize(None, _close_after_threads, exitpriority=-1)


def _close_after_threads() -> None:
    # Up to Python 3.12 the finalizers run before the threads are waited for. A thread of ours
    # that is no daemon is waited for with them, and after what ends the workers of a pool.
    if _working():
        threading.Thread(target=_wait_and_close, name="weclaw-end", daemon=False).start()
    else:
        _close_all()


def _wait_and_close() -> None:
    while working := _working():
        for thread in working:
            thread.join()
    _close_all()


def _working() -> list[threading.Thread]:
    """The threads that the end of the process waits for, but for the two that bring it about."""
    ending = (threading.main_thread(), threading.current_thread())
    return [t for t in threading.enumerate() if not t.daemon and t not in ending]


def _before_fork() -> None:
    # No thread may be inside LMDB or the log while memory is copied: the child would find a
    # transaction that is not its own, and closing it would release the parent's lock.
    _registry_lock.acquire()
    for engine in _engines.values():
        engine._lock.acquire()


def _after_fork_in_parent() -> None:
    for engine in _engines.values():
        engine._lock.release()
    _registry_lock.release()


def _after_fork_in_child() -> None:
    global _registry_lock, _ends_as_a_child
    _registry_lock = threading.RLock()
    _ends_as_a_child = False
    engines = list(_engines.values())
    _engines.clear()
    for engine in engines:
        engine._lock = threading.Lock()
        engine._sync_lock = threading.Lock()
        engine.abandon()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
