"""What happens to machines that did not qualify: which are left for the jobs to come, and what is done with the others.

The rules of who is out are tasks/qualification/remaining.py; this file is between them and the backends. See
docs/qualification.md, "What happens to a bad machine".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from tasks.artifacts import Check, Cluster, unqualified
from tasks.compute import machines_of
from tasks.compute.azureml.support_requests import Request, requests
from tasks.compute.nodes import Drained
from tasks.config.cluster import ClusterConfig
from tasks.config.qualification import BenchmarkConfig
from tasks.orchestration.stage_context import at_work
from tasks.qualification.measured import Measurement
from tasks.qualification.pairs import EITHER
from tasks.qualification.remaining import Remaining, remaining
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, Reason
from tasks.security.audit import audit

FAULT_CODE = re.compile(r"\bNHC\d{4}\b")
"""Of AzNHC."""


@dataclass(frozen=True)
class Outcast:
    """What was done with machines that are out."""

    drained: tuple[Drained, ...]
    requests: tuple[Request, ...]
    checks: tuple[Check, ...]
    """What people should read of it; none of them closes the gate."""


def require_possible(cluster: ClusterConfig, config: BenchmarkConfig) -> None:
    """Raise ValueError for machines that cannot be chosen on this backend."""
    for setting, value in (("benchmark.nodes", ", ".join(config.nodes)), ("benchmark.spare_nodes", config.spare_nodes)):
        if value and (why := cluster.capabilities.cannot_choose):
            raise ValueError(f"{setting} is {value}: {why}. Leave it empty")


def require_proof(cluster: ClusterConfig, config: BenchmarkConfig) -> None:
    """Raise ValueError for a qualification that could not let a training run start, whatever it finds."""
    require_possible(cluster, config)
    fewest = config.act.min_nodes or (cluster.elastic.min_nodes if cluster.elastic else cluster.nodes)
    if config.nodes and len(config.nodes) < fewest:
        raise ValueError(f"benchmark.nodes names {len(config.nodes)} machines, and training needs {fewest}: name more")
    missing = [name for name in ("compute", "collectives") if name not in config.groups]
    if missing:
        raise ValueError(
            f"benchmark.checks lacks {', '.join(missing)}: the plan of a training run is computed from what they measure"
        )


def needed_nodes(cluster: ClusterConfig, config: BenchmarkConfig) -> int:
    """Fewest machines with which the runs to come go on."""
    least = cluster.elastic.min_nodes if cluster.elastic else cluster.nodes
    return min(config.act.min_nodes or least, len(config.nodes) or least)


def begins_with_few(cluster: ClusterConfig, config: BenchmarkConfig) -> bool:
    """Whether jobs begin on the fewest machines, and each that comes later measures itself: where no machines are named."""
    return bool(cluster.elastic) and not config.nodes and not cluster.capabilities.cannot_choose


def machines(
    cluster: ClusterConfig, config: BenchmarkConfig, *, only: tuple[str, ...] = (), existing: int | None = None
) -> Cluster:
    """The machines that are measured, and which they are where that is said; as one job of fixed size, which runs once.

    An elastic job's are as many as it needs to begin; what comes later measures itself (tasks/jobs/node/admission.py).
    `existing` is how many a job could get: spares that are drained are not waited for. Slurm must not queue the job again when a
    machine is lost: it would wait for that machine, and the loss is what it found.
    """
    names = only or config.nodes
    once = cluster.slurm.model_copy(update={"requeue": False})
    rigid = cluster.model_copy(update={"elastic": None, "slurm": once})
    most = cluster.elastic.max_nodes if cluster.elastic else cluster.nodes
    at_first = needed_nodes(cluster, config) if begins_with_few(cluster, config) else most
    wanted = len(names) or at_first + config.spare_nodes
    most = wanted if existing is None else min(wanted, max(existing, needed_nodes(cluster, config)))
    return unqualified(rigid).model_copy(update={"nodes": most, "proven": names})


def left_of(verdict: ClusterVerdict, cluster: ClusterConfig, config: BenchmarkConfig) -> Remaining:
    """The machines that the runs to come may use. Where none can be chosen, none can be left out."""
    needed = needed_nodes(cluster, config)
    if cluster.capabilities.cannot_choose:
        act = config.act.model_copy(update={"exclude": False})
        config = config.model_copy(update={"act": act})
    return remaining(verdict, config, needed)


def subject_of(cluster: ClusterConfig, config: BenchmarkConfig, left: Remaining) -> Cluster:
    """The cluster that the verdict vouches for: fewer or other machines than were asked for, and the bad ones named."""
    bare = unqualified(cluster)
    if cluster.capabilities.cannot_choose:
        return bare
    most = cluster.elastic.max_nodes if cluster.elastic else cluster.nodes
    nodes = max(min(most, len(left.nodes)), 1)
    out = [name for name in left.excluded if name not in cluster.exclude and " " not in name]
    elastic = cluster.elastic
    if elastic and not begins_with_few(cluster, config):
        elastic = elastic.model_copy(update={"max_nodes": nodes, "min_nodes": min(elastic.min_nodes, nodes)})
    config_now = cluster.model_copy(
        update={"nodes": nodes, "exclude": (*cluster.exclude, *sorted(out)), "elastic": elastic}
    )
    return bare.model_copy(update={"nodes": nodes, "proven": left.nodes, "config": config_now})


def act_on(
    measured: Measurement, verdict: ClusterVerdict, left: Remaining, cluster: ClusterConfig, config: BenchmarkConfig
) -> Outcast:
    """Drain what is to be drained, and render what somebody may send."""
    bad = [node for node in verdict.nodes if _failed(node) or _unreachable(node, measured, verdict)]
    drained = _drained(bad, cluster, config, of=len(verdict.nodes)) if config.act.drain else ()
    asked = tuple(request for node in bad for request in _requests(node, measured, cluster))
    checks = [*map(_drain_check, drained)]
    can = cluster.capabilities
    if can.cannot_choose and not can.this_machine:
        checks.append(
            Check(
                name="jobs run on these machines",
                measured=can.cannot_choose,
                limit="the machines that qualified",
                passed=True,
                warned=True,
                remedy="Give the compute cluster as many nodes as the job has, and no more: then there are no others.",
            )
        )
    return Outcast(drained, asked, tuple(checks))


def why(node: NodeVerdict) -> str:
    """The first reason that condemns a machine, as a sentence."""
    result = _worst(node)
    return result.sentence if result else f"{node.name} is {node.verdict}"


def _worst(node: NodeVerdict) -> Reason | None:
    failed = (reason for reason in node.reasons if reason.verdict == "failed")
    return next(failed, None) or next((reason for reason in node.reasons if reason.verdict == node.verdict), None)


def _failed(node: NodeVerdict) -> bool:
    """Something of it was seen to be bad, whatever else is unknown of it: who dies of a fault leaves checks unfinished.

    What may be another machine's fault does not count: a sound one would be drained.
    """
    results = [reason for reason in node.reasons if reason.verdict == "failed"]
    return any(not reason.where.startswith(EITHER) for reason in results)


def _unreachable(node: NodeVerdict, measured: Measurement, verdict: ClusterVerdict) -> bool:
    """Nothing came from it while others came to their end: the machine's fault, not ours."""
    silent = all(report.node != node.name for report in measured.ranks)
    return silent and node.verdict == "unknown" and " " not in node.name and bool(verdict.named("healthy", "degraded"))


