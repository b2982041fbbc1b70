"""The bytes of the file: packed and read back, refused when wrong, and as docs/format.md says."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wal_tools import attach, bodies, opened, sync

from weclaw_embedded import _appending, _files, _format, wal
from weclaw_embedded._format import (
    END_RECORD_AT,
    HEADER_BYTES,
    MAGIC,
    MAX_SEGMENT_BYTES,
    MIN_SEGMENT_BYTES,
    SLOT_BYTES,
    VOUCH,
    FileHeader,
    SlotHeader,
    check_segment_bytes,
    envelopes,
    pack_end,
    pack_head,
    pack_header,
    pack_slot,
    part_checksum,
    slot_unpacker,
    unpack_end,
    unpack_head,
    unpack_header,
    unseed,
)
from weclaw_embedded.errors import CorruptError, FormatVersionError, NotAQueueError

DOCS = Path(__file__).resolve().parent.parent / "docs" / "format.md"
STORE_ID = bytes(range(16))
HEADER = FileHeader(1 << 20, STORE_ID, 3, 2, 1_790_000_000_000_000)
S = MIN_SEGMENT_BYTES
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)


@given(
    st.builds(
        FileHeader,
        st.integers(16, 30).map(lambda bits: 1 << bits),
        st.binary(min_size=16, max_size=16),
        u64,
        u64,
        u64,
        st.just(_format.VERSION),
    )
)
def test_a_header_comes_back_equal(header: FileHeader) -> None:
    """Whatever its values, a header block of 4096 bytes is read back as it was packed."""
    block = pack_header(header)
    assert len(block) == HEADER_BYTES
    assert unpack_header(block) == header


def test_one_good_copy_of_the_header_is_enough() -> None:
    """Every byte of one copy may be wrong, and of two good ones the newer counts."""
    block = pack_header(HEADER)
    for at in range(68):
        if 16 <= at < 20:
            continue  # the version is judged before the checksum
        for base in (0, 2048):
            damaged = bytearray(block)
            damaged[base + at] ^= 0x40
            assert unpack_header(bytes(damaged)) == HEADER
    newer = pack_header(HEADER._replace(generation=9, epoch=4))
    assert unpack_header(newer[:2048] + block[2048:]).epoch == 4
    assert unpack_header(block[:2048] + newer[2048:]).epoch == 4


def test_a_newer_version_is_told_before_any_checksum() -> None:
    """The version stands in the clear: it is named even if nothing else of the file is right."""
    for block in (
        MAGIC + struct.pack("<I", 2) + b"\xff" * 40,
        pack_header(HEADER._replace(version=7)),
        b"\0" * 2048 + pack_header(HEADER._replace(version=7))[2048:],
    ):
        with pytest.raises(FormatVersionError):
            unpack_header(block)


@pytest.mark.parametrize("block", [b"", b"SQLite format 3\0" + bytes(4080), bytes(4096), MAGIC[:9]])
def test_what_is_not_ours_is_not_a_queue(block: bytes) -> None:
    """Without the magic in either place the file is somebody else's."""
    with pytest.raises(NotAQueueError):
        unpack_header(block)


def test_a_header_damaged_twice_is_corrupt() -> None:
    """With the magic there but no copy whole, it is one of ours and damaged."""
    block = bytearray(pack_header(HEADER))
    block[30] ^= 1
    block[2048 + 30] ^= 1
    for damaged in (bytes(block), bytes(block[:64])):
        with pytest.raises(CorruptError):
            unpack_header(damaged)


@pytest.mark.parametrize("n", [0, 1, 65535, 65537, 3 << 20, MAX_SEGMENT_BYTES * 2, -65536])
def test_segment_sizes_are_powers_of_two_within_limits(n: int) -> None:
    """Anything but a power of two from 64 KiB to 1 GiB is a ValueError."""
    with pytest.raises(ValueError):
        check_segment_bytes(n)
    assert check_segment_bytes(MIN_SEGMENT_BYTES) == MIN_SEGMENT_BYTES


