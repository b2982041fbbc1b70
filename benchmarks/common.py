"""What every benchmark measures with: the message, the floor, the yardstick, fair repeats.

A figure alone says more about the disk than about the queue, so each is given as a ratio:

* **The floor**: pack the message and write it with one `pwritev(RWF_DSYNC)` into space that is
  already filled with zeros, p50. No durable queue can do better than its disk.
* **The yardstick**: the queue one writes by hand with sqlite3 (WAL, synchronous=FULL).

All contenders of a row take turns in slices of a fraction of a second, in an order that rotates;
ratios are taken inside each turn and the median of the turns counts, so that what else the
machine does hits all of them alike. A turn in which the bare disk was much slower than it can be,
or in which this program waited for a processor, is taken again; how many were is printed.

The rows and their table are in `table.py`, what a program asks, prints and keeps in `program.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack

_FLOOR_BYTES: Final = 16 << 20
_PROMPT: Final = "Summarise the following support conversation in three sentences. " * 5

Body = dict[str, Any]
Samples = dict[str, list[float]]


# -- the message ---------------------------------------------------------------------------------


def make_message(n: int) -> Body:
    """A task as a back end for language models has them: 300 characters of prompt, 440 bytes
    packed, every part of it made anew.
    """
    return {
        "task_id": f"task-{n:08d}-7f3c",
        "prompt": f"{n:012d} {_PROMPT}"[:300],
        "model": f"gpt-large-{n & 7}",
        "callback_url": f"http://localhost:8080/callback/{n:08d}",
        "created_at": time.time(),
    }


def make_messages(n: int) -> list[Body]:
    return [make_message(i) for i in range(n)]


# -- the floor -----------------------------------------------------------------------------------


class Floor:
    """The bare disk: pack and write synced into a file of zeros."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        zeros = bytes(1 << 20)
        for at in range(0, _FLOOR_BYTES, len(zeros)):
            os.pwrite(self._fd, zeros, at)
        os.fsync(self._fd)
        self._at = 0

    def put(self, body: Body) -> None:
        data = msgpack.packb(body)
        if self._at + len(data) > _FLOOR_BYTES:
            self._at = 0
        os.pwritev(self._fd, [data], self._at, os.RWF_DSYNC)
        self._at += len(data)

    def close(self) -> None:
        os.close(self._fd)


# -- the yardstick -------------------------------------------------------------------------------


