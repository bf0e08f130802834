"""A user's own suite in `headway validate`: what closes the gate is named wherever people look; a verdict is kept under it."""

import json
from pathlib import Path

import pytest
from own_expectation import PLUGIN

from tasks.data.suite import FOLDER, PAGES, PLUGINS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def suite(home, tmp_path_factory):
    """Writes suites of the custom Expectation; `numbers` is a dataset of twelve documents."""
    folder = tmp_path_factory.mktemp("suite")
    plugins = home.path / FOLDER / PLUGINS
    plugins.mkdir(parents=True, mode=0o755, exist_ok=True)
    (plugins / "odd.py").write_text(PLUGIN)
    texts = [f"def function_{number}():\n    return {number * 7919}\n" for number in range(12)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    home.ok("dataset", "publish", "numbers", folder / "numbers.jsonl")

    def make(name, *, column="line", **kwargs):
        expectation = {"type": "odd.ExpectOdd", "kwargs": {"column": column, **kwargs}}
        (folder / name).write_text(json.dumps({"name": "mine", "expectations": [expectation]}))
        return "-c", "tiny", "--set", f"validation.suite={folder / name}"

    return make


def test_a_failing_expectation_closes_the_gate_with_its_name(home, suite):
    ran = home.run("validate", "numbers", *suite("strict.json"))
    assert ran.code == 3, ran.stderr
    assert [check["name"] for check in ran.said["error"]["checks"]] == ["expect_odd line"]
    assert "expect_odd line" in ran.said["error"]["message"]
    key = ran.stage("validate")["key"]
    pages = {page.stem: page for page in home.path.glob(PAGES.format(key=key[:16]))}
    assert set(pages) == {"numbers-corpus", "numbers-documents", "numbers-mine"}
    report = Path(ran.said["report"])
    for page in pages.values():
        link = report.read_text().partition(f'/{page.name}"')[0].rpartition('"')[2] + f"/{page.name}"
        assert (report.parent / link).resolve() == page.resolve()


def test_a_verdict_is_reused_for_the_same_suite_wherever_it_lies(home, suite):
    first = home.ok("validate", "numbers", *suite("half.json", mostly=0.5))
    folder = home.folder_of(first.said["validation"]) / "files"
    assert json.loads((folder / "suite.json").read_text())["expectations"][0]["kwargs"]["mostly"] == 0.5
    assert home.ok("validate", "numbers", *suite("elsewhere.json", mostly=0.5)).statuses() == {"validate": "reused"}
    assert home.ok("validate", "numbers", *suite("half.json", mostly=0.4)).statuses() == {"validate": "ran"}
    assert home.ok("validate", "numbers", "-c", "tiny").statuses() == {"validate": "ran"}


def test_what_cannot_be_judged_is_refused_before_anything_is_read(home, suite):
    jobs = set((home.path / "jobs").glob("validate-*"))
    ran = home.run("validate", "numbers", *suite("wrong.json", column="wrong"))
    assert ran.code == 2 and "expect_odd wrong cannot be computed" in ran.said["error"]["message"]
    assert set((home.path / "jobs").glob("validate-*")) == jobs
