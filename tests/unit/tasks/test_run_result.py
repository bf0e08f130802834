"""What a flow's command answers with beside what all answer: the same fields in the same order, also when nothing came about."""

import json

import pytest

from tasks.artifacts import Endpoint, Model
from tasks.orchestration.result import RunResult, ValidationResult

pytestmark = pytest.mark.unit

FIELDS = {
    "retrain": "dataset endpoint samples",
    "revalidate": "dataset revalidation",
    "validate": "dataset validation accepted quarantined checks",
    "qualify": "qualification verdict sku expires nodes pairs reasons usable excluded drained requests page",
}


@pytest.mark.parametrize("flow", FIELDS)
def test_every_field_is_in_the_answer_of_a_run_that_never_began(flow):
    answer = RunResult().plain(flow, dataset="tiny")
    assert list(answer) == FIELDS[flow].split()
    assert {key: value for key, value in answer.items() if value is not None} == (
        {} if flow == "qualify" else {"dataset": "tiny"}
    )


def test_what_came_about_takes_the_place_of_what_was_asked_for():
    model = Model(name="tiny", version="a" * 64, uri="")
    result = RunResult(
        dataset=f"dataset/tiny@{'b' * 64}",
        endpoint=Endpoint(name="tiny", url="http://127.0.0.1:1", model=model),
        samples=[{"prompt": "def ", "completion": "f"}],
        validation=ValidationResult(validation="validation/tiny", checks=[{"name": "rows", "measured": 5}]),
    )
    assert json.dumps(result.plain("retrain", dataset="tiny")) == (
        f'{{"dataset": "dataset/tiny@{"b" * 64}", "endpoint": {{"ref": "endpoint/tiny", "url": "http://127.0.0.1:1", '
        f'"model": "model/tiny@{"a" * 64}"}}, "samples": [{{"prompt": "def ", "completion": "f"}}]}}'
    )
    judged = result.plain("validate", dataset="tiny")
    assert judged["checks"] == [{"name": "rows", "measured": 5}] and judged["accepted"] is None
