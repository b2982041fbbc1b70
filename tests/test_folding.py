"""When what was written reaches the index, if nobody looks."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import drain, eventually, scratch

import weclaw_embedded as weclaw
from weclaw_embedded import _folding
from weclaw_embedded._format import CHECKPOINT_FRAME
from weclaw_embedded._index import Index
from weclaw_embedded._index_rows import GROUP, HEAD, U64
from weclaw_embedded._index_topics import GroupState
from weclaw_embedded.wal import TAIL

BODY = "x" * 1000


def applied(engine: Any) -> int:
    """The offset up to which the index has been folded."""

    def look(session: Any) -> int:
        tx = engine.index.write()
        at = tx.stored
        tx.abort()
        return int(at)

    return int(engine.run_once(look))


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


def test_who_only_puts_is_not_held_up_by_retention(open_queue, small_parts, monkeypatch):
    """Whether settled messages may go is not asked while the answer takes folding a lot."""
    behind = []
    catch_up = _folding.Folding.catch_up
    monkeypatch.setattr(
        _folding.Folding,
        "catch_up",
        lambda self, tx: (behind.append(self.page.words[TAIL] - tx.applied), catch_up(self, tx)),
    )
    q = open_queue(segment_bytes=1 << 16, flush="os", retention_bytes=1 << 20)
    for n in range(3000):
        q.put([n, BODY])
    assert max(behind) <= 2 * small_parts
    assert [n for n, _ in drain(q)] == list(range(3000))


def test_long_messages_are_given_back_as_they_are_settled(open_queue, small_parts):
    """One of which each is more than a part is not taken for a lot that nobody has looked at."""
    q = open_queue(segment_bytes=1 << 16, flush="os", retention_bytes=1 << 20)
    engine = q._engine
    for _ in range(40):
        q.put(b"x" * 3 * small_parts)
        q.get().ack()
        assert engine.page.words[TAIL] - engine.log.head_offset < 3 << 20


# Anew ---------------------------------------------------------------------------------------------


class Anew(_folding.Folding):
    """Folds a log that somebody has open into an index of its own, after recovery."""

    def __init__(self, engine: Any, index: Index) -> None:
        self.path, self.page, self.log, self.index = engine.path, engine.page, engine.log, index
        self.damage_met = lambda: None  # there is nobody to heal it
        self.tell_damage = lambda place, reason: None  # recovery has told of it


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


@pytest.mark.parametrize("kind", ["plain", "several topics", "with keys", "large", "few", "acks"])
def test_frames_over_several_segments_are_folded_as_record_by_record(open_queue, tmp_path, kind):
    """At one stroke or not: the index has the same rows."""
    q = open_queue(segment_bytes=1 << 16, flush="os")
    for n in range(40):
        bodies = [[n, i, BODY] for i in range(100)]
        if kind == "plain":
            q.put_many(bodies)
        elif kind == "several topics":
            with q.transaction() as tx:
                for i, body in enumerate(bodies):
                    tx.put(body, topic="second" if i % 3 == 0 else "default")
        elif kind == "with keys":
            q.put_many(
                [weclaw.Put(body, key=f"k{i % 2}" if i else None) for i, body in enumerate(bodies)]
            )
        elif kind == "large":
            q.put(BODY * 200)
        elif kind == "few":
            q.put_many([BODY * 50, BODY * 30])
        else:
            q.put_many(bodies)
            with q.transaction() as tx:
                for msg in q.get_many(100):
                    tx.ack(msg, result=BODY)
    engine = q._engine
    log, tail = engine.log, engine.page.words[TAIL]
    frames = list(log.frames(0, tail))
    assert sum(frame.end >> log.bits != frame.offset >> log.bits for frame in frames) > 8
    found = []
    for name in ("at once", "one by one"):
        index = Index.open(tmp_path / name, create=True)
        with engine._lock:
            tx = index.write()
            if name == "at once":
                Anew(engine, index).fold_all(tx)
            else:
                for frame in frames:
                    for offset, record in frame.records:
                        tx.apply([(offset, frame.time_us, (record,))])
            tx.commit(tail, 0)
            found.append(rows(index))
        index.close()
    assert found[0] == found[1]


def test_the_end_of_a_frame_whose_beginning_is_given_back_holds_nothing(open_queue, tmp_path):
    """What is left of a message over several segments is gone through, with no record in it."""
    q = open_queue(segment_bytes=1 << 16, flush="os", retention=0)
    engine = q._engine
    for _ in range(8):
        q.put(BODY * 500)
        q.get().ack()
        log = engine.log
        frames = list(log.frames(log.head_offset, engine.page.words[TAIL]))
        if frames and not frames[0].records:
            break
    else:
        pytest.fail("no frame was given back in part")
    index = Index.open(tmp_path / "anew", create=True)
    with engine._lock:
        tx = index.write()
        assert tx.apply_many(frames[:1]) == frames[0].end
        tx.abort()
    index.close()


# By several processes -----------------------------------------------------------------------------


def take_turns(pipe, path, ahead_bytes, rare):
    """Do what the parent says, each time something drawn by the number it says."""
    state = weclaw._index_state
    state._MOST_AHEAD_BYTES = ahead_bytes
    weclaw._folding._AHEAD_PAUSE_BYTES = 0
    joined, ahead = [], []
    join, told_ahead = state.State.join, state.State.told_ahead
    state.State.join = lambda tx: (joined.append(tx.leader), join(tx))
    state.State.told_ahead = lambda tx, end: (ahead.append(end), told_ahead(tx, end))
    queues = [
        weclaw.Queue(path, topic, group=group, visibility_timeout=None, flush="os")
        for topic, group in (("default", "default"), ("default", "other"), ("second", "default"))
    ]
    held = []
    while True:
        seed = pipe.recv()
        if seed is None:
            pipe.send((len(joined), len(ahead)))
            break
        draw = random.Random(seed)
        q = draw.choice([queues[0], queues[0], *queues])
        plain = draw.random() >= rare  # which an index in memory can be told without its rows
        kind = draw.choice("ppgggaa" if plain else "rnfmkid")
        if kind == "p":
            q.put([seed, "x" * draw.randrange(300)])
        elif kind == "k":
            q.put(seed, key=f"k{draw.randrange(2)}", ttl=draw.choice([None, 1000]))
        elif kind == "i":
            q.put(seed, id=f"i{draw.randrange(5)}", priority=draw.randrange(3))
        elif kind == "d":
            q.put(seed, delay=draw.choice([0.001, 1000.0]))
        elif kind == "m":
            q.put_many(range(draw.randrange(1, 20)))
        elif kind == "g":
            try:
                held += q.get_many(draw.choice([1, 1, 1, 4]), block=False)
            except weclaw.Empty:
                pass
        elif held:
            msg = held.pop(0 if plain else draw.randrange(len(held)))
            if kind == "r":
                msg.release()
            elif kind == "n":
                msg.nack(backoff=0.0)
            elif kind == "f":
                msg.fail("no")
            else:
                msg.ack(result=seed if draw.random() < 0.1 else None)
        pipe.send(kind)
    pipe.recv()


def told(stored: dict[bytes, bytes]) -> dict[bytes, Any]:
    """What rows say, but for what each process may know for itself: of a group, how far it looked
    past what is skipped, by when the next lease ends at the earliest, which deaths it has seen.
    """
    found: dict[bytes, Any] = dict(stored)
    for key, value in stored.items():
        if key.startswith(GROUP):
            group = GroupState.unpack(U64.unpack(key[1:])[0], value)
            ahead = [sum(group.cursor) + group.skipped]
            names = {"cursor", "skipped", "next_deadline_ns", "dead_seen", "text"}
            names |= {"fresh", "part", "part_start", "lane", "topic", "order"}
            found[key] = ahead + [
                getattr(group, name) for name in GroupState.__slots__ if name not in names
            ]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ahead_bytes", "rare"), [(2000, 0.1), (10_000, 0.02)])
def test_processes_that_fold_in_turns_leave_what_one_would(path, tmp_path, seed, ahead_bytes, rare):
    """Whoever commits, follows or is killed: the index has what a fold of the whole log gives."""
    q = weclaw.Queue(path)
    engine = q._engine
    draw = random.Random(seed)
    crew = [Child(take_turns, str(path), ahead_bytes, rare) for _ in range(3)]
    joined = ahead = 0
    try:
        for number in range(500):
            if number == 250:
                crew[0].close()
                crew[0] = Child(take_turns, str(path), ahead_bytes, rare)
            one = draw.choice(crew)
            one.say(draw.randrange(2**30))
            one.hear()
        for one in crew:
            one.say(None)
            n_joined, n_ahead = one.hear()
            joined += n_joined
            ahead += n_ahead

        soon_us = engine.now_us() + 10_000_000

        def level(session: Any) -> None:
            for group in session.tx.groups():
                session.tx.move_due(group, soon_us)
            session.tx._use_rows()  # so that LMDB gets all of it

        engine.run(level)
        index = Index.open(tmp_path / "anew", create=True)
        with engine._lock:
            tx = index.write()
            Anew(engine, index).fold_all(tx)
            for group in tx.groups():
                tx.move_due(group, soon_us)
            tx.commit(engine.page.words[TAIL], 0)
            assert told(rows(index)) == told(rows(engine.index))
        index.close()
    finally:
        for one in crew:
            one.close()
    assert joined + ahead > 3
    q.close()


def lines_of_folding(tmp_path: Path, topics: int, key: str | None) -> int:
    """How many lines of the index run for a rebuild of so many topics, all of them worked at."""
    path = tmp_path / f"{topics}-{key}.wq"
    with weclaw.open(path, flush="os") as store:
        for n in range(topics):
            q = store.queue(f"topic-{n}")
            q.put(n, key=key)
            q.get().ack()
    shutil.rmtree(scratch(path))
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if "_index" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        store = weclaw.open(path)
    finally:
        sys.settrace(before)
    assert len(store.groups()) == topics
    store.close()
    return lines


@pytest.mark.parametrize("key", [None, "a key"])
def test_a_topic_costs_a_rebuild_the_same_among_many(tmp_path, key):
    """Eight times as many topics, each with a group, take eight times the work to fold anew."""
    few, many = (lines_of_folding(tmp_path, n, key) for n in (50, 400))
    assert few > 50 * 100
    assert many < 8 * few * 1.1
