"""`AsyncQueue`: a queue for asyncio."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import signal
import threading
import time
import traceback
from datetime import datetime, timedelta, timezone

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _files, _io
from weclaw_embedded.wal import LAST, SPARES

NO_WAIT = weclaw.RetryPolicy(backoff=0.0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_what_is_put_is_got_and_its_result_is_kept(path):
    """The life of a message, awaited."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            task = await q.put({"prompt": "hello"}, headers={"a": 1}, priority=3, key="k")
            msg = await q.get()
            assert (msg["prompt"], msg.headers, msg.priority, msg.key) == (
                "hello",
                {"a": 1},
                3,
                "k",
            )
            assert await q.status(task) == "leased"
            msg.ack(result="done")
            assert await q.result(task) == "done"
            assert await q.status(task) == "done"
            assert (await q.stats()).settled == 1
            assert await q.offset > 0

    run(main())
    with weclaw.Queue(path) as q:
        assert q.stats().settled == 1


def test_it_has_all_that_a_queue_has():
    """Whatever `Queue` has, `AsyncQueue` has."""
    names = {name for name in dir(weclaw.Queue) if not name.startswith("_")}
    assert names <= {*dir(weclaw.AsyncQueue), "topic", "group", "dlq", "maxsize"}


def test_looking_steering_and_dead_letters(path):
    """Counts, peek, pause, purge, cancel, replay and dead letters answer as those of `Queue`."""

    async def main():
        q = weclaw.AsyncQueue(path, retry=NO_WAIT, maxsize=5)
        ids = await q.put_many([1, weclaw.Put(2), 3])
        assert (await q.qsize(), await q.empty(), await q.full(), q.maxsize) == (3, False, False, 5)
        assert [m.body for m in await q.peek(5)] == [1, 2, 3]
        assert await q.cancel(ids[1])
        await q.pause(60, "for a while")
        with pytest.raises(weclaw.Empty):
            await q.get_nowait()
        await q.resume()
        (first, third) = await q.get_many(5)
        await first.ack("r")
        await third.fail("bad")
        assert await q.dlq.count() == len(q.dlq) == 1
        assert [letter.reason async for letter in q.dlq] == ["bad"]
        with pytest.raises(weclaw.DeadLetterError):
            await q.result(ids[2], timeout=5)
        assert await q.dlq.redrive() == 1
        assert await q.replay(ids=[ids[0]]) == 1
        assert await q.replay(offset="earliest") == 0
        assert await q.purge() == 2
        with pytest.raises(KeyError):
            await q.result("nothing of the kind")
        await q.put("later", eta=datetime.now(timezone.utc) + timedelta(seconds=0.1))
        started = time.monotonic()
        msg = await q.get(timeout=5)
        assert time.monotonic() - started > 0.05
        await msg.nack(backoff=0.05, count=False)
        msg = await q.get(timeout=5)
        assert (msg.retry_count, msg.delivery_count) == (0, 2)
        msg.extend(30)
        msg.release()
        await q.flush()
        await q.close()
        with pytest.raises(weclaw.ClosedError):
            await q.put(1)

    run(main())


