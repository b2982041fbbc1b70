"""put: what is read from files and the command line, and what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import start

import weclaw_embedded as weclaw


def bodies(file: Path) -> list[Any]:
    with weclaw.Queue(file) as q:
        return [one.body for one in q.peek(100)]


@pytest.mark.parametrize(
    ("text", "fault", "before"),
    [
        (b"id,id\n1,2\n", "line 1 is not CSV: the heading has 'id' twice", 0),
        (b"\n\na,b,,\n1,2,3,4\n", "line 3 is not CSV: the heading has '' twice", 0),
        (b"id,prompt\n1\n", "line 2 is not CSV: fewer fields than the heading has", 0),
        (b"id,prompt\n1,2\n2,3,4\n", "line 3 is not CSV: more fields than the heading has", 1),
        (b'id,prompt\n1,"a\nb"\n\n2,"c\nd",e\n', "line 5 is not CSV: more fields", 1),
        (b'id,prompt\n1,2\n\n3,"4\n5\n', "line 4 is not CSV: unexpected end of data", 1),
        (b'id,prompt\n1,2\n3,"4\n5\xff"\n', "line 4 is not CSV: 'utf-8' codec can't decode", 1),
    ],
    ids=["twice", "nameless twice", "short", "long", "after lines", "never closed", "no UTF-8"],
)
def test_csv_that_fits_no_heading_is_refused_at_its_line(
    text: bytes, fault: str, before: int, file: Path, tmp_path: Path, ctl: Any
) -> None:
    """No column is lost and none is made up; what was before it is put."""
    source = tmp_path / "tasks.csv"
    source.write_bytes(text)
    status, _, err = ctl("put", file, "--input", source)
    assert status == 1
    assert err.startswith(f"weclawctl: {fault}")
    assert len(err.splitlines()) == 1
    assert (len(bodies(file)) if before else file.exists()) == before


def test_csv_is_read_whole(file: Path, tmp_path: Path, ctl: Any) -> None:
    """A mark at the beginning, quotes over lines, empty lines and fields, any end of line."""
    source = tmp_path / "tasks.csv"
    source.write_bytes('\ufeffid,说\r\n1,"a\nb, ""c"""\r\n\r\n2,\r\n3,ü'.encode())
    assert ctl("put", file, "--input", source)[0] == 0
    assert bodies(file) == [
        {"id": "1", "说": 'a\nb, "c"'},
        {"id": "2", "说": ""},
        {"id": "3", "说": "ü"},
    ]


def test_the_line_of_a_record_of_csv_is_where_it_begins(
    file: Path, tmp_path: Path, ctl: Any
) -> None:
    source = tmp_path / "tasks.csv"
    source.write_text('id,note\n1,"a\nb"\n"","c\nd"\n', "utf-8")
    _, _, err = ctl("put", file, "--input", source, "--id-field", "id")
    assert err.startswith("weclawctl: line 4: ")
    _, _, err = ctl("put", file, "--input", source, "--id-field", "none")
    assert err.startswith("weclawctl: line 2: there is no field 'none'")
    for body in ('{"id": [1]}', '{"id": null}'):
        _, _, err = ctl("put", file, body, "--id-field", "id")
        assert "the field 'id' is no text or number to take the id from" in err


def test_what_was_there_already_is_not_said_to_be_put(file: Path, ctl: Any) -> None:
    """By its id, which is the only way in which something can be."""
    for _ in range(2):
        said = ctl("put", file, '{"id": 1}', "--id-field", "id")[1]
        assert said == f"1 message put into {file}, or there already by its id\n"
    with weclaw.Queue(file) as q:
        assert q.qsize() == 1


@pytest.mark.parametrize("words", [(), ("-",), ("--input", "-")], ids=str)
def test_a_dash_is_standard_input(words: tuple[str, ...], file: Path) -> None:
    """As for `dlq export` it is standard output; never the text "-", unless that is meant."""
    child = start("put", file, *words, stdin=subprocess.PIPE)
    out, err = child.communicate("1\n2\n", timeout=60)
    assert (child.returncode, out, err) == (0, f"2 messages put into {file}\n", "")
    assert bodies(file) == [1, 2]


