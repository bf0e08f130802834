"""The report of a run: what it says and leaves out, that nothing in it can run or be fetched, and how it is drawn."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from jinja2 import Environment

from tasks.report import pages
from tasks.report.data import Lineage, RunReport, duration, number, percent, short
from tasks.report.lineage import BOX_HEIGHT, BOX_WIDTH, lineage_graph, lineage_page
from tasks.report.page import gather, render_page
from tasks.report.published import ColumnDrift, EvaluationReport, LossPoint, QualificationReport
from tasks.report.run_charts import classes_chart, drift_chart, loss_chart, ranks_chart, scores_chart
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit

EVIL = """<script>alert('x')</script><img src=x onerror="a()">&amp;"""
VOID = {"meta", "link", "img", "br"}
HASH = "0123456789abcdef" * 4
CLOSED = {"name": "duplicate_share", "measured": 0.312, "limit": "<= 0.2", "passed": False, "remedy": "Deduplicate it."}


class Page(HTMLParser):
    """Every element with its attributes, the text, and whether each tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text, self._open = "", []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, {key: value or "" for key, value in attributes}))
        if name not in VOID:
            self._open.append(name)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, {key: value or "" for key, value in attributes}))

    def handle_endtag(self, name):
        assert self._open.pop() == name

    def handle_data(self, data):
        self.text += data

    def all(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.elements if attribute in found]


def _ref(kind: str, name: str = "code") -> str:
    return f"{kind}/{name}@{HASH}"


def _nodes(*kinds: str) -> list[dict[str, str]]:
    return [{"ref": _ref(kind), "kind": kind, "name": "code", "version": HASH} for kind in kinds]


def _edges(*pairs: str) -> list[dict[str, str]]:
    return [{"output": _ref(made), "input": _ref(read)} for read, made in (pair.split(" ") for pair in pairs)]


EVALUATION = {
    **{"documents": 36, "bytes": 612_345, "tokens": 255_100, "perplexity": 24.9, "confidence": 0.95},
    **{"bits_per_byte": 1.934, "interval": [1.881, 1.993]},
    **{"unigram": {"bits_per_byte": 3.212}, "bigram": {"bits_per_byte": 2.447}},
    "gain_over_bigram": {"estimate": 0.2097, "interval": [0.197, 0.2221]},
}
LINEAGE = {
    "nodes": _nodes("model", "dataset", "tokens", "qualification", "plan", "checkpoint", "evaluation", "endpoint"),
    "edges": _edges("dataset tokens", "tokens plan", "qualification plan", "tokens checkpoint", "plan checkpoint")
    + _edges("checkpoint evaluation", "tokens evaluation", "checkpoint model", "evaluation model", "model endpoint"),
}
FACTS = (
    *("✓ completed", "12 min 34 s", "with uncommitted changes", "1.934", "21.0%", "19.7% to 22.2%", "120 of 120"),
    "95% interval 1.881 to 1.993; lower is better; champion 1.981",
    "2 attempts, resumed from step 400, adopted",
    "checks: 1 of 1 passed",
)


def _report(**changes) -> RunReport:
    fixed = {"title": "Retrain code", "status": "completed", "started": "2026-11-21T10:04:11Z", "seconds": 754.2}
    made_of = {"dataset": _ref("dataset"), "config_digest": HASH, "commit": "3148e5412aa90b77", "dirty": True}
    config = {"training": {"model": "code", "betas": (0.9, 0.95)}}
    return RunReport.model_validate({**fixed, **made_of, "config": config, **changes})


@pytest.mark.skipif(sys.dont_write_bytecode, reason="nothing compiled is kept here")
def test_templates_are_compiled_once_and_not_at_every_run(monkeypatch):
    page = render_page(_report())
    pages._templates.cache_clear()
    monkeypatch.setattr(Environment, "compile", lambda *_, **__: pytest.fail("compiled once more"))
    assert render_page(_report()) == page


