"""Cluster -> Qualification: no training starts on machines that have not proven themselves.

The measuring is done by the program tasks/jobs/benchmark.py; what hardware must show is data in tasks/hardware, and the
verdict is tasks/qualification. A baseline is never written by the run that it judges. What is done with machines that failed is
tasks/orchestration/node_exclusion.py. See docs/qualification.md.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tasks.artifacts import Cluster, Pending, Qualification
from tasks.common.errors import JobFailed
from tasks.common.home import home
from tasks.compute import machines_of
from tasks.compute.nodes import read_mark
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig
from tasks.config.qualification import BenchmarkConfig
from tasks.config.training import TrainingConfig
from tasks.hardware.files import is_known
from tasks.hardware.sku import Sku, gpus_of, load_sku
from tasks.orchestration.job_spec import Program
from tasks.orchestration.node_exclusion import (
    Outcast,
    act_on,
    begins_with_few,
    left_of,
    machines,
    needed_nodes,
    require_possible,
    subject_of,
)
from tasks.orchestration.observers import Shown
from tasks.orchestration.run import current
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import at_work, intended_nodes, publish, run_again, run_job, scratch
from tasks.qualification.judge import Past, judge
from tasks.qualification.measured import Measurement, Sweep, read_measurement
from tasks.qualification.remaining import Remaining, gate_checks, usable
from tasks.qualification.verdicts import ClusterVerdict
from tasks.registry.qualifications import PAGE, past, stored
from tasks.registry.records import Record, age_hours
from tasks.report.qualification.report import write_qualification

ROUNDS = 3
"""Most often that what is left is measured again by itself; each time some machine was left out."""


@dataclass(frozen=True)
class Proof:
    """What was measured, the verdict on it, and what is left."""

    measured: Measurement
    verdict: ClusterVerdict
    left: Remaining
    lost: tuple[str, ...] = ()
    """Machines that failed under the job and ended it for all."""
    gone: tuple[str, ...] = ()
    """Machines that were out before the last measurement: nobody measures them again."""

    @property
    def unproven(self) -> tuple[str, ...]:
        """Machines that must show by themselves what they do without the others; none: nothing is open."""
        if self.lost and self.left.excluded:
            return tuple(name for name in self.measured.nodes if name not in (*self.lost, *self.gone))
        return self.left.nodes if self.left.needs_fresh_run else ()


def hardware_of(cluster: ClusterConfig, config: BenchmarkConfig) -> Sku:
    """What the cluster's machines are judged as. Raises ValueError when nothing is known of them."""
    name, folder = config.sku or cluster.size, home() / "hardware"
    if not (config.sku or cluster.gpus_per_node or is_known(name, folder)):
        name = "local-cpu"  # files are of sizes with GPUs; of a small size for CPUs there is none
    if not name:
        raise ValueError(
            f"cluster {cluster.name} has GPUs and names no VM size: set benchmark.sku; `headway hardware` lists them"
        )
    return load_sku(name, folder)


SAME_GPUS = "set cluster.gpus_per_node and cluster.ranks_per_node to that number, or name the size that you have"


def gpu_mismatch(cluster: ClusterConfig) -> str:
    """The two numbers, where jobs use another number of GPUs than the VM size that is named has; empty: they agree."""
    existing = gpus_of(cluster.size, home() / "hardware") if cluster.size and cluster.gpus_per_node else None
    if existing in (None, cluster.gpus_per_node):
        return ""
    idle = "; the others would stand idle" if existing and existing > cluster.gpus_per_node else ""
    return f"cluster.gpus_per_node is {cluster.gpus_per_node}, and a {cluster.size} has {existing} GPUs{idle}"


def require_gpus(cluster: ClusterConfig) -> None:
    """Raise ValueError when jobs ask for more GPUs than the VM size that is named has."""
    text = gpu_mismatch(cluster)
    if text and "idle" not in text:
        raise ValueError(f"{text}: {SAME_GPUS}")


