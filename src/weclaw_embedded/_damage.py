"""What an open file was met damaged in, and who decides that it is healed: this room alone.

Role: the part of the engine that asks the replica for what can't be read, wherever that is met: by
recovery, while the index is folded, when a message is read, carried or repaired.

What folding met was passed over: the index lacks what it said, and nobody asks for it any more. So
it is noted in the index, and each engine asks the replica for what is noted, when it opens the file
and whenever something more is. What could be healed is in the index once that is folded anew.

Invariant: no segment is freed with something in it that a replica may still heal. It has said that
it lacks it, or it has not been asked yet, or could not be: then the segment is kept (`unanswered`).

It must not know what messages are, nor how a replica is asked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Final

from ._channel import Address, normal, read_record
from ._opening import Opened
from ._part import Part
from ._session import ALL, Session
from ._shared import IS_COPY, IS_FENCED, REPLICATION
from .errors import ClosedError, DiskFullError, StorageError

logger = logging.getLogger("weclaw_embedded")

# How long a replica that could not be asked to heal something is left alone.
HEAL_PAUSE_S: Final = 30.0
# So many places are told of in the log by one process.
_MOST_TOLD: Final = 1000


class Damage(Part):
    """What `Engine` inherits to heal what it meets."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._named = opened.replica
        # One thread at a time heals what was met; what that needs may lead it here again.
        self.healing = threading.RLock()
        # Offsets of what was met and no replica of these has.
        self._answered: set[int] = set()
        self._answered_by: list[Address] = []
        self._heal_again_s = 0.0  # before that (time.monotonic) the replica is not asked for bytes
        self._told: set[int] = set()  # places that were told of
        self.last_bad = (0, 0)  # where the last one begins and ends that was set aside

    def replicas(self) -> list[Address]:
        """Where what is damaged here may be whole: where the replica is, and, while a file is being
        opened, where it is to be from now on.
        """
        if self.page.words[REPLICATION] & (IS_COPY | IS_FENCED):
            return []  # what is there may only be looked at
        known = normal(self.option("replica"))
        if known is None and not self.chose("replica"):  # else there is to be none any more
            known = read_record(self.directory)
        if self._adopted or self._named is None:
            return [] if known is None else [known]
        named = normal(self._named)
        if named is None:
            return []
        return [named] if known in (None, named) else [named, known]

    def heal(self, start: int, end: int, *, insist: bool = False) -> bool:
        """Put what the replica has in the place of what can't be read between two offsets; True
        when something can be read again. Blocks while the replica is asked, and holds no lock then.

        One that can't be asked is not asked again for a while, except if `insist`: then that raises
        StorageError.
        """
        return self._ask([(start, end)], insist)

    def _ask(self, spans: list[tuple[int, int]], insist: bool) -> bool:
        from ._healing import UnreachableError, heal, patience_of

        if self.heal_pause_s() > 0 and not insist:
            return False
        engine = self.whole
        is_healed = False
        for address in self.replicas():
            try:
                patience_s = patience_of(engine.replica_timeout)
                is_healed |= bool(heal(engine, address, spans, patience_s))
            except (UnreachableError, DiskFullError) as error:
                if insist and isinstance(error, DiskFullError):
                    raise
                if insist:
                    raise StorageError(
                        f"{self.path}: {error}; nothing was written over, because the replica may "
                        "have what can't be read; try again when it can be reached, or give it up "
                        "with replica=False"
                    ) from None
                self._heal_again_s = time.monotonic() + HEAL_PAUSE_S
                logger.warning("%s: damage is not healed: %s", self.path, error)
        return is_healed

    def heal_pause_s(self) -> float:
        """Seconds until a replica that could not be asked is asked again; 0.0 if there is none."""
        return max(0.0, self._heal_again_s - time.monotonic())

    def heal_met(self) -> None:
        """Ask the replica for all that was passed over and that it was not asked for yet. Blocks as
        `heal` does, and for who heals already; one that can't be asked now is asked again later, by
        itself.
        """
        try:
            # Who makes room waits for nobody who heals, for that one may wait for the room.
            if not self.healing.acquire(blocking=not self.makes_room):
                return
            while places := self.run(_unanswered_places):
                if self.heal_pause_s() > 0:
                    self.timer.call_by(self._heal_again_s, self._heal_quietly)
                    return
                bits = self.log.bits
                segments = sorted({place >> bits for place in places})
                spans = [(n << bits, (n + 1) << bits) for n in segments]
                if self._ask(spans, False):
                    self.run(_fold_anew)
                if self.heal_pause_s() <= 0:
                    self._answered.update(places)
        finally:
            with contextlib.suppress(RuntimeError):  # this thread does not have it
                self.healing.release()

    def unanswered(self, session: Session, start: int, end: int) -> list[tuple[int, str]]:
        """(offset, reason) of what was met between two offsets and the replica was not asked for,
        or could not be. Called under the write lock.
        """
        met = [one for one in session.tx.damage() if start <= one[0] < end]
        if not met:
            return []
        session.options()  # as they are now: to look for them takes the lock, which we have
        replicas = self.replicas()
        if replicas != self._answered_by:
            self._answered, self._answered_by = set(), replicas
        return [one for one in met if one[0] not in self._answered] if replicas else []

    def tell_damage(self, place: int, reason: str) -> None:
        """Say in the log what can't be read, once for each place."""
        if place in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told.add(place)
        logger.warning(
            "%s: damage at offset %d: %s; it is passed over, the rest flows",
            self.path,
            place,
            reason,
        )

    def damage_met(self) -> None:
        """Something was passed over just now. Called under the write lock."""
        self.timer.call_by(0.0, self._heal_quietly)

    def _heal_quietly(self) -> None:
        # Each of these every later call says.
        with contextlib.suppress(StorageError, ClosedError):
            if not self.closed:
                self.heal_met()


def _unanswered_places(session: Session) -> list[int]:
    return [offset for offset, _ in session.engine.unanswered(session, 0, 1 << 63)]


def _fold_anew(session: Session) -> None:
    """What was passed over when the index was made is there now."""
    session.tx.clear()
    session.engine.catch_up(session.tx)
    session.ready = session.settled = ALL
