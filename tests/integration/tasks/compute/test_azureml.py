"""The Azure ML backend against a service that keeps state and can fail; jobs really run, on nodes that share no folder."""

import hashlib
import json
import time
import uuid
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml
from azureml_service import TOKEN, WHERE, Trouble, cluster
from azureml_stand import standing
from azurite import ACCOUNT
from store_stand import fill
from waiting import limit

from tasks.azure.arm_client import use_files
from tasks.common.errors import JobFailed, Missing
from tasks.common.process import descendants
from tasks.compute import open_backend
from tasks.compute.azureml.backend import azureml_findings
from tasks.compute.job import Job
from tasks.storage import open_files, open_store
from tasks.storage.manifest import Provenance

PROGRAM = """
import os, sys, time
import tasks
from tasks.jobs.node.runtime import main

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.02)

def write(rank, text):
    (rank.output / "made").write_text(text)

if __name__ == "__main__":
    sys.exit(main(lambda rank: eval(rank.settings["code"], globals(), {"rank": rank})))
"""


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    with standing(tmp_path_factory.mktemp("azureml")) as stand:
        (stand.home / "program.py").write_text(PROGRAM)
        yield stand


@pytest.fixture
def service(stand):
    """The service, without what a test before brought about."""
    service = stand.service
    service.trouble, service.fails_with, service.token = [], None, TOKEN
    service.clusters = {"cpu": cluster()}
    service.holds.set()
    service.log.clear()
    stand.log_in()
    return service


@pytest.fixture
def job(stand, request):
    """A function that makes a job of one rank, which evaluates an expression; its name is the test's."""

    def make(code="{'answer': 42}", **fields):
        token = hashlib.sha256(request.node.name.encode()).hexdigest()[:32]
        program = {"program": str(stand.home / "program.py"), "module": False, "settings": {"code": code}}
        return Job(**{"name": "stage", "token": token, "inputs": {}, "restarts": 0, **program, **fields})

    return make


def folder_of(stand, job):
    return stand.home / "jobs" / job.id


def started(stand, job):
    return [name for name in stand.service.submitted if name == job.submission_id]


def test_a_job_runs_there_and_its_folder_arrives_here(stand, service, job, tmp_path):
    store = open_store(stand.home)
    files = fill(tmp_path / "tokens", **{"data.bin": b"abc" * 1000})
    tokens = store.publish(files, kind="tokens", inputs=(), provenance=Provenance(name="code"))
    go = tmp_path / "go"
    code = f"""(rank.metrics(step=1, loss=2.5), wait_for({str(go)!r}), print("hello", flush=True),
           write(rank, (rank.inputs["tokens"] / "data.bin").read_text()[:6]),
           {{"code": tasks.__file__, "inputs": str(rank.inputs["tokens"])}})[-1]"""
    work = job(code, inputs={"tokens": "/not/there"}, artifacts={"tokens": tokens.ref})
    backend, folder = stand.backend(), folder_of(stand, work)
    handle = backend.submit(work, folder)
    running = stand.wait(backend, handle, folder, until=lambda state: (folder / "metrics.jsonl").exists())
    assert running.state == "running", "metrics come while it runs"
    assert json.loads((folder / "metrics.jsonl").read_text())["loss"] == 2.5
    assert not (folder / "out").exists()
    (stand.home / "keys" / "jobs.key").write_text(
        "f" * 64
    )  # as another home has it: the workspace has the one that counts
    go.touch()
    changed = {"name": "of-another", "prefix": "jobs/of-another"}
    ended = stand.wait(backend, changed, folder)  # as its home may say it, no journal
    assert (ended.state, ended.code, ended.attempts) == ("ended", 0, 1), stand.said()
    assert (folder / "out" / "made").read_text() == "abcabc"
    assert "hello" in (folder / "logs" / "rank-0.log").read_text()
    result = json.loads((folder / "result.json").read_text())
    here = str(service.base)
    assert result["code"].startswith(here) and result["inputs"].startswith(here), "node has its own code and inputs"
    assert service.record(work.submission_id).history[-2:] == ["Finalizing", "Completed"]
    asset = next(body for name, body in service.assets.items() if "/data/headway-tokens-code/" in name)
    assert asset["properties"]["dataUri"].endswith(f"/artifacts/tokens/code/versions/{tokens.version}/")
    ((name, known),) = service.datastores.items()
    assert f"/datastores/{name}/paths/some/prefix/" in asset["properties"]["dataUri"]
    assert known["properties"]["containerName"] == stand.container
    assert known["properties"]["credentials"] == {"credentialsType": "None"}, "who reads does so as itself"


