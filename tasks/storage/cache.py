"""The files of artifacts on this machine: `cache/KIND/NAME/VERSION/files` below the home, hashed again at each fetch.

It may be deleted while nothing runs. What fills it is blob/store.py, and local.py where others may write to the store.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.common.errors import Missing
from tasks.common.process import locked
from tasks.storage.manifest import FileEntry, Manifest, check

HEADROOM_BYTES = 64 << 20


def place_of(home: Path, manifest: Manifest) -> Path:
    """A version's folder in the cache."""
    return home / "cache" / manifest.content.kind / manifest.provenance.name / manifest.version


def filled(place: Path, manifest: Manifest, download: Callable[[list[FileEntry], Path], None]) -> Path:
    """A folder with exactly the artifact's files: what is missing or damaged is downloaded, what is not named goes away."""
    files = place / "files"
    if files.is_symlink():
        files.unlink()
    files.mkdir(parents=True, exist_ok=True)
    with locked(place / ".lock"):
        problems = check(files, manifest.content.files)
        for problem in problems:
            _discard(files / problem.path)
        wrong = {problem.path for problem in problems}
        needed = [entry for entry in manifest.content.files if entry.path in wrong]
        if needed:
            require_room(place, sum(entry.size for entry in needed), what=manifest.ref)
            with _arriving(place) as folder:
                download(needed, folder)
                for entry in needed:
                    arrived = folder / entry.path
                    target = files / entry.path
                    arrived.chmod(0o444)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _discard(target)
                    os.replace(arrived, target)
    return files


def keep(place: Path, manifest: Manifest, folder: Path) -> None:
    """Take over the files of a folder that its owner is about to delete; where that cannot be, they are downloaded later."""
    files = place / "files"
    with locked(place / ".lock"):
        try:
            for entry in manifest.content.files:
                target = files / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                os.link(folder / entry.path, target)
                target.chmod(0o444)
        except OSError:
            shutil.rmtree(files, ignore_errors=True)


def drop(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)


def require_room(folder: Path, needed: int, *, what: str) -> None:
    """Raise Missing when the disk under a folder has no room for `needed` bytes and a little headroom."""
    free = shutil.disk_usage(folder).free
    if free < needed + HEADROOM_BYTES:
        raise Missing(
            f"no space on the disk for {what}: {needed / 1e6:.1f} MB and {HEADROOM_BYTES / 1e6:.0f} MB of headroom are "
            f"needed, {free / 1e6:.1f} MB are free under {folder}",
            remedy="Free space there, or set HEADWAY_HOME to a folder on a larger disk.",
        )


@contextmanager
def _arriving(place: Path) -> Iterator[Path]:
    for left in place.glob(".incoming-*"):  # of a process that was killed: its lock is ours now
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=place, prefix=".incoming-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
