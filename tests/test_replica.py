"""The replica: a second, complete copy of a file that is there when the first is not."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import Child
from tests.replica_tools import (
    RECEIVER_CODE,
    bodies,
    command,
    eventually,
    is_received,
    kill_receiver,
    level,
    receivers,
    same,
    send_signal,
)

import weclaw_embedded as weclaw
from weclaw_embedded import (
    _names,
    _records,
    _replicated,
    _replication,
    _restore,
    _shared,
    _waiting,
    _wake,
    replica,
)
from weclaw_embedded._channel import LinkDownError
from weclaw_embedded._options import store_options
from weclaw_embedded.wal import TAIL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def open_queue(copy: Path, open_queue: Callable[..., Any]) -> Callable[..., Any]:
    """The same, closed before it is looked what is left behind."""
    return open_queue


# -- the copy --------------------------------------------------------------------------------------


def test_the_copy_has_the_same_frames_at_the_same_offsets(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Whatever was done to the queue is in the copy once it is closed, in the same places."""
    q = open_queue(replica=copy)
    q.put_many([{"n": n} for n in range(200)])
    for n in range(40):
        q.put({"n": n}, priority=n % 10, key=f"k{n % 3}", delay=0.0 if n % 2 else 60.0)
    for n in range(60):
        msg = q.get()
        (msg.ack, msg.nack, msg.fail)[n % 3]()
    q.put(os.urandom(3_000_000))
    q.close()
    assert same(path, copy) > 100
    assert replica.node(path)[1:4] == ("primary", 1, False)
    assert replica.node(copy)[1:4] == ("copy", 1, False)


