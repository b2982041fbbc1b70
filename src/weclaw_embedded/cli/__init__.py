"""`weclawctl`: look at a queue, feed it, work it off, mend it.

One file a group of verbs; `_common` has what they share.  What changes a queue goes through the
public interface of the package, so that whatever the command line can do a program can do too; what
only an operator asks is in `_survey`.  click and rich come with the extra `cli`; without it `main`
says so, and nothing else of the package needs them.

Exit status: 0 fine; 1 the answer is bad, or what was asked for was not done; 2 wrong usage.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

__all__ = ["main"]


def main(interrupt: Any = None) -> None:
    """Run `weclawctl` with the arguments of the process, and end the process.

    `interrupt` is the handler of Ctrl-C from the moment on when all is imported; None: the one
    there is.
    """
    try:
        import click  # noqa: F401  is it installed?
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"weclawctl: {error.name} is not installed; the command line needs the extra 'cli': "
            "pip install 'weclaw-embedded[cli]'\n"
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        from weclaw_embedded.cli._app import run
        from weclaw_embedded.cli._screen import open_output, stand_in_for_closed

        stand_in_for_closed()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = open_output(sys.stdout)
        # A terminal that can't show a sign gets its code, not an error in the middle of a line.
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr.reconfigure(errors="backslashreplace")
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)
        status = run(sys.argv[1:])
        # What is left is the end of the interpreter: nothing that Ctrl-C could harm.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # before or after the command itself
        sys.exit(130)
    sys.exit(status)
