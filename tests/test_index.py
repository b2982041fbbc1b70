"""The index against a plain model, whole and rebuilt, over processes, aborts and reopenings."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import resource
import tempfile
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_model import ALL, Driver, check, found, joined, rebuild, stretch, tell

from weclaw_embedded import _index as door
from weclaw_embedded import _records as rec
from weclaw_embedded._index import FILE_NAME, Index, IndexFullError, Picks, Tx
from weclaw_embedded._index_rows import HEAD
from weclaw_embedded._index_topics import CHUNK_ENTRIES

GID = rec.group_id("default", "default")
PUT = joined(rec.pack_put(0, 0, 0, b"", b"body"))

steps = st.lists(
    st.tuples(st.integers(0, 19), st.integers(0, 299), st.integers(0, 299)), max_size=60
)
commits = st.integers(1, 12)


@settings(
    max_examples=int(os.environ.get("INDEX_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps, commits)
def test_any_records_give_the_answers_of_the_model_and_again_when_rebuilt(
    todo: list[tuple[int, int, int]], every: int
) -> None:
    """Folded one by one or in one go, from the beginning or the head, the answers are the same."""
    with tempfile.TemporaryDirectory() as folder:
        index = Index.open(Path(folder, "a"), create=True)
        driver = Driver(index)
        for number, (op, a, b) in enumerate(todo):
            driver.step(op, a, b)
            if number % every == 0:
                driver.commit()
            if number % 16 == 15:
                check(driver.model, driver.open())
        check(driver.model, driver.open())
        driver.commit()
        index.close()
        again = Index.open(Path(folder, "a"), create=False)
        check(driver.model, again.write())
        again.close()
        new = Index.open(Path(folder, "b"), create=True)
        tx = rebuild(driver.model, new)
        check(driver.model, tx)
        tx.commit(driver.model.end, 1)
        new.close()


@pytest.mark.parametrize("seed", range(40))
def test_long_random_histories_give_the_answers_of_the_model(seed: int, tmp_path: Path) -> None:
    """What holds for short histories holds for long ones, with reclaim again and again."""
    numbers = random.Random(seed)
    index = Index.open(tmp_path / "a", create=True)
    driver = Driver(index)
    every = numbers.randrange(1, 12)
    for number in range(numbers.randrange(60, 200)):
        driver.step(numbers.randrange(20), numbers.randrange(300), numbers.randrange(300))
        if number % every == 0:
            driver.commit()
        if number % 20 == 0:
            check(driver.model, driver.open())
    check(driver.model, driver.open())
    driver.commit()
    index.close()
    new = Index.open(tmp_path / "b", create=True)
    check(driver.model, rebuild(driver.model, new, seed=seed))
    new.close()


@pytest.mark.parametrize("seed", range(24))
def test_many_at_once_leave_the_rows_that_one_by_one_do(seed: int, tmp_path: Path) -> None:
    """Long logs of what is folded in one loop, with what is not strewn in, give the same rows."""
    numbers = random.Random(seed)
    log = list(hot_log(numbers, length=numbers.choice((300, 3000, 6000))))
    end = log[-1][0] + 1000
    one, many = Index.open(tmp_path / "a", create=True), Index.open(tmp_path / "b", create=True)
    tx = one.write()
    for offset, time_us, record in log:
        tell(tx, offset, time_us, record)
    tx.commit(end, 1)
    tx = many.write()
    half = numbers.randrange(len(log))
    tx.apply_many(found(log[:half], numbers))
    tx.commit(log[half][0], 1)
    tx = many.write()
    last = tx.apply_many(found(log[half:], numbers))
    assert last > log[-1][0]
    tx.commit(end, 1)
    assert rows(many) == rows(one)
    one.close()
    many.close()


@pytest.mark.parametrize("seed", range(32))
def test_what_stays_in_memory_leaves_the_rows_that_commits_do(seed: int, tmp_path: Path) -> None:
    """Whatever is kept in memory between commits, or is dropped there and folded again, the rows
    are those of an index that always commits.
    """
    numbers = random.Random(seed)
    log = list(hot_log(numbers, length=numbers.choice((30, 300, 1500))))
    ends = [offset for offset, _, _ in log[1:]] + [log[-1][0] + 1000]
    plain, kept = Index.open(tmp_path / "a", create=True), Index.open(tmp_path / "b", create=True)
    tx = plain.write()
    for offset, time_us, record in log:
        tell(tx, offset, time_us, record)
    tx.commit(ends[-1], 1)
    commits = memoryview(bytearray(8)).cast("Q")
    kept.share(commits)
    n_kept = told = 0
    while told < len(log):
        tx = kept.write()
        told = bisect_right(ends, tx.applied)
        part = log[told : told + numbers.choice((1, 1, 1, 2, 30))]
        told += len(part)
        if numbers.randrange(2):
            tx.apply_many(found(part, numbers))
        else:
            for offset, time_us, record in part:
                if not lease(tx, record, numbers):
                    tell(tx, offset, time_us, record)
        what = numbers.randrange(100)
        if what == 0:
            tx.abort()
            told = 0
        elif what > 3 and told < len(log) and tx.keep(ends[told - 1]):
            n_kept += 1
        else:
            tx.commit(ends[told - 1], 1)
        if what == 1 and told < len(log):
            commits[0] += 1  # as one leaves it who dies before his commit is done
    assert n_kept or len(log) < 100
    assert rows(kept) == rows(plain)
    kept.close()
    plain.close()


@pytest.mark.parametrize("seed", range(24))
def test_what_is_at_hand_is_what_an_index_read_anew_has(seed: int, tmp_path: Path) -> None:
    """Whatever was picked and folded before, and however much at once, the next messages of every
    group are those that its rows say.
    """
    numbers = random.Random(seed)
    log = list(hot_log(numbers, length=numbers.choice((300, 2500)), priorities=(1, 1, 2, 3)))
    ends = [offset for offset, _, _ in log[1:]] + [log[-1][0] + 1000]
    gids = {said.gid for _, _, data in log if isinstance(said := unpacked(data), rec.Group)}
    kept, anew = Index.open(tmp_path / "a", create=True), Index.open(tmp_path / "b", create=True)
    kept.share(memoryview(bytearray(8)).cast("Q"))
    told = 0
    while told < len(log):
        part = log[told : told + numbers.choice((1, 1, 2, 30, 300))]
        told += len(part)
        for index in (kept, anew):
            tx = index.write()
            if len(part) > 30:
                tx.apply_many(found(part, numbers))
            else:
                tx.apply((offset, time_us, (data,)) for offset, time_us, data in part)
            if index is anew or not tx.keep(ends[told - 1]):
                tx.commit(ends[told - 1], 1)
        n, visible = numbers.choice((1, 1, 2, 5, 3000)), numbers.choice((ALL, log[told - 1][0]))
        now, known = kept.write(), anew.write()
        for gid in gids:
            group, same = now.group(gid), known.group(gid)
            assert (group is None) == (same is None)
            if group is not None and same is not None:
                picks = [
                    tx.pick(one, n, visible=visible, suspects=1)[:2]
                    for tx, one in ((now, group), (known, same))
                ]
                assert picks[0] == picks[1]
        known.abort()  # what it knew in memory is read again
        if not now.keep(ends[told - 1]):
            now.commit(ends[told - 1], 1)
    kept.close()
    anew.close()


@pytest.mark.parametrize("among", ["alone", "a result", "another record", "as long as an ACK"])
@pytest.mark.parametrize("seed", range(4))
def test_many_acks_of_this_process_are_folded_as_any_are(
    seed: int, among: str, tmp_path: Path
) -> None:
    """Read at one stroke or one by one: of leases in memory, of some with a row or a key, of what
    is settled, waits or was never there, in two groups.
    """
    numbers = random.Random(seed)
    gids = [rec.group_id("default", name) for name in "ab"]
    log = [(100 + n, 1, rec.pack_group(0, gid, str(n))) for n, gid in enumerate(gids)]
    meta = rec.pack_meta(key="k")
    log += [(1000 + n, 2, rec.pack_put(0, 0, 0, b"" if n % 9 else meta, b"x")) for n in range(90)]
    acks = [rec.pack_ack(0, numbers.choice(gids), numbers.randrange(1000, 1095)) for _ in range(80)]
    odd = {
        "a result": rec.pack_ack(0, gids[0], 1003, b"\1"),
        "another record": rec.pack_return(gids[0], 1003, 0, delivery=1, retry=0, crash=0),
        "as long as an ACK": rec.pack_put(0, 0, 0, b"", bytes(16)),
    }
    if among in odd:
        acks[40] = odd[among]
    told = [(2000 + n, 3 + n, record) for n, record in enumerate(acks)]
    found = []
    for way in (Tx.apply, Tx.apply_own):
        index = Index.open(tmp_path / way.__name__, create=True)
        index.share(memoryview(bytearray(8)).cast("Q"))
        tx = index.write()
        tx.apply(log)
        for count in (40, 30):
            for gid in gids:
                group = tx.group(gid)
                assert group is not None
                tx.lease(group, tx.pick(group, count, visible=ALL), 5, 2**40)
            if count == 40:  # these have rows; the others' leases are in memory alone
                tx.commit(1900, 1)
                tx = index.write()
        way(tx, told)
        tx.commit(3000, 1)
        found.append(rows(index))
        index.close()
    assert found[0] == found[1]


def lease(tx: Tx, record: bytes, numbers: random.Random) -> bool:
    """Tell it what a DELIVER says as its writer does, of some; return whether that was done."""
    said = unpacked(record)
    if not isinstance(said, rec.Deliver) or numbers.randrange(2):
        return False
    group = tx.group(said.gid)
    if group is None or group.is_template:
        return False
    flags = [priority << 4 | queued for _, priority, queued in said.items]
    picks = Picks([message for message, _, _ in said.items], flags, {})
    following = tx.pick(group, len(flags), visible=ALL)
    if picks[:2] == following[:2]:
        picks = following
    tx.lease(group, picks, said.owner, said.deadline_ns)
    return True


def unpacked(data: bytes) -> rec.AnyRecord | None:
    """Return a record, if it can be read."""
    try:
        return rec.unpack(data)
    except ValueError:
        return None


def test_an_index_in_memory_is_dropped_when_another_process_commits(tmp_path: Path) -> None:
    """The shared count says so, and what LMDB has then is read; without a change nothing is."""
    index = Index.open(tmp_path / "a", create=True)
    commits = memoryview(bytearray(8)).cast("Q")
    index.share(commits)
    gid = rec.group_id("default", "g")
    tx = index.write()
    tell(tx, 100, 1, joined(rec.pack_group(0, gid, "g")))
    tx.commit(200, 1)
    assert commits[0] == 1
    tx = index.write()
    tell(tx, 200, 1, joined(rec.pack_put(0, 0, 0, b"", b"x")))
    assert tx.keep(300)
    assert (index.write().applied, tx.stored, tx.ready_count(tx.group(gid))) == (300, 200, 1)
    assert tx._txn is None
    commits[0] += 1
    tx = index.write()
    assert (tx.applied, tx.ready_count(tx.group(gid))) == (200, 0)
    index.close()


class Kept:
    """An index that commits only when it must, with a group and three messages."""

    def __init__(self, path: Path) -> None:
        self.index = Index.open(path, create=True)
        self.index.share(memoryview(bytearray(8)).cast("Q"))
        self.gid = rec.group_id("default", "g")
        self.end = 100
        self.tell(rec.pack_group(0, self.gid, "g"))
        self.messages = [self.tell(rec.pack_put(0, 0, 0, b"", b"x")) for _ in range(3)]

    def begin(self) -> Tx:
        """Begin a turn, where that of who only looked before has ended with nothing new."""
        if self.index.tx.armed:
            self.end_turn()
        return self.index.write()

    def end_turn(self, *, commit: bool = False) -> None:
        tx = self.index.tx
        if commit or not tx.keep(self.end):
            tx.commit(self.end, 1)

    def tell(self, record: rec.Record, *, commit: bool = False) -> int:
        """Fold a record; return its offset."""
        offset, data = self.end, joined(record)
        self.end += 32 + len(data)
        tx = self.begin()
        tell(tx, offset, 1, data)
        self.end_turn(commit=commit)
        return offset

    def deliver(self, n: int, *, commit: bool = False) -> None:
        """Lease the first `n` messages, one by one."""
        for message in self.messages[:n]:
            record = rec.pack_deliver(0, self.gid, 5, 2**40, [message], [rec.FROM_QUEUE])
            self.tell(record, commit=commit)

    def counts(self) -> tuple[int, ...]:
        """Return how many are leased, dead and settled."""
        group = self.begin().group(self.gid)
        assert group is not None
        return group.n_leased, group.n_dead, group.settled


def test_a_lease_known_to_be_in_the_index_ends_once(tmp_path: Path) -> None:
    """One that was written is ended by its ack in memory, and not again after it died."""
    kept = Kept(tmp_path / "a")
    kept.deliver(3, commit=True)
    kept.tell(rec.pack_ack(0, kept.gid, kept.messages[0]))
    assert not kept.begin()._in_use
    assert kept.counts() == (2, 0, 1)
    kept.tell(rec.pack_dead(kept.gid, kept.messages[1], "why", 5, retry=0, crash=0))
    kept.tell(rec.pack_ack(0, kept.gid, kept.messages[1]))
    assert kept.counts() == (1, 1, 1)
    assert [offset for offset, _ in kept.begin().leases(kept.gid)] == kept.messages[2:]
    kept.index.close()


def test_a_lease_that_is_given_twice_is_counted_twice(tmp_path: Path) -> None:
    """Where damage took what lies between two deliveries, the ack of the second knows of both."""
    kept = Kept(tmp_path / "a")
    kept.deliver(1, commit=True)
    kept.deliver(1)
    kept.tell(rec.pack_ack(0, kept.gid, kept.messages[0]))
    tx = kept.begin()
    group = tx.group(kept.gid)
    assert group is not None
    assert tx.deliveries(group, kept.messages[0]) == 2
    kept.index.close()


def test_a_full_chunk_is_found_before_it_is_written(tmp_path: Path) -> None:
    """A queue longer than a chunk that is in memory alone is picked from its beginning."""
    kept = Kept(tmp_path / "a")
    for _ in range(CHUNK_ENTRIES):
        kept.tell(rec.pack_put(0, 0, 0, b"", b""))
    tx = kept.begin()
    group = tx.group(kept.gid)
    assert group is not None
    assert tx._txn is None
    assert tx.pick(group, 3, visible=kept.end).offsets == kept.messages
    assert len(tx.pick(group, 2000, visible=kept.end).offsets) == CHUNK_ENTRIES + 3
    kept.index.close()


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_what_was_cancelled_is_passed_over_wherever_the_group_is(
    at_once: int, tmp_path: Path
) -> None:
    """Cancelled ahead of a part of a queue that is at hand, it is neither picked nor leased, though
    a delivery may name it.
    """
    kept = Kept(tmp_path / "a")
    for _ in range(5):
        kept.messages.append(kept.tell(rec.pack_put(0, 0, 0, b"", b"x")))

    def next_ones() -> list[int]:
        tx = kept.begin()
        group = tx.group(kept.gid)
        assert group is not None
        return tx.pick(group, at_once, visible=kept.end).offsets

    def deliver(messages: list[int]) -> None:
        flags = [rec.FROM_QUEUE] * len(messages)
        kept.tell(rec.pack_deliver(0, kept.gid, 5, 2**40, messages, flags))

    first, *others = kept.messages
    deliver([first])
    assert next_ones() == others[:at_once]
    kept.tell(rec.pack_cancel(0, [others[0], others[2]]))
    left = [others[1], *others[3:]]
    assert next_ones() == left[:at_once]
    for start in range(0, 4, at_once):
        deliver(others[start : min(start + at_once, 4)])
    assert kept.counts() == (3, 0, 0)
    assert next_ones() == others[4 : 4 + at_once]
    leases = kept.begin().leases(kept.gid)
    assert [offset for offset, _ in leases] == [first, others[1], others[3]]
    kept.index.close()


def test_many_at_once_pass_over_what_was_cancelled(tmp_path: Path) -> None:
    """A stretch that delivers one after the other leases none that was cancelled before it."""
    index = Index.open(tmp_path / "a", create=True)
    gid = rec.group_id("default", "g")
    messages = [1000 + 100 * n for n in range(6)]
    first = [(100, 1, joined(rec.pack_group(0, gid, "g")))]
    first += [(message, 1, PUT) for message in messages]
    first.append((2000, 1, joined(rec.pack_cancel(0, [messages[2]]))))
    deliveries = [
        joined(rec.pack_deliver(0, gid, 5, 2**40, [one], [rec.FROM_QUEUE])) for one in messages
    ]
    rest = [(3000 + 100 * n, 1, one) for n, one in enumerate(deliveries)]
    rest += [
        (4000 + 100 * n, 1, joined(rec.pack_ack(0, gid, one))) for n, one in enumerate(messages)
    ]
    tx = index.write()
    tx.apply((offset, time_us, (data,)) for offset, time_us, data in first)
    tx.apply_many([stretch(rest, random.Random(1))])
    group = tx.group(gid)
    assert group is not None
    assert (tx.ready_count(group), group.n_leased, group.settled) == (0, 0, 5)
    index.close()


def test_no_memory_is_left_ahead_of_what_no_record_can_bring_again(tmp_path: Path) -> None:
    """What the store remembers of an index is in LMDB alone: a transaction that set it commits."""
    kept = Kept(tmp_path / "a")
    tx = kept.begin()
    tx.meta = {"a": 1}
    assert not tx.keep(kept.end)
    tx.commit(kept.end, 1)
    tx = kept.begin()
    assert tx.keep(kept.end)
    kept.index.close()


def hot_log(
    numbers: random.Random, length: int, priorities: tuple[int, ...] = (1, 1, 2)
) -> Iterator[tuple[int, int, bytes]]:
    """Yield records that are mostly puts of plain messages, deliveries of the next and acks."""
    n_topics, n_groups = (numbers.choice((1, 1, 2)) for _ in range(2))
    n_priorities = numbers.choice(priorities)
    groups = [
        (tid, rec.group_id(str(tid), str(n))) for tid in range(n_topics) for n in range(n_groups)
    ]
    offset = numbers.choice((100, 2**32 - 50_000, 2**40))
    odd = numbers.choice((0.0, 0.001, 0.03, 0.3))
    runs = numbers.choice((1, 3, 50, 400))
    queues: dict[tuple[int, int], list[int]] = {}
    cursors: dict[tuple[int, int], int] = {}
    leased: dict[int, list[int]] = {gid: [] for _, gid in groups}
    for tid, gid in groups:
        yield offset, 1, joined(rec.pack_group(tid, gid, "g"))
        offset += 100
    kind, time_us = 0, 5
    for _ in range(length):
        if not numbers.randrange(runs):
            kind = numbers.choice((0, 0, 1, 1, 2))
        tid, gid = numbers.choice(groups)
        priority = numbers.randrange(n_priorities)
        queue = queues.setdefault((tid, priority), [])
        at = cursors.setdefault((gid, priority), 0)
        if numbers.random() < odd:
            near = [*queue[at : at + 4], *queue[-3:], *leased[gid][-3:], 7]
            record = odd_record(numbers, tid, gid, priority, near)
            leased[gid] = [one for one in leased[gid] if numbers.randrange(9)]
        elif kind == 1 and at < len(queue):
            n = numbers.choice((1, 1, 1, 4))
            picks = queue[at : at + n]
            cursors[gid, priority] += len(picks)
            leased[gid] += picks
            flags = [priority << 4 | rec.FROM_QUEUE] * len(picks)
            deadline = numbers.randrange(1, 2**40)
            record = joined(rec.pack_deliver(tid, gid, 5, deadline, picks, flags))
        elif kind == 2 and leased[gid]:
            one = leased[gid].pop(numbers.randrange(min(3, len(leased[gid]))))
            record = joined(rec.pack_ack(tid, gid, one, numbers.choice((b"", b"", b"\1"))))
        else:
            body = numbers.randbytes(numbers.choice((0, 5, 20)))
            record = joined(rec.pack_put(priority, numbers.choice((0, 0, 2)), tid, b"", body))
            queue.append(offset)
        yield offset, time_us, record
        offset += len(record) + 32
        time_us += numbers.randrange(2)


def odd_record(
    numbers: random.Random, tid: int, gid: int, priority: int, messages: list[int]
) -> bytes:
    """Return a record that is folded in the general way, or only looks like one that isn't."""
    one = messages[0] if numbers.randrange(2) else numbers.choice(messages)
    deliver = joined(rec.pack_deliver(tid, gid, 5, 9, [one], [priority << 4 | 1]))
    choices: list[bytes] = [
        joined(rec.pack_put(priority, 0, tid, rec.pack_meta(key="k"), b"x")),
        joined(rec.pack_put(priority, 0, tid, rec.pack_meta(id=str(one)), b"x")),
        joined(rec.pack_put(numbers.randrange(10), 0, tid, b"", b"")),
        joined(rec.pack_return(gid, one, rec.RELEASE, due_us=0, delivery=1, retry=0, crash=0)),
        joined(rec.pack_dead(gid, one, "why", 5, retry=1, crash=0)),
        joined(rec.pack_cancel(tid, messages[1:3])),
        joined(rec.pack_purge(gid)),
        joined(rec.pack_ack(tid, gid, one)),
        joined(rec.pack_clean()),
        joined(rec.pack_deliver(tid, gid, 5, 9, [one], [12 << 4 | 1])),
        deliver,
        deliver + b"x",
        deliver + b"x",
        deliver[:-1],
        deliver[:1] + b"\1" + deliver[2:],
        b"\1\0\0\0",
        b"\1\xf0\0\0\0\0\0\0body",
        b"\2\0\1\0\0\0\0\0",
        b"\3\0\0\0\0\0\0\0short",
    ]
    return numbers.choice(choices)


