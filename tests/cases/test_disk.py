"""Disks: full ones, read-only ones, and the space that settled messages give back."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time

import pytest
from tests.helpers.faults import fill, read_only, small_disk
from tests.helpers.processes import Child
from tests.helpers.queues import disk_bytes, drain, eventually, scratch

import weclaw_embedded as weclaw

MIB = 2**20


def put_until_full(q, size=50_000, limit=1000):
    """Bodies whose put returned, and the number of the one that raised."""
    returned = []
    for n in range(limit):
        body = n.to_bytes(4, "big") * (size // 4)
        try:
            q.put(body)
        except weclaw.DiskFullError:
            return returned, n
        returned.append(body)
    raise AssertionError("the disk was never full")


def test_case_18_a_full_disk_refuses_puts_and_lets_work_go_on(tmp_path):
    """Case 18: on a 4 MB disk what raised is never delivered, what returned is, acks work."""
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        q = weclaw.Queue(disk / "tasks.wq", retry=weclaw.RetryPolicy(backoff=0.0))
        try:
            returned, _ = put_until_full(q)
            assert len(returned) >= 5
            with pytest.raises(weclaw.DiskFullError):
                q.put(bytes(MIB))
            with pytest.raises(weclaw.DiskFullError):
                q.put_many([bytes(100_000)] * 20)
            assert q.stats().ready == len(returned)
            msg = q.get(block=False)
            msg.nack()
            msg = q.get(block=False)
            assert msg.retry_count == 1
            msg.fail("no room")
            assert len(q.dlq) == 1
            assert drain(q) == returned[1:]
            # All of it is settled: the next put in the same process finds room.
            q.put(b"after")
            assert drain(q) == [b"after"]
        finally:
            q.close()
        q = weclaw.Queue(disk / "tasks.wq")
        try:
            assert [x.body for x in q.dlq] == returned[:1]
            assert drain(q) == []
            assert q.stats().settled == len(returned)
        finally:
            q.close()


def test_case_18_every_last_byte_taken_by_others(tmp_path):
    """Case 18: with not a byte left opening, get, ack, nack and fail work; put when there is."""
    with small_disk(tmp_path / "disk", 16 * MIB) as disk:
        path = disk / "tasks.wq"
        q = weclaw.Queue(path, retry=weclaw.RetryPolicy(backoff=0.0))
        small = [f"small {n}".encode() for n in range(300)]
        q.put_many(small)
        ballast = fill(disk)
        returned, _ = put_until_full(q, size=20_000)
        q.close()
        q = weclaw.Queue(path, retry=weclaw.RetryPolicy(backoff=0.0))
        try:
            more, _ = put_until_full(q, size=20_000)
            assert len(more) < 100
            for _ in range(100):
                q.get(block=False).ack(result="fine")
            q.get(block=False).nack()
            q.get(block=False).fail("bad")
            for _ in range(50):
                q.get(block=False).release()
                q.get(block=False).ack()
            ballast.unlink()
            q.put(b"there is room")
            rest = drain(q)
            assert rest[-1] == b"there is room"
            assert rest[: 300 - 151] == small[151:]
            assert rest[300 - 151 : -1] == returned + more
        finally:
            q.close()


def test_case_18_a_new_file_on_a_full_disk(tmp_path):
    """Case 18: where there is no room for a new queue it is refused, and nothing is left lying."""
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        fill(disk, leave_bytes=300_000)
        with pytest.raises(weclaw.DiskFullError):
            weclaw.Queue(disk / "tasks.wq")
        assert not (disk / "tasks.wq").exists()
        assert [x.name for x in disk.iterdir() if x.is_file()] == ["ballast"]
        (disk / "ballast").unlink()
        with weclaw.Queue(disk / "tasks.wq") as q:
            q.put("x")
            assert drain(q) == ["x"]


def put_under_a_limit(pipe, path, limit):
    q = weclaw.Queue(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    n = 0
    try:
        while True:
            q.put(n.to_bytes(4, "big") * 10_000)
            pipe.send(n)
            n += 1
    except weclaw.DiskFullError as error:
        pipe.send(error)
    for _ in range(10):
        q.get(block=False).ack()
    pipe.send(q.stats().ready)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    q.put(b"after")
    pipe.send("after")
    q.close()


def test_case_18_a_limit_on_the_size_of_files(path, open_queue):
    """Case 18: RLIMIT_FSIZE is a full disk too; what returned is all there."""
    with Child(put_under_a_limit, path, 4 * MIB) as child:
        said = child.end()
    *puts, error, ready, after = said
    assert isinstance(error, weclaw.DiskFullError)
    assert len(puts) > 20
    assert ready == len(puts) - 10
    assert after == "after"
    q = open_queue()
    assert drain(q) == [n.to_bytes(4, "big") * 10_000 for n in puts[10:]] + [b"after"]


def test_case_19_settled_space_comes_back(path, open_queue):
    """Case 19: 15 MB put and acked with retention 0: the disk space is back with no call."""
    q = open_queue(retention=0)
    for _ in range(15):
        q.put_many([os.urandom(50_000) for _ in range(20)])
    assert disk_bytes(path) > 14 * MIB
    assert len(drain(q)) == 300
    eventually(lambda: disk_bytes(path) < 4 * MIB, 10.0, "the space given back")
    q.put("x")
    assert drain(q) == ["x"]


def test_case_19_put_and_acked_in_turn(path, open_queue):
    """Case 19: put and acked one after the other, 15 MB never take more than a few slots."""
    q = open_queue(retention=0, flush="os")
    most = 0
    for n in range(300):
        q.put(os.urandom(50_000))
        q.get(block=False).ack()
        if n % 20 == 0:
            most = max(most, disk_bytes(path))
    assert most < 6 * MIB


def acked_in_turn(q):
    for _ in range(20):
        q.put(b"x" * 3 * MIB)
        q.get(timeout=5).ack()


def acked_after_all_were_put(q):
    q.put_many([b"x" * 3 * MIB] * 20)
    for _ in range(20):
        q.get(timeout=5).ack()


def acked_with_large_results(q):
    for n in range(20):
        q.put(n)
        q.get(timeout=5).ack(b"x" * 3 * MIB)


@pytest.mark.parametrize(
    "work", [acked_in_turn, acked_after_all_were_put, acked_with_large_results]
)
@pytest.mark.parametrize("retention", [48 * 3600, None], ids=["48h", "None"])
def test_case_19_large_messages_are_kept_within_retention_bytes(path, open_queue, work, retention):
    """Case 19: also where a message is larger than a segment, while the file stays open and nobody
    does anything more."""
    q = open_queue(retention=retention, retention_bytes=8 * MIB, flush="os")
    q.put("first")
    q.get(timeout=5).ack()
    time.sleep(0.3)  # so that it is known by then that nothing is over for long
    work(q)
    eventually(lambda: disk_bytes(path) < 20 * MIB, 30.0, "no more than is to be kept")


def churn(q, rounds, batch, size=300):
    for _ in range(rounds):
        q.put_many([os.urandom(size) for _ in range(batch)])
        left = batch
        while left:
            for msg in q.get_many(left, block=False):
                msg.ack()
                left -= 1


@pytest.mark.parametrize("what", ["held", "delayed", "dead", "parked"])
def test_case_20_one_message_does_not_pin_its_neighbours(path, open_queue, hours_later, what):
    """Case 20: one message held, 50 000 acked around it: the disk stays bounded."""
    q = open_queue(retention=0, flush="os")
    rounds = 100 if what == "held" else 40
    if what == "held":
        task = q.put("the one")
        held = q.get(visibility_timeout=None)
    elif what == "delayed":
        task = q.put("the one", delay=3600.0)
    elif what == "dead":
        task = q.put("the one")
        q.get().fail("bad")
    else:
        q.put("its head", key="k", delay=3600.0)
        task = q.put("the one", key="k")
    most = 0
    for _ in range(rounds // 10):
        churn(q, 10, 500)
        most = max(most, disk_bytes(path))
    assert most < 8 * MIB
    if what == "held":
        held.ack(result="kept")
        assert q.status(task) == "done"
        return
    q.close()
    q = open_queue(flush="os")
    if what == "dead":
        assert q.dlq.get(task).body == "the one"
        assert q.dlq.redrive() == 1
        assert drain(q) == ["the one"]
    else:
        assert q.status(task) == "delayed"
        q.close()
        hours_later(2)
        q = open_queue()
        assert drain(q)[-1] == "the one"


@pytest.mark.slow
def test_soak_of_two_million_through_a_shallow_queue(path, open_queue):
    """2 million messages through a depth of 1 000: no more disk than for the first 100 000, but for
    the one segment that may have begun just now.
    """
    q = open_queue(retention=0, flush="os")
    q.put_many([os.urandom(100) for _ in range(500)])

    def most_bytes(rounds):
        most = 0
        for _ in range(rounds // 10):
            churn(q, 10, 500, 100)
            index = sum(disk_bytes(x) for x in scratch(path).rglob("*") if x.is_file())
            most = max(most, disk_bytes(path) + index)
        return most

    early = most_bytes(200)
    assert most_bytes(3800) <= early + MIB


def test_case_32_replay_from_what_is_gone(path, open_queue):
    """Case 32: replay from an offset already freed names the first that is kept."""
    q = open_queue(retention=0, segment_bytes=65536)
    q.put_many([os.urandom(50_000) for _ in range(60)])
    offsets = []
    for _ in range(60):
        with q.get(block=False) as msg:
            offsets.append(msg.offset)
    eventually(lambda: disk_bytes(path) < MIB)
    q.close()
    q = open_queue(retention=3600)  # so that what is there now stays
    with pytest.raises(weclaw.OffsetTrimmedError) as caught:
        q.replay(offset=offsets[0])
    first = caught.value.first_offset
    assert offsets[0] < first
    again = q.replay(offset=first)
    assert again == len([x for x in offsets if x >= first])
    assert len(drain(q)) == again
    assert q.replay(offset="earliest") == again


def test_case_26_a_read_only_mount(tmp_path, path):
    """Case 26: on a read-only mount stats and peek work, and no file is made."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "tasks.wq"
    with weclaw.Queue(path) as q:
        q.put_many(["a", "b", "c"])
        q.get().ack()
        q.get().fail("bad")
    for with_scratch in (True, False):
        if not with_scratch:
            shutil.rmtree(scratch(path))
        with read_only(tmp_path / "data", tmp_path / "view") as view:
            before = sorted(x.name for x in view.iterdir())
            with weclaw.Queue(view / "tasks.wq", readonly=True) as q:
                assert q.stats()[:5] == (1, 0, 0, 1, 1)
                assert [m.body for m in q.peek(10)] == ["c"]
                assert [x.body for x in q.dlq] == ["b"]
                assert q.qsize() == 1
                for change in (lambda: q.put("x"), lambda: q.get(block=False), q.purge):
                    with pytest.raises(weclaw.StorageError):
                        change()
            with pytest.raises((weclaw.WeclawError, OSError)):
                weclaw.Queue(view / "tasks.wq").put("x")
            assert sorted(x.name for x in view.iterdir()) == before


