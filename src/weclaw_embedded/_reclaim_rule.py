"""The rule by which space is given back: is the oldest segment freed, carried up, or left?

Role: `decide` goes from what is known of the oldest segment to what is done with it, and why.

Invariants:

* It changes nothing, and asks the dearer things only where they decide.
* Each constant of the rule stands here, with what it is for.

It must not know where the answers come from: `_reclaim` gets them from the log and the index.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple, Protocol

# Where nobody waits for it, carrying may write half of what it frees: of the oldest segment alone,
# or of all that is kept. So a file is not much more than twice as large as what it keeps, and no
# more is carried than is got back. With 7/8 for one alone files were as large on the whole, and 1.4
# times as much was carried.
_HALF: Final = 1 / 2
# Where the disk is short it may be two thirds of all that is kept: with a half, a disk full of
# messages that are put off again and again was full for good before it came to that.
_SHORT: Final = 2 / 3
# Where a put found no room whatever is got back counts, from an eighth of what is carried on.
_EIGHTH: Final = 1 / 8
# So many segments are looked at together then: as many as are freed before a put is tried again for
# the first time. What is ready is carried for a put only if that gives half of them back, as where
# nobody takes it: a producer who waits for a consumer at `max_bytes` finds 69 % of the file in use.
# It was 62 % when what is ready was carried as soon as it took no more than a quarter of its
# segment, for the copies took the room.
AHEAD: Final = 8
# In so many segments the log goes on while what lives is carried. Where only `max_bytes` is reached
# they are there for a moment: what is freed takes their place.
_BESIDE: Final = 2
# More than so many live messages are not carried out of one segment alone while nobody waits for
# it: it took 0.4 to 0.8 s of processor with 23 000.
_MANY: Final = 20_000


class Does(enum.Enum):
    """What is done with the oldest segment."""

    FREE = "free"  # nothing in it is needed
    CARRY = "carry"  # written once more at the end of the log, and then freed
    LEAVE = "leave"


class Decision(NamedTuple):
    """What is done, why, and after how many seconds to ask again (None: that is no matter of
    time).
    """

    does: Does
    why: str
    wait_s: float | None = None


class Oldest(Protocol):
    """What the rule asks of the oldest segment. The segments that follow it have numbers, from 0
    for the oldest on. What carrying writes is counted with the index where the disk is short: that
    takes its part of the same disk.
    """

    is_forced: bool  # a put found no room
    is_short: bool  # the disk has no more than what is held for what waits
    segment_bytes: int

    def is_last(self) -> bool:
        """Whether the log goes on in it."""

    def is_pinned(self) -> bool:
        """Whether a backup, or the replica, still reads it."""

    def retained_s(self) -> float | None:
        """How long retention holds what is settled in it; 0.0: no more; None: not by time."""

    def n_segments(self) -> int:
        """How many segments there are to be freed."""

    def n_live(self, number: int) -> int:
        """How many messages live in a segment."""

    def has_ready(self, number: int) -> bool:
        """Whether some of them may be taken now."""

    def getting_on_s(self) -> float:
        """For how long still what is ready in it is left to its groups; 0.0: they stand still."""

    def can_be_settled(self) -> bool:
        """Whether there is room to settle what lives in it where it is."""

    def carried_bytes(self) -> int:
        """What carrying it writes. The messages are read for that."""

    def each_bytes(self) -> int:
        """What carrying a message writes, about."""

    def all_bytes(self) -> tuple[int, int]:
        """(what carrying all that lives writes, what of it is one message's), about."""

    def kept_bytes(self) -> int:
        """How long the log is."""

    def room_bytes(self) -> int:
        """What the log can take where it is, with one free slot left."""


def decide(oldest: Oldest) -> Decision:
    """Return what is to be done with the oldest segment."""
    if oldest.is_last():
        return Decision(Does.LEAVE, "the log goes on in it")
    if oldest.is_pinned():
        return Decision(Does.LEAVE, "it is still read")
    if not oldest.is_forced:
        wait_s = oldest.retained_s()
        if wait_s != 0.0:
            return Decision(Does.LEAVE, "retention holds it", wait_s)
    if not oldest.n_live(0):
        return Decision(Does.FREE, "nothing lives in it")
    if oldest.has_ready(0):
        # What will be taken soon is not worth carrying; what nobody takes is.
        if oldest.is_forced:
            if oldest.can_be_settled() and not (_pays_soon(oldest) or _pays_in_all(oldest)):
                return Decision(Does.LEAVE, "it can be worked off where it is")
        elif not (oldest.is_short and _pays_in_all(oldest)):
            wait_s = oldest.getting_on_s()
            if wait_s > 0.0:
                return Decision(Does.LEAVE, "it is being worked off", wait_s)
    if oldest.is_forced:
        spare_bytes = 0 if oldest.is_short else _BESIDE * oldest.segment_bytes
        if oldest.carried_bytes() > oldest.room_bytes() + spare_bytes:
            return Decision(Does.LEAVE, "there is no room to carry it")
        if _gives_room(oldest):
            return Decision(Does.CARRY, "it gives room for the put")
    elif oldest.n_live(0) <= _MANY and oldest.carried_bytes() <= oldest.segment_bytes * _HALF:
        return Decision(Does.CARRY, "little lives in it")
    if _pays_in_all(oldest):
        return Decision(Does.CARRY, "little lives in all that is kept")
    return Decision(Does.LEAVE, "too much lives in it")


def _pays_in_all(oldest: Oldest) -> bool:
    """Whether carrying all that lives gives enough back, and fits where the disk is short."""
    all_bytes, each_bytes = oldest.all_bytes()
    share = _SHORT if oldest.is_short else _HALF
    if all_bytes + _BESIDE * oldest.segment_bytes >= oldest.kept_bytes() * share:
        return False
    if not oldest.is_short:
        return True
    # Segment after segment, until they give more than what lives in them takes at the end. What
    # was carried a moment ago stands there already, and is not counted again.
    room_bytes = oldest.room_bytes()
    taken_bytes = 0
    for number in range(oldest.n_segments()):
        taken_bytes += oldest.n_live(number) * each_bytes - oldest.segment_bytes
        if not 0 < taken_bytes < room_bytes:
            break
    return taken_bytes < room_bytes


def _pays_soon(oldest: Oldest) -> bool:
    """Whether carrying the next few segments, all of them, gives half of them back."""
    n_segments = min(AHEAD, oldest.n_segments())
    left_bytes = n_segments * oldest.segment_bytes * _HALF
    for number in range(n_segments):
        left_bytes -= oldest.n_live(number) * oldest.each_bytes()
        if left_bytes < 0:
            return False
    return True


def _gives_room(oldest: Oldest) -> bool:
    """Whether the oldest segment, or some of the next few together, give an eighth of theirs back
    when they are carried. Not beyond one with something ready in it.
    """
    carried_bytes = 0
    for number in range(min(AHEAD, oldest.n_segments())):
        if not number:
            carried_bytes = oldest.carried_bytes()
        elif oldest.has_ready(number):
            return False
        else:
            carried_bytes += oldest.n_live(number) * oldest.each_bytes()
        if carried_bytes <= (number + 1) * oldest.segment_bytes * (1 - _EIGHTH):
            return True
    return False
