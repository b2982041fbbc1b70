"""Where a copy may be, and where not: what must not be overwritten is refused, with a reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import Child
from tests.replica_tools import bodies, command, eventually, level, same

import weclaw_embedded as weclaw
from weclaw_embedded import _locks, _replicated, replica
from weclaw_embedded._copy import Copy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def open_queue(copy: Path, open_queue: Callable[..., Any]) -> Callable[..., Any]:
    """The same, closed before it is looked what is left behind."""
    return open_queue


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "small"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(words).returncode:
        pytest.skip("can't mount a small disk here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def put_at_last(q: Any, body: Any) -> None:
    """Put again until it is confirmed."""

    def put() -> bool:
        try:
            q.put(body)
        except weclaw.ReplicaUnavailableError:
            return False
        return True

    eventually(put, 60)


def refused(q: Any, word: str) -> None:
    """A put says why it is not confirmed."""
    until = time.monotonic() + 60
    while True:
        with pytest.raises(weclaw.ReplicaUnavailableError) as caught:
            q.put("refused")
        if word in str(caught.value):
            return
        assert time.monotonic() < until, str(caught.value)


@pytest.mark.parametrize("way", ["file", "command"])
def test_a_folder_that_is_not_there_yet(
    open_queue: Callable[..., Any],
    path: Path,
    copy: Path,
    way: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Puts say so and what to do, and go on once somebody has made it; nothing is said to be made
    before.
    """
    weclaw.Queue(path).close()
    place = copy.parent / "new" / "copy.wq"
    caplog.set_level("INFO", "weclaw_embedded")
    q = open_queue(replica=place if way == "file" else command(place), replica_timeout=0.5)
    refused(q, f"the folder {place.parent} does not exist")
    refused(q, "make the folder first, or check the path")
    assert "a copy is made" not in caplog.text
    assert f"the folder {place.parent} does not exist" in caplog.text
    place.parent.mkdir()
    put_at_last(q, 1)
    q.close()
    same(path, place)