def keep_putting(pipe, path):
    q = weclaw.Queue(path)
    n = 0
    while not pipe.poll():
        q.put(n)
        n += 1
        time.sleep(0.002)
    pipe.send(n)
    q.close()


def test_case_26_looking_while_others_write(path):
    """Case 26: a read-only handle follows what others write, and leaves no trace."""
    with Child(keep_putting, path) as child:
        eventually(path.exists)
        q = weclaw.Queue(path, readonly=True)
        eventually(lambda: q.stats().ready > 5)
        before = sorted(x.name for x in path.parent.rglob("*"))
        first = q.stats().ready
        eventually(lambda: q.stats().ready > first + 20)
        assert sorted(x.name for x in path.parent.rglob("*")) == before
        child.say("stop")
        n = child.hear()
        child.end()
        assert q.stats().ready == n
        assert [m.body for m in q.peek(n)] == list(range(n))
        q.close()


def two_slots(pipe, path):
    """Fill a file that may never have more than two slots, work it off, and again."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    q = weclaw.Queue(path, retention=0)
    for _ in range(3):
        put = done = 0
        try:
            while True:
                q.put(os.urandom(50_000))
                put += 1
        except weclaw.DiskFullError:
            pass
        while True:
            try:
                q.get(block=False).ack()
            except weclaw.Empty:
                break
            done += 1
        pipe.send((put, done))
    q.close()


def test_case_18_a_limit_of_two_slots_is_worked_off_and_filled_again(path):
    """Case 18: where a file can't grow beyond its spare, settled space is used again and again."""
    with Child(two_slots, path) as child:
        for put, done in [child.hear() for _ in range(3)]:
            assert put == done
            assert put > 10
        child.end()


