"""`headway plan -c` of machines without GPUs: the stage's own formulas, with what the last qualification here measured.

Of machines with GPUs the plan is tasks/planning/planned_case.py. Nothing is judged here that the stage `plan` does not judge
again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from deployments.cli.output import say

if TYPE_CHECKING:
    from tasks.artifacts import Qualification
    from tasks.config.flows import RetrainConfig

GIB = 1 << 30
DAY = 86_400.0


def say_measured(settings: RetrainConfig, *, as_json: bool) -> bool:
    """Say the plan of a configuration; False, and nothing is said, where its cluster was not measured here."""
    from tasks.common.home import home
    from tasks.storage import open_store

    store = open_store(home())
    measured = _last_qualification(store, settings)
    if measured is None:
        return False
    told = _reckoned(settings, measured, store)
    say(told, _page(told), as_json=as_json)
    return True


def _last_qualification(store: Any, settings: RetrainConfig) -> Qualification | None:
    """The newest that vouches for as many ranks of this cluster."""
    from tasks.artifacts import Qualification
    from tasks.registry.records import newest

    name = settings.cluster.name
    record = newest(store, "benchmark", of=lambda one: bool(one.value["subject"]["name"] == name))
    found = Qualification.model_validate(record.value) if record else None
    if found is None or not found.passed:
        return None
    ranks = settings.cluster.nodes * settings.cluster.ranks_per_node
    return found if found.subject.world_size == ranks else None


def _reckoned(settings: RetrainConfig, measured: Qualification, store: Any) -> dict[str, Any]:
    from tasks.plan import PAST_RUNS, memory_limit, reckon
    from tasks.planning.correction import measured_on
    from tasks.registry.journal import StoreJournal

    on, journal = measured.subject, StoreJournal(store)
    keys = sorted(journal.list(measured_on(on.name)))[-PAST_RUNS:]
    numbers = reckon(
        settings.training,
        settings.planning,
        settings.execution,
        on,
        vocab_size=settings.preprocessing.tokenizer.vocab_size,
        train_tokens=0,
        past=[found for key in keys if (found := journal.get(key))],
    )
    usable = memory_limit(settings.planning, on) / GIB
    memory = numbers.memory_per_rank / GIB
    limit = settings.planning.max_minutes
    slow = math.isfinite(limit) and numbers.seconds > limit * 60
    return {
        "name": settings.training.model,
        "fits": memory <= usable and not slow,
        "fit": "fits" if memory <= usable else "does not fit",
        "ranks": on.world_size,
        "parameters": numbers.parameters,
        "memory_gib": {"total": memory, "usable": usable},
        "step_seconds": numbers.step_seconds,
        "steps": settings.training.steps,
        "days": numbers.seconds / DAY,
        "days_with_failures": numbers.seconds / numbers.goodput / DAY,
        "checkpoint": {"gib": numbers.checkpoint / GIB, "every_steps": numbers.checkpoint_every_steps},
        "goodput": {"mid": numbers.goodput},
        "correction": {
            "factor": numbers.correction,
            "runs": numbers.corrected_by_runs,
            "said": numbers.correction_said,
        },
        "machine": {
            "name": on.name,
            "gflops_per_rank": on.matmul_gflops_per_rank,
            "allreduce_gigabytes_per_second": on.allreduce_gigabytes_per_second,
            "qualification": measured.ref,
        },
        "reason": f"it takes longer than planning.max_minutes {limit:g}" if slow else "",
    }


def _page(told: dict[str, Any]) -> str:
    memory, seconds = told["memory_gib"], told["days"] * DAY
    verdict = {"fits": "it fits", "does not fit": "it does not fit"}[told["fit"]]
    corrected = told["correction"]
    runs = "run" if corrected["runs"] == 1 else f"{corrected['runs']} runs"
    by = f", times {corrected['factor']:.2f} as the last {runs} here took" if corrected["runs"] else ""
    where = f"{told['ranks']} ranks of cluster {told['machine']['name']}"
    lines = [
        f"{told['name']}: {told['parameters']:,} parameters on {where}: {verdict}",
        f"  memory      {memory['total']:.3g} of {memory['usable']:.3g} GiB a rank",
        f"  a step      {told['step_seconds']:.3g} s{by}",
        f"  takes       {seconds / 60:.3g} minutes for {told['steps']:,} steps",
        f"  checkpoint  {told['checkpoint']['gib']:.3g} GiB every {told['checkpoint']['every_steps']:,} steps",
        f"  goodput     {told['goodput']['mid']:.1%}",
        f"  measured    {told['machine']['gflops_per_rank']:.3g} GFLOP/s a rank, all-reduce "
        f"{told['machine']['allreduce_gigabytes_per_second']:.3g} GB/s",
    ]
    return "\n".join([*lines, *([f"  mind        {told['reason']}"] if told["reason"] else [])])
