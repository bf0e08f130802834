"""The champion of a model against the newest data: every byte of it verified, then measured, and held to what it was.

It changes nothing that is served and moves no ref. That it was done is noted (tasks/registry/revalidations.py).
"""

from __future__ import annotations

from prefect import flow

from flows.closing import close
from flows.data import tokenized, validated
from flows.inputs import checked
from flows.prefect_run import cancelled, flow_run, named, setting, started_by
from flows.progress import PrefectProgress
from tasks.artifacts import Checkpoint, Evaluation, parse_ref, unqualified
from tasks.config import RevalidateConfig
from tasks.errors import Unknown
from tasks.evaluate import champion_checkpoint, evaluate, hold
from tasks.lifecycle import Lifecycle, current, lifecycle
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import note_revalidation
from tasks.registry.verification import problems_of, refusal
from tasks.storage.manifest import Manifest
from tasks.storage.store import find

STAGES = ("validate", "preprocess", "evaluate")


def _name() -> str:
    return named(setting("model"))


@flow(name="revalidate", flow_run_name=_name, validate_parameters=False)  # type: ignore[untyped-decorator]
def revalidate(dataset: str, config: RevalidateConfig) -> Evaluation:
    """Verify the champion of a model, measure it on the newest version of a dataset, and judge it.

    Raises GateFailed when it is worse than it was, or the data is no good; IntegrityError when it is damaged.

    Args:
        dataset: NAME for the newest version of a dataset, or dataset/NAME@VERSION. `headway dataset list` shows them.
        config: Whose champion is measured, on what, and by which limits.
    """
    config = checked(RevalidateConfig, config)
    with (
        started_by("run", f"revalidate {config.model} on dataset {dataset}"),
        lifecycle(
            "revalidate",
            config,
            subject=config.model,
            stages=STAGES,
            cancelled=cancelled,
            flow_run=flow_run(),
            observers=(PrefectProgress(),),
            at_end=close,
        ) as run,
    ):
        champion = sound_champion(run, config.model)
        scores = measured(dataset, config)
        judge(run, champion, scores, config)
        return scores


def sound_champion(run: Lifecycle, model: str) -> Manifest:
    """The champion, every byte and its signature verified. Raises Unknown, IntegrityError."""
    ref = read_ref(run.store, f"{model}/champion")
    if ref is None:
        raise Unknown(f"model/{model} has no champion", remedy="`headway retrain` makes one; `model` is the setting.")
    manifest, problems = problems_of(run.store, ref, keys=run.home / "keys")
    if problems:
        raise refusal(manifest, problems)
    return manifest


def measured(dataset: str, config: RevalidateConfig) -> Evaluation:
    """The champion's checkpoint on the held-out split of the data."""
    validation = validated(dataset, config.validation, config.preprocessing, config.cluster)
    tokens = tokenized(validation, config.preprocessing, config.cluster)
    checkpoint = champion_checkpoint(config.model)
    assert isinstance(checkpoint, Checkpoint), "a champion was exported from a checkpoint"
    return evaluate(checkpoint, tokens, config.evaluation, on=unqualified(config.cluster))


def judge(run: Lifecycle, champion: Manifest, scores: Evaluation, config: RevalidateConfig) -> None:
    """Hold the champion to what it was when it was promoted, and note the verdict either way. Raises GateFailed."""
    before = bits_at_promotion(run, champion)
    told = {
        "champion": champion.ref,
        "evaluation": scores.ref,
        "bits_per_byte": scores.metrics["bits_per_byte"],
        "bits_per_byte_at_promotion": before,
    }
    run.results["revalidation"] = told
    passed = False
    try:
        hold(scores, before, config.evaluation, config.comparison)
        passed = True
    finally:
        run.results["revalidation"] = {**told, "passed": passed}
        note_revalidation(run.journal, config.model, {**told, "passed": passed, "dataset": run.results["dataset"]})


def bits_at_promotion(run: Lifecycle, champion: Manifest) -> float:
    """Bits per byte of the evaluation under which the champion was exported. Raises Unknown when that is gone."""
    under = next((ref for ref in champion.provenance.context if ref.startswith("evaluation/")), None)
    if under is None:
        raise Unknown(f"{champion.ref} names no evaluation", remedy="Export it again: `headway retrain --from export`.")
    return float(find(current().store, *parse_ref(under)).provenance.metrics["bits_per_byte"])
