"""The section "Evaluation" of a run's page: bits per byte beside baselines and champion, slices, calibration, suites.

Values come from tasks/report/published.py and data.py, drawings from tasks/report/charts.py and charts.py.
"""

from __future__ import annotations

from tasks.report.data import RunReport, number, percent
from tasks.report.evaluation.messages import figures
from tasks.report.markup import Html, facts, figure, folded, grid, join, tag
from tasks.report.published import EvaluationReport


def evaluation_section(data: RunReport) -> Html:
    """Says why for a run that trained and was not evaluated; empty for one that did neither."""
    if not (scores := data.evaluation):
        if not any(stage.name == "train" for stage in data.stages):
            return Html()
        why = f": the run ended in the stage {data.error.stage}" if data.error and data.error.stage else ""
        return tag("p", f"The model was not evaluated{why}.", class_="note")
    from tasks.report.charts import scores_chart

    counts: dict[str, float | str | None] = {
        name: getattr(scores, name) for name in ("documents", "bytes", "tokens", "perplexity")
    }
    counts["of the held-out text"] = percent(scores.heldout.share) if scores.heldout else None
    counts["top-1 accuracy"] = percent(scores.accuracy.estimate) if scores.accuracy else None
    counts["context measured, in tokens"] = scores.context.measured if scores.context else None
    counts["calibration error"] = scores.calibration.error if scores.calibration else None
    text = f"lower is better; the whisker is the {scores.confidence:.0%} interval"
    chart = figure(scores_chart(scores, data.champion), "Bits per byte", text)
    note = Html() if data.champion else tag("p", "No champion to compare with: none has been promoted.", class_="note")
    whole = tag("div", chart, tag("div", facts(counts), note), class_="figures")
    return join(whole, _by_slice(data, scores), _suites(scores))


def _by_slice(data: RunReport, scores: EvaluationReport) -> Html:
    from tasks.report.evaluation.charts import losses_chart, positions_chart, reliability_chart, slices_chart

    compared = data.comparison
    charts = (
        figure(slices_chart(scores.slices), "Bits per byte by slice", "a whisker where there are documents enough"),
        figure(losses_chart(compared.rows), "Loss to the champion", "right of the line is worse")
        if compared
        else Html(),
        figure(positions_chart(scores.positions), "Bits a token by position", "tokens read before; it should not rise")
        if scores.positions
        else Html(),
        figure(reliability_chart(scores.calibration), "Calibration", "on the dashed line it is as sure as it is right")
        if scores.calibration
        else Html(),
    )
    return join(tag("div", *charts, class_="figures"), folded("Slices in figures", _table(data, scores)))


def _table(data: RunReport, scores: EvaluationReport) -> Html:
    against = {row.slice: row for row in data.comparison.rows} if data.comparison else {}
    heads = ["Slice", "Documents", "Bits per byte", "Interval", "Perplexity", "Top-1 accuracy", "Calibration error"]
    rows = []
    for each in scores.slices:
        interval = f"{each.interval[0]:.3f} to {each.interval[1]:.3f}" if each.interval else "too few documents"
        row = [
            each.slice,
            number(each.documents),
            number(each.bits_per_byte),
            interval,
            number(each.perplexity),
            percent(each.accuracy.estimate) if each.accuracy else "",
            number(each.calibration_error),
        ]
        compared = against.get(each.slice)
        rows.append([*row, *(figures(compared)[1:] if compared else ("", ""))] if against else row)
    return grid([*heads, *(["Champion", "Loss"] if against else [])], rows)


def _suites(scores: EvaluationReport) -> Html:
    rows = [
        (f"{name}.{metric}", number(value), number(suite.samples))
        for name, suite in scores.suites.items()
        for metric, value in suite.metrics.items()
    ]
    failed = [(name, suite.failed, "") for name, suite in scores.suites.items() if suite.failed]
    return folded("Probes and suites", grid(("Metric", "Value", "Samples"), [*rows, *failed]))
