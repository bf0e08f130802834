"""`headway cost` and `headway rightsize` over runs as their logs and job folders tell them."""

import json
from dataclasses import dataclass, field

import pytest
import run_folders
from support import Home
from waiting import limit

from tasks.compute.job import Job, write_folder
from tasks.config.backends.slurm import SlurmConfig
from tasks.config.cluster import ClusterConfig

H100 = "Standard_ND96isr_H100_v5"
BIG = ClusterConfig(name="big", backend="slurm", ranks_per_node=8, gpus_per_node=8, nodes=4)
HERE = ClusterConfig(ranks_per_node=2)
SHARES = {"mfu": 0.4, "data_share": 0.02, "communication_share": 0.1, "goodput": 0.95}
"""What training's outcome tells of a step, and of all its time."""


@dataclass
class Stored:
    """A run's folder, written event by event at the times that a test names, and the folders of its jobs."""

    home: Home
    identity: str
    cluster: ClusterConfig = BIG
    sku: str = H100
    preemptible: bool = False
    events: list = field(default_factory=list)

    def stage(self, name, began, ended, *, status="ran", metrics=None, job=True):
        """A stage whose job had its machines from a minute after it began."""
        self._say(began, "started", stage=name, estimate=None)
        folder = self.home.path / "jobs" / f"{name}-{self.identity}"
        if job and status != "reused":
            self._say(began, "job", stage=name, kind="submitted", text="")
            self._say(began + 60, "job", stage=name, kind="running", text="")
            self._folder(name, folder)
        told = {"id": folder.name, "folder": str(folder)} if job else None
        outcome = {"name": name, "status": status, "job": told, "metrics": metrics or {}}
        self._say(ended, "ended", outcome=outcome)
        return folder

    def close(self):
        log = run_folders.Run(self.home.path, self.identity, subject="big").log
        log._events.close()
        text = "".join(json.dumps(event) + "\n" for event in self.events)
        (log.folder / "events.jsonl").write_text(text + '{"event": "closed", "time": 1, "status": "completed"}\n')

    def _say(self, time, event, **more):
        self.events.append({"event": event, "time": 1000.0 + time, **more})

    def _folder(self, name, folder):
        nodes = self.cluster.nodes if name == "train" else 1
        shape = {
            "nodes": nodes,
            "ranks_per_node": self.cluster.ranks_per_node,
            "gpus_per_node": self.cluster.gpus_per_node,
        }
        job = Job(name=name, token="t" * 32, program="-", settings={}, inputs={}, preemptible=self.preemptible, **shape)
        write_folder(job, folder)
        told = self.cluster.model_copy(update={"slurm": SlurmConfig(sku=self.sku)}).model_dump(mode="json")
        (folder / "cluster.json").write_text(json.dumps(told))


@pytest.fixture
def desk(tmp_path):
    return Home(tmp_path / "home")


def whole(desk, identity="aaaa1111", **more):
    run = Stored(desk, identity, **more)
    run.stage("validate", 0, 10, status="reused")
    run.stage("benchmark", 10, 1870)  # 30 minutes of one machine
    run.stage("plan", 1870, 1871, metrics={"seconds": 32_000.0}, job=False)
    folder = run.stage("train", 1871, 1871 + 60 + 36_000, metrics=SHARES)
    run.close()
    return folder


def test_every_stage_costs_the_hours_of_its_machines(desk):
    whole(desk)
    said = desk.ok("cost", "aaaa").said
    stages = {stage["stage"]: stage for stage in said["stages"]}
    assert {name: stage["machine_hours"] for name, stage in stages.items()} == {
        **{"validate": 0.0, "benchmark": 0.5, "plan": 0.0},
        "train": 40.0,
    }
    assert stages["train"]["cost"] == pytest.approx(40 * 98.32) and stages["benchmark"]["cost"] == pytest.approx(49.16)
    assert said["total"] == pytest.approx(40.5 * 98.32) == sum(stage["cost"] for stage in said["stages"])
    assert stages["train"]["planned_cost"] == pytest.approx(32_000 / 3600 * 4 * 98.32)
    assert stages["train"]["over"] == pytest.approx(36_060 / 32_000 - 1) and stages["train"]["goodput"] == 0.95
    assert said["prices"][0]["source"] and any("days old" in warning for warning in said["warnings"])


def test_another_region_and_another_kind_have_their_own_prices(desk):
    whole(desk)
    assert desk.ok("cost", "--region", "westus").said["total"] == pytest.approx(40.5 * 127.816)
    spot = desk.ok("cost", "--kind", "spot").said
    assert spot["total"] is None and any("no spot price" in warning for warning in spot["warnings"])


def test_machines_that_may_be_taken_away_cost_the_spot_price(desk):
    whole(desk, sku="Standard_ND96amsr_A100_v4", preemptible=True)
    said = desk.ok("cost").said
    assert said["kind"] == "spot" and said["total"] == pytest.approx(40.5 * 3.6047)


