"""Rounds with a replica: whoever takes part is killed, the primary is lost, the copy is promoted.

The promoted copy is then held against the same ledger as any file. What a replica does not
promise is left out: a delivery that nobody settled may be forgotten.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.crash.ledger import Violation, check
from tests.crash.rounds import PATIENCE, Crew, kept_on_violation, random_options

import weclaw_embedded as weclaw
from weclaw_embedded import _survey, replica

RECEIVER = Path(__file__).with_name("receiver.py")


def command(copy: Path, log: Path, at: int, moment: str) -> list[str]:
    return [sys.executable, str(RECEIVER), str(copy), str(log), str(at), moment]


_MOST_S = 60.0  # until the second receiver has begun


def receivers(copy: Path) -> list[int]:
    """The processes at work on this copy."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if name.isdigit() and str(RECEIVER).encode() in words and str(copy).encode() in words:
            found.append(int(name))
    return found


def kill_receivers(copy: Path) -> int:
    n = 0
    for pid in receivers(copy):
        try:
            os.kill(pid, signal.SIGKILL)
            n += 1
        except ProcessLookupError:
            pass
    return n


def wait_until_gone(copy: Path) -> None:
    """The receivers of killed processes end by themselves, and soon."""
    end = time.monotonic() + PATIENCE
    while receivers(copy):
        if time.monotonic() > end:
            kill_receivers(copy)
            raise Violation("a receiver was left behind by its feeder")
        time.sleep(0.02)


def _check_log(log: Path) -> int:
    lines = log.read_text().splitlines() if log.exists() else []
    if any("twice" in line for line in lines):
        raise Violation("two processes fed at once")
    return sum("began" in line for line in lines)


def _check_promoted(copy: Path, crew: Crew, where: str) -> dict[str, int]:
    if not copy.exists():
        if any(what == "put" for _, what, *_ in crew.ledger.events):
            raise Violation(f"{where}: puts were confirmed and there is no copy")
        return {}
    if replica.node(copy).role != "primary":
        replica.promote(copy)
    return check(copy, crew.ledger, crew.options, where, forgets=True)


def _check_beginning(path: Path, copy: Path, where: str) -> None:
    """Whatever the copy has is what the primary has in the same place."""
    if not copy.exists():
        return
    with weclaw.open(path, readonly=True) as one, weclaw.open(copy, readonly=True) as other:
        ahead = _survey.end(other) > _survey.end(one)
        found = _survey.compare(one, other, _survey.end(one)).differences
    if ahead or found:
        raise Violation(f"{where}: the copy is {'ahead' if ahead else 'another'}: {found}")


def _promote_at_work(crew: Crew, copy: Path) -> bool:
    """Promote while producers put and the feeder starts its receiver again."""
    for _ in range(20):
        kill_receivers(copy)
        crew.listen(0.01)
        try:
            replica.promote(copy)
        except weclaw.LockedError:
            continue
        crew.fenced = True
        return True
    return False


