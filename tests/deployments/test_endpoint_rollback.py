"""`headway rollback endpoint/NAME` as a person types it, with real servers, while clients ask 50 times a second."""

import pytest
from endpoint_stand import Clients
from support import Home
from tiny_model import export_tiny, files_of
from waiting import until

from tasks.endpoints.known import endpoint_of, require_accepted, settle_all
from tasks.endpoints.refused import refused_models
from tasks.errors import GateFailed
from tasks.process import read_json
from tasks.registry.audit import entries
from tasks.serving_config import DeploymentConfig
from tasks.storage import open_store

ONE, TWO = f"model/tiny@{'1' * 64}", f"model/tiny@{'2' * 64}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    made.path.mkdir()
    yield made
    endpoint_of(made.path, "api").stop()


def deploy(home, model, ref):
    endpoint, golden = endpoint_of(home.path, "api"), read_json(model / "golden.json")
    config = DeploymentConfig.model_validate({"endpoint": "api", "rollout": {"step_requests": 0, "step_seconds": 0}})
    return endpoint.switch(endpoint.start(model, ref, files=files_of(model), golden=golden, timeout=120, config=config))


def test_the_traffic_goes_back_in_seconds_with_a_reason_and_the_model_stays_away_until_it_is_promoted(home, model):
    at = deploy(home, model, ONE)
    refused = home.run("rollback", "endpoint/api", "--reason", "nothing before")
    assert refused.code == 2 and "no way back" in refused.said["error"]["message"]
    assert deploy(home, model, TWO).port == at.port
    assert home.run("rollback", "endpoint/api").code == 2  # without a reason
    would = home.ok("rollback", "endpoint/api", "--dry-run").said
    assert (would["before"], would["after"], would["changed"]) == (TWO, ONE, False)
    with Clients(at.port, rate=50) as clients:
        until(lambda: clients.got[TWO] > 20)
        said = home.ok("rollback", "endpoint/api", "--reason", "it answers nonsense").said
        until(lambda: clients.got[ONE] > 20)
    assert not clients.failed and (said["before"], said["after"], said["changed"]) == (TWO, ONE, True)
    assert said["seconds"] < 5
    served = endpoint_of(home.path, "api").observe()
    assert (served.model_ref, served.port, served.ready) == (ONE, at.port, True)
    entry = next(entry for entry in entries(open_store(home.path)) if entry.action == "rollback endpoint")
    assert (entry.what, entry.before, entry.after, entry.reason) == ("endpoint/api", TWO, ONE, "it answers nonsense")
    with pytest.raises(GateFailed, match="was rolled back on endpoint/api: it answers nonsense"):
        require_accepted(home.path, "api", TWO)
    require_accepted(home.path, "api", ONE)
    assert list(refused_models(home.path / "endpoints" / "api")) == [TWO]


@pytest.mark.long
def test_the_server_before_is_a_rung_of_the_new_one_and_the_settings_reach_both(home, model):
    deploy(home, model, ONE)
    deploy(home, model, TWO)
    folder = home.path / "endpoints" / "api"
    started = read_json(
        next(path for path in folder.glob("servers/*/serve.json") if read_json(path)["model_ref"] == TWO)
    )
    assert [(rung["name"], rung["model_ref"]) for rung in started["ladder"]] == [("previous", ONE)]
    assert started["limits"]["waiting"] == read_json(folder / "gateway" / "gateway.json")["limits"]["waiting"] == 32


def test_who_died_in_the_middle_is_settled_by_the_next_start_of_the_platform(home, model):
    deploy(home, model, ONE)
    endpoint, golden = endpoint_of(home.path, "api"), read_json(model / "golden.json")
    endpoint.start(model, TWO, files=files_of(model), golden=golden, timeout=120)  # and never switched
    assert endpoint.changes.open_change() is not None
    assert settle_all(home.path) == {"api": "reverted"} and settle_all(home.path) == {}
    assert endpoint.observe().model_ref == ONE
