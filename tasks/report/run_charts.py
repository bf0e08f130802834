"""The charts of a run's page: its training, data, cluster and evaluation. Each is empty where there is nothing to draw.

How charts are drawn: charts.py. Headings and captions: templates/run.html.

Champion against challenger by slice is also a table in Markdown, for Prefect's page, and a picture as PNG for MLflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tasks.report.charts import (
    WIDTH,
    Axis,
    Band,
    Bar,
    Columns,
    Line,
    Point,
    Upright,
    bars,
    brief,
    fit,
    legend,
    plot,
    round_ticks,
    spread,
)
from tasks.report.data import duration, number, percent, short
from tasks.report.pictures import ACCENT, INK, LINE, MUTED, WARN, picture, rows_of
from tasks.report.published import (
    Calibration,
    Champion,
    ColumnDrift,
    ComparedMetric,
    ComparedSlice,
    ComparisonReport,
    EvaluationReport,
    HeldoutPoint,
    Histogram,
    LossPoint,
    PositionScore,
    QualificationReport,
    SliceScore,
    StepTime,
    TimeReport,
)

FILE = "comparison.png"
SLICES_SHOWN = 24
EDGE = ("axes fraction", "data")


def comparison_markdown(payload: Mapping[str, Any]) -> str:
    """Every slice with both models' bits per byte and the relative loss."""
    result = ComparisonReport.model_validate(payload)
    head = f"| slice | documents | this model | champion | loss, {result.confidence:.0%} interval |"
    rows = [f"| {' | '.join((row.slice, str(row.documents), *figures(row)))} |" for row in result.rows]
    about = (
        f"`{short(result.candidate)}` against the champion `{short(result.champion)}`, in bits per byte of the same documents. "
        "A loss over 0 is worse."
    )
    lines = ["# Champion against challenger", "", about, "", head, "| --- | --- | --- | --- | --- |", *rows]
    if decided := [gained(row) for row in result.suites if row.gain]:
        heads = ("problems", "this model", "champion", "won", "lost", "of", f"gain, {result.confidence:.0%} interval")
        lines += ["", *(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *decided))]
    return "\n".join(lines)


def gained(row: ComparedMetric) -> tuple[str, ...]:
    """Problems won and lost against the champion, and the gain with its interval, for people."""
    assert row.gain
    shares = (f"{value:.1%}" if value is not None else "" for value in (row.candidate, row.champion))
    counts = (str(number) for number in (row.won, row.lost, row.samples))
    ends = f"{signed(row.gain.low)} to {signed(row.gain.high)}"
    return row.metric, *shares, *counts, f"{signed(row.gain.estimate)} ({ends})"


def figures(row: ComparedSlice) -> tuple[str, str, str]:
    """This model, the champion, and the loss with its interval, for people."""
    mine, theirs = (f"{value:.4f}" if value is not None else "" for value in (row.candidate, row.champion))
    if row.loss is None:
        return mine, theirs, _why_none(row)
    return mine, theirs, f"{signed(row.loss.estimate)} ({signed(row.loss.low)} to {signed(row.loss.high)})"


def signed(share: float) -> str:
    """A share with its sign: `+1.2%`."""
    return f"{share:+.1%}".replace("-", "\u2212")


