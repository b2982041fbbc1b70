"""What is met damaged while a file is opened is healed from the replica, before it can be lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import Child, environment
from tests.replica_tools import command, eventually, level

import weclaw_embedded as weclaw
from weclaw_embedded import _damage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SEGMENT = 65536
COUNT = 200  # of messages of 1 KB, in four segments


@pytest.fixture
def open_queue(copy: Path, open_queue: Callable[..., Any]) -> Callable[..., Any]:
    """The same, closed before it is looked what is left behind."""
    return open_queue


def make(pipe, path, address, count, clean):  # type: ignore[no-untyped-def]
    """Puts that were confirmed by both disks; then a clean end, or one by SIGKILL."""
    q = weclaw.Queue(path, replica=address, segment_bytes=65536, retention=0)
    q.put_many([])
    for n in range(count):
        q.put(f"m{n:03}_" + "x" * 1000)
    if clean:
        q.close()
    pipe.send("done")
    os.kill(os.getpid(), signal.SIGKILL)  # at once: the index does not have the last ones yet


def made(path: Path, address: Any, *, clean: bool) -> None:
    with Child(make, str(path), address, COUNT, clean) as child:
        assert child.hear(90) == "done"
        child.wait()


def flip(path: Path, n: int) -> None:
    """One bit in the body of the n-th message."""
    data = path.read_bytes()
    at = data.index(b"m%03d_" % n) + 100
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))


def spoil_scratch(path: Path, how: str) -> None:
    scratch = Path(f"{path}.d")
    if how == "deleted":
        shutil.rmtree(scratch)
    elif how == "garbage":
        for one in scratch.rglob("*"):
            if one.is_file():
                one.write_bytes(b"\xa5" * 5000)


def drained(q: Any) -> list[int]:
    """The numbers of all that is delivered, and acked."""
    found = []
    while True:
        try:
            for msg in q.get_many(50, timeout=0.5):
                if isinstance(msg.body, str):
                    found.append(int(msg.body[1:4]))
                msg.ack()
        except weclaw.Empty:
            return found


def reclaim(q: Any) -> None:
    """Work until the first segment is given back."""
    while not q._store._engine.first_offset():
        q.put_many([b"n" * 1000] * 50)
        for msg in q.get_many(50):
            msg.ack()


def weclawctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weclaw_embedded.cli", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("place", [1, COUNT - 2], ids=["first", "last"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "recorded"])
@pytest.mark.parametrize("scratch", ["kept", "deleted", "garbage"])
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_bit_that_flipped_is_healed_however_the_file_is_opened(
    open_queue: Callable[..., Any],
    path: Path,
    copy: Path,
    clean: bool,
    scratch: str,
    given: bool,
    place: int,
) -> None:
    """All is delivered, in order, nothing stays damaged, and none is gone when space is reused."""
    made(path, str(copy), clean=clean)
    flip(path, place)
    spoil_scratch(path, scratch)
    q = open_queue(replica=copy) if given else open_queue()
    assert drained(q) == list(range(COUNT))
    assert q.stats().damaged == 0
    assert q._store.verify() == []
    q.close()


@pytest.mark.parametrize("given", [True, False], ids=["given", "recorded"])
@pytest.mark.parametrize("scratch", ["kept", "deleted"])
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_an_end_of_zeros_is_got_back_however_the_file_is_opened(
    open_queue: Callable[..., Any],
    path: Path,
    copy: Path,
    clean: bool,
    scratch: str,
    given: bool,
) -> None:
    """From the replica, which is found in what is left of the file when nothing else names it."""
    made(path, str(copy), clean=clean)
    data = path.read_bytes()
    at = data.index(b"m%03d_" % (COUNT - 20)) - 100
    path.write_bytes(data[:at] + bytes(len(data) - at))
    spoil_scratch(path, scratch)
    q = open_queue(replica=copy) if given else open_queue()
    assert drained(q) == list(range(COUNT))
    assert q._store.verify() == []


@pytest.mark.parametrize("verb", ["stats", "health", "verify", "put"])
def test_whoever_opens_it_first_has_it_healed(
    open_queue: Callable[..., Any], path: Path, copy: Path, verb: str
) -> None:
    """The command line, too, which is told of no replica."""
    made(path, str(copy), clean=False)
    flip(path, 1)
    spoil_scratch(path, "deleted")
    if verb == "put":
        subprocess.run(
            [sys.executable, "-m", "weclaw_embedded.cli", "put", str(path)],
            env=environment(),
            input='{"one": "more"}\n',
            text=True,
            timeout=60,
            check=True,
        )
    else:
        # verify writes nothing, so it leaves that to the next, and says that something is damaged.
        assert weclawctl(verb, str(path)).returncode == (1 if verb == "verify" else 0)
    q = open_queue()
    assert drained(q) == list(range(COUNT))
    assert q.stats().damaged == 0


def test_what_was_passed_over_is_healed_by_the_next_who_names_a_replica(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Though it was opened without one before, and the index has it as damaged since."""
    made(path, str(copy), clean=False)
    flip(path, COUNT - 2)
    q = open_queue(replica=False)
    assert q.stats().damaged == 1
    assert q.qsize() == COUNT - 1
    q.close()
    q = open_queue(replica=copy)
    assert q.stats().damaged == 0
    assert sorted(drained(q)) == list(range(COUNT))


