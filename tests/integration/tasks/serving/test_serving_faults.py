"""Faults 50 to 64, from the gate of an evaluation to a stopped server: which tests show what happens then, and some of them.

The numbers are those of docs/rollout.md, "Faults". Latency under overload needs cores of its own: benchmarks/overload.py.
"""

import ast
import json
import os
import time
from functools import cache
from pathlib import Path

import pytest
from endpoint_stand import BLUE, GREEN, Clients, Endpoint
from made_versions import make
from waiting import limit, until

from tasks.artifacts import Model
from tasks.common import process
from tasks.common.errors import GateFailed, IntegrityError
from tasks.config.flows import RetrainConfig
from tasks.config.serving import RolloutConfig
from tasks.jobs.serving.runtime import read_contents
from tasks.orchestration.promotion import challenge
from tasks.orchestration.run import lifecycle
from tasks.registry.refs import aliases
from tasks.security.signatures import sign
from tasks.security.trust import OWN, revoke_key
from tasks.serving.protocol.routes import read_routes
from tasks.serving.rollout import roll_out
from tasks.storage import open_store
from tasks.storage.manifest import describe

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[3]
GATE = "unit/tasks/evaluation/test_gate_rules.py"
PROMOTING = "integration/tasks/registry/test_promoting.py"
SIGNING = "integration/tasks/signing/test_signing.py"
ARCHIVES = "integration/tasks/test_archives.py"
EXPORT, EXPORTED, MODEL, SERVER = (
    f"integration/tasks/jobs/{name}.py"
    for name in (
        "exporting/test_export",
        "exporting/test_export_serve",
        "serving/test_model_faults",
        "serving_api/test_server_faults",
    )
)
GRAPH, HEADERS = "unit/tasks/formats/test_onnx_data.py", "integration/tasks/formats/test_safetensors_headers.py"
ROLLOUT, GATEWAY, AZURE, HERE = (
    f"integration/tasks/serving/test_{name}.py"
    for name in ("rollout", "gateway", "azureml_endpoints", "serving_faults")
)
FAULTS = {
    50: (
        "a metric is missing, NaN or tied",
        (GATE, "fault_50_a_metric_that_is_missing_closes_the_gate"),
        (GATE, "fault_50_a_metric_that_is_no_number_closes_the_gate"),
        (GATE, "fault_50_a_metric_that_nobody_measured_closes_the_gate"),
        (GATE, "fault_50_a_tie_of_nothing_closes_the_gate"),
        (GATE, "fault_50_documents_without_numbers_close_the_gate"),
    ),
    51: (
        "a graph reads data from elsewhere",
        (GRAPH, "data_is_found_wherever_the_graph_names_it"),
        (GRAPH, "only_a_plain_name_beside_the_graph_is_followed"),
        (GRAPH, "a_folder_with_links_or_foreign_data_is_refused_variants_too"),
        (EXPORTED, "data_outside_of_the_folder_is_refused"),
        (EXPORT, "a_server_does_not_load_a_graph_that_reads_elsewhere"),
    ),
    52: (
        "the exported model computes something else",
        (EXPORTED, "a_wrong_export_shows_in_the_parity_and_closes_the_gate"),
        (EXPORT, "a_model_that_is_another_one_or_slower_is_refused"),
    ),
    53: (
        "a model's files are changed",
        (SIGNING, "every_change_of_the_files_is_named"),
        (HERE, "of_a_folder_that_was_changed_nothing_is_loaded"),
        (MODEL, "a_changed_file_is_found_before_anything_is_loaded"),
        (MODEL, "a_file_changed_between_verification_and_load_is_not_loaded_and_found_at_the_next_start"),
        (SERVER, "changed_files_never_get_ready_and_are_not_tried_again"),
    ),
    54: (
        "no signature, or an unknown or revoked key",
        (HERE, "what_nobody_trusted_signed_is_not_registered"),
        (PROMOTING, "what_is_damaged_or_unsigned_is_not_promoted"),
        (PROMOTING, "what_another_or_a_revoked_key_signed_is_not_promoted"),
        ("integration/flows/test_signatures.py", "nothing_whose_signature_does_not_count_is_deployed"),
        (
            "integration/deployments/test_endpoint_rollback.py",
            "the_traffic_goes_back_in_seconds_with_a_reason_and_the_model_stays_away_until_it_is_promoted",
        ),
        (
            "integration/deployments/test_endpoint_rollback.py",
            "a_deploy_over_a_model_whose_key_was_revoked_goes_one_way",
        ),
        ("integration/flows/test_signatures.py", "a_checkpoint_that_is_not_signed_is_not_exported"),
    ),
    55: (
        "a crafted archive",
        (ARCHIVES, "no_archive_is_unpacked"),
        (ARCHIVES, "the_only_command_that_unpacks_is_for_our_own_code"),
    ),
    56: (
        "a crafted safetensors header",
        (HEADERS, "a_crafted_header_is_refused_at_once_and_in_little_memory"),
        (HEADERS, "the_library_that_loads_the_weights_refuses_them_too"),
    ),
    57: ("two promotions at once", (PROMOTING, "of_two_promotions_at_once_one_wins_and_the_other_is_told")),
    58: (
        "the new model does not start, or fails a golden prompt",
        (EXPORTED, "a_server_that_does_not_prove_itself_leaves_the_old_one_alone"),
        (MODEL, "a_wrong_answer_to_a_golden_prompt_makes_no_model_ready"),
        (AZURE, "a_deployment_that_does_not_come_up_reverts"),
        (AZURE, "a_model_that_does_not_answer_gets_no_traffic"),
    ),
    59: (
        "the new model is slow, or fails 20 % of its requests, at 10 %",
        (HERE, "a_model_that_turns_bad_at_ten_per_cent_loses_its_traffic_and_no_caller_notices"),
        (ROLLOUT, "a_bad_model_loses_its_traffic_within_30_seconds_and_no_caller_notices"),
        (GATEWAY, "a_green_that_plainly_fails_loses_its_share_without_any_deployer"),
        (AZURE, "a_model_that_breaks_under_traffic_loses_it"),
    ),
    60: (
        "the deployer dies in the middle",
        (ROLLOUT, "a_deployer_that_is_killed_at_a_step_is_finished_or_reverted_by_the_next_start"),
        (EXPORTED, "a_deploy_that_was_killed_is_healed_by_the_next"),
        (GATEWAY, "shares_whose_deployer_died_go_back_to_blue"),
        (
            GATEWAY,
            "a_client_says_neither_whose_request_it_is_nor_anything_to_the_private_port_and_bad_routes_are_not_followed",
        ),
        (
            "integration/deployments/test_endpoint_rollback.py",
            "who_died_in_the_middle_is_settled_by_the_next_start_of_the_platform",
        ),
        (AZURE, "a_deployer_that_is_killed_between_two_puts"),
    ),
    61: ("ten times too many requests", (SERVER, "fault_61_overload_is_refused_and_what_is_accepted_is_answered")),
    62: (
        "slow clients, huge bodies, bad or deep JSON",
        (SERVER, "fault_62_hostile_sockets_are_told_off_and_nobody_else_waits"),
        (SERVER, "fault_62_slow_clients_hold_no_place"),
    ),
    63: (
        "the model crashes in a request",
        (SERVER, "fault_63_a_segfault_is_answered_degraded_until_the_full_model_is_back"),
        (MODEL, "a_segfault_in_a_request_is_told_at_once_and_the_model_comes_back"),
    ),
    64: ("a stop under load", (SERVER, "fault_64_a_stop_under_load_finishes_what_was_begun")),
}


