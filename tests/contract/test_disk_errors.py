"""A disk that refuses: each failure is told once, in our words, and to whoever it concerns."""

import errno
import os

import lmdb
import pytest
from tests.helpers.queues import drain

import weclaw_embedded as weclaw
from weclaw_embedded import _files, _reclaim
from weclaw_embedded.wal import RESERVE


def refuse(*_):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("flush", ["os", "batch"])
@pytest.mark.parametrize("by", ["queue", "store", "engine"])
def test_a_flush_that_fails_while_closing_is_told(path, monkeypatch, flush, by):
    """Closing flushes: when that fails first it says so, and all is closed; a second time it
    says nothing.
    """
    store = weclaw.open(path, flush=flush, flush_interval_ms=600_000, flush_messages=10**6)
    q = store.queue()
    q.put("a")
    if by == "engine":  # whoever else has the store open has not flushed
        monkeypatch.setattr(store._engine, "hand_back", lambda belongs: None)
    with monkeypatch.context() as patch:
        patch.setattr(_files, "sync_data", refuse)
        with pytest.raises(weclaw.StoreFailedError):
            (q if by == "queue" else store).close()
        q.close()
        store.close()
        assert store._shared.closed
    with weclaw.Queue(path) as q:
        assert drain(q) == ["a"]


def test_a_failure_that_was_told_is_not_told_again_by_closing(path, monkeypatch):
    """The put has said it; so has the flush of a closed queue to whoever closes the store."""
    q = weclaw.Queue(path)
    monkeypatch.setattr(_files, "sync_data", refuse)
    with pytest.raises(weclaw.StoreFailedError):
        q.put("a")
    q.close()


def test_a_failure_in_the_background_is_told_by_closing_if_by_no_call_before(path, monkeypatch):
    """With flush="batch" a timer syncs: what fails there must not end as if it had not been."""
    q = weclaw.Queue(path, flush="batch", flush_interval_ms=600_000)
    engine = q._store._engine
    q.put("a")
    with monkeypatch.context() as patch:
        patch.setattr(_files, "sync_data", refuse)
        engine._flush_quietly()  # as the timer does
    with pytest.raises(weclaw.StoreFailedError):
        q.close()
    q = weclaw.Queue(path, flush="batch", flush_interval_ms=600_000)
    engine = q._store._engine
    q.put("b")
    with monkeypatch.context() as patch:
        patch.setattr(_files, "sync_data", refuse)
        engine._flush_quietly()
        with pytest.raises(weclaw.StoreFailedError):
            q.put("c")
    q.close()


@pytest.mark.parametrize("call", range(1, 6))
def test_every_write_that_the_disk_refuses_is_typed(path, monkeypatch, call):
    """Also while new space is filled with zeros: a put raises what it may raise, and the store
    stops.
    """
    calls = []
    real = os.pwrite

    def pwrite(fd, *args):
        if fd == engine.fd:
            calls.append(fd)
            if len(calls) == call:
                refuse()
        return real(fd, *args)

    q = weclaw.Queue(path, segment_bytes=65536)
    engine = q._store._engine
    q.put("first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(weclaw.StoreFailedError):
            q.put_many(["x" * 90000, "y" * 70000])
        assert len(calls) >= call
        with pytest.raises(weclaw.StoreFailedError):
            q.put("refused")
    q.close()
    with weclaw.Queue(path) as q:
        got = drain(q)
        assert got[:1] == ["first"]
        assert [body[:1] for body in got[1:]] in ([], ["x", "y"])


def test_an_index_that_is_not_synced_is_not_believed_and_closing_goes_on(path, monkeypatch):
    """LMDB's own error is not the user's: the index is made anew at the next opening."""
    from weclaw_embedded import _opening

    class Environment:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def sync(self, force):
            raise lmdb.Error("mdb_env_sync: Input/output error")

    q = weclaw.Queue(path)
    q.put("a")
    assert q.get().body == "a"
    room = q._store._engine.index.room
    room.env = Environment(room.env)
    q.close()
    made = []
    real = _opening.new_index
    monkeypatch.setattr(_opening, "new_index", lambda *args: made.append(1) or real(*args))
    with weclaw.Queue(path) as q:
        assert made
        with q.get(block=False) as msg:
            assert (msg.body, msg.delivery_count, msg.crash_count) == ("a", 2, 0)
    with weclaw.Queue(path) as q:
        assert len(made) == 1
        assert drain(q) == []


@pytest.mark.parametrize("is_short", [False, True])
def test_a_disk_that_does_not_say_how_much_room_it_has_fails_no_call(path, monkeypatch, is_short):
    """Space is looked for after a put: it is written, and what was held for a short disk stays."""
    if is_short:
        monkeypatch.setattr(_reclaim, "_SHORT_BYTES", 1 << 60)
    q = weclaw.Queue(path, segment_bytes=65536)
    q.put("x" * 50_000)
    held = [q.put("x" * 5000) for _ in range(20)]
    words = q._store._engine.page.words
    assert bool(words[RESERVE]) == is_short
    monkeypatch.setattr(os, "fstatvfs", refuse)
    held += [q.put("x" * 5000) for _ in range(100)]
    assert bool(words[RESERVE]) == is_short
    assert q.qsize() == 1 + len(held)
    assert len(drain(q)) == 1 + len(held)
    q.close()
