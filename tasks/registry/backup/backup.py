"""Making a backup: what the target does not have is sent, and the backup itself appears last. Old ones go with `keep`.

Who is killed in between leaves the backups from before whole, and what was sent is not sent again. Rebuilding is restore.py.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError, Unknown
from tasks.common.process import locked
from tasks.registry import foreign
from tasks.registry.backup import snapshot
from tasks.registry.backup.snapshot import KIND, Contents
from tasks.registry.transfer import ancestry, beside_digests, bring, bring_beside, require_other, require_there
from tasks.security.access import note_access
from tasks.security.audit import audited
from tasks.storage.manifest import Manifest, Provenance
from tasks.storage.store import Store, find

# Which artifacts a backup holds: all that cannot be made again from the others, and what serves or is about to.
#
# Tokens are left out: they are made again from their dataset and tokenizer, and have the same version then. Of
# checkpoints it holds the newest one of each name that is intact, and those that a champion stands on, now or before.


MADE_AGAIN = ("tokens",)
SOME = "checkpoint"


def selected(store: Store, is_held: Callable[[Manifest], bool]) -> tuple[list[Manifest], list[Manifest]]:
    """What goes into a backup and what does not, both in the order of the store.

    `is_held` says whether the backup has the bytes of an artifact already: then it was intact, and is not read again.
    """
    everything = [one for one in store.manifests() if one.content.kind != KIND]
    results = [one for one in everything if one.content.kind == SOME]
    under = (one for champion in _champions(store) for one in (champion, *ancestry(store, champion)))
    wanted = {one.ref for one in under if one.content.kind == SOME}
    for name in {one.provenance.name for one in results}:
        of_name = (one for one in results if one.provenance.name == name)
        newest = next((one for one in of_name if is_held(one) or not store.verify(one)), None)
        wanted |= {newest.ref} if newest else set()
    chosen: list[Manifest] = []
    left: list[Manifest] = []
    for one in everything:
        key_asset = one.ref in wanted if one.content.kind == SOME else one.content.kind not in MADE_AGAIN
        (chosen if key_asset else left).append(one)
    return chosen, left


def _champions(store: Store) -> Iterator[Manifest]:
    """What refs point to, and pointed to before."""
    for key in store.list("refs"):
        document = store.read(key)
        output = json.loads(document.data) if document else {}
        for ref in (output.get("target"), output.get("before")):
            try:
                yield from (find(store, *parse_ref(ref)),) if ref else ()
            except Unknown:
                continue


CLAIM = "backup-of.json"
"""Document that makes a store one of backups, and says of which home."""
Tell = Callable[[int, int, str], None]
"""Bytes done, bytes in all, and of what."""


@dataclass(frozen=True)
class Made:
    """A backup that was made."""

    manifest: Manifest
    contents: Contents
    sent: tuple[str, ...]
    """References of the artifacts that the target did not have."""
    sent_bytes: int
    left_out: tuple[str, ...]
    kept_out: tuple[str, ...] = ()
    """Settings of the platform that hold a secret in clear text: after a restore they are to be given again."""
    pruned: tuple[str, ...] = ()
    """Times of the backups that went, as too old."""


def back_up(
    home: Path, store: Store, target: Store, *, keep: int = 0, with_keys: bool = False, tell: Tell = lambda *_: None
) -> Made:
    """Back up a home and its store into another store; with `keep`, only so many of the newest backups stay there.

    What is damaged in the home and not in the target from before is left out, and named in the contents. Raises ValueError for a
    target that is no store of this home's backups, Missing when it is not there or has no room.
    """
    require_other(store, target)
    require_there(target)
    if f"{target.uri}/".startswith(f"{home.absolute().as_uri()}/"):
        raise ValueError(
            f"{target.uri} lies in the home that it would be a backup of, and is lost with it; name another place"
        )
    work = home / "work"
    work.mkdir(parents=True, exist_ok=True)
    with locked(home / "locks" / "backup"), tempfile.TemporaryDirectory(dir=work) as scratch:
        # Have the target hold this home's backups and nothing else. Raises ValueError when it holds something else.
        origin = _origin(store)
        document = target.read(CLAIM)
        if document is None:
            if target.list("") or any(target.manifests()):
                raise ValueError(
                    f"{target.uri} holds other things than backups; a backup needs a store, or a folder, of its own"
                )
            target.create(CLAIM, json.dumps({"origin": origin}).encode())
            document = target.read(CLAIM)
        if document is None or json.loads(document.data)["origin"] != origin:
            raise ValueError(
                f"{target.uri} holds backups of another home; each home needs a store, or a folder, of its own"
            )
        with audited(store, "backup", right="publish", what=target.uri):
            made = _make(home, store, target, Path(scratch), with_keys=with_keys, tell=tell)
        if not keep:
            return made
        with audited(store, "prune backups", right="publish", what=f"{target.uri}, all but the newest {keep}"):
            return replace(made, pruned=prune(target, keep))


def prune(target: Store, keep: int) -> tuple[str, ...]:
    """Remove all backups but the newest ones, and every artifact that none of these names; returns the times of what went.

    The store holds nothing but backups, so what none names is of old ones, or of one that was killed. Raises
    IntegrityError, and removes nothing, when one that stays is damaged or lacks something.
    """
    result = snapshot.backups(target)
    kept, old = result[:keep], result[keep:]
    named = {ref for one in kept for ref in _whole(target, one)}
    for one in old:
        target.delete(one)
    for one in list(target.manifests()):
        if one.content.kind != snapshot.KIND and one.ref not in named:
            target.delete(one)
    return tuple(one.provenance.created for one in old)


def _whole(target: Store, backup: Manifest) -> Iterable[str]:
    """The artifacts that a backup names, once every byte of it was read where it lies, and each of them is there."""
    problems = target.verify(backup)
    output = {} if problems else snapshot.read(snapshot.fetch(target, backup)).artifacts
    existing = {ref: target.manifest(*parse_ref(ref)) for ref in output}
    lost = [ref for ref, one in existing.items() if one is None or not target.present(one)]
    if problems or lost:
        raise IntegrityError(
            f"no old backup was removed from {target.uri}: the newer one of {backup.provenance.created} is damaged",
            problems=[*(one.model_dump() for one in problems), *({"path": ref, "problem": "missing"} for ref in lost)],
            remedy="Check the disk that it is on. It is removed once there are as many newer backups as --keep asks for.",
        )
    return output


def _make(home: Path, store: Store, target: Store, folder: Path, *, with_keys: bool, tell: Tell) -> Made:
    """Documents before artifacts: what a document names was published before it was written."""
    at = snapshot.now()
    documents = snapshot.take_documents(store, folder)
    kept_out = snapshot.take_files(home, folder, with_keys=with_keys)
    chosen, left = selected(store, lambda one: _held(target, one))
    sent, damaged = _send(home, store, target, chosen, tell)
    left += [one for one in chosen if one.ref in damaged]
    listing = Contents(
        at=at,
        origin=_origin(store),
        home=home.as_uri(),
        headway=snapshot.headway_version(),
        artifacts={one.ref: beside_digests(target, one) for one in chosen if one.ref not in damaged},
        documents=documents,
        damaged=tuple(damaged),
    )
    snapshot.write(folder, listing)
    (folder / snapshot.MANIFESTS).write_bytes(b"".join(foreign.to_json(one) + b"\n" for one in left))
    inputs = tuple(one.version for one in chosen if one.ref in listing.artifacts)
    made = Provenance(name=snapshot.NAME, created=listing.at, stage="backup")
    return Made(
        manifest=target.publish(folder, kind=snapshot.KIND, inputs=inputs, provenance=made),
        contents=listing,
        sent=tuple(one.ref for one in sent),
        sent_bytes=sum(one.bytes for one in sent),
        left_out=tuple(one.ref for one in left),
        kept_out=kept_out,
    )


def _origin(store: Store) -> str:
    """Which home this is. Raises ValueError for one in which nothing was ever done."""
    first = next(iter(store.list("audit")), None)
    document = store.read(first) if first else None
    if document is None:
        raise ValueError(f"there is nothing to back up in {store.uri}: nothing was published yet")
    return hashlib.sha256(document.data).hexdigest()


def _held(target: Store, manifest: Manifest) -> bool:
    existing = target.manifest(manifest.content.kind, manifest.provenance.name, manifest.version)
    return existing is not None and target.present(existing)


def _send(
    home: Path, store: Store, target: Store, chosen: list[Manifest], tell: Tell
) -> tuple[list[Manifest], list[str]]:
    """Send what the target does not have; returns that, and references of what is damaged here and not there."""
    new = [one for one in chosen if not _held(target, one)]
    total, done = sum(one.bytes for one in new), 0
    sent, damaged = [], []
    for one in chosen:
        if one not in new:
            bring_beside(store, target, one)
            continue
        tell(done, total, one.ref.partition("@")[0])
        try:
            sent.append(bring(store, target, one))
            note_access(home, one.ref, bytes=one.bytes, what="backup")
        except IntegrityError:
            damaged.append(one.ref)
        done += one.bytes
    tell(total, total, "documents")
    return sent, damaged
