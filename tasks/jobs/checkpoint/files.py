"""What a training checkpoint is on disk: names, manifest, their chain, verification, quarantine.

    checkpoints/LATEST                                   advice: changes with every commit, never decides anything
    checkpoints/SCRUBBED                                 which one was last read again, when, and whether it is good
    checkpoints/attempts/A                               attempt A has started: whoever is older may not commit
    checkpoints/step-S/attempt-A/shard-K.safetensors     rank K's tensors, under a name that is never used again
    checkpoints/step-S/attempt-A/own/...                 files that another engine wrote, in its own format
    checkpoints/step-S/attempt-A/receipt-K.json          rank K has written its files: their sizes and hashes
    checkpoints/step-S/attempt-A/manifest.json           written last, create-only: without it there is no checkpoint
    checkpoints/step-S/attempt-A/quarantined.json        it failed verification, and why: not considered again
    checkpoints/step-S/attempt-A/read-by-B               attempt B goes on from it: older attempts do not delete it
    checkpoints/step-S/attempt-A/failed-B.json           attempt B broke before its first step; see
    tasks/jobs/training/checkpoints.py

A file is hashed whole (`sha256`), or in blocks (`blocks`) where ranks read parts of it. Standard library only, for the writer
process must start fast. Tensors do not live here (snapshot.py), nor does the order of writing (writer.py), nor
what is deleted when (retention.py). See docs/DESIGN.md, "Checkpoint".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.common.process import whole
from tasks.jobs.checkpoint.mirrored import lying_here

SCHEMA = "headway/checkpoint/2"
BEFORE = "headway/checkpoint/1"
"""Of the release before: no chain, one shard a rank with whole tensors, its sha256 of the whole file."""
BLOCK = 4 << 20
"""Bytes of a shard that are hashed together."""


@dataclass(frozen=True)
class Manifest:
    """One committed checkpoint. `files` are `{path, size, sha256 | blocks}`, in the order of the ranks that wrote them."""

    step: int
    attempt: int
    consumed_samples: int
    """Position in the data: samples of the global order that all steps so far used."""
    identity: dict[str, Any]
    """Training settings and tokens: what a run must share to go on from here."""
    identity_digest: str
    files: list[dict[str, Any]]
    world_size: int = 0
    """Ranks that wrote it; 0: its release did not say."""
    previous: dict[str, Any] | None = None
    """`{step, attempt, sha256}` of the newest manifest before it, when it was committed; None: there was none."""
    schema: str = SCHEMA

    def entry(self, path: str) -> dict[str, Any] | None:
        """What is known of a file, by its path in the checkpoint's folder."""
        return next((entry for entry in self.files if entry["path"] == path), None)