def rows(index: Index) -> dict[bytes, bytes]:
    """Return all that is in an index but how often it was committed."""
    tx = index.write()
    stored = dict(tx._use_rows().cursor().iternext())
    tx.abort()
    del stored[HEAD]
    return stored


@pytest.mark.parametrize("seed", range(20))
def test_lost_records_lose_no_message_whose_put_is_there(seed: int, tmp_path: Path) -> None:
    """Damage may bring a message once more; it never takes one that nothing left says is done."""
    numbers = random.Random(seed)
    index = Index.open(tmp_path / "a", create=True)
    driver = Driver(index)
    for _ in range(150):
        op = numbers.choice([n for n in range(19) if n not in (13, 14, 16)])
        driver.step(op, numbers.randrange(300), numbers.randrange(300))
    model = driver.model
    driver.commit()
    index.close()
    lost = {offset for offset, _, _ in model.log if numbers.random() < 0.15}
    kept = [row for row in model.log if row[0] not in lost]
    told = [(offset, rec.unpack(data)) for offset, _, data in kept]
    new = Index.open(tmp_path / "b", create=True)
    tx = new.write()
    tx.apply_many(
        [(offset, offset + 1, time, 0, 0, [(offset, data)]) for offset, time, data in kept]
    )
    assert not tx.damage()
    done = {(said.gid, said.offset) for _, said in told if isinstance(said, rec.Ack)}
    for gid, group in model.groups.items():
        now = tx.group(gid)
        if now is None or group.created in lost:
            continue
        for offset, said in told:
            if isinstance(said, rec.Put) and said.tid == group.tid and offset >= group.start:
                state = tx.state(now, offset, lambda _, p=said.priority: p)
                assert state in ("ready", "delayed", "leased", "dead") or (gid, offset) in done
        assert tx.ready_count(now) == len(tx.peek(now, 10_000, 0))
    tx.abort()
    new.close()


