"""dlq watch: call a command once for each new dead letter.

What was called for is remembered in a file beside the queue, one line a death, written before the
command is started: whatever happens in between, nobody is called twice for the same letter. A
letter that was redriven and dies again is a new one.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from typing import Any, TextIO

import click

import weclaw_embedded as weclaw
from weclaw_embedded import _survey
from weclaw_embedded._jsonable import dumps
from weclaw_embedded.cli import _common as common

__all__ = ["watch"]

# Lines of letters that are gone by now are dropped when there are so many more than letters.
_SLACK = 1000
# The longest text a variable of the environment may have is 128 KiB on Linux.
_LONGEST = 100_000

Death = tuple[str, str, int, int]  # topic, group, offset, time in microseconds


@click.command()
@common.file_argument
@click.option("--exec", "command", required=True, metavar="CMD", help="Run by the shell.")
@click.option(
    "--state",
    type=click.Path(dir_okay=False),
    help="Where to remember what was called for; default: FILE.watch.",
)
@click.option("--skip-existing", is_flag=True, help="At the first start, skip what is dead by now.")
@click.option("--once", is_flag=True, help="Call for what is there and end.")
@click.option("--interval", type=common.DURATION, default=1.0, show_default=True)
@click.option("--topic", help="Only this topic; default: all.")
@click.option("--group", help="Only this group; default: all.")
@common.readonly_option
def watch(
    file: str,
    command: str,
    state: str | None,
    skip_existing: bool,
    once: bool,
    interval: float,
    topic: str | None,
    group: str | None,
    readonly: bool,
) -> int:
    """Call CMD once for each dead letter of FILE, until SIGTERM or Ctrl-C.

    CMD gets the letter as one line of JSON on its standard input, and in its environment
    WECLAW_LETTER_ID, _REASON, _TOPIC, _GROUP and _FILE. Started again, it goes on where it was.
    A command that fails is reported and not called again; the letter stays where it is.
    """
    common.must_exist(file)
    memory = _Memory(state or f"{os.path.realpath(file)}.watch")
    stop = _Stop()
    failed = 0
    try:
        with common.looking(file, readonly=readonly) as store:
            known_end = -1
            first = skip_existing and memory.is_new
            while not stop.asked():
                queues = [
                    common.queue_of(store, place.topic, place.group)
                    for place in common.places(store, topic, group)
                ]
                for queue in queues:
                    len(queue.dlq)  # leases that ran out are judged when somebody looks
                # While nothing is written, nothing has died.
                end = _survey.end(store)
                deaths = _deaths(queues) if end != known_end else []
                for queue, death in deaths:
                    if stop.asked():
                        break
                    if memory.add(death) and not first:
                        failed += not _call(command, file, queue, death)
                else:
                    if end != known_end:
                        memory.forget_all_but([death for _, death in deaths])
                    known_end, first = end, False
                if once:
                    break
                stop.wait(max(interval, 0.05))
    finally:
        stop.end()
        memory.close()
    return 1 if once and failed else 0


def _deaths(queues: list[weclaw.Queue]) -> list[tuple[weclaw.Queue, Death]]:
    """Every letter there is, the one that died first first."""
    found = [
        (queue, (queue.topic, queue.group, offset, died_us))
        for queue in queues
        for offset, died_us in _survey.deaths(queue)
    ]
    return sorted(found, key=lambda pair: pair[1][3])


def _call(command: str, file: str, queue: weclaw.Queue, death: Death) -> bool:
    """Run the command for one letter; whether it ended well, or the letter is gone again."""
    topic, group, offset, died_us = death
    letter = _survey.letter_at(queue, offset, died_us)
    if letter is None:
        return True
    told = {"ID": letter.id, "REASON": letter.reason, "TOPIC": topic, "GROUP": group}
    told["FILE"] = os.path.abspath(file)
    environment = dict(os.environ)
    for name, text in told.items():
        environment[f"WECLAW_LETTER_{name}"] = text.replace("\0", "")[:_LONGEST]
    done = subprocess.run(
        command,
        shell=True,  # it is the operator's own command; what is in a letter is never part of it
        input=(dumps(letter.to_dict()) + "\n").encode("utf-8", "backslashreplace"),
        env=environment,
        # Ctrl-C is for us: the command may end what it began.
        start_new_session=True,
    )
    if done.returncode:
        click.echo(
            f"weclawctl: the command ended with {done.returncode} for "
            f"{common.plain(letter.id)}; it is not called again",
            err=True,
        )
    return done.returncode == 0


class _Memory:
    """The deaths that were called for, over restarts. One watcher has it at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = self._open(path)
        self._file.seek(0)
        *lines, cut = self._file.read().split("\n")
        self.is_new = not lines
        self._known = set(lines)
        if cut:  # by a crash in the middle of writing it: nobody was called for it
            self._rewrite()

    def _open(self, path: str) -> TextIO:
        try:
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise common.Failure(
                f"{common.plain(path)} can't be written ({error.strerror}), so nothing could be "
                "remembered; nothing was called; name another place with --state"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == os.stat(path).st_ino:
                return file
        except OSError:
            pass  # whoever has it, or has just replaced it, is at work
        file.close()
        raise common.Failure(
            f"{common.plain(path)} is in use by another watch; nothing was called; give one of "
            "them another --state"
        )

    def add(self, death: Death) -> bool:
        """Remember it, on disk when this returns; False if it was known."""
        line = _line(death)
        if line in self._known:
            return False
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._known.add(line)
        return True

    def forget_all_but(self, deaths: list[Death]) -> None:
        """Drop letters that are gone, when they have become many."""
        if len(self._known) > len(deaths) + _SLACK:
            self._known.intersection_update(map(_line, deaths))
            self._rewrite()

    def _rewrite(self) -> None:
        """To another name first: cut in the middle, it would call again for what it lost."""
        temporary = f"{self._path}.part"
        if os.path.exists(temporary):
            os.unlink(temporary)
        file = self._open(temporary)
        file.writelines(f"{line}\n" for line in sorted(self._known))
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary, self._path)
        self._file.close()
        self._file = file

    def close(self) -> None:
        self._file.close()


def _line(death: Death) -> str:
    topic, group, offset, died_us = death
    return dumps([topic, group, offset, died_us])


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
