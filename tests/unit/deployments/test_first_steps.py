"""What a newcomer meets: `headway` alone, `headway init`, and the lines that a run moves on a terminal."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.init import SIZES
from deployments.cli.main import app
from deployments.cli.overview import overview
from deployments.cli.progress import LEVELS, Progress, curve
from tasks.config.files import load, load_cluster, places, presets
from tasks.storage import open_store

pytestmark = pytest.mark.unit


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty folder to work in, whose home nobody made yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_HOME", raising=False)
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, words, catch_exceptions=True)


def test_an_empty_home_is_shown_its_first_three_commands(desk):
    lines = run().stdout.splitlines()
    commands = [line.strip() for line in lines if line.startswith("    headway ")]
    assert lines[0] == f"Home      {desk / '.headway'} (not made yet)" and "Platform  not up" in lines
    assert [words.split()[1] for words in commands] == ["init", "dataset", "retrain"]
    assert not (desk / ".headway").exists()


def test_a_home_says_what_ran_last_and_what_is_served(desk):
    home = desk / ".headway"
    (home / "runs" / "a").mkdir(parents=True)
    handle = {"pid": 1, "started": 0, "boot_id": "", "flow": "retrain", "subject": "mine", "host": "h"}
    (home / "runs" / "a" / "handle.json").write_text(json.dumps(handle))
    events = [
        {"event": "opened", "time": 1.0},
        {"event": "closed", "time": 2.0, "status": "gate_closed", "report": "/r.html"},
    ]
    (home / "runs" / "a" / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (home / "store" / "artifacts" / "dataset" / "mine").mkdir(parents=True)
    store = open_store(home)
    store.create("refs/mine/champion.json", json.dumps({"target": "model/mine@" + "b" * 64}).encode())
    (home / "endpoints" / "mine").mkdir(parents=True)
    (home / "endpoints" / "mine" / "endpoint.json").write_text(
        json.dumps({"url": "http://x", "model_ref": "model/mine@" + "a" * 64})
    )
    (desk / "headway.yaml").write_text("dataset: mine")
    text = "\n".join(overview(home, desk))
    assert "retrain of mine: gate closed, started " in text and text.count("/r.html") == 1
    assert "mine: model/mine@aaaaaaaaaaaa  stopped" in text and "Champion  model/mine@bbbbbbbbbbbb" in text
    assert "headway retrain -c headway.yaml" in text and "headway init" not in text


def test_every_size_stands_for_a_shipped_configuration():
    assert sorted(SIZES.values()) == presets()


@pytest.mark.parametrize("where", ["local", *places()])
@pytest.mark.parametrize("size", SIZES)
def test_what_init_writes_is_a_configuration_with_comments(desk, size, where):
    made = run("init", "--yes", "--size", size, "--where", where, "--data", "mine")
    if load_cluster(where, []).gpus_per_node and size != "medium":
        assert (
            "global_batch_size 8 must be a multiple of" in str(made.exception) and not (desk / "headway.yaml").exists()
        )
        return
    assert made.exit_code == 0
    text = (desk / "headway.yaml").read_text()
    config = load("headway.yaml", [])
    assert (config.dataset, config.training.model) == ("mine", "mine")
    there = load_cluster(where, [])
    assert (config.cluster.backend, config.cluster.size) == (there.backend, there.size)
    assert config.validation.text_field == config.preprocessing.text_field == "text"
    assert text.count("#") > 3 and max(map(len, text.splitlines())) <= 130


def test_init_takes_defaults_where_nobody_can_be_asked_and_names_the_next_commands(desk):
    fields = json.loads(run("init", "--json").stdout)
    assert (fields["dataset"], fields["where"], fields["size"]) == ("python-stdlib", "local", "small")
    assert fields["next"][-1] == "headway retrain -c headway.yaml"
    (desk / "My Notes").mkdir()
    fields = json.loads(run("init", "other.yaml", "--data", "My Notes", "--json").stdout)
    assert fields["dataset"] == "my-notes" and fields["next"][0] == "headway dataset publish my-notes 'My Notes'"


def test_init_overwrites_nothing(desk):
    (desk / "headway.yaml").write_text("mine")
    error = run("init", "--yes").exception
    assert isinstance(error, ValueError) and "headway.yaml exists" in str(error) and "OTHER.yaml" in str(error)
    assert (desk / "headway.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    "words, value, remedy",
    [
        (("--size", "huge"), "'huge'", "tiny, small, medium"),
        (("--where", "moon"), "'moon'", "local, azureml, azureml-cpu, azureml-nc-a100"),
        (("--data", "./nothing"), "./nothing", "the path of one, or the name of a dataset"),
        (("--data", "Bad Name"), "Bad Name", ""),
    ],
)
def test_a_bad_answer_is_named_with_its_remedy_and_nothing_is_written(desk, words, value, remedy):
    error = run("init", "--yes", *words).exception
    assert isinstance(error, ValueError) and value in str(error) and remedy in str(error)
    assert not (desk / "headway.yaml").exists()


def test_a_curve_of_losses_goes_from_the_highest_bar_to_the_lowest():
    drawn = curve([float(100 - k) for k in range(100)], 20)
    assert len(drawn) == 20 and drawn[0] == LEVELS[-1] and drawn[-1] == LEVELS[0]
    assert curve([3.0, 3.0], 20) == LEVELS[0] * 2


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_lines_that_move_are_cut_at_the_edge_of_the_terminal(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    progress = Progress(console)
    progress.progress("train", 30, 60, "loss 3.214, 4,000 tokens/s, held-out 2.100 bits per byte" * 3, 12.0)
    progress.measured("train", [{"step": k, "loss": 6 - k / 10} for k in range(30)] + [{"step": 30}])
    with console.capture() as captured:
        console.print(progress.view())
    lines = captured.get().splitlines()
    assert [line.split()[0] for line in lines] == ["train", "loss"] and all(len(line) <= width for line in lines)
    assert "50%" in lines[0] and lines[1].endswith("3.10")


def test_a_log_hears_of_a_stage_that_says_nothing(monkeypatch):
    monkeypatch.setattr("deployments.cli.progress.LINE_EVERY_SECONDS", 0.0)
    text = io.StringIO()
    progress = Progress(Console(file=text, width=80))
    progress.started("evaluate", None)
    while not text.getvalue():  # within the test's time limit
        pass
    progress.quiet()
    assert text.getvalue().startswith("  evaluate") and "\x1b" not in text.getvalue()
