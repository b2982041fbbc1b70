"""The feeder's end of the stream: the receiver process, and the log sent to it.

Role: a `Link` starts the receiver, greets it, decides where to go on or why not to, and from then
on sends the log up to a point and waits until the receiver has it on its disk. What is not sent
yet stays in the file: only one message at a time is in memory, however far the replica is behind.

Invariants:

* Only what the primary has synced is sent: never past the target, before which all is.
* The head is sent after everything that was durable when the primary recorded it.
* A segment freed while it was read is noticed after the read: nothing of it is sent.

It must not know who waits. A link is used by one thread at a time.
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
from ._format import SLOT_BYTES, FileHeader, pack_slot
from ._recovery import is_whole
from ._segments import HEAD, MissingSegmentError
from ._stream import (
    ACK,
    MAX_DATA,
    REFUSED,
    STATE,
    SYNC_EVERY,
    UNSURE_BYTES,
    Hello,
    Incoming,
    State,
    StreamError,
)
from .errors import DiskFullError
from .wal import Log, LogState

logger = logging.getLogger("weclaw_embedded")

Address = str | tuple[str, ...]

ERRORS_NAME: Final = "replica.err"
RECORD_NAME: Final = "replica"  # where the address is kept beside the file
_CONNECT_S: Final = 30.0
_END_PATIENCE_S: Final = 1.0
_KILL_PATIENCE_S: Final = 2.0
# A receiver that neither takes nor says anything for this long, though it should, is given up: far
# longer than a slow disk needs, and longer by what it has to bring to its disk.
HANGS_S: Final = 60.0
_SLOWEST_BYTES_S: Final = 1 << 20
_LOOK_S: Final = 0.1  # how long a wait goes on before it is seen that the store closes
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
            self.wait(min(_LOOK_S, until_s - time.monotonic()))

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


class Link:
    """A receiver that has been greeted, and how far it is. One thread at a time."""

    def __init__(
        self,
        channel: Channel,
        fd: int,
        header: FileHeader,
        page: LogState,
        stopping: Callable[[], bool],
    ) -> None:
        self.channel = channel
        # Its own look at the log, because a `Log` is one thread's at a time.
        self._log = Log(fd, header, page, readonly=True)
        self._page = page
        self._header = header
        self._stopping = stopping
        self.sent = 0  # everything before this has been given to the stream
        self.asked = 0  # up to here the receiver was asked to confirm
        self.acked = 0  # up to here it has
        self._asked_at = 0
        self._whole = False  # the copy is in its place
        self.head = 0  # the last head sent
        self.is_greeted = False
        self._waited_since_s = 0.0  # when it was first seen that it has not answered; 0: it has

    def greet(self, commit: int) -> bool:
        """Find out what the receiver has and where to go on; True when the copy is made anew."""
        header = self._header
        channel = self.channel
        until_s = time.monotonic() + _CONNECT_S
        hello = Hello(header.store_id, header.segment_bytes, header.epoch, header.created_us)
        channel.send(_stream.HELLO, _stream.pack_hello(hello))
        body = channel.answer(until_s, self._stopping)
        if body[0] != STATE:
            raise LinkDownError("the receiver did not say what it has")
        try:
            state = _stream.unpack_state(body)
        except StreamError as error:
            raise LinkDownError(str(error)) from None
        anew = not state.exists or self._is_too_far_behind(state, commit)
        if state.is_damaged and not anew:
            # It is replaced when it is whole again, and by what is whole here alone.
            anew = is_whole(self._log, commit, UNSURE_BYTES)
        if anew:
            self.sent = self._log.head_offset
            self.head = self.sent >> self._log.bits
        else:
            self.sent = self.acked = self.asked = state.tail
            self.head = state.head
            self._whole = True
        self._asked_at = self.sent
        self.is_greeted = True
        channel.send(_stream.BEGIN, _stream.pack_begin(anew, self.sent))
        return anew

    def _is_too_far_behind(self, state: State, commit: int) -> bool:
        """False when the copy can be continued. RefusedError when it is none of ours."""
        log = self._log
        if state.last_end <= log.head_offset and (state.last_crc or log.head_offset):
            return True
        if state.tail <= commit and log.ends_with(state.last_end, state.last, state.last_crc):
            return False
        raise RefusedError(
            _stream.DIVERGED,
            state.epoch,
            f"what the copy ends with (at offset {state.last_end}) is not in this file: the two "
            "have gone different ways, or this file is an older one, or damaged; to go on with "
            "what the copy has, move this file away and open again; to go on with this one, name "
            "another place for the replica",
        )

    def send(self, target: int, announced: int = 0) -> None:
        """Send of what `pump` does as much as goes now. Raises what that does."""
        channel = self.channel
        while channel.is_writable:
            if self.sent < target:
                self._send_log(self.sent, target)
            elif self.asked < target:
                channel.send(_stream.SYNC, _stream.pack_offset(self.sent))
                self.asked = self._asked_at = self.sent
            elif self.head < announced:
                channel.send(_stream.HEAD, _stream.pack_offset(announced))
                self.head = announced
            else:
                return

    def pump(self, target: int, announced: int, until_s: float) -> bool:
        """Send everything up to `target`, which is synced, and then that segments before
        `announced` are gone; True once the receiver has confirmed `target`, False when the time
        is over. Raises LinkDownError, RefusedError, LookupError (freed before it was sent).
        """
        channel = self.channel
        self.send(target, announced)
        while self.acked < target:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._stopping():
                return False
            if channel.wait(min(left_s, _LOOK_S)):
                while self._take():
                    pass
            else:
                self._look_whether_it_hangs()
            if self.asked < target or self.head < announced:
                self.send(target, announced)
        return True

    def listen(self) -> None:
        """Hear what the receiver says though nothing is asked of it, and that it has ended. Raises
        LinkDownError, RefusedError.
        """
        self.channel.wait(0.0)
        while self._take():
            pass

    def _take(self) -> bool:
        """Take one answer that is there; False when there is none."""
        body = self.channel.take()
        if body is None:
            return False
        if body[0] != ACK:
            raise LinkDownError("the receiver answered something else than how far it is")
        self.acked = min(_stream.unpack_offset(body), self.asked)
        self._whole = True
        self._waited_since_s = 0.0
        return True

    def _look_whether_it_hangs(self) -> None:
        """Raise LinkDownError when the receiver was silent for too long."""
        now_s = time.monotonic()
        self._waited_since_s = self._waited_since_s or now_s
        silent_s = now_s - max(self.channel.moved_s, self._waited_since_s)
        if silent_s > HANGS_S + (self.sent - self.acked) / _SLOWEST_BYTES_S:
            raise LinkDownError(
                f"the receiver has neither taken nor said anything for {silent_s:.0f} s, and is "
                f"ended{self.channel.last_words()}"
            )

    def _send_log(self, at: int, target: int) -> None:
        """Send what the log has at an offset before `target`."""
        log = self._log
        segment = at >> log.bits
        if at & (log.segment_bytes - 1) == 0:
            self._send_segment(segment)
            return
        end = target if segment == target >> log.bits else log.frames_end(segment)
        if end is None or at >= end:
            following = log.next_present(segment)
            if following is None or following > target >> log.bits:
                raise LinkDownError(f"segment {segment + 1} of the log can't be found")
            self._send_segment(following)
            return
        n = min(MAX_DATA, end - at)
        # What can't be read must not come to the other side as something else.
        data = _files.read_at(log.fd, n, at + log.place(segment)[0])
        self._still_kept(segment)
        if len(data) < n:
            raise LinkDownError("the file ends before its log does")
        end = at + n
        # A copy that is made anew takes its place with the first sync: not before it is whole.
        sync = end == target or (self._whole and end - self._asked_at >= SYNC_EVERY)
        self.channel.send(_stream.DATA, _stream.pack_data(at, sync), data)
        self.sent = end
        if sync:
            self.asked = self._asked_at = end

    def _send_segment(self, segment: int) -> None:
        log = self._log
        try:
            log.place(segment)
            slot = log.read_slot(log.slot_of(segment))
        except (MissingSegmentError, KeyError):
            slot = None
        self._still_kept(segment)
        if slot is None or slot.segment != segment:
            raise LinkDownError(f"segment {segment} of the log has no readable header")
        self.channel.send(_stream.SEGMENT, pack_slot(slot, self._header.store_id))
        self.sent = (segment << log.bits) + SLOT_BYTES

    def _still_kept(self, segment: int) -> None:
        if segment < self._page.words[HEAD]:
            raise LookupError(f"segment {segment} was freed before the replica had it")

    def close(self) -> None:
        self.channel.close()

    def abandon(self) -> None:
        self.channel.abandon()


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
