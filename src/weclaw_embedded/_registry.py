"""One engine for each file of this process, and what happens to them at a fork and at the end.

Role: handles ask here for the engine of a path and give it back here. LMDB and locks both break
when a process opens a file twice, so nobody else may make an engine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
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
    global _registry_lock
    _registry_lock = threading.RLock()
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
