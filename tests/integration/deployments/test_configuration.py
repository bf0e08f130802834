"""From YAML and `--set` to a configuration, with errors that name the key and the remedy; and errors as exit codes."""

import errno
import json
import math
from pathlib import Path

import pytest

from deployments.catalogue.flows import as_prefect_yaml
from deployments.cli.operations.doctor import examine
from deployments.cli.output import CommandError, exit_code, say, say_error
from deployments.configuration.platform import PlatformConfig, ScheduleConfig, current_settings, kept
from tasks.common.errors import Cancelled, GateFailed, HeadwayError, IntegrityError, JobFailed, Missing, Unknown
from tasks.config.files import SHIPPED, load, load_cluster, presets
from tasks.config.flows import RetrainConfig
from tasks.planning.case import Network
from tasks.planning.counts import parameter_count

pytestmark = pytest.mark.unit

ONLY_WHERE = ("ssh", "slurm", "azureml", "ray")
STARTING_POINTS = ("azureml-cpu", "azureml-nc-a100", "azureml-nd-h100", "azureml-spot")
NAMES = sorted(path.stem for path in SHIPPED.glob("*.yaml"))


@pytest.fixture
def config(tmp_path):
    """Loads a configuration from the text of a file."""

    def read(text, *overrides):
        (tmp_path / "mine.yaml").write_text(text)
        return load(str(tmp_path / "mine.yaml"), list(overrides))

    return read


def test_there_are_shipped_configurations():
    assert {"tiny", "local", "codeparrot", *ONLY_WHERE, *STARTING_POINTS} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_is_valid_and_says_what_it_changes(name):
    loaded = load(name, [])
    assert loaded == load(str(SHIPPED / f"{name}.yaml"), [])
    assert loaded != RetrainConfig()
    assert ("training" in loaded.model_fields_set) == (name not in ONLY_WHERE)


@pytest.mark.parametrize("name", ONLY_WHERE)
@pytest.mark.parametrize("trained", ["tiny", "local"])
def test_one_training_runs_on_every_backend(name, trained):
    """What a file of a cluster adds is the cluster: the same stages, keys and numbers."""
    alone, there = load(trained, []), load([trained, name], [])
    assert there.cluster.backend == name and alone.cluster.backend == "local"
    assert there.model_copy(update={"cluster": alone.cluster}) == alone
    assert there.cluster.world_size == alone.cluster.world_size == 2


def test_what_only_says_where_is_no_deployment():
    assert presets() == ["codeparrot", "local", "tiny"]


def test_codeparrot_is_of_the_published_size():
    """Hugging Face's page: 110 million parameters, 29.5 billion tokens, micro batches of 12 on eight GPUs."""
    config = load("codeparrot", [])
    training = config.training
    network = Network.of_config(training.network, config.preprocessing.tokenizer.vocab_size)
    assert 0.1e9 < parameter_count(network, 1024) < 0.12e9
    assert training.steps * training.global_batch_size * training.sequence_length == 29_491_200_000
    assert training.global_batch_size // (training.micro_batch_size * config.cluster.world_size) == 2


def test_of_several_files_the_later_wins_key_by_key(config, tmp_path):
    (tmp_path / "below.yaml").write_text("training: {steps: 100, network: {layers: 2}}\ndataset: a\n")
    (tmp_path / "above.yaml").write_text(
        "training: {network: {heads: 2, kv_heads: 2}}\nexport: {golden_prompts: [x]}\n"
    )
    loaded = load([str(tmp_path / "below.yaml"), str(tmp_path / "above.yaml")], ["training.warmup_steps=1"])
    assert (loaded.training.steps, loaded.training.network.layers, loaded.training.network.heads) == (100, 2, 2)
    assert (loaded.training.warmup_steps, loaded.dataset, loaded.export.golden_prompts) == (1, "a", ("x",))
    (tmp_path / "above.yaml").write_text("training: {stps: 1}\n")
    with pytest.raises(ValueError, match=r"below\.yaml \+ .*above\.yaml is not valid: training\.stps"):
        load([str(tmp_path / "below.yaml"), str(tmp_path / "above.yaml")], [])


