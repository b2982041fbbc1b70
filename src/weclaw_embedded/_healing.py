"""What a replica's copy has, to mend a file of the same queue: frames, whole segments, the end.

Role: one look at the copy, wherever it is: a file here is read as it stands; behind a command a
receiver is asked, which then only reads. Neither disturbs who writes the copy meanwhile.

Invariants: only bytes that are no valid frame are ever written over, with those that the copy has
at the same offsets of the same life of the segment; what is no better afterwards is put back. What
is asked for is fetched while no lock is held.

It must not know what messages are.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from . import _files, _stream
from ._channel import Address, Channel, LinkDownError, RefusedError, describe, normal, read_record
from ._copy import Copy, check_is_file, is_same_file
from ._format import COPY, FIRST, PART_BYTES, SLOT_BYTES, FileHeader, SlotHeader
from ._mend import find_slot, has_slot, unreadable
from ._options import StoreOptions
from ._recovery import recover_copy
from ._scan import BadPartError, check_part
from ._scratch import scratch_of
from ._stream import DATA, MAX_DATA, SEGMENT, STATE, Hello, State, StreamError
from .errors import CorruptError, DiskFullError, StorageError, WeclawError
from .wal import HEAD, LAST, TAIL, Log, read_file_header

if TYPE_CHECKING:
    from ._engine import Engine

logger = logging.getLogger("weclaw_embedded")

_AT_LEAST_S: Final = 5.0
NOBODY: Final = Hello(bytes(16), 0, 0, 0)  # who only wants to see what is there
_AT_ONCE: Final = 64 << 20  # bytes fetched before they are written


class UnreachableError(Exception):
    """The replica can't be asked what it has; internal, and a StorageError to who has asked."""


def replica_of(path: str, options: StoreOptions | None) -> Address | None:
    """Where the replica of a file that can't be asked is: the argument, the environment, or what
    was noted beside the file.
    """
    if options is not None and options.chosen("replica"):
        return normal(options.replica)
    return read_record(scratch_of(path))


def patience_of(replica_timeout: float) -> float:
    """How many seconds a replica may take to say what it has."""
    return max(replica_timeout, _AT_LEAST_S)


# -- a look at the copy --------------------------------------------------------------------------


class Source(Protocol):
    """A copy that is read. Each method may raise UnreachableError."""

    state: State

    def slot(self, segment: int) -> bytes:
        """The packed header of a segment; nothing if it has none."""

    def read(self, offset: int, n: int) -> bytes:
        """At most `n` bytes of the log, of one segment; nothing where it ends."""

    def close(self) -> None: ...


