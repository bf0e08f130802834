"""A model of the store becomes a commit on the Hugging Face hub: verified first, private unless somebody says otherwise.

The core of `headway model push`; who may, is asked there. The commit holds what the artifact holds and nothing else, so whoever
loads it loads what was signed; only the front matter of the card is another, for the hub takes names of its own alone. What
talks to the hub is hugging_face.py. See docs/hugging-face.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deployments.publishing.hugging_face import KEPT, MAIN, Hub, split
from tasks.artifacts import parse_ref
from tasks.formats.model_card import front_matter
from tasks.registry.licenses import licenses_of
from tasks.registry.logged_model import evaluation_of
from tasks.registry.transfer import ancestry, sound
from tasks.security.access import note_access
from tasks.security.audit import audit, audited
from tasks.security.signatures import KINDS
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

CARD = "README.md"
DATA = "## Data and base"
PARTS = ("dataset", "tokenizer", "tokens", "checkpoint")
"""Kinds of artifacts that a card names as what the model is made from."""


class Pushed(NamedTuple):
    """What became of it."""

    manifest: Manifest
    uri: str
    """The address, with the commit."""
    page: str
    moved: bool
    """False when the branch held these files already."""
    created: bool
    deleted: tuple[str, ...]
    """Files of the commit before that are not in this one."""


def push(
    store: Store, home: Path, ref: str, address: str, hub: Hub, *, public: bool = False, reason: str = ""
) -> Pushed:
    """Send a model, or a checkpoint, to a repository on the hub, which is made when it is not there.

    A repository that is there needs a revision in the address, unless it holds these very files. Raises IntegrityError when the
    artifact is damaged or no signature counts, ValueError for an address that would overwrite what it does not name, Conflict
    when somebody else committed meanwhile, Missing when the hub is away or does not let us in.
    """
    if parse_ref(ref)[0] not in KINDS:
        raise ValueError(f"{ref}: what is pushed is signed: a {' or a '.join(KINDS)}")
    _, repo, revision, path = split(address, "model")
    if path:
        raise ValueError(f"{address}: a model is pushed to the root of a repository; leave {path!r} out")
    manifest = sound(store, ref, home)
    branches = hub.branches(repo)
    note_access(home, manifest.ref, bytes=manifest.bytes, what="push")
    what = f"{manifest.ref} to hf://{repo}"
    with tempfile.TemporaryDirectory() as folder:
        files = _files(store, manifest, Path(folder))
        if branches is None:
            details: dict[str, Any] = {"right": "publish", "what": what, "after": manifest.version, "reason": reason}
            with audited(store, "push model", **details):
                hub.create(repo, private=not public)
                if revision not in ("", MAIN):
                    hub.branch(repo, revision)
                return _commit(store, hub, f"hf://{repo}@{revision or MAIN}", manifest, files, created=True)
        known = hub.open(f"hf://{repo}@{revision if revision in branches else MAIN}", "model")
        same = all(file.path in files and file.is_of(files[file.path]) for file in known.files if file.path != KEPT)
        if same and {file.path for file in known.files} >= files.keys() and (revision or MAIN) in branches:
            return Pushed(manifest, known.uri(), f"{hub.api.endpoint}/{repo}", False, False, ())
        if not revision:
            raise ValueError(
                f"hf://{repo} is there already and holds something else: to commit on top of it, name the branch, "
                f"hf://{repo}@{MAIN}; a branch that is not there is made. Nothing was sent"
            )
        with audited(store, "push model", right="publish", what=what, after=manifest.version, reason=reason):
            if revision not in branches:
                hub.branch(repo, revision)
            return _commit(store, hub, f"hf://{repo}@{revision}", manifest, files, created=False)


def _commit(
    store: Store, hub: Hub, address: str, manifest: Manifest, files: dict[str, Path], *, created: bool
) -> Pushed:
    onto = hub.open(address, "model")
    deleted = tuple(file.path for file in onto.files if file.path not in files and file.path != KEPT)
    commit = hub.push(
        onto,
        files,
        message=f"{manifest.content.kind}/{manifest.provenance.name}@{manifest.version[:12]}, by Headway",
        description=f"Version {manifest.version}. Every file but the card's front matter is as it was signed.",
        deleted=deleted,
    )
    uri = f"{onto.name}@{commit}"
    audit(store, "pushed model", right="publish", what=f"{manifest.ref} as {uri}", after=manifest.version)
    return Pushed(manifest, uri, f"{hub.api.endpoint}/{onto.repo}/tree/{commit}", True, created, deleted)


def _files(store: Store, manifest: Manifest, scratch: Path) -> dict[str, Path]:
    """The files of the artifact by their paths, verified as they are fetched; the card with a front matter that the hub takes."""
    folder = store.fetch(manifest)
    files = {entry.path: folder / entry.path for entry in manifest.content.files}
    if CARD in files:
        text = card_for_hub(files[CARD].read_text(encoding="utf-8"), ancestry(store, manifest))
        text += "".join(f"\n{line}" for line in _from_the_store(store, manifest, text)) + "\n"
        files[CARD] = scratch / CARD
        files[CARD].write_text(text, encoding="utf-8")
    return files


def _from_the_store(store: Store, manifest: Manifest, text: str) -> list[str]:
    """Sections of a card that the store knows and a training or an export does not: licences, and what an evaluation measured."""
    lines: list[str] = []
    known = licenses_of(store, [manifest.ref])
    if known and DATA not in text:
        lines += [DATA, "", "| | licence | from |", "| --- | --- | --- |"]
        for ref, terms in sorted(known.items()):
            lines.append(f"| `{ref}` | {terms.license or 'not known'} | {terms.origin or 'files of its publisher'} |")
        lines.append("")
    evaluation = evaluation_of(store, manifest) if manifest.content.kind == "model" else None
    if evaluation:
        lines += ["## Evaluation", "", f"By `{evaluation.ref}`.", "", "| metric | value |", "| --- | --- |"]
        lines += (f"| {name} | {value:.6g} |" for name, value in sorted(evaluation.provenance.metrics.items()))
        lines.append("")
    parts = [f"- `{one.ref}`" for one in ancestry(store, manifest) if one.content.kind in PARTS]
    return [*lines, "## Lineage", "", f"`{manifest.ref}`, made from:", "", *(parts or ["- nothing in the store"])]


def card_for_hub(text: str, ancestors: Iterable[Manifest]) -> str:
    """A card whose front matter names base model and datasets as the hub knows them; those that it does not know are left out.

    The hub refuses a commit whose card names others. What a model was made from stands below, in Headway's references.
    """
    matter, body = front_matter(text)
    if not matter:
        return text
    known: dict[str, list[str]] = {"checkpoint": [], "dataset": []}
    for one in ancestors:
        for origin in (one.provenance.config or {}).get("origins", []) if one.content.kind in known else []:
            known[one.content.kind].append(split(origin["uri"])[1])
    for key, repos in (("base_model", known["checkpoint"]), ("datasets", known["dataset"])):
        matter.pop(key, None)
        if repos:
            matter[key] = sorted(set(repos))
    front = yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n{body}"
