"""`weclawctl`: look at a queue, feed it, work it off, mend it.

One file a group of verbs; `_common` has what they share.  Everything goes through the public
interface of the package, so that whatever the command line can do a program can do too.  click
and rich come with the extra `cli`; without it `main` says so, and nothing else of the package
needs them.

Exit status: 0 fine; 1 the answer is bad, or what was asked for was not done; 2 wrong usage.
"""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Run `weclawctl` with the arguments of the process, and end the process."""
    try:
        import click  # noqa: F401  is it installed?
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"weclawctl: {error.name} is not installed; the command line needs the extra 'cli': "
            "pip install 'weclaw-embedded[cli]'\n"
        )
        sys.exit(1)
    try:
        from weclaw_embedded.cli._app import run
    except KeyboardInterrupt:  # Ctrl-C before we have begun
        sys.exit(130)

    # A terminal that can't show a sign gets its code, not an error in the middle of a table.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))
