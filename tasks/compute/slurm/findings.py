"""What `headway doctor` finds of a Slurm cluster: whether its scheduler answers, what it has, whether it runs containers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.common.errors import HeadwayError
from tasks.common.home import home
from tasks.compute.slurm.commands import Login, Said, open_login
from tasks.compute.slurm.errors import PARTITIONS, parse_partitions
from tasks.config.cluster import ClusterConfig
from tasks.hardware.environment import nccl_environment

Found = tuple[str, bool, str, str]
"""Name, whether it is in order, what was seen, the remedy."""
SECONDS = 10.0
PYXIS = (
    "Have the administrator install pyxis and enroot (CycleCloud's Slurm workspace has both), or leave cluster.image empty and "
    "install Headway on the nodes."
)


def slurm_findings(config: ClusterConfig) -> Iterator[Found]:
    """Findings, the scheduler first; without an answer there is nothing more to ask."""
    try:
        login = open_login(config)
        version, partitions = login.run(("sinfo", "--version"), seconds=SECONDS), login.run(PARTITIONS, seconds=SECONDS)
    except (HeadwayError, ValueError) as error:
        yield "slurm scheduler", False, str(error), getattr(error, "remedy", "") or "Correct cluster.slurm."
        return
    if partitions.code:
        yield "slurm scheduler", False, partitions.text, "Look at `scontrol ping` on the login node."
        return
    yield "slurm scheduler", True, f"{version.out} answers", ""
    yield _partition(config, partitions.out)
    yield _accounting(login)
    yield from _containers(config, login)
    if config.slurm.sku:
        yield _sku(config.slurm.sku)


def _partition(config: ClusterConfig, text: str) -> Found:
    known = parse_partitions(text)
    wanted = config.slurm.partition
    chosen = next((p for p in known if (p.name == wanted if wanted else p.default)), None)
    names = ", ".join(p.name for p in known)
    if chosen is None:
        return (
            "slurm partition",
            False,
            f"{wanted or 'no default'}: the cluster has {names}",
            "Set cluster.slurm.partition.",
        )
    seen = f"{chosen.name}: {chosen.nodes} node(s), {chosen.state}"
    return (
        "slurm partition",
        chosen.nodes >= config.nodes and chosen.state == "UP",
        seen,
        "Lower cluster.nodes, or take another.",
    )


def _accounting(login: Login) -> Found:
    """Without accounting all works; it is said because Slurm then forgets finished jobs."""
    try:
        output = login.run(("sacct", "--noheader", "--allocations", "--starttime=now"), seconds=SECONDS)
    except HeadwayError as error:
        output = Said(1, "", str(error))
    source = "sacct answers" if not output.code else "no sacct: ends of jobs are read from squeue and the job folder"
    return "slurm accounting", True, source, ""


def _containers(config: ClusterConfig, login: Login) -> Iterator[Found]:
    """pyxis is a part of srun; enroot is on the compute nodes and may be on the login node."""
    try:
        pyxis = "--container-image" in login.run(("srun", "--help"), seconds=SECONDS).out
        enroot = login.run(("sh", "-c", "command -v enroot && enroot version"), seconds=SECONDS)
    except HeadwayError as error:
        yield "slurm pyxis", not config.image, str(error), PYXIS
        return
    needed = bool(config.image)
    seen = "srun has --container-image" if pyxis else "srun has no --container-image"
    yield "slurm pyxis", pyxis or not needed, seen + ("" if needed else " (cluster.image is empty)"), PYXIS
    version = re.search(r"[\d.]+$", enroot.out)
    text = f"enroot {version.group()}" if version else "enroot is not on the login node; the compute nodes need it"
    yield "slurm enroot", bool(version) or not needed or pyxis, text, PYXIS


def _sku(sku: str) -> Found:
    try:
        return "slurm sku", True, f"{sku}: {len(nccl_environment(sku, home() / 'hardware'))} variables of NCCL", ""
    except ValueError as error:
        return "slurm sku", False, str(error), "Correct cluster.slurm.sku, or leave it empty."
