"""weclawctl dlq: choose, redrive, export, purge, and call somebody."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import Terminal, kill_letters, start, until

import weclaw_embedded as weclaw


@pytest.fixture
def letters(file: Path) -> dict[str, list[str]]:
    """Letters of two reasons, and one in another topic and group."""
    found = {
        "timeout": kill_letters(file, {"n": 1}, {"n": 2}, reason="TimeoutError: no answer"),
        "policy": kill_letters(file, {"n": 3}, reason="blocked by policy"),
    }
    found["other"] = kill_letters(file, b"\xff", topic="mails", group="senders")
    return found


def test_letters_are_chosen_by_reason_and_age(file: Path, letters: Any, js: Any, ctl: Any) -> None:
    """--reason is a part of the reason in any case; ages count from the death."""
    assert [one["id"] for one in js("dlq", "list", file, "--reason", "timeout")] == letters[
        "timeout"
    ]
    assert js("dlq", "list", file, "--older-than", "1h") == []
    assert len(js("dlq", "list", file, "--newer-than", "1h")) == 3
    assert len(js("dlq", "list", file, "--newer-than", "1h", "--reason", "POLICY")) == 1
    assert "no dead letters that pass" in ctl("dlq", "list", file, "--reason", "nonsense")[1]
    assert ctl("dlq", "list", file, "--older-than", "soon")[0] == 2


def test_letters_elsewhere_are_not_overlooked(file: Path, letters: Any, ctl: Any) -> None:
    """Who looks in the wrong topic is told where there are letters."""
    with weclaw.Queue(file, "empty") as q:
        q.put(1)
    _, out, _ = ctl("dlq", "list", file, "--topic", "empty")
    assert "1 letter in topic 'mails', group 'senders'" in out
    assert "3 letters in topic 'default', group 'default'" in out


def test_a_long_list_is_cut_and_says_so(file: Path, js: Any, ctl: Any) -> None:
    kill_letters(file, *range(120))
    assert len(js("dlq", "list", file)) == 120
    assert len(js("dlq", "list", file, "-n", 5)) == 5
    assert "the first 5 of 120 letters" in ctl("dlq", "list", file, "-n", 5)[1]


def test_a_dry_run_shows_and_changes_nothing(file: Path, letters: Any, js: Any, ctl: Any) -> None:
    status, out, _ = ctl("dlq", "redrive", file, "--reason", "timeout", "--dry-run")
    assert status == 0
    assert out.splitlines() == [*letters["timeout"], "2 dead letters would be redriven"]
    assert js("dlq", "redrive", file, "-n", 1, "--dry-run") == {
        "redriven": 0,
        "dry_run": True,
        "letters": 1,
        "ids": letters["timeout"][:1],
    }
    assert js("stats", file)["dead"] == 3


def test_those_that_pass_are_redriven(file: Path, letters: Any, js: Any, ctl: Any) -> None:
    assert js("dlq", "redrive", file, "--reason", "timeout") == {"redriven": 2}
    assert [one["id"] for one in js("dlq", "list", file)] == letters["policy"]
    assert js("dlq", "redrive", file, "--reason", "timeout", status=1) == {"redriven": 0}
    assert ctl("dlq", "redrive", file, "--all", "--reason", "x")[0] == 2
    assert js("dlq", "redrive", file, "--all") == {"redriven": 1}
    assert js("dlq", "redrive", file, "--topic", "mails", "--group", "senders")["redriven"] == 1


@pytest.mark.parametrize("words", [(), ("--all",), ("--reason", "timeout")], ids=str)
def test_redrive_shows_and_asks_on_a_terminal(
    words: tuple[str, ...], file: Path, letters: Any, js: Any
) -> None:
    """No is the default; nobody is asked for those that are named, nor with --yes."""
    number = 2 if "timeout" in words else 3
    with Terminal("dlq", "redrive", file, *words) as screen:
        screen.wait_for(rf"{letters['timeout'][0]}  TimeoutError: no answer")
        screen.wait_for(rf"Redrive {number} dead letters\? \[y/N\]")
        screen.type("\n")
        assert screen.end() == 1
        assert "nothing was done" in screen.text
    assert js("stats", file)["dead"] == 3
    with Terminal("dlq", "redrive", file, *words) as screen:
        screen.wait_for(r"\[y/N\]")
        screen.type("y\n")
        assert screen.end() == 0
    assert js("stats", file)["dead"] == 3 - number
    kill_letters(file, "another", reason="TimeoutError: no answer")
    with Terminal("dlq", "redrive", file, *words, "--yes") as screen:
        assert screen.end() == 0


def test_redrive_of_a_named_letter_does_not_ask(file: Path, letters: Any, js: Any) -> None:
    with Terminal("dlq", "redrive", file, letters["policy"][0]) as screen:
        assert screen.end() == 0
    assert [one["id"] for one in js("dlq", "list", file)] == letters["timeout"]


def test_an_export_replaces_nothing_unasked(
    file: Path, letters: Any, tmp_path: Path, ctl: Any, js: Any
) -> None:
    """An empty file has nothing to lose; the queue itself and a device are never replaced."""
    out = tmp_path / "letters.jsonl"
    out.touch()
    assert js("dlq", "export", file, out)["exported"] == 3
    before = out.read_bytes()
    status, _, err = ctl("dlq", "export", file, out, "--reason", "timeout")
    assert status == 1
    assert "exists" in err
    assert "--yes" in err
    assert out.read_bytes() == before
    assert js("dlq", "export", file, out, "--reason", "timeout", "--yes")["exported"] == 2
    with Terminal("dlq", "export", file, out) as screen:
        screen.wait_for(r"Replace it\? \[y/N\]")
        screen.type("n\n")
        assert screen.end() == 1
    assert len(out.read_text("utf-8").splitlines()) == 2

    queue = file.read_bytes()
    status, _, err = ctl("dlq", "export", file, file, "--yes")
    assert (status, "is the queue itself" in err) == (1, True)
    assert file.read_bytes() == queue
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, _, err = ctl("dlq", "export", file, pipe, "--yes")
    assert (status, "no regular file" in err) == (1, True)
    assert pipe.is_fifo()


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_an_export_to_standard_output(form: str, file: Path, letters: Any, ctl: Any) -> None:
    status, out, err = ctl("dlq", "export", file, "-", "--format", form)
    assert (status, err) == (0, "")
    rows = (
        list(csv.DictReader(io.StringIO(out)))
        if form == "csv"
        else [json.loads(line) for line in out.splitlines()]
    )
    assert [row["id"] for row in rows] == letters["timeout"] + letters["policy"]


def test_purge_asks_on_a_terminal(file: Path, letters: Any, js: Any) -> None:
    """No is the default; a yes does it."""
    with Terminal("dlq", "purge", file, "--reason", "timeout") as screen:
        screen.wait_for(r"Take 2 dead letters .* away for good\? \[y/N\]")
        screen.type("\n")
        assert screen.end() == 1
        assert "nothing was done" in screen.text
    assert js("stats", file)["dead"] == 3
    with Terminal("dlq", "purge", file, "--reason", "timeout") as screen:
        screen.wait_for(r"\[y/N\]")
        screen.type("y\n")
        assert screen.end() == 0
    assert [one["id"] for one in js("dlq", "list", file)] == letters["policy"]


def test_export_as_csv_and_jsonl(file: Path, letters: Any, tmp_path: Path, js: Any) -> None:
    """The name says the form; a body that JSON can't write is given as its bytes in base64."""
    out = tmp_path / "letters.csv"
    assert js("dlq", "export", file, out, "--reason", "timeout")["exported"] == 2
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    assert [row["id"] for row in rows] == letters["timeout"]
    assert [json.loads(row["body"]) for row in rows] == [{"n": 1}, {"n": 2}]
    assert json.loads(rows[0]["failures"])[0]["reason"] == "TimeoutError: no answer"
    out = tmp_path / "letters.jsonl"
    js("dlq", "export", file, out, "--topic", "mails", "--group", "senders")
    assert json.loads(out.read_text(encoding="utf-8"))["body"] == {"base64": "/w=="}
    assert sorted(one.name for one in tmp_path.iterdir() if "letters" in one.name) == [
        "letters.csv",
        "letters.jsonl",
    ]


