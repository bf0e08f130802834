"""The page of a qualification: what it says first, that nothing in it can run, and that what is missing is never green."""

from __future__ import annotations

import base64
import io
import math
import re

import pytest
from html_page import Page
from PIL import Image
from qualification_material import SKU, sample

from tasks.qualification.verdicts import PairVerdict
from tasks.report.charts import Line
from tasks.report.published import QualificationReport
from tasks.report.qualification.data import by_number, size_text
from tasks.report.qualification.rates import curves, limit_steps
from tasks.report.qualification.report import colour, pair_map, qualification_markdown, write_qualification

pytestmark = pytest.mark.unit

EVIL = """</title><script>alert('x')</script><img src=x onerror="a()">&amp;`|*_[a](javascript:a) """
EMPTY = {"verdict": "unknown", "sku": SKU.name, "sku_digest": "0" * 64}


@pytest.fixture
def page(tmp_path):
    def made(told):
        return Page(write_qualification(tmp_path / "made" / "here", told).read_text(encoding="utf-8"))

    return made


@pytest.mark.integration
@pytest.mark.parametrize("machines", [1, 64, *(pytest.param(many, marks=pytest.mark.long) for many in (2, 4, 512))])
def test_a_page_of_any_number_of_machines_names_them_all_and_fetches_nothing(page, machines):
    made = page(sample(machines))
    assert all(re.search(rf"ccw-hpc-{number}\b", made.text) for number in range(1, machines + 1))
    assert len(made.raw) < 1_000_000
    fetched = [value for _, found in made.elements for key, value in found.items() if key in ("src", "href")]
    assert all(value.startswith(("#", "data:")) for value in fetched) and not made.all("script")
    ids = [found["id"] for _, found in made.elements if "id" in found]
    assert len(ids) == len(set(ids))


def test_the_verdict_comes_first_with_every_sentence_of_it(page):
    told = sample(4)
    text = page(told).text
    head = text[: text.index(" Machines Machine ")]
    assert "unknown" in head and "Silence is not health" in head and "holds until 2026-11-23 10:00 UTC" in head
    reasons = [*told["verdict"]["reasons"], *(one for node in told["verdict"]["nodes"] for one in node["reasons"])]
    assert len(reasons) == 5
    for reason in reasons:
        measured = reason["said"] if reason["measured"] is None else f"{reason['measured']}"
        for part in (
            reason["node"],
            reason["check"],
            measured,
            f"limit {reason['limit']}",
            "a page of figures, 2026-11-01",
        ):
            assert part in head
    assert "Left out of the jobs to come: ccw-hpc-2, ccw-hpc-4" in head and "Drained" in head


def test_what_is_unknown_does_not_look_sound(page):
    made = page(sample(4))
    shown = [
        found["class"] for tag, found in made.elements if tag == "div" and "verdict" in found.get("class", "").split()
    ]
    assert shown == ["verdict unknown"]
    assert "verdict good" in page(sample(4, faults=())).raw


def test_of_a_closed_gate_it_says_of_no_machine_that_jobs_run_on_it(page):
    assert "Jobs run on" not in page(sample(4)).text
    assert "Jobs run on 4 machines: ccw-hpc-1, ccw-hpc-2" in page(sample(4, faults=())).text


def test_hostile_names_and_messages_are_text(page):
    made = page(sample(4, text=EVIL))
    assert not made.all("script") and not made.all("img")
    assert not [key for _, found in made.elements for key in found if key.startswith("on")]
    assert "alert('x')" in made.text
    assert "<script" not in qualification_markdown(sample(4, text=EVIL))


def test_nothing_measured_is_a_page_too(page):
    told = {
        "verdict": EMPTY,
        "measured": {"expected_nodes": 4, "error": "no machine came"},
        "sku": SKU.model_dump(mode="json"),
    }
    text = page(told).text
    assert "4 machines left no word at all" in text and "no machine came" in text
    assert "healthy" not in text.partition("Silence")[0]


def test_numbers_that_are_none_are_left_out_of_the_drawings(page):
    told = sample(4)
    for sweep in told["measured"]["sweeps"][:4]:
        for row in sweep["rows"]:
            row["busbw"] = math.nan
    told["measured"]["sweeps"][5] |= {"rows": [], "status": "timed out", "said": "60 s"}
    told["measured"]["training"][0]["tflops_per_rank"] = None
    told["measured"]["ranks"][0]["probes"][0]["measured"] = math.inf
    made = page(told)
    assert not re.search(r'(?:d|cx|cy|x1)="[^"]*(?:nan|inf)', made.raw)
    assert "timed out" in made.text and "60 s" in made.text


