"""What people read in Prefect's page of a whole run, in Markdown: the report in short, and what an approver should know.

A stage's own note is tasks/orchestration/prefect_artifacts.py; the whole report, with its figures, is tasks/report/.
"""

from __future__ import annotations

from tasks.artifacts import Endpoint, Evaluation, Model
from tasks.config.serving import DeploymentConfig
from tasks.orchestration.observers import Outcome
from tasks.orchestration.prefect_artifacts import number, table
from tasks.orchestration.run import Lifecycle
from tasks.registry.versions import flat
from tasks.report.data import duration, short


def report(run: Lifecycle, *, html: str, mlflow: str | None) -> str:
    """The report of a run in short."""
    parts = [
        f"# {run.flow} {run.subject}: {run.status.replace('_', ' ')}",
        _error(run.error),
        f"{duration(run.seconds)}. Dataset `{run.results.get('dataset', 'none')}`.",
        _stages(run),
        run.results.get("approval", ""),
        _served(run.results.get("endpoint")),
        _champion(run),
        _revalidation(run),
        _samples(run.results.get("samples", [])),
        "## Where the rest is",
        f"- The whole report, with its figures: `{html}`. A browser opens it from the disk, not from this page.",
        f"- [This run in MLflow]({mlflow}), with the report attached to it." if mlflow else "- MLflow has it too.",
    ]
    return "\n\n".join(part for part in parts if part)


def reasons(run: Lifecycle, model: Model, scores: Evaluation, serving: DeploymentConfig) -> str:
    """What speaks for a new model: its scores beside the champion's, its checks, what it was made from, and how it is served."""
    payload = flat("deployment", serving.model_dump(mode="json", exclude_defaults=True))
    wanted = [name for name in run.outcomes["evaluate"].shown.metrics if name in scores.metrics]
    checks = [
        ["passed" if check["passed"] else "**failed**", check["name"], number(check["measured"]), check["limit"]]
        for outcome in run.outcomes.values()
        for check in outcome.checks
    ]
    parts = [
        _champion(run) or "There is no champion to compare it with.",
        table(["score", "value"], [[name, number(scores.metrics[name])] for name in wanted]),
        table(["", "check", "measured", "limit"], checks) if checks else "",
        f"Made from `{short(run.results['dataset'])}`, settings `{run.config_digest[:12]}`; model `{short(model.ref)}`.",
        table(
            ["how it is served, beside the defaults", ""], [[name, number(value)] for name, value in payload.items()]
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _error(error: BaseException | None) -> str:
    if error is None:
        return ""
    remedy = getattr(error, "remedy", "")
    return f"**{type(error).__name__}**: {error}" + (f"\n\n{remedy}" if remedy else "")


def _stages(run: Lifecycle) -> str:
    rows = [
        [
            outcome.name,
            outcome.status.replace("_", " "),
            f"{outcome.seconds:.1f}",
            _metrics(outcome),
        ]
        for outcome in run.outcomes.values()
    ]
    return table(["stage", "result", "seconds", ""], rows)


def _metrics(outcome: Outcome) -> str:
    metrics = outcome.metrics
    return ", ".join(f"{name} {number(metrics[name])}" for name in outcome.shown.metrics if name in metrics)


def _served(endpoint: Endpoint | None) -> str:
    return f"Served at {endpoint.url} as `{endpoint.model.ref}`." if endpoint else "Nothing new is served."


def _champion(run: Lifecycle) -> str:
    champion = run.results.get("champion")
    scores = run.outcomes["evaluate"].metrics if "evaluate" in run.outcomes else {}
    if not champion or "bits_per_byte" not in scores:
        return ""
    head = ["bits per byte on the same held-out text", ""]
    theirs = [f"champion `{short(champion['ref'])}`", number(champion["bits_per_byte"])]
    return table(head, [["this model", number(scores["bits_per_byte"])], theirs])


def _revalidation(run: Lifecycle) -> str:
    """The verdict on a champion, why, and the parts that it rests on."""
    payload = run.results.get("revalidation")
    return f"{run.results['evidence']}\n\nThe evidence, with figures: `{payload['evidence']}`." if payload else ""


def _samples(samples: list[dict[str, str]]) -> str:
    messages = [f"```\n{each['prompt']}{each['completion']}\n```" for each in samples]
    return "\n\n".join(["What it says:", *messages]) if messages else ""
