"""Contract 4: getting, leasing, settling, waiting."""

from __future__ import annotations

import asyncio
import datetime
import queue
import re
import signal
import threading
import time

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, drain, eventually, take

import weclaw_embedded as weclaw
from weclaw_embedded import _clock, _waiting, aio, dlq, threads

UTC = datetime.timezone.utc


def test_in_asks_the_body_and_nothing_iterates_it(open_queue):
    """`msg[...]` and `in` ask the body of every kind of message and of a letter; none of them is
    iterated by accident.
    """
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    q.put({"prompt": "x"})

    async def taken():
        async with weclaw.AsyncQueue(q.store.path) as waiting:
            msg = await waiting.get()
            check(msg)
            await msg.release()

    def check(one):
        assert one["prompt"] == "x"
        assert "prompt" in one
        assert "missing" not in one
        assert 0 not in one
        with pytest.raises(TypeError, match=rf"{one.id} .*can't be .*its \.body"):
            list(one)
        with pytest.raises(TypeError, match=r"put_many takes several bodies, not one "):
            q.put_many(one)

    check(q.peek()[0])
    asyncio.run(taken())
    msg = q.get(block=False)
    check(msg)
    msg.fail()
    check(q.dlq.peek()[0])
    with pytest.raises(weclaw.DeadLetterError) as error:
        q.result(msg.id)
    check(error.value.letter)

    q.put(5)
    with pytest.raises(TypeError):
        assert 0 in q.peek()[0]  # of a body in which nothing can be, as Python says it


def test_what_a_message_tells(open_queue):
    """A message tells all that the contract names."""
    q = open_queue("jobs", visibility_timeout=30.0)
    before = datetime.datetime.now(UTC)
    task = q.put({"prompt": "x", "n": [1]}, key="k", priority=3, headers={"h": 1})
    msg = q.get()
    after = datetime.datetime.now(UTC)
    assert (msg.id, msg.key, msg.priority, msg.topic) == (task, "k", 3, "jobs")
    assert msg.body == {"prompt": "x", "n": [1]}
    assert msg["prompt"] == "x"
    with pytest.raises(KeyError):
        msg["missing"]
    assert msg.headers == {"h": 1}
    assert isinstance(msg.offset, int)
    assert (msg.retry_count, msg.delivery_count, msg.crash_count) == (0, 1, 0)
    slack = datetime.timedelta(seconds=1)
    assert msg.enqueued_at.utcoffset() == datetime.timedelta(0)
    assert before - slack <= msg.enqueued_at <= after + slack
    assert msg.lease_expires_at.utcoffset() == datetime.timedelta(0)
    lease = datetime.timedelta(seconds=30)
    assert before + lease - slack <= msg.lease_expires_at <= after + lease + slack
    q.put("plain")
    plain = q.get(visibility_timeout=None)
    assert (plain.key, plain.headers, plain.priority) == (None, {}, 0)
    assert plain.lease_expires_at is None
    assert plain.offset > msg.offset


def test_empty_is_everybodys_empty(q):
    """`Empty` is also `queue.Empty` and `asyncio.QueueEmpty`."""
    for look in (
        lambda: q.get(block=False),
        lambda: q.get_nowait(),
        lambda: q.get(timeout=0.05),
        lambda: q.get(timeout=0),
        lambda: q.get_many(5, block=False),
        lambda: q.get_many(5, timeout=0.05),
    ):
        with pytest.raises(weclaw.Empty):
            look()
    with pytest.raises(queue.Empty):
        q.get(block=False)
    with pytest.raises(asyncio.QueueEmpty):
        q.get(block=False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": -1},
        {"timeout": "x"},
        {"visibility_timeout": -1},
        {"visibility_timeout": "x"},
        {"no_such": 1},
    ],
    ids=str,
)
def test_bad_arguments_of_get(q, arguments):
    """A bad argument of `get` is `ValueError` or `TypeError` and takes nothing."""
    q.put("x")
    with pytest.raises((ValueError, TypeError)):
        q.get(**arguments)
    with pytest.raises((ValueError, TypeError)):
        q.get_many(2, **arguments)
    msg = q.get()
    assert msg.delivery_count == 1


@pytest.mark.parametrize("n", [0, -1, 1.5, None])
def test_get_many_of_a_senseless_number(q, n):
    """`get_many` takes a number of at least one."""
    q.put("x")
    with pytest.raises((ValueError, TypeError)):
        q.get_many(n)
    assert q.get().delivery_count == 1


def test_get_many(q):
    """Up to n, at least one; each with a lease of its own."""
    q.put_many(list(range(5)))
    first = q.get_many(3)
    assert [m.body for m in first] == [0, 1, 2]
    first[1].ack()
    first[0].release()
    assert [m.body for m in q.get_many(10)] == [0, 3, 4]
    first[2].ack()
    assert q.stats().settled == 2


