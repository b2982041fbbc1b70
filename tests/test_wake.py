"""Waking: a put wakes one process of a group, and no message waits for one that does not come."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dis import opname
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _files, _waiting, _wake
from weclaw_embedded._shared import READY, SETTLED, WAITERS
from weclaw_embedded._wake import SETTLED_BYTE, Timer, pipe_path, waiter_for
from weclaw_embedded.wal import COMMIT, TAIL


def marked(q: weclaw.Queue) -> int:
    """How many processes would be woken."""
    page = q._store._engine.page
    return sum(page.waits(slot, READY) for slot, _ in page.owners())


def consume(pipe, path):
    """Get and ack, again and again, and say what."""
    q = weclaw.Queue(path, retry=weclaw.RetryPolicy(backoff=0.0))
    pipe.send("open")
    while True:
        with q.get() as msg:
            pipe.send(msg.body)


def consume_one(pipe, path):
    """Get and ack one, and be idle after that."""
    q = weclaw.Queue(path)
    pipe.send("open")
    with q.get() as msg:
        pipe.send(msg.body)
    pipe.recv()


@contextmanager
def waiting(q: weclaw.Queue, *children: Child) -> Iterator[None]:
    """All these children wait for a message."""
    try:
        for child in children:
            assert child.hear() == "open"
        eventually(lambda: marked(q) == len(children))
        q.qsize()  # a turn of our own: whoever marked himself last is out of his by then
        yield
    finally:
        for child in children:
            child.close()


def test_a_put_wakes_one_process_and_leaves_the_other_asleep(path: Path) -> None:
    """Whoever was not woken is woken by the next put."""
    with weclaw.Queue(path) as q:
        one, other = Child(consume_one, path), Child(consume_one, path)
        with waiting(q, one, other):
            q.put("first")
            eventually(lambda: q.stats().settled == 1)
            assert marked(q) == 1
            q.put("second")
            assert {one.hear(), other.hear()} == {"first", "second"}


def take_one(pipe, path):
    """Get and ack one, and close once told to."""
    with weclaw.Queue(path) as q:
        pipe.send("open")
        with q.get() as msg:
            pipe.send(msg.body)
        pipe.recv()


def test_who_has_the_slot_of_one_who_left_is_woken_through_its_own_pipe(path: Path) -> None:
    """Whoever woke the one before still has that one's pipe, which nobody reads any more."""
    with weclaw.Queue(path) as q:
        waker = q._store._engine.waker
        for n in range(2):
            child = Child(take_one, path)
            with waiting(q, child):
                q.put(n)
                assert child.hear() == n
                [(slot, fd)] = waker._outgoing.items()
                assert os.path.samestat(os.fstat(fd), os.stat(pipe_path(waker._directory, slot)))
                child.say("close")
                child.end()


