"""A first deploy whose port or address the gateway cannot have leaves nothing open: the next one works."""

import socket
from contextlib import closing

import pytest
from endpoint_stand import GREEN, Endpoint, ask

from tasks.common import process
from tasks.common.errors import HeadwayError
from tasks.config.serving import DeploymentConfig
from tasks.serving.keys import add_key
from tasks.serving.known import settle_all
from tasks.serving.local.endpoint import LocalEndpoint
from tasks.serving.rollout import take_over


@pytest.fixture
def endpoint(tmp_path):
    made = Endpoint(tmp_path / "endpoints" / "a")
    yield made
    made.stop()


def first_deploy(endpoint):
    green = endpoint.server("green", GREEN)
    endpoint.journal.begin(what="deploy", blue=None, green=green, config=endpoint.config)
    return endpoint.traffic()


def test_an_address_that_others_reach_is_refused_before_anything_begins(endpoint, tmp_path):
    config = DeploymentConfig.model_validate({"access": {"host": "0.0.0.0"}})
    local = LocalEndpoint(tmp_path / "endpoints", "a")

    def deploy():
        local.start(tmp_path, GREEN, files=[], golden={"prompts": []}, timeout=0.01, config=config)

    with pytest.raises(ValueError, match=r"host 0.0.0.0 is not loopback.*headway endpoint key add"):
        deploy()
    assert not endpoint.journal.lines()
    add_key(endpoint.folder, "ci")
    with pytest.raises(HeadwayError):  # there is no model in the folder, but the address was taken
        deploy()
    assert [line["event"] for line in endpoint.journal.lines()] == ["begin", "revert", "reverted"]


def test_a_gateway_that_cannot_start_gives_the_first_deploy_back_and_the_next_one_works(endpoint, tmp_path):
    endpoint.config["gateway"] = {"access": {"host": "0.0.0.0"}}
    with pytest.raises(HeadwayError, match="the gateway does not follow"):
        take_over(first_deploy(endpoint), endpoint.journal)
    assert [line["event"] for line in endpoint.journal.lines()] == ["begin", "revert", "reverted"]
    assert not endpoint.gateway.running and settle_all(tmp_path) == {}
    endpoint.config["gateway"] = {}
    take_over(first_deploy(endpoint), endpoint.journal)
    assert ask(endpoint.port, {"prompt": "a", "max_tokens": 4})[0] == 200


def test_the_port_of_before_is_looked_at_before_anything_begins(endpoint, tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        folder = str(endpoint.folder / "servers" / "gone")
        process.write_json(endpoint.folder / "endpoint.json", {"port": port, "folder": folder, "colour": "blue"})
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be used"):
            LocalEndpoint(tmp_path / "endpoints", "a").start(tmp_path, GREEN, files=[], golden={}, timeout=1)
    assert not endpoint.journal.lines()
