"""Clocks that jump."""

from __future__ import annotations

import subprocess
import time

import pytest
from tests.helpers.faults import WallClock
from tests.helpers.processes import Child

import weclaw_embedded as weclaw

HOUR = 3600


def live_through_a_jump(pipe, path):
    q = weclaw.Queue(path, retry=weclaw.RetryPolicy(backoff=0.0), consumer="jumping")
    q.put("held")
    held = q.get(visibility_timeout=600.0)
    q.put("short")
    q.get(visibility_timeout=1.0)
    q.put("delayed", delay=1.0)
    begun = time.monotonic()
    pipe.send(time.time())
    pipe.recv()  # The clock has jumped.
    pipe.send(time.time())
    got = []
    for _ in range(2):
        msg = q.get(timeout=30.0)
        got.append((msg.body, time.monotonic() - begun))
        msg.ack()
    pipe.send(got)
    pipe.send(q.status(held.id))
    held.ack()
    q.put("again", delay=1.0)
    q.put("with ttl", ttl=3600.0, delay=0.5)
    pipe.send(q.stats()[:4])
    pipe.recv()
    pipe.send(sorted(q.get(timeout=5.0).body for _ in range(2)))
    q.close()


@pytest.mark.parametrize("hours", [-12, 12, 24 * 400])
def test_case_25_the_wall_clock_jumps(path, tmp_path, hours):
    """Case 25: a delay of 1 s is due after 1 s, not hours, and leases are not lost or frozen."""
    clock = WallClock(tmp_path)
    with Child(live_through_a_jump, path, env=clock.env) as child:
        before = child.hear()
        clock.jump(hours * HOUR)
        child.say("jumped")
        assert abs(child.hear() - before - hours * HOUR) < 60
        got = child.hear()
        assert sorted(body for body, _ in got) == ["delayed", "short"]
        assert all(after >= 0.9 for _, after in got), got
        assert child.hear() == "leased"
        assert child.hear() == (0, 2, 0, 0)
        clock.jump(-hours * HOUR)
        child.say("jumped back")
        assert child.hear() == ["again", "with ttl"]
        child.end()


def put_delayed(pipe, path):
    q = weclaw.Queue(path)
    q.put("delayed", delay=4.0)
    q.put("for long", ttl=3600.0)
    q.close()
    pipe.send("closed")


def get_delayed(pipe, path):
    q = weclaw.Queue(path)
    got = [q.get(timeout=30.0).body for _ in range(2)]
    pipe.send((got, len(q.dlq)))
    q.close()


@pytest.mark.parametrize("hours", [-12, 12])
def test_case_25_the_wall_clock_jumps_while_nobody_is_there(path, tmp_path, hours):
    """Case 25: nor does it matter when all are closed: within a boot another clock counts."""
    clock = WallClock(tmp_path)
    with Child(put_delayed, path, env=clock.env) as child:
        child.end()
    clock.jump(hours * HOUR)
    with Child(get_delayed, path, env=clock.env) as child:
        got, dead = child.hear(timeout=60.0)
        child.end()
    assert got == ["for long", "delayed"]
    assert dead == 0


def test_case_25_two_processes_of_different_opinion(path, tmp_path):
    """Case 25: of two processes one believes it is yesterday: delays and order are the same."""
    clock = WallClock(tmp_path)
    with weclaw.Queue(path) as q:
        begun = time.monotonic()
        clock.jump(-24 * HOUR)
        with Child(put_delayed, path, env=clock.env) as child:
            assert child.hear() == "closed"
            child.end()
        q.put("behind")
        assert q.get(timeout=5.0).body == "for long"
        assert q.get(timeout=5.0).body == "behind"
        msg = q.get(timeout=8.0)
        assert msg.body == "delayed"
        assert time.monotonic() - begun > 4.0


def _can_have_time_namespaces():
    try:
        done = subprocess.run(
            ["unshare", "--time", "--boottime", "1000", "--fork", "true"],
            capture_output=True,
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


def test_case_25_a_suspended_machine(path, tmp_path):
    """Case 25: time that passed in a suspension counts for a delay, as CLOCK_BOOTTIME says."""
    if not _can_have_time_namespaces():
        pytest.skip("this machine does not let us make a time namespace")
    q = weclaw.Queue(path)
    q.put("in an hour", delay=HOUR)
    q.close()
    command = ("unshare", "--time", "--boottime", str(HOUR + 10), "--fork")
    with Child(get_at_once, path, command=command) as child:
        assert child.hear() == "in an hour"


def get_at_once(pipe, path):
    q = weclaw.Queue(path)
    pipe.send(q.get(timeout=5.0).body)
    q.close()
