"""demo: the crash drills, with real processes and a real SIGKILL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import click

import weclaw_embedded as weclaw
from weclaw_embedded.cli import _common as common
from weclaw_embedded.cli._actors import answer, read_tasks

__all__ = ["COMMANDS"]

_KILL_AT = 362
_MANY = 1000
_FEWER = 500
_HELD = 10
_LIMIT_S = 300.0

OURS = "weclaw"
THEIRS = "asyncio.Queue"


@dataclass(frozen=True)
class Outcome:
    """What became of the tasks of one drill."""

    killed: str
    queue: str
    tasks: int
    done_before: int
    found_after: int
    lost: int
    repeated: int  # finished before the kill, and handed out again after it
    seconds: float


@click.command()
@click.option(
    "--tasks",
    "source",
    type=click.Path(dir_okay=False, readable=False),
    help="Your own tasks, one JSON object a line.",
)
@click.option("--keep", type=click.Path(file_okay=False), help="Run in this folder and leave it.")
@common.json_option
def demo(source: str | None, keep: str | None, as_json: bool) -> int:
    """Kill processes and count what is lost. Ends with 1 if anything was.

    Drill 1: 1000 tasks, the consumer is killed in the middle of the 362nd, another one goes on.
    Drill 2: 500 tasks, some of them held, every process is killed. Drill 3: the same two with
    asyncio.Queue.
    """
    # The drills are about a fresh queue: no replica or flush policy of the user's own.
    for name in list(os.environ):
        if name.startswith(("WECLAW_", "WEBCLAW_")):
            del os.environ[name]
    with _folder(keep) as folder:
        own = None if source is None else _own_tasks(source)
        many = _write_tasks(folder, "many", own or _made_up(_MANY))
        fewer = _write_tasks(folder, "fewer", own or _made_up(_FEWER))
        outcomes = [
            _consumer_killed(folder, many),
            _consumer_killed_in_memory(folder, many),
            _all_killed(folder, fewer),
            _all_killed_in_memory(folder, fewer),
        ]
    bad = [found for found in outcomes if found.queue == OURS and (found.lost or found.repeated)]
    if as_json:
        common.print_json({"ok": not bad, "drills": [asdict(found) for found in outcomes]})
        return 1 if bad else 0
    common.print_table(
        [
            "killed",
            "queue",
            ("tasks", "right"),
            ("done", "right"),
            ("found", "right"),
            ("lost", "right"),
            ("done twice", "right"),
        ],
        [
            (
                found.killed,
                found.queue,
                found.tasks,
                found.done_before,
                found.found_after,
                found.lost,
                found.repeated,
            )
            for found in outcomes
        ],
    )
    click.echo("done: finished before the kill; found: there for the processes started after it\n")
    ours = [found for found in outcomes if found.queue == OURS]
    if bad:
        click.echo(f"{OURS} lost {sum(one.lost for one in ours)} tasks: please report this.")
        return 1
    tasks = sum(found.tasks for found in ours)
    seconds = sum(found.seconds for found in ours)
    click.echo(
        f"{OURS}: all {tasks} tasks done in the end, none lost, none done twice ({seconds:.1f} s)."
    )
    return 0


# Tasks.


def _made_up(number: int) -> list[dict[str, Any]]:
    wishes = (
        "Summarise this article in three sentences",
        "Übersetze den Vertrag ins Englische",
        "写一份关于季度销售的报告",
        "Écris une réponse polie à cette réclamation",
        "この会議の議事録をまとめてください",
        "Explica por qué falla esta prueba",
        "Напиши план урока по физике",
        "صنّف رسائل العملاء حسب الموضوع",
    )
    return [
        {"task_id": f"task-{i:04d}", "prompt": f"{wishes[i % len(wishes)]} (№ {i})", "tokens": 256}
        for i in range(number)
    ]


def _own_tasks(source: str) -> list[Any]:
    tasks = []
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                tasks.append(json.loads(line))
            except ValueError as error:
                common.fail(f"{common.plain(source)}: line {number} is not JSON: {error}")
    if len(tasks) < 2:
        common.fail(f"{common.plain(source)}: a drill needs at least 2 tasks")
    return tasks


def _write_tasks(folder: str, name: str, tasks: list[Any]) -> str:
    path = os.path.join(folder, f"{name}.jsonl")
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(task) + "\n" for task in tasks)
    return path


def _moment(tasks: int) -> int:
    """The task in whose middle the consumer dies: the 362nd of 1000, or as far along."""
    return _KILL_AT if tasks >= _MANY else max(1, round(tasks * _KILL_AT / _MANY))


def _at(moment: int) -> str:
    ending = "th" if moment % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(moment % 10)
    return f"consumer at {moment}{ending or 'th'}"


# The drills.


def _consumer_killed(folder: str, tasks: str) -> Outcome:
    started = time.monotonic()
    bodies = read_tasks(tasks)
    moment = _moment(len(bodies))
    file = os.path.join(folder, "consumer killed.wq")
    with _stage(folder, f"{OURS}: {_at(moment)} task, killed", 2 * len(bodies)) as stage:
        producer = stage.start("produce", file, tasks, "0", str(len(bodies)))
        ids = [words[1] for words in stage.until(producer, "end") if words[0] == "put"]
        first = stage.start("consume", file, str(moment))
        before = _ids(stage.until(first, "hold", moment), "done")
        stage.kill(first)

        second = stage.start("consume", file, "0")
        told = stage.until(second, "end")
        taken = _ids(told, "hold")
        with weclaw.Queue(file) as queue:
            lost = sum(not _is_answered(queue, *pair) for pair in zip(ids, bodies, strict=True))
    return Outcome(
        killed=_at(moment),
        queue=OURS,
        tasks=len(bodies),
        done_before=len(before),
        found_after=len(taken),
        lost=lost,
        repeated=len(before & taken) + len(told) - 1 - 2 * len(taken),
        seconds=time.monotonic() - started,
    )


def _is_answered(queue: weclaw.Queue, id: str, body: Any) -> bool:
    try:
        return bool(queue.result(id) == answer(body))
    except (KeyError, weclaw.WeclawError):
        return False


def _all_killed(folder: str, tasks: str) -> Outcome:
    started = time.monotonic()
    bodies = read_tasks(tasks)
    half = len(bodies) // 2
    held = min(_HELD, half)
    file = os.path.join(folder, "all killed.wq")
    with _stage(folder, f"{OURS}: every process killed", 2 * len(bodies)) as stage:
        producers = [
            stage.start("produce", file, tasks, "0", str(half)),
            stage.start("produce", file, tasks, str(half), str(len(bodies))),
        ]
        holder = stage.start("hold", file, str(held))
        ids = []
        for producer in producers:
            ids += [words[1] for words in stage.until(producer, "end") if words[0] == "put"]
        stage.until(holder, "end")
        stage.kill(*producers, holder)

        last = stage.start("consume", file, "0")
        told = stage.until(last, "end")
        taken = _ids(told, "hold")
        with weclaw.Queue(file) as queue:
            lost = sum(not _is_answered(queue, *pair) for pair in zip(ids, bodies, strict=True))
    return Outcome(
        killed="every process",
        queue=OURS,
        tasks=len(bodies),
        done_before=0,
        found_after=len(taken),
        lost=lost,
        repeated=len(told) - 1 - 2 * len(taken),
        seconds=time.monotonic() - started,
    )


def _consumer_killed_in_memory(folder: str, tasks: str) -> Outcome:
    total = len(read_tasks(tasks))
    return _in_memory(folder, tasks, _at(_moment(total)), _moment(total))


def _all_killed_in_memory(folder: str, tasks: str) -> Outcome:
    return _in_memory(folder, tasks, "every process", None)


def _in_memory(folder: str, tasks: str, killed: str, moment: int | None) -> Outcome:
    started = time.monotonic()
    total = len(read_tasks(tasks))
    with _stage(folder, f"{THEIRS}: {killed} killed", total) as stage:
        child = stage.start("memory", tasks, "never" if moment is None else str(moment))
        stage.until(child, "end")
        done = _ids(stage.until(child, "hold", moment), "done") if moment is not None else set()
        stage.kill(child)
        again = stage.start("memory_again")
        found = int(stage.until(again, "found")[-1][1])
    return Outcome(
        killed=killed,
        queue=THEIRS,
        tasks=total,
        done_before=len(done),
        found_after=found,
        lost=total - len(done) - found,
        repeated=0,
        seconds=time.monotonic() - started,
    )


def _ids(told: list[list[str]], what: str) -> set[str]:
    return {words[1] for words in told if words[0] == what}


# Processes.


class _Stage:
    """Starts actors, listens to them, kills them."""

    def __init__(self, folder: str, errors: Any, update: Any) -> None:
        self._folder = folder
        self._errors = errors
        self._update = update
        self._steps = 0
        self.actors: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        # In the drill's folder, so that no file of the user's shadows a module; what PYTHONPATH
        # names is still found from there.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths if path),
        }
        actor = subprocess.Popen(
            [sys.executable, "-m", "weclaw_embedded.cli._actors", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._folder,
            env=environment,
            encoding="utf-8",
        )
        self.actors.append(actor)
        return actor

    def until(self, actor: subprocess.Popen[str], what: str, times: int = 1) -> list[list[str]]:
        """What the actor tells, up to the `times`th line of this kind."""
        assert actor.stdout is not None
        told = []
        for line in actor.stdout:
            words = line.split()
            told.append(words)
            if words[0] in ("put", "done"):
                self._steps += 1
                if self._steps % 10 == 0:
                    self._update(completed=self._steps)
            if words[0] == what:
                times -= 1
                if times == 0:
                    return told
        status = actor.wait()
        self._errors.seek(0)
        last = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        raise common.Failure(
            f"a process of the drill ended with {status} before its time"
            + (f": {common.plain(last[0])}" if last else f" ({_LIMIT_S:.0f} s are the limit)")
        )

    def kill(self, *actors: subprocess.Popen[str]) -> None:
        """SIGKILL, to all at once, then see that each died of it."""
        for actor in actors:
            actor.send_signal(signal.SIGKILL)
        for actor in actors:
            if actor.wait() != -signal.SIGKILL:
                raise common.Failure("a process ended by itself before it could be killed")


@contextmanager
def _stage(folder: str, label: str, steps: int) -> Iterator[_Stage]:
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile())
        update = stack.enter_context(common.progress_bar(label, steps))
        stage = _Stage(folder, errors, update)
        # Whoever hangs is killed too, which ends the drill with an error instead of never.
        watch = threading.Timer(_LIMIT_S, _end, [stage.actors])
        watch.daemon = True
        watch.start()
        try:
            yield stage
            update(completed=steps)
        finally:
            watch.cancel()
            _end(stage.actors)
            for actor in stage.actors:
                actor.wait()
                if actor.stdout is not None:
                    actor.stdout.close()


def _end(actors: list[subprocess.Popen[str]]) -> None:
    for actor in actors:
        if actor.poll() is None:
            actor.kill()


@contextmanager
def _folder(keep: str | None) -> Iterator[str]:
    if keep is not None:
        os.makedirs(keep, exist_ok=True)
        if os.listdir(keep):
            common.fail(f"{common.plain(keep)} is not empty; name a new folder")
        yield os.path.abspath(keep)
        return
    folder = tempfile.mkdtemp(prefix="weclaw-demo-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


COMMANDS = [demo]
