"""Contract 3: putting."""

from __future__ import annotations

import asyncio
import datetime
import threading
import time

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, drain, eventually, take

import weclaw_embedded as weclaw
from weclaw_embedded import _clock, _files, _message, aio, threads
from weclaw_embedded.wal import TAIL

UTC = datetime.timezone.utc


def test_ids_are_unique_and_ordered_by_time(q):
    """The library's own ids are distinct texts that sort as they were put."""
    ids = [q.put(n) for n in range(50)] + q.put_many(list(range(50)))
    assert all(isinstance(task, str) for task in ids)
    assert len(set(ids)) == 100
    assert sorted(ids) == ids


def test_first_in_first_out(q):
    """Of one priority the first put is the first delivered."""
    q.put_many(list(range(10)))
    for n in range(10, 20):
        q.put(n)
    assert drain(q) == list(range(20))


def test_a_kept_id_is_put_once(open_queue):
    """A second put of an id that is waiting, leased, dead or done stores nothing."""
    q = open_queue(retry=NO_WAIT)
    assert q.put("first", id="mine") == "mine"
    assert q.put("second", id="mine") == "mine"
    assert q.qsize() == 1
    msg = q.get()
    assert (msg.id, msg.body) == ("mine", "first")
    assert q.put("third", id="mine") == "mine"
    msg.nack(backoff=60)
    assert q.put("fourth", id="mine") == "mine"
    assert q.stats()[:4] == (0, 1, 0, 0)
    q.put("other", id="dead")
    q.get().fail("bad")
    assert q.put("again", id="dead") == "dead"
    assert q.stats()[:4] == (0, 1, 0, 1)
    q.put("x", id="done")
    q.get().ack(result=1)
    assert q.put("x", id="done") == "done"
    assert q.qsize() == 1
    q.close()
    q = open_queue()
    for task in ("mine", "dead", "done"):
        assert q.put("after reopening", id=task) == task
    assert q.stats()[:5] == (0, 1, 0, 1, 1)


def test_a_cancelled_or_purged_id_is_free_again(q):
    """Cancelled or purged, an id can be put anew."""
    q.put("first", id="mine")
    assert q.cancel("mine")
    assert q.put("second", id="mine") == "mine"
    assert q.qsize() == 1
    q.purge()
    assert q.qsize() == 0
    q.put("third", id="mine")
    assert drain(q) == ["third"]
    q.put("dead", id="other")
    q.get().fail("x")
    assert q.dlq.purge() == 1
    q.put("alive", id="other")
    assert drain(q) == ["alive"]


def test_an_id_is_its_topics_own(open_store):
    """The same id in two topics is two messages."""
    store = open_store()
    one, two = store.queue("one"), store.queue("two")
    one.put("a", id="mine")
    two.put("b", id="mine")
    assert drain(one) == ["a"]
    assert two.status("mine") == "ready"
    assert drain(two) == ["b"]


def test_one_id_twice_in_one_batch(q):
    """In a batch the second of an id stores nothing either."""
    ids = q.put_many([weclaw.Put("a", id="x"), "b", weclaw.Put("c", id="x")])
    assert ids[0] == ids[2] == "x"
    assert drain(q) == ["a", "b"]


