"""The bare disk: what one message costs without any queue, by the ways there are to write it.

python benchmarks/floor.py --quick
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import msgpack
from common import Body, Floor, Yardstick, make_message, median_ratio, p50_us, take_turns
from program import Run, parser, report, running, surroundings
from table import Row

_children = multiprocessing.get_context("spawn")
_ZEROED = 16 << 20


def _zeroed(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for at in range(0, _ZEROED, 1 << 20):
        os.pwrite(fd, bytes(1 << 20), at)
    os.fsync(fd)
    return fd


class Writer:
    """Writes one message after the other into `fd`, then syncs as told."""

    def __init__(self, fd: int, sync: Callable[[int], None], limit: int) -> None:
        self._fd, self._sync, self._limit, self._at = fd, sync, limit, 0

    def put(self, body: Body) -> None:
        data = msgpack.packb(body)
        if self._at + len(data) > self._limit:
            self._at = 0
        os.pwrite(self._fd, data, self._at)
        self._at += len(data)
        self._sync(self._fd)


def _nothing(fd: int) -> None:
    pass


def _sync_alone(path: str, seconds: float, start: Barrier, told: Connection) -> None:
    floor = Floor(path)
    start.wait()
    count = 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        floor.put(make_message(count))
        count += 1
    told.send(count / seconds)
    floor.close()


def _several(run: Run, processes: int) -> float:
    """Microseconds a message when so many processes write and sync, each its own file."""
    start = _children.Barrier(processes)
    pipes = [_children.Pipe(duplex=False) for _ in range(processes)]
    crew = [
        _children.Process(
            target=_sync_alone, args=(run.path("several"), 2 * run.slice_s, start, there)
        )
        for _, there in pipes
    ]
    for one in crew:
        one.start()
    rate = sum(here.recv() for here, _ in pipes)
    for one in crew:
        one.join()
    return float(1e6 / rate)


def main() -> None:
    chosen = parser(str(__doc__).partition("\n")[0]).parse_args()
    with running(chosen) as run:
        where = surroundings(run.folder)
        floor, yardstick = Floor(run.path("floor")), Yardstick(run.path("yardstick.db"))
        unbounded = 1 << 40

        def appended(name: str) -> int:
            return os.open(run.path(name), os.O_RDWR | os.O_CREAT, 0o600)

        writers = {
            "pack + pwrite + fdatasync, zeroed": Writer(
                _zeroed(run.path("z")), os.fdatasync, _ZEROED
            ),
            "pack + append + fdatasync": Writer(appended("a"), os.fdatasync, unbounded),
            "pack + append + fsync": Writer(appended("b"), os.fsync, unbounded),
            "pack + pwrite, not synced": Writer(_zeroed(run.path("n")), _nothing, _ZEROED),
        }
        names = {
            "floor": "the floor: pack + pwritev(RWF_DSYNC), zeroed",
            "yardstick": "the yardstick: sqlite3 put",
        }
        contenders: dict[str, Callable[[], float]] = {
            "floor": functools.partial(p50_us, floor.put, run.slice_s),
            "yardstick": functools.partial(p50_us, yardstick.put, run.slice_s),
        }
        for name, writer in writers.items():
            contenders[name] = functools.partial(p50_us, writer.put, run.slice_s)
        samples = take_turns(run.calm, run.rounds, contenders)
        rounds = max(3, run.rounds // 2)
        several = take_turns(
            run.calm,
            rounds,
            {
                "floor": functools.partial(p50_us, floor.put, run.slice_s),
                "three processes, a message of any": lambda: _several(run, 3),
            },
            most=rounds,
        )
        rows = []
        for found in (samples, several):
            for name, values in found.items():
                if found is several and name == "floor":
                    continue
                ratio = median_ratio(found, name, "floor")
                value = statistics.median(values)
                by = median_ratio(found, name, "yardstick") if "yardstick" in found else None
                row = Row(names.get(name, name), value, "µs", ratio, by, samples={name: values})
                rows.append(row)
        floor.close()
        yardstick.close()
        report("floor", run, rows, where, chosen)


if __name__ == "__main__":
    main()
