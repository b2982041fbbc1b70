"""Records that are well formed and carry numbers at the ends of what a number can be: each is set
aside as damage, with its offset and a reason, or does nothing bad. Never does one stop what is
behind it, raise what is no error of ours, or ask for much memory.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.fuzz import targets

import weclaw_embedded as weclaw
from weclaw_embedded import _format, _records
from weclaw_embedded._records import NEVER, CarriedRow, Carry

GID = _records.group_id("default", "default")
NUMBERS = [0, 1, 64, 2**31, 2**32 - 1, 2**32, 2**56 - 1, 2**56, 2**56 + 1]
NUMBERS += [2**62, 2**62 + 1, NEVER, 2**63, 2**64 - 2, 2**64 - 1]
BEYOND = [-(2**63), -1, 2**64 - 1]
hostile = st.sampled_from(NUMBERS + BEYOND)

QUICK = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
LONG = settings(QUICK, max_examples=250, derandomize=False)

PUT = b"".join(_records.pack_put(3, 2, 0, b"", b"carried"))
ROW = [GID, 1, 0, 0, 0, 0, 1, 0, 0, 0, [[1, "no", "w"]], "no", 9]
GROUP = [0, GID, "default", 0, 64, [0] * 10, 5, 5, 5, 0, ""]


def honest(at: int) -> dict[int, list[object]]:
    """One record of each kind that is all msgpack, about the message at an offset."""
    row = [*ROW[:4], at, *ROW[5:]]
    return {
        _records.RETURN: [GID, at, 0, 0, 1, 1, 1, [9, "no", "w"]],
        _records.DEAD: [GID, at, "no", 9, 1, 0, [9, "no", "w"]],
        _records.EXTEND: [GID, at, 10**10],
        _records.REDRIVE: [GID, [[at, 0]]],
        _records.CANCEL: [0, [at]],
        _records.PURGE: [GID],
        _records.PURGE_DEAD: [GID, [at]],
        _records.TOPIC: [7, "seven"],
        _records.GROUP: [0, GID ^ 1, "another", at],
        _records.GROUP_DROP: [GID ^ 2],
        _records.PAUSE: [GID, 0, "429"],
        _records.REPLAY: [GID, [[at, 3, b"", 0]]],
        _records.OPTION: [{"retention": 5, "max_bytes": None, "retention_bytes": 7}],
        _records.CHECKPOINT: [[[0, "default", 1, 10]], [GROUP], {}, [[GID, 3, at, at + 1]]],
        _records.CARRY: [at, 7, 8, PUT, [row], [[GID ^ 1, b"\1"]], [GID ^ 3], [[GID, 2]]],
        _records.VOID: [[at]],
        _records.OWNER: [5, "w"],
        _records.DAMAGED: [[[at, "bad"]]],
    }


def numbers_in(fields: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Where in a record's fields numbers stand."""
    if isinstance(fields, int) and not isinstance(fields, bool):
        return [path]
    if isinstance(fields, list):
        return [p for n, one in enumerate(fields) for p in numbers_in(one, (*path, n))]
    if isinstance(fields, dict):
        return [p for name, one in fields.items() for p in numbers_in(one, (*path, name))]
    return []


def with_number(fields: object, path: tuple[object, ...], number: int) -> object:
    if not path:
        return number
    first, *rest = path
    if isinstance(fields, dict):
        return {**fields, first: with_number(fields[first], tuple(rest), number)}
    assert isinstance(fields, list)
    assert isinstance(first, int)
    changed = list(fields)
    changed[first] = with_number(fields[first], tuple(rest), number)
    return changed


KINDS = tuple(kind for kind, fields in honest(64).items() if numbers_in(fields))
#: Of the layouts that are fixed: the name of the one, and what makes it of two numbers.
FIXED = {
    "deliver": lambda a, b: _records.pack_deliver(0, GID, 7, b, [a, a], [3 << 4 | 1, 0]),
    "deliver, of whom": lambda a, b: _records.pack_deliver(
        b & 0xFFFFFFFF, a, b, b, [b], [_records.FROM_QUEUE]
    ),
    "ack": lambda a, b: _records.pack_ack(0, GID, a, b"\1"),
    "ack, of whom": lambda a, b: _records.pack_ack(b & 0xFFFFFFFF, a, b, b""),
    "put": lambda a, b: _records.pack_put(
        1, 2, 0, msgpack.packb({3: a, 4: b, 8: a, 9: b, 7: b}), b"put"
    ),
    "put, in seconds": lambda a, b: _records.pack_put(
        1, 2, 0, msgpack.packb({1: "key", 7: a, 9: b}), b"put"
    ),
}


def offsets_of(path: Path) -> list[int]:
    """Where the messages stand that are in a file."""
    with weclaw.open(path, readonly=True) as store:
        return [msg.offset for msg in store.queue().peek(10)]


