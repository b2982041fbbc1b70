"""weclawctl top, tail, metrics, bench: what goes on, on a screen and for programs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from rich.cells import cell_len
from tests.helpers.cli import COMMAND, Terminal, kill_letters, start, until
from tests.helpers.processes import environment

import weclaw_embedded as weclaw

# top


def test_top_counts_what_happens(file: Path) -> None:
    """One object a line and look: counts, rates since the look before."""
    with weclaw.Queue(file) as q:
        q.put_many(range(10))
        q.get(timeout=5)
        child = start("top", file, "--json", "--interval", "0.3", "-n", 20)
        assert child.stdout is not None
        first = json.loads(child.stdout.readline())
        (group,) = first["groups"]
        assert (group["ready"], group["leased"], group["dead"]) == (9, 1, 0)
        q.put_many(range(5))
        q.get(timeout=5).ack()
        looks = [json.loads(child.stdout.readline())["groups"][0] for _ in range(4)]
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (0, "")  # as on a screen
    assert sum(look["puts_per_s"] for look in looks) > 0
    assert sum(look["settled_per_s"] for look in looks) > 0
    assert looks[-1]["settled"] == 1
    assert {"file_bytes", "reclaimable_bytes", "damaged", "replica_lag"} <= set(first)


def test_top_shows_topics_that_nobody_has_read(file: Path, js: Any) -> None:
    """As stats, health and metrics do."""
    with weclaw.Queue(file, "mails") as q:
        q.put_many([1, 2])
    (group,) = js("top", file, "--interval", "0.1")["groups"]
    assert (group["topic"], group["group"], group["ready"]) == ("mails", "default", 2)
    assert [one["ready"] for one in js("stats", file)["groups"]] == [2]
    checks = js("health", file, "--max-backlog", 1, status=1)["checks"]
    assert [one["topic"] for one in checks if one["check"] == "backlog"] == ["mails"]


def test_top_on_a_screen(file: Path) -> None:
    """Fits 80 by 24, is drawn anew, and Ctrl-C ends it with 0."""
    kill_letters(file, *range(3))
    with weclaw.open(file) as store:
        for n in range(40):
            store.queue(f"a topic with a long name, number {n}").put(n)
    with Terminal("top", file, "--interval", "0.2") as screen:
        screen.wait_for(r"topic/group +ready +delayed +leased +dead +in/s +done/s +retries +oldest")
        screen.wait_for(r"and \d+ more; choose with --topic")
        screen.raw = ""
        screen.wait_for(r"UTC")
        screen.type("\x03")
        assert screen.end() == 0
        screen.raw = screen.raw.split("\x1b[H")[1].split("^C")[0]
    assert len(screen.text.splitlines()) <= 24
    assert max(map(cell_len, screen.text.splitlines())) <= 80, screen.text
    assert "Traceback" not in screen.text


def test_top_says_who_is_paused_and_tells_long_names_apart(file: Path) -> None:
    """In 80 columns both ends of a topic and of a group are there, and the pause has its reason."""
    with weclaw.open(file) as store:
        for n in (1, 2):
            store.queue(
                f"a topic with a long name, number {n}",
                group="workers of one kind",
                start="earliest",
            ).put(n)
        store.queue("mails", group="senders").pause(3600, "provider is down " * 10)
    with Terminal("top", file, "--interval", "0.1", "-n", 1) as screen:
        assert screen.end() == 0
        text = screen.text
    for n in (1, 2):
        assert re.search(rf"a top…er {n}/work…kind", text), text
    assert "mails/senders is paused for 60 m more: provider is down" in text
    assert max(map(cell_len, text.splitlines())) <= 80, text


@pytest.mark.parametrize(
    "text", ["short", "a topic whose name is long", "写一份关于季度销售的报告"]
)
@pytest.mark.parametrize("width", [5, 9, 10])
def test_the_middle_of_a_long_name_is_left_out(text: str, width: int) -> None:
    """What is left fits, and has both ends."""
    from weclaw_embedded.cli._screen import middle

    found = middle(text, width)
    assert cell_len(found) <= width
    if found != text:
        begin, end = found.split("…")
        assert text.startswith(begin)
        assert end
        assert text.endswith(end)


@pytest.mark.parametrize("width", [5, 9, 10, 20])
@pytest.mark.parametrize(
    "form",
    [
        "topic-number-{:03}-with-a-long-name-主题",
        "主题主题主题{}主题主题主题",
        "{}",
        "a" * 30 + "{}",
    ],
)
def test_names_stay_apart_however_they_are_cut(form: str, width: int) -> None:
    """They fit, and no two are alike, though both ends of all are the same."""
    from weclaw_embedded.cli._screen import apart

    names = [form.format(n) for n in range(0, 200, 7)]
    found = apart(names, width)
    assert all(cell_len(one) <= width for one in found), found
    assert len(set(found)) == len(names), found


def test_top_tells_topics_apart_that_begin_and_end_alike(file: Path, ctl: Any) -> None:
    """The number in the middle is what one looks for."""
    with weclaw.open(file) as store:
        for n in range(40):
            store.queue(f"topic-number-{n:02}-with-a-long-name-主题").put(n)
    status, out, _ = ctl("top", file, "--interval", "0.1")
    assert status == 0
    rows = [line.split()[0] for line in out.splitlines() if "/default " in line]
    assert len(rows) == 40
    assert [row.split("…")[1][:2] for row in rows] == [f"{n:02}" for n in range(40)]
    assert max(map(cell_len, out.splitlines())) <= 80


# tail


def test_tail_begins_with_the_last_and_follows(file: Path) -> None:
    with weclaw.open(file) as store:
        q = store.queue()
        q.put_many([{"n": n} for n in range(20)])
        child = start("tail", file, "--json", "-n", 3)
        assert child.stdout is not None
        lines = child.stdout
        assert [json.loads(lines.readline())["body"]["n"] for _ in range(3)] == [17, 18, 19]
        own = store.queue("mails").put(b"\xff", key="k", priority=3, headers={"h": 1}, id="mine")
        found = json.loads(lines.readline())
        assert (found["id"], found["topic"], found["key"]) == (own, "mails", "k")
        assert (found["priority"], found["headers"]) == (3, {"h": 1})
        assert found["body"] == {"base64": "/w=="}
        for n in range(3):
            q.put(n)
            assert json.loads(lines.readline())["body"] == n
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (0, "")


def test_tail_reads_what_is_kept(file: Path, ctl: Any) -> None:
    """By topic, from an offset, over segments, and ends when told to."""
    with weclaw.Queue(file, segment_bytes=65536) as q:
        q.put_many(["x" * 20_000] * 10)
        ids = [q.put({"n": n, "text": "y" * 20_000}) for n in range(10)]
        mail = q._store.queue("mails").put("a mail")
    _, out, _ = ctl("tail", file, "--no-follow", "-n", 0)
    assert out == ""
    _, out, _ = ctl("tail", file, "--no-follow", "--offset", "earliest")
    assert len(out.splitlines()) == 21
    assert max(map(len, out.splitlines())) == 80
    _, out, _ = ctl("tail", file, "--no-follow", "--topic", "default", "-n", 5)
    assert [line.split()[1] for line in out.splitlines()] == ids[-5:]
    _, out, _ = ctl("tail", file, "--no-follow", "-n", 1)
    assert out.split()[1:] == [mail, "mails", "a", "mail"]
    assert ctl("tail", file, "--offset", "x")[0] == 2


def test_tail_passes_over_damage(file: Path, ctl: Any) -> None:
    with weclaw.Queue(file) as q:
        for text in ("a", "b", "c"):
            q.put(text * 300)
    data = bytearray(file.read_bytes())
    data[data.index(b"b" * 300) + 100] ^= 0xFF
    file.write_bytes(data)
    status, out, _ = ctl("tail", file, "--no-follow")
    assert status == 0
    assert [line.split()[-1][0] for line in out.splitlines()] == ["a", "c"]


# metrics


def test_metrics_are_prometheus_text(file: Path, ctl: Any, js: Any) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    kill_letters(file, 1)
    with weclaw.Queue(file) as q:
        q.put_many([1, 2, 3])
        q.get(timeout=5).ack()
        q._store.queue('a "topic"\n').put(1)
    status, out, _ = ctl("metrics", file)
    assert status == 0
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(out)
        for sample in family.samples
    }
    assert found[("weclaw_up",)] == 1
    assert found[("weclaw_ready", "default", "default")] == 2
    assert found[("weclaw_dead", "default", "default")] == 1
    assert found[("weclaw_settled_total", "default", "default")] == 1
    assert found[("weclaw_damaged",)] == 0
    assert ("weclaw_ready", "default", 'a "topic"\n') in found
    assert {"name": "weclaw_up", "labels": {}, "value": 1.0} in js("metrics", file)


def test_metrics_leave_nothing_out_of_a_name(file: Path, ctl: Any) -> None:
    """Not what a terminal would obey, either: two topics would have one label."""
    pytest.importorskip("prometheus_client")
    with weclaw.open(file) as store:
        for n, name in enumerate(("a\x1b[31mb", "ab")):
            store.queue(name).put_many([0] * (n + 1))
    status, out, _ = ctl("metrics", file)
    assert status == 0
    assert 'weclaw_ready{group="default",topic="a\x1b[31mb"} 1.0' in out
    assert 'weclaw_ready{group="default",topic="ab"} 2.0' in out
    with Terminal("metrics", file) as screen:
        assert screen.end() == 0
        assert "\x1b[31m" not in screen.raw
        assert 'topic="a\\x1b[31mb"} 1.0' in screen.raw


def test_metrics_are_served_and_outlive_the_file(file: Path) -> None:
    """What can't be opened is weclaw_up 0, not the end of the server."""
    pytest.importorskip("prometheus_client")
    with weclaw.Queue(file) as q:
        q.put(1)
    child = start("metrics", file, "--serve", "127.0.0.1:0")
    assert child.stderr is not None
    url = child.stderr.readline().split()[-1]

    def scrape() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode("utf-8")

    assert 'weclaw_ready{group="default",topic="default"} 1.0' in scrape()
    with weclaw.Queue(file) as q:
        q.put(2)
        assert 'weclaw_ready{group="default",topic="default"} 2.0' in scrape()
    os.rename(file, f"{file}.away")
    assert "weclaw_up 0.0" in scrape()
    os.rename(f"{file}.away", file)
    assert "weclaw_up 1.0" in scrape()
    child.terminate()
    child.communicate(timeout=30)
    assert child.returncode == 0


