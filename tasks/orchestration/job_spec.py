"""What a stage runs, and the job that this is on a cluster: values only, so that `headway job render` shows what a stage submits.

The programs themselves are tasks/jobs; who runs a job is tasks/orchestration/stage_context.py, and for a program of the user's
own deployments/cli/cluster/submit.py. See docs/compute.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.artifacts import Artifact, Cluster
from tasks.common.home import home
from tasks.compute.job import Admission, Job
from tasks.config.cluster import ClusterConfig
from tasks.hardware.sku import load_sku


@dataclass(frozen=True)
class Program:
    """A program of tasks/jobs, with everything that it reads."""

    module: str
    settings: dict[str, Any]
    inputs: Mapping[str, Artifact] = field(default_factory=dict)
    ranks: int | None = None
    """Ranks of a program that runs on one machine; None: as many as the cluster has."""
    threads: int | None = None
    """Threads a rank; None: as the cluster says."""
    progress: str = ""
    by_range: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files of inputs, by patterns, of which a machine that shares no folder with the launcher reads parts where they lie."""
    restarts: int = 2
    """Restarts on the same machines; 0: nothing is tried again, because its failure is what it measures."""


def job_of(name: str, key: str, program: Program, *, on: Cluster, folders: dict[str, str]) -> Job:
    """The job of a stage: `key` is the stage's, `folders` are its inputs as they lie there, by name."""
    # How many machines and ranks; a program with its own number of ranks runs on one
    alone = program.ranks is not None
    machines: dict[str, Any] = {
        "nodes": 1 if alone else on.nodes,
        "ranks_per_node": program.ranks or on.ranks_per_node,
        "threads_per_rank": program.threads or on.threads_per_rank,
        "launcher": "torchrun" if alone else on.config.launcher,
        "elastic": None if alone else on.config.elastic,
    }
    admission = Admission(proven=on.proven, settings=on.admission) if machines["elastic"] and on.admission else None
    return Job(
        name=name,
        token=key[:32],
        program=program.module,
        settings=program.settings,
        inputs=folders,
        artifacts={name: artifact.ref for name, artifact in program.inputs.items()},
        by_range=dict(program.by_range),
        progress=program.progress,
        restarts=program.restarts,
        only_nodes=() if admission else on.proven,
        admission=admission,
        **machines,
        **{**shape(on.config), **({} if program.restarts else {"retry": None})},
    )


def shape(config: ClusterConfig) -> dict[str, Any]:
    """What every job takes of a cluster's settings."""
    limit = config.time_limit_minutes
    return {
        "gpus_per_node": config.gpus_per_node,
        "size": _size(config),
        "cpus_per_node": config.cpus_per_node,
        "memory_gib": config.memory_gib,
        "time_limit": limit * 60 if limit else None,
        "image": config.image,
        "python": config.python,
        "environment": config.environment,
        "exclusive": config.exclusive,
        "preemptible": config.preemptible,
        "excluded_nodes": config.exclude,
        "scratch": config.scratch,
        "watch": config.watch,
        "retry": config.retry,
    }


def _size(config: ClusterConfig) -> str:
    """The machines' VM size, where its hardware is known.

    Azure itself refuses a size that it does not have, and has many of which nothing is known here. Elsewhere the setting is for
    NCCL's environment alone, and a size that is not known is an error: raises ValueError.
    """
    can = config.capabilities
    size = str(getattr(config.section, can.size_setting)) if can.size_setting else ""
    try:
        if size:
            load_sku(size, home() / "hardware")
    except ValueError:
        if not can.within_quota:
            raise
        return ""
    return size
