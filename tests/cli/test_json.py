"""The keys that --json prints are those of docs/cli.md, and every verb that has it is there."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import click
from tests.helpers.cli import ROOT, kill_letters

import weclaw_embedded as weclaw
from weclaw_embedded.cli import demo
from weclaw_embedded.cli._app import app

PAGE = (ROOT / "docs" / "cli.md").read_text("utf-8").partition("\n## JSON\n")[2]
#: Values of the user's, whose keys are theirs.
OPAQUE = {"body", "result", "headers", "labels", "consumers"}


def documented() -> dict[str, dict[str, bool]]:
    """Of each section its keys, and whether a key is always there."""
    found: dict[str, dict[str, bool]] = {}
    for title, text in re.findall(r"^### (.+)\n((?:(?!^### ).*\n)*)", PAGE, re.MULTILINE):
        keys = {}
        for names, meaning in re.findall(r"^\| (`.+?`) \| (.*)\|$", text, re.MULTILINE):
            for name in re.findall(r"`([^`]+)`", names):
                keys[name] = not meaning.startswith("only")
        found[title] = keys
    return found


SECTIONS = documented()


def keys_of(value: Any, prefix: str = "") -> Iterator[str]:
    """`a`, `b[].c`: every key of an object or of a list of objects."""
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            continue
        for name, inner in one.items():
            deeper = isinstance(inner, dict) or (
                isinstance(inner, list) and inner and isinstance(inner[0], dict)
            )
            if name in OPAQUE or not deeper:
                yield prefix + name
            elif isinstance(inner, list):
                yield from keys_of(inner, f"{prefix}{name}[].")
            else:
                yield from keys_of(inner, f"{prefix}{name}.")


class Scene:
    """A file with something of everything in it."""

    def __init__(self, folder: Path, handler: str) -> None:
        self.file = folder / "tasks.wq"
        self.folder = folder
        self.handler = handler
        self.letters = kill_letters(self.file, {"n": 0}, {"n": 1})
        with weclaw.Queue(self.file, codec="pickle") as q:  # not decoded where it is not asked for
            self.odd_letter = q.put({1, 2})
            q.get(timeout=5).fail("odd")
            q.put({3, 4}, priority=9)
        with weclaw.open(self.file) as store:
            q = store.queue()
            self.waiting = q.put({"n": 2})
            self.done = q.put({"n": 3}, priority=9)
            q.get(timeout=5).release()
            for msg in q.get_many(2):
                if msg.id == self.done:
                    msg.ack(result={"answer": 42})
                else:
                    msg.release()
            mails = store.queue("mails", group="senders", start="earliest")
            mails.put("a mail")
            mails.pause(600, "upkeep")
        self.store = weclaw.open(self.file)
        held = self.store.queue("held")
        held.put(1)
        self.held = held.get(timeout=5, visibility_timeout=None)

    def close(self) -> None:
        self.store.close()

    def damaged(self) -> Path:
        """A copy with a message in it that can't be read."""
        other = self.folder / "damaged.wq"
        if other.exists():
            return other
        with weclaw.Queue(other) as q:
            for text in ("a", "b", "c"):
                q.put(text * 300)
        data = bytearray(other.read_bytes())
        data[data.index(b"b" * 300) + 100] ^= 0xFF
        other.write_bytes(data)
        return other

    def copy(self) -> tuple[Path, Path]:
        """A file and the copy its replica made."""
        first, second = self.folder / "first.wq", self.folder / "second.wq"
        with weclaw.Queue(first, replica=str(second)) as q:
            q.put(1)
        return first, second

    def commands(self, section: str) -> list[list[object]]:
        """What shows every key of a section."""
        file, out = self.file, self.folder / "out"
        commands: dict[str, list[list[object]]] = {
            "stats": [["stats", file]],
            "health": [["health", file], ["health", file, "--topic", "nope"]],
            "peek": [["peek", file]],
            "peek --leased": [["peek", file, "--leased", "--topic", "held"]],
            "results": [["results", file, self.done, self.letters[0], "nobody"]],
            "top": [["top", file, "--interval", "0.1"]],
            "tail": [["tail", file, "--no-follow", "-n", 100]],
            "put": [["put", file, "1"]],
            "work": [["work", file, self.handler, "--drain", "--topic", "mails"]],
            "dlq list": [["dlq", "list", file]],
            "dlq list --by-reason": [["dlq", "list", file, "--by-reason"]],
            "dlq show": [
                ["dlq", "show", file, self.letters[0]],
                ["dlq", "show", file, self.odd_letter],
            ],
            "dlq redrive": [["dlq", "redrive", file, self.letters[0]]],
            "dlq redrive --dry-run": [["dlq", "redrive", file, "--dry-run"]],
            "dlq export": [["dlq", "export", file, out]],
            "dlq purge": [["dlq", "purge", file, self.letters[0], "--yes"]],
            "dlq watch": [["dlq", "watch", file, "--exec", "true", "--once"]],
            "pause": [["pause", file, 60]],
            "resume": [["resume", file]],
            "cancel": [["cancel", file, self.waiting], ["cancel", file, "nobody"]],
            "replay": [["replay", file, "--offset", "earliest"]],
            "purge": [["purge", file, "--yes"]],
            "backup": [["backup", file, out]],
            "metrics": [["metrics", file]],
            "bench": [["bench", file, "-n", 100]],
        }
        if section in ("verify", "repair"):
            return [[section, self.damaged(), *(["--yes"] if section == "repair" else [])]]
        if section == "verify --against":
            damaged = self.damaged()
            whole = self.folder / "whole.wq"
            whole.write_bytes(damaged.read_bytes().replace(b"c" * 300, b"c" * 299 + b"d"))
            return [["verify", damaged, "--against", whole]]
        if section == "promote":
            return [["promote", self.copy()[1], "--yes"]]
        return commands[section]


