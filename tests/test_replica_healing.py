"""Getting back from the replica what its primary lacks: the file, its end, what lies within it."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.replica_tools import bodies, command, eventually, same

import weclaw_embedded as weclaw
from weclaw_embedded import replica
from weclaw_embedded._format import END_RECORD_AT, HEADER_BYTES, SLOT_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SEGMENT = 65536
COUNT = 120  # of messages, in several segments


@pytest.fixture
def open_queue(copy: Path, open_queue: Callable[..., Any]) -> Callable[..., Any]:
    """The same, closed before it is looked what is left behind."""
    return open_queue


@pytest.fixture(params=["file", "command"])
def address(request: pytest.FixtureRequest, copy: Path) -> Any:
    """The replica, named by its path or by a command that starts its receiver."""
    return copy if request.param == "file" else command(copy)


def body(n: int) -> dict[str, Any]:
    return {"n": n, "pad": bytes([n % 251]) * 2000}


@pytest.fixture
def closed(open_queue: Callable[..., Any], address: Any) -> Callable[..., Any]:
    """A queue of several segments with a replica, closed; opens it again."""
    q = open_queue(replica=address, segment_bytes=SEGMENT)
    for n in range(COUNT):
        q.put(body(n))
    q.close()
    return open_queue


def spoil(path: Path, *places: int, n: int = 8) -> None:
    data = bytearray(path.read_bytes())
    for at in places:
        for i in range(at, at + n):
            data[i] ^= 0xFF
    path.write_bytes(data)


def slot(n: int) -> int:
    """Where the n-th slot begins."""
    return HEADER_BYTES + n * SEGMENT


def lose_headers(path: Path, *slots: int) -> None:
    """Both headers of each slot."""
    for n in slots:
        spoil(path, slot(n), slot(n + 1) - SLOT_BYTES, n=SLOT_BYTES)


def all_there(q: Any) -> None:
    assert [msg.body for msg in q.peek(1000)] == [body(n) for n in range(COUNT)]
    assert q._store.verify() == []


@pytest.mark.parametrize("scratch", [True, False], ids=["scratch", "no scratch"])
@pytest.mark.parametrize("how", ["read", "repair"])
def test_damage_is_healed_from_the_replica(
    closed: Callable[..., Any],
    path: Path,
    copy: Path,
    address: Any,
    scratch: bool,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When a message is read, when the file is repaired, and when it is opened anew."""
    spoil(path, slot(0) + 3000, slot(1) + 5000, slot(1) + 30_000)
    if how == "repair":
        spoil(path, slot(2) + 9)  # one of its two headers
    if not scratch:
        shutil.rmtree(f"{path}.d")
    q = closed(replica=address)
    if how == "repair":
        q._store.repair()
    all_there(q)
    q.put(body(COUNT))
    q.close()
    same(path, copy)
    assert "healed" in caplog.text


@pytest.mark.parametrize("how", ["read", "repair"])
@pytest.mark.parametrize("bad", [(50,), (51,), (50, 52), (51, 53)])
def test_what_the_replica_has_of_damaged_neighbours_is_healed(
    closed: Callable[..., Any], path: Path, copy: Path, address: Any, bad: tuple[int, ...], how: str
) -> None:
    """Of four frames in a row that are damaged those are lost that the copy lacks, too."""

    def spoil_bodies(file: Path, *numbers: int) -> None:
        data = file.read_bytes()
        spoil(file, *(data.index(bytes([n]) * 2000) + 1000 for n in numbers))

    spoil_bodies(path, 50, 51, 52, 53)
    spoil_bodies(copy, *bad)
    q = closed(replica=address)
    if how == "repair":
        from weclaw_embedded import _survey

        (found,) = _survey.repair(q._store, lambda **_: None)
        assert not found.healed
        assert 2000 * len(bad) < found.size_bytes < 2200 * len(bad)
        assert q._store.verify() == []
    for _ in range(2):
        seen = [msg.body["n"] for msg in q.peek(1000)]
        assert seen == [n for n in range(COUNT) if n not in bad]
    q.close()


