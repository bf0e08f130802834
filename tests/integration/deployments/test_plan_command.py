"""`headway plan`: the JSON that is promised, several cases, configurations, and every mistake with its value, before anything."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from support import HEADWAY
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.cli.output import describe, exit_code

CASE = {
    "name": "llama",
    "network": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "gated": True,
        "vocab": 128256,
        "tied": False,
    },
    "sequence": 8192,
    "cluster": {"sku": "Standard_ND96isr_H100_v5", "nodes": 8},
    "batch": {"global": 256},
    "tokens": 10**12,
}
KEYS = {
    "fits", "memory_gib", "step_seconds", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "days", "cost", "checkpoint",
    "goodput", "limits", "warnings", "parallel",
}  # fmt: skip


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))

    def run(said, *words, code=0):
        path = tmp_path / "case.yaml"
        path.write_text(said if isinstance(said, str) else yaml.safe_dump(said))
        ran = subprocess.run([HEADWAY, "plan", "--case", str(path), *words, "--json"], capture_output=True, text=True)
        assert ran.returncode == code, ran.stderr
        return json.loads(ran.stdout)

    return run


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """The reason why a case is refused, by the command in this process."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))

    def run(said):
        path = tmp_path / "case.yaml"
        path.write_text(said if isinstance(said, str) else yaml.safe_dump(said))
        ran = CliRunner().invoke(app, ["plan", "--case", str(path), "--json"])
        error = getattr(ran.exception, "error", ran.exception)
        assert exit_code(error) == 2 and not ran.stdout, ran.output
        return describe(error)["message"]

    return run


def test_a_plan_says_all_that_is_promised_in_the_units_of_its_names(plan):
    said = plan(CASE)
    assert said.keys() >= KEYS and said["fits"] is True
    memory = said["memory_gib"]
    parts = sum(memory[part] for part in ("weights", "gradients", "optimizer", "activations", "other"))
    assert parts == pytest.approx(memory["total"], rel=1e-4) and memory["total"] < memory["usable"] < 80
    tokens = said["tokens_per_second_per_gpu"]
    assert tokens * 64 * said["step_seconds"] == pytest.approx(256 * 8192, rel=1e-4)
    assert (
        said["days"] == pytest.approx(10**12 / tokens / 64 / 86400, rel=1e-4)
        and said["days_with_failures"] > said["days"]
    )
    assert 0.2 < said["mfu"] < 0.8 and said["tflops_per_gpu"]["model"] == pytest.approx(said["mfu"] * 989, rel=1e-3)
    assert said["tflops_per_gpu"]["hardware"] <= 794.5
    cost = said["cost"]
    assert cost["total"] == pytest.approx(sum(cost["parts"].values())) and cost["price_source"] and cost["price_date"]
    hours = said["days_with_failures"] * 24 * 8
    assert cost["parts"]["training"] + cost["parts"]["failures"] == pytest.approx(
        hours * cost["machine_hour"], rel=1e-3
    )
    assert cost["currency"] == "USD" and any("days old" in warning for warning in said["warnings"])
    goodput = said["goodput"]
    assert 0.5 < goodput["low"] < goodput["mid"] < goodput["high"] < 1
    assert said["checkpoint"]["gib"] == pytest.approx(said["parameters"] * 14 / 2**30, rel=1e-3)
    assert said["storage"]["data"]["tib"] >= 10**12 * 4 / 2**40 and said["storage"]["scratch"]["name"] == "local-nvme"
    way = said["parallel"]
    assert way["tp"] * way["pp"] * way["cp"] * way["dp"] == 64


def test_without_tokens_there_are_neither_days_nor_cost(plan):
    said = plan({key: value for key, value in CASE.items() if key != "tokens"})
    assert said["days"] is None and said["cost"] is None and said["step_seconds"] > 0


def test_a_number_may_have_an_exponent(plan):
    said = plan(yaml.safe_dump({**CASE, "tokens": 0}).replace("tokens: 0", "tokens: 1e12"))
    assert said["days"] == plan(CASE)["days"] and said["needs"] == []


@pytest.mark.parametrize("form", ["list", "cases", "documents"])
def test_several_cases_give_a_list(plan, form):
    other = {**CASE, "name": "other", "cluster": {"gpu": "A100-80GB", "gpus": 64}}
    said = {"list": [CASE, other], "cases": {"cases": [CASE, other]}, "documents": yaml.safe_dump_all([CASE, other])}[
        form
    ]
    plans = plan(said)
    assert [one["name"] for one in plans] == ["llama", "other"]
    assert plans[0]["step_seconds"] < plans[1]["step_seconds"]


