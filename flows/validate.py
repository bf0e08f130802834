"""A dataset by itself: profiled, judged, its quarantine set aside; reported like every run, and reused by a retraining."""

from __future__ import annotations

from dataclasses import replace

from prefect import flow

from flows.support.inputs import NOTHING, Config, Overrides, Preset, Where, configured, resolve, setting, validated
from flows.support.prefect_page import shown_lifecycle
from flows.support.prefect_run import named, started_by
from tasks.artifacts import Validation, parse_ref
from tasks.config.flows import ValidateConfig
from tasks.orchestration.result import ValidationResult
from tasks.storage.store import find

STAGES = ("validate",)


@flow(  # type: ignore[untyped-decorator]
    name="validate",
    flow_run_name=lambda: named(setting(ValidateConfig, "dataset")),
    validate_parameters=False,
)
def validate(
    dataset: str,
    preset: Preset = "",
    where: Where = "",
    cluster: str = "",
    overrides: Overrides = (),
    config: Config = NOTHING,
) -> Validation:
    """Judge a dataset, set aside what breaks a rule, and publish what is left as a version of its own.

    Raises GateFailed when the data is no good.

    Args:
        dataset: NAME for the newest version of a dataset, or dataset/NAME@VERSION. `headway dataset list` shows them.
        preset: The shipped configuration that all other settings come from, the rules above all. Empty: the deployment's.
        where: The shipped configuration that says where jobs run, on top of the preset. Empty: where the preset says.
        cluster: Name of a Prefect block `Headway cluster`, whose settings count over `where`. Empty: none.
        overrides: Settings that differ, each as A.B=VALUE, like --set of the command line: validation.min_documents=100.
        config: The same by sections, as JSON: what it names counts instead of the preset's, and `overrides` instead of it.
    """
    config = configured(ValidateConfig, config, preset, where, overrides, cluster=cluster)
    with (
        started_by("run", f"validate dataset {dataset}", cluster=cluster),
        shown_lifecycle("validate", config, subject=parse_ref(dataset, kind="dataset")[1], stages=STAGES) as run,
    ):
        validation = validated(resolve(dataset), config.validation, config.preprocessing, config.cluster)
        inputs = find(run.store, *parse_ref(validation.ref)).provenance.inputs
        result = ValidationResult(
            validation=validation.ref,
            accepted=validation.subject.ref if validation.passed else None,
            quarantined=next((ref for ref in inputs if ref.startswith("quarantine/")), None),
            checks=[{**check.model_dump(mode="json"), "outcome": check.outcome} for check in validation.checks],
        )
        run.result = replace(run.result, validation=result)
        validation.require()
        return validation
