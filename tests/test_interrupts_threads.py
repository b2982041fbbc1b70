"""Ctrl-C at any moment in one thread: the others of its process go on, and so do later calls."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.interrupts import interrupted
from tests.helpers.queues import eventually

import weclaw_embedded as weclaw
from weclaw_embedded import Put
from weclaw_embedded._handle import _Untold
from weclaw_embedded._wake import Timer

pytestmark = pytest.mark.usefixtures("little_garbage")


def beside(call: Callable[[], object], what: object) -> None:
    """Make the call in another thread, which must come back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), what


def cancel_many(timer: Timer) -> None:
    for number in range(1, 100):
        timer.cancel(number)


@pytest.mark.parametrize(
    "broken_off",
    [
        lambda timer: timer.call_at(0.0, int),
        cancel_many,
        lambda timer: timer.stop(),
        lambda timer: timer.close(),
    ],
    ids=["call_at", "cancel", "stop", "close"],
)
@pytest.mark.parametrize("sleeps", [False, True], ids=["new", "asleep"])
def test_a_timer_that_was_broken_off_anywhere_goes_on(
    broken_off: Callable[[Timer], Any], sleeps: bool
) -> None:
    """It calls in time what others want called, and can be closed."""
    n, places = 0, []
    while n == len(places):
        n += 1
        timer = Timer("weclaw-test")
        if sleeps:
            timer.call_at(time.monotonic() + 3600, int)
        error = interrupted(lambda timer=timer: broken_off(timer), n)
        if error is None:
            beside(timer.close, places)
            break
        places.append(error.args[0])
        called = threading.Event()
        beside(lambda timer=timer, called=called: timer.call_at(0.0, called.set), places)
        assert timer._closed or called.wait(20), places
        beside(timer.close, places)
        assert timer._thread is None or not timer._thread.is_alive(), places
    assert places


def test_who_was_told_and_not_taken_off_is_not_told_again_for_another() -> None:
    """Ctrl-C in `notify`, behind the waking: the thread waits anew, behind its old self in the
    list, before the next call is planned.
    """
    timer = Timer("weclaw-test")
    timer.call_at(time.monotonic() + 3600, int)
    waiting = timer._condition._waiters  # type: ignore[attr-defined]
    assert eventually(lambda: len(waiting) == 1)

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        if event == "c_return" and (frame.f_code.co_name, argument.__name__) == (
            "notify",
            "release",
        ):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sys.setprofile(interrupt)
        try:
            timer.call_at(0.0, int)
        finally:
            sys.setprofile(None)
    assert eventually(lambda: len(waiting) == 2)
    called = threading.Event()
    timer.call_at(0.0, called.set)
    assert called.wait(20)
    timer.close()


def test_a_wait_for_on_dead_that_was_broken_off_anywhere_leaves_its_thread_at_work(
    path: Path,
) -> None:
    """Ctrl-C at the end of the program, while it waits for that thread: the file can be closed."""
    told: list[int] = []
    with weclaw.Queue(path) as q:
        untold = _Untold(q._store._engine, told.extend)
        n, places = 0, []
        while n == len(places):
            n += 1
            error = interrupted(lambda: untold.wait_told(time.monotonic() + 20), n)
            if error is not None:
                places.append(error.args[0])
            untold.add([n])
            eventually(lambda n=n: told[-1:] == [n], what=str(places))
        assert "call_at" in places
        untold.close()


def test_a_close_that_was_broken_off_while_it_stops_the_feeder_can_be_called_again(
    tmp_path: Path,
) -> None:
    """The thread that feeds the replica ends, wherever Ctrl-C came."""
    n, places = 0, []
    while n == len(places):
        n += 1
        weclaw.Queue(tmp_path / f"{n}.wq").close()
        q = weclaw.Queue(tmp_path / f"{n}.wq", replica=["false"], sync_replica=False)
        replication = q._store._engine.replication
        assert replication is not None
        eventually(lambda replication=replication: replication._thread is not None)
        error = interrupted(replication.close, n)
        if error is not None:
            places.append(error.args[0])
        q.close()
        assert replication._thread is not None
        assert not replication._thread.is_alive(), places
    assert "wake_feeder" in places


def put_too_many(q: weclaw.Queue, _: list[weclaw.Message]) -> None:
    with contextlib.suppress(weclaw.Full):
        q.put("too many", block=False)


def get(q: weclaw.Queue, got: list[weclaw.Message]) -> None:
    got.append(q.get(block=False))


def ask(q: weclaw.Queue, _: list[weclaw.Message]) -> None:
    q.stats()


def look(q: weclaw.Queue, _: list[weclaw.Message]) -> None:
    q.peek(2)


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["known", "forgotten"])
@pytest.mark.parametrize("broken_off", [put_too_many, get, ask, look])
def test_a_turn_that_was_broken_off_anywhere_leaves_nothing_that_is_told_twice(
    path: Path,
    broken_off: Callable[[weclaw.Queue, list[weclaw.Message]], None],
    is_forgotten: bool,
) -> None:
    """Another thread, while the exception is alive, finds the right counts: what was acked before
    doesn't come back, and the index's transaction keeps nobody waiting.
    """
    with (
        weclaw.Queue(path, flush="os", maxsize=4, visibility_timeout=None) as q,
        weclaw.Queue(path, flush="os") as other,
    ):
        index = q._store._engine.index
        q.put_many(["x", "x", "x", "x"])
        acked = 0
        n, places = 0, []
        while n == len(places):
            n += 1
            msg = q.get(block=False)
            if is_forgotten:  # so that the turn reads in LMDB what it knows
                index.write().abort()
            msg.ack()  # which the turn learns of, as of this put
            acked += 1
            other.put("x", priority=n % 3)
            got: list[weclaw.Message] = []
            error = interrupted(lambda got=got: broken_off(q, got), n)
            if error is not None:
                places.append(error.args[0])
            for _ in range(2):
                found: list[Any] = []
                beside(lambda found=found: found.append(q.stats()), places)
                assert found[0][:5] == (4 - len(got), 0, len(got), 0, acked), places
            for msg in got:
                msg.release()
        assert q._store.verify() == []
    assert {"catch_up", "apply"} <= set(places), places


def test_ctrl_c_again_and_again_leaves_no_transaction_open(path: Path) -> None:
    """Also where what is to take a turn back is broken off each time: no other thread could end the
    transaction of LMDB, and all would wait for it.
    """
    rng = random.Random(8)
    ours = {str(file) for file in Path(weclaw.__file__).parent.glob("*.py")}

    def interrupt(_: int, frame: Any) -> None:
        if frame.f_code.co_filename in ours:  # not here, nor in pytest
            raise KeyboardInterrupt

    with weclaw.Queue(path, flush="os") as q:
        q.put_many([Put("x", id=str(n)) for n in range(50)])
        index = q._store._engine.index
        calls: list[Callable[[], object]] = [
            q.stats,
            lambda: q.status(str(rng.randrange(50))),
            lambda: q.put("x", id=str(rng.randrange(100))),
            lambda: q.get(block=False).release(),
        ]
        n_broken_off = 0
        before = signal.signal(signal.SIGALRM, interrupt)
        gc.collect()  # so that nobody's `__del__` is broken off instead
        gc.disable()
        try:
            for n in range(200):
                index.write().abort()  # so that the turn asks LMDB for what it knows
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-6, 2e-4), 2e-5)
                try:
                    rng.choice(calls)()
                except KeyboardInterrupt:
                    n_broken_off += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                beside(q.stats, n)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            gc.enable()
        assert n_broken_off > 20
        assert q.store.verify() == []
