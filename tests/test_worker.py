"""`Worker`: handlers, renewal, failures, stopping."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _files
from weclaw_embedded import worker as worker_module


class Running:
    """A worker at work in a thread; what `run` raised is raised at the end."""

    def __init__(self, q, handler, **options):
        self.worker = weclaw.Worker(q, handler, **options)
        self.error = None
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self.worker.run()
        except BaseException as error:  # noqa: BLE001  raised at the end
            self.error = error

    def __enter__(self):
        self.thread.start()
        return self.worker

    def __exit__(self, kind, error, traceback):
        self.worker.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.error is not None and error is None:
            raise self.error


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "weclaw_embedded")


async def double(msg):
    await asyncio.sleep(0)
    return msg.body * 2


class Doubler:
    async def __call__(self, msg):
        return msg.body * 2


@pytest.mark.parametrize(
    "handler",
    [
        lambda msg: msg.body * 2,
        double,
        functools.partial(double),
        Doubler(),
        lambda msg: double(msg),
        lambda msg: msg.ack(result=msg.body * 2),
    ],
    ids=["function", "coroutine", "partial", "object", "returns a coroutine", "acks itself"],
)
def test_what_a_handler_returns_becomes_the_result(open_queue, handler):
    """Functions and coroutines alike; one that acks by itself has done so."""
    q = open_queue()
    ids = q.put_many(range(20))
    with Running(q, handler, concurrency=4) as worker:
        assert [q.result(id, timeout=20) for id in ids] == [i * 2 for i in range(20)]
        eventually(lambda: worker.done == 20)
    assert q.stats().settled == 20


def test_an_async_handler_may_await_its_ack(open_queue):
    """`await msg.ack()` waits for the disk; `msg.nack()` without it is in effect."""
    q = open_queue(retry=NO_WAIT)
    id = q.put("x")

    async def handler(msg):
        if msg.retry_count == 0:
            msg.nack(backoff=0)
        else:
            await msg.ack(result="acked")

    with Running(q, handler):
        assert q.result(id, timeout=20) == "acked"


def test_an_exception_is_a_failure_that_says_what_it_was(open_queue):
    """Retried as the policy says, then dead, with the type and text of the exception."""
    letters = []
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=2, backoff=0), on_dead=letters.append)
    q.put("x")

    def handler(msg):
        raise ValueError(f"number {msg.retry_count}")

    with Running(q, handler) as worker:
        eventually(lambda: letters)
        eventually(lambda: worker.failed == 3)
    assert [f.reason for f in letters[0].failures] == [f"ValueError: number {i}" for i in range(3)]


def test_discard_goes_straight_to_the_dead_letters(open_queue):
    """No retry, its own reason, and no failure for the circuit breaker."""
    q = open_queue()
    q.put_many(range(10))

    async def handler(msg):
        raise weclaw.Discard("of no use")

    with Running(q, handler, pause_after=2) as worker:
        eventually(lambda: len(q.dlq) == 10)
        assert worker.failed == 0
    assert {(letter.reason, letter.retry_count) for letter in q.dlq} == {("of no use", 0)}


def test_a_result_that_cannot_be_kept_is_a_failure(open_queue):
    """A handler that returns what msgpack can't write has failed, for that reason."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    id = q.put("x")
    with Running(q, lambda msg: {1, 2}), pytest.raises(weclaw.DeadLetterError) as dead:
        q.result(id, timeout=20)
    assert dead.value.letter.reason.startswith("SerializationError")


