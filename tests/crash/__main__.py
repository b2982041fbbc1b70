"""Long rounds by hand: `python -m tests.crash --rounds N --seed S [--kind KIND]`.

KIND: random, calls, lines; with a replica: copies (random), receiver, feeder-calls, feeder-lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("weclaw_embedded") is None:
    sys.path.insert(0, str(ROOT / "src"))

from tests.crash import copies, rounds  # noqa: E402
from tests.crash.ledger import SCRATCH, Violation  # noqa: E402


def stops(kind: str, number: int, seed: int, directory: Path) -> list[tuple[int, str, bool, int]]:
    """The stops to make: all of them, or `number` chosen ones."""
    lines = kind == "lines"
    found = []
    for existing in (False, True):
        for retention in (3600, 0):
            place = directory / f"count {existing} {retention}"
            n = rounds.stop_round(
                place, kind, 0, "count", existing=existing, scratch="deleted", retention=retention
            )
            shutil.rmtree(place)
            moments = ("before",) if lines else ("before", "half", "after")
            found += [
                (at, moment, existing, retention) for at in range(1, n + 1) for moment in moments
            ]
    if number and number < len(found):
        found = random.Random(seed).sample(found, number)
    return found


def replica_stops(kind: str, number: int, seed: int, directory: Path) -> list[tuple[Any, ...]]:
    """Stops of a receiver, or of a process that works with a replica: all, or `number` of them."""
    found: list[tuple[Any, ...]] = []
    for existing in (False, True) if kind != "receiver" else (False,):
        for retention in (3600, 0):
            place = directory / f"count {existing} {retention}"
            if kind == "receiver":
                n = copies.receiver_stop_round(place, 0, "count", retention=retention)
            else:
                n = copies.feeder_stop_round(
                    place,
                    kind.removeprefix("feeder-"),
                    0,
                    "count",
                    existing=existing,
                    retention=retention,
                )
            shutil.rmtree(place)
            moments = ("before",) if kind == "feeder-lines" else ("before", "half", "after")
            found += [
                (at, moment, existing, retention) for at in range(1, n + 1) for moment in moments
            ]
    if number and number < len(found):
        found = random.Random(seed).sample(found, number)
    return found


def replica_round(kind: str, place: Path, what: tuple[Any, ...], seconds: float) -> str:
    if kind == "copies":
        numbers = copies.copy_round(place, what[0], seconds=seconds)
        return " ".join(f"{key} {value}" for key, value in numbers.items())
    at, moment, existing, retention = what
    if kind == "receiver":
        copies.receiver_stop_round(place, at, moment, retention=retention)
    else:
        stop_at = kind.removeprefix("feeder-")
        copies.feeder_stop_round(place, stop_at, at, moment, existing=existing, retention=retention)
    return f"{moment} {at} existing {existing} retention {retention}"


REPLICA_KINDS = ("copies", "receiver", "feeder-calls", "feeder-lines")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="0: every stop there is")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--kind", choices=("random", "calls", "lines", *REPLICA_KINDS), default="random"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="of work in a random round")
    parser.add_argument("--keep-going", action="store_true", help="count violations to the end")
    parser.add_argument("--directory", type=Path, help="where the files are; a new one if left out")
    given = parser.parse_args()
    # Fenced files are wanted, too.
    level = logging.CRITICAL if given.kind in REPLICA_KINDS else logging.ERROR
    logging.getLogger("weclaw_embedded").setLevel(level)  # Torn tails are what is wanted.
    seed = random.randrange(10**6) if given.seed is None else given.seed
    directory = given.directory or Path(tempfile.mkdtemp(prefix="weclaw-crash-"))
    print(f"kind {given.kind}, seed {seed}, in {directory}", flush=True)
    work: list[tuple[Any, ...]]
    if given.kind == "random":
        work = [(n,) for n in range(given.rounds)]
    elif given.kind == "copies":
        work = [(f"{seed}/{n}",) for n in range(given.rounds)]
    elif given.kind in REPLICA_KINDS:
        work = replica_stops(given.kind, given.rounds, seed, directory)
    else:
        work = stops(given.kind, given.rounds, seed, directory)
    begun = time.monotonic()
    violations = 0
    for n, what in enumerate(work):
        place = directory / f"round {n}"
        try:
            if given.kind in REPLICA_KINDS:
                line = replica_round(given.kind, place, what, given.seconds)
            elif given.kind == "random":
                numbers = rounds.random_round(place, f"{seed}/{n}", seconds=given.seconds)
                line = " ".join(f"{key} {value}" for key, value in numbers.items())
            else:
                at, moment, existing, retention = what
                line = f"{moment} {at} existing {existing} retention {retention}"
                rounds.stop_round(
                    place,
                    given.kind,
                    at,
                    moment,
                    existing=existing,
                    scratch=SCRATCH[1:][n % 3],
                    retention=retention,
                )
        except Violation as violation:
            violations += 1
            print(f"\nround {n}: {what}\n{violation}\nkept: {place}\n", flush=True)
            if not given.keep_going:
                return 1
            continue
        shutil.rmtree(place)
        print(
            f"{n + 1}/{len(work)}  {time.monotonic() - begun:6.0f} s  {line}",
            end="\r" if sys.stdout.isatty() else "\n",
            flush=True,
        )
    print(f"\n{len(work)} rounds, {violations} violations, seed {seed}")
    if not violations and given.directory is None:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
