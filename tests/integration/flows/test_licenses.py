"""The licence of a run's data closes the gate before anything is spent, unless somebody waived it."""

import pytest

from deployments.publishing.datasets import make_dataset
from flows.retrain import preview
from tasks.common.errors import GateFailed
from tasks.config.flows import RetrainConfig
from tasks.registry.licenses import licenses_of
from tasks.storage import open_store


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    return tmp_path


def published(home, **how):
    return make_dataset(open_store(home), home / "work", "mine", [home / "a.jsonl"], **how).manifest


def test_a_licence_that_forbids_closes_the_gate_and_a_waiver_opens_it(home):
    ref = published(home, license_="cc-by-nc-4.0").ref
    _, outcomes, closed = preview("mine", RetrainConfig(), None, None)
    assert isinstance(closed, GateFailed) and closed.stage == "validate" and outcomes[0]["status"] == "gate_closed"
    assert closed.checks[0]["measured"] == "cc-by-nc-4.0" and "licenses.waivers" in closed.remedy
    waiver = {"of": "dataset/mine", "who": "ada", "why": "a contract", "until": "2999-01-01"}
    _, outcomes, closed = preview("mine", RetrainConfig(licenses={"waivers": [waiver]}), None, None)
    assert closed is None and outcomes[0]["name"] == "validate"
    (terms,) = licenses_of(open_store(home), [ref]).values()
    assert terms.license == "cc-by-nc-4.0"


def test_what_nobody_says_closes_nothing_and_is_not_taken_for_a_permission(home):
    some = {"uri": "hf://datasets/o/a@1", "license": "mit"}
    none = {"uri": "hf://datasets/o/b@1"}
    manifest = published(home, origins=[some, none])
    assert preview("mine", RetrainConfig(), None, None)[2] is None
    (terms,) = licenses_of(open_store(home), [manifest.ref]).values()
    assert (terms.license, terms.origin) == ("", "hf://datasets/o/a@1, hf://datasets/o/b@1")


def test_settings_without_a_waiver_are_what_they_were():
    assert "licenses" not in RetrainConfig().model_dump(mode="json")