class _Here:
    """A copy that is a file of this machine."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self.state = copy.state()
        self.slot = copy.read_slot
        self.read = copy.read_kept

    def close(self) -> None:
        self._copy.close()


def ask(address: Address, patience_s: float) -> State:
    """What there is behind a command, whosever it is. Raises StorageError."""
    try:
        source = _Away(address, NOBODY, patience_s)
    except UnreachableError as error:
        raise StorageError(str(error)) from None
    source.close()
    return source.state


class _Away:
    """A copy behind a command."""

    def __init__(self, address: Address, hello: Hello, patience_s: float) -> None:
        self._address = address
        self._patience_s = patience_s
        self._channel: Channel | None = None
        try:
            self._channel = Channel(address, None)
            self._channel.send(_stream.LOOK, _stream.pack_hello(hello))
            body = self._answer(STATE)
            self.state = _stream.unpack_state(body)
        except (LinkDownError, RefusedError, StreamError) as error:
            self.close()
            raise self._unreachable(error) from None
        except BaseException:
            self.close()
            raise

    def _unreachable(self, error: Exception) -> UnreachableError:
        refuses = "refuses to be read" if isinstance(error, RefusedError) else "can't be asked"
        return UnreachableError(f"the replica {describe(self._address)} {refuses}: {error}")

    def _answer(self, kind: int) -> bytes:
        assert self._channel is not None, "it is open"
        body = self._channel.answer(time.monotonic() + self._patience_s, lambda: False)
        if body[0] != kind:
            raise LinkDownError("it answered something else than it was asked for")
        return body

    def _ask(self, offset: int, n: int, kind: int) -> bytes:
        assert self._channel is not None, "it is open"
        try:
            self._channel.send(_stream.READ, _stream.pack_read(offset, n))
            return self._answer(kind)
        except (LinkDownError, RefusedError) as error:
            raise self._unreachable(error) from None

    def slot(self, segment: int) -> bytes:
        return self._ask(segment * self.state.segment_bytes, SLOT_BYTES, SEGMENT)[1:]

    def read(self, offset: int, n: int) -> bytes:
        body = self._ask(offset, min(n, MAX_DATA), DATA)
        try:
            at, _, data = _stream.unpack_data(body)
        except StreamError as error:
            raise self._unreachable(error) from None
        if at != offset or len(data) > n:
            raise self._unreachable(LinkDownError("it sent other bytes than it was asked for"))
        return bytes(data)

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def look(path: str, header: FileHeader, address: Address, patience_s: float) -> Source | None:
    """The copy of the file at `path`, to be read and then closed. None if there is none that is
    one of this queue. Raises UnreachableError.
    """
    source: Source
    if isinstance(address, str):
        if is_same_file(address, path):
            return None
        try:
            check_is_file(address)
            fd = _files.open_ro(address)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(os.path.abspath(address))):
                return None
            raise UnreachableError(
                f"the replica {address} can't be read: its folder is not there"
            ) from None
        except (OSError, StorageError) as error:
            raise UnreachableError(f"the replica {address} can't be read: {error}") from None
        try:
            if not _files.size(fd) or read_file_header(fd, address).store_id != header.store_id:
                return None
            copy = Copy.look(address)
        except (OSError, WeclawError) as error:
            raise UnreachableError(f"the replica {address} can't be read: {error}") from None
        finally:
            _files.close(fd)
        if copy is None:
            return None
        source = _Here(copy)
    else:
        hello = Hello(header.store_id, header.segment_bytes, header.epoch, header.created_us)
        source = _Away(address, hello, patience_s)
    state = source.state
    if state.role == COPY and (state.store_id, state.segment_bytes) == (
        header.store_id,
        header.segment_bytes,
    ):
        return source
    source.close()
    return None


# -- the end of the log --------------------------------------------------------------------------


def complete(path: str, fd: int, header: FileHeader, address: Address, patience_s: float) -> bool:
    """Get back what the copy has beyond the end of this file's log, which was cut off or damaged;
    True when there was something. The caller has the file for itself.

    Raises StorageError when the copy has more and it can't be got, after what is torn was cut off.
    """
    mine = Copy(path, fd, header, None, readonly=True)
    mine.look_again()
    try:
        source = look(path, header, address, patience_s)
    except UnreachableError as error:
        logger.warning(
            "%s did not end cleanly and %s: whether that has more is not known", path, error
        )
        return False
    if source is None:
        return False
    try:
        before = mine.tail
        if source.state.tail <= before or not _continues(mine, source):
            return False
        copy = Copy(path, fd, header, None)
        recover_copy(copy.log)
        _follow(copy, source)
        copy.sync()
    except UnreachableError as error:
        raise StorageError(
            f"{path} lacks the end of its log, and {error}; what is there was not lost; open it "
            "again when the replica can be reached, or without it, with replica=False"
        ) from None
    finally:
        source.close()
    logger.warning(
        "%s ended at offset %d, before what was confirmed: RESTORED up to offset %d from its "
        "replica %s",
        path,
        before,
        copy.tail,
        describe(address),
    )
    return True


def _continues(mine: Copy, source: Source) -> bool:
    """Whether the copy has what this log ends with, so that the rest of it follows."""
    last, end, crc = mine.last_frame()
    if not end:
        return source.state.head == mine.log.state.words[HEAD] == 0
    segment = last >> mine.log.bits
    slot = mine.log.unpack_slot(source.slot(segment))
    if slot is None or slot.salt != mine.log.place(segment)[1]:
        return False
    return source.read(last, PART_BYTES)[:4] == crc.to_bytes(4, "little")


def _follow(copy: Copy, source: Source) -> None:
    """Write what the source has from the end of `copy` on."""
    until = source.state.tail
    bits = copy.log.bits
    while copy.tail < until:
        at = 0 if copy.empty else copy.tail
        segment = at >> bits
        packed = b"" if segment == until >> bits else source.slot(segment + 1)
        following = copy.log.unpack_slot(packed)
        end = until if segment == until >> bits else following.prev_end if following else 0
        while at < end:
            data = source.read(at, end - at)
            if not data:
                raise UnreachableError(f"the replica has nothing at offset {at}")
            copy.write(at, memoryview(data))
            at += len(data)
        if segment == until >> bits:
            return
        if following is None or at != end:
            raise UnreachableError(f"the replica lacks segment {segment + 1}")
        copy.begin_segment(packed)


# -- what is damaged within it -------------------------------------------------------------------


class _Lack(NamedTuple):
    """What can't be read: a whole segment without a header, or a range of one."""

    begin: int
    end: int
    reason: str
    is_segment: bool


