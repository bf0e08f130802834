"""What an evaluation is given beside the checkpoint and its tokens, and what people see of champion against challenger.

What is measured is tasks/evaluate.py; the picture is tasks/report/comparison.py.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from flows.support.inputs import datasets
from tasks.artifacts import Dataset, Tokens
from tasks.config.evaluation import EvaluationConfig
from tasks.orchestration.prefect_artifacts import hand_in, new_artifact
from tasks.orchestration.run import Lifecycle
from tasks.report.comparison import comparison_markdown, draw_comparison


def read_by_suites(config: EvaluationConfig) -> tuple[Dataset, ...]:
    """The datasets that suites read. Raises Unknown for one that there is not."""
    return datasets(config.files)


def with_suites(mixed: tuple[Tokens, ...], files: tuple[Dataset, ...]) -> tuple[Any, ...]:
    """What evaluate is handed after its settings: only what there is, so that the key of a run without is always the same."""
    return (mixed, files) if files else (mixed,) if mixed else ()


def tell_comparison(run: Lifecycle) -> None:
    """Attach champion against challenger by slice: the picture and its figures in MLflow, the table in Prefect's page."""
    payload = run.results.get("comparison")
    if not payload:
        return
    spool = run.need_spool()
    picture = draw_comparison(run.home / "reports" / (run.run or run.flow)[:8], payload)
    if run.run:
        loss = payload["rows"][0]["loss"] or {}
        figures = {"loss_to_champion": "estimate", "loss_to_champion_low": "low", "loss_to_champion_high": "high"}
        spool.log_metrics(run.run, [(name, loss[key], 0) for name, key in figures.items() if key in loss])
        spool.log_json(run.run, "comparison.json", payload)
        spool.log_file(run.run, picture)
    image = f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"
    hand_in(new_artifact("image", "comparison-picture", image, "Champion against challenger by slice"))
    hand_in(
        new_artifact("markdown", "comparison", comparison_markdown(payload), "Champion against challenger by slice")
    )