def digest(value: Any) -> str:
    """sha256, in hex, of the one JSON spelling of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def place_of(root: Path, step: int, attempt: int) -> Path:
    return root / f"step-{step:08d}" / f"attempt-{attempt}"


def shard_name(rank: int) -> str:
    return f"shard-{rank}.safetensors"


def create_only(path: Path, value: Any) -> bool:
    """Write a JSON file whole or not at all, and only where none is; returns whether it was written."""
    try:
        with whole(path, replace=False) as file:
            file.write(json.dumps(value, indent=1).encode())
    except FileExistsError:
        return False
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
    """Make a checkpoint exist, chained to the newest one before it. False: this very checkpoint was committed before."""
    value = asdict(replace(manifest, previous=_previous(root, manifest)))
    place = place_of(root, manifest.step, manifest.attempt)
    return create_only(place / "manifest.json", {**value, "sha256": digest(value)})


def _previous(root: Path, manifest: Manifest) -> dict[str, Any] | None:
    for path in manifests(root):
        if age(path) < (manifest.step, manifest.attempt) and not quarantined(path.parent):
            step, attempt = age(path)
            return {"step": step, "attempt": attempt, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return None


def require_chained(root: Path, manifest: Manifest, path: Path) -> None:
    """Raise IntegrityError for a manifest that was not committed where it lies, in the order in which it lies.

    An old one that is put to a newer step still names its own predecessor, and not the one that lies before it now. One that was
    replaced is not the one that the next one names.
    """
    if (manifest.step, manifest.attempt) != age(path):
        raise IntegrityError(f"{path} is of step {manifest.step}, attempt {manifest.attempt}: it was put there")
    if manifest.schema == BEFORE:
        return
    before = manifest.previous
    since = (before["step"], before["attempt"]) if before else (-1, 0)
    others = manifests(root)
    between = [other for other in others if since < age(other) < age(path) and not quarantined(other.parent)]
    if between:
        raise IntegrityError(
            f"{path} was committed before {between[0].parent} was, and lies after it: an old one was put there"
        )
    for other in others:
        if age(other) > age(path) and _names_otherwise(other, path):
            raise IntegrityError(f"{path} is not the manifest that {other} was committed after")


def _names_otherwise(newer: Path, path: Path) -> bool:
    """Whether a newer manifest names this one's place, and another content."""
    try:
        named = read_manifest(newer).previous
    except (IntegrityError, ValueError, OSError):
        return False
    named_here = named is not None and (named["step"], named["attempt"]) == age(path)
    return named_here and named is not None and named["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest()


def manifests(root: Path) -> list[Path]:
    """Every manifest, quarantined ones too: highest step first, then highest attempt."""
    return sorted(root.glob("step-*/attempt-*/manifest.json"), key=age, reverse=True)


def age(manifest: Path) -> tuple[int, int]:
    """Step and attempt, from the path."""
    step, attempt = manifest.parts[-3], manifest.parts[-2]
    return int(step.removeprefix("step-")), int(attempt.removeprefix("attempt-"))


def verify(path: Path) -> Manifest:
    """Read a manifest and every byte that it names; where the folder is mirrored, of the files that lie here.

    Raises IntegrityError when something is missing or not what it should be, ValueError for another release's schema.
    """
    manifest = read_manifest(path)
    require_chained(path.parents[2], manifest, path)
    for entry in lying_here(path.parent, manifest.files):
        verify_file(path.parent / entry["path"], entry)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check it against its own sha256, not its files; raises what `verify` raises."""
    try:
        value = json.loads(path.read_bytes())
        recorded, schema = value.pop("sha256"), value["schema"]
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
        raise IntegrityError(f"{path} is not a manifest: {error!r}") from error
    if digest(value) != recorded:
        raise IntegrityError(f"{path} was changed after it was written: its own sha256 does not fit")
    if schema not in (SCHEMA, BEFORE):
        raise ValueError(f"{path} has schema {schema!r}, not {SCHEMA!r}: continue with the release that wrote it")
    manifest = Manifest(**value)
    for entry in manifest.files:
        name = entry["path"]
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts:
            raise IntegrityError(f"{path} names {name}, which is not in its folder")
    return manifest


def verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    """Read a file whole; raises IntegrityError when it is not what its entry in the manifest says."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["size"]:
                raise IntegrityError(f"{path} has {size} bytes, its manifest says {entry['size']}")
            if "blocks" in entry:
                if len(entry["blocks"]) != -(-size // BLOCK):
                    raise IntegrityError(
                        f"{path} has {size} bytes, and its manifest hashes of {len(entry['blocks'])} blocks"
                    )
                for number in range(len(entry["blocks"])):
                    checked_block(file.read(BLOCK), entry, number, path)
                return
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is missing") from error
    if actual != entry["sha256"]:
        raise IntegrityError(f"{path} has sha256 {actual[:12]}, its manifest says {entry['sha256'][:12]}")


def checked_block(data: bytes, entry: Mapping[str, Any], number: int, path: Path) -> bytes:
    """A block's bytes; raises IntegrityError when they are not those that were written."""
    if hashlib.sha256(data).hexdigest() != entry["blocks"][number]:
        raise IntegrityError(f"block {number} of {path} has not the sha256 that its manifest says")
    return data


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
