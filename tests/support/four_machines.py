"""Four machines with networks of their own under a real Slurm, configured as a cluster of three and a spare."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from networks import network
from slurm_jobs import reachable
from slurm_stand import SlurmStand, slurm

CLUSTER = {
    "cluster": {"name": "four", "backend": "slurm", "nodes": 3, "ranks_per_node": 1},
    "benchmark": {
        "seconds": 0.5,
        "spare_nodes": 1,
        "largest_megabytes": 4,
        "act": {"drain": True},
    },
    "training": {"global_batch_size": 12, "steps": 20},
}


@contextmanager
def four_machines(folder: Path) -> Iterator[tuple[SlurmStand, Path]]:
    """The stand, reachable for commands that this process starts, and the configuration's file."""
    path = folder / "four.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    with network(4) as made, slurm(4, cpus=2, network=made) as stand, reachable(stand):
        yield stand, path
