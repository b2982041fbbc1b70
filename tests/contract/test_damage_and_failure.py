"""Contract 9: what happens when files, folders, disks and syncs go wrong while in use."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, drain, eventually, scratch, take

import weclaw_embedded as weclaw
from weclaw_embedded import _damage, _files, _mend, _names, _reclaim, _records, threads
from weclaw_embedded.wal import HEAD, TAIL


def keep_putting(pipe, path, prefix):
    q = weclaw.Queue(path)
    n = 0
    try:
        while not pipe.poll():
            q.put([prefix, n])
            pipe.send(n)
            n += 1
            time.sleep(0.001)
        pipe.send("told to stop")
    except weclaw.WeclawError as error:
        pipe.send(error)
    try:
        q.close()
    except BaseException as error:  # noqa: BLE001 - what close raises is what is asked here
        pipe.send(("close raised", repr(error)))


def confirmed(child, at_least=20):
    """Hear at least so many confirmations; the numbers."""
    return [child.hear() for _ in range(at_least)]


@pytest.mark.parametrize("what", ["scratch deleted", "file moved", "file replaced", "file deleted"])
def test_what_is_taken_away_in_use_stops_the_users_and_loses_nothing(path, tmp_path, what):
    """Scratch deleted or file moved in use: `StoreFailedError` at the next call, nothing lost."""
    kept = path
    with Child(keep_putting, path, "a") as one, Child(keep_putting, path, "b") as two:
        puts = {"a": confirmed(one), "b": confirmed(two)}
        if what == "scratch deleted":
            shutil.rmtree(scratch(path))
        elif what == "file moved":
            kept = tmp_path / "moved.wq"
            path.rename(kept)
        elif what == "file deleted":
            kept = tmp_path / "linked.wq"
            os.link(path, kept)
            path.unlink()
        else:
            kept = tmp_path / "moved.wq"
            os.link(path, kept)
            with weclaw.Queue(tmp_path / "other.wq") as q:
                q.put("another queue")
            os.replace(tmp_path / "other.wq", path)
        for name, child in (("a", one), ("b", two)):
            while True:
                said = child.hear(timeout=15.0)
                if isinstance(said, int):
                    puts[name].append(said)
                    continue
                assert isinstance(said, weclaw.StoreFailedError), said
                break
            assert child.hear_rest() == []
            assert child.wait() == 0
    if kept != path:
        shutil.rmtree(scratch(path), ignore_errors=True)
        with weclaw.Queue(kept) as q:
            bodies = drain(q)
    else:
        with weclaw.Queue(path) as q:
            bodies = drain(q)
    for name, numbers in puts.items():
        mine = [n for prefix, n in bodies if prefix == name]
        # A put that raised is in doubt: it may be there, once, behind all that returned.
        assert mine[: len(numbers)] == numbers
        assert len(mine) <= len(numbers) + 1


@pytest.mark.parametrize("flush", ["sync", "batch", "os"])
@pytest.mark.parametrize("call", ["put", "put_many", "get", "ack", "nack", "stats", "flush"])
def test_each_call_says_that_the_file_was_moved(path, tmp_path, call, flush):
    """The very next call raises, whichever it is and whatever was promised before."""
    q = weclaw.Queue(path, flush=flush)
    q.put_many(["x", "y"])
    msg = q.get()
    calls = {
        "put": lambda: q.put("z"),
        "put_many": lambda: q.put_many(["z"]),
        "get": lambda: q.get(block=False),
        "ack": msg.ack,
        "nack": msg.nack,
        "stats": q.stats,
        "flush": q.flush,
    }
    path.rename(tmp_path / "moved.wq")
    with pytest.raises(weclaw.StoreFailedError, match="moved or replaced"):
        calls[call]()
    q.close()


def stay_open(pipe, path):
    q = weclaw.Queue(path)
    q.put("x")
    pipe.send("open")
    pipe.recv()
    try:
        q.put("y")
    except weclaw.WeclawError as error:
        pipe.send(error)
    else:
        pipe.send("put")
    q.close()


def test_who_opens_after_the_scratch_was_deleted_in_use_is_locked_out(path):
    """While old users of a deleted scratch live, who opens gets `LockedError`."""
    with Child(stay_open, path) as child:
        child.hear()
        shutil.rmtree(scratch(path))
        with pytest.raises(weclaw.LockedError):
            weclaw.Queue(path)
        child.say("put")
        assert isinstance(child.hear(), weclaw.StoreFailedError)
        child.end()
    with weclaw.Queue(path) as q:
        # The put that raised is in doubt: it may be there.
        assert drain(q) in (["x"], ["x", "y"])


@pytest.fixture
def failing_sync(monkeypatch):
    """The next sync of the log fails, as a disk's would; those after it lie that all is well."""
    from weclaw_embedded import _files

    state = {"fail": False, "failed": 0}
    real = _files.sync_data

    def sync_data(fd):
        if state["fail"]:
            state["failed"] += 1
            if state["failed"] == 1:
                raise OSError(errno.EIO, "Input/output error")
            return None
        return real(fd)

    monkeypatch.setattr(_files, "sync_data", sync_data)
    return state


