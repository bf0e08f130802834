"""One tiny model and its golden answers, for all tests of what serves it."""

import asyncio
import json

import pytest
from tiny_model import export_tiny

from tasks.jobs.serving.runtime import Golden


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def answers(model):
    """Golden prompts: {"prompt", "completion", "tokens"}."""
    return json.loads((model / "golden.json").read_text())["prompts"]


@pytest.fixture(scope="session")
def golden(answers):
    return [Golden(each["prompt"], tuple(each["tokens"])) for each in answers]


@pytest.fixture
def run():
    """Runs coroutines in one loop, in the main thread: a model's process ends with the thread that started it."""
    with asyncio.Runner() as runner:
        yield runner.run
