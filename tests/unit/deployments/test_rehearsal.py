"""What a rehearsal makes of its faults: passed, failed and not tried are three things; and its page and its documentation."""

import json
import random
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.rehearsal import run
from deployments.rehearsal import scene as scene_module
from deployments.rehearsal.fault import Fault, check
from deployments.rehearsal.run import FAULTS, RankKilled
from deployments.rehearsal.scene import NotSeen, Scene
from tasks.common.errors import Unknown
from tasks.config.files import load
from tasks.report.pages import render

pytestmark = pytest.mark.unit
DOCS = Path(run.__file__).parents[2] / "docs"


class Harmless(Fault):
    name, what, promise = "harmless", "Nothing.", "Nothing is lost."

    def inject(self, scene):
        scene.mark("injected", "nothing")
        scene.mark("recovered", "from nothing")

    def expect(self, scene):
        yield check("losses", 0, "0", True)


class Broken(Harmless):
    name = "broken"

    def expect(self, scene):
        yield from super().expect(scene)
        yield check("submissions", 2, "1", False)


class TooLate(Harmless):
    name = "too-late"

    def inject(self, scene):
        raise NotSeen("training was over before the fault came")


class Idle(Harmless):
    name = "idle"

    def expect(self, scene):
        return iter(())


class Forbidden(Harmless):
    name = "forbidden"

    def impossible(self, scene):
        return "nobody may mount here"


class NeverUndone(Harmless):
    name = "never-undone"

    def undo(self, scene):
        raise NotSeen("the bytes are still wrong")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return Scene(tmp_path / "home", (), "rehearsal", "rehearsal", (), 10, random.Random(1), lambda line: None)


@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        (Harmless, "passed", "recovered after"),
        (Broken, "failed", "submissions: 2, not 1"),
        (TooLate, "failed", "training was over before the fault came"),
        (Idle, "failed", "idle"),
        (Forbidden, "not tried", "nobody may mount here"),
        (NeverUndone, "failed", "the bytes are still wrong"),
    ],
)
def test_the_verdict_on_a_fault(home, fault, verdict, words):
    result = run.try_fault(fault(), home)
    assert result.verdict == verdict
    assert words in run.line_of(result)


def report_of(*results, invariants=()):
    known = {"schema": run.SCHEMA, "id": "1", "began": datetime.now(UTC), "backend": "local", "seed": 1}
    return run.Report(**known, configuration=(), dataset="tiny", results=results, invariants=invariants)


def test_what_was_not_tried_has_not_passed(home):
    good, bad, never = (run.try_fault(one(), home) for one in (Harmless, Broken, Forbidden))
    assert report_of(good, never).passed
    assert not report_of(good, bad).passed
    assert not report_of(never).passed and not report_of().passed
    assert not report_of(good, invariants=(check("audit log", "changed", "as written", False),)).passed


def test_the_page_escapes_what_it_shows_and_has_every_fault(home):
    result = run.try_fault(Broken(), home).model_copy(update={"why": "<script>alert(1)</script>"})
    page = render("rehearsal", report=report_of(result), title="Rehearsal")
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert 'id="broken"' in page and "submissions" in page


def test_a_job_that_was_submitted_again_before_its_end_is_named(home):
    jobs = home.home / "store/documents/journal/jobs"
    for token, ends in {"good": ("0001",), "bad": ("0002",)}.items():
        for number in ("0001", "0002"):
            (jobs / token / number).mkdir(parents=True)
        for number in ends:
            (jobs / token / number / "end.json").write_text("{}")
    assert list(home.two_at_work()) == ["bad"]


