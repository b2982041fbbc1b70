"""Ctrl-C at any moment: the call ends, the file closes, and what was confirmed is there."""

from __future__ import annotations

import contextvars
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import _durability, _files, aio, threads
from weclaw_embedded._appending import Appending
from weclaw_embedded._session import Session
from weclaw_embedded._wake import Waker
from weclaw_embedded.wal import TAIL

pytestmark = pytest.mark.usefixtures("little_garbage")

PACKAGE = str(Path(weclaw.__file__).parent)


def work(path: Path, confirmed: list[str], acked: list[str], n: int) -> None:
    """Everything a program does, over and over, until interrupted."""
    with weclaw.Queue(path, retry=weclaw.RetryPolicy(max_retries=0)) as q:
        for i in range(30):
            confirmed.append(q.put({"round": n, "i": i}))
            confirmed.extend(q.put_many([i, i]))
            q.stats()
            q.peek(2)
            if i % 3:
                msg = q.get(block=False)
                msg.ack()
                acked.append(msg.id)


# What is cut off in the middle of being made, somebody's file or thread too, is left to the garbage
# collector, which warns of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_after_ctrl_c_at_any_moment_everything_goes_on(path: Path) -> None:
    """A hundred of them in one process: none hangs, none breaks what comes after, none loses."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    confirmed: list[str] = []
    acked: list[str] = []
    interrupted = 0
    for n in range(100):
        # A real signal, as a terminal would send it, while this thread is anywhere.
        timer = threading.Timer(
            chance.uniform(0.0005, 0.012),
            signal.pthread_kill,
            (threading.main_thread().ident, signal.SIGINT),
        )
        try:
            timer.start()
            work(path, confirmed, acked, n)
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        try:
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted > 20, f"seed {seed}"
    with weclaw.Queue(path) as q:
        status = {one: q.status(one) for one in confirmed}
        assert set(status.values()) <= {"ready", "done"}, f"seed {seed}"
        assert {q.status(one) for one in acked} <= {"done"}, f"seed {seed}"
        assert q.stats().leased == 0
        assert q._store.verify() == []


def test_who_waited_for_a_sync_and_is_gone_is_not_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C takes one out of those who wait for another's sync; the next one does it then."""
    began, go_on = threading.Event(), threading.Event()
    real = _files.sync_data

    def sync(fd: int) -> None:
        if threading.current_thread().name == "the first":
            began.set()
            assert go_on.wait(30)
        real(fd)

    with weclaw.Queue(path) as q:
        q.put(0)
        msg = q.get()
        monkeypatch.setattr(_files, "sync_data", sync)
        durability = q._store._engine
        first = threading.Thread(target=q.put, args=(1,), name="the first")
        last = threading.Thread(target=msg.ack)
        first.start()
        assert began.wait(30)

        def interrupt() -> None:
            while len(durability._sync_waiters) < 1:
                time.sleep(0.01)
            last.start()
            while len(durability._sync_waiters) < 2:
                time.sleep(0.01)
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)

        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            q.put(2)
        helper.join()
        go_on.set()
        first.join(30)
        last.join(30)
        assert not last.is_alive()
        assert sorted(msg.body for msg in q.peek(5)) == [1, 2]
        assert q.status(msg.id) == "done"


def test_a_sync_that_was_broken_off_at_any_call_is_not_waited_for(path: Path) -> None:
    """Ctrl-C is noticed where a function begins: at each of those of a sync in turn, and the next
    put does its own.
    """
    broken_off: list[str] = []
    with weclaw.Queue(path) as q:
        q.put("warm")
        for n in range(100):
            calls = 0

            def interrupt(frame: Any, event: str, _: Any, n: int = n) -> None:
                nonlocal calls
                if event == "call" and frame.f_code.co_filename == _durability.__file__:
                    calls += 1
                    if calls == n + 1:
                        broken_off.append(frame.f_code.co_name)
                        raise KeyboardInterrupt

            sys.settrace(interrupt)
            try:
                q.put(n)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if len(broken_off) <= n:
                break
            again = threading.Thread(target=q.put, args=("again",), daemon=True)
            again.start()
            again.join(20)
            assert not again.is_alive(), broken_off
    assert {"durable", "_sync_once", "_end_sync"} <= set(broken_off)


def break_off(call: Callable[[], object], n: int) -> str | None:
    """Ctrl-C where the n-th function of the package begins, which is where it is noticed: the name
    of that function; None where the call was over before.
    """
    where: str | None = None
    left = n

    def interrupt(frame: Any, event: str, _: Any) -> None:
        nonlocal left, where
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            left -= 1
            if left == 0:
                where = frame.f_code.co_name
                raise KeyboardInterrupt

    gc.collect()  # so that nobody's `__del__` is broken off instead
    gc.disable()
    sys.settrace(interrupt)
    try:
        call()
    except (KeyboardInterrupt, weclaw.Full, weclaw.Empty):
        pass
    finally:
        sys.settrace(None)
        gc.enable()
    return where


