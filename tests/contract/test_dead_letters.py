"""Contract 6: dead letters."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
from tests.helpers.processes import Child, environment
from tests.helpers.queues import NO_WAIT, drain, eventually, take

import weclaw_embedded as weclaw
from weclaw_embedded import _handle, _taking, aio, dlq, threads

UTC = datetime.timezone.utc


def kill_off(q, *bodies, **options):
    """Put and fail at once; the ids."""
    ids = []
    for body in bodies:
        ids.append(q.put(body, **options))
        q.get().fail(f"reason of {body!r}")
    return ids


def test_a_letter_tells_all(open_queue):
    """A letter has the whole body, the counts, the history and the times."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=1, backoff=0.0))
    before = datetime.datetime.now(UTC) - datetime.timedelta(seconds=1)
    task = q.put({"big": "x" * 10_000}, key="k", headers={"h": 1}, priority=2)
    q.get().nack(reason="first")
    q.get().nack(reason="second")
    letter = q.dlq.get(task)
    after = datetime.datetime.now(UTC) + datetime.timedelta(seconds=1)
    assert letter.body == {"big": "x" * 10_000}
    assert (letter.id, letter.key, letter.headers, letter.reason) == (
        task,
        "k",
        {"h": 1},
        "second",
    )
    assert (letter.delivery_count, letter.crash_count, letter.redrive_count) == (2, 0, 0)
    assert letter.retry_count in (1, 2)
    assert [f.reason for f in letter.failures] == ["first", "second"]
    assert before <= letter.enqueued_at <= letter.died_at <= after
    assert letter.died_at.utcoffset() == datetime.timedelta(0)


