"""Machines agree on what they found, at the launcher's store: all of them take the same decisions, also when one is missing.

Only local rank 0 of a machine speaks; all its ranks hear. Who comes last publishes what was said, so nobody asks the store again
and again; when somebody does not come in time, whoever waited publishes what is there. What is published first holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from tasks.jobs.qualify.bench import Bench

LISTEN_SECONDS = 15.0
"""Longer that those who only listen wait, for others publish after their whole time."""


class LeftOut(Exception):
    """The others went on without this machine, or it hears nobody."""


def agree(bench: Bench, name: str, value: Any, *, among: Collection[int], seconds: float) -> dict[int, Any]:
    """What the machines `among`, by node rank, say under a name that is used once; without those that said nothing in time.

    The same on every rank. Raises LeftOut where this machine is not in it, and where nobody publishes.
    """
    if bench.node_rank not in among:
        raise LeftOut(f"{name}: {bench.node} is not among those that meet")
    deadline = time.monotonic() + seconds
    if bench.local_rank == 0:
        _say(bench, name, value, among, deadline)
    output = _agreed(bench, name, deadline - time.monotonic() + LISTEN_SECONDS)
    if bench.node_rank not in output:
        raise LeftOut(f"{name}: the others went on without {bench.node}, which did not answer within {seconds:.0f} s")
    return output


def recall(bench: Bench, name: str) -> dict[int, Any] | None:
    """What was agreed under a name; None where nothing was."""
    return _agreed(bench, name, 1.0) if bench.store.check([f"{name}/agreed"]) else None


def _say(bench: Bench, name: str, value: Any, among: Collection[int], deadline: float) -> None:
    store = bench.store
    store.set(f"{name}/{bench.node_rank}", json.dumps(value))
    if store.add(f"{name}/count", 1) < len(among):
        try:
            store.wait([f"{name}/agreed"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            return
        except DistStoreError:
            print(f"{name}: not all of {len(among)} machines answered in time", flush=True)
    output = {
        node: json.loads(store.get(f"{name}/{node}")) for node in sorted(among) if store.check([f"{name}/{node}"])
    }
    store.compare_set(f"{name}/agreed", "", json.dumps(output))


def _agreed(bench: Bench, name: str, seconds: float) -> dict[int, Any]:
    try:
        bench.store.wait([f"{name}/agreed"], timedelta(seconds=max(0.1, seconds)))
    except DistStoreError as error:
        raise LeftOut(f"{name}: nobody answered within {seconds:.0f} s: {error}") from error
    return {int(node): value for node, value in json.loads(bench.store.get(f"{name}/agreed")).items()}
