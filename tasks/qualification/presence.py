"""Who was to say something, and did not. Silence is not health."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Sku
from tasks.qualification.measured import Measurement, RankReport
from tasks.qualification.verdicts import NodeVerdict, Reason

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
