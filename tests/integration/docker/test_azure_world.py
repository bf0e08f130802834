"""The lifecycle on Azure ML as people have it: jobs run in the built image, as its user, with nothing but their identity's roles.

azure_world.py says what stands in for Azure. Nothing here tells a program where the tests are.
"""

import json
import sys
import threading
from contextlib import contextmanager

import azure_by_hand
import pytest
import yaml
from azure_world import (
    CLUSTER,
    CONTAINER,
    CONTRIBUTOR,
    ENDPOINT_IMAGE,
    IMAGE,
    PERSON,
    PULL,
    READER,
    REGISTRY,
    SCIENTIST,
    SERVING,
    STORAGE_SCOPE,
    settings,
    world,
)
from azureml_bodies import DATASTORE
from azureml_service import Trouble
from built_images import Built, require_builder
from waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

LIBRARY = "/usr/lib/python3.11"
FOLDERS = [f"{LIBRARY}/{name}" for name in ("json", "email", "logging", "importlib")]


@pytest.fixture(scope="module")
def images():
    require_builder()
    built = {IMAGE: Built("cluster-cpu"), ENDPOINT_IMAGE: Built("endpoint")}
    yield built
    for one in built.values():
        one.close()


@pytest.fixture(scope="module")
def azure(images, tmp_path_factory):
    """With a dataset, and a configuration beside it."""
    with world(tmp_path_factory.mktemp("azure"), images) as made:
        (made.base / "azure.yaml").write_text(yaml.safe_dump(settings()))
        done = made.run("headway", "dataset", "publish", "tiny", *FOLDERS, "--include", "*.py")
        assert done.returncode == 0, done.stderr
        yield made


@pytest.fixture(scope="module")
def finished(azure):
    """And a lifecycle that ran to its end; what it says."""
    return retrained(azure)


def retrained(azure, *words):
    before = len(azure.service.submitted)
    command = ("headway", "retrain", "-c", "tiny", "-c", azure.base / "azure.yaml", *words, "--json")
    done = azure.run(*command, seconds=1500)
    assert done.returncode == 0, done.stderr[-3000:] + azure.logs()
    names = [name.rpartition("-")[0].split("-")[1] for name in azure.service.submitted[before:]]
    return json.loads(done.stdout) | {"submissions": {name: names.count(name) for name in names}}


def during_training(azure, steps, act):
    """Train for so many steps, and do something as soon as a whole checkpoint lies in the store; what the run says."""
    before, asked = len(azure.service.submitted), len(azure.storage.who)

    def wait():
        until(
            lambda: any(
                blob.endswith("/manifest.json") and "/checkpoints/" in blob and method == "PUT"
                for _, method, blob in azure.storage.who[asked:]
            ),
            900,
        )
        act(next(name for name in azure.service.submitted[before:] if "-train-" in name))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    ran = retrained(azure, "--set", f"training.steps={steps}")
    thread.join()
    train = next(stage for stage in ran["stages"] if stage["name"] == "train")
    assert train["job"]["resumed_from_step"], "it went on, and did not begin anew"
    return ran


def test_the_lifecycle_completes_with_one_submission_a_job(azure, finished):
    assert {stage["status"] for stage in finished["stages"]} == {"ran"}
    assert set(finished["submissions"].values()) == {1}
    verified = azure.run("headway", "verify", "model/tiny")
    assert verified.returncode == 0, verified.stderr
    answered = azure.run("headway", "complete", "tiny", "def ")
    assert answered.returncode == 0, answered.stderr
    [served] = azure.served
    assert served.process.poll() is None and "10001" in served.user, "the container answered"
    assert retrained(azure)["submissions"] == {}, "a second one has nothing to do"


def test_jobs_have_their_identitys_rights_and_who_submits_reads_no_checkpoint(azure, finished):
    changed = {identity for identity, method, blob in azure.storage.who if method == "PUT" and "/jobs/" in blob}
    assert changed == {PERSON, CLUSTER}
    read = [blob for identity, method, blob in azure.storage.who if (identity, method) == (PERSON, "GET")]
    assert not [blob for blob in read if "/checkpoints/" in blob and "shard" in blob]
    passed = [blob for blob in read if "/artifacts/tokens/" in blob and "/files/" in blob]
    assert {blob.rpartition("/")[2] for blob in passed} <= {"tokens.json"}, "tokens never lie on the launcher"
    nodes = [blob for identity, method, blob in azure.storage.who if (identity, method) == (CLUSTER, "GET")]
    assert any("/artifacts/tokens/" in blob and blob.endswith("train_text_document.bin") for blob in nodes)
    assert not any("/parts/" in blob for blob in read), "nor do parts of the corpus"
    assert {of for identity, of in azure.identities.asked if identity == CLUSTER} == {STORAGE_SCOPE}


def test_training_goes_on_after_azure_started_the_job_on_other_nodes(azure, finished):
    """The same submission: it finds its checkpoint in the store."""
    ran = during_training(azure, 400, azure.service.requeue)
    last = next(name for name in reversed(azure.service.submitted) if "-train-" in name)
    assert ran["submissions"]["train"] == 1 and "Queued" in azure.service.record(last).history[4:]


