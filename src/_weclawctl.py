"""The door of `weclawctl`: Ctrl-C while Python still imports ends it without a traceback.

It stands outside the package because importing anything of a package imports all that its
`__init__` does, which takes a few tenths of a second.
"""

from __future__ import annotations

import signal

__all__ = ["main"]


def main() -> None:
    """Run `weclawctl` with the arguments of the process, and end the process."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from weclaw_embedded.cli import main as begin

    begin(interrupt)
