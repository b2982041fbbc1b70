"""Another process feeds the replica from now on: what waits for it is confirmed all the same."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.helpers.processes import Child

import weclaw_embedded as weclaw

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def feed_and_die(pipe, path, copy):
    from weclaw_embedded import _replication

    def die(replication, target, acked):
        if target:
            os.kill(os.getpid(), signal.SIGKILL)

    q = weclaw.Queue(path, replica=copy)
    q.put("first")
    pipe.send("feeds")
    pipe.recv()
    _replication.Replication._publish = die
    pipe.send("dies with the next one")
    pipe.recv()


def put_and_never_feed(pipe, path):
    from weclaw_embedded import _replication

    _replication._TAKE_OVER_S = 3600.0
    q = weclaw.Queue(path)
    pipe.send("open")
    pipe.recv()
    try:
        pipe.send(("put", q.put("second")))
    except weclaw.ReplicaUnavailableError as error:
        pipe.send(("not put", str(error)))


def test_what_the_dead_feeder_knew_and_had_not_said_is_confirmed(path: Path, copy: Path) -> None:
    """The receiver has confirmed, and the feeder dies before it can say so: nothing more is to be
    sent, and still the put returns and is delivered as soon as another process feeds."""
    with Child(feed_and_die, str(path), str(copy)) as feeder:
        assert feeder.hear() == "feeds"
        with weclaw.Queue(path) as q, Child(put_and_never_feed, str(path)) as producer:
            assert producer.hear() == "open"
            q.get(timeout=5).ack()
            feeder.say("die")
            assert feeder.hear() == "dies with the next one"
            producer.say("put")
            assert feeder.wait() == -signal.SIGKILL
            assert q.get(timeout=20).body == "second"
            assert producer.hear()[0] == "put"