def begun(path: Path) -> Index:
    """Return an index with one group and nothing in it."""
    index = Index.open(path, create=True)
    tx = index.write()
    tell(tx, 50, 1, joined(rec.pack_group(0, GID, "default")))
    tx.commit(100, 1)
    return index


def test_an_aborted_transaction_leaves_no_trace(tmp_path: Path) -> None:
    """After an abort, memory and disk are as before, full chunks too."""
    index = begun(tmp_path / "a")
    for number in range(3):
        tx = index.write()
        for place in range(2000):
            tell(tx, 1000 * number + 200 + 3 * place, 1, PUT)
        group = tx.group(GID)
        assert group is not None
        assert tx.ready_count(group) == 2000
        assert tx.pick(group, 2, visible=ALL).offsets == [
            1000 * number + 200,
            1000 * number + 203,
        ]
        tx.abort()
    tx = index.write()
    group = tx.group(GID)
    assert group is not None
    assert tx.ready_count(group) == 0
    assert tx.pick(group, 1, visible=ALL).offsets == []
    tx.abort()
    index.close()


def test_a_transaction_that_changed_nothing_is_no_commit(tmp_path: Path) -> None:
    """Looking does not make other processes read everything again."""
    index = begun(tmp_path / "a")
    tx = index.write()
    before = tx._sequence
    tx.commit(100, 1)
    tx = index.write()
    assert tx._sequence == before
    assert (tx.applied, tx.last_crc) == (100, 1)
    tx.meta = {"clean": True}
    tx.commit(100, 1)
    tx = index.write()
    assert tx._sequence == before + 1
    assert tx.meta == {"clean": True}
    tx.abort()
    index.close()


