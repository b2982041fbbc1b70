"""The index anew: all that a log keeps, folded into an empty one.

Role: folding in parts, which all of a log takes, and doing so while recovery reads it. What
recovery has to look at is what a rebuild has to fold, so they go through the log together: reading
and checking it is the larger half of both.

What was folded during recovery is an index that is behind the log, no more: when the log turns out
to end otherwise than it looked, it is emptied, and the fold after the opening begins at its front.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from . import _records
from ._format import Stretch
from ._index import Index, IndexFullError, Tx
from .wal import Frame, Log

logger = logging.getLogger("weclaw_embedded")

# Bytes of the log that are folded in one transaction of the index: one of LMDB holds only so many
# pages.
_FOLD_BYTES: Final = 256 << 20


class Last:
    """Remembers the last frame that went by."""

    def __init__(self, enough: int) -> None:
        self.enough = enough  # what begins after this offset is left
        self.offset = 0
        self.end = 0
        self.found: Stretch | Frame | None = None
        self.was_all = False

    def until_enough(self, found: Iterator[Stretch | Frame]) -> Iterator[Stretch | Frame]:
        """Yield what comes, until it is enough."""
        for one in found:
            if isinstance(one, Stretch):
                self.offset, self.end = one.last, one.end
            else:
                self.offset, self.end = one[0], one[1]
            self.found = one
            yield one
            if self.end > self.enough:
                return
        self.was_all = True


def fold_in_parts(
    index: Index, tx: Tx, log: Log, found: Iterator[Stretch | Frame], start: int
) -> Last:
    """Fold all that is found from an offset on, with commits in between; the last part is the
    caller's to commit. Returns the last frame.
    """
    last = Last(start + _FOLD_BYTES)
    while True:
        tx.apply_many(last.until_enough(found))
        if last.was_all:
            return last
        tx.commit(last.end, log.checksum(last.offset), last.offset)
        index.write()  # the same object, armed anew
        last.enough = last.end + _FOLD_BYTES


def seed(tx: Tx, checkpoint: bytes, head: int) -> str:
    """Tell an empty index what a checkpoint knows of the time before what is kept; return what is
    wrong with it, if it can't be read.
    """
    try:
        known = _records.unpack(checkpoint)
    except ValueError as error:
        return str(error)
    if not isinstance(known, _records.Checkpoint):
        return "another record where a checkpoint should be"
    tx.seed(known, head)
    return ""


class Rebuild:
    """Fills an empty index while its log is recovered: `follow` is for `Log.recover`."""

    def __init__(self, index: Index, log: Log) -> None:
        self._index = index
        self._log = log
        self._checkpoint = 0  # the offset of the one that it began with

    def follow(self, found: Iterator[Stretch | Frame]) -> None:
        """Fold what recovery finds, from the head of the log to the first that is bad."""
        log = self._log
        try:
            tx = self._index.write()
            try:
                offset, record = log.last_checkpoint()
                if offset and not seed(tx, record, log.head_offset):
                    self._checkpoint = offset
                last = fold_in_parts(self._index, tx, log, found, log.head_offset)
                if last.end:
                    tx.commit(last.end, log.checksum(last.offset), last.offset)
            finally:
                tx.abort()  # unless it was committed
        except IndexFullError as error:
            logger.debug("index not written, it is folded later: %s", error)

    def finish(self) -> None:
        """Empty the index if it is not of the log that was found in the end."""
        log = self._log
        tx = self._index.write()
        try:
            is_of_it = log.ends_with(tx.applied, tx.last_frame, tx.last_crc)
            if tx.applied and not (is_of_it and log.checkpoint() == self._checkpoint):
                tx.clear()
                tx.commit(0, 0)
        finally:
            tx.abort()
