"""Case 33: a stopped replica holds nobody up."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.replica_tools import level, same, send_signal


def test_a_replica_stopped_for_20000_puts_holds_nobody_up(
    open_queue: Callable[..., Any], path: Path, tmp_path: Path
) -> None:
    """The puts go on as fast, memory stays as small, and the copies are equal afterwards."""
    copy = tmp_path / "copy.wq"
    q = open_queue(replica=copy, sync_replica=False, flush="batch")
    for n in range(200):
        q.put(n)
    q.flush()
    level(q)
    pid = send_signal(copy, signal.SIGSTOP)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = 0.0
    try:
        for n in range(20_000):
            began = time.monotonic()
            q.put({"n": n, "text": "x" * 200})
            slowest = max(slowest, time.monotonic() - began)
        assert q.stats().replica_lag > 4_000_000
    finally:
        os.kill(pid, signal.SIGCONT)
    assert slowest < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10
    q.flush()
    level(q)
    q.close()
    assert same(path, copy) > 20_000