class _Found(NamedTuple):
    lack: _Lack
    slot: SlotHeader
    data: bytes


def heal(
    engine: Engine, address: Address, spans: Sequence[tuple[int, int]], patience_s: float
) -> list[int]:
    """Write what the copy has over what can't be read from one offset to another, and over what
    belongs to it: the offsets that can be read again. Raises UnreachableError.
    """
    log = engine.log

    def look_for_lacks() -> list[_Lack]:
        found: dict[int, _Lack] = {}
        for span in spans:
            lacks = engine.run(lambda session, *span: _lacks(session.log, *span), *span)
            found.update((lack.begin, lack) for lack in lacks)
        return list(found.values())

    lacks = look_for_lacks()
    if not lacks:
        return []
    healed: list[int] = []
    source = look(engine.path, engine.header, address, patience_s)
    if source is None:
        return []
    try:
        # A segment that has its header again may have damage of its own.
        for lack in [lack for lack in lacks if lack.is_segment]:
            healed += _heal_some(engine, _fetch(source, log, [lack]))
        if healed:
            lacks = [lack for lack in lacks if lack.is_segment] + look_for_lacks()
        some: list[_Lack] = []
        for lack in [lack for lack in lacks if not lack.is_segment]:
            some.append(lack)
            if sum(one.end - one.begin for one in some) >= _AT_ONCE:
                healed += _heal_some(engine, _fetch(source, log, some))
                some = []
        healed += _heal_some(engine, _fetch(source, log, some))
    finally:
        source.close()
    for lack in lacks:
        for begin in healed:
            if lack.begin <= begin < lack.end:
                logger.warning(
                    "damage at offset %d (%s): healed from offset %d on from the replica %s",
                    lack.begin,
                    lack.reason,
                    begin,
                    describe(address),
                )
    return healed


def _lacks(log: Log, start: int, end: int) -> list[_Lack]:
    words = log.state.words
    lacks = []
    start = max(start, log.head_offset)
    if end <= start:
        return []
    end = _reach(log, end)
    for segment in range(max(words[HEAD], start >> log.bits), ((end - 1) >> log.bits) + 1):
        if segment <= words[LAST] and not has_slot(log, segment):
            begin = segment << log.bits
            lacks.append(_Lack(begin, log.limit(segment), "its slot headers are lost", True))
    missing = {lack.begin >> log.bits for lack in lacks}
    for begin, stop, reason in unreadable(log.at_rest(), start, _end_of_segment(log, end - 1)):
        if begin >> log.bits not in missing:
            lacks.append(_Lack(begin, stop, reason, False))
    return lacks