def _drained(
    bad: list[NodeVerdict], cluster: ClusterConfig, config: BenchmarkConfig, *, of: int
) -> tuple[Drained, ...]:
    """In the audit log before it is done: who asked for it is who started the run. Too many are left to a person."""
    reasons = {node.name: why(node).removeprefix(f"{node.name}: ") for node in bad}
    if not cluster.capabilities.cannot_drain and len(reasons) > max(1, int(config.act.drain_share * of)):
        share = f"benchmark.act.drain_share is {config.act.drain_share:g}"
        text = f"left for you to decide: {len(reasons)} of {of} machines failed at once, and {share}"
        return tuple(Drained(node=name, done=False, said=text) for name in reasons)
    for name, reason in reasons.items():
        audit(at_work().lifecycle.store, "drain", what=f"{cluster.name} {name}", reason=reason)
    return machines_of(cluster).drain(reasons)


def _drain_check(one: Drained) -> Check:
    remedy = "" if one.done else f"Keep jobs of others away from it by hand, or: `headway qualify --drain {one.node}`."
    return Check(
        name=f"{one.node} drained", measured=one.said, limit="drained", passed=True, warned=True, remedy=remedy
    )


def _requests(node: NodeVerdict, measured: Measurement, cluster: ClusterConfig) -> tuple[Request, ...]:
    facts = {k: v for report in measured.ranks if report.node == node.name for k, v in report.machine.items()}
    result = _worst(node)
    code = FAULT_CODE.search(f"{result.source} {result.said}") if result else None
    check = code[0] if code else result.check if result else ""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return requests(node.name, facts, cluster=cluster, check=check, text=why(node), when=now)
