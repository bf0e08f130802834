"""What a person reads of a stage in the Prefect UI: one Markdown artifact a stage. Belongs to tasks/stage.py."""

from __future__ import annotations

from tasks.outcomes import Outcome


def leave_note(outcome: Outcome) -> None:
    """Attach a stage's summary to the running task."""
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact(
        key=outcome.name, markdown=as_markdown(outcome), description=f"{outcome.name}: {outcome.status}"
    )


def as_markdown(outcome: Outcome) -> str:
    """A stage's outcome as a short page: status, checks, metrics, artifacts, job."""
    parts = [f"# {outcome.name}: {outcome.status.replace('_', ' ')}", f"{outcome.seconds:.1f} s. {outcome.why}"]
    if outcome.checks:
        rows = [f"| {_mark(c)} | {c['name']} | {_number(c['measured'])} | {c['limit']} |" for c in outcome.checks]
        parts.append("\n".join(["| | check | measured | limit |", "| --- | --- | --- | --- |", *rows]))
    if outcome.metrics:
        rows = [f"| {name} | {_number(value)} |" for name, value in outcome.metrics.items()]
        parts.append("\n".join(["| metric | value |", "| --- | --- |", *rows]))
    parts += _refs("Made from", outcome.inputs) + _refs("Made", outcome.outputs)
    if outcome.job:
        job = outcome.job
        resumed = f", resumed from step {job['resumed_from_step']}" if job["resumed_from_step"] else ""
        parts.append(f"Job `{job['id']}`: {job['attempts']} attempt(s){resumed}. Folder: `{job['folder']}`")
    return "\n\n".join(parts)


def _refs(title: str, refs: list[str]) -> list[str]:
    return [f"{title}:\n\n" + "\n".join(f"- `{ref}`" for ref in refs)] if refs else []


def _mark(check: dict[str, object]) -> str:
    return "passed" if check.get("passed") else "**failed**"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