def test_the_page_says_which_documents_training_read_and_what_was_set_aside_by_which_rule():
    corpus = {"documents": 1547, "characters": 9, "bytes": 9, "accepted": _ref("dataset")}
    rules = {"documents": 36, "exact duplicates": 30, "too short": 5, "unreadable": 2}
    page = Page(render_page(_report(validation={**corpus, "quarantine": rules, "quarantined": _ref("quarantine")})))
    assert (
        "Training reads a cleaned version of the dataset: 1,513 of its 1,547 documents. Set aside before were 36, some by "
        "several rules: 30 for exact duplicates, 5 for too short, 2 for unreadable."
    ) in page.text
    whole = Page(render_page(_report(validation={**corpus, "quarantine": {"documents": 0}})))
    assert "Training reads the dataset as it was published: all of its 1,547 documents." in whole.text
    assert "Training reads" not in Page(render_page(_report(validation={**corpus, "accepted": None}))).text


def _full(text: str = "plain", points: int = 800) -> RunReport:
    """A run that came to its end, with one text wherever a text can stand."""
    check = {"name": text, "measured": text, "limit": text, "passed": True}
    job = {"id": text, "folder": text, "attempts": 2, "adopted": True, "resumed_from_step": 400}
    stage = {"name": text, "status": "ran", "seconds": 655.1, "key": text, "inputs": [text], "outputs": [text]}
    node = {"ref": text, "kind": text, "name": text, "version": text, "stage": text, "uri": text}
    rates = {"learning_rate": 1e-3, "grad_norm": 1.0}
    loss = [{"step": i, "loss": 2 + 4 * math.exp(-i / 50), **rates} for i in range(points)]
    classes = {"letters": 0.6, text: 0.4}
    counts = {"documents": 1790, "characters": 31_412_022, "bytes": 31_502_113, "duplicates": 46}
    lengths = {"edges": [0, 100, 1000], "counts": [3, 1787]}
    baseline = {"name": text, "matmul_gflops_per_rank": 10.0, "allreduce_gigabytes_per_second": 0.3}
    ranks = [{"rank": 0, "host": text, "matmul_gflops": 55.8}]
    allreduce = {"megabytes": 16, "gigabytes_per_second": 0.8123}
    return _report(
        title=text,
        commit=text,
        flow_run={"id": text, "url": f"javascript:{text}"},
        mlflow_run={"id": text, "url": f"http://127.0.0.1/{text}"},
        stages=[{**stage, "metrics": {text: text}, "checks": [check], "job": job}],
        error={"type": text, "stage": text, "message": text, "remedy": text},
        loss=loss,
        validation={**counts, "lengths": lengths, "classes": classes, "checks": [check], **_newer(text)},
        tokens={"vocab_size": 512, "engine": text, "splits": {text: {"documents": 3, "tokens": 10}}, "later": 1},
        qualification={"baseline": baseline, "ranks": ranks, "allreduce": allreduce},
        evaluation=EVALUATION,
        champion={"ref": text, "bits_per_byte": 1.981},
        parity={"max_logit_error": 2.1e-6, "greedy_equal": 120, "greedy_total": 120},
        lineage={"nodes": [*LINEAGE["nodes"], node], "edges": LINEAGE["edges"]},
        endpoint={"ref": text, "url": "http://127.0.0.1:8801", "model": text},
        samples=[{"prompt": text, "completion": text}],
        config={"training": {text: text}},
    )


def _newer(text: str) -> dict[str, object]:
    """What only `validation.json` of later versions has."""
    shard = {"name": text, "documents": 3, "divergence": 0.4, "farthest": text, "refused": text}
    return {
        **{
            "unreadable": 2,
            "tokens": 9,
            "near": 4,
            "contaminated": 1,
            "megabytes_per_second": 80.5,
            "later": "ignored",
        },
        **{"quarantine": {"documents": 5, text: 5}, "secret_types": {text: 2}, "personal_types": {text: 3}},
        **{"shards": [shard], "drift": [{"column": text, "distance": 0.2, "moved": [text]}]},
        **{"accepted": text, "quarantined": text, "reference": text, "before": {"classes": {"letters": 0.5}}},
    }