def test_settling_is_in_effect_when_it_returns(path):
    """`ack` without await has happened; a second one raises at the call."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            await q.put(1)
            msg = await q.get()
            written = msg.ack()
            with pytest.raises(weclaw.LeaseLostError):
                msg.ack()
            assert (await q.stats()).settled == 1
            assert await written is None
            assert await written is None

    run(main())


def test_async_with_settles_by_how_it_ends(path):
    """Ack on a clean end, nack on an exception, release on cancellation."""

    async def main():
        async with weclaw.AsyncQueue(path, retry=NO_WAIT, visibility_timeout=0.3) as q:
            await q.put(1)
            with pytest.raises(RuntimeError):
                async with await q.get():
                    raise RuntimeError("no")
            assert (await q.stats()).retries == 1

            async def hold():
                async with await q.get():
                    await asyncio.sleep(60)

            task = asyncio.create_task(hold())
            await asyncio.sleep(1.0)
            assert (await q.stats()).leased == 1  # renewed meanwhile
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with await q.get(timeout=5) as msg:
                assert msg.retry_count == 1
            assert (await q.stats()).settled == 1

    run(main())


def test_a_transaction_is_all_or_none(path):
    """An exception in the block drops it; without one acks and puts are one step."""

    async def main():
        async with weclaw.AsyncQueue(path) as q, weclaw.AsyncQueue(path, topic="next") as after:
            await q.put("a")
            msg = await q.get()
            with pytest.raises(RuntimeError):
                async with q.transaction() as tx:
                    tx.ack(msg)
                    raise RuntimeError
            assert (await q.stats()).leased == 1
            async with q.transaction() as tx:
                tx.ack(msg, result=1)
                tx.put("b", topic="next")
            assert (await q.stats()).settled == 1
            assert (await after.get_nowait()).id == tx.ids[0]

    run(main())


def test_gets_wait_for_puts_of_others(path):
    """Waiting gets, a result and a join end when another thread has put, and when it is acked."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            gets = [asyncio.create_task(q.get()) for _ in range(20)]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(_put_from_thread, path, 20)
            messages = await asyncio.gather(*gets)
            assert [m.body for m in messages] == list(range(20))
            result = asyncio.create_task(q.result(messages[0].id, timeout=None))
            join = asyncio.create_task(q.join())
            assert await q.join(timeout=0.05) is False
            with pytest.raises(weclaw.Empty):
                await q.result(messages[0].id, timeout=0.05)
            for msg in messages:
                msg.ack(result="r")
            assert await result == "r"
            assert await join is True

    def _put_from_thread(path, n):
        with weclaw.Queue(path) as q:
            for i in range(n):
                q.put(i)

    run(main())


def test_room_is_waited_for_in_order_and_a_cancelled_put_has_not_happened(path):
    """Puts that wait for room go in the order they came; one cancelled meanwhile never does."""

    async def main():
        async with weclaw.AsyncQueue(path, maxsize=1) as q:
            await q.put(0)
            with pytest.raises(weclaw.Full):
                await q.put_nowait("x")
            started = time.monotonic()
            with pytest.raises(weclaw.Full):
                await q.put("x", timeout=0.1)
            assert 0.09 < time.monotonic() - started < 5
            puts = [asyncio.create_task(q.put(i)) for i in range(1, 6)]
            await asyncio.sleep(0.05)
            puts[1].cancel()
            await asyncio.sleep(0)
            got = [(await q.get(timeout=5)).body for _ in range(5)]
            assert got == [0, 1, 3, 4, 5]
            assert await q.qsize() == 0

    run(main())


def test_two_hundred_cancelled_gets_lose_nothing(path):
    """Gets cancelled at any moment are no deliveries; the rest comes in order."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            taken = []
            for round_ in range(10):
                gets = [asyncio.create_task(q.get()) for _ in range(20)]
                await asyncio.sleep(0.001 * (round_ % 3))
                putting = asyncio.create_task(q.put_many(range(round_ * 20, round_ * 20 + 20)))
                await asyncio.sleep(0.0005 * round_)
                for get in gets:
                    get.cancel()
                await putting
                ended = await asyncio.gather(*gets, return_exceptions=True)
                taken += [msg for msg in ended if isinstance(msg, weclaw.Message)]
            rest = []
            while len(taken) + len(rest) < 200:
                rest.append(await q.get(timeout=5))
            assert sorted(m.body for m in taken + rest) == list(range(200))
            assert {m.delivery_count for m in taken + rest} == {1}
            assert [m.body for m in rest] == sorted(m.body for m in rest)

    run(main())


def test_a_result_that_a_cancelled_task_never_saw_is_given_back(path):
    """Cancelled between the I/O thread's answer and its next step, a task has taken nothing."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            for _ in range(30):
                get = asyncio.create_task(q.get())
                await asyncio.sleep(0)
                waiting = get._fut_waiter
                with weclaw.Queue(path) as other:
                    other.put("x")
                while not waiting.over:
                    time.sleep(0.0001)  # the loop must not come to what it was answered
                get.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await get
                msg = await q.get(timeout=5)
                assert msg.delivery_count == 1
                msg.ack()
            assert (await q.stats()).settled == 30

    run(main())


