"""The log: appending, reading, reuse of space, and what is left after every kind of crash."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from wal_tools import (
    SEGMENT,
    STORE_ID,
    SYNC,
    DeadlyCalls,
    Disk,
    Killed,
    attach,
    bodies,
    create,
    frames,
    opened,
    put,
    settle,
    sync,
)

from weclaw_embedded import _appending, _files, _reading, _scan, wal
from weclaw_embedded._format import (
    CHECKPOINT_FRAME,
    END_RECORD_AT,
    HEAD_RECORD_AT,
    HEADER_BYTES,
    MAX_OFFSET,
    PART_BYTES,
    POLICY_SHIFT,
    SLOT_BYTES,
    VOUCH,
    SlotHeader,
    Stretch,
    pack_end,
    pack_slot,
)
from weclaw_embedded.errors import CorruptError, DiskFullError, StorageError
from weclaw_embedded.wal import (
    COMMIT,
    HEAD,
    LAST,
    LAST_FRAME,
    SLOTS,
    SPARES,
    TAIL,
    WRITING,
    Alike,
    Frame,
    Log,
    LogState,
)

YEAR_2026_US = 1_790_000_000_000_000


def allocated(fd: int) -> int:
    """The bytes a file takes from its file system, holes not counted."""
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return create(tmp_path / "log.wq")


# Appending and reading --------------------------------------------------------------------------


def test_two_large_frames_read_in_turns_are_each_read_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of one frame and results of another cost no more in turns than in a row."""
    with opened(path) as (log, _):
        first = put(log, *(b"message %d" % n for n in range(100)))
        second = put(log, *(b"result %d" % n for n in range(100)))
        checked: list[int] = []
        real = _reading.check_part

        def check_part(log: Log, offset: int, stop: int) -> tuple[int, int, bytes]:
            checked.append(offset)
            return real(log, offset, stop)

        monkeypatch.setattr(_reading, "check_part", check_part)
        for n, (one, other) in enumerate(zip(first, second, strict=True)):
            assert (log.read(one), log.read(other)) == (b"message %d" % n, b"result %d" % n)
        assert len(checked) == 2


def test_a_record_is_found_by_its_offset_alone(path: Path) -> None:
    """Records of one or many pieces, alone or several in a frame, are read back by offset."""
    with opened(path) as (log, _):
        one = log.append([(b"a", b"bc")], SYNC, 5)
        several = log.append([(b"d",), (b"", b"ef"), (bytearray(b"g"), memoryview(b"h"))], 0, 6)
        log.write()
        assert [log.read(n) for n in one + several] == [b"abc", b"d", b"ef", b"gh"]
        assert [log.read_with_time(n)[1] for n in one + several] == [5, 6, 6, 6]
        assert bodies(log) == [b"abc", b"d", b"ef", b"gh"]
        first, second = frames(log)
        assert [one.flags >> POLICY_SHIFT & 3 for one in (first, second)] == [SYNC, 0]
        assert first.end == second.offset == one[0] + 8 + 3
        assert second.end == log.state.words[TAIL]


def test_nothing_is_visible_before_it_is_written(path: Path) -> None:
    """Pending frames are not in the log; discarded, they leave no trace."""
    with opened(path) as (log, _):
        before = log.state.words.tolist()
        offsets = log.append([(b"x",)], SYNC, 1)
        log.append([(b"y" * 3 * SEGMENT,)], SYNC, 1)
        assert log.pending_tail > log.state.words[TAIL]
        with pytest.raises(LookupError):
            log.read(offsets[0])
        log.discard()
        assert log.state.words[TAIL] == before[TAIL] == log.pending_tail
        assert bodies(log) == []
        assert put(log, b"z") == offsets
        assert log.verify() == []


def test_no_bytes_of_a_body_pass_for_a_record(path: Path) -> None:
    """An offset inside a body, an envelope or nowhere is a LookupError, whatever is there."""
    with opened(path) as (log, _):
        inner = put(log, b"inner" * 20)[0]
        shift, _ = log.place(0)
        copy = _files.read_at(log.fd, 200, inner - PART_BYTES + shift)
        outer = put(log, copy, b"\1\0\0\0\x20\0\0\0" * 50)
        for offset in (outer[0] + 8 + PART_BYTES, outer[1] + 8, outer[0] + 1, 0, 3, 64, 1 << 40):
            with pytest.raises(LookupError):
                log.read(offset)
        assert log.read(outer[0]) == copy


@pytest.mark.parametrize("size", [1, SEGMENT - 184, SEGMENT - 152, SEGMENT, 5 * SEGMENT + 3])
def test_frames_go_on_in_the_next_segments(path: Path, size: int) -> None:
    """A record larger than what is left of a segment, or than many of them, is one record."""
    rng = random.Random(size)
    body = rng.randbytes(size)
    with opened(path) as (log, _):
        offsets = put(log, b"before", body, b"after")
        put(log, b"next")
        sync(log)
        assert [log.read(n) for n in offsets] == [b"before", body, b"after"]
        assert log.read_with_time(offsets[1])[1] == 1000
        assert len(frames(log)) == 2
        assert log.verify() == []
    with opened(path) as (log, recovery):
        assert bodies(log) == [b"before", body, b"after", b"next"]
        assert recovery.damaged == []
        assert recovery.torn_bytes == 0


def test_every_fit_at_the_end_of_a_segment_reads_back(path: Path) -> None:
    """However few bytes are left of a segment, what is put next is whole."""
    rng = random.Random(1)
    with opened(path) as (log, _):
        expected = []
        for left in range(160):
            room = log.limit(log.state.words[LAST]) - log.state.words[TAIL]
            if room < 200 + left:
                filler = b""
            else:
                filler = rng.randbytes(room - PART_BYTES - 8 - left)
            several = [rng.randbytes(rng.randint(1, 40)) for _ in range(6)]
            for group in ([filler] if filler else [], several):
                if group:
                    expected += group
                    offsets = put(log, *group)
                    assert [log.read(n) for n in offsets] == group
        assert bodies(log) == expected
        sync(log)
        assert log.verify() == []
    with opened(path) as (log, _):
        assert bodies(log) == expected


def test_a_record_of_100_mb_is_one_record(tmp_path: Path) -> None:
    """A 100 MB record goes over a hundred segments, uncopied on its way out, and reads back."""
    path = create(tmp_path / "log.wq", 1 << 20)
    body = random.Random(3).randbytes(1 << 20) * 100
    with opened(path) as (log, _):
        tracemalloc.start()
        offsets = log.append([(b"head", body)], SYNC, 1)
        log.write()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10 << 20
        assert log.read(offsets[0]) == b"head" + body
        assert len(log.segments()) > 100
        put(log, b"after")
        log.free(log.state.words[LAST] - 1)
        settle(log)
        log.trim()
        assert allocated(log.fd) < 8 << 20
    with opened(path) as (log, _):
        assert bodies(log)[-1] == b"after"