def test_iteration_waits_until_the_queue_is_closed(path):
    """`for msg in q` waits for the next one, and ends when the queue is closed."""
    q = weclaw.Queue(path)
    q.put("a")
    got = []

    def loop():
        for msg in q:
            got.append(msg.body)
            msg.ack()
        got.append("end")

    thread = threading.Thread(target=loop)
    thread.start()
    eventually(lambda: got == ["a"])
    q.put("b")
    eventually(lambda: got == ["a", "b"])
    q.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert got == ["a", "b", "end"]


def test_closing_ends_a_waiting_get(path):
    """A `get` that waits when its queue is closed gets `ClosedError`."""
    q = weclaw.Queue(path)
    raised = []

    def wait():
        try:
            q.get()
        except weclaw.WeclawError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    q.close()
    thread.join(timeout=10)
    assert [type(e) for e in raised] == [weclaw.ClosedError]


def test_nack_counts_and_waits(open_queue):
    """A nack adds a retry and waits as the policy says: backoff, times multiplier, at most max."""
    q = open_queue(
        retry=weclaw.RetryPolicy(max_retries=4, backoff=0.2, multiplier=2000.0, max_backoff=0.4)
    )
    task = q.put("x")
    gaps = []
    begun = time.monotonic()
    for retry in range(5):
        msg = q.get(timeout=30.0)
        gaps.append(time.monotonic() - begun)
        assert (msg.retry_count, msg.delivery_count) == (retry, retry + 1)
        begun = time.monotonic()
        msg.nack(reason=f"failure {retry}")
        if retry < 4:
            assert q.status(task) == "delayed"
    assert q.status(task) == "dead"
    letter = q.dlq.get(task)
    assert letter.reason == "failure 4"
    assert [f.reason for f in letter.failures] == [f"failure {n}" for n in range(5)]
    assert [f[1] for f in letter.failures] == [f.reason for f in letter.failures]
    for gap, wanted in zip(gaps[1:], (0.2, 0.4, 0.4, 0.4), strict=True):
        assert gap >= wanted  # without the limit the second would be 400


def test_nack_with_a_backoff_of_its_own(open_queue):
    """`nack(backoff=…)` waits that long, whatever the policy says."""
    q = open_queue(retry=weclaw.RetryPolicy(backoff=60.0))
    q.put("x")
    msg = q.get()
    begun = time.monotonic()
    msg.nack(backoff=0.5)
    assert q.get(timeout=30.0).retry_count == 1
    assert time.monotonic() - begun >= 0.5


def test_jitter_stays_within_its_share(open_queue, monkeypatch):
    """With jitter 0.5 a wait of 200 s is 100 to 300 s, by the clock of the queue."""
    q = open_queue(retry=weclaw.RetryPolicy(backoff=200.0, max_backoff=200.0, jitter=0.5))
    q.put_many(list(range(40)))
    now_us = _clock.boottime_us()
    monkeypatch.setattr(_clock, "boottime_us", lambda: now_us)
    for msg in q.get_many(40):
        msg.nack()
    n_ready = []
    for waited_s in (99, 200, 301):
        monkeypatch.setattr(_clock, "boottime_us", lambda s=waited_s: now_us + s * 10**6)
        n_ready.append(q.stats().ready)
    assert n_ready[0] == 0
    assert 0 < n_ready[1] < 40  # a wait is 100 to 200 s as often as 200 to 300
    assert n_ready[2] == 40


def test_settled_inside_with_is_left_alone(q):
    """What was settled inside `with msg` is not settled again at its end."""
    ids = q.put_many(["ack", "nack", "fail", "release", "nothing"])
    with q.get() as msg:
        msg.ack(result=1)
    with q.get() as msg:
        msg.nack(backoff=60)
    with q.get() as msg:
        msg.fail("bad")
    with q.get() as msg:
        msg.release()
    assert [q.status(x) for x in ids] == ["done", "delayed", "dead", "ready", "ready"]
    for _ in range(2):
        with q.get() as msg:
            pass
    assert [q.status(x) for x in ids] == ["done", "delayed", "dead", "done", "done"]


def test_a_with_whose_lease_was_lost_says_so(open_queue):
    """A block that ends well has not acked what ran out before it, whoever noticed first."""
    q = open_queue(retry=NO_WAIT)
    q.put("x")
    late = q.get(visibility_timeout=0.01)
    again = q.get(timeout=10)
    with pytest.raises(weclaw.LeaseLostError), late:
        pass
    with pytest.raises(ZeroDivisionError), late:
        1 / 0
    again.ack()
    assert q.stats().settled == 1


