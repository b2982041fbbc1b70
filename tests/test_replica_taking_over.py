"""Another process feeds the replica from now on, or the copy is the one that counts: whoever
waits is told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import Child
from tests.replica_tools import eventually, kill_receiver, level, same

import weclaw_embedded as weclaw
from weclaw_embedded import replica

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


def send_and_die(pipe, path, copy):
    from weclaw_embedded import _replication

    q = weclaw.Queue(path, replica=copy)
    q.put("first")
    pipe.send("feeds")
    pipe.recv()
    send = _replication.Replication.send

    def die(replication, target):
        send(replication, target)
        link = replication._link
        while link.acked < target:
            link.pump(target, 0, time.monotonic() + 1)
        os.kill(os.getpid(), signal.SIGKILL)

    _replication.Replication.send = die
    q.put("second")


def test_what_was_sent_before_its_feeder_died_is_gone_on_with(
    path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy has what was synced, and the feeder dies before it has raised the commit point to
    that: whoever feeds next finds that it is ours, and refuses nothing."""
    with Child(send_and_die, str(path), str(copy)) as feeder:
        assert feeder.hear() == "feeds"
        with weclaw.Queue(path) as q:
            feeder.say("die")
            assert feeder.wait() == -signal.SIGKILL
            assert [q.get(timeout=20).body for _ in range(2)] == ["first", "second"]
            q.put("third")
            level(q)
    assert same(path, copy) >= 3
    assert not [one for one in caplog.messages if "refuses" in one]


def wait_for_what_never_comes(pipe, path, what):
    q = weclaw.Queue(path, topic=what, maxsize=1 if what == "put" else 0)
    if what == "put":
        q.put(1)
    pipe.send("waits")
    try:
        q.get() if what == "get" else q.put(2)
    except weclaw.FencedError as error:
        pipe.send(str(error))
    q.close()
    pipe.send("closed")


def promote(copy: Path) -> None:
    """Between two receivers: the primary starts one after the other."""

    def is_done() -> bool:
        try:
            kill_receiver(copy)
            replica.promote(copy)
        except weclaw.LockedError:
            return False
        return True

    eventually(is_done, 60)


def wait_in_a_task(path: Path) -> str:
    async def wait() -> str:
        async with weclaw.AsyncQueue(path, topic="other") as q:
            with pytest.raises(weclaw.FencedError) as caught:
                await q.get()
        return str(caught.value)

    return asyncio.run(wait())


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_who_waits_at_a_fenced_file_is_told(
    open_queue: Callable[..., Any], path: Path, copy: Path, sync: bool
) -> None:
    """For a message or for room, in a thread, a task or another process: neither can come any more.
    Then everybody closes without an error, whoever holds messages too."""
    q = open_queue(replica=copy, sync_replica=sync)
    q.put_many([1, 2])
    held = q.get()
    level(q)
    told: list[str] = []
    task = threading.Thread(target=lambda: told.append(wait_in_a_task(path)))
    task.start()
    with (
        Child(wait_for_what_never_comes, str(path), "put") as putter,
        Child(wait_for_what_never_comes, str(path), "get") as getter,
    ):
        assert putter.hear() == "waits"
        assert getter.hear() == "waits"
        promote(copy)
        for child in (putter, getter):
            said = child.hear()
            assert "promoted over it (epoch 2" in said
            assert child.hear() == "closed"
            assert child.end() == []
    task.join(30)
    assert len(told) == 1
    with pytest.raises(weclaw.FencedError):
        q.get(block=False)
    with pytest.raises(weclaw.FencedError):
        held.ack()
    q.close()