def test_an_exception_is_told_by_type_and_text(open_queue):
    """For an exception the reason is its type and text."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    task = q.put("x")
    with pytest.raises(ConnectionError), q.get():
        raise ConnectionError("no route to the provider")
    reason = q.dlq.get(task).reason
    assert "ConnectionError" in reason
    assert "no route to the provider" in reason


def test_looking_at_letters(q):
    """`len`, iteration, `peek` and `get` look and change nothing."""
    assert len(q.dlq) == 0
    assert list(q.dlq) == []
    assert q.dlq.peek(3) == []
    ids = kill_off(q, *range(5))
    for _ in range(2):
        assert len(q.dlq) == 5
        assert [x.id for x in q.dlq] == ids
        assert [x.body for x in q.dlq.peek(2)] == [0, 1]
        assert q.dlq.get(ids[3]).body == 3
    with pytest.raises(KeyError):
        q.dlq.get("no such id")
    alive = q.put("alive")
    with pytest.raises(KeyError):
        q.dlq.get(alive)
    assert q.stats().dead == 5


def test_letters_are_each_topics_and_groups_own(open_store):
    """Letters are per topic and group."""
    store = open_store()
    one = store.queue("one", group="a", start="earliest")
    two = store.queue("one", group="b", start="earliest")
    three = store.queue("two")
    kill_off(one, "x")
    assert (len(one.dlq), len(two.dlq), len(three.dlq)) == (1, 0, 0)
    assert drain(two) == ["x"]


def test_redrive_keeps_id_and_history_and_goes_to_the_end(q):
    """Redriven, a message keeps its id and history, starts anew, and stands at the end."""
    (task,) = kill_off(q, "dead", headers={"h": 1})
    q.put("waiting")
    assert q.dlq.redrive() == 1
    assert len(q.dlq) == 0
    assert q.status(task) == "ready"
    q.put("later")
    messages = take(q)
    assert [m.body for m in messages] == ["waiting", "dead", "later"]
    msg = messages[1]
    assert (msg.id, msg.retry_count, msg.crash_count, msg.headers) == (task, 0, 0, {"h": 1})
    msg.fail("again")
    letter = q.dlq.get(task)
    assert letter.redrive_count == 1
    assert [f.reason for f in letter.failures] == ["reason of 'dead'", "again"]


def test_redrive_by_ids_and_limit(q):
    """`ids` and `limit` say which; what is no letter is not counted."""
    ids = kill_off(q, *range(6))
    alive = q.put("alive")
    assert q.dlq.redrive([ids[4], ids[1], "no such id", alive]) == 2
    assert q.dlq.redrive(limit=3) == 3
    assert q.dlq.redrive([]) == 0
    assert [x.id for x in q.dlq] == [ids[5]]
    assert sorted(map(str, drain(q))) == ["0", "1", "2", "3", "4", "alive"]
    assert q.dlq.redrive(ids=[ids[5]], limit=1) == 1
    assert q.dlq.redrive() == 0
    assert q.dlq.redrive(limit=0) == 0


def test_however_many_letters_are_named_all_are_done(q, monkeypatch):
    """Only so many are done in one step, and the steps go on until each was done once."""
    monkeypatch.setattr(dlq, "_BATCH", 3)
    ids = kill_off(q, *range(10))
    assert q.dlq.redrive([*ids, ids[0]], limit=8) == 8
    assert [x.id for x in q.dlq] == ids[8:]
    assert q.dlq.redrive([*ids, ids[0]]) == 2
    for msg in take(q):
        msg.fail("again")
    assert [x.redrive_count for x in q.dlq] == [1] * 10
    assert q.dlq.redrive() == 10
    for msg in take(q):
        msg.fail("again")
    assert q.dlq.purge([*ids[2:], ids[2]]) == 8
    assert [x.id for x in q.dlq] == ids[:2]
    assert q.dlq.purge() == 2


def test_redriven_goes_to_the_end_of_its_key(q):
    """A redriven message stands behind the others of its key."""
    q.put("k1", key="k")
    q.put("k2", key="k")
    q.get().fail("bad")
    assert q.dlq.redrive() == 1
    assert drain(q) == ["k2", "k1"]


def test_purge_letters(open_queue):
    """Purged, letters are gone for ever."""
    q = open_queue()
    ids = kill_off(q, *range(4))
    assert q.dlq.purge([ids[1], "no such id"]) == 1
    assert [x.id for x in q.dlq] == [ids[0], ids[2], ids[3]]
    assert q.status(ids[1]) == "unknown"
    q.close()
    q = open_queue()
    assert len(q.dlq) == 3
    assert q.dlq.purge() == 3
    assert q.dlq.purge() == 0
    assert q.dlq.redrive() == 0
    assert q.replay(offset="earliest") == 0
    assert q.stats()[:4] == (0, 0, 0, 0)


def test_export(q, tmp_path):
    """`export` writes one JSON object a line and leaves the letters where they are."""
    ids = kill_off(q, {"prompt": "grüße 你好"}, [1, 2.5, None])
    out = tmp_path / "letters.jsonl"
    assert q.dlq.export(out) == 2
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [x["id"] for x in lines] == ids
    assert [x["body"] for x in lines] == [{"prompt": "grüße 你好"}, [1, 2.5, None]]
    assert lines[1]["reason"] == "reason of [1, 2.5, None]"
    assert len(q.dlq) == 2
    kill_off(q, b"\x00\xff", (1, 2), {1: datetime.datetime.now(UTC)})
    assert q.dlq.export(str(out), format="jsonl") == 5
    assert len(out.read_text(encoding="utf-8").splitlines()) == 5
    with pytest.raises((ValueError, TypeError)):
        q.dlq.export(tmp_path / "other", format="cuneiform")
    assert not (tmp_path / "other").exists()


def test_letters_outlive_retention(open_queue):
    """Letters stay however long ago and however much was settled since."""
    q = open_queue(retention=0, segment_bytes=65536)
    (task,) = kill_off(q, {"kept": "x" * 1000})
    for _ in range(10):
        q.put_many([bytes(1000)] * 100)
        drain(q)
    q.close()
    q = open_queue()
    letter = q.dlq.get(task)
    assert letter.body == {"kept": "x" * 1000}
    assert q.dlq.redrive() == 1
    assert drain(q) == [{"kept": "x" * 1000}]


def test_the_last_twenty_failures(open_queue):
    """Of many failures the last 20 are told, and reasons are cut to 4 KiB."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=30, backoff=0.0))
    task = q.put("x")
    for n in range(31):
        q.get(timeout=5.0).nack(reason=f"{n} " + "ä" * 5000)
    letter = q.dlq.get(task)
    assert len(letter.failures) == 20
    assert [int(f.reason.split()[0]) for f in letter.failures] == list(range(11, 31))
    assert len(letter.reason.encode()) <= 4096
    assert letter.reason.startswith("30 ää")
    assert all(len(f.reason.encode()) <= 4096 for f in letter.failures)


