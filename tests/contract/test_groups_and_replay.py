"""Contract 5: groups, replay, retention."""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
import threading
import time

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, disk_bytes, drain, eventually, scratch, take

import weclaw_embedded as weclaw
from weclaw_embedded import _queries

UTC = datetime.timezone.utc


def names(store):
    return sorted(g[:2] for g in store.groups())


def test_a_group_exists_from_its_first_get(open_store):
    """Opening and putting make no group; the first `get` does, though it finds nothing."""
    store = open_store()
    q = store.queue()
    q.put_many(["a", "b"])
    assert names(store) == []
    assert q.qsize() == 2
    assert q.stats().ready == 2
    assert [m.body for m in q.peek(5)] == ["a", "b"]
    assert names(store) == []
    q.get().ack()
    assert names(store) == [("default", "default")]
    other = store.queue("empty", group="g")
    with pytest.raises(weclaw.Empty):
        other.get(block=False)
    assert names(store) == [("default", "default"), ("empty", "g")]


@pytest.mark.parametrize("how", ["start", "pause", "purge", "replay"])
def test_what_else_makes_a_group(open_store, how):
    """An explicit `start`, `pause`, `purge` or `replay` makes a group too."""
    store = open_store()
    store.queue().put("x")
    if how == "start":
        store.queue(group="g", start="earliest")
    else:
        q = store.queue(group="g")
        assert names(store) == []
        {
            "pause": lambda: q.pause(60),
            "purge": q.purge,
            "replay": lambda: q.replay(offset="earliest"),
        }[how]()
    assert ("default", "g") in names(store)
    # What exists gets its messages, whoever else reads.
    assert drain(store.queue()) == ["x"]
    assert store.queue(group="g").qsize() == (0 if how == "purge" else 1)


def test_each_group_gets_every_message_and_consumers_share(open_store):
    """Each group gets every message; within a group two consumers share them."""
    store = open_store()
    one = [store.queue(group="one", start="earliest") for _ in range(2)]
    two = store.queue(group="two", start="earliest")
    one[0].put_many(list(range(6)))
    got = [one[n % 2].get() for n in range(6)]
    assert [m.body for m in got] == list(range(6))
    assert drain(two) == list(range(6))
    assert one[0].stats().leased == 6
    for msg in got:
        msg.fail("bad")
    assert len(one[0].dlq) == 6
    assert len(two.dlq) == 0
    assert [two.status(m.id) for m in got] == ["done"] * 6
    assert one[0].dlq.redrive() == 6
    assert two.qsize() == 0


def test_settling_is_each_groups_own(open_store):
    """Results, retries and counts are each group's own."""
    store = open_store()
    one = store.queue(group="one", start="earliest", retry=NO_WAIT)
    two = store.queue(group="two", start="earliest")
    task = one.put("x")
    one.get().nack()
    one.get().ack(result=1)
    assert one.result(task) == 1
    with pytest.raises(weclaw.Empty):
        two.result(task)
    msg = two.get()
    assert (msg.retry_count, msg.delivery_count) == (0, 1)
    msg.ack(result=2)
    assert (one.result(task), two.result(task)) == (1, 2)


def test_a_topic_nobody_read_gives_all_to_its_first_group(open_store):
    """A topic no group has read keeps everything, whatever the retention."""
    store = open_store(retention=0, segment_bytes=65536)
    q = store.queue()
    bodies = [bytes([n]) * 10_000 for n in range(50)]
    for body in bodies:
        q.put(body)
    assert drain(store.queue(group="late")) == bodies


def test_start_latest_with_the_first_get(open_store):
    """With start "latest" a group begins behind what is there."""
    store = open_store()
    q = store.queue()
    q.put("old")
    latest = store.queue(group="new", start="latest")
    assert latest.qsize() == 0
    q.put("new")
    assert drain(latest) == ["new"]
    assert drain(q) == ["old", "new"]


