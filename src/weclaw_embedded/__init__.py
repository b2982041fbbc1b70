"""A durable task queue in one file, inside the process that uses it. No broker, no server.

>>> import weclaw_embedded as weclaw
>>> q = weclaw.Queue("tasks.wq")
>>> task_id = q.put({"prompt": "write a report"})
>>> with q.get() as msg:
...     msg.ack(result="done: " + msg["prompt"])
>>> q.result(task_id)
'done: write a report'
>>> q.close()
"""

from ._async import AsyncDeadLetterQueue, AsyncMessage, AsyncTransaction
from ._async_queue import AsyncQueue
from ._message import Message
from ._options import RetryPolicy
from ._queries import GroupInfo, Stats
from ._store import Store, open  # noqa: A004  the name is fixed: weclaw.open
from ._transaction import Transaction
from ._version import __version__
from .client import Consumer, Producer
from .dlq import DeadLetter, DeadLetterQueue, Failure
from .errors import (
    ClosedError,
    CorruptError,
    DeadLetterError,
    DiskFullError,
    Empty,
    FencedError,
    FormatVersionError,
    Full,
    LeaseLostError,
    LockedError,
    MessageTooLargeError,
    NotAQueueError,
    OffsetTrimmedError,
    ReplicaUnavailableError,
    SendFailedError,
    SerializationError,
    ShutDown,
    StorageError,
    StoreFailedError,
    WeclawError,
)
from .queue import Put, Queue
from .worker import Discard, RetryLater, Worker

__all__ = [
    "AsyncDeadLetterQueue",
    "AsyncMessage",
    "AsyncQueue",
    "AsyncTransaction",
    "ClosedError",
    "Consumer",
    "CorruptError",
    "DeadLetter",
    "DeadLetterError",
    "DeadLetterQueue",
    "Discard",
    "DiskFullError",
    "Empty",
    "Failure",
    "FencedError",
    "FormatVersionError",
    "Full",
    "GroupInfo",
    "LeaseLostError",
    "LockedError",
    "Message",
    "MessageTooLargeError",
    "NotAQueueError",
    "OffsetTrimmedError",
    "Producer",
    "Put",
    "Queue",
    "ReplicaUnavailableError",
    "RetryLater",
    "RetryPolicy",
    "SendFailedError",
    "SerializationError",
    "ShutDown",
    "Stats",
    "StorageError",
    "Store",
    "StoreFailedError",
    "Transaction",
    "WeclawError",
    "Worker",
    "__version__",
    "open",
]
