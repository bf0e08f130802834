"""What a command says: one JSON object on stdout with `--json`, else words; and the exit codes.

Progress and errors for people go to stderr. See docs/DESIGN.md, "Output for machines".
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from deployments.cli.disk import of_the_disk
from tasks.common.errors import GateFailed, HeadwayError, IntegrityError

SCHEMA = "headway/output/1"
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


def say_list(several: Sequence[dict[str, Any]], words: str, *, as_json: bool) -> None:
    """Print several results of one command: in JSON a list, each with what every object has."""
    if as_json:
        print(_json([{"schema": SCHEMA, "exit_code": 0, "error": None, **fields} for fields in several]))
    else:
        print(harmless(words))


def visible(text: str) -> str:
    """One line whose control characters, line ends among them, are written out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def harmless(text: str) -> str:
    """Text of several lines in which nothing moves the cursor, colours, or turns the direction: some of it strangers wrote."""
    return _CONTROL.sub(lambda found: visible(found[0]), text)


def short_ref(ref: str) -> str:
    """A reference with twelve digits of its version, which every command takes."""
    name, _, version = ref.partition("@")
    return f"{name}@{version[:12]}" if version else name


def say_error(raised: BaseException, *, as_json: bool) -> int:
    """Print what went wrong and how to mend it; returns the exit code."""
    error = raised.error if isinstance(raised, CommandError) else raised
    fields = raised.fields if isinstance(raised, CommandError) else {}
    code, said = exit_code(error), describe(error)
    if isinstance(raised, CommandError) and not said["stage"]:
        said["stage"] = raised.stage or None
    if code == 1:
        traceback.print_exception(error, file=sys.stderr)
    if as_json:
        print(_json({"schema": SCHEMA, "exit_code": code, "error": said, **fields}))
    words = f"headway: {said['message']}" + (f"\n  -> {said['remedy']}" if said["remedy"] else "")
    print(harmless(words), file=sys.stderr)
    return code


def _json(value: Any) -> str:
    """NaN and infinity are no JSON: they become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda constant: None))


def exit_code(error: BaseException) -> int:
    """0 done, 1 a bug of ours, 2 usage, 3 gate, 4 job, 5 integrity, 6 missing, 130 interrupted."""
    if isinstance(error, HeadwayError):
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) or of_the_disk(error):
        return 6
    if isinstance(error, ValueError):
        return 2
    return 1 if isinstance(error, Exception) else 130


def describe(error: BaseException) -> dict[str, Any]:
    """An error as `{type, stage, message, remedy, checks}`."""
    known = isinstance(error, HeadwayError)
    remedy = error.remedy if isinstance(error, HeadwayError) else ""
    message = error.message if isinstance(error, HeadwayError) else str(error)
    if disk := of_the_disk(error):
        message, remedy = disk
    if isinstance(error, ModuleNotFoundError):
        remedy = (
            "Install what this needs: pip install -c constraints.txt -e '.[local]'. `headway doctor` names all of it."
        )
    if exit_code(error) == 1:
        remedy = "This is a bug of Headway's: please report it with the lines above."
    if exit_code(error) == 130 and not known:
        remedy = "The same command goes on from where it stopped."
    return {
        "type": type(error).__name__,
        "stage": error.stage if isinstance(error, GateFailed) else None,
        "message": message or "interrupted",
        "remedy": remedy,
        "checks": error.checks if isinstance(error, GateFailed) else [],
        **({"problems": error.problems} if isinstance(error, IntegrityError) else {}),
    }
