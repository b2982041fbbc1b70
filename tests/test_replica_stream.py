"""A receiver that is fed anything but the stream it should get: what it keeps is a beginning."""

from __future__ import annotations

import os
import random
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.replica_tools import command, same

import weclaw_embedded as weclaw
from weclaw_embedded import _stream
from weclaw_embedded._copy import Copy
from weclaw_embedded._receiver import serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SEGMENT = 65536


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """(a primary, what its feeder sent to a copy made from nothing, over several segments)."""
    folder = tmp_path_factory.mktemp("recorded")
    path, copy, sent = folder / "tasks.wq", folder / "copy.wq", folder / "sent"
    weclaw.Queue(path, segment_bytes=SEGMENT).close()
    words = ["sh", "-c", f'tee "{sent}" | "$0" "$@"', *command(copy)]
    with weclaw.Queue(path, replica=words, replica_timeout=60.0) as q:
        for n in range(20):
            q.put({"n": n, "pad": "x" * (10_000 if n % 3 == 0 else 50)})
    same(path, copy)
    return path, sent.read_bytes()


def messages(data: bytes) -> list[bytes]:
    found = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        found.append(data[: 8 + length])
        data = data[8 + length :]
    return found


def feed(copy: Path, data: bytes) -> int:
    """What the receiver makes of it."""
    stream = copy.with_name("stream")
    stream.write_bytes(data)
    with open(stream, "rb") as stdin, open(os.devnull, "wb") as stdout:
        return serve(str(copy), stdin, stdout)


def is_beginning(primary: Path, copy: Path) -> int:
    """How far the copy goes; all of it is what the primary has at the same offsets."""
    found = Copy.look(str(copy)) if copy.exists() else None
    if found is None:
        return 0
    first = Copy.look(str(primary))
    assert first is not None
    try:
        assert found.tail <= first.tail
        for segment in found.log.segments():
            begin = (segment << found.log.bits) + 64
            end = min(found.tail, found.log.limit(segment))
            assert found.read_kept(begin, end - begin) == first.read_kept(begin, end - begin)
        return found.tail
    finally:
        found.close()
        first.close()


def start_over(copy: Path) -> None:
    for left in copy.parent.iterdir():
        left.unlink()


def test_the_whole_stream_makes_the_whole_copy(
    recorded: tuple[Path, bytes], tmp_path: Path
) -> None:
    """As a yardstick for the others."""
    path, data = recorded
    copy = tmp_path / "copies" / "copy.wq"
    copy.parent.mkdir()
    assert feed(copy, data) == 0
    same(path, copy)
    assert {message[8] for message in messages(data)} >= {
        _stream.HELLO,
        _stream.BEGIN,
        _stream.SEGMENT,
        _stream.DATA,
    }


def places(data: bytes) -> list[int]:
    """Every byte of the first of each kind of message, and some within each message."""
    rng = random.Random(1)
    at, found, seen = 0, [], set()
    for message in messages(data):
        if message[8] not in seen:
            seen.add(message[8])
            found += range(at, at + min(len(message), 60))
        found += [at, at + 4, at + 8, at + len(message) - 1, at + rng.randrange(len(message))]
        at += len(message)
    return sorted(set(found))


@pytest.mark.parametrize("how", ["flip", "cut", "drop", "zeros"])
def test_a_stream_spoilt_at_any_byte_is_noticed(
    recorded: tuple[Path, bytes], tmp_path: Path, how: str
) -> None:
    """Nothing of it is written from there on, and the copy goes on with the next receiver."""
    path, data = recorded
    copy = tmp_path / "copies" / "copy.wq"
    copy.parent.mkdir()
    rng = random.Random(how)
    chosen = places(data)
    for at in rng.sample(chosen, 150):
        start_over(copy)
        if how == "flip":
            spoilt = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif how == "cut":
            spoilt = data[:at]
        elif how == "drop":
            spoilt = data[:at] + data[at + 1 :]
        else:
            n = rng.randrange(1, 4000)
            spoilt = data[:at] + bytes(n) + data[at + n :]
        status = feed(copy, spoilt)
        assert status == 1 or how in ("cut", "zeros", "drop"), at
        is_beginning(path, copy)
        assert [p.name for p in copy.parent.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("seed", range(4))
def test_messages_in_another_order_are_noticed(
    recorded: tuple[Path, bytes], tmp_path: Path, seed: int
) -> None:
    """One left out, sent twice or moved; and with its number and checksum made right."""
    path, data = recorded
    copy = tmp_path / "copies" / "copy.wq"
    copy.parent.mkdir()
    rng = random.Random(seed)
    whole = messages(data)
    for _ in range(40):
        start_over(copy)
        some: list[Any] = list(whole)
        what = rng.choice(("drop", "twice", "swap", "other"))
        at = rng.randrange(len(some))
        if what == "drop":
            del some[at]
        elif what == "twice":
            some.insert(rng.randrange(at, len(some)), some[at])
        elif what == "swap":
            other = rng.randrange(len(some))
            some[at], some[other] = some[other], some[at]
        else:  # of another type
            some[at] = some[at][:8] + bytes([rng.randrange(32)]) + some[at][9:]
        if rng.random() < 0.7:
            some = [_stream.message(n, one[8], one[9:]) for n, one in enumerate(some)]
        feed(copy, b"".join(some))
        is_beginning(path, copy)


def test_what_comes_after_a_cut_goes_on_where_it_was(
    recorded: tuple[Path, bytes], tmp_path: Path
) -> None:
    """The copy that a cut stream left is continued by its primary."""
    path, data = recorded
    place = tmp_path / "primary.wq"
    copy = tmp_path / "copies" / "copy.wq"
    copy.parent.mkdir()
    for at in random.Random(3).sample(range(len(data) // 2, len(data)), 5):
        start_over(copy)
        shutil.copy(path, place)
        feed(copy, data[:at])
        before = is_beginning(path, copy)
        with weclaw.Queue(place, replica=copy) as q:
            q.put("more")
        same(place, copy)
        assert before
        shutil.rmtree(f"{place}.d")
