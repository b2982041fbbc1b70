"""The receiver behind a command, as behind `ssh host weclawctl replica`: in another folder, as
another user, in another network, by plain pipes alone; and one that hangs there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import SOURCE, Child
from tests.replica_tools import bodies, command, eventually, level, receivers, same, send_signal

import weclaw_embedded as weclaw
from weclaw_embedded import _feeder

pytest.importorskip("click")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

NOBODY = 65534
USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
NETWORK = ["unshare", "--net", "--"]
PLACES = {"another folder": [], "user": USER, "network": NETWORK, "both": [*NETWORK, *USER]}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[list[str], Path]]:
    """(what a command there begins with, its own folder)."""
    prefix = PLACES[request.param]
    if prefix and os.geteuid() != 0:
        pytest.skip("only root may become another user or leave the network")
    folder = Path(tempfile.mkdtemp(prefix="weclaw-elsewhere-"))
    try:
        if USER[0] in prefix:
            os.chown(folder, NOBODY, NOBODY)
        where = os.pathsep.join(filter(os.path.isabs, [str(SOURCE), *sys.path]))
        there = ["env", f"PYTHONPATH={where}", "sh", "-c", f'cd "{folder}" && exec "$0" "$@"']
        said = ""
        # An interpreter below /root is not for everybody.
        for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
            words = [*prefix, *there, python]
            try:
                done = subprocess.run(
                    [*words, "-c", "import weclaw_embedded.cli"], capture_output=True, text=True
                )
            except FileNotFoundError as error:
                pytest.skip(f"no such tool here: {error}")
            if not done.returncode:
                prefix = words
                break
            said = done.stderr.strip()[-200:]
        else:
            pytest.skip(f"can't be done on this machine: {said}")
        yield prefix, folder
    finally:
        shutil.rmtree(folder)


def test_a_replica_elsewhere_is_fed_restores_heals_and_is_promoted(
    open_queue: Callable[..., Any], path: Path, place: tuple[list[str], Path]
) -> None:
    """All of it through the command; the files there belong to who runs it."""
    prefix, folder = place
    ctl = [*prefix, "-m", "weclaw_embedded.cli"]
    copy = folder / "copy.wq"
    options: dict[str, Any] = {"replica": [*ctl, "replica", "copy.wq"], "replica_timeout": 30.0}
    q = open_queue(**options)
    for n in range(30):
        q.put({"n": n, "pad": "x" * 500})
    assert copy.stat().st_uid == folder.stat().st_uid
    q.close()
    same(path, copy)
    # Damage is healed from there.
    data = bytearray(path.read_bytes())
    data[4096 + 5000] ^= 0xFF
    path.write_bytes(data)
    q = open_queue(**options)
    assert q._store.repair()
    assert [msg.body["n"] for msg in q.peek(100)] == list(range(30))
    q.close()
    # A lost file is restored from there.
    path.unlink()
    shutil.rmtree(f"{path}.d")
    q = open_queue(**options)
    assert [msg.body["n"] for msg in q.peek(100)] == list(range(30))
    q.put({"n": 30})
    q.close()
    same(path, copy)
    # And it is promoted there; the old one finds out.
    done = subprocess.run([*ctl, "promote", "copy.wq", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epoch"] > 1
    q = open_queue(**options)
    with pytest.raises(weclaw.SendFailedError):
        while True:
            q.put("refused")
    q.close()
    assert [body["n"] for body in bodies(copy)] == list(range(31))


# -- one that hangs --------------------------------------------------------------------------------


@pytest.fixture
def open_queue(copy: Path, open_queue: Callable[..., Any]) -> Callable[..., Any]:
    """The same, closed before it is looked what is left behind."""
    return open_queue


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_a_receiver_that_hangs_is_ended_and_started_again(
    open_queue: Callable[..., Any],
    path: Path,
    copy: Path,
    sync: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After the time that is given to it the copy is level again, without a hand being lifted."""
    monkeypatch.setattr(_feeder, "HANGS_S", 1.0)
    q = open_queue(replica=copy, sync_replica=sync, replica_timeout=30.0)
    q.put(0)
    level(q)
    pid = send_signal(copy, signal.SIGSTOP)
    for n in range(1, 20):
        q.put(n)
    level(q)
    assert gone(pid)
    assert bodies(copy) == list(range(20))
    assert "neither taken nor said anything" in caplog.text
    q.close()
    same(path, copy)


def test_a_receiver_with_nothing_to_do_does_not_hang(
    open_queue: Callable[..., Any], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long nothing is put, it stays."""
    monkeypatch.setattr(_feeder, "HANGS_S", 0.3)
    q = open_queue(replica=copy)
    q.put(0)
    level(q)
    (pid,) = receivers(copy)
    time.sleep(1.0)
    q.put(1)
    assert receivers(copy) == [pid]


@pytest.mark.parametrize("stop", ["never", "stopped", "busy"])
def test_what_a_command_has_started_itself_is_not_left_behind(
    open_queue: Callable[..., Any], path: Path, copy: Path, stop: str
) -> None:
    """A shell that starts the receiver and something else, which hangs at the end."""
    words = command(copy)
    shell = '"$0" "$@"; true' if stop != "busy" else '"$0" "$@"; while true; do :; done'
    q = open_queue(replica=["sh", "-c", shell, *words], sync_replica=False)
    q.put(1)
    level(q)
    pids = receivers(copy)
    assert len(pids) == 2, "the shell and the receiver"
    if stop == "stopped":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        q.put(2)
    began = time.monotonic()
    q.close()
    assert time.monotonic() - began < 60
    eventually(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_a_receiver_that_dies_idle_is_started_again(
    open_queue: Callable[..., Any], copy: Path, sync: bool
) -> None:
    """Nothing has to be put for that, and no zombie is left."""
    q = open_queue(replica=copy, sync_replica=sync)
    q.put(0)
    level(q)
    pid = send_signal(copy, signal.SIGKILL)
    eventually(lambda: gone(pid))
    eventually(lambda: receivers(copy))


def put_where_a_broken_pipe_kills(pipe, path, copy):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    q = weclaw.Queue(path, codec="raw", replica=copy, replica_timeout=30.0)
    pipe.send(q.put(b"small"))
    pipe.recv()
    pipe.send(q.put(bytes(8 << 20)))  # far more than a pipe holds


def test_a_receiver_that_dies_takes_nobody_with_it(path: Path, copy: Path) -> None:
    """Not even a program that gave SIGPIPE its deadly meaning back: it is an error like others."""
    with Child(put_where_a_broken_pipe_kills, str(path), str(copy)) as child:
        child.hear()
        pid = send_signal(copy, signal.SIGSTOP)
        child.say("more than it takes")
        eventually(lambda: path.stat().st_size > 8 << 20)
        os.kill(pid, signal.SIGKILL)
        assert child.hear()
        assert child.end() == []
    same(path, copy)
