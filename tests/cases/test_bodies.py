"""What may be put, what may not, and how much of it."""

from __future__ import annotations

import datetime
import math

import pytest
from tests.helpers.queues import drain

import weclaw_embedded as weclaw


def nested(depth):
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


REFUSED = {
    "a tuple as key": {(1, 2): 3},
    "a set": {1, 2},
    "a frozenset": frozenset(),
    "a lambda": lambda: None,
    "an object": object(),
    "2**64": 2**64,
    "less than -2**63": -(2**63) - 1,
    "a lone surrogate": "\ud800",
    "a lone surrogate as key": {"\udfff": 1},
    "nesting of 1024": nested(1024),
    "nesting of 100000": nested(100_000),
    "a naive datetime": datetime.datetime(2026, 1, 1),  # noqa: DTZ001
    "a date": datetime.date(2026, 1, 1),
    "a float key": {1.5: 1},
    "deep inside": [{"x": [(1, {2})]}],
    "a type": int,
    "an exception": ValueError("x"),
    "complex": 1j,
}

IST = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
KEPT = {
    "a tuple": (1, 2),
    "tuples in lists in tuples": ([(1,), ()], ((),)),
    "int keys": {1: 2, -5: "x"},
    "a None key": {None: 1},
    "bool keys": {True: 1, False: 0},
    "bytes keys": {b"a": 1},
    "mixed keys": {"a": 1, b"a": 2, 7: 3, None: 4},
    "the year 1": datetime.datetime(1, 1, 1, tzinfo=datetime.timezone.utc),
    "the year 1 east of Greenwich": datetime.datetime(1, 1, 1, tzinfo=IST),
    "the year 9999": datetime.datetime(
        9999, 12, 31, 23, 59, 59, 999999, tzinfo=datetime.timezone.utc
    ),
    "microseconds": datetime.datetime(1969, 7, 20, 20, 17, 40, 123457, tzinfo=IST),
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "the least int": -(2**63),
    "the greatest int": 2**64 - 1,
    "a float": 0.1,
    "infinity": -math.inf,
    "minus zero": -0.0,
    "text": "grüße, 你好 \x00 🦀",
    "empty text": "",
    "bytes": b"\x00\xff",
    "empty bytes": b"",
    "nothing in it": [[], {}, (), "", b"", None],
    "nesting of 400": nested(400),
    "a task": {"prompt": "write a report", "n": [1, 2.5, None], "t": (True, b"")},
}


def same(one, other):
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(a, b) for a, b in zip(one.values(), other.values(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        while isinstance(one, list) and len(one) == len(other) == 1:
            one, other = one[0], other[0]
            if type(one) is not type(other):
                return False
        if not isinstance(one, (list, tuple)):
            return same(one, other)
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and one == other
    return one == other


@pytest.mark.parametrize("what", REFUSED)
def test_case_29_what_can_not_come_back_equal_is_refused(path, q, what):
    """Case 29: a body that could not come back equal is refused, and nothing is written."""
    q.put("before")
    bytes_before = path.read_bytes()
    with pytest.raises(weclaw.SerializationError) as caught:
        q.put(REFUSED[what])
    assert isinstance(caught.value, ValueError)
    with pytest.raises(weclaw.SerializationError):
        q.put_many(["fine", REFUSED[what], "fine too"])
    with pytest.raises(weclaw.SerializationError):
        q.put("x", headers={"h": REFUSED[what]})
    assert path.read_bytes() == bytes_before
    msg = q.get()
    with pytest.raises(weclaw.SerializationError):
        msg.ack(result=REFUSED[what])
    assert q.status(msg.id) == "leased"
    msg.ack(result="fine")
    q.put("after")
    assert drain(q) == ["after"]


@pytest.mark.parametrize("what", KEPT)
def test_case_29_the_rest_comes_back_equal_types_too(q, open_queue, what):
    """Case 29: the second list comes back equal and of the same types, from the disk too."""
    body = KEPT[what]
    task = q.put(body, headers={"h": body})
    q.put_many([body])
    q.close()
    q = open_queue()
    msg = q.get()
    assert same(msg.body, body)
    assert same(msg.headers, {"h": body})
    msg.ack(result=body)
    assert same(q.result(task), body)
    with q.get() as msg:
        assert same(msg.body, body)


def test_case_29_not_a_number(q):
    """Case 29: NaN comes back as NaN."""
    q.put([math.nan])
    assert math.isnan(q.get().body[0])


@pytest.mark.parametrize("limit", [1000, 100_000, 3_000_000])
def test_case_30_a_message_at_the_limit_and_one_past_it(open_queue, limit):
    """Case 30: a body of exactly the limit works both ways; one byte more is refused."""
    q = open_queue(max_message_bytes=limit, codec="raw")
    body = bytes(range(256)) * (limit // 256) + bytes(limit % 256)
    q.put(body)
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put(body + b"x")
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put_many([b"small", body + b"x"])
    assert issubclass(weclaw.MessageTooLargeError, weclaw.SendFailedError)
    assert drain(q) == [body]
    q.close()
    # The limit belongs to the file: the same for who does not give it.
    q = open_queue(codec="raw")
    q.put(body)
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put(body + b"x")
    assert drain(q) == [body]


def test_case_30_the_default_limit_is_16_mb_encoded(open_queue):
    """Case 30: 16 MiB once encoded is the default limit."""
    q = open_queue()
    body = bytes(16 * 2**20 - 5)  # msgpack takes 5 bytes to say how many follow
    q.put(body)
    with pytest.raises(weclaw.MessageTooLargeError):
        q.put(body + b"x")
    assert drain(q) == [body]


@pytest.mark.slow
def test_case_30_a_message_of_100_mb(open_queue):
    """Case 30: 100 MB work when the limit allows them, after a reopening too."""
    q = open_queue(max_message_bytes=128 * 2**20, retention=0)
    body = bytes(range(250)) * 400_000
    q.put(body)
    q.put("small")
    q.close()
    q = open_queue()
    assert drain(q) == [body, "small"]
