"""What MLflow's page is given of a table, and the word that says where weights go."""

import json

import pytest

from tasks.config.base import copies_weights
from tasks.lineage.messages import MOST_ROWS, RESULTS_TABLE, RESULTS_TAG, results_table

pytestmark = pytest.mark.unit


def test_a_table_by_columns_becomes_rows_and_only_so_many():
    assert results_table({"bytes": [3, 4], "kinds": ["a", "b"]}) == {
        "columns": ["bytes", "kinds"],
        "data": [[3, "a"], [4, "b"]],
    }
    assert len(results_table({"bytes": list(range(MOST_ROWS + 5))})["data"]) == MOST_ROWS
    assert json.loads(RESULTS_TAG["mlflow.loggedArtifacts"]) == [{"path": RESULTS_TABLE, "type": "table"}]


@pytest.mark.parametrize(("word", "copies"), [("", False), ("store", False), ("copy", True)])
def test_weights_are_copied_when_the_environment_says_so(monkeypatch, word, copies):
    monkeypatch.setenv("HEADWAY_MLFLOW_WEIGHTS", word)
    assert copies_weights() is copies


def test_another_word_is_refused_before_a_run_begins(monkeypatch):
    monkeypatch.setenv("HEADWAY_MLFLOW_WEIGHTS", "yes")
    with pytest.raises(ValueError, match="HEADWAY_MLFLOW_WEIGHTS is 'yes'"):
        copies_weights()
