"""When what was written reaches the index, if nobody looks."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from tests.helpers.queues import drain, eventually

import weclaw_embedded as weclaw
from weclaw_embedded import _folding
from weclaw_embedded._format import CHECKPOINT_FRAME
from weclaw_embedded._index import Index
from weclaw_embedded._index_rows import HEAD
from weclaw_embedded.wal import TAIL

BODY = "x" * 1000


def applied(engine: Any) -> int:
    """The offset up to which the index has been folded."""

    def look(session: Any) -> int:
        tx = engine.index.write()
        at = tx.stored
        tx.abort()
        return int(at)

    return int(engine.turn(look))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """A part of 128 KiB and a bound of 1 MiB: as with the real ones, but soon."""
    monkeypatch.setattr(_folding, "_PART_BYTES", 128 << 10)
    monkeypatch.setattr(_folding, "_MOST_LEFT_BYTES", 1 << 20)
    return 128 << 10


def test_who_only_puts_does_not_fold(open_queue):
    """Putting leaves the index as it is, also when the log goes on into further segments."""
    q = open_queue(segment_bytes=1 << 16, flush="os")
    q.put(-1)
    engine = q._engine
    before = applied(engine)
    for n in range(300):
        q.put([n, BODY])
    assert engine.page.words[TAIL] > 4 << 16
    assert applied(engine) == before
    assert q.get().body == -1
    assert [n for n, _ in drain(q)] == list(range(300))


def test_who_is_refused_drops_nothing(open_queue):
    """A put that finds no room leaves what the index has in memory for the next look."""
    q = open_queue(maxsize=1, flush="os")
    for n in range(3):
        q.put(n)
        q.get().ack()
    q.put(3)
    engine = q._engine
    with pytest.raises(weclaw.Full):
        q.put(4, block=False)
    tx = engine.index.write()
    assert tx.stored < tx.applied == engine.page.words[TAIL]
    assert q.get().body == 3


def test_what_is_left_is_folded_soon_after(open_queue, small_parts):
    """The index follows by itself when the writing is over, in parts."""
    q = open_queue(segment_bytes=1 << 16, flush="os")
    q.put_many([[n, BODY] for n in range(600)])
    engine = q._engine
    tail = engine.page.words[TAIL]
    assert tail > 4 * small_parts
    eventually(lambda: tail - applied(engine) <= small_parts)
    assert [n for n, _ in drain(q)] == list(range(600))


def test_the_index_is_never_left_far_behind(open_queue, small_parts):
    """Whoever goes on putting folds a part now and then, so that the first get is not late."""
    q = open_queue(segment_bytes=1 << 16, flush="os")
    engine = q._engine
    for n in range(3000):
        q.put([n, BODY])
        if n % 500 == 499:
            assert engine.page.words[TAIL] - applied(engine) <= (1 << 20) + 2 * small_parts
    assert [n for n, _ in drain(q)] == list(range(3000))


# Anew ---------------------------------------------------------------------------------------------


class Anew(_folding.Folding):
    """Folds a log that somebody has open into an index of its own, after recovery."""

    def __init__(self, engine: Any, index: Index) -> None:
        self.path, self.page, self.log, self.index = engine.path, engine.page, engine.log, index


def rows(index: Index) -> dict[bytes, bytes]:
    """All that is in an index but how often it was committed."""
    tx = index.write()
    stored = dict(tx._use_rows().cursor().iternext())
    tx.abort()
    return {key: value for key, value in stored.items() if key != HEAD}


def used(path: Any, **options: Any) -> Any:
    """A queue with something in each state, over many segments."""
    q = weclaw.Queue(path, segment_bytes=1 << 16, flush="os", **options)
    held = []
    for n in range(600):
        q.put([n, BODY], key=f"k{n % 3}" if n % 50 == 0 else None, delay=900 if n % 70 == 1 else 0)
        if n % 3:
            msg = q.get()
            if n % 40 == 2:
                msg.fail("no")
            elif n % 90 == 5:
                held.append(msg)
            else:
                msg.ack(result=n if n % 7 == 0 else None)
    return q, held


@pytest.mark.parametrize("head", ["kept", "freed"])
@pytest.mark.parametrize("harm", ["none", "damaged", "torn", "a checkpoint gone"])
def test_what_recovery_folds_is_what_is_folded_after_it(path, tmp_path, monkeypatch, head, harm):
    """Without its scratch folder a file gets the same index, whatever recovery finds in it."""
    q, _ = used(path, retention=0 if head == "freed" else 10**6)
    engine = q._engine
    if head == "freed":
        eventually(lambda: engine.log.head_offset > 0)
    log = engine.log
    frames = list(log.frames(log.head_offset, engine.page.words[TAIL]))
    checkpoints = [frame for frame in frames if frame.flags & CHECKPOINT_FRAME]
    assert bool(checkpoints) == (head == "freed")
    at = {
        "none": None,
        "damaged": frames[len(frames) // 2].offset,
        "torn": frames[-1].offset,
        "a checkpoint gone": checkpoints[-1].offset if checkpoints else frames[0].offset,
    }[harm]
    place = None if at is None else at + log.place(at >> log.bits)[0]
    copy = tmp_path / "copy.wq"
    shutil.copy(path, copy)
    q.close()
    if place is not None:
        with open(copy, "r+b") as file:
            file.seek(place + 20)
            file.write(b"\xff" * 9)
    folded = []
    catch_up = _folding.Folding.catch_up
    monkeypatch.setattr(
        _folding.Folding,
        "catch_up",
        lambda self, tx: (folded.append(tx.applied), catch_up(self, tx)),
    )
    with weclaw.Queue(copy) as q:
        engine = q._engine
        head_offset, tail = engine.log.head_offset, engine.page.words[TAIL]
        if harm == "none":
            assert folded[0] == tail
        if harm == "damaged":
            assert head_offset < folded[0] < tail
        index = Index.open(tmp_path / "anew", create=True)
        with engine._lock:
            tx = index.write()
            Anew(engine, index).fold_all(tx)
            tx.commit(tail, 0)
            assert rows(index) == rows(engine.index)
        index.close()