@pytest.mark.parametrize("start", [b"", b"st", b"s" * 5000])
@pytest.mark.parametrize("largest", [1, 700, 90_000, 300_000])
def test_records_that_begin_alike_are_laid_out_as_if_they_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, largest: int
) -> None:
    """Byte for byte, at the same offsets, be it one part, several segments, or large records."""
    rng = random.Random(largest)
    rests = [rng.randbytes(rng.randint(1, largest)) for _ in range(4 if largest > 700 else 300)]
    for module in (wal, _appending):
        monkeypatch.setattr(module, "new_salt", lambda: 7)
    files = [create(tmp_path / name) for name in ("alike", "each")]
    told = []
    for file, records in zip(
        files, (Alike(start, rests), [(start, rest) for rest in rests]), strict=True
    ):
        with opened(file) as (log, _):
            put(log, b"first")
            told.append(log.append(records, SYNC, 1000))
            log.write()
            assert bodies(log) == [b"first", *(start + rest for rest in rests)]
    assert told[0] == told[1]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_has_no_records_or_no_bytes_is_refused(path: Path) -> None:
    """An empty frame or record is a ValueError and leaves nothing pending."""
    with opened(path) as (log, _):
        empty = Alike(b"", [b"a", b""])
        for records in ([], [()], [(b"",)], [(b"a",), (b"",)], empty):
            with pytest.raises(ValueError):
                log.append(records, SYNC, 1)
        log.write()
        assert bodies(log) == []


def test_frames_start_at_any_boundary(path: Path) -> None:
    """frames() can begin at every frame."""
    rng = random.Random(7)
    with opened(path) as (log, _):
        for _ in range(120):
            put(log, *[rng.randbytes(rng.choice((5, 300, 9000))) for _ in range(rng.randint(1, 3))])
        tail = log.state.words[TAIL]
        everything = frames(log)
        for i in range(0, len(everything), 7):
            assert list(log.frames(everything[i].offset, tail)) == everything[i:]
        unchecked = _scan.walk(log, log.head_offset, everything[9].end, check=False)
        assert list(unchecked) == everything[:10]
        assert log.last_frame[0] == everything[-1].offset
        assert log.ends_with(tail, *log.last_frame)
        assert not log.ends_with(everything[-2].end, *log.last_frame)
        assert not log.ends_with(tail + 1, *log.last_frame)


@pytest.mark.parametrize("seed", range(6))
def test_stretches_tell_the_frames_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Tiny and large records, alone and together, over windows and segments: none is missed, and
    place and time of each are its own. Salts that a place carries over 2**32 change nothing.
    """
    rng = random.Random(seed)
    for module in (wal, _appending):
        monkeypatch.setattr(module, "new_salt", lambda: rng.choice((2**32 - 1, 2**32 - 2**18, 1)))
    path = create(tmp_path / "log.wq", 1 << 20)
    written: dict[int, tuple[int, bytes]] = {}
    largest = rng.choice((9, 60, 500, 400_000))
    with opened(path) as (log, _):
        for time_us in range(1500 if largest < 1000 else 60):
            n = rng.choice((1, 1, 1, 2, 30))
            bodies = [rng.randbytes(rng.randint(1, largest) // n + 1) for _ in range(n)]
            flags = CHECKPOINT_FRAME if rng.randrange(50) == 0 else 0
            offsets = log.append([(body,) for body in bodies], rng.randrange(4), time_us, flags)
            log.write()
            if rng.randrange(3) == 0:
                sync(log)
            written.update(zip(offsets, ((time_us, body) for body in bodies), strict=True))
        tail = log.state.words[TAIL]
        found: dict[int, tuple[int, bytes]] = {}
        highest = 0
        for one in log.stretches(log.head_offset, tail, on_damage=lambda *what: pytest.fail(what)):
            if isinstance(one, Frame):
                found.update((offset, (one.time_us, body)) for offset, body in one.records)
            else:
                found.update((offset, (time_us, body)) for offset, time_us, (body,) in one.told())
                heads = [int.from_bytes(body[:8], "little") for _, _, (body,) in one.told()]
                short = [len(body) < 8 for _, _, (body,) in one.told()]
                assert one.heads == [
                    -1 if is_short else head for head, is_short in zip(heads, short, strict=True)
                ]
                assert one.is_boundary(one.last)
                assert one.is_boundary(one.end)
                assert not one.is_boundary(one.end - 1)
            assert one.commit >= highest
            highest = one.commit
        assert list(found.items()) == list(written.items())
        alone = {at: (f.time_us, body) for f in frames(log) for at, body in f.records}
        assert alone == written


def test_a_checkpoint_is_found_after_reopening(path: Path) -> None:
    """checkpoint() is the latest one, kept by the headers of segments begun after it."""
    with opened(path) as (log, _):
        assert log.checkpoint() == 0
        first = log.append([(b"check",)], 0, 1, CHECKPOINT_FRAME)[0]
        log.write()
        for _ in range(10):
            put(log, bytes(20_000))
        assert log.checkpoint() == first
    with opened(path) as (log, _):
        assert log.checkpoint() == first
        assert log.read(first) == b"check"
        latest = log.append([(b"check 2",)], 0, 1, CHECKPOINT_FRAME)[0]
        log.write()
        log.free(log.state.words[LAST] - 1)
        assert log.checkpoint() == latest
    with opened(path) as (log, _):
        assert log.checkpoint() == latest


# Several processes ------------------------------------------------------------------------------


def test_another_process_sees_what_was_written(path: Path) -> None:
    """Logs that share one state follow each other's frames, segments, freeing and growth."""
    state = LogState()
    one, two = attach(path, state), attach(path, state)
    one.recover()
    rng = random.Random(5)
    written: dict[int, bytes] = {}
    for step in range(300):
        writer, reader = (one, two) if rng.random() < 0.5 else (two, one)
        body = rng.randbytes(rng.choice((10, 500, 30_000)))
        written[put(writer, body)[0]] = body
        offset = rng.choice(list(written))
        if offset >= reader.head_offset:
            assert reader.read(offset) == written[offset]
        else:
            with pytest.raises(LookupError):
                reader.read(offset)
        if step % 20 == 19:
            sync(writer)
            writer.free(writer.state.words[LAST] - 1)
            settle(writer)
            reader.trim(1)
    assert bodies(one) == bodies(two)
    assert one.verify() == two.verify() == []
    assert state.words[SLOTS] < 20
    for log in (one, two):
        _files.close(log.fd)


