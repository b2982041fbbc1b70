"""What every benchmark shares: the message, the floor, the yardstick, fair repeats, the table.

A figure alone says more about the disk than about the queue, so each is given as a ratio:

* **The floor**: pack the message and write it with one `pwritev(RWF_DSYNC)` into space that is
  already filled with zeros, p50. No durable queue can do better than its disk.
* **The yardstick**: the queue one writes by hand with sqlite3 (WAL, synchronous=FULL).

All contenders of a row take turns in slices of a fraction of a second, in an order that rotates;
ratios are taken inside each turn and the median of the turns counts, so that what else the
machine does hits all of them alike. A turn in which the bare disk was much slower than it can be,
or in which this program waited for a processor, is taken again; how many were is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgpack

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results"
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
    run: Run, rounds: int, contenders: Mapping[str, Callable[[], float]], most: int = 0
) -> Samples:
    """Each contender once a turn, in an order that rotates. Of the turns the calm ones are kept,
    and if there are not enough of them among `most` (four times as many) the calmest.
    """
    names = list(contenders)
    turns: list[tuple[float, dict[str, float]]] = []
    calm = 0
    while calm < rounds and len(turns) < (most or 4 * rounds):
        shift = len(turns) % len(names)
        order = names[shift:] + names[:shift]
        disturbed, found = run.calm.watch([(name, contenders[name]) for name in order])
        turns.append((disturbed, found))
        calm += disturbed < Calm.LIMIT
    run.calm.turns += len(turns)
    run.calm.disturbed += len(turns) - calm
    turns.sort(key=lambda one: one[0])
    return {name: [found[name] for _, found in turns[:rounds]] for name in names}


def median_ratio(samples: Samples, above: str, below: str) -> float:
    pairs = zip(samples[above], samples[below], strict=True)
    return statistics.median(a / b for a, b in pairs)


# -- the table -----------------------------------------------------------------------------------


@dataclass
class Target:
    """What must be reached: of the value itself, or of its ratio to the floor or yardstick."""

    of: str  # "value", "floor" or "yardstick"
    limit: float
    is_upper: bool
    unit: str = ""

    def __str__(self) -> str:
        unit = {"floor": " × F", "yardstick": " × Y"}.get(self.of, f" {self.unit}".rstrip())
        return f"{'≤' if self.is_upper else '≥'} {figure(self.limit)}{unit}"


def at_most(limit: float, of: str = "value", unit: str = "") -> Target:
    return Target(of, limit, True, unit)


def at_least(limit: float, of: str = "value", unit: str = "") -> Target:
    return Target(of, limit, False, unit)


@dataclass
class Row:
    """One line of the table; `samples` are the turns it comes from."""

    work: str
    value: float
    unit: str
    x_floor: float | None = None
    x_yardstick: float | None = None
    target: Target | None = None
    note: str = ""
    samples: Samples = field(default_factory=dict)
    section: str = ""

    @property
    def reached(self) -> str:
        if self.target is None:
            return ""
        value = {"floor": self.x_floor, "yardstick": self.x_yardstick}.get(
            self.target.of, self.value
        )
        if value is None:
            return "?"
        is_met = value <= self.target.limit if self.target.is_upper else value >= self.target.limit
        return "yes" if is_met else "NO"


def figure(value: float | None) -> str:
    if value is None:
        return ""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.3g}"


def latency_row(work: str, samples: Samples, target: Target | None = None) -> Row:
    """A row of times in microseconds, of the contenders "ours", "floor" and "yardstick"."""
    return Row(
        work,
        statistics.median(samples["ours"]),
        "µs",
        median_ratio(samples, "ours", "floor") if "floor" in samples else None,
        median_ratio(samples, "ours", "yardstick") if "yardstick" in samples else None,
        target,
        samples=samples,
    )


def rate_row(work: str, samples: Samples, target: Target | None = None, note: str = "") -> Row:
    """A row of rates. Its × floor is how many messages go through while the floor writes one."""
    return Row(
        work,
        statistics.median(samples["ours"]),
        "/s",
        median_ratio(samples, "ours", "floor") if "floor" in samples else None,
        median_ratio(samples, "ours", "yardstick") if "yardstick" in samples else None,
        target,
        note,
        samples,
    )


_HEAD = ("work", "measured", "× floor", "× yardstick", "target", "reached", "note")


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table that reads well on a terminal, too."""
    cells = [
        (
            row.work,
            f"{figure(row.value)} {row.unit}".rstrip(),
            figure(row.x_floor),
            figure(row.x_yardstick),
            "" if row.target is None else str(row.target),
            row.reached,
            row.note,
        )
        for row in rows
    ]
    # Columns that nothing stands in are left out.
    kept = [i for i in range(len(_HEAD)) if any(line[i] for line in cells)]
    columns = [[_HEAD[i], *[line[i] for line in cells]] for i in kept]
    widths = [max(len(text) for text in column) for column in columns]
    lines = []
    for n in range(len(cells) + 1):
        words = [column[n].ljust(width) for column, width in zip(columns, widths, strict=True)]
        lines.append(f"| {' | '.join(words)} |")
        if n == 0:
            lines.append(f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


# -- where it ran --------------------------------------------------------------------------------


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def disk_of(path: str) -> tuple[str, str]:
    """Device and file system that `path` is on."""
    best = ("?", "?", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            device, point, kind = line.split()[:3]
            inside = point == "/" or path == point or path.startswith(point + "/")
            if inside and len(point) >= len(best[2]):
                best = (device, kind, point)
    return best[0], best[1]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def surroundings(path: str) -> dict[str, str]:
    """Machine, disk, date and versions, as they go into every result."""
    device, kind = disk_of(os.path.realpath(path))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = _first_line(["git", "describe", "--always", "--dirty", "--exclude=*"])
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_cpu()}, {os.cpu_count()} CPUs, {memory:.0f} GiB",
        "disk": f"{device}, {kind}",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "weclaw-embedded": f"{_version('weclaw-embedded')} ({commit})",
        "sqlite": sqlite3.sqlite_version,
        "lmdb": _version("lmdb"),
        "msgpack": _version("msgpack"),
        "each sync": slow_sync_of_this_run() or "as the disk has it",
        "load": f"{os.getloadavg()[0]:.1f} at the start",
    }


