"""verify: is what lies on disk what was written?"""

from __future__ import annotations

import click

from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]


@click.command()
@common.file_argument
@common.json_option
@common.readonly_option
def verify(file: str, as_json: bool, readonly: bool) -> int:
    """Read all of FILE and check it. Writes nothing; ends with 1 if something is damaged."""
    with common.looking(file, readonly=readonly) as store:
        faults = [(found[0], found[1]) for found in store.verify()]
    if as_json:
        common.print_json([{"offset": offset, "reason": reason} for offset, reason in faults])
    elif not faults:
        click.echo("good: everything kept can be read")
    else:
        common.print_table([("offset", "right"), "reason"], faults)
        click.echo(
            f"{common.count(len(faults), 'fault')}; what they hit is set aside, the rest flows"
        )
    return 1 if faults else 0


COMMANDS = [verify]
