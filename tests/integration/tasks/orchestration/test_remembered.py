"""What a training took is noted for the next plan of its kind, and a note that cannot be written loses no model."""

import pytest

from tasks.artifacts import Cluster, Plan
from tasks.config.flows import RetrainConfig
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage_context import Work, home_folder, noted, working
from tasks.plan import judge, reckon
from tasks.planning.spent import measured_on
from tasks.train import remember

ON = Cluster(
    name="nd", backend="slurm", nodes=1, ranks_per_node=8, threads_per_rank=1, sku="desk",
    matmul_gflops_per_rank=10.0, allreduce_gigabytes_per_second=1.0, memory_bytes_per_node=64 << 30,
)  # fmt: skip
TRAINING = TrainingConfig(
    network=NetworkConfig(layers=2, hidden_size=64, heads=4), engine="megatron", steps=20, warmup_steps=2
)
HALVED, EIGHT = (ExecutionConfig(tensor_parallel=parts) for parts in (2, 8))
LIMITS = PlanningConfig(max_minutes=1e6)
TOOK_TWICE = {"plan_error": 1.0, "tokens_per_second": 80.0, "tokens_per_second_per_rank": 10.0}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The body of a stage, with a real store in which nothing is told to MLflow."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    opened = lifecycle("retrain", RetrainConfig(), subject="m", stages=("train",), dry=True)
    with opened as run, working(Work("train", "k", run, "", handed=[], context=[])):
        yield run


def planned(how):
    past = noted(measured_on(ON.name), 50)
    numbers = reckon(TRAINING, LIMITS, how, ON, vocab_size=320, train_tokens=10_000, home=home_folder(""), past=past)
    return numbers, {check.name: check for check in judge(numbers, LIMITS)}


def plan_of(numbers):
    return Plan(
        name="m", version="0" * 64, uri="", checks=(), steps=TRAINING.steps, seconds=numbers.seconds,
        checkpoint_every_steps=5, keep_checkpoints=2, parameters=numbers.parameters, correction=numbers.correction,
    )  # fmt: skip


def test_a_run_corrects_the_plan_of_its_division_and_of_no_other(run):
    numbers, checks = planned(HALVED)
    assert numbers.correction == 1.0 and "earlier runs of this kind" not in checks
    remember(TRAINING, HALVED, plan_of(numbers), on=ON, metrics=TOOK_TWICE)
    again, checks = planned(HALVED)
    assert again.correction == pytest.approx(2.0) and "earlier runs of this kind" not in checks
    other, checks = planned(EIGHT)
    assert (other.correction, other.corrected_by_runs) == (1.0, 0)
    said = checks["earlier runs of this kind"]
    assert (
        said.outcome == "warned" and "tp 2, not 8" in said.remedy and said.remedy.endswith(f"{other.correction_said}.")
    )


def test_a_note_that_cannot_be_written_is_said_and_the_training_stands(run, tmp_path, caplog):
    numbers, _ = planned(HALVED)
    remember(TRAINING, HALVED, plan_of(numbers), on=ON, metrics=TOOK_TWICE)
    assert not caplog.records and len(noted(measured_on(ON.name), 50)) == 1
    remember(TRAINING, HALVED, plan_of(numbers), on=ON, metrics={**TOOK_TWICE, "tokens_per_second_per_rank": 0.0})
    [notes] = tmp_path.rglob("planned/nd")
    notes.rename(notes.with_name("away"))
    notes.write_text("a file where a folder was")
    remember(TRAINING, HALVED, plan_of(numbers), on=ON, metrics=TOOK_TWICE)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("what model took is not noted" in line for line in said)
