"""What the home's own records show of how models are made and served: the half of the audit that Azure does not see."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError
from tasks.common.process import alive, read_json
from tasks.registry.backup.snapshot import backups
from tasks.registry.qualifications import DAYS as QUALIFIED_DAYS
from tasks.registry.qualifications import Stored, stored
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions, learnt_from, revalidations
from tasks.report.estate.record import Record
from tasks.report.estate.trainings import TRAININGS
from tasks.report.rehearsals import last_rehearsal
from tasks.security import audit_chain
from tasks.security.signatures import require_signed
from tasks.storage import open_named, open_store
from tasks.storage.settings import load_stores

DAYS = 30
"""How old the last revalidation of a champion, and the last rehearsal, may be."""


def records(home: Path) -> dict[str, Record]:
    """Every record by its name. What cannot be read is not known."""
    if not home.is_dir():
        return {name: Record(None, f"there is no home {home}") for name in RECORDS}
    result = {}
    for name, look in RECORDS.items():
        try:
            result[name] = look(home)
        except (HeadwayError, ValueError, OSError) as error:
            result[name] = Record(None, f"it cannot be read: {error}")
    return result


def _champions(home: Path) -> dict[str, str]:
    """The champion of each model."""
    store = open_store(home)
    return {name: ref for name in champions(store) if (ref := read_ref(store, f"{name}/champion"))}


def _of_each(home: Path, wrong: Callable[[str, str], str], so: str) -> Record:
    """What holds of every champion; `wrong` says what does not hold of one, given its name and reference."""
    each = _champions(home)
    if not each:
        return Record(None, "no model has a champion")
    problems = [text for name, ref in each.items() if (text := wrong(name, ref))]
    return Record(not problems, "; ".join(problems) or f"{so}: {', '.join(each)}")


def signatures(home: Path) -> Record:
    """A signature that counts, of what the manifest says; `headway verify` reads the bytes too."""
    store = open_store(home)

    def wrong(name: str, ref: str) -> str:
        manifest = store.manifest(*parse_ref(ref))
        if manifest is None:
            return f"{name}: its manifest is gone"
        try:
            require_signed(store, home, manifest)
        except HeadwayError as error:
            return f"{name}: {error.message}"
        return ""

    return _of_each(home, wrong, "signed by a key that counts")


def drift(home: Path) -> Record:
    store, since = open_store(home), time.time() - DAYS * 86400

    def wrong(name: str, ref: str) -> str:
        lately = any(each["time"] >= since and each.get("champion") == ref for each in revalidations(store, name))
        return "" if lately else f"{name} was not revalidated in the last {DAYS} days"

    return _of_each(home, wrong, "revalidated")


def lineage(home: Path) -> Record:
    store = open_store(home)
    return _of_each(
        home, lambda name, ref: "" if learnt_from(store, ref) else f"{name} names no dataset", "the dataset is named"
    )


def qualification(home: Path) -> Record:
    """The newest one of each cluster counts."""
    newest: dict[str, Stored] = {}
    store = open_store(home)
    for one in stored(store):
        newest.setdefault(one.manifest.provenance.name, one)
    if not newest and any(True for _ in store.manifests("checkpoint")):
        return Record(False, f"models were trained, and no cluster was qualified in the last {QUALIFIED_DAYS:.0f} days")
    if not newest:
        return Record(None, f"no cluster was qualified in the last {QUALIFIED_DAYS:.0f} days")
    bad = [f"{name}: {one.verdict.verdict}" for name, one in newest.items() if one.verdict.verdict != "healthy"]
    return Record(not bad, "; ".join(bad) or f"healthy: {', '.join(newest)}")


def backup(home: Path) -> Record:
    """Backups in folders that stores.yaml names. That one was restored in a drill leaves no record."""
    stores = load_stores(home)
    folders = [
        name
        for name, one in stores.stores.items()
        if name != stores.use and not one.uri.startswith(("az:", "azureml:"))
    ]
    newest = [(name, made[0].provenance.created) for name in folders if (made := backups(open_named(home, name)))]
    if not newest:
        return Record(
            None, "no folder of stores.yaml has one; other stores were not asked, and a drill leaves no record"
        )
    return Record(None, f"{newest[0][0]} has one of {newest[0][1]}; a drill leaves no record: headway backup --drill")


def watch(home: Path) -> Record:
    if not (home / "platform").is_dir():
        return Record(None, "the platform has not run in this home")
    runs = alive(read_json(home / "platform" / "watch" / "handle.json"))
    return Record(True, "it runs") if runs else Record(None, "it does not run on this machine; it may on another")


def fallback(home: Path) -> Record:
    endpoints = {path.parent.name: read_json(path) or {} for path in sorted(home.glob("endpoints/*/endpoint.json"))}
    if not endpoints:
        return Record(None, "there is no endpoint")
    alone = [name for name, one in endpoints.items() if not (one.get("previous") or {}).get("model_ref")]
    return Record(not alone, f"none before it: {', '.join(alone)}" if alone else ", ".join(endpoints))


def store(home: Path) -> Record:
    stores = load_stores(home)
    config = stores.stores.get(stores.jobs or stores.use)
    uri = config.uri if config else "a folder of the home"
    return Record(uri.startswith("az://"), uri)


def resumed(home: Path) -> Record:
    for path in home.glob("jobs/*/result.json"):
        if (read_json(path) or {}).get("resumed_from_step") is not None:
            return Record(True, path.parts[-2])
    return Record(None, "no folder of a job shows one")


def rehearsed(home: Path) -> Record:
    """The newest rehearsal; what it could not try has not been shown."""
    last = last_rehearsal(home)
    if last is None:
        return Record(None, "there was no rehearsal in this home")
    age = datetime.now(UTC) - datetime.fromisoformat(last["began"])
    words = f"of {last['began'][:10]}: {last['passed']} passed, {last['failed']} failed, {last['not_tried']} not tried"
    if last["failed"] or last["broken"] or not last["passed"]:
        return Record(False, "; ".join([words, *last["broken"]]))
    return Record(True, words) if age.days < DAYS else Record(None, f"the last one is {age.days} days old: {words}")


def audit_log(home: Path) -> Record:
    checked = audit_chain.check(open_store(home))
    if checked.broken:
        return Record(False, f"the audit log is broken at entry {checked.broken.number}: {checked.broken.problem}")
    return Record(bool(checked.entries) or None, f"{checked.entries:,} entries, each with the hash of the one before")


def onnx(home: Path) -> Record:
    """Champions that ONNX Runtime can serve; others are served by vLLM."""
    store = open_store(home)
    manifests = {name: store.manifest(*parse_ref(ref)) for name, ref in _champions(home).items()}
    if not manifests:
        return Record(None, "no model has a champion")
    such = [
        name
        for name, one in manifests.items()
        if one and any(file.path.endswith(".onnx") for file in one.content.files)
    ]
    return Record(True, ", ".join(such)) if such else Record(None, "no champion is of ONNX", applies=False)


def _made(kind: str, home: Path) -> Record:
    """An artifact of a kind is there; where models were trained without one, that is wrong."""
    store = open_store(home)
    for one in store.manifests(kind):
        return Record(True, f"{kind}/{one.provenance.name}")
    trained = any(True for _ in store.manifests("checkpoint"))
    return Record(False if trained else None, f"there is no {kind}")


RECORDS: dict[str, Callable[[Path], Record]] = {
    **{
        each.__name__: each
        for each in (
            signatures,
            drift,
            lineage,
            qualification,
            backup,
            watch,
            fallback,
            store,
            resumed,
            rehearsed,
            audit_log,
            onnx,
        )
    },
    **{f"has_{kind}": partial(_made, kind) for kind in ("tokens", "plan", "evaluation")},
    **TRAININGS,
}
