"""The exceptions a user can meet, all of them, drawn as a tree.

    WeclawError
    ├─ Empty (also queue.Empty, asyncio.QueueEmpty)
    ├─ Full (also queue.Full, asyncio.QueueFull)
    ├─ ShutDown (also queue.ShutDown, asyncio.QueueShutDown where Python has them)
    ├─ ClosedError
    ├─ LeaseLostError
    ├─ SerializationError (also ValueError)
    ├─ OffsetTrimmedError(first_offset)
    ├─ DeadLetterError(letter)
    ├─ SendFailedError
    │  ├─ MessageTooLargeError
    │  ├─ ReplicaUnavailableError
    │  └─ DiskFullError, StoreFailedError, FencedError
    └─ StorageError
       ├─ NotAQueueError
       ├─ FormatVersionError
       ├─ CorruptError(offset, reason)
       ├─ LockedError
       ├─ DiskFullError (also SendFailedError)
       ├─ StoreFailedError (also SendFailedError)
       └─ FencedError (also SendFailedError)

Each class says *when*; each message says what happened, what is still true and what to do.
Attributes and text survive pickling and copying.  This module knows nothing of files or queues.
"""

from __future__ import annotations

import asyncio
import queue
import sys
from typing import Any

__all__ = [
    "ClosedError",
    "CorruptError",
    "DeadLetterError",
    "DiskFullError",
    "Empty",
    "FencedError",
    "FormatVersionError",
    "Full",
    "LeaseLostError",
    "LockedError",
    "MessageTooLargeError",
    "NotAQueueError",
    "OffsetTrimmedError",
    "ReplicaUnavailableError",
    "SendFailedError",
    "SerializationError",
    "ShutDown",
    "StorageError",
    "StoreFailedError",
    "WeclawError",
]


def _rebuild(
    cls: type[WeclawError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> WeclawError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class WeclawError(Exception):
    """Anything this library raises on purpose, apart from ValueError and TypeError."""

    def __reduce__(self) -> Any:
        # The default would call the class with `args`, which is the message alone, and so lose
        # (or stumble over) the attributes of the classes that take more.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class Empty(WeclawError, queue.Empty, asyncio.QueueEmpty):
    """Nothing could be delivered within the time given, or a result isn't there yet."""


class Full(WeclawError, queue.Full, asyncio.QueueFull):
    """No room for the message within the time given; nothing was written."""


if sys.version_info >= (3, 13):

    class ShutDown(WeclawError, queue.ShutDown, asyncio.QueueShutDown):
        """The drop-in queue was shut down; what it holds stays in the file."""

else:

    class ShutDown(WeclawError):
        """The drop-in queue was shut down; what it holds stays in the file."""


class ClosedError(WeclawError):
    """The store or queue was closed; open it again to go on."""


class LeaseLostError(WeclawError):
    """The message is no longer held by this lease; the call changed nothing."""


class SerializationError(WeclawError, ValueError):
    """A body, header or result can't be written so that it comes back equal, or can't be read."""


class OffsetTrimmedError(WeclawError):
    """A replay asked for messages whose space was already reused.

    `first_offset` is the first offset that is still kept.
    """

    def __init__(self, first_offset: int, message: str | None = None) -> None:
        super().__init__(
            message
            or f"what was asked for is no longer kept: the first offset kept is {first_offset}; "
            f"nothing was replayed; replay from there, or from 'earliest'"
        )
        self.first_offset = first_offset


class DeadLetterError(WeclawError):
    """A result was asked for of a message that died; `letter` is its dead letter."""

    def __init__(self, letter: Any, message: str | None = None) -> None:
        super().__init__(
            message
            or f"message {getattr(letter, 'id', '?')} is a dead letter "
            f"({getattr(letter, 'reason', None)}); it has no result; look at .letter, "
            f"redrive it through the queue's dlq"
        )
        self.letter = letter


class SendFailedError(WeclawError):
    """A put that isn't as durable as promised; the class says whether it may be there."""


class MessageTooLargeError(SendFailedError):
    """The encoded message is larger than the file allows; nothing was written."""


class ReplicaUnavailableError(SendFailedError):
    """The replica didn't confirm in time; the put was taken back, or the message says that for want
    of room on the disk it could not be.
    """


class StorageError(WeclawError):
    """The file can't be opened, read or written as asked."""


class NotAQueueError(StorageError):
    """The file isn't one of ours; it wasn't touched."""


class FormatVersionError(StorageError):
    """The file is of a format this release doesn't know; it wasn't touched."""


class CorruptError(StorageError):
    """Stored bytes are not what was written: at `offset` of the log, for `reason`."""

    def __init__(self, offset: int, reason: str, message: str | None = None) -> None:
        super().__init__(
            message
            or f"damage at offset {offset}: {reason}; the other records are unharmed; "
            f"verify lists all damage, repair sets it aside or heals it from a replica"
        )
        self.offset = offset
        self.reason = reason


class LockedError(StorageError):
    """Others have the file open in a way that excludes what was asked."""


class DiskFullError(StorageError, SendFailedError):
    """No space, quota or file size left; nothing was written, and what was kept is still there."""


class StoreFailedError(StorageError, SendFailedError):
    """A write or sync failed, or the file was moved away: nothing more is promised until all
    processes have closed it and it is opened again. Where it was deleted or replaced the message
    says how to save it first.
    """


class FencedError(StorageError, SendFailedError):
    """A replica was promoted over this file: it takes no more writes."""
