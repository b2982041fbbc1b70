"""The queue itself: each promise of speed, beside the bare disk and a hand-written sqlite3 queue.

python benchmarks/bench_queue.py --quick            a table in about two minutes
python benchmarks/bench_queue.py --bench batch      some of its rows
python benchmarks/bench_queue.py --full             with backlogs of 1 and 10 million
python benchmarks/bench_queue.py --slow-sync 5ms    as on a slower disk
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from common import (
    Floor,
    Samples,
    Yardstick,
    disk_bytes,
    make_message,
    make_messages,
    median_ratio,
    p50_us,
    rate_of,
    rate_of_threads,
    rss_mb,
    take_turns,
)
from crew import through_processes
from peers import ByHand, Ours
from processors import Apart
from program import Run, parser, report, running, surroundings
from table import Row, Target, at_least, at_most, figure, latency_row, rate_row

import weclaw_embedded as weclaw

_children = multiprocessing.get_context("spawn")
_KEPT_S = 48 * 3600


class Trio:
    """Floor, yardstick and ours, each with a fresh file, closed together."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.floor = Floor(run.path("floor"))
        self.yardstick = Yardstick(run.path("yardstick.db"))
        self.path = run.path("ours.wq")
        self.queue = weclaw.Queue(self.path, **options)

    def __enter__(self) -> Trio:
        return self

    def __exit__(self, *_: object) -> None:
        self.floor.close()
        self.yardstick.close()
        self.queue.close()

    def floor_rate(self, seconds: float) -> float:
        return 1e6 / p50_us(self.floor.put, seconds)


@contextlib.contextmanager
def _queue(path: str, **options: Any) -> Iterator[weclaw.Queue]:
    queue = weclaw.Queue(path, **options)
    try:
        yield queue
    finally:
        queue.close()


def _fill(queue: weclaw.Queue, count: int, batch: int = 1000) -> None:
    for start in range(0, count, batch):
        queue.put_many([make_message(n) for n in range(start, min(start + batch, count))])


def _putter(put: Callable[[Any], Any]) -> Callable[[], int]:
    def step() -> int:
        put(make_message(7))
        return 1

    return step


def _many_putter(put_many: Callable[[Any], Any], count: int) -> Callable[[], int]:
    def step() -> int:
        put_many(make_messages(count))
        return count

    return step


def _get_and_ack(queue: weclaw.Queue) -> int:
    message = queue.get()
    assert message.body["model"]
    message.ack()
    return 1


def _yardstick_get_and_ack(yardstick: Yardstick) -> int:
    id, body = yardstick.get_waiting()
    assert body["model"]
    yardstick.ack(id)
    return 1


# -- synced, one at a time -----------------------------------------------------------------------


def bench_put(run: Run) -> Iterator[Row]:
    with Trio(run) as trio:
        contenders = {
            "floor": lambda: p50_us(trio.floor.put, run.slice_s),
            "yardstick": lambda: p50_us(trio.yardstick.put, run.slice_s),
            "ours": lambda: p50_us(trio.queue.put, run.slice_s),
        }
        samples = take_turns(run.calm, 2 * run.rounds + 1, contenders)
    floor, yardstick = samples["floor"], samples["yardstick"]
    yield Row("the floor: pack + pwritev(RWF_DSYNC), p50", statistics.median(floor), "µs", 1.0)
    ratio = median_ratio(samples, "yardstick", "floor")
    yield Row("the yardstick: sqlite3 put, p50", statistics.median(yardstick), "µs", ratio, 1.0)
    yield latency_row("put, p50", samples, at_most(1.35, "floor"))


def bench_put_many(run: Run) -> Iterator[Row]:
    yield _row_of_put_many(run, 100, at_least(1.6, "yardstick"))
    yield _row_of_put_many(run, 1000, None)


def _row_of_put_many(run: Run, count: int, target: Target | None) -> Row:
    with Trio(run) as trio:
        contenders = {
            "floor": lambda: trio.floor_rate(run.slice_s / 3),
            "yardstick": lambda: rate_of(_many_putter(trio.yardstick.put_many, count), run.slice_s),
            "ours": lambda: rate_of(_many_putter(trio.queue.put_many, count), run.slice_s),
        }
        return rate_row(f"put_many({count})", take_turns(run.calm, run.rounds, contenders), target)