SECTIONS = ["stages", "training", "data", "cluster", "evaluation", "lineage", "configuration", "identifiers"]


def _sections(text: str) -> list[str]:
    return [found["id"] for name, found in Page(text).elements if name == "section"]


def test_a_finished_run_says_all_its_results_in_order():
    text = render_page(_full())
    said = re.sub(r"\s+", " ", Page(text).text)
    assert [fact for fact in FACTS if fact not in said] == []
    assert _sections(text) == SECTIONS
    charts = [found["aria-label"] for name, found in Page(text).elements if name == "svg" and "aria-label" in found]
    assert len(charts) == 13
    assert (
        "Bits per byte, lower is better: unigram 3.212, Kneser-Ney bigram 2.447, champion 1.981, this model 1.934"
        in charts
    )


def test_hostile_text_stays_text():
    text = render_page(_full(EVIL))
    page = Page(text)
    plain = Page(render_page(_full()))
    assert [name for name, _ in page.elements] == [name for name, _ in plain.elements]
    assert not [key for _, found in page.elements for key in found if key.startswith("on")]
    assert not [link for link in page.all("href") if link.startswith("javascript")]
    assert page.text.count(EVIL) > 25


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("count", [8, 60])
def test_hostile_names_in_a_lineage_stay_text(direction, count):
    def page(text):
        kinds = ("dataset", "model", "endpoint")
        common = {"created": "2026-11-21T10:00:00+00:00", "config": {text: text}, "dirty": True}
        common |= dict.fromkeys(
            ("name", "version", "stage", "uri", "commit", "config_digest", "who", "host", "sku"), text
        )
        nodes = [{**common, "ref": f"{text}{n}", "kind": kinds[n % 3]} for n in range(count)]
        edges = [{"input": nodes[0]["ref"], "output": node["ref"], "how": "serves"} for node in nodes[1:]]
        ends = {kind: [{**node, "through": "data"} for node in nodes if node["kind"] == kind] for kind in kinds}
        walked = {"root": text, "direction": direction, "damaged": [text], "nodes": nodes, "edges": edges}
        return Page(lineage_page({**walked, "endpoints": ends["endpoint"], "models": ends["model"]}))

    made, plain = page(EVIL), page("plain")
    assert [name for name, _ in made.elements] == [name for name, _ in plain.elements]
    assert not [key for _, found in made.elements for key in found if key.startswith("on")]
    assert made.text.count("<script>") > count


def test_nothing_is_fetched_and_ids_are_unique():
    page = Page(text := render_page(_full()))
    assert not page.all("src")
    assert {name for name, found in page.elements if "://" in found.get("href", "")} == {"a"}
    assert "http" not in re.sub(r'href="[^"]*"|http-equiv', "", text).replace("http://127.0.0.1", "")
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    inside = re.findall(r"url\(#([^)]+)\)", text) + [link[1:] for link in page.all("href") if link.startswith("#")]
    assert inside and set(inside) <= set(ids)
    assert "default-src 'none'" in text


def test_equal_runs_give_equal_pages_of_bounded_size():
    first, again = render_page(_full(points=20_000)), render_page(_full(points=20_000))
    assert first == again
    assert len(first.encode()) < 400_000


def test_a_closed_gate_shows_what_to_do_and_leaves_out_what_was_not_reached():
    error = {"type": "GateFailed", "stage": "validate", "message": "it stays closed", "remedy": "Deduplicate it."}
    closed = {"name": "validate", "status": "gate_closed", "seconds": 7.9, "checks": [CLOSED]}
    stages = [closed, {"name": "train", "status": "not_run"}]
    text = render_page(_report(status="gate_closed", error=error, stages=stages))
    said = Page(text).text
    assert "✕ gate closed" in said and "– not run" in said and "checks: 0 of 1 passed" in said
    assert "What to do: Deduplicate it." in said
    assert "✕ duplicate_share: measured 0.312, limit <= 0.2. Deduplicate it." in said
    assert "The model was not evaluated: the run ended in the stage validate." in said
    assert _sections(text) == ["stages", "evaluation", "configuration", "identifiers"]
    assert "<svg" not in text and 'class="cards"' not in text