def test_a_failed_sync_is_never_retried_into_a_success(path, failing_sync):
    """After a failed sync every write is refused until all have closed and it is reopened."""
    q, other = weclaw.Queue(path), weclaw.Queue(path)
    before = [q.put(n) for n in range(5)]
    held = q.get()
    failing_sync["fail"] = True
    with pytest.raises(weclaw.StoreFailedError):
        q.put("in doubt")
    for change in (
        lambda: q.put("refused"),
        lambda: other.put("refused"),
        lambda: other.put_many(["refused"]),
        lambda: held.ack(),
        lambda: other.get(block=False),
    ):
        with pytest.raises(weclaw.StoreFailedError):
            change()
    other.close()
    q.close()
    failing_sync["fail"] = False
    q = weclaw.Queue(path)
    bodies = []
    for _ in range(6):
        try:
            msg = q.get(block=False)
        except weclaw.Empty:
            break
        bodies.append(msg.body)
        msg.ack()
    assert bodies[:5] == list(range(5))
    assert bodies[5:] in ([], ["in doubt"])
    assert len(before) == 5
    q.put("again")
    assert drain(q) == ["again"]
    q.close()


def test_a_sync_that_finds_no_room_is_a_failed_one(path, monkeypatch):
    """A thin volume says ENOSPC only then: the put is not made again, and no later one is safe."""
    with weclaw.Queue(path) as q:
        q.put("before")
        real, calls = os.fdatasync, []

        def fdatasync(fd):
            calls.append(fd)
            if len(calls) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd)

        monkeypatch.setattr(os, "fdatasync", fdatasync)
        for _ in range(2):
            with pytest.raises(weclaw.StoreFailedError):
                q.put("in doubt")
        assert len(calls) == 1
    monkeypatch.undo()
    with weclaw.Queue(path) as q:
        assert drain(q) in (["before"], ["before", "in doubt"])


def test_a_sync_that_fails_at_the_end_is_remembered(path, monkeypatch):
    """The last to close finds it: what the disk may lack is written again by the next opening."""
    from weclaw_embedded import _files, _recovery

    real, syncs, again = _files.sync_data, [], []

    def sync_data(fd):
        syncs.append(fd)
        if len(syncs) == 2:  # after the flush: that of the frame which vouches
            raise OSError(errno.EIO, "Input/output error")
        return real(fd)

    q = weclaw.Queue(path, flush="os")
    q.put("kept")
    monkeypatch.setattr(_files, "sync_data", sync_data)
    q.close()
    assert len(syncs) == 2
    monkeypatch.undo()
    write_again = _recovery._write_again
    monkeypatch.setattr(
        _recovery, "_write_again", lambda *args: again.append(1) or write_again(*args)
    )
    with weclaw.Queue(path) as q:
        assert drain(q) == ["kept"]
    assert again


def write_until_refused(pipe, path):
    q = weclaw.Queue(path)
    pipe.send("open")
    try:
        while True:
            q.put("x")
            time.sleep(0.001)
    except weclaw.WeclawError as error:
        pipe.send(type(error).__name__)
    pipe.recv()
    q.close()
    pipe.send("closed")


def test_a_failed_sync_stops_all_processes(path, failing_sync):
    """A sync that fails in one process refuses the writes of every other, until all have closed."""
    q = weclaw.Queue(path)
    q.put("x")
    with Child(write_until_refused, path) as child:
        child.hear()
        failing_sync["fail"] = True
        with pytest.raises(weclaw.StoreFailedError):
            for _ in range(1000):
                q.put("y")
        assert child.hear() == "StoreFailedError"
        q.close()
        failing_sync["fail"] = False
        with pytest.raises(weclaw.StoreFailedError), weclaw.Queue(path) as again:
            again.put("z")
        child.say("close")
        assert child.hear() == "closed"
        child.end()
    with weclaw.Queue(path) as q:
        q.put("z")
        assert drain(q)[-1] == "z"


