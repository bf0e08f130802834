"""Gates fail closed: each one with a subject that passes, and with everything that must keep it shut."""

import json
import math

import pytest

from deployments.cli.output import say_error
from tasks.artifacts import Check, Checkpoint, Cluster, Evaluation, Pending, Plan, Qualification, Validation, parse_ref
from tasks.common.errors import GateFailed
from tasks.config.base import Settings, config_digest
from tasks.config.data import ValidationConfig
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.config.flows import RetrainConfig
from tasks.config.planning import PlanningConfig
from tasks.config.serving import ExportConfig
from tasks.config.training import CheckpointConfig, ExecutionConfig, NetworkConfig, TrainingConfig
from tasks.data.expectations import of_unreadable
from tasks.evaluate import compare
from tasks.export import parity_checks
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage_context import Work, working
from tasks.plan import GIB, reckon
from tasks.plan import judge as judge_plan
from tasks.planning.configured import share_of_state
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit

PASSED = Check(name="rows", measured=5.0, limit=">= 1", passed=True, remedy="Add rows.")
FAILED = Check(name="speed", measured=1.23456789, limit=">= 4", passed=False, remedy="Take the node out.")
ALSO = Check(name="sum", measured="wrong", limit="correct", passed=False, remedy="Take the node out.")
CLUSTER = Cluster(
    name="local", backend="local", nodes=1, ranks_per_node=2, threads_per_rank=1,
    matmul_gflops_per_rank=10.0, allreduce_gigabytes_per_second=1.0, memory_bytes_per_node=8 << 30,
)  # fmt: skip


def qualification(*checks):
    return Qualification(name="local", version="a" * 64, uri="", checks=checks, subject=CLUSTER)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A lifecycle with a real store, in which nothing is told to MLflow."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    with lifecycle("retrain", RetrainConfig(), subject="m", stages=("evaluate",), dry=True) as run:
        yield run


def test_a_gate_gives_up_its_subject_when_every_check_passed():
    cluster = qualification(PASSED, PASSED).require()
    assert cluster == CLUSTER.model_copy(update={"qualification": f"qualification/local@{'a' * 64}"})


def test_a_share_is_told_in_the_unit_of_its_limit_with_the_first_lines_that_break_it(capsys):
    samples = tuple(f"notes.jsonl:{line}: not JSON" for line in range(1, 6))
    config = ValidationConfig(max_unreadable_share=0.1)
    figure = of_unreadable(config, 4, 6, samples)
    check = Check(
        name=figure.name, measured=figure.value, limit=figure.limit, passed=False, remedy=figure.remedy, samples=samples
    )
    with pytest.raises(GateFailed, match=r"unreadable: measured 40\.00%, limit <= 10\.00% of lines$") as closed:
        qualification(check).require()
    assert say_error(closed.value, as_json=False) == 3
    first, *listed, remedy = capsys.readouterr().err.splitlines()
    assert listed == [f"     notes.jsonl:{line}: not JSON" for line in (1, 2, 3)]
    assert "40.00%" in first and remedy.startswith("  -> Correct these lines")


def test_a_closed_gate_tells_each_failed_check_with_its_remedy_once():
    gate = qualification(PASSED, FAILED, ALSO)
    assert not gate.passed
    with pytest.raises(GateFailed) as closed:
        gate.require()
    assert closed.value.stage == "benchmark"
    assert closed.value.exit_code == 3
    assert closed.value.checks == [
        {"name": "speed", "measured": 1.23456789, "limit": ">= 4"},
        {"name": "sum", "measured": "wrong", "limit": "correct"},
    ]
    assert closed.value.message == (
        "the gate of benchmark stays closed: speed: measured 1.23457, limit >= 4; sum: measured wrong, limit correct"
    )
    assert closed.value.remedy == "Take the node out."


@pytest.mark.parametrize("kind", [Qualification, Validation, Plan])
def test_a_gate_that_checked_nothing_is_closed(kind):
    plain = {
        "subject": CLUSTER,
        "steps": 1,
        "checkpoint_every_steps": 1,
        "keep_checkpoints": 2,
        "seconds": 1.0,
        "parameters": 1,
    }
    gate = kind.model_construct(name="x", version="a" * 64, uri="", checks=(), **plain)
    assert not gate.passed
    with pytest.raises(GateFailed, match="nothing was checked"):
        gate.require()


def test_a_gate_survives_its_record():
    gate = qualification(PASSED, FAILED, ALSO)
    assert Qualification.model_validate(json.loads(gate.model_dump_json())) == gate


