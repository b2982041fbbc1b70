"""Leases: whose a message is, for how long, and what happens when its holder is gone."""

from __future__ import annotations

import gc
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, drain, eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _holding
from weclaw_embedded._delivery import Lease


def put_three_and_lease_one(pipe, path, close):
    q = weclaw.Queue(path)
    for body in ("a", "b", "c"):
        pipe.send(q.put(body))
    pipe.send(q.get().id)
    pipe.recv()


def test_case_01_a_killed_process_loses_nothing_and_its_lease_is_back_at_once(path, open_queue):
    """Case 1: after kill -9 all three come, the leased one first, at once, as delivery 2."""
    with Child(put_three_and_lease_one, path, False) as child:
        ids = [child.hear() for _ in range(3)]
        assert child.hear() == ids[0]
        child.kill()
    q = open_queue()
    first = q.get(timeout=1.0)
    assert (first.id, first.body) == (ids[0], "a")
    assert (first.delivery_count, first.retry_count, first.crash_count) == (2, 0, 1)
    first.ack()
    others = [q.get(block=False) for _ in range(2)]
    assert [m.id for m in others] == ids[1:]
    assert [m.body for m in others] == ["b", "c"]
    assert [m.delivery_count for m in others] == [1, 1]
    for msg in others:
        msg.ack()
    with pytest.raises(weclaw.Empty):
        q.get(block=False)


def test_case_01_a_waiting_consumer_gets_the_dead_ones_message_at_once(path, open_queue):
    """Case 1: who already waits when a process dies has its message within half a second."""
    q = open_queue()
    with Child(put_three_and_lease_one, path, False) as child:
        ids = [child.hear() for _ in range(3)]
        assert child.hear() == ids[0]
        for _ in range(2):
            q.get(timeout=5.0).ack()
        got = []
        waiter = threading.Thread(target=lambda: got.append((q.get(timeout=20), time.monotonic())))
        waiter.start()
        time.sleep(0.3)
        assert not got
        killed_at = time.monotonic()
        child.kill()
        waiter.join()
    msg, at = got[0]
    # Half a second is the promise; the rest is for a busy machine.
    assert at - killed_at < 5.0
    assert (msg.id, msg.delivery_count, msg.crash_count) == (ids[0], 2, 1)
    msg.ack()


def lease_one_for(pipe, path, seconds):
    q = weclaw.Queue(path)
    pipe.send("ready")
    pipe.recv()
    pipe.send(q.get(visibility_timeout=seconds).id)
    pipe.recv()


