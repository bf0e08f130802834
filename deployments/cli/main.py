"""The `headway` command: what holds for every command, and the one place where errors become exit codes."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.commands import CommandGroup
from deployments.cli.output import Terminated, say, say_error
from tasks.common.home import home
from tasks.common.redaction import clean_logs, redacted

app = typer.Typer(
    cls=CommandGroup,
    help=(
        "Headway takes a large language model from data to a served endpoint: validate, preprocess, benchmark, plan, train, "
        "evaluate, export, deploy.\n\n`headway` alone shows where you are and what to do next; `headway init` writes a "
        "configuration.\n\nState lives under .headway/ in the working directory, or in HEADWAY_HOME. Every command takes --json."
    ),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    """What is installed, without a look at the home: it may be a newer version's."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headway {version('headway')}")
        raise typer.Exit


@app.callback()
def _look_at_home(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    from contextlib import nullcontext, suppress
    from functools import partial

    from deployments.services.starting import no_file, not_newer

    if context.invoked_subcommand is None:  # it only reads: what commands need besides takes time to import
        from deployments.cli.overview import overview

        no_file(home())
        not_newer(home())
        say({}, overview(home(), Path.cwd()), as_json=False)
        return
    from deployments.services.library_settings import take_no_files
    from tasks.azure.arm_client import use_files
    from tasks.config.base import policy_file, trust_file
    from tasks.storage import open_files
    from tasks.storage.settings import stores_file

    doctor = context.invoked_subcommand == "doctor"  # it says what is wrong with the home with all else that it finds
    if not doctor:
        no_file(home())
        for file_of in (policy_file, trust_file, stores_file):
            file_of(home())  # refuses a variable that names another file than what binds this home
    take_no_files()
    with suppress(PermissionError) if doctor else nullcontext():
        not_newer(home())
    use_files(partial(open_files, home()))


def run() -> None:
    """The console script."""
    as_json = "--json" in takewhile(lambda word: word != "--", sys.argv[1:])
    # Most of what a command allocates are modules and models, which stay: a tenth of its time went into collecting them.
    gc.set_threshold(50_000, 20, 50)
    signal.signal(signal.SIGTERM, _as_interrupt)
    clean_logs()
    code = 1

    def leave() -> None:
        """Ends before Python frees its memory piece by piece, which takes 0.3 s after a flow run."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # what is registered first is called last, and all of it after the threads have ended
    code = _run(as_json)
    sys.exit(code)


def _run(as_json: bool) -> int:
    """Run the command of the command line; what ends it early is printed. Returns the exit code."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:  # a mistake in the command line
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        if text.startswith("Got unexpected extra argument") and (context := getattr(error, "ctx", None)):
            named = {"dataset": "a dataset as --dataset NAME", "set_": "a setting as --set A.B=VALUE"}
            options = [named[one.name] for one in context.command.params if one.opts[0][0] == "-" and one.name in named]
            text += f": give {', or '.join(options)}" if options else ""
        text = text if text.endswith("?") else f"{text.rstrip('.')}."
        usage = ValueError(f"{text} See `headway --help`, or --help after the command.")
        return say_error(redacted(usage), as_json=as_json)
    except SystemExit as error:  # of a library: nothing of ours raises it
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        return say_error(redacted(error), as_json=as_json)
    return code if isinstance(code, int) else 0


def _as_interrupt(*_: object) -> None:
    """SIGTERM is a request to stop, as Ctrl-C is, but nobody is there to be asked: the run ends, and its job with it."""
    raise Terminated