@pytest.mark.parametrize("name", STARTING_POINTS)
def test_a_starting_point_says_where_and_what_it_may_cost_and_nothing_of_what_is_trained(name):
    there = load(["codeparrot", name], [])
    changed = {"cluster": there.cluster, "planning": there.planning}
    assert load("codeparrot", []).model_copy(update=changed) == there
    cluster, spending = there.cluster, there.planning.spending
    assert cluster.name == name and cluster.time_limit_minutes and spending.max_cost and spending.ask_above
    assert cluster.gpus_per_node in (0, cluster.ranks_per_node) and cluster.size == cluster.azureml.size
    with pytest.raises(ValueError, match=r"cluster\.image \(my-registry.*cluster\.azureml\.compute \(my-cluster\)"):
        cluster.require_own()
    assert "training" in load(name, []).model_fields_set  # alone it trains what its key `trains` names


def test_a_file_lies_on_top_of_the_one_that_it_is_based_on(config, tmp_path):
    assert load("azureml-spot", []).cluster.size == load("azureml-nc-a100", []).cluster.size
    loaded = config(
        "based_on: azureml-nd-h100\ncluster: {azureml: {workspace: mine}}\ntraining: {global_batch_size: 32}\n"
    )
    assert (loaded.cluster.ranks_per_node, loaded.cluster.azureml.workspace) == (8, "mine")
    assert loaded.training.model == RetrainConfig().training.model  # the file itself says what is trained
    (tmp_path / "other.yaml").write_text(f"based_on: {tmp_path / 'mine.yaml'}\n")
    with pytest.raises(ValueError, match=r"comes back to a file that is based on it"):
        config(f"based_on: {tmp_path / 'other.yaml'}\n")
    with pytest.raises(ValueError, match=r"based_on is \['tiny'\]: name one configuration"):
        config("based_on: [tiny]\n")
    with pytest.raises(ValueError, match=r"there is no configuration 'tinny'"):
        config("based_on: tinny\n")


def test_the_size_of_machines_is_that_of_the_backend_in_use():
    named = ["cluster.slurm.sku=Standard_ND96isr_H100_v5", "cluster.azureml.size=Standard_F32s_v2"]
    assert load(["azureml"], named).cluster.size == "Standard_F32s_v2"
    assert load(["slurm"], named).cluster.size == "Standard_ND96isr_H100_v5"


def test_a_cluster_alone_has_no_rules_with_the_training():
    assert load_cluster("tiny", ["cluster.ranks_per_node=3"]).ranks_per_node == 3
    with pytest.raises(ValueError, match="only settings of cluster count here"):
        load_cluster("tiny", ["training.steps=3"])
    with pytest.raises(ValueError, match=r"did you mean slurm\.partition"):
        load_cluster("slurm", ["cluster.slurm.partitio=x"])


def test_an_empty_file_is_the_defaults(config):
    assert config("") == config("# nothing\n") == RetrainConfig()


def test_a_file_sets_what_it_names_and_nothing_else(config):
    loaded = config("training:\n  learning_rate: 3e-4\n  network: {layers: 2}\n")
    assert loaded.training.learning_rate == 3e-4
    assert loaded.training.network.layers == 2
    assert loaded.training.network.hidden_size == RetrainConfig().training.network.hidden_size
    assert loaded.evaluation == RetrainConfig().evaluation


MISSPELT = {
    "trainin: {}": "trainin: there is no such key; did you mean training?",
    "training: {learning_rat: 1}": "training.learning_rat: there is no such key; did you mean training.learning_rate?",
    "training: {network: {layer: 2}}": (
        "training.network.layer: there is no such key; did you mean training.network.layers?"
    ),
    "planning: {checkpoint: {zzz: 2}}": "planning.checkpoint.zzz: there is no such key; there are: every_steps, keep",
}


@pytest.mark.parametrize("text", MISSPELT)
def test_a_misspelt_key_is_named_with_the_right_one(config, text):
    with pytest.raises(ValueError, match=r"mine\.yaml is not valid") as error:
        config(text)
    assert MISSPELT[text] in str(error.value)


def test_all_mistakes_are_told_at_once(config):
    with pytest.raises(ValueError, match=r"mine\.yaml is not valid") as error:
        config("trainin: {}\nevaluation: {confidence: 2}\n", "benchmark.secnds=1")
    assert str(error.value).count(";") >= 3
    for said in (
        "trainin:",
        "evaluation.confidence: Input should be less than 1, not 2",
        "did you mean benchmark.seconds?",
    ):
        assert said in str(error.value)


