"""Every byte against the manifest, checkpoints and models against their signatures, token files against their format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.common.seal import has_seal, opened, opened_lines
from tasks.data.tokenizing.checking import look
from tasks.registry.chained import NO_SEAL, chained, lacks_seal, read_chain, seconds
from tasks.security import audit_chain
from tasks.security.signatures import KINDS, remedy_for, require_signed
from tasks.signing.bundle import SIGNATURE
from tasks.storage.history import newest_publication
from tasks.storage.manifest import Manifest, Problem, remake
from tasks.storage.store import Store, find

MANIFEST = "manifest.json"
AS_WRITTEN = "as it was written"


def problems_of(store: Store, ref: str, *, keys: Path) -> tuple[Manifest, list[Problem]]:
    """The manifest that a reference means, and everything that is wrong with what it names.

    `keys` is the home's folder of keys; the trust policy lies beside it.
    """
    manifest = find(store, *parse_ref(ref))
    problems = [*store.verify(manifest), *_manifest_problems(store, manifest)]
    if manifest.content.kind in KINDS and not problems:
        problems = _signature_problems(store, manifest, keys.parent)
    if manifest.content.kind == "tokens" and not problems:
        problems = _format_problems(store.fetch(manifest))
    return manifest, problems


def everything(store: Store, *, keys: Path) -> Iterator[tuple[str, list[Problem]]]:
    """Every artifact, every document, the audit log and the files of endpoints, each by its name, with what is wrong with it.

    The home is the folder that `keys` is in.
    """
    since = read_chain(store).sealing[1]
    for listed in sorted(store.versions()):
        ref = f"{listed.kind}/{listed.name}@{listed.version}"
        try:
            manifest, problems = problems_of(store, ref, keys=keys)
            if not manifest.sealed and seconds(manifest.provenance.created) > since:
                problems = [*problems, NO_SEAL.model_copy(update={"path": MANIFEST})]
            yield ref, problems
        except IntegrityError as error:
            yield ref, [Problem(path=MANIFEST, problem="sha256", expected=AS_WRITTEN, actual=error.message)]
    chain = chained(store)
    for key in store.list(""):
        yield key, _document_problems(store, key) or ([chain.pop(key)] if key in chain else [])
    for key, problem in chain.items():  # of what is gone
        yield key, [problem]
    broken = audit_chain.check(store).broken
    entries = (
        [Problem(path=str(broken.number), problem="sha256", expected=AS_WRITTEN, actual=broken.words)] if broken else []
    )
    yield "audit log", entries
    for path in sorted((keys.parent / "endpoints").rglob("*.json*")):
        if path.suffix in (".json", ".jsonl"):  # others are being written
            yield str(path.relative_to(keys.parent)), _file_problems(path, since)


def _file_problems(path: Path, since: float) -> list[Problem]:
    """Of a file of an endpoint: one JSON object, or one a line."""
    try:
        data = path.read_bytes()
        if path.suffix == ".jsonl":
            for _ in opened_lines(data, where=str(path)):
                pass
            # Raise IntegrityError for a line without a seal behind one that has it: a server of an older release,
            # which writes none, may go on after an upgrade, in files of its own. One that a kill cut is no JSON, and
            # is passed over.
            all_of_them = since < 0
            before = all_of_them
            for number, line in enumerate(data.split(b"\n"), 1):
                if before and lacks_seal(line, since=-1.0):
                    raise IntegrityError(f"line {number} has no seal, and what is written now gets one")
                before = before or has_seal(line)
        else:
            json.loads(opened(data, where=str(path)))
            if lacks_seal(data, since=since):
                raise IntegrityError("it has no seal, and what is written now gets one")
    except FileNotFoundError:  # a server ended meanwhile
        return []
    except (IntegrityError, ValueError) as error:
        return [Problem(path=path.name, problem="sha256", expected=AS_WRITTEN, actual=str(error))]
    return []


def _document_problems(store: Store, key: str) -> list[Problem]:
    try:
        result = store.read(key)
        json.loads(result.data if result else b"null")
    except (IntegrityError, ValueError) as error:
        return [Problem(path=key, problem="sha256", expected=AS_WRITTEN, actual=str(error))]
    return []


def _manifest_problems(store: Store, manifest: Manifest) -> list[Problem]:
    """Whether the manifest, where it came from included, is the one that history and audit log saw published."""
    kind, name = manifest.content.kind, manifest.provenance.name
    noted = newest_publication(store, kind, name, manifest.version)
    if noted is None or not noted.manifest:  # it was copied or restored here, or an older release published it
        return []
    entry = audit_chain.linked(store, audit_chain.Link(noted.entry or 0, noted.entry_hash))
    logged = json.loads(entry) if entry else {}
    known = (noted.manifest, logged.get("manifest") if logged.get("what") == manifest.ref else None)
    return [
        Problem(path=MANIFEST, problem="sha256", expected=wanted or "an entry of the audit log", actual=manifest.digest)
        for wanted in known
        if wanted != manifest.digest
    ][:1]


def refusal(manifest: Manifest, problems: list[Problem]) -> IntegrityError:
    """The error that says what is wrong with an artifact, and what to do."""
    first = problems[0]
    if first.problem == "signature":
        return IntegrityError(
            f"{manifest.ref}: {first.actual}",
            problems=[problem.model_dump() for problem in problems],
            remedy=remedy_for(manifest.ref),
        )
    text = ", ".join(f"{p.path} ({p.problem})" for p in problems[:5])
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return IntegrityError(
        f"{manifest.ref} is damaged: {text}{more}",
        problems=[problem.model_dump() for problem in problems],
        remedy=remake(manifest),
    )


def _signature_problems(store: Store, manifest: Manifest, home: Path) -> list[Problem]:
    """The store has just compared every byte with the manifest, so comparing the manifest with the signature is enough."""
    try:
        require_signed(store, home, manifest)
    except IntegrityError as error:
        text = error.message.removeprefix(f"{manifest.ref}: ")
        return [Problem(path=SIGNATURE, problem="signature", expected="one that counts", actual=text)]
    return []


def _format_problems(folder: Path) -> list[Problem]:
    """Whether every dataset is one that Megatron reads: index, sizes, ids below the vocabulary, ends of documents."""
    about = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    problems = []
    for split in about["splits"]:
        name = f"{split}_text_document"
        try:
            held = look(folder / name, largest=about["vocab_size"])
        except IntegrityError as error:
            problems.append(Problem(path=name, problem="format", expected="a Megatron dataset", actual=error.message))
            continue
        if held.sequences and held.ends != ((about["eod_id"], held.sequences),):
            ends = f"end of document {about['eod_id']} after {held.sequences} sequences"
            problems.append(Problem(path=f"{name}.bin", problem="format", expected=ends, actual=str(held.ends)))
    return problems
