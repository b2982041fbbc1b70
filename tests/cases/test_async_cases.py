"""Cases of the field that concern asyncio, the drop-ins and workers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import NO_WAIT, eventually

import weclaw_embedded as weclaw
from weclaw_embedded import aio


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_case_02_a_lease_is_per_get_in_asyncio_too(path):
    """Case 2: of two leases the short one comes back, the long one stays."""

    async def main():
        async with weclaw.AsyncQueue(path, retry=NO_WAIT) as q:
            await q.put_many(["long", "short"])
            await q.get(visibility_timeout=600)
            await q.get(visibility_timeout=1)
            assert (await q.get(timeout=30)).body == "short"
            assert (await q.stats()).leased == 2

    run(main())


@pytest.mark.parametrize("blocks", [False, True])
def test_case_03_a_handler_five_leases_long_gets_one_delivery(path, blocks):
    """Case 3: also when it blocks the loop that the worker runs in."""

    async def handler(msg):
        calls.append(msg.delivery_count)
        if blocks:
            time.sleep(2.0)
        else:
            await asyncio.sleep(2.0)

    calls: list[int] = []
    with weclaw.Queue(path, visibility_timeout=0.4, retry=NO_WAIT) as q:
        q.put("long work")
        worker = weclaw.Worker(q, handler)
        thread = threading.Thread(target=worker.run)
        thread.start()
        eventually(lambda: calls)
        with pytest.raises(weclaw.Empty):
            q.get(timeout=2.5)
        assert q.join(timeout=5.0)
        worker.stop()
        thread.join()
    assert calls == [1]


def test_case_04_a_late_ack_changes_nothing(path):
    """Case 4: the first holder's ack raises at the call, the second's works."""

    async def main():
        async with weclaw.AsyncQueue(path, visibility_timeout=0.2, retry=NO_WAIT) as q:
            id = await q.put("x")
            first = await q.get()
            second = await q.get(timeout=5, visibility_timeout=30)
            with pytest.raises(weclaw.LeaseLostError):
                first.ack(result="first")
            await second.ack(result="second")
            assert await q.result(id) == "second"

    run(main())


def a_worker_that_dies_of_poison(pipe, path):
    def handler(msg):
        if msg.body == "poison":
            os._exit(9)
        return "fine"

    with weclaw.Queue(path) as q:
        weclaw.Worker(q, handler, concurrency=4).run()


def test_case_05_poison_dies_and_its_neighbours_live(path, open_queue):
    """Case 5: after the crash limit it is a dead letter; every good one is done."""
    q = open_queue()
    poison = q.put("poison")
    good = q.put_many([f"good {i}" for i in range(8)])

    def over():
        return q.status(poison) == "dead" and all(q.status(id) == "done" for id in good)

    for _ in range(10):
        with Child(a_worker_that_dies_of_poison, path) as child:
            eventually(lambda child=child: child.process.poll() is not None or over(), 20)
        if over():
            break
    assert q.dlq.get(poison).reason == "consumer died"
    assert [q.result(id) for id in good] == ["fine"] * 8


def test_case_07_release_is_not_counted(path):
    """Case 7: released ten times, it is not dead."""

    async def main():
        async with weclaw.AsyncQueue(path, retry=weclaw.RetryPolicy(max_retries=3)) as q:
            await q.put("x")
            for n in range(10):
                msg = await q.get(timeout=5)
                assert (msg.retry_count, msg.delivery_count) == (0, n + 1)
                await msg.release()
            assert (await q.stats()).ready == 1

    run(main())


def test_case_08_twenty_times_later_then_done(path, open_queue):
    """Case 8: an async handler that raises `RetryLater` burns no retry and trips no breaker."""
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=3, backoff=0.0))
    id = q.put("x")
    seen = []

    async def handler(msg):
        seen.append(msg.retry_count)
        if len(seen) <= 20:
            raise weclaw.RetryLater(0.01)
        return "fine"

    worker = weclaw.Worker(q, handler, pause_after=2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert q.result(id, timeout=20.0) == "fine"
    worker.stop()
    thread.join()
    assert seen == [0] * 21


def test_case_27_gets_with_a_short_timeout_lose_nothing(path):
    """Case 27: 200 puts every 3 ms, `wait_for(get, 4 ms)` again and again: all, in order, once."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:

            async def produce():
                for i in range(200):
                    await asyncio.sleep(0.003)
                    await q.put(i)

            producing = asyncio.create_task(produce())
            got = []
            while len(got) < 200:
                try:
                    msg = await asyncio.wait_for(q.get(), 0.004)
                except asyncio.TimeoutError:
                    continue
                got.append((msg.body, msg.retry_count, msg.delivery_count))
                msg.ack()
            await producing
            assert got == [(i, 0, 1) for i in range(200)]

    run(main())


def test_case_28_shutdown_with_three_getters_waiting(path):
    """Case 28: each is told within half a second; items stay for the next open."""

    async def main():
        q = aio.Queue(path=path)
        getters = [asyncio.create_task(q.get()) for _ in range(3)]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        q.shutdown(immediate=True)
        ended = await asyncio.gather(*getters, return_exceptions=True)
        # Half a second is the promise; the rest is for a busy machine.
        assert time.monotonic() - started < 5
        assert {type(error) for error in ended} == {aio.QueueShutDown}
        q.close()
        q = aio.Queue(path=path)
        await q.put("stays")
        q.shutdown(immediate=True)
        q.close()
        q = aio.Queue(path=path)
        assert await q.get() == "stays"
        q.close()

    run(main())


def a_worker_with_a_long_task(pipe, path):
    def handler(msg):
        pipe.send(msg.body)
        time.sleep(60)

    with weclaw.Queue(path) as q:
        weclaw.Worker(q, handler, grace=0.5).run()
    pipe.send("ended")


def test_case_36_sigterm_hands_a_long_task_back_uncounted(path, open_queue):
    """Case 36: it stops taking, waits `grace`, hands back; the task is ready within a second."""
    q = open_queue()
    q.put_many(["long", "next", "last"])
    with Child(a_worker_with_a_long_task, path) as child:
        assert child.hear() == "long"
        child.signal(signal.SIGTERM)
        started = time.monotonic()
        eventually(lambda: q.stats().ready == 3, 20)  # far sooner than the task ends
        assert time.monotonic() - started > 0.4
        assert child.end() == ["ended"]
    msg = q.get()
    assert (msg.body, msg.retry_count, msg.crash_count) == ("long", 0, 0)


def test_case_37_put_in_a_thread_get_in_a_loop(path):
    """Case 37: a thousand times, all arrive, in order."""

    async def main():
        q = weclaw.AsyncQueue(path)

        def put():
            with weclaw.Queue(path) as plain:
                for i in range(1000):
                    plain.put(i)

        putting = threading.Thread(target=put)
        putting.start()
        got = []
        for _ in range(1000):
            msg = await q.get(timeout=20)
            got.append(msg.body)
            msg.ack()
        putting.join()
        assert got == list(range(1000))
        await q.close()

    run(main())