BAD_VALUES = {
    "training: {steps: many}": "training.steps: Input should be a valid integer",
    "training: {steps: 0}": "training.steps: Input should be greater than 0, not 0",
    "training: 5": "training: Input should be",
    "training: {engine: jax}": "training.engine: Input should be 'torch', 'deepspeed' or 'megatron', not 'jax'",
    "training: {model: My Model}": "training.model: String should match pattern",
    "training: {steps: 10, warmup_steps: 10}": "warmup_steps 10 must be fewer than steps 10",
    "training: {network: {heads: 3}}": "hidden_size 128 must be a multiple of heads 3",
    "training: {global_batch_size: 6}": (
        "training.global_batch_size 6 must be a multiple of training.micro_batch_size x ranks = 4 x 2 = 8"
    ),
    "cluster: {ranks_per_node: 3}": "training.global_batch_size 8 must be a multiple of",
    "validation: {text_field: body}": "validation.text_field 'body' and preprocessing.text_field 'text' must be the same",
    "preprocessing: {tokenizer: {vocab_size: 100}}": "preprocessing.tokenizer.vocab_size: Input should be greater than",
}


@pytest.mark.parametrize("text", BAD_VALUES)
def test_a_bad_value_is_named_with_its_limit(config, text):
    with pytest.raises(ValueError, match=r"mine\.yaml is not valid") as error:
        config(text)
    assert BAD_VALUES[text] in str(error.value)


@pytest.mark.parametrize("text", ["[1, 2]", "word", "a: [", "a: b: c", "\t- x"])
def test_what_is_no_mapping_is_refused(config, text):
    with pytest.raises(ValueError, match=r"mine\.yaml (is not YAML|holds)"):
        config(text)


def test_a_file_that_is_not_there_is_told_with_the_shipped_ones(tmp_path):
    for source in ("tinny", str(tmp_path), str(tmp_path / "none.yaml")):
        with pytest.raises(ValueError, match="there is no configuration .* or one of .*tiny"):
            load(source, [])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not YAML"):
        load(str(tmp_path / "binary.yaml"), [])


SETTINGS = {
    "training.learning_rate=3e-4": lambda c: c.training.learning_rate == 3e-4,
    "training.learning_rate=.002": lambda c: c.training.learning_rate == 0.002,
    "training.learning_rate=1E-3": lambda c: c.training.learning_rate == 1e-3,
    "training.steps=1e3": lambda c: c.training.steps == 1000,
    "training.steps=100": lambda c: c.training.steps == 100,
    "training.network.tie_embeddings=false": lambda c: c.training.network.tie_embeddings is False,
    "planning.checkpoint.every_steps=": lambda c: c.planning.checkpoint.every_steps is None,
    "planning.checkpoint.every_steps=null": lambda c: c.planning.checkpoint.every_steps is None,
    "planning.checkpoint.every_steps=7": lambda c: c.planning.checkpoint.every_steps == 7,
    "export.golden_prompts=[a=b, '1']": lambda c: c.export.golden_prompts == ("a=b", "1"),
    "dataset=corpus": lambda c: c.dataset == "corpus",
    "dataset=dataset/corpus@0123abcd": lambda c: c.dataset == "dataset/corpus@0123abcd",
    "dataset=nan": lambda c: c.dataset == "nan",
    "dataset=infinity": lambda c: c.dataset == "infinity",
    "deployment.endpoint=a": lambda c: c.deployment.endpoint == "a",
    "deployment={port: 8080}": lambda c: c.deployment.port == 8080,
}


@pytest.mark.parametrize("override", SETTINGS)
def test_one_setting_on_the_command_line(config, override):
    assert SETTINGS[override](config("dataset: x\n", override))


def test_the_command_line_wins_over_the_file_and_the_last_over_the_first(config):
    loaded = config("training: {steps: 100, seed: 7}\n", "training.steps=200", "training.steps=300")
    assert (loaded.training.steps, loaded.training.seed) == (300, 7)


