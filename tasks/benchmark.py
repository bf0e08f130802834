"""Cluster -> Qualification: no training starts on machines that have not proven themselves.

The measuring is done by the program tasks/jobs/benchmark.py; what hardware must show is data in tasks/hardware, and the
verdict is tasks/qualification. A baseline is never written by the run that it judges.
"""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

from tasks.artifacts import Check, Cluster, Qualification, unqualified
from tasks.cluster_config import ClusterConfig
from tasks.config import TrainingConfig
from tasks.errors import JobFailed
from tasks.hardware.sku import Sku, load_sku
from tasks.programs import Program
from tasks.qualification.judge import judge
from tasks.qualification.measured import Measurement, read_measurement
from tasks.qualification.verdicts import ClusterVerdict, Reason
from tasks.qualification_config import BenchmarkConfig
from tasks.registry.records import Record, age_hours
from tasks.settings import digest, home
from tasks.stage import stage
from tasks.workbench import publish, run_job, scratch


def hardware_of(cluster: ClusterConfig, config: BenchmarkConfig) -> Sku:
    """What the cluster's machines are judged as. Raises ValueError when nothing is known of them."""
    name = config.sku or cluster.slurm.sku or cluster.azureml.size or ("" if cluster.gpus_per_node else "local-cpu")
    if not name:
        raise ValueError(
            f"cluster {cluster.name} has GPUs and names no VM size: set benchmark.sku; `headway hardware` lists them"
        )
    return load_sku(name, home() / "hardware")


def too_old(record: Record, args: tuple[Any, ...]) -> bool:
    """A qualification holds for its time, its machines and its baseline."""
    cluster, config = args
    there = cluster.backend != "local" or socket.gethostname() in record.value["hosts"]
    same = record.value["baseline"] == digest(hardware_of(cluster, config).model_dump(mode="json"))
    return age_hours(record) > config.max_age_hours or not there or not same


@stage(version=2, expires=too_old)
def benchmark(cluster: ClusterConfig, config: BenchmarkConfig, *, training: TrainingConfig) -> Qualification:
    """Measure every machine, and what they do together, and judge both. `training` is what the training probe runs."""
    sku = hardware_of(cluster, config)
    bare = unqualified(cluster)
    read = partial(read_measurement, nodes=bare.nodes, ranks_per_node=bare.ranks_per_node)
    try:
        job = run_job(program(cluster, config, training), on=bare)
        measured = read(job.output, seconds=job.result["seconds"])
    except JobFailed as error:
        measured = read(Path(error.folder) / "out", error=error.message.splitlines()[0])
    return _conclude(bare, sku, measured, judge(measured, sku, config))


def program(cluster: ClusterConfig, config: BenchmarkConfig, training: TrainingConfig) -> Program:
    """What measures, on the whole cluster."""
    settings = {
        "benchmark": config.model_dump(mode="json"),
        "sku": hardware_of(cluster, config).model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
        "threads": cluster.threads_per_rank,
    }
    return Program("tasks.jobs.benchmark", settings, restarts=0)


def _conclude(bare: Cluster, sku: Sku, measured: Measurement, verdict: ClusterVerdict) -> Qualification:
    checks = _checks(measured, verdict)
    subject = bare.model_copy(
        update={
            "matmul_gflops_per_rank": 1000 * min(_values(measured, "matmul_fp32"), default=0.0),
            "allreduce_gigabytes_per_second": _busbw(measured),
            "memory_bytes_per_node": round(min(_values(measured, "memory_gib"), default=0.0) * 2**30),
        }
    )
    page = {
        "verdict": verdict.model_dump(mode="json"),
        "measured": measured.model_dump(mode="json"),
        "sku": sku.model_dump(mode="json"),
        "checks": [check.model_dump() for check in checks],
    }
    with scratch() as folder:
        (folder / "qualification.json").write_text(json.dumps(page, indent=1))
        return publish(
            folder,
            Qualification,
            name=bare.name,
            metrics={
                "matmul_gflops_per_rank": subject.matmul_gflops_per_rank,
                "allreduce_gigabytes_per_second": subject.allreduce_gigabytes_per_second,
            },
            checks=checks,
            subject=subject,
            hosts=tuple(sorted({report.host for report in measured.ranks})),
            baseline=verdict.sku_digest,
        )


def _checks(measured: Measurement, verdict: ClusterVerdict) -> tuple[Check, ...]:
    """One a machine and one a reason; silence is not health."""
    reasons = [*verdict.reasons, *(reason for node in verdict.nodes for reason in node.reasons)]
    absent = measured.expected_nodes - len(measured.nodes)
    missing = Check(
        name="machines with a result",
        measured=measured.error or f"{len(measured.nodes)} of {measured.expected_nodes}",
        limit="all",
        passed=absent <= 0,
        remedy="" if absent <= 0 else "Read the job's logs; take the machine out.",
    )
    sound = (
        Check(name=n.name, measured=n.verdict, limit="healthy", passed=True) for n in verdict.nodes if not n.reasons
    )
    return (missing, *sound, *map(_check, reasons))


def _check(reason: Reason) -> Check:
    closed = reason.verdict in ("failed", "unknown")
    return Check(
        name=" ".join(part for part in (reason.node, reason.where, reason.check) if part),
        measured=reason.measured,
        limit=f"{reason.limit} {reason.unit}".strip(),
        passed=not closed,
        warned=not closed,
        remedy=reason.remedy,
    )


def _values(measured: Measurement, check: str) -> list[float]:
    probes = (probe for report in measured.ranks for probe in report.probes if probe.check == check)
    return [probe.measured for probe in probes if isinstance(probe.measured, float)]


def _busbw(measured: Measurement) -> float:
    """Of the largest message of the all-reduce over all ranks, in GB/s; 0 where there was none."""
    rows = [r for s in measured.sweeps if (s.collective, s.scope) == ("all_reduce", "all") for r in s.rows]
    return max(((row.bytes, row.busbw or 0.0) for row in rows), default=(0, 0.0))[1]
