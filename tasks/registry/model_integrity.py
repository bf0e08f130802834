"""A model's files where they lie and where they are served from, against what was signed; and what is done when they differ.

One finding is one event, `model.tampered`, however often and by whomever it is found: what stands is kept in `integrity/` of
the home until the bytes are right again. Who looks, and when, does not live here (deployments/watch/duties.py and the flow
revalidate). See docs/endpoint.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from tasks.artifacts import Value, parse_ref
from tasks.common.errors import HeadwayError, IntegrityError, Unknown
from tasks.common.process import locked, read_json, write_json
from tasks.config.base import digest
from tasks.config.revalidation import IntegrityConfig
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.registry.verification import problems_of
from tasks.security.audit import audited
from tasks.security.signatures import require_signed, signed_config
from tasks.security.trust import Untrusted
from tasks.serving.endpoint import ServedFrom
from tasks.serving.known import endpoint_of, known_endpoints
from tasks.serving.servers import barring, rungs_before
from tasks.storage.manifest import Manifest, Problem, check
from tasks.storage.store import Store, find

# Whether what endpoints serve, or would go back to, is signed by a key that counts today. It may have been revoked
# since.
#
# An endpoint goes on with what it serves, and the watch says so (deployments/watch); nothing is moved onto it. See
# docs/trust.md, "A revoked key".


def require_way_back(home: Path, store: Store, endpoint: str, model: str) -> None:
    """Raise IntegrityError unless a signature of the model counts that an endpoint is to go back to."""
    try:
        require_signed(store, home, find(store, *parse_ref(model)))
    except (IntegrityError, Unknown) as error:
        raise IntegrityError(
            f"endpoint/{endpoint} does not go back to {model}: {error.message.removeprefix(f'{model}: ')}",
            remedy=f"What it serves stays. If you stand by {model}: `headway sign {model} --reason TEXT`. If not, deploy another "
            f"model, or `headway endpoint stop {endpoint} --reason TEXT`.",
        ) from error


def untrusted(home: Path, store: Store, model: str) -> str:
    """Why the key that signed a model does not count; empty when it does, and for what is not signed or was changed."""
    manifest = store.manifest(*parse_ref(model))
    try:
        if manifest:
            require_signed(store, home, manifest)
    except Untrusted as error:
        return error.message
    except IntegrityError:
        return ""
    return ""


class Untrusting(NamedTuple):
    """An endpoint in service whose model is signed by a key that does not count."""

    endpoint: str
    model: str
    why: str


def untrusted_endpoints(home: Path, store: Store) -> list[Untrusting]:
    """The endpoints that serve what a key signed that was revoked since, is not known, or may not sign it."""
    results = []
    for name in known_endpoints(home):
        served = endpoint_of(home, name).serves_from()
        why = untrusted(home, store, served.model_ref) if served else ""
        if served and why and (served.running or _answers(home, name)):
            results.append(Untrusting(name, served.model_ref, why))
    return results


def bar_rungs(home: Path, store: Store) -> list[Untrusting]:
    """Keep models whose key does not count from answering for the one in service, and let those answer whose key counts again.

    Returns what was barred that was not yet.
    """
    results = []
    for name in known_endpoints(home):
        folder = home / "endpoints" / name
        for model in sorted(rungs_before(folder)):
            mark, why = barring(folder, model), untrusted(home, store, model)
            if why and not mark.exists():
                mark.parent.mkdir(exist_ok=True)
                mark.touch()
                results.append(Untrusting(name, model, why))
            elif not why:
                mark.unlink(missing_ok=True)
    return results


def _answers(home: Path, name: str) -> bool:
    """Whether an endpoint that runs elsewhere serves; one that cannot be asked now does, as far as anybody knows."""
    try:
        return endpoint_of(home, name).observe() is not None
    except (HeadwayError, ValueError):
        return True


STORE = "store"
"""Where a finding is that no endpoint has."""


class Finding(Value):
    """One place where a model's files are not what was signed."""

    where: str
    """`store`, or endpoint/NAME."""
    place: str
    """The folder, or the address in the store."""
    problems: tuple[Problem, ...]
    untrusted: bool = False
    """Whether every byte is as it was signed, and only the key counts no more."""


def findings(home: Path, store: Store, model: str) -> list[Finding]:
    """Every place where the files of a model (its whole reference) are not what was signed. Every byte is read, once a place.

    A manifest that is gone or was edited, its schema too, is a finding as well, and so is every endpoint that serves from it:
    nobody can say what its files should be.
    """
    try:
        manifest, problems = problems_of(store, model, keys=home / "keys")
    except (Unknown, IntegrityError, ValueError) as error:
        lost = Problem(path="manifest.json", problem="signature", expected="as it was signed", actual=str(error))
        unproven = [
            Finding(where=f"endpoint/{name}", place=str(served.folder), problems=(lost,))
            for name, served in serving(home, model).items()
            if served.running
        ]
        return [Finding(where=STORE, place=store.uri, problems=(lost,)), *unproven]
    only_key = bool(problems) and problems[0].problem == "signature" and untrusted(home, store, model) != ""
    place = store.uri_of(manifest)
    existing = [Finding(where=STORE, place=place, problems=tuple(problems), untrusted=only_key)] if problems else []
    return existing + _where_served(home, store, manifest, stored=[] if only_key else problems)