def test_an_exception_inside_with_is_a_nack_with_its_text(open_queue):
    """An exception inside `with msg` nacks with its type and text, and goes on."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    task = q.put("x")
    with pytest.raises(ZeroDivisionError), q.get():
        1 / 0
    letter = q.dlq.get(task)
    assert "ZeroDivisionError" in letter.reason
    assert "division by zero" in letter.reason


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interruption_inside_with_is_a_release(q, exception):
    """Ctrl-C, exit and cancellation inside `with msg` release it, uncounted."""
    task = q.put("x")
    with pytest.raises(exception), q.get():
        raise exception
    assert q.status(task) == "ready"
    msg = q.get(block=False)
    assert (msg.retry_count, msg.delivery_count) == (0, 2)


def test_settling_late_or_twice_is_lease_lost(q):
    """Whatever settles twice is `LeaseLostError`, and nothing changes."""
    settle = {
        "ack": lambda m: m.ack(result="again"),
        "nack": lambda m: m.nack(backoff=60),
        "fail": lambda m: m.fail("again"),
        "release": lambda m: m.release(),
        "extend": lambda m: m.extend(),
    }
    for first in ("ack", "nack", "fail", "release"):
        for second, do in settle.items():
            task = q.put("x")
            msg = q.get()
            settle[first](msg)
            before = q.status(task)
            with pytest.raises(weclaw.LeaseLostError, match=f"message {task} was settled already"):
                do(msg)
            assert q.status(task) == before, (first, second)
            if before == "ready":
                q.get().ack()
    stats = q.stats()
    assert (stats.ready, stats.leased) == (0, 0)


@pytest.mark.parametrize("id", [None, "mine"])
def test_a_lost_lease_names_its_message_and_how_it_was_lost(path, id):
    """Whatever ended the lease, the error says which message it was of, and what became of it."""
    store = weclaw.open(path)
    q = store.queue(retry=NO_WAIT)
    task = q.put("x", id=id)
    ran_out = q.get(visibility_timeout=0.01)
    taken_away = q.get(timeout=10.0)
    assert ran_out.id == taken_away.id == task
    with pytest.raises(weclaw.LeaseLostError, match=rf"0\.01 s on message {task} ran out"):
        ran_out.ack()
    with (
        pytest.raises(weclaw.LeaseLostError, match=f"message {task} ran out"),
        q.transaction() as tx,
    ):
        tx.ack(ran_out)
    store.drop_group("default")
    with pytest.raises(weclaw.LeaseLostError, match=f"message {task} was taken away: its group"):
        taken_away.ack()
    msg = q.get()
    q.close()
    for _ in range(2):
        with pytest.raises(weclaw.LeaseLostError, match=f"message {task} was handed back"):
            msg.ack()
        store.close()


def test_extend_without_seconds_gives_those_it_was_taken_with(open_queue):
    """Also after an `extend` by other seconds, and with what renews it meanwhile."""
    q = open_queue(visibility_timeout=100)
    q.put("x")

    def left_s():
        return (msg.lease_expires_at - datetime.datetime.now(UTC)).total_seconds()

    for how, seconds in (({}, 100), ({"visibility_timeout": 50}, 50)):
        msg = q.get(**how)
        msg.extend(1000)
        assert left_s() > 900
        with msg:
            msg.extend()
            assert seconds - 40 < left_s() <= seconds
            msg.release()
    msg = q.get(visibility_timeout=None)
    msg.extend(1000)
    msg.extend()
    assert msg.lease_expires_at is None


def test_extend_counts_anew_from_now(open_queue):
    """`extend` gives the lease its seconds anew; None takes the lease's own."""
    q = open_queue(visibility_timeout=0.6, retry=NO_WAIT)
    task = q.put("x")
    msg = q.get()
    for turn in range(5):
        time.sleep(0.3)
        msg.extend() if turn % 2 else msg.extend(0.7)
        assert q.status(task) == "leased"
    with pytest.raises(weclaw.Empty):
        q.get(block=False)
    at = msg.lease_expires_at
    msg.extend(30)
    assert msg.lease_expires_at > at
    msg.extend(0.1)
    assert q.get(timeout=5.0).delivery_count == 2
    with pytest.raises(weclaw.LeaseLostError):
        msg.extend()


def test_a_lapsed_lease_counts_as_a_failure(open_queue):
    """A lease that runs out adds a retry and waits the backoff."""
    q = open_queue(visibility_timeout=0.2, retry=weclaw.RetryPolicy(max_retries=1, backoff=0.4))
    task = q.put("x")
    begun = time.monotonic()
    q.get()
    msg = q.get(timeout=30.0)
    assert time.monotonic() - begun >= 0.59
    assert (msg.retry_count, msg.delivery_count, msg.crash_count) == (1, 2, 0)
    eventually(lambda: q.status(task) == "dead")
    with pytest.raises(weclaw.LeaseLostError):
        msg.ack()


