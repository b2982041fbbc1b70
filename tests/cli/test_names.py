"""A topic or group that is not in the file: misspelt it looks empty and healthy, so it is said."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import kill_letters, start

import weclaw_embedded as weclaw

#: Verbs that go on only with names that are there, and what else they need.
STRICT: list[tuple[str, ...]] = [
    ("health",),
    ("top", "--interval", "0.1"),
    ("results",),
    ("pause", "60"),
    ("resume",),
    ("purge", "--yes"),
    ("purge", "--yes", "--drop-group"),
    ("replay", "--offset", "earliest"),
    ("dlq list",),
    ("dlq show", "x"),
    ("dlq redrive",),
    ("dlq redrive", "--dry-run"),
    ("dlq purge", "--yes"),
    ("dlq export", "-"),
    ("dlq watch", "--exec", "true", "--once"),
]
#: Those that take what begins with them, or shows what it would get: of a group that is.
LENIENT: list[tuple[str, ...]] = [("stats",), ("peek",)]


def name_of(words: tuple[str, ...]) -> str:
    return " ".join(words)


def command(words: tuple[str, ...], file: Path, *extra: str) -> list[str]:
    verb, *rest = words
    return [*verb.split(), str(file), *rest, *extra]


@pytest.fixture
def read_by_one(file: Path) -> Path:
    """A file with one topic, which one group has read."""
    kill_letters(file, 1)
    with weclaw.Queue(file) as q:
        q.put(2)
    return file


def groups(file: Path) -> list[tuple[str, str]]:
    with weclaw.open(file) as store:
        return [(one.topic, one.group) for one in store.groups()]


@pytest.mark.parametrize("words", [*STRICT, *LENIENT, ("cancel", "x")], ids=name_of)
def test_a_topic_that_is_not_there(words: tuple[str, ...], read_by_one: Path, ctl: Any) -> None:
    """Named, with those that are; exit status 1, and nothing changed."""
    status, out, err = ctl(*command(words, read_by_one, "--topic", "defualt"))
    assert status == 1
    said = err if words[0] != "health" else out
    assert "there is no topic 'defualt' in this file; the topics there are: 'default'" in said
    assert len(err.splitlines()) <= 1
    with weclaw.open(read_by_one) as store:
        (only,) = store.groups()
    assert (only.topic, only.ready, only.dead, only.paused) == ("default", 1, 1, False)


@pytest.mark.parametrize("words", STRICT, ids=name_of)
def test_a_group_that_is_not_there(words: tuple[str, ...], read_by_one: Path, ctl: Any) -> None:
    """The same; no group begins with a name that was misspelt."""
    status, out, err = ctl(*command(words, read_by_one, "--group", "defualt"))
    assert status == 1
    said = err if words[0] != "health" else out
    assert "there is no group 'defualt' in " in said
    assert "the groups there are: 'default'" in said
    assert groups(read_by_one) == [("default", "default")]


@pytest.mark.parametrize("words", LENIENT, ids=name_of)
def test_what_a_group_would_get_is_shown_with_a_line(
    words: tuple[str, ...], read_by_one: Path, ctl: Any
) -> None:
    """Two messages were put, and a new group would get both."""
    status, out, err = ctl(*command(words, read_by_one, "--group", "new"))
    assert status == 0
    assert "there is no group 'new' in topic 'default'; the groups there are: 'default'" in err
    assert out.count("\n") > 3
    assert groups(read_by_one) == [("default", "default")]


@pytest.mark.parametrize("words", [*STRICT[2:-1], *LENIENT], ids=name_of)
def test_a_topic_that_nobody_has_read_takes_any_group(
    words: tuple[str, ...], file: Path, ctl: Any
) -> None:
    """It waits for its first one, whatever that is called."""
    with weclaw.Queue(file) as q:
        q.put(1)
    _, _, err = ctl(*command(words, file, "--group", "workers"))
    assert "there is no group" not in err.replace("there is no group 'workers' yet", "")


@pytest.mark.parametrize("words", [("pause", "60"), ("purge", "--yes"), ("dlq redrive",)])
def test_a_default_that_is_not_there_is_no_reason_to_do_nothing(
    words: tuple[str, ...], file: Path, ctl: Any
) -> None:
    """Who forgot --topic is told which there are, instead of a success with no effect."""
    kill_letters(file, 1, topic="mails", group="senders")
    status, _, err = ctl(*command(words, file))
    assert status == 1
    assert "there is no topic 'default' in this file; the topics there are: 'mails'" in err
    status, _, err = ctl(*command(words, file, "--topic", "mails"))
    assert status == 1
    assert "there is no group 'default' in topic 'mails'; the groups there are: 'senders'" in err
    assert groups(file) == [("mails", "senders")]


def test_looking_at_a_default_that_is_not_there_tells(file: Path, ctl: Any) -> None:
    kill_letters(file, 1, topic="mails", group="senders")
    for verb in ("peek", "results"):
        status, _, err = ctl(verb, file)
        assert status == 0
        assert "the topics there are: 'mails'" in err
    assert "the topics there are: 'mails'" in ctl("stats", file, "--json")[2]
    for words in ((), ("--topic", "mails")):  # it shows all there are, so nothing is missing
        status, out, err = ctl("stats", file, *words)
        assert (status, err) == (0, "")
        assert "senders" in out
    assert "1 letter in topic 'mails', group 'senders'" in ctl("dlq", "list", file)[1]


def test_a_new_file_has_no_names_to_be_wrong(file: Path, ctl: Any) -> None:
    """Nothing was put yet: it can be looked at, and paused before the first message."""
    weclaw.open(file).close()
    for words in (("stats",), ("peek",), ("health",), ("top", "--interval", "0.1"), ("results",)):
        status, _, err = ctl(words[0], file, *words[1:])
        assert (status, err) == (0, "")
    assert ctl("stats", file, "--topic", "mails")[0] == 1
    assert ctl("pause", file, "60")[0] == 0
    assert groups(file) == [("default", "default")]


def test_put_begins_a_topic_and_work_a_group(file: Path, ctl: Any, js: Any, handlers: Any) -> None:
    """The first with no word, the second with a line: a consumer may be there first."""
    kill_letters(file, 1)
    assert ctl("put", file, "2", "--topic", "mails")[2] == ""
    spec = handlers("def handle(msg):\n    return 1\n")
    status, _, err = ctl("work", file, spec, "--drain", "--group", "second")
    assert status == 0
    assert "there is no group 'second' in topic 'default'" in err
    assert "begins" in err
    assert js("stats", file, "--group", "second")["settled"] == 1


def test_tail_waits_for_a_topic(file: Path, ctl: Any) -> None:
    """It may begin at any moment, unless nobody waits for it."""
    kill_letters(file, 1)
    status, _, err = ctl("tail", file, "--topic", "mails", "--no-follow")
    assert status == 1
    assert "there is no topic 'mails'" in err
    child = start("tail", file, "--topic", "mails", stdin=subprocess.DEVNULL)
    assert child.stderr is not None
    assert child.stdout is not None
    assert "waiting for it" in child.stderr.readline()
    with weclaw.Queue(file, "mails") as q:
        q.put("the first mail")
    assert "the first mail" in child.stdout.readline()
    child.terminate()
    child.communicate(timeout=30)


def test_stats_shows_the_groups_that_were_asked_for(file: Path, ctl: Any) -> None:
    kill_letters(file, 1)
    kill_letters(file, 1, topic="mails", group="senders")
    kill_letters(file, 1, topic="mails", group="archive")
    _, out, _ = ctl("stats", file)
    assert [name in out for name in ("default", "senders", "archive")] == [True, True, True]
    _, out, _ = ctl("stats", file, "--group", "senders", "--topic", "mails")
    assert [name in out for name in ("default", "senders", "archive")] == [False, True, False]
    _, out, _ = ctl("stats", file, "--topic", "mails")
    assert [name in out for name in ("default", "senders", "archive")] == [False, True, True]


def test_a_drain_of_a_topic_that_is_not_there_is_no_drain(
    read_by_one: Path, ctl: Any, handlers: Any
) -> None:
    """Misspelt in a timetable, it would end well for ever and do nothing."""
    spec = handlers("def handle(msg): pass\n")
    before = groups(read_by_one)
    status, _, err = ctl("work", read_by_one, spec, "--drain", "--topic", "defualt")
    assert (status, len(err.splitlines())) == (1, 1)
    assert "there is no topic 'defualt'" in err
    assert "nothing was done" in err
    assert groups(read_by_one) == before
