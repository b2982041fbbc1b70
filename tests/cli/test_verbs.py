"""weclawctl: what each verb prints and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import ROOT, kill_letters, start, until

import weclaw_embedded as weclaw
from weclaw_embedded.cli import _common
from weclaw_embedded.cli._app import app

# put


def test_put_reads_one_object_a_line(file: Path, tmp_path: Path, ctl: Any) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text('{"a": 1}\n\n  {"a": "ü"}  \n[1, 2]', encoding="utf-8")
    status, out, _ = ctl("put", file, "--input", source)
    assert status == 0
    assert out.startswith("3 messages put")
    with weclaw.Queue(file) as q:
        assert [q.get(timeout=5).body for _ in range(3)] == [{"a": 1}, {"a": "ü"}, [1, 2]]


def test_put_reads_a_pipe_and_does_not_wait_for_its_end(file: Path) -> None:
    child = start("put", file, "--json", stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write('{"n": 1}\n')
    child.stdin.flush()
    first = json.loads(child.stdout.readline())
    with weclaw.Queue(file) as q:
        assert q.get(timeout=5).id == first["id"]
        q.stats()
    out, err = child.communicate('{"n": 2}\n', timeout=30)
    assert child.returncode == 0, err
    assert json.loads(out)["id"] != first["id"]


def test_a_line_that_is_no_json_is_named_and_what_was_before_it_is_put(
    file: Path, tmp_path: Path, ctl: Any
) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text('{"a": 1}\n{"a": \n{"a": 3}\n', encoding="utf-8")
    status, _, err = ctl("put", file, "--input", source)
    assert status == 1
    assert "line 2 is not JSON" in err
    assert "1 message before it" in err
    assert len(err.splitlines()) == 1
    with weclaw.Queue(file) as q:
        assert q.qsize() == 1


def test_put_takes_bodies_from_the_command_line(file: Path, js: Any, ctl: Any) -> None:
    found = js("put", file, '{"a": 1}')
    with weclaw.Queue(file) as q:
        assert q.get(timeout=5).id == found["id"]
    assert ctl("put", file, "plain text", "--priority", 5)[0] == 0
    assert ctl("put", file, "17", "--text", "--priority", 9)[0] == 0
    with weclaw.Queue(file) as q:
        assert [q.get(timeout=5).body for _ in range(2)] == ["17", "plain text"]
    status, _, err = ctl("put", file, '{"a": ')
    assert status == 1
    assert "looks like JSON" in err


def test_the_name_of_a_file_is_hardly_a_message(
    file: Path, tmp_path: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who forgot `<` or --input is told; --text is for those who mean it."""
    monkeypatch.chdir(tmp_path)
    for name in ("in.csv", "in.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n', encoding="utf-8")
        status, _, err = ctl("put", file, name)
        assert status == 2
        assert f"--input {name}" in err
        assert not file.exists()
    assert ctl("put", file, "none.csv")[0] == 0
    assert ctl("put", file, "in.csv", "--text")[0] == 0
    with weclaw.Queue(file) as q:
        assert [one.body for one in q.peek(3)] == ["none.csv", "in.csv"]


def test_the_line_that_is_refused_is_named(file: Path, tmp_path: Path, ctl: Any) -> None:
    """One message that can't be put stops at its line; what was before it is put."""
    source = tmp_path / "tasks.jsonl"
    source.write_text(f'{{"a": 1}}\n{{"a": 2}}\n{{"a": {2**70}}}\n{{"a": 4}}\n', "utf-8")
    status, _, err = ctl("put", file, "--input", source)
    assert status == 1
    assert err.startswith("weclawctl: line 3: ")
    assert "2 messages before it were put" in err
    with weclaw.Queue(file) as q:
        assert [one.body["a"] for one in q.peek(5)] == [1, 2]


def test_put_into_a_folder_that_is_not_there(tmp_path: Path, ctl: Any) -> None:
    status, _, err = ctl("put", tmp_path / "none" / "x.wq", "1")
    assert status == 1
    assert "there is no such folder" in err


def test_put_takes_key_and_id_from_fields(file: Path, tmp_path: Path, ctl: Any) -> None:
    source = tmp_path / "tasks.csv"
    source.write_text("order,customer,note\n1,a,\n2,b,hi\n", encoding="utf-8")
    command = ("put", file, "--input", source, "--id-field", "order", "--key-field", "customer")
    assert ctl(*command)[0] == 0
    assert ctl(*command)[0] == 0
    with weclaw.Queue(file) as q:
        assert q.qsize() == 2
        msg = q.get(timeout=5)
        assert (msg.id, msg.key, msg.body) == (
            "1",
            "a",
            {"order": "1", "customer": "a", "note": ""},
        )
    status, _, err = ctl("put", file, '{"x": 1}', "--id-field", "order")
    assert status == 1
    assert "no field 'order'" in err


# stats, health, peek, results


def test_stats_has_the_librarys_names(file: Path, js: Any, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put_many([1, 2, 3])
        q.get(timeout=5).ack()
    found = js("stats", file)
    assert (found["ready"], found["settled"]) == (2, 1)
    with weclaw.Queue(file) as q:
        assert set(q.stats()._asdict()) <= set(found)
    status, out, _ = ctl("stats", file)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80


def test_looking_makes_no_file_and_no_group(file: Path, js: Any, ctl: Any) -> None:
    for verb in ("stats", "peek", "verify"):
        status, _, err = ctl(verb, file)
        assert status == 1
        assert "no such file" in err
    assert not file.exists()
    with weclaw.Queue(file) as q:
        q.put(1)
    js("stats", file)
    js("peek", file)
    assert js("health", file)["ok"]
    with weclaw.open(file) as store:
        assert store.groups() == []


def test_health_ends_with_1_on_a_breach(file: Path, js: Any, ctl: Any) -> None:
    kill_letters(file, 1)
    with weclaw.Queue(file) as q:
        q.put_many([1, 2, 3])
    assert js("health", file)["ok"] is True
    assert js("health", file, "--max-backlog", 2, status=1)["ok"] is False
    assert js("health", file, "--max-backlog", 3, "--max-age", 600)["ok"] is True
    assert js("health", file, "--max-dead", 0, status=1)["ok"] is False
    status, out, _ = ctl("health", file, "--max-lag", 1000)
    assert status == 1
    assert "BAD replica_lag: there is no replica (limit 1000)" in out.splitlines()
    status, out, _ = ctl("health", file, "--max-dead", 0)
    assert status == 1
    assert "BAD dead default/default: 1 (limit 0)" in out.splitlines()


def test_health_of_a_missing_or_foreign_file_is_bad(file: Path, js: Any, tmp_path: Path) -> None:
    assert js("health", file, status=1)["ok"] is False
    foreign = tmp_path / "photo.wq"
    foreign.write_bytes(b"\x89PNG" + bytes(5000))
    found = js("health", foreign, status=1)
    assert found["checks"][0]["check"] == "opens"
    assert foreign.read_bytes() == b"\x89PNG" + bytes(5000)


def test_peek_takes_nothing(file: Path, js: Any, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put_many([{"n": n} for n in range(150)])
    assert [found["body"]["n"] for found in js("peek", file)] == list(range(100))
    assert len(js("peek", file, "-n", 3)) == 3
    assert js("stats", file)["ready"] == 150
    assert ctl("peek", file)[0] == 0


def test_results_end_with_1_unless_all_are_done(file: Path, js: Any, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        done, waiting = q.put_many([1, 2])
        q.get(timeout=5).ack(result={"answer": (1, b"x")})
    (found,) = js("results", file, done)
    assert found == {"id": done, "status": "done", "result": {"answer": [1, {"base64": "eA=="}]}}
    statuses = [one["status"] for one in js("results", file, done, waiting, "nobody", status=1)]
    assert statuses == ["done", "ready", "unknown"]
    assert ctl("results", file, done)[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_can_be_looked_at(file: Path, js: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put(1)
    file.chmod(0o400)
    assert js("stats", file)["ready"] == 1


def test_readonly_looks_without_writing(file: Path, js: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put(1)
    before = file.read_bytes()
    for words in (("stats",), ("peek",), ("health",), ("verify",), ("dlq", "list")):
        js(*words, file, "--readonly")
    assert file.read_bytes() == before


# dlq


def test_dead_letters_are_listed_shown_and_redriven(file: Path, js: Any, ctl: Any) -> None:
    first, second = kill_letters(file, {"n": 1}, {"n": 2})
    found = js("dlq", "list", file)
    assert [one["id"] for one in found] == [first, second]
    assert [one["reason"] for one in found] == ["blocked by policy"] * 2
    assert js("dlq", "show", file, first)["body"] == {"n": 1}
    status, out, _ = ctl("dlq", "show", file, first)
    assert status == 0
    assert "blocked by policy" in out
    assert "a test" in out
    status, out, _ = ctl("dlq", "list", file)
    assert status == 0
    assert first in out
    assert max(map(len, out.splitlines())) <= 80

    found = js("dlq", "redrive", file, "--dry-run")
    assert found == {"redriven": 0, "dry_run": True, "letters": 2, "ids": [first, second]}
    assert js("dlq", "redrive", file, first) == {"redriven": 1}
    assert js("dlq", "redrive", file) == {"redriven": 1}
    assert js("stats", file)["ready"] == 2
    assert ctl("dlq", "list", file)[1] == "no dead letters\n"


def test_what_is_no_dead_letter_is_said_so(file: Path, ctl: Any) -> None:
    kill_letters(file, 1)
    for words in (("show",), ("redrive",), ("purge", "--yes")):
        status, _, err = ctl("dlq", words[0], file, "nobody", *words[1:])
        assert status == 1
        assert "no dead letter" in err


def test_purging_letters_asks(file: Path, js: Any, ctl: Any) -> None:
    kill_letters(file, 1, 2)
    status, _, err = ctl("dlq", "purge", file)
    assert status == 1
    assert "--yes" in err
    assert js("dlq", "purge", file, "--yes") == {"purged": 2}
    assert js("dlq", "list", file) == []


def test_letters_are_exported(file: Path, tmp_path: Path, js: Any) -> None:
    ids = kill_letters(file, {"n": 1}, {"n": 2})
    out = tmp_path / "letters.jsonl"
    assert js("dlq", "export", file, out)["exported"] == 2
    lines = out.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == ids


# pause, resume, cancel, purge, verify


def test_pause_and_resume(file: Path, ctl: Any, js: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put(1)
        assert ctl("resume", file)[1] == "it was not paused\n"
        assert q._store.groups() == []  # nobody has read it yet, and asking is no reading
        assert ctl("pause", file, 60, "--reason", "upkeep")[0] == 0
        with pytest.raises(weclaw.Empty):
            q.get(block=False)
        assert js("resume", file)["was_paused"] is True
        q.get(timeout=5).ack()


def test_a_pause_is_seen_by_whoever_looks(file: Path, ctl: Any, js: Any) -> None:
    """With how long and why; it is no breach, since it may be meant."""
    with weclaw.Queue(file) as q:
        q.put(1)
    assert ctl("pause", file, 600, "--reason", "upkeep")[0] == 0
    status, out, _ = ctl("health", file, "--max-backlog", 5)
    assert status == 0
    assert re.search(
        r"^!!  flow default/default: paused for 10 m more: upkeep$", out, re.MULTILINE
    ), out
    found = js("health", file)
    (flow,) = [one for one in found["checks"] if one["check"] == "flow"]
    assert (found["ok"], flow["ok"], flow["warning"]) == (True, True, True)
    assert "is paused for 10 m more: upkeep" in ctl("stats", file)[1]
    (group,) = js("stats", file)["groups"]
    assert (group["paused"], group["pause_reason"]) == (True, "upkeep")
    assert 590 < group["pause_left_s"] <= 600


def test_cancel(file: Path, js: Any) -> None:
    with weclaw.Queue(file) as q:
        one = q.put(1)
    assert js("cancel", file, one) == {"id": one, "cancelled": True}
    assert js("cancel", file, one, status=1)["cancelled"] is False


def test_what_is_not_cancelled_is_told_why(file: Path, ctl: Any) -> None:
    """Who has it, or in which topic it is, or that there is none."""
    with weclaw.open(file) as store:
        mail = store.queue("mails").put("a mail")
        q = store.queue(group="readers")
        one = q.put(1)
        q.get(timeout=5).ack()
    status, out, err = ctl("cancel", file, one)
    assert (status, out) == (1, "")
    assert "it is done in group 'readers'" in err
    assert "it is in topic 'mails', not in 'default'" in ctl("cancel", file, mail)[2]
    assert "there is no such message in topic 'default'" in ctl("cancel", file, "nobody")[2]
    assert "there is no topic 'mials'" in ctl("cancel", file, mail, "--topic", "mials")[2]
    assert ctl("cancel", file, mail, "--topic", "mails")[0] == 0


def test_purge_asks(file: Path, js: Any, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put_many([1, 2])
    assert ctl("purge", file)[0] == 1
    assert js("stats", file)["ready"] == 2
    assert js("purge", file, "--yes") == {"purged": 2, "kept": None}
    assert js("stats", file)["ready"] == 0


def test_verify_names_the_damage(file: Path, js: Any, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put_many([{"text": "x" * 500} for _ in range(3)])
        for _ in range(3):
            q.put({"text": "y" * 500})
    assert ctl("verify", file) == (0, "good: everything kept can be read\n", "")
    data = bytearray(file.read_bytes())
    data[data.index(b"y" * 500) + 250] ^= 0xFF
    file.write_bytes(data)
    found = js("verify", file, status=1)
    assert found[0]["offset"] > 0
    assert found[0]["reason"]
    assert ctl("verify", file)[0] == 1


# work


def test_work_drains_and_keeps_results(file: Path, js: Any, ctl: Any, handlers: Any) -> None:
    with weclaw.Queue(file) as q:
        ids = q.put_many([{"n": n} for n in range(50)])
    spec = handlers("def handle(msg):\n    return msg['n'] * 2\n")
    found = js("work", file, spec, "--drain", "--concurrency", 4)
    assert (found["done"], found["failed"], found["left"]) == (50, 0, 0)
    with weclaw.Queue(file) as q:
        assert [q.result(one) for one in ids] == [n * 2 for n in range(50)]
    assert ctl("work", file, spec, "--drain")[0] == 0


def test_a_handler_may_be_async_may_settle_itself_and_may_fail(
    file: Path, js: Any, handlers: Any
) -> None:
    with weclaw.Queue(file) as q:
        fine, own, bad = q.put_many(["fine", "own", "bad"])
    spec = handlers(
        "async def handle(msg):\n"
        "    if msg.body == 'own':\n        msg.fail('not for me')\n"
        "    if msg.body == 'bad' and msg.retry_count == 0:\n"
        "        msg.nack(backoff=0)\n        raise ValueError('once')\n"
        "    return 'done'\n"
    )
    found = js("work", file, spec, "--drain")
    assert found["failed"] == 1
    with weclaw.Queue(file) as q:
        assert q.result(fine) == q.result(bad) == "done"
        assert q.dlq.get(own).reason == "not for me"


def test_a_handler_that_is_not_there_is_wrong_usage(file: Path, ctl: Any, handlers: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put(1)
    ends = handlers("import sys\nsys.exit('at import')\n")
    for spec in (
        *("nothing", "no_such_module_here:handle", "json:__name__"),
        *(handlers("x = 1\n"), handlers("1 / 0\n"), handlers("import nothing_here\n"), ends),
    ):
        status, out, err = ctl("work", file, spec, "--drain")
        assert (status, out) == (2, "")
        assert len(err.splitlines()) == 1, err
    assert "no_such_module_here.py:handle" in ctl("work", file, "no_such_module_here:handle")[2]
    assert "ZeroDivisionError" in ctl("work", file, handlers("1 / 0\n"))[2]


@pytest.mark.crash
def test_work_goes_on_after_a_kill(file: Path, js: Any, handlers: Any) -> None:
    with weclaw.Queue(file) as q:
        ids = q.put_many(list(range(200)))
    spec = handlers("import time\ndef handle(msg):\n    time.sleep(0.005)\n    return msg.body\n")
    child = start("work", file, spec, "--concurrency", 4)
    with weclaw.Queue(file) as q:
        deadline = time.monotonic() + 30
        while q.stats().settled < 50 and time.monotonic() < deadline:
            time.sleep(0.01)
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert js("work", file, spec, "--drain", "--concurrency", 4)["left"] == 0
    with weclaw.Queue(file) as q:
        assert [q.result(one) for one in ids] == list(range(200))


def test_sigterm_hands_back_uncounted(file: Path, handlers: Any) -> None:
    began = file.parent / "began"
    with weclaw.Queue(file) as q:
        q.put("long")
        spec = handlers(
            "import pathlib, time\ndef handle(msg):\n"
            f"    pathlib.Path({str(began)!r}).touch()\n    time.sleep(60)\n"
        )
        child = start("work", file, spec, "--grace", 0.2)
        until(began.exists)
        child.terminate()
        child.communicate(timeout=20)
        assert child.returncode == 0
        msg = q.get(timeout=1)
        assert (msg.delivery_count, msg.retry_count, msg.crash_count) == (2, 0, 0)


# the rest


def test_errors_are_one_line_and_debug_shows_the_traceback(tmp_path: Path, ctl: Any) -> None:
    foreign = tmp_path / "photo.wq"
    foreign.write_bytes(b"\x89PNG" + bytes(5000))
    status, out, err = ctl("stats", foreign)
    assert (status, out) == (1, "")
    assert err.startswith("weclawctl: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" in ctl("stats", foreign, "--debug")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no-such-verb",), "no verb 'no-such-verb'"),
        (("stat", "x.wq"), "there is 'stats'"),
        (("stats",), "missing argument 'FILE'"),
        (("stats", "x.wq", "--nonsense"), "no such option '--nonsense'; 'weclawctl stats --help"),
        (
            ("work", "x.wq", "os:getcwd", "--max-retries", "3"),
            "no such option '--max-retries'; there is '--max-run-time'; 'weclawctl work --help",
        ),
        (("pause", "x.wq", "-5"), "what begins with '-' stands behind '--'; 'weclawctl"),
        (("put", "x.wq", "--priority", "10", "1"), "--priority"),
        (("pause", "x.wq", "soon"), "48h"),
        (("pause", "x.wq", "0"), "more than 0"),
        (("dlq", "lst", "x.wq"), "lst"),
        (("replay", "x.wq"), "--since"),
        (("work", "x.wq", "os:getcwd", "--concurrency", "0"), "--concurrency"),
        (("dlq", "redrive", "x.wq", "ID", "--readonly"), "--dry-run"),
        (("dlq", "watch", "x.wq", "--exec", " "), "--exec names no command"),
    ],
    ids=str,
)
def test_wrong_usage_is_one_line_and_ends_with_2(
    words: tuple[str, ...], said: str, ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong, and where it is said how it goes."""
    monkeypatch.chdir(tmp_path)
    status, out, err = ctl(*words)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("weclawctl")
    assert said in err
    assert "--help' says how" in err
    assert list(tmp_path.iterdir()) == []


def test_a_variable_that_makes_no_sense_is_wrong_usage(
    file: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with weclaw.Queue(file) as q:
        q.put(1)
    monkeypatch.setenv("WECLAW_RETENTION", "soon")
    status, _, err = ctl("stats", file)
    assert status == 2
    assert "WECLAW_RETENTION" in err
    assert len(err.splitlines()) == 1


def test_a_file_without_a_byte_is_no_healthy_queue(file: Path, ctl: Any, js: Any) -> None:
    """Something cut it to nothing, or nobody has put yet: not green, and left as it is."""
    file.touch()
    for verb in ("verify", "stats", "peek", "pause"):
        status, _, err = ctl(verb, file, *(["60"] if verb == "pause" else []))
        assert status == 1
        assert "is empty: there is no queue in it" in err
    assert js("health", file, status=1)["ok"] is False
    assert file.stat().st_size == 0
    assert list(file.parent.iterdir()) == [file]
    assert ctl("put", file, "1")[0] == 0
    assert ctl("verify", file)[0] == 0


def test_every_verb_has_help_that_fits_80_columns(ctl: Any) -> None:
    def walk(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
        yield path
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, *path, name)

    for path in walk(app):
        status, out, _ = ctl(*path, "--help")
        assert status == 0
        assert max(map(len, out.splitlines())) <= 80, path


def test_a_file_in_use_by_another_process_is_looked_at(file: Path, js: Any) -> None:
    child = start("put", file, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write('{"n": 1}\n')
    child.stdin.flush()
    deadline = time.monotonic() + 30
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    while js("stats", file)["ready"] < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert js("peek", file)[0]["body"] == {"n": 1}
    _, err = child.communicate(timeout=30)
    assert child.returncode == 0, err


def test_what_a_terminal_would_obey_is_not_printed(file: Path, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put("\x1b[2J\x07 evil [bold]markup[/bold]")
    _, out, _ = ctl("peek", file)
    assert "\x1b" not in out
    assert "\x07" not in out


def test_json_can_hold_every_body() -> None:
    body = {1: (b"\xff", float("nan")), None: float("inf"), b"k": [True], "s": "\ud800"}
    assert json.dumps(_common.jsonable(body))


@pytest.mark.crash
def test_the_drills_lose_nothing_and_asyncio_queue_does(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = (ROOT / "examples" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    tasks.write_text("\n".join(lines), encoding="utf-8")
    child = start("demo", "--tasks", tasks, "--json", cwd=tmp_path)
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    found = json.loads(out)
    assert found["ok"] is True
    ours = [one for one in found["drills"] if one["queue"] == "weclaw"]
    theirs = [one for one in found["drills"] if one["queue"] == "asyncio.Queue"]
    assert [one["lost"] for one in ours] == [0, 0]
    assert [one["done_before"] for one in ours] == [13, 0]
    assert all(one["lost"] > 0 for one in theirs)


def test_the_example_tasks_are_many_and_varied() -> None:
    lines = (ROOT / "examples" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines]
    assert len({task["prompt"] for task in tasks}) == len(tasks) >= 300
    assert len({task["lang"] for task in tasks}) >= 20
    assert len({task["id"] for task in tasks}) == len(tasks)


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['click'] = None\nfrom weclaw_embedded.cli import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 1
    assert "weclaw-embedded[cli]" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_python_imports_is_no_traceback(tmp_path: Path) -> None:
    """At whatever moment after the first line of the command: an end, and nothing on the screen."""
    code = (
        "import signal, sys, os\n"
        "from _weclawctl import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[1]:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    for module in ("lmdb", "click", "rich", "weclaw_embedded.cli._app", "rich.progress"):
        done = subprocess.run(
            [sys.executable, "-c", code, module],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            cwd=tmp_path,
        )
        assert done.returncode == -signal.SIGINT, (module, done.stderr)
        assert (done.stdout, done.stderr) == ("", ""), module


def test_stats_and_top_say_who_has_what_in_hand(file: Path, js: Any, ctl: Any) -> None:
    """By the name that was given as `consumer`."""
    with weclaw.Queue(file, consumer="mailer-7") as q:
        q.put_many([1, 2, 3])
        held = q.get_many(2)
        found = js("stats", file)
        assert found["consumers"] == found["groups"][0]["consumers"] == {"mailer-7": 2}
        assert "in hand: mailer-7 2" in ctl("stats", file)[1]
        assert js("top", file, "--interval", "0.1")["groups"][0]["consumers"] == {"mailer-7": 2}
        assert "default/default in hand: mailer-7 2" in ctl("top", file, "--interval", "0.1")[1]
        for msg in held:
            msg.ack()
        assert js("stats", file)["consumers"] == {}
        assert "in hand:" not in ctl("stats", file)[1]


def test_what_can_not_be_put_makes_no_file(file: Path, tmp_path: Path, ctl: Any) -> None:
    """Neither an input whose first line can't be used, nor an empty one."""
    source = tmp_path / "in"
    for text, fault in (
        ("{not json\n", "line 1 is not JSON"),
        ('\n{"a": 99999999999999999999999}\n', "line 2"),
        ('{"a": 1}\n', "there is no field 'id'"),
    ):
        source.write_text(text, encoding="utf-8")
        status, _, err = ctl("put", file, "--input", source, "--id-field", "id")
        assert status == 1
        assert fault in err or "no field" in err
        assert not file.exists()
    source.write_text("\n", encoding="utf-8")
    status, out, _ = ctl("put", file, "--input", source)
    assert status == 0
    assert "not made: there was nothing to put" in out
    assert not file.exists()
    source.write_text('{"a": 99999999999999999999999}\n', encoding="utf-8")
    assert ctl("put", file, "--input", source)[0] == 1
    assert not file.exists()
    source.write_text('{"a": 1}\n{"a": \n', encoding="utf-8")
    assert ctl("put", file, "--input", source)[0] == 1
    with weclaw.Queue(file) as q:
        assert q.qsize() == 1


def test_the_name_of_a_file_that_is_not_there_is_put_and_said(file: Path, ctl: Any) -> None:
    status, _, err = ctl("put", file, "nofile.jsonl")
    assert status == 0
    assert "there is no file 'nofile.jsonl', so the name itself is put" in err
    assert ctl("put", file, "nofile.jsonl", "--text")[2] == ""


def test_what_begins_with_a_dash_is_told_where_it_goes(file: Path, ctl: Any) -> None:
    status, _, err = ctl("pause", file, "-5")
    assert status == 2
    assert "'-5' is no option; what begins with '-' stands behind '--'" in err


def test_a_group_that_has_not_begun_does_not_stand_still(
    file: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would get has waited for nobody."""
    monkeypatch.setattr("weclaw_embedded.cli.look._STILL_S", -1.0)
    with weclaw.Queue(file) as q:
        q.put_many([1, 2])
        q.get(timeout=5).ack()
    out = ctl("stats", file, "--group", "nope")[1]
    assert "group 'nope' has not begun; this is what it would get" in out
    assert "stands still" not in out
    assert "stands still" in ctl("stats", file)[1]


def test_a_group_named_of_a_topic_that_none_has_read_is_said_to_be_new(
    file: Path, ctl: Any
) -> None:
    """Any name would do there, a misspelt one too: what it would get is shown, and said to be."""
    with weclaw.Queue(file) as q:
        q.put_many([1, 2])
    named = [file, "--group", "nope"]
    for verb in ("stats", "stats --json", "peek", "results", "dlq list", "top"):
        status, _, err = ctl(*verb.split(), *named)
        assert status == 0, verb
        assert "yet; group 'nope' would get all of it" in err, verb
        assert ctl(*verb.split(), file)[2] == "", verb
    new = "group 'nope' has not begun; this is what it would get"
    assert new in ctl("stats", *named)[1]
    status, out, _ = ctl("health", *named)
    assert (status, out.count("!!  named default/nope: has not begun")) == (0, 1)
    assert "!!" not in ctl("health", file)[1]
    with weclaw.Queue(file, group="nope") as q:
        q.get(timeout=5).ack()
    for verb in ("stats", "peek", "top"):
        status, out, err = ctl(verb, *named)
        assert (status, err) == (0, ""), verb
        assert "begun" not in out, verb
    assert "begun" not in ctl("health", *named)[1]


def test_what_is_in_hand_is_shown_with_its_body(file: Path, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put({"prompt": "never ends"})
        q.get(timeout=5)
        out = ctl("peek", file, "--leased")[1]
        assert '{"prompt": "never ends"}' in out.replace('":"', '": "')
        assert max(map(len, out.splitlines())) <= 80


def test_one_long_name_makes_no_lists_of_the_others(file: Path, ctl: Any) -> None:
    """What fits is a table; what is too wide for it stands behind that, whole."""
    long = "a-service-of-some-department.with-a-long-name.orders-of-customers"
    with weclaw.open(file) as store:
        for topic in ("mails", long, "reports", f"{long}-2"):
            store.queue(topic).put("x")
    status, out, _ = ctl("stats", file)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert " ".join(lines[0]) == "topic group ready delayed leased dead settled oldest"
    assert [line[:7] for line in lines[2:4]] == [
        [name, "default", "1", "0", "0", "0", "0"] for name in ("mails", "reports")
    ]
    assert lines[4:7] == [[], ["topic", long], ["group", "default"]]
    assert [line for line in lines if line[:1] == ["topic"]][1:] == [
        ["topic", long],
        ["topic", f"{long}-2"],
    ]
    assert ctl("stats", file, "--topic", long)[1].startswith(f"topic   {long}")