def test_few_records_that_are_alone_in_their_frames_are_told_as_the_walk_tells_them(
    path: Path,
) -> None:
    """And nothing is told of anything else: two in a frame, what a Checkpoint begins, a segment's
    end, a tail within a frame, or frames in which one byte is another.
    """
    state = LogState()
    writer, reader = attach(path, state), attach(path, state)
    writer.recover()
    starts = [state.words[TAIL]]
    for n, body in enumerate((b"a", b"b" * 300, b"c" * 8, b"d" * 21)):
        put(writer, body, time_us=1000 + n)
        starts.append(state.words[TAIL])
        sync(writer)
    tail = starts.pop()
    for start in starts:
        told = reader.alone(start, tail)
        assert told is not None
        (found,) = reader.stretches(start, tail, on_damage=lambda *what: pytest.fail(str(what)))
        assert isinstance(found, Stretch)
        assert told == found.told()
        assert reader.last_frame == writer.last_frame
        for offset, time_us, (body,) in told:
            assert reader.read_with_time(offset) == (body, time_us)
    assert reader.alone(tail, tail) is None
    for end in range(starts[1] + 1, starts[2]):
        assert reader.alone(starts[1], end) is None
    shift, _ = reader.place(0)
    for at in range(starts[2], tail):
        (byte,) = _files.read_at(writer.fd, 1, at + shift)
        _files.write_at(writer.fd, [bytes((byte ^ 1,))], at + shift)
        assert reader.alone(starts[2], tail) is None
        _files.write_at(writer.fd, [bytes((byte,))], at + shift)
    assert reader.alone(starts[2], tail) is not None
    for group, flags in (([b"e", b"f"], 0), ([b"g"], CHECKPOINT_FRAME), ([b"h" * 5000], 0)):
        start = state.words[TAIL]
        writer.append([(body,) for body in group], SYNC, 1000, flags)
        writer.write()
        assert reader.alone(start, state.words[TAIL]) is None
    while state.words[LAST] == 0:
        start = state.words[TAIL]
        put(writer, b"i" * 1000)
    assert reader.alone(start, state.words[TAIL]) is None
    for log in (writer, reader):
        _files.close(log.fd)


def test_what_another_wrote_and_was_just_walked_is_at_hand(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records and which frame is the last are known without another look at the file."""

    def fail(*_: object) -> None:
        raise AssertionError

    state = LogState()
    writer, reader = attach(path, state), attach(path, state)
    writer.recover()
    for group in ([b"a"], [b"b", b"c"], [b"d" * 100_000], [b"e"], [b"f"]):
        start = state.words[TAIL]
        offsets = put(writer, *group)
        found = list(reader.stretches(start, state.words[TAIL], on_damage=fail))[-1]
        reader.keep_at_hand(found)
        with monkeypatch.context() as patch:
            patch.setattr(_files, "read_at", fail)
            assert reader.last_frame == writer.last_frame
            if len(group) == 1 and len(group[0]) == 1:
                assert reader.read(offsets[0]) == group[0]
    put(writer, b"g")
    reader.keep_at_hand(found)  # it isn't the last any more
    assert reader.last_frame == writer.last_frame
    assert reader.read(offsets[0]) == b"f"
    for log in (writer, reader):
        _files.close(log.fd)


@pytest.mark.parametrize("largest", [9, 700, 200_000])
def test_a_frame_of_thousands_of_records_goes_over_many_segments(path: Path, largest: int) -> None:
    """Small ones, and small ones among which a large one is, are found at the offsets told."""
    rng = random.Random(largest)
    records = [rng.randbytes(rng.randint(1, min(largest, 700))) for _ in range(3000)]
    records[1500] = rng.randbytes(largest)
    with opened(path) as (log, _):
        put(log, b"first")
        offsets = put(log, *records)
        put(log, b"last")
        assert [log.read(offset) for offset in offsets] == records
        assert bodies(log) == [b"first", *records, b"last"]
        (frame,) = [frame for frame in frames(log) if len(frame.records) > 1]
        assert [offset for offset, _ in frame.records] == offsets
    with opened(path) as (log, recovery):
        assert not recovery.damaged
        assert bodies(log) == [b"first", *records, b"last"]


def test_a_reader_of_freed_and_reused_space_gets_lookup_error(path: Path) -> None:
    """A reader that is overtaken by the reuse of a slot is told so, never given other bytes."""
    state = LogState()
    writer, reader = attach(path, state), attach(path, state)
    writer.recover()
    offsets = [put(writer, bytes([n]) * 10_000)[0] for n in range(20)]
    assert reader.read(offsets[0]) == bytes([0]) * 10_000
    walk = reader.frames(0, state.words[TAIL])
    next(walk)
    writer.free(state.words[LAST] - 1)
    for _ in range(60):
        put(writer, b"new" * 4000)
        sync(writer)
    for offset in offsets[:6]:
        with pytest.raises(LookupError):
            reader.read(offset)
    with pytest.raises(LookupError):
        for _ in walk:
            pass
    for log in (writer, reader):
        _files.close(log.fd)


def test_a_record_whose_rest_is_freed_while_it_is_read_is_gone_and_not_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads a record over two segments is told that it is no longer kept, and of no damage."""
    with opened(path) as (log, _):
        (offset,) = put(log, b"x" * 100_000)
        assert log.read(offset) == b"x" * 100_000
        put(log, b"y" * 100_000)
        real = _files.read_at

        def read_at(*args: int, **how: bool) -> bytes:
            monkeypatch.undo()
            log.free(offset + 100_000 >> log.bits)
            return bytes(len(real(*args, **how)))

        monkeypatch.setattr(_files, "read_at", read_at)
        with pytest.raises(LookupError):
            log.read(offset)


@pytest.mark.parametrize("how", ["body", "header", "zeros"])
@pytest.mark.parametrize("piece", [1000, 1 << 12, 1 << 20])
def test_a_large_record_that_is_damaged_costs_only_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str, piece: int
) -> None:
    """However much longer it is than what a search has in memory at once."""
    monkeypatch.setattr(_scan, "_PIECE", piece)
    with opened(path) as (log, _):
        large = random.Random(1).randbytes(30_000)
        around = [b"before %d" % n for n in range(3)] + [b"after %d" % n for n in range(3)]
        for body in around[:3]:
            put(log, body)
        (offset,) = put(log, large)
        for body in around[3:]:
            put(log, body)
        log.append([(b"the end",)], SYNC, 1000, VOUCH)
        log.write()
        sync(log)
        at = offset - PART_BYTES + log.place(0)[0]
    begin, n = {"body": (at + 20_000, 1), "header": (at, 40), "zeros": (at, 30_032)}[how]
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(n) if how == "zeros" else b"!" * n)
    with opened(path) as (log, recovery):
        assert [spot for spot, _ in recovery.damaged] == [offset - PART_BYTES]
        assert recovery.torn_bytes == 0
        assert bodies(log)[:7] == [*around, b"the end"]


