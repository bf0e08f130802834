"""A Prefect server and a worker as anybody starts them, not `headway up`: `prefect deploy --all`, and a run of what it made."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import azurite
import pytest
import yaml
from azure.storage.blob import ContainerClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_docker.worker import DockerWorker
from support import Home, publish_tiny
from waiting import limit, until

from deployments.catalogue.flows import as_prefect_yaml
from deployments.configuration.platform import PlatformConfig
from flows.support.blocks import cluster_block, take_store
from flows.support.inputs import configured
from tasks.config.files import load
from tasks.config.flows import RetrainConfig

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
PREFECT = Path(sys.executable).parent / "prefect"


class Plain:
    """A server with its worker, in a profile of their own; nobody told the worker where the home is."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_")) and k != "HEADWAY_HOME"
        }
        self.folder, self.api = folder, f"http://127.0.0.1:{port}/api"
        self.environment = {
            **kept,
            "PREFECT_HOME": str(folder / "profile"),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        self.processes = []

    def start(self, *words):
        with open(self.folder / f"{words[0]}.log", "w") as log:
            started = subprocess.Popen([PREFECT, *words], cwd=self.folder, env=self.environment, stdout=log, stderr=log)
        self.processes.append(started)

    def prefect(self, *words, **variables):
        """A command in a clone of the repository."""
        environment = {**self.environment, **variables}
        argv = [PREFECT, "--no-prompt", *words]
        ended = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(240))
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.api + path, data, {"Content-Type": "application/json"})

        def asked():
            try:
                with urllib.request.urlopen(request, timeout=limit(20)) as answer:
                    return [json.loads(answer.read())]
            except urllib.error.HTTPError as error:
                if error.code != 503:  # its SQLite is locked: Prefect's own client asks again, too
                    raise
                return None

        return until(asked, 60, every=1.0)[0]

    def answers(self):
        try:
            return self.ask("/health")
        except OSError:
            return False

    def run(self, deployment, **parameters):
        words = [word for key, value in parameters.items() for word in ("--param", f"{key}={json.dumps(value)}")]
        self.prefect("deployment", "run", deployment, *words)
        (run,) = self.ask("/flow_runs/filter", {"sort": "EXPECTED_START_TIME_DESC", "limit": 1})
        return until(lambda: self.ended(run["id"]), 240, every=1.0)

    def ended(self, run):
        found = self.ask(f"/flow_runs/{run}")
        return found if found["state_type"] in ("COMPLETED", "FAILED", "CRASHED") else None


