"""weclawctl as a process, letters to look at, and a terminal of 80 by 24 to look at it in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.processes import SOURCE, environment

import weclaw_embedded as weclaw

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, "-m", "weclaw_embedded.cli"]

__all__ = ["COMMAND", "ROOT", "SOURCE", "Terminal", "kill_letters", "start", "until"]


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    """weclawctl in a process of its own, with pipes to talk to it."""
    return subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment(),
        **options,
    )


def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true answer; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def kill_letters(
    file: Path, *bodies: Any, reason: str = "blocked by policy", **place: Any
) -> list[str]:
    """Put messages and fail them at once; their ids."""
    with weclaw.Queue(file, consumer="a test", **place) as q:
        ids = q.put_many(list(bodies))
        for _ in bodies:
            q.get(timeout=5).fail(reason)
    return ids


class Terminal:
    """weclawctl on a terminal of 24 lines."""

    def __init__(self, *words: object, cwd: Path | None = None, columns: int = 80) -> None:
        self.fd, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        env = {**environment(), "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            env.pop(name, None)
        self.child = subprocess.Popen(
            [*COMMAND, *map(str, words)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)
        self.raw = ""

    def read(self, seconds: float) -> str:
        """What was written in that time, or until it ended, as plain text."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.fd], [], [], left)[0]:
                break
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            self.raw += data.decode("utf-8", "replace")
        return self.text

    @property
    def text(self) -> str:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", self.raw)
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def wait_for(self, pattern: str, seconds: float = 30.0) -> re.Match[str]:
        """Read until the pattern is there."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(pattern, self.text)
            if found:
                return found
            self.read(0.1)
        raise AssertionError(f"{pattern!r} did not come:\n{self.text}")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """Wait for the end; the exit status."""
        deadline = time.monotonic() + 30
        while self.child.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        self.read(0.2)
        return self.child.wait(timeout=1)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        with contextlib.suppress(OSError):
            os.close(self.fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
