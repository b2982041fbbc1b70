"""Contract 3 and 4: what a transaction puts is held up as `put_many` is, and only that."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest
from tests.helpers.queues import NO_WAIT, drain, take

import weclaw_embedded as weclaw


def test_the_ids_of_a_transaction(q):
    """A given id is returned at once, one that is made when the block has ended."""
    with q.transaction() as tx:
        assert tx.put("a", id="mine") == "mine"
        assert tx.put("b") is None
        assert tx.ids == []
    assert tx.ids == [m.id for m in q.peek(5)]
    assert tx.ids[0] == "mine"
    with q.transaction() as tx:
        tx.put("again", id="mine")
    assert tx.ids == ["mine"]
    assert q.qsize() == 2


def test_a_transaction_waits_until_all_it_puts_has_room(open_store):
    """Its end waits as `put_many` does, by each topic's `maxsize`; none of it happens before."""
    store = open_store()
    q, following = store.queue("one", maxsize=2), store.queue("two", maxsize=2)
    store.queue("two", group="other", maxsize=1)
    q.put("task")
    msg = q.get()
    q.put_many(["here", "here"])
    following.put("there")
    for puts in ([("one", 1)], [("two", 2)], [("one", 1), ("two", 1)]):
        for how in ({"block": False}, {"timeout": 0.1}):
            with pytest.raises(weclaw.Full), q.transaction(**how) as tx:
                tx.ack(msg, result="done")
                for topic, n in puts:
                    for _ in range(n):
                        tx.put("more", topic=topic)
            assert q.status(msg.id) == "leased"
            assert (q.qsize(), following.qsize()) == (2, 1)
    with pytest.raises(weclaw.Full), q.transaction() as tx:  # never: at once
        for _ in range(3):
            tx.put("more", topic="two")

    def commit():
        with q.transaction() as tx:
            tx.ack(msg, result="done")
            tx.put("more", topic="one")
            tx.put("more", topic="two")

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert q.status(msg.id) == "leased"
    assert following.qsize() == 1
    assert drain(q, 1) == ["here"]
    thread.join(10.0)
    assert not thread.is_alive()
    assert q.result(msg.id) == "done"
    assert (q.qsize(), following.qsize()) == (2, 2)


def test_a_transaction_is_no_matter_of_what_queues_are_opened_meanwhile(open_store):
    """Another thread may open one between any two of its lines."""
    store = open_store()
    q = store.queue()
    opened = [store.queue("other", maxsize=1), store.queue("third")]
    before = sys.gettrace()

    def open_one(frame, event, arg):
        if event == "line" and len(opened) < 200:
            sys.settrace(None)  # not at the lines of the opening
            opened.append(store.queue(f"topic {len(opened)}"))
            sys.settrace(open_one)
        return open_one

    try:
        with q.transaction() as tx:
            tx.put("a", topic="other")
            sys.settrace(open_one)
    finally:
        sys.settrace(before)
    assert len(opened) == 200
    assert store.queue("other").qsize() == 1


def test_a_transaction_that_only_acks_never_waits(open_queue):
    """Where nothing is put, a full queue or file does not matter."""
    q = open_queue(maxsize=1)
    q.put("a")
    msg = q.get()
    q.put("b")
    assert q.full()
    with q.transaction() as tx:
        tx.ack(msg)
    assert q.status(msg.id) == "done"


def test_a_lease_that_ends_while_a_transaction_waits_is_lost(open_queue):
    """Waiting renews nothing: then it raises, and none of it happens."""
    q = open_queue(maxsize=1, visibility_timeout=0.3, retry=NO_WAIT)
    q.put("a")
    msg = q.get()
    q.put("b")
    with pytest.raises(weclaw.LeaseLostError), q.transaction() as tx:
        tx.ack(msg)
        tx.put("c")
    assert [m.body for m in take(q)] == ["a", "b"]