def bench_get_ack(run: Run) -> Iterator[Row]:
    stock = run.syncs_in(1.5 * run.slice_s) + 100  # more than a turn can take

    with Trio(run) as trio:

        def yardstick() -> float:
            trio.yardstick.put_many(make_messages(stock))
            return rate_of(lambda: _yardstick_get_and_ack(trio.yardstick), run.slice_s, stock)

        def ours() -> float:
            _fill(trio.queue, stock)
            return rate_of(lambda: _get_and_ack(trio.queue), run.slice_s, stock)

        contenders = {
            "floor": lambda: trio.floor_rate(run.slice_s / 2),
            "yardstick": yardstick,
            "ours": ours,
        }
        samples = take_turns(run.calm, run.rounds, contenders)
    yield rate_row("get + ack", samples, at_least(1.8, "yardstick"))


# -- several at once -----------------------------------------------------------------------------


def bench_processes(run: Run) -> Iterator[Row]:
    count = max(50, min(3000, run.syncs_in(0.1 if run.quick else 0.3)))
    floor = Floor(run.path("floor"))
    contenders = {
        "floor": lambda: 1e6 / p50_us(floor.put, run.slice_s),
        "yardstick": lambda: through_processes(ByHand.name, run.path("yardstick"), count),
        "ours": lambda: through_processes(Ours.name, run.path("ours"), count),
    }
    rounds = 3 if run.quick else 7
    samples = take_turns(run.calm, rounds, contenders, most=2 * rounds)
    floor.close()
    yield rate_row("1 producer + 2 consumer processes", samples, at_least(2.2, "yardstick"))


def bench_threads(run: Run) -> Iterator[Row]:
    apart = Apart()
    with Trio(run) as trio:
        contenders = {
            "floor": lambda: trio.floor_rate(run.slice_s / 2),
            "yardstick": lambda: rate_of(_putter(trio.yardstick.put), run.slice_s),
            "ours": apart.beside(lambda: rate_of_threads(trio.queue.put, 8, 2 * run.slice_s)),
        }
        samples = take_turns(run.calm, run.rounds, contenders)
    note = f"Y with one thread; {apart}"
    yield rate_row("8 threads putting", samples, at_least(3, "yardstick"), note)


# -- flush="batch" -------------------------------------------------------------------------------


def _ack_one_by_one(queue: weclaw.Queue) -> int:
    messages = queue.get_many(100)
    for message in messages:
        assert message.body["model"]
        message.ack()
    return len(messages)


def _ack_in_a_transaction(queue: weclaw.Queue) -> int:
    messages = queue.get_many(100)
    with queue.transaction() as transaction:
        for message in messages:
            assert message.body["model"]
            transaction.ack(message)
    return len(messages)


def bench_batch(run: Run) -> Iterator[Row]:
    floor = Floor(run.path("floor"))
    works: list[tuple[str, float, Callable[[weclaw.Queue], int], Target]] = [
        ('flush="batch": put', 0, lambda queue: _putter(queue.put)(), at_least(80_000, unit="/s")),
        ('flush="batch": get + ack', 80_000, _get_and_ack, at_least(45_000, unit="/s")),
        (
            'flush="batch": get_many(100) + acks',
            250_000,
            _ack_one_by_one,
            at_least(120_000, unit="/s"),
        ),
        (
            'flush="batch": get_many(100) + acks in a transaction',
            450_000,
            _ack_in_a_transaction,
            at_least(200_000, unit="/s"),
        ),
    ]
    for work, fastest, step, target in works:

        def turn(fastest: float = fastest, step: Callable[[weclaw.Queue], int] = step) -> float:
            with _queue(run.path("batch.wq"), flush="batch") as queue:
                stock = int(fastest * run.slice_s) + 1000
                _fill(queue, stock)
                return rate_of(lambda: step(queue), run.slice_s, stock if fastest else math.inf)

        contenders = {
            "floor": lambda: 1e6 / p50_us(floor.put, run.slice_s / 3),
            "ours": turn,
        }
        samples = take_turns(run.calm, run.rounds, contenders)
        yield rate_row(work, samples, target, f"best {figure(max(samples['ours']))}")
    floor.close()


# -- between processes ---------------------------------------------------------------------------


def _receive(path: str, flush: str, count: int, told: Connection) -> None:
    taken: list[float] = []
    with _queue(path, flush=flush) as queue:
        told.send("ready")
        for _ in range(count):
            message = queue.get()
            now = time.monotonic()
            taken.append((now - message.body["created_at"]) * 1e6)
            message.ack()
    told.send(taken)


