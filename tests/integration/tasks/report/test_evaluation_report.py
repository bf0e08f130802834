"""What people see of an evaluation: slices, calibration and suites on the page; champion against challenger, drawn and told."""

import pytest
from html_page import Page

from tasks.report.data import RunReport
from tasks.report.page import render_page
from tasks.report.published import Calibration, ComparisonReport, SliceScore
from tasks.report.run_charts import (
    comparison_markdown,
    draw_comparison,
    losses_chart,
    positions_chart,
    reliability_chart,
    slices_chart,
)

EVALUATION = {
    **{"documents": 36, "bytes": 612_345, "tokens": 255_100, "perplexity": 24.9, "bits_per_byte": 1.934},
    **{"interval": [1.881, 1.993], "bigram": {"bits_per_byte": 2.447}, "confidence": 0.95},
}
"""What every release has written."""
SLICES = [
    {
        **{
            "slice": "script latin",
            "status": "measured",
            "documents": 30,
            "bits_per_byte": 1.9,
            "interval": [1.8, 2.0],
        },
        **{"perplexity": 24.1, "accuracy": {"estimate": 0.41, "interval": [0.4, 0.42]}, "calibration_error": 0.031},
    },
    {
        **{"slice": "<b>source</b> \u202e", "status": "insufficient", "documents": 4, "bits_per_byte": 2.2},
        **{"interval": None, "perplexity": 30.0, "accuracy": {"estimate": 0.3, "interval": None}},
    },
]
BINS = [
    {"from": 0.0, "to": 0.5, "tokens": 700, "probability": 0.3, "accuracy": 0.25},
    {"from": 0.5, "to": 1.0, "tokens": 300, "probability": 0.8, "accuracy": 0.85},
]
POSITIONS = [
    {
        "from": 1,
        "to": 16,
        "tokens": 576,
        "documents": 36,
        "bits_per_token": 4.85,
        "interval": [4.6, 5.1],
        "joined": False,
    },
    {"from": 17, "to": 24, "tokens": 80, "documents": 10, "bits_per_token": 3.85, "interval": None, "joined": True},
    {"from": 25, "to": 32, "tokens": 0, "documents": 0, "bits_per_token": None, "interval": None, "joined": False},
]
WHOLE = {
    **EVALUATION,
    "accuracy": {"estimate": 0.4, "interval": [0.39, 0.41]},
    "calibration": {"error": 0.05, "bins": BINS},
    "slices": SLICES,
    "context": {"declared": 32, "measured": 32},
    "positions": POSITIONS,
    "suites": {
        "memorisation": {"metrics": {"train_share": 0.0625}, "samples": 16},
        "code": {"metrics": {}, "samples": 0, "failed": "did not end within evaluation.suite_seconds = 5"},
    },
}
LOSS = {"estimate": -0.053, "low": -0.06, "high": -0.047}
COMPARED = {
    "candidate": "checkpoint/code@" + "a" * 64,
    "champion": "checkpoint/code@" + "b" * 64,
    "confidence": 0.95,
    "rows": [
        {"slice": "all documents", "documents": 34, "candidate": 1.934, "champion": 2.04, "loss": LOSS},
        {
            "slice": "script latin",
            "documents": 30,
            "candidate": 1.9,
            "champion": 2.0,
            "loss": {**LOSS, "estimate": 0.01},
        },
        {
            "slice": "<b>source</b> \u202e",
            "status": "insufficient",
            "documents": 4,
            "candidate": 2.2,
            "champion": 2.3,
            "loss": None,
        },
    ],
}


def _report(**parts):
    fixed = {"title": "Retrain code", "status": "completed", "started": "2026-11-21T10:04:11Z", "seconds": 754.2}
    made_of = {"dataset": "dataset/code@" + "c" * 64, "config_digest": "d" * 64, "config": {}}
    return RunReport.model_validate({**fixed, **made_of, **parts})


def test_the_page_tells_slices_calibration_suites_and_the_champion():
    page = Page(text := render_page(_report(evaluation=WHOLE, comparison=COMPARED)))
    for said in ("top-1 accuracy", "40.0%", "calibration error", "0.05", "1.800 to 2.000", "too few documents"):
        assert said in page.text
    assert "memorisation.train_share" in page.text and "did not end within evaluation.suite_seconds" in page.text
    assert "+1.0% (\u22126.0% to \u22124.7%)" in page.text and "2.0000" in page.text
    assert "<b>source</b>" not in text and text.count("Loss to the champion") == 1
    labels = [found["aria-label"] for name, found in page.elements if name == "svg" and "aria-label" in found]
    assert "Bits a token by position: 4.85 up to 16, 3.85 up to 24" in labels
    assert any(label.startswith("Reliability curve; expected calibration error 0.05") for label in labels)
    ids = page.all("id")
    assert len(ids) == len(set(ids))


def test_an_evaluation_of_an_older_release_still_makes_a_page():
    text = render_page(_report(evaluation=EVALUATION))
    assert "Slices in figures" not in text and "Reliability" not in text and "Loss to the champion" not in text


def test_charts_of_nothing_are_left_out():
    assert slices_chart([]) == "" and losses_chart([]) == "" and reliability_chart(Calibration(error=0.0)) == ""
    assert positions_chart([]) == ""
    assert losses_chart(ComparisonReport.model_validate(COMPARED).rows[2:]) == ""
    slices = [SliceScore.model_validate(each) for each in SLICES]
    assert slices_chart(slices) == slices_chart(slices)


def test_the_picture_is_a_png_of_the_slices_that_grows_with_them(tmp_path):
    first = draw_comparison(tmp_path / "few", COMPARED).read_bytes()
    assert first.startswith(b"\x89PNG") and first == draw_comparison(tmp_path / "again", COMPARED).read_bytes()
    many = {**COMPARED, "rows": COMPARED["rows"] * 8}
    heights = [
        int.from_bytes(data[20:24], "big") for data in (first, draw_comparison(tmp_path / "many", many).read_bytes())
    ]
    assert heights[1] > 2 * heights[0]


@pytest.mark.parametrize("rows", [COMPARED["rows"], [{**COMPARED["rows"][0], "loss": None, "candidate": None}]])
def test_the_table_has_a_row_a_slice(rows):
    told = comparison_markdown({**COMPARED, "rows": rows})
    assert told.count("\n| ") == len(rows) + 2
    assert "checkpoint/code@aaaaaaaa" in told
    assert ("too few documents" in told) == (len(rows) > 1) and ("not comparable" in told) == (len(rows) == 1)


def test_the_table_has_what_was_won_and_lost_where_problems_are_told():
    gain = {"estimate": 0.25, "low": 0.1, "high": 0.4}
    suites = [
        {
            "metric": "prompts.own_share",
            "candidate": 0.75,
            "champion": 0.5,
            "samples": 40,
            "won": 12,
            "lost": 2,
            "gain": gain,
        },
        {"metric": "prompts.own_low", "candidate": 0.6, "champion": None, "samples": 40},
    ]
    told = comparison_markdown({**COMPARED, "suites": suites}).splitlines()
    assert told[-1] == "| prompts.own_share | 75.0% | 50.0% | 12 | 2 | 40 | +25.0% (+10.0% to +40.0%) |"
    assert told[-3].endswith("gain, 95% interval |")
