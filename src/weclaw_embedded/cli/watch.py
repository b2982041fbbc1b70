"""dlq watch: call a command once for each new dead letter.

What was called for is remembered in a file beside the queue: a line for each death before the
command is started, and another when it has ended. So nobody is called twice for a letter that was
dealt with, whatever happens in between; and a command that failed is called again, after a pause
that doubles, over restarts too. One that ran when the watch was killed may have done its work: it
is reported and not called again. A letter that was redriven and dies again is a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, TextIO

import click
import filelock

import weclaw_embedded as weclaw
from weclaw_embedded import _names, _survey
from weclaw_embedded._jsonable import dumps
from weclaw_embedded.cli import _common as common

__all__ = ["watch"]

# Lines of letters that are gone by now are dropped when there are so many more than letters.
_SLACK = 1000
# Between two calls for a letter whose command fails: so long after the first, doubled up to …
_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0
# The longest text a variable of the environment may have is 128 KiB on Linux.
_LONGEST = 100_000
_STDERR = 2

Death = tuple[str, str, int, int]  # topic, group, offset, time in microseconds


@click.command(short_help="Call a command once for each dead letter.")
@common.file_argument
@click.option("--exec", "command", required=True, metavar="CMD", help="Run by the shell.")
@click.option(
    "--state",
    type=click.Path(dir_okay=False),
    help="Where to remember what was called for; default: FILE.watch.",
)
@click.option("--skip-existing", is_flag=True, help="At the first start, skip what is dead by now.")
@click.option("--once", is_flag=True, help="Call for what is there and end.")
@click.option("--interval", type=common.POSITIVE, default=1.0, show_default=True)
@click.option(
    "--retry-after",
    type=common.DURATION,
    default=_PAUSE_S,
    show_default=True,
    help="Call a command that failed again after so long, then twice as long, up to 10m.",
)
@click.option("--topic", help="Only this topic; default: all.")
@click.option("--group", help="Only this group; default: all.")
@common.json_option
@common.readonly_option
def watch(
    file: str,
    command: str,
    state: str | None,
    skip_existing: bool,
    once: bool,
    interval: float,
    retry_after: float,
    topic: str | None,
    group: str | None,
    as_json: bool,
    readonly: bool,
) -> int:
    """Call CMD once for each dead letter of FILE, until SIGTERM or Ctrl-C.

    CMD gets the letter as one line of JSON on its standard input, and in its environment
    WECLAW_LETTER_ID, _REASON, _TOPIC, _GROUP, _FILE and _ATTEMPT. Started again, it goes on where
    it was. A command that fails is reported and called again later, for as long as the letter is
    there: after --retry-after, at the next start, or by the next --once. With --json, one object a
    line for each call, and what CMD prints goes to standard error.
    """
    if not command.strip():
        raise click.UsageError("--exec names no command")
    stop = _Stop()
    failed = 0
    try:
        with common.looking(file, readonly=readonly) as store, contextlib.ExitStack() as stack:
            wrong = common.missing(store, topic, group)
            if wrong is not None and once:
                common.fail(f"{wrong}; nothing was called")
            # Only now: what is no queue, or is not meant, gets nothing beside it.
            memory = _Memory(state, os.path.realpath(file))
            stack.callback(memory.close)
            if wrong is not None:  # it may begin at any moment
                common.say(f"weclawctl: {wrong}; waiting for it")
            if memory.unfinished is not None:
                _tell_unfinished(store, memory.unfinished)
                memory.ended(memory.unfinished, 0, 0.0)
            known_end = -1
            first = skip_existing and memory.is_new
            while not stop.asked():
                queues = _queues(store, topic, group)
                # While nothing is written, nothing has died.
                end = _survey.end(store)
                new = end != known_end
                if new:
                    deaths = _deaths(queues)
                if first:
                    memory.skip([death for _, death in deaths])
                for queue, death in deaths if new or memory.is_due() else []:
                    if stop.asked():
                        break
                    if memory.knows(death):
                        continue
                    memory.begin(death)
                    attempt = memory.failures(death) + 1
                    status, id = _call(command, file, queue, death, attempt, as_json=as_json)
                    pause_s = min(retry_after * 2 ** min(attempt - 1, 20), _LONGEST_PAUSE_S)
                    memory.ended(death, attempt if status else 0, pause_s)
                    if status:
                        failed += 1
                        _tell_failed(status, id, attempt, None if once else pause_s)
                else:
                    if new:
                        memory.forget_all_but([death for _, death in deaths])
                    known_end, first = end, False
                if once:
                    break
                stop.wait(max(interval, 0.05))
                if as_json:
                    common.check_reader()
    finally:
        stop.end()
    return 1 if once and failed else 0


def _queues(store: weclaw.Store, topic: str | None, group: str | None) -> list[weclaw.Queue]:
    """Those that are watched. Leases that ran out are judged when somebody looks: now."""
    places = common.places(store, topic, group)
    queues = [common.queue_of(store, place.topic, place.group) for place in places]
    for queue in queues:
        len(queue.dlq)
    return queues


def _tell_failed(status: int, id: str, attempt: int, pause_s: float | None) -> None:
    then = "by the next --once" if pause_s is None else f"in {common.age(pause_s)}"
    common.say(
        f"weclawctl: the command ended with {status} for {common.plain(id)}, "
        f"attempt {attempt}; it is called again {then}"
    )


def _tell_unfinished(store: weclaw.Store, death: Death) -> None:
    """Its command may have done its work, so it is not called again; somebody should look."""
    topic, group, offset, died_us = death
    letter = _survey.letter_at(common.queue_of(store, topic, group), offset, died_us)
    which = f"the letter at offset {offset}, which is gone," if letter is None else letter.id
    common.say(
        common.plain(
            f"weclawctl: the watch before this one ended while the command ran for {which} of "
            f"topic {topic!r}, group {group!r}; it is not called again"
        )
    )


def _deaths(queues: list[weclaw.Queue]) -> list[tuple[weclaw.Queue, Death]]:
    """Every letter there is, the one that died first first."""
    found = [
        (queue, (queue.topic, queue.group, offset, died_us))
        for queue in queues
        for offset, died_us in _survey.deaths(queue)
    ]
    return sorted(found, key=lambda pair: pair[1][3])


def _call(
    command: str, file: str, queue: weclaw.Queue, death: Death, attempt: int, *, as_json: bool
) -> tuple[int, str]:
    """Run the command for one letter: its exit status (0 if the letter is gone again), its id."""
    topic, group, offset, died_us = death
    letter = _survey.letter_at(queue, offset, died_us)
    if letter is None:
        return 0, ""
    told = {"ID": letter.id, "REASON": letter.reason, "TOPIC": topic, "GROUP": group}
    told.update(FILE=os.path.abspath(file), ATTEMPT=str(attempt))
    environment = dict(os.environ)
    for name, text in told.items():
        environment[f"WECLAW_LETTER_{name}"] = text.replace("\0", "")[:_LONGEST]
    done = subprocess.run(
        command,
        shell=True,  # it is the operator's own command; what is in a letter is never part of it
        input=(dumps(letter.to_dict()) + "\n").encode("utf-8", "backslashreplace"),
        # Standard output is one object a line then.
        stdout=_STDERR if as_json else None,
        env=environment,
        # Ctrl-C is for us: the command may end what it began.
        start_new_session=True,
    )
    if as_json:
        found: dict[str, Any] = {"id": letter.id, "topic": topic, "group": group}
        found.update(reason=letter.reason, attempt=attempt, exit_status=done.returncode)
        common.print_json(found, indent=None)
    return done.returncode, letter.id


class _Memory:
    """The deaths that were called for, over restarts. One watcher has it at a time.

    A line is a list: topic, group, offset, time of death when a call begins; the same and how often
    in a row it has failed when it has ended, 0 for a good end. The last line of a death counts.
    """

    def __init__(self, path: str | None, file: str) -> None:
        """At this path, made as all new files are; without one beside the queue's file, whose owner
        and mode it has.
        """
        self._path = path or f"{file}.watch"
        self._like = None if path else file
        self._locked = self._lock()
        self._file = self._open(self._path)
        self._file.seek(0)
        *lines, cut = self._file.read().split("\n")
        self.is_new = not lines
        self._lines = len(lines)
        self._failures: dict[Death, int] = {}
        begun: Death | None = None
        try:
            for line in lines:
                topic, group, offset, died_us, *ended = json.loads(line)
                death = (topic, group, offset, died_us)
                self._failures[death] = ended[0] if ended else 0
                begun = None if ended else death
        except (ValueError, TypeError) as error:
            self.close()
            raise common.Failure(
                f"{common.plain(self._path)} is not the memory of a watch; nothing was called; "
                "name another place with --state"
            ) from error
        self._due_s = {death: 0.0 for death, number in self._failures.items() if number}
        if cut:  # by a crash in the middle of writing it: nobody was called for it
            self._rewrite()
        #: The one whose command ran when the watch before this one ended.
        self.unfinished = begun

    def _lock(self) -> filelock.BaseFileLock:
        # A file of its own: the memory itself is replaced when it is written anew.
        path = f"{self._path}.lock"
        lock = filelock.FileLock(path, timeout=0)
        try:
            if self._like is not None:
                _names.make_beside(path, self._like)
            lock.acquire()
        except filelock.Timeout:
            raise common.Failure(
                f"{common.plain(self._path)} is in use by another watch; nothing was called; give "
                "one of them another --state"
            ) from None
        except OSError as error:
            raise self._refused(error) from error
        return lock

    def _open(self, path: str) -> TextIO:
        try:
            if self._like is not None:
                _names.make_beside(path, self._like)
            return open(path, "a+", encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> common.Failure:
        return common.Failure(
            f"{common.plain(self._path)} can't be written ({error.strerror}), so nothing could be "
            "remembered; nothing was called; name another place with --state"
        )

    def knows(self, death: Death) -> bool:
        """Whether there is nothing to do for it now."""
        if death not in self._failures:
            return False
        due_s = self._due_s.get(death)
        return due_s is None or time.monotonic() < due_s

    def is_due(self) -> bool:
        """Whether a command that failed is to be called again."""
        now_s = time.monotonic()
        return any(now_s >= due_s for due_s in self._due_s.values())

    def failures(self, death: Death) -> int:
        """How often in a row its command has failed."""
        return self._failures.get(death, 0)

    def begin(self, death: Death) -> None:
        """Remember that its command is called, on disk when this returns."""
        self._write(list(death))
        self._failures.setdefault(death, 0)

    def skip(self, deaths: list[Death]) -> None:
        """Remember all these as dealt with."""
        self._failures.update(dict.fromkeys(deaths, 0))
        self._write(*([*death, 0] for death in deaths))

    def ended(self, death: Death, failures: int, pause_s: float) -> None:
        """Remember how it ended; one that failed is due again after the pause."""
        self._failures[death] = failures
        self._due_s.pop(death, None)
        if failures:
            self._due_s[death] = time.monotonic() + pause_s
        self._write([*death, failures])
        if self._lines > 2 * len(self._failures) + _SLACK:  # a command that fails again and again
            self._rewrite()

    def _write(self, *lines: list[Any]) -> None:
        self._file.writelines(f"{dumps(line)}\n" for line in lines)
        self._lines += len(lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def forget_all_but(self, deaths: list[Death]) -> None:
        """Drop letters that are gone, when they have become many."""
        if len(self._failures) > len(deaths) + _SLACK:
            kept = set(deaths)
            self._failures = {death: n for death, n in self._failures.items() if death in kept}
            self._due_s = {death: at for death, at in self._due_s.items() if death in kept}
            self._rewrite()

    def _rewrite(self) -> None:
        """To another name first: cut in the middle, it would call again for what it lost."""
        temporary = f"{self._path}.part"
        if os.path.exists(temporary):
            os.unlink(temporary)
        file = self._open(temporary)
        file.writelines(f"{dumps([*death, n])}\n" for death, n in self._failures.items())
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary, self._path)
        self._file.close()
        self._file = file
        self._lines = len(self._failures)

    def close(self) -> None:
        self._file.close()
        self._locked.release()


class _Stop:
    """SIGTERM and Ctrl-C end the watch after the command that runs; a second one ends it now."""

    def __init__(self) -> None:
        self._told = False
        self._before: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        if self._told:
            sys.exit(130)
        self._told = True

    def asked(self) -> bool:
        return self._told

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._told and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))

    def end(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
