"""The page of one run of a flow: a RunReport in, one HTML text out. What is on it: templates/run.html."""

from __future__ import annotations

from tasks.report import run_charts
from tasks.report.comparison import figures
from tasks.report.data import RunReport
from tasks.report.lineage import lineage_graph
from tasks.report.pages import render


def render_page(data: RunReport) -> str:
    """The report as one HTML document, UTF-8; equal values give equal text."""
    config = data.model_dump(mode="json", include={"config"})["config"]
    lineage = lineage_graph(data.lineage)
    return render(
        "run.html", title=data.title, run=data, charts=run_charts, compared=figures, config=config, lineage=lineage
    )