def test_what_does_not_fit_is_told_with_the_nearest_that_does(plan):
    said = plan({**CASE, "cluster": {"gpu": "V100-32GB", "gpus": 1}, "precision": "fp16", "batch": {"global": 8}})
    assert said["fits"] is False and said["nearest"] and said["memory_gib"]["total"] > said["memory_gib"]["usable"]
    assert said["cost"] is None


def test_a_goal_chooses_the_machines(plan):
    said = plan({**CASE, "cluster": {"gpu": "H100"}}, "--goal", "smallest")
    assert said["goal"] == "smallest" and said["gpus"] <= 8


def test_the_division_is_written_as_settings(plan, tmp_path):
    plan({**CASE, "parallel": {"tp": 4, "zero": 1}}, "--write", str(tmp_path / "settings.yaml"))
    said = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert said["training"]["engine"] == "megatron" and said["execution"]["tensor_parallel"] == 4
    from tasks.config.training import ExecutionConfig

    assert ExecutionConfig.model_validate(said["execution"]).megatron.distributed_optimizer


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sequence": 0}, "sequence"),
        ({"sequence": -1}, "sequence"),
        ({"batch": {"global": 0}}, "batch.global"),
        ({"batch": {"global": 3}, "parallel": {"tp": 1, "pp": 1}}, "batch.global 3"),
        ({"network": {**CASE["network"], "heads": 33}}, "heads 33"),
        ({"network": {**CASE["network"], "layers": 10**15}}, "layers"),
        ({"network": {**CASE["network"], "hiden": 1}}, "hiden"),
        ({"cluster": {"gpu": "A100-81GB", "gpus": 8}}, "A100-81GB"),
        ({"cluster": {"sku": "Standard_X9", "nodes": 1}}, "Standard_X9"),
        ({"cluster": {"gpu": "H100", "sku": "Standard_ND96isr_H100_v5", "nodes": 1}}, "sku"),
        ({"cluster": {"gpu": "H100", "nodes": 1, "gpus": 8}}, "nodes 1"),
        ({"cluster": {"gpu": "H100", "gpus": 13}}, "13"),
        ({"cluster": {"gpu": "H100", "gpus": 10**8}}, "100000000"),
        ({"cluster": {"gpu": "H100"}}, "goal fastest"),
        ({"parallel": {"tp": 5}}, "tp 5"),
        ({"parallel": {"tp": 8, "pp": 8, "dp": 8}}, "64 GPUs|dp 8"),
        ({"parallel": {"zero": 4}}, "zero"),
        ({"precision": "int7"}, "precision"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": float("nan")}, "tokens"),
        ({"max_cost": float("inf")}, "max_cost"),
    ],
)
def test_a_mistake_is_named_by_its_value_before_anything(refused, change, named):
    assert re.search(named, refused({**CASE, **change}))


@pytest.mark.parametrize("text", ["", "42", "[]", "a: [", "- 1\n- 2", "\x00", "x: &a [*a]"])
def test_a_file_that_is_no_case_is_refused(refused, text):
    assert "case" in refused(text)


def test_a_file_that_is_not_there_and_a_wrong_goal_are_named(plan):
    assert "fastest, cheapest, smallest" in plan(CASE, "--goal", "best", code=2)["error"]["message"]
    ran = subprocess.run([HEADWAY, "plan", "--case", "/no/such.yaml"], capture_output=True, text=True)
    assert ran.returncode == 2 and "/no/such.yaml" in ran.stderr and "gpt3-175b" in ran.stderr


def test_a_shipped_case_is_named_from_any_folder_and_a_file_of_that_name_comes_first(tmp_path):
    words = [HEADWAY, "plan", "--case", "gpt3-175b", "--json"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and json.loads(ran.stdout)["gpus"] == 1024, ran.stderr
    (tmp_path / "gpt3-175b").write_text(yaml.safe_dump(CASE))
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(ran.stdout)["gpus"] == 64, ran.stderr


def test_what_if_is_drawn(plan, tmp_path):
    plan({**CASE, "parallel": {"tp": 4, "pp": 1, "cp": 1, "zero": 1}}, "--plots", str(tmp_path / "plots"))
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert drawn.keys() == {"gpus.png", "cost.png", "depth.png", "interval.png"}
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 10_000 for picture in drawn.values())


