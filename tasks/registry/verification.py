"""Every byte against the manifest, checkpoints and models against their signatures, token files against their format."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.common.seal import has_seal, opened, opened_lines
from tasks.data.tokenizing.checking import look
from tasks.formats.mmididx import prefixes
from tasks.registry.approvals import Approval
from tasks.security import audit_chain
from tasks.security.signatures import KINDS, remedy_for, require_signed
from tasks.signing.bundle import SIGNATURE
from tasks.storage.history import Change, newest_publication
from tasks.storage.manifest import Manifest, Problem, remake
from tasks.storage.store import Document, Store, find

# Documents against the chain of the audit log: a ref that was moved, a change of history, an approval, a seal that is
# gone.
#
# A seal says that a document is as it was written; the chain says that it was written, and that it is still there. Only
# what was written after the audit log says that seals came in must have one: documents of releases before are sound
# without.


ANOTHER_LOOK_SECONDS = 1.0
"""After which what was wrong is looked at again: somebody may have been between an entry and its change."""
_CHANGES = ("publish", "copy", "rollback", "delete")
"""Actions of the audit log that are changes of history too; the first word of the entry's action."""
NO_SEAL = Problem(path="", problem="sha256", expected="the seal that all that is written now gets", actual="no seal")
Found = dict[str, Problem]


class Chain(NamedTuple):
    """What the audit log says, oldest first, without what came to nothing."""

    entries: dict[int, dict[str, Any]]
    hashes: dict[int, str]

    @property
    def sealing(self) -> tuple[int, float]:
        """Number and time of the first entry that a Headway wrote which seals; beyond all others where there is none.

        In a home that began with it, everything has a seal, also what does not say when it was written.
        """
        number = next((number for number, entry in self.entries.items() if entry.get("seals")), None)
        if number is None:
            return 1 << 62, float("inf")
        return number, float(self.entries[number]["time"]) if number > 1 else -1.0


def chained(store: Store) -> Found:
    """What is not as the audit log says, by the key of the document, or the reference of the manifest."""
    result = dict(_all(store))
    if result:
        time.sleep(ANOTHER_LOOK_SECONDS)
        again = dict(_all(store))
        result = {key: again[key] for key in result if key in again}
    return result


def lacks_seal(data: bytes, *, since: float) -> bool:
    """Whether JSON without a seal says of itself that it was written after `since`, when all that was written got one."""
    if not data.endswith(b"}") or data == b"{}" or has_seal(data):
        return False
    try:
        return _time_of(json.loads(data)) > since
    except ValueError:
        return False


def read_chain(store: Store) -> Chain:
    """The audit log as it is; whether it holds together is `audit_chain.check`."""
    data = dict(sorted(audit_chain.backwards(store)))
    entries = {number: _object(each) for number, each in data.items()}
    failed = {entry.get("of") for entry in entries.values() if entry.get("outcome") == "failed"}
    payload = {n: entry for n, entry in entries.items() if n not in failed and entry.get("outcome", "done") == "done"}
    return Chain(payload, {number: audit_chain.hash_of(each) for number, each in data.items()})


def _all(store: Store) -> Iterator[tuple[str, Problem]]:
    chain = read_chain(store)
    documents = {key: result for key in store.list("") if (result := store.read(key))}
    yield from _without_seal(chain, documents)
    yield from _refs(chain, documents)
    yield from _histories(chain, documents)
    yield from _approvals(chain, documents)


def _without_seal(chain: Chain, documents: Mapping[str, Document]) -> Iterator[tuple[str, Problem]]:
    """Documents that must have a seal: by their own time, by their number, or by a neighbour before them."""
    number, since = chain.sealing
    sealed_before: set[str] = set()
    for key, document in sorted(documents.items()):
        folder, _, name = key.rpartition("/")
        if key.startswith(f"{audit_chain.FOLDER}/"):
            continue
        if has_seal(document.written):
            sealed_before |= {folder} if name.removesuffix(".json").isdigit() else set()
            continue
        is_head = key == audit_chain.HEAD and int(_object(document.written).get("number", 0)) >= number
        if is_head or folder in sealed_before or lacks_seal(document.written, since=since):
            yield key, NO_SEAL.model_copy(update={"path": key})


