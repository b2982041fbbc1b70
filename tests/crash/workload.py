"""What the children do, and say. Each call is announced with a `?` and confirmed after it returned.

Bodies are `{"t": token, "pad": bytes}`; a token is given once in the whole history of a file, so
that a message is known again whatever id it has.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import weclaw_embedded as weclaw

Say = Callable[..., None]

#: Failures must not lead to the dead letters by number here: only `fail` does.
ENDLESS = weclaw.RetryPolicy(max_retries=100_000, backoff=0.0, max_crashes=100_000)
KEYS = (None, None, None, "red", "blue")
SECOND = "second"


def body(token: str, size: int) -> dict[str, Any]:
    return {"t": token, "pad": bytes([len(token) % 251]) * size}


class Worker:
    """One child's hands: every method is one call, announced and confirmed."""

    def __init__(self, say: Say, path: str, options: dict[str, Any], name: str, seed: str) -> None:
        self.say, self.path, self.options, self.name = say, path, options, name
        self.rng = random.Random(seed)
        self.number = 0
        self.mine: list[str] = []
        self.held: list[Any] = []
        self.store: Any = None
        self.q: Any = None

    def open(self) -> None:
        self.say("open?")
        self.store = weclaw.open(self.path, **self.options)
        self.q = self.store.queue(retry=ENDLESS, visibility_timeout=None)
        self.say("open")

    def close(self) -> None:
        self.say("close?")
        self.held.clear()
        self.store.close()
        self.say("close")

    def token(self) -> str:
        self.number += 1
        return f"{self.name}.{self.number}"

    def _size(self) -> int:
        return self.rng.choice((0, 10, 100, 400, 2000, 2000, 30_000))

    def put(self, **options: Any) -> None:
        token = self.token()
        options.setdefault("key", self.rng.choice(KEYS))
        options.setdefault("priority", self.rng.choice((0, 0, 0, 1, 9)))
        if options.pop("own_id", self.rng.random() < 0.2):
            options["id"] = token
        self.say("put?", [token], [options])
        task = self.q.put(body(token, options.pop("size", self._size())), **options)
        self.say("put", [token], [task])
        self.mine.append(task)

    def put_again(self) -> None:
        """The same id once more: nothing must come of it, unless it was cancelled."""
        own = [task for task in self.mine if task.startswith(self.name)]
        if own:
            task = self.rng.choice(own)
            self.say("again?", task)
            assert self.q.put(body(task, 5), id=task) == task
            self.say("again", task)

    def put_many(self, n: int) -> None:
        tokens = [self.token() for _ in range(n)]
        options = [
            {"key": self.rng.choice(KEYS), "priority": self.rng.choice((0, 0, 1))} for _ in tokens
        ]
        self.say("put?", tokens, options)
        puts = [
            weclaw.Put(body(token, self._size()), **given)
            for token, given in zip(tokens, options, strict=True)
        ]
        tasks = self.q.put_many(puts)
        self.say("put", tokens, tasks)
        self.mine += tasks

    def cancel(self) -> None:
        if self.mine:
            task = self.rng.choice(self.mine[-20:])
            self.say("cancel?", task)
            self.say("cancel", task, self.q.cancel(task))

    def get(self, n: int = 1, timeout: float = 0.05) -> None:
        try:
            messages = self.q.get_many(n, timeout=timeout)
        except weclaw.Empty:
            return
        for msg in messages:
            self.say(
                "got",
                msg.body["t"],
                msg.id,
                (msg.delivery_count, msg.retry_count, msg.crash_count),
            )
        self.held += messages

    def _settle(self, what: str, *details: Any) -> Any:
        msg = self.held.pop(self.rng.randrange(len(self.held)))
        self.say(what + "?", msg.id, msg.delivery_count, *details)
        return msg

    def ack(self) -> None:
        if self.held:
            msg = self._settle("ack")
            msg.ack(result=[msg.body["t"], msg.delivery_count])
            self.say("ack", msg.id, msg.delivery_count)

    def nack(self) -> None:
        if self.held:
            msg = self._settle("nack")
            msg.nack(backoff=self.rng.choice((0, 0, 0.01)), reason="nacked")
            self.say("nack", msg.id, msg.delivery_count)

    def release(self) -> None:
        if self.held:
            msg = self._settle("release")
            msg.release()
            self.say("release", msg.id, msg.delivery_count)

    def fail(self) -> None:
        if self.held:
            msg = self._settle("fail")
            msg.fail(f"failed {msg.body['t']}")
            self.say("fail", msg.id, msg.delivery_count)

    def transaction(self) -> None:
        if self.held:
            tokens = [self.token() for _ in range(self.rng.randrange(1, 4))]
            topics = [self.rng.choice((None, SECOND)) for _ in tokens]
            msg = self._settle("tx", tokens, topics)
            with self.q.transaction() as tx:
                tx.put(body(tokens[0], self._size()), topic=topics[0] or "default")
                tx.ack(msg, result=[msg.body["t"], msg.delivery_count])
                for token, topic in zip(tokens[1:], topics[1:], strict=True):
                    tx.put(body(token, self._size()), topic=topic or "default")
            self.say("tx", msg.id, msg.delivery_count, tokens)

    def redrive(self) -> None:
        self.say("redrive?")
        self.say("redrive", self.q.dlq.redrive(limit=2))

    def flush(self) -> None:
        self.say("flush?")
        self.q.flush()
        self.say("flush")

    def reopen(self) -> None:
        self.close()
        self.open()


