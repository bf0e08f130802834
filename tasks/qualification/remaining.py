"""Which machines a run may use after a verdict, and the checks of the gate: without those that failed, and only with proof of
the rest.

What all machines did together says nothing of the rest as soon as one of them is left out. Pairs and parts among the rest do: the
rest is proven when sound pairs, parts or a sound sweep of more machines connect it and no bad link is inside. Otherwise the rest
must be qualified by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tasks.artifacts import Check
from tasks.config.qualification import COLLECTIVES, BenchmarkConfig, Verdict
from tasks.hardware.sku import Sku
from tasks.qualification.measured import Measurement, RankReport
from tasks.qualification.verdicts import WORST, ClusterVerdict, NodeVerdict, Reason, Value, worst

# Who was to say something, and did not. Silence is not health.


SOURCE = "Headway: what is missing is unknown"
LOGS = "Read the job's logs of this machine; give it more time with benchmark.check_seconds where it ran out of it."
HEALTH = (
    "gpu_count", "gpu_smi", "xid", "ecc", "rows", "throttle", "sm_clock", "memory_clock", "persistence", "nvlink_down",
    "ib_ports_active", "ib_rate", "link_flaps", "sriov", "nvme_count", "memory_gib", "cpu_count", "time_skew", "scratch_free",
)  # fmt: skip
RATES = {
    "compute": ("matmul_fp32", "matmul_tf32", "matmul_bf16", "matmul_fp16", "matmul_fp8"),
    "memory": ("memory_bandwidth", "host_to_device", "device_to_host", "peer_to_peer"),
    "soak": ("soak_drop", "temperature"),
    "storage": ("scratch_write", "scratch_read"),
}
"""Groups that measure some of these; which ones depends on the depth and the hardware."""


def known_nodes(measurement: Measurement, config: BenchmarkConfig) -> tuple[str, ...]:
    """Every machine that anything names: the configuration, the job, a rank, a sweep; sorted."""
    named = {*config.nodes, *measurement.nodes, *(report.node for report in measurement.ranks)}
    named |= {node for sweep in measurement.sweeps for node in sweep.nodes}
    return tuple(sorted(named | {node for point in measurement.training for node in point.nodes}))


def switches(measurement: Measurement) -> dict[str, str]:
    """The switch that each machine is under, of those that said it."""
    return {report.node: report.machine["switch"] for report in measurement.ranks if report.machine.get("switch")}


def absent(measurement: Measurement, known: int) -> tuple[NodeVerdict, ...]:
    """Machines that were expected and have not even a name."""
    expected = measurement.expected_nodes
    return tuple(
        NodeVerdict(name=name, verdict="unknown", reasons=(_silent(name, measurement.error),))
        for name in (f"machine {number} of {expected}" for number in range(known + 1, expected + 1))
    )


def of_node(name: str, measurement: Measurement, sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    """Ranks, groups of checks and probes of a machine that are not there. Logs of a cluster that ran no job of ours have none."""
    mine = [report for report in measurement.ranks if report.node == name]
    if not measurement.expected_nodes:
        return
    if not mine:
        yield _silent(name, measurement.error)
        return
    if len(mine) < measurement.ranks_per_node:
        yield _missing(name, "ranks", f"{len(mine)}", f"= {measurement.ranks_per_node}", "Some ranks left no result.")
    finished = set.intersection(*(set(report.done) for report in mine))
    for group in config.groups:
        if group not in finished:
            text = measurement.error or "It began and did not come to its end."
            yield _missing(name, group, "not finished", "finished", text)
        else:
            yield from _not_looked(name, group, mine, sku)


def _not_looked(name: str, group: str, mine: list[RankReport], sku: Sku) -> Iterator[Reason]:
    existing = {probe.check for report in mine for probe in report.probes}
    text = "The hardware's file has a limit for it, and nobody measured it."
    if group == "health":
        for check in (check for check in HEALTH if check in sku.limits and check not in existing):
            yield _missing(name, check, "nothing", "a measurement", text)
    limited = [check for check in RATES.get(group, ()) if check in sku.limits]
    if limited and not existing & set(RATES[group]):
        yield _missing(name, group, "nothing", f"one of {', '.join(limited)}", text)


def of_cluster(measurement: Measurement, unfinished: tuple[str, ...]) -> Iterator[Reason]:
    """A job that ended early, and a measurement of nothing."""
    if measurement.error:
        yield _missing("", "job", "ended early", "its end", measurement.error, nodes=unfinished)
    if not (measurement.ranks or measurement.sweeps or measurement.training):
        yield _missing("", "measurement", "empty", "at least one machine", measurement.error or "Nothing was measured.")


def _silent(name: str, error: str) -> Reason:
    return _missing(name, "result", "none", "a result", error or "It was expected and never reported.")


def _missing(node: str, check: str, measured: str, limit: str, text: str, nodes: tuple[str, ...] = ()) -> Reason:
    return Reason(
        node=node,
        check=check,
        measured=measured,
        limit=limit,
        source=SOURCE,
        verdict="unknown",
        said=text,
        remedy=LOGS,
        nodes=nodes,
    )


CLOSED: tuple[Verdict, ...] = ("failed", "unknown")


class Remaining(Value):
    """What is left of a cluster."""

    nodes: tuple[str, ...]
    """Machines that may be used, healthiest first."""
    excluded: dict[str, str]
    """The others, each with why, as a sentence."""
    enough: bool
    """Whether as many are left as are needed."""
    verdict: Verdict
    """Of those that are left, together; the gate opens for healthy and degraded."""
    reasons: tuple[Reason, ...] = ()
    """Of the cluster, that hold for those that are left."""
    needs_fresh_run: bool = False
    """Nothing proves the rest together: qualify them once more by themselves."""


def remaining(verdict: ClusterVerdict, config: BenchmarkConfig, needed: int) -> Remaining:
    """What is left when the machines that config.act leaves out are out; `needed`: config.act.min_nodes or cluster.nodes."""
    excluded = _excluded(verdict, config, needed)
    left = {node.name: node for node in verdict.nodes if node.name not in excluded}
    holding = tuple(reason for reason in verdict.reasons if set(reason.nodes) <= set(left))
    together = {"collectives", "pairs"} & set(config.groups)
    several = bool(excluded and together and len(left) > 1)
    fresh = several and (not _proven(set(left), verdict) or _unexplained(set(left), verdict))
    reasons = holding
    if fresh:
        nodes = tuple(sorted(left))
        unproven = Reason(
            node="",
            check="the rest together",
            measured=None,
            limit="sound pairs or parts that connect all of them",
            source="Headway: what was not measured is unknown",
            verdict="unknown",
            said="nothing sound that was measured connects the machines that are left",
            remedy=f"Qualify them by themselves: `headway qualify --nodes {','.join(nodes)}`.",
            nodes=nodes,
        )
        reasons = (*holding, unproven)
    result = worst(*(node.verdict for node in left.values()), *(reason.verdict for reason in reasons))
    enough = len(left) >= max(1, needed)
    return Remaining(
        nodes=tuple(sorted(left, key=lambda name: _health(left[name]))),
        excluded=excluded,
        enough=enough,
        verdict=result if enough else worst(verdict.verdict, "failed"),
        reasons=reasons,
        needs_fresh_run=fresh and enough,
    )


def _health(node: NodeVerdict) -> tuple[int, float, str]:
    return -WORST.index(node.verdict), -node.standing, node.name


def _excluded(verdict: ClusterVerdict, config: BenchmarkConfig, needed: int) -> dict[str, str]:
    """By their own verdict, then all but one of the groups between which the network is bad, then one end of each bad link,
    the end with more of them first, else the less healthy one."""
    if not config.act.exclude:
        return {}
    out: tuple[Verdict, ...] = CLOSED if config.act.degraded == "use" else (*CLOSED, "degraded")
    excluded = {
        node.name: node.reasons[0].sentence if node.reasons else f"{node.name} is {node.verdict}"
        for node in verdict.nodes
        if node.verdict in out
    }
    excluded |= _cut_off(verdict, set(excluded), needed)
    pairs = [pair for pair in verdict.pairs if pair.verdict in out and not {pair.a, pair.b} & set(excluded)]
    # What lies between two groups is the network's.
    links = [pair for pair in pairs if sum(pair.a in group or pair.b in group for group in verdict.groups) != 2]
    health = {node.name: _health(node) for node in verdict.nodes}
    while links:
        counts = Counter(name for pair in links for name in (pair.a, pair.b))
        last = max(counts, key=lambda name: (counts[name], health[name]))
        mine = [pair for pair in links if last in (pair.a, pair.b)]
        others = ", ".join(pair.b if pair.a == last else pair.a for pair in mine)
        bad = worst(*(pair.verdict for pair in mine))
        excluded[last] = f"{last}: its pairs with {others} are {bad}, and with it out none is left ({mine[0].said})"
        links = [pair for pair in links if last not in (pair.a, pair.b)]
    return excluded


def _cut_off(verdict: ClusterVerdict, excluded: set[str], needed: int) -> dict[str, str]:
    """Of groups between which the network is bad the largest is used, where it is large enough; nobody is out where it is not."""
    groups = [[name for name in group if name not in excluded] for group in verdict.groups]
    best = max(groups, key=len, default=[])
    if len(best) < max(1, needed):
        return {}
    text = "the network between it and the machines that are used is bad, and nothing was found wrong with it"
    return {node.name: f"{node.name}: {text}" for node in verdict.nodes if node.name not in {*best, *excluded}}


def _proven(left: set[str], verdict: ClusterVerdict) -> bool:
    """Whether sound pairs and sweeps connect all that are left. A bad pair is not inside: one of its ends is out."""
    sound: Iterable[set[str]] = [{pair.a, pair.b} for pair in verdict.pairs]
    sets = [group for group in (*sound, *map(set, verdict.together)) if len(group & left) > 1]
    reached, grown = {min(left)}, True
    while grown:
        more = {name for group in sets if group & reached for name in group & left} - reached
        reached |= more
        grown = bool(more)
    return reached == left


def _unexplained(left: set[str], verdict: ClusterVerdict) -> bool:
    """Whether what all did together was bad for no reason of a machine that is out: it may be bad without that machine too."""
    if any(left <= set(group) for group in verdict.together):
        return False
    dropped = [reason for reason in verdict.reasons if not set(reason.nodes) <= left]
    bad = any(r.verdict in CLOSED and r.nodes and len(set(r.nodes) & left) > 1 for r in dropped)
    out = [node for node in verdict.nodes if node.name not in left]
    return bad and not any(_explains(node) for node in out)


def _explains(node: NodeVerdict) -> bool:
    """A machine that is bad with others, was silent, or is the end of a bad link."""
    results = [reason for reason in node.reasons if reason.verdict in CLOSED]
    return not results or any(r.check.startswith((*COLLECTIVES, "pair")) or r.source == SOURCE for r in results)


# A verdict as the checks of a gate, and as the plain values that `headway qualify --json` and its history tell.


OPEN: tuple[Verdict, ...] = ("healthy", "degraded")
PAIR = {"a", "b", "busbw_gb_s", "verdict", "said"}
REMEDY = "Repair or replace what is named, set benchmark.spare_nodes, or lower benchmark.act.min_nodes."


def gate_checks(verdict: ClusterVerdict, left: Remaining, *, needed: int) -> tuple[Check, ...]:
    """Healthy passes, degraded is warned, failed and unknown close the gate, unless the machine is left out and enough remain."""
    sound = len(usable(verdict, left))
    passed = left.enough and sound >= needed
    enough = Check(
        name="machines that qualified",
        measured=float(sound),
        limit=f">= {needed}",
        passed=passed,
        warned=passed and bool(left.excluded),
        remedy="" if passed else REMEDY,
    )
    # Whether a machine's verdict is no concern of the runs to come.
    nodes = tuple(
        check for node in verdict.nodes for check in _of_node(node, spared=left.enough and node.name not in left.nodes)
    )
    checks = (enough, *nodes, *(_check(reason, spared=False) for reason in left.reasons))
    if left.verdict in OPEN or not all(check.passed for check in checks):
        return checks
    return (
        *checks,
        Check(name="verdict", measured=left.verdict, limit="healthy or degraded", passed=False, remedy=REMEDY),
    )


def usable(verdict: ClusterVerdict, left: Remaining) -> tuple[str, ...]:
    """Machines that are left and sound, healthiest first; where none can be left out, some that are left are not."""
    sound = set(verdict.named(*OPEN))
    return tuple(name for name in left.nodes if name in sound)


def as_reason(reason: Reason) -> dict[str, Any]:
    """One reason; the sentence is for people."""
    shown = {
        "measured": reason.measured if reason.measured is not None else reason.said or None,
        "sentence": reason.sentence,
    }
    payload = reason.model_dump(
        mode="json", include={"check", "where", "measured", "unit", "limit", "source", "verdict", "remedy"}
    )
    return {**payload, **shown}


def as_told(verdict: ClusterVerdict) -> dict[str, Any]:
    """A verdict as `--json` has it, whether it is of a measurement or of logs."""
    return {
        "verdict": verdict.verdict,
        "sku": verdict.sku,
        "nodes": [as_node(node) for node in verdict.nodes],
        "pairs": [pair.model_dump(mode="json", include=PAIR) for pair in verdict.pairs],
        "reasons": [as_reason(reason) for reason in verdict.reasons],
    }


def as_node(node: NodeVerdict) -> dict[str, Any]:
    """A machine as `--json` has it."""
    return {
        "name": node.name,
        "verdict": node.verdict,
        "reasons": [as_reason(reason) for reason in node.reasons],
        "rates": node.rates,
    }


def _of_node(node: NodeVerdict, *, spared: bool) -> Iterator[Check]:
    if not node.reasons:
        sound = node.verdict in OPEN
        yield Check(name=node.name, measured=node.verdict, limit="healthy", passed=sound or spared, warned=spared)
    for reason in node.reasons:
        yield _check(reason, spared=spared)


def _check(reason: Reason, *, spared: bool) -> Check:
    passed = reason.verdict in OPEN or spared
    return Check(
        name=" ".join(part for part in (reason.node, reason.where, reason.check) if part),
        measured=reason.measured if reason.measured is not None else (reason.said or "nothing was measured"),
        limit=f"{reason.limit} {reason.unit}".strip(),
        passed=passed,
        warned=passed,
        remedy=reason.remedy,
    )