def test_a_head_that_only_a_slot_still_tells_is_recorded_before_that_is_cut_off(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may take the record and leave the torn end: what was let go of must stay so."""
    with opened(path) as (log, _):
        while log.state.words[LAST] < 6:
            put(log, b"x" * 10_000)
        sync(log)
        log.free(3)
        settle(log)  # the head is recorded
        while log.state.words[LAST] < 7:
            put(log, b"y" * 10_000)
        position = log.slot_position(log.slot_of(7))
        assert log.state.words[HEAD] == 4
    with path.open("r+b") as file:
        file.seek(HEAD_RECORD_AT)
        file.write(bytes(16))
        file.seek(position + 64)
        file.write(b"torn" * 1000)
    done: list[str] = []
    real_write, real_sync, real_fill = _files.write_at, _files.sync_data, _files.zero_fill

    def write_at(fd: int, buffers: list[bytes], offset: int) -> int:
        if offset == HEAD_RECORD_AT:
            done.append("record")
        return real_write(fd, buffers, offset)

    def sync_data(fd: int) -> None:
        done.append("sync")
        real_sync(fd)

    def zero_fill(fd: int, offset: int, n: int) -> None:
        done.append("erase")
        real_fill(fd, offset, n)

    with monkeypatch.context() as patch:
        for double in (write_at, sync_data, zero_fill):
            patch.setattr(_files, double.__name__, double)
        with opened(path) as (log, recovery):
            assert recovery.cut is not None
            assert recovery.damaged == []
            assert log.state.words[HEAD] == 4
    assert done[: done.index("erase")] == ["sync", "record", "sync"]


def test_where_the_first_segment_is_lost_nothing_is_cut_off(path: Path) -> None:
    """A log of which only an empty segment is left is refused as it is."""
    with opened(path) as (log, _):
        log.roll(1000)
        log._buffers.append(b"")
        log.write()
        position = log.slot_position(log.slot_of(0))
    with path.open("r+b") as file:
        for at in (position, position + SEGMENT - 64):
            file.seek(at)
            file.write(bytes(64))
    before = path.read_bytes()
    with pytest.raises(CorruptError), opened(path):
        pass
    assert path.read_bytes() == before


def test_a_look_up_does_not_fail_because_another_thread_forgets(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who heals what a killed process left forgets all slots, those just read too."""
    with opened(path) as (log, _):
        offsets = [put(log, bytes([n]) * 30_000)[0] for n in range(9)]
        real = log._read_table

        def read_table() -> dict[int, int]:
            found = real()
            log.forget()
            return found

        monkeypatch.setattr(log, "_read_table", read_table)
        for offset in offsets:
            log.forget()
            log.forget_read()
            assert len(log.read(offset)) == 30_000
            log.forget()
            assert log.read_slot(log.slot_of(offset >> log.bits)) is not None


def test_what_is_freed_while_it_is_checked_is_no_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check goes on with what is kept, wherever it is overtaken."""
    with opened(path) as (log, _):
        for n in range(40):
            put(log, bytes([n]) * 10_000)
        real = log.segments

        def segments() -> list[int]:
            found = real()
            log.free(found[0])
            real()  # another thread looks, and forgets it
            return found

        with monkeypatch.context() as patch:
            patch.setattr(log, "segments", segments)
            assert log.verify() == []

        def seen(_: int, __: int) -> None:
            log.free(log.state.words[LAST] - 1)
            settle(log)
            for _ in range(10):
                put(log, b"new" * 4000)

        assert log.verify(seen) == []


def test_reading_goes_on_in_threads_while_others_write_and_free(path: Path) -> None:
    """Threads that read without a lock get true bytes or LookupError, whatever goes on."""
    with opened(path) as (log, _):
        written = {put(log, *bodies)[0]: bodies[0] for bodies in [(b"a" * 99, b"b")] * 50}
        failures: list[BaseException] = []
        done = threading.Event()

        def read(seed: int) -> None:
            rng = random.Random(seed)
            try:
                while not done.is_set():
                    offset = rng.choice(list(written))
                    try:
                        assert log.read_with_time(offset) == (written[offset], 1000)
                    except LookupError:
                        assert offset < log.head_offset
            except Exception as error:  # noqa: BLE001  reported by the main thread
                failures.append(error)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        rng = random.Random(9)
        for n in range(600):
            group = [rng.randbytes(rng.choice((5, 500, 20_000))) for _ in range(rng.choice((1, 3)))]
            offsets = log.append([(body,) for body in group], SYNC, 1000)
            log.write()
            written.update(zip(offsets, group, strict=True))
            if n % 50 == 49:
                sync(log)
                log.free(log.segments()[-2])
                settle(log)
                log.trim()
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []


def test_a_healed_log_still_reads_what_it_remembers(path: Path) -> None:
    """heal() forgets where segments are, not what is in them."""
    with opened(path) as (log, _):
        offsets = put(log, b"one") + put(log, b"two")
        assert log.read(offsets[0]) == b"one"
        log.state.words[WRITING] = 1
        log.heal()
        assert [log.read(n) for n in offsets] == [b"one", b"two"]


# Space ------------------------------------------------------------------------------------------


def test_freed_slots_are_reused_once_that_is_safe(path: Path) -> None:
    """A log that is freed behind its tail stays as big as what it keeps."""
    with opened(path) as (log, _):
        for n in range(400):
            put(log, bytes([n % 256]) * 7000)
            if n % 5 == 0:
                sync(log)
            if len(log.segments()) > 2:
                log.free(log.segments()[0])
        assert _files.size(log.fd) <= HEADER_BYTES + 10 * SEGMENT
        assert log.bytes_used() <= HEADER_BYTES + 3 * SEGMENT
        assert log.verify() == []


def test_a_freed_slot_is_not_touched_before_its_reason_is_durable(path: Path) -> None:
    """Without a sync since, freed slots keep their bytes and the file grows instead."""
    with opened(path) as (log, _):
        for n in range(40):
            put(log, bytes([n + 1]) * 7000)
        last = log.state.words[LAST]
        log.free(last - 1)
        before = path.read_bytes()
        for _ in range(40):
            put(log, b"\xff" * 7000)
        after = path.read_bytes()
        for slot in range(last):
            at = HEADER_BYTES + slot * SEGMENT
            assert before[at : at + SEGMENT] == after[at : at + SEGMENT]


def test_space_goes_back_to_the_file_system(path: Path) -> None:
    """trim() cuts off or punches free slots, all but one, also where a used one is behind them."""
    with opened(path) as (log, _):
        for _ in range(200):
            put(log, os.urandom(7000))
        sync(log)
        log.free(log.state.words[LAST] - 1)
        assert log.trim() == 0, "nothing may be given back before the reason is durable"
        settle(log)
        assert log.trim() > 10 * SEGMENT
        assert allocated(log.fd) < 5 * SEGMENT
        for n in range(30):
            put(log, bytes([n + 1]) * 7000)
            sync(log)
        expected = bodies(log)
        assert log.verify() == []
    with opened(path) as (log, recovery):
        assert bodies(log) == expected
        assert recovery.damaged == []


def test_what_is_pending_keeps_its_slots(path: Path) -> None:
    """Trimming and freeing between append and write leave alone what the append was given."""
    with opened(path) as (log, _):
        for _ in range(60):
            put(log, os.urandom(7000))
        sync(log)
        log.free(log.state.words[LAST] - 1)
        settle(log)
        body = os.urandom(5 * SEGMENT)
        offset = log.append([(body,)], SYNC, 1)[0]
        log.trim(0)
        log.append([(body,)], SYNC, 1)
        log.trim(0)
        log.write()
        assert log.read(offset) == body
        assert log.verify() == []
        expected = bodies(log)
    with opened(path) as (log, _):
        assert bodies(log) == expected


def test_freeing_that_was_cut_short_is_finished_by_the_next(path: Path) -> None:
    """A process that died after moving HEAD leaves no slot that nobody uses again."""
    state = LogState()
    log, other = attach(path, state), attach(path, state)
    log.recover()
    for _ in range(60):
        put(log, bytes(7000))
    sync(log)
    state.words[WRITING] = 1
    state.words[HEAD] = state.words[LAST]
    other.heal()
    settle(other)
    other.trim(0)
    assert allocated(log.fd) < 2 * SEGMENT
    assert other.verify() == []
    for each in (log, other):
        _files.close(each.fd)


def test_the_last_free_slot_is_kept_for_finishing_work(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk puts are refused while a slot's worth of settling still goes through."""
    with opened(path) as (log, _):

        def full(*_: object) -> None:
            raise DiskFullError("full")

        monkeypatch.setattr(_files, "zero_fill", full)
        with pytest.raises(DiskFullError):
            for _ in range(1000):
                put(log, bytes(700))
        kept = bodies(log)
        assert len(kept) > 80
        with pytest.raises(DiskFullError):
            for _ in range(1000):
                put(log, bytes(700), spare=True)
        settled = len(bodies(log)) - len(kept)
        assert settled > 80
        assert log.state.words[SPARES] == 0
        with pytest.raises(DiskFullError):
            put(log, b"x")
        monkeypatch.undo()
        assert bodies(log) == kept + [bytes(700)] * settled
        put(log, b"room again")
        assert bodies(log)[-1] == b"room again"
        assert log.state.words[WRITING] == 0
        assert log.verify() == []


def test_free_space_is_used_before_a_full_disk_is_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the file can't grow, freed slots are used; those that wait for a sync after it, only."""
    with opened(path) as (log, _):
        for _ in range(100):
            put(log, bytes(700), spare=True)
            put(log, os.urandom(7000))
        log.free(log.state.words[LAST] - 1)
        end = _files.size(log.fd)
        real = _files.zero_fill

        def limited(fd: int, offset: int, n: int) -> None:
            if offset + n > end:
                raise DiskFullError("full")
            real(fd, offset, n)

        monkeypatch.setattr(_files, "zero_fill", limited)
        with pytest.raises(DiskFullError):
            for _ in range(80):
                put(log, b"\xee" * 7000)
        settle(log)
        for _ in range(80):
            put(log, b"\xee" * 7000)
        assert log.verify() == []


def test_a_write_that_hits_a_full_disk_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DiskFullError in the middle of writing takes back all of it, whole frames too."""
    deadly = DeadlyCalls(monkeypatch, random.Random(1))
    with opened(path) as (log, _):
        put(log, b"kept")
        for n in range(1, 4):
            for body in (b"small", bytes(3 * SEGMENT)):
                log.append([(b"whole frame",)], SYNC, 1, spare=True)
                log.append([(body,)], SYNC, 1, spare=True)
                deadly.arm(n, DiskFullError("full"))
                try:
                    log.write()
                except DiskFullError:
                    assert log.state.words[WRITING] == 0
                else:
                    pytest.skip("fewer calls than expected") if n == 1 else None
                finally:
                    deadly.disarm()
        found = bodies(log)
        assert found[0] == b"kept"
        assert found.count(b"whole frame") == (len(found) - 1) / 2
        put(log, b"next")
        assert bodies(log) == [*found, b"next"]
        assert log.verify() == []


# Crashes of processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_another_process_heals_what_a_killed_one_left(
    path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Killed or out of space at any storage call, what returned is there, frames stay whole."""
    rng = random.Random(seed)
    deadly = DeadlyCalls(monkeypatch, rng)
    state = LogState()
    logs = [attach(path, state), attach(path, state)]
    logs[0].recover()
    ledger: list[tuple[int, bytes]] = []
    for step in range(60):
        log = rng.choice(logs)
        pending: list[list[tuple[int, bytes]]] = []
        full = rng.random() < 0.5
        if rng.random() < 0.4:
            deadly.arm(rng.randint(1, 4), DiskFullError("full") if full else None)
        try:
            action = rng.random()
            if action < 0.8:
                for _ in range(rng.choice((1, 1, 2, 4))):
                    sizes = rng.choices((1, 50, 440, 3000, 20_000, 150_000), k=rng.choice((1, 3)))
                    group = [rng.randbytes(size) for size in sizes]
                    records = [(body,) for body in group]
                    offsets = log.append(records, SYNC, step + 1, spare=rng.random() < 0.5)
                    pending.append(list(zip(offsets, group, strict=True)))
                log.write()
                ledger += [record for frame in pending for record in frame]
                pending = []
            elif action < 0.9 and len(log.segments()) > 2:
                log.free(rng.choice(log.segments()[:-1]))
            else:
                if rng.random() < 0.5:
                    settle(log)
                log.trim(rng.randint(0, 2))
                sync(log)
        except Killed:
            deadly.disarm()
            _files.close(log.fd)
            logs[logs.index(log)] = attach(path, state)
            if state.words[WRITING]:
                rng.choice(logs).heal()
        except DiskFullError:
            deadly.disarm()
            log.discard()
            assert state.words[WRITING] == 0
            pending = []
        deadly.disarm()
        other = rng.choice(logs)
        found = [record for frame in frames(other) for record in frame.records]
        expected = [record for record in ledger if record[0] >= other.head_offset]
        assert found[: len(expected)] == expected
        extra = found[len(expected) :]
        in_doubt = [[record for frame in pending[:n] for record in frame] for n in range(5)]
        assert extra in in_doubt
        ledger += extra
    assert logs[0].verify() == []
    for log in logs:
        _files.close(log.fd)
    with opened(path, commit=state.words[COMMIT], cache_is_true=True) as (log, recovery):
        assert recovery.damaged == []
        assert recovery.tail == state.words[TAIL]
        assert [b for n, b in ledger if n >= log.head_offset] == bodies(log)


def test_kill_9_of_a_writing_process_loses_nothing_it_reported(tmp_path: Path) -> None:
    """A real process is killed while it writes; all it reported is read back by the next."""
    for delay_s in (0.05, 0.1, 0.2):
        path = create(tmp_path / f"{delay_s}.wq")
        code = (
            "import os, sys\n"
            "from weclaw_embedded import _files\n"
            "from weclaw_embedded.wal import Log, LogState, read_file_header\n"
            f"fd = _files.open_rw({str(path)!r})\n"
            "log = Log(fd, read_file_header(fd), LogState())\n"
            "log.recover()\n"
            "n = 0\n"
            "while True:\n"
            "    offset = log.append([(b'%d,' % n * (1 + n % 3000),)], 2, 1 + n)[0]\n"
            "    log.write()\n"
            "    os.write(1, b'%d %d\\n' % (n, offset))\n"
            "    n += 1\n"
        )
        source = str(Path(_files.__file__).parent.parent)
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": source},
        )
        assert child.stdout is not None
        with child, child.stdout:
            reported = [child.stdout.readline()]
            time.sleep(delay_s)
            child.send_signal(signal.SIGKILL)
            reported += child.stdout.read().splitlines()
        with opened(path, cache_is_true=True) as (log, recovery):
            assert recovery.damaged == []
            for line in reported:
                if len(line.split()) == 2:
                    n, offset = map(int, line.split())
                    assert log.read(offset) == b"%d," % n * (1 + n % 3000)
            put(log, b"more")
            expected = bodies(log)
        with opened(path) as (log, recovery):
            assert bodies(log) == expected


