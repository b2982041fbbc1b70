"""Turns that several share: operations of one caller, or of threads that come at the same time.

Role: the part of the engine that runs several operations with one lock of the file, one write, one
transaction of the index and one sync. The first thread to come leads: it does its own at once, and
who comes meanwhile waits. When it is done, the first of those leads: it runs what all of them want,
and they are woken when it is durable. So each is woken once, and only for what it waits for; waking
a thread costs more than all else that a put does. The last one to be woken lets the next one lead:
those who were woken before him are back by then, and share a turn with those who waited instead of
having one each in turns.

Invariant: nobody waits for a leader that is gone. The main thread, which Ctrl-C and the handlers of
signals interrupt anywhere, neither leads nor follows.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from ._index import IndexFullError
from ._opening import Opened
from ._part import Part
from ._session import Job, MoreEnded, Session
from ._shared import REPLICATION
from ._upkeep import MakingRoom
from .errors import DiskFullError

T = TypeVar("T")
What = TypeVar("What")

# Operations of other threads that one runs with his own.
_MOST_JOBS: Final = 64
# With these nothing of a job was done: whose it is runs it anew, alone.
_NOT_DONE: Final = (DiskFullError, MoreEnded)
# Nobody is kept for longer from his turn by one who leads and waits for the replica.
_HOLD_S: Final = 0.1


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


class Together(Part):
    """What `Engine` inherits to run operations in shared turns."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._lead_lock = threading.Lock()  # guards the next two
        self._led = False
        self._waiting: deque[Job] = deque()

    def run_together(self, operation: Callable[[Session, What], T], what: What) -> T:
        """`run_with`, for what many threads do at once: run and synced with what they want."""
        if threading.get_ident() == _main_thread:
            return self.run_with(operation, what)
        job = None
        with self._lead_lock:
            if self._led:
                job = Job(operation, what)
                job.turn.acquire()
                self._waiting.append(job)
            elif self.page.words[REPLICATION]:
                # `run_with` would wait for the replica, and lead for as long as that takes.
                job = Job(operation, what)
                job.leads = True
            self._led = True
        if job is None:
            try:
                return self.run_with(operation, what)
            finally:
                self._pass_on()
        if not job.leads:
            job.turn.acquire()  # until it is done, or this thread is to lead
            _wake(job.wakes)
            if job.passes_on:
                self._pass_on()
        if job.leads:
            self._lead(job)
        if job.tail is None or isinstance(job.error, _NOT_DONE):
            return self.run_with(operation, what)
        if job.error is not None:
            raise job.error
        if job.must_sync:
            self.durable(job.tail)
            if job.session is not None:
                job.session.confirm(job.tail, job.puts, job.until_s)
        return cast(T, job.result)

    def _lead(self, job: Job) -> None:
        """Run a job of this thread and those of others that wait, in the order they came; they are
        durable when this returns. What is left without a `tail` is run by whose it is.
        """
        with self._lead_lock:
            n = min(len(self._waiting), _MOST_JOBS)
            others = [self._waiting.popleft() for _ in range(n)]
        jobs = [job, *others]
        leads = True
        try:
            tail = self._run_jobs_once(jobs)
            for done in jobs:
                done.tail = tail
            promised = [done for done in jobs if done.must_sync]
            if promised:
                self.durable(tail)
                if promised[0].session is not None:
                    now_s = time.monotonic()
                    until_s = now_s + self.replica_timeout
                    for done in promised:
                        done.until_s = until_s
                    if not self.on_replica(tail, min(until_s, now_s + _HOLD_S)):
                        leads = False
                        self._pass_on()
                        self.on_replica(tail, until_s)
        except Exception:
            # One of the others may be the reason: each sees for himself.
            if not others:
                raise
        finally:
            if leads:
                if others:
                    others[0].passes_on = True  # who is woken last
                else:
                    self._pass_on()
            _wake(others)

    def _pass_on(self) -> None:
        """Let the first of those who came meanwhile lead."""
        following = None
        with self._lead_lock:
            self._led = bool(self._waiting)
            if self._waiting:
                following = self._waiting.popleft()
        if following is not None:
            following.leads = True
            following.turn.release()

    def run_jobs(self, jobs: Sequence[Job]) -> int:
        """Run several operations in one turn: one write, one index transaction. Each gets its own
        result or error. Does not sync: jobs with `must_sync` are durable once
        `durable(returned offset)` has returned. A job with the error MoreEnded, and all behind it,
        were not done: they are to be run again.

        Those that find no room on the disk are run again, each by itself, as more space is freed,
        before they are refused. Raises what makes the whole turn fail; then none of the jobs was
        done.
        """
        try:
            tail = self._run_jobs_once(jobs)
        except DiskFullError as error:
            if len(jobs) > 1:
                raise
            jobs[0].error = error
            tail = 0
        full = [job for job in jobs if isinstance(job.error, DiskFullError)]
        return self._run_in_room_made_for(full, tail) if full else tail

    def _run_in_room_made_for(self, full: Sequence[Job], tail: int) -> int:
        """Run jobs again that found no room on the disk; `tail` if none of them finds any."""
        making = MakingRoom(self)
        while full and making.step():
            # Each in a turn of its own: what one can't have fails none of the others.
            for job in full:
                try:
                    tail = self._run_jobs_once([job])
                except DiskFullError as error:
                    job.result, job.error, job.must_sync = None, error, False
            full = [job for job in full if isinstance(job.error, DiskFullError)]
        return tail

    def run_job(self, job: Job) -> int:
        """`run_jobs` of one job, until it is done."""
        while True:
            tail = self.run_jobs([job])
            if not isinstance(job.error, MoreEnded):
                return tail

    def _run_jobs_once(self, jobs: Sequence[Job]) -> int:
        tail = self.run_once(_run, jobs).tail
        for job in jobs:
            if job.answer is not None:
                job.result = job.answer()
        return tail


def _run(session: Session, jobs: Sequence[Job]) -> Session:
    """The operation that runs these in its turn."""
    for job in jobs:
        session.must_sync = False
        job.error = None
        try:
            job.result = job.operation(session, *job.args)
        except IndexFullError:
            raise  # its transaction is over, with what the others did in it
        except MoreEnded as more:
            # What those before it did is not done anew; those behind it stay behind it.
            for left in jobs[jobs.index(job) :]:
                left.error = more
            break
        except Exception as error:  # noqa: BLE001  each job's own, told to it
            job.error = error
        job.answer, session.answer = session.answer, None
        if session.imagined:
            session.forget_imagined()
        job.must_sync = session.must_sync
        if session.replicated:
            job.session, job.puts = session, session.take_puts()
    session.must_sync = False  # it is done for all who want it together
    return session