@pytest.mark.parametrize(
    "reason", [None, "", "x" * 10_000, "\ud800 lone", "\x00", "two\nlines", "你" * 3000]
)
def test_the_move_never_fails_for_its_reason(open_queue, reason):
    """Whatever the reason is, the message dies of it and the letter can be read."""
    q = open_queue()
    task = q.put("x")
    q.get().fail(reason)
    assert q.status(task) == "dead"
    q.close()
    q = open_queue()
    letter = q.dlq.get(task)
    assert letter.body == "x"
    assert letter.reason is None or len(letter.reason.encode()) <= 4096


def test_on_dead_is_called_once_for_each(path, open_queue):
    """`on_dead(letter)` is called once for each letter, where it was killed."""
    called = []
    q = open_queue(
        on_dead=lambda letter: called.append((letter.id, letter.reason)),
        retry=weclaw.RetryPolicy(max_retries=0, backoff=0.0),
        visibility_timeout=0.2,
    )
    other_called = []
    open_queue(on_dead=other_called.append)
    a, b, c, d = q.put_many(["a", "b", "c", weclaw.Put("d", ttl=0.1, delay=0.3)])
    q.get().fail("failed")
    q.get().nack(reason="nacked")
    q.get()
    with pytest.raises(weclaw.Empty):
        q.get(timeout=0.6)
    eventually(lambda: len(called) == 4)
    assert dict(called).keys() == {a, b, c, d}
    assert dict(called)[a] == "failed"
    assert dict(called)[b] == "nacked"
    assert dict(called)[d] == "expired"
    assert other_called == []
    assert q.dlq.redrive() == 4
    drain(q)
    assert len(called) == 4


def lease_beside_a_letter(q):
    """Take a message whose lease runs out, and put another for the `get` that finds it dead."""
    q.put("it dies")
    q.get(visibility_timeout=0.1)
    q.put("it is next")
    time.sleep(0.2)


