"""One producer and two consumers, each a process of its own, on any of the peers."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Final

from common import make_message
from peers import PEERS

_children = multiprocessing.get_context("spawn")
_LAST: Final = "stop"


def through_processes(name: str, path: str, count: int, patience_s: float = 60.0) -> float:
    """Messages a second from the first put to the last ack. Raises RuntimeError when one was
    delivered twice or not at all.
    """
    PEERS[name](path).close()
    start = _children.Barrier(4)
    pipes = [_children.Pipe(duplex=False) for _ in range(3)]
    crew = [
        _children.Process(target=work, args=(name, path, count, start, pipe[1]), daemon=True)
        for work, pipe in zip((_produce, _consume, _consume), pipes, strict=True)
    ]
    for one in crew:
        one.start()
    for _, there in pipes:
        there.close()
    try:
        start.wait(patience_s)
        began = time.monotonic()
        until = began + patience_s
        told: list[tuple[int, float]] = []
        for here, _ in pipes:
            if not here.poll(max(0.0, until - time.monotonic())):
                raise RuntimeError(f"FAILS: not done after {patience_s:.0f} s")
            try:
                told.append(here.recv())
            except EOFError:
                raise RuntimeError("FAILS: one of its processes failed") from None
        done = sum(each for each, _ in told)
        if done != count:
            raise RuntimeError(f"FAILS: {done} deliveries of {count} messages")
        for one in crew:
            one.join(patience_s)
        return count / (max(at for _, at in told) - began)
    finally:
        for one in crew:
            one.kill()


def _produce(name: str, path: str, count: int, start: Barrier, told: Connection) -> None:
    queue = PEERS[name](path)
    start.wait()
    for n in range(count):
        queue.put(make_message(n))
    queue.put(_LAST)
    queue.put(_LAST)
    told.send((0, time.monotonic()))
    queue.close()


def _consume(name: str, path: str, count: int, start: Barrier, told: Connection) -> None:
    queue = PEERS[name](path)
    start.wait()
    done = 0
    while True:
        token, body = queue.get_waiting()
        queue.ack(token)
        if body == _LAST:
            break
        done += 1
    told.send((done, time.monotonic()))
    queue.close()
