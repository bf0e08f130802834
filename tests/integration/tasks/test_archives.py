"""Fault 55: Headway unpacks no archive that somebody hands it, so paths that lead out of one, links and bombs have no door.

Single compressed files of text are read as streams, with limits of their own (tests of the corpus). What Headway writes is one
zip of its own code for Azure ML, and what unpacks that on the node is the job that carries its digest.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
UNPACKERS = {"extractall", "unpack_archive", "extractfile"}
OWN_CODE = {"tasks/compute/azureml/render.py"}
"""Names `python -m zipfile -e` for the zip that tasks/compute/azureml/folder.py made."""


def sources():
    return [path for name in ("tasks", "flows", "deployments") for path in (ROOT / name).rglob("*.py")]


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)


def test_no_archive_is_unpacked():
    found = {}
    for path in sources():
        tree = ast.parse(path.read_text())
        bad = (UNPACKERS | {"tarfile"}) & set(names_in(tree))
        if bad:
            found[path.relative_to(ROOT).as_posix()] = sorted(bad)
    assert found == {}


def test_the_only_command_that_unpacks_is_for_our_own_code():
    words = ("zipfile -e", "zipfile --extract", "tar -x", "tar x", "unzip ")
    told = {p.relative_to(ROOT).as_posix() for p in sources() if any(word in p.read_text() for word in words)}
    assert told == OWN_CODE
