"""The page of one retraining run: a RunReport in, one self-contained HTML text out, without script or outside address.

Drawing does not live here (charts.py, tasks/report/corpus/charts.py, tasks/report/lineage/graph.py), nor collecting (gather.py),
nor what is said of the data (tasks/report/corpus/section.py), of training (tasks/report/training/section.py) and of an evaluation
(tasks/report/evaluation/section.py), nor how elements are made and texts escaped (markup.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from tasks.artifacts import Check
from tasks.report.corpus.section import corpus_section
from tasks.report.data import RunReport, StageReport, duration, number, percent, short
from tasks.report.evaluation.section import evaluation_section
from tasks.report.lineage.graph import lineage_graph
from tasks.report.markup import SIGNS, Html, checks_grid, figure, folded, grid, join, measured, table, tag, tally
from tasks.report.training.section import training_section

# The section "Variants" of a run's page: the exported model and its smaller forms, by size, loss and speed.
#
# Values come from `variants.json` of the model and from the metrics of the stage export. See docs/export.md.


HEADS = ("Variant", "Megabytes", "Bits per byte", "Loss", "Tokens/s", "Beside PyTorch", "")


def variants_section(data: RunReport) -> Html:
    """Empty for a run whose export made no variants."""
    metrics: Mapping[str, Any] = next((stage.metrics for stage in data.stages if stage.name == "export"), {})
    if not data.variants:
        return Html()
    rows = [("fp32, the model", *_row(metrics, ""), "served")]
    for name, variant in data.variants.variants.items():
        rows.append((name, *_row(metrics, f"{name}."), "kept" if variant.passed else f"left out: {variant.why}"))
    limit = percent(data.variants.limit)
    text = f"Loss is by how many more bits held-out text takes than under the checkpoint; a variant may lose {limit}."
    return join(tag("p", text, class_="note"), grid(HEADS, rows))


def _row(metrics: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """Empty cells for what was not measured."""
    size, loss = metrics.get(f"{prefix}onnx_bytes"), metrics.get(f"{prefix}loss")
    ours, theirs = (metrics.get(f"{prefix}tokens_per_second_{side}") for side in ("onnx", "torch"))
    return (
        f"{size / 1e6:,.1f}" if size else "",
        number(metrics.get(f"{prefix}bits_per_byte")) if size else "",
        f"{loss:+.2%}" if loss is not None else "",
        f"{ours:,.0f}" if ours else "",
        f"{ours / theirs:.2f} times" if ours and theirs else "",
    )


FOLDER = Path(__file__).parent
METRICS_SHOWN = 5
STYLES = {
    "completed": "good",
    "ran": "good",
    "reused": "good",
    "gate_closed": "bad",
    "failed": "bad",
    "cancelled": "warn",
    "waiting": "warn",
}


def render_page(data: RunReport) -> str:
    """The report as one HTML document, UTF-8; equal values give equal text."""
    sections = {
        "Stages": _stages(data.stages),
        "Training": training_section(data),
        "Data": corpus_section(data),
        "Cluster": _cluster(data),
        "Evaluation": evaluation_section(data),
        "Variants": variants_section(data),
        "Lineage": _lineage(data),
        "Configuration": _configuration(data),
        "Identifiers": _identifiers(data),
    }
    shown = {heading: body for heading, body in sections.items() if body}
    links = (tag("a", heading, href=f"#{heading.lower()}") for heading in shown)
    bodies = (tag("section", tag("h2", heading), body, id=heading.lower()) for heading, body in shown.items())
    return Template((FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        title=escape(data.title),
        status=_badge(data.status),
        about=escape(_about(data)),
        links=join(*links),
        main=join(_error(data), _cards(data), *bodies),
    )


def _about(data: RunReport) -> str:
    messages = (
        short(data.dataset),
        short(data.model),
        duration(data.seconds),
        f"started {data.started[:16].replace('T', ' ')} UTC",
        data.commit and f"commit {data.commit[:8]}{' with uncommitted changes' if data.dirty else ''}",
    )
    return " · ".join(part for part in messages if part)


def _badge(status: str) -> Html:
    style = STYLES.get(status, "idle")
    sign = tag("span", SIGNS[style], aria_hidden="true")
    return tag("span", sign, f" {status.replace('_', ' ')}", class_=f"badge {style}")


def _error(data: RunReport) -> Html:
    if not (error := data.error):
        return Html()
    heading = f"{error.type} in the stage {error.stage}" if error.stage else error.type
    remedy = tag("p", tag("strong", "What to do: "), error.remedy) if error.remedy else Html()
    return tag("div", tag("h2", heading), tag("p", error.message), remedy, class_="error", role="alert")


def _cards(data: RunReport) -> Html:
    cards = [*_score_cards(data), *_model_cards(data)]
    if data.samples:
        answers = [tag("pre", tag("b", each.prompt), each.completion) for each in data.samples]
        note = tag("p", "The prompts are grey; the rest is the model's, drawn with a fixed seed.")
        cards.append(tag("div", tag("h2", "Sample completions"), *answers, note, class_="card wide"))
    return tag("div", *cards, class_="cards")


def _score_cards(data: RunReport) -> Iterator[Html]:
    if not (scores := data.evaluation):
        return
    sure = f"{scores.confidence:.0%} interval"
    spread = f"{sure} {scores.interval[0]:.3f} to {scores.interval[1]:.3f}; " if scores.interval else ""
    text = f"{spread}lower is better" + (f"; champion {data.champion.bits_per_byte:.3f}" if data.champion else "")
    yield _card("Bits per byte, held-out text", f"{scores.bits_per_byte:.3f}", text)
    if gain := scores.gain_over_bigram:
        spread = f"; {sure} {percent(gain.interval[0])} to {percent(gain.interval[1])}" if gain.interval else ""
        text = f"fewer bits than the Kneser-Ney bigram{spread}"
        yield _card("Gain over the bigram", percent(gain.estimate), text)


def _model_cards(data: RunReport) -> Iterator[Html]:
    if parity := data.parity:
        text = f"greedy decoding equal, ONNX against PyTorch; largest logit error {number(parity.max_logit_error)}"
        style = "good" if parity.greedy_equal == parity.greedy_total else "bad"
        yield _card("Greedy parity", f"{parity.greedy_equal:,} of {parity.greedy_total:,}", text, style=style)
    if endpoint := data.endpoint:
        yield _card("Endpoint", _link(endpoint.url, endpoint.ref), f"serves {short(endpoint.model)}", style="text")


def _card(label: str, value: str, text: str, *, style: str = "") -> Html:
    return tag("div", tag("h2", label), tag("p", value, class_=f"value {style}".strip()), tag("p", text), class_="card")


def _stages(stages: Sequence[StageReport]) -> Html:
    return table(("Stage", "Status", "Time", "Result", "Written"), [_stage(stage) for stage in stages])


def _stage(stage: StageReport) -> Html:
    cells = (
        tag("th", stage.name, scope="row"),
        tag("td", _badge(stage.status)),
        tag("td", duration(stage.seconds) if stage.seconds is not None else "", class_="number"),
        tag("td", _metrics(stage), _job(stage)),
        _refs([short(ref) for ref in stage.outputs]),
    )
    failed = [check for check in stage.checks if not check.passed]
    below = tag("td", tag("ul", *map(_failed, failed)), colspan="5")
    return join(tag("tr", *cells), tag("tr", below, class_="failed") if failed else Html())


def _metrics(stage: StageReport) -> Html:
    output = list(stage.metrics.items())[:METRICS_SHOWN]
    items = [tag("li", tag("span", f"{name.replace('_', ' ')} "), number(value)) for name, value in output]
    if stage.checks:
        items.append(tag("li", f"checks: {tally(stage.checks)}"))
    return tag("ul", *items, class_="metrics")


def _job(stage: StageReport) -> Html:
    if not (job := stage.job):
        return Html()
    messages = (
        f"job {job.id}",
        job.submissions > 1 and f"{job.submissions} submissions",
        job.attempts > 1 and f"{job.attempts} attempts",
        job.resumed_from_step is not None and f"resumed from step {number(job.resumed_from_step)}",
        job.excluded_nodes and f"without {', '.join(job.excluded_nodes)}",
        job.adopted and "adopted from an earlier flow run",
    )
    return tag("small", ", ".join(part for part in messages if part), " in ", tag("code", job.folder))


def _failed(check: Check) -> Html:
    text = f": measured {measured(check)}, limit {check.limit}. "
    return tag("li", tag("strong", f"\u2715 {check.name}", class_="bad"), text, check.remedy)


def _cluster(data: RunReport) -> Html:
    if not (cluster := data.qualification):
        return Html()
    from tasks.report.charts import RANKS_SHOWN, allreduce_chart, ranks_chart

    few = len(cluster.ranks) <= RANKS_SHOWN
    figures = (
        figure(ranks_chart(cluster), "Matrix product per rank", "GFLOP/s" if few else "GFLOP/s, the slowest ranks"),
        figure(allreduce_chart(cluster), "All-reduce", "bus bandwidth, GB/s"),
    )
    name = cluster.baseline.name
    text = f"{cluster.verdict}, judged as {name}. All that was measured is on its own page, qualification.html of the artifact."
    return join(
        tag("p", tag("strong", "Verdict: "), text) if cluster.verdict else Html(),
        tag("div", *figures, class_="figures"),
        folded(f"Checks: {tally(cluster.checks)}", checks_grid(cluster.checks)),
    )


def _lineage(data: RunReport) -> Html:
    text = "Lineage graph; scrolls sideways"
    return tag("div", Html(lineage_graph(data.lineage)), class_="scroll", tabindex="0", role="region", aria_label=text)


def _configuration(data: RunReport) -> Html:
    if not data.config:
        return Html()
    plain = data.model_dump(mode="json", include={"config"})["config"]
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
    return tag("details", tag("summary", f"All settings, digest {data.config_digest[:12]}"), tag("pre", text))


def _identifiers(data: RunReport) -> Html:
    runs = (("flow run", data.flow_run), ("MLflow run", data.mlflow_run))
    rows = {
        "dataset": tag("code", data.dataset),
        "model": tag("code", data.model),
        "champion": tag("code", data.champion.ref if data.champion else ""),
        "configuration": tag("code", data.config_digest),
        "commit": tag("code", data.commit or ""),
        **{name: _link(run.url or "", run.id) for name, run in runs if run},
    }
    listed = [join(tag("dt", name), tag("dd", value)) for name, value in rows.items() if value]
    shown = table(("Stage", "Key", "Read", "Written"), [_stage_refs(stage) for stage in data.stages])
    return join(tag("dl", *listed), folded("Keys, inputs and outputs of the stages", shown))


def _stage_refs(stage: StageReport) -> Html:
    refs = ((stage.key,), stage.inputs, stage.outputs)
    return tag("tr", tag("th", stage.name, scope="row"), *map(_refs, refs))


def _refs(refs: Sequence[str]) -> Html:
    return tag("td", *(tag("small", tag("code", ref)) for ref in refs))


def _link(url: str, text: str) -> Html:
    """A link for a web address; any other, for example a `javascript:` one, is only shown."""
    return tag("a", text, href=url) if url.startswith(("http://", "https://")) else tag("span", f"{text} {url}".strip())