@pytest.mark.parametrize("look", ["get", "stats"])
def test_case_01_all_that_the_dead_held_ended_with_them(path, open_queue, look):
    """Case 1: also where the time of their leases is over, too, when somebody looks again."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    q.put_many(["a", "b", "c"])
    children = [Child(lease_one_for, path, 2.0) for _ in range(3)]
    for child in children:
        child.hear()
    for child in children:  # one soon after the other: none looks when a lease of another is over
        child.say("go")
        child.hear()
    for child in children:
        child.kill()
    time.sleep(2.1)  # nobody looks meanwhile
    if look == "stats":
        assert q.stats()[:4] == (3, 0, 0, 0)
    for _ in range(3):  # one at a time, as what was in a crash is
        msg = q.get(block=False)
        assert (msg.delivery_count, msg.crash_count, msg.retry_count) == (2, 1, 0)
        msg.ack()


def test_case_02_a_lease_is_per_get(open_queue):
    """Case 2: the message leased for 1 s is back while the one leased for 600 s is not."""
    q = open_queue(retry=NO_WAIT)
    q.put_many(["long", "short"])
    long = q.get(visibility_timeout=600.0)
    begun = time.monotonic()
    short = q.get(visibility_timeout=1.0)
    assert (long.body, short.body) == ("long", "short")
    with pytest.raises(weclaw.Empty):
        q.get(block=False)
    again = q.get(timeout=30.0)
    assert time.monotonic() - begun >= 0.99
    assert (again.id, again.delivery_count, again.retry_count) == (short.id, 2, 1)
    with pytest.raises(weclaw.Empty):
        q.get(timeout=0.5)
    long.ack()
    again.ack()


def test_case_03_with_msg_renews_its_lease_while_it_runs(open_queue):
    """Case 3: work five leases long inside `with msg` is delivered once."""
    q = open_queue(visibility_timeout=0.4, retry=NO_WAIT)
    q.put("long work")
    others = []

    def wait_for_it():
        try:
            others.append(q.get(timeout=2.5))
        except weclaw.Empty:
            pass

    with q.get() as msg:
        waiter = threading.Thread(target=wait_for_it)
        waiter.start()
        time.sleep(2.0)
        assert msg.delivery_count == 1
    waiter.join()
    assert others == []
    assert q.stats().settled == 1


def test_a_with_that_is_over_keeps_nothing_of_its_message(open_queue):
    """However long its lease was to be renewed; and one that goes on is renewed all the same."""
    q = open_queue(flush="os", visibility_timeout=3600, retry=NO_WAIT)
    q.put("the first")
    with q.get(visibility_timeout=3) as first:
        renewed = first.lease_expires_at
        for n in range(1000):
            q.put(n)
            with q.get():
                pass
        gc.collect()
        engine = q.store._engine
        kept = [one for one in gc.get_objects() if type(one) is Lease and one.engine is engine]
        assert len(kept) < 100
        eventually(lambda: first.lease_expires_at > renewed + timedelta(seconds=1))
    assert q.stats().settled == 1001


@pytest.mark.parametrize(("given", "asked"), [(0.6, 60), (60, 2), (None, 2)])
def test_a_with_renews_by_what_was_asked_for_last(open_queue, given, asked):
    """`extend` in a `with` is neither undone by the next renewal nor left to run out."""
    q = open_queue(retry=NO_WAIT)
    q.put("x")
    with q.get(visibility_timeout=given) as msg:
        msg.extend(asked)
        time.sleep(2.5)
        left_s = (msg.lease_expires_at - datetime.now(timezone.utc)).total_seconds()
        assert asked - 3 < left_s <= asked
    assert q.stats().settled == 1


def test_case_03_a_worker_renews_while_its_handler_runs(path, open_queue):
    """Case 3: a handler five leases long in a worker is called once though others wait."""
    q = open_queue(visibility_timeout=0.4, retry=NO_WAIT)
    q.put("long work")
    calls = []

    def handler(msg):
        calls.append(msg.delivery_count)
        time.sleep(2.0)

    worker = weclaw.Worker(q, handler)
    thread = threading.Thread(target=worker.run)
    thread.start()
    eventually(lambda: calls)
    with pytest.raises(weclaw.Empty):
        q.get(timeout=2.5)
    assert q.join(timeout=5.0)
    worker.stop()
    thread.join()
    assert calls == [1]


def test_case_04_the_first_holder_cannot_settle_what_another_holds(open_queue):
    """Case 4: whose lease ran out gets `LeaseLostError`, and the second holder's ack works."""
    q = open_queue(retry=NO_WAIT)
    task = q.put("x")
    first = q.get(visibility_timeout=0.3)
    second = q.get(timeout=5.0, visibility_timeout=60.0)
    assert second.id == first.id == task
    for late in (first.ack, first.nack, first.fail, first.release, first.extend):
        with pytest.raises(weclaw.LeaseLostError):
            late()
    assert q.status(task) == "leased"
    second.ack(result="second")
    assert q.result(task) == "second"
    with pytest.raises(weclaw.LeaseLostError):
        first.ack(result="first")
    assert q.result(task) == "second"


def lease_shortly(pipe, path):
    q = weclaw.Queue(path, retry=weclaw.RetryPolicy(backoff=0.0))
    msg = q.get(visibility_timeout=0.3)
    pipe.send(msg.id)
    pipe.recv()
    try:
        msg.ack()
    except weclaw.LeaseLostError as error:
        pipe.send(error)
    else:
        pipe.send("acknowledged")
    q.close()


