"""The newest figures of models and datasets: what an evaluation measured, and what was found to drift. For alerts elsewhere.

Labels are bounded: of so many names the newest ones, and the metrics that are listed here. State: manifests, which never change,
and when the store was last asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from deployments.telemetry import instruments as of
from deployments.telemetry.instruments import Instrument, Point
from tasks.common.errors import HeadwayError
from tasks.storage import open_store
from tasks.storage.history import current
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

ASKED_SECONDS = 60.0
NAMES = 50
"""Of models, and of datasets, that have figures: those whose figures are newest."""
EVALUATED = ("bits_per_byte", "perplexity", "accuracy", "calibration_error", "gain_over_bigram", "documents")
DRIFTED = ("p_value", "token_divergence", "domain_auc", "documents")
FIGURES: tuple[tuple[str, Instrument, tuple[str, ...]], ...] = (
    ("evaluation", of.EVALUATED, EVALUATED),
    ("drift", of.DRIFTED, DRIFTED),
)


class Quality:
    """What the store of a home has, looked at once a minute."""

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, float("-inf")
        self._points: list[Point] = []
        self._known: dict[tuple[str, str, str], Manifest] = {}

    def look(self, now: float) -> list[Point]:
        """The newest figures; of a store that is away, those of before."""
        if not 0 <= now - self._last < ASKED_SECONDS:
            self._last = now
            with contextlib.suppress(HeadwayError, OSError, ValueError):
                self._points = list(self._read(open_store(self.home)))
        return self._points

    def _read(self, store: Store) -> Iterator[Point]:
        for kind, instrument, metrics in FIGURES:
            newest = sorted(self._newest(store, kind), key=lambda one: one.provenance.created, reverse=True)
            for one in newest[:NAMES]:
                for metric in metrics:
                    if metric in one.provenance.metrics:
                        yield Point(instrument, (one.provenance.name, metric), one.provenance.metrics[metric])

    def _newest(self, store: Store, kind: str) -> Iterator[Manifest]:
        """The current version of each name of a kind."""
        names = {key.split("/")[2] for key in store.list(f"history/{kind}")}
        for name in sorted(names):
            version = current(store, kind, name)
            if version is None:
                continue
            key = (kind, name, version)
            manifest = self._known.get(key) or store.manifest(*key)
            if manifest:
                self._known[key] = manifest
                yield manifest