def test_on_dead_takes_no_time_from_the_lease_of_what_get_returns(open_queue):
    """A letter that `get` finds on its way is told of beside it: `get` does not wait for that."""
    may_end = threading.Event()
    told = []

    def on_dead(letter):
        may_end.wait(30)
        told.append(letter.body)

    q = open_queue(on_dead=on_dead, retry=weclaw.RetryPolicy(max_retries=0))
    lease_beside_a_letter(q)
    msg = q.get()
    assert told == []
    msg.ack()
    with pytest.raises(weclaw.Empty):
        q.get(block=False)
    may_end.set()
    eventually(lambda: told == ["it dies"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_on_dead_that_raises_anything_keeps_no_message_and_no_call_from_anybody(
    open_queue, error, caplog
):
    """`get` returns what it has leased, and `on_dead` is called for those that die after it."""
    told = []

    def on_dead(letter):
        told.append(letter.body)
        raise error("in on_dead")

    q = open_queue(on_dead=on_dead, retry=weclaw.RetryPolicy(max_retries=0))
    for n in range(1, 3):
        lease_beside_a_letter(q)
        assert q.get().body == "it is next"
        assert q.stats().leased == n
        eventually(lambda n=n: told == ["it dies"] * n)
    assert caplog.text.count("in on_dead") >= 2


def test_on_dead_may_use_the_queue(open_queue):
    """`on_dead` may look at the letter through the queue and put elsewhere."""
    seen = []

    def on_dead(letter):
        seen.append(q.status(letter.id))
        alarms.put(letter.id)

    q = open_queue(on_dead=on_dead)
    alarms = open_queue("alarms")
    (task,) = kill_off(q, "x")
    eventually(lambda: alarms.qsize() == 1)
    assert seen == ["dead"]
    assert drain(alarms) == [task]


async def put_over_asyncio(path, options, put):
    async with weclaw.AsyncQueue(path, maxsize=1, **options) as q:
        await put(q)


async def put_in_transaction(q):
    async with q.transaction() as tx:
        tx.put("next")


async def put_over_aio(path, options):
    await aio.Queue(1, path=path, **options).put("next")


@pytest.mark.parametrize(
    "put",
    [
        lambda path, options: weclaw.Queue(path, maxsize=1, **options).put("next"),
        lambda path, options: asyncio.run(
            put_over_asyncio(path, options, lambda q: q.put("next", timeout=5))
        ),
        lambda path, options: asyncio.run(put_over_asyncio(path, options, put_in_transaction)),
        lambda path, options: asyncio.run(put_over_aio(path, options)),
        lambda path, options: aio.Queue(1, path=path, **options).put_nowait("next"),
        lambda path, options: threads.Queue(1, path=path, **options).put("next"),
    ],
    ids=["Queue", "AsyncQueue", "transaction", "aio", "aio nowait", "threads"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_on_dead_for_what_made_room(path, open_queue, put):
    """A put that finds room because a message ran out made a letter of it, and tells of it."""
    called = []
    open_queue(start="earliest").put("late", ttl=0.01)
    time.sleep(0.02)
    put(path, {"on_dead": called.append})
    eventually(lambda: [x.body for x in called] == ["late"])

    def is_gone():
        gc.collect()  # what `put` left open, here, where the warning of it is expected
        return not threads_for_on_dead()  # which may have it a moment longer

    eventually(is_gone)


def descriptors_of(path):
    """How many descriptors of this process are open files of this queue."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(str(path))
    return found


def threads_for_on_dead():
    return [thread for thread in threading.enumerate() if thread.name == "weclaw-on-dead"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="sees descriptors by /proc")
def test_a_drop_in_that_is_dropped_tells_of_all_its_letters_first(path, open_queue):
    """`on_dead` is called for each, however late; then the file is closed."""
    called = []
    dropped = threading.Event()

    def on_dead(letter):
        assert dropped.wait(10)
        called.append(letter.body)

    with weclaw.Queue(path, start="earliest") as q:
        q.put_many([weclaw.Put(n, ttl=0.01) for n in range(3)])
    time.sleep(0.02)
    stand_in = threads.Queue(path=path, on_dead=on_dead)
    assert stand_in.qsize() == 0
    del stand_in
    gc.collect()
    dropped.set()
    eventually(lambda: called == [0, 1, 2])

    def is_closed():
        gc.collect()  # the thread may have had it when it was dropped
        return not descriptors_of(path) and not threads_for_on_dead()

    eventually(is_closed)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="sees descriptors by /proc")
@pytest.mark.parametrize("module", [threads, aio])
def test_a_drop_in_that_is_dropped_in_a_cycle_needs_no_closing_either(path, module):
    """The garbage collector ends what it is made of in any order, and warns of none of it."""
    called = []
    with weclaw.Queue(path, start="earliest") as q:
        q.put("late", ttl=0.01)
    time.sleep(0.02)
    cycle = [module.Queue(path=path, on_dead=called.append)]
    cycle.append(cycle)
    assert cycle[0].qsize() == 0
    eventually(lambda: called)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del cycle

        def is_closed():
            gc.collect()  # the thread may have it a moment longer
            return not descriptors_of(path) and not threads_for_on_dead()

        eventually(is_closed)
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="sees descriptors by /proc")
def test_a_queue_that_told_of_a_letter_is_closed_when_it_is_dropped(path):
    """The thread that called `on_dead` does not keep it alive, and goes with it."""
    called = []
    q = weclaw.Queue(path, on_dead=called.append, start="earliest")
    q.put("late", ttl=0.01)
    time.sleep(0.02)
    assert q.qsize() == 0
    eventually(lambda: called)
    del q
    called.clear()

    def is_dropped():
        gc.collect()  # the thread may have it a moment longer
        return not threads_for_on_dead()

    with pytest.warns(ResourceWarning, match="unclosed"):
        eventually(is_dropped)
    eventually(lambda: not descriptors_of(path))


ENDING = """
import sys, time
import weclaw_embedded as weclaw

def on_dead(letter):
    time.sleep(float(sys.argv[2]))
    print(letter.body, flush=True)

q = weclaw.Queue(sys.argv[1], on_dead=on_dead, start="earliest")
q.put_many([weclaw.Put(n, ttl=0.01) for n in range(3)])
time.sleep(0.02)
assert q.qsize() == 0
print("the end", flush=True)
"""


def test_the_end_of_the_interpreter_waits_for_on_dead(path):
    """What died just before is told of, though nobody closed the queue."""
    command = [sys.executable, "-c", ENDING, str(path), "0.2"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "the end\n0\n1\n2\n"), done.stderr


def test_the_end_of_the_interpreter_does_not_wait_for_ever_for_on_dead(path):
    """It is said that some were not told of; they are in the dead letters."""
    command = [sys.executable, "-c", ENDING, str(path), "3600"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "the end\n")
    assert "2 more letters" in done.stderr
    with weclaw.Queue(path) as q:
        assert [letter.body for letter in q.dlq] == [0, 1, 2]


def test_on_dead_for_what_made_too_little_room(path, open_queue):
    """The put is refused; what ran out is a letter all the same, and told of once."""
    called = []

    async def main():
        async with weclaw.AsyncQueue(path, maxsize=2, on_dead=called.append) as q:
            await q.put("stays")
            with pytest.raises(weclaw.Full):
                await q.put_many(["next", "next"], block=False)
            await q.dlq.count()

    open_queue(start="earliest").put("late", ttl=0.01)
    time.sleep(0.02)
    asyncio.run(main())
    assert [x.body for x in called] == ["late"]


@pytest.mark.parametrize("count", [lambda q: q.qsize(), lambda q: q.stats(), lambda q: q.purge()])
def test_on_dead_is_called_once_for_each_where_many_run_out_at_once(open_queue, monkeypatch, count):
    """Also where a count judges them in several turns."""
    monkeypatch.setattr(_taking, "_MANY", 2)
    called = []
    q = open_queue(on_dead=called.append)
    with pytest.raises(weclaw.Empty):
        q.get(block=False)  # its group begins
    q.put_many([weclaw.Put(n, ttl=0.05) for n in range(7)])
    time.sleep(0.06)
    count(q)
    eventually(lambda: len(called) >= 7)
    q.qsize()
    q.close()
    assert sorted(letter.body for letter in called) == list(range(7))


def test_on_dead_is_not_called_by_who_only_looks(path, open_queue):
    """What would be dead by now if somebody wrote it is no letter yet."""
    q = open_queue()
    q.put("late", ttl=0.05)
    q.get().release()  # its group begins
    time.sleep(0.06)
    called = []
    with weclaw.Queue(path, readonly=True, on_dead=called.append) as looker:
        assert looker.stats().dead == 1
        assert looker.qsize() == 0
        assert looker.status("unknown") == "unknown"
        assert threads_for_on_dead() == []
    assert called == []


def test_two_threads_that_make_the_first_letters_at_once_have_them_told_by_one(path, monkeypatch):
    """So that `close` waits for both."""
    both = threading.Barrier(2, timeout=30)

    class MadeAtOnce(_handle._Untold):
        def __init__(self, *args):
            both.wait()
            super().__init__(*args)

    monkeypatch.setattr(_handle, "_Untold", MadeAtOnce)
    may_end = threading.Event()
    told = []

    def on_dead(letter):
        may_end.wait(30)
        told.append(letter.body)

    async def get_two():
        q = weclaw.AsyncQueue(path, on_dead=on_dead)
        await q.put_many([1, 2])
        return q, await q.get_many(2)

    q, messages = asyncio.run(get_two())
    failing = [threading.Thread(target=msg.fail) for msg in messages]
    for thread in failing:
        thread.start()
    for thread in failing:
        thread.join()
    assert len(threads_for_on_dead()) == 1
    may_end.set()
    asyncio.run(q.close())
    assert sorted(told) == [1, 2]


def test_close_waits_for_on_dead(path):
    """A letter that was made by the last look before the end is told of before it."""
    called = []

    def on_dead(letter):
        time.sleep(0.05)
        called.append(letter.body)

    def queue_alone():
        q = weclaw.Queue(path, on_dead=on_dead, start="earliest")
        return q, q

    def queue_of_a_store():
        store = weclaw.open(path)
        return store, store.queue(on_dead=on_dead)

    for opened in (queue_alone, queue_of_a_store):
        handle, q = opened()
        q.put_many([weclaw.Put(n, ttl=0.01) for n in range(3)])
        time.sleep(0.02)
        assert q.qsize() == 0
        handle.close()
        assert called == [0, 1, 2]
        called.clear()


def die_holding(pipe, path):
    q = weclaw.Queue(path)
    q.get()
    pipe.send("held")
    pipe.recv()


def test_on_dead_for_a_dead_consumer(path, open_queue):
    """When a consumer's death was the last, who notices it calls `on_dead`."""
    called = []
    q = open_queue(retry=weclaw.RetryPolicy(max_crashes=0), on_dead=called.append)
    task = q.put("x")
    with Child(die_holding, path) as child:
        child.hear()
        child.kill()
    with pytest.raises(weclaw.Empty):
        q.get(timeout=1.0)
    eventually(lambda: [x.id for x in called] == [task])


def test_many_letters(open_queue):
    """A thousand letters are listed, redriven and purged as few are."""
    q = open_queue(flush="os")
    q.put_many(list(range(1000)))
    for msg in q.get_many(1000):
        msg.fail("bad")
    assert len(q.dlq) == 1000
    assert [x.body for x in q.dlq] == list(range(1000))
    assert q.dlq.redrive(limit=400) == 400
    assert q.dlq.purge() == 600
    assert drain(q) == list(range(400))


def test_settling_and_redriving_at_once(open_queue):
    """Threads that fail, redrive and acknowledge at once lose and double nothing."""
    q = open_queue(retry=NO_WAIT)
    q.put_many(list(range(200)))
    done, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            try:
                msg = q.get(timeout=0.05)
            except weclaw.Empty:
                continue
            if msg.delivery_count == 1:
                msg.fail("first time")
            else:
                msg.ack()
                done.append(msg.body)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: q.dlq.redrive() >= 0 and len(done) == 200, timeout=40)
    stop.set()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(200))
    assert q.stats()[:5] == (0, 0, 0, 0, 200)


def test_a_letter_that_dies_again_at_once_is_redriven_once(tmp_path):
    """Redriving all ends, also when some are dead again before it has come to the last."""
    with weclaw.Queue(tmp_path / "q.wq") as q:
        q.put_many([weclaw.Put(n, ttl=0.000001) for n in range(3)])
        with pytest.raises(weclaw.Empty):
            q.get(block=False)
        assert len(q.dlq) == 3
        assert q.dlq.redrive() == 3
        assert len(q.dlq) == 3
        assert [letter.redrive_count for letter in q.dlq] == [1, 1, 1]
