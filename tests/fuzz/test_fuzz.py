"""Any bytes are read or refused with an error that is ours, and small bytes take little memory."""

from __future__ import annotations

import resource
import struct
import sys
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from tests.fuzz import targets

from weclaw_embedded import _format, _records

# The quick ones try the same each time; what is new is found by the long one and by hand.
QUICK = settings(max_examples=150, deadline=None, derandomize=True)
FILES = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    # Without shrinking: a file is written and opened for each step of it.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LONG = settings(FILES, max_examples=600, derandomize=False)

u32 = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**32 - 1]))
u64 = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 64, 88, 2**56, 2**63 - 1, 2**63, 2**64 - 1]),
)
GID = _records.group_id("default", "default")
gids = st.sampled_from([GID, 0, 1, GID ^ 1, 2**64 - 1])
tids = st.sampled_from([0, 1, 2**32 - 1])
#: Where records of the base file stand, and where none does.
places = st.one_of(st.integers(64, 1500), u64)
texts = st.text(max_size=8)
failures = st.none() | st.tuples(u64, texts, texts)
priorities = st.integers(0, 9)
metas = st.dictionaries(
    st.integers(0, 12),
    st.one_of(u64, st.integers(-(2**63), 2**63 - 1), texts, st.binary(max_size=8)),
    max_size=5,
)


@st.composite
def puts(draw: st.DrawFn) -> bytes:
    meta = draw(st.one_of(st.just({}), metas))
    packed = msgpack.packb(meta) if meta else draw(st.binary(max_size=4))
    body = draw(st.binary(max_size=20))
    record = _records.pack_put(draw(priorities), draw(st.integers(0, 6)), draw(tids), packed, body)
    return b"".join(record)


