"""A few threads for what is rare and short and may not be done on an event loop.

Role: questions, steering, opening and closing, for tasks. It must not know what is asked, and what
comes often or may take long is not for it: eight that wait would hold up all others.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

T = TypeVar("T")
_SMALL_POOL: Final = 8

_making = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def small_pool() -> ThreadPoolExecutor:
    """Threads for what is rare and short: questions, upkeep, opening and closing."""
    global _executor
    with _making:
        if _executor is None:
            _executor = ThreadPoolExecutor(_SMALL_POOL, thread_name_prefix="weclaw-ask")
        return _executor


async def in_pool(function: Callable[..., T], *args: Any) -> T:
    """Run a short blocking function off the loop. Cancelled, it may still be done, whole."""
    return await asyncio.get_running_loop().run_in_executor(small_pool(), function, *args)


def _after_fork_in_child() -> None:
    # Threads don't survive a fork.
    global _executor, _making
    _making = threading.Lock()
    _executor = None


os.register_at_fork(after_in_child=_after_fork_in_child)
