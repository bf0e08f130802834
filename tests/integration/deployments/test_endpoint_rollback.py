"""`headway rollback endpoint/NAME` as a person types it, with real servers, while clients ask 50 times a second."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from endpoint_stand import Clients
from support import Home
from tiny_model import export_tiny, files_of
from waiting import limit, until

from deployments.watch.duties import Trusted
from tasks.artifacts import Model
from tasks.common.errors import GateFailed
from tasks.common.process import read_json
from tasks.config.flows import RetrainConfig
from tasks.config.serving import DeploymentConfig
from tasks.deploy import deploy as deploy_stage
from tasks.orchestration.run import lifecycle
from tasks.registry.versions import publish
from tasks.security.audit import account, entries
from tasks.security.signatures import sign
from tasks.serving.journal import refused_models
from tasks.serving.known import endpoint_of, require_accepted, settle_all
from tasks.serving.servers import runs
from tasks.signing.keys import ensure_key
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

ONE, TWO = f"model/tiny@{'1' * 64}", f"model/tiny@{'2' * 64}"
AT_ONCE = {"step_requests": 0, "step_seconds": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    made.path.mkdir()
    yield made
    endpoint_of(made.path, "api").stop()


@pytest.fixture
def versions(home, model):
    """Two versions of a model, both signed by the key of the home."""
    store = open_store(home.path)
    made = [
        publish(store, model, kind="model", inputs=(number * 64,), provenance=Provenance(name="tiny"))
        for number in "12"
    ]
    for each in made:
        sign(store, home.path, each)
    return made


def revoked(home, *, kept):
    """The key that signed everything is revoked; what is kept is signed with a new one."""
    new = ensure_key(home.path / "new")
    home.ok("trust", "add", "new", new.with_suffix(".pub"), "--may-sign", "*/*", "--reason", "rotation")
    home.ok("trust", "revoke", "home", "--reason", "the laptop was stolen")
    trust = home.path / "trust.yaml"
    trust.write_text(f"{trust.read_text()}sign_with:\n  key: {new}\n")
    sign(open_store(home.path), home.path, kept)


def deploy(home, model, ref):
    endpoint, golden = endpoint_of(home.path, "api"), read_json(model / "golden.json")
    config = DeploymentConfig.model_validate({"endpoint": "api", "rollout": AT_ONCE})
    return endpoint.switch(
        endpoint.start(model, ref, files=files_of(model), golden=golden, timeout=limit(120), config=config)
    )


def test_the_traffic_goes_back_in_seconds_with_a_reason_and_the_model_stays_away_until_it_is_promoted(
    home, model, versions
):
    """Not to a model whose key was revoked, nor to one whose signature somebody took away: signed anew, it may come back."""
    first, second = versions
    one, two = first.ref, second.ref
    at = deploy(home, model, one)
    refused = home.run("rollback", "endpoint/api", "--reason", "nothing before")
    assert refused.code == 2 and "no way back" in refused.said["error"]["message"]
    assert deploy(home, model, two).port == at.port
    assert home.run("rollback", "endpoint/api").code == 2  # without a reason
    (unless,) = (
        Path(rung["unless"])
        for path in home.path.glob("endpoints/api/servers/*/serve.json")
        for rung in read_json(path)["ladder"]
    )
    Trusted(home.path).tick(0.0)
    assert not unless.exists()
    revoked(home, kept=second)
    Trusted(home.path).tick(0.0)
    assert unless.exists()
    for options in (("--dry-run",), ("--reason", "two is rude")):
        refused = home.run("rollback", "endpoint/api", *options)
        assert refused.code == 5
        today = datetime.now(UTC).date()
        message = refused.said["error"]["message"]
        assert f"endpoint/api does not go back to {one}: the key home" in message
        assert f"revoked since {today} by {account()}: the laptop was stolen" in message
        assert f"headway sign {one} --reason TEXT" in refused.said["error"]["remedy"]
    assert endpoint_of(home.path, "api").observe().model_ref == two
    assert refused_models(home.path / "endpoints" / "api") == {}
    (home.folder_of(one) / "statement.json").unlink()
    assert home.run("rollback", "endpoint/api", "--reason", "two is rude").code == 5
    home.ok("sign", one, "--reason", "it is ours")
    Trusted(home.path).tick(0.0)
    assert not unless.exists()

    would = home.ok("rollback", "endpoint/api", "--dry-run").said
    assert (would["before"], would["after"], would["changed"]) == (two, one, False)
    with Clients(at.port, rate=50) as clients:
        until(lambda: clients.got[two] > 20)
        said = home.ok("rollback", "endpoint/api", "--reason", "it answers nonsense").said
        until(lambda: clients.got[one] > 20)
    assert not clients.failed and (said["before"], said["after"], said["changed"]) == (two, one, True)
    assert said["seconds"] < limit(5)
    served = endpoint_of(home.path, "api").observe()
    assert (served.model_ref, served.port, served.ready) == (one, at.port, True)
    entry = next(entry for entry in entries(open_store(home.path)) if entry.action == "rollback endpoint")
    assert (entry.what, entry.before, entry.after, entry.reason) == ("endpoint/api", two, one, "it answers nonsense")
    with pytest.raises(GateFailed, match="was rolled back on endpoint/api: it answers nonsense"):
        require_accepted(home.path, "api", two)
    require_accepted(home.path, "api", one)
    assert list(refused_models(home.path / "endpoints" / "api")) == [two]
    words = home.command("promote", two, "--reason", "it was the prompt")
    ran = subprocess.run(words, env=home.environment(), capture_output=True, text=True, check=True)
    assert "endpoint/api may serve it again" in ran.stdout
    require_accepted(home.path, "api", two)


def test_a_deploy_over_a_model_whose_key_was_revoked_goes_one_way(home, model, versions, monkeypatch):
    """No share of requests goes to the revoked one again: not by a step that is lost, and not when the new model crashes."""
    one, two = versions
    deploy(home, model, one.ref)
    revoked(home, kept=two)
    monkeypatch.setenv("HEADWAY_HOME", str(home.path))
    settings = {"endpoint": "api", "rollout": {**AT_ONCE, "mirror": 10}}
    config = RetrainConfig.model_validate({"deployment": settings})
    with lifecycle("retrain", config, subject="tiny", stages=("deploy",)) as run:
        call = deploy_stage._call((Model(name="tiny", version=two.version, uri=""), config.deployment), {})
        deploy_stage._reuse_or_execute(run, run.outcome_for("deploy"), call)
    endpoint = endpoint_of(home.path, "api")
    assert endpoint.observe().model_ref == two.ref
    begun = max(n for n, line in enumerate(endpoint.changes.lines()) if line["event"] == "begin")
    change = [(line["event"], line.get("step")) for line in endpoint.changes.lines()[begun:]]
    assert change == [("begin", None), ("step", "mirror"), ("commit", None), ("done", None)]
    started = [read_json(path) for path in endpoint.folder.glob("servers/*/serve.json")]
    assert [each["ladder"] for each in started if each["model_ref"] == two.ref] == [[]]
    entry = next(entry for entry in entries(open_store(home.path)) if entry.action == "deploy")
    assert "there is no way back" in entry.reason and "the laptop was stolen" in entry.reason


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
    """And what the first deploy of an endpoint left when it died is seen, and stopped, by the next command that looks."""
    endpoint, golden = endpoint_of(home.path, "api"), read_json(model / "golden.json")
    endpoint.start(model, ONE, files=files_of(model), golden=golden, timeout=limit(120))  # and never switched
    (started,) = endpoint.folder.glob("servers/*")
    assert runs(started)
    assert home.ok("endpoint", "list").said["endpoints"] == []
    assert not runs(started) and endpoint.changes.open_change() is None

    deploy(home, model, ONE)
    endpoint.start(model, TWO, files=files_of(model), golden=golden, timeout=limit(120))  # and never switched
    assert endpoint.changes.open_change() is not None
    assert settle_all(home.path) == {"api": "reverted"} and settle_all(home.path) == {}
    assert endpoint.observe().model_ref == ONE
