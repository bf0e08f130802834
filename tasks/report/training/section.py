"""The section "Training" of a run's page: the loss and its schedule, how fast it was, and what its time went to.

Values come from data.py and the published log, drawings from tasks/report/charts.py and charts.py.
"""

from __future__ import annotations

from tasks.report.data import RunReport, number, percent
from tasks.report.markup import Html, facts, figure, join, tag
from tasks.report.training.data import TrainingReport


def training_section(data: RunReport) -> Html:
    """Empty for a run that did not train."""
    if not data.loss:
        return Html()
    from tasks.report.charts import loss_chart, norm_chart, rate_chart

    first, last = data.loss[0], data.loss[-1]
    text = f"from {number(first.loss)} at step {number(first.step)} to {number(last.loss)} at step {number(last.step)}"
    figures = (
        figure(loss_chart(data.loss, data.resumed_steps), "Training loss, nats a token", text),
        figure(rate_chart(data.loss), "Learning rate"),
        figure(norm_chart(data.loss), "Gradient norm"),
    )
    return join(tag("div", *figures, class_="figures loss"), _how_it_went(data))


def _how_it_went(data: RunReport) -> Html:
    if not (payload := data.training):
        return Html()
    from tasks.report.training.charts import heldout_chart, speed_chart, split_chart, time_chart

    figures = (
        figure(split_chart(payload.steps), "Where a step's time goes", "mean of neighbouring steps"),
        figure(speed_chart(payload.steps), "Speed", "tokens a second over all ranks, without standstills"),
        figure(heldout_chart(payload.heldout), "Held-out text", "bits per byte of a small sample, lower is better"),
        figure(time_chart(payload.time), "What the time went to", "all attempts together") if payload.time else Html(),
    )
    return join(_facts(data, payload), tag("div", *figures, class_="figures"))


def _facts(data: RunReport, payload: TrainingReport) -> Html:
    metrics = next((stage.metrics for stage in data.stages if stage.name == "train"), {})
    time = payload.time
    shown: dict[str, float | str | None] = {
        "tokens/s a rank": metrics.get("tokens_per_second_per_rank"),
        "TFLOP/s a rank": metrics.get("tflops_per_rank"),
        "MFU": percent(metrics["mfu"]) if "mfu" in metrics else None,
        "waiting for data": percent(metrics["data_share"]) if "data_share" in metrics else None,
        "goodput": percent(metrics["goodput"]) if "goodput" in metrics else None,
        "memory, GiB": time.memory_gib if time else None,
        "GPU memory, GiB": time.gpu_memory_gib if time else None,
    }
    return join(facts(shown), tag("p", _conventions(payload), class_="note"))


def _conventions(payload: TrainingReport) -> str:
    if not payload.time or not payload.time.flops_convention:
        return ""
    text = f"FLOPs as {payload.time.flops_convention} counts them."
    peak = payload.time.peak
    return f"{text} MFU is against {number(peak['tflops'])} TFLOP/s: {peak['of']}." if peak else text