def test_a_replica_behind_a_command_is_asked_too(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Once, for all that was met."""
    made(path, command(copy), clean=False)
    flip(path, COUNT - 3)
    flip(path, COUNT - 2)
    q = open_queue()
    assert drained(q) == list(range(COUNT))
    assert q.stats().damaged == 0


@pytest.mark.parametrize("lost", [1, COUNT - 2], ids=["known", "passed over"])
def test_nothing_is_freed_that_a_replica_may_still_heal(
    open_queue: Callable[..., Any],
    lost: int,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its disk is away when the file is opened, all else is settled, and it comes back; whether the
    index knows the message, which is read in vain, or not yet.
    """
    monkeypatch.setattr(_damage, "HEAL_PAUSE_S", 1.0)
    disk = tmp_path / "disk"
    disk.mkdir()
    made(path, str(disk / "copy.wq"), clean=lost == 1)
    flip(path, lost)
    disk.rename(tmp_path / "away")
    q = open_queue(sync_replica=False)
    assert drained(q) == [n for n in range(COUNT) if n != lost]
    for _ in range(10):
        q.put_many([b"n" * 1000] * 50)
        for msg in q.get_many(50):
            msg.ack()
    engine = q._store._engine
    engine.make_room()
    assert engine.first_offset() < 4 * SEGMENT
    assert q.stats().damaged == (lost != 1)
    (tmp_path / "away").rename(disk)
    assert eventually(lambda: drained(q), 30) == [lost]
    assert q.stats().damaged == 0
    level(q)
    reclaim(q)
    assert q._store.verify() == []


def test_what_another_thread_healed_meanwhile_is_not_set_aside(
    open_queue: Callable[..., Any], path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who read it in vain finds nothing to heal, and the message flows."""
    made(path, str(copy), clean=True)
    flip(path, 1)
    q = open_queue()
    engine = q._store._engine
    heal = engine.heal

    def healed_by_another(start: int, end: int, **options: Any) -> bool:
        assert heal(start, end, **options)
        return False

    monkeypatch.setattr(engine, "heal", healed_by_another)
    assert drained(q) == list(range(COUNT))
    assert q.stats().damaged == 0


def test_what_no_replica_has_stops_nothing(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Damaged in both files it is set aside, and its segment given back in time."""
    made(path, str(copy), clean=False)
    flip(path, COUNT - 2)
    flip(copy, COUNT - 2)
    q = open_queue()
    assert drained(q) == [n for n in range(COUNT) if n != COUNT - 2]
    assert q.stats().damaged == 1
    reclaim(q)


def test_a_message_in_several_segments_is_healed_where_it_goes_on(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Damage far behind its beginning, when it is read and when it is folded anew."""
    body = bytes(range(256)) * 1200  # nearly five segments
    for scratch in ("kept", "deleted"):
        q = open_queue(replica=copy, segment_bytes=SEGMENT)
        q.put("before")
        q.put(body)
        q.put("behind")
        q.close()
        data = path.read_bytes()
        with open(path, "r+b") as file:
            for n in (1, 3):
                at = 4096 + n * SEGMENT + 20_000
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
        spoil_scratch(path, scratch)
        q = open_queue()
        found = []
        for _ in range(3):
            msg = q.get(timeout=5)
            found.append(msg.body)
            msg.ack()
        assert found == ["before", body, "behind"]
        assert q._store.verify() == []
        q.close()
        path.unlink()
        copy.unlink()
        shutil.rmtree(f"{path}.d")


def test_healing_that_ctrl_c_kept_from_being_called_for_is_called_for_again(
    path: Path, open_queue: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag says that it is due, and nobody would call it: whoever meets damage next does."""
    engine = open_queue()._store._engine
    calls: list[float] = []

    def interrupted(when_s: float, function: Callable[[], None]) -> int:
        calls.append(when_s)
        if len(calls) == 1:
            raise KeyboardInterrupt
        function()  # at once, as the timer's thread may
        return 0

    monkeypatch.setattr(engine.timer, "call_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.damage_met()
    engine.damage_met()
    engine.damage_met()
    assert calls == [0.0, 0.0, 0.0]
