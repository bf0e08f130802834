"""A communicator over some ranks, thrown away after use: after a time-out nothing of it can be trusted.

Also what it really used, by NCCL's own debug log. A rank is in one group at a time, so each is torch's default group, on a
prefix of the launcher's store that is used once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import cuda, distributed

from tasks.formats.nccl_log import transports
from tasks.jobs.qualify.bench import Bench

LOUD = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""NCCL says which transports it uses, and waiting for a collective raises after the group's time limit: by default torch's
watchdog ends the process instead (docs.pytorch.org, torch_nccl_environment_variables)."""

STARTS = 20
"""Times the limit of one operation that a communicator may be open: NCCL's start has no limit, so the job would never end."""


class Communicator:
    """An open group of ranks."""

    def __init__(self, bench: Bench, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = self.ranks.index(bench.rank.rank)
        self.cuda = bench.cuda
        self.device = torch.device("cuda", _gpu(bench)) if bench.cuda else torch.device("cpu")

    def over_all(
        self, values: Sequence[float], how: distributed.ReduceOp.RedOpType = distributed.ReduceOp.SUM
    ) -> list[float]:
        """Values of all ranks, added up, or the largest of each."""
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(together, op=how)
        return [float(value) for value in together]


def backend(bench: Bench) -> str:
    """What communicates: nccl, rccl or gloo."""
    if not bench.cuda:
        return "gloo"
    return "rccl" if torch.version.hip else "nccl"


@contextmanager
def communicator(bench: Bench, name: str, ranks: Sequence[int], *, seconds: float) -> Iterator[Communicator]:
    """Open one over `ranks`, of which this is one. Each of its operations raises RuntimeError after `seconds`."""
    if bench.cuda:
        cuda.set_device(_gpu(bench))
        os.environ.update(LOUD, NCCL_DEBUG_FILE=str(_log(bench, bench.rank.rank)))
    # Wait for the others at the store. NCCL waits for ever for a rank that does not come to its start. Raises
    # RuntimeError.
    count = len(ranks)
    if bench.store.add(f"{name}/come", 1) == count:
        bench.store.set(f"{name}/all", "")
    bench.store.wait([f"{name}/all"], timedelta(seconds=seconds))
    overdue = threading.Timer(STARTS * seconds, os._exit, (1,))
    overdue.daemon = True
    overdue.start()
    try:
        distributed.init_process_group(
            "nccl" if bench.cuda else "gloo",
            store=distributed.PrefixStore(name, bench.store),
            rank=ranks.index(bench.rank.rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=seconds),
        )
        yield Communicator(bench, ranks)
    except BaseException:
        # Without waiting for what still hangs in it. torch puts the count of default groups into their names, by
        # which ranks find each other, and starts anew only when one is destroyed: of one that did not come up it
        # would stay, and the next group's ranks would look for different names.
        if distributed.is_initialized():
            with suppress(RuntimeError):
                if bench.cuda:
                    distributed.distributed_c10d._abort_process_group()
                else:
                    distributed.destroy_process_group()
        distributed.distributed_c10d._world.group_count = 0
        raise
    finally:
        overdue.cancel()
    distributed.destroy_process_group()


def _gpu(bench: Bench) -> int:
    """The rank's GPU; where the scheduler shows each rank only its own, that is number 0."""
    return bench.local_rank % cuda.device_count()


class Transports:
    """What is used from now on by this machine's ranks. NCCL appends to one log a rank as long as the process lives."""

    def __init__(self, bench: Bench) -> None:
        self.cuda = bench.cuda
        mine = range(bench.node_rank * bench.ranks_per_node, (bench.node_rank + 1) * bench.ranks_per_node)
        self.began = {
            path: (path.stat().st_size if path.exists() else 0) for path in (_log(bench, rank) for rank in mine)
        }

    def used(self) -> tuple[str, ...]:
        """By NCCL's logs since the beginning; of gloo, TCP and the interface that it was told."""
        if not self.cuda:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            return (f"tcp/{interface}" if interface else "tcp",)
        return transports("\n".join(_since(path, began) for path, began in self.began.items()))


def _log(bench: Bench, rank: int) -> Path:
    return bench.rank.folder / "logs" / f"nccl-{rank}.log"


def _since(path: Path, began: int) -> str:
    try:
        with path.open("rb") as log:
            log.seek(began)
            return log.read().decode(errors="replace")
    except OSError:
        return ""
