"""The receiver: one process that writes a replica's copy as the stream says.

Role: the far end of the stream, on plain standard streams, wherever a command can start it. It
answers what it has, refuses what it must not overwrite, writes what comes, and confirms only what
is on its disk. It ends with its input.

Invariants:

* Nothing is written from a message whose checksum does not hold, or that does not follow exactly
  what the copy has.
* A copy of another queue, one of a higher epoch, one that the primary does not recognise as its
  own beginning, or a file that is a queue in its own right is refused, never overwritten.

It must not know who is at the other end, nor what messages are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import BinaryIO, Final

from . import _stream
from ._copy import EMPTY_STATE, Copy, check_is_file, read_role, role_of
from ._format import COPY, check_segment_bytes
from ._paths import lacks_folder
from ._stream import (
    ACK,
    BEGIN,
    BUSY,
    DATA,
    DIVERGED,
    END,
    FAILED,
    FETCH,
    HEAD,
    HELLO,
    HIGHER_EPOCH,
    LOOK,
    NOT_A_COPY,
    OTHER_STORE,
    OTHER_VERSION,
    READ,
    REFUSED,
    SEGMENT,
    STATE,
    SYNC,
    Hello,
    Incoming,
    State,
    StreamError,
    VersionError,
)
from .errors import FormatVersionError, LockedError, WeclawError

logger = logging.getLogger("weclaw_embedded")

# How long the receiver of a feeder that has died may take to end. Who only fetches asks again.
_LOCK_PATIENCE_S: Final = 5.0
_FETCH_PATIENCE_S: Final = 1.0


class _RefusedError(Exception):
    def __init__(self, why: int, text: str, epoch: int = 0) -> None:
        super().__init__(text)
        self.why = why
        self.epoch = epoch


class _Wire:
    """The two streams of this process as messages."""

    def __init__(self, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self._in = stdin.fileno()
        self._out = stdout.fileno()
        self._incoming = Incoming()
        self._sent = 0

    def next(self, idle: Copy | None = None) -> bytes | None:
        """The next message; None at the end of the stream."""
        incoming = self._incoming
        body = incoming.next()
        if body is None and idle is not None:
            idle.prepare()
        while body is None:
            data = os.read(self._in, 1 << 16)
            if not data:
                if incoming.is_cut:
                    logger.warning("the stream ended within a message; nothing of it was written")
                return None
            incoming.add(data)
            body = incoming.next()
        return body

    def send(self, kind: int, *pieces: bytes) -> None:
        data = _stream.message(self._sent, kind, *pieces)
        self._sent += 1
        done = os.write(self._out, data)
        while done < len(data):
            done += os.write(self._out, memoryview(data)[done:])


def serve(path: str, stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Receive until the input ends. 0 when it ended well, 1 when the stream was refused."""
    wire = _Wire(stdin, stdout)
    copy: Copy | None = None
    try:
        greeting = wire.next()
        if greeting is None:
            return 0
        if greeting[0] == LOOK:
            copy = _look(path, _stream.unpack_hello(greeting))
            _answer_reads(wire, copy)
            return 0
        if greeting[0] != HELLO:
            raise StreamError("the stream does not begin with a greeting")
        hello = _stream.unpack_hello(greeting)
        copy = _open(path, hello)
        wire.send(STATE, _stream.pack_state(_state(path, copy, hello)))
        command = wire.next()
        if command is None:
            return 0
        if command[0] == FETCH:
            _send_all(wire, copy)
            return 0
        if command[0] != BEGIN:
            raise StreamError("the stream does not say where to begin")
        copy = _begin(path, hello, copy, command)
        _receive(wire, copy)
    except BrokenPipeError:
        return 0  # nobody is left to be told
    except _RefusedError as refused:
        return _refuse(wire, refused.why, str(refused), refused.epoch)
    except StreamError as error:
        why = OTHER_VERSION if isinstance(error, VersionError) else FAILED
        return _refuse(wire, why, f"the stream was refused: {error}")
    except LockedError as error:
        return _refuse(wire, BUSY, str(error))
    except (WeclawError, OSError) as error:
        return _refuse(wire, FAILED, f"{type(error).__name__}: {error}")
    finally:
        if copy is not None:
            copy.close()
    return 0


def _refuse(wire: _Wire, why: int, text: str, epoch: int = 0) -> int:
    logger.error("%s", text)
    try:
        wire.send(REFUSED, _stream.pack_refused(why, epoch, text))
    except OSError:
        pass  # nobody is left to be told
    return 1


def _must_have_folder(path: str) -> None:
    """Refuse a path at which there is no file, and can be none."""
    lacks = lacks_folder(path)
    if lacks is not None:
        raise _RefusedError(
            FAILED,
            f"{lacks}, so there can be no copy {path}; nothing was made; make the folder first, or "
            "check the path",
        )


