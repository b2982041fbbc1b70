"""A disk that fails to read, for a moment or for good, and what the queue makes of it."""

import asyncio
import errno
import os
import shutil
import types

import pytest
from tests.helpers.queues import drain

import weclaw_embedded as weclaw
from weclaw_embedded import _files
from weclaw_embedded.wal import TAIL, Log

PAGE = 4096


class Disk:
    """Stands before one file, and reads nothing of it that touches one of the `bad` ranges."""

    def __init__(self, path, monkeypatch):
        self.path = str(path)
        self.bad = []
        double = types.ModuleType("os")
        double.__dict__.update(os.__dict__)
        double.pread = self.pread
        double.pwrite = self.pwrite
        monkeypatch.setattr(_files, "os", double)

    def pread(self, fd, n, offset):
        for begin, end in self.bad:
            if offset < end and begin < offset + n and self.is_it(fd):
                raise OSError(errno.EIO, "Input/output error")
        return os.pread(fd, n, offset)

    def pwrite(self, fd, data, offset):
        for place in self.bad:  # a sector that is written anew is mapped to another place
            is_hit = offset < place[1] and place[0] < offset + len(data)
            if is_hit and place[1] - place[0] == PAGE and self.is_it(fd):
                self.bad = [one for one in self.bad if one != place]
        return os.pwrite(fd, data, offset)

    def is_it(self, fd):
        return os.readlink(f"/proc/self/fd/{fd}") == self.path


@pytest.fixture
def disk(path, monkeypatch):
    return Disk(path, monkeypatch)


def bodies(n=6):
    return [f"{i} " + "x" * 5000 for i in range(n)]


def fill(path, **options):
    with weclaw.Queue(path, **options) as q:
        for body in bodies():
            q.put(body)


def page_of(path, text):
    at = path.read_bytes().index(text) // PAGE * PAGE
    return at, at + PAGE


@pytest.mark.parametrize("reopened", [False, True])
def test_reads_that_fail_for_a_moment_lose_nothing(path, disk, reopened):
    """Each call says so, changes nothing, and all is there when the disk reads again."""
    fill(path)
    with weclaw.Queue(path) as q:
        disk.bad = [(0, 1 << 40)]
        for _ in range(3):
            with pytest.raises(weclaw.StorageError, match="nothing was changed") as told:
                q.get(block=False)
            assert not isinstance(told.value, weclaw.CorruptError | weclaw.StoreFailedError)
        disk.bad = []
        assert q.stats()[:3] == (6, 0, 0)
        assert q.stats().damaged == 0
        if not reopened:
            assert drain(q) == bodies()
    with weclaw.Queue(path) as q:
        assert drain(q) == (bodies() if reopened else [])
        assert q.stats().damaged == 0
        assert q._store.verify() == []


def test_nor_do_they_on_an_event_loop(path, disk):
    """A task is told as a thread is, and the message is there for the next."""

    async def work():
        async with weclaw.AsyncQueue(path) as q:
            disk.bad = [(0, 1 << 40)]
            with pytest.raises(weclaw.StorageError, match="nothing was changed"):
                await q.get(block=False)
            disk.bad = []
            for body in bodies():
                async with await q.get(block=False) as msg:
                    assert msg.body == body
                    assert msg.retry_count == msg.crash_count == 0

    fill(path)
    asyncio.run(work())


def test_who_is_told_by_one_call_of_many_at_once_spoils_nothing_for_the_others(path, disk):
    """A job that could not read what others wrote leaves the index of its turn as it was."""
    from weclaw_embedded._session import Job

    with weclaw.Queue(path) as q, weclaw.Queue(path, "other") as other:
        assert q._store._engine is other._store._engine
        engine = q._store._engine
        for body in bodies():
            q.put(body)
        engine._written_to = engine._written_from = -1  # as if another process had put them

        def look(session):
            return session.tx.applied

        def read_again(session):
            disk.bad = []
            return session.tx.applied

        disk.bad = [(0, 1 << 40)]
        jobs = [Job(look), Job(read_again)]
        engine.run_jobs(jobs)
        assert isinstance(jobs[0].error, weclaw.StorageError)
        assert jobs[1].error is None
        assert drain(q) == bodies()


