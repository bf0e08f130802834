"""A profile judged by real suites of Great Expectations: each rule, its limits, what is told of it, and a user's own suite."""

import dataclasses
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

import pytest
from own_expectation import PLUGIN

from tasks.config.data import ValidationConfig
from tasks.data.corpus.dividing import Division, write_marks
from tasks.data.corpus.profile import profile
from tasks.data.corpus.quarantine import Profile
from tasks.data.judging import Place, judge, judge_apart, require_judgeable, verdict
from tasks.data.suite import FOLDER, PAGES, PLUGINS, read_suite

GOOD = [f"def function_{number}():\n\treturn {number} * {number * 7919}\r\n" for number in range(20)]
NAMES = [
    "documents", "estimated tokens", "unreadable", "too short", "too long", "control characters", "replacement characters",
    "repeated lines", "exact duplicates", "near duplicates", "secrets", "personal data", "held-out contamination",
    "shard divergence", "admission",
]  # fmt: skip


@pytest.fixture
def judged(tmp_path):
    """Judges lines, given as texts or as bytes, by a configuration; the profile is made by the real program's function."""

    def make(lines, *, benchmarks=None, heldout=0.0, before=None, strange=None, own=None, run="one", **limits):
        corpus = tmp_path / "corpus"
        corpus.mkdir(exist_ok=True)
        raw = (line if isinstance(line, bytes) else json.dumps({"text": line}).encode() for line in lines)
        (corpus / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in raw))
        config = ValidationConfig(**limits)
        sets = {}
        for name, texts in (benchmarks or {}).items():
            sets[name] = tmp_path / f"{name}.jsonl"
            sets[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        profile([corpus], config, tmp_path / "profile", heldout_fraction=heldout, benchmarks=sets)
        place = own and Place(tmp_path, "corpus", run)
        measured = Profile(tmp_path / "profile", tuple(sets))
        return judge(measured, config, before=before, strange=strange or {}, own=own, place=place)

    return make


def failed(judged):
    return [check.name for check in judged.checks if not check.passed]


def check(judged, name):
    return next(check for check in judged.checks if check.name == name)


def test_good_text_passes_every_check(judged):
    found = judged(GOOD)
    assert [check.name for check in found.checks] == NAMES
    assert {check.outcome for check in found.checks} == {"passed"} and found.passed
    assert check(found, "documents").measured == 20 and check(found, "documents").limit == ">= 10"
    assert all(check.remedy for check in found.checks)
    assert found.quarantined == {"documents": 0} and not found.gone.any()


def test_what_looks_like_a_binary_is_refused_and_named(judged):
    found = judged([*GOOD, "\x7fELF\x02\x01\x01\x00\x00\x00" * 9, "caf\ufffd na\ufffdve"])
    assert failed(found) == ["control characters", "replacement characters"]
    told = check(found, "control characters")
    assert (told.measured, told.limit, told.count) == (pytest.approx(1 / 22), "<= 1.00% of documents", 1)
    assert told.samples == ("a.jsonl:21: 70.0% control characters",)
    assert "UTF-8" in check(found, "replacement characters").remedy


def test_repeated_documents_are_refused_from_the_limit_on(judged):
    few = judged([*GOOD, *GOOD[:5]])  # 5 of 25: the limit itself passes
    assert failed(few) == [] and check(few, "exact duplicates").outcome == "warned"
    found = judged([*GOOD, *GOOD[:6]])
    assert failed(found) == ["exact duplicates"]
    told = check(found, "exact duplicates")
    assert told.measured == pytest.approx(6 / 26) and told.count == 6
    assert (
        told.samples[:2] == ("a.jsonl:21: repeats a.jsonl:1", "a.jsonl:22: repeats a.jsonl:2")
        and len(told.samples) == 5
    )
    assert found.quarantined == {"documents": 6, "exact duplicates": 6}


def test_short_and_long_documents_are_counted_against_their_shares(judged):
    assert failed(judged([*GOOD[:19], ""])) == []  # 1 of 20: the limit itself passes
    limits = {"min_characters": 2, "max_characters": 100}
    bad = [*GOOD[:17], "", "a", "b" * 200]
    found = judged(bad, **limits)
    assert failed(found) == ["too short", "too long"]
    assert check(found, "too short").samples == ("a.jsonl:18: 0 characters", "a.jsonl:19: 1 characters")
    assert failed(judged(bad, **limits, max_short_share=0.1, max_long_share=0.05)) == []


def test_lines_that_are_no_documents_are_counted_and_set_aside(judged):
    lines = [*GOOD, b"{no json", b'{"text": 7}', '{"text": "\u00e4"}'.encode("latin-1")]
    found = judged(lines)
    assert failed(found) == ["unreadable"]
    told = check(found, "unreadable")
    assert told.count == 3 and told.measured == pytest.approx(3 / 23)
    assert [sample.partition(" ")[0] for sample in told.samples] == ["a.jsonl:21:", "a.jsonl:22:", "a.jsonl:23:"]
    assert "not UTF-8" in told.samples[2]
    assert failed(judged(lines, max_unreadable_share=0.2)) == [] and found.quarantined["unreadable"] == 3
    with pytest.raises(ValueError, match="lets lines pass that preprocessing refuses: name unreadable in quarantine"):
        judged(lines, max_unreadable_share=0.2, quarantine=["too short"])


def test_a_rule_that_only_warns_closes_no_gate_but_is_told(judged):
    secret = f"key = '{'AKIA' + 'QYLPMN5HFIQR7XYA'}'"
    found = judged([*GOOD, secret, "write to anna.berg@firma-berg.de"])
    assert found.passed
    for name, kind in (("secrets", "AWS"), ("personal data", "e-mail")):
        told = check(found, name)
        assert (told.outcome, told.count) == ("warned", 1) and kind in told.samples[0]
        assert "QYLP" not in told.samples[0] and "anna" not in told.samples[0]
    assert failed(judged([*GOOD, secret], only_warn=[])) == ["secrets"]
    assert judged([*GOOD, secret], quarantine=["secrets"]).quarantined == {"documents": 1, "secrets": 1}


def test_repeated_lines_and_benchmarks(judged):
    exam = " ".join(f"question {number} of the exam asks {number * 31}" for number in range(40))
    found = judged([*GOOD, "again and again\n" * 50, f"before {exam} after"], benchmarks={"exam": [exam]})
    assert check(found, "repeated lines").samples == ("a.jsonl:21: 98.0% in repeated lines",)
    told = check(found, "contamination")
    assert failed(found) == ["contamination"] and told.samples == ("a.jsonl:22: holds a document of exam",)


def test_what_repeats_across_the_held_out_border_must_go(judged):
    words = [f"word{number}" for number in range(400)]
    near = [" ".join([*words[:200], f"changed{number}", *words[201:]]) for number in range(12)]
    found = judged([*GOOD, *near], heldout=0.5, max_near_duplicate_share=1.0)
    told = check(found, "held-out contamination")
    assert told.outcome == "warned" and told.count > 0 and told.measured == 0
    assert told.samples[0].endswith("across the border")
    kept = judged([*GOOD, *near], heldout=0.5, max_near_duplicate_share=1.0, quarantine=[])
    assert failed(kept) == ["held-out contamination"] and check(kept, "held-out contamination").measured == told.count


def test_too_few_documents_and_none_at_all_are_refused(judged):
    found = judged(GOOD[:9])
    assert failed(found) == ["documents"] and check(found, "documents").measured == 9
    none = judged([])
    assert failed(none) == ["documents"]
    assert not any(isinstance(check.measured, float) and math.isnan(check.measured) for check in none.checks)


def test_a_corpus_that_is_all_set_aside_is_refused(judged):
    found = judged([""] * 12, max_short_share=1.0, max_duplicate_share=1.0)
    assert failed(found) == ["documents"]
    assert check(found, "documents").samples == ("the quarantine leaves no document",)


def test_classes_tokens_and_admission_have_limits(judged):
    found = judged(GOOD, min_class_share={"letters": 0.99}, max_class_share={"digits": 0.01}, min_tokens=10**6)
    assert failed(found) == ["estimated tokens", "class letters", "class digits"]
    assert check(found, "class letters").limit == ">= 99.00% of characters"
    assert failed(judged(GOOD, strange={"a.jsonl": "from /tmp"})) == ["admission"]


def test_drift_against_the_version_before_is_a_check_of_every_column(judged, tmp_path):
    first = judged(GOOD)
    before = dict(first.profile.columns)
    same = judged(GOOD, before=before, min_drift_documents=20)
    drift = [check for check in same.checks if check.name.startswith("drift of ")]
    assert {"drift of characters", "drift of classes", "drift of words"} <= {check.name for check in drift}
    assert {check.outcome for check in drift} == {"passed"}
    other = judged(
        ["слово " * (20 + number) for number in range(20)], before=before, min_drift_documents=20, near_duplicates=False
    )
    assert "drift of classes" in failed(other) and "cyrillic" in check(other, "drift of classes").samples[0]
    few = judged(GOOD, before=before)
    assert {check.measured for check in few.checks if check.name.startswith("drift")} == {"insufficient data"}


def test_the_verdict_is_json_of_the_whole_corpus(judged, tmp_path):
    found = judged([*GOOD, "x" * 5000, GOOD[0], ""])
    told = verdict(found, {"dataset": "d"})
    told = json.loads(json.dumps(told, allow_nan=False))
    assert (told["documents"], told["duplicates"], told["dataset"]) == (23, 1, "d")
    assert told["characters"] == sum(len(text) for text in GOOD) + 5000 + len(GOOD[0])
    assert sum(told["lengths"]["counts"]) == 23
    assert len(told["lengths"]["edges"]) == len(told["lengths"]["counts"]) + 1
    assert sum(told["classes"].values()) == pytest.approx(1)
    assert told["quarantine"] == {"documents": 2, "exact duplicates": 1, "too short": 1}
    assert told["shards"][0]["name"] == "a.jsonl" and told["shards"][0]["duplicates"] == 1


def test_the_quarantine_says_where_and_why(judged, tmp_path):
    found = judged([GOOD[0], b"half a", *GOOD, ""], max_unreadable_share=1.0)
    assert write_marks(tmp_path / "marks", found.profile.names, *found.marked()) == 3
    work = Division(tmp_path / "corpus", tmp_path / "marks", tmp_path / "parts", None)
    work.do("a.jsonl")
    assert work.finish(tmp_path / "aside")["shards"] == {"a.jsonl": 3}
    told = [json.loads(line) for line in (tmp_path / "aside" / "quarantine.jsonl").read_text().splitlines()]
    assert [(each["line"], each["rules"], each["raw"]) for each in told] == [
        (2, ["unreadable"], "half a"), (3, ["exact duplicates"], {"text": GOOD[0]}), (23, ["too short"], {"text": ""}),
    ]  # fmt: skip
    assert told[1]["detail"] == "repeats a.jsonl:1"


@pytest.mark.long
def test_the_same_corpus_gives_the_same_verdict_whenever_it_is_judged(judged):
    first, second = (verdict(judged([*GOOD, GOOD[3], "", "again and again\n" * 50]), {}) for _ in range(2))
    assert first == second


CLASH = """
from great_expectations.expectations.expectation import ColumnMapExpectation


class ExpectColumnValuesToBeBetween(ColumnMapExpectation):
    map_metric = "column_values.nonnull"
"""


@pytest.fixture
def own(tmp_path):
    """Makes a suite of expectations; the plugins of its home define some."""
    plugins = tmp_path / FOLDER / PLUGINS
    plugins.mkdir(parents=True, mode=0o755)
    (plugins / "lengths.py").write_text(PLUGIN)
    (plugins / "clash.py").write_text(CLASH)

    def make(*expectations):
        file = tmp_path / "own.json"
        file.write_text(
            json.dumps({"expectations": [{"type": kind, "kwargs": kwargs} for kind, kwargs in expectations]})
        )
        return read_suite(file, tmp_path)

    return make


def test_expectations_of_a_user_close_the_gate_with_their_names(judged, own, tmp_path):
    suite = own(
        ("expect_column_max_to_be_between", {"column": "characters", "max_value": 100}),
        ("lengths.ExpectOdd", {"column": "line", "mostly": 0.4}),
        ("lengths.ExpectOdd", {"column": "line"}),
    )
    found = judged([*GOOD, "long " * 30], own=suite)
    assert failed(found) == ["expect_column_max_to_be_between characters", "expect_odd line"]
    longest, some, every = found.checks[-3:]
    assert (longest.measured, longest.limit) == (150.0, "max_value 100")
    assert (some.outcome, every.outcome, every.count) == ("warned", "failed", 10)
    assert every.measured == pytest.approx(10 / 21)
    assert every.samples == ("a.jsonl:2", "a.jsonl:4", "a.jsonl:6", "a.jsonl:8", "a.jsonl:10")
    pages = {page.stem: page.read_text() for page in tmp_path.glob(PAGES.format(key="one"))}
    assert set(pages) == {"corpus-corpus", "corpus-documents", "corpus-own"}
    assert "Failed" in pages["corpus-own"] and "estimated tokens" in pages["corpus-corpus"]


def test_batches_are_added_up_and_their_aggregates_are_those_of_the_whole(judged, own):
    kinds = ("sum", "min", "max", "mean", "stdev")
    suite = own(*[(f"expect_column_{kind}_to_be_between", {"column": "characters", "min_value": 0}) for kind in kinds])
    lines = [*GOOD, *GOOD, "", *GOOD[:3]]
    whole = judged(lines, own=suite, max_duplicate_share=0.1)
    assert whole.profile.batch_rows > 44
    few = dataclasses.replace(whole.profile, batch_rows=7)
    place = Place(few.folder.parent, "corpus", "two")
    parts = judge(few, ValidationConfig(max_duplicate_share=0.1), before=None, strange={}, own=suite, place=place)
    assert parts.checks[:-5] == whole.checks[:-5] and failed(parts) == ["exact duplicates"]
    assert (parts.bits == whole.bits).all()
    lengths = [len(line) for line in lines]
    expected = [sum(lengths), min(lengths), max(lengths), statistics.mean(lengths), statistics.stdev(lengths)]
    for found in (whole, parts):
        assert [each.measured for each in found.checks[-5:]] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("expectation", "words"),
    [
        (
            ("expect_column_median_to_be_between", {"column": "bytes", "max_value": 1}),
            "needs column.median of all documents",
        ),
        (("expect_column_values_to_be_unique", {"column": "bytes"}), "needs column_values.unique"),
        (
            ("expect_column_values_to_be_between", {"column": "wrong", "max_value": 1}),
            '"wrong" in BatchData does not exist',
        ),
        (("expect_column_values_to_be_between", {"column": "bytes", "most": 1}), "extra fields not permitted"),
        (("expect_nothing", {}), "expect_nothing not found"),
        (("lengths.ExpectEven", {"column": "bytes"}), "no Expectation ExpectEven"),
        (("clash.ExpectColumnValuesToBeBetween", {"column": "bytes"}), "give the class another name"),
    ],
)
def test_what_cannot_be_judged_over_a_stream_is_refused_by_name(own, tmp_path, expectation, words):
    from tasks.data import gx  # takes seconds

    with pytest.raises(ValueError, match=words):
        gx.own_suite("own", own(expectation), tmp_path)


