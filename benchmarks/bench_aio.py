"""The queue in asyncio: many tasks at once, the loop's stalls, waking up, and waiting for nothing.

python benchmarks/bench_aio.py --quick
python benchmarks/bench_aio.py --slow-sync 5ms      where grouping shows most
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from common import Floor, Yardstick, make_message, p50_us, rate_of, take_turns
from processors import Apart
from program import Run, parser, report, running, slow_sync_of_this_run, surroundings
from table import Row, at_least, at_most, figure, rate_row

import weclaw_embedded as weclaw

_children = multiprocessing.get_context("spawn")
_TASKS = 64


async def _put_in_tasks(queue: weclaw.AsyncQueue, seconds: float) -> float:
    count = 0
    start = time.perf_counter()
    until = start + seconds

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await queue.put(make_message(count))
            count += 1

    await asyncio.gather(*(work() for _ in range(_TASKS)))
    return count / (time.perf_counter() - start)


async def _get_in_tasks(queue: weclaw.AsyncQueue, seconds: float, stock: int) -> float:
    """Each task gets and acks, and waits for the disk, until the time or the stock is over."""
    done = 0
    await queue.put_many([make_message(n) for n in range(stock)])
    start = time.perf_counter()
    until = start + seconds

    async def work() -> None:
        nonlocal done
        while time.perf_counter() < until and done < stock - _TASKS:
            message = await queue.get()
            await message.ack()
            done += 1

    await asyncio.gather(*(work() for _ in range(_TASKS)))
    return done / (time.perf_counter() - start)


def _run_with_queue(path: str, work: str, seconds: float, stock: int = 0) -> float:
    async def main() -> float:
        async with weclaw.AsyncQueue(path) as queue:
            if work == "put":
                return await _put_in_tasks(queue, seconds)
            return await _get_in_tasks(queue, seconds, stock)

    return asyncio.run(main())


def bench_tasks(run: Run) -> Iterator[Row]:
    floor = Floor(run.path("floor"))
    yardstick = Yardstick(run.path("yardstick.db"))
    path, gets = run.path("ours.wq"), run.path("gets.wq")
    stock = 2 * _TASKS + min(20_000, run.syncs_in(16 * run.slice_s))

    def put_yardstick() -> int:
        yardstick.put(make_message(1))
        return 1

    def floor_rate() -> float:
        return 1e6 / p50_us(floor.put, run.slice_s / 2)

    apart = Apart()
    samples = take_turns(
        run.calm,
        run.rounds,
        {
            "floor": floor_rate,
            "yardstick": lambda: rate_of(put_yardstick, run.slice_s),
            "ours": apart.beside(lambda: _run_with_queue(path, "put", 2 * run.slice_s)),
        },
    )
    note = f"Y with one thread; {apart}"
    row = rate_row(f"{_TASKS} tasks putting", samples, at_least(14, "yardstick"), note)
    shares = [ours / (_TASKS * each) for ours, each in _pairs(samples)]
    yield row
    yield Row(
        f"the same, as a share of {_TASKS} puts a floor write",
        statistics.median(shares),
        "×",
        target=at_least(0.8, unit="×") if slow_sync_of_this_run() else None,
        samples={"ours": shares},
    )
    samples = take_turns(
        run.calm,
        run.rounds,
        {
            "floor": floor_rate,
            "ours": lambda: _run_with_queue(gets, "get", 2 * run.slice_s, stock),
        },
    )
    yield rate_row(f"{_TASKS} tasks, get + await ack", samples)
    floor.close()
    yardstick.close()


def _pairs(samples: dict[str, list[float]]) -> Iterator[tuple[float, float]]:
    yield from zip(samples["ours"], samples["floor"], strict=True)


# -- stalls --------------------------------------------------------------------------------------


async def _worst_lateness(until_done: asyncio.Event) -> float:
    """Milliseconds by which a sleep of one was late at worst."""
    worst = 0.0
    while not until_done.is_set():
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - start - 0.001)
    return worst * 1e3


def _stall(path: str, count: int) -> float:
    async def main() -> float:
        done = asyncio.Event()
        async with weclaw.AsyncQueue(path) as queue:
            await queue.put(make_message(0))
            watch = asyncio.create_task(_worst_lateness(done))

            async def work() -> None:
                for n in range(count // _TASKS):
                    await queue.put(make_message(n))

            await asyncio.gather(*(work() for _ in range(_TASKS)))
            done.set()
            return await watch

    return asyncio.run(main())


def _idle_stall() -> float:
    async def main() -> float:
        done = asyncio.Event()
        watch = asyncio.create_task(_worst_lateness(done))
        await asyncio.sleep(0.5)
        done.set()
        return await watch

    return asyncio.run(main())


def bench_stall(run: Run) -> Iterator[Row]:
    count = 2000 if slow_sync_of_this_run() else 10_000
    rounds = max(3, run.rounds // 2)
    samples = take_turns(
        run.calm,
        rounds,
        {"ours": lambda: _stall(run.path("stall.wq"), count), "idle": _idle_stall},
        most=2 * rounds,
    )
    idle = figure(statistics.median(samples["idle"]))
    yield Row(
        f"worst stall of the loop, {_TASKS} tasks, {figure(count)} puts",
        statistics.median(samples["ours"]),
        "ms",
        target=at_most(5, unit="ms"),
        note=f"{idle} ms of it with no queue at all",
        samples=samples,
    )


# -- waking up and waiting -----------------------------------------------------------------------


def _receive(path: str, flush: str, count: int, told: Connection) -> None:
    async def main() -> list[float]:
        taken = []
        async with weclaw.AsyncQueue(path, flush=flush) as queue:
            told.send("ready")
            for _ in range(count):
                message = await queue.get()
                now = time.monotonic()
                taken.append((now - message.body["created_at"]) * 1e3)
                await message.ack()
        return taken

    told.send(asyncio.run(main()))


def bench_waking(run: Run) -> Iterator[Row]:
    count = 200 if run.quick else 1000
    for flush, target in (("batch", at_most(0.4, unit="ms")), ("sync", None)):
        path = run.path("wake.wq")
        here, there = _children.Pipe(duplex=False)
        with weclaw.Queue(path, flush=flush) as queue:
            child = _children.Process(target=_receive, args=(path, flush, count, there))
            child.start()
            here.recv()
            for n in range(count):
                time.sleep(0.003)
                queue.put(make_message(n) | {"created_at": time.monotonic()})
            taken = here.recv()
            child.join()
        yield Row(
            f'put to await get in another process, flush="{flush}", p50',
            statistics.median(taken),
            "ms",
            target=target,
            note=f"p99 {figure(statistics.quantiles(taken, n=100)[-1])} ms",
            samples={"ours": taken},
        )


def _wait_for_nothing(kind: str, path: str, seconds: float, told: Connection) -> None:
    async def wait() -> float:
        async with weclaw.AsyncQueue(path) as queue:
            with contextlib.suppress(weclaw.Empty):
                await queue.get(timeout=0.01)  # begins the group and starts the threads
            await asyncio.sleep(0.5)
            before = time.process_time()
            with contextlib.suppress(weclaw.Empty):
                await queue.get(timeout=seconds)
            return time.process_time() - before

    if kind == "asyncio":
        told.send(asyncio.run(wait()))
        return
    with weclaw.Queue(path) as queue:
        with contextlib.suppress(weclaw.Empty):
            queue.get(timeout=0.01)
        time.sleep(0.5)
        before = time.process_time()
        with contextlib.suppress(weclaw.Empty):
            queue.get(timeout=seconds)
        told.send(time.process_time() - before)


def bench_idle(run: Run) -> Iterator[Row]:
    seconds = 5.0 if run.quick else 20.0
    for kind in ("thread", "asyncio"):
        here, there = _children.Pipe(duplex=False)
        path = run.path("idle.wq")
        child = _children.Process(target=_wait_for_nothing, args=(kind, path, seconds, there))
        child.start()
        used_s = here.recv()
        child.join()
        yield Row(
            f"processor while waiting for nothing, {kind}",
            used_s / seconds * 100,
            "%",
            target=at_most(0.05, unit="%"),
            note=f"{figure(used_s * 1e3)} ms in {seconds:g} s",
        )


def main() -> None:
    options = parser(str(__doc__).partition("\n")[0])
    chosen = options.parse_args()
    with running(chosen) as run:
        where = surroundings(run.folder)
        rows: list[Row] = []
        for bench in (bench_tasks, bench_stall, bench_waking, bench_idle):
            began = time.monotonic()
            rows += bench(run)
            print(f"{bench.__name__}: {time.monotonic() - began:.0f} s", flush=True)
        report("aio", run, rows, where, chosen)


if __name__ == "__main__":
    main()