def test_a_get_that_was_broken_off_at_any_call_leaves_nothing_leased(tmp_path: Path) -> None:
    """What it had taken is ready again at once, as if nobody had been given it."""
    n, places = 0, []
    while n == len(places):
        n += 1
        with weclaw.Queue(tmp_path / f"{n}.wq", visibility_timeout=None) as q:
            q.put("x")
            got: list[weclaw.Message] = []
            where = break_off(lambda q=q, got=got: got.append(q.get()), n)
            if where is None:
                break
            places.append(where)
            assert got or q.stats()[:3] == (1, 0, 0), places
            assert not q._store._engine.waker._waiters, places
            if not got:
                assert q.get(block=False).delivery_count == 1, places
    assert {"take", "finish", "write_at", "messages_of"} <= set(places)


@pytest.mark.parametrize("kind", [threads.Queue, threads.LifoQueue, aio.Queue])
def test_a_get_of_a_stand_in_that_was_broken_off_at_any_call_has_taken_nothing(
    tmp_path: Path, kind: Any
) -> None:
    """The item is there for the next, as if nobody had been given it."""
    n, places = 0, []
    while n == len(places):
        n += 1
        # What was got before is known in its own context, and is let go of with it.
        run = contextvars.Context().run
        q = kind(path=tmp_path / f"get-{n}.wq")
        q.put_nowait("x")
        got: list[str] = []
        where = break_off(lambda q=q, got=got, run=run: got.append(run(q.get_nowait)), n)
        if where is not None:
            places.append(where)
            left = (q.qsize(), q.unfinished_tasks, len(q._core.hands.out))
            assert got or left == (1, 1, 0), places
            assert not q._core.engine.waker._waiters, places
        if not got:
            assert run(q.get_nowait) == "x", places
        run(q.task_done)
        assert q.unfinished_tasks == 0, places
        q.close()
    assert len(places) > 60  # how many there are depends on how far the last sync has come


@pytest.mark.parametrize("kind", [threads.Queue, aio.Queue])
def test_a_task_done_that_was_broken_off_at_any_call_is_done_or_can_be_done_again(
    tmp_path: Path, kind: Any
) -> None:
    """As many calls as items are unfinished after it settle them all."""
    n, places = 0, []
    while n == len(places):
        n += 1
        run = contextvars.Context().run
        q = kind(path=tmp_path / f"done-{n}.wq")
        for body in ("x", "y"):
            q.put_nowait(body)
            run(q.get_nowait)
        where = break_off(lambda q=q, run=run: run(q.task_done), n)
        if where is not None:
            places.append(where)
        left = q.unfinished_tasks
        assert len(q._core.engine.held) == left, places
        for _ in range(left):
            run(q.task_done)
        q.close()
        with weclaw.Queue(tmp_path / f"done-{n}.wq") as plain:
            assert plain.stats().settled == 2, places
    assert len(places) > 20  # how many there are depends on how far the last sync has come


@pytest.mark.parametrize("result", [None, {"a": 1}])
def test_an_ack_that_was_broken_off_at_any_call_is_done_or_can_be_done_again(
    tmp_path: Path, result: object
) -> None:
    """Whoever was interrupted is told the truth by the next ack."""
    n, places = 0, []
    while n == len(places):
        n += 1
        with weclaw.Queue(tmp_path / f"{n}.wq", visibility_timeout=None) as q:
            q.put("x")
            msg = q.get()
            where = break_off(lambda msg=msg: msg.ack(result), n)
            if where is None:
                break
            places.append(where)
            if q.status(msg.id) == "leased":
                msg.ack(result)
            else:
                with pytest.raises(weclaw.LeaseLostError, match="settled already"):
                    msg.ack()
            assert q.status(msg.id) == "done", places
            assert not q._store._engine.held, places
    assert {"ack", "write_at", "durable"} <= set(places)


def transfer(q: weclaw.Queue, msg: weclaw.Message) -> None:
    with q.transaction() as tx:
        tx.ack(msg)
        tx.put("next")


