"""Contract 2: a program that only looks needs nothing that it may write, and ends by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest
from tests.helpers.processes import environment

import weclaw_embedded as weclaw


@pytest.mark.parametrize("opening", ["w.Queue(p, readonly=True)", "w.open(p, readonly=True)"])
def test_a_looker_left_open_does_not_hold_up_the_end_of_the_program(path, opening):
    """The interpreter ends although a queue opened to look was never closed."""
    with weclaw.Queue(path) as q:
        q.put("x")
    code = f"import sys, weclaw_embedded as w; p = sys.argv[1]; q = {opening}; print('looked')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "looked\n"), done.stderr


def test_a_looker_can_wait(path):
    """`join` and `result` of a handle that only looks wait for what others do, and give up."""
    with weclaw.Queue(path) as q:
        task = q.put("x")
        with weclaw.Queue(path, readonly=True) as looker:
            assert looker.join(0.1) is False
            with pytest.raises(weclaw.Empty):
                looker.result(task, timeout=0.1)
            q.get(block=False).ack(result=1)
            assert looker.join(10.0) is True
            assert looker.result(task, timeout=10.0) == 1


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="has no such shared memory")
def test_a_looker_needs_no_folder_for_what_is_temporary(path, monkeypatch):
    """It looks where all of a system is read-only but shared memory."""
    with weclaw.Queue(path) as q:
        q.put("x")
    monkeypatch.setattr(tempfile, "gettempdir", _no_folder)
    with weclaw.Queue(path, readonly=True) as looker:
        assert [msg.body for msg in looker.peek(9)] == ["x"]


def _no_folder():
    raise FileNotFoundError(2, "No usable temporary directory found")
