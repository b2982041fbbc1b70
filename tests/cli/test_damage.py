"""What is damaged and come upon by looking: told of on standard error, and never "nothing"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import weclaw_embedded as weclaw


@pytest.fixture
def hit(file: Path) -> Path:
    """One dead letter and two ready messages; the letter and the first of the two are damaged."""
    with weclaw.Queue(file) as q:
        for n in range(3):
            q.put({"n": n, "pad": f"{n}" * 2000})
        q.get(timeout=5).fail("it did not fit")
    data = bytearray(file.read_bytes())
    for n in range(2):
        data[data.index(f"{n}".encode() * 2000) + 900] ^= 0xFF
    file.write_bytes(data)
    return file


def test_peek_shows_what_is_behind_the_damage(hit: Path, ctl: Any, js: Any) -> None:
    """A look at one message is a look at the first that can be read; the damage is told of."""
    status, out, err = ctl("peek", hit, "-n", 1)
    assert status == 0
    assert '{"n": 2' in out
    assert "damage at offset" in err
    assert len(js("peek", hit)) == 1


@pytest.mark.parametrize("form", [(), ("--readonly",)], ids=["", "readonly"])
def test_peek_does_not_say_that_nothing_is_ready(
    form: tuple[str, ...], hit: Path, ctl: Any
) -> None:
    """Where all that is ready is damaged."""
    with weclaw.Queue(hit) as q:
        (last,) = [one.id for one in q.peek(3)][-1:]
        q.cancel(last)
        q.put({"pad": "d" * 2000})
    data = bytearray(hit.read_bytes())
    data[data.index(b"d" * 2000) + 900] ^= 0xFF
    hit.write_bytes(data)
    status, out, err = ctl("peek", hit, *form)
    assert (status, out) == (0, "nothing that can be read is ready\n")
    assert "damage at offset" in err


@pytest.mark.parametrize("form", [(), ("--by-reason",), ("--readonly",)], ids=" ".join)
def test_dlq_list_does_not_say_that_there_are_no_letters(
    form: tuple[str, ...], hit: Path, ctl: Any
) -> None:
    """Where all that are there are damaged."""
    status, out, err = ctl("dlq", "list", hit, *form)
    assert (status, out) == (0, "no dead letters that can be read\n")
    assert "damage at offset" in err


def test_what_is_known_to_be_damaged_is_told_once(hit: Path, ctl: Any) -> None:
    """`stats` has how many places; that there was no letter is still not said."""
    ctl("dlq", "list", hit)
    assert ctl("dlq", "list", hit) == (0, "no dead letters that can be read\n", "")
    assert "damaged 1" in ctl("stats", hit)[1]
    ctl("repair", hit, "--yes")
    assert ctl("dlq", "list", hit) == (0, "no dead letters\n", "")


@pytest.mark.parametrize("named", [True, False], ids=["named", "all"])
def test_a_result_that_is_damaged_hides_no_other(
    named: bool, file: Path, ctl: Any, js: Any
) -> None:
    """It stands in the list, with why it can't be read; the exit status is 1."""
    with weclaw.Queue(file) as q:
        ids = q.put_many([1, 2, 3])
        for letter in "abc":
            q.get(timeout=5).ack(result=letter * 2000)
    data = bytearray(file.read_bytes())
    data[data.index(b"b" * 2000) + 900] ^= 0xFF
    file.write_bytes(data)
    words = ("results", file, *(ids if named else []))
    found = js(*words, status=1)
    assert [one["id"] for one in found] == ids
    assert [one["result"] and one["result"][0] for one in found] == ["a", None, "c"]
    assert "damage at offset" in found[1]["reason"]
    assert [name for one in found for name in one if name == "reason"] == ["reason"]
    status, out, _ = ctl(*words)
    assert status == 1
    assert "damage at" in " ".join(out.split())


@pytest.fixture
def four(file: Path) -> tuple[Path, list[str]]:
    """Four dead letters, the second of them damaged, and their ids."""
    with weclaw.Queue(file) as q:
        ids = [q.put({"pad": f"{n}" * 2000}, id=f"task {n}") for n in range(4)]
        for _ in ids:
            q.get(timeout=5).fail("it did not fit")
    data = bytearray(file.read_bytes())
    data[data.index(b"1" * 2000) + 900] ^= 0xFF
    file.write_bytes(data)
    return file, ids


@pytest.mark.parametrize("choice", ["", "named", "--reason fit", "--dry-run", "named --dry-run"])
def test_a_damaged_letter_holds_up_no_other(
    choice: str, four: tuple[Path, list[str]], ctl: Any
) -> None:
    """The others are put back; the damaged one is named, and the exit status is 1."""
    file, ids = four
    words = [*(ids if "named" in choice else []), *choice.replace("named", "").split()]
    status, out, err = ctl("dlq", "redrive", file, *words)
    would_be = "would be " if "--dry-run" in choice else ""
    assert (status, out.splitlines()[-1]) == (1, f"3 dead letters {would_be}redriven")
    name = "task 1" if "named" in choice else "that at offset "
    assert f"1 dead letter can't be read and stayed out of it: {name}" in err
    assert "no dead letter" not in err


@pytest.mark.parametrize("chosen", ["ids", "offset"])
def test_a_damaged_message_holds_up_no_other_that_is_replayed(
    chosen: str, file: Path, ctl: Any
) -> None:
    """The others flow again; the damaged one is named, and the exit status is 1."""
    with weclaw.Queue(file) as q:
        ids = [q.put({"pad": f"{n}" * 2000}, id=f"task {n}") for n in range(3)]
        for _ in ids:
            q.get(timeout=5).ack()
    data = bytearray(file.read_bytes())
    data[data.index(b"1" * 2000) + 900] ^= 0xFF
    file.write_bytes(data)
    words = [word for id in ids for word in ("--id", id)]
    if chosen == "offset":
        words = ["--offset", "earliest"]
    status, out, err = ctl("replay", file, *words)
    assert (status, out) == (1, "2 messages flow again\n")
    if chosen == "ids":
        assert "can't be read and were not replayed, 'task 1'" in err
    else:
        assert "1 places can't be read, and what stood there was not replayed" in err
        assert "1 place can't be read, and what stood there was left out" in err
