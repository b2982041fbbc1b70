"""The command group, and the one place where errors become a line and an exit status."""

from __future__ import annotations

import difflib
import logging
import signal
import sys
import traceback
from collections.abc import Sequence

import click

from weclaw_embedded._version import __version__
from weclaw_embedded.cli import (
    bench,
    complete,
    control,
    copies,
    demo,
    dlq,
    live,
    look,
    mend,
    metrics,
    put,
    work,
)
from weclaw_embedded.cli._common import in_one_line, plain, say
from weclaw_embedded.cli._screen import OutputError, ReaderLeftError, drop_output
from weclaw_embedded.errors import WeclawError

__all__ = ["app", "run"]


class _Verbs(click.Group):
    """The verbs; of one that is misspelt it says which may be meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.commands, 1)
            hint = f"; there is {near[0]!r}" if near else ""
            raise click.UsageError(f"there is no verb {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Verbs,
    name="weclawctl",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(__version__, prog_name="weclawctl")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def app(debug: bool) -> None:
    """Look at a queue file, feed it, work it off, mend it.

    The first argument after the verb is the file. --debug may stand anywhere.
    """


_GROUPS = (look, live, put, work, dlq, control, mend, copies, metrics, bench, demo, complete)

for _group in _GROUPS:
    for _command in _group.COMMANDS:
        app.add_command(_command)


class _Lines(logging.Handler):
    """What the library logs, as lines on standard error, beside or above a progress bar."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__(logging.WARNING)
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        text = plain(record.getMessage())
        if self._debug and record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        say(f"weclawctl: {text}")


def _usage(error: click.UsageError) -> str:
    """What is wrong with a command line, and where it says how it goes, in one line."""
    path = error.ctx.command_path if error.ctx is not None else "weclawctl"
    text = plain(" ".join(error.format_message().split())).rstrip(".?")
    if isinstance(error, click.NoSuchOption):
        text = f"no such option {error.option_name!r}"
        if error.possibilities:
            text += f"; there is {' and '.join(map(repr, sorted(error.possibilities)))}"
        if error.option_name[1:2].isdigit():
            text = f"{error.option_name!r} is no option; what begins with '-' stands behind '--'"
    return f"{path}: {text[:1].lower()}{text[1:]}; '{path} --help' says how"


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status and raises nothing."""
    own = list(arguments)
    end = own.index("--") if "--" in own else len(own)
    debug = "--debug" in own[:end]
    own = [word for i, word in enumerate(own) if i >= end or word != "--debug"]
    logger = logging.getLogger("weclaw_embedded")
    lines = _Lines(debug=debug)
    logger.addHandler(lines)
    try:
        status = app.main(args=own, prog_name="weclawctl", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.UsageError as error:
        if debug:
            traceback.print_exc()
        if type(error).__name__ == "NoArgsIsHelpError":  # which older versions do not have
            error.show()
        else:
            click.echo(_usage(error), err=True)
        return error.exit_code
    except click.ClickException as error:
        if debug:
            traceback.print_exc()
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("weclawctl: interrupted; nothing is left half done", err=True)
        return 130
    except ReaderLeftError:
        drop_output()
        return 128 + signal.SIGPIPE  # as a shell says of any other program in its place
    except OutputError as error:
        drop_output()
        if debug:
            traceback.print_exc()
        click.echo(
            f"weclawctl: standard output can't be written ({error.strerror}), so not all was "
            "printed; what was done to the file is done; send the output elsewhere",
            err=True,
        )
        return 1
    except (WeclawError, OSError, ValueError, TypeError) as error:
        if debug:
            traceback.print_exc()
        else:
            click.echo(f"weclawctl: {in_one_line(error)}", err=True)
        # A plain ValueError is the library's word for a bad argument, or variable.
        return 2 if type(error) is ValueError else 1
    finally:
        logger.removeHandler(lines)
