"""Ask the model about every line of a JSONL file; kill it whenever you like and run it again.

    python batch.py tasks.jsonl answers.jsonl

Each line is an object with a "prompt", and an "id" if it has one. The queue stands beside the
input; an answer is on disk before the next question is asked, so a second run goes on where the
first ended. When all is answered the output appears, in the order of the input.

It needs the extra `examples` (rich, for the bar): in the repository, pip install '.[examples]'
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is missing: in the repository, pip install '.[examples]'")

import weclaw_embedded as weclaw

sys.path.insert(0, str(Path(__file__).parent / "service"))
from model import complete

CHUNK = 1000


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, task) of each line; the number of the line where it has no id."""
    with path.open("rb") as lines:  # each is decoded by itself: a stream would fail lines ahead
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    task = json.loads(line)
                except ValueError as error:
                    sys.exit(f"{path}, line {number}, is not JSON: {error}")
                if not isinstance(task, dict):
                    sys.exit(f"{path}, line {number}, is JSON, but not an object with a prompt")
                yield str(task.get("id", f"line {number}")), task


def fill(q: weclaw.Queue, source: Path) -> list[str]:
    """Put every line under its id; those that an earlier run has put are passed over."""
    ids: list[str] = []
    chunk: list[weclaw.Put] = []
    for task_id, task in read(source):
        chunk.append(weclaw.Put(task, id=task_id))
        if len(chunk) == CHUNK:
            ids += q.put_many(chunk)
            chunk = []
    return ids + q.put_many(chunk)


def handle(msg: weclaw.Message) -> str:
    return complete(msg["prompt"])


def work(q: weclaw.Queue, total: int) -> bool:
    """Answer all that is open, with a bar. False when it was told to stop before the end."""
    worker = weclaw.Worker(q, handle, concurrency=4)

    def watch() -> None:
        columns = (TextColumn("asking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task("asking", total=total)
            while not ended.wait(0.1):
                stats = q.stats()
                left = stats.ready + stats.delayed + stats.leased
                progress.update(bar, completed=total - left)
                if left == 0:
                    worker.stop()

    ended = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        worker.run()  # Ctrl-C and SIGTERM end it; nothing is lost
    finally:
        ended.set()
        watching.join()
    return q.join(timeout=0)


def write(q: weclaw.Queue, ids: list[str], target: Path) -> int:
    """All answers, whole or not at all; how many there are none for."""
    failed = 0
    part = target.with_name(target.name + ".part")
    with part.open("w", encoding="utf-8") as out:
        for task_id in ids:
            line: dict[str, Any] = {"id": task_id}
            try:
                line["answer"] = q.result(task_id)
            except weclaw.DeadLetterError as error:
                failed += 1
                line["error"] = error.letter.reason
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(part, target)
    return failed


def main(source: Path, target: Path) -> int:
    try:
        source.open("rb").close()  # else a queue is made beside an input that isn't there
    except OSError as error:
        sys.exit(f"{source} can't be read: {error.strerror}")
    # Answers are kept for as long as the queue is, not only for two days.
    with weclaw.Queue(f"{source}.wq", retention=None, retention_bytes=None) as q:
        ids = fill(q, source)
        if not work(q, len(ids)):
            print("stopped; run it again to go on", file=sys.stderr)
            return 1
        failed = write(q, ids, target)
    print(f"{len(ids)} lines, {failed} without an answer", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
