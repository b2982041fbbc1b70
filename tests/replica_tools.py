"""What the tests of the replica share: looking at both files, finding and stopping receivers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.processes import SOURCE

import weclaw_embedded as weclaw
from weclaw_embedded import _files, _locks, _survey
from weclaw_embedded._opening import RECEIVER

RECEIVER_CODE = (
    f"import sys; sys.path.insert(0, {str(SOURCE)!r}); "
    "from weclaw_embedded.replica import main; main()"
)


def command(copy: Path | str) -> list[str]:
    """A receiver as any command would start it."""
    return [sys.executable, "-c", RECEIVER_CODE, str(copy)]


def eventually(what: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What it returns once that is true."""
    until = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < until, "it has not come about in time"
        time.sleep(0.01)


def receivers(copy: Path | str) -> list[int]:
    """The processes that are receivers of this copy, zombies too."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(str(copy)) in words and any(b"replica" in word for word in words):
            found.append(int(name))
    return found


def is_received(copy: Path) -> bool:
    """Whether a receiver has the copy."""
    try:
        fd = _files.open_ro(str(copy))
    except FileNotFoundError:
        return False
    try:
        return _locks.is_locked(fd, RECEIVER)
    finally:
        _files.close(fd)


def send_signal(copy: Path, number: int) -> int:
    """Signal the receiver of this copy; its process id."""
    pid = eventually(lambda: receivers(copy))[0]
    os.kill(pid, number)
    return int(pid)


def kill_receiver(copy: Path) -> None:
    pid = send_signal(copy, signal.SIGKILL)
    eventually(lambda: pid not in receivers(copy))


def level(store: Any) -> None:
    """Wait until the replica has everything."""
    eventually(lambda: store.stats().replica_lag == 0)


def same(path: Path, copy: Path) -> int:
    """Both files have the same frames at the same offsets; how many."""
    with weclaw.open(path, readonly=True) as one, weclaw.open(copy, readonly=True) as other:
        compared = _survey.compare(one, other, _survey.end(one))
        assert compared.differences == []
        assert compared.behind == 0
        assert other.verify() == []
        return compared.frames


def bodies(path: Path) -> list[Any]:
    """The bodies that wait in a file, without changing it."""
    with weclaw.Queue(path, readonly=True) as q:
        return [msg.body for msg in q.peek(100_000)]
