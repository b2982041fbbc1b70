"""CPython's tests of `asyncio.Queue` and its kin, run against `weclaw_embedded.aio`.

Ours answer after a trip through another thread, so where a test lets the loop run for one tick,
here it lets it run for some milliseconds; what is expected after it is the same. What is left out
is listed in `EXCLUDED`, each with its reason.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.drop_in.substitute import Namespace, cases, load, without_path

from weclaw_embedded import aio

TICK_S = 0.1
SLOWER = 20  # by this the hundredths of a second of the tests are made longer

PRIVATE = "looks at private attributes of asyncio.Queue"

EXCLUDED = {
    # Text of repr() beyond its beginning: `_getters[1]`, `_putters[1]`, `_queue=[1]`. That it
    # begins with "<Queue", and shows the id or not, is tested in test_more.py.
    "QueueBasicTests.test_repr": PRIVATE,
    "QueueBasicTests.test_str": PRIVATE,
    # Puts a future of its own into `_putters`.
    "QueueGetTests.test_get_with_putters": PRIVATE,
    # Looks at the length of `_getters`. The meaning, that a cancelled get takes nothing, is
    # tested in tests/test_aio.py.
    "QueueGetTests.test_cancelled_getters_not_being_held_in_self_getters": PRIVATE,
    # Looks at the length of `_putters`.
    "QueuePutTests.test_cancelled_puts_not_being_held_in_self_putters": PRIVATE,
    # Calls `_format()` and sets `_unfinished_tasks`.
    ".test_format": PRIVATE,
}

_real_sleep = asyncio.sleep


async def _sleep(delay: float, result: Any = None) -> Any:
    return await _real_sleep(delay * SLOWER / 2 or TICK_S, result)


async def _wait_for(awaitable: Any, timeout: float) -> Any:
    return await asyncio.wait_for(awaitable, timeout * SLOWER)


class _PatientLoop:
    """A loop whose `call_later` leaves more time than the hundredth of a second of the tests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        return self._loop.call_later(delay * SLOWER, callback, *args)


def _set_event_loop(loop: Any) -> None:
    asyncio.set_event_loop(loop._loop if isinstance(loop, _PatientLoop) else loop)


_asyncio = Namespace(
    asyncio,
    {
        "Queue": without_path(aio.Queue),
        "PriorityQueue": without_path(aio.PriorityQueue),
        "LifoQueue": without_path(aio.LifoQueue),
        "QueueEmpty": aio.QueueEmpty,
        "QueueFull": aio.QueueFull,
        "QueueShutDown": aio.QueueShutDown,
        "set_event_loop": _set_event_loop,
        "sleep": _sleep,
        "wait_for": _wait_for,
        "get_running_loop": lambda: _PatientLoop(asyncio.get_running_loop()),
    },
)

_module = load("test.test_asyncio.test_queues", {"asyncio": _asyncio})

if hasattr(_module, "_QueueTestBase"):
    # Up to Python 3.10 the tests run on a loop with a clock of its own, which does not wait for
    # other threads. Here it is a real one, so nothing is said about what that clock would show.
    # `_get_loop` is private, and was called to bind a queue to a loop, which ours needs not be.

    def _new_test_loop(self: Any, gen: Any = None) -> _PatientLoop:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self.addCleanup(asyncio.set_event_loop, None)
        self.addCleanup(loop.close)
        self.addCleanup(_cancel_all, loop)
        return _PatientLoop(loop)

    def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))

    def _say_nothing(self: Any, when: float, time: float) -> None:
        """`assertAlmostEqual` is used for the clock only."""

    def _run_briefly(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_until_complete(_real_sleep(TICK_S))

    _module._QueueTestBase.new_test_loop = _new_test_loop
    _module._QueueTestBase.assertAlmostEqual = _say_nothing
    # The original waits for all threads to end; those of an open file live on.
    _module._QueueTestBase.tearDown = lambda self: self.doCleanups()
    for _name in ("Queue", "PriorityQueue", "LifoQueue"):
        getattr(_asyncio, _name)._get_loop = lambda self: asyncio.get_running_loop()
    _module.test_utils = Namespace(_module.test_utils, {"run_briefly": _run_briefly})

globals().update(cases(_module, EXCLUDED))