def test_a_dash_among_bodies_is_text_only_where_that_is_said(file: Path, ctl: Any) -> None:
    status, _, err = ctl("put", file, "1", "-")
    assert status == 2
    assert "'-' is standard input, and stands alone, unless with --text; " in err
    assert not file.exists()
    assert ctl("put", file, "--text", "-", "1")[0] == 0
    assert bodies(file) == ["-", "1"]


def test_a_dash_for_a_standard_input_that_is_closed_is_wrong_usage(file: Path) -> None:
    for words in (("-",), ("--input", "-")):
        child = start("put", file, *words, preexec_fn=lambda: os.close(0))
        _, err = child.communicate(timeout=60)
        assert child.returncode == 2
        assert "standard input is closed" in err
        assert len(err.splitlines()) == 1
        assert not file.exists()


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("tasks.txt", True),
        ("none/x", True),
        ("/none/such", True),
        ("../tasks.JSONL", True),
        ("my tasks.jsonl", True),
        ("a line of text.", False),
        ("see tasks.txt", False),
        ("https://example.org/a/page.html", False),
        ('"tasks"', False),
        ("1.5", False),
        ("[1]", False),
        ("{}", False),
    ],
)
def test_what_looks_like_a_path_and_is_none_is_put_with_a_word(
    body: str, warned: bool, file: Path, tmp_path: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever misspelt the name of a file is told that the name itself was put."""
    monkeypatch.chdir(tmp_path)
    status, _, err = ctl("put", file, body)
    assert status == 0
    assert (f"there is no file {body!r}" in err) == warned
    assert len(err.splitlines()) == warned
    assert ctl("put", file, body, "--text")[1:] == ("1 message put into " + str(file) + "\n", "")


def test_a_body_that_is_refused_is_told_without_lines(file: Path, ctl: Any) -> None:
    """There are none on a command line; of several, it is said which."""
    big = str(2**70)
    status, _, err = ctl("put", file, big)
    assert status == 1
    assert "line" not in err
    assert "before it" not in err
    assert not file.exists()
    status, _, err = ctl("put", file, "1", big, "3")
    assert status == 1
    assert err.startswith("weclawctl: body 2: body: an int outside ")
    assert "; 1 message before it was put; put the rest" in err
    assert bodies(file) == [1]


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize(
    ("refused", "fault"),
    [
        (f'{{"id": "x", "a": {2**70}}}', "body['a']: an int outside "),
        ('{"id": ""}', "id must have 1 to 1024 bytes in UTF-8, not 0"),
        (f'{{"id": "x", "a": "{"a" * 70_000}"}}', "the message has 70"),
    ],
    ids=["number", "id", "size"],
)
def test_what_was_put_of_an_input_is_said_once(
    before: int, refused: str, fault: str, file: Path, tmp_path: Path, ctl: Any
) -> None:
    """Not of the message and of the input, too; and only its lines are counted."""
    weclaw.Queue(file, max_message_bytes=65536).close()
    source = tmp_path / "tasks.jsonl"
    lines = [f'{{"id": "{n}"}}' for n in range(before)]
    source.write_text("\n".join([*lines, refused, '{"id": "9"}']), "utf-8")
    status, _, err = ctl("put", file, "--input", source, "--id-field", "id")
    assert status == 1
    assert err.startswith(f"weclawctl: line {before + 1}: {fault}")
    assert err.count("nothing was") == (not before)
    assert "the first is" not in err
    assert len(bodies(file)) == before


def test_what_all_of_an_input_is_refused_for_is_said_of_its_lines(
    file: Path, tmp_path: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text("1\n\n2\n", "utf-8")

    def refused(*_: object, **__: object) -> None:
        raise weclaw.StoreFailedError("the disk is gone")

    monkeypatch.setattr(weclaw.Queue, "put_many", refused)
    monkeypatch.setattr(weclaw.Queue, "put", refused)
    assert ctl("put", file, "--input", source)[2] == (
        "weclawctl: line 1 to line 3: the disk is gone; nothing was put before it\n"
    )
    assert ctl("put", file, "1")[2] == "weclawctl: the disk is gone\n"