@pytest.mark.parametrize("awaits", [False, True])
def test_a_handler_past_its_time_has_failed(open_queue, awaits):
    """After `max_run_time` the message is failed; a coroutine is cancelled."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0), visibility_timeout=0.2)
    id = q.put("x")
    cancelled = []

    async def waits(msg):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def blocks(msg):
        time.sleep(1.5)
        with pytest.raises(weclaw.LeaseLostError):
            msg.ack()
        cancelled.append(True)

    started = time.monotonic()
    with Running(q, waits if awaits else blocks, max_run_time=0.6):
        with pytest.raises(weclaw.DeadLetterError) as dead:
            q.result(id, timeout=30)  # the handler would take a minute
        assert time.monotonic() - started > 0.5
        assert dead.value.letter.delivery_count == 1
        assert "longer than 0.6 s" in dead.value.letter.reason
        eventually(lambda: cancelled)


@pytest.mark.parametrize("kind", [weclaw.Queue, weclaw.AsyncQueue])
def test_what_a_worker_logs_names_topic_group_and_file(path, caplog, kind):
    """Failures and pauses are told with where they were, whatever the worker was given."""
    caplog.set_level(logging.WARNING, "weclaw_embedded")
    with weclaw.Queue(path, "jobs", group="gpu", retry=NO_WAIT) as q:
        q.put("x")
        given = q if kind is weclaw.Queue else weclaw.AsyncQueue(path, "jobs", group="gpu")

        def handler(msg):
            raise RuntimeError("the model is down")

        with Running(given, handler, pause_after=1, pause_for=600.0):
            eventually(lambda: "is paused" in caplog.text)
        if kind is weclaw.AsyncQueue:
            asyncio.run(given.close())
    where = f"topic 'jobs', group 'gpu', of {path}"
    lines = [record.getMessage() for record in caplog.records]
    told = next(line for line in lines if "is paused" in line)
    assert f"{where} is paused for 600 s: 1 failures in a row" in told
    assert "pause_after=0 (of `weclawctl work`: --pause-after 0) leaves such pauses out" in told
    assert any(f"of {where} failed: RuntimeError: the model is down" in line for line in lines)


def test_failures_in_a_row_pause_the_queue(open_queue, monkeypatch):
    """After `pause_after` of them nobody gets anything for `pause_for`; a success begins anew."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=100, backoff=0))
    q.put("x")
    calls = []
    pauses = []
    pause = weclaw.Queue.pause

    def note(self, seconds, reason=None):
        pauses.append((len(calls), seconds))
        pause(self, seconds, reason)

    monkeypatch.setattr(weclaw.Queue, "pause", note)

    def handler(msg):
        calls.append(msg.retry_count)
        if len(calls) in (1, 2, 3, 4, 5, 6, 8, 9):
            raise RuntimeError("the model is down")

    with Running(q, handler, pause_after=3, pause_for=600.0) as worker:
        for n in (3, 6):
            eventually(lambda n=n: pauses[-1:] == [(n, 600.0)] and q.stats().ready == 1)
            with pytest.raises(weclaw.Empty):
                q.get(block=False)
            q.resume()
        eventually(lambda: q.stats().settled == 1)
        q.put("y")
        eventually(lambda: q.stats().settled == 2)
    assert [n for n, _ in pauses] == [3, 6]
    assert worker.pauses == 2


def test_no_more_is_taken_than_is_worked_on(open_queue):
    """With concurrency 3 never more than 3 messages are held, so others can have the rest."""
    q = open_queue()
    q.put_many(range(12))
    at_once = []
    running = threading.Semaphore(3)

    def handler(msg):
        assert running.acquire(blocking=False)
        at_once.append(q.stats().leased)
        time.sleep(0.02)
        running.release()

    with Running(q, handler, concurrency=3):
        assert q.join(timeout=20)
    assert max(at_once) == 3


def test_stop_waits_for_what_runs_and_leaves_the_rest(open_queue):
    """`stop` lets the running handler end; what was not begun was not delivered."""
    q = open_queue()
    ids = q.put_many(range(5))
    begun = threading.Event()

    def handler(msg):
        begun.set()
        time.sleep(0.3)
        return "done"

    with Running(q, handler):
        assert begun.wait(10)
    assert q.result(ids[0]) == "done"
    assert q.stats().ready == 4
    assert {msg.delivery_count for msg in q.get_many(4)} == {1}


def test_a_worker_that_was_stopped_before_it_ran_takes_nothing(open_queue):
    """And a second run is refused."""
    q = open_queue()
    q.put("x")
    worker = weclaw.Worker(q, print)
    worker.stop()
    worker.run()
    assert q.stats().ready == 1
    with pytest.raises(RuntimeError):
        worker.run()


def test_run_async_works_inside_a_loop_and_hands_back_when_cancelled(open_queue):
    """Beside other tasks of a loop; a cancelled worker's message is ready at once, uncounted."""
    q = open_queue()
    q.put("x")
    begun = asyncio.Event()  # what is leased, and not yet the handler's, is no delivery

    async def handler(msg):
        begun.set()
        await asyncio.sleep(60)

    async def main():
        aq = weclaw.AsyncQueue(q._store.path)
        working = asyncio.create_task(weclaw.Worker(aq, handler).run_async())
        await asyncio.wait_for(begun.wait(), 10)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        msg = await aq.get(timeout=1)
        assert (msg.retry_count, msg.delivery_count) == (0, 2)
        with pytest.raises(RuntimeError):
            weclaw.Worker(q, handler).run()
        await aq.close()

    asyncio.run(main())


