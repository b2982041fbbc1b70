"""Contract 2: several handles of one file in one process, and what closing one of them does."""

from __future__ import annotations

import gc
import pickle
import sys
import threading

import pytest
from tests.helpers.queues import eventually

import weclaw_embedded as weclaw


def test_closing_a_queue_hands_its_leases_back_while_another_handle_works(path):
    """What a closed queue held is ready for the other handle at once, and no retry is counted."""
    with weclaw.Queue(path, visibility_timeout=None) as other:
        first = weclaw.Queue(path, visibility_timeout=None)
        other.put("x")
        held = first.get(block=False)
        assert other.status(held.id) == "leased"
        first.close()
        again = other.get(block=False)
        assert (again.id, again.retry_count, again.delivery_count) == (held.id, 0, 2)
        with pytest.raises((weclaw.LeaseLostError, weclaw.ClosedError)):
            held.ack()
        again.ack()
        assert other.status(held.id) == "done"


@pytest.mark.parametrize("maxsize", [0, 5])
def test_a_closed_queue_is_neither_full_nor_not_full(path, maxsize):
    q = weclaw.Queue(path, maxsize=maxsize)
    assert not q.full()
    q.close()
    with pytest.raises(weclaw.ClosedError):
        q.full()


def test_closing_a_store_hands_back_what_all_its_queues_held(path):
    """Closing a store closes its queues: their leases are back, those of other handles stay."""
    with weclaw.Queue(path) as other:
        store = weclaw.open(path)
        queues = [store.queue(), store.queue("second", group="g")]
        queues[0].put("a")
        queues[0].put("b")
        queues[1].put("c")
        kept = other.get(block=False)
        held = [queue.get(block=False) for queue in queues]
        store.close()
        assert other.status(held[0].id) == "ready"
        assert other.status(kept.id) == "leased"
        kept.ack()
        with weclaw.Queue(path, "second", group="g") as second:
            assert second.get(block=False).body == "c"


def test_closing_a_queue_of_a_store_leaves_the_store_open(path):
    """One queue of a store closed, the others and the store go on."""
    with weclaw.open(path) as store:
        first, second = store.queue("first"), store.queue("second")
        first.close()
        with pytest.raises(weclaw.ClosedError):
            first.put("x")
        second.put("y")
        assert store.queue("second").get(block=False).body == "y"


def test_two_threads_that_close_a_store_give_one_share_back(path):
    """However they meet: the other handle of the process stays open."""
    for _ in range(60):
        kept, closed = weclaw.open(path), weclaw.open(path)
        meet = threading.Barrier(4)

        def close(store=closed, meet=meet):
            meet.wait()
            store.close()

        threads = [threading.Thread(target=close) for _ in range(4)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        assert kept.queue().qsize() == 0
        assert kept._engine.handles == 1
        kept.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_was_dropped_contradicts_nobody(path):
    """A handle that the garbage collector closed has no options any more."""
    with weclaw.open(path) as store:
        dropped = weclaw.open(path, retention=10)
        del dropped
        gc.collect()
        eventually(lambda: store._engine.handles == 1)
        with weclaw.open(path, retention=20):
            assert store._engine.option("retention") == 20


def test_what_is_pickled_keeps_its_place(path):
    """A pickle names modules: those of what a user pickles stay where they are."""
    places = {
        "queue": [weclaw.Queue, weclaw.Put],
        "dlq": [weclaw.DeadLetter, weclaw.Failure],
        "_options": [weclaw.RetryPolicy],
        "_queries": [weclaw.Stats, weclaw.GroupInfo],
        "errors": [
            one
            for name in weclaw.__all__
            if isinstance(one := getattr(weclaw, name), type) and issubclass(one, Exception)
            if one not in (weclaw.Discard, weclaw.RetryLater)
        ],
    }
    for module, classes in places.items():
        assert {one.__module__ for one in classes} == {f"weclaw_embedded.{module}"}
    assert pickle.loads(pickle.dumps(weclaw.Put("x", priority=3))).priority == 3
    with weclaw.Queue(path) as q:
        q.put("x")
        maker, _ = q.__reduce__()
        assert (maker.__module__, maker.__qualname__) == ("weclaw_embedded.queue", "_reopen")
        with pickle.loads(pickle.dumps(q)) as again:
            assert type(again) is weclaw.Queue
            assert again.get().body == "x"