def bench_latency(run: Run) -> Iterator[Row]:
    count = 200 if run.quick else 1000
    for flush, target in (("batch", at_most(0.4, unit="ms")), ("sync", None)):
        path = run.path("latency.wq")
        here, there = _children.Pipe(duplex=False)
        with _queue(path, flush=flush) as queue:
            child = _children.Process(target=_receive, args=(path, flush, count, there))
            child.start()
            here.recv()
            for n in range(count):
                time.sleep(0.003)
                body = make_message(n)
                body["created_at"] = time.monotonic()
                queue.put(body)
            taken = here.recv()
            child.join()
        worst = figure(statistics.quantiles(taken, n=100)[-1] / 1e3)
        yield Row(
            f'put to get in a waiting process, flush="{flush}", p50',
            statistics.median(taken) / 1e3,
            "ms",
            target=target,
            note=f"p99 {worst} ms",
            samples={"ours": taken},
        )


# -- opening -------------------------------------------------------------------------------------


def _work_until_killed(path: str, told: Connection) -> None:
    queue = weclaw.Queue(path, flush="batch")
    held = queue.get_many(10)
    for n in range(100):
        queue.put(make_message(n))
    told.send(len(held))
    while True:
        queue.put(make_message(0))
        queue.get().ack()


def _kill_9_one_at_work(path: str) -> None:
    here, there = _children.Pipe(duplex=False)
    child: BaseProcess = _children.Process(target=_work_until_killed, args=(path, there))
    child.start()
    here.recv()
    time.sleep(0.02)
    child.kill()
    child.join()


def _open_after_kill(path: str) -> tuple[float, float]:
    """Milliseconds until it is open, and until the first message is there."""
    _kill_9_one_at_work(path)
    start = time.perf_counter()
    with _queue(path) as queue:
        is_open = time.perf_counter()
        message = queue.get()
        got = time.perf_counter()
        message.release()
    return (is_open - start) * 1e3, (got - start) * 1e3


def _row_of_opening(run: Run, path: str, backlog: int, target: Target | None) -> Row:
    times = [_open_after_kill(path) for _ in range(3 if run.quick else 5)]
    opened = [one for one, _ in times]
    first = figure(statistics.median(got for _, got in times))
    return Row(
        f"open after kill -9, backlog {figure(backlog)}",
        statistics.median(opened),
        "ms",
        target=target,
        note=f"first get after {first} ms",
        samples={"ours": opened},
    )


def _rebuild_rates(path: str, count: int, times: int) -> list[float]:
    rates = []
    for _ in range(times):
        shutil.rmtree(path + ".d")
        start = time.perf_counter()
        weclaw.Queue(path).close()
        rates.append(count / (time.perf_counter() - start))
    return rates


def bench_rebuild(run: Run) -> Iterator[Row]:
    count = 50_000 if run.quick else 200_000
    times = 3 if run.quick else 5
    keep: dict[str, Any] = {"flush": "os", "retention": _KEPT_S, "retention_bytes": None}

    def row(work: str, path: str, target: Target) -> Row:
        rates = _rebuild_rates(path, count, times)
        return Row(
            f"rebuild of the index: {work}",
            statistics.median(rates),
            "/s",
            target=target,
            samples={"ours": rates},
        )

    path = run.path("puts.wq")
    with _queue(path, **keep) as queue:
        for n in range(count):
            queue.put(make_message(n))
    yield row("puts", path, at_least(700_000, unit="/s"))
    with _queue(path, **keep) as queue:
        for _ in range(count):
            queue.get().ack()
    yield row("put, deliver, settle", path, at_least(350_000, unit="/s"))
    os.unlink(path)
    path = run.path("many.wq")
    with _queue(path, **keep) as queue:
        _fill(queue, count, 100)
    yield row("puts by put_many(100)", path, at_least(700_000, unit="/s"))
    os.unlink(path)


# -- space ---------------------------------------------------------------------------------------


