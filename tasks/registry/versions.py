"""Publishing, and the versions of a name in the order of its history: what was current when, and what stood before it.

Also versions that an older Headway published, which kept no history. The history itself is tasks/storage/history.py.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.artifacts import KINDS
from tasks.common.errors import IntegrityError, Unknown
from tasks.config.base import canonical_json
from tasks.config.environment import surroundings
from tasks.security.audit import actor, audited
from tasks.security.signatures import KINDS as SIGNED_KINDS
from tasks.security.signatures import is_signed
from tasks.storage.history import Action, Change, changes, current, newest_publication, note_change
from tasks.storage.manifest import Manifest, Provenance
from tasks.storage.signed import lineage_digest
from tasks.storage.store import Store, counts_as_newest

# What differs between two versions: files, configuration, metrics, inputs, code. Pure: manifests in, values out.
#
# Which arguments of a stage differ, in a few words, comes first.


# What differs between two sets of arguments, in words: why a stage runs again.


SHOWN = 3


def flat(name: str, value: Any) -> dict[str, Any]:
    """A tree of settings as one level, keys joined by dots."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for part, below in value.items() for key, leaf in flat(f"{name}.{part}", below).items()}


def what_changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Which arguments of a stage differ, old value and new one; the first three."""
    old, new = flat("", before), flat("", now)
    names = [n for n in sorted(old.keys() | new.keys()) if canonical_json(old.get(n)) != canonical_json(new.get(n))]
    messages = [f"{n.split('.', 2)[-1]} {_short(old.get(n))} -> {_short(new.get(n))}" for n in names[:SHOWN]]
    return "changed: " + ", ".join(messages) + (" ..." if len(names) > SHOWN else "")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:8] + "…"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class FileChange(_Part):
    """One file that differs. Sizes are in bytes; None where the file is not."""

    path: str
    before: int | None
    after: int | None


class Files(_Part):
    """Files by what became of them; `changed` have the same path and other bytes."""

    added: tuple[FileChange, ...]
    removed: tuple[FileChange, ...]
    changed: tuple[FileChange, ...]
    unchanged: int


class SettingChange(_Part):
    """A key of the configuration with its values; None where there is no such key."""

    key: str
    before: Any
    after: Any


class MetricChange(_Part):
    """A metric with its values; the difference is None where one of them is."""

    name: str
    before: float | None
    after: float | None
    difference: float | None


class InputChange(_Part):
    """What was read under a name (KIND/NAME), by versions: several, where one name was read in several versions."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class Difference(_Part):
    """Only what differs."""

    before: str
    after: str
    """References."""
    files: Files
    configuration: tuple[SettingChange, ...]
    metrics: tuple[MetricChange, ...]
    inputs: tuple[InputChange, ...]
    code: tuple[str | None, str | None]
    """The commits, the same or not."""

    @property
    def same(self) -> bool:
        """Whether both are one version."""
        return self.before.rpartition("@")[2] == self.after.rpartition("@")[2]


def difference(before: Manifest, after: Manifest) -> Difference:
    """What differs between two versions of one kind. Raises ValueError for two kinds."""
    if before.content.kind != after.content.kind:
        raise ValueError(f"{before.ref} and {after.ref} are of different kinds; compare two of one kind")
    old, new = (flat("", manifest.provenance.config or {}) for manifest in (before, after))
    keys = [k for k in sorted(old.keys() | new.keys()) if canonical_json(old.get(k)) != canonical_json(new.get(k))]
    return Difference(
        before=before.ref,
        after=after.ref,
        files=_files(before, after),
        configuration=tuple(SettingChange(key=k.removeprefix("."), before=old.get(k), after=new.get(k)) for k in keys),
        metrics=_metrics(before.provenance.metrics, after.provenance.metrics),
        inputs=_inputs(before, after),
        code=(before.provenance.commit, after.provenance.commit),
    )