def draw_comparison(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Draw `comparison.json` into a folder: bits per byte of both models, and the relative loss with its interval."""
    result = ComparisonReport.model_validate(payload)
    rows = result.rows[:SLICES_SHOWN]
    with picture(folder / FILE, (11, 1.9 + 0.4 * len(rows)), dots=110) as figure:
        scores, losses = figure.subplots(1, 2, sharey=True)
        # Both models as marks of their own form, joined by a line.
        for place, row in enumerate(rows):
            if row.candidate is not None and row.champion is not None:
                scores.plot([row.champion, row.candidate], [place] * 2, color=LINE, linewidth=3, zorder=1)
        marks = (("champion", "champion", "s", WARN), ("this model", "candidate", "o", ACCENT))
        for label, name, form, colour in marks:
            points = [(value, place) for place, row in enumerate(rows) if (value := getattr(row, name)) is not None]
            if points:
                scores.plot(*zip(*points, strict=True), form, color=colour, markersize=8, label=label, zorder=2)
        scores.set_title("Bits per byte, lower is better", loc="left", fontsize=12)
        rows_of(scores, [f"{fit(row.slice, 30)}  ({row.documents})" for row in rows])
        # The relative loss, with its interval.
        losses.axvline(0.0, color=MUTED, linewidth=1.2)
        for place, row in enumerate(rows):
            text, colour = (signed(row.loss.estimate), INK) if row.loss else (_why_none(row), MUTED)
            losses.annotate(text, (1.0, place), xycoords=EDGE, va="center", color=colour)
            if row.loss:
                ends = [row.loss.low * 100, row.loss.high * 100]
                losses.plot(ends, [place] * 2, color=INK, linewidth=1.6, marker="|", markersize=10)
                losses.plot([row.loss.estimate * 100], [place], "o", color=ACCENT, markersize=8, zorder=3)
        title = f"Loss to the champion, {result.confidence:.0%} interval: right of the line is worse"
        losses.set_title(title, loc="left", fontsize=12)
        losses.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
        losses.grid(axis="x", linewidth=0.8)
        losses.tick_params(axis="y", length=0)
        for axes in (scores, losses):
            axes.locator_params(axis="x", nbins=5)
        figure.legend(loc="outside lower left", ncols=2, labelcolor=INK)
        title = f"{short(result.candidate)} against the champion {short(result.champion)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return folder / FILE


def _why_none(row: ComparedSlice) -> str:
    return "too few documents" if row.status == "insufficient" else "not comparable"


MAX_POINTS = 1000
RANKS_SHOWN = 16
LEAST_SHARE = 0.0005
"""Classes of characters below it, now and before, are not drawn."""
TOKENS_HIGH = 0.25
"""Height of the fullest bin's bar, by that of the drawing."""
PARTS = {"compute": "accent", "communication": "soft", "data": "warn", "checkpoint": "bad", "rest": "line"}
"""Of a step, in the order in which they are drawn, with their colours."""
CAUSES = {
    "useful": ("useful steps", "accent"),
    "stalled": ("standing still", "muted"),
    "lost": ("steps that did not stay", "bad"),
    "restarting": ("starting again", "warn"),
    "starting": ("starting", "soft"),
    "idle": ("nothing ran", "line"),
}
SMALL, THIRD = (WIDTH, 190), (400, 165)


def loss_chart(points: Sequence[LossPoint], resumed: Sequence[int]) -> Markup:
    """Loss against the step with a running mean; `resumed` are steps at which a job went on from a checkpoint."""
    losses = _finite([(point.step, point.loss) for point in points])
    if not losses:
        return Markup()
    shapes: list[Line | Upright] = [Line("out thin", _thin(losses))]
    meaning, window = Markup(), len(losses) // 40
    if window > 1:
        steps, values = ([0.0, *accumulate(column)] for column in zip(*losses, strict=True))
        ends = range(window, len(losses) + 1)
        mean = [tuple((sums[end] - sums[end - window]) / window for sums in (steps, values)) for end in ends]
        shapes = [Line("each", _thin(losses)), Line("out", _thin(mean))]
        meaning = legend({"each": "each step", "out": f"mean of {window} steps"})
    shapes += [Upright(step, f"resumed from step {step}") for step in resumed]
    first = f"{number(losses[0][1])} at step {losses[0][0]}"
    label = f"Training loss from {first} to {number(losses[-1][1])} at the end"
    return meaning + plot(label, shapes, _steps(losses), _values(losses), size=(520, 318))


def rate_chart(points: Sequence[LossPoint]) -> Markup:
    """Learning rate against the step."""
    rates = [(point.step, point.learning_rate) for point in points if point.learning_rate is not None]
    return _against_step("Learning rate against the step", rates, size=THIRD)


def norm_chart(points: Sequence[LossPoint]) -> Markup:
    """L2 norm of the gradient against the step."""
    norms = [(point.step, point.grad_norm) for point in points if point.grad_norm is not None]
    return _against_step("Gradient norm against the step", norms, size=THIRD)


def split_chart(steps: Sequence[StepTime]) -> Markup:
    """Shares of a step by its parts, against the step."""
    if len(steps) < 2:
        return Markup()
    parts = shares(steps)
    bands, below = [], [0.0] * len(steps)
    for name, colour in PARTS.items():
        above = [low + share for low, share in zip(below, parts[name], strict=True)]
        places = [(step.step, low, high) for step, low, high in zip(steps, below, above, strict=True)]
        bands.append(Band(f"area {colour}", places))
        below = above
    text = ", ".join(f"{name} {percent(sum(values) / len(values))}" for name, values in parts.items())
    first, last = steps[0].step, steps[-1].step
    y = Axis(0, 1, (0, 0.25, 0.5, 0.75, 1), text=lambda share: f"{share:.0%}", grid=True)
    chart = plot(
        f"Shares of a step: {text}",
        bands,
        Axis(first, last, round_ticks(first, last, whole=True), label="step"),
        y,
        size=SMALL,
    )
    return legend({f"area {colour}": name for name, colour in PARTS.items()}) + chart


def shares(steps: Sequence[StepTime]) -> dict[str, list[float]]:
    """Of each step the share of each part; `rest` is what is in none."""
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    for step in steps:
        known = {
            name: getattr(step, f"{name}_seconds") / max(step.step_seconds, 1e-12) for name in PARTS if name != "rest"
        }
        for name, share in {**known, "rest": min(max(1 - sum(known.values()), 0.0), 1.0)}.items():
            parts[name].append(share)
    return parts


def speed_chart(steps: Sequence[StepTime]) -> Markup:
    """Tokens a second against the step."""
    points = [(step.step, step.tokens_per_second) for step in steps if step.tokens_per_second > 0]
    return _against_step("Tokens a second, all ranks, against the step", points, zero=True)


def heldout_chart(points: Sequence[HeldoutPoint]) -> Markup:
    """Bits per byte of held-out text against the step."""
    values = [(point.step, point.heldout_bits_per_byte) for point in points]
    return _against_step("Bits per byte of held-out text against the step", values, dots=len(values) <= 40)


def time_chart(time: TimeReport) -> Markup:
    """Seconds of the whole run by cause; causes that cost nothing are left out."""
    total = sum(time.seconds.values())
    known = [(words, colour, time.seconds.get(name, 0.0)) for name, (words, colour) in CAUSES.items()]
    rows = [Bar(w, s, f"{percent(s / total)}, {duration(s)}", style=c) for w, c, s in known if s]
    return bars("What the time of training went to", rows)


def lengths_chart(histogram: Histogram) -> Markup:
    """Counts as columns of equal width, for edges that grow by factors; the last bin may be open."""
    counts, edges = histogram.counts, histogram.edges
    if not counts:
        return Markup()
    most, every = max(*counts, 1) * 1.05, math.ceil(len(edges) / 10)
    x = Axis(
        0, max(len(counts), len(edges) - 1), range(0, len(edges), every), text=lambda place: brief(edges[int(place)])
    )
    y = Axis(0, most, round_ticks(0, most, whole=True), label="documents", grid=True)
    columns = Columns("accent", [(place + 0.04, place + 0.96, count) for place, count in enumerate(counts)])
    return plot("Histogram of document lengths in characters", [columns], x, y, size=(WIDTH, 200))


def classes_chart(classes: Mapping[str, float], before: Mapping[str, float]) -> Markup:
    """Share of each class of characters, the largest on top, with its share in the version before."""
    shown = [name for name, share in classes.items() if max(share, before.get(name, 0.0)) >= LEAST_SHARE]
    rows = []
    for name in sorted(shown, key=lambda name: -classes[name]):
        text = percent(classes[name]) + (f", was {percent(before[name])}" if name in before else "")
        rows.append(Bar(name.replace("_", ", "), classes[name], text, before=before.get(name)))
    return bars("Character classes", rows)


def drift_chart(drift: Sequence[ColumnDrift], warn: float | None, most: float | None) -> Markup:
    """Distance of each column to the version before, coloured by the two limits."""

    def colour(distance: float) -> str:
        if most is not None and distance > most:
            return "bad"
        return "warn" if warn is not None and distance >= warn else "soft"

    known = [(each.column.replace("_", " "), each.distance) for each in drift if each.distance is not None]
    rows = [Bar(column, distance, f"{distance:.3f}", style=colour(distance)) for column, distance in known]
    limits = [(words, value) for words, value in (("told", warn), ("gate closes", most)) if value is not None]
    return bars("Drift of each column", rows, [(f"{words} {number(value)}", value) for words, value in limits])


def counts_chart(counts: Mapping[str, int], label: str, but: str = "") -> Markup:
    """How many of each kind, the most on top; `but` is not one."""
    order = sorted((kind for kind, count in counts.items() if count and kind != but), key=lambda kind: -counts[kind])
    return bars(label, [Bar(kind, counts[kind], number(counts[kind])) for kind in order])


def ranks_chart(cluster: QualificationReport) -> Markup:
    """GFLOP/s of each rank, or of the slowest RANKS_SHOWN ones, against the baseline."""
    slowest = sorted(cluster.ranks, key=lambda rank: rank.matmul_gflops)[:RANKS_SHOWN]
    rows = [
        Bar(f"rank {rank.rank} {rank.host}".strip(), rank.matmul_gflops, number(rank.matmul_gflops))
        for rank in sorted(slowest, key=lambda rank: rank.rank)
    ]
    return bars("GFLOP/s of each rank", rows, _floor(cluster.baseline.name, cluster.baseline.matmul_gflops_per_rank))


def allreduce_chart(cluster: QualificationReport) -> Markup:
    """Bus bandwidth of the all-reduce in GB/s against the baseline; empty where none was measured."""
    if not cluster.allreduce or (rate := cluster.allreduce.gigabytes_per_second) is None:
        return Markup()
    rows = [Bar(f"{number(cluster.allreduce.megabytes)} MB", rate, number(rate))]
    floor = _floor(cluster.baseline.name, cluster.baseline.allreduce_gigabytes_per_second)
    return bars("Bus bandwidth of the all-reduce in GB/s", rows, floor)


def scores_chart(scores: EvaluationReport, champion: Champion | None) -> Markup:
    """Bits per byte of the baselines, the champion and this model with its interval."""
    others = (("unigram", scores.unigram), ("Kneser-Ney bigram", scores.bigram), ("champion", champion))
    rows = [Bar(name, one.bits_per_byte, f"{one.bits_per_byte:.3f}") for name, one in others if one]
    value = scores.bits_per_byte
    rows.append(Bar("this model", value, f"{value:.3f}", interval=scores.interval, style="accent"))
    return bars("Bits per byte, lower is better", rows)


def slices_chart(slices: Sequence[SliceScore]) -> Markup:
    """Bits per byte of each slice, with its interval; a slice with too few documents has none."""
    known = [(each, each.bits_per_byte) for each in slices if each.bits_per_byte is not None]
    rows = [Bar(each.slice, bits, f"{bits:.3f}", interval=each.interval) for each, bits in known]
    return bars("Bits per byte by slice, lower is better", rows)


def losses_chart(rows: Sequence[ComparedSlice]) -> Markup:
    """The relative loss to the champion of the whole and of each slice: right of the line is worse."""
    known = [(row.slice, row.loss) for row in rows if row.loss]
    if not known:
        return Markup()
    count = len(known)
    low, high = spread([0.0, *(value for _, loss in known for value in (loss.low, loss.estimate, loss.high))])
    shapes = [Line("axis", ((0.0, count - 0.5), (0.0, -0.5)))]
    for row, (_, loss) in enumerate(known):
        shapes.append(Line("ink thin", ((loss.low, row), (loss.high, row))))
        shapes += [Line("ink thin", ((end, row - 0.15), (end, row + 0.15))) for end in (loss.low, loss.high)]
        shapes.append(Line("out", ((loss.estimate, row),)))
    x = Axis(low, high, round_ticks(low, high), text=lambda share: f"{round(100 * share, 6):g}%", grid=True)
    y = Axis(count - 0.5, -0.5, range(count), text=lambda row: fit(known[int(row)][0]))
    text = ", ".join(f"{name} {signed(loss.estimate)}" for name, loss in known)
    return plot(f"Relative loss to the champion: {text}", shapes, x, y, size=(WIDTH, 30 * count + 40), style="named")


def positions_chart(positions: Sequence[PositionScore]) -> Markup:
    """Bits a token against how many tokens were read before it, up to the context; hollow where documents were joined for it."""
    known = [(each, each.bits_per_token) for each in positions if each.bits_per_token is not None]
    if not known:
        return Markup()
    shapes = [Line("out thin", [(each.last, bits) for each, bits in known])]
    for each, bits in known:
        shapes += [Line("ink thin", [(each.last, bound) for bound in each.interval])] if each.interval else []
        shapes.append(Line("hollow" if each.joined else "out", [(each.last, bits)]))
    most = 1.08 * max(max(bits, *(each.interval or (0.0,))) for each, bits in known)
    first, last = known[0][0].last, known[-1][0].last
    low, high = first / 1.2, last * 1.2
    powers = [2.0**power for power in range(40) if low <= 2.0**power <= high]
    x = Axis(low, high, powers, label="tokens read before, up to", log=True, text=lambda tokens: f"{tokens:,.0f}")
    y = Axis(0, most, round_ticks(0, most), label="bits a token", grid=True)
    (_, least), (_, end) = known[0], known[-1]
    text = f"Bits a token by position: {number(least)} up to {first}, {number(end)} up to {last}"
    return plot(text, shapes, x, y)


def reliability_chart(calibration: Calibration) -> Markup:
    """Share of tokens that were right against the probability that the model gave them; on the line it knows what it knows."""
    if not calibration.bins:
        return Markup()
    most = max(each.tokens for each in calibration.bins)
    sure = [each.probability for each in calibration.bins]
    heights = [TOKENS_HIGH * each.tokens / most for each in calibration.bins]
    shapes = (
        Columns("soft", [(max(p - 0.0225, 0.0), min(p + 0.0225, 1.0), h) for p, h in zip(sure, heights, strict=True)]),
        Line("warn", ((0, 0), (1, 1))),
        Line("out", [(each.probability, each.accuracy) for each in calibration.bins], dots=True),
    )
    ticks = (0, 0.2, 0.4, 0.6, 0.8, 1)
    x = Axis(0, 1, ticks, label="probability of the most likely token")
    y = Axis(0, 1.02, ticks, label="share right", grid=True)
    meaning = {"bar soft": "tokens, relative to the fullest bin", "warn": "as sure as right", "out": "this model"}
    text = f"Reliability curve; expected calibration error {number(calibration.error)}"
    return legend(meaning) + plot(text, shapes, x, y)


def _against_step(
    label: str,
    points: Sequence[tuple[int, float]],
    *,
    size: tuple[int, int] = SMALL,
    zero: bool = False,
    dots: bool = False,
) -> Markup:
    """A curve of what is finite, from zero where that is asked."""
    known = _finite(points)
    if not known:
        return Markup()
    ends = ", ".join(f"{number(value)} at step {step}" for step, value in (known[0], known[-1]))
    line = Line("out thin", _thin(known), dots=dots)
    return plot(f"{label}: {ends}", [line], _steps(known), _values(known, zero=zero), size=size)


def _finite(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [point for point in points if math.isfinite(point[1])]


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    return points[:: math.ceil(len(points) / MAX_POINTS)]


def _steps(points: Sequence[Point]) -> Axis:
    low, high = spread([point[0] for point in points], 0.03)
    return Axis(low, high, round_ticks(low, high, whole=True), label="step")


def _values(points: Sequence[Point], *, zero: bool = False) -> Axis:
    low, high = spread([point[1] for point in points])
    low = 0.0 if zero else low
    return Axis(low, high, round_ticks(low, high), grid=True)


def _floor(name: str, floor: float | None) -> list[tuple[str, float]]:
    return [] if floor is None else [(f"{name} {number(floor)}", floor)]
