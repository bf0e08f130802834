"""One flipped bit in any file of a finished home, with size and times kept, is found by `headway verify`, and named."""

import hashlib
import os
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tasks.registry import verification
from tasks.registry.verification import everything
from tasks.serving.protocol.routes import make_secret, read_secret
from tasks.storage import open_store

MADE_ANEW = ("gateway.secret",)
"""docs/storage.md says how; test_a_secret_that_was_damaged_is_made_anew shows it."""


@pytest.fixture(autouse=True)
def nobody_else_works_here(monkeypatch):
    monkeypatch.setattr(verification, "ANOTHER_LOOK_SECONDS", 0.0)


@pytest.fixture(scope="module")
def copied(home, done, tmp_path_factory):
    """Store, keys and endpoints of the finished lifecycle, after some requests, as a home of their own."""
    for _ in range(3):
        assert home.run("complete", "tiny", "def first", "--max-tokens", "4").code == 0
    made = tmp_path_factory.mktemp("copied") / "home"
    for name in ("store", "keys", "endpoints"):
        shutil.copytree(home.path / name, made / name)
    return made


def files_of(home):
    """All that is read back: neither locks nor logs, which are empty or are for people."""
    found = [path for name in ("store", "endpoints") for path in sorted((home / name).rglob("*")) if path.is_file()]
    return [
        path for path in found if path.stat().st_size and path.suffix not in (".log", ".lock") and path.name != ".lock"
    ]


@contextmanager
def flipped(path: Path, number: int):
    """A bit somewhere in the file, always the same one for the same bytes and number."""
    kept, was = path.read_bytes(), path.stat()
    place = int.from_bytes(hashlib.sha256(b"%d" % number + kept).digest()[:8], "big") % (8 * len(kept))
    changed = bytearray(kept)
    changed[place // 8] ^= 1 << place % 8
    for data in (changed, kept):
        path.chmod(0o600)
        path.write_bytes(data)
        path.chmod(was.st_mode)
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        if data is changed:
            yield


def damage(home):
    """All that is wrong, as text: what it is of, and the paths."""
    found = {name: found for name, found in everything(open_store(home), keys=home / "keys") if found}
    return " ".join([*found, *(problem.path for problems in found.values() for problem in problems)])


def names_of(path):
    """What of a file may be named: of an artifact its version; else its path; for an entry of the audit log the log, as a link
    between two entries that does not hold does not say which of them was changed."""
    versions = [part for part in path.parts if len(part) == 64]
    return versions or [path.stem, *(["audit log"] if path.parent.name == "audit" else [])]


def apart(paths):
    """The files in groups, none of which has two that one name could mean: a home is looked at once a group."""
    groups: list[tuple[list[Path], set[str]]] = []
    for path in paths:
        names = set(names_of(path))
        group, known = next((one for one in groups if not one[1] & names), ([], set()))
        if not group:
            groups.append((group, known))
        group.append(path)
        known |= names
    return [group for group, _ in groups]


def test_a_finished_home_is_sound(copied):
    assert damage(copied) == ""


@pytest.mark.parametrize("number", [1, *(pytest.param(each, marks=pytest.mark.long) for each in (2, 3))])
def test_a_flipped_bit_in_any_file_is_found_and_named(copied, number):
    files = [path for path in files_of(copied) if path.name not in MADE_ANEW]
    entries = [path for path in files if path.parent.name == "audit"]
    if number == 1:  # each is a look of its own, and many tests of this home have added theirs
        files = [path for path in files if path not in entries[2:-6]]
    assert len(files) > 100
    assert {"endpoint.json", "routes.json", "journal.jsonl", "gateway.json", "process.json"} < {
        path.name for path in files
    }
    unseen = {}
    for together in apart(files):
        with ExitStack() as flips:
            for path in together:
                flips.enter_context(flipped(path, number))
            said = damage(copied)
        for path in together:
            if not any(name in said for name in names_of(path)):
                unseen[str(path.relative_to(copied))] = said
    assert unseen == {}


def test_a_secret_that_was_damaged_is_made_anew(copied):
    secret = next(copied.glob("endpoints/*/gateway.secret"))
    secret.write_bytes(b"\xff" + secret.read_bytes()[1:])
    with pytest.raises(ValueError, match="stop the endpoint, and deploy it again"):
        read_secret(secret)
    secret.unlink()
    assert read_secret(make_secret(secret.parent))