def test_an_output_that_somebody_else_wrote_into_the_store_is_refused(stand, service, job):
    """Who may write to the container, and has no key, cannot have the home take weights for the job's, and sign them."""
    work = job("(write(rank, 'weights'), {'answer': 42})[-1]")
    backend, folder = stand.backend(), folder_of(stand, work)
    handle = backend.submit(work, folder)
    began = time.monotonic()
    while service.record(work.submission_id).history[-1] != "Completed":
        assert time.monotonic() - began < limit(60), stand.said()
        time.sleep(0.1)
    made = next(blob for blob in stand.blobs().list_blobs() if blob.name.endswith(f"{folder.name}/out/made"))
    stand.blobs().upload_blob(made.name, b"poison", overwrite=True)
    state = backend.states([(handle, folder)])[0]
    assert (state.state, state.failure, state.code) == ("ended", "integrity", 5)
    assert "out/made is not from the job or from who submitted it: its code is missing" in state.reason
    assert not (folder / "out" / "made").exists()
    for gone in ("out/made", "nodes/0/output.json"):
        stand.blobs().delete_blob(made.name.replace("out/made", gone))
        (folder / gone).unlink(missing_ok=True)
        state = stand.backend().states([(handle, folder)])[0]
        assert (state.failure, state.code) == ("integrity", 5) and f"has no {gone}" in state.reason
    secret = (stand.home / "keys" / "jobs.key").read_text()
    body = service.record(work.submission_id).body
    key = body["properties"]["environmentVariables"]["HEADWAY_FOLDER_KEY"]
    for blob in stand.blobs().list_blobs():
        data = stand.blobs().download_blob(blob.name).readall()
        assert key.encode() not in data and secret.encode() not in data, blob.name


def test_a_handle_that_somebody_changed_names_no_other_job(stand, service, job):
    """A job of an earlier release, whose files have no codes, ends as it did; a handle could name one."""
    other = job("(write(rank, 'weights'), {'answer': 42})[-1]", name="earlier")
    backend, folder = stand.backend(), folder_of(stand, other)
    service.holds.clear()
    handle = backend.submit(other, folder)
    sent = service.record(other.submission_id).body["properties"]
    del sent["tags"]["headway.codes"], sent["environmentVariables"]["HEADWAY_FOLDER_KEY"]
    sent["command"] = sent["command"].replace(" --codes", "")
    service.holds.set()
    state = stand.wait(backend, handle, folder)
    assert (state.state, state.code) == ("ended", 0), stand.said()
    assert (folder / "out" / "made").read_text() == "weights"
    service.holds.clear()
    work = job()
    folder = folder_of(stand, work)
    backend.submit(work, folder)
    forged = {"nodes/0/exit.json": b'{"code": 0, "reason": "ended", "attempts": 1}', "result.json": b'{"answer": 1}'}
    for name, data in {**forged, "out/made": b"poison"}.items():
        stand.blobs().upload_blob(f"some/prefix/jobs/{folder.name}/{name}", data)
    for changed in (handle, {"name": 1}, {}):
        state = backend.states([(changed, folder)])[0]
        assert not state.over and not (folder / "result.json").exists() and not (folder / "out").exists()
    backend.cancel(handle, folder)
    service.holds.set()
    assert stand.wait(backend, handle, folder).failure == "integrity"
    assert service.record(work.submission_id).history[-1] == "Canceled"
    assert service.record(other.submission_id).history[-1] == "Completed"


