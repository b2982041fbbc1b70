"""The processes that the drills of `demo` start, and kill.

Each is run as `python -m weclaw_embedded.cli._actors ACTOR …` and tells what it has done over
standard output, one line each, after the call returned: a line `put ID` means that the queue has
promised to keep that message.  What was not told when the kill came was not promised.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import weclaw_embedded as weclaw

__all__ = ["answer", "read_tasks"]


def tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def read_tasks(path: str) -> list[Any]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def answer(task: Any) -> dict[str, Any]:
    """Stands for the language model: small, local, and the same every time."""
    text = json.dumps(task, sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
    return {"words": len(text.split()), "digest": digest[:16]}


def wait_for_the_kill() -> NoReturn:
    while True:
        time.sleep(60)


def produce(file: str, tasks: str, first: str, last: str) -> None:
    """Put some of the tasks, then stay alive."""
    queue = weclaw.Queue(file)
    for task in read_tasks(tasks)[int(first) : int(last)]:
        tell("put", queue.put(task))
    tell("end")
    wait_for_the_kill()


def consume(file: str, stop_at: str) -> None:
    """Work tasks off; in the middle of number `stop_at` (0: of none) wait for the kill."""
    queue = weclaw.Queue(file)
    taken = 0
    while True:
        try:
            msg = queue.get(timeout=1.0)
        except weclaw.Empty:
            break
        taken += 1
        tell("hold", msg.id)
        if taken == int(stop_at):
            wait_for_the_kill()
        msg.ack(result=answer(msg.body))
        tell("done", msg.id)
    tell("end")


def hold(file: str, number: str) -> None:
    """Take some tasks and finish none."""
    queue = weclaw.Queue(file)
    for msg in [queue.get(timeout=30.0) for _ in range(int(number))]:
        tell("hold", msg.id)
    tell("end")
    wait_for_the_kill()


def memory(tasks: str, stop_at: str) -> None:
    """The same work with asyncio.Queue: a producer and a consumer in one process."""

    async def run() -> None:
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        for number, task in enumerate(read_tasks(tasks)):
            await queue.put((number, task))
            tell("put", number)
        tell("end")
        taken = 0
        while stop_at != "never":
            number, task = await queue.get()
            taken += 1
            tell("hold", number)
            if taken == int(stop_at):
                break
            answer(task)
            tell("done", number)

    asyncio.run(run())
    wait_for_the_kill()


def memory_again() -> None:
    """What the next process finds in its asyncio.Queue."""

    async def run() -> int:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        return queue.qsize()

    tell("found", asyncio.run(run()))


ACTORS: dict[str, Callable[..., None]] = {
    "produce": produce,
    "consume": consume,
    "hold": hold,
    "memory": memory,
    "memory_again": memory_again,
}

if __name__ == "__main__":
    ACTORS[sys.argv[1]](*sys.argv[2:])
