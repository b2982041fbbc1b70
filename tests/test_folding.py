"""When what was written reaches the index, if nobody looks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.queues import drain, eventually

from weclaw_embedded import _folding
from weclaw_embedded.wal import TAIL

BODY = "x" * 1000


def applied(engine: Any) -> int:
    """The offset up to which the index has been folded."""

    def look(session: Any) -> int:
        tx = engine.index.write()
        at = tx.applied
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