class Answering:
    """Stands for the I/O threads: each call that comes in ends as it is told, in a later round."""

    woken = _io.NOWHERE
    wait = _io.Io.wait

    def __init__(self, ending):
        self.ending = ending
        self.told = []

    def loop(self):
        return asyncio.get_running_loop()

    def submit(self, call):
        self.told.append("submit")
        call._loop.call_soon(self.end, call, asyncio.current_task())

    def end(self, call, task):
        if self.ending == "cancelled":
            task.cancel()
            return
        if self.ending == "refused":
            call.error = weclaw.DiskFullError("no room")
        call.value, call.over = ["it"], True
        call.wake_soon()

    def abandon(self, call):
        self.told.append("abandon")


@pytest.mark.parametrize("ending", ["answered", "refused", "cancelled"])
@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda q: q.put("x"), "it"),
        (lambda q: q.put_many(["x"]), ["it"]),
        (lambda q: q.get(), "it"),
        (lambda q: q.get_many(3), ["it"]),
        (lambda q: q.join(), True),
        (lambda q: q.result("an id", timeout=None), ["it"]),
        (lambda q: settled(q), None),
    ],
    ids=["put", "put_many", "get", "get_many", "join", "result", "settled"],
)
def test_all_ways_to_wait_for_the_io_threads_do_the_same(path, ask, answer, ending):
    """Some of them write `Io.wait` out, because they are the way of most messages: a call is
    submitted once, and abandoned by whoever leaves without its answer.
    """

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            engine = q._queue._engine
            engine.io = io = Answering(ending)
            try:
                task = asyncio.create_task(ask(q))
                if ending == "answered":
                    assert await task == answer
                else:
                    awaited = {"refused": weclaw.DiskFullError, "cancelled": asyncio.CancelledError}
                    with pytest.raises(awaited[ending]):
                        await task
            finally:
                engine.io = None
            assert io.told == (["submit"] if ending == "answered" else ["submit", "abandon"])

    run(main())


async def settled(q):
    """What awaiting an `ack` does."""
    return await _io.Written(q._queue._engine, 1 << 60)


def test_a_loop_that_ends_with_gets_waiting_loses_nothing(path):
    """`asyncio.run` cancels what waits; the next loop goes on with the same queue."""
    q = weclaw.AsyncQueue(path)  # without a running loop

    async def leave():
        asyncio.create_task(q.get())  # noqa: RUF006  left behind on purpose
        await asyncio.sleep(0.02)

    async def fill():
        await q.put_many(range(5))

    async def drain():
        return [(await q.get(timeout=5)).body for _ in range(5)]

    for _ in range(3):
        run(leave())
    run(fill())
    assert run(drain()) == list(range(5))
    run(q.close())


def test_several_loops_and_threads_share_a_queue(path):
    """Four loops in four threads put and get on one object; each message is in one hand."""
    q = weclaw.AsyncQueue(path, flush="os")
    got: list[int] = []

    def loop(n):
        async def work():
            await asyncio.gather(*(q.put(n * 100 + i) for i in range(100)))
            for _ in range(100):
                msg = await q.get(timeout=30)
                got.append(msg.body)
                msg.ack()

        asyncio.run(work())

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(400))
    run(q.close())