# Power cuts and failing disks -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_after_a_power_cut_the_log_is_a_prefix_with_all_that_was_synced(
    path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever sectors the disk kept of what wasn't synced, nothing synced is lost or reordered."""
    rng = random.Random(seed)
    disk = Disk(path, monkeypatch)
    ledger: list[tuple[int, bytes]] = []
    log = attach(path)
    log.recover()
    for _ in range(3):
        announced = None
        for step in range(rng.randint(0, 50)):
            action = rng.random()
            if action < 0.7:
                sizes = rng.choices((1, 10, 440, 3000, 20_000, 70_000), k=rng.choice((1, 1, 5)))
                group = [rng.randbytes(size) for size in sizes]
                ledger += zip(put(log, *group, time_us=YEAR_2026_US + step), group, strict=True)
            elif action < 0.8:
                # The steps of freed slots, one sync apart: power may fail between any two.
                sync(log)
                if announced is not None:
                    log.settled(announced)
                    announced = None
            elif action < 0.9:
                announced = log.announce()
            elif action < 0.95 and len(log.segments()) > 2:
                log.free(rng.choice(log.segments()[:-1]))
            else:
                log.trim(rng.choice((0, 1, 3)))
        commit = log.state.words[COMMIT]
        disk.cut_power(rng)
        _files.close(log.fd)
        log = attach(path)
        known = commit if rng.random() < 0.5 else 0
        recovery = log.recover(known, whole=rng.random() < 0.7)
        assert recovery.damaged == []
        found = [record for frame in frames(log) for record in frame.records]
        kept = [record for record in ledger if record[0] >= log.head_offset]
        assert kept[: len(found)] == found
        assert all(offset >= commit - 8 for offset, _ in kept[len(found) :])
        ledger = found
        assert log.verify() == []
        with opened(path) as (again, second):
            assert second.torn_bytes == 0
            assert bodies(again) == [body for _, body in found]
    _files.close(log.fd)