def _where_served(home: Path, store: Store, model: Manifest, *, stored: list[Problem]) -> list[Finding]:
    """`stored` is what is wrong where it is stored: an endpoint that serves from there is not read again."""
    results = []
    for name, served in serving(home, model.ref).items():
        if served.running or served.folder.exists():  # a cache may be deleted while nobody serves from it
            first = model.content.files[0]
            is_stored = store.location(model, first) == str(served.folder / first.path)
            problems = stored if is_stored else check(served.folder, model.content.files)
            if not served.running:  # a cache that is being filled is not all there yet
                problems = [problem for problem in problems if problem.problem != "missing"]
            problems = problems + _handed_otherwise(served, model)
            if problems:
                results.append(Finding(where=f"endpoint/{name}", place=str(served.folder), problems=tuple(problems)))
    return results


def serving(home: Path, model: str) -> dict[str, ServedFrom]:
    """The endpoints that serve a model, or served it when they were stopped."""
    result = {name: endpoint_of(home, name).serves_from() for name in known_endpoints(home)}
    return {name: served for name, served in result.items() if served and served.model_ref == model}


def _handed_otherwise(served: ServedFrom, model: Manifest) -> list[Problem]:
    """A server that starts again checks its files against what it was handed: that must be what was signed.

    One that an older release started was handed nothing: its files are compared with the manifest all the same.
    """
    if not served.files:
        return []
    if [dict(file) for file in served.files] == [file.model_dump() for file in model.content.files]:
        return []
    return [Problem(path="serve.json", problem="sha256", expected="the digests of the manifest")]


def act_on(home: Path, store: Store, model: str, results: list[Finding], *, source: str) -> list[str]:
    """Say what was found, once, and stop what serves from changed files where that is wanted; names the endpoints stopped.

    A key that counts no more changed nothing: what is served goes on being served, and an alert of its own says so
    (model_integrity.py). `source` is who found it, as headway/FLOW. Without a finding, what stood before is over. Raises what
    the store raises.
    """
    results = [one for one in results if not one.untrusted]
    with locked(home / "locks" / "integrity"):
        _tell(home, model, results, source=source)
    if not results or not stops(home, store, model):
        return []
    changed = [one.where.removeprefix("endpoint/") for one in results if one.where != STORE]
    reason = f"its files are not what was signed: {told(results)}"
    return [name for name in changed if take_out_of_service(home, store, name, reason=reason, serving=model)]


def take_out_of_service(home: Path, store: Store, endpoint: str, *, reason: str, serving: str = "") -> bool:
    """Stop an endpoint, with an entry in the audit log; whether there was anything to stop.

    With `serving`, a reference, only while it serves that: a deploy may have come in between.
    """
    port = endpoint_of(home, endpoint)
    before = port.serves_from()
    if before and before.running and serving in ("", before.model_ref):
        port.ask_back(reason)  # whoever deploys holds the lock, for as long as the steps of its rollout take
    with locked(home / "endpoints" / f"{endpoint}.lock"):
        served = port.serves_from()
        if served is None or not served.running or serving not in ("", served.model_ref):
            return False
        output = {"what": f"endpoint/{endpoint}", "reason": reason, "before": served.model_ref}
        with audited(store, "stop endpoint", right="roll_back", **output):
            port.stop()
    return True


def stops(home: Path, store: Store, model: str) -> bool:
    """Whether endpoints that serve changed files of a model are stopped: as its configuration says, when that is as signed."""
    try:
        manifest = store.manifest(*parse_ref(model))
        config = signed_config(home, store, manifest) if manifest else {}
        part = (config.get("revalidation") or {}).get("integrity") or {}
        return IntegrityConfig.model_validate(part).stop_endpoints
    except (IntegrityError, ValueError):  # what is not as it was signed, or cannot be read, has no say
        return True


def told(results: list[Finding]) -> str:
    """Findings in one line: the first places and files."""
    messages = [
        f"{one.where}: {problem.actual if one.untrusted else f'{problem.path} ({problem.problem})'}"
        for one in results
        for problem in one.problems
    ]
    return ", ".join(messages[:5]) + (f" and {len(messages) - 5} more" if len(messages) > 5 else "")


def standing(home: Path) -> dict[str, dict[str, Any]]:
    """What stands, by the reference of the model: `said`, `digest`, and `since` in seconds since the epoch."""
    notes = (read_json(path) or {} for path in sorted((home / "integrity").glob("*.json")))
    return {str(note["model"]): note for note in notes if "model" in note}


def forget(home: Path, model: str) -> None:
    """What stood about a model is over: it is neither a champion nor served any more."""
    _note_of(home, model).unlink(missing_ok=True)


def _tell(home: Path, model: str, results: list[Finding], *, source: str) -> None:
    """Keep what stands, and put it into the ledger once: a kill between the two loses nothing."""
    if not results:
        forget(home, model)
        return
    before = read_json(_note_of(home, model)) or {}
    problems = digest(sorted({problem.model_dump_json() for one in results for problem in one.problems}))
    note = {**before, "model": model, "said": told(results), "digest": problems}
    if before.get("digest") != problems:
        note |= {"since": time.time(), "told": False}
        write_json(_note_of(home, model), note)
    if not note["told"]:
        # Changed once more after it was mended, a model is told of once more: the object has the time as well.
        identity = f"{note['model']}#{note['digest'][:16]}.{note['since']:.3f}"
        Ledger(home).receive(
            Event(
                name="model.tampered",
                subject="/".join(parse_ref(note["model"])[:2]),
                source=source,
                identity=identity,
                object=identity,
                occurred=note["since"],
                channel="headway",
                data={"model": note["model"], "said": note["said"], "places": [one.where for one in results]},
            )
        )
        write_json(_note_of(home, model), {**note, "told": True})


def _note_of(home: Path, model: str) -> Path:
    _, name, version = parse_ref(model)
    return home / "integrity" / f"{name}@{version[:16]}.json"
