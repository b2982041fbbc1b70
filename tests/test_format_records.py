"""Section 11 of docs/format.md, the vocabulary of records, held equal to the code."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import msgpack
import pytest

from weclaw_embedded import _delivery, _record_put
from weclaw_embedded import _record_types as types
from weclaw_embedded import _records as rec

DOCS = Path(__file__).resolve().parent.parent / "docs" / "format.md"
SECTION = DOCS.read_text("utf-8").partition("## 11. The records")[2].partition("\n## 12.")[0]
GID = rec.group_id("default", "default")


def part(title: str) -> str:
    """What stands under one heading of the section."""
    return SECTION.partition(f"### {title}\n")[2].partition("\n### ")[0]


def table(text: str, *head: str) -> list[list[str]]:
    """The rows of the table that begins with these columns."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        rows = [
            [cell.strip().strip("`") for cell in line.strip()[1:-1].split("|")]
            for line in block.splitlines()
        ]
        if tuple(rows[0][: len(head)]) == head:
            return rows[2:]
    raise AssertionError(f"no table with the columns {head}")


def constant(record: str) -> int:
    return int(getattr(types, record.upper().replace(" ", "_")))


def split(fields: str) -> list[str]:
    """Fields at the top level, those in brackets as one."""
    found, depth, word = [], 0, ""
    for letter in fields:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            found.append(word.strip())
            word = ""
        else:
            word += letter
    return [*found, word.strip()] if word.strip() else found


def test_the_document_lists_every_type_and_no_other() -> None:
    """Numbers and names of the records are those of the code."""
    told = {row[1]: int(row[0]) for row in table(SECTION, "type", "record")}
    assert {name: constant(name) for name in told} == told
    known = {rec.PUT, rec.DELIVER, rec.ACK, *rec._FIELDS}
    assert set(told.values()) == known


def test_the_document_names_the_fields_of_every_record() -> None:
    """As many fields as the code reads, in its order, and by its names."""
    for number, name, fields, _ in table(SECTION, "type", "record"):
        if fields == "below":
            continue
        said, checks = rec._FIELDS[int(number)]
        told = split(fields)
        names = said._fields  # type: ignore[attr-defined]
        assert len(told) == len(checks) == len(names), name
        for one, real in zip(told, names, strict=True):
            assert one == real or one[0] in "[{", name


@pytest.mark.parametrize(
    ("title", "layout"),
    [
        ("Put", types.PUT_HEAD.format),
        ("Deliver", types.DELIVER_HEAD.format + types.DELIVER_ITEM.format.lstrip("<")),
        ("Ack", types.ACK_HEAD.format),
    ],
)
def test_the_document_lays_out_the_fixed_records(title: str, layout: str) -> None:
    """Types and positions of the tables are those of the code's structs."""
    rows = [row for row in table(part(title), "at", "type") if row[1]]
    assert "".join(row[1] for row in rows) == layout.lstrip("<")
    at = 0
    for position, kind, *_ in rows:
        assert int(position.split(" ")[0]) == at
        at += struct.calcsize("<" + kind)
    assert f"{types.DELIVER_ITEM.size}·i" in part("Deliver")


def test_the_document_names_the_meta_of_a_put() -> None:
    """Numbers, names and types of what can be said besides a body."""
    told = {row[1]: (int(row[0]), row[2]) for row in table(part("Put"), "meta", "name")}
    known = {
        name.removeprefix("META_").lower(): (number, _record_put._META_TYPES[number].__name__)
        for name, number in vars(types).items()
        if name.startswith("META_")
    }
    assert told == known


@pytest.mark.parametrize(
    ("title", "column", "prefix"),
    [("Put", "codec", "CODEC_"), ("Types", "kind", ""), ("Carry", "state", "STATE_")],
)
def test_the_document_names_the_small_numbers(title: str, column: str, prefix: str) -> None:
    """Codecs, kinds and states are those of the code."""
    told = {row[1]: int(row[0]) for row in table(part(title), column, "name")}
    assert told == {name: getattr(types, prefix + name.upper()) for name in told}
    if prefix:
        assert len(told) == sum(name.startswith(prefix) for name in vars(types))
    else:
        assert set(told.values()) == {0, 1, 2, 3, 4}


def test_the_document_names_the_parts_of_checkpoints_and_carries() -> None:
    """The items of their lists have the fields the code has, in its order."""
    flat = re.sub(r"\s+", " ", SECTION)
    for said in (types.CheckpointTopic, types.CheckpointGroup, types.CarriedRow):
        assert f"[{', '.join(said._fields)}]" in flat, said.__name__


