"""Duties of the watch that are a few lines each: models' files, answers of endpoints, stale champions, the audit log's copy...

Each has `tick(now)`. Those with a subject of their own have files beside this one: dead_runs.py, schedules.py, waiting.py,
alerts.py.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tasks.common import process
from tasks.common.errors import Conflict, HeadwayError
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.lineage.spool import start_publisher, unpublished
from tasks.registry.model_integrity import act_on, bar_rungs, findings, forget, standing, told
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions, last_looked_at
from tasks.security.audit import copy_of, send
from tasks.serving.known import endpoint_of, known_endpoints, tidy_all
from tasks.serving.monitor import watch
from tasks.storage import open_store
from tasks.storage.store import Store

LOWEST = 19


class Background:
    """Work that takes longer than a turn of the watch: in a thread of its own, at the lowest priority, one piece at a time.

    Reading and hashing let go of the interpreter, and the thread stands behind everything else that wants a core, so the other
    duties are taken in their time. What is cut off by the end of the watch is begun anew at its next start. State: the piece of
    work that was begun last.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_stand_back)
        self._begun: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do a piece of work; nothing must be at work."""
        assert not self.busy()
        self._begun = self._pool.submit(work)

    def busy(self) -> bool:
        """Whether something is at work. Raises, once, what the last piece raised."""
        if self._begun is not None and not self._begun.done():
            return True
        ended, self._begun = self._begun, None
        if ended is not None:
            ended.result()
        return False

    def wait(self, seconds: float) -> None:
        """Let the work end. Raises what it raised, and TimeoutError when it takes longer."""
        if self._begun is not None:
            self._begun.result(seconds)


def _stand_back() -> None:
    if sys.platform == "linux":  # there, a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


ANOMALIES_SECONDS = 120.0


class Anomalies:
    """The answers of every endpoint in service, looked at every few minutes, in the background.

    What a window is, when it stands out, and what is said then is tasks/serving/monitor/watch.py: the flow watch and `headway
    watch` look by the same, and share what is known. State: when it last looked; what is known of each endpoint is on disk.
    """

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, float("-inf")
        self.work = Background("anomalies")

    def tick(self, now: float) -> None:
        """Begin to look, every few minutes. Raises what went wrong at the last look."""
        if self.work.busy() or 0 <= now - self._last < ANOMALIES_SECONDS:
            return
        self._last = now
        self.work.start(lambda: self.look(now))

    def look(self, now: float) -> None:
        """Look at every endpoint in service."""
        watch.look(self.home, now)


AUDIT_COPY_SECONDS = 15.0


class AuditCopy:
    """Keeps the copy of the audit log elsewhere up to date, where stores.yaml names one (tasks/security/audit.py).

    State: when it last looked.
    """

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, 0.0

    def tick(self, now: float) -> None:
        """Send what the copy lacks. What is away, or does not fit, is raised: the watch says so once, and tries again."""
        if 0 <= now - self._last < AUDIT_COPY_SECONDS:
            return
        self._last = now
        lines = copy_of(self.home)
        if lines is None:
            return
        try:
            sent = send(open_store(self.home), lines)
        except Conflict:  # the watch of another host sends as well
            return
        if sent:
            logging.info("audit log: %s entries were copied to %s", sent, lines.uri)


CLOUD_ENDPOINTS_SECONDS = 60.0


class CloudEndpoints:
    """Deletes what stands on Azure ML and is over: models that were kept warm for the way back, and test endpoints that
    expired.

    What that is, tasks/serving/azureml/endpoint.py knows; an endpoint on this machine looks after itself. A deletion takes
    minutes, so it is done in the background. State: when it last looked.
    """

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, 0.0
        self.work = Background("cloud endpoints")

    def tick(self, now: float) -> None:
        """Delete what is over. A service that does not answer is raised: the watch says so once, and tries again."""
        if self.work.busy() or 0 <= now - self._last < CLOUD_ENDPOINTS_SECONDS:
            return
        self._last = now
        self.work.start(self._tidy)

    def _tidy(self) -> None:
        for deleted in tidy_all(self.home, time.time()):
            logging.info("deleted on Azure ML: %s", deleted)


class Spools:
    """Tells MLflow what it missed: publishers that gave up, or died with their machine, are started again.

    State: when it last looked.
    """

    def __init__(self, home: Path, every: float) -> None:
        self.home, self.every, self._last = home, every, 0.0

    def tick(self, now: float) -> None:
        """Start a publisher for every spool that is behind and has none. They try for minutes, so it is not often needed."""
        if now - self._last < self.every:
            return
        self._last = now
        for folder in unpublished(self.home):
            if not process.alive(process.read_json(folder / "handle.json")):
                start_publisher(folder)


TRUSTED_SECONDS = 30.0


class Trusted:
    """Bars models that were served before and are signed by a key that was revoked since: they answer no more for the one in
    service.

    What is served goes on being served, and an alert says so (deployments/telemetry/alert_rules.py). See docs/trust.md, "A
    revoked key". State: when it last looked.
    """

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, float("-inf")

    def tick(self, now: float) -> None:
        """Look at every endpoint, every so many seconds."""
        if 0 <= now - self._last < TRUSTED_SECONDS:
            return
        self._last = now
        for one in bar_rungs(self.home, open_store(self.home)):
            logging.warning(
                "%s answers no more on endpoint/%s when its model cannot: %s", one.model, one.endpoint, one.why
            )


STALE_CHAMPIONS_SECONDS = 60.0
DAY = 86_400.0


class Periods:
    """Says of champions that nobody looked at for a whole period `model.stale`, once a period, so that a trigger can have it
    done.

    The alert of it is champion_not_revalidated in deployments/telemetry/alert_rules.py; the flow is revalidate. State: when it
    last looked, and in platform/periods.json what was said of each champion.
    """

    def __init__(self, home: Path, days: float) -> None:
        self.home, self.period, self._last = home, days * DAY, float("-inf")
        self._path = home / "platform" / "periods.json"

    def tick(self, now: float) -> None:
        """Say what became stale. Raises what the store raises while it is away."""
        if 0 <= now - self._last < STALE_CHAMPIONS_SECONDS:
            return
        self._last = now
        # When each stale champion was last looked at, and how many whole periods have passed.
        store, stale = open_store(self.home), {}
        for model in champions(store):
            champion, looked = read_ref(store, f"{model}/champion"), last_looked_at(store, model)
            if champion and looked is not None and now - looked >= self.period:
                stale[champion] = (looked, int((now - looked) // self.period))
        output = process.read_json(self._path) or {}
        for champion, (looked, periods) in stale.items():
            identity = f"{champion}#{looked:.0f}.{periods}"
            if output.get(champion) != identity:
                event = Event(
                    name="model.stale",
                    subject=champion.partition("@")[0],
                    source=SOURCE,
                    identity=identity,
                    object=identity,
                    occurred=now,
                    channel="headway",
                    data={"model": champion, "last_looked_at": looked},
                )
                Ledger(self.home).receive(event)
        after = {champion: f"{champion}#{looked:.0f}.{periods}" for champion, (looked, periods) in stale.items()}
        if after != output:
            process.write_json(self._path, after)


SOURCE = "headway/watch"
AWAY = (HeadwayError, OSError, ValueError)
"""What a model that cannot be looked at now may raise: the others are looked at all the same."""


class Integrity:
    """Compares the files of every champion, and of what every endpoint serves, with what was signed: all bytes, again and
    again.

    Sizes and times are not asked: whoever changes a file can keep them. Each model is read one file at a time in the
    background. What is compared, and what becomes of a difference, is tasks/registry/model_integrity.py. State: when it last
    began to look.
    """

    def __init__(self, home: Path, every: float) -> None:
        self.home, self.every, self._last = home, every, float("-inf")
        self.work = Background("integrity")

    def tick(self, now: float) -> None:
        """Begin to look, every so many seconds. Raises what went wrong at the last look."""
        if self.work.busy() or 0 <= now - self._last < self.every:
            return
        self._last = now
        self.work.start(self.look)

    def look(self) -> None:
        """Look at everything once. Raises what the first model raised that could not be looked at, when all others were."""
        store, failed = open_store(self.home), []
        models = watched(self.home, store)
        for model in models:
            try:
                result = findings(self.home, store, model)
                if result:  # reading takes long: it may be mended by now
                    result = findings(self.home, store, model)
                stopped = act_on(self.home, store, model, result, source=SOURCE)
                if any(not one.untrusted for one in result):
                    logging.warning("%s is not what was signed: %s", model, told(result))
                for endpoint in stopped:
                    logging.warning("endpoint/%s was stopped", endpoint)
            except AWAY as error:
                failed.append(error)
        for model in standing(self.home).keys() - watched(self.home, store):
            forget(self.home, model)
        if failed:
            raise failed[0]


def watched(home: Path, store: Store) -> set[str]:
    """Champions, what is served, and what was when it was stopped for changed files: until another model is served there."""
    champions_now = {read_ref(store, f"{name}/champion") for name in champions(store)}
    served = [endpoint_of(home, name).serves_from() for name in known_endpoints(home)]
    known = standing(home)
    return {ref for ref in champions_now if ref} | {
        s.model_ref for s in served if s and (s.running or s.model_ref in known)
    }
