"""Plain requests against the fake of a workspace: what is sent, as whom, and how often a token is asked for."""

import base64
import json
from types import SimpleNamespace

import pytest
import yaml
from azure.core.credentials import AccessToken
from azureml_service import WHERE, serving
from azurite import Endpoint

from tasks.compute.azureml.client import Workspace
from tasks.compute.azureml.render import rendering, rest
from tasks.compute.job import Job
from tasks.config.cluster import ClusterConfig
from tasks.storage import open_files

AUDIENCE = "https://ml.azure.com"
REF = f"tokens/code@{'0123456789abcdef' * 4}"


@pytest.fixture
def service(tmp_path):
    with serving(Endpoint(1), tmp_path / "nodes", {}) as service:
        service.holds.clear()
        yield service


@pytest.fixture
def asked():
    """Scopes of the tokens that were asked for."""
    return []


@pytest.fixture
def made(service, asked, tmp_path):
    """A function that renders a job of some settings; returned with the workspace that it is for."""
    store = {"uri": "az://account/models/team", "credential": "managed_identity"}
    (tmp_path / "stores.yaml").write_text(yaml.safe_dump({"use": "team", "stores": {"team": store}}))

    def get_token(*scopes, **_):
        asked.extend(scopes)
        return AccessToken(jwt() if scopes[0].startswith(AUDIENCE) else service.token, 4102444800)

    def do(image="", **azureml):
        names = {
            "subscription_id": "s",
            "resource_group": "g",
            "workspace": "w",
            "compute": "cpu",
            "environment": "azureml://registries/r/environments/own/versions/1",
        }
        cluster = ClusterConfig(backend="azureml", azureml={**names, "endpoint": service.url, **azureml})
        what = {"name": "train", "token": "7" * 32, "program": "tasks.jobs.train", "settings": {}}
        job = Job(**what, inputs={"tokens": "/x"}, artifacts={"tokens": REF}, nodes=2, image=image, time_limit=3600.0)
        rendered = rendering(cluster, open_files(tmp_path, ""), job, tmp_path / "jobs" / job.id)
        return rendered, Workspace(cluster.azureml, lambda: SimpleNamespace(get_token=get_token))

    return do


def jwt():
    """A token of the form that a login gives."""
    parts = (json.dumps({"alg": "none"}), json.dumps({"aud": AUDIENCE, "tid": "t"}), "signature")
    return ".".join(base64.urlsafe_b64encode(part.encode()).rstrip(b"=").decode() for part in parts)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"identity": "user"},
        {"image": "my.azurecr.io/headway:1"},
        {"compute": "serverless", "size": "Standard_D4_v3"},
    ],
    ids=["plain", "user", "image", "serverless"],
)
def test_what_is_sent_is_what_was_rendered(service, made, settings):
    rendered, workspace = made(**settings)
    assets = [("data", asset) for asset in rendered.assets(by_id=True).values()]
    assets += [("environments", image)] if (image := rendered.image()) else []
    for _ in range(2):
        workspace.put_datastore(rendered.datastore)
    for kind, asset in assets * 2:
        workspace.put_asset(kind, str(asset.name), str(asset.version), rest(asset))
    submitted = workspace.put_job(rendered.name, rendered.request())
    assert service.jobs[rendered.name].body == rendered.request()
    studio = submitted["properties"]["services"]["Studio"]["endpoint"]
    assert (submitted["name"], studio) == (rendered.name, f"https://ml.azure.com/runs/{rendered.name}")
    assert len(service.assets) == len(assets)
    puts = [line for line in service.log if line.startswith("PUT")]
    assert puts.count(f"PUT {WHERE}/jobs/{rendered.name}") == 1 and len(puts) == 2 * len(assets) + 2


def test_a_token_is_asked_for_once(made, asked):
    """`az` is a process each time."""
    rendered, workspace = made()
    workspace.put_datastore(rendered.datastore)
    for asset in rendered.assets(by_id=True).values():
        workspace.put_asset("data", str(asset.name), str(asset.version), rest(asset))
    workspace.put_job(rendered.name, rendered.request())
    asked.clear()
    assert {workspace.job(rendered.name)["name"] for _ in range(3)} == {rendered.name}
    assert not asked