class Yardstick:
    """The hand-written queue: sqlite3, WAL, synchronous=FULL, one row a message."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(
            path, isolation_level=None, timeout=60.0, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS queue"
            " (id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL, leased_at REAL)"
        )

    def put(self, body: Any) -> None:
        self._db.execute("INSERT INTO queue (body) VALUES (?)", (msgpack.packb(body),))

    def put_many(self, bodies: Sequence[Any]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT INTO queue (body) VALUES (?)", [(msgpack.packb(body),) for body in bodies]
        )
        self._db.execute("COMMIT")

    def get(self) -> tuple[int, Any] | None:
        rows = self._db.execute(
            "UPDATE queue SET leased_at = ? WHERE id ="
            " (SELECT id FROM queue WHERE leased_at IS NULL ORDER BY id LIMIT 1)"
            " RETURNING id, body",
            (time.time(),),
        ).fetchall()
        return (rows[0][0], msgpack.unpackb(rows[0][1])) if rows else None

    def get_waiting(self) -> tuple[int, Any]:
        """SQLite wakes nobody: whoever waits looks again each millisecond."""
        while True:
            found = self.get()
            if found is not None:
                return found
            time.sleep(0.001)

    def ack(self, id: int) -> None:
        self._db.execute("DELETE FROM queue WHERE id = ?", (id,))

    def close(self) -> None:
        self._db.close()


# -- fair repeats --------------------------------------------------------------------------------


def rate_of(step: Callable[[], int], seconds: float, most: float = math.inf) -> float:
    """Messages a second: `step` says how many it did, and is called until the time is over, or
    the `most` messages that there are.
    """
    done = 0
    start = now = time.perf_counter()
    while now - start < seconds and done < most:
        done += step()
        now = time.perf_counter()
    return done / (now - start)


def rate_of_threads(put: Callable[[Body], Any], threads: int, seconds: float) -> float:
    """Messages a second of so many threads putting at once."""
    counts = [0] * threads
    start = threading.Barrier(threads + 1)

    def work(which: int) -> None:
        start.wait()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            put(make_message(counts[which]))
            counts[which] += 1

    workers = [threading.Thread(target=work, args=(which,)) for which in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - began)


def p50_us(call: Callable[[Body], Any], seconds: float) -> float:
    """The median time of one call on a fresh message, in microseconds."""
    taken: list[int] = []
    clock = time.perf_counter_ns
    until = clock() + int(seconds * 1e9)
    n = 0
    while True:
        body = make_message(n)
        start = clock()
        call(body)
        end = clock()
        taken.append(end - start)
        n += 1
        if end > until:
            return statistics.median(taken) / 1e3


class Calm:
    """Says how much a turn was disturbed by what else the machine does: 1 is not at all.

    Looks at the floor, and at the yardstick: files that grow need others of the file system to
    move, which a busy machine keeps waiting when it doesn't the floor.
    """

    LIMIT: Final = 1.8

    def __init__(self, folder: str) -> None:
        floor = Floor(os.path.join(folder, "calm"))
        yardstick = Yardstick(os.path.join(folder, "calm.db"))
        self._probes: list[Callable[[Body], None]] = [floor.put, yardstick.put]
        self._best_us = [min(p50_us(put, 0.03) for _ in range(5)) for put in self._probes]
        self.turns = self.disturbed = 0

    @property
    def best_us(self) -> float:
        """A calm floor, in microseconds."""
        return self._best_us[0]

    def watch(
        self, turn: Sequence[tuple[str, Callable[[], float]]]
    ) -> tuple[float, dict[str, float]]:
        before, waited_s, start = self._look(), _waited_s(), time.perf_counter()
        found = {name: contender() for name, contender in turn}
        waited = (_waited_s() - waited_s) / (time.perf_counter() - start)
        return max(before, self._look()) * (1 + 2 * waited), found

    def _look(self) -> float:
        """The slowest probe, as a multiple of its best."""
        found_us = [p50_us(put, 0.02) for put in self._probes]
        self._best_us = [min(pair) for pair in zip(self._best_us, found_us, strict=True)]
        return max(us / best for us, best in zip(found_us, self._best_us, strict=True))

    def __str__(self) -> str:
        return f"{self.disturbed} of {self.turns} turns were disturbed and taken again"


def _waited_s() -> float:
    """How long this thread was ready and had no processor; 0 where the system doesn't say."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def take_turns(
    calm: Calm, rounds: int, contenders: Mapping[str, Callable[[], float]], most: int = 0
) -> Samples:
    """Each contender once a turn, in an order that rotates. Of the turns the calm ones are kept,
    and if there are not enough of them among `most` (four times as many) the calmest.
    """
    names = list(contenders)
    turns: list[tuple[float, dict[str, float]]] = []
    n_calm = 0
    while n_calm < rounds and len(turns) < (most or 4 * rounds):
        shift = len(turns) % len(names)
        order = names[shift:] + names[:shift]
        disturbed, found = calm.watch([(name, contenders[name]) for name in order])
        turns.append((disturbed, found))
        n_calm += disturbed < Calm.LIMIT
    calm.turns += len(turns)
    calm.disturbed += len(turns) - n_calm
    turns.sort(key=lambda one: one[0])
    return {name: [found[name] for _, found in turns[:rounds]] for name in names}


def median_ratio(samples: Samples, above: str, below: str) -> float:
    pairs = zip(samples[above], samples[below], strict=True)
    return statistics.median(a / b for a, b in pairs)


# -- sizes ---------------------------------------------------------------------------------------


def rss_mb(pid: int | str = "self", peak: bool = False) -> float:
    """Memory of a process in MB, as Linux counts it: shared pages too."""
    word = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(word):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def disk_bytes(path: str) -> int:
    """Bytes that a file, or all files of a folder, take on the disk."""
    if not os.path.isdir(path):
        return os.stat(path).st_blocks * 512
    return sum(
        os.stat(os.path.join(at, name)).st_blocks * 512
        for at, _, names in os.walk(path)
        for name in names
    )
