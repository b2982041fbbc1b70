"""Ctrl-C at the n-th moment of a call, as Python lets it come."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Where it came is its argument."""


def interrupted(call: Callable[[], object], n: int) -> Interrupted | None:
    """Ctrl-C where the n-th function begins, or a function of C has returned, in whatever module:
    the standard library's may be broken off, too; but not between a lock and its block. The
    exception, which keeps alive all that it refers to; None where the call was over before. Other
    errors go on, unless they come of it.
    """
    left = n
    came: Interrupted | None = None

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal left, came
        if event == "c_return" and argument.__name__ == "__enter__":
            # A fault of 3.14, its issue 148874, lets Ctrl-C come before the block of a `with`
            # begins: the lock stays taken, whoever wrote it. README says so.
            return
        if frame is not here and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                where = frame.f_code.co_name
                if event == "c_return":
                    where = f"{where}, after {argument.__name__}"
                came = Interrupted(where)
                raise came

    here = sys._getframe()
    gc.collect()  # so that nobody's `__del__` is broken off instead
    gc.disable()
    sys.setprofile(interrupt)
    try:
        call()
    except BaseException:
        # The standard library's Condition raises a RuntimeError where it is broken off in a wait.
        if came is None:
            raise
    finally:
        sys.setprofile(None)
        gc.enable()
    return came