def tried(records: list[bytes], time_us: int = 10**15, flags: int = _format.WHOLE) -> None:
    """A file that says all this between honest messages opens, gives what it has, is checked and
    repaired, and what comes later is delivered; again with the scratch folder gone, and good then.
    """

    def write(log):  # type: ignore[no-untyped-def]
        targets.part(log, targets.payload(records), flags, time_us)
        targets.part(
            log, targets.payload([b"".join(_records.pack_put(9, 2, 77, b"", b"behind"))]), 3
        )

    with targets.written(write) as path:
        for is_repaired in (False, True):
            use(path, is_repaired)
            shutil.rmtree(f"{path}.d", ignore_errors=True)


def use(path: Path, is_repaired: bool) -> None:
    with weclaw.open(path) as store:
        found = store.verify()
        assert not (is_repaired and found), "what was repaired comes back with a new index"
        names = [(info.topic, info.group) for info in store.groups()]
        for topic, group in [("default", "default"), ("default", "new"), *names[:4]]:
            with contextlib.suppress(ValueError):  # a name no topic can be given
                everything(store.queue(topic, group=group))
        fresh = store.queue("fresh")
        task = fresh.put("fresh")
        with fresh.get(timeout=5) as msg:
            assert (msg.id, msg.body) == (task, "fresh")
        assert fresh.status(task) == "done"
        assert fresh.qsize() == 0
        store.repair()
    with weclaw.open(path, readonly=True) as store:
        store.queue().stats()
        store.verify()


def everything(q: weclaw.Queue) -> None:
    """All that can be asked of a queue, and all its messages taken."""
    with contextlib.suppress(weclaw.WeclawError):
        q.resume()
        q.stats()
        q.offset
        for msg in q.peek(5):
            read(msg)
            q.status(msg.id)
        for _ in range(40):
            msg = q.get(block=False)
            read(msg)
            msg.extend(5)
            msg.lease_expires_at
            if msg.delivery_count % 2:
                msg.nack(backoff=0.0)
            else:
                msg.ack(result=1)
    with contextlib.suppress(weclaw.WeclawError):
        for letter in q.dlq:
            read(letter)
            letter.died_at, letter.failures, letter.redrive_count
        q.dlq.redrive()
        q.replay(offset="earliest")
        q.put("more", key="k", ttl=5)
        q.dlq.purge()
        q.purge()


def read(msg: weclaw.Message | weclaw.DeadLetter) -> None:
    with contextlib.suppress(weclaw.SerializationError):
        msg.body, msg.headers
    msg.id, msg.key, msg.enqueued_at, msg.retry_count, msg.delivery_count, msg.crash_count


def one_hostile(kind: int, where: int, number: int, at: int) -> bytes:
    fields = honest(at)[kind]
    places = numbers_in(fields)
    changed = with_number(fields, places[where % len(places)], number)
    return bytes((kind,)) + msgpack.packb(changed)


@pytest.fixture(scope="module")
def places() -> list[int]:
    return offsets_of(Path(targets._base()))


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(data=st.data())
def test_a_number_at_its_end_stops_nothing(
    kind: int, places: list[int], data: st.DataObject
) -> None:
    """One number of a record is hostile: the file opens and can be used, also when rebuilt."""
    at = data.draw(st.sampled_from(places))
    where, number = data.draw(st.integers(0, 30)), data.draw(hostile)
    plain = bytes((kind,)) + msgpack.packb(honest(at)[kind])
    tried([one_hostile(kind, where, number, at), plain])


@pytest.mark.parametrize("name", FIXED)
@QUICK
@given(data=st.data())
def test_nor_does_one_in_a_fixed_layout(name: str, places: list[int], data: st.DataObject) -> None:
    """The same of puts, deliveries and acks."""
    unsigned = st.sampled_from([*places, *NUMBERS])
    a, b = data.draw(unsigned), data.draw(unsigned)
    tried([b"".join(FIXED[name](a, b))] * 2)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_nor_do_many_of_them(data: st.DataObject) -> None:
    """Several hostile numbers in several records of several kinds, in one frame of any time."""
    at = st.sampled_from(offsets_of(Path(targets._base())))
    some = st.builds(one_hostile, st.sampled_from(KINDS), st.integers(0, 30), hostile, at)
    unsigned = st.one_of(at, st.sampled_from(NUMBERS))
    fixed = st.builds(
        lambda name, a, b: b"".join(FIXED[name](a, b)),
        st.sampled_from(sorted(FIXED)),
        unsigned,
        unsigned,
    )
    records = data.draw(st.lists(some | fixed, min_size=1, max_size=10))
    time_us = data.draw(st.sampled_from([0, 10**15, 2**58, NEVER, 2**64 - 1]))
    tried(records, time_us)


@pytest.mark.parametrize("time_us", [0, 2**58, NEVER, 2**64 - 1])
def test_a_frame_from_the_end_of_time_ends_no_time(time_us: int) -> None:
    """What is put after a frame with such a time is delivered, and its time can be told."""
    tried([PUT], time_us)


