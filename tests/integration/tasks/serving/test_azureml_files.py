"""The files of a managed online endpoint: read back by the SDK, its policy by a list of elements, and what `render` prints."""

import json
from xml.etree import ElementTree as Xml

import pytest
from azureml_deploying import IDENTITY
from azureml_endpoints import problem
from typer.testing import CliRunner

from deployments.cli.main import app
from tasks.azure import arm_client
from tasks.config.serving import DeploymentConfig
from tasks.serving.azureml.probes import counted, metrics_query
from tasks.serving.azureml.render import (
    LONGEST_NAME,
    Rendering,
    autoscale,
    azure_name,
    diagnostics,
    files_of,
    policy,
    require_loadable,
    require_policy,
)

REF = f"model/tiny@{'1' * 64}"
FILES = [{"path": "model.onnx", "size": 1000, "sha256": "0" * 64}]
ENTRA = {"tenant": "11111111-2222-3333-4444-555555555555", "audience": "api://chat", "applications": ["one", "two"]}


def made(*, access=None, deployment=None, **azureml) -> Rendering:
    where = {
        "subscription_id": "s",
        "resource_group": "g",
        "workspace": "w",
        "endpoint": "https://management.azure.com",
    }
    said = {**where, "image": "x.azurecr.io/headway/endpoint:0.2.0", "identity": IDENTITY, **azureml}
    settings = {"backend": "azureml", "azureml": said, "access": access or {}, **(deployment or {})}
    return Rendering("chat", DeploymentConfig.model_validate(settings), "eastus")


def test_what_is_sent_is_what_the_sdk_has_models_for():
    one = made(auth="aad_token", egress=False, public=False, tags={"team": "a"})
    body = one.deployment_body("green", REF, files=FILES, inputs=["2" * 64])
    said = body["properties"]
    assert not problem("onlineEndpoints", one.endpoint_body(expires=5.0)) and not problem("deployments", body)
    assert said["egressPublicNetworkAccess"] == "disabled" and said["requestSettings"]["requestTimeout"] == "PT1M"
    assert json.loads(said["environmentVariables"]["CONTENT"]) == {
        "kind": "model",
        "files": FILES,
        "inputs": ["2" * 64],
    }
    assert one.endpoint_body()["properties"] | {"properties": 0} == {
        "authMode": "AADToken", "description": "endpoint/chat, by Headway", "properties": 0, "traffic": {},
        "mirrorTraffic": {}, "publicNetworkAccess": "disabled",
    }  # fmt: skip
    assert "dataCollector" not in said and one.deployment_body("green", REF, files=FILES, inputs=["2" * 64]) == body


def test_a_deployment_of_vllm_is_one_that_the_sdk_takes_and_says_how_vllm_is_started():
    deployment = {"runtime": "vllm", "vllm": {"tensor_parallel_size": 2}}
    one = made(deployment=deployment, instance_type="Standard_NC48ads_A100_v4")
    body = one.deployment_body("green", REF, files=FILES, inputs=())
    assert not problem("deployments", body)
    assert body["properties"]["instanceType"] == "Standard_NC48ads_A100_v4"
    assert json.loads(body["properties"]["environmentVariables"]["VLLM"])["tensor_parallel_size"] == 2
    texts = files_of(one, "green", REF, files=FILES, inputs=(), store="az://account/models/team")
    assert '"tensor_parallel_size": 2' in texts["green-deployment.yml"]
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        made(deployment=deployment, instance_type="Standard_NC24ads_A100_v4").deployment_body(
            "green", REF, files=FILES, inputs=()
        )


def test_files_are_read_back_and_a_wrong_one_is_not():
    texts = files_of(made(most_instances=2), "blue", REF, files=FILES, inputs=(), store="az://account/models/team")
    assert {
        "datastore.yml",
        "endpoint.yml",
        "blue-deployment.yml",
        "environment.yml",
        "model.yml",
        "policy.xml",
        "autoscale-blue.json",
        "autoscale-green.json",
    } == set(texts)
    with pytest.raises(ValueError, match="blue-deployment.yml"):
        require_loadable({"blue-deployment.yml": texts["blue-deployment.yml"] + "colour: red\n"})


