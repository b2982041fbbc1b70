"""The receiver as a process: the address it is started by, its two streams, and its end.

Role: a `Channel` starts the receiver of an address, sends it messages and takes its answers, and
ends it with what it has started itself.  An address is the path of the copy, or a command; it is
noted beside the file, too, for whoever finds the file gone.  Feeding, restoring and healing use it.

Invariants:

* Nothing blocks longer than it is told to, whatever the receiver does.
* No receiver is left behind: its input ends, then it is killed, and it is waited for.

It must not know what the messages say, but for a refusal.  A channel is used by one thread at a
time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from . import _files, _names, _stream
from ._stream import REFUSED, Incoming, StreamError
from .errors import DiskFullError

logger = logging.getLogger("weclaw_embedded")

Address = str | tuple[str, ...]

ERRORS_NAME: Final = "replica.err"
RECORD_NAME: Final = "replica"  # where the address is kept beside the file
LOOK_S: Final = 0.1  # how long a wait goes on before it is seen that the store closes
_END_PATIENCE_S: Final = 1.0
_KILL_PATIENCE_S: Final = 2.0
_PROGRAM: Final = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from weclaw_embedded.replica import main; main()"
)


class LinkDownError(Exception):
    """The receiver is gone, or sends what is no answer; another one is to be started."""


class NotStartedError(LinkDownError):
    """The command can't be run at all."""


class RefusedError(Exception):
    """The receiver refuses; another one would do the same."""

    def __init__(self, why: int, epoch: int, text: str) -> None:
        super().__init__(text)
        self.why = why
        self.epoch = epoch


def start(address: Address, errors: int) -> subprocess.Popen[bytes]:
    """Start the receiver of this address, in a session of its own so that no key or hang-up of
    our terminal reaches it. It ends with its input. What it says goes to the descriptor `errors`.
    """
    environment = None
    if isinstance(address, str):
        if not sys.executable:
            raise NotStartedError("there is no Python interpreter to run a receiver with")
        argv = [sys.executable, "-c", _PROGRAM, address]
        # The same library as ours, however it was found.
        places = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
        places += [place for place in sys.path if os.path.isabs(place)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}
    else:
        argv = list(address)
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise NotStartedError(f"the receiver can't be started: {error}") from None


