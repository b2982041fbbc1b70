"""Contract 10: a message names the file, the item or the function concerned, and the way out."""

from __future__ import annotations

import asyncio
import pickle
import sys

import pytest
from tests.helpers.queues import take

import weclaw_embedded as weclaw
from weclaw_embedded import aio, threads


class Fails:
    """A codec that refuses one body."""

    def encode(self, body):
        if body == 7:
            raise KeyError("no sevens")
        return b"%d" % body

    def decode(self, data):
        return int(data)


def test_put_many_says_which_body_is_refused(open_queue):
    q = open_queue(max_message_bytes=1000)
    bad = {"set": {1}, "str": "x" * 2000, "Put": weclaw.Put(1, priority=77), "headers": None}
    bad["headers"] = weclaw.Put(1, headers={"x": "y" * 2000})
    for one in bad.values():
        for many in ([0] * 5, [weclaw.Put(0)] * 5, [0, weclaw.Put(0), 0, 0, 0]):
            with pytest.raises((ValueError, weclaw.MessageTooLargeError), match=r"message 4\b.*0"):
                q.put_many([*many[:4], one, *many])
            with pytest.raises((ValueError, weclaw.MessageTooLargeError)) as caught:
                q.put_many([one])
            assert "1 of" not in str(caught.value)
    other = open_queue("other.wq", codec=Fails())
    with pytest.raises(weclaw.SerializationError, match=r"message 2 \(the first is 0\)"):
        other.put_many([1, 2, 7])
    assert (q.qsize(), other.qsize()) == (0, 0)


def test_what_stands_in_no_file_is_named_with_it(path):
    with weclaw.Queue(path) as q:
        q.put("x")
    with open(path, "r+b") as file:
        file.truncate(3000)
    with pytest.raises(weclaw.CorruptError, match=path.name):
        weclaw.Queue(path)


def test_an_awaited_put_says_why_there_was_no_room(path):
    """As the other one does: topic, number and group; those that waited behind it, too."""

    async def run():
        async with weclaw.AsyncQueue(path, maxsize=1) as q:
            await q.put("x")
            puts = (q.put(n, timeout=0.3) for n in range(3))
            for error in await asyncio.gather(*puts, return_exceptions=True):
                assert isinstance(error, weclaw.Full)
                assert "'default' has 1 of at most 1 messages waiting in group" in str(error)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda path: weclaw.Producer(path, maxsiz=1), "Producer"),
        (lambda path: weclaw.Consumer(path, concurrency=3), "Consumer"),
        (lambda path: weclaw.Queue(path, maxsiz=1), "Queue"),
        (lambda path: aio.Queue(path=path, maxsiz=1), "Queue"),
        (lambda path: threads.Queue(path=path, maxsiz=1), "Queue"),
    ],
)
def test_an_option_that_is_none_is_refused_by_who_was_called(path, call, name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument"):
        call(path)
    assert not path.exists()


def test_an_option_of_send_that_is_none_is_refused_by_it(path):
    with weclaw.Producer(path) as producer:
        with pytest.raises(TypeError, match=r"^send_sync\(\) got an unexpected.*'nope'"):
            producer.send_sync(1, nope=1)
        with pytest.raises(TypeError, match=r"^send\(\) got an unexpected.*'nope'"):
            asyncio.run(producer.send(1, nope=1))


@pytest.mark.parametrize("kind", [aio.Queue, threads.Queue])
def test_a_maxsize_that_is_no_number_is_named(path, kind):
    for value, error in (("a", TypeError), (float("nan"), ValueError)):
        with pytest.raises(error, match=f"maxsize must be a number, not {value!r}"):
            kind(value, path=path)
    assert not path.exists()
    assert kind(float("inf"), path=path).full() is False


def test_what_start_takes_is_said(path):
    with pytest.raises(TypeError, match="'earliest', 'latest' or an offset, not None"):
        weclaw.Queue(path, start=None)


def test_a_time_of_none_is_named_as_it_was_given(open_queue):
    with pytest.raises(ValueError, match=r"max_run_time .*not 0$"):
        weclaw.Worker(open_queue(), print, max_run_time=0)


def test_json_names_the_way_out(open_queue):
    q = open_queue(codec="json")
    for body in ((1, 2), {"x": {1}}, "\ud800"):
        with pytest.raises(weclaw.SerializationError, match="open with codec="):
            q.put(body)


def test_what_a_put_says_is_shown(q):
    shown = repr(weclaw.Put({"a": 1}, id="x", delay=2.5, ttl=3, headers={"h": 1}))
    assert shown == "Put({'a': 1}, id='x', delay=2.5, ttl=3, headers={'h': 1})"
    assert repr(weclaw.Put(1)) == "Put(1)"
    for one in (q.dlq, q.transaction(), weclaw.Worker(q, print)):
        assert repr(q).removeprefix("<") in repr(one)


def test_what_belongs_to_a_process_says_so_when_it_is_pickled(path):
    with weclaw.open(path) as store:
        q = store.queue()
        q.put_many(["x", "y"])
        for one in (store, q.get(), q.peek()[0]):
            with pytest.raises(
                TypeError, match=r"in the other process|have the other process open"
            ):
                pickle.dumps(one)


def test_a_closed_consumer_does_not_run(path):
    """As all else that is closed: to return would be to say that all is done."""
    consumer = weclaw.Consumer(path)
    consumer.close()
    with pytest.raises(weclaw.ClosedError):
        consumer.run(print)
    with pytest.raises(weclaw.ClosedError):
        asyncio.run(consumer.run_async(print))


def _raise(error):
    raise error


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        StopIteration("s"),
        SystemExit(3),
        KeyboardInterrupt("k"),
        asyncio.CancelledError("c"),
        ValueError("v"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_reason_is_the_type_and_text_of_what_the_handler_raised(open_queue, awaits, error):
    """Also of what is no failure elsewhere."""
    if awaits and isinstance(error, KeyboardInterrupt):
        pytest.skip("in a coroutine it ends the loop, as asyncio has it")
    q = open_queue(retry=weclaw.RetryPolicy(max_retries=0))
    q.put("x")

    async def handler(msg):
        _raise(error)

    worker = weclaw.Worker(q, handler if awaits else lambda msg: _raise(error), pause_after=1)

    async def run():
        working = asyncio.ensure_future(worker.run_async())
        while not len(q.dlq):
            await asyncio.sleep(0.01)
        worker.stop()
        await working

    asyncio.run(run())
    (letter,) = q.dlq
    told = f"{type(error).__name__}: {error}"
    if sys.version_info < (3, 11) and awaits and isinstance(error, asyncio.CancelledError):
        told = "CancelledError"  # a task kept no text
    assert letter.reason == told
    assert take(q) == []


def test_a_failed_sync_tells_those_of_batch_what_it_was_for(open_queue, monkeypatch):
    """What was written and not synced survives processes, not power: it is not called safe."""
    from weclaw_embedded import _files

    q = open_queue(flush="batch")
    q.put("x")
    monkeypatch.setattr(_files, "sync_data", lambda fd: _raise(OSError(5, "no")))
    with pytest.raises(weclaw.StoreFailedError, match=r"everything synced before is safe.*power"):
        q.flush()
