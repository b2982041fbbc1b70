"""Contract 9: a file that was deleted or replaced in use is read and saved from what is open."""

from __future__ import annotations

import asyncio
import gc
import os
import sys

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import eventually, scratch

import weclaw_embedded as weclaw
from weclaw_embedded import threads


def save_when_told(pipe, path, out):
    store = weclaw.open(path)
    q = store.queue()
    id = q.put("of the child")
    pipe.send(id)
    pipe.recv()
    try:
        q.put("too late")
    except weclaw.StoreFailedError as error:
        pipe.send(str(error))
    store.backup(out)
    pipe.send(q.status(id))
    store.close()


def take_away(path, tmp_path, how):
    if how == "deleted":
        path.unlink()
        return
    with weclaw.Queue(tmp_path / "other.wq") as q:
        q.put("of another queue")
    os.replace(tmp_path / "other.wq", path)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_was_deleted_or_replaced_in_use_is_read_and_saved(path, tmp_path, how):
    """Each process that has it open says so, reads on, and saves all that was confirmed."""
    saved = [tmp_path / "saved.wq", tmp_path / "of the child.wq"]
    store = weclaw.open(path)
    q = store.queue()
    done, dead, waits = (q.put(n) for n in range(3))
    q.get().ack(result="result")
    q.get().fail("why")
    with Child(save_when_told, path, saved[1]) as child:
        child.hear()
        take_away(path, tmp_path, how)
        changes = [lambda: q.put(1), q.get, lambda: q.cancel(waits), q.purge, q.dlq.redrive]
        for change in [*changes, store.flush, lambda: q.result(waits, timeout=1.0)]:
            with pytest.raises(weclaw.StoreFailedError, match="keep it open, save it") as caught:
                change()
            assert f"/proc/{os.getpid()}/fd/" in str(caught.value)
            assert "is safe" not in str(caught.value)
        stats = q.stats()
        assert (stats.ready, stats.settled, stats.dead) == (2, 1, 1)
        assert [q.status(id) for id in (done, dead, waits)] == ["done", "dead", "ready"]
        assert q.result(done) == "result"
        with pytest.raises(weclaw.DeadLetterError):
            q.result(dead)
        with pytest.raises(weclaw.Empty):
            q.result(waits)
        assert [msg.body for msg in q.peek(5)] == [2, "of the child"]
        assert [(letter.body, letter.reason) for letter in q.dlq] == [(1, "why")]
        assert (q.qsize(), q.dlq.export(tmp_path / "letters.jsonl")) == (2, 1)
        assert (store.verify(), len(store.groups())) == ([], 1)
        with pytest.raises(weclaw.LockedError, match="save it first"):
            weclaw.Queue(path)
        store.backup(saved[0])
        store.close()
        child.say("go on")
        assert "keep it open, save it" in child.hear()
        assert child.hear() == "ready"
        assert child.wait() == 0
    for one in saved:
        with weclaw.Queue(one) as q:
            assert [q.status(id) for id in (done, dead, waits)] == ["done", "dead", "ready"]
            assert [msg.body for msg in q.peek(5)] == [2, "of the child"]


def test_who_has_only_a_queue_saves_by_its_store(path, tmp_path):
    """No other store can be opened then; the error says which one there is."""

    async def save():
        async with weclaw.AsyncQueue(path) as q:
            assert await asyncio.to_thread(q.store.verify) == []
            await asyncio.to_thread(q.store.backup, tmp_path / "by a task.wq")

    with weclaw.Queue(path) as q:
        q.put("kept")
        asyncio.run(save())
        path.unlink()
        with pytest.raises(weclaw.StoreFailedError, match=r"q\.store\.backup\(path\)"):
            q.put("too late")
        q.store.backup(tmp_path / "saved.wq")
    for name in ("saved.wq", "by a task.wq"):
        with weclaw.Queue(tmp_path / name) as q:
            assert [msg.body for msg in q.peek(5)] == ["kept"]
    with weclaw.open(tmp_path / "saved.wq") as store:
        assert store.queue().store is store


def test_a_result_is_read_with_await_from_what_was_deleted(path):
    """As the other reading calls are, which are those of `Queue`."""

    async def run():
        async with weclaw.AsyncQueue(path) as q:
            id, waits = await q.put("task"), await q.put("waits")
            await (await q.get()).ack(result="result")
            path.unlink()
            with pytest.raises(weclaw.StoreFailedError, match="keep it open"):
                await q.put("too late")
            assert await q.result(id) == "result"
            assert (await q.stats()).ready == 1
            with pytest.raises(weclaw.Empty):
                await q.result(waits)

    asyncio.run(run())


def test_what_was_only_moved_has_a_name(path, tmp_path):
    """To close it loses nothing, so the advice is that, and looking is refused, too."""
    with weclaw.open(path) as store:
        q = store.queue()
        q.put("kept")
        path.rename(tmp_path / "moved.wq")
        for call in (lambda: q.put(1), q.stats, lambda: store.backup(tmp_path / "saved.wq")):
            with pytest.raises(weclaw.StoreFailedError, match="close the file in every process"):
                call()
    assert not (tmp_path / "saved.wq").exists()
    with weclaw.Queue(tmp_path / "moved.wq") as q:
        assert q.get().body == "kept"


