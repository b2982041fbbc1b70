"""The feeder's end of the stream: the log, sent to a receiver.

Role: a `Link` greets a receiver that was started (`_channel`), decides where to go on or why not
to, and from then on sends the log up to a point and waits until the receiver has it on its disk.
What is not sent yet stays in the file: only one message at a time is in memory, however far the
replica is behind.

Invariants:

* Only what the primary has synced is sent: never past the target, before which all is.
* The head is sent after everything that was durable when the primary recorded it.
* A segment freed while it was read is noticed after the read: nothing of it is sent.

It must not know who waits. A link is used by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from . import _files, _stream
from ._channel import LOOK_S, Channel, LinkDownError, RefusedError
from ._format import SLOT_BYTES, FileHeader, pack_slot
from ._log_end import is_whole
from ._segments import HEAD, MissingSegmentError
from ._stream import (
    ACK,
    MAX_DATA,
    STATE,
    SYNC_EVERY,
    UNSURE_BYTES,
    Hello,
    State,
    StreamError,
)
from .wal import Log, LogState

_CONNECT_S: Final = 30.0
# A receiver that neither takes nor says anything for this long, though it should, is given up: far
# longer than a slow disk needs, and longer by what it has to bring to its disk.
HANGS_S: Final = 60.0
_SLOWEST_BYTES_S: Final = 1 << 20


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
        self.replaces = False  # a copy that was there, should one be made
        self._waited_since_s = 0.0  # when it was first seen that it has not answered; 0: it has

    def greet(self, commit: int) -> bool:
        """Find out what the receiver has and where to go on; True when a whole copy is made."""
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
        self.replaces = state.exists
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
            if channel.wait(min(left_s, LOOK_S)):
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
