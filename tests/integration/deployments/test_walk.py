"""The walk of a new user: each stumble of the first walk, tried again as it was, here or in the tests that `WALK` names."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from azure.identity import CredentialUnavailableError
from prefect.client.schemas.objects import CreatedBy, FlowRun
from prefect.context import FlowRunContext
from rich.console import Console
from waiting import limit

from deployments.cli.data.judging import checks_table
from deployments.services import mlflow_server, prefect_server
from flows.support.inputs import content_of
from flows.support.prefect_run import named
from tasks.azure.arm_client import explain as explain_workspace
from tasks.common import process
from tasks.config.backends.azureml import AzureMlConfig
from tasks.config.evaluation import EvaluationConfig
from tasks.report.data import Edge, Lineage, Node
from tasks.report.lineage import lineage_graph
from tasks.storage.blob.faults import explain as explain_store

PAGE_WIDTH = 1128 - 2 * 24 - 2 * 22
"""Of what is in a section of a page, in px: tasks/report/templates/page.css."""
AZURE = ("-c", "tiny", "-c", "azureml")
TESTS = Path(__file__).parents[2]
HERE = "integration/deployments/test_walk.py"
RETRAIN = "integration/flows/test_retrain.py"
WALK = {
    "a failed login leaves a ghost job": (
        "integration/tasks/compute/test_jobs_book.py::test_a_job_that_was_never_accepted_is_closed_and_submitted_anew",
        "integration/tasks/compute/test_jobs_book.py::test_a_scheduler_that_does_not_answer_is_told_with_its_reason",
    ),
    "a missing azure package ends even `headway doctor`": (
        f"{HERE}::test_a_missing_package_is_a_finding_with_the_extra_that_brings_it",
    ),
    "a missing Azure CLI is told as `Sign in again`": (
        f"{HERE}::test_a_missing_azure_cli_is_not_told_to_sign_in_again",
    ),
    "placeholders are not refused by name": (
        f"{HERE}::test_placeholders_are_refused_by_name_before_anything_is_spent",
    ),
    "`up --port N` with the platform up ignores the port": (
        f"{HERE}::test_a_platform_that_runs_is_not_asked_for_another_port",
    ),
    "links without their login": (
        "integration/deployments/test_platform.py::test_the_login_is_shown_once_and_asked_for_everywhere",
        f"{RETRAIN}::test_a_run_ends_with_samples_of_its_corpus_and_the_login_behind_its_page",
        f"{HERE}::test_whoever_prints_an_address_of_prefects_page_prints_where_its_login_is",
    ),
    "`status` takes 5 to 14 s": (f"{HERE}::test_a_look_at_the_platform_imports_no_client_and_no_judge",),
    "a dry run at a closed gate hides the table": (
        f"{RETRAIN}::test_a_dry_run_at_a_closed_gate_shows_its_table_and_its_stages",
    ),
    "`validate` of broken input prints a line twice": (
        "integration/deployments/test_validate_command.py::test_of_a_broken_line_people_read_once_what_is_wrong_and_where",
    ),
    "`character 13 of 12`": (
        "unit/tasks/data/corpus/test_bad_input.py::test_a_bad_line_is_named_by_shard_and_number_and_its_neighbours_are_read",
    ),
    "`validate` cuts its table": (f"{HERE}::test_the_table_of_checks_is_whole",),
    "`deployments` lacks a space": (f"{HERE}::test_the_names_of_deployments_stand_apart_from_their_descriptions",),
    "`doctor` cuts references": (
        f"{RETRAIN}::test_doctor_and_verify_name_the_model_so_that_it_is_found_and_its_signature",
    ),
    "the lineage drawing cuts off its last box": (f"{HERE}::test_the_drawing_of_a_whole_lifecycle_fits_a_page",),
    "`dataset publish` takes what is no text": (f"{HERE}::test_what_is_no_text_is_refused_when_it_is_published",),
    "`retrain` asks for another dataset than was published": (
        f"{HERE}::test_a_retrain_without_its_dataset_names_the_option_that_takes_another",
    ),
    "a mistyped metric costs a training": (
        "unit/tasks/evaluation/test_gate_rules.py::test_a_rule_on_what_nothing_measures_is_refused_with_the_configuration",
    ),
    "a suite that is added does nothing": (f"{HERE}::test_suites_count_by_what_is_in_their_files",),
    "`No artifact yet` names no home": (f"{HERE}::test_who_finds_nothing_is_told_where_it_was_looked_for",),
    "`verify` never speaks of the signature": (
        f"{RETRAIN}::test_doctor_and_verify_name_the_model_so_that_it_is_found_and_its_signature",
    ),
    "the form's run name is replaced": (f"{HERE}::test_a_name_that_a_person_may_have_written_into_the_form_stays",),
    "`job render` has no `--to`, and no network in compute.yml": (
        f"{HERE}::test_what_a_job_would_be_is_written_into_a_folder",
    ),
    "the served API wants the full reference": (
        "integration/tasks/jobs/exporting/test_export_serve.py::test_a_model_answers_to_its_stable_name_and_says_its_version",
    ),
    "unknown paths are not answered in OpenAI's form": (
        "integration/tasks/jobs/exporting/test_export_serve.py::"
        "test_an_unknown_path_is_answered_in_openais_form_with_what_there_is",
    ),
    "MLflow opens in its mode for agents": (
        "integration/tasks/lineage/test_lineage_publish.py::test_the_page_of_a_run_is_that_of_the_server_that_shows_it",
        "integration/deployments/test_platform.py::test_the_login_is_shown_once_and_asked_for_everywhere",
    ),
    "Prefect's two pages": (
        "integration/deployments/test_platform.py::"
        "test_the_address_without_a_path_is_of_the_page_that_links_to_runs_lead_to",
    ),
}
"""Each item of the list that the first walk ended with, and the tests that try it again."""


def test_each_item_of_the_walk_is_tried_by_tests_that_there_are():
    missing = []
    for test in itertools.chain(*WALK.values()):
        file, _, name = test.partition("::")
        found = re.search(rf"^((?:@.*\n(?:[ )\]].*\n)*)*)def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
        if not found or re.search(r"^@pytest\.mark\.(long|soak)", found[1], re.MULTILINE):
            missing.append(test)
    assert missing == []


def words(home, *command):
    """What a person reads: stdout, stderr, exit code."""
    ran = subprocess.run(
        home.command(*command),
        env=home.environment(),
        cwd=home.path.parent,
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    return ran.stdout, ran.stderr, ran.returncode


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number} of mine"}) + "\n" for number in range(30)))
    return path


def test_what_is_no_text_is_refused_when_it_is_published(fresh, tmp_path):
    broken, other = tmp_path / "broken.jsonl", tmp_path / "other.jsonl"
    broken.write_text('{"text": "a"}\n{"text": "b"\n')
    other.write_text('{"content": "a"}\n')
    for path, place, reason in ((broken, "line 2", "not a JSON line"), (other, "line 1", "no text in field 'text'")):
        ran = fresh.run("dataset", "publish", "mine", path)
        message = ran.said["error"]["message"]
        assert ran.code == 2 and all(part in message for part in (str(path), place, reason, "validation.text_field"))
    assert fresh.ok("dataset", "list").said["datasets"] == []
    assert fresh.ok("dataset", "publish", "mine", other, "--text-field", "content").said["documents"] == 1


def test_a_retrain_without_its_dataset_names_the_option_that_takes_another(fresh, corpus):
    assert "headway dataset publish" in fresh.run("retrain").said["error"]["remedy"]
    fresh.ok("dataset", "publish", "mine", corpus)
    for command in (("retrain",), ("retrain", "--dry-run"), ("retrain", "-c", "tiny", "--dataset", "min")):
        ran = fresh.run(*command)
        assert ran.code == 2 and "--dataset mine" in ran.said["error"]["remedy"], command
    assert not (fresh.path / "prefect").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("artifacts",), ("artifacts", "model"), ("models",), ("jobs",), ("jobs", "--all"), ("reconcile",), ("endpoint", "list"),
        ("dataset", "list"), ("events",), ("approve",), ("audit-log",), ("audit-log", "--access"), ("trust", "list"),
        ("rightsize",), ("seeds",), ("scaling",),
    ],
)  # fmt: skip
def test_who_finds_nothing_is_told_where_it_was_looked_for(fresh, command):
    out, err, code = words(fresh, *command)
    assert code in (0, 6) and str(fresh.path) in out + err, (out, err)


def test_placeholders_are_refused_by_name_before_anything_is_spent(fresh, corpus):
    fresh.ok("dataset", "publish", "tiny", corpus)
    ran = fresh.run("retrain", *AZURE)
    names = ("subscription_id", "resource_group", "workspace", "compute")
    assert ran.code == 2 and all(f"cluster.azureml.{name}" in ran.said["error"]["message"] for name in names)
    assert "cluster.image (my-registry" in ran.said["error"]["message"]
    assert fresh.ok("jobs", "--all").said["jobs"] == []
    finding = next(one for one in fresh.run("doctor", *AZURE).said["findings"] if one["name"] == "azureml settings")
    assert not finding["ok"] and "cluster.azureml.workspace (my-workspace)" in finding["said"]


@pytest.mark.parametrize("package", [pytest.param("azure.mgmt", marks=pytest.mark.long), "azure.ai"])
def test_a_missing_package_is_a_finding_with_the_extra_that_brings_it(fresh, tmp_path, package):
    own = tmp_path / "own.yaml"
    own.write_text("cluster: {image: i, azureml: {subscription_id: s, resource_group: g, workspace: w, compute: c}}\n")
    hide = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({package!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
from deployments.cli.main import run
sys.argv = ["headway", "doctor", "-c", "azureml", "-c", {str(own)!r}, "--json"]
run()
"""
    ran = subprocess.run(
        [sys.executable, "-c", hide],
        env=fresh.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    findings = {one["name"]: one for one in json.loads(ran.stdout)["findings"]}
    assert ran.returncode == 6, ran.stderr
    assert {"python", "home", "store", "worker"} <= findings.keys()
    bad = [one for name, one in findings.items() if name.startswith(("backend", "azureml")) and not one["ok"]]
    assert bad and all("Sign in" not in one["remedy"] for one in bad)


def test_a_missing_azure_cli_is_not_told_to_sign_in_again():
    error = CredentialUnavailableError(message="Azure CLI not found on path")
    assert "Install the Azure CLI" in explain_store(error, "az://account/models", "cli").remedy
    assert "Install the Azure CLI" in explain_workspace(error, AzureMlConfig(workspace="w")).remedy
    gone = CredentialUnavailableError(message="Please run 'az login' to set up an account")
    assert "Sign in again" in explain_store(gone, "az://account/models", "cli").remedy


def test_a_platform_that_runs_is_not_asked_for_another_port(tmp_path, monkeypatch):
    for folder in (tmp_path / "prefect", tmp_path / "platform" / "mlflow"):
        folder.mkdir(parents=True)
        (folder / "server.json").write_text(
            json.dumps({"url": "http://127.0.0.1:4321", "port": 4321, "folder": str(folder)})
        )
        me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
        (folder / "handle.json").write_text(json.dumps(me))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for ask in (prefect_server.prepare, mlflow_server.start):
        with pytest.raises(ValueError, match="runs on port 4321, which port 4322 cannot change.*headway down"):
            ask(tmp_path, 4322)
    assert mlflow_server.start(tmp_path, 4321)["port"] == 4321


def test_a_dry_run_names_a_port_of_the_endpoint_that_another_program_has(fresh):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ("retrain", "-c", "tiny", "--dry-run", "--set", f"deployment.port={port}")
        _, error, code = words(fresh, *command)
        assert code == 2 and f"port {port} of 127.0.0.1 cannot be used" in error and "deployment.port" in error
        _, error, _ = words(fresh, *command, "--to", "train")
        assert str(port) not in error


def test_the_names_of_deployments_stand_apart_from_their_descriptions(fresh):
    out, _, code = words(fresh, "deployments")
    names = {one["full_name"]: one["description"] for one in fresh.ok("deployments").said["deployments"]}
    assert code == 0 and all(f"{name}  " in out and f"{name}{text}" not in out for name, text in names.items())


def test_the_rights_of_a_configuration_are_printed_and_nobody_is_asked(fresh, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "cluster: {image: acme.azurecr.io/c:1, azureml: {subscription_id: s, resource_group: g, workspace: w, compute: c}}\n"
    )
    fresh.path.mkdir()
    store = {"uri": "az://account/models/team", "credential": "managed_identity"}
    (fresh.path / "stores.yaml").write_text(yaml.safe_dump({"use": "team", "stores": {"team": store}}))
    own = ("-c", tmp_path / "mine.yaml", "--rights")
    roles = [(one["who"], one["role"]) for one in fresh.ok("doctor", *AZURE, *own).said["rights"]]
    assert ("CLUSTER_PRINCIPAL", "AcrPull") in roles and len(roles) == 4
    for words, said in (
        ((*AZURE, "--rights"), "cluster.azureml.workspace (my-workspace)"),
        (("-c", "tiny", "--rights"), "cluster.backend azureml"),
        ((*AZURE, *own, "--set", "cluster.azureml.store=local"), "the store local is not on Azure Blob"),
    ):
        ran = fresh.run("doctor", *words)
        assert ran.code == 2 and said in ran.said["error"]["message"], words


def test_what_a_job_would_be_is_written_into_a_folder(fresh, tmp_path):
    own = ("--set", "cluster.azureml.size=Standard_D4s_v3", "--set", "cluster.azureml.subnet=inner",
           "--set", "cluster.azureml.vnet=net", "--set", "cluster.azureml.max_nodes=7",
           "--set", "cluster.azureml.public_address=false")  # fmt: skip
    fresh.path.mkdir()
    store = {"uri": "az://account/models/team", "credential": "managed_identity"}
    (fresh.path / "stores.yaml").write_text(yaml.safe_dump({"use": "local", "stores": {"team": store}}))
    out = tmp_path / "rendered"
    fresh.ok("job", "render", *AZURE, *own, "--set", "cluster.azureml.store=team", "--to", out)
    cluster = yaml.safe_load((out / "compute.yml").read_text())
    assert cluster["max_instances"] == 7 and cluster["enable_node_public_ip"] is False
    assert cluster["network_settings"] == {"vnet_name": "net", "subnet": "inner"}
    assert {"job.yml", "job.json", "request.json"} <= {file.name for file in out.iterdir()}


def test_what_a_job_would_be_names_the_placeholders_that_are_left_and_gpus_that_would_stand_idle(fresh):
    fresh.path.mkdir()
    store = {"uri": "az://account/models/team", "credential": "managed_identity"}
    (fresh.path / "stores.yaml").write_text(yaml.safe_dump({"use": "local", "stores": {"team": store}}))
    own = ("--set", "cluster.azureml.store=team", "--set", "cluster.azureml.compute=<my cluster>",
           "--set", "cluster.azureml.size=Standard_ND96isr_H100_v5", "--set", "cluster.gpus_per_node=4")  # fmt: skip
    out, error, code = words(fresh, "job", "render", *AZURE, *own)
    assert code == 0 and "cluster.gpus_per_node is 4, and a Standard_ND96isr_H100_v5 has 8 GPUs" in error
    for left in ("cluster.azureml.workspace (my-workspace)", "cluster.azureml.compute (<my cluster>)"):
        assert f"# a placeholder, to change before you submit: {left}" in out
    _, error, code = words(fresh, "job", "render", *AZURE, *own[:-1], "cluster.gpus_per_node=16")
    assert code == 2 and "gpus_per_node is 16, and a Standard_ND96isr_H100_v5 has 8 GPUs: set " in error


def test_the_drawing_of_a_whole_lifecycle_fits_a_page():
    kinds = (
        "dataset",
        "validation",
        "dataset",
        "tokens",
        "plan",
        "checkpoint",
        "evaluation",
        "checkpoint",
        "model",
        "model",
        "endpoint",
    )
    nodes = [Node(ref=f"{kind}/{number}", kind=kind, name="tiny") for number, kind in enumerate(kinds)]
    edges = [Edge(input=a.ref, output=b.ref, how="made from") for a, b in itertools.pairwise(nodes)]
    drawing = str(lineage_graph(Lineage(nodes=tuple(nodes), edges=tuple(edges))))
    assert float(re.search(r"min-width:([0-9.]+)px", drawing)[1]) <= PAGE_WIDTH


def test_suites_count_by_what_is_in_their_files(tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("{}\n")
    config = EvaluationConfig.model_validate({"code": {"problems": str(problems)}})
    assert content_of(EvaluationConfig().paths) is None, "records of settings without suites keep their keys"
    before = content_of(config.paths)
    assert before and content_of(config.paths) == before == content_of([str(tmp_path)])
    problems.write_text("{}\n{}\n")
    assert content_of(config.paths) not in (before, None)


def test_a_look_at_the_platform_imports_no_client_and_no_judge():
    """They took two thirds of the time of `headway status`."""
    program = "import sys, deployments.platform.state; print(*{'prefect', 'httpx', 'numpy'} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=limit(120), check=True
    )
    assert ran.stdout.strip() == ""


def test_whoever_prints_an_address_of_prefects_page_prints_where_its_login_is(fresh):
    """Of a run that waits for a person; only its files are needed."""
    run, server = fresh.path / "runs" / str(uuid4()), "http://127.0.0.1:9"
    run.mkdir(parents=True)
    page = f"{server}/runs/flow-run/{run.name}"
    flow_run = {"id": run.name, "url": page}
    (run / "handle.json").write_text(
        json.dumps({"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id(),
                    "flow": "retrain", "subject": "tiny", "host": "h", "flow_run": flow_run})
    )  # fmt: skip
    waits = {"event": "waiting", "time": 2.0, "for": "approval", "question": "Deploy?", "since": 2.0, "key": "deploy"}
    (run / "events.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in ({"event": "opened", "time": 1.0}, waits))
    )
    out, err, _ = words(fresh, "approve")
    (line,) = [line for line in out.splitlines() if page in line]
    assert line.endswith(f"(login: {fresh.path / 'prefect' / 'credentials'})"), err


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_table_of_checks_is_whole(width):
    check = {"name": "near duplicates of held-out benchmarks", "outcome": "failed", "measured": 0.25, "count": 123456,
             "limit": "<= 5.00% of documents in the whole corpus", "samples": ["a.jsonl:21: repeats a.jsonl:4"]}  # fmt: skip
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(checks_table({"checks": [check], "accepted": None, "quarantined": "quarantine/mine@" + "a" * 64}))
    shown = captured.get()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    for word in " ".join(
        [check["name"], check["limit"], "failed 25.00% 123456", "quarantine/mine@aaaaaaaaaaaa"]
    ).split():
        assert word in shown.split(), word


@pytest.mark.parametrize(
    ("given", "made", "shown"),
    [
        ("brave-otter", {"deployment_id": uuid4()}, "tiny 2026-11-28 03:04 brave-otter"),
        ("Lower rate, 3rd try", {"deployment_id": uuid4()}, "Lower rate, 3rd try"),
        ("lower-rate-again", {"deployment_id": uuid4()}, "lower-rate-again"),
        ("omega248-edasich-point", {"deployment_id": uuid4()}, "tiny 2026-11-28 03:04 omega248-edasich-point"),
        ("Sleek-Koala", {"deployment_id": uuid4()}, "tiny 2026-11-28 03:04 Sleek-Koala"),
        ("brave-otter", {"deployment_id": uuid4(), "idempotency_key": "by headway run"}, "tiny 2026-11-28 03:04"),
        *(
            ("brave-otter", {"deployment_id": uuid4(), "created_by": CreatedBy(id=uuid4(), type=kind, display_value="x")},
             "tiny 2026-11-28 03:04")
            for kind in ("SCHEDULE", "AUTOMATION")
        ),
        ("brave-otter", {}, "tiny 2026-11-28 03:04"),
    ],
)  # fmt: skip
def test_a_name_that_a_person_may_have_written_into_the_form_stays(given, made, shown):
    planned = datetime(2026, 11, 28, 3, 4).astimezone(UTC)
    run = FlowRun(flow_id=uuid4(), name=given, expected_start_time=planned, **made)
    with FlowRunContext.model_construct(flow_run=run):
        assert named("tiny") == shown
