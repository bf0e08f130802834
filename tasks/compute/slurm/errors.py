"""What Slurm refuses, as our errors: before a submission from what the partitions allow, and from what sbatch says.

Slurm takes many jobs that it can never start (EnforcePartLimits=NO is its default), so the limits are looked at first. A user's
mistake is a ValueError that names the value, the remedy and what is known; anything else that was refused is a JobFailed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tasks.common.errors import JobFailed, Missing
from tasks.compute.job import Job
from tasks.compute.slurm.commands import Login, Said, silent
from tasks.config.backends.slurm import SlurmConfig

PARTITIONS = ("scontrol", "show", "partition", "--oneliner")


@dataclass(frozen=True)
class Partition:
    """What a partition allows."""

    name: str
    default: bool
    nodes: int
    max_nodes: int | None
    max_minutes: float | None
    state: str


def parse_partitions(text: str) -> list[Partition]:
    """The lines of `scontrol show partition --oneliner`."""
    facts = [dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines()]
    return [
        Partition(
            name=fact["PartitionName"],
            default=fact.get("Default") == "YES",
            nodes=int(fact.get("TotalNodes", "0")),
            max_nodes=_number(fact.get("MaxNodes", "UNLIMITED")),
            max_minutes=minutes(fact.get("MaxTime", "UNLIMITED")),
            state=fact.get("State", "UP"),
        )
        for fact in facts
        if "PartitionName" in fact
    ]


def require_limits(job: Job, config: SlurmConfig, partitions: list[Partition]) -> None:
    """Raise ValueError for a job that its partition can never start."""
    names = ", ".join(partition.name for partition in partitions) or "none"
    chosen = next((p for p in partitions if (p.name == config.partition if config.partition else p.default)), None)
    if chosen is None and config.partition and "," not in config.partition:
        raise ValueError(f"slurm.partition is {config.partition}, which this cluster does not have: it has {names}")
    if chosen is None:
        return
    most = min(chosen.nodes, chosen.max_nodes or chosen.nodes)
    if job.nodes > most:
        allows = f"it has {chosen.nodes}" + (f" and allows {most} a job" if most < chosen.nodes else "")
        raise ValueError(
            f"the job wants {job.nodes} nodes of partition {chosen.name}: {allows}. Lower cluster.nodes, or set "
            f"slurm.partition to another one of: {names}"
        )
    wanted = (job.time_limit or 0) / 60
    if chosen.max_minutes is not None and wanted > chosen.max_minutes:
        raise ValueError(
            f"cluster.time_limit_minutes is {wanted:g}, partition {chosen.name} allows {chosen.max_minutes:g}: lower it (a job "
            f"continues in its next submission), or set slurm.partition to another one of: {names}"
        )


def require_image(job: Job, login: Login) -> None:
    """Raise Missing for a cluster that runs no containers, ValueError for an image file that is not there."""
    if not job.image:
        return
    if "--container-image" not in login.run(("srun", "--help")).out:
        raise Missing(
            f"cluster.image is {job.image}, and srun of this cluster has no --container-image: pyxis is not installed",
            remedy="Have pyxis and enroot installed, or empty cluster.image and install Headway on the nodes.",
        )
    if job.image.startswith("/") and login.run(("test", "-e", job.image)).code:
        raise ValueError(
            f"cluster.image is {job.image}, and there is no such file where the login node looks: import it with "
            f"`enroot import -o {job.image} docker://REGISTRY#NAME:TAG`, or name an image of a registry"
        )


def refusal(output: Said, job: Job, config: SlurmConfig, login: Login) -> Exception:
    """The error for a submission that sbatch refused."""
    text = output.err or output.out
    for pattern, setting, value in _mistakes(job, config):
        if re.search(pattern, text, re.IGNORECASE):
            return ValueError(f"Slurm refuses {setting} {value}: {_plain(text)}. {_known(setting, login)}".strip())
    return JobFailed(
        f"sbatch refused the job: {_plain(text) or f'exit code {output.code}'}",
        failure="infrastructure",
        folder="",
        remedy="`headway job render` prints what was submitted.",
    )


def minutes(text: str) -> float | None:
    """Slurm's DAYS-HOURS:MINUTES:SECONDS in minutes; None for no limit."""
    if not re.fullmatch(r"[\d:-]+", text):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, mins, seconds = [*parts, 0, 0][:3] if dash else [0, 0, *parts][-3:]
    return int(days or 0) * 1440 + hours * 60 + mins + seconds / 60


