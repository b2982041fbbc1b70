"""work: run a handler over a queue, from a shell. All of it is `Worker`; here it is watched."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

import weclaw_embedded as weclaw
from weclaw_embedded import _survey
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

Handler = Callable[[weclaw.Message], Any]

# How often the bar moves, and the end of a drain is looked for when nobody wakes us.
_LOOK_S = 0.2


@click.command()
@common.file_argument
@click.argument("handler", metavar="MODULE:HANDLER")
@click.option("--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--drain", is_flag=True, help="End when nothing is ready, delayed or leased.")
@click.option(
    "--visibility-timeout",
    type=common.POSITIVE,
    default=60.0,
    show_default=True,
    help="How long a lease lasts; it is renewed while the handler runs.",
)
@click.option(
    "--max-run-time",
    type=common.POSITIVE,
    help="A handler that runs longer has failed; default: any time.",
)
@click.option(
    "--grace",
    type=common.DURATION,
    default=30.0,
    show_default=True,
    help="What running handlers get after SIGTERM or Ctrl-C.",
)
@click.option(
    "--pause-after",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="After so many failures in a row the queue is paused (0: never) …",
)
@click.option(
    "--pause-for", type=common.POSITIVE, default=15.0, show_default=True, help="… for so long."
)
@click.option("--consumer", help="A name for this worker, shown in failures.")
@common.topic_option
@common.group_option
@common.json_option
def work(
    file: str,
    handler: str,
    concurrency: int,
    drain: bool,
    visibility_timeout: float,
    max_run_time: float | None,
    grace: float,
    pause_after: int,
    pause_for: float,
    consumer: str | None,
    topic: str,
    group: str,
    as_json: bool,
) -> int:
    """Call MODULE:HANDLER for each message of FILE.

    The handler gets the message; what it returns is kept as the result, what it raises counts as
    a failure and is retried, as often as WECLAW_MAX_RETRIES says. Killed at any moment, start it
    again: it goes on where it was. With --drain retries are waited for, and it ends with 0 when
    nothing is left. Pauses after failures in a row are waited out, too: where tasks that always
    fail are all that is left, that is most of the time; --pause-after 0 leaves pauses out.
    """
    function = _load(handler)
    started = time.monotonic()
    with common.opened(file, consumer=consumer) as store:
        wrong = common.missing(store, topic, group)
        if drain and common.missing(store, topic, None) is not None:
            common.fail(f"{wrong}; nothing was done")  # nobody waits for it to begin
        queue = common.queue_of(store, topic, group, visibility_timeout=visibility_timeout)
        worker = weclaw.Worker(
            queue,
            function,
            concurrency=concurrency,
            max_run_time=max_run_time,
            grace=grace,
            pause_after=pause_after,
            pause_for=pause_for,
        )
        if wrong is not None:  # a consumer may be there first, and a group begins with it
            common.say(f"weclawctl: {wrong}; this worker begins it")
        with _watched(worker, store, queue, drain=drain) as seen:
            worker.run()
        stats = queue.stats()
    left = _left(stats)
    seconds = time.monotonic() - started
    if as_json:
        common.print_json(
            {
                "done": worker.done,
                "failed": worker.failed,
                "dead": stats.dead,
                "left": left,
                "seconds": round(seconds, 3),
                "paused_s": round(seen.paused_s, 3),
            }
        )
    else:
        paused = f", {seen.paused_s:.1f} s of it paused" if seen.paused_s else ""
        if paused and worker.pauses:
            paused += " (--pause-after 0 leaves out the pauses after failures in a row)"
        click.echo(
            f"{common.count(worker.done, 'message')} done, "
            f"{common.count(worker.failed, 'failure')} in {seconds:.1f} s{paused}; {left} left, "
            f"{common.count(stats.dead, 'dead letter')}"
        )
    return 1 if drain and left else 0


@dataclass
class _Seen:
    """What only one who looks on sees of a worker's run."""

    paused_s: float = 0.0  # whoever paused the queue


@contextlib.contextmanager
def _watched(
    worker: weclaw.Worker, store: weclaw.Store, queue: weclaw.Queue, *, drain: bool
) -> Iterator[_Seen]:
    """Show how far the worker is, and stop it when a drain is done."""
    over = threading.Event()
    seen = _Seen()

    def watch(update: Callable[..., None]) -> None:
        looked_s = time.monotonic()
        try:
            while not over.is_set():
                left = _left(queue.stats())
                failures = f" ({common.count(worker.failed, 'failure')})" if worker.failed else ""
                is_paused = (queue.topic, queue.group) in _survey.pauses(store)
                before_s, looked_s = looked_s, time.monotonic()
                if is_paused:
                    seen.paused_s += looked_s - before_s
                paused = ", paused" if is_paused else ""
                update(
                    completed=worker.done,
                    total=worker.done + left,
                    label=f"work{paused}{failures}",
                )
                if not drain:
                    over.wait(_LOOK_S)
                elif queue.join(timeout=_LOOK_S):
                    worker.stop()
                    return
        except (weclaw.StorageError, weclaw.ClosedError):
            worker.stop()  # it meets the same, and says so

    with common.progress_bar("work", None) as update:
        thread = threading.Thread(target=watch, args=(update,), name="watch", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()
            with contextlib.suppress(weclaw.StorageError, weclaw.ClosedError):
                update(completed=worker.done, total=worker.done + _left(queue.stats()))


def _left(stats: weclaw.Stats) -> int:
    """What a drain waits for."""
    return stats.ready + stats.delayed + stats.leased


def _load(spec: str) -> Handler:
    """The function that "package.module:name" or "file.py:name" stands for."""
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise click.UsageError(f"{spec!r} is not MODULE:HANDLER, such as tasks:handle")
    if module_name.endswith(".py"):
        folder, module_name = os.path.split(module_name[:-3])
        sys.path.insert(0, os.path.abspath(folder))
    else:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name == module_name.partition(".")[0]:
            raise click.UsageError(
                f"there is no module {module_name!r} here or on the path of Python; give a file as "
                f"{module_name}.py:{name}"
            ) from error
        raise click.UsageError(f"{spec}: {error}") from error
    except (Exception, SystemExit) as error:  # the module is the user's code
        raise click.UsageError(f"{spec}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise click.UsageError(f"{spec} is not callable but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


COMMANDS = [work]
