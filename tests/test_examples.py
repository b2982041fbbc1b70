"""The examples, run for real and killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import environment
from tests.helpers.queues import eventually

import weclaw_embedded as weclaw

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Program:
    """One example at work."""

    def __init__(self, *command: str, env: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env=environment(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def call(port: int, path: str, task: Any = None, key: str | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if task is not None:
        request.data = json.dumps(task).encode()
    if key is not None:
        request.add_header("Idempotency-Key", key)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def surely(port: int, path: str, task: Any = None, key: str | None = None) -> tuple[int, Any]:
    """As a client does it: again until there is an answer."""
    for _ in range(300):
        with contextlib.suppress(OSError):
            return call(port, path, task, key)
        time.sleep(0.05)
    raise AssertionError("the service does not answer")


@contextlib.contextmanager
def service(port: int, tmp_path: Path, part: str) -> Iterator[Program]:
    env = {"TASKS": str(tmp_path / "tasks.wq"), "MODEL_SECONDS": "0.05"}
    arguments = [str(port)] if part == "app" else []
    with Program(
        str(EXAMPLES / "service" / f"{part}.py"), *arguments, env=env, cwd=tmp_path
    ) as program:
        yield program


def test_the_service_loses_no_task_though_all_of_it_is_killed(tmp_path):
    """Worker and service are killed with -9 in the middle; every accepted task has its answer."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    port = free_port()
    ids: dict[int, str] = {}

    def submit(numbers):
        for n in numbers:
            # With an id of the client's own it may ask again without the task being there twice.
            code, answer = surely(port, "/tasks", {"prompt": f"question {n}"}, key=f"task-{n}")
            assert code == 202
            ids[n] = answer["id"]

    with service(port, tmp_path, "app") as app, service(port, tmp_path, "worker") as worker:
        submit(range(20))
        eventually(lambda: surely(port, f"/tasks/{ids[3]}?wait=5")[0] == 200)
        worker.kill()
        submit(range(20, 40))
        app.kill()
    with service(port, tmp_path, "app") as app, service(port, tmp_path, "worker"):
        submit(range(35, 60))
        app.kill()
        with service(port, tmp_path, "app"):
            submit([60])
            for n, task_id in ids.items():
                code, answer = surely(port, f"/tasks/{task_id}?wait=20")
                assert (code, answer["status"]) == (200, "done"), n
                assert answer["result"].startswith("2 words")
            assert surely(port, "/tasks/nothing") == (404, {"status": "unknown"})
            assert surely(port, "/tasks", {"no": "prompt"})[0] == 400
    assert ids == {n: f"task-{n}" for n in range(61)}


def test_the_service_refuses_what_can_be_no_task(tmp_path):
    """What a client did wrong is answered with 400, and nothing of it reaches the worker."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    port = free_port()
    with service(port, tmp_path, "app"):
        assert surely(port, "/tasks", {"prompt": "good"}, key="good")[0] == 202
        for task in ({"prompt": 5}, {"prompt": None}, {"prompt": "\ud800"}, [], "text"):
            code, answer = call(port, "/tasks", task)
            assert (code, list(answer)) == (400, ["error"]), task
        code, answer = call(port, "/tasks", {"prompt": "good"}, key="k" * 3000)
        assert (code, list(answer)) == (400, ["error"])
        for wait in ("abc", "-1", "nan", ""):
            assert call(port, f"/tasks/good?wait={wait}")[0] == 400, wait
        assert call(port, f"/tasks/{'k' * 3000}")[0] in (400, 404)
        assert call(port, "/tasks/good?wait=0.01") == (202, {"status": "ready"})
    with weclaw.Queue(tmp_path / "tasks.wq") as q:
        assert [msg.id for msg in q.peek(10)] == ["good"]


@pytest.mark.parametrize(
    ("example", "modules"),
    [("service/app.py", ("uvicorn", "starlette.applications")), ("batch.py", ("rich.progress",))],
    ids=["service", "batch"],
)
def test_an_example_says_what_it_needs(example, modules, tmp_path):
    """Without its extra it ends with one line that says how to get it."""
    block = "".join(f"sys.modules[{name!r}] = None; " for name in modules)
    path = str(EXAMPLES / example)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, runpy; {block}runpy.run_path({path!r}, run_name='__main__')",
        ],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("is missing: in the repository, pip install '.[examples]'\n")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_batch_makes_nothing_of_an_input_that_is_not_there(tmp_path):
    """A name misspelled ends in one line, and no queue is made beside it."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "batch.py"), "none.jsonl", "out.jsonl"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "none.jsonl can't be read: No such file or directory\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"prompt": two}', "is not JSON: "),
        (b'{"prompt": "\xff"}', "is not JSON: "),
        (b'["prompt"]', "is JSON, but not an object with a prompt"),
    ],
)
def test_the_batch_says_which_line_is_no_task(tmp_path, line, what):
    """Nobody is to look for it in a thousand lines."""
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "one"}\n\n' + line + b"\n")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "batch.py"), "in.jsonl", "out.jsonl"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"in.jsonl, line 3, {what}")
    assert done.stderr.count("\n") == 1