def test_a_group_that_began_later_does_not_stand_in_the_way_of_cancel(open_store):
    """A "latest" group neither holds nor settled what lay before it: it can be cancelled."""
    store = open_store()
    q = store.queue(start="earliest")
    task = q.put("old")
    store.queue(group="new", start="latest")
    assert q.cancel(task) is True
    assert q.status(task) == "unknown"
    assert take(q) == []


@pytest.mark.parametrize("look", ["stats", "peek", "offset", "status"])
def test_looking_before_a_group_exists_brings_nothing_cancelled_back(open_store, look):
    """Who looks before the first get changes nothing of what that get gives."""
    store = open_store()
    q = store.queue()
    gone, stays = q.put_many(["gone", "stays"])
    urgent = q.put("urgent and gone", priority=5)
    for task in (gone, urgent):
        assert q.cancel(task)
        {
            "stats": q.stats,
            "peek": q.peek,
            "offset": lambda: q.offset,
            "status": lambda: q.status(stays),
        }[look]()
    assert drain(q) == ["stays"]
    assert drain(store.queue(group="later")) == ["stays"]


def test_one_that_a_group_purged_can_be_cancelled_for_the_others(open_store):
    """A group that purged a message neither holds nor settled it; purged by all it is unknown."""
    store = open_store()
    one = store.queue(group="one", start="earliest")
    two = store.queue(group="two", start="earliest")
    task, again = one.put_many(["a", "b"])
    one.purge()
    assert one.cancel(task) is True
    assert one.cancel(task) is False
    assert [m.id for m in two.peek(5)] == [again]
    two.purge()
    assert one.cancel(again) is False


def test_an_id_purged_by_all_who_had_it_is_free_again(open_store):
    """A group that began behind a message never had it: what it would say of the id is nothing."""
    store = open_store()
    q = store.queue(start="earliest")
    q.put("first", id="mine")
    q.put("replayed", id="other")
    late = store.queue(group="late", start="latest")
    assert late.replay(ids=["other"]) == 1
    assert q.put("kept still", id="mine") == "mine"
    assert q.qsize() == 2
    q.purge()
    assert q.put("second", id="mine") == "mine"
    # One that a replay brought to it it has, and has settled it then.
    for expected in (["replayed", "second"], []):
        assert q.put("no", id="other") == "other"
        assert drain(late) == expected
    assert drain(q) == ["second"]


def test_groups_that_stand_still_keep_their_messages(open_store, path):
    """Nothing unread is dropped by age or size; `drop_group` leaves a group behind."""
    store = open_store(retention=0, segment_bytes=65536)
    q = store.queue(group="reader", start="earliest")
    store.queue(group="sleeper", start="earliest")
    bodies = [os.urandom(20_000) for _ in range(100)]
    for body in bodies:
        q.put(body)
    assert drain(q) == bodies
    time.sleep(0.2)
    assert disk_bytes(path) > 1_900_000
    assert store.queue(group="sleeper").qsize() == 100
    store.drop_group("sleeper")
    assert names(store) == [("default", "reader")]
    q.put("x")
    assert drain(q) == ["x"]
    eventually(lambda: disk_bytes(path) < 600_000, what="the space of the dropped group")
    assert drain(q) == []


def test_drop_group_names_its_topic(open_store):
    """`drop_group(name, topic=…)` drops that topic's group and no other."""
    store = open_store()
    for topic in ("a", "b"):
        store.queue(topic, group="g", start="earliest").put("x")
    store.drop_group("g", topic="a")
    assert names(store) == [("b", "g")]
    # A new group of that name is a new one.
    q = store.queue("a", group="g")
    assert q.qsize() == 1
    assert drain(q) == ["x"]


