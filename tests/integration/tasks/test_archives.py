"""Fault 55: Headway unpacks no archive that somebody hands it, so paths that lead out of one, links and bombs have no door.

Single compressed files of text are read as streams, with limits of their own (tests of the corpus). What Headway writes is one
zip of its own code for Azure ML, and what unpacks that on the node is the job that carries its digest.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
UNPACKERS = re.compile(r"\b(?:extractall|unpack_archive|extractfile|tarfile)\b")
OWN_CODE = {"tasks/compute/azureml/render.py"}
"""Names `python -m zipfile -e` for the zip that tasks/compute/job_folder.py made."""


def sources():
    return [path for name in ("tasks", "flows", "deployments") for path in (ROOT / name).rglob("*.py")]


def test_no_archive_is_unpacked():
    """Not even a comment says it, so that no source has to be parsed for this."""
    found = {path.relative_to(ROOT).as_posix(): UNPACKERS.findall(path.read_text()) for path in sources()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_only_command_that_unpacks_is_for_our_own_code():
    words = ("zipfile -e", "zipfile --extract", "tar -x", "tar x", "unzip ")
    told = {p.relative_to(ROOT).as_posix() for p in sources() if any(word in p.read_text() for word in words)}
    assert told == OWN_CODE
