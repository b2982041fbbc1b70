"""Every record comes back as it was said, and nothing else is taken for one."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weclaw_embedded import _records as rec

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
gids = st.integers(2**63, 2**64 - 1)
offsets = st.integers(0, 2**56)
counts = st.integers(0, rec.MAX_COUNT)
totals = st.integers(0, rec.MAX_TOTAL)
times = st.integers(0, rec.NEVER)
priorities = st.integers(0, 9)
texts = st.text(max_size=20)
failures = st.tuples(times, texts, texts)
keyhashes = st.binary(min_size=8, max_size=8)
metas = st.fixed_dictionaries(
    {},
    optional={
        "key": texts,
        "id": texts,
        "due_us": st.integers(1, 2**63 - 1),
        "expiry_us": st.integers(1, 2**63 - 1),
        "headers": st.binary(min_size=1, max_size=20),
        "codec": texts,
        "skew_us": st.integers(1, 2**60),
        "delay_us": st.integers(1, rec.MAX_WAIT_US),
        "ttl_us": st.integers(1, rec.MAX_WAIT_US),
    },
)
META_NAMES = {
    "key": rec.META_KEY,
    "id": rec.META_ID,
    "due_us": rec.META_DUE_US,
    "expiry_us": rec.META_EXPIRY_US,
    "headers": rec.META_HEADERS,
    "codec": rec.META_CODEC,
    "skew_us": rec.META_SKEW_US,
    "delay_us": rec.META_DELAY_US,
    "ttl_us": rec.META_TTL_US,
}


def joined(record: rec.Record) -> bytes:
    """Return a record's bytes."""
    return b"".join(record)


puts = st.builds(
    lambda priority, codec, tid, meta, body: joined(
        rec.pack_put(priority, codec, tid, rec.pack_meta(**meta), body)
    ),
    priorities,
    st.integers(0, 4),
    u32,
    metas,
    st.binary(max_size=50),
)
checkpoints = st.builds(
    rec.Checkpoint,
    st.lists(st.builds(rec.CheckpointTopic, u32, texts, totals, totals), max_size=3),
    st.lists(
        st.builds(
            rec.CheckpointGroup,
            *(u32, gids, texts, offsets, offsets),
            st.lists(offsets, min_size=10, max_size=10),
            *(totals, totals, totals, times, texts),
        ),
        max_size=3,
    ),
    st.dictionaries(texts, st.none() | u64 | texts, max_size=3),
    st.lists(st.tuples(gids, priorities, offsets, offsets), max_size=3),
)


def unique(*fields: st.SearchStrategy[object]) -> st.SearchStrategy[list[tuple[object, ...]]]:
    """Some of each group, of none twice."""
    return st.lists(st.tuples(gids, *fields), max_size=3, unique_by=lambda told: told[0])


