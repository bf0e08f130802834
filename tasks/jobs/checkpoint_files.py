"""What a training checkpoint is on disk: names, manifest, verification, quarantine, retention.

    checkpoints/LATEST                                   advice: changes with every commit, never decides anything
    checkpoints/attempts/A                               attempt A has started: whoever is older may not commit
    checkpoints/step-S/attempt-A/shard-K.safetensors     rank K's tensors, under a name that is never used again
    checkpoints/step-S/attempt-A/receipt-K.json          rank K has written its shard: size and sha256
    checkpoints/step-S/attempt-A/manifest.json           written last, create-only: without it there is no checkpoint
    checkpoints/step-S/attempt-A/quarantined.json        it failed verification, and why: not considered again

Standard library only, for the writer process must start fast. Tensors do not live here (checkpoint.py), nor does the
order of writing (checkpoint_writer.py). See docs/DESIGN.md, "Checkpoint".
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.errors import IntegrityError

SCHEMA = "headway/checkpoint/1"


@dataclass(frozen=True)
class Manifest:
    """One committed checkpoint. `files` are `{path, size, sha256}`, a shard a rank, in the order of the ranks."""

    step: int
    attempt: int
    consumed_samples: int
    """Position in the data: samples of the global order that all steps so far used."""
    identity: dict[str, Any]
    """Training settings, tokens and, of a fixed size, world size: what a run must share to go on from here."""
    identity_digest: str
    files: list[dict[str, Any]]
    schema: str = SCHEMA


def digest(value: Any) -> str:
    """sha256, in hex, of the one JSON spelling of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def place_of(root: Path, step: int, attempt: int) -> Path:
    return root / f"step-{step:08d}" / f"attempt-{attempt}"


def create_only(path: Path, value: Any) -> bool:
    """Write a JSON file whole or not at all, and only where none is; returns whether it was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    sync(path.parent)
    return True


def sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(root: Path, manifest: Manifest) -> bool:
    """Make a checkpoint exist. False: this very checkpoint was committed before."""
    value = asdict(manifest)
    place = place_of(root, manifest.step, manifest.attempt)
    return create_only(place / "manifest.json", {**value, "sha256": digest(value)})


def manifests(root: Path) -> list[Path]:
    """Every manifest, quarantined ones too: highest step first, then highest attempt."""
    return sorted(root.glob("step-*/attempt-*/manifest.json"), key=_age, reverse=True)


def _age(manifest: Path) -> tuple[int, int]:
    """Step and attempt, from the path."""
    step, attempt = manifest.parts[-3], manifest.parts[-2]
    return int(step.removeprefix("step-")), int(attempt.removeprefix("attempt-"))


def verify(path: Path) -> Manifest:
    """Read a manifest and every byte that it names.

    Raises IntegrityError when something is missing or not what it should be, ValueError for another release's schema.
    """
    manifest = read_manifest(path)
    for entry in manifest.files:
        _verify_file(path.parent / entry["path"], size=entry["size"], sha256=entry["sha256"])
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check it against its own sha256, not its files; raises what `verify` raises."""
    try:
        value = json.loads(path.read_bytes())
        recorded, schema = value.pop("sha256"), value["schema"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is not a manifest: {error!r}") from error
    if digest(value) != recorded:
        raise IntegrityError(f"{path} was changed after it was written: its own sha256 does not fit")
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}, not {SCHEMA!r}: go on with the release that wrote it")
    return Manifest(**value)


def _verify_file(path: Path, *, size: int, sha256: str) -> None:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            actual = hashlib.file_digest(file, "sha256").hexdigest() if found == size else ""
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is missing") from error
    if found != size:
        raise IntegrityError(f"{path} has {found} bytes, its manifest says {size}")
    if actual != sha256:
        raise IntegrityError(f"{path} has sha256 {actual[:12]}, its manifest says {sha256[:12]}")


def quarantine(folder: Path, reason: str) -> None:
    """Mark a checkpoint as bad for good; its files stay for whoever wants to know why."""
    create_only(folder / "quarantined.json", {"reason": reason})


def quarantined(folder: Path) -> str:
    """Why a checkpoint is not considered; empty when it is."""
    path = folder / "quarantined.json"
    return str(json.loads(path.read_bytes())["reason"]) if path.exists() else ""


def claim_attempt(root: Path, attempt: int) -> int:
    """Take the first free attempt number from `attempt` on, so that no two starts ever share one."""
    while not create_only(root / "attempts" / str(attempt), {"pid": os.getpid()}):
        attempt += 1
    return attempt


def newest_attempt(root: Path) -> int:
    return max((int(path.name) for path in (root / "attempts").iterdir() if path.name.isdigit()), default=0)


def clean(root: Path, attempt: int) -> None:
    """Delete what attempts before `attempt` began to write and did not commit."""
    for folder in root.glob("step-*/attempt-*"):
        if int(folder.name.removeprefix("attempt-")) < attempt and not (folder / "manifest.json").exists():
            delete(folder)


def retain(root: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints; delete older ones only while one of those kept verifies byte by byte."""
    good = [path for path in manifests(root) if not quarantined(path.parent)]
    kept, old = good[:keep], good[keep:]
    if old and any(_intact(path) for path in kept):
        for path in old:
            delete(path.parent)


def _intact(path: Path) -> bool:
    try:
        verify(path)
    except (IntegrityError, ValueError):
        return False
    return True


def delete(folder: Path) -> None:
    """Delete one attempt's folder, its manifest first. A failure is said in the log and stops nothing."""
    try:
        (folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    except OSError as error:
        print(f"could not delete {folder}: {error}", file=sys.stderr, flush=True)
