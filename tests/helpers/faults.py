"""Faults made with the system's own means: full disks, read-only mounts, clocks that jump."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CLOCK_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* The wall clock, moved by the seconds that stand in the file $CLOCK_SHIFT. */
static volatile int64_t *shift;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_SHIFT");
    int fd = path ? open(path, O_RDONLY) : -1;
    if (fd >= 0) {
        void *page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
        if (page != MAP_FAILED) shift = page;
        close(fd);
    }
}

int clock_gettime(clockid_t which, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, out);
    if (!result && shift && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        out->tv_sec += *shift;
    return result;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class WallClock:
    """The wall clock of child processes started with `env`: `jump` moves it while they run."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None or not sys.platform.startswith("linux"):
            pytest.skip("no C compiler here to build the clock that jumps")
        source = directory / "clock.c"
        library = directory / "clock.so"
        source.write_text(CLOCK_SHIM)
        command = [compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"]
        subprocess.run(command, check=True)
        self._page = directory / "shift"
        self._page.write_bytes(struct.pack("=q", 0))
        self.env = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._page)}

    def jump(self, seconds: int) -> None:
        """From now on the wall clock stands `seconds` away from the true one."""
        fd = os.open(self._page, os.O_WRONLY)
        try:
            os.pwrite(fd, struct.pack("=q", seconds), 0)
        finally:
            os.close(fd)


def _mount(*arguments: str) -> None:
    if os.name != "posix" or not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting needs root on Linux")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own, `size_bytes` large."""
    directory.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory))
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def read_only(directory: Path, at: Path) -> Iterator[Path]:
    """The same directory once more, where nothing can be written."""
    at.mkdir(exist_ok=True)
    _mount("--bind", str(directory), str(at))
    try:
        _mount("-o", "remount,ro,bind", str(at))
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(directory: Path, leave_bytes: int = 0) -> Path:
    """A ballast file that takes what room is left, but for `leave_bytes`."""
    ballast = directory / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        size = file.seek(0, 2)
        file.truncate(max(0, size - leave_bytes))
    return ballast