def test_a_long_queue_is_found_again_chunk_by_chunk(tmp_path: Path) -> None:
    """Positions over many chunks, far apart too, are what was put."""
    index = begun(tmp_path / "a")
    offsets = [1000 + 50 * n for n in range(3000)]
    offsets += [2**40 + 2**33 * n for n in range(1500)]
    tx = index.write()
    for place, offset in enumerate(offsets):
        tell(tx, offset, 1, PUT)
        if place % 700 == 0:
            tx.commit(offset + 1, 1)
            tx = index.write()
    tx.commit(2**50, 1)
    index.close()
    index = Index.open(tmp_path / "a", create=False)
    tx = index.write()
    group = tx.group(GID)
    assert group is not None
    assert tx.pick(group, 5000, visible=ALL).offsets == offsets
    for offset in offsets[::97]:
        assert tx.state(group, offset, lambda _: 0) == "ready"
        assert tx.state(group, offset + 1, lambda _: 0) == "done"
    assert tx.live_in(offsets[10], offsets[20]) == offsets[10:20]
    assert tx.live_in(0, 2**60, 7) == offsets[:7]
    tx.abort()
    index.close()


def test_records_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    """What follows flows; what was passed over is told."""
    index = begun(tmp_path / "a")
    tx = index.write()
    bad = [b"", b"\1", b"\2", b"\3", b"\7\xc1", b"\5\x90", b"\x3f\x90", PUT[:1] + b"\xf0" + PUT[2:]]
    bad += [
        joined(rec.pack_deliver(0, 0, 1, 1, [100], [rec.FROM_QUEUE]))
    ]  # a template is no reader
    bad += [joined(rec.pack_deliver(0, GID, 1, 1, [100], [rec.FROM_QUEUE])) + b"x"]
    for place, record in enumerate(bad):
        tell(tx, 200 + place, 1, record)
    assert [offset for offset, _ in tx.damage()] == list(range(200, 200 + len(bad)))
    tell(tx, 300, 1, b"\x40later")
    tell(tx, 301, 1, PUT)
    group = tx.group(GID)
    assert group is not None
    assert tx.pick(group, 9, visible=ALL).offsets == [301]
    tx.abort()
    index.close()


