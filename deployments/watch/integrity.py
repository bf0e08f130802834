"""The files of every champion, and of what every endpoint serves, against what was signed: all bytes, again and again.

Sizes and times are not asked: whoever changes a file can keep them. Each model is read one file at a time in the background
(background.py). What is compared, and what becomes of a difference, is tasks/registry/model_integrity.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

from deployments.watch.background import Background
from tasks.common.errors import HeadwayError
from tasks.registry.model_integrity import act_on, findings, forget, standing, told
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions
from tasks.serving.known import endpoint_of, known_endpoints
from tasks.storage import open_store
from tasks.storage.store import Store

SOURCE = "headway/watch"
AWAY = (HeadwayError, OSError, ValueError)
"""What a model that cannot be looked at now may raise: the others are looked at all the same."""


class Integrity:
    """State: when it last began to look."""

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
                self._look_at(store, model)
            except AWAY as error:
                failed.append(error)
        for model in standing(self.home).keys() - watched(self.home, store):
            forget(self.home, model)
        if failed:
            raise failed[0]

    def _look_at(self, store: Store, model: str) -> None:
        found = findings(self.home, store, model)
        if found:  # reading takes long: it may be mended by now
            found = findings(self.home, store, model)
        stopped = act_on(self.home, store, model, found, source=SOURCE)
        if any(not one.untrusted for one in found):
            logging.warning("%s is not what was signed: %s", model, told(found))
        for endpoint in stopped:
            logging.warning("endpoint/%s was stopped", endpoint)


def watched(home: Path, store: Store) -> set[str]:
    """Champions, what is served, and what was when it was stopped for changed files: until another model is served there."""
    crowned = {read_ref(store, f"{name}/champion") for name in champions(store)}
    served = [endpoint_of(home, name).serves_from() for name in known_endpoints(home)]
    known = standing(home)
    return {ref for ref in crowned if ref} | {s.model_ref for s in served if s and (s.running or s.model_ref in known)}