def test_a_write_that_fails_is_no_success(path, monkeypatch):
    """A write error (EIO) raises and what was refused is not delivered."""
    from weclaw_embedded import _files

    q = weclaw.Queue(path)
    q.put("before")
    real = _files.write_at

    def write_at(fd, *args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(_files, "write_at", write_at)
    with pytest.raises(weclaw.StorageError):
        q.put("lost")
    monkeypatch.setattr(_files, "write_at", real)
    q.close()
    with weclaw.Queue(path) as q:
        q.put("after")
        assert drain(q) in (["before", "after"], ["before", "lost", "after"])


def test_a_put_that_found_no_room_leaves_nothing_to_wait_for(path, monkeypatch):
    """Refused while it was written it was promised nothing: who looks next finds nothing."""
    from weclaw_embedded import _files

    real = _files.write_at

    def write_at(fd, *args, **kwargs):
        raise weclaw.DiskFullError("there is no room")

    with weclaw.Queue(path) as q:
        q.put("before")
        assert q.get().body == "before"
        monkeypatch.setattr(_files, "write_at", write_at)
        with pytest.raises(weclaw.DiskFullError):
            q.put("refused")
        monkeypatch.setattr(_files, "write_at", real)
        with pytest.raises(weclaw.Empty):
            q.get(block=False)


def busy(pipe, path):
    q = weclaw.Queue(path)
    n = 0
    while not pipe.poll():
        q.put(["live", n])
        pipe.send(n)
        n += 1
        if n % 3 == 0:
            q.get().ack()
    q.close()


def test_backup_is_online_and_consistent(path, tmp_path, open_store):
    """A backup taken while others write opens as a queue of its own, with all from before it."""
    store = open_store()
    q = store.queue()
    ids = [q.put(["first", n]) for n in range(50)]
    q.get().ack(result="answer")
    q.get().fail("bad")
    other = store.queue("other", group="g", start="earliest")
    other.put("x")
    with Child(busy, path) as child:
        for _ in range(30):
            child.hear()
        copy = tmp_path / "backup.wq"
        store.backup(copy)
        child.say("stop")
        child.end()
    with weclaw.open(copy) as second:
        assert second.verify() == []
        r = second.queue()
        assert r.result(ids[0]) == "answer"
        assert r.status(ids[1]) == "dead"
        assert r.dlq.get(ids[1]).body == ["first", 1]
        bodies = [tuple(b) for b in drain(r)]
        assert len(bodies) == len(set(bodies))
        live = [n for name, n in bodies if name == "live"]
        assert live == list(range(len(live)))
        r.put("own life")
        assert drain(r) == ["own life"]
        assert drain(second.queue("other", group="g")) == ["x"]
    assert q.status(ids[-1]) in ("ready", "done")


def test_two_backups_at_once_are_both_whole(path, tmp_path, monkeypatch):
    """What the one still reads is kept when the other has ended."""
    from weclaw_embedded import _mend

    bodies = [b"%04d" % n * 250 for n in range(300)]
    with weclaw.open(path, retention=0, segment_bytes=2**16, flush="os") as store:
        q = store.queue()
        for body in bodies:
            q.put(body)
        begun, goes_on, real = threading.Event(), threading.Event(), _mend._write_copy

        def write_copy(*args):
            if threading.current_thread() is slow:
                begun.set()
                assert goes_on.wait(30)
            real(*args)

        monkeypatch.setattr(_mend, "_write_copy", write_copy)
        slow = threading.Thread(target=store.backup, args=(tmp_path / "one.wq",))
        slow.start()
        assert begun.wait(30)
        store.backup(tmp_path / "other.wq")
        assert drain(q) == bodies
        for _ in range(100):
            q.put(b"new" * 400)
        time.sleep(0.3)  # for what would free it
        assert store._engine.page.words[HEAD] == 0
        goes_on.set()
        slow.join()
        assert drain(q) == [b"new" * 400] * 100
        eventually(lambda: store._engine.page.words[HEAD] > 0)
    for name in ("one.wq", "other.wq"):
        with weclaw.open(tmp_path / name) as store:
            assert drain(store.queue()) == bodies
            assert store.verify() == []


def test_backup_does_not_replace_a_file(path, tmp_path, open_store):
    """A backup onto an existing file is refused, or at least never half there."""
    store = open_store()
    store.queue().put("x")
    (tmp_path / "precious").write_text("precious")
    with pytest.raises((weclaw.StorageError, FileExistsError)):
        store.backup(tmp_path / "precious")
    assert (tmp_path / "precious").read_text() == "precious"


def test_backup_to_a_place_that_is_none(path, tmp_path, open_store):
    """A folder that is missing is said in our words, of the copy and not of the queue."""
    store = open_store()
    store.queue().put("x")
    with pytest.raises(
        weclaw.StorageError, match=r"the backup .*copy.wq can't be written: No such"
    ):
        store.backup(tmp_path / "nowhere" / "copy.wq")
    assert store.queue().get().body == "x"


def damaged_file(path, at_body=7):
    bodies = [f"{n:04d}".encode() + random.Random(n).randbytes(150) for n in range(20)]
    with weclaw.Queue(path) as q:
        for body in bodies:
            q.put(body)
    content = bytearray(path.read_bytes())
    content[content.index(bodies[at_body]) + 60] ^= 1
    path.write_bytes(content)
    return bodies


@pytest.mark.parametrize("given", [True, False])
def test_what_repair_has_written_over_is_told_as_gone(path, given):
    """Asking for settled messages whose bytes were damaged is no error of the log's insides: not in
    the process that has repaired them, in one frame, nor in the next one.
    """
    with weclaw.open(path) as store:
        q = store.queue()
        ids = [q.put(f"hit by damage {n}", id=f"id {n}" if given else None) for n in range(3)]
        other = q.put("whole")
        for _ in ids:
            q.get().ack(result=1)
        content = path.read_bytes()
        with path.open("r+b") as file:
            for n in range(3):
                file.seek(content.index(b"hit by damage %d" % n))
                file.write(b"!")
        store._engine.log.forget_read()
        assert store.repair()
        gone_asked_for(q, ids)
        assert take(q)[0].id == other
    with weclaw.Queue(path) as q:
        gone_asked_for(q, ids)
        assert take(q)[0].id == other


def gone_asked_for(q, ids):
    for id in ids:
        assert q.status(id) == "unknown"
        with pytest.raises(KeyError):
            q.result(id)
        assert q.replay(ids=[id]) == 0
        assert not q.cancel(id)


@pytest.mark.parametrize("what", ["the result", "the message", "the result, repaired"])
def test_what_is_damaged_and_in_the_way_of_reclaim_stops_nothing(path, what):
    """Its neighbours are put, taken and freed; a result that is lost is never told as another."""
    result, body = b"r" * 60, b"m" * 60
    with weclaw.open(path, retention=0, segment_bytes=2**16, flush="os") as store:
        done = store.queue(group="done")
        waits = store.queue(group="waits", retry=weclaw.RetryPolicy(backoff=5000.0))
        id = done.put(body)
        done.get().ack(result=result)
        waits.get().nack()
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(content.index(result if what != "the message" else body) + 30)
            file.write(b"!")
        store._engine.log.forget_read()
        if what == "the result, repaired":
            assert store.repair()
            with pytest.raises(KeyError):
                done.result(id)
        for n in range(200):
            done.put(b"%d" % n * 300)
            for q in (done, waits):
                msg = q.get(timeout=30)
                assert msg.body == b"%d" % n * 300
                msg.ack()
        eventually(lambda: store._engine.log.head_offset > 2**16)
        if what != "the message":
            assert waits.status(id) == "delayed"
            with pytest.raises(weclaw.SerializationError):
                done.result(id)
    shutil.rmtree(f"{path}.d")
    with weclaw.open(path) as store:
        if what != "the message":
            with pytest.raises(weclaw.SerializationError):
                store.queue(group="done").result(id)


@pytest.mark.parametrize("how", ["delayed", "delayed with a key", "dead"])
def test_a_damaged_message_whose_segment_is_freed_is_in_nobodys_way(path, how):
    """It is set aside when its space goes: nobody comes upon it where it is no more."""
    body = b"m" * 60
    with weclaw.open(path, retention=0, segment_bytes=2**16, flush="os") as store:
        done = store.queue(group="done")
        waits = store.queue(group="waits", retry=weclaw.RetryPolicy(backoff=2.0))
        done.put(body, key="k" if "key" in how else None)
        done.get().ack()
        msg = waits.get()
        if how == "dead":
            msg.fail("blocked")
        else:
            msg.nack()
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(content.index(body) + 30)
            file.write(b"!")
        store._engine.log.forget_read()
        for n in range(200):
            done.put(b"%d" % n * 300)
            for q in (done, waits):
                q.get(timeout=30).ack()
        eventually(lambda: store._engine.log.head_offset > 2**16)
        (place,) = (offset for offset, _ in store.verify())
        assert msg.offset - 64 < place <= msg.offset  # the frame that it stood in
        done.put("after", key="k")
        assert waits.get(timeout=30).body == "after"
        assert list(waits.dlq) == []
        assert waits.dlq.redrive() == 0
        assert waits.stats()[:4] == (0, 0, 1, 0)


@pytest.mark.parametrize("how", ["ready", "delayed", "dead"])
def test_a_message_that_is_kept_nowhere_is_in_nobodys_way(path, how):
    """The index has it, and what should have carried it up is lost: it is set aside by whoever
    comes upon it. (Here its segment is freed by hand, with nothing carried.)
    """
    with weclaw.open(path, segment_bytes=2**16) as store:
        q = store.queue(retry=weclaw.RetryPolicy(backoff=0.2))
        gone = [q.put(n, key=f"k{n}") for n in range(3)]
        for _ in gone if how != "ready" else ():
            msg = q.get()
            if how == "dead":
                msg.fail("blocked")
            else:
                msg.nack()
        q.put_many([b"x" * 50_000] * 2)
        q.put("kept", key="k1")
        store._engine.run(lambda session: session.log.free(0))
        if how == "delayed":
            eventually(lambda: q.stats().delayed <= 1)
            assert [msg.body for msg in q.peek(10)] in ([], ["kept"])
        assert list(q.dlq) == []
        assert q.get(timeout=30).body == "kept"
        with pytest.raises(weclaw.Empty):
            q.get(block=False)
        assert q.dlq.redrive() == 0
        assert q.stats()[:4] == (0, 0, 1, 0)
        assert {q.status(id) for id in gone} == {"unknown"}


def blank_with_frame_before(log, record):
    """What repair leaves of two frames in a row that can't be read: one that says nothing."""
    before = 0
    for frame in log.frames(log.head_offset, log.state.words[TAIL]):
        if any(offset == record for offset, _ in frame.records):
            _mend._blank(log, before, frame.end)
            log.forget_read()
            return
        before = frame.offset
    raise AssertionError(record)


def test_what_repair_has_written_over_is_in_nobodys_way(path):
    """A checkpoint, and a message that was carried up there: both are done without."""
    with weclaw.open(path, retention=0, segment_bytes=2**16, flush="os") as store:
        done = store.queue(group="done")
        waits = store.queue(group="waits", retry=weclaw.RetryPolicy(backoff=5000.0))
        log = store._engine.log
        done.put("carried")
        done.get().ack()
        msg = waits.get()
        offset = msg.offset
        msg.nack()

        def put_until(enough):
            for n in range(600):
                done.put(b"%d" % n * 300)
                for q in (done, waits):
                    q.get(timeout=30).ack()
                if enough():
                    return
            raise AssertionError("nothing was freed")

        put_until(lambda: log.head_offset > 0)
        carried = store._engine.run(lambda session: session.tx.location(offset)).offset
        blank_with_frame_before(log, carried)
        put_until(lambda: log.head_offset > carried)
        blank_with_frame_before(log, log.checkpoint())
        store._engine.run(_damage._fold_anew)
        done.put("after")
        assert waits.get(timeout=30).body == "after"


def test_what_is_retained_stays_where_the_next_segment_is_lost(path):
    """When a segment ended is not known then; a later one says when it had."""
    with weclaw.open(path, segment_bytes=2**16) as store:
        q = store.queue()
        ids = []
        for n in range(60):
            ids.append(q.put(b"%d" % n * 2000))
            q.get().ack(result=n)
        slot = store._engine.log.slot_position(store._engine.log.slot_of(1))
    data = bytearray(path.read_bytes())
    for at in (slot, slot + 2**16 - 64):
        data[at : at + 64] = bytes(64)
    path.write_bytes(data)
    with weclaw.open(path) as store:
        wait_s = _reclaim.take_step(store._engine, False)
        assert wait_s is not None
        assert wait_s > 3600
        assert store.queue().result(ids[0]) == 0


def test_verify_writes_nothing_and_repair_mends(path):
    """`verify` names the damage and writes nothing; after `repair` the rest is in order."""
    bodies = damaged_file(path)
    with weclaw.open(path) as store:
        before = path.read_bytes()
        damage = store.verify()
        assert path.read_bytes() == before
        assert len(damage) == 1
        offset, reason = damage[0]
        assert isinstance(offset, int)
        assert isinstance(reason, str)
        assert reason
        store.repair()
        q = store.queue()
        assert drain(q) == bodies[:7] + bodies[8:]
        q.put("after")
        assert drain(q) == ["after"]
    with weclaw.open(path) as store:
        assert store.verify() == []
        assert store.queue().stats()[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize("found_by", ["a get", "the repair"])
def test_what_was_repaired_stays_so_without_the_scratch(path, found_by):
    """What `repair` set aside for good is not told again by an index that is made anew."""
    bodies = damaged_file(path)
    with weclaw.open(path) as store:
        q = store.queue()
        if found_by == "a get":
            assert drain(q) == bodies[:7] + bodies[8:]
            assert len(store.verify()) == 1  # the place; the message in it is no other
        assert store.repair()
        assert store.verify() == []
        assert q.stats().damaged == 0
        damaged_again = q.put(b"damaged later" + random.Random(99).randbytes(150))
    for _ in range(2):
        shutil.rmtree(scratch(path))
        with weclaw.open(path, readonly=True) as store:
            assert store.verify() == []
        with weclaw.open(path) as store:
            assert store.verify() == []
            assert store.queue().stats().damaged == 0
    content = bytearray(path.read_bytes())
    content[content.index(b"damaged later") + 60] ^= 1
    path.write_bytes(content)
    with weclaw.open(path) as store:
        assert len(store.verify()) >= 1
        assert damaged_again not in [msg.id for msg in take(store.queue())]


def test_what_was_repaired_is_damage_when_it_is_hit_again(path):
    """A repair speaks of what it found; the same place hit a second time is told and counted."""
    bodies = damaged_file(path)
    with weclaw.open(path) as store:
        assert drain(store.queue()) == bodies[:7] + bodies[8:]
        place = min(store.repair())[0]
        assert store.verify() == []
    content = bytearray(path.read_bytes())
    at = content.index(bodies[6]) + len(bodies[6]) + 60  # in the frame that says nothing now
    content[at] ^= 1
    path.write_bytes(content)
    shutil.rmtree(scratch(path))
    with weclaw.open(path) as store:
        assert [offset for offset, _ in store.verify()] == [place]
        assert store.queue().stats().damaged == 1


def test_what_was_repaired_stays_so_when_segments_are_freed(path):
    """What says that a repair was made is kept at least as long as what it speaks of."""
    bodies = damaged_file(path)
    filler = bytes(100_000)
    with weclaw.open(path, retention=0.0, flush="os") as store:
        q = store.queue()
        q.put_many([filler] * 25)
        # The damaged message's segment is freed before the one in which it was set aside.
        assert drain(q) == [*bodies[:7], *bodies[8:], *[filler] * 25]
        eventually(lambda: store._engine.log.head_offset > 0)
        store.repair()
    for _ in range(4):
        shutil.rmtree(scratch(path))
        with weclaw.open(path) as store:
            assert store.verify() == []
            assert store.queue().stats().damaged == 0
            for _ in range(8):
                store.queue().put(filler)
                drain(store.queue())


def test_verify_of_a_good_file_in_use(path):
    """`verify` of a good file is empty, while others write too."""
    with Child(busy, path) as child:
        child.hear()
        with weclaw.open(path) as store:
            for _ in range(10):
                assert store.verify() == []
        child.say("stop")
        child.end()


def test_damage_is_reported_again_as_long_as_it_is_there(path, caplog):
    """Damage is logged with its offset, shown in the stats, and the rest flows."""
    bodies = damaged_file(path)
    shutil.rmtree(scratch(path))
    with caplog.at_level("WARNING", logger="weclaw_embedded"), weclaw.Queue(path) as q:
        assert drain(q) == bodies[:7] + bodies[8:]
        assert q.stats().damaged == 1
        assert any("offset" in r.getMessage() for r in caplog.records)


def test_damaged_while_open(path):
    """A body that rots under an open queue hits itself alone."""
    bodies = [f"{n:04d}".encode() + random.Random(n).randbytes(3000) for n in range(40)]
    with weclaw.Queue(path, retry=NO_WAIT) as q:
        for body in bodies:
            q.put(body)
        content = path.read_bytes()
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, b"rot", content.index(bodies[9]) + 1000)
        os.close(fd)
        # What is in memory may still be right; what is delivered is never wrong.
        got = drain(q)
        assert got in (bodies, bodies[:9] + bodies[10:])
        assert q.stats()[:3] == (0, 0, 0)


def left_behind(path):
    """What this process has at this moment: descriptors, threads, mappings, objects."""
    gc.collect()
    has_proc = os.path.isdir("/proc/self/fd")
    return (
        len(os.listdir("/proc/self/fd")) if has_proc else 0,
        threading.active_count(),
        Path("/proc/self/maps").read_text().count(str(path)) if has_proc else 0,
        len(gc.get_objects()),
    )


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_repeated_opening_leaks_nothing(tmp_path, where):
    """Hundreds of openings leave no file, descriptor, thread, mapping or object behind. (Most of
    them in memory: there closing waits for no disk.)
    """
    folder = "/dev/shm" if where == "memory" else tmp_path
    if not os.access(folder, os.W_OK):
        pytest.skip("no file system in memory here")
    rounds = 600 if where == "memory" else 100
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        path = Path(directory) / "tasks.wq"
        with weclaw.Queue(path) as q:
            q.put("x")
        for n in range(rounds):
            with weclaw.Queue(path) as q:
                assert q.qsize() == 1 + n // 10
                if n % 10 == 9:
                    q.put("y")
            if n == 19:  # by now what is kept for good is there
                size = path.stat().st_size
                before = left_behind(path)
        fds, threads, mappings, objects = left_behind(path)
        assert fds <= before[0]
        assert threads <= before[1]
        assert mappings <= before[2]
        assert objects < before[3] + rounds // 4  # not one of four openings
        assert path.stat().st_size <= size + 2**20
        assert len(list(scratch(path).iterdir())) < 12


def open_take_and_die(pipe, path, n):
    """Fork children that each hold one message and die."""
    for _ in range(n):
        pid = os.fork()
        if pid == 0:
            policy = weclaw.RetryPolicy(max_crashes=300)
            weclaw.Queue(path, visibility_timeout=None, retry=policy).get(block=False)
            os.kill(os.getpid(), 9)
        os.waitpid(pid, 0)
    pipe.send("done")


def test_two_hundred_dead_processes(path):
    """200 processes that died holding something leave nothing behind but their messages."""
    policy = weclaw.RetryPolicy(max_crashes=300)
    with weclaw.Queue(path, retry=policy) as q:
        q.put_many(list(range(250)))
        with Child(open_take_and_die, path, 200) as child:
            child.hear(timeout=60.0)
            child.end()
        seen = []
        while True:
            try:
                msg = q.get(timeout=0.3)
            except weclaw.Empty:
                break
            seen.append(msg.body)
            msg.ack()
        assert sorted(seen) == list(range(250))
        assert len(list(scratch(path).iterdir())) < 12


def test_store_failed_in_a_thread_that_waits(path, failing_sync):
    """Threads that wait for a sync that fails all hear of it; none returns."""
    q = weclaw.Queue(path)
    q.put("x")
    failing_sync["fail"] = True
    outcomes = []

    def put(n):
        try:
            q.put(n)
            outcomes.append("returned")
        except weclaw.StoreFailedError:
            outcomes.append("failed")

    threads = [threading.Thread(target=put, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == ["failed"] * 8
    q.close()
    failing_sync["fail"] = False
    with weclaw.Queue(path) as q:
        assert [m.body for m in take(q, 1)] == ["x"]


def test_a_slow_sync_holds_up_only_who_waits_for_it(path, monkeypatch):
    """While one thread waits for a slow sync another process puts, gets and acks as ever."""
    from weclaw_embedded import _files

    real = _files.sync_data
    slow, begun, goes_on = threading.Event(), threading.Event(), threading.Event()

    def sync_data(fd):
        if slow.is_set():
            begun.set()
            goes_on.wait(60)
        return real(fd)

    monkeypatch.setattr(_files, "sync_data", sync_data)
    with weclaw.Queue(path) as q, Child(work_quickly, path) as child:
        q.put("x")
        child.hear()
        slow.set()
        thread = threading.Thread(target=lambda: q.put("slow"))
        thread.start()
        assert begun.wait(20)
        child.say("go")
        child.hear(timeout=30.0)  # it is done with all of it while the sync hangs
        assert thread.is_alive()
        slow.clear()
        goes_on.set()
        thread.join()
        child.end()
        eventually(lambda: drain(q) or q.empty())


def work_quickly(pipe, path):
    q = weclaw.Queue(path, flush="sync")
    pipe.send("open")
    pipe.recv()
    for n in range(5):
        q.put(n)
    q.get().ack()
    pipe.send("done")
    q.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.EIO, weclaw.StoreFailedError), (errno.ENOSPC, weclaw.DiskFullError)],
)
@pytest.mark.parametrize("new", [False, True], ids=["existing", "new"])
def test_a_disk_that_fails_while_opening_is_said_in_our_words(
    path, monkeypatch, code, expected, new
):
    """An error of the disk while a file is made or recovered is typed, and does not stay."""
    from weclaw_embedded import _files

    if not new:
        with weclaw.Queue(path) as q:
            q.put("kept")
    shutil.rmtree(f"{path}.d", ignore_errors=True)

    def fails(*args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        for name in ("sync_data", "sync_all", "sync_dir"):
            patch.setattr(_files, name, fails)
        with pytest.raises(expected):
            weclaw.Queue(path)
    with weclaw.Queue(path) as q:
        assert drain(q) == ([] if new else ["kept"])


def test_an_opening_that_is_refused_leaves_nothing_open(path, failing_sync):
    """Whoever asks again and again until the others have closed has no descriptor less."""
    q = weclaw.Queue(path)
    with Child(hold_open, path) as child:
        child.hear()
        failing_sync["fail"] = True
        with pytest.raises(weclaw.StoreFailedError):
            q.put("in doubt")
        q.close()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(weclaw.StoreFailedError):
                weclaw.Queue(path)
        assert len(os.listdir("/proc/self/fd")) == before
        child.say("close")
        child.end()


def hold_open(pipe, path):
    with weclaw.Queue(path):
        pipe.send("open")
        pipe.recv()


def test_a_put_that_comes_too_late_for_the_close_touches_nothing(path, monkeypatch):
    """Its sync ends when the file is closed: it is told so, and leaves the descriptor alone."""
    from weclaw_embedded import _files
    from weclaw_embedded._records import pack_clean

    q = weclaw.Queue(path)
    engine = q._store._engine
    real, begun, goes_on, told = _files.sync_data, threading.Event(), threading.Event(), []

    def sync_data(fd):
        if threading.current_thread() is late:
            begun.set()
            assert goes_on.wait(30)
        real(fd)

    def append(session):
        session.append([pack_clean()])
        session.must_sync = True

    def put():
        try:
            told.append(engine.run(append))
        except (weclaw.WeclawError, OSError, ValueError) as error:
            told.append(error)

    def stop():  # after the last flush, before the file is closed
        late.start()
        assert begun.wait(30)
        stop_threads()

    late, stop_threads = threading.Thread(target=put), engine._stop_threads
    monkeypatch.setattr(_files, "sync_data", sync_data)
    monkeypatch.setattr(engine, "_stop_threads", stop)
    q.close()
    touched = []
    for name in ("_lock_file", "_unlock_file"):
        monkeypatch.setattr(engine, name, lambda name=name: touched.append(name))
    goes_on.set()
    late.join()
    assert [type(one) for one in told] == [weclaw.ClosedError]
    assert not touched


def test_an_opening_that_fails_at_its_end_leaves_nothing_open(path, monkeypatch):
    """The index could not be made anew: the next opening in the same process can."""
    from weclaw_embedded._folding import Folding

    with weclaw.Queue(path) as q:
        q.put("kept")
    shutil.rmtree(f"{path}.d")
    gc.collect()  # what the tests before have left in a circle
    before = len(os.listdir("/proc/self/fd"))

    def fails(self, tx):
        raise weclaw.DiskFullError("no room for the index")

    with monkeypatch.context() as patch:
        patch.setattr(Folding, "catch_up", fails)
        with pytest.raises(weclaw.DiskFullError):
            weclaw.Queue(path)
    assert len(os.listdir("/proc/self/fd")) == before
    with weclaw.Queue(path) as q:
        assert drain(q) == ["kept"]


def test_a_failed_sync_is_remembered_over_an_opening_that_fails(path, failing_sync, monkeypatch):
    """What the cache has and the disk may lack is written again by the opening that succeeds."""
    from weclaw_embedded import _recovery

    q = weclaw.Queue(path)
    q.put("kept")
    failing_sync["fail"] = True
    with pytest.raises(weclaw.StoreFailedError):
        q.put("in doubt")
    q.close()
    for _ in range(2):
        failing_sync["failed"] = 0
        with pytest.raises(weclaw.StoreFailedError):
            weclaw.Queue(path)
    failing_sync["fail"] = False
    again = []
    real = _recovery._write_again
    monkeypatch.setattr(
        _recovery, "_write_again", lambda log, commit: (again.append(commit), real(log, commit))
    )
    with weclaw.Queue(path) as q:
        assert len(again) == 1
        assert drain(q) in (["kept"], ["kept", "in doubt"])


def test_repair_mends_what_went_on_in_the_next_segment(path):
    """Of a batch over several segments whose beginning is damaged nothing is left to report."""
    with weclaw.Queue(path, segment_bytes=65536) as q:
        q.put("first")
        q.put_many(["beginning" + "x" * 60_000, *(["x" * 60_000] * 2)])
        q.put("last")
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"beginning")] ^= 1
    path.write_bytes(raw)
    shutil.rmtree(f"{path}.d")
    with weclaw.open(path) as store:
        assert len(store.verify()) == 1
        store.repair()
        assert store.verify() == []
        assert drain(store.queue()) == ["first", "last"]
    shutil.rmtree(f"{path}.d")
    with weclaw.open(path) as store:
        assert store.verify() == []
        assert store.queue().stats()[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_page_that_the_device_cannot_read_costs_only_what_stands_there(
    path, monkeypatch, reopened
):
    """What can't be read at an opening either is damage like any other: reported, and the rest
    flows. Whoever comes upon it before that is told so, and has lost nothing.
    """
    from weclaw_embedded import _files

    bodies = [f"{n}" + "x" * 3000 for n in range(60)]
    with weclaw.Queue(path, segment_bytes=65536) as q:
        q.put_many(bodies[:1])
        for body in bodies[1:]:
            q.put(body)
    raw = path.read_bytes()
    page = raw.index(b"30xxx") // 4096 * 4096
    hit = {n for n, body in enumerate(bodies) if overlaps(raw, body, page)}
    real = os.pread

    def pread(fd, n, offset):
        if (
            offset < page + 4096
            and page < offset + n
            and os.readlink(f"/proc/self/fd/{fd}") == name
        ):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, n, offset)

    name = str(path)
    double = types.ModuleType("os")
    double.__dict__.update(os.__dict__)
    double.pread = pread
    if reopened:
        shutil.rmtree(f"{path}.d")
    with monkeypatch.context() as patch:
        patch.setattr(_files, "os", double)
        got = []
        if not reopened:
            unread = pytest.raises(weclaw.StorageError, match="Input/output error")
            with weclaw.Queue(path) as q, unread:
                while True:
                    with q.get(block=False) as msg:
                        got.append(msg.body)
        with weclaw.Queue(path) as q:
            got += drain(q)
            assert [body for n, body in enumerate(bodies) if n not in hit] == got
            assert q.stats().damaged > 0
            q.put("after")
            assert drain(q) == ["after"]