@given(
    st.integers(1, 2**39),
    st.integers(1, 2**32 - 1),
    u32,
    st.integers(64, S - 64),
    u64,
    u64,
    st.data(),
)
def test_a_slot_header_comes_back_equal(
    segment: int, salt: int, prev_salt: int, end: int, epoch: int, time_us: int, data: st.DataObject
) -> None:
    """A slot header that makes sense is read back; in another file, or cut, it is none."""
    slot = SlotHeader(
        segment,
        salt,
        prev_salt,
        (segment - 1) * S + end,
        data.draw(st.integers(0, segment)),
        epoch,
        data.draw(st.integers(0, segment * S - 1)),
        time_us,
    )
    packed = pack_slot(slot, STORE_ID)
    assert len(packed) == SLOT_BYTES
    assert slot_unpacker(STORE_ID, S)(packed) == slot
    assert slot_unpacker(bytes(16), S)(packed) is None
    assert slot_unpacker(STORE_ID, S)(packed[:-1]) is None
    at = data.draw(st.integers(0, SLOT_BYTES - 1))
    damaged = bytearray(packed)
    damaged[at] ^= 1
    assert slot_unpacker(STORE_ID, S)(bytes(damaged)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"salt": 0},
        {"head": 6},
        {"prev_end": 4 * S + 63},
        {"prev_end": 5 * S - 63},
        {"prev_end": 6 * S},
        {"checkpoint": 5 * S},
        {"segment": 2**56 // S - 1, "prev_end": 2**56 - 2 * S - 64},
        {"segment": 2**63},
        {"segment": 0, "head": 0},
    ],
)
def test_a_slot_header_that_makes_no_sense_is_none(change: dict[str, int]) -> None:
    """Values out of range are refused though the checksum is right."""
    slot = SlotHeader(5, 1, 2, 4 * S + 64, 0, 1, 0, 0)
    assert slot_unpacker(STORE_ID, S)(pack_slot(slot, STORE_ID)) == slot
    changed = slot._replace(**change)
    assert slot_unpacker(STORE_ID, S)(pack_slot(changed, STORE_ID)) is None


def test_the_head_record_counts_only_when_whole() -> None:
    """A head record is read back; damaged, of another file or missing, it is 0."""
    block = bytearray(HEADER_BYTES)
    block[1024:1040] = pack_head(77, STORE_ID)
    assert unpack_head(bytes(block), STORE_ID) == 77
    assert unpack_head(bytes(block), bytes(16)) == 0
    assert unpack_head(bytes(block[:1030]), STORE_ID) == 0
    for at in range(1024, 1040):
        block[at] ^= 1
        assert unpack_head(bytes(block), STORE_ID) == 0
        block[at] ^= 1


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=9), st.data())
def test_envelopes_fill_their_part_exactly(records: list[bytes], data: st.DataObject) -> None:
    """The records of a part are found by their envelopes, and a wrong envelope is a ValueError."""
    part = bytearray(24)
    expected = []
    for record in records:
        expected.append((len(part), len(record)))
        part += struct.pack("<II", len(record), len(part)) + record
    assert list(envelopes(bytes(part), True).items()) == expected
    at, _ = data.draw(st.sampled_from(expected))
    field = data.draw(st.sampled_from((at + 4, at + 7)))
    part[field] ^= 0x80
    with pytest.raises(ValueError):
        envelopes(bytes(part), True)


def test_a_checksum_holds_in_one_place_and_one_life_only() -> None:
    """The same bytes at another offset or under another salt have another checksum."""
    data = b"some bytes of a frame"
    there = part_checksum(data, 5, 1000)
    assert part_checksum(data, 5, 1001) != there
    assert part_checksum(data, 6, 1000) != there
    assert part_checksum(data, 2**32 - 1, 2**40 + 5) == part_checksum(data, 4, 0)


@pytest.mark.parametrize("size", [0, 1, 7, 24, 1000, 70_001])
def test_a_checksum_tells_what_it_was_begun_with(size: int) -> None:
    """From the bytes and their checksum follows the seed."""
    data = random.Random(size).randbytes(size)
    for seed in (0, 1, 0x80000000, 0xFFFFFFFF, 0x12345678):
        assert unseed(crc32(data), crc32(data, seed), size) == seed


def test_the_end_record_counts_only_if_it_is_whole_and_of_this_store() -> None:
    """Else it says nothing."""
    block = bytearray(4096)
    block[END_RECORD_AT : END_RECORD_AT + 16] = pack_end(77_777, bytes(16))
    assert unpack_end(bytes(block), bytes(16)) == 77_777
    assert unpack_end(bytes(block), b"x" * 16) == 0
    block[END_RECORD_AT + 8] ^= 1
    assert unpack_end(bytes(block), bytes(16)) == 0
    assert unpack_end(bytes(1090), bytes(16)) == 0


