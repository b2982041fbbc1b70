"""A disk that is full to the last byte with small messages is worked off to the last of them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from tests.helpers.faults import fill as ballast
from tests.helpers.faults import small_disk
from tests.helpers.processes import Child

import weclaw_embedded as weclaw


def fill(q: weclaw.Queue, mixed: bool, size: int = 100) -> int:
    """Put until the disk is full; how many that were."""
    n = 0
    with contextlib.suppress(weclaw.DiskFullError):
        while True:
            q.put(["x" * size, n], priority=n % 2 * 9 if mixed else 0)
            n += 1
    return n


@pytest.mark.parametrize("size", [100, 1])
@pytest.mark.parametrize("retention", [3600, 0])
@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "priorities"])
def test_a_disk_full_of_small_messages_is_worked_off(
    tmp_path: Path, retention: int, mixed: bool, size: int
) -> None:
    """Every message that was put is taken and acknowledged, though each costs a record more."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        q = weclaw.Queue(disk / "t.wq", segment_bytes=65536, retention=retention, flush="os")
        n = fill(q, mixed, size)
        assert n > 1_500
        done = 0
        with contextlib.suppress(weclaw.Empty):
            while True:
                q.get(block=False).ack(result=done)
                done += 1
        assert done == n
        q.put("there is room again")
        q.close()
        with weclaw.Queue(disk / "t.wq") as again:
            assert again.get(block=False).body == "there is room again"


@pytest.mark.parametrize("ending", ["fail", "nack"])
@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "priorities"])
def test_everything_on_a_full_disk_may_fail(tmp_path: Path, mixed: bool, ending: str) -> None:
    """Each message becomes a dead letter with its reason, though nothing is ever acknowledged."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        q = weclaw.Queue(
            disk / "t.wq",
            segment_bytes=65536,
            retention=0,
            flush="os",
            retry=weclaw.RetryPolicy(max_retries=0),
        )
        n = fill(q, mixed)
        with contextlib.suppress(weclaw.Empty):
            while True:
                msg = q.get(block=False)
                reason = f"ValueError: no such thing {msg[1]}"
                if ending == "fail":
                    msg.fail(reason)
                else:
                    msg.nack(reason=reason)
        assert q.qsize() == 0
        assert len(q.dlq) == n
        q.close()
        with weclaw.Queue(disk / "t.wq") as again:
            letters = list(again.dlq)
            assert sorted(letter.body[1] for letter in letters) == list(range(n))
            assert all(x.reason == f"ValueError: no such thing {x.body[1]}" for x in letters)


@pytest.mark.parametrize("size", [100, 1_000])
@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "priorities"])
def test_everything_on_a_full_disk_goes_through_its_retries(
    tmp_path: Path, mixed: bool, size: int
) -> None:
    """Each message fails four times, as the default policy has it, and is a dead letter then."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        policy = weclaw.RetryPolicy(backoff=0.001, multiplier=1)
        q = weclaw.Queue(disk / "t.wq", segment_bytes=65536, retention=0, flush="os", retry=policy)
        n = fill(q, mixed, size)
        assert n > 1_000
        ballast(disk)
        failed = 0
        while q.qsize():
            q.get(timeout=5).nack(reason=f"ValueError: {'no such thing ' * 4}{failed:12}")
            failed += 1
        assert failed == 4 * n
        letters = list(q.dlq)
        assert sorted(letter.body[1] for letter in letters) == list(range(n))
        assert {len(letter.failures) for letter in letters} == {4}
        assert q.dlq.purge() == n
        q.put("there is room again")
        q.close()


@pytest.mark.parametrize(("size", "mib"), [(100, 2), (1_000, 2), (1_000, 3)])
def test_what_is_put_off_again_and_again_does_not_fill_a_disk(
    tmp_path: Path, size: int, mib: int
) -> None:
    """A full disk of messages that are all put off twenty times, uncounted, is worked off then."""
    # Not small ones on a larger disk: each segment that gets full costs carrying all that waits,
    # and with 3 MiB that took longer on a machine with much else to do than a test may.
    with small_disk(tmp_path / "disk", mib << 20) as disk:
        q = weclaw.Queue(disk / "t.wq", segment_bytes=65536, flush="os")
        n = fill(q, mixed=False, size=size)
        ballast(disk)
        for _ in range(20 * n):
            q.get(timeout=5).nack(backoff=0.001, count=False)
        seen = set()
        while q.qsize():
            msg = q.get(timeout=5)
            seen.add(msg[1])
            msg.ack()
        assert seen == set(range(n))
        assert q.offset > mib << 20  # so much was written
        q.put("there is room again")
        q.close()


@pytest.mark.parametrize("retention", [3600, 0])
def test_every_group_works_off_a_full_disk(tmp_path: Path, retention: int) -> None:
    """What is kept back is for each group that has a message to settle."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        store = weclaw.open(disk / "t.wq", segment_bytes=65536, retention=retention, flush="os")
        groups = [store.queue(group=name) for name in ("a", "b", "c")]
        for q in groups:
            with contextlib.suppress(weclaw.Empty):
                q.get(block=False)
        n = fill(groups[0], mixed=True)
        assert n > 500
        for q in groups:
            seen = set()
            with contextlib.suppress(weclaw.Empty):
                while True:
                    msg = q.get(block=False)
                    seen.add(msg[1])
                    msg.ack()
            assert seen == set(range(n))
        groups[0].put("there is room again")
        store.close()


def test_what_was_kept_back_is_held_after_a_kill(tmp_path: Path) -> None:
    """Opened anew on the full disk, the file still has what its messages need to be settled."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        with Child(fill_and_report, str(disk / "t.wq")) as child:
            n = child.hear()
            child.kill()
        ballast(disk)
        q = weclaw.Queue(disk / "t.wq", flush="os")
        left = n
        with contextlib.suppress(weclaw.Empty):
            while True:
                q.get(block=False).ack(result=left)
                left -= 1
        assert left == 0
        q.put("there is room again")
        q.close()


