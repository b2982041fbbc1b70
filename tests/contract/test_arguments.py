"""Contract 10: bad arguments are `ValueError` or `TypeError`, change nothing and make no file."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import os
import uuid
from typing import Any

import pytest

import weclaw_embedded as weclaw
from weclaw_embedded import aio, threads

UTC = datetime.timezone.utc
NAN, INF = float("nan"), float("inf")
NAIVE = datetime.datetime(2030, 1, 1)  # noqa: DTZ001
NOW = datetime.datetime(2030, 1, 1, tzinfo=UTC)
LONE = "\ud800"
LONG = "x" * 10_000

NAMES = ["", 5, None, b"x", "a\0b", LONG, LONE, True, ["a"]]
POSITIVE = [0, -1, NAN, INF, "5", True, 1e12, [1]]
SECONDS = [value for value in POSITIVE if value != 0] + [None]
COUNTS = [0, -1, True, 1.5, "1", None, NAN]
IDS = [5, None, b"m", True, ["m"]]
LISTS = ["m", b"m", 5, [5], ["m", 5], True]
RESULTS = [{1, 2}, object(), NAIVE, 2**64, LONE, len]

BLOCK = {"block": [3, "no", None, 0, 1]}
TIMEOUT = {"timeout": [-1, NAN, "5", True, b"1", [1], -INF]}
VISIBILITY = {"visibility_timeout": [v for v in POSITIVE if v is not None]}
PUT = {
    "id": ["", 5, b"x", LONE, LONG, True, ["a"], uuid.UUID(int=3)],
    "key": ["", 5, b"k", LONE, 7 * LONG, True, ("a",)],
    "priority": [-1, 10, 1.0, True, False, "1", None, NAN],
    "delay": [-1, NAN, INF, "5", None, True, False, 1e12],
    "eta": [NAIVE, 5.0, "2030", datetime.date(2030, 1, 1), True],
    "ttl": POSITIVE,
    "headers": ["x", [1], 5, [("a", 1)], {1: object()}, {"a": {1, 2}}, {(1, 2): 3}],
    "no_such": [1],
}
MANY = {"bodies": ["abc", b"abc", {"a": 1}, 5, None, bytearray(b"x"), "", b"", {}, weclaw.Put("x")]}
REPLAY = {
    "offset": [-1, "x", "latest", 1.5, True, b"earliest", NAN, 2**70, [1]],
    "since": [NAIVE, 5, "2020", True, datetime.date(2020, 1, 1)],
    "ids": [*LISTS, weclaw.Put("x")],
}
QUEUE = {
    "topic": NAMES,
    "group": NAMES,
    "visibility_timeout": [0, -1, NAN, INF, "5", True, b"1", 1e300],
    "retry": [None, 3, "x", {}],
    "on_dead": [3, "x"],
    "start": ["x", -1, 1.5, True, None, 2**60, b"earliest"],
}
STORE = {
    "flush": ["x", None, 1, b"sync"],
    "flush_interval_ms": [0, -1, "5", NAN, INF, True, None],
    "flush_messages": COUNTS,
    "retention": [-1, "48h", NAN, True],
    "retention_bytes": [-1, 1.5, "1", True],
    "max_bytes": [0, -1, 1.5, "1", True],
    "max_message_bytes": [0, -1, None, 1.5, 2**40, True],
    "segment_bytes": [0, 1, 65535, 65537, 2**40, "65536", 65536.0, True],
    "codec": ["x", None, 5, object(), b"raw"],
    "replica": [5, "", [], [""], ["a", 5], b"", True, "a\0b", "\udcff", ["a", "\udcff"]],
    "sync_replica": [1, 0, None, "yes"],
    "replica_timeout": [0, -1, None, NAN, INF, "5", True],
    "readonly": [1, None, "yes"],
    "consumer": ["", 5, "a\0", LONE, LONG, b"a"],
    "no_such": [1],
}
MAXSIZE = {"maxsize": ["5", None, [1], NAN]}
OWN_MAXSIZE = {"maxsize": [1.5, True, 2**70]}
WORKER = {
    "q": [None, 5, "tasks.wq"],
    "handler": [None, 5, "module:handler"],
    "concurrency": COUNTS,
    "max_run_time": [0, -1, NAN, "5", True],
    "grace": [-1, NAN, INF, "5", None, True],
    "pause_after": [-1, 1.5, True, "1", None],
    "pause_for": [-1, NAN, INF, "5", None, True],
}
RETRY = {
    "max_retries": COUNTS[1:],
    "max_crashes": COUNTS[1:],
    "backoff": SECONDS,
    "multiplier": [0, 0.5, -1, NAN, INF, "2", None, True],
    "max_backoff": SECONDS,
    "jitter": [-0.1, 1.1, NAN, "x", None, True],
}


def table(*rows: Any) -> Any:
    """One parameter set for each bad value: a row is (call, good arguments, bad ones)."""
    return [
        pytest.param(name, {**good, argument: value}, id=f"{name}-{argument}-{value!r:.20}")
        for name, good, *bad in rows
        for arguments in bad
        for argument, values in arguments.items()
        for value in values
    ]


# Opening -------------------------------------------------------------------------------------

OPENERS = {
    "open": weclaw.open,
    "Queue": weclaw.Queue,
    "AsyncQueue": weclaw.AsyncQueue,
    "Producer": weclaw.Producer,
    "Consumer": weclaw.Consumer,
    "aio.Queue": aio.Queue,
    "aio.PriorityQueue": aio.PriorityQueue,
    "threads.Queue": threads.Queue,
    "threads.LifoQueue": threads.LifoQueue,
}
OURS = ["Queue", "AsyncQueue", "Producer", "Consumer"]
DROP_INS = [name for name in OPENERS if "." in name]


@pytest.mark.parametrize(
    ("name", "arguments"),
    table(
        *[(name, {}, STORE) for name in OPENERS],
        *[(name, {}, QUEUE, MAXSIZE, OWN_MAXSIZE) for name in OURS],
        *[(name, {}, QUEUE, MAXSIZE) for name in DROP_INS],
        *[(name, {}, {"path": ["", None, 5, b"", "a\0b", True, ["x"]]}) for name in OPENERS],
    ),
)
def test_bad_arguments_of_opening_make_no_file(name, arguments, tmp_path, monkeypatch):
    """Whatever opens a file refuses a bad option before there is one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        OPENERS[name](**{"path": tmp_path / "tasks.wq", **arguments})
    assert os.listdir(tmp_path) == []