def test_what_somebody_wrote_into_one_folder_hides_no_other_job(stand, service, job):
    service.holds.clear()
    works = [job(name=name) for name in ("one", "two")]
    backend, folders = stand.backend(), [folder_of(stand, work) for work in works]
    handles = [(backend.submit(work, folder), folder) for work, folder in zip(works, folders, strict=True)]
    stand.blobs().upload_blob(f"some/prefix/jobs/{works[0].id}/logs/rank-0.log", b"x")
    stand.blobs().upload_blob(f"some/prefix/jobs/{works[0].id}/job.json/below", b"x")
    one, two = backend.states(handles)
    assert one.state == "unknown" and f"jobs/{works[0].id}/" in one.reason
    assert two.state in ("queued", "starting", "running")
    for handle, folder in handles:
        backend.cancel(handle, folder)
    service.holds.set()


def test_an_input_of_another_store_goes_along(stand, service, job, tmp_path):
    """A home that works in a folder, and names a store on Blob for its jobs alone."""
    other = tmp_path / "home"
    other.mkdir()
    (other / "stores.yaml").write_text((stand.home / "stores.yaml").read_text().replace("use: cloud", "use: local"))
    files = fill(tmp_path / "more", **{"data.bin": b"of a folder"})
    made = open_store(other).publish(files, kind="tokens", inputs=(), provenance=Provenance(name="more"))
    backend = open_backend(stand.cluster(azureml={"store": "cloud"}), partial(open_files, other))
    code = "{'read': (rank.inputs['tokens'] / 'data.bin').read_text()}"
    work = job(code, inputs={"tokens": "x"}, artifacts={"tokens": made.ref})
    folder = other / "jobs" / work.id
    assert stand.wait(backend, backend.submit(work, folder), folder).code == 0, stand.said()
    assert json.loads((folder / "result.json").read_text()) == {"read": "of a folder"}


@contextmanager
def jobs_apart(stand):
    """A container of their own for folders of jobs, named in stores.yaml, for as long as the block lasts."""
    stores, apart = stand.home / "stores.yaml", f"{stand.container[:10]}jobs{uuid.uuid4().hex[:6]}"
    before = stores.read_text()
    told = yaml.safe_load(before)
    told["stores"]["folders"] = {**told["stores"]["cloud"], "uri": f"az://{ACCOUNT}/{apart}/f"}
    stand.blobs(apart).create_container()
    stores.write_text(yaml.safe_dump({**told, "jobs": "folders"}))
    try:
        yield apart
    finally:
        stores.write_text(before)


def test_folders_of_jobs_get_a_container_of_their_own_and_a_job_that_runs_keeps_the_one_that_it_has(
    stand, service, job, tmp_path
):
    """And when they get none any more, its state is unknown, and says why, until the store is named again."""
    go = tmp_path / "go"
    files = fill(tmp_path / "more", **{"data.bin": b"an input"})
    made = open_store(stand.home).publish(files, kind="tokens", inputs=(), provenance=Provenance(name="apart"))
    code = "(write(rank, 'weights'), {'read': (rank.inputs['tokens'] / 'data.bin').read_text()})[-1]"
    before, after = job(f"(wait_for({str(go)!r}), int('five'))", name="before"), job(name="after")
    work = job(code, inputs={"tokens": "x"}, artifacts={"tokens": made.ref})
    backend, folder = stand.backend(), folder_of(stand, before)
    handle = backend.submit(before, folder)
    stand.wait(backend, handle, folder, until=lambda state: state.state == "running")
    with jobs_apart(stand) as apart:
        again = stand.backend()
        submitted = again.submit(work, folder_of(stand, work))
        assert stand.wait(again, submitted, folder_of(stand, work)).code == 0, stand.said()
        service.holds.clear()
        newer = again.submit(after, folder_of(stand, after))
        go.touch()
        ended = stand.wait(again, handle, folder)
        assert (ended.state, ended.code) == ("ended", 1), stand.said()
        report = json.loads((folder / "errors" / "rank-0.json").read_text())
        assert report["class"] == "user" and "'five'" in report["message"], "the program's own error, of its own folder"
        names = {blob.name for blob in stand.blobs(apart).list_blobs()}
        tags = service.record(work.submission_id).body["properties"]["tags"]
        assert tags["headway.folder"] == f"az://{ACCOUNT}/{apart}/f/jobs/{work.id}"
    assert (folder_of(stand, work) / "out" / "made").read_text() == "weights"
    assert json.loads((folder_of(stand, work) / "result.json").read_text()) == {"read": "an input"}
    assert names >= {f"f/jobs/{work.id}/{one}" for one in ("job.json", "result.json", "out/made")}
    assert {tuple(name.split("/")[:3]) for name in names} == {("f", "jobs", one.id) for one in (work, after)}
    assert not stand.lying(work) and stand.lying(before)
    lost = stand.backend().states([(newer, folder_of(stand, after))])[0]
    assert lost.state == "unknown" and f"its folder lies in az://{ACCOUNT}/{apart}/f/jobs/{after.id}" in lost.reason
    again.cancel(newer, folder_of(stand, after))
    service.holds.set()


