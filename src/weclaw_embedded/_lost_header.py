"""The header of a file whose first page is lost, made anew from what the slots say.

Role: what a file says about itself stands twice in its first 4096 bytes, and those may go at once,
as a page that can't be read or was overwritten. All of it can be told from the slot headers: where
they stand gives the size of a segment, and their checksums what they are begun with, the checksum
of the store's id.

It reads, and writes nothing. What else stood in the page it can't tell: whether the file was a
queue or a replica's copy.
"""

from __future__ import annotations

import hashlib
from typing import Final
from zlib import crc32

from . import _files
from ._format import (
    HEADER_BYTES,
    MAX_SEGMENT_BYTES,
    MIN_SEGMENT_BYTES,
    SLOT_BYTES,
    SLOT_MAGIC,
    FileHeader,
    slot_unpacker,
    unseed,
)

__all__ = ["rebuilt"]

_MOST_SLOTS: Final = 256  # looked at for each size of a segment


def rebuilt(fd: int, store_id: bytes | None) -> FileHeader | None:
    """What the header must have been; None where the slots don't say. `store_id` is what the id may
    have been, and counts if it fits; else another one is made that does, the same each time.
    """
    size = _files.size(fd)
    best: tuple[int, int] | None = None  # slots with both their headers, and the size that had them
    segment_bytes = MIN_SEGMENT_BYTES
    while segment_bytes <= MAX_SEGMENT_BYTES and HEADER_BYTES + segment_bytes <= size:
        n = sum(1 for begin, end in _ends(fd, size, segment_bytes) if begin == end)
        if n and (best is None or n > best[0]):
            best = n, segment_bytes
        segment_bytes *= 2
    if best is None:
        return None
    segment_bytes = best[1]
    whole = [begin for begin, end in _ends(fd, size, segment_bytes) if begin == end]
    seeds = [_begun_with(data) for data in whole]
    seed = max(seeds, key=seeds.count)
    if store_id is None or crc32(store_id) != seed:
        store_id = _an_id(seed)
    unpack = slot_unpacker(store_id, segment_bytes)
    slots = [slot for slot in map(unpack, whole) if slot is not None]
    if not slots:
        return None
    return FileHeader(
        segment_bytes,
        store_id,
        epoch=max(slot.epoch for slot in slots),
        generation=1,
        created_us=min(slot.created_us for slot in slots),
    )


def _ends(fd: int, size: int, segment_bytes: int) -> list[tuple[bytes, bytes]]:
    """What stands where the slots of this size have their headers, at the beginning and at the end;
    of those with something like one.
    """
    found = []
    positions = range(HEADER_BYTES, size, segment_bytes)
    for position in positions[:_MOST_SLOTS]:
        begin = _files.read_around(fd, SLOT_BYTES, position)[0]
        if begin[:4] == SLOT_MAGIC:
            end = _files.read_around(fd, SLOT_BYTES, position + segment_bytes - SLOT_BYTES)[0]
            found.append((begin, end))
    return found


def _begun_with(slot: bytes) -> int:
    """The checksum of the store's id, with which that of a slot header is begun."""
    fields = slot[8:SLOT_BYTES]
    return unseed(crc32(fields), int.from_bytes(slot[4:8], "little"), len(fields))


def _an_id(seed: int) -> bytes:
    """Sixteen bytes with this checksum."""
    first = hashlib.blake2b(
        seed.to_bytes(4, "little"), digest_size=12, person=b"weclaw id"
    ).digest()
    # The last four are what takes the checksum from where it is to where it is to be.
    needed = unseed(crc32(bytes(4)), seed, 4)
    return first + (crc32(first) ^ needed).to_bytes(4, "little")