@pytest.mark.parametrize("at", [b"2 xxx", b"5 xxx"], ids=["within", "at the end"])
@pytest.mark.parametrize("killed", [False, True])
def test_what_an_opening_could_not_read_comes_back_when_the_next_can(path, disk, at, killed):
    """It is called damage, is cut off by nobody, and the rest flows meanwhile."""
    if killed:
        q = weclaw.Queue(path)
        for body in bodies():
            q.put(body)
        copy = path.read_bytes()
        q.close()
        path.write_bytes(copy)
    else:
        fill(path)
    shutil.rmtree(f"{path}.d")
    disk.bad = [page_of(path, at)]
    before = path.read_bytes()
    with weclaw.Queue(path) as q:
        assert q.stats().damaged
        assert any("can't read" in reason for _, reason in q._store.verify())
        q.put("more")
        got = drain(q)
        assert got[-1] == "more"
        assert 3 <= len(got) < 7
    begin, end = disk.bad[0]
    assert path.read_bytes()[begin:end] == before[begin:end]
    disk.bad = []
    with weclaw.Queue(path) as q:
        got += drain(q)
        assert sorted(got) == sorted([*bodies(), "more"])
    with weclaw.Queue(path) as q:
        assert drain(q) == []


def test_a_segment_whose_headers_cannot_be_read_is_not_taken_for_free(path, disk):
    """While it may be the last one the file does not open; later all is there."""
    with weclaw.Queue(path, segment_bytes=65536) as q:
        for n in range(30):
            q.put(f"{n} " + "x" * 5000)
        log = q._store._engine.log
        slot = log.slot_position(log.slot_of(log.segments()[-1]))
    shutil.rmtree(f"{path}.d")
    before = path.read_bytes()
    disk.bad = [(slot, slot + 65536)]
    with pytest.raises(weclaw.StorageError, match="could not be read"):
        weclaw.Queue(path)
    assert path.read_bytes() == before
    disk.bad = []
    with weclaw.Queue(path) as q:
        assert [body.split()[0] for body in drain(q)] == [str(n) for n in range(30)]


def test_repair_writes_over_nothing_that_an_opening_did_not_find(path, disk):
    """What can't be read just now is not set aside by it; what an opening can't read either is."""
    fill(path)
    with weclaw.open(path) as store:
        disk.bad = [page_of(path, b"2 xxx")]
        before = path.read_bytes()
        assert store.verify()
        with pytest.raises(weclaw.StorageError, match="could not be read"):
            store.repair()
        assert path.read_bytes() == before
    with weclaw.open(path) as store:
        assert store.repair()
        assert store.verify() == []
        assert len(drain(store.queue())) in (4, 5)


def test_a_place_that_stays_unreadable_stops_nothing_in_any_process(path, disk, tmp_path):
    """Who joins those who opened it walks around it, too: replay, looking and backup go on."""
    fill(path)
    shutil.rmtree(f"{path}.d")
    disk.bad = [page_of(path, b"2 xxx")]
    with weclaw.Queue(path) as q:
        engine = q._store._engine
        other = Log(engine.fd, engine.header, engine.page)  # as a process has it that comes later
        other.is_at_rest = False
        frames = other.frames(other.head_offset, engine.page.words[TAIL], on_damage=lambda *_: None)
        assert len(list(frames)) > 4
        got = drain(q)
        assert q.replay(offset="earliest") == len(got)
        assert drain(q) == got
        q._store.backup(tmp_path / "copy.wq")
    disk.bad = []
    with weclaw.Queue(tmp_path / "copy.wq") as q:
        assert q.stats().damaged
