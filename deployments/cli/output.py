"""What a command says: one JSON object on stdout with `--json`, else words; and the exit codes.

Progress and errors for people go to stderr. See docs/DESIGN.md, "Output for machines".
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import sqlite3
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tasks.common.errors import GateFailed, HeadwayError, IntegrityError
from tasks.common.home import home
from tasks.orchestration.observers import interrupted

# Errors of this machine's disk and rights, which are no bug of ours: what is wrong, where, and what to do.


ANOTHER = "or set HEADWAY_HOME to a folder of yours; then run the same command again."
FULL = "Free space on the disk, or set HEADWAY_HOME to a folder on a larger one; then run the same command again."
READ_ONLY = f"The disk is mounted for reading only: mount it for writing, {ANOTHER}"
REMEDIES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: READ_ONLY,
    errno.ENOTDIR: f"There is a file where a folder should be: move it away, {ANOTHER}",
    errno.EEXIST: f"There is a file where a folder should be: move it away, {ANOTHER}",
    errno.EISDIR: f"There is a folder where a file should be: move it away, {ANOTHER}",
}
DATABASE = {
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_READONLY: f"A database of the home may not be written: look whose it is, {ANOTHER}",
    sqlite3.SQLITE_CANTOPEN: f"A database of the home may not be opened or made: look whose it is, {ANOTHER}",
}


def of_the_disk(error: BaseException) -> tuple[str, str] | None:
    """What is wrong with the disk, or with the rights on it, and the remedy; None for any other error."""
    if isinstance(error, sqlite3.OperationalError):
        remedy = DATABASE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        return (f"{home()}: {error}", remedy) if remedy else None
    if not isinstance(error, OSError):
        inner = getattr(error, "orig", None)  # SQLAlchemy's
        return of_the_disk(inner) if isinstance(inner, sqlite3.Error) else None
    if not isinstance(error.filename, str | bytes):  # of a process, or of an address; a full disk names none
        return (str(error), FULL) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    path = Path(os.fsdecode(error.filename))
    text = f"{path}: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM):
        # Whose it is, as far as we may look.
        place, owner = path.absolute(), "somebody"
        for each in (place, *place.parents):  # the last part that may be looked at
            with suppress(OSError):
                place, owner = each, _name(each.stat().st_uid)
                break
        me = _name(os.geteuid())
        if owner != me:
            remedy = f"Work as {owner}, have it given to you (chown -R {me} {place}), {ANOTHER}"
            return f"{text}; {place} belongs to {owner}, and you are {me}", remedy
        return text, f"Look at the rights on it (ls -ld {place}), {ANOTHER}"
    return (text, REMEDIES[error.errno]) if error.errno in REMEDIES else None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


OWN_EXTRAS = {"azure": "azure", "datasets": "measure", "deepspeed": "deepspeed", "lm_eval": "measure", "ray": "ray"}
"""Extras by the first word of a module's name, for what has one of its own."""
SCHEMA = "headway/output/1"
SAMPLES = 3
"""How many of the things that break a check an error lists; the report has more."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys and does not show; not the line end and the tab."""


class CommandError(Exception):
    """A command that failed, with the fields that it can tell all the same."""

    def __init__(self, error: BaseException, fields: dict[str, Any], stage: str = "") -> None:
        super().__init__(str(error))
        self.error, self.fields, self.stage = error, fields, stage


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def say(fields: dict[str, Any], words: str | list[str], *, as_json: bool) -> None:
    """Print a command's result. Of a list each element is one line, also when a value in it has line ends."""
    if as_json:
        print(_json({"schema": SCHEMA, "exit_code": 0, "error": None, **fields}), flush=True)
    elif words:
        text = words if isinstance(words, str) else "\n".join(map(visible, words))
        print(harmless(text), flush=True)  # who stays in the foreground says it now


def note(text: str) -> None:
    """Tell people what a command waits for, on stderr."""
    print(f"  {text} ...", file=sys.stderr, flush=True)


def in_home(text: str, hint: str = "") -> str:
    """A sentence about something that a home does not have, with the home's path; then what to do."""
    return f"{text} in {home()}. {hint}".rstrip()


