"""What the tests of the log share: opening one, and a disk that can lose power."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weclaw_embedded import _files
from weclaw_embedded.wal import TAIL, Frame, Log, LogState, Recovery, read_file_header

SEGMENT = 64 << 10
STORE_ID = bytes(range(16))
SYNC = 2


def create(path: Path, segment_bytes: int = SEGMENT) -> Path:
    Log.create(str(path), segment_bytes=segment_bytes, store_id=STORE_ID, created_us=1)
    return path


def attach(path: Path, state: LogState | None = None, *, readonly: bool = False) -> Log:
    """A Log over the file, not yet recovered."""
    fd = _files.open_ro(str(path)) if readonly else _files.open_rw(str(path))
    return Log(fd, read_file_header(fd, str(path)), state or LogState(), readonly=readonly)


@contextmanager
def opened(path: Path, **how: object) -> Iterator[tuple[Log, Recovery]]:
    """A recovered log, closed at the end."""
    log = attach(path)
    try:
        yield log, log.recover(**how)  # type: ignore[arg-type]
    finally:
        _files.close(log.fd)


def put(log: Log, *bodies: bytes, time_us: int = 1000, spare: bool = False) -> list[int]:
    """Append and write one frame of these records."""
    offsets = log.append([(body,) for body in bodies], SYNC, time_us, spare=spare)
    log.write()
    return offsets


def sync(log: Log) -> None:
    """Sync, and raise the commit point as the layer above does."""
    tail = log.state.words[TAIL]
    log.sync()
    log.state.words[1] = max(log.state.words[1], tail)


def frames(log: Log, **how: object) -> list[Frame]:
    return list(log.frames(log.head_offset, log.state.words[TAIL], **how))  # type: ignore[arg-type]


def bodies(log: Log) -> list[bytes]:
    """Every record kept, in order, damage passed over."""
    return [body for frame in frames(log, on_damage=lambda *_: None) for _, body in frame.records]


class Disk:
    """A file on a disk that loses power: what wasn't synced may be there or not, by sectors."""

    SECTOR = 512

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.durable = path.read_bytes()
        self.n_syncs = 0
        self.failing = False
        self.before_call: Callable[[str], None] = lambda name: None
        for name in ("write_at", "zero_fill", "truncate", "punch", "sync_data"):
            monkeypatch.setattr(_files, name, self._wrapped(name, getattr(_files, name)))

    def _wrapped(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(fd: int, *args: object) -> object:
            self.before_call(name)
            if name != "sync_data":
                return real(fd, *args)
            if self.failing:
                raise OSError(5, "Input/output error")
            self.durable = self.path.read_bytes()
            self.n_syncs += 1
            return None

        return call

    def cut_power(self, rng: random.Random) -> None:
        """Leave of what wasn't synced any part, and the file's size old or new."""
        now = self.path.read_bytes()
        size = max(len(now), len(self.durable))
        new, old = now.ljust(size, b"\0"), self.durable.ljust(size, b"\0")
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        image = bytearray(old)
        for at in range(0, size, self.SECTOR):
            if rng.random() < share:
                image[at : at + self.SECTOR] = new[at : at + self.SECTOR]
        final = rng.choice((len(now), len(self.durable)))
        self.durable = bytes(image[:final])
        with open(self.path, "r+b") as file:
            file.write(self.durable)
            file.truncate(final)
            os.fsync(file.fileno())
