"""Bodies come back equal or are refused, whichever codec wrote them."""

from __future__ import annotations

import collections
import enum
import json
import math
import pickle
import sys
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weclaw_embedded import _codecs, _values
from weclaw_embedded._codecs import (
    check_codec,
    decode,
    encode_many,
    encoder,
    pack_value,
    pack_values,
    unpack_value,
)
from weclaw_embedded.errors import SerializationError

UTC = timezone.utc


def encode(codec: Any, body: Any) -> tuple[int, str | None, bytes]:
    number, name, to_bytes = encoder(codec)
    return number, name, to_bytes(body)


def there_and_back(body: Any, codec: Any = "msgpack") -> Any:
    number, name, data = encode(codec, body)
    assert type(data) is bytes
    return decode(number, name, data, codec=codec)


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down, with NaN equal to itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            type(a) is type(b) and a == b and same(x, y)
            for (a, x), (b, y) in zip(left.items(), right.items(), strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


text = st.text(st.characters(exclude_categories=["Cs"]))
offsets = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59))
datetimes = st.builds(
    lambda when, offset: when.replace(tzinfo=timezone(offset)), st.datetimes(), offsets
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | text
    | st.binary()
    | datetimes
)
keys = text | st.binary() | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.none()
bodies = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(text, inner, max_size=5)
    ),
    max_leaves=25,
)


@given(bodies)
@settings(max_examples=300, deadline=None)
@example((1, 2))
@example({1: 2})
@example({None: 1})
@example(math.nan)
@example(datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))))
@example(datetime(9999, 12, 31, 23, 59, 59, 999999, timezone(timedelta(hours=-14))))
@example(datetime(2000, 1, 1, tzinfo=timezone(timedelta(microseconds=1))))
@example(datetime(2000, 1, 1, tzinfo=timezone(timedelta(hours=-1, microseconds=1))))
@example([(), [], {}, "", b""])
@example(-0.0)
def test_a_body_comes_back_equal_types_too(body: Any) -> None:
    assert same(there_and_back(body), body)


json_bodies = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner, max_size=5),
    max_leaves=25,
)


@given(json_bodies)
@settings(deadline=None)
def test_json_comes_back_equal_and_is_json(body: Any) -> None:
    number, _, data = encode("json", body)
    assert number == _codecs.CODEC_JSON
    assert same(json.loads(data), body)
    assert same(there_and_back(body, "json"), body)


@given(bodies)
@settings(deadline=None)
def test_json_gives_back_what_was_put_or_refuses_it(body: Any) -> None:
    try:
        back = there_and_back(body, "json")
    except SerializationError:
        return
    assert same(back, body)


@given(st.binary())
def test_raw_bytes_come_back(body: bytes) -> None:
    assert there_and_back(body, "raw") == body


@pytest.mark.parametrize("codec", ["msgpack", "json", "raw", "pickle"])
def test_many_are_encoded_as_each_of_them_is(codec: str) -> None:
    to_bytes = encoder(codec)[2]
    some = [b"x", b""] if codec == "raw" else [{"a": 1}, "x", {"b": [1, 2.5]}]
    assert encode_many(to_bytes, some) == [to_bytes(body) for body in some]


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\x7f\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x91" * 2000)
@example(b"\xc1")
@example(b"\xc7\x00\x02")
@example(b"\x81\x90\x01")
@example(msgpack.packb(msgpack.ExtType(1, b"2024-01-01T00:00:00")))
@example(msgpack.packb(msgpack.ExtType(1, b"2024-01-01T00:00:00+00:00[../../etc/passwd]")))
@example(msgpack.packb(msgpack.ExtType(1, b"2024-01-01T00:00:00+00:00[Europe]")))
@example(b"\xc7\x05\xff12345")
@example(msgpack.packb(msgpack.ExtType(77, b"?")))
def test_any_bytes_are_read_or_refused_with_the_typed_error(data: bytes) -> None:
    for number in range(3):
        try:
            decode(number, None, data, codec="msgpack")
        except SerializationError as error:
            assert str(error)  # noqa: PT017  most inputs raise, some are valid