def test_the_low_priority_tier_of_azure_ml_has_its_own_price(desk):
    workspace = {**{"subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "c"}, "size": H100}
    azure = ClusterConfig(
        name="big", backend="azureml", azureml=workspace, image="own:1", ranks_per_node=8, gpus_per_node=8, nodes=4
    )
    whole(desk, cluster=azure, preemptible=True)
    (desk.path / "prices").mkdir()
    (desk.path / "prices/own.yaml").write_text(
        f"machines: {{{H100}: {{eastus: {{on-demand: 98.32, spot: 30.0, low-priority: 40.0}}}}}}\n"
    )
    said = desk.ok("cost").said
    assert said["kind"] == "low-priority" and said["total"] == pytest.approx(40.5 * 40.0)


def test_costs_in_two_currencies_are_not_added(desk):
    run = Stored(desk, "aaaa1111")
    run.stage("benchmark", 10, 1870)
    run.sku, run.cluster = "", HERE
    run.stage("evaluate", 1870, 1870 + 60 + 3600)
    run.close()
    (desk.path / "prices").mkdir()
    (desk.path / "prices/own.yaml").write_text("currency: EUR\nmachines: {local-cpu: {any: {on-demand: 0.5}}}\n")
    said = desk.ok("cost").said
    assert said["by_currency"] == {"USD": pytest.approx(49.16), "EUR": pytest.approx(0.5)}
    assert said["total"] is None and said["known"] is None and said["currency"] is None
    assert {stage["stage"]: stage["currency"] for stage in said["stages"]} == {"benchmark": "USD", "evaluate": "EUR"}
    assert any("no rate of exchange is known" in warning for warning in said["warnings"])
    process = desk.start("cost")
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "USD 98.32" in rows["benchmark"] and "EUR 0.50" in rows["evaluate"] and "EUR 98.32" not in out
    assert "total USD 49.16 and EUR 0.50, 1.5 machine hours" in out


def test_your_own_machines_cost_nothing_only_when_you_say_so(desk):
    whole(desk, sku="", cluster=HERE)
    said = desk.ok("cost").said
    assert said["total"] is None and said["known"] == 0.0
    assert any("prices/own.yaml" in warning for warning in said["warnings"])
    (desk.path / "prices").mkdir()
    (desk.path / "prices/own.yaml").write_text("machines: {local-cpu: {any: {on-demand: 0.5}}}\n")
    assert desk.ok("cost").said["total"] == pytest.approx(5.25)
    assert desk.ok("cost", "--sku", H100).said["total"] == pytest.approx(10.5 * 98.32)


def test_a_cluster_of_your_own_is_priced_by_its_name(desk):
    whole(desk, sku="")
    assert any("no price of big is known" in warning for warning in desk.ok("cost").said["warnings"])
    (desk.path / "prices").mkdir()
    (desk.path / "prices/own.yaml").write_text("machines: {big: {any: {on-demand: 2.0}}}\n")
    assert desk.ok("cost").said["total"] == pytest.approx(81.0)


def test_people_see_a_table(desk):
    whole(desk)
    process = desk.start("cost")
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    train = next(line for line in out.splitlines() if line.startswith("train"))
    assert "4 Standard_ND96isr_H100_v5" in train and "USD 3,932.80" in train and "+13%" in train
    assert "total USD 3,981.96, 40.5 machine hours" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [(["cost", "ffff"], "no such"), (["cost", "a"], "any of"), (["cost", "aaaa", "--kind", "gratis"], "'gratis'")],
)
def test_mistakes_are_told(desk, words, said):
    whole(desk)
    whole(desk, "abbb2222")
    ran = desk.run(*words)
    assert ran.code == 2 and said in ran.said["error"]["message"]


def test_a_home_without_runs_says_so(desk):
    assert "no run yet" in desk.run("cost").said["error"]["message"]
    assert desk.ok("rightsize").said["runs"] == []


def used(folder, *, gpu_memory_gib, busy):
    (folder / "result.json").write_text(json.dumps({"metrics": {}, "time": {"gpu_memory_gib": gpu_memory_gib}}))
    for percent in (busy - 5, busy + 5):
        run_folders.metrics(folder, step=1, **{"system/gpu_0_utilization_percentage": percent})


@pytest.mark.parametrize(("peak", "busy", "advice"), [(78.0, 95, "larger"), (24.0, 20, "smaller"), (60.0, 90, "keep")])
def test_the_size_is_judged_by_what_was_measured(desk, peak, busy, advice):
    used(whole(desk), gpu_memory_gib=peak, busy=busy)
    (row,) = desk.ok("rightsize").said["runs"]
    assert (row["advice"], row["machine"], row["machines"]) == (advice, H100, 4.0)
    assert row["use"]["memory"] == pytest.approx(peak / 80) and row["use"]["busy"] == pytest.approx(busy / 100)


def test_what_was_not_measured_is_not_guessed(desk):
    whole(desk)
    (row,) = desk.ok("rightsize", "aaaa").said["runs"]
    assert row["advice"] == "unknown" and "not measured: its memory and how busy it was of the gpu" in row["reasons"]


def test_a_job_that_ran_out_of_memory_needs_more(desk):
    folder = whole(desk)
    (folder / "settled.json").write_text(json.dumps({"submission": 1, "outcome": "failed", "failure": "out_of_memory"}))
    (row,) = desk.ok("rightsize").said["runs"]
    assert row["advice"] == "larger" and "out of memory 1 time" in row["reasons"][0]