def _mistakes(job: Job, config: SlurmConfig) -> list[tuple[str, str, str]]:
    """What sbatch says, the setting that it is about, and its value."""
    machines = f"{job.nodes} with {job.ranks_per_node} ranks x {job.threads_per_rank} threads"
    machines += f", {job.gpus_per_node} GPUs" if job.gpus_per_node else ""
    machines += f", {job.memory_gib:g} GiB" if job.memory_gib else ""
    machines += f", without {', '.join(job.excluded_nodes)}" if job.excluded_nodes else ""
    return [
        (r"/qos policy|policy limit", "slurm.qos", config.qos or "(the default)"),
        (r"invalid partition", "slurm.partition", config.partition),
        (r"group not permitted|not permitted to use this partition", "slurm.partition", config.partition),
        (
            r"invalid account",
            "slurm.account",
            f"{config.account or '(the default)'} on {config.partition or 'the default partition'}",
        ),
        (r"invalid qos", "slurm.qos", config.qos),
        (r"invalid feature", "slurm.constraint", config.constraint),
        (r"reservation", "slurm.reservation", config.reservation),
        (r"invalid node name", "cluster.exclude", ",".join(job.excluded_nodes)),
        (r"time limit", "cluster.time_limit_minutes", f"{(job.time_limit or 0) / 60:g}"),
        (r"generic resource|gres", "cluster.gpus_per_node", str(job.gpus_per_node)),
        (r"memory specification", "cluster.memory_gib", f"{job.memory_gib or 0:g}"),
        (r"node count|node configuration|cpu count|more processors", "cluster.nodes", machines),
        (r"unrecognized option|invalid option|invalid --", "slurm.options", " ".join(config.options) or "(none)"),
    ]


def _known(setting: str, login: Login) -> str:
    """The remedy: what the cluster has."""
    asked = {
        "slurm.partition": ("Partitions", ("sinfo", "--noheader", "--all", "--format=%R")),
        "slurm.constraint": ("Features of its nodes", ("sinfo", "--noheader", "--all", "--format=%f")),
        "cluster.exclude": ("Its nodes", ("sinfo", "--noheader", "--all", "--format=%N")),
        "cluster.gpus_per_node": ("What its nodes have", ("sinfo", "--noheader", "--all", "--format=%G")),
        "cluster.memory_gib": ("Memory of its nodes in MiB", ("sinfo", "--noheader", "--all", "--format=%m")),
        "cluster.nodes": (
            "Its nodes (CPUs, MiB, GPUs, number)",
            ("sinfo", "--noheader", "--all", "--format=%c %m %G %D"),
        ),
        "slurm.reservation": ("Reservations", ("scontrol", "show", "reservation", "--oneliner")),
    }
    if setting not in asked:
        return f"Change or empty {setting}; `sacctmgr show associations user=$USER` on the login node lists what you may use."
    title, command = asked[setting]
    lines = dict.fromkeys(line.strip() for line in login.run(command).out.splitlines())
    return f"{title}: {'; '.join(lines) or 'none'}"


def _plain(text: str) -> str:
    lines = [re.sub(r"^sbatch: (error: )?(Batch job submission failed: )?", "", line) for line in text.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try "))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def restricted(job: Job, config: SlurmConfig, login: Login) -> Job:
    """The job with everything but its machines excluded. Raises ValueError when Slurm has too few of them, NoAnswer.

    sbatch has no word for "any two of these five" (`--nodelist` means all of them), so all others of the partition are named.
    What Slurm has is asked when a job is submitted; the render itself asks nothing (render.py).
    """
    if not job.only_nodes:
        return job
    # All machines that Slurm could take.
    which = (f"--partition={config.partition}",) if config.partition else ()
    output = login.run(("sinfo", "--noheader", "--all", "--Node", "--format=%N", *which))
    if output.code:
        raise silent(f"sinfo: {output.text}")
    existing = list(dict.fromkeys(output.out.split()))
    known = [name for name in job.only_nodes if name in existing]
    if len(known) < job.fewest_nodes:
        unknown = [name for name in job.only_nodes if name not in existing]
        where = f"partition {config.partition}" if config.partition else "this cluster"
        raise ValueError(
            f"{job.name} names the machines {', '.join(unknown)}, which {where} of Slurm does not have: it has "
            f"{', '.join(existing)}"
        )
    others = [name for name in existing if name not in job.only_nodes]
    return job.model_copy(update={"excluded_nodes": tuple(dict.fromkeys([*job.excluded_nodes, *others]))})