# What a worker of type docker makes of a deployment's job variables, as it does before it asks the engine for a container.
AS_A_CONTAINER = """
import asyncio, json, sys
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_docker.worker import DockerWorker

async def main():
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("retrain/tiny")
        pool = await client.read_work_pool(deployment.work_pool_name)
        run = await client.create_flow_run_from_deployment(deployment.id)
        made = await DockerWorker.job_configuration.from_template_and_values(
            base_job_template=pool.base_job_template, values=deployment.job_variables, client=client
        )
        made.prepare_for_flow_run(run, deployment)
    print(json.dumps({key: getattr(made, key) for key in ("image", "volumes", "env", "auto_remove", "command")}))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    made = Plain(tmp_path_factory.mktemp("plain"))
    try:
        made.start("server", "start")
        until(made.answers, every=0.5)
        made.start("worker", "start", "--pool", "headway", "--type", "process")
        until(lambda: made.ask("/work_pools/filter", {}), every=0.5)
        yield made
    finally:
        for each in reversed(made.processes):
            each.terminate()
            each.wait(limit(60))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    made = Home(tmp_path_factory.mktemp("named") / "home")
    publish_tiny(made)
    yield made
    made.stop()


def test_a_run_that_nobody_told_of_its_home_says_what_to_do(plain):
    plain.prefect("deploy", "--name", "*/tiny")
    run = plain.run("retrain/tiny")
    assert run["state_type"] == "FAILED"
    assert "HEADWAY_HOME is not set" in run["state"]["message"] and "prefect worker start" in run["state"]["message"]


def test_what_is_deployed_with_a_home_completes_the_lifecycle(plain, home):
    plain.prefect("deploy", "--all", HEADWAY_HOME=str(home.path))
    wanted = {one["full_name"]: one for one in home.ok("deployments").said["deployments"]}
    assert plain.ask("/deployments/count", {}) == len(wanted)
    for name, one in wanted.items():
        assert plain.ask(f"/deployments/name/{name}")["parameters"] == one["parameters"], name
    run = plain.run("retrain/tiny", steps=40, overrides=["training.warmup_steps=4"])
    assert (run["state_type"], run["name"][:7]) == ("COMPLETED", "tiny 20"), run["state"]["message"]
    (endpoint,) = home.ok("endpoint", "list").said["endpoints"]
    assert endpoint["ref"] == "endpoint/tiny"
    again = home.retrain("--dry-run", "--set", "training.steps=40", "--set", "training.warmup_steps=4")
    assert again.statuses()["train"] == "reused", "the fields of the form are the settings of the command line"


def test_the_server_refuses_a_field_and_the_run_an_override_that_does_not_hold(plain, home):
    deployment = plain.ask("/deployments/name/retrain/tiny")["id"]
    with pytest.raises(urllib.error.HTTPError, match="409"):
        plain.ask(f"/deployments/{deployment}/create_flow_run", {"parameters": {"learning_rate": -1}})
    run = plain.run("retrain/tiny", overrides=["training.learning_rat=1"])
    assert "did you mean training.learning_rate?" in run["state"]["message"]


def test_a_pool_of_containers_is_what_the_worker_of_docker_takes(plain, tmp_path):
    template, deployed = tmp_path / "template.json", tmp_path / "prefect.yaml"
    template.write_text(json.dumps(DockerWorker.get_default_base_job_template()))
    plain.prefect("work-pool", "create", "headway-docker", "--type", "docker", "--base-job-template", str(template))
    deployed.write_text(as_prefect_yaml(PlatformConfig(), image="headway/platform:0.2.0"))
    plain.prefect("deploy", "--all", "--prefect-file", str(deployed), HEADWAY_HOME="/srv/headway")
    argv = [sys.executable, "-c", AS_A_CONTAINER]
    ended = subprocess.run(argv, env=plain.environment, capture_output=True, text=True, timeout=limit(120))
    assert ended.returncode == 0, ended.stderr
    made = json.loads(ended.stdout)
    assert (made["image"], made["volumes"]) == ("headway/platform:0.2.0", ["/srv/headway:/var/lib/headway"])
    assert (made["env"]["HEADWAY_HOME"], made["auto_remove"]) == ("/var/lib/headway", True)
    assert made["command"] == "prefect flow-run execute"


STORE = f"az://{azurite.ACCOUNT}/blocks/team"


def block(plain, slug, name, **data):
    """Make a block as Prefect's page does; what refers to another one names it by its id."""
    kind = plain.ask(f"/block_types/slug/{slug}")["id"]
    newest = plain.ask("/block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind]}}, "limit": 1})
    body = {"name": name, "data": data, "block_type_id": kind, "block_schema_id": newest[0]["id"]}
    return {"$ref": {"block_document_id": plain.ask("/block_documents/", body)["id"]}}


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    with azurite.running(tmp_path_factory.mktemp("azurite")) as emulator:
        with ContainerClient.from_connection_string(emulator.connection_string, "blocks") as container:
            container.create_container()
        yield emulator.connection_string


@pytest.fixture(scope="module")
def blocks(plain, connection):
    """The three types, and the blocks of a team: a cluster with a store that is opened by a connection string."""
    plain.prefect("block", "register", "-m", "flows.support.blocks")
    account = block(plain, "headway-credentials", "team", credential="connection_string", secret=connection)
    store = block(plain, "headway-store", "team", uri=STORE, credentials=account)
    block(plain, "headway-cluster", "team", settings={"name": "team", "ranks_per_node": 1}, store=store)
    block(plain, "headway-cluster", "misspelt", settings={"nodez": 2})
    return account["$ref"]["block_document_id"]


def test_a_worker_without_a_store_takes_the_one_of_a_block(plain, connection, blocks, tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM_CONNECTION", connection)
    theirs, fresh = Home(tmp_path / "theirs"), tmp_path / "fresh"
    theirs.path.mkdir()
    config = {"uri": STORE, "credential": "connection_string", "secret": "env:TEAM_CONNECTION"}
    (theirs.path / "stores.yaml").write_text(yaml.safe_dump({"use": "cloud", "stores": {"cloud": config}}))
    publish_tiny(theirs)
    plain.prefect("deploy", "--name", "*/tiny", HEADWAY_HOME=str(fresh))
    run = plain.run("validate/tiny", cluster="team")
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert not (fresh / "store").exists()
    kept = yaml.safe_load((fresh / "stores.yaml").read_text())
    assert (kept["use"], kept["stores"]["block"]) == ("block", {**config, "secret": "env:HEADWAY_STORE_SECRET"})
    assert theirs.ok("artifacts", "validation").said["artifacts"]
    key = azurite.KEY.encode()
    assert not [path for path in fresh.rglob("*") if path.is_file() and key in path.read_bytes()]
    assert azurite.KEY not in json.dumps(plain.ask(f"/block_documents/{blocks}"))


def test_a_block_counts_over_the_preset_and_under_what_the_run_names(plain, blocks):
    with temporary_settings({PREFECT_API_URL: plain.api}):
        made = configured(RetrainConfig, {}, "tiny", "slurm", cluster="team").cluster
        assert (made.name, made.ranks_per_node, made.backend) == ("team", 1, "slurm")
        made = configured(RetrainConfig, {"cluster": {"name": "mine"}}, "tiny", cluster="team").cluster
        assert (made.name, made.ranks_per_node, made.backend) == ("mine", 1, "local")
        made = configured(RetrainConfig, load("local", []), overrides=["cluster.threads_per_rank=2"], cluster="team")
        assert (made.cluster.name, made.cluster.threads_per_rank, made.training.model) == ("team", 2, "python-coder")


def test_what_nobody_added_in_the_page_is_none(plain, blocks):
    shared = block(plain, "headway-store", "shared", uri="/mnt/share", credentials={})
    block(plain, "headway-cluster", "without", settings={"ranks_per_node": 1}, store={})
    block(plain, "headway-cluster", "with", store=shared)
    with temporary_settings({PREFECT_API_URL: plain.api}):
        assert cluster_block("without").store is None
        assert cluster_block("with").store.config().uri == "/mnt/share"


def test_a_block_that_does_not_hold_is_refused_with_its_name(plain, blocks, tmp_path):
    with temporary_settings({PREFECT_API_URL: plain.api}):
        with pytest.raises(ValueError, match="headway-cluster/teem: there are misspelt, team"):
            cluster_block("teem")
        with pytest.raises(ValueError, match="headway-cluster/misspelt does not hold: .*did you mean nodes?"):
            cluster_block("misspelt")
        (tmp_path / "store").mkdir()
        with pytest.raises(ValueError, match="a home has one store"):
            take_store(tmp_path, "team")
        assert not (tmp_path / "stores.yaml").exists()