# docs/format.md ---------------------------------------------------------------------------------


def _tables() -> dict[str, list[tuple[int, str, str]]]:
    """The tables of fields in the document, by the name of their first field and its title."""
    found = []
    layouts = DOCS.read_text("utf-8").partition("## 11. The records")[0]
    for block in re.findall(r"(?:^\|.*\n)+", layouts, re.MULTILINE):
        rows = [
            [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
            for line in block.splitlines()
        ]
        if rows[0][:2] == ["at", "type"]:
            found.append([(int(row[0]), row[1], row[2]) for row in rows[2:]])
    names = ("header", "head", "end", "role", "slot", "part", "record")
    return dict(zip(names, found[: len(names)], strict=True))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("header", _format._HEADER.format + "I"),
        ("head", _format._HEAD.format),
        ("end", _format._HEAD.format),
        ("role", _format._ROLE.format),
        ("slot", _format._SLOT.format),
        ("part", _format.PART.format),
        ("record", _format.ENVELOPE.format),
    ],
)
def test_the_document_describes_the_bytes_that_are_packed(name: str, code: str) -> None:
    """Types and positions of the document's tables are those of the code."""
    rows = [row for row in _tables()[name] if row[1]]
    types = "".join(kind for _, kind, _ in rows)
    assert types == code.lstrip("<")
    at = 0
    for position, kind, _ in rows:
        assert position == at
        at += struct.calcsize("<" + kind)


def test_the_document_names_the_fields_as_the_code_does() -> None:
    """The names in the document's tables are those of the code's tuples."""
    tables = _tables()
    assert [name for _, _, name in tables["slot"][2:]] == list(SlotHeader._fields)
    named = {name for _, _, name in tables["header"]} - {"magic", "crc"}
    assert named == set(FileHeader._fields)
    summary = _format.__doc__ or ""
    for name in [*SlotHeader._fields, *named]:
        assert name in summary


def test_the_documents_numbers_are_the_codes() -> None:
    """Limits and flags in the document are those of the code."""
    text = DOCS.read_text("utf-8")
    assert f"{_format.MAX_FRAME_BYTES:,}".replace(",", " ") in text
    assert _format.MAX_OFFSET == 2**56
    for value, name in (
        (_format.FIRST, "FIRST"),
        (_format.LAST_PART, "LAST"),
        (_format.CHECKPOINT_FRAME, "CHECKPOINT"),
        (_format.VOUCH, "VOUCH"),
    ):
        assert re.search(rf"^\| {value} \| {name} \|", text, re.MULTILINE)


def _example() -> bytes:
    dump = re.search(r"```hexdump\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert dump is not None
    image = bytearray(135_168)
    for line in dump[1].splitlines():
        match = re.match(r"([0-9a-f]{6})  ((?:[0-9a-f]{2} ?)+)", line)
        assert match is not None, line
        data = bytes.fromhex(match[2])
        image[int(match[1], 16) : int(match[1], 16) + len(data)] = data
    return bytes(image)


def test_the_documents_example_opens_as_it_says(tmp_path: Path) -> None:
    """The file in the document's hex dump is read: its records, times, policies, no damage."""
    path = tmp_path / "example.wq"
    path.write_bytes(_example())
    log = attach(path, readonly=True)
    recovery = log.recover()
    assert (recovery.damaged, recovery.torn_bytes) == ([], 0)
    assert bodies(log) == [b"hello", b"one", b"two"]
    assert [log.read(n) for n in (88, 125, 136)] == [b"hello", b"one", b"two"]
    assert log.verify() == []
    _files.close(log.fd)


def test_the_documents_example_is_what_we_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written again with the same salt and times, the file is the document's byte for byte."""
    path = tmp_path / "example.wq"
    for module in (wal, _appending):
        monkeypatch.setattr(module, "new_salt", lambda: 0x5A17ED01)
    created_us = 1_790_000_000_000_000
    wal.Log.create(str(path), segment_bytes=65536, store_id=bytes(range(16)), created_us=created_us)
    with opened(path) as (log, _):
        log.append([(b"hello",)], 2, created_us + 1_000_000)
        log.write()
        sync(log)
        log.append([(b"one",), (b"two",)], 0, created_us + 2_000_000, VOUCH)
        log.write()
    assert path.read_bytes() == _example()
