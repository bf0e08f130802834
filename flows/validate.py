"""A dataset by itself: profiled, judged, its quarantine set aside; reported like every run, and reused by a retraining."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.support.closing import close
from flows.support.data import validated
from flows.support.inputs import configured
from flows.support.prefect_run import cancelled, flow_run, named, setting, started_by
from flows.support.progress import PrefectProgress
from tasks.artifacts import Validation, parse_ref
from tasks.config.flows import ValidateConfig
from tasks.orchestration.run import Lifecycle, lifecycle
from tasks.storage.store import find

STAGES = ("validate",)


def _name() -> str:
    return named(setting("dataset"))


@flow(name="validate", flow_run_name=_name, validate_parameters=False)  # type: ignore[untyped-decorator]
def validate(dataset: str, config: ValidateConfig) -> Validation:
    """Judge a dataset, set aside what breaks a rule, and publish what is left as a version of its own.

    Raises GateFailed when the data is no good.

    Args:
        dataset: NAME for the newest version of a dataset, or dataset/NAME@VERSION. `headway dataset list` shows them.
        config: By which rules it is judged, and where.
    """
    config = configured(ValidateConfig, config)
    with (
        started_by("run", f"validate dataset {dataset}"),
        lifecycle(
            "validate",
            config,
            subject=parse_ref(dataset, kind="dataset")[1],
            stages=STAGES,
            cancelled=cancelled,
            flow_run=flow_run(),
            observers=(PrefectProgress(),),
            at_end=close,
        ) as run,
    ):
        validation = validated(dataset, config.validation, config.preprocessing, config.cluster)
        run.results |= told(run, validation)
        validation.require()
        return validation


def told(run: Lifecycle, validation: Validation) -> dict[str, Any]:
    """What the command line tells of a verdict."""
    inputs = find(run.store, *parse_ref(validation.ref)).provenance.inputs
    return {
        "validation": validation.ref,
        "accepted": validation.subject.ref if validation.passed else None,
        "quarantined": next((ref for ref in inputs if ref.startswith("quarantine/")), None),
        "checks": [{**check.model_dump(mode="json"), "outcome": check.outcome} for check in validation.checks],
    }