def test_a_first_model_has_no_champion():
    said = Page(render_page(_report(evaluation=EVALUATION))).text
    assert "none has been promoted" in said and "champion 1" not in said


def _corpus(**changes) -> Page:
    fixed = {"documents": 200, "characters": 9000, "bytes": 9100}
    config = {"validation": {"warn_drift": 0.1, "max_drift": 0.5}}
    return Page(render_page(_report(validation={**fixed, **changes}, config=config)))


def _rows(page: Page) -> str:
    return re.sub(r"\s+", " ", page.text)


def test_a_verdict_of_an_old_version_still_makes_a_page():
    old = {"name": "duplicate_share", "measured": 0.31, "limit": "<= 0.2", "passed": False, "remedy": "Deduplicate it."}
    page = _corpus(duplicates=46, lengths={"edges": [0, 10], "counts": [1, 2]}, classes={"letters": 1.0}, checks=[old])
    assert "Checks: 0 of 1 passed" in page.text and "✕ failed" in page.text
    labels = [found["aria-label"][:9] for name, found in page.elements if name == "svg" and "aria-label" in found]
    assert labels == ["Histogram", "Character"]
    assert "Shards" not in page.text and "quarantined" not in page.text


def test_checks_are_told_worst_first_with_outcome_count_and_places():
    passed = {"name": "too long", "measured": 0.0, "limit": "<= 0.00% of documents", "passed": True, "count": 0}
    warned = {
        **passed,
        "name": "secrets",
        "measured": 0.00125,
        "warned": True,
        "count": 3,
        "samples": ["a.jsonl:7: key"],
    }
    failed = {
        "name": "admission",
        "measured": 2.0,
        "limit": "<= 0 shards",
        "passed": False,
        "remedy": "Leave them out.",
    }
    said = _rows(_corpus(checks=[passed, warned, {**failed, "outcome": "failed", "samples": ["b.jsonl: from /tmp"]}]))
    assert "Checks: 2 of 3 passed, 1 of them with a warning" in said
    rows = (
        "admission✕ failed2<= 0 shardsb.jsonl: from /tmpLeave them out.",
        "secrets■ warned0.12%<= 0.00% of documents3a.jsonl:7: key",
        "Passed without a warning: 1",
        "too long✓ passed0.00%",
    )
    places = [said.index(row) for row in rows]
    assert places == sorted(places)


def test_drift_is_drawn_with_its_limits_in_their_colours():
    columns = {"classes": 0.62, "words": 0.2, "secrets": 0.02, "control": None}
    svg = drift_chart([ColumnDrift(column=c, distance=d) for c, d in columns.items()], 0.1, 0.5)
    assert (
        'aria-label="Drift of each column: classes 0.620, words 0.200, secrets 0.020; told 0.1; gate closes 0.5"' in svg
    )
    assert re.findall(r'<rect class="bar (\w+)"', svg) == ["bad", "warn", "soft"]
    assert drift_chart([ColumnDrift(column="words")], 0.1, 0.5) == ""


def test_classes_of_the_version_before_stand_beside_those_of_now():
    svg = classes_chart({"latin": 0.1, "cyrillic": 0.4, "greek": 0.0, "letters": 0.5}, {"letters": 0.9, "latin": 0.1})
    assert 'aria-label="Character classes: letters 50.0%, was 90.0%, cyrillic 40.0%, latin 10.0%, was 10.0%"' in svg
    assert "was" not in classes_chart({"letters": 1.0}, {})


def test_of_many_shards_the_worst_are_shown():
    shards = [{"name": f"shard-{n}", "documents": 100, "duplicates": n} for n in range(40)]
    shards += [{"name": "strange", "documents": 100, "divergence": 0.9, "farthest": "classes"}]
    shards += [{"name": "stolen", "documents": 100, "refused": "from /tmp"}]
    page = _corpus(shards=shards)
    assert "The 20 worst of 42 shards" in page.text
    assert re.findall(r"(stolen|strange|shard-\d+?)100", page.text.replace("\n", ""))[:2] == ["stolen", "strange"]
    assert "shard-39" in page.text and "shard-22" in page.text and "shard-21" not in page.text
    assert "from /tmp" in page.text and "in classes" in page.text