def test_replay_by_offset(q):
    """From an offset on, settled ones flow again in order, with retries and results anew."""
    ids = q.put_many(list(range(6)))
    offsets = []
    for n in range(6):
        msg = q.get()
        offsets.append(msg.offset)
        msg.ack(result=n)
    assert q.replay(offset=offsets[3]) == 3
    assert [q.status(x) for x in ids] == ["done"] * 3 + ["ready"] * 3
    with pytest.raises(weclaw.Empty):
        q.result(ids[4])
    msg = q.get()
    assert (msg.body, msg.id, msg.retry_count, msg.offset) == (3, ids[3], 0, offsets[3])
    msg.nack()
    assert q.get().retry_count == 1
    assert [m.body for m in take(q)] == [4, 5]


def test_replay_by_ids_and_since(q):
    """`ids` and `since` choose too; what is not settled is not touched."""
    ids = q.put_many(list(range(4)))
    for n in range(3):
        q.get().ack(result=n)
    assert q.replay(ids=[ids[2], ids[0], ids[3]]) == 2
    assert q.stats()[:5] == (3, 0, 0, 0, 3)
    assert drain(q) == [0, 2, 3]
    assert q.result(ids[1]) == 1
    time.sleep(0.05)
    since = datetime.datetime.now(UTC)
    time.sleep(0.05)
    later = q.put("later")
    q.get().ack()
    assert q.replay(since=since) == 1
    assert q.get().id == later
    assert q.replay(since=datetime.datetime(2001, 1, 1, tzinfo=UTC)) == 4
    assert q.replay(since=datetime.datetime.now(UTC) + datetime.timedelta(hours=1)) == 0


def test_replay_in_offset_order(open_queue):
    """Replayed ones come in offset order, before what is newer, over a reopening."""
    q = open_queue()
    q.put_many(list(range(5)))
    drain(q)
    q.put("new")
    assert q.replay(offset="earliest") == 5
    q.close()
    q = open_queue()
    assert q.qsize() == 6
    assert drain(q) == [0, 1, 2, 3, 4, "new"]
    assert q.stats().settled == 5 + 1 + 5  # acks, which never become fewer


def test_a_replayed_one_is_settled_with_a_new_result(q):
    """The old result is gone and a new one can be given."""
    task = q.put("x")
    q.get().ack(result="old")
    assert q.replay(ids=[task]) == 1
    assert q.replay(ids=[task]) == 0
    q.get().ack(result="new")
    assert q.result(task) == "new"
    assert q.replay(ids=["no such id"]) == 0


@pytest.mark.parametrize("how", ["at once", "reopened", "rebuilt", "carried"])
def test_a_replayed_one_goes_on_counting_its_deliveries(open_store, path, how):
    """`delivery_count` counts every hand-over, also those before a replay; retries begin anew."""
    store = open_store(retention=0 if how == "carried" else 3600, segment_bytes=65536)
    q = store.queue(retry=NO_WAIT)
    other = store.queue(group="other", start="earliest")
    task, once = q.put_many(["x", "once"])
    q.get().nack()
    q.get().release()
    msg = q.get()
    assert (msg.delivery_count, msg.retry_count) == (3, 1)
    msg.ack()
    q.get().ack()
    # The other group keeps both alive, dead letters that they are there.
    for msg in take(other):
        msg.fail()
    if how == "carried":
        at = other.dlq.get(task)
        for _ in range(10):
            q.put_many([os.urandom(1000)] * 60)
            drain(q)
            drain(other)
        eventually(lambda: disk_bytes(path) < 600_000)
        assert other.dlq.get(task).id == at.id
    if how != "at once":
        store.close()
        if how != "reopened":
            shutil.rmtree(scratch(path))
        store = open_store()
        q = store.queue(retry=NO_WAIT)
    assert q.replay(ids=[task, once]) == 2
    msg = q.get()
    assert (msg.id, msg.delivery_count, msg.retry_count) == (task, 4, 0)
    msg.ack()
    second = q.get()
    assert (second.id, second.delivery_count) == (once, 2)
    second.ack()
    assert q.replay(ids=[task, once]) == 2
    assert [m.delivery_count for m in take(q)] == [5, 3]


