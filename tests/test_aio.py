"""The stand-ins for the queues of asyncio."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.helpers.processes import Child

import weclaw_embedded as weclaw
from weclaw_embedded import _files, aio, threads


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def names(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_class_has_no_names_but_those_a_user_is_told_of():
    """The stand-ins have what the queues of Python 3.13 have, and `close`; `AsyncQueue` has what
    `Queue` has.
    """
    both = {"put", "get", "put_nowait", "get_nowait", "qsize", "empty", "full", "maxsize", "join"}
    both |= {"task_done", "shutdown", "unfinished_tasks", "close"}
    assert names(aio.Queue) == names(aio.LifoQueue) == both
    assert names(threads.Queue) == names(threads.PriorityQueue) == both | {"is_shutdown"}
    assert names(weclaw.AsyncQueue) - {"maxsize"} == names(weclaw.Queue)


async def _work(q, n):
    got = []
    for _ in range(n):
        got.append(await q.get())
        await asyncio.sleep(0)
        q.task_done()
    return got


def test_a_program_of_asyncio_queue_needs_one_other_line(path):
    """Producer and workers as in the documentation of asyncio."""

    async def main():
        q = aio.Queue(path=path)
        workers = [asyncio.create_task(_work(q, 10)) for _ in range(3)]
        for i in range(30):
            q.put_nowait(i)
        assert q.unfinished_tasks == 30
        await q.join()
        got = [item for worker in workers for item in await worker]
        assert sorted(got) == list(range(30))
        assert (q.unfinished_tasks, q.qsize()) == (0, 0)
        q.close()

    run(main())


def drop_in_then_die(pipe, path):
    import asyncio

    from weclaw_embedded import aio

    async def main():
        q = aio.Queue(path=path)
        for i in range(5):
            await q.put(i)
        q.put_nowait(5)
        assert await q.get() == 0
        q.task_done()
        assert await q.get() == 1
        pipe.send("now")
        await asyncio.sleep(60)

    asyncio.run(main())


def test_items_survive_a_kill_and_only_those_done_are_gone(path):
    """After kill -9 everything that was put and not `task_done` is there, in order."""
    with Child(drop_in_then_die, path) as child:
        assert child.hear() == "now"
        child.kill()

    async def main():
        q = aio.Queue(path=path)
        assert q.unfinished_tasks == 5
        got = [await q.get() for _ in range(5)]
        q.close()
        return got

    assert run(main()) == [1, 2, 3, 4, 5]


def test_the_same_items_are_seen_through_a_queue(path):
    """`weclaw.Queue(path)` puts and gets the items of the drop-in."""

    async def main():
        with weclaw.Queue(path) as plain:
            q = aio.Queue(path=path)
            await q.put("a")
            plain.put("b")
            assert plain.get().body == "a"
            get = asyncio.create_task(q.get())
            assert await get == "b"
            get = asyncio.create_task(q.get())
            await asyncio.sleep(0.02)
            await asyncio.to_thread(plain.put, "c")
            assert await get == "c"
            q.close()

    run(main())


def test_task_done_settles_the_item_of_the_calling_task(path):
    """Two workers hold an item each; the one that calls has its own settled, not the other's."""

    async def main():
        q = aio.Queue(path=path)
        await q.put("slow")
        await q.put("quick")
        release = asyncio.Event()

        async def slow():
            assert await q.get() == "slow"
            await release.wait()
            q.task_done()

        slow_worker = asyncio.create_task(slow())
        await asyncio.sleep(0.05)
        assert await q.get() == "quick"
        q.task_done()
        with weclaw.Queue(path) as plain:
            assert (plain.stats().leased, plain.stats().settled) == (1, 1)
        release.set()
        await slow_worker
        await q.join()
        q.close()

    run(main())


def test_task_done_in_a_child_task_or_thread_settles_the_item_it_inherited(path):
    """What was got outside and is done with inside is the item of the context."""

    async def main():
        q = aio.Queue(path=path)
        for i in range(4):
            await q.put(i)
        other = asyncio.create_task(q.get())  # somebody else's
        await other
        await q.get()

        async def child():
            q.task_done()

        await asyncio.create_task(child())
        with weclaw.Queue(path) as plain:
            assert plain.stats().settled == 1
            await asyncio.wait_for(q.get(), 5)
            await asyncio.to_thread(q.task_done)
            assert plain.stats().settled == 2
            item = await asyncio.create_task(q.get())
            assert item == 3
            q.task_done()
            assert plain.stats().settled == 3
        q.close()

    run(main())