def test_a_run_that_only_validates_says_nothing_of_a_model():
    stages = [{"name": "validate", "status": "ran", "seconds": 1.0}]
    counts = {"documents": 1, "characters": 1, "bytes": 1}
    assert _sections(render_page(_report(stages=stages, validation=counts))) == [
        *("stages", "data", "configuration", "identifiers")
    ]


def test_tokens_are_told_by_split():
    splits = {"train": {"documents": 1000, "tokens": 2_500_000}, "heldout": {"documents": 20, "tokens": 50_000}}
    said = _rows(Page(render_page(_report(tokens={"vocab_size": 50_257, "engine": "gigatoken", "splits": splits}))))
    assert "Tokens: a vocabulary of 50,257, encoded by gigatoken" in said
    assert "train1,0002,500,0002,500 heldout2050,0002,500" in said


FILES = {"validate": "validation.json"}


def test_what_came_before_is_read_from_the_verdict_that_is_named(tmp_path):
    store = open_store(tmp_path)
    named = []
    for index in range(2):
        folder = tmp_path / str(index)
        folder.mkdir()
        counts = {"documents": 1, "characters": 1, "bytes": 1, "classes": {"letters": 0.5 + index / 4}}
        (folder / "validation.json").write_text(json.dumps({**counts, "reference": named[-1] if named else None}))
        about = Provenance(name="code", stage="validate")
        named.append(store.publish(folder, kind="validation", inputs=(), provenance=about).ref)
    outcome = {"name": "validate", "outputs": [named[1]], "metrics": {"megabytes_per_second": 80.5}}
    told = gather(store, [outcome], FILES, None)["validation"]
    assert (told["classes"], told["before"]["classes"]) == ({"letters": 0.75}, {"letters": 0.5})
    assert told["megabytes_per_second"] == 80.5
    assert gather(store, [{**outcome, "outputs": [named[0]]}], FILES, None)["validation"]["before"] is None


@pytest.mark.integration
def test_matplotlib_is_only_loaded_for_a_picture():
    modules = "page, tasks.report.run_charts, tasks.report.page, tasks.report.scaling, tasks.report.pictures"
    code = f"import sys, tasks.report.{modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _bar_widths(svg: str) -> list[float]:
    """Widths of the bars, in the order in which they are drawn."""
    return [float(width) for width in re.findall(r'<rect class="bar [^>]*? width="([\d.]+)"', svg)]


def test_bars_begin_at_zero_and_are_as_long_as_their_values():
    widths = _bar_widths(scores_chart(EvaluationReport.model_validate(EVALUATION), None))
    assert [width / widths[0] for width in widths] == pytest.approx([1, 2.447 / 3.212, 1.934 / 3.212], abs=1e-4)


def test_of_many_ranks_the_slowest_are_shown():
    ranks = [{"rank": i, "host": f"n{i}", "matmul_gflops": 100.0 - i} for i in range(40)]
    baseline = {"name": "floor", "matmul_gflops_per_rank": 10.0, "allreduce_gigabytes_per_second": 0.3}
    svg = ranks_chart(QualificationReport.model_validate({"baseline": baseline, "ranks": ranks}))
    assert len(_bar_widths(svg)) == 16
    assert "rank 39 n39" in svg and "rank 23 n23" not in svg


def test_a_loss_that_is_not_a_number_leaves_the_others_in_the_chart():
    points = [LossPoint(step=i, loss=math.nan if i == 5 else 3.0 - i / 10) for i in range(10)]
    assert "nan" not in loss_chart(points, (4,)).partition(">")[2]
    assert "resumed from step 4" in loss_chart(points, (4,))
    assert loss_chart([LossPoint(step=1, loss=math.nan)], ()) == ""