def test_a_datastore_of_our_name_that_is_of_another_container_is_refused(stand, service, job):
    work = job("wait_for('/never')")
    backend, folder = stand.backend(), folder_of(stand, work)
    before = job(name="before")
    service.holds.clear()
    backend.cancel(backend.submit(before, folder_of(stand, before)), folder_of(stand, before))
    service.holds.set()
    ((name, known),) = service.datastores.items()
    service.datastores[name] = {"properties": {**known["properties"], "containerName": "elsewhere"}}
    try:
        with pytest.raises(ValueError, match=f"datastore {name} .* is of {ACCOUNT}/elsewhere, and the store is az://"):
            backend.submit(work, folder)
    finally:
        service.datastores[name] = known
    assert not started(stand, work)


def test_a_submission_is_there_once_whatever_becomes_of_the_answer(stand, service, job):
    work = job("wait_for('/never')")
    backend, folder = stand.backend(), folder_of(stand, work)
    assert backend.find(work, folder) is None
    service.trouble = [Trouble("PUT", "/jobs/", status=0, lost=True)]
    handle = backend.submit(work, folder)
    assert backend.submit(work, folder)["name"] == handle["name"]
    assert stand.backend().find(work, folder) == handle
    assert started(stand, work) == [handle["name"]]
    backend.cancel(handle, folder)


def test_cancelling_ends_every_process(stand, service, job):
    work = job("wait_for('/never')")
    backend, folder = stand.backend(), folder_of(stand, work)
    handle = backend.submit(work, folder)
    stand.wait(backend, handle, folder, until=lambda state: (folder / "ranks" / "0.json").exists())
    nodes = service.record(work.submission_id).nodes
    pids = [pid for process in nodes.processes for pid in (process.pid, *descendants(process.pid))]
    assert len(pids) >= 4
    began = time.monotonic()
    backend.cancel(handle, folder)
    state = stand.wait(backend, handle, folder)
    assert time.monotonic() - began < limit(15)
    assert (state.reason, state.failure) == ("cancelled", "cancelled")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    backend.cancel(handle, folder)


def test_waiting_for_nodes_and_images_is_no_running_and_an_ended_jobs_name_is_not_taken_for_a_new_one(
    stand, service, job
):
    service.holds.clear()
    work = job()
    backend, folder = stand.backend(), folder_of(stand, work)
    handle = backend.submit(work, folder)
    state = stand.wait(backend, handle, folder, until=lambda state: state.state == "starting")
    assert state.reason == "Preparing"
    service.holds.set()
    assert stand.wait(backend, handle, folder).code == 0
    with pytest.raises(JobFailed, match="ended job of the name") as error:
        backend.submit(work, folder)
    assert "az ml job delete" in error.value.remedy


