"""Files that earlier releases wrote open, and everything a user sees in them is what it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tests.compat import golden

import weclaw_embedded as weclaw


def expected(name: str) -> dict[str, object]:
    return json.loads((golden.V1 / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_file_of_version_1_shows_what_it_held(name: str, tmp_path: Path) -> None:
    """Messages, letters, results, groups, counters and damage are as they were written down."""
    path = golden.unpack(name, tmp_path)
    told = expected(name)
    assert golden.look(path) == told["seen"]
    ids = list(told["settled"])  # type: ignore[call-overload]
    assert golden.settled(path, ids) == told["settled"]
    assert golden.drained(path) == told["drained"]


@pytest.mark.parametrize("name", golden.NAMES)
def test_a_file_of_version_1_goes_on(name: str, tmp_path: Path) -> None:
    """After it was drained, three more puts survive a reopening, and then it is empty."""
    path = golden.unpack(name, tmp_path)
    golden.drained(path)
    with weclaw.Queue(path) as q:
        ids = q.put_many(["one", "two", "three"])
    assert [(one, body) for one, body, _ in golden.drained(path)] == list(
        zip(ids, ["'one'", "'two'", "'three'"], strict=True)
    )
    assert golden.drained(path) == []


@pytest.mark.parametrize("name", golden.NAMES)
def test_looking_alone_changes_nothing(name: str, tmp_path: Path) -> None:
    """Opened to look only, a file of version 1 shows the same and stays as it is, byte for byte."""
    path = golden.unpack(name, tmp_path)
    before = path.read_bytes()
    for group in expected(name)["seen"]["groups"]:  # type: ignore[index]
        with weclaw.Queue(
            path, group["topic"], group=group["group"], retry=golden.RETRY, readonly=True
        ) as q:
            seen = q.stats()
            assert [seen.ready, seen.delayed, seen.leased, seen.dead] == group["stats"][:4]
            assert [letter.id for letter in q.dlq] == [one["id"] for one in group["letters"]]
    assert path.read_bytes() == before


def test_what_is_torn_or_damaged_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A torn tail and a flipped byte are reported with the file and the place, and only once."""
    for name, words in (("torn", "was cut"), ("flipped", "damage at offset")):
        path = golden.unpack(name, tmp_path)
        with caplog.at_level(logging.INFO, "weclaw_embedded"), weclaw.Queue(path):
            pass
        told = [record.getMessage() for record in caplog.records if words in record.getMessage()]
        assert len(told) == 1
        assert str(path) in told[0]
        caplog.clear()


def test_what_is_half_created_is_new_or_not_a_queue(tmp_path: Path) -> None:
    """A name without bytes counts as new; what a killed creator was writing is none of ours."""
    path = golden.unpack("half_created", tmp_path)
    (temporary,) = tmp_path.glob(".half_created.wq.*.tmp")
    with pytest.raises(weclaw.NotAQueueError):
        weclaw.Queue(temporary)
    assert not Path(f"{temporary}.d").exists()
    with weclaw.Queue(path) as q:
        q.put("new")
    assert golden.drained(path)[0][1] == "'new'"


def test_a_golden_file_is_small() -> None:
    """They are kept for ever: none takes more than a few kilobytes."""
    for file in golden.V1.rglob("*"):
        if file.is_file():
            assert file.stat().st_size < 20_000, file