def test_a_replay_counts_what_lay_before_the_groups_beginning_from_nothing(open_store):
    """What a group never had it was never handed; each replay after that counts on."""
    store = open_store()
    task = store.queue().put("x")
    q = store.queue(group="new", start="latest")
    for count in (1, 2, 3):
        assert q.replay(ids=[task]) == 1
        assert q.stats()[:5] == (1, 0, 0, 0, count - 1)
        msg = q.get()
        assert msg.delivery_count == count
        msg.ack()
        assert q.stats().settled == count


def test_letters_stay_letters_and_the_cancelled_stay_gone(q):
    """Replay leaves dead letters, cancelled and purged ones alone."""
    q.put("dead")
    q.get().fail("bad")
    cancelled = q.put("cancelled")
    q.cancel(cancelled)
    q.put("purged")
    q.purge()
    q.put("done")
    q.get().ack()
    assert q.replay(offset="earliest") == 1
    assert drain(q) == ["done"]
    assert len(q.dlq) == 1


def test_replay_is_one_groups(open_store):
    """A replay is this group's alone."""
    store = open_store()
    one = store.queue(group="one", start="earliest")
    two = store.queue(group="two", start="earliest")
    one.put_many([1, 2])
    drain(one), drain(two)
    assert one.replay(offset="earliest") == 2
    assert two.qsize() == 0
    assert drain(one) == [1, 2]


def test_replay_keeps_keys_in_order(q):
    """Replayed messages of one key come one at a time, in order."""
    for n in range(3):
        q.put(n, key="k")
        q.get().ack()
    assert q.replay(offset="earliest") == 3
    assert [m.body for m in take(q)] == [0]
    assert q.stats()[:3] == (0, 2, 1)


def test_ttl_counts_anew_at_replay(q):
    """The ttl counts from the replay."""
    task = q.put("x", ttl=0.3)
    q.get().ack()
    time.sleep(0.4)
    assert q.replay(ids=[task]) == 1
    assert q.status(task) == "ready"
    time.sleep(0.4)
    assert q.status(task) == "dead"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"offset": -1},
        {"offset": "x"},
        {"offset": 0, "ids": ["x"]},
        {"since": datetime.datetime(2026, 1, 1)},  # noqa: DTZ001
        {"since": 5},
        {"ids": "one text"},
    ],
    ids=str,
)
def test_bad_arguments_of_replay(q, arguments):
    """A replay says from where, once and clearly."""
    q.put("x")
    q.get().ack()
    with pytest.raises((ValueError, TypeError)):
        q.replay(**arguments)
    assert q.qsize() == 0


def test_offset_says_before_what_all_is_settled(q):
    """Everything before `q.offset` is settled in this group, and no more than that is said."""
    q.put_many(list(range(5)))
    messages = take(q)
    offsets = [m.offset for m in messages]
    assert offsets == sorted(set(offsets))
    assert q.offset <= offsets[0]
    messages[1].ack()
    assert q.offset <= offsets[0]
    messages[0].ack()
    assert offsets[1] < q.offset <= offsets[2]
    for msg in messages[2:]:
        msg.ack()
    assert q.offset > offsets[4]


def test_retention_by_age(open_queue, path):
    """What all groups are done with is kept for `retention`, then its space is used again."""
    q = open_queue(retention=3.0, segment_bytes=65536)
    first = q.put("first")
    q.get().ack(result="kept")
    for _ in range(40):
        q.put(os.urandom(20_000))
    drain(q)
    assert q.result(first) == "kept"
    assert disk_bytes(path) > 800_000
    time.sleep(3.1)
    # Something still happens in the file, but no call asks for the space.
    q.put("x")
    q.get().ack()
    eventually(lambda: disk_bytes(path) < 500_000)
    assert q.status(first) == "unknown"


def test_retention_by_bytes(open_queue, path):
    """`retention_bytes` bounds what is kept of the settled."""
    q = open_queue(retention=3600, retention_bytes=500_000, segment_bytes=65536)
    for _ in range(150):
        q.put(os.urandom(20_000))
        q.get().ack()
    eventually(lambda: disk_bytes(path) < 1_200_000)
    assert q.replay(offset="earliest") >= 15