def test_case_04_nor_from_another_process(path, open_queue):
    """Case 4: the same when the two holders are two processes."""
    q = open_queue(retry=NO_WAIT)
    task = q.put("x")
    with Child(lease_shortly, path) as child:
        assert child.hear() == task
        second = q.get(timeout=5.0, visibility_timeout=60.0)
        child.say("now")
        assert isinstance(child.hear(), weclaw.LeaseLostError)
        assert q.status(task) == "leased"
        second.ack()
        assert q.status(task) == "done"
        child.end()


def test_case_07_release_burns_no_retry(open_queue):
    """Case 7: released ten times with max_retries 3, a message is not dead."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=3))
    task = q.put("x")
    for turn in range(10):
        msg = q.get(block=False)
        assert (msg.delivery_count, msg.retry_count) == (turn + 1, 0)
        msg.release()
        assert q.status(task) == "ready"
    msg = q.get(block=False)
    assert (msg.delivery_count, msg.retry_count, msg.crash_count) == (11, 0, 0)
    msg.ack()
    assert len(q.dlq) == 0


def test_case_08_deferring_burns_no_retry(open_queue):
    """Case 8: a 429 twenty times (`nack(count=False)`), then fine: done, and no retry burnt."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=3, backoff=0.0))
    task = q.put("x")
    for _ in range(20):
        msg = q.get(timeout=5.0)
        assert msg.retry_count == 0
        msg.nack(backoff=0.01, reason="429", count=False)
    msg = q.get(timeout=5.0)
    assert (msg.retry_count, msg.delivery_count) == (0, 21)
    msg.ack()
    assert q.status(task) == "done"
    assert len(q.dlq) == 0


