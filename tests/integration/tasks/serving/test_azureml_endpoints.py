"""A model on a managed online endpoint of Azure ML, against a fake of its REST edge: steps, failures, kill -9, refusals."""

import json
import multiprocessing
import os
import shutil
import signal
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from azureml_deploying import GOLDEN, ONE, PRELOADED, TWO, config, deploy, deploy_apart
from azureml_endpoints import API_VERSION, Behaviour, serving
from azureml_service import TOKEN, WHERE, Trouble
from azureml_stand import standing
from typer.testing import CliRunner
from waiting import limit, until

from deployments.cli.main import app
from tasks.azure.arm_client import use_files
from tasks.common.errors import GateFailed, IntegrityError, JobFailed, Missing
from tasks.serving import open_endpoint
from tasks.serving.azureml.render import Rendering
from tasks.serving.client import Sampling
from tasks.serving.known import ask
from tasks.storage import open_files


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    with standing(tmp_path_factory.mktemp("azureml")) as stand:
        use_files(partial(open_files, stand.home))
        yield stand


@pytest.fixture(scope="module")
def forked(stand):
    """Runs a deploy in a process of its own, forked from one that has the SDK loaded: that takes many seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start(base, ref, url):
        child = context.Process(target=deploy_apart, args=(stand.home, base, ref, url), daemon=True)
        child.start()
        return child

    return start


@pytest.fixture
def service(stand):
    with serving(GOLDEN) as (url, state):
        state.url = url
        yield state


def opened(base: Path):
    return open_endpoint(base / "endpoints", "chat")


def name_of(service) -> str:
    return next(key for key in service.resources if "/deployments/" not in key).partition("/")[2]


def journal(base: Path):
    return [json.loads(line) for line in (base / "endpoints/chat/journal.jsonl").read_text().splitlines()]


def always_100(service) -> bool:
    """In every state that the service was in once anything had traffic."""
    return all(sum(shares.values()) in ((0,) if not shares else (100,)) for shares in service.traffic)


def test_two_models_one_after_the_other(service, tmp_path):
    events = []
    first = deploy(tmp_path, ONE, service.url)
    assert first.model_ref == ONE and service.traffic == [{}, {"blue": 100}]
    second = deploy(tmp_path, TWO, service.url, told=lambda event, details: events.append(event))
    assert second.model_ref == TWO and opened(tmp_path).observe().ready
    shares = [{"blue": 100}, {"blue": 90, "green": 10}, {"blue": 50, "green": 50}, {"green": 100}]
    assert service.traffic[2:] == shares and {"green": 10} in service.mirrors
    assert events == ["starting", "answering", "step", "step", "step", "step", "switched"]
    assert all(named for _, named in service.heard)
    assert service.deployments(name_of(service)) == ["blue", "green"]


def test_the_old_one_goes_when_it_was_kept_warm(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    deploy(tmp_path, TWO, service.url)
    endpoint, until = (
        opened(tmp_path),
        json.loads((tmp_path / "endpoints/chat/endpoint.json").read_text())["previous"]["until"],
    )
    assert endpoint.tidy(until - 1) == [] and endpoint.tidy(until + 1) == [f"{name_of(service)}/blue"]
    assert service.deployments(name_of(service)) == ["green"]
    with pytest.raises(ValueError, match="no way back"):
        endpoint.go_back("it is rude")


def test_a_person_asks_it_by_its_split(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    service.heard.clear()
    assert ask(tmp_path, "chat", "def ", Sampling(3))["completion"] == "f(x):"
    assert service.heard == [("blue", False)]


def test_going_back_is_one_put(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    deploy(tmp_path, TWO, service.url)
    before = len(service.traffic)
    assert opened(tmp_path).go_back("it is rude").model_ref == ONE
    assert service.traffic[before:] == [{"blue": 100}] and opened(tmp_path).observe().model_ref == ONE


def test_nothing_goes_back_to_a_model_that_must_not_serve(service, tmp_path):
    def require(model_ref):
        raise IntegrityError(f"{model_ref} is revoked")

    events = []
    deploy(tmp_path, ONE, service.url)
    deploy(tmp_path, TWO, service.url, told=lambda event, details: events.append(event), barred="its key is revoked")
    assert service.traffic == [{}, {"blue": 100}, {"blue": 100}, {"green": 100}]
    assert events == ["starting", "answering", "one way", "step", "switched"]
    before = list(service.traffic)
    with pytest.raises(IntegrityError, match="is revoked"):
        opened(tmp_path).go_back("it is rude", require=require)
    assert service.traffic == before and opened(tmp_path).observe().model_ref == TWO


STEPS = {
    "the endpoint's look": Trouble("GET", r"onlineEndpoints/[^/]+$", 500, times=4),
    "model asset": Trouble("PUT", r"models/", 500, times=4),
    "environment": Trouble("PUT", r"environments/", 500, times=4),
    "deployment": Trouble("PUT", r"deployments/green", 500, times=4),
    "quota": Trouble(
        "PUT", r"deployments/green", 400, code="OutOfQuota", message="Not enough quota for Standard_DS3_v2"
    ),
    "keys": Trouble("POST", r"listKeys", 500, times=4),
    "first share": Trouble("PUT", r"onlineEndpoints/[^/]+$", 500, times=4),
}


ONCE_MORE = ("the endpoint's look", "model asset", "environment", "keys")


@pytest.mark.parametrize("step", [pytest.param(name, marks=[pytest.mark.long] * (name in ONCE_MORE)) for name in STEPS])
def test_a_failure_at_a_step_reverts(service, tmp_path, step):
    deploy(tmp_path, ONE, service.url)
    trouble = STEPS[step]
    service.trouble = [Trouble(**{**vars(trouble)})]
    with pytest.raises((Missing, ValueError, JobFailed)):
        deploy(tmp_path, TWO, service.url)
    service.trouble = []
    opened(tmp_path).settle()
    assert service.shares(name_of(service)) == {"blue": 100} and always_100(service)
    assert service.deployments(name_of(service)) == ["blue"] and opened(tmp_path).observe().model_ref == ONE


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_operation_that_fails_at_a_share_reverts(service, tmp_path, nth):
    deploy(tmp_path, ONE, service.url)
    name, puts = name_of(service), []

    def done(said: str) -> None:
        puts.append(said) if said == f"PUT onlineEndpoints/{name}" else None
        service.failing = (
            {r"^PUT onlineEndpoints/[^/]+$": ("Bad", "the share was not taken")} if len(puts) == nth else {}
        )

    service.done = done
    with pytest.raises((Missing, ValueError, JobFailed), match="not taken"):
        deploy(tmp_path, TWO, service.url)
    assert service.shares(name) == {"blue": 100} and always_100(service) and service.deployments(name) == ["blue"]


def test_a_deployment_that_does_not_come_up_reverts(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    service.failing = {"PUT .*deployments/green": ("ImageNotFound", "the image x was not found")}
    with pytest.raises((ValueError, JobFailed, Missing), match="image"):
        deploy(tmp_path, TWO, service.url)
    assert service.deployments(name_of(service)) == ["blue"]


@pytest.mark.parametrize("how", [Behaviour(wrong=True), Behaviour(fails=True)], ids=["wrong", "broken"])
def test_a_model_that_does_not_answer_gets_no_traffic(service, tmp_path, how):
    deploy(tmp_path, ONE, service.url)
    service.behaviour[TWO] = how
    with pytest.raises(JobFailed, match="green"):
        deploy(tmp_path, TWO, service.url)
    assert all("green" not in shares for shares in service.traffic) and service.deployments(name_of(service)) == [
        "blue"
    ]


def test_a_model_that_breaks_under_traffic_loses_it(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    name = name_of(service)

    def done(said: str) -> None:
        if service.traffic[-1].get("green") or "green" in service.shares(name):
            service.behaviour[TWO] = Behaviour(fails=True)

    service.done = done
    slow = {"step_requests": 50, "step_seconds": 20.0, "mirror": 0}
    with pytest.raises(GateFailed, match="errors"):
        deploy(tmp_path, TWO, service.url, rollout=slow)
    assert service.shares(name) == {"blue": 100} and always_100(service) and service.deployments(name) == ["blue"]


def test_azure_monitor_judges_where_it_counts(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    dimensions = [
        {"name": {"value": "deployment"}, "value": "green"},
        {"name": {"value": "statusCodeClass"}, "value": "5xx"},
    ]
    service.metrics = [{"metadatavalues": dimensions, "data": [{"average": 40.0}, {"average": None}]}]
    with pytest.raises(GateFailed, match="40 of 40 requests failed"):
        deploy(tmp_path, TWO, service.url)
    assert service.shares(name_of(service)) == {"blue": 100}


def test_a_rollout_of_which_azure_monitor_says_nothing_is_not_judged(service, tmp_path):
    """Our own requests are answered, many times step_requests; of the callers' nothing is known: half of them may fail."""
    deploy(tmp_path, ONE, service.url)
    rollout = {"step_requests": 2, "least_seconds": 0.0, "step_seconds": 1.0, "hold_seconds": 1.0, "mirror": 0}
    with pytest.raises(GateFailed, match="was not judged at the step 10 %") as ended:
        deploy(tmp_path, TWO, service.url, rollout=rollout)
    assert ended.value.checks[0]["measured"] == "0 requests"
    assert len([who for who, named in service.heard if who == "green" and named]) > 2
    assert service.shares(name_of(service)) == {"blue": 100} and always_100(service)