def produce(say: Say, path: str, options: dict[str, Any], name: str, seed: str) -> None:
    """Put until killed."""
    worker = Worker(say, path, options, name, seed)
    worker.open()
    while True:
        chance = worker.rng.random()
        if chance < 0.55:
            worker.put()
        elif chance < 0.60:
            worker.put(delay=0.02, key=None)
        elif chance < 0.78:
            worker.put_many(worker.rng.choice((1, 2, 3, 10)))
        elif chance < 0.86:
            worker.put_again()
        elif chance < 0.93:
            worker.cancel()
        elif chance < 0.96:
            worker.flush()
        elif chance < 0.98:
            worker.reopen()
        else:
            worker.store.verify()


def consume(say: Say, path: str, options: dict[str, Any], name: str, seed: str) -> None:
    """Take and settle until killed."""
    worker = Worker(say, path, options, name, seed)
    worker.open()
    while True:
        worker.get(worker.rng.choice((1, 1, 1, 2, 5)))
        for _ in range(worker.rng.randrange(3)):
            chance = worker.rng.random()
            if chance < 0.55:
                worker.ack()
            elif chance < 0.67:
                worker.nack()
            elif chance < 0.75:
                worker.release()
            elif chance < 0.82:
                worker.fail()
            elif chance < 0.95:
                worker.transaction()
        chance = worker.rng.random()
        if chance < 0.02:
            worker.redrive()
        elif chance < 0.03:
            worker.reopen()


def fixed(say: Say, path: str, options: dict[str, Any], name: str, seed: str) -> None:
    """A bit of everything, always the same, and a clean close."""
    worker = Worker(say, path, options, name, seed)
    worker.open()
    worker.put(own_id=True, key=None, priority=0, size=50)
    worker.put_many(3)
    worker.get(2)
    worker.ack()
    worker.transaction()
    worker.put(size=30_000)
    worker.put(size=40_000)
    worker.get(3)
    worker.fail()
    worker.nack()
    worker.release()
    worker.cancel()
    worker.put_many(2)
    worker.redrive()
    worker.put(delay=0.01, key=None)
    worker.flush()
    for _ in range(3):
        worker.get(1)
        worker.ack()
    worker.put(size=50_000)
    worker.reopen()
    for _ in range(3):
        worker.get(2)
        worker.ack()
    worker.close()


def stand_by(say: Say, path: str, options: dict[str, Any], name: str, seed: str) -> None:
    """Put, take and settle at an even pace, until `enough` is heard, and then five times more."""
    pipe: Connection = say.__self__.pipe  # type: ignore[attr-defined]
    worker = Worker(say, path, options, name, seed)
    worker.open()
    left = None
    while left != 0:
        if left is None and pipe.poll():
            left = 5
        elif left is not None:
            left -= 1
        worker.put(key=None, size=20)
        worker.get(2)
        worker.ack()
    say("goes on")
    worker.close()


class Reporter:
    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def say(self, *event: Any) -> None:
        self.pipe.send(event)


ROLES: dict[str, Callable[..., None]] = {
    "produce": produce,
    "consume": consume,
    "fixed": fixed,
    "stand_by": stand_by,
}


def child(
    pipe: Connection,
    role: str,
    path: str,
    options: dict[str, Any],
    name: str,
    seed: str,
    stop: tuple[str, int, str] | None = None,
) -> None:
    """The main function of a child process. `stop` says where it kills itself, if anywhere."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.getLogger("weclaw_embedded").setLevel(logging.CRITICAL)  # torn tails are wanted
    say = Reporter(pipe).say
    counter = None
    if stop is not None:
        from tests.crash import stops

        counter = stops.arm(*stop)
    try:
        ROLES[role](say, path, options, name, seed)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
        import traceback

        say("error", repr(error), traceback.format_exc())
    else:
        say("end", counter.calls if counter is not None else 0)
    pipe.close()
    sys.stdout.flush()
    # What is open was closed, or is to be left as a crash would leave it.
    os._exit(0)
