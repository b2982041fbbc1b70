"""Threads that put at once: one turn and one sync for many, and to each his own outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.queues import drain, eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _files, _putting, _records, _settling, threads
from weclaw_embedded._index import IndexFullError
from weclaw_embedded._session import OS, Job


class Held:
    """The first sync waits until `go_on` is set; counts them all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.count = 0
        self.real = _files.sync_data
        monkeypatch.setattr(_files, "sync_data", self.sync)

    def sync(self, fd: int) -> None:
        self.count += 1
        if self.count == 1:
            self.began.set()
            assert self.go_on.wait(30)
        self.real(fd)


def in_threads(held: Held, q: Any, calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returned or raised; all but the first come while that one syncs."""
    found: list[Any] = [None] * len(calls)

    def run(n: int) -> None:
        try:
            found[n] = calls[n]()
        except Exception as error:  # noqa: BLE001  it is looked at by the test
            found[n] = error

    workers = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    workers[0].start()
    assert held.began.wait(30)
    for n, thread in enumerate(workers[1:], 1):
        thread.start()
        eventually(lambda n=n: len(q._engine._waiting) == n)
    held.go_on.set()
    for thread in workers:
        thread.join(30)
        assert not thread.is_alive()
    return found


def test_many_puts_share_a_sync_and_keep_their_order(open_queue, monkeypatch):
    """What came while a sync was under way is written and synced at once, in the order it came."""
    q = open_queue()
    q.put(-1)
    held = Held(monkeypatch)
    ids = in_threads(held, q, [lambda n=n: q.put(n) for n in range(20)])
    assert held.count <= 3
    assert sorted(ids) == ids
    assert len(set(ids)) == 20
    assert drain(q) == list(range(-1, 20))


@pytest.mark.parametrize("kind", [threads.Queue, threads.LifoQueue])
def test_puts_of_a_stand_in_share_turns_and_syncs_too(path, monkeypatch, kind):
    """What threads put into a `threads.Queue` while one syncs is one write and one sync."""
    q = kind(path=path)
    q.put(-1)
    held = Held(monkeypatch)
    writes: list[int] = []
    real = _files.write_at

    def write_at(fd: int, buffers: Any, offset: int) -> int:
        writes.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(_files, "write_at", write_at)
    in_threads(held, q._core.queue, [lambda n=n: q.put(n) for n in range(8)])
    assert len(writes) == 2
    assert held.count <= 3
    order = [*range(-1, 8)]
    assert [q.get() for _ in order] == (order if kind is threads.Queue else order[::-1])
    q.close()


def test_each_thread_is_told_what_became_of_its_own(open_queue, monkeypatch):
    """One that finds no room, and one whose id is known, leave the others alone."""
    q = open_queue(maxsize=4)
    q.put("known", id="known")
    held = Held(monkeypatch)
    found = in_threads(
        held,
        q,
        [
            lambda: q.put("first"),
            lambda: q.put("second"),
            lambda: q.put("again", id="known"),
            lambda: q.put_many(["a", "b", "c", "d", "e"], block=False),
            lambda: q.put_many(["a", "b"], block=False),
            lambda: q.put("third"),
        ],
    )
    assert found[2] == "known"
    assert isinstance(found[3], weclaw.Full)
    assert isinstance(found[4], weclaw.Full)
    assert all(isinstance(found[n], str) for n in (0, 1, 5))
    assert drain(q) == ["known", "first", "second", "third"]


def test_a_turn_too_large_for_the_disk_fails_only_whose_it_is(open_queue, monkeypatch):
    """Where not all have room at once, each is tried by itself."""
    q = open_queue()
    q.put(-1)
    held = Held(monkeypatch)
    real = _files.write_at

    def write_at(fd: int, buffers: Any, offset: int) -> int:
        if sum(map(len, buffers)) > 5000:
            raise weclaw.DiskFullError("there is no room for so much")
        return real(fd, buffers, offset)

    monkeypatch.setattr(_files, "write_at", write_at)
    calls = [lambda n=n: q.put([n, "x" * 1000]) for n in range(9)]
    calls.append(lambda: q.put("y" * 6000))
    found = in_threads(held, q, calls)
    assert isinstance(found.pop(), weclaw.DiskFullError)
    assert all(isinstance(one, str) for one in found)
    monkeypatch.setattr(_files, "write_at", real)
    assert sorted(body[0] for body in drain(q)[1:]) == list(range(9))


def test_an_index_without_room_under_one_job_leaves_nothing_out(open_queue):
    """Its transaction is over for the others of the turn too: none was done, and each is alone."""
    q = open_queue()
    ids = q.put_many(list(range(3)))
    assert q.qsize() == 3
    msgs = q.get_many(2)
    engine = q._engine

    def ack(session, msg):
        lease = msg._lease
        record = _records.ack_of(lease.tid, lease.gid, lease.offset)
        return _settling.end(session, (lease, record, None))

    def fails(session):
        session.tx.abort()
        raise IndexFullError("no room for the index")

    jobs = [Job(ack, msgs[0]), Job(fails), Job(ack, msgs[1])]
    with pytest.raises(weclaw.DiskFullError):
        engine.run_jobs(jobs)
    assert q.stats().leased == 2
    engine.run_jobs([jobs[0], jobs[2]])
    assert [q.status(id) for id in ids] == ["done", "done", "ready"]


def test_what_was_done_is_not_done_again_when_the_rest_finds_no_room(open_queue, monkeypatch):
    """A job of a turn that found no room is refused alone, be it in laying out or in writing."""
    q = open_queue()
    real = _files.write_at
    is_full = []

    def write_at(fd: int, buffers: Any, offset: int) -> int:
        if is_full and sum(map(len, buffers)) > 5000:
            raise weclaw.DiskFullError("no room to write it")
        return real(fd, buffers, offset)

    def much(session: Any) -> None:
        if not is_full:
            is_full.append(1)
            raise weclaw.DiskFullError("no room to lay it out")
        session.append([(bytes(6000),)])

    def put(session: Any, body: str) -> list[str]:
        data, terms = q._encoder.one(body)
        return _putting.put(session, (q._address, [([data], terms)], OS, 0, None, None))

    monkeypatch.setattr(_files, "write_at", write_at)
    jobs = [Job(put, "before"), Job(much), Job(put, "behind")]
    q._engine.run_jobs(jobs)
    assert [type(job.error) for job in jobs] == [type(None), weclaw.DiskFullError, type(None)]
    assert sorted(drain(q)) == ["before", "behind"]


def test_a_sync_that_fails_fails_for_all_who_waited(open_queue, monkeypatch):
    """Nobody is told that his message is safe."""
    q = open_queue()
    q.put(-1)
    held = Held(monkeypatch)
    real = held.real

    def broken(fd: int) -> None:
        held.sync(fd)
        if held.count > 1:
            raise OSError(5, "the disk is gone")

    monkeypatch.setattr(_files, "sync_data", broken)
    found = in_threads(held, q, [lambda n=n: q.put(n) for n in range(8)])
    assert isinstance(found[0], str)
    assert all(isinstance(one, weclaw.StoreFailedError) for one in found[1:])
    monkeypatch.setattr(_files, "sync_data", real)


def test_one_that_waits_for_room_holds_nobody_up(open_queue, monkeypatch):
    """A blocking put sleeps by itself, and others lead meanwhile."""
    q = open_queue(maxsize=2)
    q.put(-1)
    held = Held(monkeypatch)
    done: list[str] = []
    waiting = [threading.Thread(target=lambda: done.append(q.put("late"))) for _ in range(3)]
    first = threading.Thread(target=lambda: done.append(q.put(0)))
    first.start()
    assert held.began.wait(30)
    for thread in waiting:
        thread.start()
    held.go_on.set()
    first.join(30)
    for n in range(5):
        with q.get(timeout=10) as msg:
            assert msg.body == ([-1, 0] + ["late"] * 3)[n]
    for thread in waiting:
        thread.join(30)
    assert len(done) == 4


def test_threads_that_come_and_go(open_queue):
    """Every put of many threads returns, whoever leads, also beside those of the main thread."""
    q = open_queue(flush="os")
    ids: list[str] = []

    def work(n: int) -> None:
        for i in range(100):
            ids.append(q.put((n, i)))
            if i % 7 == n % 7:
                time.sleep(0.0005)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in workers:
        thread.start()
    ids.extend([q.put((99, i)) for i in range(100)])
    for thread in workers:
        thread.join(60)
        assert not thread.is_alive()
    assert len(set(ids)) == 1300
    bodies = drain(q)
    for n in [*range(12), 99]:
        assert [i for who, i in bodies if who == n] == list(range(100))
