"""A log whose last slot has lost its headers, or all there was: nothing goes without a word."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.helpers.processes import Child
from tests.helpers.queues import drain, scratch
from tests.wal_tools import bodies, create, opened, put, sync

import weclaw_embedded as weclaw
from weclaw_embedded._format import HEADER_BYTES, SLOT_BYTES

SEGMENT = 65536
BODIES = [f"{n:06d}" + "x" * 3000 for n in range(50)]


def put_all(pipe, path, bodies):
    with weclaw.Queue(path, segment_bytes=65536) as q:
        for body in bodies:
            q.put(body)
    pipe.send(None)


def make(path: Path) -> None:
    with Child(put_all, path, BODIES) as child:
        child.hear()
        child.end()


def slot_of_last(path: Path) -> int:
    """Where the slot of the last segment begins in the file."""
    data = path.read_bytes()
    slots = {
        int.from_bytes(data[at + 8 : at + 16], "little"): at
        for at in range(HEADER_BYTES, len(data), SEGMENT)
        if data[at : at + 4] == b"WQSG"
    }
    return slots[max(slots)]


def write(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip_headers(path: Path, slot: int) -> None:
    """One bit in each of the two headers of a slot."""
    for at in (slot + 20, slot + SEGMENT - SLOT_BYTES + 20):
        write(path, at, bytes([path.read_bytes()[at] ^ 1]))


@pytest.mark.parametrize("kept", [True, False], ids=["scratch", "no scratch"])
def test_the_last_segment_without_headers_is_told_of_and_comes_back_whole(path, kept):
    """Both headers of the last slot are damaged: they are made anew, and verify says so."""
    make(path)
    slot = slot_of_last(path)
    before = path.read_bytes()
    flip_headers(path, slot)
    if not kept:
        shutil.rmtree(scratch(path))
    damaged = path.read_bytes()
    with weclaw.open(path, readonly=True) as store:
        ((offset, reason),) = store.verify()
        assert "both headers" in reason
        assert offset % SEGMENT == 0
    assert path.read_bytes() == damaged
    with weclaw.open(path) as store:
        assert [reason for _, reason in store.verify() if "both headers" in reason]
        q = store.queue()
        assert q.stats().damaged == 0
        assert [msg.body for msg in q.peek(100)] == BODIES
    header = slice(slot, slot + 20)
    assert path.read_bytes()[header][8:] == before[header][8:]
    with weclaw.Queue(path) as q:
        assert q.put("more")
    shutil.rmtree(scratch(path))
    with weclaw.Queue(path) as q:
        assert q._store.verify() == []
        assert drain(q) == [*BODIES, "more"]


@pytest.mark.parametrize("kept", [True, False], ids=["scratch", "no scratch"])
@pytest.mark.parametrize("how", ["zeros", "another slot's", "noise"])
def test_what_stood_in_a_slot_that_was_written_over_is_told_of(path, how, kept):
    """Of the last segment nothing is left: that something is missing is said, the rest flows."""
    make(path)
    slot = slot_of_last(path)
    data = {
        "zeros": bytes(SEGMENT),
        "another slot's": path.read_bytes()[HEADER_BYTES : HEADER_BYTES + SEGMENT],
        "noise": b"\xa5" * SEGMENT,
    }[how]
    write(path, slot, data)
    if not kept:
        shutil.rmtree(scratch(path))
    with weclaw.open(path, readonly=True) as store:
        assert store.verify() != []
    with weclaw.open(path) as store:
        found = store.verify()
        assert found != []
        q = store.queue()
        assert q.stats().damaged >= 1
        got = drain(q)
        assert 20 < len(got) < len(BODIES)
        assert got == BODIES[: len(got)]
        q.put("more")
    shutil.rmtree(scratch(path))
    with weclaw.open(path) as store:
        assert store.verify() == found
        assert drain(store.queue()) == ["more"]


def test_what_was_cut_off_does_not_come_back_though_its_frames_are_there(path):
    """Nobody vouches for what stands in a slot whose headers were erased when it was cut off."""
    with opened(create(path)) as (log, _):
        for n, body in enumerate(BODIES * 3):
            put(log, body.encode())
            if n == 10:
                sync(log)
    write(path, HEADER_BYTES + SEGMENT + 30_000, b"\xa5" * 10)  # in the second segment
    with opened(path) as (log, recovery):
        assert recovery.cut is not None
        left = bodies(log)
        assert 10 < len(left) < len(BODIES)
    data = path.read_bytes()
    slots = [data[at : at + SEGMENT] for at in range(HEADER_BYTES, len(data), SEGMENT)]
    headless = [slot for slot in slots if not slot[:SLOT_BYTES].strip(b"\0")]
    assert any(BODIES[0][6:].encode() in slot for slot in headless)
    for _ in range(2):
        with opened(path) as (log, recovery):
            assert not recovery.damaged
            assert bodies(log) == left