def bench_disk(run: Run) -> Iterator[Row]:
    count = 100_000 if run.quick else 1_000_000
    packed = len(weclaw_packed(make_message(count // 2)))
    for work, batch in (("single puts", 1), ("put_many(100)", 100)):
        path = run.path("disk.wq")
        with _queue(path, flush="os") as queue:
            _fill(queue, 100)
            queue.flush()
            log, index = disk_bytes(path), disk_bytes(path + ".d")
            _fill(queue, count, batch) if batch > 1 else _fill_singly(queue, count)
            assert queue.qsize() == count + 100
            queue.flush()
            log, index = disk_bytes(path) - log, disk_bytes(path + ".d") - index
        os.unlink(path)
        shutil.rmtree(path + ".d")
        yield Row(
            f"disk for {figure(count)} messages, {work}: log / bodies",
            log / (count * packed),
            "×",
            target=at_most(1.10, unit="×"),
            note=f"{figure(log / 1e6)} MB for bodies of {packed} bytes",
        )
        yield Row(
            f"disk for {figure(count)} messages, {work}: index, a message",
            index / count,
            "bytes",
            target=at_most(20, unit="bytes"),
        )


def _fill_singly(queue: weclaw.Queue, count: int) -> None:
    for n in range(count):
        queue.put(make_message(n))


def weclaw_packed(body: Any) -> bytes:
    import msgpack

    return bytes(msgpack.packb(body))


# -- deep backlogs -------------------------------------------------------------------------------


def _memory(path: str, told: Connection) -> None:
    """Resident memory of a process that only works on the queue, and what it had before."""
    before = rss_mb()
    with _queue(path, flush="batch") as queue:
        for _ in range(2000):
            queue.put(make_message(0))
            queue.get().ack()
    told.send((before, rss_mb(peak=True)))


def _row_of_memory(path: str, backlog: int) -> Row:
    here, there = _children.Pipe(duplex=False)
    child = _children.Process(target=_memory, args=(path, there))
    child.start()
    before, peak = here.recv()
    child.join()
    return Row(
        f"memory (RSS, peak), backlog {figure(backlog)}",
        peak,
        "MB",
        target=at_most(60, unit="MB"),
        note=f"{figure(before)} MB after the imports",
    )


def _at_backlogs(run: Run, paths: dict[int, str], flush: str) -> Samples:
    """How fast a message goes in and through, by how many wait before it."""

    def turn(queue: weclaw.Queue) -> float:
        def step() -> int:
            queue.put(make_message(0))
            return _get_and_ack(queue)

        return rate_of(step, run.slice_s)

    with contextlib.ExitStack() as stack:
        queues = {n: stack.enter_context(_queue(path, flush=flush)) for n, path in paths.items()}
        contenders = {str(n): functools.partial(turn, queue) for n, queue in queues.items()}
        return take_turns(run.calm, run.rounds, contenders)


def bench_backlog(run: Run) -> Iterator[Row]:
    sizes = [1000, 100_000] if run.quick else [1000, 10_000, 100_000]
    if run.full:
        sizes += [1_000_000, 10_000_000]
    paths = {}
    for size in sizes:
        paths[size] = run.path(f"backlog-{size}.wq")
        with _queue(paths[size], flush="os") as queue:
            _fill(queue, size)
    for flush in ("sync", "batch"):
        samples = _at_backlogs(run, paths, flush)
        for size in sizes[1:]:
            ratio = median_ratio(samples, str(size), str(sizes[0]))
            rate = figure(statistics.median(samples[str(size)]))
            yield Row(
                f'put + get + ack, flush="{flush}", backlog {figure(size)} against 1 000',
                ratio,
                "×",
                target=at_least(0.95, unit="×"),
                note=f"{rate}/s",
                samples=samples,
            )
    for size in sizes:
        limit = at_most(20, unit="ms")
        yield _row_of_opening(run, paths[size], size, limit)
    for size in sizes:
        yield _row_of_memory(paths[size], size)


BENCHES: dict[str, Callable[[Run], Iterator[Row]]] = {
    "put, p50": bench_put,
    "put_many": bench_put_many,
    "get + ack": bench_get_ack,
    "processes": bench_processes,
    "threads": bench_threads,
    "batch": bench_batch,
    "latency": bench_latency,
    "rebuild": bench_rebuild,
    "disk": bench_disk,
    "backlog": bench_backlog,
}


def main() -> None:
    options = parser(str(__doc__).partition("\n")[0])
    options.add_argument(
        "--bench", action="append", choices=list(BENCHES), help="only this; may be repeated"
    )
    chosen = options.parse_args()
    chosen.no_json |= bool(chosen.bench and not chosen.json)  # a part is not the result
    with running(chosen) as run:
        where = surroundings(run.folder)
        rows: list[Row] = []
        for name, bench in BENCHES.items():
            if chosen.bench and name not in chosen.bench:
                continue
            began = time.monotonic()
            rows += bench(run)
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        report("queue", run, rows, where, chosen)


if __name__ == "__main__":
    main()
