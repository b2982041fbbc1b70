"""Fixtures for all tests: a path, a way to open queues that closes them, and an alarm.

`tests.helpers` is importable because the root of the repository is put on the path here.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("weclaw_embedded") is None:
    sys.path.insert(0, str(ROOT / "src"))

# A shell that starts a job in the background has it ignore Ctrl-C, and its children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes says how busy the machine is, and nothing of what is tried.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("untimed")

#: A test that runs longer hangs. The slow ones get ten times as long.
ALARM_S = 90


class TookTooLong(BaseException):
    """Not an `Exception`, so that nothing under test takes it for an ordinary failure."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest-timeout is the second alarm, for a hang in which no Python runs: later than ours."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.timeout(ALARM_S * 10 + 60))


@pytest.fixture(autouse=True)
def _alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs fails instead, with the stacks of all threads."""
    can = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not can:
        yield
        return

    def ring(number: int, frame: Any) -> None:
        faulthandler.dump_traceback()
        raise TookTooLong(request.node.nodeid)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(ALARM_S * (10 if request.node.get_closest_marker("slow") else 1))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine sets for its own queues does not reach the tests."""
    for name in list(os.environ):
        if name.startswith(("WECLAW_", "WEBCLAW_")):
            monkeypatch.delenv(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a queue's file may be; there is none yet."""
    return tmp_path / "tasks.wq"


@pytest.fixture
def open_queue(path: Path) -> Iterator[Callable[..., Any]]:
    """`weclaw.Queue(path, …)`; what the test leaves open is closed after it."""
    import weclaw_embedded as weclaw

    opened: list[Any] = []

    def open_one(*args: Any, at: Path | str | None = None, **options: Any) -> Any:
        q = weclaw.Queue(path if at is None else at, *args, **options)
        opened.append(q)
        return q

    yield open_one
    for q in reversed(opened):
        q.close()


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """Where a replica's copy is to be; a receiver that is left over fails the test."""
    from tests.replica_tools import receivers

    place = tmp_path / "elsewhere" / "copy.wq"
    place.parent.mkdir()
    yield place
    left = receivers(place)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "a receiver was left behind"


@pytest.fixture
def open_store(path: Path) -> Iterator[Callable[..., Any]]:
    """`weclaw.open(path, …)`; what the test leaves open is closed after it."""
    import weclaw_embedded as weclaw

    opened: list[Any] = []

    def open_one(at: Path | str | None = None, **options: Any) -> Any:
        store = weclaw.open(path if at is None else at, **options)
        opened.append(store)
        return store

    yield open_one
    for store in reversed(opened):
        store.close()


@pytest.fixture
def hours_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves all clocks of this process on; queues are to be closed while that happens."""
    from weclaw_embedded import _clock

    def move(hours: float) -> None:
        us = int(hours * 3600 * 1_000_000)
        for name, unit in (("wall_us", us), ("boottime_us", us), ("monotonic_ns", us * 1000)):
            real = getattr(_clock, name)
            monkeypatch.setattr(_clock, name, lambda real=real, unit=unit: real() + unit)

    return move


@pytest.fixture
def q(open_queue: Callable[..., Any]) -> Any:
    """A new queue with failures that are tried again at once."""
    import weclaw_embedded as weclaw

    return open_queue(retry=weclaw.RetryPolicy(backoff=0.0))


@pytest.fixture(scope="module")
def little_garbage() -> Iterator[None]:
    """For tests that collect again and again: not through all that the tests before have made,
    which takes half a second in the middle of the suite.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