def test_caller_given_ids_are_kept_as_long_as_their_message(open_queue):
    """With retention over, an id put long ago is free again; a live one never is."""
    q = open_queue(retention=0, segment_bytes=65536)
    q.put("waits", id="live", delay=3600)
    q.put("x", id="settled")
    q.get().ack()
    for _ in range(10):
        q.put_many([os.urandom(1000)] * 60)
        drain(q)
    eventually(lambda: q.status("settled") == "unknown")
    assert q.status("live") == "delayed"
    assert q.put("again", id="live") == "live"
    assert q.stats()[:2] == (0, 1)
    assert q.put("new", id="settled") == "settled"
    assert drain(q) == ["new"]


def test_survivors_of_a_freed_segment_keep_everything(open_store, path, hours_later):
    """What is carried to the end of the log keeps its id, place, history and content."""
    store = open_store(retention=0, segment_bytes=65536)
    q = store.queue(retry=weclaw.RetryPolicy(backoff=3600), visibility_timeout=None)
    other = store.queue(group="g", start="earliest")
    q.put("delayed", id="d", delay=3600, headers={"h": 1}, priority=3)
    q.put("keyed 1", id="k1", key="k")
    q.put("keyed 2", id="k2", key="k")
    q.put("retried", id="r")
    q.put("dead", id="x", headers={"h": 2})
    q.put("held", id="held")
    for msg in q.get_many(4):
        if msg.id == "r":
            msg.nack(reason="later")
        elif msg.id == "x":
            msg.fail("bad")
        elif msg.id == "held":
            held = msg
        else:
            keyed = msg
    offset = held.offset
    drain(other)
    q.pause(0.01)
    for _ in range(20):
        other.put_many([os.urandom(1000)] * 60)
        drain(q)
        drain(other)
    eventually(lambda: disk_bytes(path) < 700_000)
    store.close()

    store = open_store()
    q = store.queue(retry=NO_WAIT)
    statuses = {x: q.status(x) for x in ("d", "k1", "k2", "r", "x", "held")}
    assert statuses == {
        "d": "delayed",
        "k1": "ready",
        "k2": "delayed",
        "r": "delayed",
        "x": "dead",
        "held": "ready",
    }
    letter = q.dlq.get("x")
    assert (letter.body, letter.headers, letter.reason) == ("dead", {"h": 2}, "bad")
    assert len(letter.failures) == 1
    first = q.get(block=False)
    second = q.get(block=False)
    assert [first.id, second.id] == ["k1", "held"]
    assert second.offset == offset
    assert second.delivery_count == 2
    assert keyed.id == "k1"
    first.ack(result=1)
    assert q.get(block=False).body == "keyed 2"
    assert q.result("k1") == 1
    second.ack()
    store.close()
    hours_later(2)
    q = open_store().queue(retry=NO_WAIT)
    messages = {m.id: m for m in take(q)}
    delayed = messages["d"]
    assert (delayed.body, delayed.headers, delayed.priority) == ("delayed", {"h": 1}, 3)
    assert (messages["r"].body, messages["r"].retry_count) == ("retried", 1)


def test_a_key_blocked_delays_no_other(open_queue):
    """Ten thousand keys, one of them blocked: all others flow."""
    q = open_queue(flush="os")
    q.put("blocks", key="bad", delay=60)
    q.put_many([weclaw.Put(n, key=f"key {n % 5000}") for n in range(10_000)])
    q.put_many([weclaw.Put("behind", key="bad") for _ in range(100)])
    seen = 0
    while True:
        try:
            batch = q.get_many(1000, block=False)
        except weclaw.Empty:
            break
        seen += len(batch)
        with q.transaction() as tx:
            for msg in batch:
                tx.ack(msg)
    assert seen == 10_000
    assert q.stats()[:3] == (0, 101, 0)


