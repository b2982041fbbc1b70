"""A process that kills itself at its k-th call to the operating system, or its k-th line.

`_files`, `_names` and `_locks` are the library's only door to the operating system, so the `os` and
`fcntl` they see are replaced by counting ones in the child. "half" writes the first half
of what was to be written before the kill.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGING = frozenset(
    [
        "chmod",
        "chown",
        "close",
        "copy_file_range",
        "fallocate",
        "fchmod",
        "fchown",
        "fdatasync",
        "fsync",
        "ftruncate",
        "link",
        "mkdir",
        "mkfifo",
        "open",
        "posix_fadvise",
        "posix_fallocate",
        "pwrite",
        "pwritev",
        "remove",
        "rename",
        "replace",
        "rmdir",
        "truncate",
        "unlink",
        "write",
        "writev",
    ]
)
LOCKING = frozenset({"fcntl", "flock", "lockf"})


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Calls:
    """Counts the calls; at the `at`-th the process dies, before, half way or after."""

    def __init__(self, at: int, moment: str) -> None:
        self.at, self.moment, self.calls = at, moment, 0

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls != self.at:
                return real(*args, **kwargs)
            if self.moment == "before":
                _die()
            if self.moment == "half":
                if name == "pwrite":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                elif name == "pwritev":
                    whole = b"".join(bytes(piece) for piece in args[1])
                    real(args[0], [whole[: len(whole) // 2]], *args[2:])
                elif name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                _die()
            result = real(*args, **kwargs)
            _die()
            return result

        return counted

    def module(self, real: types.ModuleType, names: frozenset[str]) -> types.ModuleType:
        double = types.ModuleType(real.__name__)
        double.__dict__.update(real.__dict__)
        for name in names & set(dir(real)):
            setattr(double, name, self.wrap(name, getattr(real, name)))
        return double


class Lines:
    """Counts the lines of the library that run in any thread; dies at the `at`-th."""

    def __init__(self, at: int, package: str) -> None:
        self.at, self.calls, self.package = at, 0, package

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "call":
            return self.trace if frame.f_code.co_filename.startswith(self.package) else None
        if event == "line":
            self.calls += 1
            if self.calls == self.at:
                _die()
        return self.trace


def arm(kind: str, at: int, moment: str) -> Calls | Lines:
    """From here on this process counts, and dies at the `at`-th (0: only counts)."""
    import threading

    import weclaw_embedded

    if kind == "lines":
        lines = Lines(at, str(Path(weclaw_embedded.__file__).parent))
        threading.settrace(lines.trace)
        sys.settrace(lines.trace)
        return lines
    from weclaw_embedded import _files, _locks, _names

    calls = Calls(at, moment)
    for door in (_files, _names):
        door.os = calls.module(door.os, CHANGING)
    for door in (_files, _locks):
        door.fcntl = calls.module(door.fcntl, LOCKING)
    return calls