def test_steps_of_two_attempts_are_counted_and_the_last_one_counts(tmp_path):
    rows = [(1, 4.0), (2, 3.5), (3, 3.0), (2, 3.4), (3, 2.9)]
    figures = {"learning_rate": 0.1, "grad_norm": 1.0}
    lines = [json.dumps({"step": step, "loss": loss, **figures}) for step, loss in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    assert scene_module.losses(tmp_path) == {1: [4.0, 0.1, 1.0], 2: [3.4, 0.1, 1.0], 3: [2.9, 0.1, 1.0]}
    assert scene_module.reported(tmp_path) == 5 and scene_module.newest_step(tmp_path) == 3


def test_checkpoints_are_listed_newest_first(tmp_path):
    for step in (9, 10, 100):
        folder = tmp_path / f"checkpoints/step-{step}/attempt-1"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    assert [path.parts[-3] for path in scene_module.checkpoints_of(tmp_path)] == ["step-100", "step-10", "step-9"]


def test_faults_are_chosen_by_name_and_an_unknown_name_lists_them():
    assert list(map(type, run.chosen(["rank-killed"], quick=False))) == [RankKilled]
    assert list(map(type, run.chosen([], quick=False))) == list(FAULTS)
    assert [fault.name for fault in run.chosen(["random-7", "rank-killed"], quick=True)] == ["rank-killed", "random-7"]
    left_out = [fault.name for fault in FAULTS if fault not in map(type, run.chosen([], quick=True))]
    slow = {
        *("platform-killed", "launcher-killed", "machine-off", "checkpoint-torn", "disk-full", "slow-rank"),
        *("rank-hangs", "clock-moved", "canary-wrong", "orchestrator-killed", "machine-lost"),
        *("store-refuses", "store-lost", "store-slow", "webhook-forged", "canary-fails", "canary-slow"),
    }
    assert set(left_out) == slow
    page = (DOCS / "rehearsal.md").read_text()
    assert f"`--quick` tries {len(FAULTS) - len(slow)} of them" in page and f"the {len(FAULTS)} faults" in page
    with pytest.raises(Unknown, match="there is no fault 'rank-kiled'") as raised:
        run.chosen(["rank-kiled"], quick=False)
    assert "rank-killed" in raised.value.remedy


def test_random_faults_come_after_the_others_until_the_hours_are_over_and_a_seed_names_them():
    faults = run.each_fault([RankKilled()], seed=7, hours=1.0)
    assert [next(faults).name for _ in range(3)] == ["rank-killed", "random-7", "random-8"]
    assert [fault.name for fault in run.each_fault([RankKilled()], seed=7, hours=0.0)] == ["rank-killed"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["cluster.backend=slurm", "cluster.mirror={}"], "machines of cluster.backend slurm do not share"),
        (["cluster.backend=slurm", "cluster.nodes=1:2", "training.micro_batch_size=1"], "cluster.elastic is set"),
        (["deployment.port=8080"], "port is 8080"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(settings, words):
    with pytest.raises(ValueError, match=words) as raised:
        run.require_rehearsable(load(["tiny"], settings))
    assert "--set" in str(raised.value)


def test_what_a_cluster_does_not_allow_is_not_tried_there(home):
    run.require_rehearsable(load(["tiny"], ["cluster.backend=slurm"]))
    home.cluster = load(["tiny"], ["cluster.backend=slurm"]).cluster
    results = {fault.name: run.try_fault(fault(), home) for fault in FAULTS if fault.local_only}
    assert set(results) == {"eviction-notice", "disk-full", "gpu-fails", "slow-rank", "clock-moved"}
    assert all(one.verdict == "not tried" and one.why for one in results.values())


def test_a_fault_costs_what_the_machines_cost_until_all_was_well_again(home):
    class Slow(Harmless):
        def inject(self, scene):
            scene.moments = [
                scene_module.Moment(seconds=at, kind=kind, text="")
                for at, kind in ((1.0, "injected"), (37.0, "recovered"))
            ]

    assert run.try_fault(Slow(), home, hour=100.0).cost == 1.0
    assert run.try_fault(Slow(), home).cost is None
    machines = ["cluster.backend=ssh", "cluster.ssh.hosts=[a, b]", "cluster.nodes=2", "cluster.ranks_per_node=1"]
    size = [*machines, "cluster.ssh.sku=Standard_ND96isr_H100_v5"]
    hour, currency = run.price_of(load(["tiny"], size))
    assert hour and hour > 20 and currency == "USD"
    assert run.price_of(load(["tiny"], [])) == (None, "")


def test_a_training_is_long_enough_to_be_interrupted_unless_somebody_says_how_long():
    assert run.settings_words(["tiny"], []).words == ("-c", "tiny", "--set", f"training.steps={run.STEPS}")
    assert run.settings_words(["a", "b"], ["training.steps=900"]).settings == ["training.steps=900"]


def test_the_documentation_has_every_fault_and_their_pages_exist():
    table = (DOCS / "rehearsal.md").read_text().partition("## What goes wrong")[2].partition("\n## ")[0]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])
    }
    assert named == {fault.name for fault in FAULTS}
    for fault in FAULTS:
        page, _, anchor = fault.page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(), re.M)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, fault.page


def test_an_endpoint_in_a_cloud_is_refused():
    settings = load(["tiny"], [])
    deployment = settings.deployment.model_copy(update={"backend": "azureml"})
    with pytest.raises(ValueError, match="deployment.backend is azureml: rehearsals serve on this machine"):
        run.require_rehearsable(settings.model_copy(update={"deployment": deployment}))