def test_a_process_of_its_own_judges_the_same_and_leaves_nothing_in_ours(judged, own, tmp_path):
    (tmp_path / "corpus").mkdir()
    for shard in "bcd":
        lines = [json.dumps({"text": f"{shard} is shard {number} of them"}) for number in range(20)]
        (tmp_path / "corpus" / f"{shard}.jsonl").write_text("\n".join(lines))
    suite = own(("expect_column_max_to_be_between", {"column": "characters", "max_value": 40}))
    before = judged(GOOD[:10]).profile.columns
    lines = [*GOOD, GOOD[0], b"no json", "x"]
    whole = judged(lines, before=before, strange={"a.jsonl": "nobody signed it"}, own=suite, min_drift_documents=5)
    config = ValidationConfig(min_drift_documents=5)
    arguments = {"before": before, "strange": whole.strange, "own": suite, "place": Place(tmp_path, "corpus", "apart")}
    with tempfile.TemporaryDirectory() as folder:
        apart = judge_apart(whole.profile, config, **arguments, folder=Path(folder))
    assert whole.drift and whole.apart and apart.bits.dtype == whole.bits.dtype and apart.bits.any()
    assert apart.bits.tolist() == whole.bits.tolist()
    refs = dict.fromkeys(("dataset", "reference", "accepted", "quarantined"))
    assert apart.checks == whole.checks and apart.apart == whole.apart
    assert verdict(apart, refs) == verdict(whole, refs)
    assert len(list(tmp_path.glob(PAGES.format(key="apart")))) == 3, "the pages are those of the home"


