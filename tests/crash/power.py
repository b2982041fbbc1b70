"""A disk that can lose power: what the library asked of it is written down, and later the states
it could have been left in are built from that.

`Recorder` listens at `_files` and `_names`, the door to the operating system: every write, size,
hole, sync and change of a name of the queue's file (and of the temporary ones it is made from)
becomes an event, in order, with what the workload says in between. For any moment k of that history
`Disk.state` builds a state that a power cut at k may leave:

- what a sync that returned before k covered is there;
- of all else each sector of 512 bytes may be as it was or as it was written since, for itself;
- the size may be any it had since, names may be those at any moment since the directory was synced.

The scratch folder is derived, and its index is written by LMDB past the door: it is copied now and
then as it is, and pages of the copy are spoilt where nothing says that they were synced.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import struct
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.crash.ledger import Ledger

from weclaw_embedded import _clock, _files, _names

SECTOR = 512
PAGE = 4096
Event = tuple[Any, ...]


class Recorder:
    """Writes down what happens to the files of one directory; any thread may call."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
        self.directory = str(directory.resolve())
        self.events: list[Event] = []
        self.done: dict[int, int] = {}  # number of a change -> events when it returned
        self.snapshots: dict[int, Path] = {}  # number of an event -> copy of the scratch folder
        self.share_of_snapshots = 0.0
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._ours: dict[tuple[int, int], bool] = {}
        self._place = directory.parent / f"{directory.name} snapshots"
        double = types.ModuleType("os")
        double.__dict__.update(os.__dict__)
        for name in ("pwrite", "pwritev", "ftruncate", "fdatasync", "fsync"):
            setattr(double, name, self._on_fd(name, getattr(os, name)))
        for name in ("open", "link", "unlink", "replace"):
            setattr(double, name, self._on_name(name, getattr(os, name)))
        for door in (_files, _names):
            monkeypatch.setattr(door, "os", double)
        monkeypatch.setattr(_files, "punch", self._punch(_files.punch))

    # -- hearing -------------------------------------------------------------------------------

    def say(self, child: str) -> Callable[..., None]:
        """What a worker reports goes into the same history."""
        return lambda *event: self._note(("said", child, *event)) and None

    def _note(self, event: Event) -> int:
        with self._lock:
            number = len(self.events)
            self.events.append(event)
            if self._rng.random() < self.share_of_snapshots:
                self._snapshot(number)
            return number

    def _snapshot(self, number: int) -> None:
        for scratch in Path(self.directory).glob("*.d"):
            copy = self._place / str(number)
            with contextlib.suppress(FileNotFoundError, shutil.Error):
                shutil.copytree(scratch, copy, ignore=_no_pipes)
                _carry_mark(scratch / "index", copy / "index")
            self.snapshots[number] = copy

    def _is_ours(self, fd: int) -> tuple[int, bool]:
        """(inode, whether it is the queue's file or one it is made from)."""
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        if key not in self._ours:
            path = os.readlink(f"/proc/self/fd/{fd}")
            inside = os.path.dirname(path) == self.directory
            self._ours[key] = inside and stat.S_ISREG(found.st_mode)
        return found.st_ino, self._ours[key]

    def _on_fd(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if name in ("fdatasync", "fsync"):
                return self._sync(real, fd)
            inode, ours = self._is_ours(fd)
            if not ours:
                return real(fd, *args)
            if name == "pwrite":
                event: Event = ("write", inode, args[1], bytes(args[0]))
            elif name == "pwritev":
                event = ("write", inode, args[1], b"".join(map(bytes, args[0])))
            else:
                event = ("size", inode, args[0])
            number = self._note(event)
            result = real(fd, *args)
            self.done[number] = len(self.events)
            return result

        return call

    def _sync(self, real: Callable[..., Any], fd: int) -> None:
        begun = len(self.events)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            real(fd)
            if os.readlink(f"/proc/self/fd/{fd}") == self.directory:
                self._note(("names synced", begun))
            return
        inode, ours = self._is_ours(fd)
        real(fd)
        if ours:
            self._note(("synced", inode, begun))

    def _punch(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def call(fd: int, offset: int, n: int) -> bool:
            inode, ours = self._is_ours(fd)
            if not ours:
                return real(fd, offset, n)
            number = self._note(("write", inode, offset, bytes(n)))
            result = real(fd, offset, n)
            self.done[number] = len(self.events)
            return result

        return call

    def _on_name(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: str, *args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[0] & os.O_CREAT:
                return real(path, *args, **kwargs)
            target = args[0] if name in ("link", "replace") else path
            if os.path.dirname(os.path.abspath(target)) != self.directory:
                return real(path, *args, **kwargs)
            own = os.path.basename(target)
            inode = os.stat(path).st_ino if name in ("link", "replace") else 0
            with self._lock:
                result = real(path, *args, **kwargs)
                if name == "open":
                    self._note(("name", own, os.fstat(result).st_ino))
                elif name == "unlink":
                    self._note(("name", own, None))
                else:
                    self._note(("name", own, inode))
                    if name == "replace":
                        self._note(("name", os.path.basename(path), None))
            return result

        return call


def _no_pipes(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(("wake-", "index.mdb-lock"))]


def _carry_mark(index: Path, copy: Path) -> None:
    """The mark of a clean close names inode and time of the index: those of the copy's now."""
    with contextlib.suppress(FileNotFoundError, struct.error):
        marked = struct.unpack("<QQQ", (copy / "clean").read_bytes())
        was, is_now = os.stat(index / "index.mdb"), os.stat(copy / "index.mdb")
        if marked == (was.st_ino, was.st_mtime_ns, was.st_size):
            mark = struct.pack("<QQQ", is_now.st_ino, is_now.st_mtime_ns, is_now.st_size)
            (copy / "clean").write_bytes(mark)


# The states a disk may be left in -----------------------------------------------------------


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, Event]] = field(default_factory=list)


class Disk:
    """The history of a recorder, cut at a moment."""

    def __init__(self, recorder: Recorder, k: int) -> None:
        self.k = k
        self.files: dict[int, _File] = {}
        self.names: dict[str, int | None] = {}
        self.pending_names: list[tuple[int, Event]] = []
        for number, event in enumerate(recorder.events[:k]):
            kind = event[0]
            if kind in ("write", "size"):
                self.files.setdefault(event[1], _File()).pending.append((number, event))
            elif kind == "name":
                self.pending_names.append((number, event))
            elif kind == "synced":
                file = self.files.setdefault(event[1], _File())
                left = []
                for one, change in file.pending:
                    if recorder.done.get(one, k + 1) <= event[2]:
                        _apply(file.durable, change)
                    else:
                        left.append((one, change))
                file.pending = left
            elif kind == "names synced":
                covered = [c for n, c in self.pending_names if n < event[1]]
                for change in covered:
                    self.names[change[1]] = change[2]
                self.pending_names = self.pending_names[len(covered) :]

    def unsynced(self) -> int:
        """How many changes a power cut here may take or leave."""
        return sum(len(file.pending) for file in self.files.values()) + len(self.pending_names)

    def state(self, rng: random.Random) -> dict[str, bytes]:
        """The names and contents that one power cut leaves."""
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        names = dict(self.names)
        for _, change in self.pending_names[: rng.randint(0, len(self.pending_names))]:
            names[change[1]] = change[2]
        built = {inode: self._content(file, share, rng) for inode, file in self.files.items()}
        return {name: built.get(inode, b"") for name, inode in names.items() if inode is not None}

    def _content(self, file: _File, share: float, rng: random.Random) -> bytes:
        content = bytearray(file.durable)
        sizes = [len(content)]
        # In order, or as if the disk had all of it up to some write and a torn part of that one.
        prefix = rng.randint(0, len(file.pending)) if rng.random() < 0.4 else None
        for n, (_, change) in enumerate(file.pending):
            if change[0] == "size":
                if (prefix is None and rng.random() < share) or (prefix is not None and n < prefix):
                    _apply(content, change)
                sizes.append(change[2])
                continue
            if prefix is not None:
                if n < prefix:
                    _apply(content, change)
                elif n == prefix:
                    _tear(content, change, 0.5, rng)
                continue
            _tear(content, change, share, rng)
            sizes.append(max(sizes[-1], change[2] + len(change[3])))
        if rng.random() < 0.3:
            size = rng.choice(sizes)
            content = content[:size].ljust(size, b"\0")
        return bytes(content)


def _apply(content: bytearray, change: Event) -> None:
    if change[0] == "size":
        n = change[2]
        content[:] = content[:n].ljust(n, b"\0")
        return
    _, _, offset, data = change
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


def _tear(content: bytearray, change: Event, share: float, rng: random.Random) -> None:
    """Bring a part of the sectors of a write to the disk."""
    _, inode, offset, data = change
    at = offset
    while at < offset + len(data):
        end = min((at // SECTOR + 1) * SECTOR, offset + len(data))
        if rng.random() < share:
            _apply(content, ("write", inode, at, data[at - offset : end - offset]))
        at = end


# What was promised by then ------------------------------------------------------------------

_SYNCED = {"put", "ack", "nack", "fail", "tx"}


def promised(recorder: Recorder, k: int, flush: str, *, alone: bool = True) -> Ledger:
    """What had been said at moment k, with all that a power cut may take back made doubtful.

    `alone`: with only one handle in the process, closing it closes the file.
    """
    heard = [
        (number, event[1], event[2:])
        for number, event in enumerate(recorder.events[:k])
        if event[0] == "said"
    ]
    return surely(heard, flush, alone=alone, in_order=True)


def surely(
    heard: list[tuple[int, str, Event]], flush: str, *, alone: bool, in_order: bool
) -> Ledger:
    """The ledger of (number, child, event), with what a power cut may take back made doubtful.

    A confirmed call that waited for the disk makes everything durable that was written before it
    was announced, because recovery keeps a prefix: whoever wrote it, if they were heard `in_order`
    of their speaking, else what the same child said.
    """
    announced: dict[str, int] = {}
    begun: dict[int, int] = {}  # number of a confirmation -> that of its announcement
    horizons: dict[str, int] = {}
    waited: set[int] = set()  # confirmations of calls that waited for the disk themselves
    for number, child, event in heard:
        what = event[0]
        if what.endswith("?"):
            announced[child] = number
        elif what != "got":
            begun[number] = announced.pop(child, number)
            durable = (
                what == "flush"
                or (what == "close" and alone)
                or (flush == "sync" and what in _SYNCED)
                or (flush == "sync" and what == "cancel" and event[2])
            )
            if durable:
                who = "" if in_order else child
                horizons[who] = max(horizons.get(who, -1), begun[number])
                waited.add(number)

    def horizon(child: str) -> int:
        return horizons.get("" if in_order else child, -1)

    confirmed = {
        begun[number]: number
        for number, child, _ in heard
        if number in begun and (number in waited or number < horizon(child))
    }
    open_calls = {
        number for number, _, event in heard if event[0].endswith("?") and number not in confirmed
    }
    kept = {number for number, child, _ in heard if number <= horizon(child)}
    doubt = _Doubt(heard, open_calls, set(confirmed.values()), kept)
    ledger = Ledger()
    for number, child, event in heard:
        if event[0] == "got" and number not in kept:
            ledger.hear(child, ("is", event[1], event[2]))
        elif event[0] == "put" and begun[number] not in confirmed:
            for token, task in zip(event[1], event[2], strict=True):
                ledger.hear(f"{child}~", ("is", token, task))
        elif number in open_calls:
            # A call that returned counts as one that did not: as the last of a child of its own.
            for n, part in enumerate(doubt.parts(event)):
                ledger.hear(f"{child}~{number}.{n}", part)
        elif number not in begun or begun[number] in confirmed:
            *apart, seen = doubt.seen_parts(event)
            for n, part in enumerate(apart):  # whose order beside the others can't be told
                ledger.hear(f"{child}~{number}.{n}", part)
            ledger.hear(child, seen)
    return ledger


class _Doubt:
    """What the checker can't hold a power cut against: steps of which it can't see every part,
    because a message in them may be settled already, or one to be settled may be lost.
    """

    def __init__(
        self,
        heard: list[tuple[int, str, Event]],
        open_calls: set[int],
        returned: set[int],
        kept: set[int],
    ) -> None:
        token_of: dict[str, str] = {}
        self.sure: set[str] = set()  # ids whose put is durable
        self.counted: dict[str, int] = {}  # id -> its last delivery that is durable
        for number, _, event in heard:
            if event[0] == "put":
                token_of.update(zip(event[2], event[1], strict=True))
                if number in returned:
                    self.sure.update(event[2])
            elif event[0] == "got":
                token_of[event[2]] = event[1]
                if number in kept:
                    self.sure.add(event[2])
                    last = self.counted.get(event[2], 0)
                    self.counted[event[2]] = max(last, event[3][0])
        # Ids that were put once more: if the first was gone, there are two lives of one name.
        self.again = {event[1] for _, _, event in heard if event[0] == "again?"}
        self.vanished = {
            token_of[event[1]]
            for number, _, event in heard
            if number in open_calls
            and event[0] in ("ack?", "tx?", "cancel?")
            and event[1] in token_of
        }

    def parts(self, event: Event) -> list[Event]:
        """A call in doubt as the checker is to see it."""
        if event[0] == "put?" and self.vanished.intersection(event[1]):
            return [("put?", [t], [o]) for t, o in zip(event[1], event[2], strict=True)]
        if event[0] != "tx?":
            return [event]
        _, task, delivery, tokens, topics = event
        if self.vanished.intersection(tokens) or task not in self.sure or task in self.again:
            puts = [
                ("put?", [token], [{"topic": topic or "default"}])
                for token, topic in zip(tokens, topics, strict=True)
            ]
            return [("ack?", task, delivery), *puts]
        counted = self.counted.get(task, 0)
        if counted != delivery:
            # Its delivery may be lost, and its number used again.
            return [("ack?", task, delivery), ("tx?", task, counted, tokens, topics)]
        return [event]

    def seen_parts(self, event: Event) -> list[Event]:
        """A durable call as the checker is to see it: without what may be settled already."""
        if event[0] not in ("tx", "tx?"):
            return [event]
        keep = [n for n, token in enumerate(event[3]) if token not in self.vanished]
        lists = [[values[n] for n in keep] for values in event[3:]]
        seen: list[Event] = [(*event[:3], *lists)]
        if event[0] == "tx?":
            gone = [n for n in range(len(event[3])) if n not in keep]
            seen[:0] = [
                ("put?", [event[3][n]], [{"topic": event[4][n] or "default"}]) for n in gone
            ]
        return seen


# Putting a state in place -------------------------------------------------------------------


def put_in_place(
    state: dict[str, bytes],
    recorder: Recorder,
    k: int,
    scratch: str,
    directory: Path,
    rng: random.Random,
) -> None:
    """Write the files of a state, with the scratch folder in a state of its own."""
    directory.mkdir(parents=True)
    for name, content in state.items():
        (directory / name).write_bytes(content)
        (directory / name).chmod(0o600)
    copy = recorder.snapshots.get(k)
    if scratch == "missing" or copy is None or not copy.exists():
        return
    (name,) = {Path(path).name for path in Path(recorder.directory).glob("*.d")}
    target = directory / name
    shutil.copytree(copy, target)
    index = target / "index"
    was = copy / "index"
    if (index / "index.mdb").exists():
        shutil.copystat(was / "index.mdb", index / "index.mdb")
        _carry_mark(was, index)
    if not (index / "clean").exists():
        spoil(index / "index.mdb", rng)


def spoil(path: Path, rng: random.Random) -> None:
    """Take pages of a file back that were perhaps never synced."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for page in range(size // PAGE):
            if rng.random() < 0.3:
                file.seek(page * PAGE)
                file.write(rng.choice((bytes(PAGE), rng.randbytes(PAGE))))


@contextlib.contextmanager
def next_boot(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Iterator[None]:
    """The machine has come up again: another boot, whose clocks begin anew."""
    boot = rng.randbytes(16)
    up_us = rng.randrange(10**6, 10**12)
    begun = _clock.boottime_us()
    boottime, monotonic = _clock.boottime_us, _clock.monotonic_ns
    with monkeypatch.context() as patch:
        patch.setattr(_clock, "boot_id", lambda: boot)
        patch.setattr(_clock, "boottime_us", lambda: boottime() - begun + up_us)
        patch.setattr(_clock, "monotonic_ns", lambda: monotonic() - begun * 1000 + up_us * 1000)
        yield