def test_training_goes_on_after_low_priority_nodes_were_taken_away(azure, finished):
    ran = during_training(azure, 420, azure.service.preempt)
    assert ran["submissions"]["train"] == 2


def test_training_goes_on_after_a_node_was_lost(azure, finished):
    ran = during_training(azure, 440, lambda name: azure.machines[1].kill())
    assert ran["submissions"]["train"] == 2


def test_a_busy_service_and_a_busy_store_are_waited_for(azure, finished):
    azure.storage.busy = 40
    azure.service.trouble.append(
        Trouble("GET", "/jobs/", 429, times=3, code="TooManyRequests", headers={"Retry-After": "1"})
    )
    ran = retrained(azure, "--set", "training.steps=460")
    assert set(ran["submissions"].values()) == {1} and azure.storage.busy == 0


def by_hand(azure, *words):
    done = azure.run(sys.executable, azure_by_hand.__file__, *words, seconds=200)
    assert done.returncode == 0, done.stderr[-3000:] + azure.logs()
    return done.stdout


def test_the_sdks_own_client_submits_follows_cancels_and_lists_jobs(azure):
    output = by_hand(azure, "jobs", IMAGE)
    assert "user 10001" in output, "the log was followed"
    assert "ended Completed" in output.replace("JobStatus.COMPLETED", "Completed")
    assert "cancelled Canceled" in output.replace("JobStatus.CANCELED", "Canceled")
    assert "by-hand-1" in output.rpartition("listed")[2] and "by-hand-2" in output.rpartition("listed")[2]


def test_the_sdks_own_client_deploys_an_endpoint_and_asks_it(azure, finished):
    """The model that the lifecycle deployed."""
    ours = next(one.properties for one in azure.served)
    _, place = DATASTORE.fullmatch(azure.service.assets[ours["model"]]["properties"]["modelUri"]).groups()
    request, file = azure.base / "request.json", azure.base / "deployment.json"
    request.write_text(json.dumps({"input_data": {"input_string": ["def "], "parameters": {"max_new_tokens": 4}}}))
    file.write_text(json.dumps({"model": place, "variables": ours["environmentVariables"], "request": str(request)}))
    output = by_hand(azure, "endpoint", ENDPOINT_IMAGE, file)
    assert '"0"' in output.partition("answer")[2], "completions by number, as /score gives them"
    assert "by-hand" not in output.rpartition("left")[2], "it was deleted"


# --- what a real workspace refuses, it refuses too: each mend of docs/azureml.md taken out


@contextmanager
def without(azure, *roles):
    azure.identities.roles -= {*roles}
    try:
        yield
    finally:
        azure.identities.roles |= {*roles}


def refused(azure, *words, code):
    """What a run that cannot work says, of a new training where nothing else is set."""
    words = words or ("--set", "training.steps=61")
    done = azure.run("headway", "retrain", "-c", "tiny", "-c", azure.base / "azure.yaml", *words)
    assert done.returncode == code, done.stdout[-1500:] + done.stderr[-3000:] + azure.logs()
    return done.stderr


@pytest.mark.parametrize(
    ("role", "code", "message"),
    [
        ((CLUSTER, PULL, REGISTRY), 2, "may not pull"),
        ((CLUSTER, CONTRIBUTOR, CONTAINER), 6, "headway doctor --rights"),
        ((PERSON, CONTRIBUTOR, CONTAINER), 6, "Storage Blob Data Contributor"),
        ((PERSON, SCIENTIST, "w"), 6, "AzureML Data Scientist"),
    ],
)
def test_a_missing_role_ends_the_run_and_is_named(azure, finished, role, code, message):
    before = len(azure.service.submitted)
    with without(azure, role):
        assert message in refused(azure, code=code)
    assert len(azure.service.submitted) - before <= 1


@pytest.mark.parametrize(
    ("role", "why"),
    [((SERVING, PULL, REGISTRY), "may not pull"), ((SERVING, READER, CONTAINER), "may not read the model")],
)
def test_an_endpoint_whose_identity_lacks_a_role_is_not_deployed(azure, finished, role, why):
    words = ("--set", "deployment.endpoint=other", "--set", "comparison.max_loss_to_champion=9")
    with without(azure, role):
        output = refused(azure, *words, code=4)
    assert why in output and "failed: " in output and "headway doctor --rights" in output


def test_an_image_that_is_not_in_the_registry_is_named(azure, finished):
    before = len(azure.service.submitted)
    other = f"{REGISTRY}/headway-cluster:0.0.9"
    assert other in refused(azure, "--set", f"cluster.image={other}", "--set", "training.steps=61", code=2)
    assert len(azure.service.submitted) - before == 1


def test_an_image_without_azures_packages_starts_no_job(azure, finished):
    """As it was at 0245f4f."""
    azure.hidden.append("azure")
    try:
        assert "No module named 'azure" in refused(azure, code=4)
    finally:
        azure.hidden.clear()