def failed_of(checks):
    return [check.name for check in checks if not check.passed]


TRAINING = TrainingConfig(
    network=NetworkConfig(layers=2, hidden_size=64, heads=4, kv_heads=2, intermediate_size=176),
    sequence_length=64,
    steps=60,
    warmup_steps=5,
)


def plan_checks(run, *, training=TRAINING, cluster=CLUSTER, **limits):
    limits = PlanningConfig(**limits)
    numbers = reckon(training, limits, ExecutionConfig(), cluster, vocab_size=320, train_tokens=10_000, home=run.home)
    with working(Work("plan", "k", run, "", handed=[], context=[])):
        return numbers, judge_plan(numbers, limits)


def test_a_small_plan_fits_and_its_numbers_agree(run):
    numbers, checks = plan_checks(run)
    assert failed_of(checks) == []
    assert [check.name for check in checks] == [
        "memory per rank, GiB", "disk for checkpoints, GiB", "training time, minutes",
    ]  # fmt: skip
    assert numbers.tokens == 60 * 8 * 64
    assert numbers.epochs == pytest.approx(numbers.tokens / 10_000)
    assert numbers.seconds == pytest.approx(60 * numbers.step_seconds)
    assert 1 <= numbers.checkpoint_every_steps <= 6
    slower, _ = plan_checks(run, cluster=CLUSTER.model_copy(update={"matmul_gflops_per_rank": 5.0}))
    assert slower.seconds > 1.5 * numbers.seconds