def test_late_but_first_is_in_time_or_lost(open_queue):
    """After its deadline an ack is `LeaseLostError`, and never half."""
    q = open_queue(visibility_timeout=0.2, retry=weclaw.RetryPolicy(backoff=60))
    task = q.put("x")
    msg = q.get()
    time.sleep(0.4)
    with pytest.raises(weclaw.LeaseLostError):
        msg.ack()
    assert q.status(task) == "delayed"


def test_no_hidden_prefetch(open_queue):
    """The next free consumer gets the next message, whoever else waits or works."""
    one, two = open_queue(), open_queue()
    one.put_many([1, 2, 3, 4])
    order = [one.get().body, two.get().body, one.get().body, two.get().body]
    assert order == [1, 2, 3, 4]


def test_result(open_queue):
    """`result` gives, waits, and says what is wrong."""
    q = open_queue()
    a, b, c = q.put_many(["a", "b", "c"])
    with pytest.raises(weclaw.Empty):
        q.result(a)
    with pytest.raises(weclaw.Empty):
        q.result(a, timeout=0.1)
    with pytest.raises(KeyError):
        q.result("no such id")
    q.get().ack(result={"answer": 42})
    q.get().ack()
    q.get().fail("bad")
    assert q.result(a) == {"answer": 42}
    assert q.result(b) is None
    with pytest.raises(weclaw.DeadLetterError) as caught:
        q.result(c, timeout=None)
    assert caught.value.letter.id == c
    assert caught.value.letter.reason == "bad"
    assert q.cancel(q.put("d", id="gone"))
    with pytest.raises(KeyError):
        q.result("gone")
    q.close()
    q = open_queue()
    assert q.result(a) == {"answer": 42}


@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        ("redrive", (weclaw.Empty, "is not settled yet|was not settled in time")),
        ("purge", (KeyError, "is not known in topic")),
        (None, (weclaw.DeadLetterError, "bad")),
    ],
)
@pytest.mark.parametrize("awaits", [False, True])
def test_the_result_of_a_letter_that_goes_between_the_look_and_the_reading(
    path, monkeypatch, awaits, meanwhile, told
):
    """It is what it is by then: ready again, or unknown."""
    q = weclaw.Queue(path)
    task = q.put("a")
    q.get().fail("bad")
    real = dlq.DeadLetterQueue._at

    def late(letters, offset):
        monkeypatch.setattr(dlq.DeadLetterQueue, "_at", real)
        if meanwhile is not None:
            assert getattr(q.dlq, meanwhile)() == 1
        return real(letters, offset)

    async def ask():
        async with weclaw.AsyncQueue(path) as same:
            await same.result(task)

    monkeypatch.setattr(dlq.DeadLetterQueue, "_at", late)
    with pytest.raises(told[0], match=told[1]):
        asyncio.run(ask()) if awaits else q.result(task)
    assert dlq.DeadLetterQueue._at is real
    q.close()


def ack_with_result(pipe, path):
    q = weclaw.Queue(path)
    pipe.send("ready")
    pipe.recv()
    q.get().ack(result="from another process")
    q.close()


def test_result_waits(path, open_queue):
    """`result(timeout=…)` waits for the ack of another thread or process."""
    q = open_queue()
    a, b = q.put_many(["a", "b"])
    msg = q.get()
    threading.Timer(0.3, lambda: msg.ack(result="from a thread")).start()
    assert q.result(a, timeout=20.0) == "from a thread"
    with Child(ack_with_result, path) as child:
        child.hear()
        child.say("go")
        assert q.result(b, timeout=None) == "from another process"
        child.end()


def test_result_of_what_dies_while_waited_for(q):
    """Who waits for the result of what dies gets the letter."""
    task = q.put("a")
    msg = q.get()
    threading.Timer(0.2, lambda: msg.fail("bad")).start()
    with pytest.raises(weclaw.DeadLetterError):
        q.result(task, timeout=20.0)


def test_result_is_kept_as_long_as_its_message(open_queue):
    """Beyond retention neither message nor result is kept."""
    q = open_queue(retention=0, segment_bytes=65536)
    task = q.put("x")
    q.get().ack(result="y")
    q.put_many([bytes(1000)] * 400)
    drain(q)
    eventually(lambda: q.status(task) == "unknown")
    with pytest.raises(KeyError):
        q.result(task)


def test_status(q):
    """The five states, and unknown."""
    ready = q.put("x")
    assert q.status(ready) == "ready"
    delayed = q.put("y", delay=60)
    assert q.status(delayed) == "delayed"
    msg = q.get()
    assert q.status(ready) == "leased"
    msg.ack()
    assert q.status(ready) == "done"
    dead = q.put("z")
    q.get().fail()
    assert q.status(dead) == "dead"
    q.dlq.purge()
    q.purge()
    assert [q.status(x) for x in (dead, delayed, "never", "", "0" * 20, "f" * 20, "😀")] == [
        "unknown"
    ] * 7