def test_task_done_without_an_item_only_counts_until_all_are_done(path):
    """Calls that belong to no item settle all when as many have come as items are out."""

    async def main():
        q = aio.Queue(path=path)
        for i in range(3):
            await q.put(i)
        for _ in range(3):
            await asyncio.create_task(_get_only(q))
        with weclaw.Queue(path) as plain:
            stranger = threading.Thread(target=q.task_done)
            stranger.start()
            stranger.join()
            assert (plain.stats().settled, q.unfinished_tasks) == (0, 2)
            for _ in range(2):
                stranger = threading.Thread(target=q.task_done)
                stranger.start()
                stranger.join()
            assert (plain.stats().settled, q.unfinished_tasks) == (3, 0)
        await q.join()
        with pytest.raises(ValueError, match="too many"):
            q.task_done()
        q.close()

    async def _get_only(q):
        return await q.get()

    run(main())


def test_a_task_done_that_found_no_room_is_none(path, monkeypatch):
    """It raises and leaves all as it was: the next call settles what it was to settle."""

    def full(*_):
        raise weclaw.DiskFullError("no room")

    async def main():
        q = aio.Queue(path=path)
        await q.put("a")
        assert await q.get() == "a"
        with monkeypatch.context() as patch:
            patch.setattr(_files, "write_at", full)
            with pytest.raises(weclaw.DiskFullError):
                q.task_done()
        assert q.unfinished_tasks == 1
        q.task_done()
        await q.join()
        q.close()

    run(main())
    with weclaw.Queue(path) as plain:
        assert plain.stats().settled == 1


def test_shutdown_has_the_meaning_of_3_13_and_leaves_the_items(path):
    """Gets go on until it is empty, puts raise; at once with `immediate`, and nothing is lost."""

    async def main():
        q = aio.Queue(maxsize=2, path=path)
        await q.put(1)
        await q.put(2)
        put = asyncio.create_task(q.put(3))
        await asyncio.sleep(0.05)
        q.shutdown()
        with pytest.raises(aio.QueueShutDown):
            await put
        with pytest.raises(aio.QueueShutDown):
            q.put_nowait(3)
        assert await q.get() == 1
        join = asyncio.create_task(q.join())
        await asyncio.sleep(0.02)
        assert not join.done()
        q.shutdown(immediate=True)
        assert (q.qsize(), q.unfinished_tasks) == (0, 1)
        with pytest.raises(aio.QueueShutDown):
            await q.get()
        with pytest.raises(aio.QueueShutDown):
            q.get_nowait()
        q.task_done()
        await asyncio.wait_for(join, 5)
        with pytest.raises(ValueError, match="too many"):
            q.task_done()
        q.close()
        q = aio.Queue(path=path)
        assert (q.unfinished_tasks, await q.get()) == (1, 2)
        q.close()

    run(main())


@pytest.mark.parametrize(
    ("cls", "order"), [(aio.PriorityQueue, [1, 2, 3, 4]), (aio.LifoQueue, [4, 1, 2, 3])]
)
def test_other_orders_hold_over_restarts(path, cls, order):
    """Priority and last-in-first-out orders are kept for what an earlier process has left."""

    async def main():
        q = cls(path=path)
        for i in (3, 2, 1, 4):
            await q.put((i, "x" * i))
        q.close()
        q = cls(path=path)
        assert q.qsize() == 4
        got = [(await q.get())[0] for _ in range(4)]
        q.close()
        return got

    assert run(main()) == order


def test_priorities_are_kept_while_others_put_and_take(path):
    """The order follows what other handles put, take and give back."""

    async def main():
        with weclaw.Queue(path) as plain:
            q = aio.PriorityQueue(path=path)
            await q.put(5)
            await q.put(3)
            plain.put(4)
            plain.put(1)
            held = plain.get()
            assert held.body == 5  # first in, first out for the others
            assert await q.get() == 1
            plain.put(2)
            held.release()
            assert [await q.get() for _ in range(4)] == [2, 3, 4, 5]
            with pytest.raises(aio.QueueEmpty):
                q.get_nowait()
            q.close()

    run(main())


