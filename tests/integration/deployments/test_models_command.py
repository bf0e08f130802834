"""`headway models` and `headway promote` as a person uses them; MLflow's registry has the same names."""

import json
import shutil
import sqlite3
import subprocess

import pytest
from made_versions import make, make_many
from support import Home

from deployments.cli.output import short_ref
from tasks.registry.refs import aliases, move_ref
from tasks.security.signatures import sign
from tasks.storage import open_store


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def store(home):
    return open_store(home.path)


@pytest.fixture
def models(home, store, tmp_path):
    """Three signed models with what was measured of them; the first one is champion, the last one was only exported."""
    made = []
    for number, checkpoint in enumerate(make_many(store, tmp_path / "checkpoints", "checkpoint/tiny", 3)):
        measured = {"metrics": {"bits_per_byte": 2.0 - number / 10}}
        scores = make(store, tmp_path / f"s{number}", "evaluation/tiny", {"scores": f"{number}"}, **measured)
        exported = {"bits_per_byte": 1.5, "tokens_per_second_onnx": 100.0}  # on less text than the evaluation's
        said = {"inputs": [checkpoint], "context": [scores], "metrics": exported}
        model = make(store, tmp_path / f"m{number}", "model/tiny", {"onnx": f"{number}"}, **said)
        sign(store, home.path, model)
        made.append(model)
    move_ref(store, "tiny/champion", made[0].ref, inputs=(), reason="deployed")
    move_ref(store, "tiny/challenger", made[2].ref, inputs=(), reason="exported, not promoted")
    return made


def in_mlflow(home, store, models):
    """MLflow's aliases, each with the number of its model, once all that was told is published."""
    for folder in (home.path / "lineage").iterdir():
        home.wait_for(f"lineage/{folder.name}/done")
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        query = (
            "select alias, value from registered_model_aliases a join model_version_tags t "
            "on a.name = t.name and a.version = t.version and key = 'headway.uri'"
        )
        number = {store.uri_of(model): place for place, model in enumerate(models)}
        return {alias: number[place] for alias, place in database.execute(query).fetchall()}


def test_versions_are_listed_with_their_names_measures_and_who_serves_them(home, store, models):
    (home.path / "endpoints" / "api").mkdir(parents=True)
    (home.path / "endpoints" / "api" / "endpoint.json").write_text(
        json.dumps({"model_ref": models[0].ref, "folder": "/x"})
    )
    rows = home.ok("models").said["models"]
    assert {row["ref"]: row["aliases"] for row in rows} == {
        models[0].ref: ["champion"],
        models[1].ref: [],
        models[2].ref: ["challenger"],
    }
    one = next(row for row in rows if row["ref"] == models[1].ref)
    assert one["metrics"] == {"bits_per_byte": 1.9, "tokens_per_second_onnx": 100.0} and one["bytes"] > 0
    assert one["evaluation"].startswith("evaluation/tiny@") and one["evaluated"] == {"bits_per_byte": 1.9}
    assert [row["endpoints"] for row in rows] == [[], [], []]  # it was deployed, and runs no more
    assert home.ok("models", "tiny").said["models"] == rows
    assert home.run("models", "other").code == 2
    words = subprocess.run(home.command("models"), env=home.environment(), capture_output=True, text=True, check=True)
    line = next(line for line in words.stdout.splitlines() if models[0].version[:12] in line)
    assert "champion" in line and "tokens_per_second_onnx 100 by its export" in line
    first = next(row for row in rows if row["ref"] == models[0].ref)
    assert f"bits_per_byte 2 by {short_ref(first['evaluation'])}" in line


def test_where_the_evaluation_is_gone_the_exports_own_measures_are_said_to_be_its(home, store, models):
    shutil.rmtree(store.root / "artifacts" / "evaluation")
    row = next(row for row in home.ok("models").said["models"] if row["ref"] == models[0].ref)
    assert (row["metrics"]["bits_per_byte"], row["evaluation"], row["evaluated"]) == (1.5, "", {})
    words = subprocess.run(home.command("models"), env=home.environment(), capture_output=True, text=True, check=True)
    assert "bits_per_byte 1.5, tokens_per_second_onnx 100 by its export" in words.stdout


def test_a_promotion_needs_a_reason_and_mlflow_is_told_of_every_name(home, store, models):
    ref = f"model/tiny@{models[1].version[:12]}"
    assert home.run("promote", ref).code == 2
    dry = home.ok("promote", ref, "--dry-run").said
    assert (dry["changed"], dry["before"], dry["dry_run"]) == (False, models[0].ref, True)
    assert aliases(store, "tiny")["champion"] == models[0].ref
    made = home.ok("promote", ref, "--reason", "better on tickets").said
    assert (made["ref"], made["before"], made["changed"]) == (models[1].ref, models[0].ref, True)
    home.ok("promote", models[2].ref, "--reason", "better still")
    assert aliases(store, "tiny") == {"champion": models[2].ref, "previous": models[1].ref}
    assert in_mlflow(home, store, models) == {"champion": 2, "previous": 1}
    home.ok("promote", models[0].ref, "--reason", "the first was best")
    home.ok("rollback", "model/tiny", "--to", models[1].version, "--reason", "no")  # of the newest: the champion stays
    assert in_mlflow(home, store, models) == {"champion": 0, "previous": 2}
    entry = home.ok("audit-log", "--what", "tiny/champion").said["entries"][0]
    assert (entry["after"], entry["reason"], entry["outcome"]) == (models[0].ref, "the first was best", "done")


def test_what_is_unsigned_is_refused_and_so_is_who_may_not(home, store, models):
    (store.root / "artifacts" / "model" / "tiny" / models[2].version / "signature.json").unlink()
    assert home.run("promote", models[2].ref, "--reason", "x").code == 5
    assert home.run("promote", "checkpoint/tiny", "--reason", "x").code == 2
    home.ok("person", "add", "anna")
    assert home.run("promote", models[1].ref, "--reason", "x").code == 2
    assert aliases(store, "tiny")["champion"] == models[0].ref