def test_transaction_is_one_step(open_store):
    """Acks, results and puts of a transaction, over topics, are one step."""
    store = open_store()
    q, following = store.queue("one"), store.queue("two")
    a, b = q.put_many(["a", "b"])
    one, two = q.get_many(2)
    with q.transaction() as tx:
        tx.ack(one, result="done a")
        tx.ack(two)
        tx.put("next", topic="two", id="n", headers={"from": a})
        tx.put("here")
        assert following.qsize() == 0
        assert q.stats().leased == 2
    assert q.result(a) == "done a"
    assert q.result(b) is None
    assert drain(q) == ["here"]
    msg = following.get()
    assert (msg.body, msg.id, msg.headers, msg.topic) == ("next", "n", {"from": a}, "two")


def test_a_transaction_that_raises_changes_nothing(open_store):
    """An exception inside undoes it all, and the messages are still held."""
    store = open_store()
    q, following = store.queue("one"), store.queue("two")
    task = q.put("a")
    msg = q.get()
    with pytest.raises(RuntimeError), q.transaction() as tx:
        tx.put("next", topic="two")
        tx.ack(msg, result=1)
        raise RuntimeError
    assert q.status(task) == "leased"
    assert following.qsize() == 0
    with pytest.raises(weclaw.SerializationError), q.transaction() as tx:
        tx.ack(msg)
        tx.put({1, 2}, topic="two")
    assert q.status(task) == "leased"
    msg.ack()


def test_a_transaction_with_a_lost_lease_changes_nothing(open_store):
    """If one of its leases is lost it raises, and none of it happens."""
    store = open_store()
    q = store.queue(retry=NO_WAIT)
    a, b = q.put_many(["a", "b"])
    first = q.get(visibility_timeout=0.2)
    second = q.get()
    time.sleep(0.3)
    again = q.get(timeout=5.0)
    assert again.id == a
    with pytest.raises(weclaw.LeaseLostError), q.transaction() as tx:
        tx.ack(second, result="b")
        tx.put("more")
        tx.ack(first)
    assert q.status(b) == "leased"
    assert q.qsize() == 0
    again.ack()
    second.ack()


def test_pause_is_seen_by_all_and_kept(path, open_queue):
    """A pause stops this topic and group for every process, and over a reopening."""
    q, other = open_queue(), open_queue()
    elsewhere = open_queue("elsewhere")
    q.put("x")
    elsewhere.put("y")
    q.pause(600, reason="provider is down")
    for handle in (q, other):
        with pytest.raises(weclaw.Empty):
            handle.get(timeout=0.1)
    assert q.qsize() == 1
    assert drain(elsewhere) == ["y"]
    q.close()
    other.close()
    q = open_queue()
    with pytest.raises(weclaw.Empty):
        q.get(block=False)
    got = []
    waiter = threading.Thread(target=lambda: got.append(q.get(timeout=20.0).body))
    waiter.start()
    time.sleep(0.2)
    open_queue().resume()
    waiter.join()
    assert got == ["x"]


async def ask_over_asyncio(path):
    """What three ways of taking from `asyncio` say when they get nothing."""
    told = []
    async with weclaw.AsyncQueue(path) as q:
        for how in ({"block": False}, {"timeout": 0.05}):
            with pytest.raises(weclaw.Empty) as empty:
                await q.get(**how)
            told.append(str(empty.value))
    plain = aio.Queue(path=path)
    with pytest.raises(weclaw.Empty) as empty:
        plain.get_nowait()
    plain.close()
    return [*told, str(empty.value)]


@pytest.mark.parametrize("reason", [None, "provider is down"])
def test_who_gets_nothing_from_a_paused_queue_is_told_until_when_and_why(path, reason):
    """Empty names the pause, and no other get does once it is over."""
    with weclaw.Queue(path) as q:
        q.put("x")
        q.pause(3600, reason=reason)
        told = asyncio.run(ask_over_asyncio(path))
        for how in ({"block": False}, {"timeout": 0.05}):
            with pytest.raises(weclaw.Empty) as empty:
                q.get(**how)
            told.append(str(empty.value))
        plain = threads.Queue(path=path)
        with pytest.raises(weclaw.Empty) as empty:
            plain.get(timeout=0.05)
        plain.close()
        for said in [*told, str(empty.value)]:
            until = re.search(r"is paused for 'default' until ([-0-9]+ [:0-9]+) UTC", said)
            assert until, said
            left = datetime.datetime.fromisoformat(f"{until[1]}+00:00") - datetime.datetime.now(UTC)
            assert 3000 < left.total_seconds() <= 3600
            assert ("(provider is down)" in said) == (reason is not None)
        q.resume()
        q.get(block=False).ack()
        told = asyncio.run(ask_over_asyncio(path))
        with pytest.raises(weclaw.Empty) as empty:
            q.get(timeout=0.05)
        for said in [*told, str(empty.value)]:
            assert "nothing" in said
            assert "paused" not in said


