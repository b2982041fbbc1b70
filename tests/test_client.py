"""`Producer` and `Consumer`, as code for a broker uses them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.helpers.queues import NO_WAIT

import weclaw_embedded as weclaw


def test_code_for_a_broker_runs_with_a_path(path):
    """send, run, msg["…"], retry_count, nack, fail, ack: as written for WeClaw."""

    async def main():
        seen = []
        async with weclaw.Producer(path, topic="agent_tasks") as producer:
            for i in range(3):
                task_id = f"task-{i}"
                await producer.send({"task_id": task_id, "n": i}, key=task_id)

        async with weclaw.Consumer(
            path, topic="agent_tasks", group="workers", retry=NO_WAIT
        ) as consumer:

            async def handler(msg):
                seen.append((msg["task_id"], msg.retry_count))
                if msg["n"] == 1 and msg.retry_count == 0:
                    msg.nack(backoff=0.01)
                elif msg["n"] == 2:
                    msg.fail("no")
                elif msg["n"] == 1:
                    await msg.ack()
                if len(seen) == 4:
                    consumer.stop()

            await consumer.run_async(handler, concurrency=2)
        return sorted(seen)

    assert asyncio.run(main()) == [("task-0", 0), ("task-1", 0), ("task-1", 1), ("task-2", 0)]
    with weclaw.Queue(path, "agent_tasks", group="workers") as q:
        assert (q.stats().settled, q.stats().dead) == (2, 1)


def test_without_a_loop(path):
    """send_sync, `for`, and `run` in a thread."""
    with weclaw.Producer(path) as producer:
        ids = [producer.send_sync(i, priority=i) for i in range(3)]
    with weclaw.Consumer(path) as consumer:
        for msg in consumer:
            assert msg.body == 2
            msg.ack()
            break
        running = threading.Thread(target=consumer.run, args=(lambda msg: msg.body, 2))
        running.start()
        with weclaw.Queue(path) as q:
            assert [q.result(id, timeout=20) for id in ids] == [0, 1, None]
        consumer.stop()
        running.join(20)


def test_a_consumer_that_was_stopped_before_it_ran_ends_at_once(path):
    """And takes nothing; run again, it works."""
    with weclaw.Consumer(path) as consumer, weclaw.Producer(path) as producer:
        id = producer.send_sync("x")
        consumer.stop()
        running = threading.Thread(target=consumer.run, args=(lambda msg: msg.body,), daemon=True)
        running.start()
        running.join(20)
        assert not running.is_alive()
        with weclaw.Queue(path) as q:
            assert q.status(id) == "ready"
            running = threading.Thread(target=consumer.run, args=(lambda msg: msg.body,))
            running.start()
            assert q.result(id, timeout=20) == "x"
        consumer.stop()
        running.join(20)
        assert not running.is_alive()


def test_async_for_ends_when_the_consumer_is_closed(path):
    """Whoever iterates settles."""

    async def main():
        bodies = []
        consumer = weclaw.Consumer(path)

        async def iterate():
            async for msg in consumer:
                bodies.append(msg.body)
                await msg.ack()
                if len(bodies) == 2:
                    asyncio.get_running_loop().create_task(consumer.aclose())

        async with weclaw.Producer(path) as producer:
            await producer.send("a")
            await producer.send("b")
            await asyncio.wait_for(iterate(), 20)
        return bodies

    assert asyncio.run(main()) == ["a", "b"]


def test_what_was_not_sent_says_so(path):
    """A payload that is too large is a `SendFailedError`."""

    async def main():
        async with weclaw.Producer(path, max_message_bytes=100) as producer:
            with pytest.raises(weclaw.SendFailedError):
                await producer.send("x" * 200)
            with pytest.raises(weclaw.SendFailedError):
                producer.send_sync("x" * 200)

    asyncio.run(main())
