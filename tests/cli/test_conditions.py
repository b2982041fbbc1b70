"""Every verb on a file that is healthy, at work, damaged, not writable, missing, not ours."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import COMMAND, kill_letters, start, until
from tests.helpers.faults import read_only
from tests.helpers.processes import environment

import weclaw_embedded as weclaw

LETTER = "LETTER"  # stands for the id of a dead letter
OUT = "OUT"  # for a path that is free

#: What only looks. FILE is put in after the verb.
LOOKING: list[tuple[str, ...]] = [
    ("stats",),
    ("health",),
    ("peek",),
    ("peek", "--leased"),
    ("results",),
    ("verify",),
    ("top", "--interval", "0.1"),
    ("tail", "--no-follow"),
    ("metrics",),
    ("dlq list",),
    ("dlq show", LETTER),
    ("dlq export", OUT),
]
#: What changes something, or copies.
CHANGING: list[tuple[str, ...]] = [
    ("put", '{"n": 1}'),
    ("pause", "0.1"),
    ("resume",),
    ("replay", "--offset", "earliest"),
    ("dlq redrive",),
    ("dlq redrive", "--dry-run"),
    ("dlq purge", "--yes"),
    ("repair", "--yes"),
    ("backup", OUT),
    ("purge", "--yes"),
]


def test_what_cannot_be_written_says_what_works(tmp_path: Path, ctl: Any) -> None:
    """One line with the next step, also where it is not the queue that is opened."""
    folder = tmp_path / "here"
    folder.mkdir()
    with weclaw.Queue(folder / "t.wq", replica=str(folder / "copy.wq")) as q:
        q.put(1)
    with read_only(folder, tmp_path / "there") as there:
        status, _, err = ctl("promote", there / "copy.wq", "--yes")
        assert (status, len(err.splitlines())) == (1, 1)
        assert "can't be written (Read-only file system)" in err
        assert "what only looks" in err
        status, _, err = ctl("bench", there / "t.wq", "-n", 100)
        assert (status, len(err.splitlines())) == (1, 1)
        assert "name a FILE in a folder that can" in err


@pytest.mark.parametrize("words", [("health",), ("stats",), ("work", "x.py:handle")], ids=" ".join)
def test_a_file_that_may_not_be_read(
    words: tuple[str, ...],
    tmp_path: Path,
    ctl: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer of `health`, and for all others one line that promises no looking."""
    file = tmp_path / "t.wq"
    weclaw.Queue(file).close()
    (tmp_path / "x.py").write_text("def handle(msg): pass\n")
    monkeypatch.chdir(tmp_path)
    refused = PermissionError(errno.EACCES, "Permission denied", str(file))

    def no_open(*_: object, **__: object) -> NoReturn:
        raise weclaw.StorageError("as the library says it") from refused

    # Root may read everything, and the tests run as root too.
    monkeypatch.setattr(weclaw, "open", no_open)
    monkeypatch.setattr(os, "access", lambda *_: False)
    status, out, err = ctl(words[0], file, *words[1:])
    assert status == 1
    said = out if words[0] == "health" else err
    assert len(said.splitlines()) == 1
    assert "t.wq can't be read (Permission denied); nothing was changed; do this as its" in said
    if words[0] == "health":
        assert said.startswith("BAD opens")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up its rights for a moment")