def test_case_08_retry_later_burns_no_retry(open_queue):
    """Case 8: a handler that raises `RetryLater` twenty times and then returns is done."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=3, backoff=0.0))
    task = q.put("x")
    seen = []

    def handler(msg):
        seen.append(msg.retry_count)
        if len(seen) <= 20:
            raise weclaw.RetryLater(0.01)
        return "fine"

    worker = weclaw.Worker(q, handler)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert q.result(task, timeout=20.0) == "fine"
    worker.stop()
    thread.join()
    assert seen == [0] * 21


def test_case_09_time_alone_leads_to_the_dead_letters_and_nothing_is_uncounted(open_queue):
    """Case 9: never settled, a message dies by time alone, and the sums agree at every moment."""
    q = open_queue(visibility_timeout=0.15, retry=weclaw.RetryPolicy(max_retries=2, backoff=0.05))
    tasks = q.put_many(["x", "y", "z"])
    wrong, stop = [], threading.Event()

    def count():
        while not stop.is_set():
            s = q.stats()
            if s.ready + s.leased + s.delayed + s.dead != 3 - s.settled:
                wrong.append(s)

    counter = threading.Thread(target=count)
    counter.start()
    taken = dict.fromkeys(tasks, 0)
    end = time.monotonic() + 20.0
    while q.stats().dead < 3 and time.monotonic() < end:
        try:
            msg = q.get(timeout=0.05)
        except weclaw.Empty:
            continue
        taken[msg.id] += 1
        assert msg.delivery_count == taken[msg.id]
    stop.set()
    counter.join()
    assert wrong == []
    assert taken == dict.fromkeys(tasks, 3)
    assert q.stats()[:4] == (0, 0, 0, 3)
    letters = list(q.dlq)
    assert sorted(letter.id for letter in letters) == sorted(tasks)
    assert all(letter.delivery_count == 3 for letter in letters)


def ack_one_and_wait(pipe, path):
    q = weclaw.Queue(path, visibility_timeout=0.3)
    pipe.send(q.put("x"))
    msg = q.get()
    msg.ack(result="answer")
    pipe.send("acknowledged")
    pipe.recv()


def test_case_11_what_was_acknowledged_never_comes_again(path, open_queue):
    """Case 11: acked, kill -9, reopen, wait three leases: never again."""
    with Child(ack_one_and_wait, path) as child:
        task = child.hear()
        assert child.hear() == "acknowledged"
        child.kill()
    q = open_queue(retry=NO_WAIT)
    with pytest.raises(weclaw.Empty):
        q.get(timeout=1.0)
    assert q.status(task) == "done"
    assert q.result(task) == "answer"
    q.close()
    q = open_queue()
    assert drain(q) == []


def hold_for_ever(pipe, path):
    q = weclaw.Queue(path, visibility_timeout=None)
    msg = q.get()
    pipe.send((msg.id, msg.lease_expires_at))
    pipe.recv()


def test_case_12_held_until_the_process_dies(path, open_queue):
    """Case 12: with `visibility_timeout=None` one delivery however long; at once after kill -9."""
    q = open_queue(retry=NO_WAIT, visibility_timeout=0.2)
    task = q.put("x")
    with Child(hold_for_ever, path) as child:
        assert child.hear()[0] == task
        with pytest.raises(weclaw.Empty):
            q.get(timeout=2.0)
        assert q.status(task) == "leased"
        child.kill()
        killed_at = time.monotonic()
        msg = q.get(timeout=20.0)
        # Half a second is the promise; the rest is for a busy machine.
        assert time.monotonic() - killed_at < 5.0
    assert (msg.id, msg.delivery_count, msg.retry_count, msg.crash_count) == (task, 2, 0, 1)
    msg.ack()


def judge(pipe, path):
    """Look through the leases whenever asked."""
    q = weclaw.Queue(path, retry=weclaw.RetryPolicy(max_retries=1000, backoff=0.0))
    pipe.send("open")
    while pipe.recv() == "judge":
        pipe.send(q.stats().leased)


def test_what_ran_out_and_was_judged_by_others_is_not_remembered_for_ever(
    path, open_queue, monkeypatch
):
    """Nobody tells whose lease it was; the last lease of a message is handed back all the same."""
    monkeypatch.setattr(_holding, "_FEW_HELD", 4)
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=1000, backoff=0.0))
    q.put("x")
    with Child(judge, path) as child:
        child.hear()
        for _ in range(20):
            q.get(visibility_timeout=0.05)
            time.sleep(0.06)
            child.say("judge")
            assert child.hear() == 0
        assert len(q._store._engine.held) <= 9
        msg = q.get()
        assert (msg.retry_count, msg.delivery_count) == (20, 21)
        q.close()
        child.say("end")
        child.end()
    with pytest.raises(weclaw.LeaseLostError):
        msg.ack()
    again = open_queue().get(timeout=1.0)
    assert (again.retry_count, again.delivery_count) == (20, 22)


@pytest.mark.parametrize("closes", ["queue", "store"])
def test_a_lease_that_ran_out_before_the_close_is_a_failed_delivery(path: str, closes: str) -> None:
    """Who overruns his lease and closes has burnt a retry, so that such a message is dead in the
    end, and `on_dead` is told of it before the file is closed."""
    letters: list[weclaw.DeadLetter] = []
    retry = weclaw.RetryPolicy(max_retries=1, backoff=0)
    retries = []
    for turn in range(2):
        store = weclaw.open(path)
        q = store.queue(visibility_timeout=0.05, retry=retry, on_dead=letters.append)
        if turn == 0:
            q.put("slow")
        msg = q.get(timeout=5)
        retries.append(msg.retry_count)
        while datetime.now(timezone.utc) < msg.lease_expires_at:
            time.sleep(0.01)
        with pytest.raises(weclaw.LeaseLostError):
            msg.ack()
        if closes == "queue":
            q.close()
        store.close()
    assert retries == [0, 1]
    assert [letter.reason for letter in letters] == ["lease ran out"]
    with weclaw.Queue(path) as q:
        assert len(q.dlq) == 1
        assert q.empty()