# -- a slower disk -------------------------------------------------------------------------------

_SHIM: Final = HERE / "slow_sync.c"
_SLOW_ENV: Final = "WECLAW_BENCH_SLOW_SYNC_US"


def slow_sync_of_this_run() -> str:
    microseconds = os.environ.get(_SLOW_ENV)
    return f"takes at least {int(microseconds) / 1000:g} ms" if microseconds else ""


def _microseconds(text: str) -> int:
    for unit, factor in (("ms", 1e3), ("us", 1.0), ("s", 1e6)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    raise argparse.ArgumentTypeError(f"{text!r}: a time is written like 5ms")


def _restart_with_slow_sync(microseconds: int) -> None:
    """Run this program anew with the shim preloaded, so that children have it, too."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("--slow-sync needs gcc or cc to compile its shim; there is neither")
    shim = Path(tempfile.mkdtemp(prefix="weclaw-bench-shim-")) / "slow_sync.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(shim), str(_SHIM), "-ldl"], check=True
    )
    environ = dict(os.environ)
    environ[_SLOW_ENV] = str(microseconds)
    environ["LD_PRELOAD"] = f"{shim} {environ.get('LD_PRELOAD', '')}".strip()
    try:
        raise SystemExit(subprocess.call([sys.executable, *sys.argv], env=environ))
    finally:
        shutil.rmtree(shim.parent)


# -- the program ---------------------------------------------------------------------------------


@dataclass
class Run:
    """How long to measure, and where."""

    folder: str
    rounds: int
    slice_s: float
    quick: bool
    full: bool
    calm: Calm
    _made: int = 0

    def path(self, name: str) -> str:
        self._made += 1
        return os.path.join(self.folder, f"{self._made:03d}-{name}")

    def syncs_in(self, seconds: float) -> int:
        """How many messages the bare disk takes in that time, one by one."""
        return int(seconds / self.calm.best_us * 1e6)

    def version(self, package: str) -> str:
        return _version(package)


def parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    options.add_argument("--full", action="store_true", help="also what takes minutes and GBs")
    options.add_argument("--rounds", type=int, help="turns of each contender")
    options.add_argument(
        "--realtime", action="store_true", help="go before all else that this machine does (root)"
    )
    options.add_argument("--dir", help="a folder on the disk to measure")
    options.add_argument("--slow-sync", type=_microseconds, metavar="5ms", help="a slower disk")
    options.add_argument("--no-json", action="store_true", help="print only")
    options.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there instead")
    return options


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[Run]:
    """A folder to measure in, gone afterwards."""
    if options.slow_sync and _SLOW_ENV not in os.environ:
        _restart_with_slow_sync(options.slow_sync)
    folder = tempfile.mkdtemp(prefix="weclaw-bench-", dir=options.dir)
    if disk_of(os.path.realpath(folder))[1] == "tmpfs":
        os.rmdir(folder)
        raise SystemExit(f"{folder} would be in memory; name a folder on a disk with --dir")
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    quick = options.quick
    rounds = options.rounds or (5 if quick else 11)
    try:
        slice_s = 0.1 if quick else 0.25
        yield Run(folder, rounds, slice_s, quick, options.full, Calm(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(
    name: str,
    run: Run,
    rows: Sequence[Row],
    where: dict[str, str],
    chosen: argparse.Namespace,
) -> None:
    """Print the table and keep it with all its samples."""
    for row in rows:
        # What is asked for as a ratio is asked for on a disk that syncs in about 0.1 ms.
        if row.target is not None and row.target.of != "value" and slow_sync_of_this_run():
            row.target = None
    print(f"\n{name}: " + "; ".join(f"{key} {value}" for key, value in where.items()))
    print(f"medians of {run.rounds} turns or more; {run.calm}")
    print("F: the floor, the bare disk; Y: the yardstick, sqlite3 by hand (see common.py)\n")
    for section, inside in itertools.groupby(rows, key=lambda row: row.section):
        if section:
            print(f"\n**{section}**\n")
        print(table(list(inside)))
    if chosen.no_json:
        return
    kept = {
        "name": name,
        "where": where,
        "turns": str(run.calm),
        "rows": [asdict(row) | {"reached": row.reached} for row in rows],
    }
    path: Path = chosen.json or result_path(name, quick=run.quick)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(f"\nkept in {os.path.relpath(path)}")


def result_path(name: str, *, quick: bool) -> Path:
    slow = "-slow-sync" if slow_sync_of_this_run() else ""
    return RESULTS / f"{name}{slow}{'-quick' if quick else ''}.json"


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