def test_a_size_that_the_model_fits_in():
    big = [{**FILES[0], "size": 4 * 2**30}]
    assert made().size(FILES) == ("Standard_DS3_v2", 4) and made().size(big) == ("Standard_DS3_v2", 4)
    assert made(instance_type="Standard_NC24ads_A100_v4").size(big)[0] == "Standard_NC24ads_A100_v4"
    with pytest.raises(ValueError, match="azureml.instance_type"):
        made().size([{**FILES[0], "size": 40 * 2**30}])


def test_names_are_the_same_again_and_short():
    config = made().config
    assert azure_name("chat", config) == azure_name("chat", config) != azure_name("chat2", config)
    assert (
        len(azure_name("a" * 60, config)) <= LONGEST_NAME
        and azure_name("x", config.model_copy(update={"name": "mine"})) == "mine"
    )


def test_a_policy_has_only_elements_that_are_known():
    root = Xml.fromstring(policy(made(access={"entra": ENTRA}, auth="aad_token", requests_per_day=20_000)))
    inbound = root.find("inbound")
    assert [one.tag for one in inbound][1:4] == ["validate-azure-ad-token", "rate-limit-by-key", "quota-by-key"]
    assert [one.text for one in inbound.iter("application-id")] == ["one", "two"]
    rate, quota = inbound.find("rate-limit-by-key"), inbound.find("quota-by-key")
    assert (rate.get("calls"), rate.get("renewal-period")) == ("6000", "60")
    assert (quota.get("calls"), quota.get("renewal-period")) == ("20000", "86400")
    assert quota.get("counter-key") == rate.get("counter-key")
    with pytest.raises(ValueError, match="send-request"):
        require_policy("<policies><inbound><send-request /></inbound></policies>")
    with pytest.raises(ValueError, match="no XML"):
        require_policy("<policies>")


def test_a_quota_is_below_what_the_rate_lets_through_or_not_written():
    assert "quota-by-key" not in policy(made())
    with pytest.raises(ValueError, match=r"requests_per_day is 8640000, .* no caller over 8640000 in a day"):
        made(requests_per_day=6000 * 1440)
    assert 'calls="8639999"' in policy(made(requests_per_day=6000 * 1440 - 1))


def test_rules_name_the_deployment_and_its_bounds():
    profile = autoscale(made(most_instances=3), "green")["properties"]["profiles"][0]
    assert profile["capacity"] == {"minimum": "1", "maximum": "3", "default": "1"}
    assert all(rule["metricTrigger"]["metricResourceUri"].endswith("/deployments/green") for rule in profile["rules"])
    assert diagnostics(made(log_analytics="/subscriptions/s/l"))["properties"]["workspaceId"] == "/subscriptions/s/l"


def test_counts_are_of_whole_minutes_and_not_of_callers_mistakes():
    def series(deployment, kind, *values):
        names = [
            {"name": {"value": "deployment"}, "value": deployment},
            {"name": {"value": "statusCodeClass"}, "value": kind},
        ]
        return {"metadatavalues": names, "data": [{"average": value} for value in values]}

    said = [
        series("green", "2xx", 5, None, 6),
        series("green", "5xx", 2),
        series("green", "4xx", 9),
        series("blue", "2xx", 1),
    ]
    assert counted({"value": [{"timeseries": said}]}) == {
        "green": {"requests": 13, "failures": 2},
        "blue": {"requests": 1, "failures": 0},
    }
    assert metrics_query(61.0, 200.0)["timespan"] == "1970-01-01T00:02:00Z/1970-01-01T00:03:20Z"


def test_render_prints_the_files_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    asked = [
        "endpoint",
        "render",
        "chat",
        "-c",
        "tiny",
        "-c",
        "azureml",
        "--set",
        f"deployment.azureml.identity={IDENTITY}",
        "--set",
        "deployment.azureml.image=x.azurecr.io/h:1",
    ]
    said = CliRunner().invoke(app, [*asked, "--to", str(tmp_path / "out"), "--json"])
    fields = json.loads(said.stdout)
    assert (tmp_path / "out" / "blue-deployment.yml").read_text() == fields["files"]["blue-deployment.yml"]
    assert fields["colour"] == "blue" and "placeholder" in fields["pending"][0]
    wrong = CliRunner().invoke(app, asked[:-2])
    assert "deployment.azureml.image" in str(wrong.exception)
    wrong = CliRunner().invoke(app, [*asked[:-4], *asked[-2:]])
    assert "deployment.azureml.identity is empty: create a user-assigned identity" in str(wrong.exception)


def test_a_workspace_has_one_id():
    assert arm_client.workspace_id(made().config).endswith(
        "/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
    )
