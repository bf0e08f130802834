"""A Slurm job that may run on some machines only: all others of its partition are left out by `--exclude`.

sbatch has no word for "any two of these five" (`--nodelist` means all of them), so the others are named. What Slurm has is asked
when a job is submitted; the render itself asks nothing (render.py).
"""

from __future__ import annotations

from tasks.compute.job import Job
from tasks.compute.slurm.commands import Login, silent
from tasks.config.cluster import SlurmConfig


def restricted(job: Job, config: SlurmConfig, login: Login) -> Job:
    """The job with everything but its machines excluded. Raises ValueError when Slurm has too few of them, NoAnswer."""
    if not job.only_nodes:
        return job
    existing = _nodes(config, login)
    known = [name for name in job.only_nodes if name in existing]
    if len(known) < job.fewest_nodes:
        unknown = [name for name in job.only_nodes if name not in existing]
        where = f"partition {config.partition}" if config.partition else "this cluster"
        raise ValueError(
            f"{job.name} is to run on {', '.join(unknown)}, which {where} of Slurm does not have: it has {', '.join(existing)}"
        )
    others = [name for name in existing if name not in job.only_nodes]
    return job.model_copy(update={"excluded_nodes": tuple(dict.fromkeys([*job.excluded_nodes, *others]))})


def _nodes(config: SlurmConfig, login: Login) -> list[str]:
    """All machines that Slurm could take."""
    which = (f"--partition={config.partition}",) if config.partition else ()
    output = login.run(("sinfo", "--noheader", "--all", "--Node", "--format=%N", *which))
    if output.code:
        raise silent(f"sinfo: {output.text}")
    return list(dict.fromkeys(output.out.split()))
