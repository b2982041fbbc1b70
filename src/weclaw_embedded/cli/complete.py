"""completion: verbs, options, topics and groups at the press of a key."""

from __future__ import annotations

import shlex

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
)

__all__ = ["COMMANDS"]

_RC = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/weclawctl.fish",
}


class _Bash(BashComplete):
    """bash takes what it is given as it stands; zsh and fish quote it themselves."""

    def format_completion(self, item: CompletionItem) -> str:
        if item.type == "plain":
            item.value = shlex.quote(item.value)
        return super().format_completion(item)


add_completion_class(_Bash)


@click.command()
@click.argument("shell", type=click.Choice(list(_RC)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete weclawctl.

    For bash, in ~/.bashrc:  eval "$(weclawctl completion bash)"
    """
    made = get_completion_class(shell)
    assert made is not None, "click knows the shells of the choice"
    root = context.find_root().command
    click.echo(made(root, {}, "weclawctl", "_WECLAWCTL_COMPLETE").source())


COMMANDS = [completion]
