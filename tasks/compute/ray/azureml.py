"""Ray on Azure ML: the command and the files of a job that starts a Ray head and workers on its nodes. Values only.

What runs is tasks/jobs/ray/cluster.py, once a node; the Azure ML job itself is tasks/compute/azureml/backend.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks.compute.job import Job, Rendered
from tasks.compute.nodes import node_environment, python
from tasks.compute.ray.spec import driver_spec
from tasks.config.cluster import RayConfig

PIN = "headway-node-rank"
"""As in tasks/jobs/ray/cluster.py: begins the name of the resource that only one node rank has."""


def ray_on_nodes(job: Job, folder: Path, config: RayConfig) -> Rendered:
    """What every node of the job executes, the environment it needs and the file that lies in the job folder for it.

    `folder` is the job folder as the nodes see it. Beside this they need NODE_RANK, MASTER_ADDR and MASTER_PORT, as Azure
    ML's PyTorch distribution with one process a node sets them. A node rank of the job runs on that node rank of Azure ML,
    whose mirror sends its marks. Raises ValueError for what Ray cannot do.
    """
    inside = job.model_copy(update={"image": "", "python": python(job), "exclusive": False})
    environment = node_environment(job)
    told = {"environment": environment, "pin": PIN, "join_seconds": job.watch.join_node_seconds}
    spec = {**driver_spec(inside, folder, config), **told}
    return Rendered(
        backend="azureml",
        command=(python(job), "-m", "tasks.jobs.ray.cluster", str(folder)),
        environment=environment,
        files={"ray.json": json.dumps(spec, indent=1)},
    )
