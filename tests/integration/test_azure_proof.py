"""`make azure`: the smoke test of a subscription, whole, against the fakes of Azure ML and of the Azure CLI; and its ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import azure_cli
import azureml_endpoints
import pytest
import yaml
from azureml_service import TOKEN, cluster
from azureml_stand import standing
from retail_prices import item, retail_prices
from waiting import limit, until

from benchmarks.azure import Cloud, arguments

ROOT = Path(__file__).parents[2]
PRICE = 0.229
IMAGES = [
    "--image",
    "x.azurecr.io/headway/cluster-cpu:0.1.0",
    "--endpoint-image",
    "x.azurecr.io/headway/endpoint:0.1.0",
]


@pytest.fixture
def az(tmp_path, monkeypatch):
    """What the Azure CLI keeps: a folder. Prices come from a fake of Azure's API."""
    kept = tmp_path / "az"
    for name, value in {**azure_cli.install(tmp_path / "bin", kept), "AZ_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    with retail_prices([item("Standard_DS3_v2", PRICE)]) as prices:
        monkeypatch.setenv("HEADWAY_PRICES_URL", prices.url)
        yield kept


def start(folder, *words):
    command = [
        sys.executable,
        "-m",
        "benchmarks.azure",
        "--folder",
        str(folder),
        "--to",
        str(folder / "azure.md"),
        *words,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def run(folder, *words, seconds=120):
    running = start(folder, *words)
    out, err = running.communicate(timeout=limit(seconds))
    return running.returncode, out, err


def verdicts(folder):
    """By step: the verdict and what was seen."""
    rows = re.findall(
        r"^\| ([\w ]+) \| (passed|failed|skipped) \| \d+ s \| (.*) \|$", (folder / "azure.md").read_text(), re.M
    )
    return {name: (status, rest) for name, status, rest in rows}


def test_nobody_who_could_say_yes_means_no(az, tmp_path):
    code, _, err = run(tmp_path / "run", *IMAGES)
    assert code == 130 and "about USD" in err, err
    assert azure_cli.there(az) == [] and not [line for line in azure_cli.asked(az) if "create" in line]
    assert verdicts(tmp_path / "run")["delete"][0] == "passed"


def test_a_failure_deletes_what_was_made_before_it(az, tmp_path, monkeypatch):
    monkeypatch.setenv("AZ_FAILS", "ml workspace create")
    code, _, err = run(tmp_path / "run", "--yes", *IMAGES)
    seen = verdicts(tmp_path / "run")
    assert code == 1 and "QuotaExceeded" in seen["resources"][1] and seen["two nodes"][0] == "skipped", err
    assert seen["delete"][0] == "passed" and azure_cli.there(az) == []


def test_what_could_not_be_deleted_is_named_with_its_command(az, tmp_path, monkeypatch):
    monkeypatch.setenv("AZ_FAILS", "acr create,group delete")
    code, out, _ = run(tmp_path / "run", "--yes", "--group", "mine", *IMAGES)
    assert (
        code == 1
        and "resource group mine: az group delete --name mine --yes" in verdicts(tmp_path / "run")["delete"][1]
    )
    assert "az group delete --name mine --yes" in out and azure_cli.there(az)


def test_ctrl_c_deletes_what_was_made(az, tmp_path, monkeypatch):
    monkeypatch.setenv("AZ_HANGS", "acr create")
    running = start(tmp_path / "run", "--yes", *IMAGES)
    until(lambda: any(line[:2] == ["acr", "create"] for line in azure_cli.asked(az)))
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=limit(120))
    assert running.returncode == 130 and azure_cli.there(az) == [], err
    assert ["group", "delete"] in [line[:2] for line in azure_cli.asked(az)]


def test_every_command_that_creates_is_one_of_the_azure_cli(tmp_path):
    """Of a new account too, which the whole run below does not make: its store is an emulator."""
    given = arguments(["--group", "g", "--workspace", "w", "--account", "headwaysmoke", "--region", "westeurope"])
    created = [azure_cli.parsed(words) for words, _ in Cloud(given, tmp_path).creations()]
    assert [name for name, _ in created if "storage" in name] == [
        "storage account create",
        "storage account blob-service-properties update",
        "storage container-rm create",
    ]
    undone = [undo.words[1:] for _, undo in Cloud(given, tmp_path).creations() if undo]
    assert [azure_cli.parsed(words)[0] for words in undone] == ["group delete", "ml workspace delete"]


class Golden(dict):
    """What the deployed model answers: the golden prompts of the version that lies in the store."""

    def __init__(self, stand):
        super().__init__()
        self.stand = stand

    def __missing__(self, key):
        blobs = self.stand.blobs()
        [name] = [one.name for one in blobs.list_blobs() if re.search(r"served/smoke/.*/golden\.json$", one.name)]
        return json.loads(blobs.get_blob_client(name).download_blob().readall())[key]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_of_it(az, tmp_path, monkeypatch):
    with standing(tmp_path / "stand") as stand, azureml_endpoints.serving(Golden(stand)) as (endpoints, state):
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        stand.service.clusters = {"smoke": cluster(vmSize="STANDARD_DS3_V2")}
        settings = [f"cluster.azureml.endpoint={stand.service.url}", f"deployment.azureml.endpoint={endpoints}"]
        settings += ["deployment.azureml.poll_seconds=0.02", f"benchmark.sku={tmp_path / 'any.yaml'}"]
        settings += ["benchmark.min_of_peers=0.01"]  # both nodes are this machine, and so is whatever else runs
        (tmp_path / "any.yaml").write_text(json.dumps({"name": "any", "vendor": "cpu", "sources": {}}))
        options = [word for setting in settings for word in ("--set", setting)]
        store = tmp_path / "store.yaml"
        store.write_text(json.dumps(yaml.safe_load((stand.home / "stores.yaml").read_text())["stores"]["cloud"]))
        where = ["--group", "g", "--workspace", "w", "--store", str(store), "--steps", "1500"]
        code, out, err = run(tmp_path / "run", "--yes", *where, *IMAGES, *options, seconds=1500)
        seen = verdicts(tmp_path / "run")
        assert code == 0, f"{out}\n{err[-6000:]}\n{stand.said()}"
        assert {name for name, (status, _) in seen.items() if status != "passed"} == {"push"}
        assert "resumed from step" in seen["resume"][1] and "adopted after kill -9" in seen["resume"][1]
        trained = [name for name in stand.service.submitted if "-train-" in name]
        assert len(trained) == 2 and stand.service.record(trained[0]).status == "Canceled"
        assert stand.service.record(trained[0]).nodes.count == 2
        assert azure_cli.there(az) == [] and [key for key in state.resources if "onlineEndpoints" in key] == []
        assert re.search(r"machine hours, USD 0\.\d\d", seen["two nodes"][1]), seen
