"""A rank at the bench: what it is told, where it writes what it found, and how it meets the others.

Ranks meet at the launcher's key-value store, not in a collective: a rank that does not come is missing after a time limit, and
the others go on. Each rank writes `out/ranks/R.json` anew with everything that it finds, each sweep is a file of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import cuda, distributed

from tasks.common.process import write_json
from tasks.config.qualification import BenchmarkConfig
from tasks.config.training import TrainingConfig
from tasks.hardware.sku import Sku
from tasks.jobs.node.runtime import Rank
from tasks.qualification.measured import Probe, RankReport, Sweep, TrainingPoint

POLL_SECONDS = 0.05
RANKS_AT_FULL_POLL = 512
"""More ranks than this ask less often: the launcher's store is one thread."""

LEAVE_SECONDS = 30.0


def switch_of(environment: Mapping[str, str]) -> str:
    """The switches above this machine, from the top to its own, where Slurm knows them; else empty.

    SLURM_TOPOLOGY_ADDR has them with the machine's name behind, SLURM_TOPOLOGY_ADDR_PATTERN says what each part is (slurmd,
    in the environment of a step; slurm.schedmd.com/topology.html). Without a topology only the machine's name is there.
    """
    address = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    above = len(environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")) - 1
    return ".".join(address[:above])


class Bench:
    """State: what this rank found so far, and its connection to the store."""

    def __init__(self, rank: Rank) -> None:
        payload = rank.settings
        self.rank = rank
        self.config = BenchmarkConfig.model_validate(payload["benchmark"])
        self.sku = Sku.model_validate(payload["sku"])
        self.training = TrainingConfig.model_validate(payload["training"])
        self.threads = int(payload["threads"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.node_rank = rank.rank // self.ranks_per_node
        self.node = os.environ.get("HEADWAY_NODE_NAME") or socket.gethostname()
        self.switch = switch_of(os.environ)
        self.cuda = cuda.is_available()
        self._store: distributed.Store | None = None
        self._absent: set[int] = set()
        """Ranks that did not come the last time."""
        self._report = RankReport(
            rank=rank.rank,
            local_rank=self.local_rank,
            node=self.node,
            host=socket.gethostname(),
            machine={"switch": self.switch} if self.switch else {},
        )
        self._write()

    @property
    def world_size(self) -> int:
        return self.rank.world_size

    @property
    def nodes(self) -> int:
        """Machines of the job."""
        return self.world_size // self.ranks_per_node

    def note(
        self, *probes: Probe, versions: dict[str, str] | None = None, machine: dict[str, str] | None = None
    ) -> None:
        """Write down what was found, at once."""
        self._report = self._report.model_copy(
            update={
                "probes": (*self._report.probes, *probes),
                "versions": {**self._report.versions, **(versions or {})},
                "machine": {**self._report.machine, **(machine or {})},
            }
        )
        self._write()

    def sweep(self, sweep: Sweep) -> None:
        """Write down a sweep; one of its ranks does. A second one over the same machines is told apart by its round."""
        nodes = "+".join(sweep.nodes)
        who = f"{self.rank.rank}-{nodes[:80]}-{hashlib.sha256(nodes.encode()).hexdigest()[:8]}"
        self._piece("sweeps", f"{sweep.collective}-{sweep.scope}-{sweep.round}-{who}", sweep.model_dump(mode="json"))

    def trained(self, point: TrainingPoint) -> None:
        """Write down a training probe; its first rank does."""
        self._piece("training", f"{point.ranks}-{self.rank.rank}", point.model_dump(mode="json"))

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """A group of checks: in the progress, and in `done` when it came to its end."""
        self.rank.progress(len(self._report.done), len(self.config.groups), name)
        yield
        self._report = self._report.model_copy(update={"done": (*self._report.done, name)})
        self._write()

    def share(self, name: str, value: Any, *, seconds: float) -> dict[int, Any]:
        """What every rank says under a name, by rank; without those that said nothing in time. `name` is used once.

        Who did not come once is not waited for again, only taken when it is there: a dead rank costs its time limit once.
        A counter is what ranks look at while they wait, for at thousands of ranks the store is busy enough.
        """
        if self.world_size == 1:
            return {0: value}
        store, deadline = self.store, time.monotonic() + seconds
        keys = {rank: f"{name}/{rank}" for rank in range(self.world_size)}
        awaited = [key for rank, key in keys.items() if rank not in self._absent or rank == self.rank.rank]
        store.set(keys[self.rank.rank], json.dumps(value))
        output = store.add(f"{name}/count", 1)
        while (output < len(awaited) or not store.check(awaited)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS * max(1.0, self.world_size / RANKS_AT_FULL_POLL))
            output = store.add(f"{name}/count", 0)
        existing = keys if output == len(keys) else {rank: key for rank, key in keys.items() if store.check([key])}
        self._absent = set(keys) - set(existing)
        return {
            rank: json.loads(text)
            for rank, text in zip(existing, store.multi_get(list(existing.values())), strict=True)
        }

    def leave(self, *, seconds: float) -> None:
        """Meet for the last time. Rank 0 goes last: without torchrun the store ends with its process."""
        existing = self.share("end", True, seconds=seconds)
        if self.world_size == 1:
            return
        deadline, gone = time.monotonic() + LEAVE_SECONDS, self.store.add("gone", 1)
        while self.rank.rank == 0 and gone < len(existing) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            gone = self.store.add("gone", 0)

    @property
    def store(self) -> distributed.Store:
        """The launcher's store, under a prefix of its own; process groups are made on it too."""
        if self._store is None:
            result, _, _ = next(distributed.rendezvous("env://", timeout=timedelta(seconds=self.config.check_seconds)))
            self._store = distributed.PrefixStore("headway-qualify", result)
        return self._store

    def _piece(self, folder: str, name: str, value: dict[str, Any]) -> None:
        path = self.rank.output / folder / f"{''.join(c if c.isalnum() or c in '+-._' else '_' for c in name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)

    def _write(self) -> None:
        self._piece("ranks", str(self.rank.rank), self._report.model_dump(mode="json"))