def test_a_part_of_the_path_that_is_a_file(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    weclaw.Queue(path).close()
    copy.touch()
    q = open_queue(replica=copy / "copy.wq", replica_timeout=0.5)
    refused(q, "is a file, not a folder")


@pytest.mark.parametrize("way", ["file", "command"])
def test_a_new_file_whose_replica_has_no_folder_is_not_made(
    open_queue: Callable[..., Any], path: Path, copy: Path, way: str
) -> None:
    """The disk on which the copy is may only not be mounted, and then it has what the file had."""
    place = copy.parent / "new" / "copy.wq"
    address = place if way == "file" else command(place)
    with pytest.raises(weclaw.StorageError, match=r"does not exist.*make the folder first"):
        open_queue(replica=address)
    assert not path.exists()
    place.parent.mkdir()
    q = open_queue(replica=address)
    q.put(1)
    q.close()
    same(path, place)


@pytest.mark.parametrize("what", ["folder", "pipe", "device"])
@pytest.mark.parametrize("way", ["file", "command"])
def test_what_is_no_file_is_left_alone(
    open_queue: Callable[..., Any], path: Path, copy: Path, what: str, way: str
) -> None:
    """It is neither opened, which may block, nor replaced."""
    with weclaw.Queue(path) as q:
        q.put(1)
    if what == "folder":
        copy.mkdir()
    elif what == "pipe":
        os.mkfifo(copy)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root makes devices")
        os.mknod(copy, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    before = os.lstat(copy).st_mode
    q = open_queue(replica=copy if way == "file" else command(copy), replica_timeout=0.5)
    refused(q, "is not a file")
    q.close()
    assert os.lstat(copy).st_mode == before


def test_a_link_to_another_disk_stays_a_link(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """The copy is made where it leads, and promoted there."""
    real = copy.with_name("real.wq")
    copy.symlink_to(real)
    q = open_queue(replica=copy)
    q.put(1)
    q.close()
    assert copy.is_symlink()
    same(path, real)
    replica.promote(copy)
    assert copy.is_symlink()
    assert replica.node(real).role == "primary"


NAMES = {
    "its own": lambda path, _: path,
    "a symlink": lambda path, other: os.symlink(path, other) or other,
    "a symlinked folder": lambda path, other: os.symlink(path.parent, other) or other / path.name,
    "a hard link": lambda path, other: os.link(path, other) or other,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_file_is_not_its_own_replica(
    path: Path, copy: Path, name: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By any name it is refused and not recorded: the good one that is recorded stays."""
    with weclaw.Queue(path, replica=copy) as q:
        q.put(1)
    itself = NAMES[name](path, path.with_name("other"))
    with weclaw.Queue(path) if is_open else contextlib.nullcontext():
        for more in ({}, {"sync_replica": False}, {"readonly": True}):
            with pytest.raises(ValueError, match="is the file itself"):
                weclaw.Queue(path, replica=itself, **more)
        with weclaw.Queue(path) as q:
            assert q._store._engine.options()["replica"] == str(copy)
            q.put(2)
            assert q.stats().replica_lag == 0
    assert bodies(copy) == [1, 2]
    assert "its own replica" not in caplog.text


def test_a_new_file_that_is_to_be_its_own_replica_is_not_made(path: Path) -> None:
    """Also where only the name of its folder is another."""
    link = path.parent.with_name("link")
    link.symlink_to(path.parent)
    before = os.listdir(path.parent)
    for itself in (path, link / path.name):
        with pytest.raises(ValueError, match="is the file itself"):
            weclaw.Queue(path, replica=itself)
    assert os.listdir(path.parent) == before


def test_a_file_that_names_itself_is_opened_without_a_replica(
    path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a copy does that is opened in place of what it copies, beside other handles too; by the
    environment too."""
    with weclaw.Queue(path, replica=copy) as q:
        q.put(1)
    for _ in range(2):
        with weclaw.Queue(copy) as one, weclaw.Queue(copy) as other:
            one.put(2)
            assert other.stats().replica_lag is None
    assert "its own replica" in caplog.text
    with weclaw.Queue(copy) as one:
        with pytest.raises(ValueError, match="is the file itself"):
            weclaw.Queue(copy, replica=copy)
        weclaw.Queue(copy).close()
    monkeypatch.setenv("WECLAW_REPLICA", str(path))
    with weclaw.Queue(path) as q:
        assert q.stats().replica_lag is None


def test_a_handle_that_could_not_be_opened_contradicts_nobody(
    path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was given counted only while it was to be opened."""

    def fail(*_: Any) -> None:
        raise weclaw.StorageError("no")

    with weclaw.Queue(path):
        with monkeypatch.context() as patch:
            patch.setattr(_replicated, "write_record", fail)
            with pytest.raises(weclaw.StorageError, match="no"):
                weclaw.Queue(path, replica=copy.with_name("another.wq"))
        with weclaw.Queue(path, replica=copy) as q:
            q.put(1)
    assert bodies(copy) == [1]


def test_a_full_disk_of_the_replica_is_said_and_worked_off(
    open_queue: Callable[..., Any], path: Path, small_disk: Path
) -> None:
    """Puts raise with the reason, what was confirmed is there; it goes on when there is room."""
    place = small_disk / "copy.wq"
    q = open_queue(replica=place, replica_timeout=1.0)
    confirmed = []
    with pytest.raises(weclaw.ReplicaUnavailableError):
        for n in range(100):
            q.put([n, os.urandom(100_000)])
            confirmed.append(n)
    refused(q, "DiskFullError")
    assert {body[0] for body in bodies(place)} >= set(confirmed)
    remount(small_disk, "size=64m")
    put_at_last(q, ["last", b""])
    q.close()
    same(path, place)


def test_a_disk_of_the_replica_that_takes_no_writes(
    open_queue: Callable[..., Any], path: Path, small_disk: Path
) -> None:
    """Read-only from one moment on, and back again."""
    place = small_disk / "copy.wq"
    q = open_queue(replica=place, sync_replica=False)
    q.put(1)
    level(q)
    q.close()
    remount(small_disk, "ro")
    q = open_queue(replica=place, sync_replica=True, replica_timeout=0.5)
    refused(q, "Read-only")
    remount(small_disk, "rw")
    put_at_last(q, 2)
    q.close()
    same(path, place)


def die_promoting(pipe, path, step):
    from weclaw_embedded import replica

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(replica, step, die)
    replica.promote(path)


@pytest.mark.parametrize("step", ["recover_copy", "_forget_replica", "write_role"])
def test_a_promotion_that_was_interrupted_is_done_again(
    open_queue: Callable[..., Any], path: Path, copy: Path, step: str
) -> None:
    """Afterwards the copy is a queue without a replica; the old file is refused in any case."""
    q = open_queue(replica=command(copy))
    q.put(1)
    q.close()
    with Child(die_promoting, str(copy), step) as child:
        child.wait()
    assert replica.node(copy).role == "copy"
    assert replica.promote(copy) > 1
    new = open_queue(at=copy)
    new.put(2)
    assert new.stats().replica_lag is None
    assert [msg.body for msg in new.peek(5)] == [1, 2]
    new.close()
    q = open_queue()
    with pytest.raises(weclaw.SendFailedError):
        while True:
            q.put(3)


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_no_put_is_confirmed_by_a_copy_that_has_lost_its_name(
    open_queue: Callable[..., Any], copy: Path, how: str
) -> None:
    """A receiver that goes on writing a file which nobody finds again is no replica."""
    q = open_queue(replica=copy)
    q.put("before")
    aside = copy.with_name("aside.wq")
    if how == "deleted":
        copy.unlink()
    else:
        copy.rename(aside)
    if how == "replaced":
        shutil.copy(aside, copy)
    for n in range(3):
        q.put(n)
        assert bodies(copy) == ["before", *range(n + 1)]


def test_who_waited_for_a_copy_that_was_made_anew_does_not_get_the_old_one(
    open_queue: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a file that has lost its name is worth nothing: it is opened again."""
    open_queue(replica=copy).close()
    real = _locks.try_lock

    def try_lock(fd: int, start: int, exclusive: bool) -> bool:
        if copy.exists():  # the other one's is in its place just before its lock is free
            copy.with_name("new.wq").write_bytes(copy.read_bytes())
            copy.with_name("new.wq").replace(copy)
        return real(fd, start, exclusive)

    with monkeypatch.context() as patch:
        patch.setattr(_locks, "try_lock", try_lock)
        with pytest.raises(weclaw.LockedError):
            Copy.open(str(copy), 5.0)
        with pytest.raises(weclaw.LockedError):
            replica.promote(copy)
    assert replica.promote(copy) == 2
