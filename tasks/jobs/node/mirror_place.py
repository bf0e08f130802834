"""Which machine of an Azure ML job this is, from the environment that the service gives each of them.

With the PyTorch distribution: NODE_RANK and MASTER_ADDR. With MPI: the variables of Open MPI and of Azure Batch. See
https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

OF_THE_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Of the one process a machine that the service starts: our own launcher gives the ranks theirs."""
OF_MPI = ("OMPI_", "PMIX_", "PMI_")


@dataclass(frozen=True)
class Where:
    """This machine in its job."""

    rank: int
    """0 leads."""
    name: str
    leader: str
    """Address of the leader."""


def where_we_are(told: Mapping[str, str] = os.environ) -> Where:
    """Read the service's variables. A job of one machine may have none of them."""
    batch = told.get("AZ_BATCHAI_MPI_MASTER_NODE") or told.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0]
    return Where(
        rank=int(told.get("NODE_RANK") or told.get("OMPI_COMM_WORLD_RANK") or 0),
        name=told.get("AZ_BATCH_NODE_ID") or socket.gethostname(),
        leader=told.get("MASTER_ADDR") or batch or "127.0.0.1",
    )


def environment(where: Where, told: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the node agent gets: the service's launch is over, ours has variables of its own."""
    kept = {key: value for key, value in told.items() if key not in OF_THE_LAUNCH and not key.startswith(OF_MPI)}
    ours = {"HEADWAY_NODE_RANK": str(where.rank), "HEADWAY_NODE_NAME": where.name, "HEADWAY_LEADER": where.leader}
    hosts = {"HEADWAY_MPI_HOSTS": told["AZ_BATCH_HOST_LIST"]} if told.get("AZ_BATCH_HOST_LIST") else {}
    return {**kept, **ours, **hosts}
