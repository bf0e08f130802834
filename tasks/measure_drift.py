"""Dataset, Dataset -> Drift: whether new data is still what the reference was. It judges, and closes no gate.

The work is done by the program tasks/jobs/drift.py with tasks/data/drift; what a verdict leads to is flows/revalidate.py. See
docs/drift.md.
"""

from __future__ import annotations

from tasks.artifacts import Artifact, Checkpoint, Cluster, Dataset, Drift, Tokenizer, Tokens
from tasks.config.revalidation import DriftConfig
from tasks.orchestration.job_spec import Program
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import publish, run_job


@stage(version=1, name="drift")
def measure_drift(
    new: Dataset,
    reference: Dataset,
    config: DriftConfig,
    tokenizer: Tokenizer | Tokens | Checkpoint | None,
    text_field: str,
    *,
    on: Cluster,
) -> Drift:
    """Compare new data with a reference, by the tokens of any artifact that holds a tokenizer; without one, by words."""
    settings = {
        "new": new.ref,
        "reference": reference.ref,
        "drift": config.model_dump(mode="json"),
        "text_field": text_field,
        "threads": on.threads_per_node,
    }
    inputs: dict[str, Artifact] = {"new": new, "reference": reference}
    if tokenizer:
        inputs["tokenizer"] = tokenizer
    job = run_job(Program("tasks.jobs.drift", settings, inputs), on=on)
    output = job.result
    return publish(job.output / "drift", Drift, name=new.name, metrics=output["metrics"], verdict=output["verdict"])
