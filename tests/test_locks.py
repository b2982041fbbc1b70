"""Locks on open files: whom they shut out and what ends them, with real files and processes."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from weclaw_embedded import _files, _locks


@pytest.fixture
def file(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    fd = _files.open_rw(str(path))
    yield fd
    _files.close(fd)


def test_locks_exclude_other_open_files_and_not_their_own(file: int, tmp_path: Path) -> None:
    """A lock belongs to the open file: a second open of it is somebody else, in one process too."""
    other = _files.open_rw(str(tmp_path / "file"))
    try:
        far = 1 << 62
        assert _locks.try_lock(file, far, True)
        assert not _locks.try_lock(other, far, False)
        assert _locks.is_locked(other, far)
        assert not _locks.is_locked(file, far)
        assert _locks.try_lock(other, far + 1, True)
        assert _locks.try_lock(file, far, False)  # down to shared
        assert _locks.try_lock(other, far, False)
        assert not _locks.try_lock(file, far, True)
        _locks.unlock(other, far)
        assert _locks.try_lock(file, far, True)
    finally:
        _files.close(other)
    assert not _locks.is_locked(file, far + 1)


def test_the_lock_taken_most_is_one_of_the_open_file_apart_from_those_of_bytes(
    file: int, tmp_path: Path
) -> None:
    """It shuts out other open files of the same path until it is given back, also to one who does
    not have it, dies with its process, and is in the way of no byte's lock.
    """
    other = _files.open_rw(str(tmp_path / "file"))
    lock, unlock = _locks.bound_lock(file, 7)
    took = threading.Event()

    def take() -> None:
        _locks.bound_lock(other, 7)[0]()
        took.set()

    thread = threading.Thread(target=take, daemon=True)
    try:
        lock()
        _locks.bound_lock(other, 7)[1]()  # it has nothing to give back
        thread.start()
        assert _locks.try_lock(other, 8, True)
        assert not took.wait(0.1)
        unlock()
        assert took.wait(10)
    finally:
        _files.close(other)
        thread.join(10)
    code = (
        "import os, signal\n"
        "from weclaw_embedded import _files, _locks\n"
        f"fd = _files.open_rw({str(tmp_path / 'file')!r})\n"
        "_locks.bound_lock(fd, 7)[0]()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    lock()
    unlock()


def test_a_lock_dies_with_its_process(file: int, tmp_path: Path) -> None:
    """After kill -9 the lock can be taken at once, and who waits for it gets it."""
    code = (
        "import sys, time\n"
        "from weclaw_embedded import _files, _locks\n"
        f"fd = _files.open_rw({str(tmp_path / 'file')!r})\n"
        "_locks.lock(fd, 99, True)\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == b"locked\n"
        assert _locks.is_locked(file, 99)
        assert not _locks.try_lock(file, 99, True)
        threading.Timer(0.2, child.kill).start()
        began = time.monotonic()
        _locks.lock(file, 99, True)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("bound", [False, True], ids=["a byte's", "the bound one"])
def test_ctrl_c_interrupts_waiting_for_a_lock(file: int, tmp_path: Path, bound: bool) -> None:
    """A signal handler that raises ends the wait, and the lock isn't taken."""

    class RangError(Exception):
        pass

    def ring(*_: object) -> None:
        raise RangError

    other = _files.open_rw(str(tmp_path / "file"))
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        (_locks.bound_lock(other, 5)[0] if bound else lambda: _locks.lock(other, 5, True))()
        timer = threading.Timer(
            0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        )
        timer.start()
        with pytest.raises(RangError):
            (_locks.bound_lock(file, 5)[0] if bound else lambda: _locks.lock(file, 5, True))()
        timer.join()
        if bound:
            _locks.bound_lock(other, 5)[1]()
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody has it
        else:
            _locks.unlock(other, 5)
            assert not _locks.is_locked(other, 5)
    finally:
        signal.signal(signal.SIGUSR1, before)
        _files.close(other)
