"""Two hosts on one store and one PostgreSQL, each with a home, a network and processes of its own: whatever becomes of one, the
other goes on with its flow run and its job. The job runs on a real Slurm, and its folder lies in the store.
"""

import json
import time
from dataclasses import replace
from pathlib import Path

import azurite
import pytest
import yaml
from azure.storage.blob import BlobServiceClient
from azurite import ACCOUNT
from host_stand import Host
from networks import network
from postgres import postgres, rows
from slurm_stand import slurm
from waiting import limit, until

from tasks.common.claims import watch_claim
from tasks.common.process import read_json
from tasks.compute.job_folder import key_of
from tasks.config.database import platform_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

ROOT = Path(__file__).parents[3]
SECRET, DATABASE = "HEADWAY_TEST_CONNECTION", "HEADWAY_TEST_DATABASE"
ADOPTED_SECONDS = 60.0
FLOW = """
import json
import os
from pathlib import Path

from prefect import flow

from flows.support.prefect_page import shown_lifecycle
from flows.support.prefect_run import started_by
from tasks.artifacts import Cluster, Tokens, unqualified
from tasks.config.base import Settings
from tasks.config.cluster import ClusterConfig
from tasks.orchestration.job_spec import Program
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import publish, run_job


class Lasting(Settings):
    name: str
    cluster: ClusterConfig


@stage(version=1)
def lasting(name: str, *, on: Cluster) -> Tokens:
    job = run_job(Program("lasting_job", {"go": os.environ["GO"]}, {}, ranks=1), on=on)
    return publish(job.output, Tokens, name=name, metrics={"steps": float(job.result["steps"])})


@flow(name="last")
def last(name: str):
    config = Lasting(name=name, cluster=json.loads(os.environ["CLUSTER"]))
    with started_by("run", "a test"), shown_lifecycle("last", config, subject=name, stages=("lasting",)):
        lasting(name, on=unqualified(config.cluster))


@flow(name="count")
def count(folder: str):
    from prefect.runtime import flow_run
    with open(Path(folder) / "starts", "a") as file:
        file.write(f"{flow_run.get_id()} {os.uname().nodename}\\n")
"""
JOB = """
import sys, time
from pathlib import Path
from tasks.jobs.node.runtime import main


def run(rank):
    step = 0
    while not Path(rank.settings["go"]).exists():
        step += 1
        rank.metrics(step=step, loss=1.0)
        time.sleep(0.2)
    (rank.output / "made").write_text("by one job")
    return {"steps": step}


if __name__ == "__main__":
    sys.exit(main(run))
"""