@pytest.mark.parametrize(
    "broken", [{}, {"baseline": {}, "ranks": [], "checks": []}, {"verdict": {}, "measured": {}, "sku": {}}]
)
def test_what_is_no_qualification_is_refused(tmp_path, broken):
    with pytest.raises(ValueError):
        write_qualification(tmp_path, broken)
    assert not list(tmp_path.iterdir())


def test_machines_stand_worst_first_and_by_number(page):
    text = page(sample(64)).text
    machines = text[text.index(" Machine Verdict Host ") : text.index(" Bandwidth out of place")]
    named = re.findall(r"ccw-hpc-\d+", machines)
    assert named[:3] == ["ccw-hpc-64", "ccw-hpc-22", "ccw-hpc-3"]
    assert named[3:] == sorted(named[3:], key=by_number) and len(named) == 64


def test_versions_that_differ_are_marked_with_whose_they_are(page):
    text = page(sample(4)).text
    versions = text[text.index(" Versions Component ") :]
    assert re.search(r"driver ✕ differs .*?535\.161\.08 ccw-hpc-3", versions) and "cuda ✓ equal 12.4" in versions


def test_the_slow_machine_is_a_red_cross_in_the_map_and_a_dead_one_a_hole():
    told = sample(64)["verdict"]["pairs"]
    names = [f"ccw-hpc-{number}" for number in range(1, 65)]
    svg = pair_map(names, [PairVerdict.model_validate(one) for one in told], 380.0, frozenset(["ccw-hpc-22"]))
    pixels = _pixels(svg, 64)
    red = {
        (row, column) for row in range(64) for column in range(64) if pixels[row][column][0] > pixels[row][column][2]
    }
    assert red == {(a, b) for a in range(63) for b in range(63) if a != b and 21 in (a, b)}
    assert all(pixels[63][column][3] == 0 for column in range(64)) and pixels[0][0][3] == 0
    assert re.findall(r">(ccw-hpc-\d+)<", svg) == ["ccw-hpc-22"]


def _pixels(svg, count):
    image = Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]+)", svg)[1]))).convert("RGBA")
    assert image.size == (count, count)
    return [[image.getpixel((column, row)) for column in range(count)] for row in range(count)]


def test_a_colour_says_how_far_below():
    assert colour(-1.0) == colour(0.0) and colour(1.4) == colour(1.0)
    assert colour(0.45)[0] > colour(0.45)[2] and colour(0.95)[2] > colour(0.95)[0]


def test_a_curve_that_collapses_is_drawn_down_to_the_bottom():
    points = tuple((10.0**power, 0.001 if power == 6 else 100.0) for power in range(3, 10))
    svg = curves("label", [Line("out", points), Line("fail", limit_steps([(1e6, 80.0)], 1e9))])
    drawn = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", re.search(r'line out" d="M([^"]+)"', svg)[1])]
    assert drawn.index(max(drawn)) == 3 and max(drawn) - min(drawn) > 150
    assert curves("label", [Line("fail", ((1.0, 1.0), (2.0, 1.0)))]) == ""


def test_a_limit_holds_from_its_size_to_the_next():
    assert limit_steps([(8e9, 430.0), (1e6, 10.0)], 1.6e10) == ((1e6, 10.0), (8e9, 10.0), (8e9, 430.0), (1.6e10, 430.0))
    assert limit_steps([], 1e9) == ()
    assert [size_text(size) for size in (8, 16e6, 2**30, 2**33)] == ["8 B", "16 MB", "1.07 GB", "8.59 GB"]


def test_the_report_of_a_run_reads_both_forms_of_the_file():
    new = QualificationReport.model_validate(sample(4))
    assert new.verdict == "unknown" and len(new.ranks) == 24 and new.baseline.matmul_gflops_per_rank == 600_000
    assert new.allreduce and new.allreduce.gigabytes_per_second == pytest.approx(316, abs=5)
    old = {
        "baseline": {
            "name": "cpu-floor",
            "source": "x",
            "matmul_gflops_per_rank": 4.0,
            "allreduce_gigabytes_per_second": 0.05,
        },
        "ranks": [{"rank": 0, "host": "a", "matmul_gflops": 70.0, "on_core_gflops": 71.0, "memory_bytes": 1}],
        "allreduce": {"megabytes": 16, "gigabytes_per_second": 0.8, "correct": True},
        "checks": [{"name": "rank 0: result", "measured": None, "limit": "a written result", "passed": False}],
    }
    before = QualificationReport.model_validate(old)
    assert before.verdict == "" and before.ranks[0].matmul_gflops == 70.0 and not before.checks[0].passed


def test_the_short_form_is_short():
    told = qualification_markdown(sample(64))
    assert told.startswith("# Qualification: unknown") and len(told.splitlines()) <= 40
    assert "61 healthy, 1 degraded, 1 failed, 1 unknown" in told
