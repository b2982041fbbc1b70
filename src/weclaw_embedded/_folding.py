"""Bringing the index level with the log: what is new, or all of it anew.

Role: the part of the engine that folds frames into the index. The caller holds the write lock and
has a transaction open; it is never behind the log's head, because space is given back only after
the index has what stood there, and one that is all the same is emptied and folded anew.

Whoever only puts needs no index, and leaves the folding to whoever looks next. So that this one
does not find too much, what is left is folded soon after the writing has become less, and in any
case once it is `_MOST_LEFT_BYTES`; in parts, so that nobody waits long for the lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ._index import BehindError, IndexFullError, Tx
from ._opening import Opened
from ._part import Part
from ._rebuild import Last, fold_in_parts, seed
from ._session import Appended, Session, Several
from .errors import CorruptError, StorageError
from .wal import LAST_FRAME, TAIL, Recovery

logger = logging.getLogger("weclaw_embedded")

# Of what a process wrote itself, so much is applied from memory instead of read back.
_MOST_REMEMBERED_BYTES: Final = 32 << 10
# After a record that could not be told without the lock, so much of the log is left to be.
_AHEAD_PAUSE_BYTES: Final = 64 << 10
# How far the index may be behind, and in what parts it then follows.
_MOST_LEFT_BYTES: Final = 256 << 20
_PART_BYTES: Final = 2 << 20


def _give_up(offset: int, reason: str) -> None:
    """Whoever folded this before may have had it in memory, and whole."""
    raise BehindError


class Folding(Part):
    """What `Engine` inherits to keep its index level with its log."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        # Up to here the index is known to be level; others may have brought it further.
        self.folded_to = 0
        self._tail_seen = 0  # at the last call of `fold_behind` that was not in a hurry
        self._ahead_from = 0  # nothing is folded ahead before the log's tail is there

    def catch_up(self, tx: Tx) -> None:
        """Apply everything written and not yet applied. The caller holds the write lock."""
        if tx.leader is not None:
            self._join_leader(tx)
        applied = tx.applied
        tail = self.page.words[TAIL]
        if applied == self._written_from and tail == self._written_to:
            # All that is new is our own: no need to read it back.
            written = self._written
            if len(written) > 2:
                tx.apply_own(written)
            else:
                tx.apply(written)
        elif not applied or applied < self.log.head_offset:
            self.fold_all(tx)
        elif applied == tail:
            if tx.stored == tail:
                # Others may have applied it all, and this process never seen the last frame.
                self.log.remember_last(tail, tx.last_frame, tx.last_crc)
        elif not self._fold_few(tx, applied, tail):
            found = self.log.stretches(applied, tail, on_damage=self._damage_noter(tx))
            last = fold_in_parts(self.index, tx, self.log, found, applied)
            self.log.keep_at_hand(last.found)

    def fold_ahead(self) -> None:
        """Fold the little that others have written, before the lock is taken for a look: reading
        and checking it needs none, and they need the lock. What needs more than memory is left.
        """
        with self._lock:
            tx = self.index.tx
            applied, tail = tx.applied, self.page.words[TAIL]
            own = applied if applied != self._written_from else max(applied, self._written_to)
            if (
                own == tail
                or tail < self._ahead_from
                or applied < self.log.head_offset
                or self.closed
                or not tx.ahead()
            ):
                return
            try:
                if own > applied:
                    tx.apply(self._written)
                tx.told_ahead(tail if self._fold_few(tx, own, tail) else own)
            except (BehindError, StorageError):
                # What is known is read anew. Where rows are asked for, more will be; and who has
                # the lock is told what can't be read.
                self._ahead_from = tail + _AHEAD_PAUSE_BYTES

    def _fold_few(self, tx: Tx, start: int, tail: int) -> bool:
        """Fold all from `start` to the tail, if it is so little that it is read at one stroke."""
        told = self.log.alone(start, tail)
        if told is not None:
            tx.apply(told)
            return True
        few = self.log.few(start, tail)
        if few is not None:
            tx.apply_stretch(few)
        return few is not None

    def _join_leader(self, tx: Tx) -> None:
        """Bring memory to where another process has brought LMDB, by what the log has in between;
        where that is not enough, what LMDB has is read.
        """
        start, end = tx.applied, tx.leader[0] if tx.leader else 0
        try:
            if start < self.log.head_offset:
                raise BehindError
            tx.apply_many(self.log.stretches(start, end, on_damage=_give_up))
            tx.join()
        except BehindError:
            tx.abort()
            self.index.write()

    def fold_behind(self, *, busy: bool) -> None:
        """Fold what nobody has looked at yet: one part when it is a lot, all of it when not much
        was written since the last call. Takes the write lock anew for each part.
        """
        words = self.page.words
        tail = words[TAIL]
        calm = not busy and tail - self._tail_seen < _PART_BYTES
        if not busy:
            self._tail_seen = tail
        most_bytes = _PART_BYTES if calm else _MOST_LEFT_BYTES
        while not self.closed and words[TAIL] - self.folded_to > most_bytes:
            before = self.folded_to
            self.run_once(self._fold_part)
            if busy or self.folded_to == before:
                return

    def is_far_behind(self) -> bool:
        """Whether, for all this process knows, it has to fold much to look at the index: that is
        done in parts. The last frame is not counted, however long: it may have been put just now,
        and whoever gets it will look.
        """
        return self.page.words[LAST_FRAME] - self.folded_to > _PART_BYTES

    def _fold_part(self, session: Session) -> None:
        """Bring the index a part nearer to the log's tail, if there is room for it."""
        tx = self.index.write()
        try:
            start = self._start(tx)
            tail = self.page.words[TAIL]
            last = Last(start + _PART_BYTES)
            if start < tail - _PART_BYTES:
                found = self.log.stretches(start, tail, on_damage=self._damage_noter(tx))
                tx.apply_many(last.until_enough(found))
            if last.end:
                tx.commit(last.end, self.log.checksum(last.offset), last.offset)
                self.folded_to = last.end
                return
        except IndexFullError as error:
            logger.debug("index not written, the log is ahead of it: %s", error)
            return
        except BaseException:
            tx.abort()
            raise
        tx.abort()
        self.folded_to = session.tx.stored  # with the little that is left, it is level

    def remember_written(self, start: int, tail: int, appended: list[Appended] | Several) -> None:
        """Keep a little of what this process wrote and the index does not have yet."""
        if start != self._written_to:
            self._written = []
            self._written_from = start
            self._written_until = start + _MOST_REMEMBERED_BYTES
        if tail <= self._written_until:
            self._written += appended
            self._written_to = tail
        else:
            self._written = []
            self._written_to = -1

    def fold_all(self, tx: Tx) -> None:
        """Apply the whole log, or what is left of it."""
        start = self._start(tx)
        found = self.log.stretches(start, self.page.words[TAIL], on_damage=self._damage_noter(tx))
        fold_in_parts(self.index, tx, self.log, found, start)

    def _start(self, tx: Tx) -> int:
        """Where the fold goes on. An index of which nothing is kept any more begins anew, with what
        a checkpoint knows of the time before what is kept.
        """
        head = self.log.head_offset
        if 0 < tx.applied < head:
            # An old one: what it never saw was given back meanwhile.
            tx.clear()
        if tx.applied:
            return tx.applied
        checkpoint = self.log.checkpoint()
        if checkpoint:
            try:
                wrong = seed(tx, self.log.read(checkpoint), head)
            except (CorruptError, LookupError) as error:  # the last: repair has written over it
                wrong = str(error)
            if wrong:
                # Groups from before what is kept begin anew: messages come twice, none is lost.
                tx.note_damage(checkpoint, wrong)
        return head

    def _report(self, recovery: Recovery) -> None:
        for _, reason in self.healed:
            logger.warning("%s: %s; nothing is lost", self.path, reason)
        if recovery.torn_bytes:
            logger.warning(
                "%s: the log ended in the middle of a frame; what followed offset %d (%d B) was "
                "cut, every complete record is kept",
                self.path,
                recovery.cut,
                recovery.torn_bytes,
            )

    def _damage_noter(self, tx: Tx) -> Callable[[int, str], None]:
        def note(offset: int, reason: str) -> None:
            self.tell_damage(offset, reason)
            tx.note_damage(offset, reason, met=True)
            self.damage_met()

        return note
