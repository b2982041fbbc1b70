"""Ending a lease in a turn of its own: done whole, or left to the general turn, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import _clock, _files, _records, wal
from weclaw_embedded._session import OS, SYNC
from weclaw_embedded._shared import FOR_SETTLED, LEASES_SEQ, WAITERS


def ack_of(lease: Any) -> bytes:
    return _records.ack_of(lease.tid, lease.gid, lease.offset)


def publish_is_due(engine: Any, lease: Any) -> None:
    engine.is_late = True


def somebody_waits_for_room(engine: Any, lease: Any) -> None:
    engine.page.words[WAITERS] += FOR_SETTLED


def leases_were_taken(engine: Any, lease: Any) -> None:
    engine.page.words[LEASES_SEQ] += 1


def another_is_behind(engine: Any, lease: Any) -> None:
    lease.unblocks = True


def it_is_over(engine: Any, lease: Any) -> None:
    lease.over = True


def it_ran_out(engine: Any, lease: Any) -> None:
    lease.deadline_ns = _clock.monotonic_ns()


def a_name_may_have_moved(engine: Any, lease: Any) -> None:
    engine._has_moved = lambda _: True


@pytest.mark.parametrize(
    "make",
    [
        publish_is_due,
        somebody_waits_for_room,
        leases_were_taken,
        another_is_behind,
        it_is_over,
        it_ran_out,
        a_name_may_have_moved,
    ],
)
def test_what_is_not_plain_is_left_to_the_general_turn(
    open_queue: Any, make: Callable[[Any, Any], None]
) -> None:
    """Nothing is written, and the lease is as it was."""
    with open_queue(flush="os") as q:
        q.put("a")
        lease = q.get()._lease
        engine, words = q._engine, q._engine.page.words
        tail = words[wal.TAIL]
        make(engine, lease)
        before = lease.over
        assert engine.end(lease, ack_of(lease), OS) == -1
        assert (words[wal.TAIL], words[wal.WRITING], lease.over) == (tail, 0, before)
        assert lease in engine.held


def test_what_is_plain_is_done_at_once(open_queue: Any) -> None:
    """The record is written, the lease is over, and what the index is told is what the log has."""
    with open_queue(flush="os") as q:
        q.put_many(["a", "b", "c"])
        leases = [msg._lease for msg in q.get_many(2)]
        engine = q._engine
        for lease in leases:
            assert engine.end(lease, ack_of(lease), OS) == engine.page.words[wal.TAIL]
            assert lease.over
        assert engine.held == set()
        assert engine.log.last_frame == engine.log.at_rest().last_frame
        assert (q.stats().settled, q.stats().leased, q.stats().ready) == (2, 0, 1)
        assert engine.verify() == []


def test_a_promised_end_is_synced_when_it_returns_unless_it_does_not_wait(
    open_queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync of an ack is its caller's, or that of whoever was told not to wait."""
    syncs = []
    real = _files.sync_data
    monkeypatch.setattr(_files, "sync_data", lambda fd: [syncs.append(fd), real(fd)])
    with open_queue() as q:
        q.put_many(["a", "b"])
        first, second = (msg._lease for msg in q.get_many(2))
        engine = q._engine
        syncs.clear()
        tail = engine.end(first, ack_of(first), SYNC, waits=False)
        assert tail > 0
        assert not syncs
        assert engine.end(second, ack_of(second), SYNC) > tail
        assert len(syncs) == 1
        assert engine.synced >= engine.page.words[wal.TAIL]


@pytest.mark.parametrize("call", ["append_one", "write"])
def test_ctrl_c_before_the_write_leaves_the_lease_with_its_holder(
    open_queue: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It can be acked afterwards, and what was laid out for it is not in the log."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with open_queue() as q:
        q.put("a")
        msg = q.get()
        engine = q._engine
        tail = engine.page.words[wal.TAIL]
        with monkeypatch.context() as patched:
            patched.setattr(engine.log, call, interrupted)
            with pytest.raises(KeyboardInterrupt):
                msg.ack()
        assert not msg._lease.over
        assert engine.held == {msg._lease}
        assert engine.page.words[wal.TAIL] == engine.log.pending_tail == tail
        msg.ack()
        with pytest.raises(weclaw.LeaseLostError):
            msg.ack()
        assert engine.verify() == []
