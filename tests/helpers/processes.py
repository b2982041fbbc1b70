"""Child processes that say over a pipe what was promised to them.

A child runs one function of a test module. The function's source is sent over, so that the child
does not import the test module (and with it pytest): a child starts in the time the library
takes. The function gets a connection first, and may use nothing but its arguments and the names
of `PRELUDE`. Whatever it reports it reports *after* the call in question returned; a child that
is killed simply stops reporting.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import weclaw_embedded

ROOT = Path(__file__).resolve().parent.parent.parent
#: Where the library under test lies: children are to use the same.
SOURCE = Path(weclaw_embedded.__file__).resolve().parent.parent

PRELUDE = """
import datetime, errno, json, os, queue, random, resource, signal, sys, threading, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
source, name, args = pipe.recv()
import weclaw_embedded as weclaw
names = dict(
    datetime=datetime, errno=errno, json=json, os=os, queue=queue, random=random,
    resource=resource, signal=signal, sys=sys, threading=threading, time=time, weclaw=weclaw,
)
exec(compile(source, "<" + name + ">", "exec"), names)
names[name](pipe, *args)
"""

#: A child that has not reported for this long hangs: far more than any promise of the library.
PATIENCE = 30.0


class ChildDied(AssertionError):
    """The child ended where a report was expected from it."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WECLAW_", "WEBCLAW_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(ROOT)])
    env["PYTHONFAULTHANDLER"] = "1"
    env.update(extra or {})
    return env


class Child:
    """One child process: `hear` what it says, `say` what it waits for, `kill` it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        command: tuple[str, ...] = (),
        stderr: Any = None,
    ) -> None:
        self.pipe: Connection
        self.pipe, theirs = Pipe()
        source = textwrap.dedent(inspect.getsource(function))
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", PRELUDE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stderr=stderr,
        )
        theirs.close()
        self.name = function.__name__
        self.say((source, function.__name__, args))

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, thing: Any) -> None:
        self.pipe.send(thing)

    def hear(self, timeout: float = PATIENCE) -> Any:
        """The next report; `ChildDied` when there will be none."""
        if not self.pipe.poll(timeout):
            self.signal(signal.SIGABRT)  # it says on stderr where its threads are
            self.process.wait()
            raise AssertionError(f"{self.name} has said nothing for {timeout} s")
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait(timeout=PATIENCE)
            raise ChildDied(f"{self.name} ended with {code} instead of reporting") from None

    def hear_rest(self, timeout: float = PATIENCE) -> list[Any]:
        """Everything said until it ended."""
        said = []
        while True:
            try:
                said.append(self.hear(timeout))
            except ChildDied:
                return said

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and gone when this returns (its locks too)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout: float = PATIENCE) -> int:
        return self.process.wait(timeout=timeout)

    def end(self, timeout: float = PATIENCE) -> list[Any]:
        """Let it end by itself; what it still said. A bad end is a failure of the test."""
        said = self.hear_rest(timeout)
        code = self.wait(timeout)
        assert code == 0, f"{self.name} ended with {code}"
        return said

    def close(self) -> None:
        self.kill()
        self.pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
