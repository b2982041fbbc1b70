"""Turns that several share: operations of one caller, or of threads that come at the same time.

Role: the part of the engine that runs several operations with one lock of the file, one write, one
transaction of the index and one sync. The first thread to come leads: it does its own at once, and
who comes meanwhile waits. When it is done, the first of those leads: it runs what all of them want,
and they are woken when it is durable. So each is woken once, and only for what it waits for; waking
a thread costs more than all else that a put does.

Invariant: nobody waits for a leader that is gone. The main thread, which Ctrl-C and the handlers of
signals interrupt anywhere, neither leads nor follows.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from typing_extensions import TypeVarTuple, Unpack

from . import _files
from ._opening import WRITE
from ._session import Job, Session
from ._shared import REPLICATION, SharedPage
from .errors import DiskFullError
from .wal import TAIL

T = TypeVar("T")
Args = TypeVarTuple("Args")
Pokes = list[tuple[bytes, Sequence[int]]]

# Operations of other threads that one runs with his own.
_MOST_JOBS: Final = 64


_main_thread = threading.main_thread().ident


def _after_fork_in_child() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _wake(jobs: list[Job] | None) -> None:
    """Wake the threads whose jobs are done, each by the one before: woken all at once they would
    wait again, for the lock of the interpreter.
    """
    if jobs:
        job = jobs.pop()
        job.wakes = jobs
        job.turn.release()


class Together:
    """What `Engine` inherits to run operations in shared turns."""

    fd: int
    page: SharedPage
    execute: Callable[..., Any]
    durable: Callable[[int], None]
    make_room: Callable[[], bool]
    _check_open: Callable[[], None]
    _begin: Callable[[], Session]
    _take_pokes: Callable[[Session], Pokes | None]
    _after: Callable[[Session, Pokes | None], None]
    _lock: threading.Lock
    _lead_lock: threading.Lock  # guards the next two
    _led: bool
    _waiting: deque[Job]

    def execute_together(
        self, operation: Callable[[Session, Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        """`execute`, for what many threads do at once: run and synced with what they want."""
        # Nobody waits here for another's replica: each call has its own time for that.
        if self.page.words[REPLICATION] or threading.get_ident() == _main_thread:
            return cast(T, self.execute(operation, *args))
        job = None
        with self._lead_lock:
            if self._led:
                job = Job(operation, *args)
                job.turn.acquire()
                self._waiting.append(job)
            self._led = True
        if job is None:
            try:
                return cast(T, self.execute(operation, *args))
            finally:
                self._pass_on([])
        job.turn.acquire()  # until it is done, or this thread is to lead
        _wake(job.wakes)
        if job.leads:
            self._lead(job)
        if job.tail is None or isinstance(job.error, DiskFullError):
            return cast(T, self.execute(operation, *args))
        if job.error is not None:
            raise job.error
        if job.must_sync:
            self.durable(job.tail)
            if job.session is not None:
                job.session.confirm(job.tail, job.puts)
        return cast(T, job.result)

    def _lead(self, job: Job) -> None:
        """Run a job of this thread and those of others that wait, in the order they came; they are
        durable when this returns. What is left without a `tail` is run by whose it is.
        """
        with self._lead_lock:
            n = min(len(self._waiting), _MOST_JOBS)
            others = [self._waiting.popleft() for _ in range(n)]
        jobs = [job, *others]
        try:
            with self._lock:
                session, tail, pokes = self._run(jobs)
            self._after(session, pokes)
            for done in jobs:
                done.tail = tail
            if any(done.must_sync for done in jobs):
                self.durable(tail)
        except Exception:
            # One of the others may be the reason: each sees for himself.
            if not others:
                raise
        finally:
            self._pass_on(others)

    def _pass_on(self, done: list[Job]) -> None:
        """Let the first of those who came meanwhile lead, and wake those whose jobs are done."""
        following = None
        with self._lead_lock:
            self._led = bool(self._waiting)
            if self._waiting:
                following = self._waiting.popleft()
        if following is not None:
            following.leads = True
            following.turn.release()
        _wake(done)

    def execute_many(self, jobs: Sequence[Job]) -> int:
        """Run several operations in one turn: one write, one index transaction. Each gets its own
        result or error. Does not sync: jobs with `must_sync` are durable once
        `durable(returned offset)` has returned.

        Raises what makes the whole turn fail; then none of the jobs was done.
        """
        tail = self._turn_of(jobs)
        full = [job for job in jobs if isinstance(job.error, DiskFullError)]
        if full and self.make_room():
            tail = self._turn_of(full)
        return tail

    def _turn_of(self, jobs: Sequence[Job]) -> int:
        with self._lock:
            session, tail, pokes = self._run(jobs)
        self._after(session, pokes)
        return tail

    def _run(self, jobs: Sequence[Job]) -> tuple[Session, int, Pokes | None]:
        """One turn of these; the caller has the thread lock."""
        self._check_open()
        try:
            _files.lock(self.fd, WRITE, True)
            session = self._begin()
            try:
                for job in jobs:
                    session.must_sync = False
                    job.error = None
                    try:
                        job.result = job.operation(session, *job.args)
                    except Exception as error:  # noqa: BLE001  each job's own, told to it
                        job.error = error
                    if session.imagined:
                        session.forget_imagined()
                    job.must_sync = session.must_sync
                    if session.replicated:
                        job.session, job.puts = session, session.take_puts()
                session.finish()
            except BaseException as error:
                session.abort(error)
                raise
            tail = self.page.words[TAIL]
            pokes = self._take_pokes(session)
        finally:
            _files.unlock(self.fd, WRITE)
        return session, tail, pokes