def test_a_task_that_was_just_woken_waits_for_a_loop_of_another_thread(path):
    """The loop whose tasks run on is taken by nobody else for his own."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            await q.put(1)  # what follows runs where the answer has woken this task

            def elsewhere():
                ids.append(asyncio.run(asyncio.wait_for(q.put(2), 20)))

            ids = []
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            ids.append(await q.put(3))
            assert [await q.status(id) for id in ids] == ["ready", "ready"]

    run(main())


def test_puts_of_all_kinds_that_share_a_turn_get_their_own_ids(path):
    """One message, several, some with terms of their own: each call is told what it has put."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            puts = [
                q.put("a"),
                q.put_many(["b", "c"]),
                q.put_many(["d"]),
                q.put("e", priority=1),
                q.put("f"),
            ]
            a, bc, d, e, f = await asyncio.gather(*puts)
            assert (type(bc), type(d)) == (list, list)
            got = {msg.id: msg.body for msg in await q.get_many(10)}
            assert [got[id] for id in (a, *bc, *d, e, f)] == list("abcdef")
            gh, i = await asyncio.gather(q.put_many(["g", "h"]), q.put_many(["i"]))
            got = {msg.id: msg.body for msg in await q.get_many(10)}
            assert [got[id] for id in (*gh, *i)] == list("ghi")

    run(main())


def test_get_many_gives_as_many_as_it_is_asked_for(path):
    """All `n` of what is there at once, also where several ask, and waiting is among them."""

    async def main():
        async with weclaw.AsyncQueue(path, flush="os") as q:
            await q.put_many(range(3000))
            assert [msg.body for msg in await q.get_many(1000)] == [*range(1000)]
            several = await asyncio.gather(q.get_many(300), q.get(), q.get_many(700))
            assert [len(several[0]), several[1].body, len(several[2])] == [300, 1300, 700]
            assert [msg.body for msg in await q.get_many(10_000)] == [*range(2001, 3000)]
            waiting = asyncio.create_task(q.get_many(500))
            await asyncio.sleep(0.05)
            await q.put_many(range(1000))
            assert len(await waiting) == 500

    run(main())


def test_closing_ends_what_waits(path):
    """`async for` ends, `get` raises, when the queue is closed; another of the file goes on."""

    async def main():
        q = weclaw.AsyncQueue(path)
        other = weclaw.AsyncQueue(path)
        seen = []

        async def iterate():
            async for msg in q:
                seen.append(msg.body)
                msg.ack()

        iterating = asyncio.create_task(iterate())
        await other.put(1)
        while not seen:
            await asyncio.sleep(0.001)
        get = asyncio.create_task(q.get())
        await asyncio.sleep(0.02)
        await q.close()
        await asyncio.wait_for(iterating, 5)
        with pytest.raises(weclaw.ClosedError):
            await get
        await other.put(2)
        assert (await other.get()).body == 2
        await other.close()

    run(main())


def test_the_loop_never_waits_for_the_disk(path, monkeypatch):
    """While a sync hangs the loop turns, takes, settles, hands back and puts what needs no sync; 64
    puts share a few.
    """
    syncs = []
    goes_on = threading.Event()
    real = _files.sync_data

    def hang(fd):
        syncs.append(threading.get_ident())
        # Only the loop lets it go on: a loop that waited for the disk would wait in vain.
        assert goes_on.wait(10), "the loop stood still"
        real(fd)

    async def main():
        q = weclaw.AsyncQueue(path)
        unsynced = weclaw.AsyncQueue(path, flush="os")
        await q.put("a")
        await q.put("b")
        monkeypatch.setattr(_files, "sync_data", hang)
        puts = [asyncio.create_task(q.put(i)) for i in range(64)]
        while not syncs:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        await asyncio.wait_for(unsynced.put("c"), 5)  # none of these needs a sync
        (await q.get()).ack()
        msg = await q.get()
        msg.extend()
        msg.nack()
        assert not any(put.done() for put in puts)
        assert len(syncs) == 1
        goes_on.set()
        await asyncio.gather(*puts)
        assert len(syncs) < 10
        assert threading.get_ident() not in syncs
        monkeypatch.setattr(_files, "sync_data", real)
        await unsynced.close()
        await q.close()

    run(main())