def test_people_get_a_page(tmp_path):
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(CASE))
    ran = subprocess.run([HEADWAY, "plan", "--case", str(tmp_path / "case.yaml")], capture_output=True, text=True)
    for word in ("llama: 8.03 B parameters on 64 x NVIDIA H100", "memory", "MFU", "goodput", "costs", "USD", "instead"):
        assert word in ran.stdout, ran.stdout


def test_a_plan_loads_nothing_that_it_does_not_need():
    code = (
        "import sys; import deployments.cli.planning.plan, tasks.planning.planned_case, tasks.planning.search; "
        "print([m for m in ('torch', 'prefect', 'mlflow', 'azure.ai.ml', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_configuration_of_a_cluster_is_planned_as_it_is_and_searched_for_a_goal(tmp_path):
    settings = {
        "cluster": {"name": "nd", "backend": "slurm", "nodes": 2, "ranks_per_node": 8, "gpus_per_node": 8},
        "benchmark": {"sku": "Standard_ND96isr_H100_v5"},
        "training": {
            "model": "m", "precision": "bf16", "sequence_length": 4096, "global_batch_size": 128, "micro_batch_size": 1,
            "network": {"layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 8, "intermediate_size": 14336},
        },
        "execution": {"parallel": "fsdp", "recompute": "full"},
        "planning": {"max_minutes": 100000},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    words = [HEADWAY, "plan", "-c", str(tmp_path / "c.yaml"), "--json"]
    environment = {**os.environ, "HEADWAY_HOME": str(tmp_path / "home")}
    told = json.loads(subprocess.run(words, capture_output=True, text=True, env=environment).stdout)
    assert told["parallel"]["zero"] == 3 and told["parallel"]["recompute"] == "full" and told["gpus"] == 16
    searching = subprocess.run([*words, "--goal", "fastest"], capture_output=True, text=True, env=environment)
    searched = json.loads(searching.stdout)
    assert searched["step_seconds"] <= told["step_seconds"]
    none = subprocess.run([HEADWAY, "plan", "-c", "tiny"], capture_output=True, text=True, env=environment)
    assert none.returncode != 0 and "headway retrain --to plan" in none.stderr


def test_a_plan_says_what_doctor_says_of_gpus_and_is_priced_by_whole_machines(tmp_path):
    environment = {**os.environ, "HEADWAY_HOME": str(tmp_path / "home")}

    def ran(gpus, ranks):
        given = ["--set", f"cluster.gpus_per_node={gpus}", "--set", f"cluster.ranks_per_node={ranks}", "--json"]
        words = [HEADWAY, "plan", "-c", "codeparrot", "-c", "azureml-nd-h100", *given]
        return subprocess.run(words, capture_output=True, text=True, env=environment)

    half, whole, more = ran(4, 4), ran(8, 8), ran(16, 16)
    assert half.returncode == 0 and "gpus_per_node is 4, and a Standard_ND96isr_H100_v5 has 8 GPUs" in half.stderr
    assert more.returncode == 2 and "gpus_per_node is 16" in more.stderr
    halved, costs = (json.loads(one.stdout) for one in (half, whole))
    assert halved["days"] > costs["days"] and halved["cost"]["total"] > 1.2 * costs["cost"]["total"]


def test_a_plan_and_a_rendered_endpoint_need_no_login_to_the_store(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    store = {"uri": "az://account/models/team", "credential": "cli"}
    (home / "stores.yaml").write_text(yaml.safe_dump({"use": "team", "stores": {"team": store}}))
    environment = {**os.environ, "HEADWAY_HOME": str(home), "AZURE_CONFIG_DIR": str(tmp_path / "az")}

    def words(*given):
        done = subprocess.run([HEADWAY, *given], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done

    assert "planned without" in words("plan", "-c", "codeparrot", "-c", "azureml-nd-h100").stderr
    assert "planned without" in words("plan", "-c", "azureml-cpu").stderr
    where = [f"deployment.azureml.{name}=x" for name in ("subscription_id", "resource_group", "workspace")]
    mine = [*where, "deployment.azureml.image=acme.azurecr.io/e:1", "deployment.azureml.identity=/subscriptions/s/i"]
    given = [word for one in mine for word in ("--set", one)]
    assert "its reference is a placeholder" in words("endpoint", "render", "chat", "-c", "tiny", *given).stdout
