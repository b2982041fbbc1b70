"""A process that does what it is told to a queue, so that a crash of it is a real one."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import weclaw_embedded as weclaw

POLICY = weclaw.RetryPolicy(max_retries=2, backoff=0.0, max_crashes=2)
TOPICS = ("default", "second")


class Actor:
    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.store = weclaw.open(path, **options)
        self.queues: dict[tuple[str, str], Any] = {}
        self.held: dict[tuple[str, str, str], Any] = {}

    def queue(self, topic: str, group: str, **options: Any) -> Any:
        if (topic, group) not in self.queues:
            self.queues[topic, group] = self.store.queue(
                topic, group=group, retry=POLICY, visibility_timeout=None, **options
            )
        return self.queues[topic, group]

    # Each of these is one rule's work; what they return is pickled to the test.

    def add_group(self, topic: str, group: str, start: str) -> None:
        self.queue(topic, group, start=start)

    def put(self, topic: str, body: Any, options: dict[str, Any]) -> str:
        return str(self.queue(topic, "default").put(body, **options))

    def put_many(self, topic: str, puts: list[tuple[Any, dict[str, Any]]]) -> list[str]:
        made = [weclaw.Put(body, **options) for body, options in puts]
        return list(self.queue(topic, "default").put_many(made))

    def get(self, topic: str, group: str, n: int) -> list[dict[str, Any]]:
        q = self.queue(topic, group)
        try:
            messages = q.get_many(n, block=False) if n > 1 else [q.get(block=False)]
        except weclaw.Empty:
            return []
        for msg in messages:
            self.held[topic, group, msg.id] = msg
        return [
            {
                "id": m.id,
                "body": m.body,
                "key": m.key,
                "priority": m.priority,
                "headers": m.headers,
                "offset": m.offset,
                "dc": m.delivery_count,
                "rc": m.retry_count,
                "cc": m.crash_count,
            }
            for m in messages
        ]

    def settle(self, how: str, topic: str, group: str, task: str, *details: Any) -> None:
        msg = self.held.pop((topic, group, task))
        if how == "ack":
            msg.ack(result=details[0])
        elif how == "nack":
            msg.nack(backoff=details[0], reason=details[1], count=details[2])
        elif how == "fail":
            msg.fail(details[0])
        else:
            msg.release()
        # A second settling is always refused.
        try:
            msg.ack()
        except weclaw.LeaseLostError:
            return
        raise AssertionError("settled twice")

    def transaction(
        self, topic: str, group: str, acks: list[tuple[str, Any]], puts: list[Any], commit: bool
    ) -> None:
        try:
            with self.queue(topic, group).transaction() as tx:
                for task, result in acks:
                    tx.ack(self.held[topic, group, task], result=result)
                for to, body, options in puts:
                    tx.put(body, topic=to, **options)
                if not commit:
                    raise KeyError("not this time")
        except KeyError:
            return
        for task, _ in acks:
            del self.held[topic, group, task]

    def cancel(self, topic: str, task: str) -> bool:
        return bool(self.queue(topic, "default").cancel(task))

    def redrive(self, topic: str, group: str, ids: Any, limit: Any) -> int:
        return int(self.queue(topic, group).dlq.redrive(ids, limit=limit))

    def purge_letters(self, topic: str, group: str, ids: Any) -> int:
        return int(self.queue(topic, group).dlq.purge(ids))

    def purge(self, topic: str, group: str) -> None:
        self.queue(topic, group).purge()

    def pause(self, topic: str, group: str, on: bool) -> None:
        q = self.queue(topic, group)
        q.pause(3600) if on else q.resume()

    def replay(self, topic: str, group: str, given: dict[str, Any]) -> int:
        return int(self.queue(topic, group).replay(**given))

    def backup(self, to: str) -> None:
        self.store.backup(to)

    def verify(self) -> Any:
        return self.store.verify()

    def look(self, topic: str, group: str, ids: list[str]) -> dict[str, Any]:
        """All a user can ask of one group."""
        q = self.queue(topic, group)
        results = {}
        for task in ids:
            try:
                results[task] = ("result", q.result(task))
            except weclaw.Empty:
                results[task] = ("empty",)
            except weclaw.DeadLetterError as error:
                results[task] = ("dead", error.letter.id)
            except KeyError:
                results[task] = ("unknown",)
        return {
            "stats": tuple(q.stats()[:5]),
            "damaged": q.stats().damaged,
            "qsize": q.qsize(),
            "statuses": {task: q.status(task) for task in ids},
            "results": results,
            "letters": {x.id: (x.body, x.reason, x.redrive_count, x.key, x.headers) for x in q.dlq},
            "letter count": len(q.dlq),
            "offset": q.offset,
            "groups": sorted(g[:2] for g in self.store.groups()),
            "peek": [m.id for m in q.peek(1000)],
        }

    def close(self) -> None:
        self.store.close()


def act(pipe: Connection, path: str, options: dict[str, Any]) -> None:
    """The main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    actor = None
    while True:
        try:
            name, *args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if actor is None:
                actor = Actor(path, options)
            answer = getattr(actor, name)(*args)
        except BaseException as error:  # noqa: BLE001 - the test judges it
            import traceback

            pipe.send((False, repr(error) + "\n" + traceback.format_exc()))
        else:
            pipe.send((True, answer))
        if name == "close":
            os._exit(0)