def test_metrics_of_what_is_not_there(file: Path, ctl: Any) -> None:
    pytest.importorskip("prometheus_client")
    status, out, err = ctl("metrics", file)
    assert (status, "weclaw_up 0.0" in out, "no such file" in err) == (1, True, True)
    assert ctl("metrics", file, "--serve", "127.0.0.1:0")[0] == 1
    assert ctl("metrics", file, "--serve", "127.0.0.1:http")[0] == 2


def test_metrics_on_a_port_that_is_taken(file: Path, ctl: Any) -> None:
    """One line that says so."""
    pytest.importorskip("prometheus_client")
    with weclaw.Queue(file) as q:
        q.put(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = ctl("metrics", file, "--serve", f"127.0.0.1:{port}")
    assert status == 1
    assert f"127.0.0.1:{port} can't be served" in err
    assert len(err.splitlines()) == 1


def test_a_worker_that_waits_out_a_pause_says_so(file: Path, handlers: Any) -> None:
    """On the bar, which else would only stand still."""
    with weclaw.Queue(file) as q:
        q.put(1)
        q.pause(60)
        with Terminal("work", file, handlers("def handle(msg):\n    return 1\n")) as screen:
            screen.wait_for(r"work, paused ")
            q.resume()
            screen.wait_for(r"work ━.* 1/1 ")
            screen.type("\x03")
            assert screen.end() == 0
            assert re.search(
                r"done, 0 failures in \d+\.\d s, \d+\.\d s of it paused; 0", screen.text
            )


def test_a_worker_that_paused_the_queue_says_how_to_leave_that_out(
    file: Path, handlers: Any
) -> None:
    """In its last line, with how long the queue was paused; one that never did says nothing."""
    spec = handlers(
        "def handle(msg):\n"
        "    if not msg.retry_count:\n"
        "        msg.nack(backoff=0)\n"
        "        raise ValueError\n"
    )
    words = ("work", file, spec, "--drain", "--pause-after", 1, "--pause-for", "10m")
    with weclaw.Queue(file) as q:
        q.put(1)
        with Terminal(*words) as screen:
            screen.wait_for(r"work, paused ")
            q.resume()
            assert screen.end() == 0
            told = re.search(r"1 message done.*dead letters", screen.text, re.DOTALL)
        assert told is not None
        assert re.fullmatch(
            r"1 message done, 1 failure in \d+\.\d s, \d+\.\d s of it paused \(--pause-after 0 "
            r"leaves out the pauses after failures in a row\); 0 left, 0 dead letters",
            " ".join(told[0].split()),
        )
        q.put(2)
        with Terminal("work", file, spec, "--drain", "--pause-after", 0) as screen:
            assert screen.end() == 0
            assert re.search(r"1 message done, 1 failure in \d+\.\d s; 0 left", screen.text)


def test_metrics_without_the_extra_says_what_to_install(
    file: Path, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, _, err = ctl("metrics", file)
    assert status == 1
    assert "weclaw-embedded[metrics]" in err


# bench


def test_bench_measures_a_queue_of_its_own(tmp_path, js, monkeypatch):
    """The replica and the flush policy that are set for other queues are not for this one."""
    opened = []
    made = weclaw.Queue

    def note(*args, **options):
        opened.append(made(*args, **options))
        return opened[-1]

    monkeypatch.setenv("WECLAW_REPLICA", str(tmp_path / "copy.wq"))
    monkeypatch.setenv("WECLAW_FLUSH_MODE", "os")
    monkeypatch.setattr(weclaw, "Queue", note)
    js("bench", tmp_path / "tasks.wq", "-n", 100)
    assert [q._store._options.flush for q in opened] == ["sync", "batch"]
    assert os.listdir(tmp_path) == []


def test_bench_measures_against_a_floor_and_leaves_nothing(
    tmp_path: Path, js: Any, ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = js("bench", "-n", 100)
    assert found["rows"][0]["times_floor"] == 1.0
    assert {"put, synced", "get + ack, synced"} <= {row["work"] for row in found["rows"]}
    assert all(row["per_s"] > 0 for row in found["rows"])
    assert list(tmp_path.iterdir()) == []
    _, out, _ = ctl("bench", tmp_path / "tasks.wq", "-n", 100)
    assert "× floor" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80


# screens


def test_a_progress_bar_on_a_terminal_and_none_in_a_pipe(file: Path, handlers: Any) -> None:
    with weclaw.Queue(file) as q:
        q.put_many(list(range(100)))
    spec = handlers(
        "import time\ndef handle(msg):\n    time.sleep(0.02)\n    1 / (msg.body - 50)\n"
    )
    words = ("work", file, spec, "--concurrency", 2, "--pause-after", 0)
    with Terminal(*words) as screen:
        screen.wait_for(r"work .*━.* \d+/100 ")
        screen.wait_for(r"failed: ZeroDivisionError")
        screen.wait_for(r"work \(1 failure\)")
        screen.type("\x03")
        assert screen.end() == 0
        bars = [line for line in screen.text.splitlines() if "━" in line]
        assert max(map(cell_len, bars)) <= 80
    child = start(*words, "--drain")
    until(lambda: child.poll() is not None or _leased(file), 60)
    child.terminate()
    out, err = child.communicate(timeout=30)
    assert "━" not in out + err


@pytest.mark.parametrize(
    "words", [("work", "SPEC"), ("dlq", "purge")], ids=["beside a bar", "behind a question"]
)
def test_ctrl_c_leaves_a_tidy_screen(words: tuple[str, ...], file: Path, handlers: Any) -> None:
    """The ^C that the terminal writes breaks no bar in two, and the last line begins a line."""
    kill_letters(file, 1)
    with weclaw.Queue(file) as q:
        q.put(1)
        q.pause(60)
    spec = handlers("def handle(msg):\n    return 1\n")
    words = tuple(spec if word == "SPEC" else word for word in words)
    place = words[:2] if words[0] == "dlq" else words[:1]
    with Terminal(*place, file, *words[len(place) :]) as screen:
        screen.wait_for(r"0/1 " if words[0] == "work" else r"\[y/N\]: ")
        bar = max((line for line in screen.text.splitlines()), key=cell_len)
        screen.type("\x03")
        screen.end()
        if words[0] == "work":
            assert cell_len(bar) + len("^C") <= 80
        else:
            assert screen.text.splitlines()[-1].startswith("weclawctl: interrupted")


def test_an_interrupted_put_says_how_much_is_there(file: Path) -> None:
    """What came through the pipe before Ctrl-C is put, and counted."""
    child = start("put", file, "--json", stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("1\n2\n3\n")
    child.stdin.flush()
    for _ in range(3):
        assert json.loads(child.stdout.readline())["id"]
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "at least 3 messages put" in err, err


def _leased(file: Path) -> bool:
    with weclaw.Queue(file) as q:
        return q.stats().settled > 60


@pytest.mark.parametrize(
    "words",
    [("stats",), ("peek",), ("health",), ("dlq", "list"), ("results",), ("verify",), ("tail",)],
    ids=" ".join,
)
def test_screens_are_80_wide(words: tuple[str, ...], file: Path) -> None:
    """On a terminal of 80 columns nothing runs over, whatever bodies and names are."""
    kill_letters(file, "写一份关于季度销售的报告" * 20, reason="ошибка " * 100)
    with weclaw.open(file) as store:
        queue = store.queue("a topic whose name is rather longer than anyone would wish it to be")
        queue.put({"prompt": "この会議の議事録をまとめてください" * 10, "bell": "\x07\x1b[2J"})
        done = store.queue()
        done.put(1)
        done.get(timeout=5).ack(result="é" * 500)
        done.put("x" * 1000)
    extra = ("--no-follow",) if words[0] == "tail" else ()
    with Terminal(*words, file.name, *extra, cwd=file.parent) as screen:
        assert screen.end() == 0
        text = screen.text
    assert text.strip()
    if words[0] != "health":  # lines for programs too: not cut
        assert max(map(cell_len, text.splitlines())) <= 80, text
    assert "\x07" not in screen.raw
    assert "\x1b[2J" not in screen.raw


@pytest.mark.parametrize("columns", [44, 60])
@pytest.mark.parametrize("long", [True, False], ids=["long", "short"])
def test_a_narrow_screen_breaks_no_id_and_no_name(file: Path, columns: int, long: bool) -> None:
    """Half of one can be neither copied nor searched for."""
    topic = "transcription-jobs-eu-west" if long else "default"
    group = "reporting-workers" if long else "default"
    name = "order-2026-11-30-0000123456-eu" if long else None
    with weclaw.open(file) as store:
        queue = store.queue(topic, group=group)
        ids = [queue.put({"prompt": f"a task {n} " * 20}, id=name and f"{name}{n}") for n in (1, 2)]
        queue.put(3, id="in hand", priority=9)
        with queue.get(timeout=5):
            place = ("--topic", topic, "--group", group)
            for words, whole in (
                (("stats",), (topic, group, "settled", "delayed", "oldest")),
                (("peek",), (*ids, "put (UTC)")),
                (("peek", "--leased"), ("in hand", "lease left")),
                (("results", *ids), (*ids, "status")),
            ):
                verb, *more = words
                with Terminal(
                    verb, file.name, *more, *place, cwd=file.parent, columns=columns
                ) as screen:
                    screen.end()
                    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.text)
                shown = [line for line in text.splitlines() if not line.startswith("topic '")]
                for one in whole:
                    assert any(one in line for line in shown), (words, one, text)
                assert max(map(cell_len, shown)) <= columns, text


def test_completion_knows_verbs_topics_and_groups(file: Path) -> None:
    from click.shell_completion import ShellComplete

    from weclaw_embedded.cli._app import app

    with weclaw.Queue(file, "mails", group="senders") as q:
        q.put(1)
        q.get(timeout=5)

    def complete(*words: object) -> list[str]:
        *args, incomplete = map(str, words)
        completer = ShellComplete(app, {}, "weclawctl", "_WECLAWCTL_COMPLETE")
        return [one.value for one in completer.get_completions(args, incomplete)]

    assert {"peek", "put", "pause", "promote", "purge"} <= set(complete("p"))
    assert complete("dlq", "re") == ["redrive"]
    assert complete("stats", file, "--topic", "") == ["mails"]
    assert complete("stats", file, "--group", "s") == ["senders"]
    assert complete("stats", file.parent / "none.wq", "--topic", "") == []
    with weclaw.Queue(file, "to the readers", group="printers") as q:
        q.put(1)
        q.get(timeout=5)
    assert complete("stats", file, "--group", "") == ["printers", "senders"]
    assert complete("stats", file, "--topic", "mails", "--group", "") == ["senders"]


def test_bash_gets_names_that_it_can_insert(file: Path) -> None:
    """zsh and fish quote what they insert; bash takes it as it stands."""
    with weclaw.Queue(file, "to the readers") as q:
        q.put(1)
    done = subprocess.run(
        COMMAND,
        env={
            **environment(),
            "_WECLAWCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": f"weclawctl stats '{file}' --topic ",
            "COMP_CWORD": "4",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "plain,'to the readers'\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, ctl: Any) -> None:
    status, out, _ = ctl("completion", shell)
    assert status == 0
    assert "_WECLAWCTL_COMPLETE" in out


def test_no_group_is_said_to_begin_where_nothing_was_opened(
    file: Path, ctl: Any, handlers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with the options comes first, and alone."""
    with weclaw.Queue(file) as q:
        q.put(1)
        q.get(timeout=5).ack()
    words = ("work", file, handlers("def handle(msg): pass"), "--drain", "--group", "new")
    monkeypatch.setenv("WECLAW_MAX_RETRIES", "abc")
    status, _, err = ctl(*words)
    assert status == 2
    assert len(err.splitlines()) == 1
    assert "WECLAW_MAX_RETRIES" in err
    monkeypatch.delenv("WECLAW_MAX_RETRIES")
    assert "this worker begins it" in ctl(*words)[2]


@pytest.mark.parametrize(
    "words",
    [
        ("peek", "-n", 5000),
        ("peek", "-n", 5000, "--json"),
        ("tail", "-n", 5000, "--no-follow", "--json"),
        ("tail", "-n", 5000, "--no-follow"),
        ("top", "-n", 100, "--interval", 0.1, "--json"),
        ("top", "-n", 100, "--interval", 0.1),
        ("results", "-n", 5000, "--json"),
        ("dlq list", "-n", 5000),
        ("dlq export", "-"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_reader_that_has_seen_enough(words: tuple[object, ...], file: Path) -> None:
    """`weclawctl peek FILE | head -1` ends as any program does there, without a word; whatever
    the verb, and whoever of click, rich and ourselves was writing.
    """
    with weclaw.Queue(file) as q:
        q.put_many(["a body of some length"] * 3000)
        for msg in q.get_many(1500):
            if words[0] == "results":
                msg.ack(result="a result of some length")
            elif str(words[0]).startswith("dlq"):
                msg.fail("a reason of some length")
            else:
                msg.release()
    verb, *options = words
    child = start(*str(verb).split(), file, *options)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    with child.stderr:
        assert child.stderr.read() == ""
    assert child.wait(timeout=30) == 141


@pytest.mark.parametrize(
    "words",
    [
        ("tail",),
        ("dlq watch", "--json", "--exec", "true"),
        ("top", "-n", "2", "--interval", "600"),
        ("top", "-n", "2", "--interval", "600", "--json"),
    ],
    ids=str,
)
def test_a_reader_that_leaves_while_nothing_comes(words: tuple[str, ...], file: Path) -> None:
    """`weclawctl tail FILE | head -1` ends, though no other message is ever put."""
    with weclaw.Queue(file) as q:
        q.put("a body")
        q.get().fail("why")
    verb, *options = words
    child = start(*verb.split(), file, *options)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    try:
        assert child.wait(timeout=30) == 141
    finally:
        child.kill()
    with child.stderr:
        assert child.stderr.read() == ""


def test_a_watch_that_prints_nothing_needs_no_reader(file: Path, tmp_path: Path) -> None:
    """It is there for what it calls, and goes on."""
    called = tmp_path / "called"
    with weclaw.Queue(file) as q:
        child = start("dlq", "watch", file, "--exec", f"echo >>{called}", "--interval", "0.1")
        assert child.stdout is not None
        child.stdout.close()
        for n in (1, 2):
            q.put("a body")
            q.get().fail("why")
            until(lambda n=n: called.exists() and called.read_text() == "\n" * n)
    child.terminate()
    assert child.wait(timeout=30) == 0
    assert child.stderr is not None
    with child.stderr:
        assert child.stderr.read() == ""


@pytest.mark.parametrize("words", [("--help",), ("completion", "bash"), ("stats", "FILE")])
def test_a_reader_that_was_never_there(words: tuple[str, ...], file: Path) -> None:
    """The same of a short text, which is written at once or at the end."""
    with weclaw.Queue(file) as q:
        q.put(1)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *(str(file) if word == "FILE" else word for word in words)],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("words", [("top",), ("dlq watch", "--exec", "true", "--once")], ids=str)
def test_an_interval_of_nothing_is_wrong_usage(
    words: tuple[str, ...], file: Path, ctl: Any
) -> None:
    weclaw.Queue(file).close()
    verb, *options = words
    status, _, err = ctl(*verb.split(), file, *options, "--interval", "0")
    assert status == 2
    assert "it must be more than 0 seconds" in err


def test_a_table_in_a_pipe_begins_with_its_heading(file: Path, ctl: Any) -> None:
    """Not with a line of blanks."""
    kill_letters(file, 1)
    with weclaw.Queue(file) as q:
        q.put(1)
    for words in (("stats", file), ("peek", file), ("dlq", "list", file)):
        assert ctl(*words)[1].splitlines()[0].split()[0] in ("topic", "id")