@pytest.mark.parametrize("scratch", [True, False], ids=["scratch", "no scratch"])
@pytest.mark.parametrize("lost", [(0,), (1,), (1, 2), (0, 2)])
def test_a_segment_without_headers_is_healed_from_the_replica(
    closed: Callable[..., Any],
    path: Path,
    copy: Path,
    address: Any,
    lost: tuple[int, ...],
    scratch: bool,
) -> None:
    """Where it is still recognised by what is in it, and where nothing of it is left."""
    for all_of_it in (False, True):
        if all_of_it:
            for n in lost:
                spoil(path, slot(n), n=SEGMENT)
        else:
            lose_headers(path, *lost)
        if not scratch:
            shutil.rmtree(f"{path}.d")
        q = closed(replica=address)
        q._store.repair()
        all_there(q)
        q.close()
        same(path, copy)


def test_a_segment_that_loses_its_headers_in_use_is_healed(
    closed: Callable[..., Any], path: Path, copy: Path, address: Any
) -> None:
    """By `repair`, while the file is open."""
    q = closed(replica=address)
    spoil_in_place(path, slot(1), SLOT_BYTES)
    spoil_in_place(path, slot(2) - SLOT_BYTES, SLOT_BYTES)
    q._store._engine.log.forget()
    assert q._store.verify()
    q._store.repair()
    all_there(q)
    q.close()
    same(path, copy)


def spoil_in_place(path: Path, at: int, n: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * n)


