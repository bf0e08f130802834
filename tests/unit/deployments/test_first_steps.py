"""What a newcomer meets: `headway` alone, `headway init`, and the lines that a run moves on a terminal."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.init import NEUTRAL, SIZES
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


def proposed(home, desk):
    return [line.strip() for line in overview(home, desk) if line.startswith("    headway ")]


@pytest.mark.parametrize(
    "dataset, configuration, command",
    [
        ("python-stdlib", None, "headway retrain"),
        ("tiny", None, "headway retrain -c tiny"),
        ("mine", None, "headway retrain --dataset mine"),
        ("mine", "dataset: mine", "headway retrain -c headway.yaml"),
    ],
)
def test_the_training_that_is_proposed_is_of_the_dataset_that_was_published(desk, dataset, configuration, command):
    home = desk / ".headway"
    (home / "store" / "artifacts" / "dataset" / dataset).mkdir(parents=True)
    if configuration:
        (desk / "headway.yaml").write_text(configuration)
    assert proposed(home, desk)[0] == command


def test_a_configuration_whose_dataset_nobody_published_is_first_given_it(desk):
    home = desk / ".headway"
    (home / "store" / "artifacts" / "dataset" / "other").mkdir(parents=True)
    (desk / "headway.yaml").write_text("dataset: mine")
    assert proposed(home, desk)[:2] == ["headway dataset publish mine PATH", "headway retrain -c headway.yaml"]


def test_after_ctrl_c_the_same_command_comes_first_and_then_what_was_left_running(desk):
    folder = desk / ".headway" / "runs" / "a"
    folder.mkdir(parents=True)
    command = "headway retrain -c mine.yaml"
    handle = {
        "pid": 1,
        "started": 0,
        "boot_id": "",
        "flow": "retrain",
        "subject": "mine",
        "host": "h",
        "command": command,
    }
    (folder / "handle.json").write_text(json.dumps(handle))
    events = [{"event": "opened", "time": 1.0}, {"event": "closed", "time": 2.0, "status": "cancelled"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    assert proposed(desk / ".headway", desk)[:2] == [command, "headway jobs"]


@pytest.mark.parametrize(
    "flow, subject, dataset, command",
    [
        ("retrain", "tiny", "dataset/tiny@" + "a" * 64, "headway retrain -c tiny"),
        ("retrain", "tiny", "dataset/mine@" + "a" * 64, "headway retrain -c tiny --dataset mine"),
        ("retrain", "python-coder", "dataset/mine@" + "a" * 64, "headway retrain --dataset mine"),
        ("validate", "mine", None, "headway validate mine"),
        ("qualify", "local", None, "headway qualify"),
    ],
)
def test_a_run_that_stopped_is_continued_by_a_command_with_its_configuration_and_dataset(
    desk, flow, subject, dataset, command
):
    folder = desk / ".headway" / "runs" / "a"
    folder.mkdir(parents=True)
    handle = {"pid": 1, "started": 0, "boot_id": "", "flow": flow, "subject": subject, "host": "h"}
    (folder / "handle.json").write_text(json.dumps(handle))
    events = [
        {"event": "opened", "time": 1.0},
        {"event": "closed", "time": 2.0, "status": "failed", "dataset": dataset},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    assert proposed(desk / ".headway", desk)[1] == command


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


@pytest.mark.parametrize("size", SIZES)
def test_golden_prompts_are_of_the_data_where_it_is_at_hand_and_else_of_no_kind(desk, size):
    (desk / "tales").mkdir()
    (desk / "tales" / "one.txt").write_text('Once: "upon a time" there was a miller who had three sons.')
    (desk / "tales" / "two.txt").write_text("In olden times, when wishing still helped one, there lived a king.")
    expected = ('Once: "upon a time" there was', "In olden times, when wishing")
    assert run("init", "a.yaml", "--yes", "--size", size, "--data", "tales").exit_code == 0
    assert load("a.yaml", []).export.golden_prompts == expected
    assert run("init", "b.yaml", "--yes", "--size", size, "--data", "nowhere").exit_code == 0
    assert load("b.yaml", []).export.golden_prompts == NEUTRAL
    published = desk / ".headway" / "store" / "artifacts" / "dataset" / "nowhere" / ("a" * 64) / "files"
    published.parent.mkdir(parents=True)
    (desk / "tales").rename(published)
    assert run("init", "c.yaml", "--yes", "--size", size, "--data", "nowhere").exit_code == 0
    assert load("c.yaml", []).export.golden_prompts == expected
    assert run("init", "d.yaml", "--yes", "--size", size, "--data", "python-stdlib").exit_code == 0
    assert "def " in load("d.yaml", []).export.golden_prompts


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


def test_a_bar_that_is_full_says_for_how_long_the_job_has_been_finishing(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("deployments.cli.progress.time", clock)
    progress = Progress(Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None))
    shown = []
    for now, done, text in ((100, 59, "loss 3.2"), (101, 60, "loss 3.1"), (113, 60, "saving the last checkpoint")):
        clock.monotonic = lambda now=now: float(now)
        progress.progress("train", done, 60, text, 0.0)
        shown.append(progress.view().renderables[0].plain)
    assert "finishing" not in shown[0] + shown[1]
    assert "100%" in shown[2] and shown[2].endswith("finishing for 12 s  saving the last checkpoint")


def test_a_stage_of_several_parts_has_the_time_left_of_its_present_part(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("deployments.cli.progress.time", clock)
    progress = Progress(Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None))
    progress.began = progress._part = 100.0
    lines = []
    for now, done, left in ((160, 75, None), (160, 0, None), (164, 20, None), (164, 40, 9.0)):
        clock.monotonic = lambda now=now: float(now)
        progress.progress("evaluate", done, 100, "windows", left)
        lines.append(progress.view().renderables[0].plain)
    assert "75%  60 s  about 20 s left  windows" in lines[0]
    assert "20%  64 s  about 16 s left of this part  windows" in lines[2]
    assert "about 9 s left of this part" in lines[3]  # the job knows better


def test_a_log_hears_of_a_stage_that_says_nothing(monkeypatch):
    monkeypatch.setattr("deployments.cli.progress.LINE_EVERY_SECONDS", 0.0)
    text = io.StringIO()
    progress = Progress(Console(file=text, width=80))
    progress.started("evaluate", None)
    while not text.getvalue():  # within the test's time limit
        pass
    progress.quiet()
    assert text.getvalue().startswith("  evaluate") and "\x1b" not in text.getvalue()