def test_a_file_made_where_another_one_was_is_told_of(path, caplog):
    """The scratch folder knows that there was something: it may have been deleted by mistake."""
    for bodies in ([], ["x"]):
        with weclaw.Queue(path) as q:
            q.put_many(bodies)
        path.unlink()
        caplog.clear()
        with weclaw.Queue(path) as q:
            assert q.qsize() == 0
        told = [record for record in caplog.records if "made anew" in record.message]
        assert len(told) == len(bodies)
        path.unlink()
    assert scratch(path).exists()


def drop(queues, engine):
    """Drop these open, and wait until the file is closed and all of that is said."""
    queues.clear()
    gc.collect()
    eventually(lambda: engine.closed)
    engine.timer._thread.join(30)


@pytest.mark.parametrize("held", [False, True])
def test_of_what_was_deleted_and_dropped_open_the_log_has_one_line(path, held, caplog):
    """Nobody is there to be told, so the log is; once, though handing back and flushing both meet
    it, and without a traceback.
    """
    queues = [threads.Queue(path=path)]
    queues[0].put(1)
    if held:
        queues[0].get()
    path.unlink()
    drop(queues, queues[0]._core.engine)
    (line,) = (one for one in caplog.records if one.levelname == "ERROR")
    assert "the file was deleted, moved or replaced while open" in line.message
    assert line.exc_info is None


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_fails_as_the_dropped_is_closed_is_told_in_the_log(path, caplog, monkeypatch):
    """Also what only the close has met."""

    def refused():
        raise weclaw.StorageError("the disk is gone")

    queues = [weclaw.Queue(path)]
    queues[0].put(1)
    monkeypatch.setattr(queues[0]._engine, "flush", refused)
    drop(queues, queues[0]._engine)
    assert [(one.message, one.exc_info) for one in caplog.records] == [("the disk is gone", None)]


def cut(path, tmp_path):
    """As `: > FILE` does, and `copytruncate` of what rotates logs."""
    path.open("wb").close()


def cut_in_part(path, tmp_path):
    with path.open("r+b") as file:
        file.truncate(10_000)


def copied_over(path, tmp_path):
    """Another queue of at least the size, as a backup is put back without a stop."""
    with weclaw.Queue(tmp_path / "other.wq") as q:
        q.put_many(["of another queue"] * 20_000)
    path.write_bytes((tmp_path / "other.wq").read_bytes())


def copied_over_by_older(path, tmp_path):
    """The same queue as it was a few segments ago."""
    path.write_bytes((tmp_path / "older.wq").read_bytes())


def replaced_by_text(path, tmp_path):
    path.write_text("no queue\n" * 1_000_000)


WRITTEN_OVER = [cut, cut_in_part, copied_over, copied_over_by_older, replaced_by_text]


def put_when_told(pipe, path):
    with weclaw.Queue(path) as q:
        pipe.send(q.put("of the child"))
        pipe.recv()
        try:
            pipe.send(q.put("too late"))
        except weclaw.StoreFailedError as error:
            pipe.send(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="the system says when a file is opened")
@pytest.mark.parametrize("how", WRITTEN_OVER, ids=lambda how: how.__name__)
def test_nothing_is_confirmed_in_a_file_that_was_cut_or_written_over(path, tmp_path, how):
    """By no process that has it open, and none says that what was in it is safe."""
    weclaw.Queue(path).close()
    (tmp_path / "older.wq").write_bytes(path.read_bytes())
    with weclaw.open(path) as store, Child(put_when_told, path) as child:
        child.hear()
        q = store.queue()
        q.put_many([b"x" * 1_000_000] * 3)
        how(path, tmp_path)
        for call in (lambda: q.put(1), q.get, store.flush, q.stats):
            with pytest.raises(weclaw.StoreFailedError, match="cut or written over") as caught:
                call()
            assert "is safe" not in str(caught.value)
        with pytest.raises(weclaw.StoreFailedError, match="cut or written over"):
            store.backup(tmp_path / "saved.wq")
        child.say("go on")
        assert "cut or written over" in child.hear()
        assert child.wait() == 0
    assert not (tmp_path / "saved.wq").exists()


def test_who_waits_notices_that_the_file_was_cut(path):
    """By its size, where nothing else tells: nobody had to open it for that."""
    with weclaw.Queue(path) as q:
        q.put("lost")
        q.get()
        os.truncate(path, 0)
        with pytest.raises(weclaw.StoreFailedError, match="cut or written over"):
            q.get(timeout=30)


def test_a_file_that_others_only_open_goes_on(path, tmp_path):
    """To look at it, to copy it, or to write to it what stands there."""
    with weclaw.Queue(path) as q:
        q.put("kept")
        (tmp_path / "copy.wq").write_bytes(path.read_bytes())
        with path.open("r+b") as file:
            head = file.read(100)
            file.seek(0)
            file.write(head)
        with weclaw.open(path, readonly=True) as store:
            assert store.queue().qsize() == 1
        q.put("goes on")
        assert q.qsize() == 2


def test_no_backup_is_made_of_a_file_with_nothing_to_read(path, tmp_path):
    """It could not be opened, which would be found out when it is needed."""
    with weclaw.open(path) as store:
        store.queue().put("lost")
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(4096)
            file.write(bytes(size - 4096))
        with pytest.raises(weclaw.CorruptError, match="a backup would hold nothing"):
            store.backup(tmp_path / "saved.wq")
    assert not (tmp_path / "saved.wq").exists()
