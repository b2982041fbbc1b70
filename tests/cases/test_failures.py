"""Messages that fail: retries, crashes, the dead letters, and what stands behind them."""

from __future__ import annotations

import logging
import time

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import drain, eventually

import weclaw_embedded as weclaw


def work_until_it_kills(pipe, path, batch):
    q = weclaw.Queue(path)
    while True:
        try:
            messages = q.get_many(batch, timeout=0.6)
        except weclaw.Empty:
            break
        pipe.send([(m.body, m.delivery_count, m.crash_count) for m in messages])
        for msg in messages:
            if msg.body == "poison":
                os.kill(os.getpid(), signal.SIGKILL)  # noqa: F821
        for msg in messages:
            msg.ack()
            pipe.send(["done", msg.body])
    q.close()


@pytest.mark.parametrize("batch", [1, 4])
def test_case_05_a_message_that_kills_its_workers_dies_and_its_neighbours_live(
    path, open_queue, batch
):
    """Case 5: after the crash limit it is dead of `consumer died`, and the good ones are done."""
    q = open_queue()
    poison, *good = q.put_many(["poison", *(f"good {n}" for n in range(9))])
    deaths = 0
    done = []
    while True:
        with Child(work_until_it_kills, path, batch) as child:
            done += [said[1] for said in child.hear_rest() if said[0] == "done"]
            if child.wait() == 0:
                break
            deaths += 1
        assert deaths < 10
    assert deaths == 4
    assert sorted(done) == [f"good {n}" for n in range(9)]
    assert [q.status(task) for task in good] == ["done"] * 9
    assert q.status(poison) == "dead"
    letter = q.dlq.get(poison)
    assert letter.reason == "consumer died"
    assert (letter.crash_count, letter.delivery_count, letter.retry_count) == (4, 4, 0)
    assert letter.body == "poison"
    assert len(letter.failures) == 4


def hold_two(pipe, path):
    q = weclaw.Queue(path)
    pipe.send([m.body for m in q.get_many(2)])
    pipe.recv()


def test_case_05_suspects_are_handed_out_alone(path, open_queue):
    """Case 5: of messages that were in a crash together, a process has one at a time."""
    q = open_queue()
    q.put_many([f"task {n}" for n in range(4)])
    with Child(hold_two, path) as child:
        assert child.hear() == ["task 0", "task 1"]
        child.kill()
    suspects = 0
    seen = []
    held = []
    for _ in range(10):
        try:
            messages = q.get_many(4, block=False)
        except weclaw.Empty:
            assert held
            held.pop(0).ack()
            continue
        held += messages
        seen += [m.body for m in messages]
        suspects = sum(m.crash_count > 0 for m in held)
        assert suspects <= 1
        for msg in [m for m in held if not m.crash_count]:
            held.remove(msg)
            msg.ack()
        if len(seen) == 4:
            break
    assert sorted(seen) == [f"task {n}" for n in range(4)]
    for msg in held:
        msg.ack()


def test_case_06_the_id_never_changes(open_queue):
    """Case 6: through nack, reopening, death and redrive the id stays the same."""
    policy = weclaw.RetryPolicy(max_retries=1, backoff=0.0)
    q = open_queue(retry=policy)
    task = q.put({"n": 1})
    msg = q.get(block=False)
    assert msg.id == task
    msg.nack()
    q.close()
    q = open_queue(retry=policy)
    msg = q.get(timeout=5.0)
    assert (msg.id, msg.retry_count) == (task, 1)
    msg.nack(reason="again")
    assert q.status(task) == "dead"
    q.close()
    q = open_queue(retry=policy)
    assert [letter.id for letter in q.dlq] == [task]
    assert q.dlq.redrive() == 1
    q.close()
    q = open_queue(retry=policy)
    msg = q.get(timeout=5.0)
    assert (msg.id, msg.retry_count, msg.crash_count, msg.body) == (task, 0, 0, {"n": 1})
    msg.ack(result="done")
    assert q.result(task) == "done"


def test_case_10_fail_goes_straight_to_the_dead_letters(open_queue):
    """Case 10: `fail("blocked by policy")` at the first delivery: dead at once for that reason."""
    q = open_queue()
    task = q.put("x")
    q.get().fail("blocked by policy")
    assert q.status(task) == "dead"
    assert q.stats()[:4] == (0, 0, 0, 1)
    letter = q.dlq.get(task)
    assert letter.reason == "blocked by policy"
    assert (letter.delivery_count, letter.retry_count) == (1, 0)
    with pytest.raises(weclaw.Empty):
        q.get(timeout=0.2)


def _gaps(q):
    """The gaps of a failing message, measured from nack to delivery."""
    head = q.put("bad")
    gaps = []
    msg = q.get(block=False)
    nacked_at = time.monotonic()
    msg.nack(reason="nope")
    for retry in range(1, 4):
        msg = q.get(timeout=60.0)
        gaps.append(time.monotonic() - nacked_at)
        assert (msg.id, msg.retry_count) == (head, retry)
        nacked_at = time.monotonic()
        msg.nack(reason="nope")
    assert q.status(head) == "dead"
    return gaps


def test_case_31_a_failing_head_holds_nobody_up(open_queue):
    """Case 31: while the head waits for its next try the good ones behind it flow."""
    q = open_queue(retry=weclaw.RetryPolicy(backoff=600.0))
    head = q.put("bad")
    good = [f"good {n}" for n in range(10)]
    q.put_many(good)
    msg = q.get(block=False)
    assert msg.id == head
    msg.nack(reason="nope")
    assert drain(q) == good
    assert q.status(head) == "delayed"


def test_case_31_a_failing_head_waits_twice_as_long_each_time(open_queue):
    """Case 31, ten times faster: the head's gaps grow 0.5, 1, 2 s, and end by themselves."""
    gaps = _gaps(open_queue(retry=weclaw.RetryPolicy(backoff=0.5)))
    for gap, wanted in zip(gaps, (0.5, 1.0, 2.0), strict=True):
        assert wanted - 0.01 <= gap < wanted + 10.0


@pytest.mark.slow
def test_case_31_by_default_the_gaps_are_5_10_and_20_seconds(open_queue):
    """Case 31: with the default policy the head's gaps grow 5, 10, 20 s."""
    gaps = _gaps(open_queue())
    for gap, wanted in zip(gaps, (5.0, 10.0, 20.0), strict=True):
        assert wanted - 0.01 <= gap < wanted + 10.0


def test_case_38_on_dead_may_raise(open_queue, caplog):
    """Case 38: an exception in `on_dead` is logged, and the letter is there."""
    called = []

    def on_dead(letter):
        called.append(letter)
        raise RuntimeError("the pager is broken")

    q = open_queue(on_dead=on_dead)
    first, second = q.put_many(["x", "y"])
    with caplog.at_level(logging.DEBUG, logger="weclaw_embedded"):
        q.get().fail("blocked by policy")
        eventually(lambda: called)
        eventually(lambda: "the pager is broken" in caplog.text)
    assert any(r.name.startswith("weclaw_embedded") for r in caplog.records)
    assert f"on_dead failed for message {first}" in caplog.text
    assert [(x.id, x.reason, x.body) for x in called] == [(first, "blocked by policy", "x")]
    assert q.dlq.get(first).reason == "blocked by policy"
    msg = q.get()
    assert msg.id == second
    msg.ack()