@pytest.mark.parametrize("n_held", [5, 12])
@pytest.mark.parametrize("share", [0.3, 0.5])
def test_what_is_held_does_not_keep_producers_out_of_what_is_settled_behind_it(
    path, open_queue, n_held, share
):
    """With `max_bytes` reached, as much is put again as was settled, though the oldest are held."""
    q = open_queue(max_bytes=2 * MIB, retention=0, segment_bytes=65536, flush="os")
    n = 0
    with contextlib.suppress(weclaw.Full):
        while True:
            q.put(os.urandom(9_000), block=False)
            n += 1
    held = q.get_many(n_held, visibility_timeout=None)
    settled = int(n * share)
    for msg in q.get_many(settled):
        msg.ack()
    again = 0
    with contextlib.suppress(weclaw.Full):
        while True:
            q.put(os.urandom(9_000), block=False)
            again += 1
    assert again > settled * 0.7
    for msg in held:
        msg.ack()
    assert len(drain(q)) == n - n_held - settled + again


@pytest.mark.parametrize(("size", "share"), [(5_000, 3), (5_000, 10), (300, 5)])
def test_what_nobody_takes_does_not_keep_producers_out_of_what_is_settled_around_it(
    path, open_queue, size, share
):
    """With `max_bytes` reached, and ready messages of another topic in all of the file; also where
    what settles has made it larger than that.
    """
    q = open_queue(max_bytes=4 * MIB, retention=0, segment_bytes=65536, flush="os")
    other = weclaw.Queue(path, topic="other", flush="os")
    n = n_other = 0
    with contextlib.suppress(weclaw.Full):
        while True:
            q.put(os.urandom(size), block=False)
            n += 1
            if n % share == 0:
                other.put(os.urandom(size), block=False)
                n_other += 1
    for msg in q.get_many(n):
        msg.ack()
    again = 0
    with contextlib.suppress(weclaw.Full):
        while True:
            q.put(os.urandom(size), block=False)
            again += 1
    assert again > n * 0.7
    assert len(drain(other)) == n_other
    assert len(drain(q)) == again
    other.close()