def test_the_documents_records_are_what_we_write() -> None:
    """Each example is read, says what its title says, and is written again byte for byte."""
    found = {}
    for title, text in re.findall(r"^# (.*)\n((?:  .*\n)+)", part("One of each"), re.MULTILINE):
        record = bytes.fromhex(text.replace("\n", " "))
        name = title.partition(":")[0]
        found[name] = found.get(name, 0) + 1
        assert record[0] == constant(name)
        assert again(rec.unpack(record)) == record, title
    assert set(found) == {row[1] for row in table(SECTION, "type", "record")}


def again(said: rec.AnyRecord) -> bytes:
    """Pack what was read, by the function for it."""
    if isinstance(said, types.Put):
        meta = msgpack.packb(said.meta) if said.meta else b""
        packed = rec.pack_put(said.priority, said.codec, said.tid, meta, bytes(said.body))
    elif isinstance(said, types.Return):
        fields = said._asdict()
        packed = rec.pack_return(*said[:3], **{n: fields[n] for n in list(fields)[3:]})
    elif isinstance(said, types.Dead):
        fields = said._asdict()
        packed = rec.pack_dead(*said[:4], **{n: fields[n] for n in list(fields)[4:]})
    elif isinstance(said, types.Deliver):
        offsets = [offset for offset, _, _ in said.items]
        flags = [priority << 4 | queued for _, priority, queued in said.items]
        packed = rec.pack_deliver(*said[:4], offsets, flags)
    elif isinstance(said, types.Replay):
        items = [(o, p, b"" if k == types.NO_KEY else k, e) for o, p, k, e in said.items]
        packed = rec.pack_replay(said.gid, items)
    elif isinstance(said, (types.Checkpoint, types.Carry)):
        name = f"pack_{type(said).__name__.lower()}"
        packed = getattr(rec, name)(said)
    else:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(said).__name__).lower()
        packed = getattr(rec, f"pack_{name}")(*said)
    return b"".join(packed)


def test_the_documents_id_is_the_one_we_make() -> None:
    """The digest in an id is made as the document says."""
    import hashlib

    text = part("The id of a message")
    assert "personalisation `weclaw id`" in text
    salt = 0x5A17ED01
    digest = hashlib.blake2b(salt.to_bytes(8, "little"), digest_size=4, person=b"weclaw id")
    assert _delivery.own_id(88, salt) == f"{88:014x}{digest.hexdigest()}"


def test_the_documents_numbers_of_names_are_the_codes() -> None:
    """Topics, groups and keys are numbered as the document says."""
    import hashlib

    def blake(text: str, n: int) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=n).digest()

    assert rec.topic_id("tasks") == int.from_bytes(blake("tasks", 4), "big")
    assert rec.group_id("a", "b") == int.from_bytes(blake("a\0b", 8), "big") | 1 << 63
    assert rec.key_hash("k") == blake("k", 8)


def test_the_document_describes_the_stream_of_a_replica() -> None:
    """Types, fields, limits and reasons of the messages are those of the code."""
    from weclaw_embedded import _stream

    text = DOCS.read_text("utf-8").partition("## 14.")[2]
    forms = {
        "HELLO": _stream._HELLO,
        "BEGIN": _stream._BEGIN,
        "DATA": _stream._DATA,
        "HEAD": _stream._OFFSET,
        "SYNC": _stream._OFFSET,
        "STATE": _stream._STATE,
        "ACK": _stream._OFFSET,
        "REFUSED": _stream._REFUSED,
        "END": _stream._END,
        "READ": _stream._READ,
    }
    told = table(text, "type", "name")
    assert [int(row[0]) for row in told] == [*range(1, 10), *range(16, 20)]
    for number, name, fields, _ in told:
        assert getattr(_stream, name) == int(number)
        if name in forms:
            assert re.match(r"`?(\w+)", fields)[1] == forms[name].format.lstrip("<"), name  # type: ignore[index]
    for limit in (_stream.MAX_MESSAGE, _stream.MAX_DATA):
        assert f"{limit:,}".replace(",", " ") in text
    for said, name in ((_stream.Hello, "HELLO"), (_stream.State, "STATE")):
        (fields,) = (row[2] for row in told if row[1] == name)
        for field in said._fields:
            assert field in fields
    reasons = ("BUSY", "OTHER_STORE", "HIGHER_EPOCH", "DIVERGED", "NOT_A_COPY", "FAILED")
    for name in (*reasons, "OTHER_VERSION"):
        assert re.search(rf"\b{getattr(_stream, name)} [a-z]", text), name
