"""Qualifications that were made before: what became of each machine, from the artifacts in the store.

`headway qualify --history` shows them, and a new verdict is made with them (tasks/qualification/judge.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tasks.artifacts import Qualification, parse_ref
from tasks.common.errors import IntegrityError
from tasks.qualification.judge import Past
from tasks.qualification.measured import Measurement
from tasks.qualification.remaining import as_told
from tasks.qualification.verdicts import ClusterVerdict
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, find

PAGE, PAGE_FOR_PEOPLE = "qualification.json", "qualification.html"


NEWEST, DAYS = 50, 90.0
"""How far back a verdict looks."""


@dataclass(frozen=True)
class Stored:
    """One qualification."""

    manifest: Manifest
    time: datetime
    verdict: ClusterVerdict


def stored(store: Store, cluster: str = "", *, newest: int = NEWEST, days: float = DAYS) -> Iterator[Stored]:
    """Qualifications, newest first; without those of a release that wrote them in another form."""
    since = datetime.now(UTC) - timedelta(days=days)
    results = [
        (datetime.fromisoformat(manifest.provenance.created), manifest)
        for manifest in store.manifests("qualification", cluster)
    ]
    for created, manifest in sorted(results, key=lambda item: item[0], reverse=True)[:newest]:
        if created < since:
            return
        # None for one of another form, and for one whose bytes are damaged, which is for `headway verify` to tell.
        try:
            verdict = ClusterVerdict.model_validate(_page(store, manifest).get("verdict"))
        except (ValueError, IntegrityError):
            verdict = None
        if verdict:
            yield Stored(manifest, created, verdict)


def past(results: list[Stored]) -> list[Past]:
    """What they say of each machine."""
    return [Past(time=one.time, verdict=node) for one in results for node in one.verdict.nodes]


def told(store: Store, qualification: Qualification) -> dict[str, Any]:
    """What `headway qualify --json` says of one."""
    manifest = find(store, *parse_ref(qualification.ref))
    page = _page(store, manifest)
    verdict = ClusterVerdict.model_validate(page["verdict"])
    # Where its page for people lies; empty where a release without one made it.
    pages = (file for file in manifest.content.files if file.path == PAGE_FOR_PEOPLE)
    return {
        "qualification": {"ref": qualification.ref, **qualification.metrics},
        **as_told(verdict),
        "expires": qualification.expires,
        "usable": page["usable"],
        "excluded": page["remaining"]["excluded"],
        "drained": page["drained"],
        "requests": page["requests"],
        "page": next((store.location(manifest, file) for file in pages), ""),
    }


def drained(store: Store) -> dict[str, set[str]]:
    """Machines that a qualification drained, by the name of their cluster."""
    result: dict[str, set[str]] = {}
    for one in stored(store):
        names = {str(each["node"]) for each in _page(store, one.manifest).get("drained", []) if each["done"]}
        if names:
            result.setdefault(one.manifest.provenance.name, set()).update(names)
    return result


def newest_measurement(store: Store, cluster: str) -> Measurement:
    """What the newest qualification of a cluster measured."""
    return Measurement.model_validate(_page(store, find(store, "qualification", cluster))["measured"])


def healthy_measurements(store: Store, cluster: str, sku_digest: str) -> Iterator[Measurement]:
    """What qualifications before the newest measured that found all machines healthy by the same baseline, newest first."""
    newest = find(store, "qualification", cluster).ref
    for one in stored(store, cluster):
        if (one.verdict.verdict, one.verdict.sku_digest) == ("healthy", sku_digest) and one.manifest.ref != newest:
            yield Measurement.model_validate(_page(store, one.manifest)["measured"])


def _page(store: Store, manifest: Manifest) -> dict[str, Any]:
    return dict(json.loads((store.fetch(manifest) / PAGE).read_text(encoding="utf-8")))
