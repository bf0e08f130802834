"""Commands of a machine's vendors, asked within a time limit: nvidia-smi with its renamed fields, dmesg and others.

Which commands a check needs, and what the answers mean, is elsewhere: probes.py while a job runs, qualify/ before one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress

from tasks.formats import gpu_health


class Hangs(Exception):
    """A command did not end in time."""


def ask(*command: str, seconds: float) -> tuple[int, str]:
    """Run a command: its exit code and all that it said. Raises Hangs, and FileNotFoundError where there is no such command.

    What does not end, even when killed with all that it started (state D), is left alone.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            raise Hangs(f"{command[0]} gave no answer within {seconds:g} s") from None
        output.seek(0)
        return child.returncode, output.read().decode(errors="replace")


def query_smi(
    table: str, asked: dict[str, str], asks: Callable[..., tuple[int, str]], unknown: Callable[[str], object]
) -> tuple[int, str]:
    """Ask nvidia-smi for the fields of a table (`--query-TABLE`); `asked` has their names on this driver, and is kept up to date.

    A field that this driver does not know is asked for by its old name, or no more: then `unknown` is told.
    """
    while True:
        code, output = asks(
            "nvidia-smi", f"--query-{table}={','.join(asked.values())}", "--format=csv,noheader,nounits"
        )
        refused = gpu_health.unknown_field(output) if code else None
        field = next((field for field, name in asked.items() if name == refused), None)
        if field is None:
            return code, output
        if refused == field and field in gpu_health.OLD_NAMES:
            asked[field] = gpu_health.OLD_NAMES[field]
        else:
            del asked[field]
            unknown(field)
