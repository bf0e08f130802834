"""Checkpoint, Tokens -> Model: ONNX with KV cache, proven against the checkpoint, with smaller variants; or the checkpoint's own
weights, for vLLM. Hashed and signed.

The program is tasks/jobs/export.py; signatures are tasks/security/signatures.py. A model that does not answer as the checkpoint
does is never published, and a checkpoint that nobody trusted signed is never exported. See docs/export.md.
"""

from __future__ import annotations

from math import isfinite, nan

from tasks.artifacts import Check, Checkpoint, Cluster, Evaluation, Model, Tokens, require_checks
from tasks.config.serving import ExportConfig
from tasks.formats.model_folder import DESCRIPTION, declared_context
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.promotion import require_signed, require_signer, sign
from tasks.orchestration.run import current
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import files_of, publish, run_job
from tasks.registry.ancestry import walk
from tasks.registry.licenses import licenses_of

MOST_LOSS = 1e-3
"""Share of bits by which an fp32 model may differ from its checkpoint on held-out text: what float32 sums in another order."""

PLAIN_LOGIT = 10.0
"""Logits beyond this one may differ in proportion: float32 rounds by shares. SmolLM2-135M has logits of 30, and PyTorch's own in
float32 are 7e-5 away from those in float64."""


@stage(
    version=3,
    shown=Shown(
        line="logit error {max_logit_error:.1e}, {greedy_equal:.0f} of {greedy_total:.0f} completions equal",
        metrics=("max_logit_error", "greedy_equal", "greedy_total"),
        headlines=("tokens_per_second_onnx",),
    ),
)
def export(checkpoint: Checkpoint, tokens: Tokens, config: ExportConfig, *, under: Evaluation, on: Cluster) -> Model:
    """Export what an evaluation allowed; prove logits, greedy tokens, bits per byte and speed; publish and sign.

    The held-out text of `tokens` is what it and its variants are measured on. Raises IntegrityError for a checkpoint whose
    signature does not count, GateFailed for a model that is not what the checkpoint is.
    """
    require_signed(checkpoint)
    require_signer(Model, checkpoint.name)
    made_from = lineage_of(checkpoint, tokens)
    licenses = {
        ref: terms._asdict() for ref, terms in licenses_of(current().store, (checkpoint.ref, tokens.ref)).items()
    }
    with files_of(checkpoint, *DESCRIPTION) as folder:
        measured = int(under.metrics.get("context", 0)) or declared_context(folder)
    # Tell where the settings declare a longer context than was measured.
    if config.context_length and measured and config.context_length > measured:
        text = (
            f"export.context_length declares {config.context_length} tokens, and the evaluation measured {measured}: "
            "how good the model is beyond them is not known"
        )
        current().observer.happened("export", "longer context", text)
    made = program(checkpoint, tokens, config, made_from=made_from, licenses=licenses, measured=measured, on=on)
    job = run_job(made, on=on)
    metrics: dict[str, float] = job.result["metrics"]
    require_checks("export", export_checks(metrics, config))
    for name, entry in job.result["variants"].items():
        if not entry["passed"]:
            current().observer.happened("export", "variant left out", f"variant {name} left out: {entry['why']}")
    model = publish(job.output, Model, name=checkpoint.name, metrics=metrics)
    sign(model)
    return model


def program(
    checkpoint: Checkpoint,
    tokens: Tokens,
    config: ExportConfig,
    *,
    made_from: tuple[str, ...] = (),
    licenses: dict[str, dict[str, str]] | None = None,
    measured: int | None = None,
    on: Cluster,
) -> Program:
    """What exports, on one machine with all of its threads. `made_from` are the references for the model card, `licenses` those
    of what came from outside; `measured` is the context that the model declares where the settings name none.
    """
    threads = on.threads_per_node
    settings = {"export": config.model_dump(mode="json"), "threads": threads, "made_from": list(made_from)}
    settings |= {"measured": measured} if measured else {}
    settings |= {"licenses": licenses} if licenses else {}
    inputs = {"checkpoint": checkpoint, "tokens": tokens}
    return Program("tasks.jobs.export", settings, inputs, ranks=1, threads=threads)


def lineage_of(checkpoint: Checkpoint, tokens: Tokens) -> tuple[str, ...]:
    """All that a checkpoint was made from, and itself; not what it was made under, which changes with machines."""
    edges = [edge for edge in walk(current().store, checkpoint.ref)["edges"] if edge["how"] == "input"]
    result, queue = {tokens.ref}, [checkpoint.ref, tokens.ref]
    while queue:
        ref = queue.pop()
        result.add(ref)
        queue += [edge["input"] for edge in edges if edge["output"] == ref and edge["input"] not in result]
    return tuple(sorted(result))


def export_checks(metrics: dict[str, float], config: ExportConfig) -> tuple[Check, ...]:
    """The gate of the export: what was measured against what the settings allow."""
    parity = parity_checks(metrics, config)
    if config.format == "safetensors":
        equal, total = metrics["weights_equal"], metrics["weights_total"]
        weights = Check(
            name="files of weights equal to the checkpoint's, byte for byte",
            measured=equal,
            limit=f"= {total:.0f}",
            passed=total > 0 and equal == total,
            remedy="Look at the disk: a file was not copied as it is.",
        )
        return (*parity, weights)
    loss = Check(
        name="bits per byte on held-out text, share beyond the checkpoint's",
        measured=metrics["loss"],
        limit=f"-{MOST_LOSS:g} to {MOST_LOSS:g}",
        passed=abs(metrics["loss"]) <= MOST_LOSS,
        remedy="Look at the exporter's log; a model that is another one is not published.",
    )
    # Slower for sure: the low end of the interval of the median. A busy machine gives a wide one, and closes no gate.
    speed = Check(
        name="time a token, as a multiple of PyTorch's, low end of the interval",
        measured=metrics["slowdown_low"],
        limit="any" if config.allow_slower else f"<= {config.max_slowdown:g}",
        passed=config.allow_slower or metrics["slowdown_low"] <= config.max_slowdown,
        remedy="Export on the machine that will serve it; export.allow_slower exports it all the same.",
    )
    return (*parity, loss, speed)


def parity_checks(metrics: dict[str, float], config: ExportConfig) -> tuple[Check, ...]:
    """PyTorch and what was exported must agree."""
    equal, total = metrics["greedy_equal"], metrics["greedy_total"]
    remedy = "Look at the exporter's log; a model that answers differently is not published."
    scale = metrics["logit_scale"]
    most = config.max_logit_error * max(1.0, scale / PLAIN_LOGIT) if isfinite(scale) else nan
    return (
        Check(
            name="logit error, largest absolute",
            measured=metrics["max_logit_error"],
            limit=f"<= {most:.4g}",
            passed=isfinite(most) and metrics["max_logit_error"] <= most,
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
