"""work: run a handler over a queue, from a shell.

The loop is small on purpose: threads over `Queue.get`, `with msg`, and a stop that hands back
what isn't finished. `_Crew` is all there is of it, so that something richer can take its place.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import click

import weclaw_embedded as weclaw
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

Handler = Callable[[weclaw.Message], Any]

# How often a waiting thread looks whether it should stop. It is woken by a put all the same.
_LOOK_S = 0.5


@click.command()
@common.file_argument
@click.argument("handler", metavar="MODULE:HANDLER")
@click.option("--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--drain", is_flag=True, help="End when nothing is ready, delayed or leased.")
@click.option(
    "--visibility-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds a lease lasts; it is renewed while the handler runs.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that running handlers get after SIGTERM or Ctrl-C.",
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
    grace: float,
    consumer: str | None,
    topic: str,
    group: str,
    as_json: bool,
) -> int:
    """Call MODULE:HANDLER for each message of FILE.

    The handler gets the message; what it returns is kept as the result, what it raises counts as
    a failure and is retried. Killed at any moment, start it again: it goes on where it was.
    """
    function = _load(handler)
    common.must_exist(file)
    store = weclaw.open(file, consumer=consumer)
    try:
        queue = common.queue_of(store, topic, group, visibility_timeout=visibility_timeout)
        crew = _Crew(queue, function, concurrency)
        drained = crew.run(drain=drain, grace=grace)
        left = queue.stats()
    finally:
        store.close()  # hands back, uncounted, what is still held
    if as_json:
        common.print_json(
            {
                "done": crew.done,
                "failed": crew.failed,
                "dead": left.dead,
                "left": left.ready + left.delayed + left.leased,
                "seconds": round(crew.seconds, 3),
            }
        )
    else:
        click.echo(
            f"{common.count(crew.done, 'message')} done, {common.count(crew.failed, 'failure')} "
            f"in {crew.seconds:.1f} s; {left.ready + left.delayed + left.leased} left, "
            f"{common.count(left.dead, 'dead letter')}"
        )
    return 0 if drained or not drain else 1


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
    except Exception as error:  # the module is the user's code
        raise click.UsageError(f"{spec}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise click.UsageError(f"{spec} is not callable")
    return found  # type: ignore[no-any-return]


class _Crew:
    """Threads that take messages and run the handler, until told to stop or nothing is left."""

    def __init__(self, queue: weclaw.Queue, handler: Handler, concurrency: int) -> None:
        self.done = 0
        self.failed = 0
        self.seconds = 0.0
        self._queue = queue
        self._handler = handler
        self._concurrency = concurrency
        self._stop = threading.Event()
        self._broken: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, *, drain: bool, grace: float) -> bool:
        """Work; returns whether the queue was drained. Raises what broke a thread."""
        started = time.monotonic()
        threads = [
            threading.Thread(target=self._take, name=f"work-{i}", daemon=True)
            for i in range(self._concurrency)
        ]
        handlers = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        drained = False
        try:
            for thread in threads:
                thread.start()
            with common.progress_bar("work", None) as update:
                while not self._stop.is_set() and not drained:
                    stats = self._queue.stats()
                    left = stats.ready + stats.delayed + stats.leased
                    update(completed=self.done, total=self.done + left, label=self._label())
                    drained = drain and left == 0
                    if not drained:
                        self._stop.wait(0.2)
                self._stop.set()
                deadline = time.monotonic() + grace
                for thread in threads:
                    thread.join(max(0.0, deadline - time.monotonic()))
                update(completed=self.done, label=self._label())
        finally:
            self._stop.set()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.seconds = time.monotonic() - started
        if self._broken is not None:
            raise self._broken
        return drained

    def _label(self) -> str:
        return f"work ({common.count(self.failed, 'failure')})" if self.failed else "work"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt  # asked twice: don't wait for the grace to pass
        self._stop.set()

    def _take(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    msg = self._queue.get(timeout=_LOOK_S)
                except weclaw.Empty:
                    continue
                if self._stop.is_set():
                    msg.release()
                    return
                self._work(msg)
        except weclaw.ClosedError:
            return  # the grace is over and the store was closed
        except BaseException as error:  # noqa: BLE001  run() raises it in the main thread
            self._broken = error
            self._stop.set()

    def _work(self, msg: weclaw.Message) -> None:
        try:
            with msg:
                result = self._handler(msg)
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
                try:
                    msg.ack(result=result)
                except weclaw.LeaseLostError:
                    pass  # the handler has settled it itself
        except (weclaw.StorageError, weclaw.ClosedError):
            raise
        except Exception as error:  # noqa: BLE001  the handler is the user's code
            with self._lock:
                self.failed += 1
            text = f"{type(error).__name__}: {error}"
            click.echo(f"{common.plain(msg.id)} failed ({common.excerpt(text, 200)})", err=True)
        else:
            with self._lock:
                self.done += 1


COMMANDS = [work]