carries = st.builds(
    rec.Carry,
    *(offsets, u32, times, puts),
    unique(
        *(st.integers(1, 6), u64, times, offsets, times, counts, counts, counts, counts),
        *(st.lists(failures, max_size=3), texts, times),
    ).map(lambda rows: [rec.CarriedRow(*row) for row in rows]),  # type: ignore[arg-type]
    unique(st.binary(max_size=9)),
    unique().map(lambda rows: [gid for (gid,) in rows]),
    unique(counts),
)
kinds = st.sampled_from([rec.NACK, rec.LAPSED, rec.DIED, rec.RELEASE, rec.UNDO])
items = st.lists(st.tuples(offsets, priorities, st.booleans()), max_size=5)
# What is said, and how it is packed.
said = st.one_of(
    st.builds(rec.Deliver, u32, u64, u64, u64, items).map(
        lambda s: (
            s,
            rec.pack_deliver(
                *s[:4],
                [one for one, _, _ in s.items],
                [p << 4 | queued for _, p, queued in s.items],
            ),
        )
    ),
    st.builds(rec.Ack, u32, u64, u64, st.binary(max_size=9)).map(lambda s: (s, rec.pack_ack(*s))),
    st.builds(
        rec.Return, gids, offsets, kinds, times, counts, counts, counts, st.none() | failures
    ).map(lambda s: (s, rec.pack_return(*s[:3], **dict(list(s._asdict().items())[3:])))),
    st.builds(rec.Dead, gids, offsets, texts, times, counts, counts, st.none() | failures).map(
        lambda s: (s, rec.pack_dead(*s[:4], **dict(list(s._asdict().items())[4:])))
    ),
    st.builds(rec.Extend, gids, offsets, times).map(lambda s: (s, rec.pack_extend(*s))),
    st.builds(rec.Redrive, gids, st.lists(st.tuples(offsets, times), max_size=3)).map(
        lambda s: (s, rec.pack_redrive(*s))
    ),
    st.builds(rec.Cancel, u32, st.lists(offsets, max_size=3)).map(
        lambda s: (s, rec.pack_cancel(*s))
    ),
    st.builds(rec.Purge, gids).map(lambda s: (s, rec.pack_purge(*s))),
    st.builds(rec.PurgeDead, gids, st.lists(offsets, max_size=3)).map(
        lambda s: (s, rec.pack_purge_dead(*s))
    ),
    st.builds(rec.Topic, u32, texts).map(lambda s: (s, rec.pack_topic(*s))),
    st.builds(rec.Group, u32, gids, texts, offsets | st.sampled_from(["earliest", "latest"])).map(
        lambda s: (s, rec.pack_group(*s))
    ),
    st.builds(rec.GroupDrop, gids).map(lambda s: (s, rec.pack_group_drop(*s))),
    st.builds(rec.Pause, gids, times, texts).map(lambda s: (s, rec.pack_pause(*s))),
    st.builds(
        rec.Replay, gids, st.lists(st.tuples(offsets, priorities, keyhashes, times), max_size=3)
    ).map(lambda s: (s, rec.pack_replay(*s))),
    st.builds(rec.Option, st.dictionaries(texts, st.none() | u64, max_size=3)).map(
        lambda s: (s, rec.pack_option(*s))
    ),
    checkpoints.map(lambda s: (s, rec.pack_checkpoint(s))),
    carries.map(lambda s: (s, rec.pack_carry(s))),
    st.just(rec.Clean()).map(lambda s: (s, rec.pack_clean())),
    st.builds(rec.Void, st.lists(offsets, max_size=3)).map(lambda s: (s, rec.pack_void(*s))),
    st.builds(rec.Owner, u64, texts).map(lambda s: (s, rec.pack_owner(*s))),
    st.builds(
        rec.Damaged,
        st.lists(st.tuples(offsets, texts), max_size=3),
        st.lists(offsets, max_size=3),
    ).map(lambda s: (s, rec.pack_damaged(*s))),
)


@given(said)
def test_every_record_comes_back_as_it_was_said(pair: tuple[rec.AnyRecord, rec.Record]) -> None:
    """Unpacking undoes packing, from bytes and from views."""
    expected, record = pair
    assert rec.unpack(joined(record)) == expected
    assert rec.unpack(memoryview(joined(record))) == expected


@given(priorities, st.integers(0, 4), u32, metas, st.binary(max_size=50))
def test_a_put_comes_back_as_it_was_said(
    priority: int, codec: int, tid: int, meta: dict[str, object], body: bytes
) -> None:
    """The body is the bytes given, the meta what was given and no more."""
    record = joined(rec.pack_put(priority, codec, tid, rec.pack_meta(**meta), body))  # type: ignore[arg-type]
    put = rec.unpack(record)
    named = {META_NAMES[name]: value for name, value in meta.items()}
    assert put == rec.Put(priority, codec, tid, named, body)


def test_a_plain_put_costs_eight_bytes() -> None:
    """A message with nothing said besides has no meta, and its body is not copied."""
    assert rec.pack_meta() == b""
    body = b"x" * 100
    head, same = rec.pack_put(5, 0, 0, b"", body)
    assert len(head) == 8
    assert same is body


@pytest.mark.parametrize("size", [1, 60_000, 65_529, 65_530, 65_531, 65_532, 200_000])
def test_a_meta_of_any_length_comes_back(size: int) -> None:
    """The length of the meta has a long form, from 65535 bytes on."""
    meta = rec.pack_meta(key="k" * size)
    put = rec.unpack_put(joined(rec.pack_put(1, 2, 3, meta, b"body")))
    assert put == rec.Put(1, 2, 3, {rec.META_KEY: "k" * size}, b"body")


