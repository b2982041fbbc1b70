"""Rounds of work and kills, each checked against its ledger."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.crash import workload
from tests.crash.ledger import SCRATCH, Ledger, Violation, check, spoil_scratch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.crash.workload", "tests.crash.stops"])

PATIENCE = 30.0


class Crew:
    """The children at work on one file, and what they say."""

    def __init__(self, path: Path, options: dict[str, Any], seed: str) -> None:
        self.path, self.options, self.seed = path, options, seed
        self.ledger = Ledger()
        self.children: dict[str, tuple[Any, Any]] = {}
        self.started = 0
        self.kills = 0
        self.fenced = False  # a copy was promoted over the file: whoever is at work is refused

    def start(self, role: str, stop: tuple[str, int, str] | None = None) -> str:
        self.started += 1
        name = f"{role}{self.started}"
        mine, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(
            target=workload.child,
            args=(theirs, role, str(self.path), self.options, name, f"{self.seed}/{name}", stop),
            daemon=True,
        )
        process.start()
        theirs.close()
        self.children[name] = (process, mine)
        return name

    def listen(self, seconds: float, until: str | None = None) -> Any:
        """Hear for so long, or until one says `until`."""
        end = time.monotonic() + seconds
        while True:
            pipes = {pipe: name for name, (_, pipe) in self.children.items()}
            if not pipes and until is not None:
                return None
            if not pipes:
                time.sleep(max(0.0, end - time.monotonic()))
                return None
            ready = wait(list(pipes), max(0.0, end - time.monotonic()))
            if not ready:
                return None
            for pipe in ready:
                event = self._hear(pipes[pipe], pipe)
                if event is not None and event[0] == until:
                    return event

    def _hear(self, name: str, pipe: Any) -> Any:
        try:
            event = pipe.recv()
        except (EOFError, OSError):
            process, _ = self.children.pop(name)
            process.join()
            pipe.close()
            return ("gone", name)
        if event[0] == "error" and self.fenced and "FencedError" in event[1]:
            return event
        self.ledger.hear(name, event)
        return event

    def kill(self, name: str) -> None:
        """SIGKILL; what it still said before is heard."""
        if name not in self.children:
            return
        process, pipe = self.children[name]
        process.kill()
        self.kills += 1
        process.join()
        while name in self.children:
            self._hear(name, pipe)

    def wait_for(self, name: str, seconds: float = PATIENCE) -> None:
        """Hear until `name` is gone."""
        end = time.monotonic() + seconds
        while name in self.children:
            if time.monotonic() > end:
                raise Violation(f"{name} hangs\n{self.ledger.text()[-2000:]}")
            self.listen(0.2, "gone")

    def stop_all(self) -> None:
        for name in list(self.children):
            self.kill(name)


@contextlib.contextmanager
def kept_on_violation(directory: Path, crew: Crew) -> Iterator[None]:
    try:
        yield
    except BaseException:
        (directory / "ledger.txt").write_text(crew.ledger.text())
        raise
    finally:
        crew.stop_all()


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "flush": rng.choice(("sync", "sync", "batch", "os")),
        "segment_bytes": rng.choice((65536, 65536, 2**20)),
        "retention": rng.choice((3600, 3600, 0)),
    }


def check_copies(
    path: Path, crew: Crew, rng: random.Random, where: str, kinds: tuple[str, ...] = SCRATCH
) -> dict[str, int]:
    """Check the file as it is, and copies of it with the scratch folder in other states."""
    if not path.exists():
        return {}  # Killed before there was anything.
    before = path.parent / "scratch before"
    for kind in kinds:
        if kind == "as is":
            continue
        copy = path.parent / kind / path.name
        copy.parent.mkdir()
        shutil.copy(path, copy)
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(f"{path}.d", f"{copy}.d", ignore=_no_pipes)
        spoil_scratch(copy, kind, rng, before)
        check(copy, crew.ledger, crew.options, f"{where}, scratch {kind}")
        shutil.rmtree(copy.parent)
    return check(path, crew.ledger, crew.options, f"{where}, scratch as is")


def _no_pipes(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not (Path(directory) / name).is_file()]


def random_round(directory: Path, seed: str, *, seconds: float = 1.0) -> dict[str, int]:
    """Producers and consumers at work, killed one by one and together; then the check."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    crew = Crew(directory / "tasks.wq", random_options(rng), seed)
    roles = ["produce", "consume", *rng.choices(["produce", "consume"], k=rng.randrange(2))]
    with kept_on_violation(directory, crew):
        end = time.monotonic() + seconds
        for role in roles:
            crew.start(role)
        copied = False
        while time.monotonic() < end:
            crew.listen(rng.choice((0.0, 0.01, 0.05, 0.1, 0.2)))
            if crew.children and rng.random() < 0.8:
                victim = rng.choice(list(crew.children))
                crew.kill(victim)
                crew.start(victim.rstrip("0123456789"))
            if rng.random() < 0.15:
                crew.stop_all()
                if not copied and crew.path.exists():
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copytree(
                            f"{crew.path}.d", directory / "scratch before", ignore=_no_pipes
                        )
                        copied = True
                for role in roles:
                    crew.start(role)
        if crew.children and rng.random() < 0.3:
            # One goes on after the others died, and is stopped by a polite signal.
            *others, last = list(crew.children)
            for name in others:
                crew.kill(name)
            crew.listen(0.1)
            process, _ = crew.children[last]
            process.terminate() if rng.random() < 0.5 else process.kill()
            process.join()
            crew.wait_for(last)
        crew.stop_all()
        numbers = check_copies(crew.path, crew, rng, f"seed {seed}")
        numbers["kills"] = crew.kills
        numbers["events"] = len(crew.ledger.events)
        return numbers


def stop_round(
    directory: Path,
    kind: str,
    at: int,
    moment: str,
    *,
    existing: bool,
    scratch: str,
    **options: Any,
) -> int:
    """The fixed work stopped at its `at`-th call or line while another works; then the check.

    Returns how many calls or lines there were when it ended by itself, else 0.
    """
    seed = f"{kind} {at} {moment}"
    directory.mkdir(parents=True, exist_ok=True)
    crew = Crew(directory / "tasks.wq", {"flush": "sync", "segment_bytes": 65536, **options}, seed)
    with kept_on_violation(directory, crew):
        other = None
        if existing:
            other = crew.start("stand_by")
            crew.listen(PATIENCE, "open")
        name = crew.start("fixed", (kind, at, moment))
        crew.wait_for(name)
        if other is None:
            other = crew.start("stand_by")
            crew.listen(PATIENCE, "open")
        _, pipe = crew.children[other]
        pipe.send("enough")
        if crew.listen(PATIENCE, "goes on") is None:
            raise Violation(f"{seed}: who is left does not go on\n{crew.ledger.text()[-2000:]}")
        crew.wait_for(other)
        rng = random.Random(seed)
        check_copies(crew.path, crew, rng, seed, ("as is", scratch))
        ends = [e for e in crew.ledger.events if e[0] == name and e[1] == "end"]
        return int(ends[0][2]) if ends else 0
