"""The answers of every endpoint in service: whether they are still as they were, window after window.

A window is over when it holds enough answers, and is judged once, so that the false-alarm rate is that of a window. Two in a row
must stand out before `endpoint.anomaly` is said; too many failing requests are said at once. What stands is over when no window
stood out for a while: an alarm that flaps is one. A column that comes to stand out beside what stands, two windows in a row, is
said once too: slow answers do not hide short ones. How answers are judged is tasks/service_outputs.py; it is done in the
background (background.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deployments.watch.background import Background
from tasks import process
from tasks.artifacts import parse_ref
from tasks.endpoints.known import endpoint_of, known_endpoints
from tasks.errors import IntegrityError
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.revalidation_config import ServiceConfig
from tasks.service_outputs import anomalies
from tasks.storage import open_store

EVERY_SECONDS = 120.0
COOL_DOWN_SECONDS = 1800.0
SOURCE = "headway/watch"


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


class Anomalies:
    """State: when it last looked, and in platform/anomalies.json each endpoint as it is followed."""

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, float("-inf")
        self._path = home / "platform" / "anomalies.json"
        self.work = Background("anomalies")

    def tick(self, now: float) -> None:
        """Begin to look, every few minutes. Raises what went wrong at the last look."""
        if self.work.busy() or 0 <= now - self._last < EVERY_SECONDS:
            return
        self._last = now
        self.work.start(lambda: self.look(now))

    def look(self, now: float) -> None:
        """Look at every endpoint in service. One that is not, or serves another model, is followed from its beginning."""
        kept, after = _read(self._path), {}
        for name in known_endpoints(self.home):
            served = endpoint_of(self.home, name).serves_from()
            if served and served.running:
                before = kept.get(name)
                known = before if before and before.model == served.model_ref else Followed(served.model_ref, now)
                after[name] = self._follow(name, known, now)
        if after != kept:
            process.write_json(self._path, {name: followed._asdict() for name, followed in after.items()})

    def _follow(self, name: str, known: Followed, now: float) -> Followed:
        config = service_config(self.home, known.model)
        told = anomalies(self.home, name, since=known.since, config=config, before=known.before)
        if told is None or (told["requests"] < config.min_requests and told["verdict"] != "anomaly"):
            return _cooled(known, now)
        if told["verdict"] != "anomaly":
            return _cooled(known._replace(since=now, before=known.before if known.said else None), now)
        begun = known.since if known.before is None else known.before
        if known.said is None and known.before is None and not _at_once(told, config):
            return known._replace(since=now, before=begun)
        moved = _moved(told)
        if known.said is None:
            self._say(name, told, moved, identity=f"{begun:.3f}", now=now)
            return Followed(known.model, now, begun, {"begun": begun, "columns": moved, "since": now, "last": now})
        newly = {column: of for column, of in moved.items() if column not in known.said["columns"]}
        again = {column: of for column, of in newly.items() if column in known.newly or _at_once(told, config)}
        if again:
            self._say(name, told, again, identity=f"{begun:.3f}/{'+'.join(sorted(again))}", now=now)
        said = {**known.said, "columns": {**known.said["columns"], **again}, "last": now}
        return Followed(known.model, now, begun, said, tuple(newly.keys() - again.keys()))

    def _say(
        self, name: str, told: Mapping[str, Any], columns: dict[str, list[str]], *, identity: str, now: float
    ) -> None:
        """Once for all that stands: found again after a kill, it is a duplicate."""
        data = {"model": told["model"], "columns": columns, "p_value": told["p_value"], "requests": told["requests"]}
        said = f"endpoint/{name}@{identity}"
        Ledger(self.home).receive(
            Event(
                name="endpoint.anomaly",
                subject=f"endpoint/{name}",
                source=SOURCE,
                identity=said,
                object=said,
                occurred=now,
                channel="headway",
                data=data,
            )
        )


def standing_anomalies(home: Path) -> dict[str, dict[str, Any]]:
    """What stands, by the name of the endpoint: `columns` (what moved, by name), `since`, `model`."""
    kept = _read(home / "platform" / "anomalies.json")
    return {name: {**followed.said, "model": followed.model} for name, followed in kept.items() if followed.said}


def service_config(home: Path, model: str) -> ServiceConfig:
    """How the answers of a model are judged: as its own configuration says, where that can be read."""
    try:
        manifest = open_store(home).manifest(*parse_ref(model))
        config = (manifest.provenance.config if manifest else None) or {}
        return ServiceConfig.model_validate((config.get("revalidation") or {}).get("service") or {})
    except (IntegrityError, ValueError):
        return ServiceConfig()


def _cooled(known: Followed, now: float) -> Followed:
    """The same, with what stood over when nothing stood out for long."""
    if known.said and now - float(known.said["last"]) >= COOL_DOWN_SECONDS:
        return known._replace(before=None, said=None)
    return known


def _at_once(told: Mapping[str, Any], config: ServiceConfig) -> bool:
    errors = (column for column in told["columns"] if column["name"] == "errors")
    return any(each["verdict"] == "anomaly" and each["value"] > config.max_error_share for each in errors)


def _moved(told: Mapping[str, Any]) -> dict[str, list[str]]:
    return {each["name"]: each["moved"] for each in told["columns"] if each["verdict"] == "anomaly"}


def _read(path: Path) -> dict[str, Followed]:
    """What was kept; of an odd file nothing: everything is followed from now on."""
    try:
        return {name: Followed(**followed) for name, followed in (process.read_json(path) or {}).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