def fill_and_report(pipe, path):
    q = weclaw.Queue(path, segment_bytes=65536, flush="os")
    n = 0
    try:
        while True:
            q.put(["x" * 100, n], priority=n % 2 * 9)
            n += 1
    except weclaw.DiskFullError:
        pipe.send(n)
    time.sleep(60)


def test_looking_needs_no_room(tmp_path: Path) -> None:
    """With nothing left even for settling, all that is asked is answered, and nobody is told of a
    letter before it is written.
    """
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        told: list[str] = []
        q = weclaw.Queue(
            disk / "t.wq",
            segment_bytes=65536,
            flush="os",
            retry=weclaw.RetryPolicy(max_crashes=0),
            on_dead=lambda letter: told.append(letter.id),
        )
        n = fill(q, mixed=False, size=20_000)
        with Child(take_and_report, str(disk / "t.wq")) as child:
            held = child.hear()
            mine = q.get(block=False, visibility_timeout=None)
            ballast(disk)
            with contextlib.suppress(weclaw.DiskFullError):
                while True:
                    mine.extend(60)
            child.kill()
        with pytest.raises(weclaw.DiskFullError):
            q.get(block=False)
        for _ in range(2):
            assert len(q.dlq) == len(list(q.dlq)) == len(held)
            assert q.dlq.get(held[0]).reason == "consumer died"
            assert q.qsize() == n - len(held) - 1
            assert q.stats()[:4] == (n - len(held) - 1, 0, 1, len(held))
            assert q.status(held[0]) == "dead"
            assert q.peek(1)[0].id not in held
            assert q.offset > 0
        assert not told
        q.close()


@pytest.mark.parametrize("size", range(19_900, 20_000, 30))
@pytest.mark.parametrize("held", [0, 20])
def test_what_is_taken_on_a_full_disk_can_be_ended(tmp_path: Path, size: int, held: int) -> None:
    """Wherever in the last segment it ends: taking is refused first, and never the ending."""
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        q = weclaw.Queue(disk / "t.wq", segment_bytes=65536, flush="os")
        n = fill(q, mixed=False, size=size)
        inflight = q.get_many(held, visibility_timeout=None) if held else []
        ballast(disk)
        msg = None
        with pytest.raises(weclaw.DiskFullError, match="nothing was taken"):
            while True:
                msg = q.get(block=False)
                msg.release()
        assert msg is not None
        with pytest.raises(weclaw.LeaseLostError):
            msg.ack()
        for msg in inflight:
            msg.nack(backoff=60, reason="ValueError: " + "x" * 100)
        assert q.stats()[:4] == (n - held, held, 0, 0)
        q.close()


def take_and_report(pipe, path):
    q = weclaw.Queue(path, flush="os")
    pipe.send([msg.id for msg in q.get_many(20, visibility_timeout=None)])
    time.sleep(60)


def test_closing_on_a_full_disk_raises_nothing(tmp_path: Path) -> None:
    """There is nothing left to be written that could not be done at the next opening."""
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        q = weclaw.Queue(disk / "t.wq", segment_bytes=65536, flush="os")
        n = 0
        with contextlib.suppress(weclaw.DiskFullError):
            while True:
                q.put(["x" * 20_000, n])
                n += 1
        with contextlib.suppress(weclaw.DiskFullError):
            while True:
                q.get(block=False).release()
        q.close()


def test_a_settling_that_found_no_room_at_first_is_done_with_the_room_that_was_made(
    tmp_path, monkeypatch
):
    """A write that fails for want of space is tried again with the lease it had."""
    from weclaw_embedded import _files

    real = _files.write_at
    full = []

    def write_at(fd, buffers, offset):
        if full:
            raise weclaw.DiskFullError(full.pop())
        return real(fd, buffers, offset)

    with weclaw.Queue(tmp_path / "q.wq", segment_bytes=65536, retention=0) as q:
        for body in ("ack", "nack", "fail", "tx"):
            q.put_many([body * 1000 for _ in range(30)])
        first = q.get_many(60)
        for msg in first[:-4]:
            msg.ack()
        acked, nacked, failed, moved = first[-4:]
        monkeypatch.setattr(_files, "write_at", write_at)
        monkeypatch.setattr(type(q._engine), "make_room", lambda engine, at_most: 1)
        full.append("no room")
        acked.ack(result=1)
        full.append("no room")
        nacked.nack(backoff=60)
        full.append("no room")
        failed.fail()
        full.append("no room")
        with q.transaction() as tx:
            tx.ack(moved)
            tx.put("next")
        assert not full
        assert [q.status(msg.id) for msg in (acked, nacked, failed, moved)] == [
            "done",
            "delayed",
            "dead",
            "done",
        ]
        assert q.stats()[:4] == (61, 1, 0, 1)
