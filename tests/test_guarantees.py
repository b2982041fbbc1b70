"""docs/guarantees.md names what proves each promise, and all of that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
ROWS = re.findall(r"^\| (G\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_guarantee_names_tests_that_exist(row: tuple[str, str, str, str]) -> None:
    """Each guarantee has a failure model and at least one test that is there."""
    _, promise, against, proof = row
    assert promise.endswith(".")
    assert against
    named = NAMED.findall(proof)
    assert named
    assert NAMED.sub("", proof).strip() == ""
    for path, name in named:
        text = (ROOT / path).read_text("utf-8")
        assert re.search(rf"^(?:async )?def {name}\b", text, re.MULTILINE), f"{path}::{name}"


def test_assumptions_and_guarantees_are_numbered_through() -> None:
    """A1, A2, … and G1, G2, … without a gap, each once."""
    for letter in "AG":
        numbers = re.findall(rf"^\| {letter}(\d+) \|", PAGE, re.MULTILINE)
        assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
        assert len(numbers) > 5


def test_every_reference_to_one_leads_somewhere() -> None:
    """What the pages say of A1 or G2 is there to be read."""
    defined = set(re.findall(r"^\| ([AG]\d+) \|", PAGE, re.MULTILINE))
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        used = set(re.findall(r"\(([AG]\d+)\)", page.read_text("utf-8")))
        assert used <= defined, f"{page.name}: {used - defined}"


def test_every_flush_policy_stands_in_the_matrix() -> None:
    """What can be lost is told for each way of flushing and each kind of failure."""
    from weclaw_embedded._session import POLICIES

    matrix = PAGE.partition("## What can be lost or repeated")[2].partition("\n## ")[0]
    told = re.findall(r'^\| `"(\w+)"` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$', matrix, re.MULTILINE)
    assert sorted(row[0] for row in told) == sorted(POLICIES)