def test_an_export_that_can_not_be_written_leaves_nothing(
    file: Path, letters: Any, tmp_path: Path, ctl: Any
) -> None:
    status, _, err = ctl("dlq", "export", file, tmp_path / "no such folder" / "x.jsonl")
    assert status == 1
    assert "no such folder" in err
    (tmp_path / "taken").mkdir()
    assert ctl("dlq", "export", file, tmp_path / "taken")[0] == 2


def test_json_of_a_letter_and_of_a_result_follow_one_rule(file: Path, js: Any) -> None:
    """A body reads the same wherever it is printed."""
    body = {"b": b"\xff", "nan": float("nan"), "t": (1, 2), 5: None}
    (dead,) = kill_letters(file, body)
    with weclaw.Queue(file) as q:
        q.put(body)
        shown = [js("peek", file)[0]["body"], js("dlq", "show", file, dead)["body"]]
        done = q.put(body, id="done")
        for _ in range(2):
            q.get(timeout=5).ack(result=body)
    shown.append(js("results", file, done)[0]["result"])
    expected = {"b": {"base64": "/w=="}, "nan": "nan", "t": [1, 2], "5": None}
    assert shown == [expected] * 3


# watch


def called(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").split() if log.exists() else []


def note(log: Path) -> str:
    """A command that writes down whom it was called for."""
    return f'echo "$WECLAW_LETTER_ID" >> "{log}"'


def at_rest(file: Path) -> bool:
    """Whether the end of the last call is in the memory of the watch."""
    lines = Path(f"{file}.watch").read_text("utf-8").splitlines()
    return len(json.loads(lines[-1])) == 5


def test_watch_calls_once_for_each_letter_over_restarts(file: Path, tmp_path: Path) -> None:
    """Killed and started again, it goes on with what died meanwhile and repeats nothing."""
    log = tmp_path / "calls.log"
    first = kill_letters(file, 1)
    words = ("dlq", "watch", file, "--exec", note(log), "--interval", "0.1")
    child = start(*words)
    until(lambda: called(log) == first)
    second = kill_letters(file, 2, topic="mails", group="senders")
    until(lambda: called(log) == first + second)
    until(lambda: at_rest(file))  # killed before it has noted the end, it would say so
    child.kill()
    child.communicate()

    third = kill_letters(file, 3)
    child = start(*words)
    until(lambda: called(log) == first + second + third)
    with weclaw.Queue(file) as q:  # it dies a second time
        assert q.dlq.redrive(first) == 1
        q.get(timeout=5).fail("again")
    until(lambda: called(log) == first + second + third + first)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (0, "")
    assert called(log) == first + second + third + first


def test_watch_sees_what_nobody_else_would_judge(file: Path, tmp_path: Path) -> None:
    """A message that runs out of time while no consumer runs is called for."""
    log = tmp_path / "calls.log"
    with weclaw.Queue(file, start="earliest") as q:
        one = q.put(1, ttl=0.5)
    child = start("dlq", "watch", file, "--exec", note(log), "--interval", "0.1")
    until(lambda: called(log) == [one])
    child.terminate()
    child.communicate(timeout=30)


def test_the_command_gets_the_whole_letter(file: Path, tmp_path: Path, ctl: Any) -> None:
    """On standard input as JSON, and in its environment; nothing of it is run by the shell."""
    log = tmp_path / "letter.json"
    body = {"evil": '$(touch "pwned") `touch pwned`; "'}
    (dead,) = kill_letters(file, body, reason='x"; touch pwned; $(touch pwned)')
    code = "import json, os, sys; json.dump([json.load(sys.stdin), dict(os.environ)], sys.stdout)"
    command = f"{sys.executable} -c '{code}' > '{log}'"
    assert ctl("dlq", "watch", file, "--exec", command, "--once")[0] == 0
    letter, environment = json.loads(log.read_text(encoding="utf-8"))
    assert (letter["id"], letter["body"]) == (dead, body)
    assert environment["WECLAW_LETTER_ID"] == dead
    assert environment["WECLAW_LETTER_REASON"] == 'x"; touch pwned; $(touch pwned)'
    assert environment["WECLAW_LETTER_TOPIC"] == environment["WECLAW_LETTER_GROUP"] == "default"
    assert environment["WECLAW_LETTER_FILE"] == str(file)


def test_a_command_that_fails_is_called_again_until_it_works(
    file: Path, tmp_path: Path, ctl: Any, js: Any
) -> None:
    """By the next --once, over restarts, with the number of the attempt; then never again."""
    (dead,) = kill_letters(file, 1)
    words = ("dlq", "watch", file, "--once", "--exec")
    for attempt in (1, 2):
        status, _, err = ctl(*words, "exit 3")
        assert status == 1
        assert f"ended with 3 for {dead}, attempt {attempt}" in err
    log = tmp_path / "calls.log"
    found = js(*words, f'{note(log)}; test "$WECLAW_LETTER_ATTEMPT" = 3')
    assert (found["id"], found["attempt"], found["exit_status"]) == (dead, 3, 0)
    assert ctl(*words, note(log)) == (0, "", "")
    assert called(log) == [dead]


def test_a_watch_calls_again_after_a_pause(file: Path, tmp_path: Path) -> None:
    """A letter whose command fails holds up no other, and is called for again meanwhile."""
    log = tmp_path / "calls.log"
    bad, good = kill_letters(file, 1, 2)
    works = tmp_path / "works"
    command = f'{note(log)}; test "$WECLAW_LETTER_ID" != {bad} || test -e "{works}"'
    child = start(
        *("dlq", "watch", file, "--exec", command),
        *("--interval", "0.05", "--retry-after", "0.1"),
    )
    until(lambda: called(log).count(bad) >= 3)
    works.touch()
    until(lambda: _ended(file, bad))
    n = called(log).count(bad)
    third = kill_letters(file, 3)
    until(lambda: called(log)[-1:] == third)
    child.terminate()
    _, err = child.communicate(timeout=30)
    assert child.returncode == 0
    assert (called(log).count(bad), called(log).count(good)) == (n, 1)
    assert "attempt 2; it is called again in 0.2 s" in err


def _ended(file: Path, id: str) -> bool:
    """Whether the last line of the memory for this letter is a good end."""
    with weclaw.Queue(file) as q:
        offset = q.dlq.get(id).offset
    lines = Path(f"{file}.watch").read_text("utf-8").splitlines()
    mine = [json.loads(line) for line in lines if json.loads(line)[2] == offset]
    return mine[-1][4:] == [0]


def test_a_letter_redriven_meanwhile_is_not_called_for_again(
    file: Path, tmp_path: Path, ctl: Any
) -> None:
    kill_letters(file, 1)
    assert ctl("dlq", "watch", file, "--once", "--exec", "exit 3")[0] == 1
    assert ctl("dlq", "redrive", file)[0] == 0
    log = tmp_path / "calls.log"
    assert ctl("dlq", "watch", file, "--once", "--exec", note(log)) == (0, "", "")
    assert called(log) == []


def test_a_watch_killed_while_the_command_ran_says_so(file: Path, tmp_path: Path, ctl: Any) -> None:
    """Whether it did its work is not known: it is reported, once, and not called again."""
    log = tmp_path / "calls.log"
    (dead,) = kill_letters(file, 1)
    began = tmp_path / "began"
    child = start("dlq", "watch", file, "--exec", f"touch {began}; sleep 1; {note(log)}")
    until(began.exists)
    child.kill()
    child.wait(timeout=30)
    until(lambda: called(log) == [dead])  # the command itself was let end
    child.communicate(timeout=30)
    words = ("dlq", "watch", file, "--exec", note(log), "--once")
    status, _, err = ctl(*words)
    assert status == 0
    assert f"ended while the command ran for {dead} of topic 'default'" in err
    assert ctl(*words) == (0, "", "")
    assert called(log) == [dead]


def test_what_is_no_memory_of_a_watch_is_left_alone(file: Path, tmp_path: Path, ctl: Any) -> None:
    kill_letters(file, 1)
    other = tmp_path / "notes.txt"
    other.write_text("my notes\n", encoding="utf-8")
    status, _, err = ctl("dlq", "watch", file, "--exec", "true", "--once", "--state", other)
    assert status == 1
    assert "is not the memory of a watch" in err
    assert other.read_text("utf-8") == "my notes\n"


def test_what_was_there_can_be_skipped(file: Path, tmp_path: Path, ctl: Any) -> None:
    log = tmp_path / "calls.log"
    kill_letters(file, 1, 2)
    words = ("dlq", "watch", file, "--exec", note(log), "--once", "--skip-existing")
    assert ctl(*words)[0] == 0
    (third,) = kill_letters(file, 3)
    assert ctl(*words)[0] == 0
    assert called(log) == [third]


def test_two_watches_do_not_share_a_memory(file: Path, tmp_path: Path, ctl: Any) -> None:
    log = tmp_path / "calls.log"
    kill_letters(file, 1)
    child = start("dlq", "watch", file, "--exec", note(log))
    until(lambda: called(log))
    status, _, err = ctl("dlq", "watch", file, "--exec", note(log), "--once")
    assert status == 1
    assert "another watch" in err
    other = ("--state", tmp_path / "other.state")
    assert ctl("dlq", "watch", file, "--exec", note(log), "--once", *other)[0] == 0
    child.terminate()
    child.communicate(timeout=30)
    assert len(called(log)) == 2


def test_a_line_cut_by_a_crash_is_no_call(file: Path, tmp_path: Path, ctl: Any) -> None:
    """The last line of the memory is not whole: nobody was called for it."""
    log = tmp_path / "calls.log"
    ids = kill_letters(file, 1, 2)
    assert ctl("dlq", "watch", file, "--exec", note(log), "--once")[0] == 0
    memory = Path(f"{file}.watch")
    lines = memory.read_text(encoding="utf-8")
    first, _, third, _ = lines.splitlines()  # the call and its end, of each
    assert lines.index(third) > len(first)
    memory.write_text(lines[: lines.index(third) + 9], encoding="utf-8")
    assert ctl("dlq", "watch", file, "--exec", note(log), "--once")[0] == 0
    assert called(log) == [*ids, ids[1]]
    assert memory.read_text(encoding="utf-8").count("\n") == 3  # the first one's end, as whole


def test_ctrl_c_lets_the_command_end(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    (dead,) = kill_letters(file, 1)
    began = tmp_path / "began"
    with Terminal("dlq", "watch", file, "--exec", f"touch {began}; sleep 1; {note(log)}") as screen:
        until(began.exists)
        screen.type("\x03")
        assert screen.end() == 0
    assert called(log) == [dead]


def test_watching_readonly(file: Path, tmp_path: Path, ctl: Any) -> None:
    """Only letters that are written down are called for, once."""
    log = tmp_path / "calls.log"
    (dead,) = kill_letters(file, 1)
    with weclaw.Queue(file) as q:
        q.put(1, ttl=0.01)
    for _ in range(2):
        words = ("dlq", "watch", file, "--exec", note(log), "--once", "--readonly")
        assert ctl(*words)[0] == 0
    assert called(log) == [dead]


def test_the_memory_does_not_grow_for_ever(
    file: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters that are gone are forgotten when they have become many."""
    from weclaw_embedded.cli import watch

    monkeypatch.setattr(watch, "_SLACK", 3)
    kill_letters(file, *range(5))
    assert ctl("dlq", "watch", file, "--exec", "true", "--once")[0] == 0
    assert ctl("dlq", "purge", file, "--yes")[0] == 0
    kill_letters(file, 9)
    assert ctl("dlq", "watch", file, "--exec", "true", "--once")[0] == 0
    memory = Path(f"{file}.watch")
    assert memory.read_text(encoding="utf-8").count("\n") == 1
    assert not Path(f"{memory}.part").exists()


@pytest.mark.parametrize(("mode", "memory_mode"), [(0o600, 0o600), (0o640, 0o640), (0o400, 0o600)])
def test_the_memory_of_a_watch_has_the_owner_and_mode_of_the_queue(
    mode: int, memory_mode: int, file: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are names, offsets and times in it. When it is written anew, too; and it can be written
    beside a file that may only be read.
    """
    from weclaw_embedded.cli import watch

    monkeypatch.setattr(watch, "_SLACK", 1)
    kill_letters(file, 1, 2)
    file.chmod(mode)
    if not os.geteuid():
        os.chown(file, 1234, 2345)
    umask = os.umask(0o022)
    try:
        for _ in range(4):
            assert ctl("dlq", "watch", file, "--exec", "exit 1", "--once")[0] == 1
        own = Path(f"{file}.own")
        assert ctl("dlq", "watch", file, "--exec", "true", "--once", "--state", own)[0] == 0
    finally:
        os.umask(umask)
    queue = file.stat()
    for ending in (".watch", ".watch.lock"):
        found = Path(f"{file}{ending}").stat()
        assert (found.st_uid, found.st_gid) == (queue.st_uid, queue.st_gid)
        assert stat.S_IMODE(found.st_mode) == memory_mode
    assert stat.S_IMODE(own.stat().st_mode) == 0o644  # whose place it is may say whose it is


def test_nothing_is_given_away_for_a_link_beside_the_queue(file: Path, ctl: Any) -> None:
    """What has the name already stays as it is: root watches other people's queues."""
    kill_letters(file, 1)
    other = file.with_name("other")
    other.touch(0o604)
    other.chmod(0o604)
    Path(f"{file}.watch").symlink_to(other)
    assert ctl("dlq", "watch", file, "--exec", "true", "--once")[0] == 0
    assert stat.S_IMODE(other.stat().st_mode) == 0o604


def test_the_memory_of_a_command_that_always_fails_does_not_grow(
    file: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last line of a letter counts, and the number of attempts is kept."""
    from weclaw_embedded.cli import watch

    monkeypatch.setattr(watch, "_SLACK", 3)
    kill_letters(file, 1, 2)
    for attempt in range(1, 9):
        status, _, err = ctl("dlq", "watch", file, "--exec", "exit 1", "--once")
        assert status == 1
        assert err.count(f"attempt {attempt};") == 2
        assert len(Path(f"{file}.watch").read_text("utf-8").splitlines()) <= 2 * 2 + 3


def test_the_shell_runs_the_command_in_the_callers_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctl: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    kill_letters(file, 1)
    assert ctl("dlq", "watch", file, "--exec", "pwd > here", "--once")[0] == 0
    assert (tmp_path / "here").read_text(encoding="utf-8").strip() == str(tmp_path)


def test_ids_that_are_no_letters_are_named(file: Path, ctl: Any) -> None:
    """With filters and without: whoever named them misspelt them, or was late."""
    (dead,) = kill_letters(file, 1)
    for words in (
        ("redrive", file, "nobody", dead, "--dry-run"),
        ("redrive", file, "nobody", dead, "--reason", "blocked"),
        ("purge", file, "nobody", "--reason", "blocked", "--yes"),
        ("purge", file, "nobody", "--yes"),
    ):
        status, _, err = ctl("dlq", *words)
        assert status == 1
        assert "no dead letter of this topic and group: nobody; see" in err


@pytest.mark.parametrize(
    "words",
    [("redrive",), ("redrive", "--dry-run"), ("purge", "--yes"), ("redrive", "ID")],
    ids=str,
)
def test_a_reason_that_no_letter_has_is_told(words: tuple[str, ...], file: Path, ctl: Any) -> None:
    """As an id is that is none: a misspelt one is no success."""
    (dead,) = kill_letters(file, 1)
    verb, *others = (dead if word == "ID" else word for word in words)
    status, out, err = ctl("dlq", verb, file, *others, "--reason", "blokced")
    assert (status, out.split()[0]) == (1, "0")
    assert " has 'blokced' in its reason; 'dlq list --by-reason' has those there are" in err
    assert len(err.splitlines()) == 1
    assert ctl("dlq", verb, file, *others, "--reason", "blocked", "--older-than", "1h")[0] == 0
    assert ctl("dlq", verb, file, *others, "--reason", "Blocked")[0] == 0


def test_reasons_that_differ_in_numbers_are_one_row(file: Path, js: Any) -> None:
    """And what is shown for them is what --reason takes."""
    for n in range(3):
        kill_letters(file, n, reason=f"HTTPError: 50{n} after {n}.5 s, request 7f3a{n}c")
    kill_letters(file, 1, 2, reason="disk 1 is full")
    found = js("dlq", "list", file, "--by-reason")
    assert found == [
        {"reason": "HTTPError: # after #.# s, request #", "letters": 3},
        {"reason": "disk 1 is full", "letters": 2},
    ]
    for one in found:
        assert len(js("dlq", "list", file, "--reason", one["reason"])) == one["letters"]


def test_what_is_no_queue_gets_no_memory_of_a_watch(file: Path, tmp_path: Path, ctl: Any) -> None:
    """A file that is not ours, and a topic that is not there: nothing is made beside them."""
    file.write_text("notes")
    assert ctl("dlq", "watch", file, "--exec", "true", "--once")[0] == 1
    assert list(tmp_path.iterdir()) == [file]
    file.unlink()
    weclaw.Queue(file).close()
    before = sorted(tmp_path.iterdir())
    words = ("dlq", "watch", file, "--exec", "true", "--once", "--topic", "none")
    assert ctl(*words)[0] == 1
    assert sorted(tmp_path.iterdir()) == before


def test_what_the_command_of_a_watch_prints_is_no_part_of_the_json(file: Path) -> None:
    """Each line is an object; what the command says goes to standard error."""
    ids = kill_letters(file, 1, 2)
    words = ("dlq", "watch", file, "--once", "--exec", "echo called; echo $WECLAW_LETTER_ID")
    out, err = start(*words, "--json").communicate(timeout=60)
    assert [json.loads(line)["id"] for line in out.splitlines()] == ids
    assert err.split() == ["called", ids[0], "called", ids[1]]
    for letter in ids:
        with weclaw.Queue(file) as q:
            q.dlq.redrive([letter])
            q.get(timeout=5).fail("again")
    out, err = start(*words).communicate(timeout=60)
    assert out.split() == ["called", ids[0], "called", ids[1]]
