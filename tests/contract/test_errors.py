"""Contract 10: errors."""

from __future__ import annotations

import asyncio
import pickle
import queue

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import disk_bytes, eventually

import weclaw_embedded as weclaw

TREE = {
    "WeclawError": (Exception,),
    "Empty": ("WeclawError", queue.Empty, asyncio.QueueEmpty),
    "Full": ("WeclawError", queue.Full, asyncio.QueueFull),
    "ShutDown": ("WeclawError",),
    "ClosedError": ("WeclawError",),
    "LeaseLostError": ("WeclawError",),
    "SerializationError": ("WeclawError", ValueError),
    "OffsetTrimmedError": ("WeclawError",),
    "DeadLetterError": ("WeclawError",),
    "SendFailedError": ("WeclawError",),
    "MessageTooLargeError": ("SendFailedError",),
    "ReplicaUnavailableError": ("SendFailedError",),
    "StorageError": ("WeclawError",),
    "NotAQueueError": ("StorageError",),
    "FormatVersionError": ("StorageError",),
    "CorruptError": ("StorageError",),
    "LockedError": ("StorageError",),
    "DiskFullError": ("StorageError", "SendFailedError"),
    "StoreFailedError": ("StorageError", "SendFailedError"),
    "FencedError": ("StorageError", "SendFailedError"),
}


@pytest.mark.parametrize("name", TREE)
def test_the_tree(name):
    """Each error is a public name and stands where the contract draws it."""
    error = getattr(weclaw, name)
    for parent in TREE[name]:
        assert issubclass(error, getattr(weclaw, parent) if isinstance(parent, str) else parent)
    assert name in weclaw.__all__


def test_shut_down_is_the_standard_librarys_too():
    """`ShutDown` is also the pair of Python 3.13 where present."""
    for module, name in ((queue, "ShutDown"), (asyncio, "QueueShutDown")):
        if hasattr(module, name):
            assert issubclass(weclaw.ShutDown, getattr(module, name))


def through_a_pipe(pipe, path, foreign):
    q = weclaw.Queue(path, max_message_bytes=1000)
    q.put("a")
    msg = q.get()
    msg.fail("bad")
    for provoke in (
        msg.ack,
        lambda: q.get(block=False),
        lambda: q.put({1}),
        lambda: q.put("x" * 2000),
        lambda: q.result(msg.id),
        lambda: weclaw.Queue(foreign),
    ):
        try:
            provoke()
        except weclaw.WeclawError as error:
            pipe.send((error, str(error)))
    q.close()


def test_errors_travel_between_processes(path, tmp_path):
    """Errors pickle with text and attributes."""
    foreign = tmp_path / "letter.txt"
    foreign.write_text("dear all")
    with Child(through_a_pipe, path, foreign) as child:
        said = child.end()
    assert [type(e) for e, _ in said] == [
        weclaw.LeaseLostError,
        weclaw.Empty,
        weclaw.SerializationError,
        weclaw.MessageTooLargeError,
        weclaw.DeadLetterError,
        weclaw.NotAQueueError,
    ]
    assert all(str(e) == text for e, text in said)
    letter = said[4][0].letter
    assert (letter.body, letter.reason) == ("a", "bad")
    assert len(letter.failures) == 1


def test_trimmed_offset_pickles(path, open_queue):
    """`OffsetTrimmedError` keeps its first offset."""
    q = open_queue(retention=0, segment_bytes=65536)
    q.put_many([bytes(1000)] * 300)
    for msg in q.get_many(300):
        msg.ack()
    eventually(lambda: disk_bytes(path) < 300_000)
    with pytest.raises(weclaw.OffsetTrimmedError) as caught:
        q.replay(offset=0)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.first_offset == caught.value.first_offset > 0
    assert str(error) == str(caught.value)


def test_messages_name_the_file_or_the_number(tmp_path, path, open_queue):
    """An error's text names what it is about."""
    (tmp_path / "letter.txt").write_text("dear all")
    with pytest.raises(weclaw.NotAQueueError, match=r"letter\.txt"):
        weclaw.Queue(tmp_path / "letter.txt")
    q = open_queue(max_message_bytes=1234)
    with pytest.raises(weclaw.MessageTooLargeError, match="1234"):
        q.put("x" * 5000)
    task = q.put("x")
    msg = q.get()
    msg.ack()
    with pytest.raises(weclaw.LeaseLostError, match=rf"{task}|offset {msg.offset}\b"):
        msg.ack()
    for ask in (q.result, lambda one: q.result(one, timeout=0.1), asked_by_a_task(path)):
        with pytest.raises(KeyError, match=r"'who knows' .*topic 'default'.*nothing was changed"):
            ask("who knows")
    for ask in (q.dlq.get, asked_by_a_task(path, lambda q: q.dlq.get)):
        with pytest.raises(KeyError, match=r"no dead letter 'who knows' .*nothing was changed"):
            ask("who knows")


def asked_by_a_task(path, of=lambda q: q.result):
    async def ask(one):
        async with weclaw.AsyncQueue(path) as q:
            await of(q)(one)

    return lambda one: asyncio.run(ask(one))


def test_all_is_sorted_and_holds():
    """`__all__` is sorted, and what it names is there."""
    assert list(weclaw.__all__) == sorted(weclaw.__all__)
    for name in weclaw.__all__:
        assert hasattr(weclaw, name)
    for name in ("Queue", "Store", "Message", "Put", "RetryPolicy", "DeadLetter", "open"):
        assert name in weclaw.__all__