# What is open --------------------------------------------------------------------------------


class Scene:
    """A file with a message in each state, and all the calls there are."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.store = weclaw.open(path, segment_bytes=65536)
        self.q = q = self.store.queue(start="earliest", maxsize=100)
        for name in ("done", "dead", "held", "ready"):
            q.put(name, id=name)
        q.get().ack(result=1)
        q.get().fail("bad")
        self.held = held = q.get()
        self.aq = aq = weclaw.AsyncQueue._over(q)
        self.producer = weclaw.Producer(path)
        self.consumer = weclaw.Consumer(path)
        none_yet = self.store.queue(group="none yet")
        handler = print
        self.calls = {
            "put": lambda **bad: q.put("x", **bad),
            "put_nowait": lambda **bad: q.put_nowait("x", **bad),
            "async put": lambda **bad: aq.put("x", **bad),
            "Put": lambda **bad: q.put_many(["a", weclaw.Put("x", **bad)]),
            "async Put": lambda **bad: aq.put_many(["a", weclaw.Put("x", **bad)]),
            "put_many": q.put_many,
            "async put_many": aq.put_many,
            "send": lambda **bad: self.producer.send("x", **bad),
            "send_sync": lambda **bad: self.producer.send_sync("x", **bad),
            "tx.put": lambda **bad: q.transaction().__enter__().put("x", **bad),
            "tx.ack": lambda **bad: q.transaction().__enter__().ack(**bad),
            "transaction": q.transaction,
            "async transaction": aq.transaction,
            "get": q.get,
            "async get": aq.get,
            "get_many": q.get_many,
            "async get_many": aq.get_many,
            "cancel": q.cancel,
            "async cancel": aq.cancel,
            "status": q.status,
            "async status": aq.status,
            "result": q.result,
            "async result": aq.result,
            "join": q.join,
            "async join": aq.join,
            "peek": q.peek,
            "async peek": aq.peek,
            "pause": q.pause,
            "async pause": aq.pause,
            "first pause": none_yet.pause,
            "replay": q.replay,
            "async replay": aq.replay,
            "first replay": none_yet.replay,
            "ack": held.ack,
            "nack": held.nack,
            "fail": held.fail,
            "extend": held.extend,
            "redrive": q.dlq.redrive,
            "dlq.purge": q.dlq.purge,
            "async redrive": aq.dlq.redrive,
            "dlq.peek": q.dlq.peek,
            "dlq.get": q.dlq.get,
            "export": lambda **bad: q.dlq.export(**{"path": f"{path}.out", **bad}),
            "drop_group": self.store.drop_group,
            "backup": self.store.backup,
            "store.queue": self.store.queue,
            "Worker": lambda **bad: weclaw.Worker(**{"q": q, "handler": handler, **bad}),
            "run": lambda **bad: self.consumer.run(**{"handler": handler, **bad}),
        }

    def seen(self) -> Any:
        self.store.flush()
        names = sorted(os.listdir(self.path.parent))
        return self.q.stats()[:5], self.store.groups(), names, self.path.read_bytes()

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()
        self.store.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    made = Scene(tmp_path_factory.mktemp("arguments") / "tasks.wq")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "arguments"),
    table(
        ("put", {}, PUT, BLOCK, TIMEOUT),
        ("put_nowait", {}, PUT, {"block": [True], "timeout": [-1]}),
        ("async put", {}, PUT, BLOCK, TIMEOUT),
        ("Put", {}, PUT),
        ("async Put", {}, PUT),
        ("put_many", {}, MANY),
        ("async put_many", {}, MANY),
        *[
            (name, {"bodies": bodies}, BLOCK, TIMEOUT)
            for name in ("put_many", "async put_many")
            for bodies in ([], ["a"])
        ],
        ("send", {}, PUT, BLOCK, TIMEOUT),
        ("send_sync", {}, PUT, BLOCK, TIMEOUT),
        ("put", {"eta": NOW}, {"delay": [1]}),
        ("tx.put", {}, PUT, {"topic": [name for name in NAMES if name is not None]}),
        ("tx.ack", {}, {"msg": [None, 5, "held"]}),
        ("transaction", {}, BLOCK, TIMEOUT),
        ("async transaction", {}, BLOCK, TIMEOUT),
        ("get", {}, VISIBILITY, BLOCK, TIMEOUT),
        ("get", {"block": False}, TIMEOUT),
        ("async get", {}, VISIBILITY, BLOCK, TIMEOUT),
        ("get_many", {}, {"n": COUNTS}),
        ("get_many", {"n": 1}, VISIBILITY, BLOCK, TIMEOUT),
        ("async get_many", {}, {"n": COUNTS}),
        ("async get_many", {"n": 1}, VISIBILITY, BLOCK, TIMEOUT),
        *[
            (f"{how}{name}", {}, {"id": IDS})
            for how in ("", "async ")
            for name in ("cancel", "status", "result")
        ],
        ("result", {"id": "done"}, TIMEOUT),
        ("async result", {"id": "done"}, TIMEOUT),
        ("join", {}, TIMEOUT),
        ("async join", {}, TIMEOUT),
        ("peek", {}, {"n": COUNTS[1:]}),
        ("async peek", {}, {"n": COUNTS[1:]}),
        ("pause", {}, {"seconds": [*POSITIVE, None]}),
        ("pause", {"seconds": 1}, {"reason": [5, b"x", ["x"]]}),
        ("async pause", {}, {"seconds": [*POSITIVE, None]}),
        ("first pause", {}, {"seconds": [-1, NAN]}),
        ("replay", {}, REPLAY, {"no_such": [1]}),
        ("replay", {"offset": 0}, {"ids": [["done"], []], "since": [NOW]}),
        ("replay", {"since": NOW}, {"ids": [["done"], []]}),
        ("async replay", {}, REPLAY),
        ("first replay", {}, REPLAY),
        ("ack", {}, {"result": RESULTS}),
        ("nack", {}, {"backoff": [v for v in SECONDS if v is not None], "count": [None, 1, "x"]}),
        ("nack", {}, {"reason": [5, b"x", ValueError("x")]}),
        ("fail", {}, {"reason": [5, b"x", ValueError("x")]}),
        ("extend", {}, {"seconds": POSITIVE}),
        ("redrive", {}, {"ids": LISTS, "limit": [-1, True, 1.5, "1", NAN]}),
        ("async redrive", {}, {"ids": LISTS, "limit": [-1, True, 1.5, "1", NAN]}),
        ("dlq.purge", {}, {"ids": LISTS}),
        ("dlq.peek", {}, {"n": COUNTS[1:]}),
        ("dlq.get", {}, {"id": IDS}),
        ("export", {}, {"format": ["x", None, 5, b"jsonl"], "path": [None, 5, "", "a\0b", b""]}),
        ("drop_group", {}, {"name": NAMES}),
        ("drop_group", {"name": "default"}, {"topic": NAMES}),
        ("backup", {}, {"path": [None, 5, "", "a\0b", ["x"], True]}),
        ("store.queue", {"group": "new"}, {**QUEUE, "group": NAMES}, MAXSIZE, OWN_MAXSIZE),
        ("Worker", {}, WORKER),
        ("run", {}, {**WORKER, "q": []}, {"no_such": [1]}),
    ),
)
def test_bad_arguments_of_what_is_open_change_nothing(scene, name, arguments):
    """Refused at the call, and the file, its groups and what lies beside it are as they were."""
    before = scene.seen()
    with pytest.raises((ValueError, TypeError)):
        answer = scene.calls[name](**arguments)
        if inspect.iscoroutine(answer):
            asyncio.run(answer)
    assert scene.seen() == before


@pytest.mark.parametrize(
    ("make", "arguments"),
    table(
        (weclaw.RetryPolicy, {}, RETRY),
        (weclaw.RetryLater, {}, {"seconds": SECONDS, "reason": [5, b"x"]}),
        (weclaw.Discard, {}, {"reason": [5, b"x"]}),
    ),
)
def test_bad_values_are_refused_when_they_are_made(make, arguments):
    """A policy or an exception that makes no sense is none."""
    with pytest.raises((ValueError, TypeError)):
        make(**arguments)