def _files(before: Manifest, after: Manifest) -> Files:
    old, new = ({file.path: file for file in manifest.content.files} for manifest in (before, after))
    both = sorted(old.keys() & new.keys())
    changed = [path for path in both if old[path].sha256 != new[path].sha256]
    return Files(
        added=tuple(FileChange(path=p, before=None, after=new[p].size) for p in sorted(new.keys() - old.keys())),
        removed=tuple(FileChange(path=p, before=old[p].size, after=None) for p in sorted(old.keys() - new.keys())),
        changed=tuple(FileChange(path=p, before=old[p].size, after=new[p].size) for p in changed),
        unchanged=len(both) - len(changed),
    )


def _metrics(old: dict[str, float], new: dict[str, float]) -> tuple[MetricChange, ...]:
    return tuple(
        MetricChange(
            name=name,
            before=old.get(name),
            after=new.get(name),
            difference=new[name] - old[name] if name in old and name in new else None,
        )
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    )


def _inputs(before: Manifest, after: Manifest) -> tuple[InputChange, ...]:
    old, new = _read_by_name(before), _read_by_name(after)
    return tuple(
        InputChange(name=name, before=old.get(name, ()), after=new.get(name, ()))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    )


def _read_by_name(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """What a version was made from and under: versions by KIND/NAME."""
    result: dict[str, tuple[str, ...]] = {}
    for ref in sorted((*manifest.provenance.inputs, *manifest.provenance.context)):
        name, _, version = ref.partition("@")
        result[name] = (*result.get(name, ()), version)
    return result


class Past(BaseModel):
    """What is known of a name."""

    model_config = ConfigDict(frozen=True)

    kind: str
    name: str
    changes: tuple[Change, ...]
    """Oldest first; number 0 for a version that is there without a history."""
    there: dict[str, Manifest]
    """The versions that were not deleted."""

    def stack(self) -> list[str]:
        """What was current, oldest first, as a list that one can undo: the last one is current, before it is what it replaced.

        A rollback takes off what it undid, so going back twice goes further back, and never to and fro.
        """
        results: list[str] = []
        for change in self.changes:
            if change.action == "rollback" and change.version in results:
                del results[len(results) - results[::-1].index(change.version) :]
            elif change.current and results[-1:] != [change.version]:
                results.append(change.version)
        return results

    def before(self, version: str, *, among: Collection[str] = ()) -> Manifest | None:
        """What stood before the current version, when that is `version`: the newest other one on the stack that is there.

        `among`: only one of these, where any is given.
        """
        older = (each for each in reversed(self.stack()) if each != version and each in self.there)
        return next((self.there[each] for each in older if not among or each in among), None)

    def published(self) -> list[Change]:
        """The changes that brought a version here, oldest first: it was published, copied or restored."""
        return [change for change in self.changes if change.action not in ("rollback", "delete")]

    def difference(self, change: Change) -> Difference | None:
        """What a change changed; None for the first one, and where a version is gone."""
        old, new = self.there.get(change.before or ""), self.there.get(change.version)
        return difference(old, new) if old and new and change.action != "delete" else None


def past(store: Store, kind: str, name: str) -> Past:
    """The past of a name. Raises Unknown when nothing was ever published under it."""
    noted = changes(store, kind, name)
    known = {change.version for change in noted if change.action not in ("rollback", "delete")}
    existing = {manifest.version: manifest for manifest in reversed(list(store.manifests(kind, name)))}
    if not noted and not existing:
        raise Unknown(f"there is no {kind}/{name} in {store.uri}", remedy=f"`headway artifacts {kind}` lists what is.")
    older: list[Change] = []
    for manifest in existing.values():
        if manifest.version not in known:
            before: Any = next((change.version for change in reversed(older) if change.current), None)
            older.append(
                Change(
                    number=0,
                    action="publish",
                    version=manifest.version,
                    current=counts_as_newest(manifest),
                    before=before,
                    time=_created(manifest),
                    who=manifest.provenance.who or "",
                    host=manifest.provenance.host or "",
                    flow_run=manifest.provenance.flow_run,
                )
            )
    return Past(kind=kind, name=name, changes=(*older, *noted), there=existing)


def note(store: Store, kind: str, name: str, *, action: Action, version: str, **output: Any) -> Change:
    """Write a change into the history of a name, with who acts and from where."""
    return note_change(
        store, kind, name, action=action, version=version, who=actor().name, host=socket.gethostname(), **output
    )


def is_noted(store: Store, manifest: Manifest) -> bool:
    """Whether the history of its name has a version, for whatever reason."""
    noted = changes(store, manifest.content.kind, manifest.provenance.name)
    return any(change.version == manifest.version for change in noted)


def kind_of(store: Store, name: str) -> str:
    """The only kind that has a name. Raises Unknown, and ValueError when several have it."""
    results = [kind for kind in KINDS if next(store.manifests(kind, name), None) or changes(store, kind, name)]
    if not results:
        raise Unknown(f"nothing is called {name!r} in {store.uri}", remedy="`headway artifacts` lists what there is.")
    if len(results) > 1:
        raise ValueError(f"{name!r} means several: {', '.join(f'{kind}/{name}' for kind in results)}; name one of them")
    return results[0]


def _created(manifest: Manifest) -> float:
    """When a version says that it was made, in seconds since 1970; 0.0 when it does not say."""
    try:
        return datetime.fromisoformat(manifest.provenance.created).timestamp()
    except ValueError:
        return 0.0


# Publishing: bytes into the store, an entry in the audit log, and a change of the name's history; in that order.
#
# Who is killed in between publishes again, and finds done what was done: the version is the content's. Bytes are
# tasks/storage.


def publish(
    store: Store,
    folder: Path,
    *,
    kind: str,
    inputs: tuple[str, ...],
    provenance: Provenance,
    link: bool = False,
) -> Manifest:
    """Make an artifact of a folder, and the version that its name means; see `Store.publish`."""
    signed = provenance.model_copy(update={"who": actor().name, **surroundings()})
    manifest = store.publish(folder, kind=kind, inputs=inputs, provenance=signed, link=link)
    name = provenance.name
    before, becomes_current = current(store, kind, name), counts_as_newest(manifest)
    output = {"what": manifest.ref, "before": before, "after": manifest.version, "manifest": manifest.digest}
    with audited(store, f"publish {kind}", right="publish", **output) as entry:
        known = newest_publication(store, kind, name, manifest.version)
        as_known = known is None or known.manifest in ("", manifest.digest)  # what was damaged is published anew
        if as_known and (before == manifest.version or (not becomes_current and is_noted(store, manifest))):
            return manifest
        note(
            store,
            kind,
            name,
            action="publish",
            version=manifest.version,
            current=becomes_current,
            flow_run=provenance.flow_run,
            manifest=manifest.digest,
            **entry.noted,
        )
    return manifest


def publish_for_signing(
    store: Store,
    home: Path,
    folder: Path,
    *,
    kind: str,
    inputs: tuple[str, ...],
    provenance: Provenance,
    link: bool = False,
) -> Manifest:
    """Publish what is to be signed: the store must not say that it was made of something else, nor otherwise.

    The same bytes may be there already, with the lineage of whoever made them first: it stays if somebody trusted signed it.
    Kinds that are not signed are published as ever. Raises IntegrityError.
    """
    for _ in range(2):
        manifest = publish(store, folder, kind=kind, inputs=inputs, provenance=provenance, link=link)
        ours = lineage_digest(manifest.provenance) == lineage_digest(provenance)
        if ours or kind not in SIGNED_KINDS or is_signed(store, home, manifest):
            return manifest
        store.delete(manifest)
    raise lineage_conflict(manifest)


def lineage_conflict(manifest: Manifest) -> IntegrityError:
    """What to raise for an artifact of which the store says something else than who made it."""
    return IntegrityError(
        f"{manifest.ref} has another lineage in the store than whoever made it gave it, and nobody trusted signed it",
        remedy="Find out who writes to the store. Then make it again; a stage of a run by --from.",
    )