def _open_errors(path: str | None) -> int:
    """Where a receiver's standard error goes: a file, or memory that goes with the descriptor."""
    if path is None and sys.platform == "linux":
        return os.memfd_create("weclaw-replica", os.MFD_CLOEXEC)
    return os.open(path or os.devnull, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


class Channel:
    """A receiver process and its two streams. Nothing here blocks longer than it is told to."""

    def __init__(self, address: Address, errors_path: str | None) -> None:
        self._errors = _open_errors(errors_path)
        try:
            self.process = start(address, self._errors)
        except BaseException:
            os.close(self._errors)
            raise
        self.moved_s = time.monotonic()  # when it last took or said something
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.in_fd = self.process.stdin.fileno()
        self.out_fd = self.process.stdout.fileno()
        os.set_blocking(self.in_fd, False)
        os.set_blocking(self.out_fd, False)
        self.incoming = Incoming()
        self._number = 0
        self._unsent: memoryview | None = None
        # Whether the last message has gone out whole, so that the next may be sent.
        self.is_writable = True
        self._poll = select.poll()
        self._poll.register(self.out_fd, select.POLLIN)
        self._polls_writing = False

    def send(self, kind: int, *pieces: bytes) -> None:
        """Send a message, or as much of it as goes now; only when `is_writable`."""
        self.is_writable = False
        self._unsent = memoryview(_stream.message(self._number, kind, *pieces))
        self._number += 1
        self.push()

    def push(self) -> None:
        """Send more of what is not sent yet."""
        unsent = self._unsent
        try:
            while unsent:
                unsent = unsent[_files.write_pipe(self.in_fd, unsent) :]
                self.moved_s = time.monotonic()
        except BlockingIOError:
            self._unsent = unsent
            return
        except OSError as error:
            raise LinkDownError(f"the receiver does not read any more: {error}") from None
        self._unsent = None
        self.is_writable = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until the receiver has answered or can take more. False when the time is over."""
        if self._polls_writing is self.is_writable:
            self._polls_writing = not self._polls_writing
            if self._polls_writing:
                self._poll.register(self.in_fd, select.POLLOUT)
            else:
                self._poll.unregister(self.in_fd)
        found = self._poll.poll(max(0.0, timeout_s) * 1000)
        for fd, _ in found:
            if fd == self.in_fd:
                self.push()
            else:
                self._read()
        return bool(found)

    def _read(self) -> None:
        try:
            data = os.read(self.out_fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkDownError(f"the receiver can't be read: {error}") from None
        if not data:
            cut = " in the middle of an answer" if self.incoming.is_cut else ""
            raise LinkDownError(f"the receiver ended{cut}{self.last_words()}")
        self.moved_s = time.monotonic()
        self.incoming.add(data)

    def last_words(self) -> str:
        try:
            size = os.fstat(self._errors).st_size
            text = os.pread(self._errors, 400, max(0, size - 400))
        except OSError:
            return ""
        said = text.decode("utf-8", "replace").strip()
        return f": {said}" if said else ""

    def answer(self, until_s: float, stopping: Callable[[], bool]) -> bytes:
        """Wait for the next message of the receiver. Raises LinkDownError, RefusedError."""
        while True:
            body = self.take()
            if body is not None:
                return body
            if stopping():
                raise LinkDownError("closing")
            if time.monotonic() >= until_s:
                raise LinkDownError(f"the receiver did not answer in time{self.last_words()}")
            self.wait(min(LOOK_S, until_s - time.monotonic()))

    def take(self) -> bytes | None:
        """The next message of the receiver that is there already."""
        try:
            body = self.incoming.next()
        except StreamError as error:
            raise LinkDownError(str(error)) from None
        if body is not None and body[0] == REFUSED:
            raise RefusedError(*_stream.unpack_refused(body))
        return body

    def close(self, patience_s: float = _END_PATIENCE_S) -> None:
        """End the receiver: its input ends, and if that is not enough it is killed, with what it
        has started itself (its copy is whole whenever it dies). Waits for it, so that nothing is
        left behind.
        """
        process = self.process
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        if _wait_for_end(process.pid, patience_s):
            # The session is its own, and its number is taken until we have waited for it below.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            # Not ours to kill (sudo), or stuck in the kernel. It has no input any more.
            logger.warning(
                "the receiver with process number %d can't be ended%s",
                process.pid,
                self.last_words(),
            )
        os.close(self._errors)

    def abandon(self) -> None:
        """In a forked child: give back what was inherited; the process is the parent's."""
        self.process.returncode = 0  # not ours to wait for
        os.close(self._errors)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _wait_for_end(pid: int, patience_s: float) -> bool:
    """Wait until a child has ended, at most that long, and leave it to be waited for. False when
    somebody else has waited for it: then its number may be another's by now.
    """
    until_s = time.monotonic() + patience_s
    pause_s = 0.001
    while True:
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
        except ChildProcessError:
            return False
        if time.monotonic() >= until_s:
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def describe(address: Address) -> str:
    """The address as a person writes it."""
    return address if isinstance(address, str) else " ".join(address)


def normal(address: object) -> Address | None:
    """An address as options hold it; None for none."""
    if isinstance(address, str):
        return address
    if isinstance(address, (list, tuple)) and address:
        return tuple(str(word) for word in address)
    return None


def write_record(directory: str, address: Address, like_fd: int) -> None:
    """Note the address beside the file, durably, for whoever finds the file gone."""
    path = os.path.join(directory, RECORD_NAME)
    if read_record(directory) == address:
        return
    data = json.dumps(address).encode()
    try:
        _names.create_whole(path, lambda fd: _files.write_at(fd, [data], 0), replace_file=True)
        _names.match_owner_and_mode(path, like_fd)
    except (OSError, DiskFullError) as error:
        logger.warning("where the replica is can't be noted in %s: %s", path, error)


def read_record(directory: str) -> Address | None:
    """The address noted beside the file; None when there is none that can be read."""
    try:
        with open(os.path.join(directory, RECORD_NAME), encoding="utf-8") as file:
            return normal(json.load(file))
    except (OSError, ValueError):
        return None