# A generator is broken off, too, when it is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda q, _: q.put("new", id="new"),
        lambda q, _: q.put_many(["new", weclaw.Put("newer", id="newer")]),
        lambda _, msg: msg.nack(),
        lambda _, msg: msg.fail("no"),
        lambda _, msg: msg.release(),
        lambda q, _: q.cancel("waiting"),
        transfer,
    ],
    ids=["put", "put_many", "nack", "fail", "release", "cancel", "transaction"],
)
def test_a_change_that_was_broken_off_at_any_call_is_done_or_is_not(
    tmp_path: Path, change: Callable[[weclaw.Queue, weclaw.Message], object]
) -> None:
    """What is in hands is leased, nothing is left to be written later, and the index says what the
    log says.
    """
    n, places = 0, []
    while n == len(places):
        n += 1
        path = tmp_path / f"{n}.wq"
        with weclaw.Queue(path, flush="os", visibility_timeout=None) as q:
            q.put("held", id="held")
            q.put("waiting", id="waiting")
            msg = q.get()
            where = break_off(lambda q=q, msg=msg: change(q, msg), n)
            if where is None:
                break
            places.append(where)
            engine = q._store._engine
            assert engine.log._frame == b"", places
            assert engine.log._buffers == [], places
            assert len(engine.held) == q.stats().leased, places
            q.put("after", id="after")
            asked = ["held", "waiting", "new", "newer", "after"]
            told = {id: q.status(id) for id in asked}
            assert told["after"] == "ready", places
            if told["held"] == "leased":
                told["held"] = "ready"  # at the close
        shutil.rmtree(f"{path}.d")
        with weclaw.Queue(path, flush="os") as q:  # by the log alone
            assert {id: q.status(id) for id in asked} == told, places
            assert q._store.verify() == []
    assert {"run_with", "write_at"} <= set(places)


def wait_for(what: str, q: weclaw.Queue, id: str) -> None:
    if what == "join":
        q.join(0.01)
    elif what == "result":
        q.result(id, 0.01)
    elif what == "put":
        q.put("y", timeout=0.01)
    elif what == "get":
        q.get(timeout=0.01)
    else:
        with q.transaction(timeout=0.01) as tx:
            tx.put("y")


# (The last comment of the same words says why.)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["join", "result", "put", "get", "transaction"])
def test_who_waits_and_is_broken_off_at_any_call_waits_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """But where Ctrl-C comes just as it is seen to."""
    now_s = time.monotonic()  # goes on while one sleeps only, so that each run calls the same
    read = Waker._read

    def sleep(self: Waker, timeout_s: float) -> None:
        nonlocal now_s
        read(self, 0.0)
        now_s += timeout_s

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(Waker, "_read", sleep)
    n, places = 0, []
    while n == len(places):
        n += 1
        with weclaw.Queue(tmp_path / f"{n}.wq", maxsize=1) as q:
            given = q.put("x")
            if what == "get":
                q.get()
            where = break_off(lambda q=q, given=given: wait_for(what, q, given), n)
            if where is None:
                break
            places.append(where)
            if where != "discard":
                assert not q._store._engine.waker._waiters, places
    assert {"wait_for", "wait", "_sleep"} <= set(places)