def overlaps(raw, body, page):
    at = raw.index(body.encode())
    return at - 40 < page + 4096 and page < at + len(body)


def test_a_header_that_the_device_cannot_read_is_no_other_file(path, monkeypatch):
    """Whose header can't be read is not told to be none of ours, and is not touched."""
    from weclaw_embedded import _files

    with weclaw.Queue(path) as q:
        q.put("kept")
    before = path.read_bytes()

    def pread(fd, n, offset):
        raise OSError(errno.EIO, "Input/output error")

    double = types.ModuleType("os")
    double.__dict__.update(os.__dict__)
    double.pread = pread
    with monkeypatch.context() as patch:
        patch.setattr(_files, "os", double)
        with pytest.raises(weclaw.StoreFailedError):
            weclaw.Queue(path)
    assert path.read_bytes() == before


def test_a_settling_that_finds_no_room_leaves_the_message_held(path, open_queue, monkeypatch):
    """A write that the disk has no room for changes nothing: the lease is there, and so is whoever
    did not get one.
    """
    q = open_queue()
    q.put_many(["a", "b"])
    msg = q.get()
    real = _files.write_at
    full = [True]

    def write_at(fd, buffers, at):
        if full[0] and fd == q._store._engine.fd:
            raise weclaw.DiskFullError("no room")
        return real(fd, buffers, at)

    monkeypatch.setattr(_files, "write_at", write_at)
    for settle in (msg.ack, msg.nack, msg.fail, msg.release, lambda: transact(q, msg)):
        with pytest.raises(weclaw.DiskFullError):
            settle()
    with pytest.raises(weclaw.DiskFullError):
        q.get(block=False)
    assert list(q._store._engine.held) == [msg._lease]
    full[0] = False
    msg.ack()
    assert [m.body for m in q.get_many(5)] == ["b"]


