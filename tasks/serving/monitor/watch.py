"""The answers of endpoints in service, window after window: which stand out, and what is said of it, once.

A window is over when it holds enough answers, and is judged once, so that the false-alarm rate is that of a window. One that
cannot be judged, because its answers come in a few bursts, goes on until it is as long as its reference. The first one
of an endpoint whose model brings no reference of its own is not judged: later ones are compared with it. Two in a row
must stand out before `endpoint.anomaly` is said; too many failing requests, and answers that callers call wrong, are said at
once. What stands is over when no window stood out for a while: an alarm that flaps is one. A column that comes to stand out
beside what stands, two windows in a row, is said once too: slow answers do not hide short ones. Labels come late and few: they
are a window of their own, which is over when it holds enough of them.

How answers are judged is tasks/serving/monitor/anomalies.py. Who looks, and when: deployments/watch/duties.py while the
platform is up, the flow watch, `headway watch`; they share what they know. See docs/watch.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tasks.artifacts import parse_ref
from tasks.common import process
from tasks.common.errors import IntegrityError
from tasks.config.revalidation import ServiceConfig
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.formats.answers import Answer, Label
from tasks.security.signatures import signed_config
from tasks.serving.known import endpoint_of, known_endpoints
from tasks.serving.local.endpoint import outputs_of
from tasks.serving.monitor.anomalies import anomalies
from tasks.serving.monitor.blocks import NAME as ACCURACY
from tasks.serving.monitor.measures import MEASURES, Told, ended, mean, read
from tasks.storage import open_store

# Measures and accuracy of answers over time: a row a window of as many answers, the newest last. Pure; judges nothing.


def series(payload: Told, *, requests: int, windows: int) -> list[dict[str, Any]]:
    """The last windows of so many requests each: `begins`, `ends` (seconds since the epoch), means, `labels` and `accuracy`.

    The newest window may hold fewer. A label belongs to the window in which its request was asked: accuracy is that of the
    answers of a time, whenever callers said so.
    """
    cut = [payload.answers[place : place + requests] for place in range(0, len(payload.answers), requests)]
    edges = [window[0].time for window in cut[1:]] + [math.inf]
    rows = []
    for window, edge in zip(cut, edges, strict=False):
        labels = [label for label in payload.labels if window[0].time <= label.asked < edge]
        rows.append(_row(window, labels))
    return rows[-windows:]


def _row(window: Sequence[Answer], labels: Sequence[Label]) -> dict[str, Any]:
    return {
        "begins": window[0].time,
        "ends": ended(window[-1]),
        "requests": len(window),
        **{measure.name: mean(measure, window) for measure in MEASURES},
        "labels": len(labels),
        "accuracy": fmean(label.right for label in labels) if labels else None,
    }


COOL_DOWN_SECONDS = 1800.0
SOURCE = "headway/watch"
MOST_EVIDENCE = 50
"""Files of an endpoint; the oldest go first."""


class Followed(NamedTuple):
    """An endpoint as it is followed. Times are seconds since the epoch."""

    model: str
    since: float
    """Where the window begins that is not judged yet."""
    before: float | None = None
    """Where the first window began that stood out: what was answered from then on is no reference."""
    said: dict[str, Any] | None = None
    """What was said of what stands, with the time of the last window that stood out as `last`; None: nothing stands."""
    newly: tuple[str, ...] = ()
    """The columns of the last window that stood out and were not said."""
    labels_since: float | None = None
    """Where the window of labels begins that is not judged yet; None in what an older release kept: as the answers' window."""


class Seen(NamedTuple):
    """One look at one endpoint."""

    endpoint: str
    told: dict[str, Any] | None
    """What `anomalies` says of the window; None where nothing was written yet."""
    said: tuple[str, ...]
    """The columns that an event was said of at this look."""
    evidence: str
    """The file with all that was found, where an event was said."""
    standing: tuple[str, ...]
    """The columns of all that stands."""


def look(home: Path, now: float, *, only: tuple[str, ...] = (), dry: bool = False) -> list[Seen]:
    """Look at every endpoint in service, or only at some. One that was not, or serves another model, is followed from now on.

    `dry`: nothing is said or kept, and no window is over by it.
    """
    path = _state(home)
    with process.locked(home / "locks" / "anomalies"):
        kept, after, seen = _read(path), {}, []
        for name in known_endpoints(home):
            served = endpoint_of(home, name).serves_from()
            if served is None or not served.running:
                continue
            before = kept.get(name)
            fresh = Followed(served.model_ref, now, labels_since=now)
            after[name] = before if before and before.model == served.model_ref else fresh
            if not only or name in only:
                after[name], one = _follow(home, name, after[name], now=now, dry=dry)
                seen.append(one)
        if after != kept and not dry:
            process.write_json(path, {name: followed._asdict() for name, followed in after.items()})
    return seen


def history(home: Path, name: str, *, requests: int, windows: int) -> list[dict[str, Any]]:
    """Measures and accuracy over time of what an endpoint serves, or served when it was stopped; see `series`."""
    record = process.read_json(home / "endpoints" / name / "endpoint.json")
    folder = outputs_of(home / "endpoints" / name, str(record["model_ref"])) if record else None
    return series(read(folder), requests=requests, windows=windows) if folder else []