@cache
def functions_of(path):
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("number", sorted(FAULTS))
def test_every_fault_has_its_tests(number):
    for path, name in FAULTS[number][1:]:
        assert f"test_{name}" in functions_of(path)


def test_no_fault_is_left_out_and_the_page_names_them_alike():
    assert sorted(FAULTS) == list(range(50, 65))
    page = (TESTS.parent / "docs" / "rollout.md").read_text(encoding="utf-8").partition("## Faults")[2]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert {int(number[2:]): name for number, name, _ in rows} == {number: one[0] for number, one in FAULTS.items()}


# --- 53 and 54 -----------------------------------------------------------------------------------------------------------------


def add(path):
    def change(folder):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("payload")

    return change


def link(folder):
    (folder / "model.onnx").rename(folder.parent / "elsewhere")
    (folder / "model.onnx").symlink_to(folder.parent / "elsewhere")


CHANGES = {
    "a flipped bit": lambda folder: (folder / "model.onnx").write_bytes(b"graqh"),
    "a cut": lambda folder: os.truncate(folder / "model.onnx", 4),
    "missing": lambda folder: (folder / "config.json").unlink(),
    "one too many": add("model2.onnx"),
    "hidden": add(".hidden"),
    "below .git": add(".git/hook"),
    "below __pycache__": add("__pycache__/x.pyc"),
    "in a variant": lambda folder: (folder / "variants" / "model.onnx").write_bytes(b"graqh"),
    "a link": link,
    "a second name": lambda folder: os.link(folder / "model.onnx", folder.parent / "second-name"),
    "a pipe": lambda folder: os.mkfifo(folder / "pipe"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_of_a_folder_that_was_changed_nothing_is_loaded(tmp_path, change):
    """A server makes its model of the bytes that this hands out, and of no file."""
    folder = tmp_path / "model"
    (folder / "variants").mkdir(parents=True)
    for path in ("model.onnx", "config.json", "variants/model.onnx"):
        (folder / path).write_bytes(b"graph")
    files = describe(folder)
    assert set(read_contents(folder, files)) == {"model.onnx", "config.json"}
    change(folder)
    with pytest.raises(IntegrityError, match="are not what was deployed"):
        read_contents(folder, files)


def unsigned(store, home, model):
    """Nobody signs it."""


def by_another(store, home, model):
    sign(store, home.parent / "other", model)


def by_a_revoked_key(store, home, model):
    sign(store, home, model)
    revoke_key(home, OWN, "it leaked")


@pytest.mark.integration
@pytest.mark.parametrize("signed", [unsigned, by_another, by_a_revoked_key])
def test_what_nobody_trusted_signed_is_not_registered(tmp_path, monkeypatch, signed):
    home = tmp_path / "home"
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    store = open_store(home)
    made = [make(store, tmp_path / n, "model/tiny", {"onnx": n}) for n in ("sound", "bad")]
    sign(store, home, made[0])
    with lifecycle("retrain", RetrainConfig(), subject="tiny", stages=("export",)) as run:
        challenge(Model(name="tiny", version=made[0].version, uri=""))
        signed(store, home, made[1])
        with pytest.raises(IntegrityError):
            challenge(Model(name="tiny", version=made[1].version, uri=""))
        told = [json.loads(line) for line in (run.spool.folder / "events.jsonl").read_text().splitlines()]
    assert aliases(store, "tiny") == {"challenger": made[0].ref}
    assert [event["uri"] for event in told if event["event"] == "register"] == [store.uri_of(made[0])]


# --- 59 ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint(tmp_path):
    made = Endpoint(tmp_path / "e")
    yield made
    made.stop()


@pytest.mark.integration
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"errors": 0.2}, id="20 % errors", marks=pytest.mark.long),
        pytest.param({"seconds": 0.25}, id="slow"),
    ],
)
def test_a_model_that_turns_bad_at_ten_per_cent_loses_its_traffic_and_no_caller_notices(endpoint, how):
    """Sound while requests are copied to it only; so the breach is one of answers that callers wait for."""
    endpoint.serve(seconds=0.005)
    traffic, taken = endpoint.beside(seconds=0.005), []

    def told(event, details):
        taken.append(details.get("step"))
        if taken[-1] == "10 %":
            endpoint.behave("green", **{"seconds": 0.005, **how})
            taken.append(time.monotonic())

    config = RolloutConfig(step_requests=2000, step_seconds=60, mirror=0)
    with Clients(endpoint.port, rate=200, threads=8) as clients:
        until(lambda: clients.got[BLUE] > 60)
        with pytest.raises(GateFailed, match="lost its traffic at the step 10 %"):
            roll_out(traffic, config, endpoint.journal, report=told)
        took = time.monotonic() - taken[-1]
        got = clients.got[BLUE]
        until(lambda: clients.got[BLUE] > got + 20)
    print(f"back after {took:.1f} s, {clients.got[GREEN]} answers of green")
    assert took < limit(30) and not clients.failed and clients.got[GREEN] > 0
    assert list(read_routes(endpoint.gateway.routes).colours) == ["blue"]
    assert not process.alive(process.read_json(endpoint.folder / "servers" / "green" / "handle.json"))