@pytest.mark.parametrize(
    ("fails", "failure", "said"),
    [
        (("ImageNotFound", "manifest for x:1 not found: manifest unknown"), "user", "cluster.image"),
        (("ImageBuildFailure", "Image build failed. See the build log."), "user", "azureml.environment"),
        (("QuotaExceeded", "Not enough quota of family standardNDSH100v5Family"), "missing", "Ask for quota"),
        (("NodeUnhealthy", "node tvmps_1 unhealthy"), "node", "NodeUnhealthy"),
        (("SomethingElse", "nobody knows"), "infrastructure", "nobody knows"),
    ],
)
def test_why_a_job_failed_is_the_services_word(stand, service, job, fails, failure, said):
    service.fails_with = fails
    work = job()
    backend, folder = stand.backend(), folder_of(stand, work)
    state = stand.wait(backend, backend.submit(work, folder), folder)
    assert (state.state, state.code, state.failure) == ("ended", 1, failure)
    assert said in state.reason
    assert len([line for line in service.log if line.endswith("/details")]) == 1, "the run history is asked once"


def test_an_input_that_is_damaged_there_is_told(stand, service, job, tmp_path):
    files = fill(tmp_path / "bad", **{"data.bin": b"whole"})
    made = open_store(stand.home).publish(files, kind="tokens", inputs=(), provenance=Provenance(name="bad"))
    work = job(inputs={"tokens": "x"}, artifacts={"tokens": made.ref})
    backend, folder = stand.backend(), folder_of(stand, work)
    service.holds.clear()
    handle = backend.submit(work, folder)
    snapshot = made.provenance.blob_versions["data.bin"].removeprefix("snapshot:")
    blob = stand.blobs().get_blob_client("some/prefix/artifacts/tokens/bad/files/data.bin", snapshot=snapshot)
    blob.delete_blob()
    service.holds.set()
    assert stand.wait(backend, handle, folder).code == 1
    assert json.loads((folder / "errors" / "rank-0.json").read_text())["class"] == "integrity"


def test_a_job_that_an_administrator_deleted_is_lost(stand, service, job):
    work = job("wait_for('/never')")
    backend, folder = stand.backend(), folder_of(stand, work)
    handle = backend.submit(work, folder)
    service.delete(work.submission_id)
    state = backend.states([(handle, folder)])[0]
    assert (state.state, "deleted" in state.reason) == ("lost", True)


def test_many_jobs_are_one_listing(stand, service, job):
    backend = stand.backend()
    service.holds.clear()
    works = [job(token=f"{number}" * 32) for number in range(4)]
    handles = [(backend.submit(work, folder_of(stand, work)), folder_of(stand, work)) for work in works]
    service.log.clear()
    assert {state.state for state in backend.states(handles)} <= {"queued", "starting"}
    assert [line for line in service.log if "/jobs" in line] == [f"GET {WHERE}/jobs"]
    for handle, folder in handles:
        backend.cancel(handle, folder)
    service.holds.set()


def test_a_busy_service_is_asked_again_when_it_said(stand, service, job):
    work = job("wait_for('/never')")
    backend, folder = stand.backend(), folder_of(stand, work)
    service.trouble = [
        Trouble("PUT", "/jobs/", status=429, code="TooManyRequests", headers={"Retry-After": "1"}),
        Trouble("GET", "/jobs/", status=503, headers={"Retry-After": "1"}),
    ]
    began = time.monotonic()
    handle = backend.submit(work, folder)
    assert time.monotonic() - began > 2
    assert started(stand, work) == [handle["name"]]
    backend.cancel(handle, folder)


def test_a_service_that_fails_is_unknown_and_never_lost(stand, service, job):
    work = job("wait_for('/never')")
    backend, folder = stand.backend(), folder_of(stand, work)
    handle = backend.submit(work, folder)
    service.trouble = [Trouble("GET", "/jobs/", status=500, times=99)]
    state = backend.states([(handle, folder)])[0]
    assert state.state == "unknown" and "500" in state.reason
    with pytest.raises(Missing, match="answers 500"):
        backend.find(work, folder)
    service.trouble = []
    assert backend.states([(handle, folder)])[0].state in ("queued", "starting", "running")
    backend.cancel(handle, folder)