def read_group(pipe, path, group):
    q = weclaw.Queue(path, group=group)
    got = []
    while True:
        try:
            msg = q.get(timeout=1.0)
        except weclaw.Empty:
            break
        got.append(msg.body)
        msg.ack()
    pipe.send(got)
    q.close()


def test_groups_in_several_processes(path, open_queue):
    """Two groups of two processes each, and a producer: each group has each message once."""
    q = open_queue()
    children = [Child(read_group, path, group) for group in ("a", "a", "b", "b")]
    try:
        threads = [
            threading.Thread(target=lambda k=k: [q.put([k, n]) for n in range(100)])
            for k in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        got = [child.hear() for child in children]
        for child in children:
            child.end()
    finally:
        for child in children:
            child.close()
    wanted = sorted([k, n] for k in range(3) for n in range(100))
    assert sorted(got[0] + got[1]) == wanted
    assert sorted(got[2] + got[3]) == wanted


def test_what_was_cancelled_before_anybody_read_is_in_no_group(tmp_path):
    """A look at a topic that nobody has read yet changes nothing of what its groups will get."""
    with weclaw.Queue(tmp_path / "q.wq") as q:
        cancelled, kept = q.put_many(["cancelled", "kept"])
        assert q.cancel(cancelled)
        assert [msg.id for msg in q.peek(9)] == [kept]
        assert q.stats().oldest_age_s > 0
        with weclaw.Queue(tmp_path / "q.wq", group="other") as other:
            for group in (q, other):
                assert group.get(block=False).id == kept
                assert group.qsize() == 0
                with pytest.raises(weclaw.Empty):
                    group.get(block=False)


def test_a_handle_shows_what_its_group_would_get(open_store):
    """Until a group exists a handle shows what it would get, by its `start`; looking makes none."""
    open_store().queue().put_many(["a", "b", "c"])
    second = open_store().queue().peek(3)[1].offset
    for readonly in (True, False):
        store = open_store(readonly=readonly)
        for start, bodies in (("earliest", ["a", "b", "c"]), ("latest", []), (second, ["b", "c"])):
            if not readonly:
                store.queue(group="g", start=start)  # begins it
                store.drop_group("g")
            q = store.queue(group="g", start=start) if readonly else looker(store, start)
            assert [m.body for m in q.peek(5)] == bodies
            assert (q.qsize(), q.empty()) == (len(bodies), not bodies)
            assert q.stats()[:5] == (len(bodies), 0, 0, 0, 0)
            assert (q.stats().oldest_age_s > 0) is bool(bodies)
            assert q.join(timeout=0.0) is not bool(bodies)
            assert names(store) == []
            if not readonly:
                assert drain(q) == bodies
                store.drop_group("g")


def looker(store, start):
    """A handle whose group was dropped after it was opened."""
    q = store.queue(group="g", start=start)
    store.drop_group("g")
    return q


def test_a_latest_group_that_does_not_exist_has_room(open_store):
    """`maxsize` counts what the handle's group would get: from the latest on nothing yet."""
    store = open_store()
    store.queue().put_many(["a", "b"])
    q = store.queue(group="g", start="latest", maxsize=1)
    store.drop_group("g")
    q.put("c", block=False)
    assert q.qsize() == 0
    assert not q.full()


def test_what_ran_out_before_a_group_began_is_shown_and_begins_none(open_store):
    """An expired message of an unread topic is a dead letter to every look, and makes no group."""
    store = open_store()
    q = store.queue(maxsize=3)
    head = q.put("head", ttl=0.2, key="k")
    q.put("next", key="k")
    task = q.put("x", ttl=0.2)
    assert q.stats()[:4] == (2, 1, 0, 0)
    time.sleep(0.3)
    for _ in range(2):
        assert q.stats()[:4] == (1, 0, 0, 2)
        assert [m.body for m in q.peek(5)] == ["next"]
        assert [x.id for x in q.dlq] == [head, task]
        assert (len(q.dlq), q.qsize()) == (2, 1)
        assert q.dlq.get(task).reason == "expired"
        assert q.status(task) == "dead"
        with pytest.raises(weclaw.DeadLetterError):
            q.result(task)
        assert names(store) == []
    q.put_many(["room", "for two"], block=False)
    with pytest.raises(weclaw.Full):
        q.put("more", block=False)
    assert names(store) == []
    # It may be settled like any letter; that begins the group.
    assert q.dlq.redrive([head]) == 1
    assert names(store) == [("default", "default")]
    assert q.dlq.purge([task]) == 1
    assert q.stats()[:4] == (3, 1, 0, 0)


def test_looking_ahead_does_not_disturb_what_is_done_in_the_same_turn(path):
    """Tasks that ask for results while others put: what one only imagined is dropped, no more."""

    async def main():
        async with weclaw.AsyncQueue(path, group="none yet") as q:
            task = await q.put("x", ttl=0.05)
            await asyncio.sleep(0.1)

            async def ask():
                with pytest.raises(weclaw.DeadLetterError):
                    await q.result(task, timeout=5.0)

            await asyncio.gather(
                *(q.put(n, id=f"{n}") for n in range(50)), *(ask() for _ in range(50))
            )
            assert await q.qsize() == 50
            bodies = [m.body for m in await q.peek(100)]
            assert sorted(bodies) == list(range(50))

    asyncio.run(main())


def test_purge_and_cancel_judge_what_ended_by_itself_first(open_store):
    """A lease that ran out holds nothing; what expired is a dead letter and is not purged."""
    store = open_store()
    q = store.queue(retry=weclaw.RetryPolicy(backoff=60.0))
    a, b = q.put_many(["a", "b"])
    q.get(visibility_timeout=0.1)
    q.get(visibility_timeout=0.1)
    time.sleep(0.2)
    assert q.cancel(a) is True
    assert q.purge() == 1
    assert q.status(b) == "unknown"
    task = q.put("x", ttl=0.1)
    time.sleep(0.2)
    assert q.purge() == 0
    assert q.status(task) == "dead"


@pytest.mark.parametrize("how", ["earliest", "since"])
def test_what_another_group_keeps_can_be_replayed_from_the_earliest(open_store, path, how):
    """One whose segment was freed is kept while a group needs it, and flows again with all."""
    store = open_store(retention=0, segment_bytes=65536)
    q = store.queue(start="earliest")
    other = store.queue(group="other", start="earliest")
    before = datetime.datetime.now(UTC)
    old = q.put("old", key="k", priority=3)
    q.get().ack(result=1)
    other.get().fail("keeps it")
    for _ in range(10):
        q.put_many([os.urandom(1000)] * 60)
        drain(q)
        drain(other)
    eventually(lambda: disk_bytes(path) < 600_000)
    new = q.put("new")
    q.get().ack()
    given = {"offset": "earliest"} if how == "earliest" else {"since": before}
    kept = q.replay(**given)
    assert kept >= 2
    msg = q.get()
    assert (msg.id, msg.body, msg.key, msg.priority, msg.delivery_count) == (old, "old", "k", 3, 2)
    assert q.status(new) == "ready"
    assert q.qsize() == kept - 1
    assert q.replay(**given) == 0


def test_a_replay_that_is_refused_begins_no_group(open_store):
    """Bad arguments and an offset that is kept no more change nothing."""
    store = open_store(retention=0, segment_bytes=65536)
    q = store.queue()
    for _ in range(5):
        q.put_many([os.urandom(1000)] * 60)
        drain(q)
    late = store.queue(group="late")

    def trimmed():
        with pytest.raises(weclaw.OffsetTrimmedError) as caught:
            late.replay(offset=0)
        return caught.value.first_offset > 0

    q.put("x")
    drain(q)
    eventually(lambda: store.queue().offset and disk_bytes(store.path) < 300_000)
    assert trimmed()
    assert ("default", "late") not in names(store)


def hold_and_settle(pipe, path):
    q = weclaw.Queue(path)
    msg = q.get()
    second = q.get()
    pipe.send((msg.id, second.id))
    pipe.recv()
    told = []
    for settle in (msg.ack, second.nack, second.extend):
        try:
            settle()
            told.append("done")
        except weclaw.LeaseLostError:
            told.append("lost")
    pipe.send(told)
    pipe.recv()
    q.close()


def test_who_held_messages_of_a_dropped_group_in_another_process_has_lost_them(path, open_store):
    """Their late holder is told so, and harms nobody who has them anew."""
    store = open_store()
    q = store.queue()
    ids = q.put_many(["a", "b"])
    with Child(hold_and_settle, path) as child:
        assert child.hear() == (ids[0], ids[1])
        assert store.drop_group("default")
        again = [q.get(block=False), q.get(block=False)]
        assert [m.id for m in again] == ids
        child.say("go")
        assert child.hear() == ["lost"] * 3
        again[0].ack(result="mine")
        again[1].extend(60.0)
        assert q.result(ids[0]) == "mine"
        assert q.status(ids[1]) == "leased"
        child.say("end")


@pytest.mark.parametrize("how", ["at once", "rebuilt"])
def test_a_purge_says_nothing_of_what_was_done_among_the_purged(open_queue, path, how):
    """What had been settled, or died, between the purged ones stays so, over a rebuild too."""
    q = open_queue(start="earliest")
    gone = q.put("gone")
    done, dead = q.put("done", key="k"), q.put("dead", key="l")
    q.put_many(["purged", "purged too"])
    assert q.cancel(gone)
    q.get().ack(result=1)
    q.get().fail("bad")
    assert q.purge() == 2
    if how == "rebuilt":
        q.close()
        shutil.rmtree(scratch(path))
        q = open_queue()
    assert [q.status(x) for x in (gone, done, dead)] == ["unknown", "done", "dead"]
    assert q.result(done) == 1
    assert q.stats()[:5] == (0, 0, 0, 1, 1)
    assert q.replay(offset="earliest") == 1
    assert q.get().id == done


def test_what_is_counted_never_goes_down(open_queue):
    """Settled are acks, retries the failures that are tried again: neither becomes fewer."""
    q = open_queue(retry=NO_WAIT)
    ids = q.put_many(list(range(10)))
    for msg in q.get_many(10):
        msg.ack()
    assert q.stats().settled == 10
    assert q.replay(ids=ids[:2]) == 2
    assert q.stats().settled == 10
    q.get().nack()
    q.get().nack(count=False)
    q.get().release()
    assert (q.stats().settled, q.stats().retries) == (10, 1)
    q.get().fail("never")
    q.get().ack()
    assert (q.stats().settled, q.stats().retries) == (11, 1)


@pytest.mark.parametrize("how", ["earliest", "offset", "since"])
def test_what_a_replay_reads_is_kept_until_it_is_over(open_store, monkeypatch, how):
    """Others may settle all that kept it meanwhile: it all flows again, and goes when it may."""
    store = open_store(retention=0, segment_bytes=65536, flush="os")
    q = store.queue(start="earliest")
    other = store.queue(group="other", start="earliest")
    before = datetime.datetime.now(UTC)
    for _ in range(10):
        q.put_many([os.urandom(1000)] * 60)
    first = other.peek(1)[0].offset
    n = len(drain(q))
    engine = store._engine
    segments = len(engine.log.segments())
    assert (n, q.qsize()) == (600, 0)
    assert segments > 8
    candidate = _queries.candidate
    met = []

    def settle_first(*args):
        if not met:
            assert len(drain(other)) == n
            for _ in range(20):
                engine._upkeep()
        met.append(len(engine.log.segments()))
        return candidate(*args)

    monkeypatch.setattr(_queries, "candidate", settle_first)
    given = {
        "earliest": {"offset": "earliest"},
        "offset": {"offset": first},
        "since": {"since": before},
    }[how]
    assert q.replay(**given) == n
    assert met[0] >= segments
    assert len(drain(q)) == n
    eventually(lambda: len(engine.log.segments()) < 4)