def test_each_limit_of_a_plan_closes_it(run, monkeypatch):
    numbers, _ = plan_checks(run)
    at, under = numbers.memory_per_rank / GIB, (numbers.memory_per_rank - 1) / GIB
    assert failed_of(plan_checks(run, memory_per_rank_gib=at)[1]) == []
    assert failed_of(plan_checks(run, memory_per_rank_gib=under)[1]) == ["memory per rank, GiB"]
    assert failed_of(plan_checks(run, max_minutes=numbers.seconds / 60 * 0.99)[1]) == ["training time, minutes"]
    usage = type("Usage", (), {"free": numbers.checkpoint * 3 - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert failed_of(plan_checks(run)[1]) == ["disk for checkpoints, GiB"]
    usage.free += 1
    assert failed_of(plan_checks(run)[1]) == []


def test_the_configured_checkpoint_interval_counts(run):
    assert plan_checks(run, checkpoint=CheckpointConfig(every_steps=17))[0].checkpoint_every_steps == 17


def evaluation(run, name, bits, *, gain=0.3, low=0.2):
    """A published evaluation, with bits for each held-out document."""
    folder = run.home / name
    folder.mkdir()
    (folder / "documents.json").write_text(json.dumps({"bytes": [100] * len(bits), "model_bits": bits}))
    manifest = run.store.publish(folder, kind="evaluation", inputs=(), provenance=Provenance(name=name))
    return Evaluation(
        name=name,
        version=manifest.version,
        uri="",
        metrics={"gain_over_bigram": gain, "gain_low": low, "bits_per_byte": sum(bits) / len(bits) / 100},
        subject=Checkpoint(name=name, version=manifest.version, uri=""),
    )


BITS = [200.0 + number for number in range(20)]
LIMITS = ComparisonConfig()


def compared(run, scores, champion=None, limits=LIMITS):
    """The names of the checks that kept the gate closed."""
    try:
        assert compare(scores, champion, EvaluationConfig(), limits) == scores.subject
    except GateFailed as closed:
        assert closed.stage == "evaluate"
        return [check["name"] for check in closed.checks]
    return []


def test_a_model_must_beat_the_bigram_and_surely_so(run):
    assert compared(run, evaluation(run, "good", BITS)) == []
    assert compared(run, evaluation(run, "limit", BITS, gain=0.10, low=0.01)) == []
    assert compared(run, evaluation(run, "close", BITS, gain=0.09, low=0.01)) == ["gain over the Kneser-Ney bigram"]
    low = "gain over the bigram, low end of the 95% interval"
    assert compared(run, evaluation(run, "unsure", BITS, gain=0.2, low=0.0)) == [low]
    assert len(compared(run, evaluation(run, "diverged", BITS, gain=math.nan, low=math.nan))) == 2
    lax = ComparisonConfig(min_gain_over_bigram=-1.0)
    assert compared(run, evaluation(run, "lax", BITS, gain=-0.5, low=-0.6), limits=lax) == []
    assert [check["passed"] for check in run.outcomes["evaluate"].checks] == [True, True]


def test_a_model_must_not_be_worse_than_the_champion(run):
    champion = evaluation(run, "champion", BITS)
    check = "relative loss to the champion, high end of the 95% interval"
    assert compared(run, evaluation(run, "better", [b * 0.9 for b in BITS]), champion) == []
    assert compared(run, evaluation(run, "alike", [b * 1.01 for b in BITS]), champion) == []
    assert compared(run, evaluation(run, "worse", [b * 1.03 for b in BITS]), champion) == [check]
    noisy = [b * (1.3 if number % 4 == 0 else 0.91) for number, b in enumerate(BITS)]
    assert compared(run, evaluation(run, "noisy", noisy), champion) == [check]
    assert compared(run, champion, champion) == []


def test_a_comparison_waits_for_what_is_pending(run):
    champion = evaluation(run, "champion", BITS)
    for scores, other in ((Pending(stage="train"), None), (champion, Pending(stage="evaluate"))):
        assert isinstance(compare(scores, other, EvaluationConfig(), LIMITS), Pending)


def test_a_model_that_answers_differently_is_not_exported():
    def failed(**metrics):
        plain = {"max_logit_error": 1e-4, "logit_scale": 5.0, "greedy_equal": 120.0, "greedy_total": 120.0}
        return failed_of(parity_checks({**plain, **metrics}, ExportConfig()))

    assert failed() == []
    assert failed(max_logit_error=1.1e-3) == ["logit error, largest absolute"]
    for bad in (math.nan, math.inf):
        assert failed(max_logit_error=bad) == ["logit error, largest absolute"]
        assert failed(logit_scale=bad) == ["logit error, largest absolute"]
    assert failed(greedy_equal=119.0) == ["greedy completions equal, token for token"]
    assert failed(greedy_equal=0.0, greedy_total=0.0) == ["greedy completions equal, token for token"]


def test_a_digest_is_of_the_values_whether_written_out_or_not():
    written = RetrainConfig.model_validate(json.loads(RetrainConfig().model_dump_json()))
    assert config_digest(written) == config_digest(RetrainConfig())
    assert config_digest(TrainingConfig(steps=800)) == config_digest(TrainingConfig())
    assert config_digest(TrainingConfig(learning_rate=1)) == config_digest(TrainingConfig(learning_rate=1.0))
    assert config_digest(TrainingConfig(steps=801)) != config_digest(TrainingConfig())
    deep = TrainingConfig(network=NetworkConfig(tie_embeddings=False))
    assert config_digest(deep) != config_digest(TrainingConfig())


def test_a_digest_does_not_depend_on_the_order_of_fields():
    class One(Settings):
        a: int = 1
        b: str = "ä"

    class Other(Settings):
        b: str = "ä"
        a: int = 1

    assert config_digest(One()) == config_digest(Other())


def test_references_are_read_strictly():
    version = "0123abcd" * 8
    assert parse_ref(f"dataset/a.b-c_1@{version}") == ("dataset", "a.b-c_1", version)
    assert parse_ref("model/coder@01234567") == ("model", "coder", "01234567")
    assert parse_ref("coder", kind="model") == ("model", "coder", "")
    assert parse_ref("endpoint/local") == ("endpoint", "local", "")
    wrong = [
        "coder",
        "models/coder",
        "model/Coder",
        "model/../x",
        "model/coder@0123",
        "model/coder@xyzxyzxy",
        "model/",
        "",
    ]
    for text in [*wrong, "model/coder@01234567\n", f"model/coder@{version}0"]:
        with pytest.raises(ValueError, match="is not a reference"):
            parse_ref(text)
    with pytest.raises(ValueError, match="is not a reference to a dataset"):
        parse_ref("model/coder", kind="dataset")


@pytest.mark.parametrize(
    "engine, how, share",
    [
        ("torch", {}, 1.0),
        ("torch", {"parallel": "fsdp", "tensor_parallel": 2}, 1 / 8),
        ("deepspeed", {"deepspeed": {"zero_stage": 1}}, (2 + 2 / 8) / 4),
        ("deepspeed", {"deepspeed": {"zero_stage": 3}}, 1 / 8),
        ("megatron", {"tensor_parallel": 2, "pipeline_parallel": 2}, (2 + 2 / 2) / 4 / 4),
    ],
)
def test_memory_of_weights_is_that_of_a_ranks_part(engine, how, share):
    assert share_of_state(TrainingConfig(engine=engine), ExecutionConfig(**how), 8) == pytest.approx(share)
