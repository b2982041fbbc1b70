"""Ctrl-C at any moment: the call ends, the file closes, and what was confirmed is there."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import _durability, _files


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