def _boxes(svg: str) -> dict[str, tuple[float, float]]:
    """Left and top of each node's box, by reference."""
    found = re.findall(r'<title>(\S+?)(?:\n[^<]*)?</title><rect class="box" x="([\d.]+)" y="([\d.]+)"', svg)
    return {ref: (float(x), float(y)) for ref, x, y in found}


def _curve_points(path: str) -> list[tuple[float, float]]:
    """Points on a path of M, C and H commands, close enough together that no box is missed."""
    points: list[tuple[float, float]] = []
    for command, numbers in re.findall(r"([MCH])([^MCH]*)", path):
        values = [float(value) for value in numbers.split()]
        if command == "M":
            points.append((values[0], values[1]))
            continue
        x0, y0 = points[-1]
        x1, y1, x2, y2, x3, y3 = values if command == "C" else (x0, y0, values[0], y0, values[0], y0)
        for t in (step / 100 for step in range(101)):
            a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            points.append((a * x0 + b * x1 + c * x2 + d * x3, a * y0 + b * y1 + c * y2 + d * y3))
    return points


def test_lineage_runs_from_left_to_right_and_no_arrow_crosses_a_box():
    svg = lineage_graph(Lineage.model_validate(LINEAGE))
    boxes = _boxes(svg)
    assert set(boxes) == {node["ref"] for node in LINEAGE["nodes"]}
    for edge in LINEAGE["edges"]:
        assert boxes[edge["input"]][0] + BOX_WIDTH < boxes[edge["output"]][0]
    assert min(boxes, key=boxes.get) == _ref("dataset") and max(boxes, key=boxes.get) == _ref("endpoint")
    paths = re.findall(r'<path d="([^"]+)" class="arrow"', svg)
    assert len(paths) == len(LINEAGE["edges"])
    inside = [
        (x, y)
        for path in paths
        for x, y in _curve_points(path)
        for left, top in boxes.values()
        if left + 0.1 < x < left + BOX_WIDTH - 0.1 and top + 0.1 < y < top + BOX_HEIGHT - 0.1
    ]
    assert not inside


def test_boxes_do_not_overlap_and_lie_within_the_drawing():
    svg = lineage_graph(Lineage.model_validate(LINEAGE))
    width, height = (float(value) for value in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    boxes = list(_boxes(svg).values())
    assert all(0 <= x <= width - BOX_WIDTH and 0 <= y <= height - BOX_HEIGHT for x, y in boxes)
    pairs = [(one, other) for i, one in enumerate(boxes) for other in boxes[i + 1 :]]
    assert all(abs(a[0] - b[0]) >= BOX_WIDTH or abs(a[1] - b[1]) >= BOX_HEIGHT for a, b in pairs)


@pytest.mark.parametrize(
    ("edges", "arrows"),
    [(("dataset tokens", "tokens dataset"), 2), (("dataset unknown",), 0), (("dataset dataset",), 0), ((), 0)],
)
def test_a_lineage_that_is_broken_is_still_drawn(edges, arrows):
    lineage = Lineage.model_validate({"nodes": _nodes("dataset", "tokens"), "edges": _edges(*edges)})
    svg = lineage_graph(lineage)
    assert svg.count('class="arrow"') == arrows and svg.count('class="box"') == 2
    assert lineage_graph(Lineage()) == ""


def test_numbers_are_written_for_people():
    assert [number(value) for value in (0.0, 5, 5.0, 0.812345, 2.1e-6, 13_212_991, 1234.5, None, "torch", True)] == [
        *("0", "5", "5", "0.8123", "2.1e-06", "13,212,991", "1,234", "None", "torch", "True")
    ]
    assert [duration(value) for value in (0.04, 12.3, 200, 7500)] == ["0.0 s", "12 s", "3 min 20 s", "2 h 5 min"]
    assert percent(-0.0213) == "−2.1%"
    assert short(_ref("tokens")) == "tokens/code@01234567" and short("endpoint/local") == "endpoint/local"
