"""The queue with a second copy on the same disk: what waiting for it costs, and how far it lags.

python benchmarks/bench_replica.py --quick
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import (
    Floor,
    Yardstick,
    make_message,
    make_messages,
    median_ratio,
    p50_us,
    rate_of,
    rate_of_threads,
    take_turns,
)
from program import Run, parser, report, running, surroundings
from table import Row, at_most, figure, latency_row, rate_row

import weclaw_embedded as weclaw


@contextlib.contextmanager
def _with_copy(run: Run, *, sync: bool, **options: Any) -> Iterator[weclaw.Queue]:
    queue = weclaw.Queue(
        run.path("primary.wq"), replica=run.path("copy.wq"), sync_replica=sync, **options
    )
    try:
        queue.put(make_message(0))  # the receiver is started by now
        yield queue
    finally:
        queue.close()


def _many(queue: weclaw.Queue) -> Callable[[], int]:
    def step() -> int:
        queue.put_many(make_messages(100))
        return 100

    return step


def bench_puts(run: Run) -> Iterator[Row]:
    floor, yardstick = Floor(run.path("floor")), Yardstick(run.path("yardstick.db"))
    alone = weclaw.Queue(run.path("alone.wq"))
    with _with_copy(run, sync=True) as waiting, _with_copy(run, sync=False) as lagging:
        samples = take_turns(
            run.calm,
            2 * run.rounds + 1,
            {
                "floor": functools.partial(p50_us, floor.put, run.slice_s),
                "yardstick": functools.partial(p50_us, yardstick.put, run.slice_s),
                "alone": functools.partial(p50_us, alone.put, run.slice_s),
                "waiting": functools.partial(p50_us, waiting.put, run.slice_s),
                "lagging": functools.partial(p50_us, lagging.put, run.slice_s),
            },
        )
        value = statistics.median(samples["floor"])
        yield Row("the floor: pack + pwritev(RWF_DSYNC), p50", value, "µs", 1.0)
        ratio = median_ratio(samples, "yardstick", "floor")
        value = statistics.median(samples["yardstick"])
        yield Row("the yardstick: sqlite3 put, p50", value, "µs", ratio, 1.0)
        works = [
            ("put without a replica, p50", "alone", None),
            ("put, sync_replica=True, p50", "waiting", at_most(3, "floor")),
            ("put, sync_replica=False, p50", "lagging", None),
        ]
        for work, name, target in works:
            yield latency_row(work, samples | {"ours": samples[name]}, target)
        samples = take_turns(
            run.calm,
            run.rounds,
            {
                "floor": lambda: 1e6 / p50_us(floor.put, run.slice_s / 3),
                "ours": functools.partial(rate_of, _many(waiting), run.slice_s),
            },
        )
        yield rate_row("put_many(100), sync_replica=True", samples)
        samples = take_turns(
            run.calm,
            run.rounds,
            {
                "floor": lambda: 1e6 / p50_us(floor.put, run.slice_s / 3),
                "ours": functools.partial(rate_of_threads, waiting.put, 8, 2 * run.slice_s),
            },
        )
        yield rate_row("8 threads putting, sync_replica=True", samples)
    alone.close()
    floor.close()
    yardstick.close()


def bench_lag(run: Run) -> Iterator[Row]:
    """Put as fast as it goes with a copy nobody waits for; then see how far behind it is."""
    lags, caught_up = [], []
    with _with_copy(run, sync=False, flush="batch") as queue:
        for _ in range(run.rounds):
            rate_of(_many(queue), run.slice_s)
            queue.flush()
            lags.append((queue.stats().replica_lag or 0) / 1e6)
            start = time.perf_counter()
            while queue.stats().replica_lag and time.perf_counter() - start < 30:
                time.sleep(0.002)
            caught_up.append((time.perf_counter() - start) * 1e3)
    worst = figure(max(lags))
    yield Row(
        f"lag after {run.slice_s:g} s of put_many(100), sync_replica=False",
        statistics.median(lags),
        "MB",
        note=f"at worst {worst} MB",
        samples={"ours": lags},
    )
    yield Row(
        "until it is level again", statistics.median(caught_up), "ms", samples={"ours": caught_up}
    )


def main() -> None:
    chosen = parser(str(__doc__).partition("\n")[0]).parse_args()
    with running(chosen) as run:
        where = surroundings(run.folder)
        rows = [*bench_puts(run), *bench_lag(run)]
        report("replica", run, rows, where, chosen)


if __name__ == "__main__":
    main()
