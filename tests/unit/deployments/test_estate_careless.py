"""The audit of two careless estates: thirty faults each that were planted once the rules were frozen, each named with its remedy.

tests/support/careless_estate and tests/support/planted_estate have the exports, made by hand after Microsoft's documentation of
Resource Graph and the REST API, and the faults. Whoever planted the second thirty had not seen the rules.
"""

import datetime
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from tasks.common.process import read_json, write_json
from tasks.report.estate.audit import audit, recommendations
from tasks.report.estate.exports import read_exports
from tasks.report.estate.records import records

pytestmark = pytest.mark.unit
CARELESS = Path("tests/support/careless_estate")
FAULTS = yaml.safe_load((CARELESS / "faults.yaml").read_text())
NOW = datetime.datetime(2026, 11, 29, tzinfo=datetime.UTC)
BESIDE = {
    "checkpoint-storage/in-blob": "checkpoints/in-blob",
    "clocks/qualified": "nccl/qualified",
    "integrity/drift": "revalidation/lately",
    "nccl-bandwidth/qualified": "nccl/qualified",
    "node-health/qualified": "nccl/qualified",
    "health/memory": "health/silent",
    "health/network": "health/silent",
    "health/processors": "health/silent",
    "revalidation/alert": "revalidation/lately",
}
"""Checks that show the same fault as another one, or one of the same recommendation that nobody planted."""
PLANTED = Path("tests/support/planted_estate")
SECOND = yaml.safe_load((PLANTED / "faults.yaml").read_text())
ALSO = {"patched/scale-sets": "rolling-patches/scale-sets", "scale-sets/clusters": "autoscale/clusters",
        "scale-sets/scale-sets": "autoscale/scale-sets"}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The home of an earlier commit, whose champion is unsigned, the first of its kind and on machines that nobody measured."""
    folder = tmp_path_factory.mktemp("home")
    with tarfile.open("tests/support/old_home/home-of-0245f4f.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in folder.glob("store/artifacts/model/*/*/signature.json"):
        path.unlink()
    shutil.rmtree(folder / "store/artifacts/qualification")
    for path in folder.glob("endpoints/*/endpoint.json"):
        write_json(path, read_json(path) | {"previous": None})
    return folder


@pytest.fixture(scope="module")
def findings(home):
    rows = audit(read_exports([CARELESS / "export"]), records(home), now=NOW)
    return {
        f"{row.recommendation.id}/{check.id}": [one for one in row.findings if one.check == check.id]
        for row in rows
        for check in row.recommendation.checks
    }


def test_there_are_thirty_faults_each_of_another_recommendation():
    lines = {int(row.source.split()[1]) for row in recommendations() if row.source.startswith("iaas")}
    assert len(FAULTS) == 30
    assert len({one["line"] for one in FAULTS} & lines) == 30
    assert sum(one["at_first"] for one in FAULTS) == 16


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one["fault"])
def test_a_fault_of_the_careless_estate_is_found_with_its_remedy(fault, findings):
    wrong = [one for one in findings[fault["check"]] if one.verdict == "not met"]
    assert any(one.remedy and fault["resource"] in f"{one.resource} {one.text}" for one in wrong), findings[
        fault["check"]
    ]


def test_nothing_but_the_faults_is_not_met_in_the_careless_estate(findings):
    wrong = {check for check, each in findings.items() if any(one.verdict == "not met" for one in each)}
    assert {BESIDE.get(check, check) for check in wrong} == {one["check"] for one in FAULTS}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """What is not met in each of the two exports, by check."""
    folder = tmp_path_factory.mktemp("planted")
    with tarfile.open(PLANTED / "exports.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    result = {}
    for name in ("good", "careless"):
        wrong = result[name] = {}
        for row in audit(read_exports([folder / name]), {}, now=NOW):
            for one in row.findings:
                if one.verdict == "not met":
                    wrong.setdefault(f"{row.recommendation.id}/{one.check}", []).append(one)
    return result


@pytest.mark.parametrize("fault", SECOND, ids=lambda one: one["id"])
def test_a_fault_of_a_planter_who_saw_no_rule_is_found_with_its_remedy(fault, planted):
    wrong = planted["careless"].get(fault["check"], [])
    assert any(one.remedy and fault["resource"] in f"{one.resource} {one.text}" for one in wrong), wrong


def test_the_planter_without_the_faults_has_nothing_that_is_not_met(planted):
    assert planted["good"] == {}
    assert len(SECOND) == 30 and sum(one["at_first"] for one in SECOND) == 22
    assert {ALSO.get(check, check) for check in planted["careless"]} == {one["check"] for one in SECOND}
