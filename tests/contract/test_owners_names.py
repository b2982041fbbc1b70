"""Contract 6: a failure names the consumer that had the message, however old that consumer is."""

from __future__ import annotations

import shutil

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import scratch

import weclaw_embedded as weclaw
from weclaw_embedded._index_rows import OWNER_AT, OWNER_NAME, OWNER_OF


def rows(q):
    """How many rows there are of owners' names, of each kind."""

    def count(session):
        return [sum(1 for _ in session.tx._scan(k)) for k in (OWNER_NAME, OWNER_AT, OWNER_OF)]

    return q.store._engine.run(count)


def give_back(q, times=2):
    """Have the log let go of what it began with, so many times over."""
    log = q.store._engine.log
    for _ in range(times):
        last = log.segments()[-1]
        while log.segments()[0] <= last:
            q.put(b"x" * 5000)
            q.get().ack()


def test_the_index_forgets_consumers_that_are_gone(path):
    """However many there were one after the other, it knows those whose records the log keeps."""
    for _ in range(30):
        with weclaw.Queue(path, retention=0, segment_bytes=2**16, flush="os") as q:
            q.put(b"x" * 5000)
            q.get().ack()
    with weclaw.Queue(path, flush="os") as q:
        assert rows(q)[0] >= 3  # the others went already
        give_back(q)
        assert rows(q) == [1, 1, 1]


def hold_until_killed(pipe, path, is_held):
    """Be introduced by a first lease, and have one when it is killed, if only a second."""
    q = weclaw.Queue(path, consumer="worker-7", visibility_timeout=None, flush="os")
    msg = q.get()
    if not is_held:
        msg.ack()
    pipe.send("introduced")
    pipe.recv()
    if not is_held:
        q.get()
    pipe.send("has it")
    pipe.recv()


@pytest.mark.parametrize("scratch_is_lost", [False, True])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_failure_names_a_consumer_that_has_long_been_there(path, is_held, scratch_is_lost):
    """Also when the segment in which it was introduced is given back, whether it had a message then
    or takes one later; and when the index is made anew.
    """
    options = {"retention": 0, "segment_bytes": 2**16, "flush": "os"}
    with weclaw.Queue(path, topic="other", consumer="someone", **options) as other:
        other.store.queue().put("it")
        with Child(hold_until_killed, path, is_held) as child:
            assert child.hear() == "introduced"
            give_back(other)
            if not is_held:
                other.store.queue().put("it")
            child.say("go on")
            assert child.hear() == "has it"
            give_back(other)
            child.kill()
    if scratch_is_lost:
        shutil.rmtree(scratch(path))
    with weclaw.Queue(path, retry=weclaw.RetryPolicy(max_crashes=0)) as q:
        (letter,) = q.dlq
        assert [failure.consumer for failure in letter.failures] == ["worker-7"]
