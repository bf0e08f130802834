"""Cluster -> Qualification: no training starts on machines that have not proven themselves.

The measuring is done by the program tasks/jobs/benchmark.py; baselines are data in tasks/hardware/baselines. A baseline is
never written by the run that it judges.
"""

from __future__ import annotations

import json
import socket
import statistics
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tasks.artifacts import Check, Cluster, Qualification, unqualified
from tasks.cluster_config import ClusterConfig
from tasks.config import BenchmarkConfig
from tasks.errors import JobFailed
from tasks.programs import Program
from tasks.registry.records import Record, age_hours
from tasks.settings import digest
from tasks.stage import stage
from tasks.workbench import publish, run_job, scratch

BASELINES = Path(__file__).parent / "hardware" / "baselines"


class Baseline(BaseModel):
    """Rates that a cluster must reach."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    """Where the numbers come from."""
    matmul_gflops_per_rank: float = Field(gt=0)
    allreduce_gigabytes_per_second: float = Field(gt=0)


def load_baseline(name: str) -> Baseline:
    """A baseline by name, or by the path of a JSON file. Raises ValueError when there is none."""
    path = Path(name) if name.endswith(".json") else BASELINES / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in BASELINES.glob("*.json")))
        raise ValueError(f"benchmark.baseline {name!r} is not there; known: {known}, or the path of a .json file")
    return Baseline.model_validate_json(path.read_text())


def too_old(record: Record, args: tuple[Any, ...]) -> bool:
    """A qualification holds for its time, its machines and its baseline."""
    cluster, config = args
    there = cluster.backend != "local" or socket.gethostname() in record.value["hosts"]
    same = record.value["baseline"] == digest(load_baseline(config.baseline).model_dump(mode="json"))
    return age_hours(record) > config.max_age_hours or not there or not same


@stage(version=1, expires=too_old)
def benchmark(cluster: ClusterConfig, config: BenchmarkConfig) -> Qualification:
    """Measure every rank's matmul rate and the all-reduce bandwidth, and judge both."""
    baseline = load_baseline(config.baseline)
    bare = unqualified(cluster)
    try:
        job = run_job(program(cluster, config), on=bare)
        measured = _read(job.output / "measurement.json")
    except JobFailed as error:
        measured = {"error": error.message.splitlines()[0]}
    return _conclude(bare, config, baseline, measured)


def program(cluster: ClusterConfig, config: BenchmarkConfig) -> Program:
    """What measures, on the whole cluster."""
    settings = {"benchmark": config.model_dump(mode="json"), "threads": cluster.threads_per_rank}
    return Program("tasks.jobs.benchmark", settings, restarts=0)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"error": "the job ended without writing its measurement"}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _conclude(bare: Cluster, config: BenchmarkConfig, baseline: Baseline, measured: dict[str, Any]) -> Qualification:
    checks = judge(measured, config, baseline, world_size=bare.world_size)
    ranks = measured.get("ranks", [])
    subject = bare.model_copy(
        update={
            "matmul_gflops_per_rank": min((r["matmul_gflops"] for r in ranks), default=0.0),
            "allreduce_gigabytes_per_second": measured.get("allreduce", {}).get("gigabytes_per_second", 0.0),
            "memory_bytes_per_node": min((r["memory_bytes"] for r in ranks), default=0),
        }
    )
    page = {**measured, "baseline": baseline.model_dump(), "checks": [check.model_dump() for check in checks]}
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
            hosts=tuple(sorted({r["host"] for r in ranks})),
            baseline=digest(baseline.model_dump(mode="json")),
        )


def judge(
    measured: dict[str, Any], config: BenchmarkConfig, baseline: Baseline, *, world_size: int
) -> tuple[Check, ...]:
    """Checks by name: every rank has a result, none is slow against the baseline or its peers, the all-reduce is right.

    A result that was never written is a failed check: silence is not health.
    """
    ranks = {int(row["rank"]): row for row in measured.get("ranks", [])}
    checks = [check for rank in range(world_size) for check in _judge_rank(rank, ranks, config, baseline, measured)]
    return (*checks, *_judge_allreduce(measured, baseline)) if world_size > 1 else tuple(checks)


def _judge_rank(
    rank: int, ranks: dict[int, dict[str, Any]], config: BenchmarkConfig, baseline: Baseline, measured: dict[str, Any]
) -> list[Check]:
    row = ranks.get(rank)
    if row is None:
        said = measured.get("error", "no result")
        remedy = "Read the job's logs; take the node out."
        return [
            Check(name=f"rank {rank}: result", measured=said, limit="a written result", passed=False, remedy=remedy)
        ]
    where = f"rank {rank} on {row['host']}"
    rate, floor = row["matmul_gflops"], baseline.matmul_gflops_per_rank
    checks = [_at_least(f"{where}: matmul GFLOP/s", rate, floor, f"Slower than baseline {baseline.name}.")]
    others = [other["on_core_gflops"] for number, other in ranks.items() if number != rank]
    if others:
        peers = config.min_of_peers * statistics.median(others)
        remedy = "Slower than its peers while it had its core: throttled, or a bad part? Take the node out."
        checks.append(_at_least(f"{where}: matmul GFLOP/s against its peers", row["on_core_gflops"], peers, remedy))
    return checks


def _judge_allreduce(measured: dict[str, Any], baseline: Baseline) -> list[Check]:
    found = measured.get("allreduce")
    if not found:
        remedy = "Read the job's logs: the ranks did not reach each other."
        return [Check(name="all-reduce", measured=None, limit="a written result", passed=False, remedy=remedy)]
    rate, floor = found["gigabytes_per_second"], baseline.allreduce_gigabytes_per_second
    right = Check(
        name="all-reduce: sum",
        measured="correct" if found["correct"] else "wrong",
        limit="correct",
        passed=bool(found["correct"]),
        remedy="A wrong sum is silent data corruption: take the node out.",
    )
    return [
        right,
        _at_least("all-reduce: GB/s", rate, floor, f"Slower than baseline {baseline.name}: look at the network."),
    ]


def _at_least(name: str, measured: float, limit: float, remedy: str) -> Check:
    return Check(name=name, measured=measured, limit=f">= {limit:.4g}", passed=measured >= limit, remedy=remedy)