@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_whether_there_is_a_file_behind_a_closed_folder_is_not_known(
    there: bool, tmp_path: Path, ctl: Any
) -> None:
    """No verb says that it does not exist: who believes it puts anew, elsewhere."""
    closed = tmp_path / "closed"
    closed.mkdir()
    file = closed / "t.wq"
    if there:
        weclaw.Queue(file).close()
    more = [
        ("promote",),
        ("work", "os.path:abspath", "--drain"),
        ("cancel", "x"),
        ("dlq purge", "--yes"),
    ]
    more += [("dlq watch", "--once", "--exec", "true")]
    closed.chmod(0o700)
    pytest.importorskip("prometheus_client")
    for words in LOOKING + CHANGING + more:  # imports what others may not be able to read
        ctl(*command(words, tmp_path / "open.wq"))
    before = sorted(closed.iterdir())
    os.seteuid(65534)
    try:
        answers = {words: ctl(*command(words, file)) for words in LOOKING + CHANGING + more}
        answers["demo",] = ctl("demo", "--tasks", file)
    finally:
        os.seteuid(0)
    for words, (status, out, err) in answers.items():
        said = out if words[0] == "health" else err
        assert status == 1, words
        assert len(said.splitlines()) == 1, (words, said)
        assert "Permission denied" in said, (words, said)
        assert "not exist" not in said, (words, said)
        assert "there is no" not in said, (words, said)
    assert sorted(closed.iterdir()) == before


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="root gives up a right of its own"
)
def test_nor_is_it_said_of_a_second_file_behind_a_closed_folder(tmp_path: Path) -> None:
    """A copy, a backup, a file of messages, the replica that is recorded."""
    closed, file = tmp_path / "closed", tmp_path / "t.wq"
    closed.mkdir()
    with weclaw.Queue(file, replica=str(closed / "copy.wq")) as q:
        q.put(1)
    closed.chmod(0o700)
    os.chown(closed, 65534, 65534)
    rights = "-dac_override,-dac_read_search"
    for words in (
        ("verify", file, "--against", closed / "copy.wq"),
        ("backup", file, closed / "out.wq"),
        ("put", file, closed / "t.jsonl"),
        ("put", file, "--input", closed / "t.jsonl"),
        ("dlq", "export", file, closed / "out.jsonl"),
        ("health", file, "--readonly"),
    ):
        done = subprocess.run(
            [
                *("setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", *COMMAND),
                *map(str, words),
            ],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
        said = done.stdout + done.stderr
        assert "Permission denied" in said or words[0] == "put", said
        for claim in ("not exist", "there is no", "no copy there"):
            assert claim not in said, said


@pytest.mark.parametrize("words", [("pause", "1"), ("replay", "--offset", "0")], ids=" ".join)
def test_a_link_that_leads_nowhere_is_no_file(
    words: tuple[str, ...], tmp_path: Path, file: Path, ctl: Any
) -> None:
    """Only put makes a file, through a link too."""
    file.symlink_to(tmp_path / "elsewhere.wq")
    status, _, err = ctl(words[0], file, *words[1:])
    assert status == 1
    assert "elsewhere.wq, where it leads; 'weclawctl put' makes one" in err
    assert not (tmp_path / "elsewhere.wq").exists()


def name_of(words: tuple[str, ...]) -> str:
    return " ".join(words)


def command(words: tuple[str, ...], file: Path, *extra: str, letter: str = "x") -> list[str]:
    verb, *rest = words
    out = f"{file}.{time.monotonic_ns()}.out"
    rest = [{LETTER: letter, OUT: out}.get(word, word) for word in rest]
    return [*verb.split(), str(file), *rest, *extra]


@pytest.fixture
def letter(file: Path) -> str:
    """A file with something of everything; the id of its dead letter."""
    (dead,) = kill_letters(file, {"n": 0})
    with weclaw.Queue(file) as q:
        q.put_many([{"n": n, "text": "a" * 200} for n in range(1, 9)])
        for n in range(3):
            q.get(timeout=5).ack(result={"n": n})
    return dead


@pytest.mark.parametrize("words", LOOKING + CHANGING, ids=name_of)
def test_on_a_healthy_file(words: tuple[str, ...], file: Path, letter: str, ctl: Any) -> None:
    """Ends with 0, prints within 80 columns, and says nothing on standard error."""
    status, out, err = ctl(*command(words, file, letter=letter))
    assert (status, err) == (0, "")
    if words[0] not in ("metrics", "put", "health") and OUT not in words:  # programs; long paths
        assert max(map(len, out.splitlines()), default=0) <= 80, out


@pytest.mark.parametrize("words", LOOKING, ids=name_of)
def test_looking_readonly(words: tuple[str, ...], file: Path, letter: str, ctl: Any) -> None:
    """--readonly changes no byte of the file and nothing beside it, scratch folder or none."""
    scratch = Path(f"{file}.d")
    shutil.rmtree(scratch)
    before = file.read_bytes()
    assert ctl(*command(words, file, "--readonly", letter=letter))[0] == 0
    assert file.read_bytes() == before
    assert not scratch.exists()


@pytest.mark.parametrize("words", LOOKING, ids=name_of)
def test_looking_at_what_may_not_be_written(
    words: tuple[str, ...],
    file: Path,
    letter: str,
    ctl: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the caller may not write is opened readonly without being asked for it."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    before = file.read_bytes()
    assert ctl(*command(words, file, letter=letter))[0] == 0
    assert file.read_bytes() == before


def test_on_a_read_only_mount(file: Path, letter: str, ctl: Any, tmp_path: Path) -> None:
    """Looking works without being told; changing says in one line that it can't."""
    with read_only(file.parent, tmp_path / "mounted") as mounted:
        there = mounted / file.name
        for words in LOOKING:
            if OUT not in words:
                assert ctl(*command(words, there, letter=letter))[0] == 0, words
        for words in CHANGING:
            status, _, err = ctl(*command(words, there))
            if "--dry-run" in words:
                assert status == 0
                continue
            assert status == 1, words
            assert len(err.splitlines()) == 1, err
            assert err.startswith("weclawctl: ")
            assert "can't be written" in err
            told = "the queue is as it was" if words == ("backup", OUT) else "nothing was changed"
            assert told in err


@pytest.mark.parametrize("words", LOOKING + CHANGING[1:], ids=name_of)
def test_on_a_missing_file(words: tuple[str, ...], file: Path, ctl: Any) -> None:
    """One line that says so, exit status 1, and no file made; only `put` makes one."""
    status, out, err = ctl(*command(words, file))
    assert status == 1
    assert "there is no such file" in out + err
    assert "Traceback" not in err
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize("words", LOOKING + CHANGING, ids=name_of)
def test_on_a_file_that_is_not_ours(words: tuple[str, ...], file: Path, ctl: Any) -> None:
    """Refused, and not touched."""
    file.write_bytes(b"\x89PNG" + bytes(5000))
    status, out, err = ctl(*command(words, file))
    assert status == 1
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 1
    assert out or err
    assert file.read_bytes() == b"\x89PNG" + bytes(5000)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("words", LOOKING + CHANGING, ids=name_of)
def test_on_a_damaged_file(words: tuple[str, ...], file: Path, letter: str, ctl: Any) -> None:
    """Damage is bad for `verify`, `health` and who asks for all, and stops nothing else."""
    with weclaw.Queue(file) as q:
        q.put("b" * 300)
        q.put("after it")
    data = bytearray(file.read_bytes())
    data[data.index(b"b" * 300) + 100] ^= 0xFF
    file.write_bytes(data)
    if words[0] == "health":  # which does not read everything, but knows what was met
        shutil.rmtree(f"{file}.d")
    for _ in range(2):  # found while it is opened, and known
        status, _, err = ctl(*command(words, file, letter=letter))
        leaves_out = words == ("replay", "--offset", "earliest")  # what it can't read
        assert status == (1 if words[0] in ("verify", "health") or leaves_out else 0), err
        assert "Traceback" not in err
        if words[0].startswith("dlq"):
            break  # the letter is no longer there


@pytest.fixture
def busy(file: Path, handlers: Callable[[str], str]) -> Iterator[Path]:
    """A file that another process works on meanwhile."""
    with weclaw.Queue(file) as q:
        q.put_many([{"n": n} for n in range(200)])
    spec = handlers("import time\ndef handle(msg):\n    time.sleep(0.05)\n    return 1\n")
    child = start("work", file, spec, "--concurrency", 2)
    with weclaw.Queue(file) as q:
        until(lambda: q.stats().settled > 0)
    yield file
    child.terminate()
    child.communicate(timeout=30)
    assert child.returncode == 0


def test_on_a_file_at_work(busy: Path, ctl: Any, js: Any) -> None:
    """All verbs work while another process has the file, and that one is not disturbed."""
    kill_letters(busy, 1)
    with weclaw.Queue(busy) as q:
        (dead,) = q.dlq.peek(1)
    for words in LOOKING + CHANGING[:-1]:
        status, _, err = ctl(*command(words, busy, letter=dead.id))
        assert status == 0, (words, err)
        if words[0] in ("pause", "dlq purge"):
            kill_letters(busy, 1)
    until(lambda: js("peek", busy, "--leased"))
    found = js("stats", busy)
    until(lambda: js("stats", busy)["settled"] > found["settled"])
    assert ctl(*command(CHANGING[-1], busy))[0] == 0


@pytest.mark.parametrize("words", [*LOOKING, *CHANGING], ids=name_of)
def test_json_is_json(words: tuple[str, ...], file: Path, letter: str, ctl: Any) -> None:
    """Every verb that prints data has --json, in one document or one line each."""
    status, out, err = ctl(*command(words, file, "--json", letter=letter))
    assert status == 0, err
    try:
        json.loads(out)
    except ValueError:
        assert [json.loads(line) for line in out.splitlines()]


def test_a_name_that_begins_with_a_dash_or_is_a_link(
    file: Path, letter: str, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a file may be called."""
    monkeypatch.chdir(file.parent)
    link = file.parent / "-ссылка ‘x’.wq"
    link.symlink_to(file)
    assert ctl("stats", "--", link.name)[0] == 0
    assert ctl("dlq", "show", "--", link.name, letter)[0] == 0


def test_a_new_file_where_nothing_can_be_written_is_not_said_to_be_unreadable(
    tmp_path: Path, ctl: Any
) -> None:
    """There is none: it can't be made there."""
    folder = tmp_path / "here"
    folder.mkdir()
    with read_only(folder, tmp_path / "there") as there:
        status, _, err = ctl("put", there / "new.wq", '"x"')
        assert status == 1
        assert "does not exist and can't be made" in err
        assert "can't be read" not in err
        with pytest.raises(weclaw.StorageError, match="there is no such file, and none can be"):
            weclaw.Queue(there / "new.wq")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        ("stats",),
        ("stats", "--json"),
        ("tail", "--no-follow", "--json"),
        ("top", "-n", "1"),
        ("metrics",),
        ("dlq export", "-"),
        ("put", "1"),
        ("--help",),
    ],
    ids=" ".join,
)
def test_a_full_standard_output_is_named_as_such(
    words: tuple[str, ...], file: Path, letter: str
) -> None:
    """It leaves nobody to think that it is the disk of the queue that is full."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *command(words, file)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=60,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(
        "weclawctl: standard output can't be written (No space left on device), so not all was"
    )
    assert done.stderr.count("\n") == 1


def with_closed(streams: str, *words: object) -> subprocess.CompletedProcess[str]:
    """weclawctl as a shell runs it with some of the standard streams closed."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {streams}', "sh", *COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(),
        timeout=60,
    )


def test_with_a_standard_stream_closed(file: Path) -> None:
    """What needs it says so in one line, and the queue's file never takes its place."""
    with weclaw.Queue(file) as q:
        q.put("first")
    done = with_closed(">&-", "stats", file)
    assert done.returncode == 1
    assert done.stderr.startswith("weclawctl: standard output can't be written (Bad file")
    assert done.stderr.count("\n") == 1
    for verb in ("put", "replica"):
        done = with_closed("<&-", verb, file)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert with_closed("<&-", "purge", file).returncode == 1  # nobody can be asked
    done = with_closed("2>&-", "stats", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "default" in done.stdout
    assert with_closed("<&- >&- 2>&-", "put", file, "second").returncode == 1  # it prints a line
    with weclaw.Queue(file) as q:
        assert q.store.verify() == []
        assert [msg.body for msg in q.peek(5)] == ["first", "second"]