def _refs(chain: Chain, documents: Mapping[str, Document]) -> Iterator[tuple[str, Problem]]:
    """Each ref points to where its last move in the audit log went."""
    moves = {
        str(e["what"]): (n, e) for n, e in chain.entries.items() if e.get("action") == "move_ref" and e.get("what")
    }
    were_champion = {e.get("after") for _, e in moves.values()} | {e.get("before") for _, e in moves.values()}
    for what, (number, entry) in moves.items():
        key, after = f"{what}.json", entry.get("after")
        text = f"{after}, by entry {number} of the audit log"
        if key not in documents:
            yield key, Problem(path=key, problem="missing", expected=text)
            continue
        ref = _readable(documents[key])
        if ref is None:
            continue
        ended = what.endswith("/challenger") and ref.get("target") is None and after in were_champion
        if ref.get("target") != after and not ended:
            yield key, _problem(key, text, str(ref.get("target")))
        elif number >= chain.sealing[0] and not has_seal(documents[key].written):
            yield key, NO_SEAL.model_copy(update={"path": key})
    for key, document in documents.items():
        if key.startswith("refs/") and key.removesuffix(".json") not in moves and has_seal(document.written):
            yield key, _problem(key, "a move in the audit log", "none")


def _histories(chain: Chain, documents: Mapping[str, Document]) -> Iterator[tuple[str, Problem]]:
    """Each change of a name is in the audit log, and what the audit log says of it is a change."""
    names: dict[str, dict[str, Change | None]] = defaultdict(dict)
    for key, document in sorted(documents.items()):
        if key.startswith("history/"):
            try:
                names[key.rpartition("/")[0]][key] = Change.model_validate(_readable(document))
            except ValueError:
                names[key.rpartition("/")[0]][key] = None
    wanted: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for number, entry in chain.entries.items():
        effect = _effect(entry)
        if effect and number >= chain.sealing[0]:
            wanted[effect[0]][effect[1:]] = number  # of a command that was killed and given again, the last one
    for folder in sorted({*names, *wanted}):
        changes = {key: change for key, change in names[folder].items() if change}
        for key, change in changes.items():
            if why := _unknown(chain, folder, change):
                yield key, _problem(key, "an entry of the audit log", why)
        if len(changes) == len(names[folder]):  # what cannot be read is told by itself
            yield from _gaps(folder, list(changes.items()), wanted[folder])


def _gaps(
    folder: str, changes: list[tuple[str, Change]], wanted: Mapping[tuple[str, str], int]
) -> Iterator[tuple[str, Problem]]:
    """What is missing of a history: by its own numbers, and by the entries of the audit log that tell of a change."""
    for place, (key, change) in enumerate(changes, 1):
        if change.number != place:
            yield key, _problem(key, f"number {place}", f"number {change.number}")
    known = {change.entry for _, change in changes}
    listed = {(change.action, change.version) for _, change in changes if not change.current}
    for (action, version), number in wanted.items():
        if number not in known and (action, version) not in listed:
            text = f"{action} {version[:12]}, by entry {number} of the audit log"
            yield f"{folder} (entry {number})", Problem(path=folder, problem="missing", expected=text)


