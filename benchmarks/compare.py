"""Two commits against each other: what changed beyond noise.

    python benchmarks/compare.py main~5 main
    python benchmarks/compare.py main~5 main --runs 7 --bench batch --bench processes

Both are measured by the benchmarks as they are here, taking turns; the library comes from a work
tree of each commit that is gone afterwards. Of a row's figure and its ratios to the floor and the
yardstick the one that varies least from run to run of the same commit is compared. It has changed
when no run of one commit lies among the runs of the other, and their medians differ by more than
--noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program import HERE
from table import figure

_ROOT = HERE.parent
Figures = dict[str, dict[str, Any]]  # the rows by their work


@contextlib.contextmanager
def _work_tree(commit: str, folder: Path) -> Iterator[Path]:
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", str(folder), commit],
        cwd=_ROOT,
        check=True,
    )
    try:
        yield folder / "src"
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=_ROOT, check=True)


def _measure(script: str, source: Path, options: list[str], out: Path) -> Figures:
    environ = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, str(HERE / script), "--json", str(out), *options]
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads(out.read_text())["rows"]
    return {row["work"]: row for row in rows if not row["work"].startswith(("the floor", "the y"))}


def _spread(runs: list[float]) -> float:
    middle = statistics.median(runs)
    return (max(runs) - min(runs)) / middle if middle else 0.0


def _steadiest(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """Which figure of a row to compare: the one with least noise, whatever it says."""
    names = [name for name in ("value", "x_floor", "x_yardstick") if new[0][name] is not None]
    return min(
        names,
        key=lambda name: sum(_spread([row[name] for row in rows]) for rows in (old, new)),
    )


def _verdict(old: list[float], new: list[float], is_more_better: bool, noise: float) -> str:
    change = statistics.median(new) / statistics.median(old) - 1
    if abs(change) < noise or not (min(new) > max(old) or max(new) < min(old)):
        return ""
    return "better" if (change > 0) == is_more_better else "WORSE"


def main() -> None:
    options = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    options.add_argument("old", metavar="OLD")
    options.add_argument("new", metavar="NEW")
    options.add_argument("--runs", type=int, default=5, help="of each commit")
    options.add_argument("--script", default="bench_queue.py", help="or bench_aio.py")
    options.add_argument("--bench", action="append", default=[], help="as for bench_queue.py")
    options.add_argument("--realtime", action="store_true", help="as for bench_queue.py")
    options.add_argument("--noise", type=float, default=0.03, help="changes below are ignored")
    chosen = options.parse_args()
    passed = ["--quick", *[f"--bench={name}" for name in chosen.bench]]
    passed += ["--realtime"] if chosen.realtime else []
    runs: dict[str, list[Figures]] = {"old": [], "new": []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weclaw-compare-")))
        sources = {
            which: stack.enter_context(_work_tree(commit, folder / which))
            for which, commit in (("old", chosen.old), ("new", chosen.new))
        }
        for turn in range(chosen.runs):
            order = ("old", "new") if turn % 2 == 0 else ("new", "old")
            for which in order:
                out = folder / f"{which}.json"
                runs[which].append(_measure(chosen.script, sources[which], passed, out))
            print(f"run {turn + 1} of {chosen.runs}", flush=True)
    width = max(len(work) for work in runs["new"][0])
    print(f"\n{'work':{width}}  {'old':>10}  {'new':>10}         change")
    for work, row in runs["new"][0].items():
        old_rows, new_rows = ([run[work] for run in runs[which] if work in run] for which in runs)
        if not old_rows:
            continue
        name = _steadiest(old_rows, new_rows)
        unit = {"x_floor": "× F", "x_yardstick": "× Y"}.get(name, row["unit"])
        is_more_better = row["unit"] in ("/s", "×") and "disk" not in work
        old, new = ([each[name] for each in rows] for rows in (old_rows, new_rows))
        before, after = statistics.median(old), statistics.median(new)
        verdict = _verdict(old, new, is_more_better, chosen.noise)
        change = f"{(after / before - 1) * 100:+.0f} %" if before else ""
        line = f"{work:{width}}  {figure(before):>10}  {figure(after):>10} {unit:5}  {change:>6}"
        print(f"{line}  {verdict}".rstrip())
    print("\nNo word at the end of a line: nothing beyond noise.")


if __name__ == "__main__":
    main()