@pytest.mark.parametrize("seed", range(30))
def test_a_failed_sync_is_made_good_or_cut_at_the_next_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """What the kernel dropped after a failed sync is written again before the disk is believed."""
    rng = random.Random(seed)
    disk = Disk(path, monkeypatch)
    log = attach(path)
    log.recover()
    expected = []
    for _ in range(rng.randint(1, 50)):
        expected += [rng.randbytes(size) for size in rng.choices((1, 440, 3000, 90_000), k=2)]
        put(log, *expected[-2:])
        if rng.random() < 0.1:
            sync(log)
    disk.failing = rng
    with pytest.raises(OSError):
        log.sync()
    disk.failing = None
    commit = log.state.words[COMMIT]
    _files.close(log.fd)
    with opened(path, commit=commit, failed=True) as (log, recovery):
        assert recovery.damaged == []
        assert bodies(log) == expected
        put(log, b"more")
        sync(log)
    disk.cut_power(rng)
    with opened(path) as (log, _):
        assert bodies(log) == [*expected, b"more"]


def test_recovery_on_a_failing_disk_raises_and_promises_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk refuses the sync of recovery, that is an error, not a success."""
    disk = Disk(path, monkeypatch)
    with opened(path) as (log, _):
        put(log, b"x")
    disk.failing = random.Random(1)
    log = attach(path)
    with pytest.raises(OSError):
        log.recover()
    _files.close(log.fd)


def test_a_torn_tail_is_cut_quietly_at_every_byte(path: Path, tmp_path: Path) -> None:
    """Cut the last frame short anywhere: those before it are kept, nothing is called damage."""
    with opened(path) as (log, _):
        put(log, b"first")
        start = log.state.words[TAIL]
        put(log, b"second record")
        end = log.state.words[TAIL]
        shift, _ = log.place(0)
    whole = path.read_bytes()
    for cut in range(start, end):
        image = bytearray(whole)
        image[cut + shift : end + shift] = bytes(end - cut)
        copy = tmp_path / "copy.wq"
        copy.write_bytes(image)
        with opened(copy) as (log, recovery):
            assert recovery.damaged == []
            assert bodies(log) == [b"first"]
            assert (recovery.torn_bytes > 0) == any(image[start + shift : end + shift])
            put(log, b"third")
        with opened(copy) as (log, recovery):
            assert recovery.torn_bytes == 0
            assert bodies(log) == [b"first", b"third"]


def test_the_last_frame_is_known_behind_a_cut(path: Path) -> None:
    """What queue time goes on from, and an index is believed by, is found though the log goes on in
    a segment with nothing in it yet.
    """
    with opened(path) as (log, _):
        put(log, b"kept", time_us=YEAR_2026_US)
        sync(log)
        last = log.last_frame
        torn = put(log, b"torn")[0]
    image = bytearray(path.read_bytes())
    image[HEADER_BYTES + torn + 8] ^= 1
    path.write_bytes(image)
    for is_cut in (True, False):
        with opened(path) as (log, recovery):
            assert (recovery.cut is not None) is is_cut
            assert log.state.words[LAST] == 1
            assert log.last_frame == last
            assert not is_cut or log.state.words[LAST_FRAME] == last[0]
            assert log.last_time_us() == YEAR_2026_US


def test_what_was_cut_never_comes_back(path: Path, tmp_path: Path) -> None:
    """Frames beyond the cut stay dead, even when new ones end exactly where they began."""
    with opened(path) as (log, _):
        spots = [put(log, b"record %d" % n)[0] for n in range(4)]
        shift, _ = log.place(0)
    image = bytearray(path.read_bytes())
    image[spots[1] + 8 + shift] ^= 1
    path.write_bytes(image)
    with opened(path) as (log, recovery):
        assert recovery.cut == spots[1] - PART_BYTES
        assert bodies(log) == [b"record 0"]
        put(log, b"record N")
        assert bodies(log) == [b"record 0", b"record N"]
    with opened(path) as (log, _):
        assert bodies(log) == [b"record 0", b"record N"]


# Damage -----------------------------------------------------------------------------------------


def test_damage_is_what_a_later_frame_vouches_for(path: Path) -> None:
    """A bad frame below a later commit point is reported by offset, the others are kept."""
    with opened(path) as (log, _):
        spots = [put(log, b"record %d" % n)[0] for n in range(4)]
        sync(log)
        log.append([(b"clean",)], 0, 1, VOUCH)
        log.write()
        shift, _ = log.place(0)
    image = bytearray(path.read_bytes())
    image[spots[1] + 8 + shift] ^= 1
    path.write_bytes(image)
    for _ in range(2):
        with opened(path) as (log, recovery):
            assert recovery.damaged == [(spots[1] - PART_BYTES, "the checksum is wrong")]
            assert recovery.torn_bytes == 0
            assert bodies(log) == [b"record 0", b"record 2", b"record 3", b"clean"]
            assert log.verify() == recovery.damaged
            with pytest.raises(CorruptError) as caught:
                log.read(spots[1])
            assert caught.value.offset == spots[1]
            with pytest.raises(CorruptError):
                frames(log)


def test_a_known_commit_point_vouches_too(path: Path) -> None:
    """A bad last frame below the commit point of before is damage, and stays visible."""
    with opened(path) as (log, _):
        put(log, b"first")
        spot = put(log, b"second")[0]
        sync(log)
        commit = log.state.words[COMMIT]
        shift, _ = log.place(0)
    image = bytearray(path.read_bytes())
    image[spot + 9 + shift] ^= 1
    path.write_bytes(image)
    with opened(path, commit=commit) as (log, recovery):
        assert [offset for offset, _ in recovery.damaged] == [spot - PART_BYTES]
        put(log, b"third")
        assert bodies(log) == [b"first", b"third"]
    with opened(path) as (log, recovery):
        assert [offset for offset, _ in recovery.damaged] == [spot - PART_BYTES]


@pytest.mark.parametrize("n", [1, 24, 64, 500])
def test_the_end_of_the_file_cut_off_is_survived(path: Path, n: int) -> None:
    """A file cut by some bytes, or with zeros appended, opens with every complete record."""
    with opened(path) as (log, _):
        while log.state.words[LAST] < 3:
            put(log, b"x" * 5000)
        expected = bodies(log)
        log.trim(0)
    image = path.read_bytes()
    for changed in (image[:-n], image + bytes(4096)):
        path.write_bytes(changed)
        with opened(path) as (log, _):
            assert bodies(log)[: len(expected) - 13] == expected[: len(expected) - 13]
            put(log, b"more")
            kept = bodies(log)
        with opened(path) as (log, recovery):
            assert recovery.torn_bytes == 0
            assert bodies(log) == kept


def test_a_damaged_header_is_healed_from_its_second_copy(path: Path) -> None:
    """Either copy of the file's and of each slot's header can be lost without losing a record."""
    with opened(path) as (log, _):
        for _ in range(40):
            put(log, os.urandom(5000))
        sync(log)
        expected = bodies(log)
        places = [0, 2048]
        for n in log.segments():
            position = log.slot_position(log.slot_of(n))
            places += [position, position + SEGMENT - 64]
    image = path.read_bytes()
    for place in places:
        damaged = bytearray(image)
        damaged[place : place + 64] = b"\xaa" * 64
        path.write_bytes(damaged)
        with opened(path) as (log, recovery):
            assert bodies(log) == expected
            assert len(recovery.healed) == 1
            assert log.verify() == []


def test_a_lost_segment_costs_only_its_own_records(path: Path) -> None:
    """With a whole slot gone the segments before and after it are kept, and it is reported."""
    with opened(path) as (log, _):
        for n in range(60):
            put(log, b"%02d" % n * 2000)
        sync(log)
        log.append([(b"clean",)], 0, 1, VOUCH)
        log.write()
        slot = log.slot_position(log.slot_of(1))
    image = bytearray(path.read_bytes())
    image[slot : slot + SEGMENT] = bytes(SEGMENT)
    path.write_bytes(image)
    with opened(path) as (log, recovery):
        found = bodies(log)
        assert found[0] == b"00" * 2000
        assert found[-1] == b"clean"
        assert 40 < len(found) < 50
        assert SEGMENT in [offset for offset, _ in recovery.damaged]
        put(log, b"more")
        assert bodies(log) == [*found, b"more"]


def test_what_goes_on_behind_a_lost_segment_vouches_for_it(path: Path) -> None:
    """The last frame goes on behind a slot that is gone: its part there says what was durable."""
    with opened(path) as (log, _):
        for n in range(20):
            put(log, b"%02d" % n * 2000)
            sync(log)
        put(log, bytes(60_000))
        assert log.state.words[LAST] == 2
        slot = log.slot_position(log.slot_of(1))
    image = bytearray(path.read_bytes())
    image[slot : slot + SEGMENT] = bytes(SEGMENT)
    path.write_bytes(image)
    for _ in range(2):
        with opened(path) as (log, recovery):
            assert SEGMENT in [offset for offset, _ in recovery.damaged]
            assert recovery.torn_bytes == 0
            kept = bodies(log)
            assert kept[0] == b"00" * 2000
            put(log, b"more")
            assert bodies(log) == [*kept, b"more"]


def test_what_goes_on_behind_a_lost_segment_may_not_know_of_it(path: Path) -> None:
    """The same where nothing says that it was durable: a power cut may have left this."""
    with opened(path) as (log, _):
        for n in range(20):
            put(log, b"%02d" % n * 2000)
        put(log, bytes(60_000))
        slot = log.slot_position(log.slot_of(1))
    image = bytearray(path.read_bytes())
    image[slot : slot + SEGMENT] = bytes(SEGMENT)
    path.write_bytes(image)
    with opened(path) as (log, recovery):
        assert recovery.damaged == []
        kept = bodies(log)
        assert kept == [b"%02d" % n * 2000 for n in range(len(kept))]


@pytest.mark.parametrize("was_durable", [False, True])
def test_a_slot_that_claims_a_segment_far_off_holds_nothing_up(
    path: Path, was_durable: bool
) -> None:
    """Behind a number that nobody could count to what is there is kept, and its end is found."""
    far = MAX_OFFSET // SEGMENT - 9
    with opened(path) as (log, _):
        put(log, b"one")
        header = SlotHeader(far, 7, 7, log.limit(far - 1), 0, 1, 0, 1)
    packed = pack_slot(header, STORE_ID)
    image = bytearray(path.read_bytes())
    image += packed + bytes(SEGMENT - 2 * SLOT_BYTES) + packed
    if was_durable:  # so it says: else the slot is what was torn
        record = pack_end((far + 1) * SEGMENT, STORE_ID)
        image[END_RECORD_AT : END_RECORD_AT + len(record)] = record
    path.write_bytes(image)
    for _ in range(2):
        with opened(path) as (log, recovery):
            assert bool(recovery.damaged) is was_durable
            assert bodies(log) == [b"one"]
            assert was_durable or log.state.words[LAST] == 1
    for expected in ([b"one"], [b"one", b"more"]):
        with opened(path) as (log, _):
            assert log.last_frame[0] == frames(log, on_damage=lambda *_: None)[-1].offset
            assert bodies(log) == expected
            put(log, b"more")


def test_a_log_without_any_segment_is_a_typed_error(path: Path) -> None:
    """When no slot header is left, or only those of segments long freed, nothing is made up."""
    with opened(path) as (log, _):
        for _ in range(40):
            put(log, bytes(5000))
        sync(log)
        log.free(log.state.words[LAST] - 1)
        settle(log)
        log.trim(9)
        last = log.slot_position(log.slot_of(log.state.words[LAST]))
    for content in (
        path.read_bytes()[:last],
        path.read_bytes()[:HEADER_BYTES] + bytes(3 * SEGMENT),
    ):
        path.write_bytes(content)
        log = attach(path)
        with pytest.raises(CorruptError):
            log.recover()
        _files.close(log.fd)
        assert path.read_bytes() == content


@pytest.mark.parametrize("seed", range(150))
def test_any_mutation_opens_in_time_and_never_shows_other_bytes(path: Path, seed: int) -> None:
    """Flipped, moved, cut or inserted bytes: a typed error, or a log of true records."""
    rng = random.Random(seed)
    written: dict[int, bytes] = {}
    with opened(path) as (log, _):
        for n in range(rng.randint(1, 80)):
            sizes = rng.choices((1, 10, 440, 3000, 70_000), (5, 5, 5, 3, 1), k=rng.choice((1, 3)))
            group = [rng.randbytes(size) for size in sizes]
            written.update(zip(put(log, *group, time_us=YEAR_2026_US + n), group, strict=True))
            if rng.random() < 0.1 and len(log.segments()) > 2:
                log.free(log.segments()[0])
            if rng.random() < 0.2:
                sync(log)
        commit = log.state.words[COMMIT]
    path.write_bytes(_mutated(bytearray(path.read_bytes()), rng))
    began = time.monotonic()
    try:
        log = attach(path)
        recovery = log.recover(
            rng.choice((0, commit, rng.getrandbits(40))), cache_is_true=rng.random() < 0.5
        )
    except StorageError:
        return
    finally:
        assert time.monotonic() - began < 30  # seconds at the most, and the machine is busy
    found = [record for frame in frames(log, on_damage=lambda *_: None) for record in frame.records]
    assert all(written.get(offset) == body for offset, body in found)
    for offset, body in written.items():
        try:
            assert log.read(offset) == body
        except (LookupError, CorruptError):
            assert offset not in dict(found)
    log.verify()
    new = put(log, b"new", b"z" * 100_000, time_us=YEAR_2026_US)
    _files.close(log.fd)
    with opened(path) as (log, second):
        assert bodies(log) == [*(body for _, body in found), b"new", b"z" * 100_000]
        assert log.read(new[0]) == b"new"
        assert recovery.damaged or not second.damaged
    shutil.rmtree(path.parent)


def _mutated(data: bytearray, rng: random.Random) -> bytes:
    interesting = [0, 16, 60, 1024, HEADER_BYTES, HEADER_BYTES + 64, HEADER_BYTES + SEGMENT - 64]
    for _ in range(rng.choice((1, 1, 1, 3, 30))):
        at = rng.choice(interesting) + rng.randrange(20)
        if rng.random() < 0.7:
            at = rng.randrange(len(data))
        kind = rng.randrange(8)
        if at >= len(data):
            continue
        if kind < 2:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + rng.randint(1, 600)] = rng.randbytes(rng.randint(1, 600))
        elif kind == 3:
            n = min(rng.randint(1, 100_000), len(data) - at)
            data[at : at + n] = bytes(n)
        elif kind == 4 and len(data) > 2 * at:
            del data[-at:]
        elif kind == 5:
            data += rng.choice((bytes(5000), rng.randbytes(90_000)))
        elif kind == 6:
            source, n = rng.randrange(len(data)), rng.choice((24, 64, 500, SEGMENT))
            if n == SEGMENT:
                source -= (source - HEADER_BYTES) % SEGMENT
                at -= (at - HEADER_BYTES) % SEGMENT
            if min(source, at) >= 0:
                data[at : at + n] = data[source : source + n]
        elif kind == 7:
            del data[at : at + rng.randint(1, 70_000)]
    return bytes(data)


def test_a_segment_full_of_false_headers_is_searched_in_time(tmp_path: Path) -> None:
    """Bytes made to look like millions of frame headers don't hold up recovery."""
    path = create(tmp_path / "log.wq", 1 << 20)
    fake = bytes.fromhex("00000000 00f00000 03 00000000000000 0000000000060000".replace(" ", ""))
    with opened(path) as (log, _):
        put(log, b"first")
        spot = put(log, (fake * 44_000)[:1_040_000])[0]
        for _ in range(5):
            put(log, (fake * 44_000)[:1_040_000])
        sync(log)
        log.append([(b"clean",)], 0, 1, VOUCH)
        log.write()
        shift, _ = log.place(spot >> log.bits)
    image = bytearray(path.read_bytes())
    image[spot - 20 + shift] ^= 0x7F  # the length: so that the search has to go byte by byte
    path.write_bytes(image)
    began = time.monotonic()
    with opened(path) as (log, recovery):
        assert time.monotonic() - began < 30  # seconds at the most, and the machine is busy
        assert len(recovery.damaged) >= 1
        assert bodies(log)[0] == b"first"
        assert bodies(log)[-1] == b"clean"


