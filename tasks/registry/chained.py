"""Documents against the chain of the audit log: a ref that was moved, a change of history, an approval, a seal that is gone.

A seal says that a document is as it was written; the chain says that it was written, and that it is still there. Only what was
written after the audit log says that seals came in must have one: documents of releases before are sound without. Who asks is
verification.py.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from tasks.common.errors import IntegrityError
from tasks.common.seal import has_seal
from tasks.registry.approvals import Approval
from tasks.security import audit_chain
from tasks.storage.history import Change
from tasks.storage.manifest import Problem
from tasks.storage.store import Document, Store

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
    crowned = {e.get("after") for _, e in moves.values()} | {e.get("before") for _, e in moves.values()}
    for what, (number, entry) in moves.items():
        key, after = f"{what}.json", entry.get("after")
        text = f"{after}, by entry {number} of the audit log"
        if key not in documents:
            yield key, Problem(path=key, problem="missing", expected=text)
            continue
        ref = _readable(documents[key])
        if ref is None:
            continue
        ended = what.endswith("/challenger") and ref.get("target") is None and after in crowned
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
            names[key.rpartition("/")[0]][key] = _change(document)
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


def _change(document: Document) -> Change | None:
    try:
        return Change.model_validate(_readable(document))
    except ValueError:
        return None
