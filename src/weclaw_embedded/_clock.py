"""The only door to time: wall clock, the two clocks that never jump, and which boot this is.

Call these as `_clock.wall_us()` and so on, so that a test can put its own in their place.
This module must not know what the times are used for.
"""

from __future__ import annotations

import ctypes
import sys
import time
import uuid

__all__ = ["boot_id", "boottime_us", "monotonic_ns", "wall_us"]


def wall_us() -> int:
    """Microseconds since 1970 by the wall clock, which may jump either way."""
    return time.time_ns() // 1000


# Nanoseconds of CLOCK_MONOTONIC: never jumps, stands still while suspended; the same for all
# processes of one boot.
monotonic_ns = time.monotonic_ns


if sys.platform == "linux":

    def boottime_us() -> int:
        """Microseconds since boot, counting suspension; the same for all processes of one boot."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000

elif sys.platform == "darwin":

    def boottime_us() -> int:
        """Microseconds since boot, counting suspension; the same for all processes of one boot."""
        # Darwin's CLOCK_MONOTONIC counts suspension, but time.monotonic() (mach_absolute_time)
        # does not.
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

else:

    def boottime_us() -> int:
        """Microseconds of the monotonic clock, the nearest there is on this system."""
        return time.monotonic_ns() // 1000


def boot_id() -> bytes:
    """Sixteen bytes that change with each boot; all zero where the system doesn't tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return uuid.UUID(file.read().strip()).bytes
    except (OSError, ValueError):
        pass
    if sys.platform == "darwin":
        try:
            libc = ctypes.CDLL(None)
            text = ctypes.create_string_buffer(64)
            size = ctypes.c_size_t(64)
            if libc.sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0) == 0:
                return uuid.UUID(text.value.decode("ascii")).bytes
        except (OSError, ValueError, AttributeError):
            pass
    return bytes(16)
