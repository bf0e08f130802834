"""Slots of deployments: as many are occupied as runs are at work.

Prefect counts slots up and down as states change, and can miscount: a run whose lease ran out gives its slot back once when it
runs out and once more when the run ends; a run that goes on after a pause takes none. Then a run waits for a slot that nobody
holds, or two are at work at once. What is counted here is what is.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName

from deployments.catalogue.flows import POOL
from deployments.services.flow_runs import AT_WORK, flow_runs

Seen = dict[UUID, tuple[int, frozenset[UUID]]]
"""Of each deployment whose count is wrong: the count, and the states of the runs at work."""


class Slots:
    """State: what was wrong at the last look. Only what is still wrong in the same way at the next one is put right."""

    def __init__(self) -> None:
        self._seen: Seen = {}

    def tick(self, client: SyncPrefectClient) -> None:
        """Put the counts right."""
        states = defaultdict(set)
        for run in flow_runs(client, *AT_WORK):
            states[run.deployment_id].add(run.state_id)
        seen: Seen = {}
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
        for deployment in client.read_deployments(work_pool_filter=pool):
            limit, holders = deployment.global_concurrency_limit, frozenset(states[deployment.id])
            if limit is None or limit.active_slots == len(holders):
                continue
            seen[deployment.id] = (limit.active_slots, holders)
            if self._seen.get(deployment.id) == seen[deployment.id]:
                client.update_global_concurrency_limit(
                    name=limit.name, concurrency_limit=GlobalConcurrencyLimitUpdate(active_slots=len(holders))
                )
                logging.info("%s: %s slots were taken, by %s runs", limit.name, limit.active_slots, len(holders))
        self._seen = seen
