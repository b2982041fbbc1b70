"""The first page of a file is lost: what it said is made anew from the slots."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.cli import start

import weclaw_embedded as weclaw
from weclaw_embedded import _files, _lost_header
from weclaw_embedded._format import HEADER_BYTES, SLOT_BYTES, unpack_header

PAGE = bytes(HEADER_BYTES)
ALL = {"segment_bytes": 65536, "retention": 0}


def fill(path: Path, n: int, settled: int, **options: Any) -> list[Any]:
    """Put so many at once, settle the first of them; the bodies that are left."""
    with weclaw.Queue(path, **options) as q:
        bodies = [{"n": n, "text": "x" * 200} for n in range(n)]
        q.put_many(bodies)
        for _ in range(settled):
            q.get().ack()
    return bodies[settled:]


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def drain(q: weclaw.Queue) -> list[Any]:
    found = []
    with contextlib.suppress(weclaw.Empty):
        while True:
            with q.get(block=False) as msg:
                found.append(msg.body)
    return found


@pytest.mark.parametrize("page", [PAGE, os.urandom(HEADER_BYTES)], ids=["zeros", "garbage"])
@pytest.mark.parametrize("segment_bytes", [65536, 1 << 20])
@pytest.mark.parametrize(("n", "settled"), [(0, 0), (1, 0), (500, 100), (6000, 5000)])
def test_all_is_there_and_the_page_is_told_of(
    path: Path, n: int, settled: int, segment_bytes: int, page: bytes
) -> None:
    """Also where much was given back; and from then on it is as it was."""
    left = fill(path, n, settled, segment_bytes=segment_bytes, retention=0)
    before = unpack_header(path.read_bytes()[:HEADER_BYTES])
    overwrite(path, 0, page)
    with weclaw.Queue(path) as q:
        assert "header block was lost" in str(q.store.verify())
        assert q.qsize() == len(left)
        q.put("new")
    after = unpack_header(path.read_bytes()[:HEADER_BYTES])
    # When it was made is known no more once its first segment was given back.
    assert after._replace(created_us=before.created_us) == before
    assert after.created_us >= before.created_us
    with weclaw.Queue(path) as q:
        assert q.store.verify() == []
        assert drain(q) == [*left, "new"]


def test_with_nobody_to_say_whose_it_was_it_is_not_written(path: Path, tmp_path: Path) -> None:
    """Without the scratch folder it may have been a copy: it can be looked at and copied."""
    left = fill(path, 300, 100, **ALL)
    overwrite(path, 0, PAGE)
    shutil.rmtree(f"{path}.d")
    data = path.read_bytes()
    with pytest.raises(weclaw.CorruptError, match=r"backup --readonly"):
        weclaw.Queue(path)
    with weclaw.Queue(path, readonly=True) as q:
        assert [msg.body for msg in q.peek(1000)] == left
    out = tmp_path / "saved.wq"
    with start("backup", "--readonly", path, out) as backup:
        assert backup.wait(60) == 0
    assert path.read_bytes() == data
    with weclaw.Queue(out) as q:
        assert drain(q) == left


def test_a_folder_of_another_file_says_nothing(path: Path, tmp_path: Path) -> None:
    """The id that the folder knows must be the one that the slots were made with."""
    fill(path, 3, 0)
    fill(tmp_path / "other.wq", 3, 0)
    overwrite(path, 0, PAGE)
    shutil.rmtree(f"{path}.d")
    shutil.copytree(tmp_path / "other.wq.d", f"{path}.d")
    with pytest.raises(weclaw.CorruptError, match="a replica's copy"):
        weclaw.Queue(path)


@pytest.mark.parametrize("scratch", [True, False])
def test_a_lost_head_record_takes_nothing_and_brings_nothing_back(
    path: Path, scratch: bool
) -> None:
    """What is missing before the first segment was given back, and is no damage."""
    left = fill(path, 6000, 5000, **ALL)
    overwrite(path, 1024, bytes(64))
    if not scratch:
        shutil.rmtree(f"{path}.d")
    with weclaw.Queue(path, readonly=True) as q:
        assert q.qsize() == len(left)
    with weclaw.Queue(path) as q:
        assert q.stats().damaged == 0
        assert drain(q) == left


@given(st.binary(min_size=16, max_size=16))
def test_an_id_with_the_same_checksum_stands_for_one_that_is_lost(store_id: bytes) -> None:
    """The slots were made with no more of it than that."""
    made = _lost_header._an_id(crc32(store_id))
    assert len(made) == 16
    assert crc32(made) == crc32(store_id)
    assert made == _lost_header._an_id(crc32(store_id))


@given(data=st.data())
def test_whatever_the_bytes_are_there_is_a_header_or_none(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Garbage where slots would be is nothing to go by."""
    block = bytearray(HEADER_BYTES + 2 * 65536)
    for at in data.draw(st.lists(st.sampled_from([4096, 69568, 69632, 135104]), max_size=4)):
        slot = b"WQSG" + data.draw(st.binary(min_size=60, max_size=60))
        block[at : at + 64] = slot
    file = tmp_path_factory.mktemp("lost") / "file"
    file.write_bytes(block)
    fd = _files.open_ro(str(file))
    try:
        found = _lost_header.rebuilt(fd, None)
    finally:
        _files.close(fd)
    assert found is None or len(found.store_id) == 16


def test_a_file_that_never_was_one_stays_none(path: Path) -> None:
    """Zeros and text are no queue, however long."""
    for data in (PAGE * 40, b"text\n" * 40000):
        path.write_bytes(data)
        with pytest.raises(weclaw.NotAQueueError):
            weclaw.Queue(path)
        assert path.read_bytes() == data


def lose_headers(path: Path, which: int) -> None:
    """Overwrite both headers of a kept segment's slot, and the first page of the file."""
    with weclaw.open(path) as store:
        log = store._engine.log
        slot = log.slot_of(log.segments()[which])
        position, size = log.slot_position(slot), log.segment_bytes
    for at in (position, position + size - SLOT_BYTES):
        overwrite(path, at, bytes(SLOT_BYTES))
    overwrite(path, 0, PAGE)


@pytest.mark.parametrize("scratch", [True, False])
@pytest.mark.parametrize("settled", [0, 500])
def test_a_first_segment_lost_with_the_page_is_told_of(
    path: Path, tmp_path: Path, settled: int, scratch: bool
) -> None:
    """It is not taken for one that was given back; and repair finds it by its frames."""
    with weclaw.Queue(path, **ALL) as q:
        for n in range(1000):
            q.put({"n": n, "text": "x" * 200})
        for _ in range(settled):
            q.get().ack()
    lose_headers(path, 0)
    if not scratch:
        shutil.rmtree(f"{path}.d")
        with weclaw.Queue(path, readonly=True) as q:
            left = [msg["n"] for msg in q.peek(1000)]
            assert len(left) < 1000 - settled
            assert q.stats().damaged > 0
        return
    with weclaw.Queue(path) as q:
        assert "has no slot header" in str(q.store.verify())
        q.store.repair()
        assert q.store.verify() == []
        assert [body["n"] for body in drain(q)] == [*range(settled, 1000)]


def test_a_last_segment_lost_with_the_page_is_not_taken_for_the_first(path: Path) -> None:
    """Its frames say that it stood behind the others, and what was given back is not missed."""
    left = fill(path, 6000, 5000, **ALL)
    lose_headers(path, -1)
    with weclaw.Queue(path) as q:
        assert "made anew from what stands in it" in str(q.store.verify())
        assert drain(q) == left
        assert q.stats().damaged == 0
