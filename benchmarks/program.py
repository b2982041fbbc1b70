"""A benchmark as a program: its options, where it ran, a slower disk, what it prints and keeps."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from common import Calm
from table import Row, table

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results"


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