@pytest.mark.parametrize("options", [{}, {"retention": 0}, {"retention": 0, "flush": "os"}])
def test_what_only_a_loop_settles_has_its_space_seen_to_by_another_thread(
    path, monkeypatch, options
):
    """Over several segments the loop's thread syncs nothing and zeroes no slot; a spare is there
    before the next one begins, and what is settled is given back.
    """
    on_loop = []
    n = 6000
    sync_data, zero_fill = _files.sync_data, _files.zero_fill

    def noted(what, real):
        def door(*args):
            if threading.current_thread() is threading.main_thread():
                on_loop.append((what, [frame.name for frame in traceback.extract_stack()[-12:-1]]))
            return real(*args)

        return door

    with weclaw.Queue(path, segment_bytes=65536, visibility_timeout=600, **options) as q:
        q.put_many(list(range(n)))

    async def main():
        async with weclaw.AsyncQueue(path, visibility_timeout=600) as q:
            msgs = []
            while len(msgs) < n:
                msgs += await q.get_many(n)
            words = q.store._engine.page.words
            begun = words[LAST]
            monkeypatch.setattr(_files, "sync_data", noted("sync", sync_data))
            monkeypatch.setattr(_files, "zero_fill", noted("zeroes", zero_fill))
            for at in range(0, n, 100):
                for msg in msgs[at : at + 100]:
                    msg.ack()
                # Nobody else writes.
                await asyncio.to_thread(eventually, lambda: words[SPARES], 20)
            assert words[LAST] - begun >= 3
            if "retention" in options:
                await asyncio.to_thread(
                    eventually, lambda: os.stat(path).st_blocks * 512 < 6 * 65536, 20
                )
            assert on_loop == []
            monkeypatch.undo()

    run(main())


def test_a_get_that_does_not_wait_for_a_message_waits_for_no_disk(path, monkeypatch):
    """What somebody's sync has not reached yet is not there: Empty, at once, and there after it."""
    real = _files.sync_data
    begun, goes_on = threading.Event(), threading.Event()

    def hang(fd):
        begun.set()
        assert goes_on.wait(10)
        real(fd)

    async def main():
        same = weclaw.Queue(path)
        async with weclaw.AsyncQueue(path) as q:
            with pytest.raises(weclaw.Empty):
                await q.get_nowait()  # begins the group
            monkeypatch.setattr(_files, "sync_data", hang)
            put = asyncio.create_task(q.put("a"))
            await asyncio.to_thread(begun.wait, 30)
            for look in (q.get_nowait, lambda: q.get(block=False), lambda: q.get(timeout=0)):
                with pytest.raises(weclaw.Empty):
                    await look()
            with pytest.raises(weclaw.Empty):
                await q.get_many(3, block=False)
            with pytest.raises(weclaw.Empty):
                same.get(block=False)
            assert not put.done()
            goes_on.set()
            await put
            assert (await q.get_nowait()).body == "a"
        same.close()

    try:
        run(main())
    finally:
        goes_on.set()


def _hang_in_a_sync(pipe, path):
    from weclaw_embedded import _files

    def hang(fd):
        pipe.send("written")
        time.sleep(600)

    with weclaw.Queue(path) as q:
        _files.sync_data = hang
        q.put("left")


@pytest.mark.parametrize("kind", ["thread", "task"])
def test_what_the_dead_have_left_unsynced_is_found_by_who_only_looks(path, kind):
    """A writer dies in its sync: gets that don't wait find the message a little later."""
    with weclaw.Queue(path) as q, pytest.raises(weclaw.Empty):
        q.get_nowait()

    async def look():
        async with weclaw.AsyncQueue(path) as q:
            while True:
                try:
                    return (await q.get_nowait()).body
                except weclaw.Empty:
                    await asyncio.sleep(0.01)

    def look_in_thread():
        with weclaw.Queue(path) as q:
            return eventually(lambda: _body_of_next(q))

    with weclaw.open(path), Child(_hang_in_a_sync, path) as child:
        assert child.hear() == "written"
        child.kill()
        assert (run(look()) if kind == "task" else look_in_thread()) == "left"


