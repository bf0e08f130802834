"""What the driver of a job on Ray is given, as a value: `ray.json` of the job folder, and the command on nodes of Azure ML. Pure.

The driver is tasks/jobs/ray/driver.py; on Azure ML tasks/jobs/ray/cluster.py starts a Ray head and workers around it, once a
node. Two backends use it: Ray and Azure ML.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tasks.compute.job import Job, Rendered
from tasks.compute.job_folder import SEEN, MirroredFolders
from tasks.compute.nodes import node_command, node_environment, python
from tasks.config.backends.ray import RayConfig

GIB = 2**30
PIN = "headway-node-rank"
"""As in tasks/jobs/ray/cluster.py: begins the name of the resource that only one node rank has."""


def driver_spec(job: Job, folder: Path, config: RayConfig) -> dict[str, Any]:
    """What `ray.json` says; `folder` is as the machines see it. Raises ValueError for what Ray cannot do."""
    _refuse(job)
    most = job.elastic.max_nodes if job.elastic else job.nodes
    elastic = {
        "max_nodes": most,
        "proven": list(job.admission.proven) if job.admission else [],
        "restarts": job.restarts,
        "progress": job.progress,
        "holder": [python(job), "-m", "tasks.common.process", f"{folder}/rendezvous"],
    }
    return {
        "submission": job.submission,
        "nodes": job.fewest_nodes,
        "driver": job.driver,
        "bundle": bundle(job, config),
        "strategy": config.strategy,
        "excluded": list(job.excluded_nodes),
        "only": list(job.only_nodes),
        "autoscales": config.autoscales,
        "pin": "",
        "shared_seconds": job.watch.silent_node_seconds,
        "commands": [node_command(job, folder, rank) for rank in range(most)],
        "environment": node_environment(job),
        **({"elastic": elastic} if job.elastic else {}),
    }


def mirrored_spec(job: Job, folder: Path, config: RayConfig, mirrored: MirroredFolders) -> dict[str, Any]:
    """The same for machines that share no folder: each runs a mirror of the job's, in a folder of its own.

    Raises ValueError for what Ray cannot do, and for a driver script, which has no machine of the job's.
    """
    if job.driver:
        raise ValueError(
            "a driver script runs on Ray's head and reads the job's folder there: leave cluster.mirror empty"
        )
    commands = [
        ["bash", "-c", f"HEADWAY_NODE_RANK={rank} exec {_mirror(job, folder, rank, mirrored)}"]
        for rank in range(job.nodes)
    ]
    return {**driver_spec(job, SEEN, config), "mirrored": True, "commands": commands}


def mirrored_driver(job: Job, folder: Path, mirrored: MirroredFolders) -> str:
    """What Ray's head executes there: the driver below a mirror, which counts as one more machine and reads no inputs."""
    driver = [python(job), "-m", "tasks.jobs.ray.driver", str(SEEN)]
    return f"HEADWAY_NODE_RANK={job.nodes} exec {_mirror(job, folder, job.nodes, mirrored, *driver)}"


def _mirror(job: Job, folder: Path, rank: int, mirrored: MirroredFolders, *runs: str) -> str:
    base = mirrored.own_base(job, shlex.quote(f"ray-{job.submission_id}-{rank}"))
    return mirrored.command(job, folder, base=base, runs=runs)


def bundle(job: Job, config: RayConfig) -> dict[str, float]:
    """What one machine of the job takes of Ray's resources; memory in bytes."""
    takes = {"CPU": job.ranks_per_node * job.threads_per_rank, "GPU": job.gpus_per_node}
    memory = {"memory": int(job.memory_gib * GIB)} if job.memory_gib else {}
    return {kind: amount for kind, amount in {**takes, **memory, **config.resources}.items() if amount}


def _refuse(job: Job) -> None:
    """What a Ray cluster cannot give is an error before anything is submitted."""
    if job.image:
        raise ValueError(
            f"on backend ray a job runs in the cluster's own environment, image is {job.image}: leave cluster.image "
            "empty and start the cluster from that image"
        )
    if job.exclusive:
        raise ValueError(
            "a Ray cluster shares its machines: set cluster.exclusive to false and take all CPUs or GPUs of one"
        )
    if job.launcher == "mpi" and job.nodes > 1:
        raise ValueError(
            "launcher mpi needs SSH between the machines, which Ray does not give: use torchrun on backend ray"
        )
    if job.driver and (job.elastic or job.nodes * job.ranks_per_node > 1):
        nodes = f"{job.elastic.min_nodes}:{job.elastic.max_nodes}" if job.elastic else job.nodes
        raise ValueError(
            f"a driver script is one process, and this one has {nodes} x {job.ranks_per_node}: set nodes and "
            "ranks_per_node to 1; what it takes of the cluster it asks Ray for itself"
        )


def ray_on_nodes(job: Job, folder: Path, config: RayConfig) -> Rendered:
    """What every node of the job executes, the environment it needs and the file that lies in the job folder for it.

    `folder` is the job folder as the nodes see it. Beside this they need NODE_RANK, MASTER_ADDR and MASTER_PORT, as Azure
    ML's PyTorch distribution with one process a node sets them. A node rank of the job runs on that node rank of Azure ML,
    whose mirror sends its marks. Raises ValueError for what Ray cannot do.
    """
    inside = job.model_copy(update={"image": "", "python": python(job), "exclusive": False})
    environment = node_environment(job)
    payload = {"environment": environment, "pin": PIN, "join_seconds": job.watch.join_node_seconds}
    spec = {**driver_spec(inside, folder, config), **payload}
    return Rendered(
        backend="azureml",
        command=(python(job), "-m", "tasks.jobs.ray.cluster", str(folder)),
        environment=environment,
        files={"ray.json": json.dumps(spec, indent=1)},
    )