def transact(q, msg):
    with q.transaction() as tx:
        tx.ack(msg)


def test_an_error_of_ours_is_not_taken_for_damage(path, monkeypatch):
    """What is not the parser's word about the bytes goes to the caller, and sets nothing aside."""

    def wrong(record):
        raise ValueError("a coding error")

    with weclaw.Queue(path) as q:
        q.put("x", headers={"a": 1})  # else there is nothing to parse
        with monkeypatch.context() as patched:
            patched.setattr(_records, "meta_of_put", wrong)
            for ask in (lambda: q.get(block=False), lambda: q.peek(1)):
                with pytest.raises(ValueError, match="a coding error"):
                    ask()
        assert q.stats().damaged == 0
        assert q.get(block=False).body == "x"


def test_an_error_of_ours_is_not_taken_for_an_answer(path, monkeypatch):
    """Who looks for an id, replays, or orders what there is, goes to the caller with it too."""

    def wrong(record):
        raise ValueError("a coding error")

    with weclaw.Queue(path) as q:
        done = q.put("done")
        q.get().ack()
        with monkeypatch.context() as patched:
            patched.setattr(_records, "unpack_put", wrong)
            for ask in (lambda: q.status(done), lambda: q.replay(offset="earliest")):
                with pytest.raises(ValueError, match="a coding error"):
                    ask()
        assert q.status(done) == "done"
        q.put(2)
        q.put(1)
    with monkeypatch.context() as patched:
        ordered = threads.PriorityQueue(path=path)
        patched.setattr(_records, "unpack_put", wrong)
        with pytest.raises(ValueError, match="a coding error"):
            ordered.get(timeout=1)
        patched.undo()
        assert [ordered.get(timeout=1), ordered.get(timeout=1)] == [1, 2]
        ordered.close()


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.ENOSPC, weclaw.DiskFullError), (errno.EMFILE, weclaw.StorageError)],
    ids=["no room", "too many files"],
)
def test_a_get_that_finds_no_room_to_wait_says_so(path, monkeypatch, number, told):
    """In our words when the pipe to be woken by can't be made; later it can."""

    def full(path):
        raise OSError(number, os.strerror(number))

    with weclaw.Queue(path) as q:
        with monkeypatch.context() as patched:
            patched.setattr(_names, "make_fifo", full)
            with pytest.raises(told, match="nothing was taken"):
                q.get(timeout=1)
        with pytest.raises(weclaw.Empty):
            q.get(timeout=0.01)
        q.put("x")
        assert q.get().delivery_count == 1


