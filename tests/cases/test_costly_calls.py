"""The reason the library exists: costly work that is not to be done twice."""

from __future__ import annotations

import random

from tests.helpers.processes import Child
from tests.helpers.queues import drain

import weclaw_embedded as weclaw


def call_a_model(pipe, path, journal):
    q = weclaw.Queue(path, visibility_timeout=None)
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # noqa: F821
    while True:
        try:
            msg = q.get(timeout=0.6)
        except weclaw.Empty:
            break
        os.write(fd, f"call {msg.body}\n".encode())  # noqa: F821
        time.sleep(0.001)  # noqa: F821
        msg.ack(result=["answer", msg.body])
        os.write(fd, f"done {msg.body}\n".encode())  # noqa: F821
        pipe.send(msg.body)
    q.close()


def test_case_34_no_finished_call_is_made_again(path, tmp_path, open_queue):
    """Case 34: 200 costly calls with five kills: no finished call again, none lost."""
    rng = random.Random(34)
    journal = tmp_path / "journal"
    q = open_queue()
    tasks = q.put_many(list(range(200)))
    kills_at = sorted(rng.sample(range(10, 190), 5))
    finished = 0
    for stop in [*kills_at, None]:
        with Child(call_a_model, path, journal) as child:
            if stop is None:
                finished += len(child.end())
                break
            while finished < stop:
                child.hear()
                finished += 1
            child.kill()
            finished += len(child.hear_rest())
    lines = journal.read_text().split("\n")[:-1]
    calls = [int(x.split()[1]) for x in lines if x.startswith("call")]
    assert set(calls) == set(range(200))
    assert len(calls) <= 205
    done = set()
    for line in lines:
        what, n = line.split()
        if what == "done":
            done.add(n)
        else:
            assert n not in done, f"call {n} was finished and made again"
    assert [q.result(task) for task in tasks] == [["answer", n] for n in range(200)]


def consume_until_killed(pipe, path, stop):
    q = weclaw.Queue(path)
    for _ in range(stop):
        try:
            msg = q.get(timeout=0.6)
        except weclaw.Empty:
            break
        msg.ack(result=msg.body * 2)
        pipe.send(msg.body)
    else:
        q.get()
        pipe.send("holds one more")
        pipe.recv()
    q.close()


def test_case_35_killed_at_the_362nd_of_1000_it_goes_on_there(path, open_queue):
    """Case 35: after the kill it continues there; all 1 000 results are there, none missing."""
    q = open_queue()
    tasks = q.put_many(list(range(1000)))
    with Child(consume_until_killed, path, 361) as child:
        assert [child.hear() for _ in range(361)] == list(range(361))
        assert child.hear() == "holds one more"
        child.kill()
    with Child(consume_until_killed, path, 1000) as child:
        assert child.end() == list(range(361, 1000))
    assert [q.result(task) for task in tasks] == [2 * n for n in range(1000)]
    assert drain(q) == []
    assert q.stats()[:5] == (0, 0, 0, 0, 1000)