@given(
    puts | st.binary(max_size=20).map(lambda data: b"\1" + data) | st.binary(),
    st.integers(0, 60),
)
def test_a_put_that_is_not_taken_apart_is_checked_all_the_same(record: bytes, size: int) -> None:
    """What is whole, and its meta, is said as by taking it apart; so are its parts."""
    for data in (record, record[:size], memoryview(record)):
        try:
            put = rec.unpack_put(data)
        except ValueError:
            with pytest.raises(ValueError, match=r"PUT|msgpack"):
                rec.meta_of_put(data)
            continue
        assert rec.meta_of_put(data) == put.meta
        assert rec.kind_of_put(data) == (put.priority, put.codec)
        assert rec.split_put(data)[1] == put.body
        assert rec.body_of_put(data) == (put.codec, put.body)


@given(st.lists(st.builds(rec.Ack, u32, u64, u64, st.binary(max_size=9)), max_size=5))
def test_acks_packed_together_are_those_packed_one_by_one(acks: list[rec.Ack]) -> None:
    """With a result and without."""
    assert rec.pack_acks([(ack, bytes(ack.result)) for ack in acks]) == [
        rec.pack_ack(*ack) for ack in acks
    ]


@given(said | puts.map(lambda put: (None, (put,))), st.data())
def test_a_record_cut_short_is_refused(
    pair: tuple[rec.AnyRecord | None, rec.Record], data: st.DataObject
) -> None:
    """No part of a record is taken for a whole one, except where the body or the result is cut."""
    record = joined(pair[1])
    cut = data.draw(st.integers(0, len(record) - 1))
    try:
        part = rec.unpack(record[:cut])
    except ValueError:
        return
    assert isinstance(part, (rec.Put, rec.Ack))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    """Garbage raises ValueError and nothing else."""
    for start in (b"", *(bytes((kind,)) for kind in range(25))):
        try:
            rec.unpack(start + data)
        except ValueError:
            continue


@given(st.recursive(u64 | texts | st.none(), lambda inner: st.lists(inner, max_size=12)))
def test_any_fields_are_a_record_or_refused(fields: object) -> None:
    """Well-formed msgpack that says something else raises ValueError and nothing else."""
    for kind in range(4, 25):
        try:
            rec.unpack(bytes((kind,)) + msgpack.packb(fields))
        except ValueError:
            continue


def test_nested_garbage_is_refused() -> None:
    """Depth and unhashable keys of msgpack are no other error."""
    for garbage in (b"\x91" * 5000, b"\x81\x91\x01\x01", b"\xdf\xff\xff\xff\xff", b"\xc7\x00\xff"):
        with pytest.raises(ValueError):
            rec.unpack(b"\x07" + garbage)


def test_a_later_version_may_add_fields() -> None:
    """Fields at the end of a record or an item that are not known here are passed over."""
    gid = rec.group_id("default", "default")
    assert rec.unpack(b"\x09" + msgpack.packb([gid, "more"])) == rec.Purge(gid)
    assert rec.unpack(b"\x07" + msgpack.packb([gid, [[1, 2, 3]]])) == rec.Redrive(gid, [(1, 2)])


def test_types_from_64_on_may_be_passed_over() -> None:
    """Of an unknown record one knows whether it may be ignored."""
    assert rec.unpack(b"\x40anything") == rec.Unknown(64)
    for kind in (0, 23, 63):
        with pytest.raises(ValueError, match=f"unknown type {kind}"):
            rec.unpack(bytes((kind,)))


def test_numbers_of_names_are_what_files_hold() -> None:
    """They are written into files: changing them would lose what stands under them."""
    assert rec.topic_id("default") == 0
    assert rec.topic_id("tasks") == 0x5C4AF150
    assert rec.group_id("default", "default") == 0xD11BC902EF63C219
    assert rec.key_hash("a").hex() == "40f89e395b66422f"
