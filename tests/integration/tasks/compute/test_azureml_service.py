"""The fake of Azure ML refuses what the real one refuses: a wrong body, a wrong API version, no token. And it keeps state."""

import json
import urllib.error
import urllib.request

import pytest
from azureml_service import API_VERSION, TOKEN, WHERE, serving
from azurite import Endpoint

DATASTORES = "azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores"
KNOWN = {
    "datastoreType": "AzureBlob",
    "accountName": "a",
    "containerName": "c",
    "credentials": {"credentialsType": "None"},
}
BODY = {
    "properties": {
        "jobType": "Command",
        "command": "true",
        "environmentId": "azureml://registries/azureml/environments/e/labels/latest",
        "computeId": f"{WHERE}/computes/cpu",
        "resources": {"instanceCount": 1},
        "tags": {"headway": "job"},
    }
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(Endpoint(1), tmp_path_factory.mktemp("nodes"), {}) as service:
        service.holds.clear()
        assert ask(service, "PUT", f"{WHERE}/datastores/known", {"properties": KNOWN})[0] == 201
        yield service


def ask(service, method, path, body=None, *, token=TOKEN, version=API_VERSION):
    request = urllib.request.Request(
        f"{service.url}{path}?api-version={version}",
        method=method,
        data=json.dumps(body).encode() if body else None,
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"null"), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), dict(error.headers)


def changed(**fields):
    properties = {key: value for key, value in {**BODY["properties"], **fields}.items() if value is not ...}
    return {"properties": properties}


def input_at(uri):
    return changed(inputs={"code": {"jobInputType": "uri_file", "mode": "Download", "uri": uri}})


def output_at(uri, mode="Upload"):
    return changed(outputs={"folder": {"jobOutputType": "uri_folder", "mode": mode, "uri": uri}})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (changed(comand="true"), "/properties/comand is no field of CommandJob"),
        (changed(command=...), "/properties/command is required"),
        (changed(resources={"instanceCount": "2"}), "'2', and must be int"),
        (changed(tags={"steps": 3}), "/properties/tags must have texts only"),
        (changed(distribution={"distributionType": "PyTorch", "nodes": 2}), "nodes is no field of PyTorch"),
        (changed(computeId=f"{WHERE}/computes/other"), "computes/other not found"),
        (changed(identity={"identityType": "UserIdentity"}), "needs the header x-azureml-token"),
        (changed(command="x ${{inputs.data}}"), "the command names the input data"),
        (input_at("https://account.blob.core.windows.net/models/a.zip"), "private storage has no other name"),
        (input_at("azureml://datastores/known/paths/a.zip"), "is no path in a datastore of this workspace"),
        (input_at(f"{DATASTORES}/other/paths/a.zip"), "the datastore other, which the workspace does not have"),
        (output_at(f"{DATASTORES}/known/paths/out/", mode="Direct"), "mode Direct is none of ReadWriteMount, Upload"),
        (output_at("https://account.blob.core.windows.net/models/out/"), "private storage has no other name"),
        (changed(environmentId=f"{WHERE}/environments/e/versions/1"), "environments/e/versions/1 not found"),
    ],
)
def test_a_wrong_body_is_refused(service, body, said):
    code, answer, _ = ask(service, "PUT", f"{WHERE}/jobs/wrong", body)
    assert code == 400 and said in answer["error"]["message"]
    assert "wrong" not in service.jobs


def test_a_missing_token_and_another_version_are_refused(service):
    assert ask(service, "PUT", f"{WHERE}/jobs/a", BODY, token="")[0] == 401
    assert ask(service, "PUT", f"{WHERE}/jobs/a", BODY, token="another")[0] == 401
    code, answer, _ = ask(service, "PUT", f"{WHERE}/jobs/a", BODY, version="2020-01-01")
    assert (code, answer["error"]["code"]) == (400, "InvalidApiVersionParameter")
    assert ask(service, "PUT", f"{WHERE}/jobs/a", BODY, version="2024-01-02-preview")[0] == 400
    assert ask(service, "GET", "/subscriptions/s/resourceGroups/other/providers/x")[0] == 404
    assert not service.submitted


def test_the_same_name_is_one_job_and_cancelling_is_answered_later(service):
    assert ask(service, "PUT", f"{WHERE}/jobs/one", BODY)[0] == 201
    assert ask(service, "PUT", f"{WHERE}/jobs/one", changed(tags={"headway": "again"}))[0] == 200
    assert service.submitted == ["one"]
    assert ask(service, "GET", f"{WHERE}/jobs/one")[1]["properties"]["tags"] == {"headway": "again"}
    code, _, headers = ask(service, "POST", f"{WHERE}/jobs/one/cancel")
    assert code == 202 and headers["Retry-After"] == "1"
    page = headers["Azure-AsyncOperation"].removeprefix(service.url).partition("?")[0]
    assert [ask(service, "GET", page)[1]["status"] for _ in range(2)] == ["InProgress", "Succeeded"]