def too_old(record: Record, args: tuple[Any, ...]) -> bool:
    """A qualification holds for its time, its machines and its baseline."""
    cluster, config = args
    reachable = not cluster.capabilities.this_machine or socket.gethostname() in record.value["hosts"]
    same = record.value["baseline"] == sku_digest(hardware_of(cluster, config))
    return age_hours(record) > config.max_age_hours or not reachable or not same or _condemned_since(record, cluster)


def _condemned_since(record: Record, cluster: ClusterConfig) -> bool:
    """Whether a later qualification, by whatever settings, found one of its machines bad."""
    mine = set(record.value["subject"]["proven"] or record.value["machines"])
    for one in stored(current().store, cluster.name):
        if one.time.timestamp() <= record.created:
            return False
        if mine & set(one.verdict.named("failed", "unknown")):
            return True
    return False


def sku_digest(sku: Sku) -> str:
    """By which a verdict says what it was judged by."""
    return digest(sku.model_dump(mode="json"))


RATES = ("machines_usable", "matmul_gflops_per_rank", "allreduce_gigabytes_per_second")


@stage(
    version=3,
    expires=too_old,
    shown=Shown(
        line=(
            "{machines_usable:.0f} machine(s), {matmul_gflops_per_rank:.1f} GFLOP/s a rank, all-reduce "
            "{allreduce_gigabytes_per_second:.2f} GB/s"
        ),
        metrics=RATES,
        headlines=RATES,
        part="qualification.json",
    ),
)
def benchmark(cluster: ClusterConfig, config: BenchmarkConfig, *, training: TrainingConfig) -> Qualification:
    """Measure every machine, and what they do together, and judge both. `training` is what the training probe runs."""
    require_possible(cluster, config)
    sku = hardware_of(cluster, config)
    # What earlier qualifications as the same hardware say of the machines; they stand in the lineage beside the
    # inputs.
    work = at_work()
    results = [one for one in stored(work.lifecycle.store, cluster.name) if one.verdict.sku == sku.name]
    work.context += [one.manifest.ref for one in results]
    before = past(results)
    asked = program(cluster, config, training)
    first = machines(cluster, config, existing=intended_nodes() or machines_of(cluster).count(config.nodes))
    proof = _prove(asked, first, cluster, config, sku, before)
    for _ in range(ROUNDS):
        on = _still_to_measure(proof, cluster, config)
        if on is None:
            break
        again = f"rest-{digest(on.proven or on.config.exclude)[:8]}"
        proof = joined(proof, _prove(asked, on, cluster, config, sku, before, again=again))
    outcast = act_on(proof.measured, proof.verdict, proof.left, cluster, config)
    return _conclude(cluster, config, sku, proof, outcast)


def _still_to_measure(proof: Proof, cluster: ClusterConfig, config: BenchmarkConfig) -> Cluster | None:
    """What is left, by itself, where nothing proves that; others in the place of bad machines, where a job begins with few."""
    needed = needed_nodes(cluster, config)
    if len(proof.unproven) >= needed:
        return machines(cluster, config, only=proof.unproven)
    bad = sorted(name for name in proof.left.excluded if " " not in name and name not in cluster.exclude)
    if not bad or not begins_with_few(cluster, config) or len(usable(proof.verdict, proof.left)) >= needed:
        return None
    others = cluster.model_copy(update={"exclude": (*cluster.exclude, *bad)})
    existing = machines_of(others).count()
    return None if existing is not None and existing < needed else machines(others, config, existing=existing)


def admitting(on: Cluster, config: BenchmarkConfig, training: TrainingConfig) -> Cluster:
    """The cluster that also takes in machines which nobody measured, for elastic jobs; each measures itself before it joins."""
    if isinstance(on, Pending) or not begins_with_few(on.config, config):
        return on
    return on.model_copy(update={"admission": program(on.config, config, training).settings})