def test_a_pause_ends_by_itself(q):
    """After its seconds a pause is over, and a waiting `get` wakes."""
    q.put("x")
    begun = time.monotonic()
    q.pause(0.5)
    q.get(timeout=30.0).ack()
    assert time.monotonic() - begun >= 0.49


def test_a_pause_leaves_other_groups_alone(open_store):
    """A pause is one group's."""
    store = open_store()
    one = store.queue(group="one", start="earliest")
    two = store.queue(group="two", start="earliest")
    one.put("x")
    one.pause(600)
    assert drain(two) == ["x"]
    assert take(one) == []


def test_sizes(open_queue):
    """`qsize`, `empty` and `full` count what is ready and delayed."""
    q = open_queue(maxsize=3)
    assert (q.qsize(), q.empty(), q.full()) == (0, True, False)
    q.put_many(["a", weclaw.Put("b", delay=60)])
    assert (q.qsize(), q.empty(), q.full()) == (2, False, False)
    q.put("c")
    assert q.full()
    msg = q.get()
    assert (q.qsize(), q.full()) == (2, False)
    msg.ack()
    assert open_queue().maxsize == 0
    assert not open_queue().full()


def test_join(q):
    """`join` waits until ready, delayed and leased are 0; False when the time is over."""
    assert q.join() is True
    q.put_many(["a", "b"])
    assert q.join(timeout=0.1) is False
    msg = q.get()
    q.get().fail("bad")
    assert q.join(timeout=0.1) is False
    threading.Timer(0.2, msg.ack).start()
    assert q.join(timeout=20.0) is True


def test_peek_takes_nothing(q):
    """`peek` shows what would come next and changes nothing."""
    q.put("low")
    q.put("high", priority=5)
    q.put("later", delay=60)
    before = q.stats()[:5]
    for _ in range(2):
        seen = q.peek(10)
        assert [m.body for m in seen][:2] == ["high", "low"]
        assert len(q.peek(1)) == 1
    assert q.stats()[:5] == before
    msg = q.get()
    assert (msg.body, msg.delivery_count) == ("high", 1)


def test_purge_takes_ready_and_delayed_of_this_group(open_store):
    """`purge` clears ready and delayed of one group; held, dead and other groups stay."""
    store = open_store()
    q = store.queue(group="one", start="earliest")
    other = store.queue(group="two", start="earliest")
    ids = q.put_many(["held", "dead", "a", weclaw.Put("b", delay=60), weclaw.Put("c", key="k")])
    held = q.get()
    q.get().fail("bad")
    q.purge()
    assert q.stats()[:4] == (0, 0, 1, 1)
    assert [q.status(x) for x in ids] == ["leased", "dead", "unknown", "unknown", "unknown"]
    assert other.qsize() == 5
    q.put("after")
    held.ack()
    assert drain(q) == ["after"]
    assert drain(other) == ["held", "dead", "a", "c", "after"]


def test_stats(open_queue):
    """`stats` is one moment's truth, field by field."""
    q = open_queue(retry=weclaw.RetryPolicy(backoff=60))
    assert q.stats()[:5] == (0, 0, 0, 0, 0)
    q.put_many(list("abcdef"))
    q.put("later", delay=60)
    q.put("k1", key="k", delay=60)
    q.put("k2", key="k")
    time.sleep(0.2)
    q.get().ack()
    q.get().fail("bad")
    q.get().nack()
    q.get()
    s = q.stats()
    assert (s.ready, s.delayed, s.leased, s.dead, s.settled) == (2, 4, 1, 1, 1)
    assert 0.2 <= s.oldest_age_s < 30
    assert s.retries >= 1
    assert s.replica_lag is None
    assert s.file_bytes >= 2**20
    assert 0 <= s.reclaimable_bytes < s.file_bytes
    assert s.damaged == 0
    assert s._fields[:5] == ("ready", "delayed", "leased", "dead", "settled")


def test_dead_owners_leases_count_as_ready(path, open_queue):
    """In the stats the leases of the dead are ready again."""
    q = open_queue()
    q.put_many(["a", "b"])
    with Child(hold_all, path) as child:
        child.hear()
        assert q.stats()[:3] == (0, 0, 2)
        child.kill()
    eventually(lambda: q.stats()[:3] == (2, 0, 0), timeout=5.0)


def hold_all(pipe, path):
    q = weclaw.Queue(path)
    pipe.send(len(q.get_many(10)))
    pipe.recv()


def wait_for_one(pipe, path):
    q = weclaw.Queue(path)
    pipe.send("waiting")
    try:
        while True:
            msg = q.get()
            pipe.send((msg.body, time.time()))
            msg.ack()
    except KeyboardInterrupt:
        pipe.send("interrupted")
    pipe.send(q.stats()[:3])
    q.close()