def test_a_login_that_ended_says_so(stand, service, job):
    work = job("wait_for('/never')")
    backend, folder = stand.backend(), folder_of(stand, work)
    handle = backend.submit(work, folder)
    service.token = "another, for the old one has ended"
    state = backend.states([(handle, folder)])[0]
    assert state.state == "unknown" and "az login" in state.reason
    stand.log_out()
    for asked in (lambda: stand.backend().find(work, folder), lambda: stand.backend().submit(work, folder)):
        with pytest.raises(Missing) as error:
            asked()
        assert "az login" in error.value.remedy
    service.token = TOKEN
    stand.log_in()
    stand.backend().cancel(handle, folder)


def test_doctor_finds_the_store_the_workspace_and_the_cluster(stand, service):
    use_files(partial(open_files, stand.home))
    (_, ok, said, _), (_, fits, size, _) = azureml_findings(stand.cluster(nodes=2))
    assert ok and "/some/prefix" in said and fits and "STANDARD_D2_V2" in size
    typo = {"size": "Standard_ND96irs_H100_v5"}
    name, ok, said, _ = next(azureml_findings(stand.cluster(azureml=typo, gpus_per_node=8)))
    assert (name, ok) == ("azureml size", False) and "Standard_ND96isr_H100_v5" in said
    *_, (name, fits, said, _) = azureml_findings(stand.cluster(nodes=3))
    assert name == "azureml compute" and not fits and "at most 2" in said
    *_, (_, ok, said, _) = azureml_findings(stand.cluster(azureml={"store": "nowhere"}))
    assert not ok and "'nowhere' is not in stores.yaml" in said
    stand.log_out()
    *_, (_, fits, _, remedy) = azureml_findings(stand.cluster())
    assert not fits and "az login" in remedy


@pytest.mark.parametrize(
    ("cluster_said", "fields", "error", "said"),
    [
        (None, {}, ValueError, "azureml.compute cpu is not in the workspace w: create it"),
        (cluster(), {"nodes": 3}, ValueError, "needs 3 nodes, and the cluster cpu has at most 2"),
        (cluster(), {"preemptible": True}, ValueError, "of the tier dedicated, and cluster.preemptible is true"),
        (
            cluster(errors=[{"error": {"code": "ClusterCoreQuotaReached", "message": "quota of 0 cores"}}]),
            {},
            Missing,
            "cannot get nodes: ClusterCoreQuotaReached quota of 0 cores",
        ),
    ],
)
def test_a_cluster_that_the_job_does_not_fit_is_told_before(stand, service, job, cluster_said, fields, error, said):
    service.clusters = {"cpu": cluster_said} if cluster_said else {}
    work = job(**fields)
    with pytest.raises(error, match=said):
        stand.backend().submit(work, folder_of(stand, work))
    assert not started(stand, work)


@pytest.mark.parametrize(
    ("code", "message", "error", "said"),
    [
        ("QuotaExceeded", "The quota of 0 cores is exceeded.", Missing, "no quota"),
        ("UserError", "The environment image is invalid.", ValueError, "cluster.image"),
        ("AuthorizationFailed", "does not have authorization", Missing, "does not let us"),
        ("ResourceGroupNotFound", "Resource group g could not be found.", ValueError, "azureml.resource_group"),
        ("Odd", "nobody foresaw this", JobFailed, "nobody foresaw this"),
    ],
)
def test_what_the_service_refuses_is_told_with_a_remedy(stand, service, job, code, message, error, said):
    status = {"AuthorizationFailed": 403, "ResourceGroupNotFound": 404}.get(code, 400)
    service.trouble = [Trouble("PUT", "/jobs/", status=status, code=code, message=message)]
    work = job()
    with pytest.raises(error, match=said):
        stand.backend().submit(work, folder_of(stand, work))
    assert not started(stand, work)