@pytest.fixture
def scene(tmp_path: Path, handlers: Any) -> Iterator[Scene]:
    made = Scene(tmp_path, handlers("def handle(msg):\n    return 1\n"))
    yield made
    made.close()


def read(out: str) -> Any:
    try:
        return json.loads(out)
    except ValueError:
        return [json.loads(line) for line in out.splitlines()]


#: Keys of things this scene has none of: a body of `held` that can't be decoded.
UNSEEN = {"peek --leased": {"body_error"}}


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "demo"])
def test_the_keys_are_those_of_the_page(section: str, scene: Scene, ctl: Any) -> None:
    """All that is documented is printed, and nothing that is not."""
    if section == "metrics":
        pytest.importorskip("prometheus_client")
    keys = SECTIONS[section]
    assert keys, section
    always = {name for name, there in keys.items() if there}
    seen: set[str] = set()
    for words in scene.commands(section):
        _, out, err = ctl(*words, "--json")
        assert out, err
        found = read(out)
        for one in found if isinstance(found, list) else [found]:
            mine = set(keys_of(one))
            empty = {name for name in always if "[]." in name and not one[name.split("[]")[0]]}
            assert always - mine <= empty, (words, always - mine)
            seen |= mine
    assert seen == set(keys) - UNSEEN.get(section, set())


def test_the_keys_of_demo_are_those_of_the_page() -> None:
    """Seen by the drills themselves elsewhere; here its fields are held against the page."""
    fields = {f"drills[].{field.name}" for field in dataclasses.fields(demo.Outcome)}
    assert set(SECTIONS["demo"]) == fields | {"ok"}


def verbs(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from verbs(command, *path, name)
        else:
            yield " ".join((*path, name)), command


def test_every_verb_has_json_but_those_that_print_no_data() -> None:
    """And each of them is on the page."""
    with_json = {
        name
        for name, command in verbs(app)
        if any("--json" in option.opts for option in command.params)
    }
    assert {name for name, _ in verbs(app)} - with_json == {"replica", "completion"}
    assert {title.split(" --")[0] for title in SECTIONS} == with_json


def test_every_verb_that_looks_has_readonly() -> None:
    """In its options, and so in its help."""
    looking = {
        *("stats", "health", "peek", "results", "top", "tail", "verify", "metrics", "backup"),
        *("dlq list", "dlq show", "dlq export", "dlq watch", "dlq redrive"),  # its dry run
    }
    found = {
        name
        for name, command in verbs(app)
        if any("--readonly" in option.opts for option in command.params)
    }
    assert found == looking