def program(cluster: ClusterConfig, config: BenchmarkConfig, training: TrainingConfig) -> Program:
    """What measures, on the whole cluster."""
    settings = {
        "benchmark": config.model_dump(mode="json"),
        "sku": hardware_of(cluster, config).model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
        "threads": cluster.threads_per_rank,
    }
    return Program("tasks.jobs.benchmark", settings, restarts=0)


def _prove(
    asked: Program,
    on: Cluster,
    cluster: ClusterConfig,
    config: BenchmarkConfig,
    sku: Sku,
    before: Sequence[Past],
    *,
    again: str = "",
) -> Proof:
    measured, lost = measure(asked, on, hours=config.max_age_hours, again=again)
    verdict = judge(measured, sku, config.model_copy(update={"nodes": on.proven}), before)
    return Proof(measured, verdict, left_of(verdict, cluster, config), lost)


def measure(asked: Program, on: Cluster, *, hours: float, again: str = "") -> tuple[Measurement, tuple[str, ...]]:
    """What the machines of a cluster show, of a job that failed what there is of it; and machines that made it fail."""
    began, error = time.monotonic(), ""
    try:
        result = run_job(asked, on=on, again=again)
        if result.adopted and _hours_since_end(Path(result.folder)) > hours:
            result = run_again(asked, on=on, again=again)
        folder = Path(result.folder)
    except JobFailed as failed:
        if not failed.folder:
            raise
        folder, error = Path(failed.folder), failed.message.splitlines()[0]
    measured = read_measurement(
        folder / "out",
        nodes=on.nodes,
        ranks_per_node=on.ranks_per_node,
        error=error,
        seconds=time.monotonic() - began,
    )
    came = [str(read_mark(mark).get("name", "")) for mark in sorted((folder / "nodes").glob("*/node.json"))]
    known = dict.fromkeys([*on.proven, *measured.nodes, *filter(None, came)])
    end = read_mark(folder / "settled.json") if error else {}
    lost = tuple(end.get("nodes", ())) if end.get("failure") == "node" else ()
    return measured.model_copy(update={"nodes": tuple(known)}), lost


def _hours_since_end(folder: Path) -> float:
    """Of a job that ended while nobody looked: what it measured may have been true then."""
    ended = read_mark(folder / "nodes" / "0" / "exit.json").get("ended") or (folder / "result.json").stat().st_mtime
    return (time.time() - float(ended)) / 3600


def joined(first: Proof, second: Proof) -> Proof:
    """The second proof is of the rest; what is known of the others is from the first."""
    rest = {node.name for node in second.verdict.nodes}
    others = [node for node in first.verdict.nodes if node.name not in rest]
    pairs = [pair for pair in first.verdict.pairs if not {pair.a, pair.b} <= rest]
    verdict = second.verdict.model_copy(
        update={"nodes": (*second.verdict.nodes, *others), "pairs": (*second.verdict.pairs, *pairs)}
    )
    out_before = {name: why for name, why in first.left.excluded.items() if name not in rest}
    left = second.left.model_copy(update={"excluded": {**out_before, **second.left.excluded}})
    out = {node.name for node in others}
    measured = second.measured.model_copy(
        update={
            "nodes": tuple(dict.fromkeys([*second.measured.nodes, *first.measured.nodes])),
            "ranks": (*second.measured.ranks, *(rank for rank in first.measured.ranks if rank.node in out)),
            "sweeps": (*second.measured.sweeps, *(sweep for sweep in first.measured.sweeps if out & set(sweep.nodes))),
            "seconds": first.measured.seconds + second.measured.seconds,
        }
    )
    return Proof(measured, verdict, left, second.lost, tuple(out))