# Whole or at the end only -----------------------------------------------------------------------


def test_looking_at_the_end_alone_finds_the_same_tail(path: Path) -> None:
    """With whole=False only the last segment is read, if the commit point is one of this log's."""
    with opened(path) as (log, _):
        for _ in range(60):
            put(log, os.urandom(3000))
        sync(log)
        commit = log.state.words[COMMIT]
        put(log, b"unsynced")
        tail = log.state.words[TAIL]
        last_frame, expected = log.last_frame, bodies(log)
    for known, whole in ((commit, False), (commit + 1, True), (0, True), (1 << 40, True)):
        with opened(path, commit=known, whole=False, cache_is_true=True) as (log, recovery):
            assert recovery.whole is whole
            if known <= commit:
                assert recovery.tail == tail
                assert log.last_frame == last_frame
            assert bodies(log)[: len(expected)] == expected


def test_a_read_only_log_changes_nothing(path: Path) -> None:
    """Opened read-only, a torn log shows what is whole, and its file stays as it is."""
    with opened(path) as (log, _):
        put(log, b"first")
        spot = put(log, b"second")[0]
        shift, _ = log.place(0)
    image = bytearray(path.read_bytes())
    image[spot + 9 + shift] ^= 1
    path.write_bytes(image)
    path.chmod(0o400)
    log = attach(path, readonly=True)
    recovery = log.recover()
    assert recovery.torn_bytes > 0
    assert bodies(log) == [b"first"]
    assert log.verify() == []
    _files.close(log.fd)
    assert path.read_bytes() == image


def test_creating_over_another_file_is_refused(path: Path) -> None:
    """Log.create never replaces a file with bytes in it, and takes an empty one's place."""
    content = path.read_bytes()
    with pytest.raises(FileExistsError):
        create(path)
    assert path.read_bytes() == content
    empty = path.parent / "empty.wq"
    empty.touch()
    create(empty)
    with opened(empty) as (log, recovery):
        assert recovery.tail == 64
        assert log.last_frame == (0, 0)
        assert log.ends_with(64, 0, 0)
        assert (log.state.words[HEAD], log.state.words[SLOTS]) == (0, 2)


def test_the_epoch_is_raised_one_copy_at_a_time(path: Path) -> None:
    """write_header keeps one good copy on the disk at every moment."""
    with opened(path) as (log, _):
        assert isinstance(log, Log)
        put(log, b"x")
        header = log.write_header(epoch=7)
        assert (header.epoch, header.generation) == (7, 2)
    with opened(path) as (log, _):
        assert log.header == header
        assert bodies(log) == [b"x"]
