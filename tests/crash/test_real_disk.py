"""Power fails under a real file system: an ext4 image, copied while processes work on it.

What the kernel had not yet written to the disk below is not in the copy, which is what a power cut
leaves. Mounting it replays ext4's journal, and the library sees another disk under the file. Needs
root and mkfs.ext4 on Linux.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crash import power, rounds
from tests.crash.ledger import check

pytestmark = pytest.mark.crash

IMAGE_BYTES = 48 << 20


@contextlib.contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """The image as a disk of its own."""
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-o", "loop", image, at], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not mount images: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A small empty ext4 file system."""
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or mkfs is None:
        pytest.skip("an image of a disk needs root and mkfs.ext4")
    path = tmp_path / "disk.img"
    with open(path, "wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run([mkfs, "-q", "-F", path], check=True, capture_output=True)
    return path


def cut_power(
    image: Path, place: Path, seed: str, options: dict[str, Any], *, cuts: int
) -> tuple[int, int]:
    """Two processes at work; the disk below is copied now and then, and each copy checked.

    Returns how many cuts there were, and how many promises had been made by the last.
    """
    rng = random.Random(seed)
    made = 0
    with mounted(image, place / "disk") as disk:
        crew = rounds.Crew(disk / "tasks.wq", options, seed)
        try:
            for role in ("produce", "consume"):
                crew.start(role)
            for n in range(cuts):
                room = os.statvfs(disk)
                if room.f_bavail < room.f_blocks // 3:
                    break  # a full disk is another test's
                crew.listen(rng.choice((0.05, 0.1, 0.3)))
                copy = place / f"copy {n}"
                _copy_stopped(crew, image, copy)
                heard = [
                    (number, child, tuple(event))
                    for number, (child, *event) in enumerate(crew.ledger.events)
                ]
                ledger = power.surely(heard, options["flush"], alone=True, in_order=False)
                with mounted(copy, place / f"after {n}") as after:
                    where = f"seed {seed}, cut {n}"
                    if (after / "tasks.wq").exists():
                        check(after / "tasks.wq", ledger, options, where)
                        made += 1
                    else:
                        assert not any(event[1] == "put" for event in ledger.events), where
                copy.unlink()
                if rng.random() < 0.3:
                    victim = rng.choice(list(crew.children))
                    crew.kill(victim)
                    crew.start(victim.rstrip("0123456789"))
        finally:
            crew.stop_all()
        return made, len(crew.ledger.events)


def _copy_stopped(crew: rounds.Crew, image: Path, copy: Path) -> None:
    """Copy the disk while nobody begins anything new; what was said by then is heard."""
    pids = [process.pid for process, _ in crew.children.values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(0.02)  # what is on its way to the disk arrives
        shutil.copyfile(image, copy)
        crew.listen(0.02)
        while any(pipe.poll() for _, pipe in crew.children.values()):
            crew.listen(0.0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


OPTIONS = [
    {"flush": "sync", "segment_bytes": 65536, "retention": 3600},
    {"flush": "sync", "segment_bytes": 65536, "retention": 0},
    {"flush": "batch", "segment_bytes": 65536, "retention": 0},
]


def test_images_of_a_real_disk_keep_every_promise(tmp_path: Path, image: Path) -> None:
    """A copy of the disk, taken at any moment, holds all that was promised by then."""
    made, events = cut_power(image, tmp_path, "ci", OPTIONS[1], cuts=4)
    assert made > 1
    assert events > 20


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=["sync", "sync freeing", "batch freeing"])
@pytest.mark.parametrize("seed", range(3))
def test_many_images_of_a_real_disk(
    tmp_path: Path, image: Path, options: dict[str, Any], seed: int
) -> None:
    """The same for longer and with other options."""
    cut_power(image, tmp_path, f"slow {seed}", options, cuts=30)
