"""A user's own suite of expectations over the columns of documents: its file, its identity, and the code that it names.

The file is JSON as Great Expectations stores a suite. Who judges by it: tasks/data/gx.py. See docs/validation-suites.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.common.process import locked
from tasks.config.base import canonical_json

FOLDER = "great_expectations"
"""The file context, in the home."""
PLUGINS = "plugins"
"""Where it has the code of expectations that Great Expectations does not have."""
LOCK = ".lock"
"""Held by whoever writes to it."""
RESULTS = ("uncommitted/validations", "uncommitted/data_docs/local_site/validations")
"""Where it has the results of runs, and the pages of its Data Docs on them: SUITE/RUN/TIME/ in both."""
PAGES = f"{FOLDER}/{RESULTS[1]}/*/{{key}}/*/*.html"
"""Pages on one run, below the home. A run is named by the first 16 digits of the stage's key."""
MOST_BYTES = 1_000_000
KNOWN = {"type", "kwargs", "severity", "description", "meta", "notes", "id", "rendered_content", "success_on_last_run"}
"""Keys that Great Expectations writes of an expectation."""
KEPT = ("type", "kwargs", "severity")
"""Those that say what is expected. Data Docs show the text of the others as HTML, whoever wrote it."""
IMPORT_PATH = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Suite:
    """What a user expects of documents."""

    name: str
    expectations: tuple[Mapping[str, Any], ...]
    code: Mapping[str, str]
    """Files of the plugins folder that the types of expectations name, with their sha256."""

    @cached_property
    def text(self) -> str:
        """One spelling of the whole: equal suites have equal texts."""
        return canonical_json({"name": self.name, "expectations": list(self.expectations), "code": dict(self.code)})

    @property
    def digest(self) -> str:
        """sha256, in hex, of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_suite(path: Path, home: Path) -> Suite:
    """Read the file of a suite. Raises ValueError, without anything of what the file holds but names.

    A type that is an import path, MODULE.CLASS, means the file MODULE.py of the home's plugins folder and nothing else: what may
    run is decided by whoever can write to the home, not by whoever writes a configuration.
    """
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(MOST_BYTES + 1))
    except OSError as error:
        raise ValueError(f"validation.suite {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"validation.suite {path} is no JSON of at most {MOST_BYTES:,} bytes") from None
    entries = content.get("expectations") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"validation.suite {path} has no list of `expectations`; docs/validation-suites.md has an example"
        )
    name = content.get("name") or path.stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", str(name)):
        raise ValueError(
            f"validation.suite {path}: `name` must be letters, digits, dot, dash and underscore, at most 63"
        )
    if name in ("corpus", "documents"):
        raise ValueError(
            f"validation.suite {path}: suites of that name hold the rules of Headway: call yours otherwise than {name}"
        )
    expectations = tuple(
        _expectation(entry, f"validation.suite {path}: expectation {n}") for n, entry in enumerate(entries, 1)
    )
    modules = {match[1] for each in expectations if (match := IMPORT_PATH.fullmatch(each["type"]))}
    code = {f"{module}.py": hashlib.sha256(plugin(home, f"{module}.py")).hexdigest() for module in sorted(modules)}
    return Suite(str(name), expectations, code)


def plugin(home: Path, name: str) -> bytes:
    """A file of the plugins folder. Raises ValueError for one that is not there, or that others may write."""
    folder = home / FOLDER / PLUGINS
    try:
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            for known in (os.fstat(file.fileno()), folder.stat()):
                if known.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(known.st_mode) & 0o022:
                    raise ValueError(
                        f"{folder / name} can be written by others than you: chmod go-w the file and its folder"
                    )
            return file.read()
    except OSError as error:
        raise ValueError(
            f"an expectation of validation.suite is of {name}, and {folder / name} cannot be read ({error.strerror}): "
            "code of expectations is taken from there alone"
        ) from None


def title(configuration: Any) -> str:
    """The name of an expectation for people: its type, and the columns that it is about."""
    about = [configuration.kwargs.get(key) for key in ("column", "column_A", "column_B", "column_list")]
    columns = [", ".join(each) if isinstance(each, list) else each for each in about if each]
    return " ".join([configuration.type, *columns])


def forget(home: Path, key: str) -> None:
    """Delete the results and the pages of the runs of a stage's key: its verdict was deleted."""
    folder = home / FOLDER
    if not folder.is_dir():
        return
    with locked(folder / LOCK):
        for path in (path for place in RESULTS for path in (folder / place).glob(f"*/{key[:16]}")):
            shutil.rmtree(path)


def _expectation(entry: Any, place: str) -> dict[str, Any]:
    """One expectation without what says nothing of what is expected. Raises ValueError."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or not isinstance(entry.get("kwargs", {}), dict):
        raise ValueError(f"{place} needs a `type`, and `kwargs` that are a map")
    if strange := sorted(set(entry) - KNOWN):
        raise ValueError(f"{place}, {kind}: unknown {', '.join(strange)}")
    if "row_condition" in entry.get("kwargs", {}):
        raise ValueError(
            f"{place}, {kind}: row_condition is refused, for pandas runs it as code; a custom Expectation can do the same"
        )
    if "<" in canonical_json(entry.get("kwargs", {})):
        raise ValueError(f"{place}, {kind}: `<` is refused in `kwargs`, for Data Docs would show what follows as HTML")
    return {key: entry[key] for key in KEPT if entry.get(key) not in (None, "")}