def wait_without_looking(pipe, path):
    """Get what comes, and do not look for the dead now and then while waiting."""
    from weclaw_embedded import _waiting

    _waiting.DEATH_CHECK_S = _waiting.ALONE_CHECK_S = 3600.0
    q = weclaw.Queue(path)
    pipe.send("waiting")
    for _ in range(20):
        msg = q.get()
        pipe.send(msg.body)
        msg.ack()
    q.close()


def test_get_wakes_for_a_put_of_another_process(path, open_queue):
    """A waiting `get` is woken by a put of another process; it comes upon none by looking."""
    q = open_queue()
    with Child(wait_without_looking, path) as child:
        child.hear()
        for n in range(20):
            time.sleep(0.05)  # so that it waits again; if it does not yet, the put is found at once
            q.put(n)
            assert child.hear(timeout=30.0) == n
        child.end()


@pytest.mark.parametrize(
    "event", ["delay", "nack", "release", "resume", "redrive", "replay", "lapse"]
)
def test_get_wakes_for_everything_that_makes_ready(open_queue, event, monkeypatch):
    """A waiting `get` wakes for whatever makes a message ready, in another handle, though it looks
    for nothing while it waits.
    """
    for name in ("DEATH_CHECK_S", "ALONE_CHECK_S"):
        monkeypatch.setattr(_waiting, name, 3600.0)
    q = open_queue(retry=NO_WAIT)
    other = open_queue(retry=NO_WAIT)
    if event != "delay":
        q.put("x")
    msg = None
    if event in ("nack", "release", "redrive", "replay"):
        msg = q.get()
    if event == "redrive":
        msg.fail("bad")
    if event == "replay":
        msg.ack()
    if event == "resume":
        q.pause(600)
    if event == "lapse":
        q.get(visibility_timeout=1.0)
    got = []
    waiter = threading.Thread(target=lambda: got.append(other.get(timeout=20)))
    waiter.start()
    time.sleep(0.3)
    assert got == []
    {
        "delay": lambda: q.put("x", delay=0.2),
        "nack": lambda: msg.nack(backoff=0),
        "release": lambda: msg.release(),
        "resume": lambda: q.resume(),
        "redrive": lambda: q.dlq.redrive(),
        "replay": lambda: q.replay(offset="earliest"),
        "lapse": lambda: None,
    }[event]()
    waiter.join()
    assert got[0].body == "x"


def test_ctrl_c_interrupts_a_waiting_get_and_nothing_is_lost(path, open_queue):
    """Ctrl-C ends a waiting `get` within a second, and the next message is not lost."""
    q = open_queue()
    with Child(wait_for_one, path) as child:
        child.hear()
        time.sleep(0.2)
        child.signal(signal.SIGINT)
        begun = time.monotonic()
        assert child.hear(timeout=20.0) == "interrupted"
        # A second is the promise; the rest is for a busy machine.
        assert time.monotonic() - begun < 8.0
        child.end()
    q.put("x")
    assert drain(q) == ["x"]


def work_until_interrupted(pipe, path):
    q = weclaw.Queue(path)
    while True:
        try:
            pipe.send("working")
            while True:
                q.put("x")
                msg = q.get()
                msg.ack()
        except KeyboardInterrupt:
            pipe.send(q.stats()[:4])
            if pipe.recv() == "end":
                break
    q.close()


def test_ctrl_c_at_any_moment_leaves_a_usable_queue(path, open_queue):
    """Ctrl-C in the middle of puts, gets and acks leaves the queue usable in the same process."""
    with Child(work_until_interrupted, path) as child:
        for turn in range(30):
            assert child.hear() == "working"
            time.sleep(0.002 + 0.011 * (turn % 7))
            child.signal(signal.SIGINT)
            ready, _, leased, dead = child.hear(timeout=10.0)
            assert dead == 0
            assert ready + leased <= turn + 2
            child.say("end" if turn == 29 else "go on")
        child.end()
    q = open_queue()
    drain(q)
    assert q.stats()[:4] == (0, 0, 0, 0)
    assert weclaw.open(path).close() is None


def wait_for_room(pipe, path):
    q = weclaw.Queue(path, maxsize=1)
    q.put("a")
    pipe.send("full")
    try:
        q.put("b")
    except KeyboardInterrupt:
        pipe.send("interrupted")
    q.close()


def test_ctrl_c_interrupts_a_put_that_waits_for_room(path, open_queue):
    """Ctrl-C ends a put that waits for room, and it has not happened."""
    with Child(wait_for_room, path) as child:
        child.hear()
        time.sleep(0.2)
        child.signal(signal.SIGINT)
        begun = time.monotonic()
        assert child.hear(timeout=20.0) == "interrupted"
        # A second is the promise; the rest is for a busy machine.
        assert time.monotonic() - begun < 8.0
        child.end()
    assert drain(open_queue()) == ["a"]