def test_the_batch_goes_on_where_it_was_killed(tmp_path):
    """Killed three times, the batch answers every line, and asks hardly any question twice."""
    source, target, log = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "log"
    prompts = [f"number {n}" for n in range(60)]
    source.write_text(
        "".join(json.dumps({"id": f"t{n}", "prompt": p}) + "\n" for n, p in enumerate(prompts))
    )
    env = {"MODEL_SECONDS": "0.02", "MODEL_LOG": str(log)}
    command = (str(EXAMPLES / "batch.py"), str(source), str(target))
    for round_ in range(1, 4):
        with Program(*command, env=env, cwd=tmp_path):
            eventually(lambda n=round_ * 12: log.exists() and len(log.read_text().split("\n")) > n)
    assert not target.exists()
    with Program(*command, env=env, cwd=tmp_path) as program:
        assert program.process.wait(60) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"t{n}" for n in range(60)]
    assert all("2 words" in line["answer"] for line in lines)
    asked = Counter(log.read_text().splitlines())
    assert set(asked) == set(prompts)
    assert sum(asked.values()) <= 60 + 3 * 4  # those that were under way at a kill


def test_the_batch_stops_in_an_orderly_way(tmp_path):
    """After SIGINT it says that it has to be run again; then it ends well."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(40)))
    env = {"MODEL_SECONDS": "0.05", "MODEL_LOG": str(tmp_path / "log")}
    command = (str(EXAMPLES / "batch.py"), str(source), str(target))
    with Program(*command, env=env, cwd=tmp_path) as program:
        eventually((tmp_path / "log").exists)
        os.kill(program.process.pid, signal.SIGINT)
        assert program.process.wait(30) == 1
    with Program(*command, env=env, cwd=tmp_path) as program:
        assert program.process.wait(60) == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 40
    assert len(target.read_text().splitlines()) == 40


def test_the_one_line_makes_the_program_survive(tmp_path):
    """Killed after the first answers and run again without arguments, it does the rest."""
    prompts = [f"prompt {n}" for n in range(20)]
    env = {"MODEL_SECONDS": "0.05"}
    command = str(EXAMPLES / "one_line.py")
    with Program(command, *prompts, env=env, cwd=tmp_path) as program:
        assert program.process.stdout is not None
        first = [program.process.stdout.readline() for _ in range(5)]
        program.kill()
        first += program.process.stdout.readlines()
    with Program(command, env=env, cwd=tmp_path) as program:
        rest, _ = program.process.communicate(timeout=60)
        assert program.process.returncode == 0
    answered = {line.partition(":")[0] for line in [*first, *rest.splitlines()]}
    assert answered == set(prompts)
    assert len(rest.splitlines()) <= 20 - 5 + 3  # those done are not done again