def test_nor_does_the_last_one_for_who_only_looks() -> None:
    """Where queue time goes on from it without a lock, what is there is told of all the same."""
    put = b"".join(_records.pack_put(0, 2, 0, b"", b"last"))
    with targets.written(
        lambda log: targets.part(log, targets.payload([put]), _format.WHOLE, 2**64 - 1)
    ) as path:
        with weclaw.open(path, readonly=True) as looking:
            seen = looking.queue().stats()
        with weclaw.open(path) as store:
            assert store.queue().stats()[:5] == seen[:5]


@pytest.mark.parametrize("record", [PUT, b"\x11\x90", b"\x11" + b"\xc1"])
def test_a_frame_that_is_no_checkpoint_says_it_is_one(record: bytes) -> None:
    """The flag of a frame is not believed when its record says otherwise."""
    tried([record], flags=_format.WHOLE | _format.CHECKPOINT_FRAME)


REFUSED = {
    "an offset beyond the log": (_records.CANCEL, [0, [2**56 + 1]]),
    "a group that is none": (_records.PURGE, [7]),
    "a count beyond 32 bits": (_records.RETURN, [GID, 88, 0, 0, 2**32, 0, 0, None]),
    "a total beyond counting": (
        _records.CHECKPOINT,
        [[[0, "default", 2**62 + 1, 0]], [], {}, []],
    ),
    "a time beyond never": (_records.PAUSE, [GID, 2**63, ""]),
    "two rows in one group": (_records.CARRY, [88, 7, 8, PUT, [ROW, ROW], [], []]),
    "two results in one group": (_records.CARRY, [88, 7, 8, PUT, [], [[GID, b""]] * 2, []]),
    "purged twice in one group": (_records.CARRY, [88, 7, 8, PUT, [], [], [GID, GID]]),
    "delivered twice over": (
        _records.CARRY,
        [88, 7, 8, PUT, [], [], [], [[GID, 1], [GID, 2]]],
    ),
    "a template that leases": (_records.CARRY, [88, 7, 8, PUT, [[0, 5, *ROW[2:]]], [], []]),
    "a row of another template": (_records.CARRY, [88, 7, 8, PUT, [[3, 1, *ROW[2:]]], [], []]),
    "an option of options": (_records.OPTION, [{"max_bytes": [[1]]}]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_record_may_say_is_damage_with_its_offset(name: str) -> None:
    """It is named by offset and reason in `verify`, counted in `stats`, and changes nothing."""
    kind, fields = REFUSED[name]
    record = bytes((kind,)) + msgpack.packb(fields)
    with pytest.raises(ValueError):
        _records.unpack(record)
    at: list[int] = []

    def write(log):  # type: ignore[no-untyped-def]
        at.append(log.pending_tail + _format.PART_BYTES)
        targets.part(log, targets.payload([record]))

    with weclaw.open(targets._base(), readonly=True) as store:
        before = store.queue().stats()
    with targets.written(write) as path:
        for _ in range(2):
            with weclaw.open(path) as store:
                ((offset, reason),) = store.verify()
                assert offset == at[0]
                assert reason
                stats = store.queue().stats()
                assert stats.damaged == 1
                assert stats[:5] == before[:5]
            shutil.rmtree(f"{path}.d")


def test_a_carry_of_what_comes_after_it_is_damage() -> None:
    """A message that is carried was put before."""
    later = Carry(2**50, 7, 8, PUT, [CarriedRow(*ROW[:4], 2**50, *ROW[5:])], [], [], [])  # type: ignore[arg-type]
    record = b"".join(_records.pack_carry(later))
    with (
        targets.written(lambda log: targets.part(log, targets.payload([record]))) as path,
        weclaw.open(path) as store,
    ):
        assert [reason for _, reason in store.verify()] == [
            f"a CARRY of a message at {2**50}, which comes after it"
        ]
        assert all(msg.body != b"carried" for msg in store.queue().peek(100))


def test_counting_stops_at_its_end() -> None:
    """A message that was delivered as often as can be counted is delivered once more."""
    at = offsets_of(Path(targets._base()))[0]
    full = _records.pack_return(
        GID, at, 3, delivery=2**32 - 1, retry=2**32 - 1, crash=0, failure=None
    )
    deliver = _records.pack_deliver(0, GID, 7, 1, [at], [_records.FROM_QUEUE])
    records = [b"".join(deliver), b"".join(full)]
    with (
        targets.written(lambda log: targets.part(log, targets.payload(records))) as path,
        weclaw.Queue(path, retry=weclaw.RetryPolicy(max_retries=2**40, backoff=0.0)) as q,
    ):
        for _ in range(2):
            msg = next(msg for msg in q if msg.offset == at)
            assert (msg.delivery_count, msg.retry_count) == (2**32 - 1, 2**32 - 1)
            msg.nack()
        assert q.stats().damaged == 0