@pytest.mark.long  # a hundred of our own requests to the old model come first
def test_the_counts_of_azure_monitor_advance_the_steps(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    dimensions = [
        {"name": {"value": "deployment"}, "value": "green"},
        {"name": {"value": "statusCodeClass"}, "value": "2xx"},
    ]
    service.metrics = [{"metadatavalues": dimensions, "data": [{"average": 200.0}]}]
    rollout = {"steps": (100,), "least_seconds": 0.0, "step_seconds": 300.0, "mirror": 0, "max_slowdown": 50.0}
    assert deploy(tmp_path, TWO, service.url, rollout=rollout).model_ref == TWO
    [commit] = [line for line in journal(tmp_path) if line["event"] == "commit" and line.get("outcomes")]
    assert commit["outcomes"] == {"100 %": "passed"}


@pytest.mark.parametrize("place", [2, 5, *(pytest.param(place, marks=pytest.mark.soak) for place in (0, 1, 3, 4))])
def test_a_deployer_that_is_killed_between_two_puts(service, forked, tmp_path, place):
    deploy(tmp_path, ONE, service.url)
    changes, name = [], name_of(service)

    def done(said: str) -> None:
        if "models/" in said or "environments/" in said:
            return
        changes.append(said)
        if len(changes) == place + 1:
            os.kill(child.pid, signal.SIGKILL)

    service.done = done
    child = forked(tmp_path, TWO, service.url)
    child.join(limit(60))
    assert child.exitcode == -signal.SIGKILL, changes
    service.done = lambda said: None
    lines = [json.loads(line)["event"] for line in (tmp_path / "endpoints/chat/journal.jsonl").read_text().splitlines()]
    committed = "commit" in lines[lines.index("done") + 1 :]
    assert committed == (place == 5)
    assert opened(tmp_path).settle() == ("done" if committed else "reverted")
    assert service.shares(name) == ({"green": 100} if committed else {"blue": 100}) and always_100(service)
    assert opened(tmp_path).observe().model_ref == (TWO if committed else ONE)
    assert deploy(tmp_path, TWO, service.url).model_ref == TWO


def test_what_is_there_already_is_taken_as_it_is(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    (tmp_path / "endpoints/chat/journal.jsonl").unlink()
    (tmp_path / "endpoints/chat/endpoint.json").unlink()
    service.log.clear()
    assert deploy(tmp_path, ONE, service.url).model_ref == ONE
    assert not [said for said in service.log if said.startswith("PUT onlineEndpoints")]


def test_a_stopped_endpoint_is_deleted_and_made_again(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    opened(tmp_path).stop()
    assert not service.resources and opened(tmp_path).observe() is None
    assert deploy(tmp_path, TWO, service.url).model_ref == TWO and service.traffic[-1] == {"green": 100}


@pytest.mark.parametrize("how", ["killed", "refused"])
def test_what_a_first_deploy_left_behind_is_deleted_by_stop(service, forked, stand, tmp_path, monkeypatch, how):
    """Nothing has traffic, and no model is in service: the managed endpoint stands in the workspace all the same."""
    shutil.copyfile(stand.home / "stores.yaml", tmp_path / "stores.yaml")
    if how == "refused":
        service.behaviour[ONE] = Behaviour(wrong=True)
        with pytest.raises(JobFailed):
            deploy(tmp_path, ONE, service.url)
    else:
        service.done = lambda request: os.kill(child.pid, signal.SIGKILL) if "deployments" in request else None
        child = forked(tmp_path, ONE, service.url)
        child.join(limit(120))
        service.done = lambda request: None
    assert [key for key in service.resources if key.startswith("onlineEndpoints/")]
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["endpoint", "stop", "chat", "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["stopped"] and service.resources == {}, result.output
    assert json.loads(CliRunner().invoke(app, ["endpoint", "list", "--json"]).stdout)["endpoints"] == []


def test_a_test_endpoint_expires(service, tmp_path):
    deploy(tmp_path, ONE, service.url, expires_hours=1.0)
    expires = json.loads((tmp_path / "endpoints/chat/endpoint.json").read_text())["expires"]
    [body] = [one.body for key, one in service.resources.items() if "/deployments/" not in key]
    assert body["tags"]["expires"] == f"{expires:.0f}"
    assert opened(tmp_path).tidy(expires - 1) == [] and opened(tmp_path).tidy(expires + 1) and not service.resources


def test_every_deployment_is_scaled_and_its_setting_goes_with_it(service, tmp_path):
    deploy(tmp_path, ONE, service.url, most_instances=3)
    name = name_of(service)
    assert set(service.scaling) == {f"{name}-blue"}
    deploy(tmp_path, TWO, service.url, most_instances=4)
    assert {key: one["properties"]["profiles"][0]["capacity"]["maximum"] for key, one in service.scaling.items()} == {
        f"{name}-blue": "3",
        f"{name}-green": "4",
    }
    targets = {one["properties"]["targetResourceUri"].rpartition("/")[2] for one in service.scaling.values()}
    assert targets == {"blue", "green"}
    until = json.loads((tmp_path / "endpoints/chat/endpoint.json").read_text())["previous"]["until"]
    assert opened(tmp_path).tidy(until + 1) == [f"{name}/blue"] and set(service.scaling) == {f"{name}-green"}
    opened(tmp_path).stop()
    assert not service.scaling and not service.resources


def test_without_the_right_to_scale_a_model_gets_no_traffic_and_the_role_is_named(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    service.may_scale = False
    with pytest.raises(Missing) as error:
        deploy(tmp_path, TWO, service.url, most_instances=2)
    assert "Monitoring Contributor" in error.value.remedy
    assert service.deployments(name_of(service)) == ["blue"] and service.shares(name_of(service)) == {"blue": 100}


def test_nothing_is_sent_without_an_image(service, tmp_path):
    with pytest.raises(ValueError, match="azureml.image is empty"):
        deploy(tmp_path, ONE, service.url, image="")
    assert service.log == []


def test_nothing_is_sent_without_an_identity_that_may_read_the_model(service, tmp_path):
    with pytest.raises(ValueError, match="azureml.identity is empty: create a user-assigned identity"):
        deploy(tmp_path, ONE, service.url, identity="")
    assert service.log == []


def test_an_endpoint_stays_where_it_is(service, tmp_path):
    deploy(tmp_path, ONE, service.url)
    with pytest.raises(ValueError, match="on the backend azureml"):
        open_endpoint(tmp_path / "endpoints", "chat", "local")


@pytest.mark.parametrize(
    ("changed", "version", "token", "status"),
    [
        ({"colour": "red"}, API_VERSION, TOKEN, 400),
        ({"traffic": {"blue": 60}}, API_VERSION, TOKEN, 400),
        ({"traffic": {"blue": 100}}, API_VERSION, TOKEN, 400),
        ({"mirrorTraffic": {"blue": 60}}, API_VERSION, TOKEN, 400),
        ({"authMode": None}, API_VERSION, TOKEN, 400),
        ({}, "2019-01-01", TOKEN, 400),
        ({}, API_VERSION, "", 401),
        ({}, API_VERSION, TOKEN, 201),
    ],
)
def test_the_fake_refuses_what_the_real_one_refuses(service, changed, version, token, status):
    properties = {key: value for key, value in {"authMode": "Key", **changed}.items() if value is not None}
    body = {"location": "eastus", "properties": properties}
    assert put(service, "onlineEndpoints/x", body, version=version, token=token)[0] == status


def test_the_fake_refuses_models_outside_a_datastore_and_deployments_without_an_identity_that_has_rights(service):
    model = {
        "properties": {"modelType": "custom_model", "modelUri": "https://account.blob.core.windows.net/models/served/"}
    }
    assert put(service, "models/m/versions/1", model) == (400, "InvalidUri")
    made = Rendering("chat", config(service.url), "eastus")
    name, own = f"onlineEndpoints/{made.name}", made.endpoint_body()
    body = made.deployment_body("blue", ONE, files=[], inputs=[])
    service.assets |= {body["properties"][one]: {} for one in ("model", "environmentId")}
    assert put(service, name, {**own, "identity": {"type": "SystemAssigned"}})[0] == 201
    until(lambda: service.advance() or service.resources[name].state == "Succeeded")
    assert put(service, f"{name}/deployments/blue", body) == (400, "ImagePullUnauthorized")
    assert put(service, name, own)[0] == 200
    until(lambda: service.advance() or service.resources[name].state == "Succeeded")
    assert put(service, f"{name}/deployments/blue", body)[0] == 201


def put(service, path, body, *, version=API_VERSION, token=TOKEN):
    """Status of a plain PUT, and the code of its error."""
    request = urllib.request.Request(
        f"{service.url}{WHERE}/{path}?api-version={version}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        method="PUT",
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["code"]