def test_an_id_put_from_two_threads_and_processes_is_one_message(path, open_queue):
    """An id put at the same moment by many is stored once."""
    q = open_queue()
    children = [Child(put_same_ids, path) for _ in range(2)]
    try:
        for child in children:
            assert child.hear() == "ready"
        for child in children:
            child.say("go")
        threads = [
            threading.Thread(target=lambda: [q.put(n, id=f"id {n}") for n in range(50)])
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for child in children:
            child.end()
    finally:
        for child in children:
            child.close()
    assert sorted(drain(q)) == list(range(50))


def put_same_ids(pipe, path):
    q = weclaw.Queue(path)
    pipe.send("ready")
    pipe.recv()
    for n in range(50):
        assert q.put(n, id=f"id {n}") == f"id {n}"
    q.close()


def test_keys_are_delivered_in_put_order_one_at_a_time(q):
    """Of a key the next comes only after the earlier one is settled; priority does not help it."""
    q.put("a1", key="a", priority=0)
    q.put("a2", key="a", priority=9)
    q.put("b1", key="b")
    q.put("none")
    batch = q.get_many(10, block=False)
    assert sorted(m.body for m in batch) == ["a1", "b1", "none"]
    assert take(q) == []
    by_body = {m.body: m for m in batch}
    by_body["b1"].ack()
    assert take(q) == []
    by_body["a1"].release()
    msg = q.get(block=False)
    assert msg.body == "a1"
    msg.ack()
    assert [m.body for m in take(q)] == ["a2"]


def test_a_delayed_head_holds_its_key(q):
    """A delayed head holds its key."""
    q.put("a1", key="a", delay=0.5)
    q.put("a2", key="a")
    assert q.stats()[:2] == (0, 2)
    assert take(q) == []
    msg = q.get(timeout=5.0)
    assert msg.body == "a1"
    assert take(q) == []
    msg.ack()
    assert [m.body for m in take(q)] == ["a2"]


def test_a_freed_key_wakes_who_waits(q):
    """The ack of a key's head wakes a `get` that waits for its next."""
    q.put("a1", key="a")
    q.put("a2", key="a")
    head = q.get()
    got = []
    waiter = threading.Thread(target=lambda: got.append(q.get(timeout=20.0).body))
    waiter.start()
    time.sleep(0.2)
    assert got == []
    head.ack()
    waiter.join()
    assert got == ["a2"]


def test_many_keys_survive_reopening(open_queue):
    """Order per key holds over a reopening."""
    q = open_queue(flush="os")
    for n in range(300):
        q.put([n % 30, n // 30], key=f"key {n % 30}")
    seen = {}
    for turn in range(10):
        batch = q.get_many(100, block=False)
        assert len(batch) == 30
        for msg in batch:
            k, n = msg.body
            assert n == turn
            seen[k] = n
            msg.ack()
        if turn % 3 == 0:
            q.close()
            q = open_queue(flush="os")
    assert take(q) == []


def test_higher_priority_first_and_fifo_inside(q):
    """Higher priority first, FIFO inside one priority."""
    for n in range(3):
        for priority in (0, 5, 9):
            q.put([priority, n], priority=priority)
    assert drain(q) == [[p, n] for p in (9, 5, 0) for n in range(3)]


def test_one_delivery_in_sixteen_goes_to_the_oldest(q):
    """At least one delivery in 16 goes to the oldest ready message of any priority."""
    q.put_many([weclaw.Put(["low", n], priority=0) for n in range(20)])
    q.put_many([weclaw.Put(["high", n], priority=9) for n in range(200)])
    order = [q.get(block=False).body for _ in range(160)]
    low = [n for n, body in enumerate(order) if body[0] == "low"]
    assert len(low) >= 10
    assert all(b - a <= 16 for a, b in zip([-1, *low], low, strict=False))
    assert [order[n][1] for n in low] == list(range(len(low)))
    assert len(low) <= 20


def test_a_nacked_message_takes_its_old_place(q):
    """Whatever comes back takes its old place among its priority."""
    q.put_many(list(range(5)))
    batch = q.get_many(3, block=False)
    batch[1].release()
    batch[0].nack(backoff=0)
    assert [m.body for m in take(q)] == [0, 1, 3, 4]


def test_delay_and_eta(q):
    """Not before `delay` seconds or before `eta`; what is past is now."""
    begun = time.monotonic()
    q.put("delay", delay=2.0)
    q.put("eta", eta=datetime.datetime.now(UTC) + datetime.timedelta(seconds=2.5))
    q.put("past", eta=datetime.datetime(2001, 1, 1, tzinfo=UTC))
    q.put("now")
    assert q.stats()[:2] == (2, 2)
    assert q.qsize() == 4
    assert drain(q) == ["past", "now"]
    times = {}
    for _ in range(2):
        msg = q.get(timeout=30.0)
        times[msg.body] = time.monotonic() - begun
        msg.ack()
    assert times["delay"] >= 1.99
    assert times["eta"] >= 2.45


def test_a_delay_survives_a_reopening(open_queue, monkeypatch):
    """A delay runs on while the file is closed, and not anew."""
    real = _clock.boottime_us
    q = open_queue()
    task = q.put("x", delay=1000.0)
    q.close()
    monkeypatch.setattr(_clock, "boottime_us", lambda: real() + 600 * 10**6)
    q = open_queue()
    assert q.status(task) == "delayed"
    monkeypatch.setattr(_clock, "boottime_us", lambda: real() + 1001 * 10**6)
    q.get(block=False).ack()


def test_ttl_leads_to_the_dead_letters(q):
    """A message whose ttl is over goes to the dead letters as `expired`, not to a worker."""
    task = q.put("x", ttl=0.2)
    fine = q.put("y", ttl=60.0)
    time.sleep(0.3)
    msg = q.get(block=False)
    assert msg.id == fine
    msg.ack()
    assert q.status(task) == "dead"
    letter = q.dlq.get(task)
    assert (letter.reason, letter.delivery_count) == ("expired", 0)


def test_ttl_of_what_nobody_takes(q):
    """The ttl runs out with nobody coming for it: the answers say so at once."""
    task = q.put("x", ttl=0.2)
    time.sleep(0.3)
    assert q.status(task) == "dead"
    assert q.stats()[:4] == (0, 0, 0, 1)
    assert [x.reason for x in q.dlq] == ["expired"]
    assert len(q.dlq) == 1


def test_ttl_starts_anew_at_redrive(q):
    """Redriven, a message has its whole ttl again."""
    task = q.put("x", ttl=0.4)
    time.sleep(0.5)
    assert q.status(task) == "dead"
    assert q.dlq.redrive() == 1
    msg = q.get(block=False)
    assert msg.id == task
    msg.release()
    time.sleep(0.5)
    assert q.status(task) == "dead"


def test_a_leased_message_does_not_expire_in_its_workers_hands(q):
    """A ttl that runs out during a lease disturbs nobody: the ack counts."""
    task = q.put("x", ttl=0.2)
    msg = q.get()
    time.sleep(0.4)
    assert q.status(task) == "leased"
    msg.ack()
    assert q.status(task) == "done"


def test_headers(q):
    """Headers come along; without any they are `{}`."""
    q.put("a", headers={"trace": "1", "n": 5})
    q.put("b")
    assert q.get().headers == {"trace": "1", "n": 5}
    assert q.get().headers == {}


def test_put_many_keeps_order_and_takes_put_objects(q):
    """`put_many` takes bodies and `Put`s, and gives the ids in their order."""
    ids = q.put_many(
        ["a", weclaw.Put("b", id="given", key="k", headers={"h": 1}, priority=0), {"c": 1}]
    )
    assert ids[1] == "given"
    messages = take(q)
    assert [m.id for m in messages] == ids
    assert [m.body for m in messages] == ["a", "b", {"c": 1}]
    assert messages[1].key == "k"
    assert q.put_many([]) == []
    assert q.put_many(str(n) for n in range(3))


def test_put_many_takes_bodies_that_are_made_one_out_of_the_other(q):
    """What an iterator yields is put as it was when it came, though it is changed for the next."""

    def growing():
        body = {"steps": []}
        for n in range(4):
            body["n"] = n
            body["steps"].append(n)
            yield body

    q.put_many(growing())
    assert [m.body for m in take(q)] == [{"steps": list(range(n + 1)), "n": n} for n in range(4)]


def test_put_many_gives_ids_in_order_whatever_they_stand_for(q):
    """Ids that were given, known already, and made stand where their messages stood."""
    known = q.put("known", id="known")
    first = q.put_many(
        [
            weclaw.Put("a"),
            "b",
            weclaw.Put("c", id="known"),
            weclaw.Put("d", priority=3),
            "e",
            weclaw.Put("f", id="new"),
            "g",
            "h",
            weclaw.Put("i", id="new"),
        ]
    )
    assert [first[n] for n in (2, 5, 8)] == [known, "new", "new"]
    bodies = {m.id: m.body for m in take(q)}
    assert [bodies[id] for id in first] == ["a", "b", "known", "d", "e", "f", "g", "h", "f"]


def test_put_many_is_all_or_nothing(open_queue):
    """One bad body among good ones: nothing is put."""
    q = open_queue(max_message_bytes=1000)
    for bad, error in (
        ({1, 2}, weclaw.SerializationError),
        ("x" * 2000, weclaw.MessageTooLargeError),
        (weclaw.Put("x", headers={"h": object()}), weclaw.SerializationError),
    ):
        with pytest.raises(error):
            q.put_many(["a", "b", bad, "c"])
        assert q.qsize() == 0


def test_a_large_batch(q):
    """A batch larger than many segments is one step too, and comes in order."""
    bodies = [bytes([n % 256]) * 30_000 for n in range(150)]
    q.put_many(bodies)
    assert drain(q) == bodies


BAD_PUTS = [
    {"priority": -1},
    {"priority": 10},
    {"priority": 1.5},
    {"priority": "high"},
    {"delay": -1.0},
    {"delay": float("nan")},
    {"delay": "soon"},
    {"eta": datetime.datetime(2030, 1, 1)},  # noqa: DTZ001
    {"eta": 5.0},
    {"eta": datetime.datetime(2030, 1, 1, tzinfo=UTC), "delay": 5.0},
    {"ttl": -5},
    {"ttl": float("nan")},
    {"id": 5},
    {"key": 5},
    {"headers": [1]},
    {"headers": "x"},
    {"timeout": -1},
    {"no_such": 1},
]


@pytest.mark.parametrize("arguments", BAD_PUTS, ids=str)
def test_bad_arguments_of_put_change_nothing(q, path, arguments):
    """A bad argument of `put` is `ValueError` or `TypeError` and changes nothing."""
    q.put("before")
    before = path.read_bytes()
    with pytest.raises((ValueError, TypeError)):
        q.put("x", **arguments)
    if "timeout" not in arguments:
        with pytest.raises((ValueError, TypeError)):
            q.put_many(["a", weclaw.Put("x", **arguments)])
    assert path.read_bytes() == before
    assert drain(q) == ["before"]


def test_maxsize_counts_ready_and_delayed_and_leaves_leased_out(open_queue):
    """At `maxsize` a put that may not wait is `Full`; a lease makes room."""
    q = open_queue(maxsize=2)
    q.put("a")
    q.put("b", delay=60.0)
    assert q.full()
    assert q.maxsize == 2
    for refused in (
        lambda: q.put_nowait("c"),
        lambda: q.put("c", block=False),
        lambda: q.put("c", timeout=0.1),
    ):
        with pytest.raises(weclaw.Full):
            refused()
    assert q.qsize() == 2
    msg = q.get()
    q.put_nowait("c")
    with pytest.raises(weclaw.Full):
        q.put_nowait("d")
    msg.ack()
    assert drain(q) == ["c"]


def test_a_full_queue_blocks_until_there_is_room(open_queue):
    """A put that may wait waits until there is room, in other threads too."""
    q = open_queue(maxsize=1)
    q.put("a")
    done = []
    thread = threading.Thread(target=lambda: done.append(q.put("b", timeout=20.0)))
    thread.start()
    time.sleep(0.2)
    assert done == []
    q.get().ack()
    thread.join()
    assert done
    assert drain(q) == ["b"]


def test_put_many_waits_until_all_has_room_and_never_for_what_can_not_have_it(open_queue):
    """`put_many` waits for room for all of it; what can never have room is `Full` at once."""
    q = open_queue(maxsize=3)
    with pytest.raises(weclaw.Full):
        q.put_many([1, 2, 3, 4])  # without a timeout: what waits, waits for ever
    q.put_many([1, 2])
    done = []
    thread = threading.Thread(target=lambda: done.append(q.put_many([3, 4, 5])))
    thread.start()
    time.sleep(0.2)
    q.get().ack()
    time.sleep(0.2)
    assert (done, q.qsize()) == ([], 1)
    q.get().ack()
    thread.join()
    assert drain(q) == [3, 4, 5]


def test_an_id_that_is_kept_needs_no_room(open_queue):
    """Putting what is already there is no reason to wait for room."""
    q = open_queue(maxsize=1)
    q.put("a", id="mine")
    assert q.put_nowait("a", id="mine") == "mine"


@pytest.mark.parametrize("how", ["put", "put_many", "transaction"])
def test_a_lease_that_has_run_out_takes_room_whoever_looks_first(open_queue, how):
    """`maxsize` is judged as `qsize` counts, also by a put that is the first call after it."""
    q = open_queue(maxsize=2, visibility_timeout=0.1, retry=NO_WAIT)
    q.put_many(["a", "b"])
    assert len(q.get_many(2)) == 2
    time.sleep(0.15)

    def put():
        if how == "put":
            q.put("c", block=False)
        elif how == "put_many":
            q.put_many(["c", "d"], block=False)
        else:
            with q.transaction(block=False) as tx:
                tx.put("c")

    with pytest.raises(weclaw.Full):
        put()
    assert q.qsize() == 2
    assert q.purge() == 2
    put()


def put_what_fits(pipe, path, maxsize):
    q = weclaw.Queue(path, maxsize=maxsize)
    pipe.send("ready")
    pipe.recv()
    n = 0
    while True:
        try:
            q.put_nowait(n)
        except weclaw.Full:
            break
        n += 1
    pipe.send(n)
    q.close()


def test_maxsize_is_exact_over_processes(path, open_queue):
    """Three processes that put at once do not exceed `maxsize` by one."""
    q = open_queue(maxsize=100)
    children = [Child(put_what_fits, path, 100) for _ in range(3)]
    try:
        for child in children:
            child.hear()
        for child in children:
            child.say("go")
        assert sum(child.hear() for child in children) == 100
        for child in children:
            child.end()
    finally:
        for child in children:
            child.close()
    assert q.qsize() == 100


def test_max_bytes(open_queue):
    """At `max_bytes` a put is `Full`; settled space makes room for it."""
    q = open_queue(max_bytes=4 * 2**20, retention=0, codec="raw")
    n = 0
    with pytest.raises(weclaw.Full):
        while n < 200:
            q.put(bytes(100_000), timeout=0.1)
            n += 1
    assert 5 < n < 45
    with pytest.raises(weclaw.Full):
        q.put_nowait(bytes(100_000))
    with pytest.raises(weclaw.Full):
        q.put_many([bytes(100_000)] * 100)
    done = []
    thread = threading.Thread(target=lambda: done.append(q.put(bytes(5), timeout=30.0)))
    thread.start()
    time.sleep(0.1)
    for _ in range(n):
        q.get(block=False).ack()
    thread.join()
    assert done
    q.put(bytes(100_000), timeout=5.0)


async def put_all_over_asyncio(path, bodies, **how):
    async with weclaw.AsyncQueue(path) as q:
        for body in bodies:
            await q.put(body, **how)


async def put_all_in_transactions(path, bodies):
    async with weclaw.AsyncQueue(path) as q:
        for body in bodies:
            async with q.transaction(block=False) as tx:
                tx.put(body)


async def put_all_over_aio(path, bodies):
    q = aio.Queue(path=path)
    for body in bodies:
        await asyncio.wait_for(q.put(body), 30)
    q.close()


def put_many_at_once(path, bodies):
    with weclaw.Queue(path) as q:
        q.put_many(bodies, block=False)


def put_all_now(path, bodies, module):
    q = module.Queue(path=path)
    for body in bodies:
        q.put_nowait(body)
    q.close()


@pytest.mark.parametrize(
    "put_all",
    [
        put_many_at_once,
        lambda path, bodies: asyncio.run(put_all_over_asyncio(path, bodies, timeout=30)),
        lambda path, bodies: asyncio.run(put_all_over_asyncio(path, bodies, block=False)),
        lambda path, bodies: asyncio.run(put_all_in_transactions(path, bodies)),
        lambda path, bodies: asyncio.run(put_all_over_aio(path, bodies)),
        lambda path, bodies: put_all_now(path, bodies, aio),
        lambda path, bodies: put_all_now(path, bodies, threads),
    ],
    ids=["Queue", "waits", "at once", "transaction", "aio", "aio nowait", "threads nowait"],
)
def test_what_is_settled_makes_room_whatever_its_retention(path, open_queue, put_all):
    """At `max_bytes` the settled messages go before a put waits or is refused."""
    q = open_queue(max_bytes=1 << 20, segment_bytes=65536, flush="os")
    bodies = [bytes(20_000)] * 15
    with pytest.raises(weclaw.Full):
        while q.qsize() < 100:
            q.put(bodies[0], block=False)
    for msg in q.get_many(100):
        msg.ack()
    put_all(path, bodies)
    assert q.qsize() == 15


def test_those_who_wait_for_bytes_are_let_in_in_order(path, open_queue):
    """Room is made for the first of them, and no other comes before it."""
    q = open_queue(max_bytes=1 << 20, segment_bytes=65536, flush="os")
    q.put_many([bytes(20_000)] * 35)
    held = q.get_many(100)

    async def main():
        async with weclaw.AsyncQueue(path) as aq:
            puts = [asyncio.ensure_future(aq.put([n, bytes(300_000)])) for n in range(2)]
            await asyncio.sleep(0.2)
            assert not any(put.done() for put in puts)
            for msg in held:
                msg.ack()
            await asyncio.wait_for(asyncio.gather(*puts), 30)

    asyncio.run(main())
    assert [body[0] for body in drain(q)] == [0, 1]


def test_cancel(q):
    """Cancelled, a message is gone from every group; unknown, held or settled ones stay."""
    ready, delayed, held, done = (
        q.put("ready"),
        q.put("delayed", delay=60.0),
        q.put("held", priority=9),
        q.put("done", priority=9),
    )
    assert q.get().id == held
    q.get().ack()
    assert q.cancel(ready) is True
    assert q.cancel(delayed) is True
    assert q.cancel(ready) is False
    assert q.cancel("no such id") is False
    assert q.cancel(held) is False
    assert q.cancel(done) is False
    assert [q.status(x) for x in (ready, delayed, held, done)] == [
        "unknown",
        "unknown",
        "leased",
        "done",
    ]
    assert take(q) == []
    assert q.qsize() == 0


def test_cancel_in_the_middle_survives_reopening(open_queue):
    """Cancelled in the middle of a backlog, before and after a reopening."""
    q = open_queue()
    ids = q.put_many(list(range(20)))
    assert all(q.cancel(ids[n]) for n in (0, 5, 6, 19))
    assert q.qsize() == 16
    q.close()
    q = open_queue()
    assert q.qsize() == 16
    assert q.cancel(ids[7])
    assert drain(q) == [n for n in range(20) if n not in (0, 5, 6, 7, 19)]


def test_cancel_is_for_all_groups_or_none(open_store):
    """What one group holds or has settled can't be cancelled; else it leaves all groups."""
    store = open_store()
    one = store.queue(group="one", start="earliest")
    two = store.queue(group="two", start="earliest")
    a, b, c = one.put_many(["a", "b", "c"])
    one.get().ack()
    two.get()
    assert two.cancel(a) is False
    two.get().release()
    assert one.cancel(c) is True
    assert one.cancel(b) is True
    assert (one.qsize(), two.qsize()) == (0, 0)
    assert two.status(a) == "leased"


class Reversed:
    """A codec of one's own."""

    def encode(self, body):
        return body.encode()[::-1]

    def decode(self, data):
        return bytes(data)[::-1].decode()


def test_each_message_remembers_its_codec(open_queue):
    """Any handle reads what any other wrote; an object's own only where it was given."""
    plain = open_queue()
    plain.put({"m": 1})
    open_queue(codec="json").put({"j": [1, None, "x"]})
    open_queue(codec="raw").put(b"raw")
    open_queue(codec=Reversed()).put("own")
    messages = take(plain)
    assert [m.body for m in messages[:3]] == [{"m": 1}, {"j": [1, None, "x"]}, b"raw"]
    with pytest.raises(weclaw.SerializationError):
        messages[3].body
    messages[3].release()
    own = open_queue(codec=Reversed())
    msg = own.get(block=False)
    assert msg.body == "own"
    msg.ack()


def test_pickle_only_where_it_was_asked_for(open_queue):
    """A pickled body is loaded by a handle that asked for pickle, and by no other."""
    asked = open_queue(codec="pickle")
    asked.put({1, 2})
    plain = open_queue()
    msg = plain.get(block=False)
    with pytest.raises(weclaw.SerializationError):
        msg.body
    msg.release()
    msg = asked.get(block=False)
    assert msg.body == {1, 2}
    msg.ack()


@pytest.mark.parametrize("codec", ["msgpack", "pickle"])
def test_who_is_refused_is_not_told_to_do_what_would_not_help(open_queue, codec):
    """Another codec is advised for a body; headers and results are msgpack with any."""
    q = open_queue(codec=codec)
    if codec == "msgpack":
        with pytest.raises(weclaw.SerializationError, match="pickle"):
            q.put({"a": {1}})
    with pytest.raises(weclaw.SerializationError, match="give what it is made of") as headers:
        q.put("x", headers={"a": {1}})
    q.put("x")
    msg = q.get(block=False)
    with pytest.raises(weclaw.SerializationError, match="give what it is made of") as result:
        msg.ack(result={1})
    assert "pickle" not in f"{headers.value} {result.value}"
    msg.ack()


@pytest.mark.parametrize("codec", ["msgpack", "json", "raw", "pickle"])
def test_a_put_given_as_a_body_is_told_where_it_belongs(open_queue, codec):
    """Whoever takes `put` and `put_many` for each other is told, with any codec."""
    q = open_queue(codec=codec)
    wrong = weclaw.Put(b"x", key="k")
    for put in (q.put, q.put_nowait, lambda put: q.put_many([weclaw.Put(put)])):
        with pytest.raises(weclaw.SerializationError, match="put_many"):
            put(wrong)
    with q.transaction() as tx, pytest.raises(weclaw.SerializationError, match="put_many"):
        tx.put(wrong)

    async def over_asyncio():
        async with weclaw.AsyncQueue(q._store.path) as there:
            with pytest.raises(weclaw.SerializationError, match="put_many"):
                await there.put(wrong)
            with pytest.raises(TypeError, match="put_many takes several bodies, not one int"):
                await there.put_many(5)

    asyncio.run(over_asyncio())
    with pytest.raises(TypeError, match="put_many takes several bodies, not one int"):
        q.put_many(5)
    assert q.qsize() == 0


def test_an_undecodable_body_stops_nothing(open_queue):
    """What can't be decoded is delivered, says so, and is settled like any other."""
    open_queue(codec=Reversed()).put("own")
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    q.put("behind")
    msg = q.get(block=False)
    assert msg.id
    with pytest.raises(weclaw.SerializationError):
        msg.body
    with pytest.raises(weclaw.SerializationError), msg:
        msg["key"]
    assert q.stats().dead == 1
    assert drain(q) == ["behind"]
    assert len(list(q.dlq)) == 1


@pytest.mark.parametrize(
    ("codec", "bad"),
    [
        ("json", b"bytes"),
        ("json", {1: 2}),
        ("json", (1, 2)),
        ("json", {1}),
        ("raw", "text"),
        ("raw", {"a": 1}),
        ("pickle", lambda: None),
    ],
)
def test_other_codecs_refuse_what_does_not_come_back_equal(open_queue, codec, bad):
    """With other codecs too a body comes back equal or is refused."""
    q = open_queue(codec=codec)
    with pytest.raises(weclaw.SerializationError):
        q.put(bad)
    assert q.qsize() == 0


def test_bytes_that_change_after_put_change_nothing(q):
    """What was put is a copy: the caller may go on with its objects."""
    body = {"list": [1, 2]}
    q.put(body)
    body["list"].append(3)
    assert q.get().body == {"list": [1, 2]}


def test_puts_of_threads_share_what_they_wait_for(q):
    """Eight threads that put at once all return, and all of it is there."""

    def put(name):
        for n in range(40):
            q.put([name, n])

    threads = [threading.Thread(target=put, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bodies = drain(q)
    assert len(bodies) == 320
    for name in range(8):
        assert [b[1] for b in bodies if b[0] == name] == list(range(40))


def test_batch_is_synced_in_time_without_being_asked(path, open_queue):
    """With flush "batch" others see a put at once."""
    q = open_queue(flush="batch", flush_interval_ms=50, flush_messages=3)
    other = open_queue(flush="sync")
    q.put("x")
    assert eventually(lambda: other.qsize() == 1)
    assert drain(other) == ["x"]


@pytest.mark.parametrize("way", ["put", "put_many", "transaction", "threads", "aio", "aio tx"])
def test_batch_leaves_fewer_unsynced_than_flush_messages(path, monkeypatch, way):
    """Whoever has put the last of so many messages returns when the disk has kept up with them."""
    under_way, let_go = threading.Event(), threading.Event()
    sync = _files.sync_data

    def held(fd):
        under_way.set()
        assert let_go.wait(60.0)
        sync(fd)

    how = {"flush": "batch", "flush_interval_ms": 600_000, "flush_messages": 6}
    n_at_once = 4 if way == "put_many" else 1
    returned = []

    def put_all():
        if way.startswith("aio"):
            asyncio.run(put_in_a_loop())
            return
        q = threads.Queue(path=path, **how) if way == "threads" else weclaw.Queue(path, **how)
        monkeypatch.setattr(_files, "sync_data", held)
        for n in range(12):
            if way == "put_many":
                q.put_many([n] * n_at_once)
            elif way == "transaction":
                with q.transaction() as tx:
                    tx.put(n)
            else:
                q.put(n)
            returned.append(n)
        q.close()

    async def put_in_a_loop():
        async with weclaw.AsyncQueue(path, **how) as q:
            monkeypatch.setattr(_files, "sync_data", held)
            for n in range(12):
                if way == "aio":
                    await q.put(n)
                else:
                    async with q.transaction() as tx:
                        tx.put(n)
                returned.append(n)

    putting = threading.Thread(target=put_all)
    putting.start()
    try:
        assert under_way.wait(60.0)
        assert eventually(lambda: len(returned) * n_at_once >= 4)
        time.sleep(0.2)  # to go on, if anybody would
        assert len(returned) * n_at_once < 6
    finally:
        let_go.set()
        putting.join(60.0)
    assert len(returned) == 12


def test_what_is_behind_anothers_unsynced_put_is_there_with_its_sync(open_queue, monkeypatch):
    """Where handles flush in different ways, a put that has returned may have to wait for another's
    sync: until then `get` says Empty or waits, and then gives all in order.
    """
    q = open_queue()
    under_way, let_go = threading.Event(), threading.Event()
    sync = _files.sync_data

    def held(fd):
        under_way.set()
        assert let_go.wait(60.0)
        sync(fd)

    monkeypatch.setattr(_files, "sync_data", held)
    before = threading.Thread(target=q.put, args=("before",))
    before.start()
    assert under_way.wait(60.0)
    written = open_queue(flush="os")
    written.put("behind")
    assert written.qsize() == 2
    with pytest.raises(weclaw.Empty):
        written.get(block=False)
    got = []
    waits = threading.Thread(target=lambda: got.extend(written.get().body for _ in range(2)))
    waits.start()
    let_go.set()
    waits.join(60.0)
    before.join(60.0)
    assert got == ["before", "behind"]


@pytest.mark.parametrize(
    ("flush", "size", "expected"),
    [("sync", 1000, ["begin", "sync"]), ("sync", 10, ["sync"]), ("batch", 1000, [])],
)
def test_the_disk_begins_with_a_long_put_before_its_sync(
    open_queue, monkeypatch, flush, size, expected
):
    """What a long put still has to do is done while the disk works; a short one asks for nothing,
    and neither does one that waits for no disk.
    """
    q = open_queue(flush=flush, flush_interval_ms=600_000)
    q.put("first")
    calls = []
    begin, sync = _files.begin_sync, _files.sync_data
    with monkeypatch.context() as patch:
        patch.setattr(_files, "begin_sync", lambda fd: (calls.append("begin"), begin(fd)))
        patch.setattr(_files, "sync_data", lambda fd: (calls.append("sync"), sync(fd)))
        ids = q.put_many([bytes([n]) * size for n in range(50)])
    assert calls == expected
    assert q.get().body == "first"
    assert [msg.id for msg in q.get_many(50)] == ids


@pytest.mark.parametrize("how", ["put", "ack", "nack", "transaction", "cancel", "pause"])
def test_batch_forces_to_disk_whatever_was_written(open_queue, monkeypatch, how):
    """With flush "batch" settling and steering reach the disk within the interval, as puts do."""
    first, _ = open_queue().put_many(["a", "b"])
    q = open_queue(flush="batch", flush_interval_ms=50)
    msg = q.get()
    synced = threading.Event()
    sync = _files.sync_data

    def noted(fd):
        sync(fd)
        synced.set()

    monkeypatch.setattr(_files, "sync_data", noted)
    if how == "transaction":
        with q.transaction() as tx:
            tx.ack(msg)
    else:
        {
            "put": lambda: q.put("c"),
            "ack": msg.ack,
            "nack": msg.nack,
            "cancel": lambda: q.cancel(q.peek()[0].id),
            "pause": lambda: q.pause(60),
        }[how]()
    assert first == msg.id
    assert synced.wait(10.0)


def test_batch_is_forced_to_disk_within_the_interval_of_each_handle(open_queue):
    """Also where one that may wait longer has put before, or was opened before."""
    slow = open_queue(flush="batch", flush_interval_ms=3_600_000)
    engine = slow._store._engine
    slow.put("slow")
    quick = open_queue(topic="other", flush="batch", flush_interval_ms=20)
    for _ in range(2):
        slow.put("slow")
        quick.put("quick")
        tail = engine.page.words[TAIL]
        eventually(lambda tail=tail: engine.is_durable(tail))


def test_batch_forces_to_disk_what_is_put_while_a_flush_is_under_way(open_queue, monkeypatch):
    """That one does not reach so far: the next is made within the interval, too."""
    q = open_queue(flush="batch", flush_interval_ms=50, flush_messages=6)
    under_way, let_go = threading.Event(), threading.Event()
    last, synced = threading.Event(), threading.Event()
    sync = _files.sync_data

    def held(fd):
        covers = last.is_set()  # it began when all was written
        under_way.set()
        assert let_go.wait(60.0)
        sync(fd)
        if covers:
            synced.set()

    monkeypatch.setattr(_files, "sync_data", held)
    q.put_many([1, 2, 3])  # half as many: it is begun
    assert under_way.wait(10.0)
    q.put("the last one")
    last.set()
    let_go.set()
    assert synced.wait(10.0)


def test_an_id_the_library_made_is_put_once_too(open_store):
    """Putting under the id of a message that is kept stores nothing, whoever made the id."""
    store = open_store()
    q = store.queue()
    made, gone = q.put_many(["first", "gone"])
    assert q.put("again", id=made) == made
    assert q.put_many([weclaw.Put("again", id=made)]) == [made]
    with q.transaction() as tx:
        tx.put("again", id=made)
    assert q.qsize() == 2
    assert q.cancel(gone)
    assert q.put("new under the old id", id=gone) == gone
    assert q.put("once", id=gone) == gone
    assert drain(q) == ["first", "new under the old id"]
    assert q.put("settled and retained", id=made) == made
    assert drain(q) == []
    assert store.queue("another topic").put("its own", id=made) == made
    assert store.queue("another topic").qsize() == 1


def test_headers_have_the_limit_of_a_message(open_queue):
    """Headers that are larger than a message may be are refused like one, nothing written."""
    q = open_queue(max_message_bytes=1000)
    q.put("fits", headers={"h": "x" * 900})
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put("x", headers={"h": "x" * 1000})
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put_many(["a", weclaw.Put("x", headers={"h": "x" * 1000})])
    assert drain(q) == ["fits"]


def test_a_result_may_be_larger_than_a_message(open_queue):
    """What was done can be acked with its result, however small messages have to be."""
    q = open_queue(max_message_bytes=1000)
    task = q.put("x")
    q.get().ack(result="x" * 2**21)
    assert q.result(task) == "x" * 2**21


def test_a_result_has_its_own_limit(open_queue, monkeypatch):
    """What no frame could hold is refused in plain words, and the message is still held."""
    monkeypatch.setattr(_message, "MAX_RESULT_BYTES", 1000)
    q = open_queue()
    task = q.put("x")
    msg = q.get()
    with pytest.raises(weclaw.SerializationError, match="more than 1000"):
        msg.ack(result="x" * 1000)
    with pytest.raises(weclaw.SerializationError, match="more than 1000"), q.transaction() as tx:
        tx.ack(msg, result="x" * 1000)
    assert q.status(task) == "leased"
    msg.ack(result="x" * 900)
    assert q.result(task) == "x" * 900