def idle(pipe, path):
    q = weclaw.Queue(path)
    pipe.send("waiting")
    before = time.process_time()
    try:
        q.get(timeout=3.0)
    except weclaw.Empty:
        pass
    pipe.send(time.process_time() - before)
    q.close()


def test_idle_waiting_uses_no_cpu_to_speak_of(path):
    """Three seconds of waiting cost next to no CPU."""
    with Child(idle, path) as child:
        child.hear()
        # 0.05 % is the goal; a twentieth of that many seconds is the bound on a busy machine.
        assert child.hear() < 0.05
        child.end()


def terminated_while_holding(pipe, path):
    q = weclaw.Queue(path)
    pipe.send(q.get().id)
    pipe.recv()


def test_an_unhandled_sigterm_is_a_death(path, open_queue):
    """A process ended by SIGTERM that nobody handles died: its delivery counts as a crash."""
    q = open_queue()
    task = q.put("x")
    with Child(terminated_while_holding, path) as child:
        assert child.hear() == task
        child.signal(signal.SIGTERM)
        child.wait()
    msg = q.get(timeout=5.0)
    assert (msg.crash_count, msg.retry_count, msg.delivery_count) == (1, 0, 2)


def test_max_crashes_is_the_handles(path, open_queue):
    """With `max_crashes=0` the first death is the end."""
    q = open_queue(retry=weclaw.RetryPolicy(max_crashes=0))
    task = q.put("x")
    with Child(terminated_while_holding, path) as child:
        child.hear()
        child.kill()
    with pytest.raises(weclaw.Empty):
        q.get(timeout=1.0)
    assert q.dlq.get(task).reason == "consumer died"


def test_the_consumers_name_stands_in_the_failures(path):
    """A failure names the consumer that had it, and when."""
    before = datetime.datetime.now(UTC) - datetime.timedelta(seconds=1)
    with weclaw.Queue(path, consumer="worker seven") as q:
        task = q.put("x")
        q.get().fail("bad")
        failure = q.dlq.get(task).failures[0]
        assert failure.reason == "bad"
        assert failure.consumer == "worker seven"
        assert failure.time.utcoffset() == datetime.timedelta(0)
        assert before < failure.time < datetime.datetime.now(UTC) + datetime.timedelta(seconds=1)


@pytest.mark.parametrize("kept", [False, True], ids=["the last handle", "another handle is open"])
@pytest.mark.parametrize("close", ["queue", "store"])
def test_with_a_queue_that_is_closed_inside_says_that_nothing_was_settled(path, kept, close):
    """Closing hands the message back, so the block did not ack it: `LeaseLostError`. An error that
    ends the block goes on as it is.
    """
    other = weclaw.open(path) if kept else None
    with weclaw.Queue(path) as q:
        id = q.put("x")
    for error, told in ((None, weclaw.LeaseLostError), (KeyError("mine"), KeyError)):
        q = weclaw.Queue(path)
        msg = q.get(block=False)
        with pytest.raises(told, match="handed back" if error is None else "mine"), msg:
            (q if close == "queue" else q._store).close()
            if error is not None:
                raise error
        q.close()
        with weclaw.Queue(path) as q:
            assert q.status(id) == "ready"
    if other is not None:
        other.close()


def test_async_with_a_queue_that_is_closed_inside_says_that_nothing_was_settled(path):
    """The same in asyncio."""

    async def main():
        q = weclaw.AsyncQueue(path)
        await q.put("x")
        with pytest.raises(weclaw.LeaseLostError, match="handed back"):
            async with await q.get():
                await q.close()
        async with weclaw.AsyncQueue(path) as q, await q.get() as msg:
            assert (msg.body, msg.retry_count) == ("x", 0)

    asyncio.run(main())


def read_while_short_of_memory(pipe, path, codec):
    import resource

    from weclaw_embedded._values import unpack_value

    q = weclaw.Queue(path, codec=codec)
    msg = q.get()
    # Each array announces as many items as there are bytes, and memory is taken for it at once.
    n = 4 << 20
    announcing = (b"\xdd" + (n - 5000).to_bytes(4, "big")) * 300 + bytes(n)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")  # noqa: F821
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
    told = []
    for read in (lambda: msg.body, lambda: unpack_value(announcing)):
        try:
            told.append(type(read()).__name__)
        except (MemoryError, weclaw.WeclawError) as error:
            told.append(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    told.append(len(msg.body))
    msg.ack()
    pipe.send(told)
    q.close()


@pytest.mark.parametrize("codec", ["msgpack", "json", "pickle"])
def test_a_body_there_is_no_memory_for_is_not_one_that_cannot_be_read(path, open_queue, codec):
    """The machine's MemoryError says nothing against the message, which can be read later."""
    open_queue(codec=codec).put([1] * (6 << 20))
    with Child(read_while_short_of_memory, path, codec) as child:
        assert child.hear() == ["MemoryError", "SerializationError", 6 << 20]