def test_a_suite_that_cannot_be_judged_is_refused_with_the_same_words_from_there(own, tmp_path):
    with pytest.raises(ValueError, match=r"needs column\.median of all documents"):
        require_judgeable(own(("expect_column_median_to_be_between", {"column": "bytes", "max_value": 1})), tmp_path)
    require_judgeable(own(("expect_column_max_to_be_between", {"column": "bytes", "max_value": 1})), tmp_path)


def test_code_of_a_user_is_what_the_suite_was_read_with_and_is_on_no_path(judged, own, tmp_path):
    from tasks.data import gx  # takes seconds

    suite, file = (
        own(("lengths.ExpectOdd", {"column": "line", "mostly": 0.4})),
        tmp_path / FOLDER / PLUGINS / "lengths.py",
    )
    assert judged(GOOD, own=suite).passed
    assert not [place for place in sys.path if PLUGINS in place]
    file.write_text(PLUGIN.replace("== 1", ">= 0"))
    with pytest.raises(ValueError, match=r"lengths\.py of the plugins was changed"):
        gx.own_suite("own", suite, tmp_path)
    file.write_text("raise RuntimeError('no')")
    with pytest.raises(ValueError, match=r"lengths\.py of the plugins cannot be loaded: RuntimeError: no"):
        gx.own_suite("own", own(("lengths.ExpectOdd", {"column": "line"})), tmp_path)


def test_runs_that_judge_at_once_leave_whole_stores(judged, own, tmp_path):
    """Two processes judge the same corpus; a third finds what one left that was killed while it wrote."""
    found = judged(GOOD, own=own(("expect_table_row_count_to_be_between", {"min_value": 1})))
    context = multiprocessing.get_context("fork")

    def again(run):
        place = Place(tmp_path, "corpus", run)
        assert judge(found.profile, ValidationConfig(), before=None, strange={}, place=place).passed

    runs = [context.Process(target=again, args=(name,)) for name in ("two", "three")]
    for process in runs:
        process.start()
    for process in runs:
        process.join()
    assert [process.exitcode for process in runs] == [0, 0]
    stores = tmp_path / FOLDER
    kept = [path for path in stores.rglob("*.json") if json.loads(path.read_text())]
    results = {path.parts[-3] for path in kept if "validations" in path.parts}
    assert results == {"one", "two", "three"} and not (stores / ".writing").exists()
    torn = next(path for path in kept if "two" in path.parts)
    torn.write_text(torn.read_text()[:100])
    (stores / ".writing").touch()
    again("two")
    assert all(json.loads(path.read_text()) for path in stores.rglob("*.json"))
