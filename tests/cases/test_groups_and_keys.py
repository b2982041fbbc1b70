"""Consumer groups beside each other, keys behind each other."""

from __future__ import annotations

import time

import pytest
from tests.helpers.queues import drain, take

import weclaw_embedded as weclaw


def test_case_39_groups_that_begin_at_the_earliest_and_at_the_latest(open_store):
    """Case 39: after 100 messages "earliest" has 100, "latest" 0; the first is not disturbed."""
    store = open_store()
    first = store.queue()
    first.put_many(list(range(100)))
    held = [first.get() for _ in range(3)]
    held[0].ack()
    before = first.stats()[:5]
    earliest = store.queue(group="audit", start="earliest")
    latest = store.queue(group="new", start="latest")
    assert earliest.qsize() == 100
    assert latest.qsize() == 0
    with pytest.raises(weclaw.Empty):
        latest.get(block=False)
    assert drain(earliest) == list(range(100))
    assert first.stats()[:5] == before
    first.put("to all")
    assert drain(latest) == ["to all"]
    assert drain(earliest) == ["to all"]
    held[1].ack()
    held[2].ack()
    assert drain(first) == [*range(3, 100), "to all"]


def test_case_40_a_key_waits_for_its_head_and_no_other_key_does(open_queue):
    """Case 40: A's first fails and waits: B flows; A's second comes only after A's first."""
    q = open_queue(retry=weclaw.RetryPolicy(backoff=2.0))
    q.put("a1", key="A")
    q.put("a2", key="A")
    q.put("b1", key="B")
    first = q.get(block=False)
    assert (first.body, first.key) == ("a1", "A")
    failed_at = time.monotonic()
    first.nack(reason="not yet")
    assert drain(q) == ["b1"]
    assert q.status(first.id) == "delayed"
    again = q.get(timeout=30.0)
    assert time.monotonic() - failed_at >= 1.99
    assert (again.body, again.retry_count) == ("a1", 1)
    with pytest.raises(weclaw.Empty):
        q.get(block=False)
    again.ack()
    assert drain(q) == ["a2"]


def test_case_40_after_the_heads_death_its_key_goes_on(open_queue):
    """Case 40: dead or cancelled, the head lets its key go on too."""
    q = open_queue()
    ids = [q.put(n, key="A") for n in range(4)]
    assert [m.body for m in take(q)] == [0]
    assert q.cancel(ids[1])
    q.purge()
    q.close()
    q = open_queue()
    assert [m.body for m in take(q)] == [0]


def test_case_40_dead_and_cancelled_heads(open_queue):
    """Case 40: the next of a key comes after the earlier one is acked, dead or cancelled."""
    q = open_queue()
    ids = [q.put(n, key="A") for n in range(4)]
    q.get(block=False).fail("dead")
    assert q.cancel(ids[1])
    msg = q.get(block=False)
    assert msg.id == ids[2]
    assert take(q) == []
    msg.ack()
    assert drain(q) == [3]
