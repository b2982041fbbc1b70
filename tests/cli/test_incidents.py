"""The three incidents of docs/operations.md, played through with the commands of the page."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from tests.helpers.cli import ROOT, kill_letters, start, until
from tests.helpers.faults import small_disk

import weclaw_embedded as weclaw

PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")


class Section:
    """A section of the page: its commands, each of which must be run by the test."""

    def __init__(self, title: str, ctl: Callable[..., Any]) -> None:
        text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
        self.commands = [line.strip() for block in blocks for line in block.splitlines()]
        assert self.commands
        self._left = set(self.commands)
        self._ctl = ctl

    def run(self, line: str, status: int = 0, *extra: str, **values: str) -> str:
        """Run a command of the page, with values in the place of its capitals; its output."""
        assert line in self.commands, line
        self._left.discard(line)
        program, *words = shlex.split(line)
        words = [values.get(word, word) for word in words]
        if program == "kill":
            os.kill(int(words[1]), signal.SIGKILL)
            return ""
        if program != "weclawctl":
            return subprocess.check_output([program, *words], text=True)
        ended, out, err = self._ctl(*words, *extra)
        assert ended == status, (line, out, err)
        return str(out + err)

    def all_run(self) -> None:
        assert not self._left


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8 << 20) as place:
        monkeypatch.chdir(place)
        yield place
        monkeypatch.chdir(tmp_path)


def test_a_consumer_that_looks_alive_and_does_nothing(
    here: Path, ctl: Any, handlers: Callable[[str], str]
) -> None:
    """Found by its lease, ended by its pid, and the next one has its message at once."""
    page = Section("Incident: a consumer looks alive and does nothing", ctl)
    file = here / "tasks.wq"
    with weclaw.Queue(file) as q:
        q.put_many([{"n": n} for n in range(5)])
        q.pause(60, "five failures in a row")
        assert "is paused" in page.run("weclawctl stats tasks.wq")
        page.run("weclawctl resume tasks.wq")
        stuck = start("work", file, handlers("import time\ndef handle(m):\n    time.sleep(600)\n"))
        until(lambda: q.stats().leased == 1)
        out = page.run("weclawctl peek tasks.wq --leased")
        pid = re.search(r":(\d+)\s*$", out, re.MULTILINE)
        assert pid is not None, out
        assert int(pid[1]) == stuck.pid
        page.run("kill -9 PID", PID=pid[1])
        stuck.communicate(timeout=30)
        msg = q.get(timeout=1)
        assert (msg.body, msg.crash_count) == ({"n": 0}, 1)
        msg.release()
        drained = handlers("def handle(msg):\n    return 'ok'\n")
        assert ctl("work", file, drained, "--drain")[0] == 0
    page.all_run()


def test_a_handler_that_hangs_is_a_failed_delivery(
    here: Path, js: Any, handlers: Callable[[str], str]
) -> None:
    """What the page says to prevent it with."""
    with weclaw.Queue(here / "tasks.wq", retry=weclaw.RetryPolicy(max_retries=0)) as q:
        one = q.put(1)
        spec = handlers("import asyncio\nasync def handle(m):\n    await asyncio.sleep(600)\n")
        child = start("work", q._store.path, spec, "--max-run-time", "300ms")
        until(lambda: q.stats().retries == 1)
        child.terminate()
        child.communicate(timeout=30)
        assert q.status(one) == "delayed"
    assert js("health", here / "tasks.wq", "--max-age", "10m")["ok"]


@pytest.mark.crash
def test_a_disk_that_fills_up(
    disk: Path, tmp_path_factory: pytest.TempPathFactory, ctl: Any
) -> None:
    """Taking and settling go on, and each way out of the page makes room in the same process."""
    page = Section("Incident: the disk fills up", ctl)
    elsewhere = tmp_path_factory.mktemp("another disk")
    with weclaw.open(disk / "tasks.wq", retention=0) as store:
        q = store.queue()
        mails = store.queue("mails")
        reader = store.queue("mails", group="reader")
        store.queue("mails", group="old-reports", start="earliest")

        def fill(queue: weclaw.Queue) -> int:
            done = 0
            with pytest.raises(weclaw.DiskFullError):
                while True:
                    queue.put(b"x" * 50_000)
                    done += 1
            return done

        n = fill(mails)
        for _ in range(n):
            reader.get(timeout=5).ack()
        assert fill(mails) < 3  # the group that stands still keeps it all
        out = page.run("weclawctl stats tasks.wq")
        assert re.search(rf"mails +old-reports +{n}", out), out
        assert page.run("du -h tasks.wq").endswith("\ttasks.wq\n")
        page.run(
            "weclawctl purge tasks.wq --topic mails --group old-reports --drop-group", 0, "--yes"
        )
        until(lambda: _fits(q))
        mails.purge()
        reader.purge()

        fill(q)
        while (left := q.stats()).ready:
            q.get(timeout=5).fail("bad input")
        assert not _fits(q)
        status, _, err = ctl("dlq", "export", "tasks.wq", "letters.jsonl")  # no room for it here
        assert status == 1
        assert re.fullmatch(
            r"weclawctl: there is no room for \S+/letters.jsonl \(No space .*; .* another place\n",
            err,
        )
        assert not (disk / "letters.jsonl.part").exists()
        there = "/other/disk/letters.jsonl"
        page.run(
            f"weclawctl dlq export tasks.wq {there}", **{there: str(elsewhere / "letters.jsonl")}
        )
        assert (elsewhere / "letters.jsonl").read_text("utf-8").count('"bad input"') >= 1
        page.run("weclawctl dlq purge tasks.wq", 0, "--yes")
        until(lambda: _fits(q))

        fill(q)
        assert q.get(timeout=5).body  # still taken …
        page.run("weclawctl purge tasks.wq", 0, "--yes")
        until(lambda: _fits(q))
        page.run("weclawctl top tasks.wq", 0, "--interval", "0.1")
        del left
    page.all_run()


def _fits(queue: weclaw.Queue) -> bool:
    try:
        queue.put(b"y" * 50_000)
    except weclaw.DiskFullError:
        return False
    return True


def test_dead_letters_that_pour_in(here: Path, ctl: Any, js: Any) -> None:
    """Stopped, understood, tried with a few, redriven; what can't work is kept and taken out."""
    page = Section("Incident: dead letters pour in", ctl)
    file = here / "tasks.wq"
    late = kill_letters(file, *range(12), reason="TimeoutError: the provider did not answer")
    bad = kill_letters(file, "x", "y", reason="blocked by policy")
    with weclaw.Queue(file) as q:
        q.put("the next one")
        page.run('weclawctl pause tasks.wq 30m --reason "provider is down"')
        with pytest.raises(weclaw.Empty):
            q.get(block=False)
        out = page.run("weclawctl dlq list tasks.wq --by-reason")
        assert re.search(r"12 +TimeoutError: the provider did not answer", out)
        assert re.search(r"2 +blocked by policy", out)
        counted = js("dlq", "list", file, "--by-reason")
        assert [one["letters"] for one in counted] == [12, 2]
        out = page.run("weclawctl dlq list tasks.wq --newer-than 1h -n 20")
        assert late[0] in out
        out = page.run("weclawctl dlq show tasks.wq ID", ID=late[0])
        assert "TimeoutError" in out
        page.run("weclawctl resume tasks.wq")
        out = page.run("weclawctl dlq redrive tasks.wq --reason timeout --dry-run")
        assert "12 dead letters would be redriven" in out
        assert len(q.dlq) == 14
        page.run("weclawctl dlq redrive tasks.wq --reason timeout -n 5")
        assert len(q.dlq) == 9
        page.run("weclawctl top tasks.wq", 0, "--interval", "0.1")
        page.run("weclawctl dlq redrive tasks.wq --reason timeout")
        done = [q.get(timeout=5) for _ in range(13)]
        assert {msg.id for msg in done} > set(late)
        for msg in done:
            msg.ack()
        page.run(
            'weclawctl dlq export tasks.wq rejected.csv --reason "blocked by policy"',
        )
        assert (here / "rejected.csv").read_text("utf-8").count("blocked by policy") >= 2
        page.run('weclawctl dlq purge tasks.wq --reason "blocked by policy"', 0, "--yes")
        assert len(q.dlq) == 0
        assert q.status(bad[0]) == "unknown"
    page.all_run()
