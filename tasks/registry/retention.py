"""Retention: which versions stay, each with its reasons, and the deletion of all others.

Records of stages stay when what they gave is deleted: the stage then finds its output gone, and runs again. Endpoints and
running flows are refs and processes, so the caller says what they use. See docs/history.md.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict

from tasks.common.errors import HeadwayError, Unknown
from tasks.registry.records import StoreJournal
from tasks.registry.refs import made_from, read_ref
from tasks.registry.versions import Past, note, past
from tasks.security.audit import audited, entries
from tasks.storage.history import Change, current
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, counts_as_newest, find

YOUNG_SECONDS = 3600.0
FEWEST_KEPT = 2
"""The newest one, and one to go back to."""


class Rule(BaseModel):
    """What stays of each name, whoever uses it or not."""

    model_config = ConfigDict(frozen=True)

    keep: int
    """The last ones."""
    every: int = 0
    """And every Nth, counted from the first that was ever published; 0 for none."""


class Verdict(BaseModel):
    """A version, and why it stays; without a reason it goes."""

    model_config = ConfigDict(frozen=True)

    manifest: Manifest
    why: tuple[str, ...]


class Deletion(BaseModel):
    """What became of a version that was to go."""

    model_config = ConfigDict(frozen=True)

    manifest: Manifest
    error: str
    """Why it is still there; empty when it is gone."""


def judge(store: Store, rule: Rule, *, kind: str = "", name: str = "", used: Mapping[str, str]) -> list[Verdict]:
    """All versions of a kind and name, with the reasons to keep them. `used` are references in use, with by whom.

    What was ever a champion stays, what is in use, every model that the rule keeps, and all that these were made from.

    Raises Unknown when there is no such name, and ValueError for a rule that keeps nothing to go back to.
    """
    if rule.keep < FEWEST_KEPT:
        raise ValueError(f"--keep {rule.keep} leaves nothing to go back to: keep {FEWEST_KEPT} or more")
    known = {manifest.ref: manifest for manifest in store.manifests()}
    names = {(m.content.kind, m.provenance.name): None for m in known.values()}
    chosen = [one for one in names if kind in ("", one[0]) and name in ("", one[1])]
    if name and not chosen:
        raise Unknown(f"there is no {kind}/{name} in {store.uri}", remedy=f"`headway artifacts {kind}` lists what is.")
    champions = _champions(store)  # before the journal: a job that begins meanwhile is seen
    # What jobs were handed that have no end in the journal: they run, or the next run of the same stage goes on with
    # them.
    journal = StoreJournal(store)
    keys = set(journal.list("jobs"))
    by_version: dict[str, list[str]] = {}
    for ref in known:
        by_version.setdefault(ref.rpartition("@")[2], []).append(ref)
    result: dict[str, str] = {}
    for key in keys:
        if key.endswith("/intent") and f"{key.removesuffix('/intent')}/end" not in keys:
            intent = journal.get(key) or {}
            versions = re.findall(r"[0-9a-f]{64}", json.dumps(intent))
            job = f"the job {intent.get('job', {}).get('name', key)} has no end yet"
            result |= {ref: job for version in versions for ref in by_version.get(version, [])}
    roots = [*used.items(), *champions.items(), *result.items()]
    reasons = _stood_on(known, roots)
    models = [v for one in names if one[0] == "model" for v in _of_name(store, past(store, *one), rule, reasons)]
    reasons = _stood_on(known, [*roots, *((v.manifest.ref, "") for v in models if v.why)])
    return [verdict for one in chosen for verdict in _of_name(store, past(store, *one), rule, reasons)]


def prune(store: Store, verdicts: list[Verdict], *, reason: str) -> Iterator[Deletion]:
    """Delete the versions that nothing keeps, one by one, each in the audit log before and in its history after.

    One that cannot be deleted does not stop the others.
    """
    for verdict in verdicts:
        if not verdict.why:
            yield Deletion(manifest=verdict.manifest, error=_delete(store, verdict.manifest, reason))


def _delete(store: Store, manifest: Manifest, reason: str) -> str:
    """Why a version could not be deleted; empty when it was."""
    kind, name, version = manifest.content.kind, manifest.provenance.name, manifest.version
    if current(store, kind, name) == version:
        return "it has become the current one"
    try:
        with audited(store, "delete", right="override", what=manifest.ref, before=version, reason=reason) as entry:
            store.delete(manifest)
    except (OSError, HeadwayError) as error:
        return str(error)
    note(store, kind, name, action="delete", version=version, current=False, reason=reason, **entry.noted)
    return ""


def _of_name(store: Store, known: Past, rule: Rule, reasons: Mapping[str, list[str]]) -> list[Verdict]:
    """Verdicts on the versions of a name, the one that was published first first."""
    counted = any(map(counts_as_newest, known.there.values()))
    now = find(store, known.kind, known.name).version if counted else ""
    before, published = known.before(now), known.published()
    by_rule = _by_rule([c for c in published if c.current], known, rule)
    by_rule |= _by_rule([c for c in published if not c.current], known, rule)
    made = {change.version: (number, change.time) for number, change in enumerate(published)}
    verdicts = []
    for version in sorted(known.there, key=lambda version: made[version]):
        manifest = known.there[version]
        own = (
            "current" if version == now else "",
            "rollback goes to it" if before and version == before.version else "",
            "younger than an hour" if time.time() - made[version][1] < YOUNG_SECONDS else "",
        )
        why = (*filter(None, own), *by_rule[version], *reasons.get(manifest.ref, ()))
        verdicts.append(Verdict(manifest=manifest, why=why))
    return verdicts


def _by_rule(published: list[Change], known: Past, rule: Rule) -> dict[str, list[str]]:
    """What the rule says of each version: what validation left of versions is counted by itself.

    Deleted versions count, so that every Nth stays the same one; those of before there was a history do not.
    """
    ever = list(dict.fromkeys(change.version for change in published))
    newest = [v for v in dict.fromkeys(change.version for change in reversed(published)) if v in known.there]
    last = {version: [f"of the last {rule.keep}"] for version in newest[: rule.keep]}
    numbered = [(n, version) for n, version in enumerate(ever, 1) if rule.every and n % rule.every == 0]
    kept = {version: [f"number {n}, one of every {rule.every}"] for n, version in numbered}
    return {version: [*last.get(version, ()), *kept.get(version, ())] for version in ever}


def _stood_on(known: Mapping[str, Manifest], roots: list[tuple[str, str]]) -> dict[str, list[str]]:
    """What stays for a reason of its own (empty: it is known already), and all that it was made from and under, with why."""
    result: dict[str, dict[str, None]] = {}
    for root, why in roots:
        name, _, version = root.partition("@")
        for ref in _ancestry(known, root):
            output = why if ref == root else f"{name}@{version[:12]} stands on it"
            result.setdefault(ref, {}).update({output: None} if output else {})
    return {ref: list(reasons) for ref, reasons in result.items()}


def _champions(store: Store) -> dict[str, str]:
    """Every model that is or was a champion; and what the champion was made from, for its manifest may be gone."""
    result: dict[str, str] = {}
    for key in store.list("refs"):
        ref = key.removeprefix("refs/").removesuffix(".json")
        target = read_ref(store, ref)
        result |= {made: f"refs/{ref} stands on it" for made in made_from(store, ref)}
        result |= {target: f"refs/{ref} points to it"} if target else {}
    moves = [entry for entry in entries(store) if entry.action == "move_ref" and entry.outcome == "done"]
    moves = [move for move in moves if not move.what.endswith("/challenger")]  # not promoted, so free to go
    for ref, target in ((move.what, each) for move in moves for each in (move.after, move.before) if each):
        result.setdefault(target, f"{ref} pointed to it")
    return result


def _ancestry(known: Mapping[str, Manifest], root: str) -> list[str]:
    """A reference, and all that it was made from and under."""
    result: dict[str, None] = {}
    ahead = [root]
    while ahead:
        ref = ahead.pop()
        if ref not in result:
            result[ref] = None
            made = known[ref].provenance if ref in known else None
            ahead += [*made.inputs, *made.context] if made else []
    return list(result)