def record(kind: int, *fields: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    return st.tuples(*fields).map(lambda said: bytes((kind,)) + msgpack.packb(list(said)))


def lists(*fields: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(st.tuples(*fields), max_size=3)


carried_rows = lists(
    *(gids, st.integers(1, 6), u64, u64, u64, u64, u32, u32, u32, u32),
    *(lists(u64, texts, texts), texts, u64),
)
checkpoint_groups = lists(
    *(tids, gids, texts, u64, u64, st.lists(u64, min_size=10, max_size=10)),
    *(u64, u64, u64, u64, texts),
)
#: Records that are well formed, and say whatever they like.
hostile = st.one_of(
    puts(),
    st.tuples(tids, gids, u64, u64, lists(places, st.integers(0, 255))).map(
        lambda said: b"".join(
            _records.pack_deliver(*said[:4], [one for one, _ in said[4]], [f for _, f in said[4]])
        )
    ),
    st.tuples(tids, gids, places, st.binary(max_size=4)).map(
        lambda said: b"".join(_records.pack_ack(*said))
    ),
    record(_records.RETURN, gids, places, st.integers(0, 4), u64, u32, u32, u32, failures),
    record(_records.DEAD, gids, places, texts, u64, u32, u32, failures),
    record(_records.EXTEND, gids, places, u64),
    record(_records.REDRIVE, gids, lists(places, u64)),
    record(_records.CANCEL, tids, st.lists(places, max_size=3)),
    record(_records.PURGE, gids),
    record(_records.PURGE_DEAD, gids, st.lists(places, max_size=3)),
    record(_records.TOPIC, tids, texts),
    record(
        _records.GROUP, tids, gids, texts, st.sampled_from(["earliest", "latest", 0, 2**64 - 1])
    ),
    record(_records.GROUP_DROP, gids),
    record(_records.PAUSE, gids, u64, texts),
    record(
        _records.REPLAY,
        gids,
        lists(places, priorities, st.sampled_from([b"", b"12345678"]), u64),
    ),
    record(_records.OPTION, st.dictionaries(texts, u64 | texts | st.none(), max_size=3)),
    record(
        _records.OPTION,
        st.fixed_dictionaries(
            {}, optional={"retention": u64 | texts, "max_bytes": u64 | texts | st.none()}
        ),
    ),
    record(
        _records.CHECKPOINT,
        lists(tids, texts, u64, u64),
        checkpoint_groups,
        st.just({}),
        lists(gids, priorities, u64, u64),
    ),
    record(
        _records.CARRY,
        *(places, u64, u64, puts(), carried_rows),
        *(lists(gids, st.binary(max_size=4)), st.lists(gids, max_size=2)),
    ),
    record(_records.VOID, st.lists(places, max_size=3)),
    record(_records.OWNER, u64, texts),
    record(_records.DAMAGED, lists(places, texts)),
    st.binary(min_size=1, max_size=40),
)


@pytest.mark.parametrize("target", targets.TARGETS[:7], ids=lambda target: target.__name__)
def test_any_bytes_are_read_or_refused(target: Callable[[bytes], None]) -> None:
    """Each reader of bytes takes any: what it raises is told in its documentation."""

    @QUICK
    @given(st.binary(max_size=200))
    @example(b"")
    @example(b"\xff" * 200)
    def tried(data: bytes) -> None:
        target(data)

    tried()


@QUICK
@given(hostile)
def test_any_record_is_read_or_refused(data: bytes) -> None:
    """Well-formed or not, a record is one or a ValueError."""
    targets.record(data)


@FILES
@given(st.binary(max_size=9000), st.booleans())
def test_any_file_opens_or_is_refused(data: bytes, ours: bool) -> None:
    """A file of any bytes, also behind a good header, opens or raises a typed error."""
    head = _format.pack_header(_format.FileHeader(targets.SEGMENT, targets.STORE_ID, 1, 1, 1))
    targets.file(head + data if ours else data)


@FILES
@given(st.binary(min_size=1, max_size=400))
def test_any_payload_opens_or_is_set_aside(data: bytes) -> None:
    """A frame whose checksum is right and whose payload is anything stops nothing."""
    targets.frames(data)


@FILES
@given(st.lists(hostile, min_size=1, max_size=8))
def test_a_file_may_say_what_it_likes(records: list[bytes]) -> None:
    """Records that contradict all that was said before open, or raise a typed error."""
    targets.frames(targets.payload([data for data in records if data]))


@pytest.mark.slow
@LONG
@given(st.lists(hostile, min_size=1, max_size=12))
def test_a_file_may_say_what_it_likes_for_long(records: list[bytes]) -> None:
    """The same with many more of them."""
    targets.frames(targets.payload([data for data in records if data]))


#: Histories that once raised what is no error of ours.
FOUND = {
    "an ack of a group that was dropped meanwhile": [
        b"".join(_records.pack_group(0, GID ^ 1, "another")),
        b"".join(_records.pack_put(0, 2, 0, b"", b"first")),
        b"".join(
            _records.pack_deliver(0, GID ^ 1, 7, _records.NEVER, [200], [_records.FROM_QUEUE])
        ),
        b"".join(_records.pack_group_drop(GID ^ 1)),
        b"".join(_records.pack_ack(0, GID ^ 1, 200, b"\x01")),
    ],
    "a limit that is no number": [b"".join(_records.pack_option({"max_bytes": "much"}))],
    "an age that is no number": [b"".join(_records.pack_option({"retention": "long"}))],
    "a size that is no number": [
        b"".join(_records.pack_option({"retention_bytes": [1], "max_message_bytes": {}}))
    ],
    "a carried letter at a place where no record begins": [
        b"".join(
            _records.pack_carry(
                _records.Carry(
                    65,
                    7,
                    8,
                    b"".join(_records.pack_put(0, 2, 0, b"", b"x")),
                    [_records.CarriedRow(GID, 6, 0, 0, 65, 0, 1, 0, 0, 0, [], "no", 9)],
                    [],
                    [],
                    [],
                )
            )
        )
    ],
    "a topic that counts to the end": [
        b"".join(
            _records.pack_checkpoint(
                _records.Checkpoint(
                    [_records.CheckpointTopic(0, "default", 2**64 - 1, 2**64 - 1)], [], {}, []
                )
            )
        )
    ],
    "counters at their end": [
        b"".join(_records.pack_deliver(0, GID, 7, 1, [place], [_records.FROM_QUEUE]))
        for place in (164,)
    ]
    + [
        b"".join(
            _records.pack_return(GID, 164, 0, delivery=2**32 - 1, retry=2**32 - 1, crash=2**32 - 1)
        )
    ]
    * 2,
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_mended(name: str) -> None:
    """Records that found a defect: the file opens and can be used."""
    targets.frames(targets.payload(FOUND[name]))


BOMBS = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "arrays in arrays": b"\xdd\x00\xff\xff\xff" * 30,
    "nesting": b"\x91" * 5000,
    "a length of 1 GiB": struct.pack("<IIQQ", 0, 2**30, 259, 1),
    "a long meta": b"\x01\x00\xff\xff\x00\x00\x00\x00\xff\xff\xff\xff",
    "many deliveries": b"\x02\x00\xff\xff" + bytes(28),
}


@pytest.mark.parametrize("name", BOMBS)
def test_few_bytes_do_not_ask_for_much_memory(name: str) -> None:
    """What a few bytes announce is believed only when it is there."""
    data = BOMBS[name]
    tries = [data, *(bytes((kind,)) + data for kind in range(1, 24))]
    tracemalloc.start()
    try:
        for one in tries:
            for target in targets.TARGETS[:7]:
                target(one)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes"


@pytest.mark.parametrize("name", BOMBS)
def test_few_bytes_in_a_file_do_not_ask_for_much_memory(name: str) -> None:
    """The same in a file: the process stays small, and opening it ends."""
    unit = 1 if sys.platform == "darwin" else 1024
    data = BOMBS[name]
    targets.said(b"\x01" + data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for one in (data, b"\x12" + data, b"\x11" + data):
        targets.frames(one)
        targets.said(one)
        targets.file(targets._format.MAGIC + one)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert after - before < 200 << 20
