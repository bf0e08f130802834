"""When champions were measured again on new data, with which verdict: kept in the store, asked by alerts and by the next one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from tasks.artifacts import parse_ref
from tasks.registry.records import StoreJournal
from tasks.storage.store import Store

LEARNT_FROM = ("checkpoint", "tokens", "dataset")
"""The way from a model down to its data."""


def note_revalidation(journal: StoreJournal, model: str, verdict: dict[str, Any]) -> None:
    """Note what became of a revalidation: at least `champion`, its reference, `passed`, `verdict` and `dataset`."""
    journal.append(f"revalidations/{model}", {**verdict, "time": time.time()})


def revalidations(store: Store, model: str) -> Iterator[dict[str, Any]]:
    """What was noted, newest first. Notes of releases before verdicts get one: `valid` or `degraded`."""
    journal = StoreJournal(store)
    for key in reversed(journal.list(f"revalidations/{model}")):
        noted = journal.get(key)
        if noted:
            yield {"verdict": "valid" if noted["passed"] else "degraded", **noted}


def last_revalidated(store: Store, model: str) -> float | None:
    """When the champion of a model last passed, else when it became champion, in seconds since the epoch; None without one."""
    champion = _champion(store, model)
    if champion is None:
        return None
    passed = (each["time"] for each in revalidations(store, model) if each["passed"] and _is_of(each, champion))
    return float(max(next(passed, 0.0), champion["time"]))


def last_looked_at(store: Store, model: str) -> float | None:
    """When the champion was last revalidated, whatever the verdict, else when it became champion; None without one."""
    champion = _champion(store, model)
    if champion is None:
        return None
    looked = (each["time"] for each in revalidations(store, model) if _is_of(each, champion))
    return float(max(next(looked, 0.0), champion["time"]))


def answers_judged(store: Store, champion: str, *, fewest: int) -> float:
    """Until when a champion's answers were looked at: its newest revalidation that had enough of them, else its promotion.

    Windows that were too small grow together, and answers that nobody judged never become what is usual.
    """
    champion_since = _champion(store, parse_ref(champion)[1]) or {"time": 0.0}
    enough = (
        each["time"]
        for each in revalidations(store, parse_ref(champion)[1])
        if each["champion"] == champion and each.get("answers", 0) >= fewest
    )
    return float(max(next(enough, 0.0), champion_since["time"]))


def degraded_in_a_row(store: Store, champion: str) -> tuple[str, ...]:
    """References of the datasets on which a champion was found degraded since it was last found valid, oldest first.

    The same data twice counts once, as do two datasets that share documents (the window of a note says which counted); a verdict
    that is neither says nothing and is passed over. What was found before it became
    champion again, after a rollback, does not count.
    """
    results: list[str] = []
    champion_since = _champion(store, parse_ref(champion)[1])
    since = champion_since["time"] if champion_since and champion_since["target"] == champion else 0.0
    for noted in revalidations(store, parse_ref(champion)[1]):
        if noted["time"] < since:
            break
        if noted["champion"] != champion or noted["verdict"] not in ("valid", "degraded"):
            continue
        if noted["verdict"] == "valid":
            break
        counted = noted["dataset"] in (noted.get("window") or {}).get("data", (noted["dataset"],))
        if counted and noted["dataset"] not in results:
            results.append(noted["dataset"])
    return tuple(reversed(results))


def documents_looked_at(store: Store, champion: str) -> dict[str, tuple[str, ...]]:
    """A sample of the documents of each dataset of `degraded_in_a_row`, where a note tells them; by reference."""
    row = degraded_in_a_row(store, champion)
    notes = (noted for noted in revalidations(store, parse_ref(champion)[1]) if noted["dataset"] in row)
    return {noted["dataset"]: tuple(noted["documents"]) for noted in notes if noted.get("documents")}


def learnt_from(store: Store, model: str) -> str | None:
    """Reference of the dataset that a model was trained on: what its data is held against. None where the way is broken."""
    ref = model
    for kind in LEARNT_FROM:
        manifest = store.manifest(*parse_ref(ref))
        inputs = manifest.provenance.inputs if manifest else ()
        ref = next((each for each in inputs if each.startswith(f"{kind}/")), "")
        if not ref:
            return None
    return ref


def champions(store: Store) -> list[str]:
    """Names of all models that have a champion."""
    keys = store.list("refs")
    return [key.removeprefix("refs/").removesuffix("/champion.json") for key in keys if key.endswith("/champion.json")]


def _champion(store: Store, model: str) -> dict[str, Any] | None:
    document = store.read(f"refs/{model}/champion.json")
    return json.loads(document.data) if document else None


def _is_of(noted: dict[str, Any], champion: dict[str, Any]) -> bool:
    return bool(noted["champion"] == champion["target"])
