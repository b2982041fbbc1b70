"""One function for each thing that reads bytes: it takes any bytes and raises nothing but what is
told to users. Used by the tests here with hypothesis, and by `atheris_target.py` for hours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

import weclaw_embedded as weclaw
from weclaw_embedded import _codecs, _files, _format, _records, _stream, _values, wal
from weclaw_embedded._records import unpack, unpack_put

SEGMENT = 65536
STORE_ID = bytes(range(16))


def header(data: bytes) -> None:
    """The header block of a file."""
    with contextlib.suppress(weclaw.NotAQueueError, weclaw.FormatVersionError, weclaw.CorruptError):
        found = _format.unpack_header(data)
        assert _format.unpack_header(_format.pack_header(found)) == found
    assert _format.unpack_head(data, STORE_ID) >= 0


def slot(data: bytes) -> None:
    """A slot header, with its checksum made right."""
    fields = data[:56].ljust(56, b"\0")
    whole = _format.SLOT_MAGIC + struct.pack("<I", crc32(fields, crc32(STORE_ID))) + fields
    for one in (data, whole):
        found = _format.slot_unpacker(STORE_ID, SEGMENT)(one)
        if found is not None:
            assert _format.pack_slot(found, STORE_ID) == one[:64]


def envelopes(data: bytes) -> None:
    """The records of a part."""
    for first in (True, False):
        with contextlib.suppress(ValueError):
            for at, length in _format.envelopes(bytes(24) + data, first).items():
                assert 24 <= at < 24 + len(data)
                assert length > 0


def record(data: bytes) -> None:
    """One record, of the type that its first byte says."""
    with contextlib.suppress(ValueError):
        said = unpack(data)
        if isinstance(said, _records.Put):
            content = unpack_put(data)
            with contextlib.suppress(weclaw.SerializationError):
                _codecs.decode(
                    content.codec,
                    content.meta.get(_records.META_CODEC),
                    content.body,
                    codec="msgpack",
                )


def stream(data: bytes) -> None:
    """What the two ends of a replica send each other, cut anyhow, with its checksum and without."""
    readers = (
        _stream.unpack_hello,
        _stream.unpack_state,
        _stream.unpack_begin,
        _stream.unpack_data,
        _stream.unpack_offset,
        _stream.unpack_refused,
        _stream.unpack_end,
        _stream.unpack_read,
    )
    for reader in readers:
        with contextlib.suppress(_stream.StreamError):
            reader(data)
    whole = _stream.message(0, data[0], data[1:]) if data else b""
    for sent in (data, whole, whole + data):
        incoming = _stream.Incoming()
        with contextlib.suppress(_stream.StreamError):
            for at in range(0, len(sent), 7):
                incoming.add(sent[at : at + 7])
                while incoming.next() is not None:
                    pass


def value(data: bytes) -> None:
    """A body, header or result in msgpack."""
    with contextlib.suppress(weclaw.SerializationError):
        _values.unpack_value(data)


def body(data: bytes) -> None:
    """A body of any codec but pickle, which is read only where it was asked for."""
    for codec in range(5):
        with contextlib.suppress(weclaw.SerializationError):
            _codecs.decode(codec, "somebody's", data, codec="json")


def file(data: bytes) -> None:
    """A whole file, of these bytes and no other."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "any.wq"
        path.write_bytes(data)
        use(path)


def frames(data: bytes) -> None:
    """A file with a frame whose payload is these bytes, checksum and all made right."""
    with written(lambda log: part(log, data)) as path:
        use(path)


def said(data: bytes) -> None:
    """A file with a record of these bytes after some that are as they should be."""
    if data:
        with written(lambda log: log.append([(data,)], 2, 10**15)) as path:
            use(path)


def payload(records: Sequence[bytes]) -> bytes:
    """The payload of a part that holds these records and nothing else."""
    packed = b""
    for data in records:
        packed += struct.pack("<II", len(data), 24 + len(packed)) + data
    return packed


def part(log: wal.Log, payload: bytes, flags: int = _format.WHOLE, time_us: int = 10**15) -> None:
    """Put a part with this payload at the end of the log, whatever is in it."""
    words = log.state.words
    offset = log.pending_tail
    payload = payload[: log.room - 32]
    if not payload:
        return
    shift, salt = log.place(offset >> log.bits)
    head = _format.PART.pack(0, len(payload), offset << 8 | flags, time_us)[4:]
    crc = _format.part_checksum(head + payload, salt, offset)
    _files.write_at(log.fd, [struct.pack("<I", crc) + head + payload], offset + shift)
    log.discard()
    words[wal.TAIL] = offset + 24 + len(payload)


@contextlib.contextmanager
def written(write: Callable[[wal.Log], object]):  # type: ignore[no-untyped-def]
    """A small queue file, to which something was written past the library's own care."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "made.wq"
        with open(_base(), "rb") as source:
            path.write_bytes(source.read())
        fd = _files.open_rw(str(path))
        try:
            log = wal.Log(fd, wal.read_file_header(fd), wal.LogState())
            log.recover()
            write(log)
            log.write()
        finally:
            _files.close(fd)
        yield path


_made: list[str] = []


def _base() -> str:
    """A queue with a message in each state, made once."""
    if not _made:
        directory = tempfile.mkdtemp(prefix="weclaw-fuzz-")
        path = os.path.join(directory, "base.wq")
        with weclaw.Queue(path, segment_bytes=SEGMENT, retention=None) as q:
            q.put_many(["done", "dead", "ready", "last"])
            q.get().ack(result=1)
            q.get().fail("no")
            q.put("later", delay=10**6)
            q.put("k1", key="k")
            q.put("k2", key="k")
        _made.append(path)
    return _made[0]


def use(path: Path) -> None:
    """Do all that a user does, twice; whatever is raised is one of ours."""
    for _ in range(2):
        with contextlib.suppress(weclaw.WeclawError), weclaw.open(path) as store:
            store.verify()
            groups = [(info.topic, info.group) for info in store.groups()]
            for topic, group in [("default", "default"), *groups[:3]]:
                with contextlib.suppress(ValueError):  # a name no topic can be given
                    _use_queue(store.queue(topic, group=group))
    shutil.rmtree(f"{path}.d", ignore_errors=True)
    with contextlib.suppress(weclaw.WeclawError), weclaw.open(path, readonly=True) as store:
        store.queue().stats()


def _use_queue(q: weclaw.Queue) -> None:
    with contextlib.suppress(weclaw.WeclawError):
        q.stats()
        for msg in q.peek(5):
            with contextlib.suppress(weclaw.SerializationError):
                _ = msg.body, msg.headers
            q.status(msg.id)
        for letter in q.dlq.peek(3):
            with contextlib.suppress(weclaw.SerializationError):
                _ = letter.body, letter.failures
        for _ in range(3):
            msg = q.get(block=False)
            with contextlib.suppress(weclaw.SerializationError):
                _ = msg.body
            msg.nack(backoff=0.0)
        q.put("more")
        q.dlq.redrive(limit=1)


TARGETS: Sequence[Callable[[bytes], None]] = (
    header,
    slot,
    envelopes,
    record,
    stream,
    value,
    body,
    file,
    frames,
    said,
)
