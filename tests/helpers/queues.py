"""Small things said often about queues."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import weclaw_embedded as weclaw

NO_WAIT = weclaw.RetryPolicy(backoff=0.0)


def scratch(path: Path | str) -> Path:
    return Path(str(path) + ".d")


def drain(q: Any, limit: int = 1_000_000, timeout: float = 0.0) -> list[Any]:
    """Take and acknowledge all there is; the bodies in the order they came."""
    bodies = []
    while len(bodies) < limit:
        try:
            msg = q.get(timeout=timeout) if timeout else q.get(block=False)
        except weclaw.Empty:
            break
        bodies.append(msg.body)
        msg.ack()
    return bodies


def take(q: Any, n: int = 1_000_000) -> list[Any]:
    """Take all there is, settle nothing; the messages."""
    messages = []
    while len(messages) < n:
        try:
            messages.append(q.get(block=False))
        except weclaw.Empty:
            break
    return messages


def eventually(question: Callable[[], Any], timeout: float = 10.0, what: str = "") -> Any:
    """The first true answer; generous, because the machine may be busy with other things."""
    end = time.monotonic() + timeout
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what or question}")
        time.sleep(0.01)


def disk_bytes(path: Path | str) -> int:
    """What a file really takes on the disk."""
    return os.stat(path).st_blocks * 512


def unsettled(q: Any) -> int:
    s = q.stats()
    return int(s.ready + s.delayed + s.leased)
