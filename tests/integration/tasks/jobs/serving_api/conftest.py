"""One tiny model, and one server of it that most tests ask."""

import json

import pytest
from api_stand import serving
from tiny_model import export_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def golden(model):
    return json.loads((model / "golden.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), model) as running:
        yield running
