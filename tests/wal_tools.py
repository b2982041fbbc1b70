"""What the tests of the log share: opening one, and a disk that can lose power."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weclaw_embedded import _files
from weclaw_embedded.wal import COMMIT, TAIL, Frame, Log, LogState, Recovery, read_file_header

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
    log.state.words[COMMIT] = max(log.state.words[COMMIT], tail)


def settle(log: Log) -> None:
    """Take freed slots through their steps, as the layer above does, so that all may be reused."""
    sync(log)
    announced = log.announce()
    log.sync()
    log.settled(announced)


def frames(log: Log, **how: object) -> list[Frame]:
    return list(log.frames(log.head_offset, log.state.words[TAIL], **how))  # type: ignore[arg-type]


def bodies(log: Log) -> list[bytes]:
    """Every record kept, in order, damage passed over."""
    return [body for frame in frames(log, on_damage=lambda *_: None) for _, body in frame.records]


class Disk:
    """A file on a disk that loses power or fails a sync, sector by sector.

    What wasn't synced may be on the disk or not, each sector for itself.  A failed sync leaves
    the sectors it didn't write clean, as the kernel does: readable until the cache is dropped,
    and never written again by themselves.
    """

    SECTOR = 512

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.durable = bytearray(path.read_bytes())
        self.durable_size = len(self.durable)
        self.dirty: set[int] = set()
        self.n_syncs = 0
        self.failing: random.Random | None = None
        for name in ("write_at", "zero_fill", "punch", "truncate", "sync_data", "drop_cache"):
            monkeypatch.setattr(_files, name, self._wrapped(name, getattr(_files, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if name == "sync_data":
                return self._sync()
            if name == "drop_cache":
                return self._drop_cache()
            result = real(fd, *args)
            if name == "write_at":
                self._touch(args[1], result)
            elif name in ("zero_fill", "punch"):
                self._touch(args[0], args[1])
            return result

        return call

    def _touch(self, offset: int, n: int) -> None:
        self.dirty.update(range(offset // self.SECTOR, -(-(offset + n) // self.SECTOR)))

    def _store(self, sectors: Iterable[int], now: bytes) -> None:
        self.durable.extend(bytes(max(0, len(now) - len(self.durable))))
        for sector in sectors:
            at = sector * self.SECTOR
            piece = now[at : at + self.SECTOR]
            self.durable[at : at + len(piece)] = piece

    def _sync(self) -> None:
        now = self.path.read_bytes()
        self.n_syncs += 1
        if self.failing is not None:
            rng = self.failing
            self._store([n for n in self.dirty if rng.random() < 0.5], now)
            self.dirty.clear()
            raise OSError(5, "Input/output error")
        self._store(self.dirty, now)
        self.dirty.clear()
        self.durable_size = len(now)

    def _drop_cache(self) -> None:
        now = bytearray(self.path.read_bytes())
        for at in range(0, min(len(now), len(self.durable)), self.SECTOR):
            if at // self.SECTOR not in self.dirty:
                now[at : at + self.SECTOR] = self.durable[at : at + self.SECTOR]
        self._replace_content(bytes(now))

    def cut_power(self, rng: random.Random) -> None:
        """Leave of what wasn't synced any part, and the file's size old or new."""
        now = self.path.read_bytes()
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        self._store([n for n in self.dirty if rng.random() < share], now)
        self.dirty.clear()
        self.durable_size = rng.choice((len(now), self.durable_size))
        self.durable = self.durable[: self.durable_size].ljust(self.durable_size, b"\0")
        self._replace_content(bytes(self.durable))

    def _replace_content(self, content: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.write(content)
            file.truncate(len(content))


class Killed(BaseException):
    """Where the process would have died."""


class DeadlyCalls:
    """Changes of the file of which the n-th is done in part, and then the process dies.

    Or, with `error`, fails with that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.rng = rng
        self.left = -1
        self.error: BaseException = Killed()
        for name in ("write_at", "zero_fill", "truncate", "punch"):
            monkeypatch.setattr(_files, name, self._wrapped(name, getattr(_files, name)))

    def arm(self, n: int, error: BaseException | None = None) -> None:
        self.left = n
        self.error = error or Killed()

    def disarm(self) -> None:
        self.left = -1

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            self.left -= 1
            if self.left:
                return real(fd, *args)
            if name == "write_at":
                data = b"".join(args[0])
                n = self.rng.randint(0, len(data))
                if n:
                    real(fd, [data[:n]], args[1])
            elif name == "zero_fill":
                real(fd, args[0], self.rng.randint(0, args[1]))
            elif self.rng.random() < 0.5:
                real(fd, *args)
            raise self.error

        return call
