"""Other queues behind one small face, each in its most durable mode.

A peer's own waiting (where it polls at 10 ms or more) is not used: whoever finds nothing looks
again after a millisecond. Where a peer has no batch put, there is none in the table either.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgpack
from common import Yardstick

_import = importlib.import_module


class Peer:
    """A queue by its path. `get` gives (what `ack` takes, body), or None when there is nothing."""

    name: ClassVar[str]
    package: ClassVar[str]
    durable: ClassVar[str]
    is_durable: ClassVar[bool] = True
    at_least_once: ClassVar[bool] = True
    has_put_many: ClassVar[bool] = True
    shares_threads: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        raise NotImplementedError

    def put(self, body: Any) -> Any:
        raise NotImplementedError

    def put_many(self, bodies: Sequence[Any]) -> Any:
        raise NotImplementedError

    def get(self) -> tuple[Any, Any] | None:
        raise NotImplementedError

    def ack(self, token: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def get_waiting(self) -> tuple[Any, Any]:
        while True:
            found = self.get()
            if found is not None:
                return found
            time.sleep(0.001)


class Ours(Peer):
    name = "weclaw_embedded"
    package = "weclaw-embedded"
    durable = 'flush="sync", the default'

    def __init__(self, path: str) -> None:
        self._queue = _import("weclaw_embedded").Queue(path + ".wq")

    def put(self, body: Any) -> None:
        self._queue.put(body)

    def put_many(self, bodies: Sequence[Any]) -> None:
        self._queue.put_many(bodies)

    def get_waiting(self) -> tuple[Any, Any]:
        message = self._queue.get()
        return message, message.body

    def ack(self, token: Any) -> None:
        token.ack()

    def close(self) -> None:
        self._queue.close()


class ByHand(Peer):
    name = "sqlite3 by hand (Y)"
    package = ""
    durable = "WAL, synchronous=FULL"
    shares_threads = False

    def __init__(self, path: str) -> None:
        self._queue = Yardstick(path + ".db")

    def put(self, body: Any) -> None:
        self._queue.put(body)

    def put_many(self, bodies: Sequence[Any]) -> None:
        self._queue.put_many(bodies)

    def get(self) -> tuple[Any, Any] | None:
        return self._queue.get()

    def ack(self, token: Any) -> None:
        self._queue.ack(token)

    def close(self) -> None:
        self._queue.close()


class PersistQueue(Peer):
    name = "persist-queue SQLiteAckQueue"
    package = "persist-queue"
    durable = "WAL, SQLite's default FULL"
    has_put_many = False

    def __init__(self, path: str) -> None:
        package = _import("persistqueue")
        by_msgpack = _import("persistqueue.serializers.msgpack")
        self._empty = package.Empty
        self._queue = package.SQLiteAckQueue(
            path, multithreading=True, timeout=60.0, serializer=by_msgpack
        )

    def put(self, body: Any) -> None:
        self._queue.put(body)

    def get(self) -> tuple[Any, Any] | None:
        try:
            found = self._queue.get(block=False, raw=True)
        except self._empty:
            return None
        return found["pqid"], found["data"]

    def ack(self, token: Any) -> None:
        self._queue.ack(id=token)

    def close(self) -> None:
        self._queue.close()


class LiteQueue(Peer):
    name = "litequeue"
    package = "litequeue"
    durable = "WAL, FULL (set by us; ships NORMAL)"
    has_put_many = False

    def __init__(self, path: str) -> None:
        self._queue = _import("litequeue").LiteQueue(path + ".db", timeout=60.0)
        self._queue.conn.execute("PRAGMA synchronous=FULL")

    def put(self, body: Any) -> None:
        self._queue.put(json.dumps(body))

    def get(self) -> tuple[Any, Any] | None:
        found = self._queue.pop()
        return None if found is None else (found, json.loads(found.data))

    def ack(self, token: Any) -> None:
        self._queue.done(token.message_id)

    def close(self) -> None:
        self._queue.close()


class LocalQueue(Peer):
    name = "localqueue"
    package = "localqueue"
    durable = "DurabilityMode.DURABLE"

    def __init__(self, path: str) -> None:
        package = _import("localqueue")
        self._empty = package.Empty
        self._queue = package.SimpleQueue(path, durability=package.DurabilityMode.DURABLE)

    def put(self, body: Any) -> None:
        self._queue.put(body)

    def put_many(self, bodies: Sequence[Any]) -> None:
        self._queue.put_many(list(bodies))

    def get(self) -> tuple[Any, Any] | None:
        try:
            job = self._queue.get(block=False)
        except self._empty:
            return None
        return job, job.data

    def ack(self, token: Any) -> None:
        self._queue.ack(token)

    def close(self) -> None:
        self._queue.close()


class LeanQueue(Peer):
    name = "leanqueue"
    package = "leanqueue"
    durable = "sync_interval_ms=0"

    def __init__(self, path: str) -> None:
        self._queue = _import("leanqueuedb").Queue(path, sync_interval_ms=0)

    def put(self, body: Any) -> None:
        self._queue.put_json(body)

    def put_many(self, bodies: Sequence[Any]) -> None:
        self._queue.put_many_json(list(bodies))

    def get(self) -> tuple[Any, Any] | None:
        message = self._queue.get(block=False)
        return None if message is None else (message, message.json())

    def ack(self, token: Any) -> None:
        token.ack()

    def close(self) -> None:
        self._queue.close()


class Huey(Peer):
    name = "huey SqliteStorage"
    package = "huey"
    durable = "WAL, fsync=True"
    at_least_once = False  # a message is deleted when it is taken
    has_put_many = False

    def __init__(self, path: str) -> None:
        storage = _import("huey.storage").SqliteStorage
        self._storage = storage(filename=path + ".db", fsync=True, timeout=60)

    def put(self, body: Any) -> None:
        self._storage.enqueue(msgpack.packb(body))

    def get(self) -> tuple[Any, Any] | None:
        data = self._storage.dequeue()
        return None if data is None else (None, msgpack.unpackb(data))

    def ack(self, token: Any) -> None:
        pass

    def close(self) -> None:
        self._storage.close()


class LmdbQueue(Peer):
    name = "lmdb-queue"
    package = "lmdb-queue"
    durable = "sync=True, which its map_async undoes"
    is_durable = False
    has_put_many = False

    def __init__(self, path: str) -> None:
        package = _import("equeue")
        self._empty = package.QueueEmpty
        self._queue = package.Queue(path, sync=True)

    def put(self, body: Any) -> None:
        self._queue.put(body)

    def get(self) -> tuple[Any, Any] | None:
        try:
            record = self._queue.get(timeout=0.0005)
        except self._empty:
            return None
        return record, record.payload

    def ack(self, token: Any) -> None:
        token.ack()

    def close(self) -> None:
        self._queue.close()


class RedisStreams(Peer):
    """The path names a stream; the server was started by `redis_server`."""

    name = "Redis Streams"
    package = "redis"
    durable = "appendonly, appendfsync always"

    def __init__(self, path: str) -> None:
        package = _import("redis")
        self._redis = package.Redis(port=int(os.environ["WECLAW_BENCH_REDIS_PORT"]))
        self._stream = os.path.basename(path)
        with contextlib.suppress(package.ResponseError):  # the group is there already
            self._redis.xgroup_create(self._stream, "g", id="0", mkstream=True)
        self._consumer = f"c{os.getpid()}"

    def put(self, body: Any) -> None:
        self._redis.xadd(self._stream, {"b": msgpack.packb(body)})

    def put_many(self, bodies: Sequence[Any]) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        for body in bodies:
            pipeline.xadd(self._stream, {"b": msgpack.packb(body)})
        pipeline.execute()

    def _read(self, block_ms: int | None) -> tuple[Any, Any] | None:
        found = self._redis.xreadgroup(
            "g", self._consumer, {self._stream: ">"}, count=1, block=block_ms
        )
        if not found:
            return None
        entries = next(iter(found.values())) if isinstance(found, dict) else found[0][1]
        entry = entries[0][0] if isinstance(entries[0], list) else entries[0]
        return entry[0], msgpack.unpackb(entry[1][b"b"])

    def get(self) -> tuple[Any, Any] | None:
        return self._read(None)

    def get_waiting(self) -> tuple[Any, Any]:
        found = None
        while found is None:
            found = self._read(1000)
        return found

    def ack(self, token: Any) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xack(self._stream, "g", token)
        pipeline.xdel(self._stream, token)
        pipeline.execute()

    def close(self) -> None:
        self._redis.close()


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        ByHand,
        Ours,
        PersistQueue,
        LiteQueue,
        LocalQueue,
        LeanQueue,
        Huey,
        LmdbQueue,
        RedisStreams,
    )
}


@contextlib.contextmanager
def redis_server(folder: str) -> Iterator[str]:
    """A server of our own on loopback, ended by its pid; gives its version, "" without one."""
    program = shutil.which("redis-server")
    if program is None:
        yield ""
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.makedirs(folder)
    options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
    options += ["--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no"]
    with open(os.path.join(folder, "log"), "wb") as log:
        server = subprocess.Popen([program, *options], stdout=log, stderr=log)
    os.environ["WECLAW_BENCH_REDIS_PORT"] = str(port)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        yield version.stdout.partition("v=")[2].partition(" ")[0]
    finally:
        server.terminate()
        server.wait()