class Stand:
    """Two hosts, and what both see."""

    def __init__(self, folder, slurm, blobs, database, machines, environment):
        self.folder, self.slurm, self.database, self.blobs = folder, slurm, database, blobs
        home = folder / "home"
        home.mkdir()
        self.hosts = [
            Host(name, machine, folder / name, home, environment)
            for name, machine in zip(("first", "second"), machines, strict=True)
        ]

    @property
    def go(self):
        return self.folder / "go"

    def other(self, host):
        return next(one for one in self.hosts if one is not host)

    def start_run(self, host, entrypoint, parameters, name, *, limit=None):
        flow = host.ask("POST", "/flows/", {"name": entrypoint})["id"]
        body = {"name": name, "flow_id": flow, "entrypoint": f"lasting.{entrypoint}", "work_pool_name": "headway"}
        body |= {"concurrency_limit": limit, "pull_steps": [], "enforce_parameter_schema": False}
        deployment = host.ask("POST", "/deployments/", body)["id"]
        return lambda: host.ask("POST", f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]

    def documents(self, start):
        names = self.blobs.list_blobs(name_starts_with=f"team/{start}")
        return [blob.name.removeprefix("team/") for blob in names]

    def holder(self, claim):
        """The host that holds a claim, by its note."""
        blob = self.blobs.get_blob_client(f"team/claims/{claim}")
        if not blob.exists():
            return None
        name = json.loads(blob.download_blob().readall()).get("host")
        return next((host for host in self.hosts if host.name == name), None)

    @property
    def watch(self):
        """The claim to act for both hosts."""
        return watch_claim(platform_of(self.hosts[0].disk))

    def token(self, before=()):
        """Of the job that was intended since."""
        intents = [n for n in self.documents("documents/journal/jobs/") if n.endswith("/0001/intent.json")]
        return next((name.split("/")[3] for name in intents if name.split("/")[3] not in before), None)

    def states(self, run):
        query = f"SELECT type, name, message FROM prefect.flow_run_state WHERE flow_run_id = '{run}' ORDER BY timestamp"
        return rows(self.database, query)

    def state(self, run):
        return rows(self.database, f"SELECT state_name FROM prefect.flow_run WHERE id = '{run}'")[0][0]

    def jobs_at_the_scheduler(self):
        lines = self.slurm.command("scontrol", "--oneliner", "show", "jobs", check=False).splitlines()
        return sorted(w.removeprefix("JobName=") for line in lines for w in line.split() if w.startswith("JobName="))

    def why(self):
        logs = [
            *(path for host in self.hosts for path in (host.disk / "platform").glob("*/*.log")),
            *(path for host in self.hosts for path in (host.disk / "runs").glob("*/events.jsonl")),
        ]
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-1500:]}" for path in logs)


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    seen = folder / "seen"
    seen.mkdir()
    for name, text in (("lasting.py", FLOW), ("lasting_job.py", JOB)):
        (seen / name).write_text(text)
    with (
        network(3) as net,
        azurite.running(folder / "azurite", in_memory=True, host=net.here) as blobs,
        postgres(folder / "postgres", host=net.here) as database,
        slurm(
            1, network=replace(net, machines=net.machines[:1]), settings=f"TaskProlog={seen}/prolog", min_job_age=3600
        ) as made,
    ):
        (seen / "prolog").write_text(f"#!/bin/sh\necho 'export {SECRET}={blobs.connection_string}'\n")
        (seen / "prolog").chmod(0o755)
        service = BlobServiceClient.from_connection_string(blobs.connection_string)
        service.create_container("jobs")
        cluster = {
            "name": "stand",
            "backend": "slurm",
            "ranks_per_node": 1,
            "mirror": {"credential": "connection_string"},
            "environment": {"PYTHONPATH": f"{ROOT}:{seen}"},
            "watch": {"silent_node_seconds": 600.0, "join_node_seconds": 600.0},
        }
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(folder),
            "PYTHONPATH": f"{ROOT}:{seen}",
            "PYTHONDONTWRITEBYTECODE": "",
            SECRET: blobs.connection_string,
            DATABASE: database,
            "GO": str(folder / "go"),
            "CLUSTER": json.dumps(cluster),
            **made.environment,
        }
        stand = Stand(folder, made, service.get_container_client("jobs"), database, net.machines[1:], environment)
        store = {"uri": f"az://{ACCOUNT}/jobs/team", "credential": "connection_string", "secret": f"env:{SECRET}"}
        key_of(stand.hosts[0].disk / "jobs" / "any")  # makes the key
        for host in stand.hosts:
            (host.disk / "keys").mkdir(parents=True, exist_ok=True)
            (host.disk / "stores.yaml").write_text(yaml.safe_dump({"use": "blob", "stores": {"blob": store}}))
            (host.disk / "asked.yaml").write_text(yaml.safe_dump({"database": f"env:{DATABASE}"}))
            (host.disk / "keys" / "jobs.key").write_bytes((stand.hosts[0].disk / "keys" / "jobs.key").read_bytes())
        try:
            for host in stand.hosts:
                host.start()
            yield stand
        finally:
            for host in stand.hosts:
                if host.process:
                    host.power_off()


@pytest.fixture
def running(stand):
    """A flow run whose job is at work, its token, and the host that supervises it; both hosts are on."""
    for host in stand.hosts:
        if host.process is None:
            host.start()
    stand.go.unlink(missing_ok=True)
    before = {n.split("/")[3] for n in stand.documents("documents/journal/jobs/")}
    name = f"made-{len(before)}"
    run = stand.start_run(stand.hosts[0], "last", {"name": name}, name, limit=1)()
    token = until(lambda: stand.token(before), 600, every=0.5, why=stand.why)
    metrics = until(
        lambda: [n for n in stand.documents("jobs/") if token[:12] in n and n.endswith("metrics.jsonl")],
        600,
        every=0.5,
        why=stand.why,
    )
    assert metrics
    supervisor = until(lambda: stand.holder(f"jobs/{token}"), 60, why=stand.why)
    assert stand.holder(f"runs/{run}") is supervisor
    return name, run, token, supervisor


def adopted_by(stand, token, host):
    """Seconds until a host supervises the job."""
    began = time.monotonic()
    until(lambda: stand.holder(f"jobs/{token}") is host, 600, every=0.2, why=stand.why)
    return time.monotonic() - began


def require_done_once(stand, name, run, token):
    """The flow run completed, its job was submitted once, and what it made was published once."""
    until(lambda: stand.state(run) == "Completed", 600, every=0.5, why=lambda: f"{stand.states(run)}\n{stand.why()}")
    submitted = [job for job in stand.jobs_at_the_scheduler() if token[:12] in job]
    assert len(submitted) == 1 and submitted[0].endswith("-1"), submitted
    keys = stand.documents(f"documents/journal/jobs/{token}/")
    assert sorted(key.rpartition("/")[2] for key in keys) == ["end.json", "handle.json", "intent.json"], keys
    made = [n for n in stand.documents(f"artifacts/tokens/{name}/versions/") if n.endswith("manifest.json")]
    assert len(made) == 1
    ended = [state for state in stand.states(run) if state[0] in ("COMPLETED", "FAILED", "CANCELLED")]
    assert [state[0] for state in ended] == ["COMPLETED"], ended