def put_when_told(pipe, path):
    """A message, and then whatever it is told to put."""
    q = weclaw.Queue(path)
    q.put("kept")
    pipe.send("open")
    try:
        while pipe.recv() == "put":
            try:
                q.put("more")
                pipe.send("put")
            except weclaw.StoreFailedError as error:
                pipe.send(str(error))
    except EOFError:
        pass


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
@pytest.mark.parametrize("noticed", [False, True])
def test_who_opens_a_file_that_was_taken_away_in_use_is_refused(path, tmp_path, how, noticed):
    """Until those who have it open have closed, or died; no file is made meanwhile."""
    with Child(put_when_told, path) as child:
        assert child.hear() == "open"
        kept = tmp_path / "kept.wq"
        os.link(path, kept)
        if how == "replaced":
            with weclaw.Queue(tmp_path / "other.wq") as q:
                q.put("of another queue")
            os.replace(tmp_path / "other.wq", path)
        else:
            path.unlink()
        if noticed:
            child.say("put")
            assert "moved" in child.hear()
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(weclaw.LockedError, match="moved, deleted or replaced"):
            weclaw.Queue(path)
        assert (path.read_bytes() if path.exists() else None) == before
        if how == "moved":
            os.rename(kept, path)
            if not noticed:
                with weclaw.Queue(path) as q:
                    assert q.qsize() == 1
            child.kill()
            with weclaw.Queue(path) as q:
                assert [msg.body for msg in q.peek(3)] == ["kept"]
            return
        child.kill()
    with weclaw.Queue(path) as q:
        assert [msg.body for msg in q.peek(3)] == (
            ["of another queue"] if how == "replaced" else []
        )
    shutil.rmtree(scratch(path))
    with weclaw.Queue(kept) as q:
        assert [msg.body for msg in q.peek(3)] == ["kept"]


@pytest.mark.parametrize("what", ["file", "scratch"])
def test_every_process_is_told_what_was_taken_away(path, tmp_path, what):
    """Not only the one that notices it: the others don't speak of a write that failed."""
    with Child(put_when_told, path) as one, Child(put_when_told, path) as two:
        assert one.hear() == two.hear() == "open"
        (path if what == "file" else scratch(path)).rename(tmp_path / "away")
        for child in (one, two):
            child.say("put")
            said = child.hear()
            assert (
                f"the {'file' if what == 'file' else 'scratch folder'} was deleted, moved" in said
            )
            assert "failed" not in said