def test_ctrl_c_twice_leaves_nothing_that_a_later_call_would_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that is broken off, and broken off again as it is taken back, is not there later."""
    finish, discard = Session.finish, Appending.discard
    came: list[str] = []

    def broken_finish(self: Session) -> None:
        if not came:
            came.append("finish")
            raise KeyboardInterrupt
        finish(self)

    def broken_discard(self: Appending) -> None:
        if len(came) == 1:
            came.append("discard")
            raise KeyboardInterrupt
        discard(self)

    with weclaw.Queue(path) as q:
        q.put("before")
        with monkeypatch.context() as patch:
            patch.setattr(Session, "finish", broken_finish)
            patch.setattr(Appending, "discard", broken_discard)
            with pytest.raises(KeyboardInterrupt):
                q.put("broken off")
        assert came == ["finish", "discard"]
        q.put("after")
        assert [msg.body for msg in q.peek(5)] == ["before", "after"]
    shutil.rmtree(f"{path}.d")
    with weclaw.Queue(path) as q:  # by the log alone
        assert [msg.body for msg in q.peek(5)] == ["before", "after"]


def test_ctrl_c_in_a_put_does_not_end_the_flushes_of_batch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came just when the next one was to be planned: the next put plans it."""
    with weclaw.Queue(path, flush="batch", flush_interval_ms=20) as q:
        engine = q._store._engine
        with monkeypatch.context() as patch:

            def call_at(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(engine.timer, "call_at", call_at)
            with pytest.raises(KeyboardInterrupt):
                q.put("broken off")
        q.put("after")
        tail = engine.page.words[TAIL]
        until_s = time.monotonic() + 30
        while not engine.is_durable(tail):
            assert time.monotonic() < until_s
            time.sleep(0.01)


@pytest.mark.parametrize("what", ["backup", "replay"])
def test_what_reads_all_and_was_broken_off_at_any_call_keeps_no_space(
    path: Path, tmp_path: Path, what: str
) -> None:
    """Also in its last turn: what it read is free to go at the next upkeep."""
    places: list[str] = []
    with weclaw.Queue(path) as q:
        q.put("x")
        engine = q._store._engine
        for n in range(1, 1000):
            assert q.replay(offset="earliest") == 0  # so that the same is in memory each time
            copy = tmp_path / f"copy-{n}.wq"
            call = {
                "backup": lambda copy=copy: q.store.backup(copy),
                "replay": lambda: q.replay(offset="earliest"),
            }
            where = break_off(call[what], n)
            if where is None:
                break
            places.append(where)
            engine._upkeep()
            assert engine.page.pinned(engine.log.segment_bytes) == 1 << 63, places
        else:
            pytest.fail("it never came to its end")
    assert {"pin", "create_whole" if what == "backup" else "frames"} <= set(places)


# (The last comment of the same words says why.)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_opening_that_was_broken_off_at_any_call_leaves_nothing_open(path: Path) -> None:
    """No descriptor, and with it no lock; the next one opens."""
    with weclaw.Queue(path) as q:
        q.put("x")
    places: list[str] = []
    n_open = len(os.listdir("/dev/fd"))
    for n in range(1, 5000):
        opened: list[weclaw.Queue] = []
        where = break_off(lambda opened=opened: opened.append(weclaw.Queue(path)), n)
        for q in opened:
            q.close()
        if len(os.listdir("/dev/fd")) > n_open:
            gc.collect()
        assert len(os.listdir("/dev/fd")) == n_open, (n, where)
        if where is None:
            break
        places.append(where)
    assert {"belongs_to", "take_owner_slot", "typed_errors"} <= set(places)
    with weclaw.Queue(path) as q:
        assert [msg.body for msg in q.peek(2)] == ["x"]


def left_open(folder: Path) -> tuple[int, list[str], list[str]]:
    """Descriptors, files that are mapped, and folders of lookers, of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[5] for line in maps if str(folder) in line]
    return len(os.listdir("/dev/fd")), sorted(mapped), sorted(os.listdir(folder / "own"))


def numbers(left: tuple[int, list[str], list[str]]) -> tuple[int, int, int]:
    return left[0], len(left[1]), len(left[2])


@pytest.fixture(params=["nobody beside", "one who writes"])
def looked_at(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A file to be looked at with a message in it, while nobody has it open, or somebody has."""
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    path = tmp_path / "tasks.wq"
    with weclaw.Queue(path) as q:
        q.put("x")
        if request.param == "one who writes":
            yield path
    if request.param != "one who writes":
        yield path


# (The last comment of the same words says why.)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_opening_to_look_that_was_broken_off_at_any_call_leaves_nothing_open(
    looked_at: Path,
) -> None:
    """No descriptor, no mapping, and no index of its own; the next one opens."""
    places: list[str] = []
    before = left_open(looked_at.parent)
    for n in range(1, 5000):
        opened: list[weclaw.Queue] = []
        where = break_off(
            lambda opened=opened: opened.append(weclaw.Queue(looked_at, readonly=True)), n
        )
        for q in opened:
            q.close()
        del opened
        if left_open(looked_at.parent) != before:
            gc.collect()
        assert left_open(looked_at.parent) == before, (n, where)
        if where is None:
            break
        places.append(where)
    assert {"open_readonly", "_own_index", "keep", "typed_errors"} <= set(places)
    with weclaw.Queue(looked_at, readonly=True) as q:
        assert [msg.body for msg in q.peek(2)] == ["x"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("anew", [False, True], ids=["", "anew"])
def test_a_look_that_was_broken_off_at_any_call_can_be_taken_again(
    looked_at: Path, anew: bool
) -> None:
    """It has left nothing open, and what it was to find is found; also where it makes its index
    anew.
    """
    places: list[str] = []
    with weclaw.Queue(looked_at, readonly=True) as q:
        before = numbers(left_open(looked_at.parent))
        for n in range(1, 5000):
            q.store._engine._is_doubtful = anew
            found: list[weclaw.Message] = []
            where = break_off(lambda found=found: found.extend(q.peek(2)), n)
            for _ in range(2):  # what was left behind is closed when it begins anew once more
                q.store._engine._is_doubtful = anew
                assert [msg.body for msg in q.peek(2)] == ["x"], (n, where)
            if numbers(left_open(looked_at.parent)) != before:
                gc.collect()
            assert numbers(left_open(looked_at.parent)) == before, (n, where)
            if where is None:
                break
            places.append(where)
    assert {"_look_at_page", "_find_end", "catch_up"} <= set(places)
    assert ("_begin_anew" in places) is anew
    assert not os.listdir(looked_at.parent / "own")