def test_both_servers_of_both_hosts_keep_what_they_know_in_the_one_database(stand):
    schemas = dict(rows(stand.database, "SELECT schemaname, count(*) FROM pg_tables GROUP BY 1"))
    assert int(schemas["prefect"]) > 20 and int(schemas["mlflow"]) > 20 and "public" not in schemas
    for host in stand.hosts:
        assert not list(host.disk.rglob("prefect.db")) and not (host.disk / "mlflow" / "mlflow.db").exists()
        named = {f"{one['name']}" for one in host.ask("POST", "/work_pools/headway/workers/filter", {})}
        assert named == {"headway-first", "headway-second"}, "each server knows both workers"


def test_the_other_host_adopts_the_run_of_one_that_lost_its_power_and_the_job_is_submitted_once(stand, running):
    name, run, token, supervisor = running
    other = stand.other(supervisor)
    began = time.monotonic()
    supervisor.power_off()
    adopted_by(stand, token, other)
    seconds = time.monotonic() - began
    print(f"\nadopted after {seconds:.1f} s")
    assert seconds <= limit(ADOPTED_SECONDS) and stand.holder(stand.watch) is other
    assert stand.state(run) == "Running"
    stand.go.touch()
    require_done_once(stand, name, run, token)
    assert any("is gone" in state[2] for state in stand.states(run))
    events = [json.loads(line) for line in (other.disk / "runs" / run / "events.jsonl").read_text().splitlines()]
    assert next(one["kind"] for one in events if one["event"] == "job") == "adopted"


def test_a_host_that_was_paused_and_wakes_up_does_nothing_more_to_a_run_that_another_has(stand, running):
    name, run, token, supervisor = running
    other = stand.other(supervisor)
    supervisor.stop()
    try:
        seconds = adopted_by(stand, token, other)
    finally:
        supervisor.go_on()
    print(f"\nadopted after {seconds:.1f} s")
    log = supervisor.disk / "runs" / run / "events.jsonl"
    closed = until(lambda: [e for e in map(json.loads, log.read_text().splitlines()) if e["event"] == "closed"], 300)
    assert closed[-1]["error"]["type"] == "Superseded"
    assert stand.state(run) == "Running" and stand.holder(f"jobs/{token}") is other
    stand.go.touch()
    require_done_once(stand, name, run, token)
    assert not (supervisor.disk / "jobs" / f"lasting-{token[:12]}" / "result.json").exists()


def test_a_host_with_a_store_of_its_own_is_not_let_in(stand):
    first = stand.hosts[0]
    third = Host("third", first.network, stand.folder / "third", first.home, first.environment)
    third.disk.mkdir()
    (third.disk / "asked.yaml").write_text(yaml.safe_dump({"database": f"env:{DATABASE}"}))
    with pytest.raises(
        AssertionError, match=r"other hosts \(first, second\) work with this database already"
    ) as refused:
        third.start()
    assert "the store of this home is a folder" in str(refused.value) and "use the same stores.yaml" in str(
        refused.value
    )
    assert not (third.disk / "prefect" / "server.json").exists(), "nothing was started"


def test_runs_that_both_workers_see_start_once(stand):
    for host in stand.hosts:
        if host.process is None:
            host.start()
    start = stand.start_run(stand.hosts[0], "count", {"folder": str(stand.folder)}, "each-once")
    runs = {start() for _ in range(6)}
    until(lambda: all(stand.state(run) == "Completed" for run in runs), 600, every=1.0, why=stand.why)
    starts = [line.split() for line in (stand.folder / "starts").read_text().splitlines()]
    assert sorted(run for run, _ in starts) == sorted(runs)


def test_what_a_host_keeps_for_itself_says_which_one_it_is(stand):
    assert {read_json(host.disk / "platform" / "worker" / "part.json")["name"] for host in stand.hosts} == {
        "headway-first",
        "headway-second",
    }


def test_the_watch_of_the_other_host_acts_within_half_a_minute_of_the_loss_of_the_one_that_did(stand):
    for host in stand.hosts:
        if host.process is None:
            host.start()
    acting = until(lambda: stand.holder(stand.watch), 60, why=stand.why)
    began = time.monotonic()
    acting.power_off()
    until(lambda: stand.holder(stand.watch) is stand.other(acting), 60, every=0.2, why=stand.why)
    seconds = time.monotonic() - began
    print(f"\nthe other watch acts after {seconds:.1f} s")
    assert seconds <= limit(30)
