"""The evidence of a revalidation: what the page and its short form say, that nothing in it can run, that people can read it."""

from __future__ import annotations

import json
import math
import re

import evidence_material as material
import pytest
from html_page import Page

from tasks.report.charts import round_ticks
from tasks.report.revalidation.report import evidence_markdown, figures, write_evidence

pytestmark = pytest.mark.unit

EVIL = """</title><script>alert('x')</script><img src=x onerror="a()">&amp;`|*_[a](javascript:a) """
MADE = {
    "valid": material.valid(),
    "degraded": material.told(),
    "invalid": material.invalid(),
    "unknown": material.unknown(),
}
PNG = b"\x89PNG\r\n"


@pytest.fixture
def page(tmp_path):
    def made(told):
        return Page(write_evidence(tmp_path / "made" / "here", told).read_text(encoding="utf-8"))

    return made


@pytest.mark.parametrize("verdict", MADE)
def test_the_verdict_comes_first_with_why_and_what_to_do(page, verdict):
    text = page(MADE[verdict]).text
    head, body = text[: text.index(" Parts Part ")], text[text.index(" Parts Part ") :]
    assert verdict in head and all(
        one.replace("`", "") in head.replace(" ,", ",") or "`" in one for one in MADE[verdict]["why"]
    )
    assert "What to do" in head and "What happens by itself" in head
    assert all(part["name"] in body and part["said"].partition("`")[0] in body for part in MADE[verdict]["parts"])


@pytest.mark.parametrize(
    ("window", "acts", "said"),
    [
        ({"number": 1, "of": 2, "data": [material.DATASET]}, False, "Window 1 of 2: nothing starts yet"),
        ({"number": 2, "of": 2, "data": [material.REFERENCE, material.DATASET]}, True, "model.degraded is said"),
        ({"number": 2, "of": 2, "data": [material.DATASET]}, False, "this data counted already"),
    ],
)
def test_it_says_what_starts_by_itself(page, window, acts, said):
    told = material.told(window=window, acts=acts)
    assert said in page(told).text
    assert said in evidence_markdown(told).replace("`", "")


def test_each_column_stands_beside_its_threshold_and_its_calibration(page):
    found = page(material.told())
    assert re.search(r"language language mix .*? ✕ drift 0\.23 bits 0\.014 0\.025", found.text)
    drawn = [each for each in found.all("svg") if each.get("aria-labelledby", "").startswith("drift-")]
    measured = [column for column in material.columns() if column["value"] is not None]
    assert len(drawn) == len(measured) == 9
    described = re.findall(r'<desc id="drift-\d+-d">(.*?)</desc>', found.raw)
    assert "This window: 0.1834; threshold 0.0121. 200 comparisons" in described[0]
    before, _, after = found.text.partition("Distributions of what did not move (1)")
    assert "256 to 512 6.0% 7.0%" in after and "256 to 512" not in before
    assert "en 98.9% 57.6%" in before and "und new data 0.1% 39.0% 3.1" in found.text


def test_a_window_beyond_its_threshold_is_told_by_form_not_only_by_colour(page):
    raw = page(material.told()).raw
    strips = re.findall(r'<svg class="strip" width="100%".*?</title>.*?</svg>(?=</td>)', raw, re.DOTALL)
    by_name = {re.search(r"<title[^>]*>([^:<]*):", strip)[1]: strip for strip in strips if 'id="drift-' in strip}
    assert "<path" in by_name["language"] and "<circle" not in by_name["language"]
    assert "<circle" in by_name["length"] and "<path" not in by_name["length"]
    place = {
        style: float(re.search(rf'x1?="([\d.]+)%"[^>]*class="{style}"', by_name["language"])[1])
        for style in ("limit", "found")
    }
    assert place["limit"] < place["found"]


def test_the_scores_and_slices_are_drawn_on_one_scale(page):
    found = page(material.told())
    dots = re.findall(r'<circle cx="([\d.]+)%" cy="14"[^>]*/></svg></td>', found.raw)
    assert len(dots) == 2 and float(dots[0]) > float(dots[1])
    assert "+31.0% (+26.0% to +37.0%)" in found.text
    assert re.search(r"language de – insufficient 310 / 171 not measured", found.text)


def test_what_was_not_measured_is_told_with_the_reason(page):
    text = page(material.invalid()).text
    assert text.count("Not looked at: the champion is damaged.") == 4 + 3
    assert "model.onnx.data: sha256 7f3a, signed as 1b0c" in text
    assert "headway rollback model/tickets --reason TEXT" in text and "headway retrain --from export" in text
    text = page(material.unknown()).text
    assert "That is no all-clear" in text and "at least 100 on either side" in text