class NoException(BaseException):
    """As some libraries have for their time limits."""


@pytest.mark.parametrize("awaits", [False, True], ids=["function", "coroutine"])
@pytest.mark.parametrize("error", [NoException("odd"), asyncio.CancelledError()], ids=repr)
def test_whatever_a_handler_raises_is_a_failure(open_queue, error, awaits):
    """What is no Exception, too: the worker does not end for it, and the message is not held."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    _, good = q.put_many(["bad", "good"])

    def handle(msg):
        if msg.body == "bad":
            raise error

    async def handle_async(msg):
        handle(msg)

    with Running(q, handle_async if awaits else handle) as worker:
        assert eventually(lambda: q.status(good) == "done")
    assert (worker.done, worker.failed) == (1, 1)
    assert [letter.body for letter in q.dlq] == ["bad"]


@pytest.mark.parametrize(
    "ending",
    [ValueError("no"), weclaw.RetryLater(60), weclaw.Discard("never"), None],
    ids=["fails", "later", "discards", "returns"],
)
def test_a_message_that_was_lost_meanwhile_does_not_end_the_worker(path, open_queue, ending):
    """Its group was dropped by another process while its handler ran: the next one is taken."""
    q = open_queue()
    q.put("first")

    def handle(msg):
        if second:  # both are delivered: the group begins anew
            return "done"
        code = "import sys, weclaw_embedded as w; w.open(sys.argv[1]).drop_group('default')"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, path], check=True)
        second.append(q.put("second"))
        if ending is not None:
            raise ending
        return "nobody's"

    second = []
    with Running(q, handle):
        assert eventually(lambda: second and q.status(second[0]) == "done")


@pytest.mark.parametrize("outcome", ["returns", "fails", "too long"])
def test_what_came_of_a_handler_is_kept_until_a_full_disk_has_room(
    open_queue, monkeypatch, caplog, outcome
):
    """It may have cost a minute and money: the message is not handed out a second time."""
    q = open_queue(visibility_timeout=1.5)
    id = q.put("prompt")
    q.put("next")
    handled = []
    refused = []
    room = threading.Event()
    real = _files.write_at

    def full(fd, buffers, offset):
        if b"its outcome" in b"".join(buffers) and not room.is_set():
            refused.append(time.monotonic())
            raise weclaw.DiskFullError("no room")
        return real(fd, buffers, offset)

    async def handle(msg):
        handled.append(msg.body)
        if msg.body == "next":
            return None
        if outcome == "fails":
            raise weclaw.Discard("its outcome")
        if outcome == "too long":
            await asyncio.sleep(60)
        return "its outcome"

    if outcome == "too long":
        monkeypatch.setattr(worker_module, "describe", lambda error: "its outcome")
    monkeypatch.setattr(worker_module, "_PATIENCE_S", 0.02)
    monkeypatch.setattr(_files, "write_at", full)
    monkeypatch.setattr(type(q._engine), "make_room", lambda engine, at_most: 0)
    caplog.set_level(logging.WARNING, "weclaw_embedded")
    with Running(q, handle, max_run_time=1):
        assert eventually(lambda: refused and refused[-1] - refused[0] > 3)  # two leases long
        room.set()
        assert eventually(lambda: q.status(id) in ("done", "dead", "delayed"))
        assert eventually(lambda: "next" in handled)
    assert handled.count("prompt") == 1
    assert handled.count("next") == 1
    told = [record for record in caplog.records if "kept until it can" in record.getMessage()]
    assert len(told) == 1


def test_a_closed_queue_ends_the_worker(path):
    """Closing is another way to say that nothing more is wanted."""
    q = weclaw.Queue(path)
    running = Running(q, print)
    with running:
        time.sleep(0.1)
        q.close()
        running.thread.join(5)
        assert not running.thread.is_alive()


def test_bad_arguments_are_refused(open_queue):
    """As everywhere: ValueError or TypeError, before anything runs."""
    q = open_queue()
    for arguments in (
        {"concurrency": 0},
        {"grace": -1},
        {"max_run_time": -1},
        {"pause_after": -1},
        {"pause_for": "long"},
    ):
        with pytest.raises((ValueError, TypeError)):
            weclaw.Worker(q, print, **arguments)
    with pytest.raises(TypeError):
        weclaw.Worker(q, None)
    with pytest.raises(TypeError):
        weclaw.Worker("tasks.wq", print)
    with pytest.raises(ValueError, match="seconds"):
        weclaw.RetryLater(-1)


def work_until_told(pipe, path, seconds, grace, awaits):
    import asyncio

    q = weclaw.Queue(path, visibility_timeout=60)

    async def waits(msg):
        pipe.send(msg.id)
        await asyncio.sleep(seconds)

    def blocks(msg):
        pipe.send(msg.id)
        time.sleep(seconds)

    weclaw.Worker(q, waits if awaits else blocks, grace=grace).run()
    pipe.send("ended")
    q.close()


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_let_what_runs_come_to_its_end(path, open_queue, number, awaits):
    """SIGTERM and SIGINT stop the taking; within `grace` the handler ends, its message is done."""
    q = open_queue()
    ids = q.put_many(["first", "second"])
    with Child(work_until_told, path, 0.5, 30, awaits) as child:
        assert child.hear() == ids[0]
        child.signal(number)
        assert child.end() == ["ended"]
    assert [q.status(id) for id in ids] == ["done", "ready"]


def test_a_second_signal_cuts_the_grace_short(path, open_queue):
    """Asked twice, a worker hands back at once."""
    q = open_queue()
    id = q.put("x")
    with Child(work_until_told, path, 60, 60, True) as child:
        assert child.hear() == id
        child.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert q.status(id) == "leased"
        child.signal(signal.SIGTERM)
        assert child.end() == ["ended"]
    assert q.status(id) == "ready"


def test_a_killed_worker_gives_its_messages_to_the_others_at_once(path, open_queue):
    """After kill -9 another worker has the message within half a second, long before its lease."""
    q = open_queue()
    id = q.put("x")
    with Child(work_until_told, path, 60, 60, False) as child:
        assert child.hear() == id
        with Running(q, lambda msg: msg.crash_count):
            time.sleep(0.2)
            child.kill()
            started = time.monotonic()
            assert q.result(id, timeout=20) == 1
            # Half a second is the promise; the rest is for a busy machine.
            assert time.monotonic() - started < 5.0


class Untellable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


async def exits(msg):
    sys.exit(3)


def raises_untellable(msg):
    raise Untellable


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (
            raises_untellable,
            "Untellable: (its text can't be told: its __str__ raised RuntimeError)",
        ),
        (exits, "SystemExit: 3"),
        (lambda msg: exits(msg), "SystemExit: 3"),
        (lambda msg: sys.exit(3), "SystemExit: 3"),
    ],
    ids=[
        "an exception without a text",
        "a coroutine exits",
        "a lambda's exits",
        "a function exits",
    ],
)
def test_however_a_handler_fails_it_is_counted_and_the_next_one_has_its_turn(
    open_queue, handler, reason
):
    """A failure that can't be told, and `sys.exit()`, end a delivery and not the worker."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=1, backoff=0))
    bad = q.put("bad")
    good = q.put("good")
    with Running(q, lambda msg: handler(msg) if msg.body == "bad" else "done", pause_after=0):
        assert q.result(good, timeout=20) == "done"
        eventually(lambda: q.status(bad) == "dead")
    [letter] = q.dlq
    assert letter.retry_count == 1
    assert reason in letter.reason


@pytest.mark.parametrize("awaits", [False, True])
def test_a_renewal_goes_on_with_the_time_the_handler_asked_for(open_queue, awaits):
    """`extend(60)` in a handler is not undone by the next renewal of a short lease."""
    q = open_queue(visibility_timeout=0.6)
    task = q.put("x")
    left_s = []

    def handler(msg):
        msg.extend(60)
        time.sleep(1.0)
        left_s.append((msg.lease_expires_at - datetime.now(timezone.utc)).total_seconds())

    async def awaiting(msg):
        handler(msg)

    with Running(q, awaiting if awaits else handler):
        q.result(task, timeout=20)
    assert left_s[0] > 10
