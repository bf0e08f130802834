"""The performance in a revalidation's page: the champion on new data against itself at promotion, whole and in slices."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tasks.report.data import number, short
from tasks.report.markup import Html, facts, grid, join, tag
from tasks.report.revalidation.charts import axis, scale_of, whisker
from tasks.report.revalidation.data import Loss, PerformanceReport, Score, Slice
from tasks.report.revalidation.markup import badge, said
from tasks.report.revalidation.messages import loss_said, score_said, value_said

SCALE = tag("small", "scale")


def performance_section(performance: PerformanceReport | None, why: str) -> Html:
    """The scores and the slices; where they were not measured, why not."""
    if performance is None:
        return tag(
            "p",
            "The champion was not measured on the new data: ",
            said(why or "nothing is said of it"),
            ".",
            class_="note",
        )
    sure = f"{performance.confidence:.0%} interval" if performance.confidence else "interval"
    scored = f" Scored by {short(performance.scored_by)}." if performance.scored_by else ""
    paired = (
        f" {performance.paired:,} documents are the same in both, and compared one by one."
        if performance.paired
        else ""
    )
    return join(
        facts(
            {
                "loss since promotion": loss_said(performance.loss),
                "perplexity, new": _perplexity(performance.new),
                "perplexity, promotion": _perplexity(performance.promotion),
            }
        ),
        tag("p", f"Lower is better. The whisker is the {sure}.{paired}{scored}", class_="note"),
        _scores(performance),
        _slices(performance),
    )


def _perplexity(score: Score) -> str | None:
    return None if score.perplexity is None else number(score.perplexity)


def _scores(performance: PerformanceReport) -> Html:
    both = {"new data": performance.new, "at promotion": performance.promotion}
    scale = scale_of([value for score in both.values() for value in (score.bits_per_byte, score.low, score.high)])
    rows: list[Sequence[str]] = [
        (
            name,
            "" if score.documents is None else number(score.documents),
            score_said(score),
            _score(name, score, scale),
        )
        for name, score in both.items()
    ]
    rows.append((SCALE, "", "", axis(scale, name="score-axis", what="Bits per byte")))
    return grid(("Bits per byte", "Documents", "Measured", "Interval"), rows, class_="forest")


def _score(name: str, score: Score, scale: tuple[float, float]) -> Html:
    told = f"{name}: {score_said(score)} bits per byte"
    return whisker(score.bits_per_byte, score.low, score.high, scale=scale, name=f"score-{name.split()[0]}", said=told)


def _slices(performance: PerformanceReport) -> Html:
    losses = [each.loss for each in performance.slices if each.loss]
    bounds = [value for loss in losses for value in (loss.estimate, loss.low, loss.high)]
    if not performance.slices:
        return Html()
    scale = scale_of(bounds, zero=True)
    rows = [_slice(each, scale, place) for place, each in enumerate(performance.slices)]
    if losses:
        rows.append((SCALE, "", "", axis(scale, name="slice-axis", share=True, what="Loss since promotion")))
    told = "How far bits per byte lie over those at promotion; right of the line is worse. A diamond failed."
    heads = ("Slice", "Documents, then and now", "Bits per byte", "Loss since promotion")
    return join(tag("h3", "Slices"), tag("p", told, class_="note"), grid(heads, rows, class_="forest"))


def _slice(each: Slice, scale: tuple[float, float], place: int) -> tuple[str, ...]:
    loss = each.loss or Loss()
    drawn = whisker(
        loss.estimate,
        loss.low,
        loss.high,
        scale=scale,
        name=f"slice-{place}",
        zero=0.0,
        said=f"{each.slice}: {loss_said(each.loss)}",
        failed=each.status == "failed",
    )
    known = each.promotion is not None and each.new is not None
    return (
        join(Html(escape(each.slice)), tag("small", badge(each.status))),
        f"{each.reference_documents:,} / {each.documents:,}",
        f"{value_said(each.promotion)} to {value_said(each.new)}" if known else "not measured",
        join(drawn, tag("small", loss_said(loss) if drawn else "")),
    )