def test_a_transaction_waits_for_bytes(open_queue):
    """`max_bytes` holds the puts of a transaction up, too."""
    q = open_queue(segment_bytes=65536, max_bytes=6 * 65536, retention=0)
    msgs = [q.put(os.urandom(20_000), timeout=0) for _ in range(6)]
    with pytest.raises(weclaw.Full), q.transaction() as tx:
        tx.put(os.urandom(7 * 65536))
    with pytest.raises(weclaw.Full):
        while True:
            msgs.append(q.put(os.urandom(20_000), block=False))
    with pytest.raises(weclaw.Full), q.transaction(timeout=0.1) as tx:
        tx.put(os.urandom(20_000))
    held = q.get()
    with q.transaction(block=False) as tx:
        tx.ack(held)
    drain(q)
    with q.transaction(timeout=10.0) as tx:
        tx.put("fits")
    assert drain(q) == ["fits"]


def test_what_has_a_kept_id_needs_no_room(open_queue):
    """A put that stores nothing waits for nothing, in a transaction too."""
    q = open_queue(maxsize=1)
    q.put("a", id="mine")
    with q.transaction(block=False) as tx:
        tx.put("a", id="mine")
    assert tx.ids == ["mine"]
    assert q.qsize() == 1


@pytest.mark.parametrize("bad", [{"block": 3}, {"timeout": -1}, {"timeout": "5"}], ids=str)
def test_bad_arguments_of_a_transaction(q, bad):
    """They are refused where it begins."""
    with pytest.raises((ValueError, TypeError)):
        q.transaction(**bad)


def test_a_transaction_of_tasks_waits_for_room_off_the_loop(path):
    """`async with q.transaction()` waits the same; neither the loop nor other puts wait with it."""

    async def main():
        async with weclaw.AsyncQueue(path, "one", maxsize=2) as q:
            following = weclaw.AsyncQueue(path, "two", maxsize=1)
            await q.put("task")
            msg = await q.get()
            await q.put("here")
            await q.put("here too")
            with pytest.raises(weclaw.Full):
                async with q.transaction(block=False) as tx:
                    tx.ack(msg)
                    tx.put("more")
            with pytest.raises(weclaw.Full):
                async with q.transaction(timeout=0.1) as tx:
                    tx.ack(msg)
                    tx.put("more")
            assert await q.status(msg.id) == "leased"

            async def commit():
                async with q.transaction() as tx:
                    tx.ack(msg, result=1)
                    tx.put("more")
                return tx.ids

            waiting = asyncio.create_task(commit())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await following.put("elsewhere")
            assert await q.status(msg.id) == "leased"
            (await q.get()).ack()
            ids = await asyncio.wait_for(waiting, 10.0)
            assert await q.result(msg.id) == 1
            assert ids == [(await q.peek(2))[1].id]
            await following.close()

    asyncio.run(main())


def test_a_transaction_that_has_not_begun_takes_nothing(q, path):
    """Without `with` a put or an ack raises: it would return, and never happen."""
    q.put("task")
    msg = q.get()
    tx = q.transaction()
    for call in (lambda: tx.put("x", id="L"), lambda: tx.ack(msg)):
        with pytest.raises(weclaw.ClosedError, match="has not begun; nothing was changed"):
            call()
    assert q.status(msg.id) == "leased"
    with tx:
        tx.ack(msg)
        tx.put("x")
    assert (q.status(msg.id), q.qsize()) == ("done", 1)
    with pytest.raises(weclaw.ClosedError, match="has ended"), tx:
        pass

    async def run():
        async with weclaw.AsyncQueue(path) as aq:
            tx = aq.transaction()
            taken = await aq.get()
            for call in (lambda: tx.put("y"), lambda: tx.ack(taken)):
                with pytest.raises(weclaw.ClosedError, match="begin it with `async with"):
                    call()
            async with tx:
                tx.put("z")
            assert tx.ids
            taken.release()

    asyncio.run(run())
    assert q.qsize() == 2
