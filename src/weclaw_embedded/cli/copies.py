"""replica, promote: the second copy of a file, and making it the first.

Thin on purpose: what they do is in `weclaw_embedded.replica`, which has no command line.
"""

from __future__ import annotations

import sys

import click

import weclaw_embedded as weclaw
from weclaw_embedded import replica as copies
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]


@click.command(short_help="Receive a copy of another queue (for machines).")
@common.file_argument
def replica(file: str) -> int:
    """Receive a copy of another queue file into FILE: the stream comes on standard input.

    Nobody starts this by hand: the process that has the other file open does, as its option
    replica=["ssh", "host", "weclawctl", "replica", "FILE"] says. It ends with its input.
    """
    if sys.stdin is None or sys.stdin.isatty():
        what = "closed" if sys.stdin is None else "a terminal"
        raise click.UsageError(f"standard input is {what}, not the stream of a queue")
    return copies.receive(file, sys.stdin.buffer, sys.stdout.buffer)


@click.command(short_help="Make a copy the queue that counts.")
@common.file_argument
@common.yes_option
@common.json_option
def promote(file: str, yes: bool, as_json: bool) -> None:
    """Make FILE, the copy of another queue, a queue of its own that takes puts.

    Do it when the other one is lost or stopped: from now on it is refused as the older one. A file
    over which its own copy was promoted is refused here, too.
    """
    common.must_exist(file)
    # It destroys nothing: a program is not asked, nor anybody about what will be refused.
    if not yes and common.asks() and _may_be_promoted(file):
        common.ask(
            f"Make {common.plain(file)} the one that counts, and refuse the file it copies?",
            yes=False,
        )
    try:
        epoch = copies.promote(file)
    except weclaw.StorageError as error:
        common.fail_if_not_ours(file, error)
        raise
    if as_json:
        common.print_json({"path": file, "epoch": epoch})
    else:
        click.echo(f"{common.plain(file)} is a queue of its own now; open it in place of the other")


def _may_be_promoted(file: str) -> bool:
    try:
        return copies.node(file).role == "copy"
    except (weclaw.WeclawError, OSError):
        return False  # promote meets the same, and says what it is


COMMANDS = [replica, promote]