def _reach(log: Log, end: int) -> int:
    """How far what ends there goes on: over segments that are lost, too, or begin with the rest of
    a frame, or with nothing that can be read.
    """
    segment = (end - 1) >> log.bits
    while segment < log.state.words[LAST]:
        following = segment + 1
        try:
            begin = (following << log.bits) + SLOT_BYTES
            if check_part(log, begin, _end_of_segment(log, begin))[0] & FIRST:
                break
        except (BadPartError, CorruptError):
            pass  # it may be the rest of one
        segment = following
    return max(end, (segment + 1) << log.bits if segment > (end - 1) >> log.bits else 0)


def _end_of_segment(log: Log, offset: int) -> int:
    """The offset up to which its segment may hold frames."""
    words = log.state.words
    segment = offset >> log.bits
    return int(words[TAIL]) if segment >= words[LAST] else log.limit(segment)


def _fetch(source: Source, log: Log, lacks: list[_Lack]) -> list[_Found]:
    found = []
    for lack in lacks:
        slot = log.unpack_slot(source.slot(lack.begin >> log.bits))
        if slot is None:
            continue
        at = lack.begin + (SLOT_BYTES if lack.is_segment else 0)
        pieces = []
        while at < lack.end:
            data = source.read(at, lack.end - at)
            if not data:
                break
            pieces.append(data)
            at += len(data)
        if lack.is_segment or at == lack.end:
            found.append(_Found(lack, slot, b"".join(pieces)))
    return found


def _heal_some(engine: Engine, found: list[_Found]) -> list[int]:
    if not found:
        return []
    healed = engine.run(lambda session: _write(session.log, found))
    if healed:
        engine.sync_file()
    return healed


def _write(log: Log, found: list[_Found]) -> list[int]:
    """Put what was found in its place; the caller holds the write lock."""
    healed = []
    written: list[tuple[_Lack, bytes, int]] = []
    look = log.at_rest()
    for lack, slot, data in found:
        if lack.is_segment:
            if _write_segment(log, slot, data):
                healed.append(lack.begin)
            continue
        try:
            shift, salt = log.place(lack.begin >> log.bits)
        except (LookupError, CorruptError):
            continue
        if salt == slot.salt:
            before = look.bytes_at(lack.end - lack.begin, lack.begin + shift)
            if before != data:
                _files.write_at(log.fd, [data], lack.begin + shift)
                written.append((lack, before, shift))
    # After all of it was written: a frame may go over several of these places.
    for lack, before, shift in written:
        # What is no better is put back; a neighbour that is stays.
        begin = lack.begin
        for place, end, _ in unreadable(look, lack.begin, _end_of_segment(log, lack.begin)):
            if lack.begin <= place < lack.end:
                piece = before[place - lack.begin : end - lack.begin]
                if not look.is_unread(place + shift, end - place):
                    _files.write_at(log.fd, [piece], place + shift)
                if begin < place:
                    healed.append(begin)
                begin = end
        if begin < lack.end:
            healed.append(begin)
    return healed


def _write_segment(log: Log, slot: SlotHeader, data: bytes) -> bool:
    """Give a segment that can't be found a slot again: its own, where that is still recognised by
    what is in it, else another with the copy's bytes.
    """
    segment = slot.segment
    words = log.state.words
    if not words[HEAD] <= segment <= words[LAST] or has_slot(log, segment):
        return False
    following = segment + 1
    if following <= words[LAST] and has_slot(log, following):
        header = log.read_slot(log.slot_of(following))
        if header is None or header.prev_salt != slot.salt:
            return False  # another life of it
    place = find_slot(log, slot)
    if place is not None:
        log.put_in_slot(slot, place, None)
        return True
    try:
        place = log.take_slot(spare=True)
    except DiskFullError:
        return False
    log.put_in_slot(slot, place, data)
    return True
