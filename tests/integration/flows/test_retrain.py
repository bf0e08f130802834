"""The whole chain, as a user runs it: what it makes, what it reuses, and what it refuses."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support import HEADWAY, STAGES, everything_reused
from waiting import limit

LAX = ("--set", "comparison.max_loss_to_champion=100")


def test_the_first_run_runs_every_stage_and_serves_a_model(home, done):
    assert done.statuses() == dict.fromkeys(STAGES, "ran")
    assert done.said["status"] == "completed" and done.said["exit_code"] == 0 and done.said["error"] is None
    assert done.said["dataset"].startswith("dataset/tiny@")
    assert done.said["flow_run"]["url"].endswith(done.said["flow_run"]["id"])
    assert done.said["mlflow_run"]["id"]
    assert len(done.said["samples"]) == 3 and all(each["completion"] for each in done.said["samples"])
    page = Path(done.said["report"]).read_text()
    assert "bits per byte" in page.lower() and "<svg" in page and "http-equiv" in page
    with urllib.request.urlopen(done.said["endpoint"]["url"] + "/readyz", timeout=limit(20)) as answer:
        assert json.load(answer)["model"] == done.said["endpoint"]["model"]
    with urllib.request.urlopen(done.said["endpoint"]["url"] + "/v1/models", timeout=limit(20)) as answer:
        assert json.load(answer)["data"][0]["max_model_len"] == done.stage("evaluate")["metrics"]["context"] == 64
    assert "Bits a token by position" in page and done.stage("export")["metrics"]["context_length"] == 64
    train = done.stage("train")["job"]
    assert (train["submissions"], train["attempts"], train["adopted"]) == (1, 1, False)


def test_an_unchanged_run_reuses_everything(home, done):
    again = home.retrain()
    assert again.statuses() == everything_reused()
    assert again.said["endpoint"] == done.said["endpoint"]
    assert [s["outputs"] for s in again.said["stages"]] == [s["outputs"] for s in done.said["stages"]]


def test_the_training_is_in_the_scaling_report_beside_its_plan(home, done, tmp_path):
    curves = home.ok("scaling", "tiny", "--picture", str(tmp_path / "s.png")).said["curves"]
    points = [point for curve in curves for point in curve["points"]]
    (made,) = done.stage("train")["outputs"]
    ((point, run),) = [(point, run) for point in points for run in point["runs"] if run["checkpoint"] == made]
    assert point["ranks"] == run["ranks"] == 2 and run["tflops"] > 0 and run["planned_tflops"] > 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert home.run("scaling", "none").code == home.run("scaling", "none", "--json").code != 0


def test_one_seed_says_nothing_of_the_noise_of_seeds(home, done):
    told = home.ok("seeds", "tiny")
    (recipe,) = told.said["recipes"]
    (run,) = recipe["runs"]
    assert (
        run["checkpoint"] in done.stage("train")["outputs"] and run["evaluation"] in done.stage("evaluate")["outputs"]
    )
    assert run["bits_per_byte"] == done.stage("evaluate")["metrics"]["bits_per_byte"]
    assert recipe["deviation"] is recipe["seed_noise"] is None
    refused = home.run("seeds", "none")
    assert refused.code != 0 and "no evaluation of a training of none" in str(refused.said["error"])


def test_a_measured_machine_without_gpus_is_planned_as_the_stage_does(home, done):
    told = home.ok("plan", "-c", "tiny").said
    planned = done.stage("plan")["metrics"]
    assert told["fits"] and told["parameters"] == planned["parameters"] and told["steps"] == 60
    assert told["step_seconds"] == pytest.approx(planned["step_seconds"] * told["correction"]["factor"])
    assert told["checkpoint"]["gib"] == pytest.approx(planned["checkpoint"] / 2**30)
    late = home.ok("plan", "-c", "tiny", "--set", "planning.max_minutes=0.00001").said
    assert not late["fits"] and late["fit"] == "fits" and "max_minutes" in late["reason"]
    other = home.run("plan", "-c", "tiny", "--set", "cluster.ranks_per_node=1")
    assert other.code != 0 and "headway retrain --to plan" in other.stderr, "two ranks were measured, and not one"


def test_a_dry_run_says_what_would_run_and_why_without_a_server(home, done):
    before = sorted((home.path / "lineage").iterdir())
    said = home.retrain("--dry-run", "--set", "training.learning_rate=0.001").said["stages"]
    assert {s["name"]: s["status"] for s in said} == {
        **dict.fromkeys(STAGES, "pending"),
        **dict.fromkeys(("validate", "preprocess", "benchmark"), "reused"),
    }
    assert "-> 0.001" in next(s["why"] for s in said if s["name"] == "plan")
    assert sorted((home.path / "lineage").iterdir()) == before


def test_a_dry_run_at_a_closed_gate_shows_its_table_and_its_stages(home, done):
    closed = ("--dry-run", "--set", "comparison.rules=[{metric: bits_per_byte, at_most: 0.001}]")
    ran = home.retrain(*closed)
    assert (ran.code, ran.said["status"], ran.said["error"]["stage"]) == (3, "gate_closed", "evaluate")
    assert ran.statuses()["train"] == "reused" and ran.statuses()["evaluate"] == "gate_closed"
    shown = home.start("retrain", "-c", "tiny", *closed)
    out, err = shown.communicate(timeout=limit(300))
    assert shown.returncode == 3 and "bits_per_byte" in err
    assert [line.split()[0] for line in out.splitlines()] == list(ran.statuses())


def test_a_run_ends_with_samples_of_its_corpus_and_the_login_behind_its_page(home, done):
    (evaluation,) = done.stage("evaluate")["outputs"]
    openings = json.loads((home.folder_of(evaluation) / "files" / "openings.json").read_text())
    assert len(openings) == 3 and [each["prompt"] for each in done.said["samples"]] == openings
    again = home.start("retrain", "-c", "tiny")
    out, err = again.communicate(timeout=limit(300))
    assert again.returncode == 0, err
    (page,) = [line for line in out.splitlines() if line.startswith("Flow run: ")]
    assert page.endswith(f"(login: {home.path / 'prefect' / 'credentials'})")
    assert all(f"$ headway complete tiny {shlex.quote(opening)} " in out for opening in openings)


def test_doctor_and_verify_name_the_model_so_that_it_is_found_and_its_signature(home, done):
    (model,) = done.stage("export")["outputs"]
    serving = next(f["said"] for f in home.ok("doctor").said["findings"] if f["name"] == "endpoint tiny")
    verified = home.start("verify", serving.split()[-1])
    out, err = verified.communicate(timeout=limit(300))
    assert verified.returncode == 0, err
    assert out.startswith(f"{model}: ") and re.search("signed by key [0-9a-f]{16} at .*, which is trusted", out)


def test_to_stops_after_a_stage(home, done):
    ran = home.retrain("--to", "plan")
    assert ran.code == 0
    last = STAGES.index("plan")
    assert ran.statuses() == {stage: "reused" if place <= last else "not_run" for place, stage in enumerate(STAGES)}
    assert ran.said["endpoint"] is None


APART = (("validate", "plan"), ("preprocess", "benchmark", "export"), ("train",), ("evaluate",))
"""Every stage that makes an artifact, in sets in which no stage is handed what another one of its set made."""


@pytest.mark.parametrize(
    "stages", [APART[0], *(pytest.param(more, marks=pytest.mark.long) for more in APART[1:])], ids="-".join
)
def test_deleted_outputs_run_exactly_their_stages_again(home, done, stages):
    for ref in (ref for stage in stages for ref in done.stage(stage)["outputs"]):
        shutil.rmtree(home.folder_of(ref))
    again = home.retrain()
    assert again.code == 0, again.stderr
    judged = {"plan"} if "benchmark" in stages else set()  # a plan holds for the qualification that it was made under
    assert again.statuses() == {**everything_reused(), **dict.fromkeys({*stages, *judged}, "ran")}
    for stage in set(stages) - {"benchmark", "plan"}:  # those two hold measured rates
        assert again.stage(stage)["outputs"] == done.stage(stage)["outputs"]


def test_a_stopped_endpoint_runs_only_deploy(home, done):
    home.ok("endpoint", "stop", "tiny")
    assert home.run("complete", "tiny", "def ").code == 6
    again = home.retrain()
    assert again.statuses() == {**everything_reused(), "deploy": "ran"}
    assert again.said["endpoint"]["url"] == done.said["endpoint"]["url"]
    assert home.ok("complete", "tiny", "def ", "--max-tokens", "4").said["completion"]


@pytest.mark.long
def test_another_learning_rate_reuses_the_data_and_the_champion_is_judged_anew(home, done):
    other, before = ("--set", "training.learning_rate=0.0001"), names_of_models(home)
    worse = home.retrain(*other)
    assert worse.code == 3 and worse.said["status"] == "gate_closed"
    assert worse.said["error"]["stage"] == "evaluate"
    assert "champion" in worse.said["error"]["checks"][0]["name"]
    assert "against the champion" in worse.stderr and "more bits (95% interval" in worse.stderr
    [picture] = home.path.glob("reports/*/comparison.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    before_train = dict.fromkeys(("validate", "preprocess", "benchmark"), "reused")
    not_run = dict.fromkeys(("export", "deploy"), "not_run")
    assert worse.statuses() == {**before_train, "plan": "ran", "train": "ran", "evaluate": "gate_closed", **not_run}

    assert names_of_models(home) == before  # nothing was exported
    allowed = home.retrain(*other, *LAX)
    assert allowed.statuses() == {**everything_reused(), "export": "ran", "deploy": "ran"}
    first, second = done.said["endpoint"]["model"], allowed.said["endpoint"]["model"]
    assert served_models(home) == {"champion": second, "previous": first}

    replaced = home.retrain()  # the champion is another one now: only the comparison is made anew, and it is won
    assert replaced.statuses() == {**everything_reused(), "deploy": "ran"}
    lost = home.retrain(*other)
    assert lost.code == 3 and lost.statuses()["evaluate"] == "gate_closed" and lost.statuses()["train"] == "reused"
    assert served_models(home) == {"champion": first, "previous": second}
    exported = home.retrain(*other, *LAX, "--to", "export")
    assert exported.code == 0 and names_of_models(home) == {"champion": first, "previous": second, "challenger": second}


def served_models(home):
    """Without the challenger, which other tests of this home may have exported."""
    return {alias: ref for alias, ref in names_of_models(home).items() if alias != "challenger"}


def names_of_models(home):
    """The reference that each alias stands for."""
    rows = home.ok("models", "tiny").said["models"]
    return {alias: row["ref"] for row in rows for alias in row["aliases"]}


def test_the_lineage_of_the_endpoint_reaches_data_commit_and_config(home, done):
    found = home.ok("lineage", "endpoint/tiny").said
    kinds = {node["kind"] for node in found["nodes"]}
    wanted = {"endpoint", "model", "checkpoint", "tokens", "tokenizer", "dataset", "plan", "qualification"}
    assert kinds >= wanted
    model = next(node for node in found["nodes"] if node["kind"] == "model")
    has_history = (Path(__file__).parents[3] / ".git").exists()
    assert len(model["commit"] or "") == (40 if has_history else 0)
    assert model["config_digest"] == done.said["config_digest"]
    assert model["config"]["training"]["model"] == "tiny"
    assert {"output": "endpoint/tiny", "input": done.said["endpoint"]["model"], "how": "serves"} in found["edges"]
    made = next(node["ref"] for node in found["nodes"] if node["kind"] == "dataset")
    assert made == done.said["dataset"]
    assert subprocess.run([HEADWAY, "lineage", "endpoint/tiny"], **_quiet(home)).returncode == 0


def test_one_changed_byte_is_refused_by_name(home, done):
    tokens = next(ref for ref in done.stage("preprocess")["outputs"] if ref.startswith("tokens/"))
    file = home.folder_of(tokens) / "files" / "train_text_document.bin"
    sound = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(sound[:1000] + bytes([sound[1000] ^ 1]) + sound[1001:])
    try:
        verified = home.run("verify", tokens)
        assert verified.code == 5 and verified.said["ok"] is False
        assert verified.said["problems"][0]["path"] == "train_text_document.bin"
        assert verified.said["problems"][0]["problem"] == "sha256"
        ran = home.retrain("--from", "evaluate")
        assert ran.code == 5 and "train_text_document.bin" in ran.said["error"]["message"]
        assert ran.said["error"]["stage"] == "evaluate" and ran.statuses()["export"] == "not_run"
    finally:
        file.write_bytes(sound)
    assert home.ok("verify", tokens).said["problems"] == []


@pytest.mark.long
def test_a_changed_model_file_is_not_deployed(home, done):
    model = done.said["endpoint"]["model"]
    file = home.folder_of(model) / "files" / "genai_config.json"
    sound = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(sound.replace(b"0", b"1", 1))
    home.ok("endpoint", "stop", "tiny")
    try:
        ran = home.retrain()
        assert ran.code == 5 and "genai_config.json" in ran.said["error"]["message"]
        assert home.ok("endpoint", "list").said["endpoints"][0]["ready"] is False
    finally:
        file.write_bytes(sound)
    assert home.retrain().statuses()["deploy"] == "ran"


def test_mlflow_has_the_runs_nested_with_datasets_metrics_and_the_champion(home, done):
    code = """# fork: commands
import json, sys, mlflow
client = mlflow.MlflowClient(sys.argv[1])
parent = client.get_run(sys.argv[2])
children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{sys.argv[2]}'")
train = next(r for r in children if r.info.run_name == "train")
print(json.dumps({
  "status": parent.info.status, "names": sorted(r.info.run_name for r in children),
  "loss": len(client.get_metric_history(train.info.run_id, "loss")),
  "inputs": [i.dataset.name for r in children for i in r.inputs.dataset_inputs],
  "files": [f.path for f in client.list_artifacts(sys.argv[2])],
  "champion": client.get_model_version_by_alias("tiny", "champion").source,
}))
"""
    uri = f"sqlite:///{home.path}/mlflow/mlflow.db"
    ran = subprocess.run([sys.executable, "-c", code, uri, done.said["mlflow_run"]["id"]], **_quiet(home))
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["status"] == "FINISHED" and set(STAGES) <= set(said["names"])
    assert said["loss"] >= 60 and "tiny" in said["inputs"]
    assert any(path.endswith(".html") for path in said["files"])
    assert said["champion"].startswith("models:/m-")


def _quiet(home):
    return {"env": home.environment(), "capture_output": True, "text": True, "timeout": limit(120)}
