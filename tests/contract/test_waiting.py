"""Contract 3 and 4: who waits sees what ends by itself, also where nobody else looks."""

from __future__ import annotations

import asyncio
import threading

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import threads

AT_ONCE = weclaw.RetryPolicy(max_retries=0)
HOWS = ["expires", "lapses"]


def one_that_ends_by_itself(q, how):
    """Put a message that becomes a dead letter shortly, with nobody writing anything."""
    task = q.put("x", ttl=0.3 if how == "expires" else None)
    if how == "lapses":
        q.get(visibility_timeout=0.3)
    return task


def ends(call):
    """What a call that waits for ever returned or raised, within a generous time."""
    found = []

    def wait():
        try:
            found.append(call())
        except weclaw.WeclawError as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(20.0)
    assert found, "it still waits"
    return found[0]


@pytest.mark.parametrize("how", HOWS)
def test_who_waits_for_a_result_sees_it_die(open_queue, how):
    """`result` that waits for ever ends when the message runs out, or its last lease does."""
    q = open_queue(retry=AT_ONCE)
    task = one_that_ends_by_itself(q, how)
    error = ends(lambda: q.result(task, timeout=None))
    assert isinstance(error, weclaw.DeadLetterError)
    assert error.letter.id == task


@pytest.mark.parametrize("how", HOWS)
def test_who_joins_sees_the_last_one_die(open_queue, how):
    """`join` that waits for ever ends then, too."""
    q = open_queue(retry=AT_ONCE)
    one_that_ends_by_itself(q, how)
    assert ends(q.join) is True


@pytest.mark.parametrize("how", ["put", "put_many", "transaction", "stand-in"])
def test_who_found_room_at_last_waits_no_more(path, open_queue, monkeypatch, how):
    """Also where space was freed only when it was about to wait: nobody is woken for it later."""
    q = open_queue(max_bytes=1 << 20, segment_bytes=65536, flush="os")
    with pytest.raises(weclaw.Full):
        while True:
            q.put(bytes(20_000), block=False)
    for msg in q.get_many(100):
        msg.ack()  # retention holds it
    engine = q._store._engine
    make_room, asked = engine.make_room, []

    def make_room_when_asked_again(at_most):
        asked.append(1)
        return make_room(at_most) if len(asked) > 1 else 0

    monkeypatch.setattr(engine, "make_room", make_room_when_asked_again)
    if how == "put":
        q.put(bytes(20_000), timeout=20)
    elif how == "put_many":
        q.put_many([bytes(20_000)], timeout=20)
    elif how == "transaction":
        with q.transaction(timeout=20) as tx:
            tx.put(bytes(20_000))
    else:
        stand_in = threads.Queue(path=path)
        stand_in.put(bytes(20_000), timeout=20)
        stand_in.close()
    assert len(asked) == 2
    assert not engine.waker._waiters
    assert q.qsize() == 1


def test_who_waits_for_room_gets_that_of_one_that_ran_out(open_queue):
    """A put that waits for ever is let in when a waiting message expires."""
    q = open_queue(maxsize=1, retry=AT_ONCE)
    q.put("x", ttl=0.3)
    assert isinstance(ends(lambda: q.put("y")), str)


@pytest.mark.parametrize("how", HOWS)
def test_tasks_see_it_too(path, how):
    """The same for `AsyncQueue`: results, joins and puts that wait."""

    async def main():
        async with weclaw.AsyncQueue(path, maxsize=1, retry=AT_ONCE) as q:

            async def put():
                task = await q.put("x", ttl=0.3 if how == "expires" else None)
                if how == "lapses":
                    await q.get(visibility_timeout=0.3)
                return task

            task = await put()
            with pytest.raises(weclaw.DeadLetterError):
                await asyncio.wait_for(q.result(task, timeout=None), 20.0)
            await put()
            assert await asyncio.wait_for(q.join(), 20.0) is True
            if how == "expires":
                await put()
                await asyncio.wait_for(q.put("y"), 20.0)

    asyncio.run(main())
