"""Laying out a frame that is more than one small record, over as many segments as it needs.

Role: from records to the buffers that are pending in a `Log`: the frame's parts, each with its
header and checksum, and the segments that are begun for them.

Invariants: a record goes on in the next segment only where it does not fit, and then at its first
place there; what was laid out before an error is taken back by the log, which alone knows what was
pending before.

It knows nothing of the file: it begins segments by asking the log, and writes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, TypeAlias, overload
from zlib import crc32

from . import _files
from ._format import (
    ENVELOPE,
    ENVELOPE_BYTES,
    FIRST,
    LAST_PART,
    PART,
    PART_BYTES,
    POLICY_SHIFT,
    REST,
    VOUCH,
)
from ._segments import COMMIT

if TYPE_CHECKING:
    from ._appending import Appending

Record: TypeAlias = Sequence[_files.Bytes]  # one after the other they are the record's bytes

JOIN_BYTES = 1 << 20  # up to here one copy is cheaper than handing over many buffers
SMALL_BYTES = 64 << 10  # up to here one copy more, also made in vain, is not worth a look
NO_BYTES = "a frame needs records, and a record needs bytes"


class Alike(Sequence[tuple[bytes, bytes]]):
    """Records that begin with the same bytes, each with a rest of its own: put_many's, which are
    laid out in steps over all of them.
    """

    __slots__ = ("lengths", "rests", "start")

    def __init__(self, start: bytes, rests: Sequence[bytes]) -> None:
        self.start = start
        self.rests = rests
        n = len(start)
        self.lengths = [n + len(rest) for rest in rests]

    def __len__(self) -> int:
        return len(self.rests)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return zip(repeat(self.start), self.rests, strict=False)

    @overload
    def __getitem__(self, at: int) -> tuple[bytes, bytes]: ...
    @overload
    def __getitem__(self, at: slice) -> Alike: ...
    def __getitem__(self, at: int | slice) -> tuple[bytes, bytes] | Alike:
        if isinstance(at, slice):
            return Alike(self.start, self.rests[at])
        return (self.start, self.rests[at])


def bytes_of(records: Sequence[Record]) -> int:
    """How many bytes the records have together."""
    if isinstance(records, Alike):
        return sum(records.lengths)
    return sum(map(len, chain.from_iterable(records)))


class Layout:
    """The laying out of one frame that may go over several segments."""

    def __init__(self, log: Appending, policy: int, time_us: int, flags: int, spare: bool) -> None:
        self.log = log
        self.time_us = time_us
        self.spare = spare
        commit = log.state.words[COMMIT]
        if flags & VOUCH:
            commit = max(commit, log._end)
        self.commit_flags = commit << 8 | flags | policy << POLICY_SHIFT
        self.first = (0, 0)  # offset and checksum of the first part
        self.pieces: list[_files.Bytes] = []  # payload of the part under way
        self.n = 0  # its length
        self.begin = log._end
        self.is_first = True

    def place(self, records: Sequence[Record], payload: int) -> list[int]:
        """Lay out all records; return their offsets."""
        if payload <= JOIN_BYTES or max(map(len, chain.from_iterable(records))) <= SMALL_BYTES:
            offsets = self._place_small(records)
        else:
            offsets = [self._add(record) for record in records]
        self._close_part(LAST_PART)
        return offsets

    def _place_small(self, records: Sequence[Record]) -> list[int]:
        """`place`, in steps over as many as fit into the part, each of them one call, with pieces
        joined: put_many lives here.
        """
        if isinstance(records, Alike):
            start, bodies, lengths = records.start, records.rests, records.lengths
        else:
            start, bodies = b"", [*map(b"".join, records)]
            lengths = [*map(len, bodies)]
        each = 3 if start else 2  # pieces of a record: its envelope, the start, the rest
        if not all(lengths):
            raise ValueError(NO_BYTES)
        # Where each begins in this part, and the last one ends, if all of them fit.
        sizes = [ENVELOPE_BYTES + length for length in lengths]
        starts = [*accumulate(sizes, initial=PART_BYTES)]
        offsets: list[int] = []
        done = 0
        while done < len(bodies):
            moved = PART_BYTES + self.n - starts[done]
            fit = bisect_right(starts, self.log._limit - self.begin - moved) - 1
            if fit > done:
                places = starts[done:fit]
                if moved:  # in a later part
                    places = [moved + place for place in places]
                pieces: list[_files.Bytes] = [start] * (each * len(places))
                pieces[::each] = map(ENVELOPE.pack, lengths[done:fit], places)
                pieces[each - 1 :: each] = bodies[done:fit]
                self.pieces += pieces
                self.n += starts[fit] - starts[done]
                begin = self.begin
                offsets += [begin + place for place in places]
                done = fit
            if done < len(bodies):
                offsets.append(self._add((start, bodies[done])))
                done += 1
        return offsets

    def _add(self, record: Record) -> int:
        """Lay out one record, over several parts if need be; return its offset."""
        log = self.log
        length = sum(map(len, record))
        if not length:
            raise ValueError(NO_BYTES)
        at = self.begin + PART_BYTES + self.n
        if at + ENVELOPE_BYTES + 1 > log._limit:
            self._next_part(0)
            at = self.begin + PART_BYTES + self.n
        self.pieces.append(ENVELOPE.pack(length, at - self.begin))
        self.n += ENVELOPE_BYTES
        if at + ENVELOPE_BYTES + length <= log._limit:
            self.pieces.extend(record)
            self.n += length
        else:
            self._cut(record, length)
        return at

    def _cut(self, record: Record, length: int) -> None:
        """Lay out a record's bytes over this part and those that follow."""
        rest = length
        for piece in record:
            view = memoryview(piece).cast("B")
            while len(view):
                room = self.log._limit - (self.begin + PART_BYTES + self.n)
                if room <= 0:
                    self._next_part(rest)
                    continue
                taken = view[:room]
                self.pieces.append(taken)
                self.n += len(taken)
                rest -= len(taken)
                view = view[len(taken) :]

    def _next_part(self, rest: int) -> None:
        self._close_part(0)
        self.log._begin_segment(self.time_us, self.spare)
        self.begin = self.log._end
        self.pieces = [REST.pack(rest)]
        self.n = REST.size

    def _close_part(self, last: int) -> None:
        log = self.log
        flags = self.commit_flags | last | (FIRST if self.is_first else 0)
        head = PART.pack(0, self.n, flags, self.time_us)
        seed = log._salt + self.begin
        if self.n <= SMALL_BYTES * len(self.pieces):
            part = bytearray().join([head, *self.pieces])
            with memoryview(part) as view:
                crc = crc32(view[4:], seed)
            part[:4] = crc.to_bytes(4, "little")
            log._buffers.append(part)
        else:  # large ones are handed over as they are
            crc = crc32(head[4:], seed)
            for piece in self.pieces:
                crc = crc32(piece, crc)
            log._buffers += (crc.to_bytes(4, "little"), head[4:], *self.pieces)
        if self.is_first:
            self.first = (self.begin, crc)
        log._end = self.begin + PART_BYTES + self.n
        self.is_first = False