def copy_round(directory: Path, seed: str, *, seconds: float = 1.5) -> dict[str, int]:
    """Producers, consumers and receivers killed one by one and together; then the primary is lost,
    or promoted over while it works, or compared."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / "primary"
    place.mkdir()
    copy, log = directory / "copy.wq", directory / "receivers"
    options = {
        **random_options(rng),
        "replica": command(copy, log, -1, "before"),
        "sync_replica": rng.random() < 0.75,
        "replica_timeout": 60.0,
    }
    crew = Crew(place / "tasks.wq", options, seed)
    roles = ["produce", "consume", *rng.choices(["produce", "consume"], k=rng.randrange(2))]
    with kept_on_violation(directory, crew):
        if rng.random() < 0.8:  # else it is made in the middle of all this
            weclaw.open(crew.path, **options).close()
        end = time.monotonic() + seconds
        for role in roles:
            crew.start(role)
        killed = 0
        # On a busy machine it takes a while until there is anybody to be killed.
        while time.monotonic() < end or (_check_log(log) < 2 and time.monotonic() < end + _MOST_S):
            crew.listen(rng.choice((0.0, 0.01, 0.05, 0.1, 0.3)))
            chance = rng.random()
            if chance < 0.35 and crew.children:
                victim = rng.choice(list(crew.children))
                crew.kill(victim)
                crew.start(victim.rstrip("0123456789"))
            elif chance < 0.6:
                killed += kill_receivers(copy)
            elif chance < 0.7:
                # All that are there, in whatever order.
                pids = [process.pid for process, _ in crew.children.values()] + receivers(copy)
                rng.shuffle(pids)
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                crew.stop_all()
                for role in roles:
                    crew.start(role)
        promoted = False
        if options["sync_replica"] and rng.random() < 0.3 and copy.exists():
            promoted = _promote_at_work(crew, copy)
            crew.listen(rng.choice((0.1, 0.5, 1.0)))
        crew.stop_all()
        wait_until_gone(copy)
        where = f"seed {seed}"
        numbers = {"receivers": _check_log(log), "killed": crew.kills + killed}
        if crew.path.exists() and not promoted:
            _check_beginning(crew.path, copy, where)
        if options["sync_replica"]:
            shutil.rmtree(place)
            numbers |= _check_promoted(copy, crew, where)
            numbers["promoted"] = promoted
        elif crew.path.exists():
            # Without a receiver, so that what is checked is the primary alone.
            crew.options = {k: v for k, v in options.items() if "replica" not in k}
            with weclaw.open(crew.path, replica=False):
                pass
            numbers |= check(crew.path, crew.ledger, crew.options, where)
        numbers["events"] = len(crew.ledger.events)
        return numbers


def receiver_stop_round(directory: Path, at: int, moment: str, *, retention: int = 3600) -> int:
    """The first receiver dies at its `at`-th call while the fixed work goes on; then the primary
    is lost. Returns how many calls it made, if it ended by itself."""
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / "primary"
    place.mkdir()
    copy, log = directory / "copy.wq", directory / "receivers"
    options = {
        "flush": "sync",
        "segment_bytes": 65536,
        "retention": retention,
        "replica": command(copy, log, at, moment),
        "replica_timeout": 60.0,
    }
    where = f"receiver {at} {moment}"
    crew = Crew(place / "tasks.wq", options, where)
    with kept_on_violation(directory, crew):
        # There already, so that the first receiver is not one that is only asked for data.
        weclaw.open(crew.path, segment_bytes=65536).close()
        crew.wait_for(crew.start("fixed"), 2 * PATIENCE)
        wait_until_gone(copy)
        _check_log(log)
        _check_beginning(crew.path, copy, where)
        shutil.rmtree(place)
        _check_promoted(copy, crew, where)
        counted = [line for line in log.read_text().splitlines() if "calls" in line]
        return int(counted[0].split()[0]) if counted else 0


def feeder_stop_round(
    directory: Path, kind: str, at: int, moment: str, *, existing: bool, retention: int = 3600
) -> int:
    """The process that feeds, or one that does not, dies at its `at`-th call or line; another goes
    on; then the primary is lost. Returns the number of calls, if it ended by itself."""
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / "primary"
    place.mkdir()
    copy, log = directory / "copy.wq", directory / "receivers"
    options = {
        "flush": "sync",
        "segment_bytes": 65536,
        "retention": retention,
        "replica": command(copy, log, -1, "before"),
        "replica_timeout": 60.0,
    }
    where = f"feeder {kind} {at} {moment}"
    crew = Crew(place / "tasks.wq", options, where)
    with kept_on_violation(directory, crew):
        other = None
        if existing:
            other = crew.start("stand_by")
            crew.listen(PATIENCE, "open")
        name = crew.start("fixed", (kind, at, moment))
        crew.wait_for(name, 2 * PATIENCE)
        if other is None:
            other = crew.start("stand_by")
            crew.listen(PATIENCE, "open")
        _, pipe = crew.children[other]
        pipe.send("enough")
        if crew.listen(PATIENCE, "goes on") is None:
            raise Violation(f"{where}: who is left does not go on\n{crew.ledger.text()[-2000:]}")
        crew.wait_for(other)
        wait_until_gone(copy)
        _check_log(log)
        _check_beginning(crew.path, copy, where)
        shutil.rmtree(place)
        _check_promoted(copy, crew, where)
        ends = [e for e in crew.ledger.events if e[0] == name and e[1] == "end"]
        return int(ends[0][2]) if ends else 0