def test_a_poke_is_never_written_to_what_has_the_descriptor_by_now(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread closes the pipe of a process that is gone, another is about to write to it."""
    with weclaw.Queue(path) as q:
        child = Child(consume_one, path)
        with waiting(q, child):
            q.put("x")
            assert child.hear() == "x"
        waker = q._store._engine.waker
        [slot] = waker._outgoing  # nobody is behind it any more
        real, at_it, goes_on = _files.write_pipe, threading.Event(), threading.Event()

        def write_pipe(fd: int, data: bytes) -> int:
            if threading.current_thread() is slow:
                at_it.set()
                goes_on.wait(1)  # for the other one, if nothing keeps it out
            return real(fd, data)

        monkeypatch.setattr(_files, "write_pipe", write_pipe)
        slow = threading.Thread(target=waker.poke, args=([slot], b"r"))
        slow.start()
        assert at_it.wait(30)
        other = threading.Thread(target=waker.poke, args=([slot], b"r"))
        other.start()
        eventually(lambda: not waker._outgoing or not slow.is_alive())
        other.join()
        ours = [os.open(path.with_name("ours"), os.O_RDWR | os.O_CREAT) for _ in range(3)]
        goes_on.set()
        slow.join()
        assert path.with_name("ours").read_bytes() == b""
        for fd in ours:
            os.close(fd)


def test_a_put_does_not_fail_because_nobody_can_be_woken(path: Path) -> None:
    """Without a descriptor left it returns, and who waits comes upon the message by himself."""
    with weclaw.Queue(path) as q:
        child = Child(consume_one, path)
        with waiting(q, child):
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
            try:
                q.put("x")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert child.hear() == "x"


def test_what_was_due_and_failed_stops_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """The thread that flushes in time survives whatever it calls, and says what has failed."""
    timer, called = Timer("weclaw-test"), threading.Event()
    timer.call_at(0.0, lambda: [][0])
    timer.call_at(0.0, called.set)
    assert called.wait(30)
    timer.close()
    assert "IndexError" in caplog.text


def test_what_many_want_soon_is_called_once_for_all_of_them() -> None:
    """By the first time that one of them wants; and again for who wants it after it began."""
    timer, may_end, came = Timer("weclaw-test"), threading.Event(), threading.Semaphore(0)

    def function() -> None:
        came.release()
        may_end.wait(30)

    far_s = time.monotonic() + 3600
    for when_s in (far_s, far_s + 1, far_s):
        timer.call_by(when_s, function)
    assert [one[0] for one in timer._heap] == [far_s]
    timer.call_by(0.0, function)
    assert came.acquire(timeout=30)
    assert timer.next_s(function) == far_s
    for _ in range(2):
        timer.call_by(1.0, function)
    assert timer.next_s(function) == 1.0
    assert len(timer._heap) == 2
    may_end.set()
    assert came.acquire(timeout=30)
    timer.close()
    assert not came.acquire(blocking=False)
    assert timer.next_s(function) == math.inf


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_call_that_was_asked_for_again_after_ctrl_c_comes(sleeps: bool) -> None:
    """Wherever that was noticed while it was asked for, where a function begins or a call is over;
    with the timer's thread to be begun, and with one that sleeps.
    """
    n = 0
    while True:
        n += 1
        timer, called = Timer("weclaw-test"), threading.Event()
        if sleeps:
            timer.call_at(0.0, called.set)
            assert called.wait(30)
            called.clear()
        left = n
        called_last = False

        def interrupt(frame: Any, event: str, _: Any) -> Any:
            nonlocal left, called_last
            if frame.f_code.co_filename != _wake.__file__:
                return None
            frame.f_trace_opcodes = True
            left -= event == "call" or (event == "opcode" and called_last)
            now = opname[frame.f_code.co_code[frame.f_lasti]]
            called_last = event == "opcode" and now.startswith("CALL")
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            timer.call_by(0.0, called.set)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if left > 0:
            break
        timer.call_by(0.0, called.set)
        assert called.wait(30), n
        timer.close()
    timer.close()
    assert n > 8


def test_what_was_cancelled_is_not_kept_and_all_else_is_called_in_time() -> None:
    """However many calls are cancelled, in whatever order, and however far off they are."""
    timer, called = Timer("weclaw-test"), [threading.Event() for _ in range(3)]
    soon_s = time.monotonic() + 0.3
    numbers, kept = [], []
    for n in range(3000):
        one = functools.partial(print, n)
        kept.append(weakref.ref(one))
        numbers.append(timer.call_at(soon_s + 3600 + n, one))
        if n % 1000 == 500:
            timer.call_at(soon_s + n / 10_000, called[n // 1000].set)
    random.Random(7).shuffle(numbers)
    del one
    for number in numbers:
        timer.cancel(number)
    assert sum(one() is not None for one in kept) < 100
    for one in called:
        assert one.wait(30)
    timer.close()


def test_several_puts_wake_several_processes(path: Path) -> None:
    """As many as there are messages."""
    with weclaw.Queue(path) as q:
        children = [Child(consume_one, path) for _ in range(3)]
        with waiting(q, *children):
            q.put_many(["a", "b", "c"])
            assert {child.hear() for child in children} == {"a", "b", "c"}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
def test_what_one_was_woken_for_who_does_not_come_goes_to_another(
    path: Path, end: signal.Signals
) -> None:
    """Killed, stopped or interrupted while it waits: every message reaches the other."""
    with weclaw.Queue(path) as q:
        gone, other = Child(consume, path), Child(consume, path)
        with waiting(q, gone, other):
            gone.signal(end)
            for n in range(4):
                q.put(n)
                assert other.hear() == n


def put_and_sync_when_told(pipe, path):
    """Put what is said; it is on stable storage when that is said, too."""
    from weclaw_embedded.wal import Log

    real = Log.sync

    def sync(log):
        pipe.send("written")
        assert pipe.recv() == "sync"
        real(log)

    q = weclaw.Queue(path)
    Log.sync = sync
    pipe.send("open")
    while True:
        q.put(pipe.recv())
        pipe.send("put")


def get_one(path: Path, got: list[object]) -> None:
    with weclaw.Queue(path) as q, q.get() as msg:
        got.append(msg.body)


def get_one_in_a_loop(path: Path, got: list[object]) -> None:
    async def get() -> None:
        async with weclaw.AsyncQueue(path) as q, await q.get() as msg:
            got.append(msg.body)

    asyncio.run(get())


@pytest.mark.parametrize("get", [get_one, get_one_in_a_loop])
def test_what_was_written_and_not_yet_synced_at_the_last_look_is_found(
    path: Path, monkeypatch: pytest.MonkeyPatch, get
) -> None:
    """Also when another one was woken for it, who was stopped."""
    # So late that who looks finds the sync done, and does not do it himself.
    monkeypatch.setattr(_waiting, "DEATH_CHECK_S", 2.0)
    got: list[object] = []
    with weclaw.Queue(path) as q:
        page, slot = q._store._engine.page, q._store._engine.slot
        gone, producer = Child(consume, path), Child(put_and_sync_when_told, path)
        assert producer.hear() == "open"  # which wakes who waits, once
        with producer, waiting(q, gone):
            gone.signal(signal.SIGSTOP)
            for body in ("first", "second"):  # for one of them the other one is woken
                producer.say(body)
                assert producer.hear() == "written"
                thread = threading.Thread(target=get, args=(path, got), daemon=True)
                thread.start()
                eventually(lambda: page.waits(slot, READY))
                producer.say("sync")
                assert producer.hear() == "put"
                thread.join(20)
                assert got.pop() == body


def consume_without_looking(pipe, path):
    """Get and ack, and look for nothing by itself now and then."""
    from weclaw_embedded import _waiting

    _waiting.DEATH_CHECK_S = _waiting.ALONE_CHECK_S = 3600.0
    q = weclaw.Queue(path)
    pipe.send("open")
    while True:
        with q.get() as msg:
            pipe.send(msg.body)


def test_what_a_turn_makes_visible_is_told_though_it_fails(path: Path) -> None:
    """Its own sync had made durable what another process put."""
    with weclaw.Queue(path, maxsize=1) as q:
        q.put("mine")
        msg = q.get()
        child, producer = Child(consume_without_looking, path), Child(put_and_sync_when_told, path)
        assert producer.hear() == "open"
        with producer, waiting(q, child):
            producer.say("theirs")
            assert producer.hear() == "written"
            msg.ack()
            with pytest.raises(weclaw.Full):
                q.put("no room", block=False)
            assert child.hear() == "theirs"


def test_who_waited_in_vain_is_woken_no_more(path: Path) -> None:
    """A get whose time was over leaves no mark behind that would swallow a wake-up."""

    def wait_in_vain(pipe, path):
        q = weclaw.Queue(path)
        pipe.send("open")
        try:
            q.get(timeout=0.1)
        except weclaw.Empty:
            pipe.send("empty")
        pipe.recv()

    with weclaw.Queue(path) as q, Child(wait_in_vain, path) as gone:
        assert [gone.hear(), gone.hear()] == ["open", "empty"]
        assert marked(q) == 0


def test_a_task_that_was_cancelled_is_woken_no_more(path: Path) -> None:
    """Nor one that waits in an event loop."""

    def cancel(pipe, path):
        import asyncio

        async def wait() -> None:
            async with weclaw.AsyncQueue(path) as q:
                pipe.send("open")
                pipe.recv()
                try:
                    await asyncio.wait_for(q.get(), 0.1)
                except (asyncio.TimeoutError, TimeoutError):
                    pipe.send("cancelled")
                await asyncio.to_thread(pipe.recv)

        asyncio.run(wait())

    with weclaw.Queue(path) as q, Child(cancel, path) as gone:
        assert gone.hear() == "open"
        other = Child(consume, path)
        with waiting(q, other):
            gone.say("wait")
            assert gone.hear() == "cancelled"
            for n in range(4):
                q.put(n)
                assert other.hear() == n


def test_who_was_not_woken_knows_when_a_lease_ends(path: Path) -> None:
    """A lease that runs out while nothing else happens goes to whoever waits."""

    def hold(pipe, path):
        q = weclaw.Queue(path)
        pipe.send("open")
        q.get(visibility_timeout=0.7)
        pipe.send("held")
        pipe.recv()

    with weclaw.Queue(path) as q:
        holder = Child(hold, path)
        with waiting(q, holder):
            waiter = Child(consume, path)
            assert waiter.hear() == "open"
            eventually(lambda: marked(q) == 2)
            # Whoever is woken: when it is the waiter, the next is the holder's.
            q.put("a")
            q.put("b")
            assert holder.hear() == "held"
            assert {waiter.hear(), waiter.hear()} == {"a", "b"}
            waiter.close()


def test_who_was_not_woken_knows_when_a_message_is_due(path: Path) -> None:
    """A delayed message goes to one who waits when the one told of it has gone."""
    with weclaw.Queue(path) as q:
        children = [Child(consume_one, path) for _ in range(2)]
        with waiting(q, *children):
            q.put("later", delay=0.5)
            q.put("later", delay=0.5)
            assert [child.hear() for child in children] == ["later", "later"]


def test_threads_that_wait_take_turns_reading_the_pipe(path: Path) -> None:
    """The first that waits reads for all; when it leaves, another one does."""
    with weclaw.Queue(path) as q:
        got: list[object] = []

        def take(timeout: float | None) -> None:
            try:
                with q.get(timeout=timeout) as msg:
                    got.append(msg.body)
            except weclaw.Empty:
                got.append(None)

        first = threading.Thread(target=take, args=(0.3,))
        others = [threading.Thread(target=take, args=(None,)) for _ in range(5)]
        joining = threading.Thread(target=q.join)
        first.start()
        eventually(lambda: marked(q) == 1)
        for thread in others:
            thread.start()
        first.join()
        assert got == [None]
        assert q._store._engine.waker._thread is None  # no other one reads for them
        q.put(0)
        joining.start()
        q.put_many([1, 2, 3, 4])
        for thread in [*others, joining]:
            thread.join()
        assert sorted(one for one in got if one is not None) == [0, 1, 2, 3, 4]


def test_closing_ends_what_waits(path: Path) -> None:
    """Also the thread that reads the pipe, and also when the one who closes is in that thread."""
    q = weclaw.Queue(path)
    ended = threading.Event()

    def wait() -> None:
        try:
            q.get()
        except weclaw.ClosedError:
            ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: marked(q) == 1)
    q.close()
    thread.join()
    assert ended.is_set()

    q = weclaw.Queue(path)
    before = signal.signal(signal.SIGALRM, lambda *_: q.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(weclaw.ClosedError):
            q.get()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_thread_and_a_loop_may_wait_in_one_process(path: Path) -> None:
    """Whichever of them reads the pipe wakes the other."""
    q = weclaw.Queue(path)
    got: list[object] = []

    def take() -> None:
        with q.get() as msg:
            got.append(msg.body)

    async def both() -> None:
        async with weclaw.AsyncQueue(path) as aq:
            for n in range(20):
                thread = threading.Thread(target=take)
                thread.start()
                task = asyncio.create_task(aq.get())
                await asyncio.sleep(0)
                await aq.put_many([n, n])
                msg = await task
                await msg.ack()
                await asyncio.to_thread(thread.join)
                got.append(msg.body)

    asyncio.run(both())
    q.close()
    assert sorted(got) == sorted([*range(20), *range(20)])


def test_who_waits_alone_is_told_when_another_process_comes(path: Path) -> None:
    """Alone it looks seldom; from then on as often as a death has to be noticed."""

    def wait_alone(pipe, path):
        from weclaw_embedded import _waiting

        _waiting.ALONE_CHECK_S = 3600.0
        q = weclaw.Queue(path)
        engine = q._store._engine
        real = engine.run_with

        def turn(operation, what):
            pipe.send(engine.look_every_s)
            return real(operation, what)

        engine.run_with = turn
        with q.get() as msg:
            pipe.send(msg.body)

    def come(pipe, path):
        pipe.send("open" if weclaw.Queue(path) else "")
        pipe.recv()

    with Child(wait_alone, path) as waiter:
        assert waiter.hear() == 3600.0
        with Child(come, path) as other:
            assert other.hear() == "open"
            while (said := waiter.hear()) == 3600.0:
                pass
            assert said < 0.5


def open_and_hold(pipe, path):
    """Take as many messages as is said, and keep them."""
    q = weclaw.Queue(path)
    held = [q.get() for _ in range(pipe.recv())]
    pipe.send([msg.body for msg in held])
    pipe.recv()


def test_the_next_get_has_what_a_dead_process_held_whatever_else_is_ready(
    path: Path, open_queue
) -> None:
    """However short the time since it was last asked who has died."""
    q = open_queue()
    for n in range(5):
        q.put(n)
        q.put(n + 0.5)
        with Child(open_and_hold, path) as child:
            child.say(1)
            assert child.hear() == [n]
            q.get(visibility_timeout=None).release()
            child.kill()
            got = []
            for _ in range(2):
                with q.get() as msg:
                    got.append((msg.body, msg.crash_count))
            assert got == [(n, 1), (n + 0.5, 0)]


@pytest.mark.parametrize("waits", [False, True])
def test_who_died_and_held_nothing_is_forgotten_too(path: Path, open_queue, waits: bool) -> None:
    """By who looks again after a while, and by who waits: what he had to read is in the way of the
    space.
    """
    q = open_queue()
    engine = q._engine
    getter = threading.Thread(target=q.get, kwargs={"timeout": 60}, daemon=True)
    with Child(open_and_hold, path) as child:
        child.say(0)
        assert child.hear() == []
        assert len(engine.page.owners()) == 2
        if waits:
            getter.start()
            eventually(lambda: marked(q) == 1)
        child.kill()
    until_s = time.monotonic() + 30
    while len(engine.page.owners()) == 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)
        if not waits:
            with contextlib.suppress(weclaw.Empty):
                q.get_nowait()
    if waits:
        q.put("x")
        getter.join()


def test_who_is_woken_before_sleeping_does_not_sleep() -> None:
    """A join is noted before it looks, so that no end is missed; `task_done` may be that quick."""
    waiter = waiter_for(SETTLED_BYTE)
    waiter.wake()
    waiter.arm()
    slept = threading.Thread(target=waiter.wait, args=(3600.0,), daemon=True)
    slept.start()
    slept.join(10)
    assert not slept.is_alive()


def put_and_hang(pipe, path):
    """Put one that is written, and hang in its sync."""
    from weclaw_embedded import _files

    q = weclaw.Queue(path)

    def sync_data(fd):
        pipe.send("in its sync")
        time.sleep(1000)

    _files.sync_data = sync_data
    q.put("written")


def test_an_ack_leaves_the_commit_point_to_the_next_turn(open_queue):
    """It is durable when it returns, with no lock after its sync; the next turn tells others."""
    q = open_queue()
    engine = q._engine
    words = engine.page.words
    q.put("x")
    assert words[COMMIT] == words[TAIL]
    msg = q.get()
    msg.ack()
    tail = words[TAIL]
    assert words[COMMIT] < tail
    assert engine.is_durable(tail)
    assert q.qsize() == 0
    assert words[COMMIT] == words[TAIL] == tail


def test_what_a_dead_process_put_comes_with_the_sync_of_an_ack(path):
    """A put whose process died in its sync is durable by anybody's, and then it is delivered."""
    with weclaw.Queue(path) as q:
        q.put("first")
        msg = q.get()
        with Child(put_and_hang, str(path)) as child:
            assert child.hear() == "in its sync"
            child.kill()
        msg.ack()
        assert q.get(block=False).body == "written"


def test_a_commit_point_below_a_put_wakes_nobody_for_it(path):
    """Who syncs something else while a put is in its sync leaves those who wait for it asleep."""
    with weclaw.Queue(path) as q, waiting(q, Child(consume_one, str(path))):
        page = q._engine.page
        words = page.words

        def ask(session):
            tail = words[TAIL]
            page.promise_sync(tail + 100, tail + 200)
            assert page.note_puts(1, 1) == []
            words[COMMIT] = tail
            assert page.take_seen() == []
            assert marked(q) == 1
            words[COMMIT] = tail + 200
            woken = page.take_seen()
            page.wait_for(woken[0], READY, 1)
            page.forget_promises()
            words[COMMIT] = tail
            return woken

        assert len(q._engine.run(ask)) == 1
        q.put("x")


def test_those_who_wait_are_counted_by_what_for(open_queue):
    """Twice for the same thing is once; a slot that is given up waits for nothing."""
    page = open_queue()._engine.page
    words = page.words
    before = words[WAITERS]
    page.wait_for(7, READY, 1)
    page.wait_for(7, READY, 2)
    assert words[WAITERS] == before + 1
    page.wait_for(7, SETTLED, 1)
    assert words[WAITERS] >> 32 == (before >> 32) + 1
    assert page.waits(7, READY)
    page.set_token(7, 0)
    assert words[WAITERS] == before
    assert not page.waits(7, READY)
    assert not page.waits(7, SETTLED)


def test_ctrl_c_while_a_timer_starts_leaves_one_thread_and_one_that_can_be_closed(monkeypatch):
    """Interrupted between the start of its thread and the note of it, it has it all the same."""
    before = set(threading.enumerate())
    interrupts = [KeyboardInterrupt()]

    class Interrupted(threading.Thread):
        def start(self):
            super().start()
            if interrupts:
                raise interrupts.pop()

    monkeypatch.setattr(threading, "Thread", Interrupted)
    timer, called = Timer("weclaw-test"), threading.Event()
    with pytest.raises(KeyboardInterrupt):
        timer.call_at(time.monotonic() + 3600, called.set)
    timer.call_at(time.monotonic(), called.set)
    assert called.wait(10)
    timer.close()
    eventually(lambda: set(threading.enumerate()) <= before)