def test_the_map_grows_and_other_openers_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early in general; a transaction that fills it fails whole, and the next has room."""
    monkeypatch.setattr(door, "MAP_BYTES", 2**22)
    monkeypatch.setattr(door, "CHECK_EVERY", 4)
    index = begun(tmp_path / "a")
    context = multiprocessing.get_context("spawn")
    go, said = context.Queue(), context.Queue()
    child = context.Process(target=_count_ready, args=(tmp_path / "a", go, said))
    child.start()
    assert said.get(timeout=30) == 0
    record = joined(rec.pack_put(0, 0, 0, rec.pack_meta(key="k" * 99), b""))
    for start in (1_000, 1_000_000):
        tx = index.write()
        with pytest.raises(IndexFullError):
            for place in range(100_000):
                tell(tx, start + place, 1, record)
        assert tx._txn is None
    for batch in range(100):
        tx = index.write()
        for place in range(200):
            tell(tx, 10_000_000 + 1000 * batch + place, 1, PUT)
            tell(tx, 10_000_000 + 1000 * batch + 500 + place, 1, record)
        tx.commit(20_000_000 + batch, 1)
    go.put(1)
    assert said.get(timeout=30) == 20_001  # of one key one is ready
    child.join()
    index.close()


def _count_ready(path: Path, go: Any, said: Any) -> None:
    index = Index.open(path, create=False)
    for look in range(2):
        if look:
            go.get()
        tx = index.write()
        group = tx.group(GID)
        assert group is not None
        said.put(tx.ready_count(group))
        tx.abort()
    index.close()


def _work(path: Path, lock_path: Path, rounds: int) -> None:
    """Put, lease and ack, each round under the lock, the log's end being the index's."""
    index = Index.open(path, create=False)
    with lock_path.open("w") as lock:
        held: list[int] = []
        for number in range(rounds):
            fcntl.flock(lock, fcntl.LOCK_EX)
            tx = index.write()
            end = tx.applied
            tell(tx, end, 1, PUT)
            if held:
                tell(tx, end + 50, 1, joined(rec.pack_ack(0, GID, held.pop())))
            group = tx.group(GID)
            assert group is not None
            picks = tx.pick(group, 1 + number % 2, visible=ALL)
            record = rec.pack_deliver(0, GID, os.getpid(), 2**60, *picks[:2])
            tell(tx, end + 100, 1, joined(record))
            held += picks.offsets
            tx.commit(end + 200, 1)
            fcntl.flock(lock, fcntl.LOCK_UN)
    index.close()


def test_processes_that_share_an_index_see_each_others_commits(tmp_path: Path) -> None:
    """Each message is in one hand, and the counters add up."""
    begun(tmp_path / "a").close()
    context = multiprocessing.get_context("spawn")
    rounds = 1500
    children = [
        context.Process(target=_work, args=(tmp_path / "a", tmp_path / "lock", rounds))
        for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    index = Index.open(tmp_path / "a", create=False)
    tx = index.write()
    group = tx.group(GID)
    topic = tx.topic("default")
    assert group is not None
    assert topic is not None
    assert topic.puts == 3 * rounds
    leases = tx.leases(GID)
    assert len(leases) == group.n_leased
    assert group.settled + group.n_leased + tx.ready_count(group) == 3 * rounds
    assert group.settled >= 3 * (rounds - 1) // 2
    tx.abort()
    index.close()


def _fill(path: Path, said: Any) -> None:
    """Write until the file may not grow, then go on settling."""
    index = Index.open(path, create=False)
    tx = index.write()
    for place in range(2000):
        tell(tx, 1000 + 3 * place, 1, PUT)
    tx.commit(10_000, 1)
    size = (path / FILE_NAME).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    end = 20_000
    with pytest.raises(IndexFullError):
        while True:
            tx = index.write()
            for _ in range(300):
                tell(tx, end, 1, joined(rec.pack_put(0, 0, 0, rec.pack_meta(key=str(end)), b"")))
                end += 3
            tx.commit(end, 1)
    assert tx._txn is None
    for _ in range(500):
        tx = index.write()
        group = tx.group(GID)
        assert group is not None
        picks = tx.pick(group, 1, visible=ALL)
        tell(tx, end, 1, joined(rec.pack_deliver(0, GID, 7, 2**60, *picks[:2])))
        tell(tx, end + 50, 1, joined(rec.pack_ack(0, GID, picks.offsets[0])))
        end += 100
        tx.commit(end, 1)
    index.close()
    said.put("settled")


def test_when_the_disk_is_full_messages_can_still_be_settled(tmp_path: Path) -> None:
    """A commit that finds no room changes nothing; small ones live on the reserve."""
    begun(tmp_path / "a").close()
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    child = context.Process(target=_fill, args=(tmp_path / "a", said))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert said.get(timeout=1) == "settled"
    index = Index.open(tmp_path / "a", create=False)
    tx = index.write()
    group = tx.group(GID)
    assert group is not None
    assert group.settled == 500
    tx.abort()
    index.close()


def test_what_is_no_index_is_said_to_be_none(tmp_path: Path) -> None:
    """Missing and foreign files are two errors, and neither is touched."""
    with pytest.raises(FileNotFoundError):
        Index.open(tmp_path, create=False)
    (tmp_path / FILE_NAME).write_bytes(b"no index at all" * 1000)
    with pytest.raises(OSError, match="could not be opened"):
        Index.open(tmp_path, create=False)


def test_only_the_index_imports_lmdb() -> None:
    """LMDB has one door."""
    package = Path(door.__file__).parent
    for path in package.rglob("*.py"):
        if "import lmdb" in path.read_text(encoding="utf-8"):
            assert path.name.startswith("_index")


def test_a_forked_child_that_closes_harms_nobody(tmp_path: Path) -> None:
    """The parent's open transaction and its next ones are as if there had been no fork."""
    index = begun(tmp_path / "a")
    tx = index.write()
    tell(tx, 200, 1, PUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with the alarm's thread
        child = os.fork()
    if not child:
        code = 1
        try:
            index.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tx.commit(300, 1)
    tx = index.write()
    tell(tx, 300, 1, PUT)
    group = tx.group(GID)
    assert group is not None
    assert tx.pick(group, 9, visible=ALL).offsets == [200, 300]
    tx.commit(400, 1)
    index.close(sync=True)


def test_a_delivery_of_what_was_cancelled_says_nothing(tmp_path: Path) -> None:
    """Nothing is handed out that was cancelled before, one by one or many at once."""
    said = [
        (100, PUT),
        (200, PUT),
        (300, joined(rec.pack_cancel(0, [100]))),
        (400, joined(rec.pack_group(0, GID, "default"))),
        (500, joined(rec.pack_deliver(0, GID, 7, 1, [100], [rec.FROM_QUEUE]))),
        (600, joined(rec.pack_ack(0, GID, 100))),
    ]
    for many in (False, True):
        index = Index.open(tmp_path / str(many), create=True)
        tx = index.write()
        if many:
            tx.apply_many([(0, 700, 1, 0, 0, said)])
        else:
            for offset, record in said:
                tell(tx, offset, 1, record)
        group = tx.group(GID)
        assert group is not None
        assert (tx.ready_count(group), group.n_leased, group.settled) == (1, 0, 0)
        assert tx.pick(group, 9, visible=ALL).offsets == [200]
        tx.abort()
        index.close()