def test_a_put_that_has_returned_is_in_the_copy(open_queue: Callable[..., Any], copy: Path) -> None:
    """Whatever `flush` says: the copy alone is looked at, after its receiver was killed."""
    for number, flush in enumerate(("sync", "batch", "os")):
        place = copy.with_name(f"{number}.wq")
        q = open_queue(at=copy.with_name(f"primary-{number}.wq"), replica=place, flush=flush)
        for n in range(10):
            q.put(n)
        assert q.stats().replica_lag == 0
        kill_receiver(place)
        assert bodies(place) == list(range(10))
        q.put(10)  # it is started again
        assert bodies(place) == list(range(11))
        q.close()
        assert receivers(place) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_who_waits_for_the_replica_can_do_without_a_pipe(
    open_queue: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where there is no room to be woken a put looks by itself; where there is none to feed the
    replica either it says that the replica has it not, and the next one with room is on both.
    """

    def full(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(_wake, "open_pipe", full)
        q = open_queue(replica=copy, replica_timeout=20.0)
        q.put(1)
        assert bodies(copy) == [1]
        q.close()
        patched.setattr(_replication, "open_pipe", full)
        q = open_queue(replica=copy, replica_timeout=1.0)
        confirmed, refusal = [1], "taken back"
        try:
            q.put(2)
            confirmed.append(2)  # the put itself was quicker than the feeder, who then gave up
        except weclaw.ReplicaUnavailableError as error:
            refusal = str(error)
        assert "taken back" in refusal
        q.close()
    q = open_queue(replica=copy, replica_timeout=20.0)
    q.put(3)
    assert bodies(copy) == [*confirmed, 3]


def test_segments_are_used_again_in_the_copy_too(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Many times the size of the file goes through, and both stay as small."""
    q = open_queue(replica=copy, sync_replica=False, segment_bytes=65536, retention=0.0)
    for _ in range(40):
        q.put_many([os.urandom(4000) for _ in range(25)])
        for msg in q.get_many(25):
            msg.ack()
        level(q)  # what the copy still needs is kept: a slow one would let the file grow
    q.put("last")
    q.close()
    same(path, copy)
    assert path.stat().st_size < 1_500_000
    assert copy.stat().st_size < 1_500_000


def test_an_asynchronous_replica_is_never_waited_for(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Puts return while the receiver is stopped; it catches up when it goes on."""
    q = open_queue(replica=copy, sync_replica=False, replica_timeout=30.0)
    q.put(0)
    level(q)
    pid = send_signal(copy, signal.SIGSTOP)
    began = time.monotonic()
    for n in range(1, 101):
        q.put(n)
    assert time.monotonic() - began < 25  # one that waited would take 30 s, and fail
    assert q.stats().replica_lag > 0
    assert [msg.body for msg in q.peek(200)] == list(range(101))
    os.kill(pid, signal.SIGCONT)
    level(q)
    assert bodies(copy) == list(range(101))


def test_a_first_copy_is_made_without_a_warning(
    open_queue: Callable[..., Any], path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However much is in the file by then: nothing is thrown away."""
    caplog.set_level(logging.INFO, "weclaw_embedded")
    open_queue(segment_bytes=65536).put_many([os.urandom(4000) for _ in range(100)])
    q = open_queue(replica=copy)
    level(q)
    told = [record for record in caplog.records if "cop" in record.message]
    assert [record.levelname for record in told] == ["INFO"]
    assert told[0].message == f"{path}: a copy is made at {copy}"


def test_a_copy_too_far_behind_is_made_anew(
    open_queue: Callable[..., Any],
    path: Path,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Past a bound the segments it still needs are freed all the same. The log warns of it."""
    monkeypatch.setattr(_shared, "PIN_BYTES", 4 << 16)
    q = open_queue(replica=copy, sync_replica=False, segment_bytes=65536, retention=0.0)
    q.put(0)
    level(q)
    before = copy.stat().st_ino
    pid = send_signal(copy, signal.SIGSTOP)
    for _ in range(30):
        q.put_many([os.urandom(4000) for _ in range(25)])
        for msg in q.get_many(100):
            msg.ack()
    eventually(lambda: path.stat().st_size < 2_000_000)
    os.kill(pid, signal.SIGCONT)
    level(q)
    q.close()
    assert copy.stat().st_ino != before
    same(path, copy)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"{path}: the copy at {copy} is made anew" in warned


def _impatient(open_queue: Callable[..., Any], copy: Path, timeout: float = 0.5) -> Any:
    """A queue with one message whose replica is there, and is waited for only shortly from now."""
    q = open_queue(replica=copy, replica_timeout=60.0)
    q.put("first")
    open_queue(replica_timeout=timeout)
    return q


# -- waiting for it --------------------------------------------------------------------------------


def test_a_put_that_waits_too_long_is_taken_back(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """It raises, is delivered to nobody, and what is put later is unharmed."""
    q = _impatient(open_queue, copy)
    pid = send_signal(copy, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(weclaw.ReplicaUnavailableError, match="taken back"):
        q.put("lost", id="mine")
    with pytest.raises(weclaw.ReplicaUnavailableError):
        q.put_many(["lost too"] * 3)
    assert 0.9 < time.monotonic() - began < 30
    assert q.status("mine") == "unknown"
    msg = q.get(timeout=5)
    assert msg.body == "first"
    began = time.monotonic()
    msg.ack()  # done all the same
    assert time.monotonic() - began > 0.4
    with pytest.raises(weclaw.Empty):
        q.get(timeout=0.3)
    os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: _put_or_not(q, "again"))
    q.put("mine now", id="mine")
    assert [q.get(timeout=5).body, q.get(timeout=5).body] == ["again", "mine now"]
    with pytest.raises(weclaw.Empty):
        q.get(block=False)
    level(q)
    same(path, copy)


def _put_or_not(q: Any, body: Any) -> bool:
    try:
        q.put(body)
    except weclaw.ReplicaUnavailableError:
        return False
    return True


def test_a_put_that_there_is_no_room_to_take_back_is_not_made_twice(
    open_queue: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in doubt and said to be so: a full disk would mean that nothing was written."""
    q = _impatient(open_queue, copy)
    pid = send_signal(copy, signal.SIGSTOP)

    def pack_void(puts: list[int]) -> Any:
        raise weclaw.DiskFullError("no room for that")

    monkeypatch.setattr(_records, "pack_void", pack_void)
    with pytest.raises(weclaw.ReplicaUnavailableError, match="in doubt"):
        q.put("second")
    os.kill(pid, signal.SIGCONT)
    level(q)
    assert [msg.body for msg in q.peek(5)] == ["first", "second"]


def test_nothing_is_delivered_before_the_replica_has_it(
    open_queue: Callable[..., Any], copy: Path
) -> None:
    """A consumer that waits gets a message when the replica has confirmed it, and not before."""
    q = open_queue(replica=copy, replica_timeout=20.0)
    q.put(0)
    q.get().ack()
    pid = send_signal(copy, signal.SIGSTOP)
    put = threading.Thread(target=q.put, args=(1,))
    put.start()
    with pytest.raises(weclaw.Empty):
        q.get(timeout=0.5)
    got: list[Any] = []
    getter = threading.Thread(target=lambda: got.append(q.get(timeout=20)))
    getter.start()
    time.sleep(0.2)
    assert not got
    os.kill(pid, signal.SIGCONT)
    getter.join()
    put.join()
    assert got[0].body == 1


def test_waiting_puts_share_a_round(
    open_queue: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four tasks, and then threads, put at once: the replica syncs a few times."""
    rounds = []
    real = _replication.Replication._publish

    def count(self: Any, target: int, acked: int) -> None:
        rounds.append(target)
        real(self, target, acked)

    q = open_queue(replica=copy)
    q.put("first")
    monkeypatch.setattr(_replication.Replication, "_publish", count)

    async def put_all() -> None:
        async with weclaw.AsyncQueue(q._store.path) as aq:
            await asyncio.gather(*(aq.put(n) for n in range(64)))

    asyncio.run(put_all())
    assert len(rounds) < 24
    rounds.clear()
    threads = [threading.Thread(target=q.put, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rounds) < 48
    assert q.qsize() == 129


def test_who_waits_for_the_replica_keeps_no_thread_from_its_turn(
    open_queue: Callable[..., Any], copy: Path
) -> None:
    """What other threads put meanwhile is written long before his time is over, and each is told
    when the replica has it."""
    q = open_queue(replica=copy, replica_timeout=60.0)
    q.put(0)
    pid = send_signal(copy, signal.SIGSTOP)
    ids: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: ids.append(q.put(n)))  # type: ignore[misc]
        for n in range(1, 9)
    ]
    words = q._engine.page.words
    for thread in threads:
        before = words[TAIL]
        thread.start()
        eventually(lambda before=before: words[TAIL] > before, 30)
    assert not ids
    os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 8
    assert sorted(bodies(copy)) == list(range(9))


def test_threads_whose_puts_the_replica_does_not_confirm_are_told_each(
    open_queue: Callable[..., Any], copy: Path
) -> None:
    """They share a turn and a wait, and every put of theirs is taken back."""
    q = _impatient(open_queue, copy)
    pid = send_signal(copy, signal.SIGSTOP)
    told: list[Exception] = []

    def put(n: int) -> None:
        try:
            q.put(n)
        except weclaw.ReplicaUnavailableError as error:
            told.append(error)

    threads = [threading.Thread(target=put, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 8
    assert all("taken back" in str(error) for error in told)
    os.kill(pid, signal.SIGCONT)
    level(q)
    assert [msg.body for msg in q.peek(20)] == ["first"]


def test_ctrl_c_at_the_beginning_of_a_round_leaves_it_to_the_others(
    open_queue: Callable[..., Any], copy: Path
) -> None:
    """It may come just when the lock is taken: then it is given back all the same."""
    q = open_queue(replica=copy)
    q.put("first")
    replication = q._store._engine.replication
    real = replication._round

    class Interrupted:
        release = real.release

        def acquire(self, blocking: bool) -> bool:
            assert real.acquire()
            raise KeyboardInterrupt

    replication._round = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        replication._lead(time.monotonic() + 5)
    replication._round = real
    put = threading.Thread(target=q.put, args=("second",))
    put.start()
    put.join(30)
    assert bodies(copy) == ["first", "second"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_feeding_begins_leaves_nobody_who_does_not_feed(
    open_queue: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The next put begins it again, and there is one receiver."""
    q = open_queue(replica=copy)
    q.put("first")
    engine = q._store._engine
    _replicated.stop(engine)
    real = _replication.Replication.start

    def start(self: Any) -> None:
        if when == "after":
            real(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_replication.Replication, "start", start)
        with pytest.raises(KeyboardInterrupt):
            _replicated.follow(engine)
    q.put("second")
    assert len(receivers(copy)) == 1
    assert bodies(copy) == ["first", "second"]


def test_a_task_is_told_when_its_put_was_taken_back(
    open_queue: Callable[..., Any], copy: Path
) -> None:
    """An asynchronous put raises, and its message is delivered to nobody."""
    q = _impatient(open_queue, copy)
    send_signal(copy, signal.SIGSTOP)

    async def put() -> None:
        async with weclaw.AsyncQueue(q._store.path) as aq:
            found = await asyncio.gather(*(aq.put(n) for n in range(5)), return_exceptions=True)
            assert all(isinstance(one, weclaw.ReplicaUnavailableError) for one in found)
            msg = await aq.get()
            await msg.ack()

    asyncio.run(put())
    assert q.stats().ready == 0
    send_signal(copy, signal.SIGCONT)


@pytest.mark.parametrize("dies_at", [(), ("stamp",), ("mode",), ("mode", "stamp", "mode")])
def test_what_nobody_was_promised_yet_stays_unseen_after_a_crash(
    path: Path, copy: Path, dies_at: tuple[str, ...]
) -> None:
    """A put that waits for the replica is killed: the next to open delivers it when the replica
    has it, and not before; how far the replica is, is known at once. Also when others died while
    they opened the file in between.
    """

    def put(pipe, path, copy):
        q = weclaw.Queue(path, replica=copy, replica_timeout=60.0)
        q.put("first")
        pipe.send("put")
        pipe.recv()
        pipe.send("puts")
        q.put("second")

    child = Child(put, str(path), str(copy))
    assert child.hear() == "put"
    pid = send_signal(copy, signal.SIGSTOP)
    child.say("go on")
    assert child.hear() == "puts"
    time.sleep(0.5)
    child.close()

    def die_opening(pipe, path, step):
        from weclaw_embedded import _replicated, _shared

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if step == "stamp":
            _shared.SharedPage.stamp = die
        else:
            _replicated._set_mode = die
        weclaw.Queue(path)

    for step in dies_at:
        dying = Child(die_opening, str(path), step)
        dying.wait()
        dying.close()
    q = weclaw.Queue(path, replica_timeout=60.0, visibility_timeout=None)
    assert 0 < q.stats().replica_lag < 1000
    assert q.get(timeout=5).body == "first"
    with pytest.raises(weclaw.Empty):
        q.get(timeout=0.5)
    os.kill(pid, signal.SIGCONT)
    assert q.get(timeout=20).body == "second"
    q.close()
    with weclaw.Queue(path) as q:
        assert q.stats().replica_lag == 0
    same(path, copy)


def produce(pipe, path, tag, options):
    q = weclaw.Queue(path, **options)
    pipe.send("open")
    n = 0
    while True:
        body = f"{tag}-{n}"
        pipe.send(("put?", body))
        try:
            pipe.send(("put", body, q.put(body)))
        except weclaw.ReplicaUnavailableError:
            pipe.send(("not put", body))
        n += 1


def consume(pipe, path):
    q = weclaw.Queue(path, visibility_timeout=None)
    pipe.send("open")
    while True:
        msg = q.get()
        pipe.send(("ack?", msg.body))
        msg.ack()
        pipe.send(("acked", msg.body))


def produce_without_looking(pipe, path):
    """Put when told to, and do not look for anything by itself now and then."""
    from weclaw_embedded import _replication, _waiting

    _replication._SLEEP_S = _waiting.DEATH_CHECK_S = _waiting.ALONE_CHECK_S = 3600.0
    q = weclaw.Queue(path, replica_timeout=60.0)
    pipe.send("open")
    while pipe.recv() == "put":
        pipe.send(q.put("x"))
    q.close()


def test_a_process_that_does_not_feed_waits_and_is_woken(
    path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feeder is woken by its puts and wakes it: no one comes upon anything by looking."""
    monkeypatch.setattr(_replication, "_SLEEP_S", 3600.0)
    for name in ("DEATH_CHECK_S", "ALONE_CHECK_S"):
        monkeypatch.setattr(_waiting, name, 3600.0)
    with (
        weclaw.Queue(path, replica=copy) as q,
        Child(produce_without_looking, str(path)) as child,
    ):
        q.put(0)
        assert child.hear() == "open"
        for _ in range(40):
            child.say("put")
            child.hear(timeout=30)
        child.say("end")
        child.end()


# -- dying -----------------------------------------------------------------------------------------


def test_another_process_feeds_when_the_feeder_dies(path: Path, copy: Path) -> None:
    """Puts go on in the others within a few seconds, and none fails."""
    first = Child(produce, str(path), "a", {"replica": str(copy)})
    assert first.hear() == "open"
    assert first.hear()[0] == "put?"
    assert first.hear()[0] == "put"
    with Child(produce, str(path), "b", {}) as second:
        assert second.hear() == "open"
        first.close()
        done = 0
        while done < 20:
            said = second.hear()
            assert said[0] != "not put", said
            done += said[0] == "put"
        second.kill()
    eventually(lambda: not receivers(copy))
    assert len(bodies(copy)) >= 21


@pytest.mark.parametrize("seed", range(4))
def test_every_confirmed_put_outlives_the_primary(tmp_path: Path, copy: Path, seed: int) -> None:
    """Processes and receivers are killed at random moments, then the primary is deleted."""
    rng = random.Random(seed)
    path = tmp_path / "p" / "tasks.wq"
    path.parent.mkdir()
    options = {"replica": str(copy), "segment_bytes": 65536, "replica_timeout": 20.0}
    put: set[str] = set()
    maybe_acked: set[str] = set()
    acked: set[str] = set()

    def note(said: tuple[str, ...]) -> None:
        if said[0] == "put":
            put.add(said[1])
        elif said[0] == "ack?":
            maybe_acked.add(said[1])
        elif said[0] == "acked":
            acked.add(said[1])

    weclaw.Queue(path, **options).close()
    for turn in range(3):
        children = [Child(produce, str(path), f"{turn}-{n}", {}) for n in range(2)]
        children.append(Child(consume, str(path)))
        for child in children:
            assert child.hear() == "open"
        for _ in range(rng.randrange(3)):
            time.sleep(rng.uniform(0.05, 0.4))
            found = receivers(copy)
            if found:
                try:
                    os.kill(rng.choice(found), signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(rng.uniform(0.2, 0.6))
        while turn == 2 and not put:  # until now no receiver may have had the time to begin
            note(children[0].hear())
        rng.shuffle(children)
        for child in children:
            child.kill()
            time.sleep(rng.choice((0.0, 0.0, 0.2)))
        for child in children:
            for said in child.hear_rest():
                note(said)
            child.close()
    shutil.rmtree(path.parent)
    eventually(lambda: not receivers(copy))
    replica.promote(copy)
    with weclaw.Queue(copy) as q:
        there = [msg.body for msg in q.peek(100_000)]
        while True:  # what was held by the dead
            try:
                msg = q.get(block=False)
            except weclaw.Empty:
                break
            if msg.body not in there:
                there.append(msg.body)
    assert len(there) == len(set(there))
    assert put - set(there) <= maybe_acked, "a confirmed put is not in the copy"
    assert not acked & set(there), "what was acked came back"
    # One that the last to be killed was just starting comes late: it finds nobody, and ends.
    eventually(lambda: not receivers(copy))


def test_only_one_process_feeds(tmp_path: Path, copy: Path) -> None:
    """Receivers that were there at once say so: none does while feeders are killed in turn."""
    path = tmp_path / "tasks.wq"
    log = tmp_path / "log"
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import fcntl, os, sys, time\n"
        f"log = open({str(log)!r}, 'a')\n"
        f"lock = open({str(log) + '.lock'!r}, 'w')\n"
        "for _ in range(300):\n"  # the receiver of a killed feeder may take a moment to end
        "    try:\n"
        "        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB); break\n"
        "    except OSError:\n"
        "        time.sleep(0.01)\n"
        "else:\n"
        "    print('twice', file=log, flush=True)\n"
        "print('began', file=log, flush=True)\n" + RECEIVER_CODE.replace("; ", "\n") + "\n"
    )
    options = {"replica": [sys.executable, str(wrapper), str(copy)], "replica_timeout": 30.0}
    children = [Child(produce, str(path), "0", options)]
    assert children[0].hear() == "open"
    for n in range(1, 4):
        children.append(Child(produce, str(path), str(n), {}))
        assert children[-1].hear() == "open"
        _hear_put(children[-1])
    for n in range(3):
        children[n].kill()
        _hear_put(children[-1], 30)
    for child in children:
        child.close()
    eventually(lambda: not receivers(copy))
    words = log.read_text().split()
    assert "twice" not in words
    assert words.count("began") >= 2


def _hear_put(child: Child, n: int = 1) -> None:
    done = 0
    while done < n:
        done += child.hear()[0] == "put"


def test_a_forked_child_does_not_keep_the_receiver(path: Path, copy: Path) -> None:
    """The parent is killed, the child lives on: the receiver ends with the parent."""

    def fork(pipe, path, copy):
        q = weclaw.Queue(path, replica=copy)
        q.put(1)
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        pipe.send(pid)
        time.sleep(60)

    child = Child(fork, str(path), str(copy))
    pid = child.hear()
    try:
        child.kill()
        eventually(lambda: not receivers(copy), 5)
    finally:
        os.kill(pid, signal.SIGKILL)
        child.close()


def test_a_closed_queue_leaves_no_process(open_queue: Callable[..., Any], copy: Path) -> None:
    """No receiver, no zombie, no open pipe, whether it was stopped or not."""
    gc.collect()  # what tests before this one left to it (the mapping of a page) is not counted
    before = len(os.listdir("/proc/self/fd"))
    for stop in (False, True):
        q = open_queue(replica=copy, sync_replica=False)
        q.put(1)
        level(q)
        if stop:
            send_signal(copy, signal.SIGSTOP)
            q.put(2)
        began = time.monotonic()
        q.close()
        assert time.monotonic() - began < 5
        assert receivers(copy) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert multiprocessing.active_children() == []


# -- the stream ------------------------------------------------------------------------------------

PROXY = """
import os, subprocess, sys, threading
code, copy, marker, at, how = sys.argv[1:]
receiver = subprocess.Popen([sys.executable, "-c", code, copy], stdin=subprocess.PIPE)
spoil = not os.path.exists(marker)
done = 0
while True:
    data = os.read(0, 65536)
    if not data:
        break
    if spoil and done <= int(at) < done + len(data):
        open(marker, "w").close()
        i = int(at) - done
        if how == "cut":
            receiver.stdin.write(data[:i]); break
        if how == "flip":
            data = data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1:]
        if how == "drop":
            data = data[:i] + data[i + 1:]
    done += len(data)
    try:
        receiver.stdin.write(data); receiver.stdin.flush()
    except BrokenPipeError:
        break
try:
    receiver.stdin.close()
except BrokenPipeError:
    pass
sys.exit(receiver.wait())
"""


@pytest.mark.parametrize(
    ("at", "how"),
    [(at, how) for at in (3, 40, 90, 130, 260, 700, 5000) for how in ("flip", "cut")]
    # A byte less is noticed when something follows that does not fit.
    + [(at, "drop") for at in (130, 700)],
)
def test_a_garbled_stream_is_noticed_and_never_written(
    open_queue: Callable[..., Any], path: Path, copy: Path, tmp_path: Path, at: int, how: str
) -> None:
    """A byte changed, lost, or all after it: the next receiver goes on, and the copy is one."""
    marker = tmp_path / "spoilt"
    q = open_queue()
    q.put("first")
    q.close()
    q = open_queue(
        replica=[sys.executable, "-c", PROXY, RECEIVER_CODE, str(copy), str(marker), str(at), how],
        replica_timeout=1.0 if how == "drop" else 20.0,
    )
    for n in range(100):
        assert _put_or_not(q, {"n": n, "text": "x" * 60}) or how == "drop"
    assert marker.exists()
    q.close()
    same(path, copy)


def test_the_receiver_runs_anywhere_a_command_can_start_it(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """In another folder, in an environment of its own, through a shell and plain pipes."""
    shell = (
        f'cd "{copy.parent}" && exec env -i PATH=/usr/bin:/bin "{sys.executable}" -c '
        f"'{RECEIVER_CODE.replace(chr(39), chr(34))}' copy.wq"
    )
    q = open_queue(replica=["sh", "-c", shell])
    for n in range(20):
        q.put(n)
    q.close()
    same(path, copy)
    path.unlink()
    shutil.rmtree(str(path) + ".d")
    q = open_queue(replica=["sh", "-c", shell])
    assert [msg.body for msg in q.peek(30)] == list(range(20))
    q.close()


def test_a_command_that_is_no_receiver_is_said_to_be_none(
    open_queue: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What it printed is in the log, puts raise, and the queue can be read."""
    q = open_queue(sync_replica=False)
    q.put(1)
    q.close()
    q = open_queue(
        replica=["sh", "-c", "echo welcome to this machine; echo no such command >&2; exit 127"],
        sync_replica=True,
        replica_timeout=0.4,
    )
    with pytest.raises(weclaw.ReplicaUnavailableError):
        q.put(2)
    assert q.get(timeout=1).body == 1
    assert "welcome to this machine" in caplog.text or "no such command" in caplog.text


# -- what is refused -------------------------------------------------------------------------------


def _refusal(open_queue: Callable[..., Any], copy: Path, caplog: Any, word: str) -> None:
    before = copy.read_bytes()
    q = open_queue(replica=copy, replica_timeout=0.5)
    with pytest.raises(weclaw.ReplicaUnavailableError):
        q.put("refused")
    eventually(lambda: word in caplog.text)
    q.close()
    assert copy.read_bytes() == before


def test_the_file_of_another_queue_is_not_overwritten(
    open_queue: Callable[..., Any], path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither another queue nor what is no queue at all."""
    with weclaw.Queue(copy) as other:
        other.put("mine")
    with weclaw.Queue(path) as q:
        q.put(1)
    _refusal(open_queue, copy, caplog, "another queue")
    photo = copy.with_name("photo.jpg")
    photo.write_bytes(b"\xff\xd8 not a queue" * 1000)
    caplog.clear()
    with weclaw.Queue(path, replica=False):
        pass
    _refusal(open_queue, photo, caplog, "no copy of this queue")


def test_a_copy_that_went_its_own_way_is_refused(
    open_queue: Callable[..., Any], path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Opened and changed without promotion, it keeps what it has and the primary refuses it."""
    q = open_queue(replica=copy, sync_replica=False)
    q.put(1)
    level(q)
    q.close()
    with weclaw.Queue(copy) as own:
        own.put("own")
    assert "was not promoted" in caplog.text
    with pytest.raises(weclaw.StorageError, match="no copy"):  # too late, as the warning says
        replica.promote(copy)
    assert "before anything is changed" in caplog.text
    assert replica.node(copy).role == "primary"
    q = open_queue(sync_replica=True, replica=copy, replica_timeout=0.5)
    with pytest.raises(weclaw.ReplicaUnavailableError):
        q.put(2)
    eventually(lambda: "different ways" in caplog.text)
    q.close()
    assert bodies(copy) == [1, "own"]


def test_looking_at_a_copy_changes_nothing(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Opened as it is, looked at and closed, it is still a copy that the primary goes on with."""
    q = open_queue(replica=copy)
    q.put(1)
    q.close()
    with weclaw.Queue(copy) as looked:
        assert looked.qsize() == 1
        assert looked.stats().ready == 1
    assert replica.node(copy).role == "copy"
    q = open_queue()
    q.put(2)
    q.close()
    same(path, copy)


def test_a_copy_is_not_opened_while_it_is_received(
    open_queue: Callable[..., Any], copy: Path
) -> None:
    """To write, that is; to look it is."""
    q = open_queue(replica=copy)
    q.put(1)
    with pytest.raises(weclaw.LockedError, match="receiver"):
        weclaw.Queue(copy)
    with pytest.raises(weclaw.LockedError):
        replica.promote(copy)
    assert bodies(copy) == [1]
    q.put(2)


# -- promotion -------------------------------------------------------------------------------------


def test_a_promoted_copy_fences_the_primary(
    open_queue: Callable[..., Any],
    path: Path,
    copy: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that was running all the time, in every process; what it has can be read."""
    q = open_queue(replica=copy, sync_replica=False)
    q.put("both")
    level(q)
    words = q._store._engine.page.words
    told_before: list[int] = []
    real = _replication.write_role

    def write_role(*args: Any) -> None:
        told_before.append(words[_shared.REPLICATION] & _shared.IS_FENCED)
        real(*args)

    monkeypatch.setattr(_replication, "write_role", write_role)
    with Child(produce, str(path), "c", {}) as child:
        assert child.hear() == "open"
        # The connection is lost and can't come back for a while.
        away = copy.with_name("away.wq")
        os.rename(copy, away)
        kill_receiver(copy)
        eventually(lambda: not is_received(away))
        assert replica.promote(away) == 2
        os.rename(away, copy)
        q_fenced = eventually(lambda: _is_fenced(q), 20)
        assert "epoch 2" in str(q_fenced)
        child.hear_rest()  # it ends with the error, too
        assert child.wait() != 0
    assert "takes no more writes" in caplog.text
    assert told_before == [0]  # it is recorded before anybody is told
    for call in (lambda: q.get(timeout=1), lambda: q.put(1), lambda: q.pause(1)):
        with pytest.raises(weclaw.FencedError):
            call()
    assert q.stats().ready >= 1
    q.close()
    assert replica.node(path).role == "fenced"
    q = open_queue()
    with pytest.raises(weclaw.FencedError):
        q.put(1)
    assert q.peek(1)[0].body == "both"
    q.close()
    new = open_queue(at=copy)
    new.put("new")
    assert new.stats().replica_lag is None
    assert new.get().body == "both"


def _is_fenced(q: Any) -> Any:
    try:
        q.put("only here")
    except weclaw.FencedError as error:
        return error
    return None


def test_no_synchronous_put_returns_after_a_promotion(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """Whatever the old primary is told afterwards, it is no success."""
    q = _impatient(open_queue, copy)
    away = copy.with_name("away.wq")
    os.rename(copy, away)
    kill_receiver(copy)
    eventually(lambda: not is_received(away))
    replica.promote(away)
    os.rename(away, copy)
    with pytest.raises(weclaw.SendFailedError):
        q.put(2)
    with weclaw.Queue(copy) as new:
        assert [msg.body for msg in new.peek(5)] == ["first"]


def test_a_fenced_file_is_not_promoted(
    open_queue: Callable[..., Any], path: Path, copy: Path, tmp_path: Path
) -> None:
    """Else both would take puts. A backup of it is the way back when the promoted one is lost."""
    q = open_queue(replica=copy)
    q.put(1)
    q.close()
    assert replica.promote(copy) == 2
    with weclaw.Queue(path) as q:
        eventually(lambda: _is_fenced(q))
    for _ in range(2):
        with pytest.raises(weclaw.FencedError, match="epoch 2, this file has 1"):
            replica.promote(path)
    assert replica.node(path)[1:3] == ("fenced", 1)
    with weclaw.Queue(path) as q:
        with pytest.raises(weclaw.FencedError):
            q.put(2)
        q._store.backup(tmp_path / "new.wq")
    with weclaw.Queue(tmp_path / "new.wq") as q:
        q.put(3)
        assert q.get().body == 1


def test_only_a_copy_is_promoted(path: Path, copy: Path) -> None:
    """A primary, a missing file and a foreign one are refused and not changed."""
    with pytest.raises(weclaw.StorageError):
        replica.promote(copy)
    with weclaw.Queue(path) as q:
        q.put(1)
        with pytest.raises(weclaw.LockedError):
            replica.promote(path)
    with pytest.raises(weclaw.StorageError):
        replica.promote(path)
    assert replica.node(path).epoch == 1


# -- getting it back -------------------------------------------------------------------------------


@pytest.fixture
def lost(open_queue: Callable[..., Any], path: Path, copy: Path) -> Callable[..., Any]:
    """A queue of fifty messages with a replica, closed; opens it again."""
    q = open_queue(replica=copy)
    q.put_many(list(range(50)))
    q.close()
    return open_queue


@pytest.mark.parametrize("how", ["missing", "empty", "header, scratch too", "missing, scratch too"])
def test_a_lost_file_is_restored(
    lost: Callable[..., Any],
    path: Path,
    copy: Path,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Never an empty queue in its place, whether the replica is named or was noted beside it."""
    if how.startswith("missing"):
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data = bytearray(path.read_bytes())
        data[30] ^= 1
        data[2078] ^= 1
        path.write_bytes(data)
    if "scratch" in how:
        shutil.rmtree(str(path) + ".d")
    q = lost(replica=copy) if "scratch" in how else lost()
    assert [msg.body for msg in q.peek(100)] == list(range(50))
    assert "RESTORED" in caplog.text
    q.put("after")
    q.close()
    same(path, copy)
    if how.startswith("header"):
        assert list(path.parent.glob("*.damaged-*"))


def begin_anew(pipe, path):
    with weclaw.Queue(path, replica=False) as q:
        q.put("anew")
        pipe.send("begun")
        pipe.recv()
        q.put("still here")


@pytest.mark.parametrize("when", ["asked", "fetched", "placed"])
def test_a_file_that_comes_to_be_while_it_is_restored_is_left_alone(
    lost: Callable[..., Any],
    path: Path,
    copy: Path,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes find it missing, and one is quicker: the other one's file was moved aside, or
    replaced, under him.
    """
    path.unlink()
    place, name = {
        "asked": (_restore, "_restore_once"),
        "fetched": (_restore, "_fill"),
        "placed": (_names, "place"),
    }[when]
    real = getattr(place, name)
    with Child(begin_anew, path) as child:

        def meanwhile(*args: Any, **options: Any) -> Any:
            assert child.hear() == "begun"
            if when == "asked":
                raise LinkDownError("the receiver of another one is at work")
            return real(*args, **options)

        monkeypatch.setattr(place, name, meanwhile)
        _restore.restore_missing(str(path), store_options({"replica": copy}))
        child.say("go on")
        child.end()
    assert not list(path.parent.glob("*.damaged-*"))
    assert not list(path.parent.glob(".*.receiving"))
    shutil.rmtree(str(path) + ".d")
    with weclaw.Queue(path, replica=False) as q:
        assert [msg.body for msg in q.peek(10)] == ["anew", "still here"]


def test_a_restoring_process_that_died_as_its_file_took_its_place_leaves_it_alone(
    lost: Callable[..., Any], path: Path, tmp_path: Path, copy: Path
) -> None:
    """It has both names then, and whoever restores next does not begin by emptying it."""
    left = path.with_name(f".{path.name}.receiving")
    os.link(path, left)
    path.rename(tmp_path / "put away")
    q = lost(replica=copy)
    assert q.qsize() == 50
    q.close()
    assert not left.exists()
    with weclaw.Queue(tmp_path / "put away", replica=False) as q:
        assert q.qsize() == 50


def test_what_cannot_be_restored_is_not_begun_anew(
    lost: Callable[..., Any], path: Path, copy: Path
) -> None:
    """A replica that can't be asked, or was promoted: the error says how to go on."""
    path.unlink()
    with pytest.raises(weclaw.StorageError, match="can't be asked"):
        lost(replica=["sh", "-c", "exit 255"])
    shutil.rmtree(str(path) + ".d")
    with pytest.raises(weclaw.StorageError, match="can't be asked"):
        lost(replica=["sh", "-c", "exit 255"], sync_replica=False)
    assert not path.exists()
    replica.promote(copy)
    with pytest.raises(weclaw.StorageError, match="in its own right"):
        lost(replica=copy)
    assert not path.exists()
    q = lost(replica=False)
    assert q.qsize() == 0


# -- options ---------------------------------------------------------------------------------------


def test_the_replica_belongs_to_the_file(
    open_queue: Callable[..., Any], path: Path, copy: Path
) -> None:
    """It is recorded, inherited, changed and forgotten."""
    q = open_queue(replica=copy, sync_replica=False)
    q.put(1)
    q.close()
    q = open_queue()
    assert q.stats().replica_lag is not None
    level(q)
    other = copy.with_name("other.wq")
    q.close()
    q = open_queue(replica=other)
    level(q)
    assert bodies(other) == [1]
    q.close()
    q = open_queue(replica=False)
    assert q.stats().replica_lag is None
    q.put(2)
    q.close()
    q = open_queue()
    assert q.stats().replica_lag is None
    assert receivers(copy) == receivers(other) == []


def test_a_backup_has_no_replica(open_queue: Callable[..., Any], path: Path, copy: Path) -> None:
    """It is a queue of its own, and does not write into the original's copy."""
    q = open_queue(replica=copy)
    q.put(1)
    backup = path.with_name("backup.wq")
    q._store.backup(backup)
    q.close()
    own = open_queue(at=backup)
    own.put(2)
    assert own.stats().replica_lag is None
    own.close()
    same(path, copy)


def test_a_normal_end_brings_the_copy_level(path: Path, copy: Path) -> None:
    """Also without a close, and also when the process that fed it ended earlier."""

    def put(pipe, path, copy):
        q = weclaw.Queue(path, replica=copy, sync_replica=False)
        q.put_many(list(range(1000)))
        pipe.send("put")
        pipe.recv()

    children = [Child(put, str(path), str(copy)) for _ in range(2)]
    for child in children:
        assert child.hear() == "put"
    for child in children:
        child.say("end")
        child.wait()
        child.close()
    eventually(lambda: not is_received(copy))
    same(path, copy)
    assert sorted(bodies(copy)) == sorted([*range(1000), *range(1000)])


def test_a_put_of_the_same_id_waits_for_the_replica_too(
    open_queue: Callable[..., Any], copy: Path
) -> None:
    """What somebody else put under the id may be taken back yet."""
    q = _impatient(open_queue, copy, 1.0)
    pid = send_signal(copy, signal.SIGSTOP)
    errors: list[BaseException] = []

    def put() -> None:
        try:
            q.put("x", id="mine")
        except weclaw.ReplicaUnavailableError as error:
            errors.append(error)

    threads = [threading.Thread(target=put) for _ in range(2)]
    threads[0].start()
    time.sleep(0.6)
    threads[1].start()
    time.sleep(0.6)
    os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert q.status("mine") == "unknown"


def test_the_environment_names_a_replica(
    open_queue: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a process that was told nothing else."""
    monkeypatch.setenv("WECLAW_REPLICA", str(copy))
    q = open_queue()
    q.put(1)
    assert bodies(copy) == [1]


def test_a_receiver_speaks_to_nobody_else(tmp_path: Path) -> None:
    """What is no stream is answered with a refusal, and makes no file."""
    done = subprocess.run(
        command(tmp_path / "copy.wq"), input=b"GET / HTTP/1.1\r\n\r\n", capture_output=True
    )
    assert done.returncode == 1
    assert b"no message of the stream" in done.stdout
    assert list(tmp_path.iterdir()) == []
    logging.getLogger("weclaw_embedded").debug("%s", done.stderr)
