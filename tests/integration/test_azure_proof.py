"""`make azure`: the smoke test of a subscription, whole, against the fakes of Azure ML and of the Azure CLI; and its ends."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import azure_cli
import azureml_endpoints
import psutil
import pytest
import yaml
from azureml_service import OVER, TOKEN, cluster
from azureml_stand import standing
from retail_prices import item, retail_prices
from waiting import limit, until

from benchmarks.azure import Cloud, Prices, arguments, steps_of

ROOT = Path(__file__).parents[2]
PRICE = 0.229
IMAGES = [
    "--image",
    "x.azurecr.io/headway/cluster-cpu:0.2.0",
    "--endpoint-image",
    "x.azurecr.io/headway/endpoint:0.2.0",
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
    assert "delete: passed" in err and not (tmp_path / "run" / "azure.md").exists(), err


def test_a_failure_deletes_what_was_made_before_it(az, tmp_path, monkeypatch):
    monkeypatch.setenv("AZ_FAILS", "ml workspace create")
    code, _, err = run(tmp_path / "run", "--yes", *IMAGES)
    seen = verdicts(tmp_path / "run")
    assert code == 1 and "QuotaExceeded" in seen["resources"][1] and seen["two nodes"][0] == "skipped", err
    assert seen["delete"][0] == "passed" and azure_cli.there(az) == []
    assert (
        err.index("resources: costs about USD 0.22") < err.index("resources: a group") and "two nodes: costs" not in err
    )


def test_what_could_not_be_deleted_is_named_and_the_next_run_deletes_it(az, tmp_path, monkeypatch):
    monkeypatch.setenv("AZ_FAILS", "acr create,group delete")
    code, out, _ = run(tmp_path / "run", "--yes", "--group", "mine", *IMAGES)
    command = "resource group mine: az group delete --name mine --yes"
    assert code == 1 and command in verdicts(tmp_path / "run")["delete"][1]
    assert "az group delete --name mine --yes" in out and azure_cli.there(az)
    monkeypatch.setenv("AZ_FAILS", "")
    code, _, err = run(tmp_path / "run", *IMAGES)
    assert "leftovers: passed" in err and "deleted: resource group mine" in err and azure_cli.there(az) == []


def test_a_group_that_is_there_is_neither_used_nor_deleted(az, tmp_path):
    group = {"kind": "group", "name": "mine", "group": "mine", "tags": "made-by=headway-smoke-test"}
    (az / "az.json").write_text(json.dumps([group]))
    code, _, err = run(tmp_path / "run", "--yes", "--group", "mine", *IMAGES)
    seen = verdicts(tmp_path / "run")
    assert code == 1 and "choose another --group" in seen["resources"][1], err
    assert "group mine may be in use: az group delete --name mine --yes" in seen["leftovers"][1]
    assert azure_cli.there(az) == [group] and "deleted: nothing was made" in seen["delete"][1]


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGHUP])
def test_an_interruption_deletes_what_was_made(az, tmp_path, monkeypatch, how):
    monkeypatch.setenv("AZ_HANGS", "acr create")
    running = start(tmp_path / "run", "--yes", *IMAGES)
    until(lambda: any(line[:2] == ["acr", "create"] for line in azure_cli.asked(az)))
    running.send_signal(how)
    _, err = running.communicate(timeout=limit(120))
    assert running.returncode == 130 and azure_cli.there(az) == [], err
    assert ["group", "delete"] in [line[:2] for line in azure_cli.asked(az)]


def test_a_second_ctrl_c_skips_one_deletion_and_the_next_run_makes_up_for_it(az, tmp_path, monkeypatch):
    monkeypatch.setenv("AZ_HANGS", "ml workspace create,group delete")
    running = start(tmp_path / "run", "--yes", "--group", "mine", *IMAGES)
    for words in (["ml", "workspace", "create"], ["group", "delete"]):
        until(lambda words=words: any(line[: len(words)] == words for line in azure_cli.asked(az)))
        running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=limit(120))
    assert "az group delete --name mine --yes --subscription s" in verdicts(tmp_path / "run")["delete"][1], err
    assert azure_cli.there(az)
    monkeypatch.setenv("AZ_HANGS", "")
    _, _, err = run(tmp_path / "run", *IMAGES)
    assert "deleted: resource group mine" in err and azure_cli.there(az) == []


def test_two_runs_in_one_folder_do_not_meet(az, tmp_path, monkeypatch):
    monkeypatch.setenv("AZ_HANGS", "account show")
    running = start(tmp_path / "run", *IMAGES)
    until(lambda: azure_cli.asked(az))
    code, _, err = run(tmp_path / "run", *IMAGES)
    assert code == 2 and "choose another --folder" in err
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=limit(120))


def test_a_workspace_of_your_own_is_priced_by_its_size_and_nothing_is_made_for_it(tmp_path, capsys):
    (tmp_path / "store.yaml").write_text("uri: az://account/container\n")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"cluster": {"azureml": {"size": "Standard_ND96isr_H100_v5"}}}))
    words = ["-c", str(tmp_path / "mine.yaml"), "--store", str(tmp_path / "store.yaml")]
    given = arguments(words)
    assert (given.size, given.endpoint_size) == ("Standard_ND96isr_H100_v5", "")
    paid = {one.step.name: one.cost(Prices(100.0, None)) for one in steps_of(Cloud(given, tmp_path))}
    assert (paid["resources"], paid["two nodes"], paid["endpoint"]) == ("nothing", "about USD 40.00", "unknown")
    assert Cloud(given, tmp_path).has_images
    (tmp_path / "store.yaml").write_text("uri: /a/folder\n")
    with pytest.raises(SystemExit):
        arguments(words)
    assert "its uri is /a/folder and not az://ACCOUNT/CONTAINER" in capsys.readouterr().err


def test_the_page_lists_the_steps_and_what_they_cost(tmp_path):
    """docs/azure.md, in their order."""
    steps = [
        (one.step.name, one.node_minutes + one.endpoint_minutes) for one in steps_of(Cloud(arguments([]), tmp_path))
    ]
    page = (ROOT / "docs" / "azure.md").read_text()
    table = page[page.index("| step | proves | costs |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [row[0] for row in rows] == [*(name for name, _ in steps), "delete"]
    named = {row[0]: int(row[2].split()[0]) for row in rows if "machine minutes" in row[2]}
    assert named == {name: minutes for name, minutes in steps if minutes}


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


@contextmanager
def workspace(tmp_path, monkeypatch):
    """A stand with a workspace, its endpoints, and the options that lead there: both nodes of it are this machine."""
    with standing(tmp_path / "stand") as stand, azureml_endpoints.serving(Golden(stand)) as (endpoints, state):
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        settings = [f"cluster.azureml.endpoint={stand.service.url}", f"deployment.azureml.endpoint={endpoints}"]
        settings += ["deployment.azureml.poll_seconds=0.02", f"benchmark.sku={tmp_path / 'any.yaml'}"]
        settings += ["benchmark.min_of_peers=0.01", "cluster.watch.hang_seconds=120"]  # and others may want it too
        settings += ["cluster.watch.silent_node_seconds=300"]
        (tmp_path / "any.yaml").write_text(json.dumps({"name": "any", "vendor": "cpu", "sources": {}}))
        store = tmp_path / "store.yaml"
        store.write_text(json.dumps(yaml.safe_load((stand.home / "stores.yaml").read_text())["stores"]["cloud"]))
        yield stand, state, ["--store", str(store), *(word for one in settings for word in ("--set", one))]


def nothing_is_left(stand, state, folder):
    """Of jobs, endpoints and processes of a run."""
    until(lambda: {stand.service.record(name).status for name in stand.service.submitted} <= set(OVER))
    assert state.resources == {} and state.scaling == {}
    assert not [one.cmdline() for one in psutil.process_iter() if works_in(one, folder / "home")]


def works_in(process, home):
    try:
        return process.environ().get("HEADWAY_HOME") == str(home)
    except psutil.Error:
        return False


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_of_it(az, tmp_path, monkeypatch):
    with workspace(tmp_path, monkeypatch) as (stand, state, options):
        stand.service.clusters = {"smoke": cluster(vmSize="STANDARD_DS3_V2")}
        where = ["--group", "g", "--workspace", "w", "--steps", "1500"]
        code, out, err = run(tmp_path / "run", "--yes", *where, *IMAGES, *options, seconds=1500)
        seen = verdicts(tmp_path / "run")
        assert code == 0, f"{out}\n{err[-6000:]}\n{stand.said()}"
        assert {name for name, (status, _) in seen.items() if status != "passed"} == {"push"}
        assert "resumed from step" in seen["resume"][1] and "adopted after kill -9" in seen["resume"][1]
        trained = [name for name in stand.service.submitted if "-train-" in name]
        assert len(trained) == 2 and stand.service.record(trained[0]).status == "Canceled"
        assert stand.service.record(trained[0]).nodes.count == 2
        assert re.search(r"machine hours, USD 0\.\d\d", seen["two nodes"][1]), seen
        for name in seen.keys() - {"delete"}:
            assert err.index(f"{name}: costs ") < err.index(f"{name}: {seen[name][0]} after"), name
        assert azure_cli.there(az) == [] and len(stand.service.submitted) > len(trained)
        nothing_is_left(stand, state, tmp_path / "run")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_in_your_own_workspace_a_killed_run_is_cleared_away_by_the_next_and_ctrl_c_leaves_nothing(
    az, tmp_path, monkeypatch
):
    own = {"subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "cpu", "shm_size": "1g"}
    mine = {"cluster": {"image": IMAGES[1], "azureml": {**own, "cluster_identity": "/identity/headway"}}}
    mine["deployment"] = {"azureml": {"image": IMAGES[3], "identity": "/identity/headway-endpoint"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    with workspace(tmp_path, monkeypatch) as (stand, state, options):
        service, folder, words = stand.service, tmp_path / "run", ["--yes", "-c", str(tmp_path / "mine.yaml"), *options]

        def interrupted(how):
            """The jobs of a run that is interrupted while one of them runs, and what it printed."""
            before, running = set(service.submitted), start(folder, *words)
            ours = lambda: [service.record(name) for name in set(service.submitted) - before]  # noqa: E731
            until(lambda: running.poll() is not None or any(job.status == "Running" for job in ours()), timeout=600)
            running.send_signal(how)
            out, err = running.communicate(timeout=limit(600))
            assert ours(), f"{out}\n{err}"
            return ours(), err

        [job], _ = interrupted(signal.SIGKILL)
        assert job.status == "Running" and (folder / "azure-made.json").exists()
        _, err = interrupted(signal.SIGINT)
        assert "leftovers: passed" in err and "delete: passed" in err, err
        nothing_is_left(stand, state, folder)
        deleted = [line for line in azure_cli.asked(az) if line[:3] == ["storage", "blob", "delete-batch"]]
        assert len(deleted) == 2 and "some/prefix/run/*" in deleted[0] and not (folder / "azure-made.json").exists()
        assert not [line for line in azure_cli.asked(az) if "create" in line]