def brief(name: str, seen: Seen | None) -> dict[str, Any]:
    """One look in short: verdict (anomaly, none, insufficient, nothing written, stopped), what was said, what stands."""
    if seen is None or seen.told is None:
        verdict = "stopped" if seen is None else "nothing written"
        return {"endpoint": name, "verdict": verdict, "requests": 0, "said": [], "standing": [], "evidence": ""}
    keys = ("verdict", "model", "against", "requests", "reference_requests", "labels", "p_value")
    payload = {key: seen.told[key] for key in keys}
    return {
        "endpoint": name,
        **payload,
        "said": list(seen.said),
        "standing": list(seen.standing),
        "evidence": seen.evidence,
    }


def standing_anomalies(home: Path) -> dict[str, dict[str, Any]]:
    """What stands, by the name of the endpoint: `columns` (what moved, by name), `since`, `model`."""
    kept = _read(_state(home))
    return {name: {**followed.said, "model": followed.model} for name, followed in kept.items() if followed.said}


def service_config(home: Path, model: str) -> ServiceConfig:
    """How the answers of a model are judged: as its own configuration says, where that can be read and is what was signed."""
    try:
        store = open_store(home)
        manifest = store.manifest(*parse_ref(model))
        config = signed_config(home, store, manifest) if manifest else {}
        return ServiceConfig.model_validate((config.get("revalidation") or {}).get("service") or {})
    except (IntegrityError, ValueError):
        return ServiceConfig()


def _follow(home: Path, name: str, known: Followed, *, now: float, dry: bool) -> tuple[Followed, Seen]:
    config = service_config(home, known.model)
    payload = anomalies(
        home, name, since=known.since, config=config, before=known.before, labels_since=known.labels_since
    )
    after, columns = (_cooled(known, now), {}) if payload is None else next_followed(known, payload, config, now=now)
    evidence = ""
    if payload is not None and columns and not dry:
        # All that was found, as a file of the home, which the event names; returns its path below the home.
        folder = home / "endpoints" / name / "anomalies"
        path = folder / f"{now:.3f}.json"
        process.write_json(path, dict(payload))
        files = sorted(folder.glob("*.json"), key=lambda one: float(one.stem))
        for old in files[:-MOST_EVIDENCE]:
            old.unlink(missing_ok=True)
        evidence = str(path.relative_to(home))
        # Once for all that stands: found again after a kill, it is a duplicate.
        # Of what stands by when it began; of what came beside it by its columns as well.
        begun = f"{after.before:.3f}"
        identity = begun if known.said is None else f"{begun}/{'+'.join(sorted(columns))}"
        data = {
            "model": payload["model"],
            "columns": columns,
            "p_value": payload["p_value"],
            "requests": payload["requests"],
        }
        text = f"endpoint/{name}@{identity}"
        Ledger(home).receive(
            Event(
                name="endpoint.anomaly",
                subject=f"endpoint/{name}",
                source=SOURCE,
                identity=text,
                object=text,
                occurred=now,
                channel="headway",
                data={**data, "evidence": evidence},
            )
        )
    if payload is not None and payload["labels"] >= config.min_labels:
        after = after._replace(labels_since=now)
    standing = tuple(sorted(after.said["columns"])) if after.said else ()
    return after, Seen(name, payload, tuple(sorted(columns)), evidence, standing)


def next_followed(
    known: Followed, payload: Mapping[str, Any], config: ServiceConfig, *, now: float
) -> tuple[Followed, dict[str, list[str]]]:
    """How an endpoint is followed after a window, and the columns that are to be said of it. Pure."""
    short = payload["requests"] < max(config.min_requests, payload["reference_requests"])
    if payload["verdict"] == "insufficient" and (short or payload["against"] == "model"):
        return _cooled(known, now), {}
    if payload["verdict"] != "anomaly":
        return _cooled(known._replace(since=now, before=known.before if known.said else None), now), {}
    begun = known.since if known.before is None else known.before
    if known.said is None and known.before is None and not _at_once(payload, config):
        return known._replace(since=now, before=begun), {}
    moved = {each["name"]: each["moved"] for each in payload["columns"] if each["verdict"] == "anomaly"}
    if known.said is None:
        output = {"begun": begun, "columns": moved, "since": now, "last": now}
        return known._replace(since=now, before=begun, said=output, newly=()), moved
    at_once = _at_once(payload, config)
    newly = {column: of for column, of in moved.items() if column not in known.said["columns"]}
    again = {column: of for column, of in newly.items() if column in known.newly or at_once}
    output = {**known.said, "columns": {**known.said["columns"], **again}, "last": now}
    return known._replace(since=now, before=begun, said=output, newly=tuple(newly.keys() - again.keys())), again


def _cooled(known: Followed, now: float) -> Followed:
    """The same, with what stood over when nothing stood out for long."""
    if known.said and now - float(known.said["last"]) >= COOL_DOWN_SECONDS:
        return known._replace(before=None, said=None)
    return known


def _at_once(payload: Mapping[str, Any], config: ServiceConfig) -> bool:
    """Too many requests fail, or callers call answers wrong that were right: the next window is not waited for."""
    anomalous = {each["name"]: each["value"] for each in payload["columns"] if each["verdict"] == "anomaly"}
    return anomalous.get("errors", 0.0) > config.max_error_share or ACCURACY in anomalous


def _state(home: Path) -> Path:
    return home / "platform" / "anomalies.json"


def _read(path: Path) -> dict[str, Followed]:
    """What was kept; of an odd file nothing: everything is followed from now on."""
    try:
        return {name: Followed(**followed) for name, followed in (process.read_json(path) or {}).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
