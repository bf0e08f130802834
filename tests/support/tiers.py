"""The tiers of the tests, and what holds for them; a plugin of pytest that conftest.py loads. See docs/testing.md.

A test is `integration` unless its file or it itself is marked `unit` (no process, no socket: enforced here) or `e2e`. What is
marked `long` or `soak` as well is left out of `make test`, which says so at its end.
"""

from __future__ import annotations

import gc
import os
import platform
import runpy
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import waiting
from scheduling import scope_of

SUPPORT = Path(__file__).resolve().parent
TIERS = ("unit", "integration", "e2e")
LEFT_OUT = {"long": "make long", "soak": "make soak"}
SLOWEST = (  # files, and scopes of scheduling.py: benchmarks/suite.py measures which
    "done",
    "integration/deployments/test_states_and_events.py",
    "e2e/test_documentation.py",
    "integration/deployments/test_dispatch.py",
    "integration/tasks/compute/test_slurm.py",
    "integration/tasks/compute/test_slurm_elastic.py",
    "integration/deployments/test_dead_runs.py",
    "integration/deployments/test_arrivals.py",
    "integration/deployments/test_bridge.py",
    "integration/flows/test_old_home.py",
    "integration/tasks/jobs/serving/test_model_faults.py",
    "integration/tasks/serving/test_azureml_endpoints.py",
    "integration/tasks/compute/test_ray.py",
    "integration/tasks/serving/test_gateway.py",
    "integration/tasks/jobs/training/test_training_safety.py",
    "integration/tasks/compute/test_hang.py",
    "integration/tasks/jobs/node/test_mirror.py",
    "integration/tasks/jobs/node/test_node.py",
    "integration/tasks/jobs/serving_api/test_server_faults.py",
    "integration/deployments/test_suspended_runs.py",
    "integration/tasks/jobs/exporting/test_export_serve.py",
    "integration/deployments/test_schedules.py",
    "integration/tasks/storage/test_services.py",
    "integration/tasks/compute/test_azureml.py",
    "integration/tasks/lineage/test_load_model.py",
    "integration/tasks/serving/test_rollout.py",
    "integration/tasks/storage/test_local_store.py",
    "integration/tasks/jobs/checkpoint/test_mirrored.py",
    "integration/tasks/lineage/test_lineage_publish.py",
    "integration/tasks/compute/test_slurm_login.py",
    "integration/deployments/test_integrity_watch.py",
    "integration/deployments/test_notifications.py",
    "integration/deployments/test_webhook.py",
    "integration/test_azure_proof.py",
    "integration/tasks/jobs/training/test_training.py",
    "integration/tasks/test_validate.py",
    "integration/deployments/test_commands.py",
    "integration/deployments/test_validate_command.py",
    "integration/tasks/jobs/test_preprocess.py",
    "integration/tasks/jobs/qualify/test_skew.py",
    "integration/tasks/storage/test_faults.py",
    "integration/deployments/test_starting_points.py",
    "integration/tasks/storage/test_silence.py",
    "integration/tasks/jobs/training/test_training_deepspeed.py",
    "integration/tasks/jobs/serving/test_vllm.py",
    "integration/tasks/jobs/serving/test_serve_outputs.py",
    "integration/tasks/compute/test_connection.py",
    "integration/deployments/test_working_directory.py",
    "integration/deployments/test_platform.py",
    "integration/tasks/compute/test_supervisor.py",
    "integration/tasks/jobs/training/test_train_megatron.py",
    "integration/deployments/test_endpoint_rollback.py",
    "integration/deployments/test_senders.py",
    "integration/tasks/compute/test_ssh.py",
    "integration/flows/test_add_a_stage.py",
    "integration/tasks/storage/test_contract.py",
    "integration/tasks/jobs/evaluation/test_suites_files.py",
    "integration/tasks/registry/test_backup.py",
    "integration/tasks/jobs/qualify/test_collectives.py",
    "integration/tasks/storage/test_bad_input.py",
    "integration/tasks/jobs/serving_api/test_edge.py",
    "integration/tasks/jobs/training/test_training_faults.py",
    "integration/flows/test_continue_from.py",
    "integration/deployments/test_queues.py",
    "integration/flows/test_known_corpora.py",
    "integration/tasks/data/corpus/test_profile_job.py",
    "integration/tasks/jobs/serving_api/test_completions_options.py",
    "integration/tasks/serving/monitor/test_answer_watch.py",
    "integration/tasks/data/drift/test_corpora.py",
    "integration/tasks/data/tokenizing/test_run.py",
    "integration/deployments/test_walk.py",
)
FOLDER = pytest.StashKey[Path]()
FORBIDDEN = {
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "socket.bind": "opens a socket",
    "socket.connect": "opens a socket",
}
_guarded: list[str] = []
"""The unit test that runs now."""
_left_out: Counter[str] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """One folder a run, for what its tests share. Programs that they start are forked where they can be (fork_server.py)."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell's background job: what it starts would ignore Ctrl-C too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until everything is collected: thousands of modules and tests that stay
    worker = getattr(config, "workerinput", None)
    if worker is None:
        # Workers collect, and this process shares out what they found: else it puts files with many tests first, however long
        # they take.
        config.option.loadscopereorder = False
        folder = Path(tempfile.mkdtemp(prefix="headway-tests-"))
        (folder / "owner").write_text(str(os.getpid()))
        slower = waiting.measure()
        os.environ[waiting.SLOWER] = f"{slower:.2f}"
        if most := config.getini("timeout"):
            os.environ.setdefault("PYTEST_TIMEOUT", str(round(float(most) * slower)))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        if "TESTS_FORK_SERVER" not in os.environ:
            os.environ["TESTS_FORK_SERVER"] = str(folder)
            path = [str(SUPPORT / "forks"), *filter(None, [os.environ.get("PYTHONPATH")])]
            os.environ["PYTHONPATH"] = os.pathsep.join(path)
            if config.getoption("numprocesses", None) and config.option.markexpr != "unit":
                _start_fork_servers(folder)  # they import while the tests are collected
        name = "main"
    else:
        folder, name = Path(worker["headway_folder"]), worker["workerid"]
    config.stash[FOLDER] = folder
    os.environ["HEADWAY_HOME"] = str(folder / f"no-home-{name}")
    platform.processor()  # starts `uname` where it is first asked for, which would be a unit test
    sys.addaudithook(_heed)


def _start_fork_servers(folder):
    forks = runpy.run_path(str(SUPPORT / "forks" / "sitecustomize.py"))
    (folder / "workers.wanted").touch()  # the server of commands goes on to it
    for kind in sorted(set(forks["MODULES"].values())):
        forks["start_server"](str(folder / kind))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """What a worker is told."""
    node.workerinput["headway_folder"] = str(node.config.stash[FOLDER])


def pytest_ignore_collect(collection_path, config):
    """Where only unit tests are asked for, no other file is imported: the others import torch, Prefect and MLflow."""
    if config.option.markexpr == "unit" and collection_path.suffix == ".py":
        return "mark.unit" not in collection_path.read_text(encoding="utf-8") or None
    return None


def tier_of(item):
    """A test's own mark comes before its file's; what is left out of `make test` for its time is no unit test."""
    if any(map(item.get_closest_marker, LEFT_OUT)):
        return "integration"
    return next((mark.name for mark in item.iter_markers() if mark.name in TIERS), "integration")


def pytest_itemcollected(item):
    """A test that names a time limit of its own has it stretched as the one of all tests is."""
    if mark := item.get_closest_marker("timeout"):
        stretched = mark.args[0] * float(os.environ.get(waiting.SLOWER, "1"))
        item.add_marker(pytest.mark.timeout(stretched), append=False)
    if not any(map(item.get_closest_marker, TIERS)):
        item.add_marker("integration")


def pytest_collection_modifyitems(config, items):
    """The files that take longest come first, so that no worker begins one when the others have nothing left."""
    first = {name: place for place, name in enumerate(SLOWEST)}

    def place(item):
        scope = scope_of(item.nodeid.partition("::")[0])
        return first.get(scope.removeprefix("tests/"), len(first))

    items.sort(key=place)
    if config.option.markexpr == "unit":
        others = [item for item in items if tier_of(item) != "unit"]
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


def pytest_deselected(items):
    for item in items:
        for mark in LEFT_OUT:
            _left_out[mark] += item.get_closest_marker(mark) is not None


def _heed(event, arguments):
    if _guarded and event in FORBIDDEN:
        raise RuntimeError(f"a unit test {FORBIDDEN[event]} ({arguments[:2]}): mark {_guarded[0]} integration")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A unit test and what it asks for start no process and open no socket. What ends after it may be other tests'."""
    return (yield from _guarding(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _guarding(item))


def _guarding(item):
    _guarded[:] = [item.nodeid] * (tier_of(item) == "unit")
    try:
        return (yield)
    finally:
        _guarded.clear()


@pytest.fixture(autouse=True)
def _no_home():
    """A test hands a home to every process that it starts. This fails the one whose process used the default one."""
    yield
    home = Path(os.environ["HEADWAY_HOME"])
    if home.name.startswith("no-home-") and home.exists():
        held = sorted(path.name for path in home.iterdir())
        shutil.rmtree(home, ignore_errors=True)  # the process may still write there
        pytest.fail(
            f"this test, or one of its fixtures, gave a process no home of its own; it wrote {held}", pytrace=False
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Every worker collects everything: one of them is enough."""
    _left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - _left_out)


def pytest_terminal_summary(terminalreporter):
    for mark, command in LEFT_OUT.items():
        if _left_out[mark]:
            terminalreporter.line(f"left out: {_left_out[mark]} tests marked {mark}; `{command}` runs them")
