"""A cluster, measured by itself: every time again, judged by what its hardware must show, reported like every run."""

from __future__ import annotations

from dataclasses import replace

from prefect import flow

from flows.support.inputs import NOTHING, Config, Overrides, Preset, Where, configured, setting
from flows.support.prefect_page import shown_lifecycle
from flows.support.prefect_run import named, started_by
from tasks.artifacts import Qualification
from tasks.benchmark import benchmark
from tasks.config.flows import QualifyConfig
from tasks.orchestration.result import QualificationResult
from tasks.registry.qualifications import told

STAGES = ("benchmark",)


@flow(  # type: ignore[untyped-decorator]
    name="qualify",
    flow_run_name=lambda: named(setting(QualifyConfig, "cluster", "name")),
    validate_parameters=False,
)
def qualify(
    preset: Preset = "",
    where: Where = "",
    cluster: str = "",
    overrides: Overrides = (),
    config: Config = NOTHING,
) -> Qualification:
    """Benchmark a cluster, and judge it. A run that starts within the day reuses what was measured here.

    Raises GateFailed when it failed, or when too little is known of it, and too few machines are left.

    Args:
        preset: The shipped configuration that all other settings come from. Empty: the deployment's.
        where: The shipped configuration that says where jobs run, on top of the preset. Empty: where the preset says.
        cluster: Name of a Prefect block `Headway cluster`, whose settings count over `where`. Empty: none.
        overrides: Settings that differ, each as A.B=VALUE, like --set of the command line: benchmark.depth=full.
        config: The same by sections, as JSON: what it names counts instead of the preset's, and `overrides` instead of it.
    """
    config = configured(QualifyConfig, config, preset, where, overrides, cluster=cluster)
    with (
        started_by("run", f"qualify {config.cluster.name}", cluster=cluster),
        shown_lifecycle("qualify", config, subject=config.cluster.name, stages=STAGES, first=STAGES[0]) as run,
    ):
        qualification = benchmark(config.cluster, config.benchmark, training=config.training)
        run.result = replace(run.result, qualification=QualificationResult(**told(run.store, qualification)))
        qualification.require()
        return qualification