class Text(str):
    __slots__ = ()


class Colour(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: int


class Louder(str):
    """A str that is not equal to the plain one."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Louder) and str.__eq__(self, other)

    __hash__ = str.__hash__


class Rude(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = str.__hash__


class Naive(tzinfo):
    def utcoffset(self, when: datetime | None) -> None:
        return None


class Broken(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        raise RuntimeError("no")


class NoRepr:
    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError("no")


def nested(levels: int, kind: Any = list) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if kind is dict else kind((value,))
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED = {
    "a tuple as key": {(1, 2): 3},
    "a float as key": {1.5: 3},
    "a datetime as key": {datetime(2024, 1, 1, tzinfo=UTC): 1},
    "a frozenset as key": {frozenset(): 1},
    "a set": {1, 2},
    "a set inside": {"a": [{"b": {1}}]},
    "a function": lambda: None,
    "an object": object(),
    "an object that can't be shown": {NoRepr(): 1},
    "a class": dict,
    "too large an int": 2**64,
    "too small an int": -(2**63) - 1,
    "too large an int as key": {2**64: 1},
    "a lone surrogate": "a\ud800",
    "a lone surrogate in a key": {"\udfff": 1},
    "a naive datetime": datetime(2024, 1, 1),  # noqa: DTZ001  that is the point
    "a datetime of a zone without offset": datetime(2024, 1, 1, tzinfo=Naive()),
    "a datetime of a broken zone": datetime(2024, 1, 1, tzinfo=Broken()),
    "a date": datetime(2024, 1, 1, tzinfo=UTC).date(),
    "a bytearray": bytearray(b"x"),
    "a bytearray inside": {"a": [bytearray(b"x")]},
    "a memoryview": memoryview(b"x"),
    "an extension type": msgpack.ExtType(2, b""),
    "an extension type inside": {"a": [msgpack.ExtType(2, b""), 1]},
    "a msgpack timestamp": [msgpack.Timestamp(1)],
    "a subclass that isn't equal": Louder("a"),
    "a subclass whose comparison raises": Rude("a"),
    "a key that isn't equal": {Louder("a"): 1},
    "nesting of 1024": nested(1024),
    "nesting of 1024 tuples": nested(1024, tuple),
    "nesting of 1024 dicts": nested(1024, dict),
    "nesting one past the limit": nested(_codecs.MAX_NESTING + 1),
    "nesting of 100 000": nested(100_000),
    "itself": endless(),
    "a complex number": 1j,
    "a generator": (i for i in range(3)),
}


@pytest.mark.parametrize("codec", ["msgpack", "json", "raw"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_come_back_is_refused(what: str, codec: str) -> None:
    with pytest.raises(SerializationError) as caught:
        encode(codec, REFUSED[what])
    assert "nothing was written" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def said_of(pack: Any, values: Any) -> Any:
    """What packing gives, or what it says."""
    try:
        return pack(values)
    except SerializationError as error:
        return str(error)


def one_by_one(values: list[Any]) -> list[bytes]:
    return [pack_value(value) for value in values]


@pytest.mark.parametrize("others", [[{"a": "b", "c": 1}], [{"a": [1]}, (2,)]])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_alone_is_refused_among_others(what: str, others: list[Any]) -> None:
    for body in (REFUSED[what], {"a": REFUSED[what]}):
        values = [*others, body, *others]
        with pytest.raises(SerializationError) as refused:
            pack_values(values)
        assert str(refused.value) == said_of(pack_value, body)


strange = st.sampled_from(
    [
        bytearray(b"x"),
        memoryview(b"x"),
        msgpack.ExtType(2, b""),
        msgpack.Timestamp(1),
        Text("a"),
        Louder("a"),
        Rude("a"),
        Colour.RED,
        Level.HIGH,
        Point(1, 2),
        collections.OrderedDict(a=1),
        2**64,
        object,
    ]
)
# Many are equal, and not of the same type.
near_keys = st.sampled_from(
    ["a", "1", Text("a"), b"a", 1, 1.0, True, 0, 0.0, False, None, Level.HIGH, 3, (1,), Louder("a")]
)
near_bodies = st.dictionaries(near_keys, scalars | strange, max_size=3) | st.recursive(
    scalars | strange,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(near_keys, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.just("a"), scalars) | near_bodies, max_size=6))
@settings(max_examples=500, deadline=None)
@example([{1: "a"}, {1.0: "a"}])
@example([{True: "a"}, {1.0: "a"}])
@example([{"a": 1}, {"a": bytearray(b"x")}])
@example([{"a": 1}, msgpack.ExtType(2, b"")])
@example([{"a": 1}, "a", 1, (1, 2)])
@example([])
def test_many_bodies_are_packed_or_refused_as_each_of_them_is(values: list[Any]) -> None:
    assert said_of(pack_values, values) == said_of(one_by_one, values)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"a": [1, {"b": {1}}]}, "body['a'][1]['b']: "),
        ({"a": (1, 2**64)}, "body['a'][1]: an int"),
        ({"a": {"k": {(1,): 2}}}, "body['a']['k'][(1,)]: a key of type tuple"),
        ([b"", "\ud800"], "body[1]: the text has a lone surrogate"),
    ],
)
def test_a_refusal_names_the_place(body: Any, place: str) -> None:
    with pytest.raises(SerializationError) as caught:
        encode("msgpack", body)
    assert str(caught.value).startswith(place)


def test_a_refusal_stays_short() -> None:
    body: Any = {1}
    for _ in range(100):
        body = {"k" * 1000: body}
    with pytest.raises(SerializationError) as caught:
        encode("msgpack", body)
    assert len(str(caught.value)) < 600


def test_the_next_body_is_fine_after_a_refused_one() -> None:
    for body in REFUSED.values():
        with pytest.raises(SerializationError):
            encode("msgpack", body)
        assert there_and_back({"a": (1, "x")}) == {"a": (1, "x")}


@pytest.mark.parametrize(
    ("body", "plain"),
    [
        (Text("a"), "a"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Point(1, 2), (1, 2)),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        ({Text("k"): Point(1, [Level.HIGH])}, {"k": (1, [3])}),  # type: ignore[arg-type]
        (Point(math.nan, math.inf), (math.nan, math.inf)),  # type: ignore[arg-type]
    ],
)
def test_a_subclass_comes_back_as_the_plain_type_it_is_equal_to(body: Any, plain: Any) -> None:
    assert same(there_and_back(body), plain)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_nesting_up_to_the_limit_comes_back(kind: Any) -> None:
    body = nested(_codecs.MAX_NESTING, kind)
    back = there_and_back(body)
    for _ in range(_codecs.MAX_NESTING):
        assert type(back) is kind
        back = back["a"] if kind is dict else back[0]
    assert back == 1


def test_a_tuple_that_looks_like_the_mark_is_told_from_it() -> None:
    body = [("a",), [None], ((),), [[]], ([],)]
    assert same(there_and_back(body), body)


def zone(key: str) -> ZoneInfo:
    try:
        return ZoneInfo(key)
    except ZoneInfoNotFoundError:
        pytest.skip("this machine has no time zone data")


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.parametrize("hour", [1, 2, 3, 12])
def test_a_zone_comes_back_in_the_hour_that_is_repeated(hour: int, fold: int) -> None:
    """Such an hour of a zone is equal to none of a fixed offset, so the zone must be kept."""
    when = datetime(2024, 10, 27, hour, 30, tzinfo=zone("Europe/Berlin"), fold=fold)
    back = there_and_back(when)
    assert back == when
    assert back.utcoffset() == when.utcoffset()
    assert back.tzinfo is when.tzinfo


def test_a_zone_this_machine_does_not_know_becomes_its_offset() -> None:
    data = msgpack.packb(msgpack.ExtType(1, b"2024-01-01T00:00:00+05:00[Mars/Olympus]"))
    assert unpack_value(data) == datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5)))


def test_pickle_is_read_only_by_a_handle_opened_with_it() -> None:
    number, name, data = encode("pickle", {1, 2})
    assert decode(number, name, data, codec="pickle") == {1, 2}
    with pytest.raises(SerializationError, match="codec='pickle'"):
        decode(number, name, data, codec="msgpack")


def test_what_can_not_be_pickled_is_refused() -> None:
    with pytest.raises(SerializationError):
        encode("pickle", lambda: None)
    with pytest.raises(SerializationError):
        decode(_codecs.CODEC_PICKLE, None, b"garbage", codec="pickle")
    with pytest.raises(SerializationError):
        decode(_codecs.CODEC_PICKLE, None, pickle.dumps(1)[:-1], codec="pickle")


class Upper:
    name = "upper"

    def encode(self, body: str, /) -> bytes:
        return body.upper().encode()

    def decode(self, data: bytes, /) -> str:
        return data.decode().lower()


class Nameless(Upper):
    name = None  # type: ignore[assignment]


def test_a_codec_of_ones_own_is_used_and_remembered() -> None:
    number, name, data = encode(Upper(), "abc")
    assert (number, name, data) == (_codecs.CODEC_OTHER, "upper", b"ABC")
    assert decode(number, name, memoryview(data), codec=Upper()) == "abc"
    for other in ("msgpack", "pickle", Nameless()):
        with pytest.raises(SerializationError, match="'upper'"):
            decode(number, name, data, codec=other)


def test_a_codec_without_a_name_goes_by_its_class() -> None:
    _, name, _ = encode(Nameless(), "abc")
    assert name is not None
    assert name.endswith("Nameless")


def test_whatever_a_codec_of_ones_own_raises_is_a_serialization_error() -> None:
    with pytest.raises(SerializationError):
        encode(Upper(), 1)
    with pytest.raises(SerializationError):
        decode(_codecs.CODEC_OTHER, "upper", b"\xff", codec=Upper())

    class NoBytes(Upper):
        def encode(self, body: Any, /) -> Any:
            return body

    with pytest.raises(SerializationError, match="str, not bytes"):
        encode(NoBytes(), "abc")


@pytest.mark.parametrize("codec", ["msgpack", "json", "raw", "pickle", Upper()])
def test_a_codec_is_accepted(codec: Any) -> None:
    assert check_codec(codec) is codec


@pytest.mark.parametrize("codec", ["yaml", "", "MSGPACK"])
def test_an_unknown_codec_is_refused(codec: str) -> None:
    with pytest.raises(ValueError, match="not known"):
        check_codec(codec)


@pytest.mark.parametrize("codec", [None, 1, object(), Upper, b"msgpack"])
def test_what_is_no_codec_is_refused(codec: Any) -> None:
    with pytest.raises(TypeError):
        check_codec(codec)


def test_a_codec_from_the_future_is_refused() -> None:
    with pytest.raises(SerializationError, match="number 9"):
        decode(9, None, b"", codec="msgpack")


def test_values_say_what_they_are_when_refused() -> None:
    with pytest.raises(SerializationError, match=r"^result\['a'\]: "):
        pack_value({"a": {1}}, "result")
    with pytest.raises(SerializationError, match=r"^headers"):
        pack_value({"a": object()}, "headers")


def test_a_large_value_does_not_keep_its_memory() -> None:
    _values._packers.clear()
    pack_value(b"x" * (8 << 20))
    assert not _values._packers
    pack_value(b"x")
    assert len(_values._packers) == 1


def test_a_put_from_within_a_put_finds_its_own_packer() -> None:
    class Nosy(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            assert there_and_back({"inner": [1, (2,)]}) == {"inner": [1, (2,)]}
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    assert there_and_back({"a": [Nosy("x")], "b": 2}) == {"a": ["x"], "b": 2}


@pytest.mark.skipif(sys.platform == "win32", reason="no POSIX")
def test_text_of_all_scripts_comes_back() -> None:
    body = {"提示": "写一份报告", "prompt": "naïve café 🦀", "اسم": "تقرير", "\x00": "\U0010ffff"}
    assert there_and_back(body) == body
    assert there_and_back(body, "json") == body