def _conclude(
    cluster: ClusterConfig, config: BenchmarkConfig, sku: Sku, proof: Proof, outcast: Outcast
) -> Qualification:
    measured, left = proof.measured, proof.left
    verdict = proof.verdict.model_copy(update={"verdict": left.verdict})
    checks = (*gate_checks(verdict, left, needed=needed_nodes(cluster, config)), *outcast.checks)
    rates = {**_rates(measured, left), "peak_tflops": _peaks(sku), "sku": sku.name}
    subject = subject_of(cluster, config, left).model_copy(update=rates)
    expires = (datetime.now(UTC) + timedelta(hours=config.max_age_hours)).isoformat(timespec="seconds")
    page = {
        "name": cluster.name,
        "verdict": verdict.model_dump(mode="json"),
        "remaining": left.model_dump(mode="json"),
        "usable": usable(verdict, left),
        "expires": expires,
        "measured": measured.model_dump(mode="json"),
        "sku": sku.model_dump(mode="json"),
        "checks": [check.model_dump() for check in checks],
        "drained": [one.model_dump() for one in outcast.drained],
        "requests": [one.model_dump() for one in outcast.requests],
    }
    with scratch() as folder:
        (folder / PAGE).write_text(json.dumps(page, indent=1))
        write_qualification(folder, page)
        counts = {
            f"machines_{name}": float(len(verdict.named(name))) for name in ("healthy", "degraded", "failed", "unknown")
        }
        metrics = {
            "matmul_gflops_per_rank": subject.matmul_gflops_per_rank,
            "allreduce_gigabytes_per_second": subject.allreduce_gigabytes_per_second,
            "machines_usable": float(len(usable(verdict, left))),
            **counts,
        }
        return publish(
            folder,
            Qualification,
            name=cluster.name,
            metrics=metrics,
            checks=checks,
            subject=subject,
            hosts=tuple(sorted({report.host for report in measured.ranks})),
            baseline=sku_digest(sku),
            verdict=verdict.verdict,
            sku=sku.name,
            expires=expires,
            machines={node.name: node.verdict for node in verdict.nodes},
        )


def _rates(measured: Measurement, left: Remaining) -> dict[str, Any]:
    """What the plan reckons with, of the machines that are left."""
    return {
        "matmul_gflops_per_rank": 1000 * min(_values(measured, "matmul_fp32", left), default=0.0),
        "allreduce_gigabytes_per_second": busbw_of(measured, left),
        "memory_bytes_per_node": round(min(_values(measured, "memory_gib", left), default=0.0) * 2**30),
    }


def _peaks(sku: Sku) -> dict[str, float]:
    """By precision of training, as the file of the hardware has them; of CPUs it has none."""
    result = {precision: sku.specs.get(f"peak_{precision}_tflops") for precision in ("fp32", "bf16")}
    return {precision: float(number.value) for precision, number in result.items() if number}


def _values(measured: Measurement, check: str, left: Remaining) -> list[float]:
    reports = [report for report in measured.ranks if report.node in left.nodes or not left.nodes]
    probes = (probe for report in reports for probe in report.probes if probe.check == check)
    return [probe.measured for probe in probes if isinstance(probe.measured, float)]


def busbw_of(measured: Measurement, left: Remaining) -> float:
    """Of the largest message of the all-reduce over the machines that are left, in GB/s; 0 where there was none.

    Where only all machines were measured together, a bad one among them, it is the slowest pair's of those that are left.
    """
    sums = [sweep for sweep in measured.sweeps if sweep.collective == "all_reduce"]
    over_all = [sweep for sweep in sums if sweep.scope == "all"]
    rest = [sweep for sweep in over_all if set(sweep.nodes) <= set(left.nodes)]
    pairs = [sweep for sweep in sums if sweep.scope == "pair" and set(sweep.nodes) <= set(left.nodes)]
    if rest or not pairs:
        return max(map(_largest, rest or over_all), default=(0, 0.0))[1]
    best: dict[tuple[str, ...], tuple[int, float]] = {}
    for sweep in pairs:
        best[sweep.nodes] = max(best.get(sweep.nodes, (0, 0.0)), _largest(sweep))
    return min(rate for _, rate in best.values())


def _largest(sweep: Sweep) -> tuple[int, float]:
    """Bytes and bus bandwidth of a sweep's largest message."""
    return max(((row.bytes, row.busbw or 0.0) for row in sweep.rows), default=(0, 0.0))