@pytest.mark.parametrize("verdict", MADE)
def test_nothing_is_fetched_or_run(page, verdict):
    found = page(MADE[verdict])
    names = {name for name, _ in found.elements}
    assert not names & {"script", "iframe", "object", "embed", "form", "base", "img"}
    addresses = [each.get("href") or each.get("src") for _, each in found.elements if "href" in each or "src" in each]
    assert all(address.startswith(("#", "data:,")) for address in addresses)
    assert not re.search(r"url\(|@import|https?://", found.raw)


@pytest.mark.parametrize("told", [material.hostile(EVIL), material.hostile(EVIL * 300)], ids=["short", "long"])
def test_hostile_text_stays_text_and_what_is_no_number_is_not_measured(page, told):
    found = page(told)
    names = {name for name, _ in found.elements}
    assert not names & {"script", "img"} and "<script>alert('x')" in found.text
    assert not any(key.startswith("on") for _, attributes in found.elements for key in attributes)
    assert not re.search(r"\bnan\b", found.text) and "not measured" in found.text
    short = evidence_markdown(told)
    assert "<" not in re.sub(r"`[^`]*`", "", short) and len(short.splitlines()) <= 60


@pytest.mark.parametrize("count", [0, 1, 60])
def test_any_number_of_columns(page, count):
    told = material.many(count)
    found = page(told)
    assert len(re.findall(r'aria-labelledby="drift-\d+-t', found.raw)) == count
    assert ("No column was measured" in found.text) == (count == 0)
    assert len(evidence_markdown(told).splitlines()) <= 60


def test_missing_and_empty_values_are_no_error(page, tmp_path):
    told = {"schema": "headway/revalidation/1", "verdict": "unknown", "window": {"number": 0, "of": 2}, "drift": None}
    assert "Unknown" in page(told).text.title() and evidence_markdown(told)
    assert figures(tmp_path, told) == ()
    with pytest.raises(ValueError, match="verdict"):
        write_evidence(tmp_path, {"verdict": "splendid"})


def test_every_table_has_heads_and_every_drawing_a_name(page):
    found = page(material.told())
    assert all("scope" in each for each in found.all("th"))
    assert len(found.all("thead")) == len(found.all("table"))
    ids = [each["id"] for _, each in found.elements if "id" in each]
    assert len(ids) == len(set(ids))
    for drawing in (each for each in found.all("svg") if each.get("role") == "img"):
        assert set(drawing["aria-labelledby"].split()) <= set(ids)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_marks_stand_out_from_what_is_behind_them(page, scheme):
    raw = page(material.told()).raw
    plain = dict(pairs("".join(re.findall(r"^:root \{(.*?)\}", raw, re.DOTALL | re.MULTILINE))))
    dark = dict(pairs("".join(re.findall(r"scheme: dark\) \{\s*:root \{(.*?)\}", raw, re.DOTALL))))
    colours = plain if scheme == "light" else plain | dark
    assert plain.keys() == dark.keys()
    assert len(colours) > 15
    for word in ("good", "bad", "warn"):
        assert contrast(colours[word], colours[f"{word}-fill"]) >= 4.5, word
        assert contrast(colours["ink"], colours[f"{word}-fill"]) >= 7, word
    for mark in ("null", "accent", "bad", "ink"):
        assert contrast(colours[mark], colours["panel"]) >= 3, mark


def pairs(block):
    return re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)


def contrast(one, other):
    """WCAG 2.2: relative luminances, 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_short_form_says_what_an_approver_needs():
    short = evidence_markdown(material.told())
    assert short.startswith("## ■ degraded: tickets")
    for said in (
        "23.5 %",
        "drift **failed**",
        "(6 of 10 columns)",
        "de 0.2 % → 41.7 %",
        "1.731 (1.684 to 1.779)",
        "`und`",
        "+31.0%",
    ):
        assert said in short
    assert "dataset/tickets@fedcba98" in short and len(short.splitlines()) <= 60


def test_the_pictures_are_drawn_where_there_is_something_to_draw(tmp_path):
    drawn = figures(tmp_path, material.told())
    assert [path.name for path in drawn] == ["drift.png", "performance.png"]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 10_000 for path in drawn)
    assert figures(tmp_path, material.invalid()) == ()


def test_equal_values_give_equal_pages(tmp_path):
    told = json.loads(json.dumps(material.told()))
    first, second = (write_evidence(tmp_path / name, told).read_bytes() for name in ("a", "b"))
    assert first == second and [path.name for path in (tmp_path / "a").iterdir()] == ["evidence.html"]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.04, 0.37), (1.363, 1.787), (0.0, 1e-6), (-5e8, 5e8)])
def test_ticks_are_few_round_and_inside(low, high):
    found = round_ticks(low, high)
    assert 2 <= len(found) <= 6 and all(low <= tick <= high for tick in found)
    digits = {f"{tick:.6g}" for tick in found}
    assert all(math.isclose(float(f"{tick:.3g}"), tick, abs_tol=1e-12 * (high - low)) for tick in found), digits
