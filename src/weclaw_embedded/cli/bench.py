"""bench: what this disk can do, and what the queue makes of it.

Every row is a ratio to the floor of the same run: one task packed and written, with its sync, to
space that is already there. Nobody can put durably in less. Small on purpose; the comparisons
with others are in benchmarks/.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import click
import msgpack

import weclaw_embedded as weclaw
from weclaw_embedded import _files
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

_BATCH = 100
# What the rows say is so, whatever is set for the user's own queues in the environment.
_ALONE: Final[dict[str, Any]] = {"replica": False}


class Row(NamedTuple):
    work: str
    p50_us: float
    """Microseconds a message, median (of a batch: its time through its messages)."""
    per_s: float
    times_floor: float


@click.command(short_help="Measure put and get on the disk where FILE lies.")
@click.argument("file", required=False, type=click.Path(dir_okay=False), metavar="[FILE]")
@click.option(
    "-n", "--messages", type=click.IntRange(100, 1_000_000), default=2000, show_default=True
)
@common.json_option
def bench(file: str | None, messages: int, as_json: bool) -> None:
    """Measure put and get on the disk where FILE lies; default: the current folder.

    FILE itself is not touched: the work is done in a folder made beside it, and removed after.
    """
    beside = os.path.dirname(os.path.abspath(file)) if file is not None else os.getcwd()
    try:
        folder = tempfile.mkdtemp(prefix=".weclaw-bench-", dir=beside)
    except OSError as error:
        common.fail(
            f"{common.plain(beside)} can't be written ({error.strerror}), and the work is done "
            "there; name a FILE in a folder that can"
        )
    try:
        rows = _measured(folder, messages)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        common.print_json(
            {
                "folder": beside,
                "messages": messages,
                "rows": [
                    {
                        name: v if name == "work" else round(v, 3)
                        for name, v in row._asdict().items()
                    }
                    for row in rows
                ],
            }
        )
        return
    _print_rows(rows)
    click.echo(f"{messages} messages of about 440 bytes each, in {common.plain(beside)}")


def _measured(folder: str, messages: int) -> list[Row]:
    """Do the work in the folder; the rows, the floor's first, each against it."""
    with common.progress_bar("bench", 5) as update:
        done = 0

        def step(work: str, run: Callable[..., list[float]], *args: Any, a_time: int = 1) -> Row:
            nonlocal done
            took = run(*args)
            done += 1
            update(completed=done)
            median = statistics.median(took) / a_time * 1e6
            total = sum(took)
            return Row(work, median, len(took) * a_time / total, 0.0)

        rows = [step("floor: pack, write, sync", _floor, folder, messages)]
        with weclaw.Queue(os.path.join(folder, "sync.wq"), flush="sync", **_ALONE) as queue:
            rows.append(step("put, synced", _put, queue, messages))
            rows.append(step("get + ack, synced", _get, queue, messages))
            rows.append(
                step(f"put_many({_BATCH}), synced", _put_many, queue, messages, a_time=_BATCH)
            )
        with weclaw.Queue(os.path.join(folder, "batch.wq"), flush="batch", **_ALONE) as queue:
            rows.append(step('put, flush="batch"', _put, queue, messages))
    floor = rows[0].p50_us
    return [row._replace(times_floor=row.p50_us / floor) for row in rows]


def _print_rows(rows: Sequence[Row]) -> None:
    common.print_table(
        ["work", ("p50 a message", "right"), ("a second", "right"), ("× floor", "right")],
        [
            (
                row.work,
                f"{row.p50_us:.1f} µs",
                f"{row.per_s:,.0f}".replace(",", " "),
                f"{row.times_floor:.2f}",
            )
            for row in rows
        ],
    )


def _task(number: int) -> dict[str, Any]:
    return {
        "task_id": f"task-{number:08d}",
        "prompt": "write a report about the sales of this quarter; " * 6 + "thanks, as ever!",
        "model": "a-model-of-some-size",
        "callback_url": "https://example.com/callbacks/tasks",
        "created_at": time.time(),
    }


def _timed(works: int, work: Callable[[int], object]) -> list[float]:
    took = []
    for number in range(works):
        begin = time.perf_counter()
        work(number)
        took.append(time.perf_counter() - begin)
    return took


def _floor(folder: str, messages: int) -> list[float]:
    fd = os.open(os.path.join(folder, "floor"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = 1 << 20
        _files.zero_fill(fd, 0, size)
        os.fsync(fd)
        sync = getattr(os, "RWF_DSYNC", 0)
        at = 0

        def write(number: int) -> None:
            nonlocal at
            data = msgpack.packb(_task(number))
            if at + len(data) > size:
                at = 0
            if sync:
                os.pwritev(fd, [data], at, sync)
            else:
                os.pwrite(fd, data, at)
                _files.sync_data(fd)
            at += len(data)

        return _timed(messages, write)
    finally:
        os.close(fd)


def _put(queue: weclaw.Queue, messages: int) -> list[float]:
    return _timed(messages, lambda number: queue.put(_task(number)))


def _put_many(queue: weclaw.Queue, messages: int) -> list[float]:
    return _timed(
        max(10, messages // _BATCH),
        lambda number: queue.put_many([_task(number * _BATCH + i) for i in range(_BATCH)]),
    )


def _get(queue: weclaw.Queue, messages: int) -> list[float]:
    return _timed(messages, lambda _: queue.get(block=False).ack())


COMMANDS = [bench]