def _effect(entry: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The history that an entry is also in, the action there, and the version; None for what changes none."""
    action, (ref, _, where) = str(entry.get("action")).partition(" ")[0], str(entry.get("what")).partition(" ")
    name, _, version = ref.partition("@")
    if action not in _CHANGES or not version or where.startswith("to "):  # sent from here, not brought here
        return None
    if action != "delete" and entry.get("before") == entry.get("after"):
        return None  # it was current already
    return f"history/{name}", action, version


def _unknown(chain: Chain, folder: str, change: Change) -> str:
    """Why a change is not in the audit log; empty when it is, or when an older release wrote it, which noted no entry."""
    if change.entry is None:
        return "it names none" if change.time > chain.sealing[1] else ""
    entry = chain.entries.get(change.entry, {})
    if chain.hashes.get(change.entry) != change.entry_hash:
        return f"entry {change.entry} is another one"
    kind_name = folder.removeprefix("history/")
    ref = f"{kind_name}@{change.version}"
    action, what = str(entry.get("action")).partition(" ")[0], str(entry.get("what"))
    same = action == change.action and (action == "restore" or what.partition(" ")[0] == ref)
    return "" if same else f"entry {change.entry} says otherwise"


def _approvals(chain: Chain, documents: Mapping[str, Document]) -> Iterator[tuple[str, Problem]]:
    """Each approval lies where its question is, and its entry stands."""
    for key, document in documents.items():
        if not key.startswith("journal/approvals/"):
            continue
        kept = _readable(document) or {}
        if "approval" not in kept or "entry" not in kept:
            continue  # of a release whose approvals count no more
        try:
            place = Approval.model_validate(kept["approval"]).place
            number, hash_ = int(kept["entry"]["number"]), str(kept["entry"]["hash"])
        except (ValueError, TypeError, KeyError):
            yield key, _problem(key, "an approval", "something else")
            continue
        if key.rpartition("/")[0] != f"journal/{place}":
            yield key, _problem(key, f"journal/{place}", "an approval of another question")
        elif chain.hashes.get(number) != hash_:
            yield key, _problem(key, "an entry of the audit log", f"entry {number} is another one")


def _time_of(value: Any) -> float:
    """When a document says that it was written, in seconds since 1970; 0 where it does not say."""
    if not isinstance(value, dict):
        return 0.0
    parts = [value, *(value[name] for name in ("provenance", "approval") if isinstance(value.get(name), dict))]
    return max((seconds(part.get(name)) for part in parts for name in ("time", "created", "since")), default=0.0)


def seconds(output: Any) -> float:
    """A time as seconds since 1970, from such a number or from ISO 8601; 0 for anything else."""
    if isinstance(output, int | float):
        return float(output)
    try:
        return datetime.fromisoformat(output).timestamp() if isinstance(output, str) else 0.0
    except ValueError:
        return 0.0


def _problem(path: str, expected: str, actual: str) -> Problem:
    return Problem(path=path, problem="sha256", expected=expected, actual=actual)


def _readable(document: Document) -> dict[str, Any] | None:
    """What a document says; None of one that is damaged, which is told by itself."""
    try:
        return _object(document.data)
    except IntegrityError:
        return None


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


MANIFEST = "manifest.json"
AS_WRITTEN = "as it was written"


def problems_of(store: Store, ref: str, *, keys: Path) -> tuple[Manifest, list[Problem]]:
    """The manifest that a reference means, and everything that is wrong with what it names.

    `keys` is the home's folder of keys; the trust policy lies beside it.
    """
    manifest = find(store, *parse_ref(ref))
    problems = [*store.verify(manifest), *_manifest_problems(store, manifest)]
    if manifest.content.kind in KINDS and not problems:
        # The store has just compared every byte with the manifest, so comparing the manifest with the signature is
        # enough.
        try:
            require_signed(store, keys.parent, manifest)
        except IntegrityError as error:
            text = error.message.removeprefix(f"{manifest.ref}: ")
            problems = [Problem(path=SIGNATURE, problem="signature", expected="one that counts", actual=text)]
        else:
            problems = []
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


def _format_problems(folder: Path) -> list[Problem]:
    """Whether every dataset is one that Megatron reads: index, sizes, ids below the vocabulary, ends of documents."""
    about = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    problems = []
    for prefix in (prefix for split in about["splits"] for prefix in prefixes(folder, split)):
        name = prefix.name
        try:
            held = look(prefix, largest=about["vocab_size"])
        except IntegrityError as error:
            problems.append(Problem(path=name, problem="format", expected="a Megatron dataset", actual=error.message))
            continue
        if held.sequences and held.ends != ((about["eod_id"], held.sequences),):
            ends = f"end of document {about['eod_id']} after {held.sequences} sequences"
            problems.append(Problem(path=f"{name}.bin", problem="format", expected=ends, actual=str(held.ends)))
    return problems
