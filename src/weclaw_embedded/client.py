"""`Producer` and `Consumer`: the words of a broker's client, for a file.

Code that was written for a WeClaw broker runs with `brokers=[…]` replaced by a path. There is
nothing here that `AsyncQueue` and `Worker` don't do.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Final

from ._async import AsyncMessage
from ._async_queue import AsyncQueue
from ._message import Message
from ._options import QUEUE_NAMES, check_names
from .queue import Queue
from .worker import Worker

_SEND_OPTIONS: Final = frozenset(
    ("id", "priority", "delay", "eta", "ttl", "headers", "block", "timeout")
)


class _Client:
    def __init__(
        self, path: str | os.PathLike[str], topic: str = "default", **options: Any
    ) -> None:
        check_names(type(self).__name__, options, QUEUE_NAMES - {"topic"})
        self._queue = Queue(path, topic, **options)
        self._async = AsyncQueue._over(self._queue)
        self.topic = topic

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._queue!r}>"

    def close(self) -> None:
        """Close the file for this client; see `Queue.close`."""
        self._async._close()

    async def aclose(self) -> None:
        """`close` off the loop."""
        await self._async.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class Producer(_Client):
    """Puts messages of one topic: `await producer.send(payload)`.

    Takes the options of `Queue`. Any thread and loop may use it.
    """

    async def send(self, payload: Any, key: str | None = None, **options: Any) -> str:
        """Put `payload`; its id, when it is as durable as `flush` promises.

        `options` are those of `Queue.put`: `id`, `priority`, `delay`, `eta`, `ttl`, `headers`,
        `block`, `timeout`. Raises `SendFailedError` (or a class under it) when it is not.
        """
        for name in options:
            if name not in _SEND_OPTIONS:
                raise TypeError(f"send() got an unexpected keyword argument {name!r}")
        return await self._async.put(payload, key=key, **options)

    def send_sync(self, payload: Any, key: str | None = None, **options: Any) -> str:
        """`send` for those who have no loop."""
        for name in options:
            if name not in _SEND_OPTIONS:
                raise TypeError(f"send_sync() got an unexpected keyword argument {name!r}")
        return self._queue.put(payload, key=key, **options)

    def __enter__(self) -> Producer:
        return self

    async def __aenter__(self) -> Producer:
        return self


class Consumer(_Client):
    """Gets messages of one topic as a member of a group: `for`, `async for`, or `run(handler)`.

    Takes the options of `Queue`. A message got by iterating is settled by whoever got it; `run`
    settles as `Worker` does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        topic: str = "default",
        group: str = "default",
        **options: Any,
    ) -> None:
        super().__init__(path, topic, group=group, **options)
        self.group = group
        self._worker: Worker | None = None
        self._stopping = False  # before there was a worker to be stopped

    def run(self, handler: Callable[[Any], Any], concurrency: int = 1, **options: Any) -> None:
        """Work until SIGTERM, SIGINT or `stop()`. A handler that returns without settling acks,
        one that raises nacks. `options` are those of `Worker`.
        """
        self._work(handler, concurrency, options).run()

    async def run_async(
        self, handler: Callable[[Any], Any], concurrency: int = 1, **options: Any
    ) -> None:
        """`run` inside a loop."""
        await self._work(handler, concurrency, options).run_async()

    def _work(
        self, handler: Callable[[Any], Any], concurrency: int, options: dict[str, Any]
    ) -> Worker:
        worker = Worker(self._queue, handler, concurrency=concurrency, **options)
        # In this order, as `stop` does: one of the two sees what the other has noted.
        self._worker = worker
        if self._stopping:
            self._stopping = False
            worker.stop()
        return worker

    def stop(self) -> None:
        """Let `run` come to its end, as SIGTERM does. From any thread, and before `run`."""
        self._stopping = True
        worker = self._worker
        if worker is not None:
            worker.stop()
            self._stopping = False

    def __iter__(self) -> Iterator[Message]:
        """Waits for the next message, and the next, until the consumer is closed."""
        return iter(self._queue)

    def __aiter__(self) -> AsyncIterator[AsyncMessage]:
        """Waits for the next message, and the next, until the consumer is closed."""
        return aiter(self._async)

    def __enter__(self) -> Consumer:
        return self

    async def __aenter__(self) -> Consumer:
        return self