def _open(path: str, hello: Hello) -> Copy | None:
    """The copy, locked. What must not be overwritten is refused before it is touched."""
    feeds = any(hello.store_id)
    check_is_file(path)
    try:
        header, _, _ = role_of(path)
    except FileNotFoundError:
        _must_have_folder(path)
        return None
    except FormatVersionError:
        raise
    except WeclawError as error:
        if not os.stat(path).st_size:
            return None
        raise _RefusedError(
            OTHER_STORE, f"{path} is no copy of this queue and was not touched: {error}"
        ) from None
    if feeds and header.store_id != hello.store_id:
        raise _RefusedError(
            OTHER_STORE,
            f"{path} is the file of another queue; it was not touched; name another place for the "
            "replica, or move that file away",
        )
    if feeds and header.epoch > hello.epoch:
        raise _RefusedError(
            HIGHER_EPOCH,
            f"{path} was promoted: it has epoch {header.epoch}, this file {hello.epoch}",
            header.epoch,
        )
    if feeds and header.segment_bytes != hello.segment_bytes:
        raise _RefusedError(DIVERGED, f"{path} has segments of another size; it was not touched")
    copy = Copy.open(path, _LOCK_PATIENCE_S if feeds else _FETCH_PATIENCE_S)
    if copy is not None and feeds and copy.header.epoch > hello.epoch:
        # Promoted between the two looks.
        epoch = copy.header.epoch
        copy.close()
        raise _RefusedError(HIGHER_EPOCH, f"{path} was promoted: it has epoch {epoch}", epoch)
    return copy


def _state(path: str, copy: Copy | None, hello: Hello) -> State:
    """What there is, for who feeds it or only wants to fetch it."""
    if copy is None:
        return EMPTY_STATE
    state = copy.state(check=any(hello.store_id))
    if state.is_damaged:
        logger.warning(
            "something in the copy %s is missing or can't be read; it is made anew if its primary "
            "has it all",
            path,
        )
    return state


def _look(path: str, hello: Hello) -> Copy | None:
    """The copy, to be read by one whose file may be damaged; it goes on being written by others."""
    check_is_file(path)
    try:
        if not os.stat(path).st_size:
            return None
        header, _, _ = role_of(path)
    except FileNotFoundError:
        _must_have_folder(path)
        return None
    if any(hello.store_id) and header.store_id != hello.store_id:
        raise _RefusedError(OTHER_STORE, f"{path} is the file of another queue")
    return Copy.look(path)


def _answer_reads(wire: _Wire, copy: Copy | None) -> None:
    """Give what is asked for, as far as it is there, until nothing is asked any more."""
    wire.send(STATE, _stream.pack_state(EMPTY_STATE if copy is None else copy.state()))
    while True:
        body = wire.next()
        if body is None:
            return
        if body[0] != READ:
            raise StreamError("who only looks can only read")
        offset, n = _stream.unpack_read(body)
        if copy is None:
            wire.send(SEGMENT)
        elif offset & (copy.log.segment_bytes - 1) == 0:
            wire.send(SEGMENT, copy.read_slot(offset >> copy.log.bits))
        else:
            wire.send(DATA, _stream.pack_data(offset, False), copy.read_kept(offset, n))


def _begin(path: str, hello: Hello, copy: Copy | None, command: bytes) -> Copy:
    anew, offset = _stream.unpack_begin(command)
    check_segment_bytes(hello.segment_bytes)
    if not any(hello.store_id):
        raise StreamError("it says neither whose stream it is nor what it wants")
    if anew:
        if copy is not None and read_role(copy.fd, copy.header)[0] != COPY:
            raise _RefusedError(
                NOT_A_COPY,
                f"{path} is not known to be a mere copy of this queue; it was not touched; move it "
                "away to have the copy made anew",
            )
        return Copy.create(path, hello, COPY, copy)
    if copy is None or offset != copy.tail:
        raise StreamError(f"it goes on at {offset}, where the copy does not end")
    copy.go_on(hello.epoch)
    return copy


def _receive(wire: _Wire, copy: Copy) -> None:
    """Write what comes until nothing comes any more."""
    while True:
        body = wire.next(copy)
        if body is None:
            return
        kind = body[0]
        if kind == DATA:
            offset, sync, data = _stream.unpack_data(body)
            copy.write(offset, data)
            if not sync:
                continue
        elif kind == SEGMENT:
            copy.begin_segment(body[1:])
            continue
        elif kind == HEAD:
            copy.let_go(_stream.unpack_offset(body))
            continue
        elif kind != SYNC:
            raise StreamError(f"a message of the unknown type {kind}")
        copy.sync()
        wire.send(ACK, _stream.pack_offset(copy.tail))


def _send_all(wire: _Wire, copy: Copy | None) -> None:
    """Hand the whole copy out, to restore a lost primary from it."""
    if copy is None:
        wire.send(END, _stream.pack_end(0, 0))
        return
    for offset, data in _pieces(copy):
        if offset < 0:
            wire.send(SEGMENT, data)
        else:
            wire.send(DATA, _stream.pack_data(offset, False), data)
    wire.send(END, _stream.pack_end(copy.state().head, copy.tail))


def _pieces(copy: Copy) -> Iterator[tuple[int, bytes]]:
    """(-1, slot header) and (offset, bytes) of all that is kept."""
    for segment, packed, end in copy.segments():
        yield -1, packed
        at = (segment << copy.log.bits) + len(packed)
        while at < end:
            data = copy.read(at, end)
            if not data:
                break
            yield at, data
            at += len(data)