def _body_of_next(q):
    try:
        return q.get_nowait().body
    except weclaw.Empty:
        return None


def test_what_a_stopped_loop_has_settled_is_synced(path, monkeypatch):
    """The sync waits for the end of the loop's round, but not where no such end comes."""
    syncs = []
    real = _files.sync_data

    def count(fd):
        syncs.append(fd)
        real(fd)

    q = weclaw.AsyncQueue(path)

    async def leave(loop):
        await q.put("x")
        msg = await q.get()
        await asyncio.sleep(0.05)  # until the I/O threads sleep
        monkeypatch.setattr(_files, "sync_data", count)
        loop.stop()
        msg.ack()

    loop = asyncio.new_event_loop()
    leaving = loop.create_task(leave(loop))
    loop.run_forever()
    assert leaving.done()
    loop.close()
    eventually(lambda: syncs)
    run(q.close())


def test_tasks_of_a_group_run_on_each_as_itself(path):
    """Each runs on in its own context and as the current task, though one callback wakes them."""
    number = contextvars.ContextVar("number")

    async def work(q, i):
        number.set(i)
        me = asyncio.current_task()
        for _ in range(3):
            await q.put(i)
            assert (number.get(), asyncio.current_task()) == (i, me)
            await (await q.get()).ack()
            assert (number.get(), asyncio.current_task()) == (i, me)

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            await asyncio.gather(*(work(q, i) for i in range(20)))

    asyncio.run(main(), debug=True)


def test_an_interrupt_in_one_task_leaves_the_others_their_answers(path):
    """Ctrl-C goes through the loop at once; when the loop runs again the others go on."""
    q = weclaw.AsyncQueue(path)

    async def put(i):
        id = await q.put(i)
        if i == 3:
            raise KeyboardInterrupt
        return id

    async def start():
        return [asyncio.create_task(put(i)) for i in range(10)]

    async def end(tasks):
        ids = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        await q.close()
        return ids

    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(start())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(tasks[3])
    assert isinstance(tasks.pop(3).exception(), KeyboardInterrupt)
    assert len({*loop.run_until_complete(end(tasks))}) == 9
    loop.close()


def test_a_failed_sync_is_told_to_everybody(path, monkeypatch):
    """Puts that waited for a sync that failed raise, and so does what comes after."""

    async def main():
        q = weclaw.AsyncQueue(path)
        await q.put("x")
        waiting = asyncio.create_task(q.put_nowait(1))
        await waiting

        def broken(fd):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(_files, "sync_data", broken)
        ended = await asyncio.gather(*(q.put(i) for i in range(5)), return_exceptions=True)
        assert {type(error) for error in ended} == {weclaw.StoreFailedError}
        with pytest.raises(weclaw.StoreFailedError):
            await q.get()
        await q.close()

    run(main())


def test_refused_puts_write_nothing(path):
    """What can't be encoded or is too large is refused at once, each put for itself."""

    async def main():
        async with weclaw.AsyncQueue(path, max_message_bytes=1000) as q:
            ended = await asyncio.gather(
                q.put({1, 2}), q.put("x" * 2000), q.put("fine"), return_exceptions=True
            )
            assert isinstance(ended[0], weclaw.SerializationError)
            assert isinstance(ended[1], weclaw.MessageTooLargeError)
            assert await q.qsize() == 1
            same = await asyncio.gather(*(q.put("s", id="same") for _ in range(5)))
            assert set(same) == {"same"}
            assert await q.qsize() == 2

    run(main())


