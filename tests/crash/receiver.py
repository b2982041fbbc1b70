"""A receiver that notes when it works, alone or not, and can be told to die at its k-th call.

    python tests/crash/receiver.py COPY LOG AT MOMENT

`LOG` gets a line `PID began` when it starts and `PID twice` when another one still works long
after the process that fed it is gone. With `AT` above 0 the first receiver to come kills itself at
its AT-th call to the operating system (`stops.py`); those that follow don't.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

_PATIENCE_S = 20.0  # how long the receiver of a killed feeder may take to end


def main() -> None:
    copy, log, at, moment = sys.argv[1:]
    root = Path(__file__).resolve().parent.parent.parent
    sys.path[0] = str(root)
    from weclaw_embedded import replica

    with open(log, "a") as notes, open(f"{log}.lock", "w") as lock:
        print(os.getpid(), "began", file=notes, flush=True)
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= until_s:
                    print(os.getpid(), "twice", file=notes, flush=True)
                    break
                time.sleep(0.01)
        calls = None
        if int(at) >= 0 and not Path(f"{log}.armed").exists():
            from tests.crash import stops

            Path(f"{log}.armed").touch()
            calls = stops.arm("calls", int(at), moment)
        out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        status = replica.receive(copy, sys.stdin.buffer, out)
        if calls is not None:
            print(calls.calls, "calls", file=notes, flush=True)  # type: ignore[union-attr]
        sys.exit(status)


if __name__ == "__main__":
    main()
