"""Checkpoint -> Model: ONNX with KV cache, parity proven, every file hashed, signed.

The program is tasks/jobs/export.py; signatures are tasks/registry/signatures.py. A model that does not answer as the checkpoint
does is never published, and a checkpoint that nobody trusted signed is never exported.
"""

from __future__ import annotations

from tasks.artifacts import Check, Checkpoint, Cluster, Evaluation, Model, require_checks
from tasks.programs import Program
from tasks.promotion import require_signed, require_signer, sign
from tasks.serving_config import ExportConfig
from tasks.stage import stage
from tasks.workbench import publish, run_job


@stage(version=1)
def export(checkpoint: Checkpoint, config: ExportConfig, *, under: Evaluation, on: Cluster) -> Model:
    """Export what an evaluation allowed, prove parity of logits and greedy tokens, publish and sign.

    Raises IntegrityError for a checkpoint whose signature does not count.
    """
    require_signed(checkpoint)
    require_signer(Model, checkpoint.name)
    job = run_job(program(checkpoint, config, on=on), on=on)
    metrics: dict[str, float] = job.result["metrics"]
    require_checks("export", parity_checks(metrics, config))
    model = publish(job.output, Model, name=checkpoint.name, metrics=metrics)
    sign(model)
    return model


def program(checkpoint: Checkpoint, config: ExportConfig, *, on: Cluster) -> Program:
    """What exports, on one machine with all of its threads."""
    threads = on.threads_per_node
    settings = {"export": config.model_dump(mode="json"), "threads": threads}
    return Program("tasks.jobs.export", settings, {"checkpoint": checkpoint}, ranks=1, threads=threads)


def parity_checks(metrics: dict[str, float], config: ExportConfig) -> tuple[Check, ...]:
    """The gate of the export: PyTorch and ONNX Runtime must agree."""
    equal, total = metrics["greedy_equal"], metrics["greedy_total"]
    remedy = "Look at the exporter's log; a model that answers differently is not published."
    return (
        Check(
            name="logit error, largest absolute",
            measured=metrics["max_logit_error"],
            limit=f"<= {config.max_logit_error:.4g}",
            passed=metrics["max_logit_error"] <= config.max_logit_error,
            remedy=remedy,
        ),
        Check(
            name="greedy completions equal, token for token",
            measured=equal,
            limit=f"= {total:.0f}",
            passed=total > 0 and equal == total,
            remedy=remedy,
        ),
    )