@pytest.mark.parametrize("scratch", [True, False], ids=["scratch", "no scratch"])
@pytest.mark.parametrize("how", ["cut", "cut far", "headers", "zeros"])
def test_an_end_that_is_missing_is_got_back(
    closed: Callable[..., Any],
    path: Path,
    copy: Path,
    address: Any,
    how: str,
    scratch: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file that was cut, or whose last segments are lost, has all its messages again."""
    last = max(n for n in range(20) if path.stat().st_size > slot(n) and path.read_bytes()[slot(n)])
    if how == "cut":
        os.truncate(path, slot(last) + 5000)
    elif how == "cut far":
        os.truncate(path, slot(1) + 5000)
    elif how == "headers":
        lose_headers(path, last)
        spoil(path, slot(last) + SLOT_BYTES)  # else they would be made anew from what stands there
    else:
        data = bytearray(path.read_bytes())
        data[slot(last) + 4000 : slot(last + 1)] = bytes(SEGMENT - 4000)
        path.write_bytes(data)
    if not scratch:
        shutil.rmtree(f"{path}.d")
    q = closed(replica=address)
    all_there(q)
    assert "RESTORED" in caplog.text
    q.put(body(COUNT))
    q.close()
    same(path, copy)


def test_a_replica_that_is_behind_does_not_shorten_the_file(
    open_queue: Callable[..., Any], path: Path, copy: Path, address: Any
) -> None:
    """What only the primary has stays, after an end that was not clean."""
    q = open_queue(replica=address, segment_bytes=SEGMENT)
    q.put("both")
    q.close()
    q = open_queue(replica=False)
    q.put("here")
    q.close()
    shutil.rmtree(f"{path}.d")
    data = bytearray(path.read_bytes())
    at = data.rindex(b"here")
    data[END_RECORD_AT : END_RECORD_AT + 16] = bytes(16)  # which a clean end alone writes
    path.write_bytes(data[: at + 4].ljust(len(data), b"\0"))  # without the frame that vouches
    q = open_queue(replica=address)
    assert [msg.body for msg in q.peek(10)] == ["both", "here"]
    q.put("again")
    q.close()
    same(path, copy)


@pytest.mark.parametrize("hit", ["end", "before", "headers"])
def test_a_copy_that_lost_its_power_is_not_gone_on_with(
    closed: Callable[..., Any], path: Path, copy: Path, hit: str
) -> None:
    """Of what it had not synced a later part came to its disk, and not an earlier one: what it
    confirms afterwards would not be there. (Here the bytes are spoilt, which is found the same.)
    """
    data = copy.read_bytes()
    if hit == "headers":
        lose_headers(copy, 1)
    else:
        spoil(copy, data.index(body(COUNT - 9 if hit == "end" else COUNT // 2)["pad"]) + 500)
    q = closed()
    q.put(body(COUNT))
    q.close()
    same(path, copy)
    assert len(bodies(copy)) == COUNT + 1


def test_a_copy_is_not_made_anew_from_a_primary_that_is_damaged(
    closed: Callable[..., Any], open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """What the other one has of it stays, however often they meet."""
    q = closed(replica=False)
    q.close()
    for one, n in ((path, COUNT - 9), (copy, COUNT - 5)):
        spoil(one, one.read_bytes().index(body(n)["pad"]) + 500)
    inode = copy.stat().st_ino
    q = open_queue(replica=copy, sync_replica=False)
    eventually(lambda: q.stats().replica_lag == 0)
    q.close()
    assert copy.stat().st_ino == inode


@pytest.mark.parametrize("how", ["missing", "empty", "header"])
def test_a_lost_file_is_restored(
    closed: Callable[..., Any], path: Path, copy: Path, address: Any, how: str
) -> None:
    """Through a command as from a file, by several who open it at once."""
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        spoil(path, 0, HEADER_BYTES // 2, n=72)
        path.write_bytes(path.read_bytes()[:16] + b"\1\0\0\0" + path.read_bytes()[20:])
        if path.read_bytes()[:8] != b"weclaw q":
            spoil(path, 0, n=16)
        shutil.rmtree(f"{path}.d")  # which knew whose file it was
    q = closed(replica=address)
    all_there(q)
    q.close()
    same(path, copy)


def test_a_lost_header_block_is_no_reason_to_go_back_to_the_copy(
    closed: Callable[..., Any], path: Path, copy: Path
) -> None:
    """The file may have what the copy lacks: it is opened by its slots, and the copy follows."""
    q = closed(replica=False)
    q.put("not in the copy")
    q.close()
    spoil(path, 0, n=HEADER_BYTES)
    inode = path.stat().st_ino
    q = closed(replica=copy, sync_replica=False)
    assert [msg.body for msg in q.peek(1000)] == [*map(body, range(COUNT)), "not in the copy"]
    eventually(lambda: q.stats().replica_lag == 0)
    q.close()
    assert path.stat().st_ino == inode
    with weclaw.Queue(copy, readonly=True) as there:
        assert there.qsize() == COUNT + 1


def test_what_was_passed_over_comes_back_when_it_is_healed_later(
    closed: Callable[..., Any], path: Path, copy: Path
) -> None:
    """The index was made without it; after `repair` it has it, and so has one that is made anew."""
    spoil(path, slot(1) + 5000)
    lose_headers(path, 0)
    shutil.rmtree(f"{path}.d")
    q = closed(replica=False)
    assert len(q.peek(1000)) < COUNT
    q.close()
    q = closed(replica=copy, sync_replica=False)
    q._store.repair()
    all_there(q)
    q.close()
    shutil.rmtree(f"{path}.d")
    q = closed(replica=copy, sync_replica=False)
    all_there(q)


@pytest.mark.parametrize("scratch", [True, False], ids=["scratch", "no scratch"])
@pytest.mark.parametrize("lost", [(0,), (1,), (0, 2), (1, 2)])
def test_lost_headers_are_mended_without_a_replica(
    open_queue: Callable[..., Any], path: Path, lost: tuple[int, ...], scratch: bool
) -> None:
    """A segment before one with its headers is recognised; of others the messages are set aside."""
    q = open_queue(segment_bytes=SEGMENT)
    for n in range(COUNT):
        q.put(body(n))
    q.close()
    lose_headers(path, *lost)
    if not scratch:
        shutil.rmtree(f"{path}.d")
    q = open_queue()
    assert q._store.verify()
    q._store.repair()
    assert q._store.verify() == []
    there = [msg.body["n"] for msg in q.peek(1000)]
    if lost != (1, 2):
        all_there(q)
    assert len(there) > COUNT - 40
    q.put(body(COUNT))
    q.close()
    shutil.rmtree(f"{path}.d")
    q = open_queue()
    assert [msg.body["n"] for msg in q.peek(1000)] == [*there, COUNT]


# -- when the replica can't be asked -----------------------------------------------------------


NOBODY = ["sh", "-c", "echo nobody is there >&2; exit 255"]


def test_a_new_file_is_not_begun_while_its_replica_cannot_be_asked(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """It may have data; the error says how to begin all the same, and that works."""
    for sync in (True, False):
        with pytest.raises(weclaw.StorageError, match=r"can't be asked.*replica=False") as caught:
            open_queue(replica=NOBODY, sync_replica=sync)
        assert "nobody is there" in str(caught.value)
        assert type(caught.value) is weclaw.StorageError  # a class that a user knows
        assert not path.exists()
    with pytest.raises(weclaw.StorageError, match="can't be started"):
        open_queue(replica=["/nowhere/at/all"], replica_timeout=60.0)
    open_queue(replica=False).close()
    q = open_queue(replica=command(copy))
    q.put(1)
    assert bodies(copy) == [1]


def test_a_replica_that_comes_up_late_is_waited_for(
    open_queue: Callable[..., Any], path: Path, copy: Path, tmp_path: Path
) -> None:
    """A receiver that dies before it has answered is started again, within the time there is."""
    mark = tmp_path / "mark"
    words = command(copy)
    shell = f'test -e "{mark}" || {{ touch "{mark}"; exit 1; }}; exec "$0" "$@"'
    q = open_queue(replica=["sh", "-c", shell, *words], replica_timeout=30.0)
    q.put(1)
    assert bodies(copy) == [1]


def test_damage_is_not_written_over_while_the_replica_cannot_be_asked(
    closed: Callable[..., Any], path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`repair` says so; reading sets aside what is damaged, and asks once, not for each message."""
    spoil(path, slot(0) + 3000, slot(0) + 9000)
    before = path.read_bytes()[slot(0) + SLOT_BYTES : slot(1)]
    q = closed(replica=NOBODY, sync_replica=False)
    with pytest.raises(weclaw.StorageError, match="can't be asked") as caught:
        q._store.repair()
    assert type(caught.value) is weclaw.StorageError
    assert len(q.peek(1000)) == COUNT - 2
    q.close()
    assert path.read_bytes()[slot(0) + SLOT_BYTES : slot(1)] == before
    assert caplog.text.count("damage is not healed") == 1
    q = closed(replica=command(copy))
    q._store.repair()
    assert q._store.verify() == []
    q.close()
    assert path.read_bytes()[slot(0) + SLOT_BYTES : slot(1)] != before


def test_a_hanging_replica_does_not_hold_up_an_opening_for_ever(
    open_queue: Callable[..., Any], path: Path
) -> None:
    """It is given up after the time that is documented, and ended."""
    began = time.monotonic()
    with pytest.raises(weclaw.StorageError, match="in time"):
        open_queue(replica=["sleep", "1000"], replica_timeout=0.1)
    assert time.monotonic() - began < 30
    assert not path.exists()


def test_looking_into_a_copy_disturbs_nobody(
    open_queue: Callable[..., Any], copy: Path, address: Any
) -> None:
    """Damage is healed while the receiver is at work, and puts go on."""
    q = open_queue(replica=address, segment_bytes=SEGMENT)
    for n in range(COUNT):
        q.put(body(n))
    spoil_in_place(Path(q._store.path), slot(0) + 3000, 8)
    assert q._store.repair()
    all_there(q)
    q.put("more")
    assert replica.node(copy).alive
    logging.getLogger("weclaw_embedded").debug("done")