def say_list(several: Sequence[dict[str, Any]], words: str, *, as_json: bool) -> None:
    """Print several results of one command: in JSON a list, each with what every object has."""
    if as_json:
        print(_json([{"schema": SCHEMA, "exit_code": 0, "error": None, **fields} for fields in several]))
    else:
        print(harmless(words))


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows of a table as lines, each column as wide as its widest cell; rows may be shorter than others."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()


def short_number(value: float | None) -> str:
    """Four digits of a number; nothing for None."""
    return "" if value is None else f"{value:.4g}"


def visible(text: str) -> str:
    """One line whose control characters, line ends among them, are written out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def harmless(text: str) -> str:
    """Text of several lines in which nothing moves the cursor, colours, or turns the direction: some of it strangers wrote."""
    return _CONTROL.sub(lambda result: visible(result[0]), text)


def short_ref(ref: str) -> str:
    """A reference with twelve digits of its version, which every command takes."""
    name, _, version = ref.partition("@")
    return f"{name}@{version[:12]}" if version else name


def say_error(raised: BaseException, *, as_json: bool) -> int:
    """Print what went wrong and how to fix it; returns the exit code."""
    error = raised.error if isinstance(raised, CommandError) else raised
    fields = raised.fields if isinstance(raised, CommandError) else {}
    code, output = exit_code(error), describe(error)
    if isinstance(raised, CommandError) and not output["stage"]:
        output["stage"] = raised.stage or None
    if code == 1:
        traceback.print_exception(error, file=sys.stderr)
    if as_json:
        print(_json({"schema": SCHEMA, "exit_code": code, "error": output, **fields}))
    listed = "checks" in fields  # the command has printed its table of checks with the samples
    lines = [f"headway: {output['message']}", *([] if listed else samples(output["checks"]))]
    lines += [f"  -> {output['remedy']}"] if output["remedy"] else []
    print(harmless("\n".join(lines)), file=sys.stderr)
    return code


def samples(checks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines with the first things that break a closed gate's checks: file, line number and why."""
    for check in checks:
        yield from (f"     {visible(one)}" for one in check.get("samples", ())[:SAMPLES])


def _json(value: Any) -> str:
    """NaN and infinity are no JSON: they become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda constant: None))


def exit_code(error: BaseException) -> int:
    """0 done, 1 a bug of ours, 2 usage, 3 gate, 4 job, 5 integrity, 6 missing, 130 interrupted."""
    if isinstance(error, HeadwayError):
        return error.exit_code
    if interrupted(error):
        return 130
    if isinstance(error, ModuleNotFoundError) or of_the_disk(error):
        return 6
    if isinstance(error, ValueError):
        return 2
    return 1


def extra_of(module: str) -> str:
    """The extra of docs/install.md that brings a module: its own where it has one, else `local`, which brings most."""
    return OWN_EXTRAS.get(module.partition(".")[0], "local")


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def describe(error: BaseException) -> dict[str, Any]:
    """An error as `{type, stage, message, remedy, checks}`."""
    known = isinstance(error, HeadwayError)
    remedy = error.remedy if isinstance(error, HeadwayError) else ""
    message = error.message if isinstance(error, HeadwayError) else str(error)
    if disk := of_the_disk(error):
        message, remedy = disk
    if isinstance(error, ModuleNotFoundError):
        remedy = f"Install what this needs: {install(extra_of(error.name or ''))}. `headway doctor` names all of it."
    if exit_code(error) == 1:
        remedy = "This is a bug of Headway's: please report it with the lines above."
    if exit_code(error) == 130 and not known:
        message = "interrupted"
        remedy = "Run the same command again to continue from where it stopped."
    return {
        "type": type(error).__name__,
        "stage": error.stage if isinstance(error, GateFailed) else None,
        "message": message or "interrupted",
        "remedy": remedy,
        "checks": error.checks if isinstance(error, GateFailed) else [],
        **({"problems": error.problems} if isinstance(error, IntegrityError) else {}),
    }
