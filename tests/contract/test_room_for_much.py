"""Contract 9: settled space is freed before anything is refused, however much is put at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.faults import fill, small_disk
from tests.helpers.queues import drain

import weclaw_embedded as weclaw
from weclaw_embedded import _reclaim, aio, threads
from weclaw_embedded._engine import Engine
from weclaw_embedded._session import Session

MIB = 1 << 20
SEGMENT = 65536
BODY = bytes(20_000)
MUCH = 50  # of these: 16 segments
NONE_OF_IT = (weclaw.Full, weclaw.DiskFullError)


def put_many(path: Path, n: int) -> None:
    with weclaw.Queue(path, flush="os") as q:
        q.put_many([BODY] * n, block=False)


def put_in_a_transaction(path: Path, n: int) -> None:
    with weclaw.Queue(path, flush="os") as q, q.transaction(block=False) as tx:
        for _ in range(n):
            tx.put(BODY)


async def put_many_as_a_task(path: Path, n: int) -> None:
    async with weclaw.AsyncQueue(path, flush="os") as q:
        await q.put_many([BODY] * n, block=False)


async def put_with_other_tasks(path: Path, n: int) -> None:
    async with weclaw.AsyncQueue(path, flush="os") as q:
        puts = [q.put(BODY, block=False) for _ in range(2)]
        much = q.put_many([BODY] * (n - 2), block=False)
        refused, *ids = await asyncio.gather(much, *puts, return_exceptions=True)
        assert len(set(ids)) == 2
        if isinstance(refused, BaseException):
            raise refused


async def put_in_a_tasks_transaction(path: Path, n: int) -> None:
    async with weclaw.AsyncQueue(path, flush="os") as q, q.transaction(block=False) as tx:
        for _ in range(n):
            tx.put(BODY)


async def put_one_now(path: Path, n: int) -> None:
    with contextlib.closing(aio.Queue(path=path)) as q:
        q.put_nowait(BODY * n)


def put_one(path: Path, n: int) -> None:
    with contextlib.closing(threads.Queue(path=path)) as q:
        q.put_nowait(BODY * n)


Put = Callable[[Path, int], Any]
WAYS = [
    put_many,
    put_in_a_transaction,
    put_many_as_a_task,
    put_with_other_tasks,
    put_in_a_tasks_transaction,
    put_one_now,
    put_one,
]


def put_in(way: Put, path: Path, n: int) -> None:
    found = way(path, n)
    if asyncio.iscoroutine(found):
        asyncio.run(found)


@pytest.fixture(params=["max_bytes", "disk"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[weclaw.Queue]:
    """A queue that takes no more, on a disk of its own or at its limit; retention keeps all."""
    with contextlib.ExitStack() as stack:
        if request.param == "disk":
            disk = stack.enter_context(small_disk(tmp_path / "disk", 6 * MIB))
            q = weclaw.Queue(disk / "q.wq", segment_bytes=SEGMENT, flush="os")
        else:
            path = tmp_path / "q.wq"
            q = weclaw.Queue(path, segment_bytes=SEGMENT, flush="os", max_bytes=2 * MIB)
        stack.enter_context(q)
        with contextlib.suppress(*NONE_OF_IT):
            while True:
                q.put(BODY, block=False)
        if request.param == "disk":
            fill(disk)
        yield q


def bytes_in(q: weclaw.Queue) -> int:
    return sum(map(len, drain(q)))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_much_is_put_where_all_was_settled(full: weclaw.Queue, way: Put) -> None:
    """At the first try, without waiting, though retention holds all of it."""
    n = full.qsize()
    assert n > MUCH
    for msg in full.get_many(n):
        msg.ack()
    put_in(way, Path(full._store.path), MUCH)
    assert bytes_in(full) == MUCH * len(BODY)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_too_much_is_refused_and_nothing_is_lost(full: weclaw.Queue, way: Put) -> None:
    """What has no room beside what still waits is refused, and what waits stays."""
    n = full.qsize()
    for msg in full.get_many(n // 2):
        msg.ack()
    with pytest.raises(NONE_OF_IT):
        put_in(way, Path(full._store.path), n)
    left = bytes_in(full)
    alone = 2 * len(BODY) if way is put_with_other_tasks else 0
    assert left == (n - n // 2) * len(BODY) + alone
    full.put_many([BODY] * MUCH, block=False)
    assert bytes_in(full) == MUCH * len(BODY)


class _MetDamage:
    """A step that comes upon damage each time, and finds no room to see to it."""

    def __init__(self, q: weclaw.Queue) -> None:
        self.engine = q._store._engine
        self.steps = 0

    def no_room(self, session: Session) -> None:
        raise weclaw.DiskFullError("no room")

    def take_step(self, engine: Engine, force: bool) -> float | None:
        self.steps += 1
        engine.heal_met()
        with pytest.raises(weclaw.DiskFullError):
            engine.run(self.no_room)
        return None

    def put(self) -> str:
        with pytest.raises(weclaw.DiskFullError):
            self.engine.run(self.no_room)
        return "refused"


def test_what_is_mended_while_room_is_made_waits_for_no_room_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for who mends in another thread, and may wait for the room."""
    with weclaw.Queue(tmp_path / "q.wq") as q, ThreadPoolExecutor(1) as pool:
        met = _MetDamage(q)
        monkeypatch.setattr(_reclaim, "take_step", met.take_step)
        assert pool.submit(met.put).result(10) == "refused"
        with met.engine.healing:
            assert pool.submit(met.put).result(10) == "refused"
            assert met.put() == "refused"
        assert met.steps == 3