def test_it_pickles_and_survives_a_fork(path):
    """A pickled queue opens its path; a forked child opens it anew and its I/O threads with it."""

    async def main(q):
        await q.put("before")

    q = weclaw.AsyncQueue(path)
    run(main(q))
    copy = pickle.loads(pickle.dumps(q))
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            asyncio.run(q.put("from the child"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    async def drain():
        return [(await copy.get(timeout=5)).body for _ in range(2)]

    assert run(drain()) == ["before", "from the child"]
    run(copy.close())
    run(q.close())


def hold_then_die(pipe, path):
    import asyncio

    async def main():
        q = weclaw.AsyncQueue(path)
        msg = await q.get()
        pipe.send(msg.body)
        await asyncio.sleep(60)

    asyncio.run(main())


def test_a_waiting_get_notices_the_death_of_a_holder(path):
    """What a killed process held comes to whoever waits within half a second."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            await q.put("x")
            with Child(hold_then_die, path) as child:
                assert await asyncio.to_thread(child.hear) == "x"
                get = asyncio.create_task(q.get())
                await asyncio.sleep(0.3)
                assert not get.done()
                child.kill()
                started = time.monotonic()
                msg = await asyncio.wait_for(get, 20)
                # Half a second is the promise; the rest is for a busy machine.
                assert time.monotonic() - started < 5
                assert (msg.crash_count, msg.delivery_count) == (1, 2)

    run(main())


def test_a_lease_that_runs_out_wakes_who_waits(path):
    """A waiting get is given what another lost by time, without anybody writing."""

    async def main():
        async with weclaw.AsyncQueue(path, visibility_timeout=0.2, retry=NO_WAIT) as q:
            await q.put("x")
            await q.get()
            msg = await q.get(timeout=5)
            assert (msg.retry_count, msg.delivery_count) == (1, 2)

    run(main())


def test_on_dead_is_called_off_the_loop(path):
    """The callback for dead letters does not hold up the loop."""
    seen = []

    def on_dead(letter):
        seen.append((letter.id, threading.current_thread() is threading.main_thread()))

    async def main():
        async with weclaw.AsyncQueue(path, on_dead=on_dead) as q:
            id = await q.put("x")
            (await q.get()).fail("no")
            while not seen:
                await asyncio.sleep(0.001)
            assert seen == [(id, False)]

    run(main())


def test_a_call_that_no_task_waits_for_leaves_its_group_the_answers(path):
    """A coroutine that was run by hand and closed takes nothing from those that wait beside it."""
    failures = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: failures.append(context))
        async with weclaw.AsyncQueue(path) as q:
            for i in range(20):
                by_hand = [q.put("by hand") for _ in range(3)]
                tasks = [loop.create_task(q.put(i)) for _ in range(2)]
                for coroutine in by_hand:
                    coroutine.send(None)
                tasks += [loop.create_task(q.put(i)) for _ in range(2)]
                await asyncio.sleep(0)
                for coroutine in by_hand:
                    coroutine.close()
                await asyncio.wait_for(asyncio.gather(*tasks), 20)

    asyncio.run(main())
    assert failures == []


def test_a_coroutine_run_by_hand_has_no_success_before_the_answer(path):
    """Who runs a put by hand is not told that it is done before it is, and gets its id then."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            early = q.put("early")
            early.send(None)
            with pytest.raises(RuntimeError, match="run on before"):
                early.send(None)
            late = q.put("late")
            call = late.send(None)
            done = asyncio.get_running_loop().create_future()
            call.add_done_callback(done.set_result)
            assert await asyncio.wait_for(done, 20) is call
            with pytest.raises(StopIteration) as end:
                late.send(None)
            assert await q.status(end.value.value) == "ready"

    asyncio.run(main())


def test_an_async_with_whose_lease_was_lost_says_so(path):
    """A block that ends well after its group was dropped has acked nothing, and is told."""

    async def main():
        async with weclaw.AsyncQueue(path) as q:
            await q.put("x")
            with pytest.raises(weclaw.LeaseLostError):
                async with await q.get():
                    await asyncio.to_thread(_drop_default_group, path)

    asyncio.run(main())


def _drop_default_group(path):
    with weclaw.open(path) as store:
        store.drop_group("default")
