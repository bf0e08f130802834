"""An endpoint that the release before gateways left: its server holds the public port itself. It is taken over under load."""

from pathlib import Path

import pytest
from endpoint_stand import BLUE, GREEN, Clients, Endpoint
from waiting import until

from tasks.common import process
from tasks.config.serving import RolloutConfig
from tasks.serving.local.endpoint import LocalEndpoint
from tasks.serving.rollout import roll_out


@pytest.fixture
def old(tmp_path):
    """As it was: no colour, no routes, no gateway, and the server on the port."""
    made = Endpoint(tmp_path / "a")
    folder = made.folder / "servers" / "blue"
    process.write_json(folder / "public.json", {"port": made.port})
    record = {key: value for key, value in made.server("blue", BLUE).items() if key != "colour"}
    process.write_json(made.folder / "endpoint.json", {**record, "since": 0})
    yield made
    made.stop()


def test_it_is_observed_as_before(old):
    endpoint = LocalEndpoint(old.folder.parent, "a")
    served = until(endpoint.observe)
    assert (served.model_ref, served.port, served.ready) == (BLUE, old.port, True)
    assert endpoint.serves_from().running
    endpoint.stop()
    assert endpoint.observe() is None


def test_its_next_deploy_puts_a_gateway_before_it_and_no_request_is_lost(old):
    before = {**process.read_json(old.folder / "endpoint.json"), "colour": "blue"}
    green = old.server("green", GREEN)
    old.journal.begin(what="deploy", blue=before, green=green, config={**old.config, "keep_warm_seconds": 0.0})
    with Clients(old.port, rate=100) as clients:
        until(lambda: clients.got[BLUE] > 20)
        roll_out(
            old.traffic(),
            RolloutConfig(step_requests=10, least_seconds=0, step_seconds=20, max_slowdown=100),
            old.journal,
        )
        until(lambda: clients.got[GREEN] > 40)
    assert not clients.failed
    assert not process.alive(process.read_json(Path(before["folder"]) / "handle.json"))
    assert not (Path(before["folder"]) / "public.json").exists()
    assert LocalEndpoint(old.folder.parent, "a").observe().model_ref == GREEN
