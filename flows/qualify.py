"""A cluster, measured by itself: always anew, judged by what its hardware must show, reported like every run."""

from __future__ import annotations

from prefect import flow

from flows.support.closing import close
from flows.support.inputs import configured
from flows.support.prefect_run import cancelled, flow_run, named, setting, started_by
from flows.support.progress import PrefectProgress
from tasks.artifacts import Qualification
from tasks.benchmark import benchmark
from tasks.config.flows import QualifyConfig
from tasks.orchestration.run import lifecycle
from tasks.registry.qualifications import told

STAGES = ("benchmark",)


def _name() -> str:
    return named(setting("cluster", "name"))


@flow(name="qualify", flow_run_name=_name, validate_parameters=False)  # type: ignore[untyped-decorator]
def qualify(config: QualifyConfig) -> Qualification:
    """Benchmark a cluster, and judge it. A run that starts within the day reuses what was measured here.

    Raises GateFailed when it failed, or when too little is known of it, and too few machines are left.

    Args:
        config: Which cluster, how it is measured, as which hardware it is judged, and what happens to bad machines.
    """
    config = configured(QualifyConfig, config)
    with (
        started_by("run", f"qualify {config.cluster.name}"),
        lifecycle(
            "qualify",
            config,
            subject=config.cluster.name,
            stages=STAGES,
            first=STAGES[0],
            cancelled=cancelled,
            flow_run=flow_run(),
            observers=(PrefectProgress(),),
            at_end=close,
        ) as run,
    ):
        qualification = benchmark(config.cluster, config.benchmark, training=config.training)
        run.results |= told(run.store, qualification)
        qualification.require()
        return qualification