def test_an_item_that_compares_with_nothing_is_taken_at_any_time(path):
    """Before the first get and after it, and it stops nothing; those of one kind in put order."""

    async def main():
        q = aio.PriorityQueue(path=path)
        q.put_nowait("text")
        q.put_nowait(2)
        await q.put({"b": 1})
        q.put_nowait(1)
        got = [await q.get()]
        q.put_nowait("a text")
        await q.put({"a": 1})
        with weclaw.Queue(path) as plain:
            plain.put({"c": 1})
        got += [await q.get() for _ in range(6)]
        assert q.empty()
        assert [one for one in got if isinstance(one, dict)] == [{"b": 1}, {"a": 1}, {"c": 1}]
        assert sorted(map(str, got)) == sorted(
            ["text", "2", "{'b': 1}", "1", "a text", "{'a': 1}", "{'c': 1}"]
        )
        q.close()

    run(main())


def test_an_item_that_cannot_be_decoded_goes_to_the_dead_letters(path):
    """It stops nobody, and is not lost."""

    async def main():
        with weclaw.Queue(path, codec="pickle") as plain:
            plain.put({1, 2})
        q = aio.Queue(path=path)
        await q.put("fine")
        assert await q.get() == "fine"
        q.close()

    run(main())
    with weclaw.Queue(path) as plain:
        assert [letter.reason.split(":")[0] for letter in plain.dlq] == ["SerializationError"]


def test_options_that_make_no_sense_make_no_file(path):
    """`visibility_timeout` is no option of a drop-in; bad ones raise before anything is made."""
    with pytest.raises(TypeError):
        aio.Queue(path=path, visibility_timeout=5)
    with pytest.raises(TypeError):
        aio.Queue(path=path, nonsense=5)
    with pytest.raises(TypeError):
        aio.Queue("many", path=path)
    with pytest.raises(TypeError):
        aio.Queue()
    assert not path.exists()


def test_a_queue_that_is_dropped_closes_itself_silently(path):
    """As nobody closes an `asyncio.Queue`, no warning is given."""
    aio.Queue(path=path).put_nowait(1)
    with weclaw.Queue(path) as q:
        assert q.qsize() == 1


def test_text_and_types(path):
    """repr names the class; `Queue[int]` can be written; the exceptions are asyncio's."""
    q = aio.Queue(path=path)
    assert repr(q).startswith("<Queue at ")
    assert hex(id(q)) in repr(q)
    assert hex(id(q)) not in str(q)
    assert aio.Queue[int].__args__ == (int,)
    assert issubclass(aio.QueueEmpty, asyncio.QueueEmpty)
    assert issubclass(aio.QueueFull, asyncio.QueueFull)
    q.close()


def test_a_stand_in_that_only_looks_refuses_to_put_and_to_get(path):
    """`readonly=True` refuses every change with StorageError, and looking works."""
    with weclaw.Queue(path) as real:
        real.put("kept")

    async def main():
        q = aio.Queue(path=path, readonly=True)
        for change in (q.put("x"), q.get()):
            with pytest.raises(weclaw.StorageError, match="readonly=True"):
                await change
        for change in (lambda: q.put_nowait("x"), q.get_nowait):
            with pytest.raises(weclaw.StorageError, match="readonly=True"):
                change()
        assert (q.qsize(), q.unfinished_tasks) == (1, 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(q.join(), 0.5)
        join = asyncio.create_task(q.join())
        await asyncio.sleep(0)
        with weclaw.Queue(path) as real:
            assert real.purge() == 1
            await asyncio.wait_for(join, 30)
            real.put("kept")
        q.shutdown()
        with pytest.raises(aio.QueueShutDown):
            await q.put("x")
        q.close()

    run(main())
    q = threads.Queue(path=path, readonly=True)
    for change in (lambda: q.put("x"), q.get, q.get_nowait):
        with pytest.raises(weclaw.StorageError, match="readonly=True"):
            change()
    assert q.qsize() == 1
    q.close()
    with weclaw.Queue(path) as real:
        assert real.get(block=False).body == "kept"