BAD_OVERRIDES = {
    "training.steps": "is not of the form a.b=value",
    "=5": "is not of the form a.b=value",
    "training.steps=ten": "training.steps: Input should be a valid integer",
    "training.stps=10": "did you mean training.steps?",
    "training.steps.deep=1": "training.steps",
    "dataset.deep=1": "dataset is a value, and has no keys below it",
    "export.golden_prompts=[a": "--set 'export.golden_prompts=[a'",
    "dataset='a": "--set",
    "training.global_batch_size=6": "must be a multiple of",
    "training.learning_rate=nan": "training.learning_rate",
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_a_bad_setting_on_the_command_line_is_named(config, override):
    with pytest.raises(ValueError, match=r"not valid|--set") as error:
        config("dataset: x\n", override)
    assert BAD_OVERRIDES[override] in str(error.value)


CHECKS = [{"name": "speed", "measured": 1.0, "limit": ">= 4"}]
ERRORS = [
    (
        ModuleNotFoundError("No module named 'prefect'"),
        6,
        "ModuleNotFoundError",
        "Install what this needs: pip install -c constraints.txt -e '.[local]'. `headway doctor` names all of it.",
    ),
    (KeyError("missing"), 1, "KeyError", "This is a bug of Headway's: please report it with the lines above."),
    (HeadwayError("odd", remedy="Look."), 1, "HeadwayError", None),
    (ValueError("steps 0 must be above 0"), 2, "ValueError", ""),
    (Unknown("dataset/x is not there", remedy="List them."), 2, "Unknown", "List them."),
    (GateFailed("closed", stage="plan", checks=CHECKS, remedy="Add ranks."), 3, "GateFailed", "Add ranks."),
    (JobFailed("crashed", failure="timeout", folder="/job", remedy="Look."), 4, "JobFailed", "Look."),
    (IntegrityError("torn", problems=[{"path": "a"}], remedy="Restore."), 5, "IntegrityError", "Restore."),
    (Missing("no room", remedy="Free some."), 6, "Missing", "Free some."),
    (OSError(errno.ENOSPC, "No space left on device"), 6, "OSError", None),
    (OSError(errno.EROFS, "Read-only file system", "/home/x"), 6, "OSError", None),
    (PermissionError(errno.EACCES, "Permission denied", "/nowhere/x"), 6, "PermissionError", None),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/nowhere/x"), 6, "NotADirectoryError", None),
    (PermissionError(errno.EPERM, "Operation not permitted"), 1, "PermissionError", None),
    (FileNotFoundError(errno.ENOENT, "No such file", "/nowhere/x"), 1, "FileNotFoundError", None),
    (Cancelled("stopped"), 130, "Cancelled", ""),
    (KeyboardInterrupt(), 130, "KeyboardInterrupt", "Run the same command again to continue from where it stopped."),
]


@pytest.mark.parametrize(("error", "code", "kind", "remedy"), ERRORS, ids=[case[2] for case in ERRORS])
def test_each_error_has_its_exit_code_and_is_one_json_object(capsys, error, code, kind, remedy):
    assert say_error(error, as_json=True) == code == exit_code(error)
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert said.out.count("\n") == 1
    assert (value["schema"], value["exit_code"]) == ("headway/output/1", code)
    assert set(value["error"]) - {"problems"} == {"type", "stage", "message", "remedy", "checks"}
    assert value["error"]["type"] == kind
    assert value["error"]["message"]
    assert remedy in (None, value["error"]["remedy"])
    assert value["error"]["stage"] == ("plan" if kind == "GateFailed" else None)
    assert value["error"]["checks"] == (CHECKS if kind == "GateFailed" else [])
    assert value["error"].get("problems") == ([{"path": "a"}] if kind == "IntegrityError" else None)
    assert f"headway: {value['error']['message']}" in said.err
    assert (f"{kind}: " in said.err) == (code == 1)  # a bug is told with its traceback


def test_without_json_people_read_words_on_stderr_only(capsys):
    assert say_error(Missing("no room", remedy="Free some."), as_json=False) == 6
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "headway: no room\n  -> Free some.\n"


def test_a_command_that_failed_still_tells_what_it_knows(capsys):
    raised = CommandError(JobFailed("crashed", failure="timeout", folder="/job"), {"stages": [1]}, stage="train")
    assert say_error(raised, as_json=True) == 4
    value = json.loads(capsys.readouterr().out)
    assert value["stages"] == [1]
    assert (value["error"]["type"], value["error"]["stage"]) == ("JobFailed", "train")


def not_json(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_a_measured_value_that_is_not_a_number_is_still_json(capsys):
    checks = [{"name": "loss", "measured": math.nan, "limit": "<= 1"}, {"name": "x", "measured": math.inf, "limit": ""}]
    say_error(GateFailed("closed", stage="evaluate", checks=checks), as_json=True)
    value = json.loads(capsys.readouterr().out, parse_constant=not_json)
    assert [check["measured"] for check in value["error"]["checks"]] == [None, None]
    say({"metrics": {"loss": [math.nan, 1.0]}}, "", as_json=True)
    assert json.loads(capsys.readouterr().out, parse_constant=not_json)["metrics"] == {"loss": [None, 1.0]}


def test_success_is_one_object_or_words(capsys):
    say({"ref": "model/coder@1"}, "published", as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert value == {"schema": "headway/output/1", "exit_code": 0, "error": None, "ref": "model/coder@1"}
    say({"ref": "model/coder@1"}, "published", as_json=False)
    assert capsys.readouterr().out == "published\n"
    say({"ref": "model/coder@1"}, "", as_json=False)
    assert capsys.readouterr().out == ""


def test_the_file_for_prefect_deploy_is_that_of_the_catalogue():
    kept = (Path(__file__).parents[3] / "prefect.yaml").read_text()
    assert kept == as_prefect_yaml(PlatformConfig()), "run: headway deployments --prefect-yaml > prefect.yaml"


def test_nothing_at_all_is_empty_text_where_that_is_the_default(config):
    assert config("cluster:\n  image:\n", "cluster.ray.address=").cluster.ray.address == ""
    with pytest.raises(ValueError, match=r"cluster\.backend"):
        config("cluster:\n  backend:\n")


def test_a_range_of_nodes_is_an_elastic_job_and_no_time_of_day(config):
    """YAML 1.1 makes 68 of 1:8."""
    text = "cluster:\n  backend: slurm\n  nodes: 1:8\n  ranks_per_node: 1\n  elastic: {address: login-1}\n"
    text += "training: {micro_batch_size: 1, global_batch_size: 840}\n"
    found = config(text).cluster
    assert (found.nodes, found.elastic.min_nodes, found.elastic.max_nodes, found.elastic.address) == (
        1,
        1,
        8,
        "login-1",
    )
    assert config(text, "cluster.nodes=2:4").cluster.elastic.min_nodes == 2
    with pytest.raises(ValueError, match="local takes no elastic jobs"):
        config("cluster: {nodes: 1:8}")
    with pytest.raises(ValueError, match="min_nodes 4 must not be above max_nodes 2"):
        config("cluster: {backend: slurm, nodes: 4:2}")
    training = "training: {seed: 0x10, steps: 1_000, warmup_steps: 0, micro_batch_size: 2, global_batch_size: 12}"
    read = config(f"{training}\ncluster: {{backend: slurm, nodes: 3, ranks_per_node: 1}}")
    assert (read.training.seed, read.training.steps, read.cluster.nodes, read.cluster.elastic) == (16, 1000, 3, None)


@pytest.mark.parametrize(
    "line",
    [
        "0 3 * * 5L",
        "0 3 * * * *",
        "0 3 * *",
        "@daily",
        "0 25 * * *",
        "0 3 LW * *",
        "R 3 * * *",
        "R/5 * * * *",
        "H 3 * * *",
        "",
    ],
)
def test_a_cron_line_that_prefect_reads_otherwise_or_not_at_all_is_refused(line):
    with pytest.raises(ValueError, match="not a cron line of five fields"):
        ScheduleConfig(deployment="retrain/tiny", cron=line)


@pytest.mark.parametrize(("line", "said"), [("0 0 30 2 *", "never comes"), ("0 0 31 4 *", "never comes")])
def test_a_cron_line_that_never_comes_is_refused(line, said):
    with pytest.raises(ValueError, match=said):
        ScheduleConfig(deployment="retrain/tiny", cron=line)


@pytest.mark.parametrize(
    "line", ["0 3 * * 1", "*/5 0-6,22 * * *", "0 3 * jan sun", "0 3 L * *", "0 3 * * L5", "0 3 * * 1#2"]
)
@pytest.mark.integration
def test_a_cron_line_that_is_accepted_is_one_of_prefects(line):
    from prefect.client.schemas.schedules import CronSchedule

    assert CronSchedule(cron=ScheduleConfig(deployment="retrain/tiny", cron=line).cron).cron == line


@pytest.mark.parametrize("zone", ["Mars/Olympus", "europe/berlin", "localtime", "", "../UTC"])
def test_what_is_no_time_zone_of_prefects_is_refused(zone):
    with pytest.raises(ValueError, match="not a time zone"):
        ScheduleConfig(deployment="retrain/tiny", cron="0 3 * * 1", timezone=zone)


def test_kept_settings_that_somebody_broke_by_hand_change_nothing_for_what_runs(tmp_path):
    before = PlatformConfig(parallel_runs=2)
    assert current_settings(tmp_path, before) == PlatformConfig()
    kept(tmp_path).write_text("parallel_runs: [")
    assert current_settings(tmp_path, before) is before


def test_doctor_sees_that_the_worker_cannot_write_its_temporary_files(tmp_path):
    def worker():
        return next(finding for finding in examine(tmp_path) if finding.name == "worker")

    assert worker().ok
    place = tmp_path / "platform" / "worker" / "tmp"
    place.rmdir()
    place.write_text("somebody else's")
    assert not worker().ok
    assert str(place) in worker().said
