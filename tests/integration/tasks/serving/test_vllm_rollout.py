"""A model of vLLM takes traffic and is kept for the way back, and one that computes otherwise gets none: as any other model."""

import json
import shutil

import pytest
from endpoint_stand import ask
from vllm_stand import Program, export_for_vllm, prompts_of
from waiting import until

from tasks.common.errors import JobFailed
from tasks.config.serving import DeploymentConfig
from tasks.serving.keys import add_key
from tasks.serving.local.endpoint import LocalEndpoint
from tasks.serving.servers import servers_of
from tasks.storage.manifest import describe

FIRST, SECOND, THIRD = (f"model/tiny@{digit * 64}" for digit in "123")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_for_vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def endpoint(tmp_path):
    made = LocalEndpoint(tmp_path / "endpoints", "a")
    yield made
    made.stop()


@pytest.mark.long
def test_rollout_refusal_and_the_way_back(endpoint, exported, tmp_path):
    program = Program(tmp_path)
    config = DeploymentConfig.model_validate(
        {
            "runtime": "vllm",
            "vllm": program.config().model_dump(),
            "rollout": {"steps": [50, 100], "step_requests": 0, "step_seconds": 0, "keep_warm_seconds": 300},
        }
    )
    golden = json.loads((exported / "golden.json").read_text())
    _, key = add_key(endpoint.folder, "ci")

    def deploy(ref, name):
        folder = shutil.copytree(exported, tmp_path / name)
        files = [file.model_dump() for file in describe(folder)]
        return endpoint.switch(endpoint.start(folder, ref, files=files, golden=golden, timeout=60, config=config))

    def answered(port):
        entry = prompts_of(exported)[0]
        body = {"prompt": entry["prompt"], "max_tokens": len(entry["tokens"]), "temperature": 0, "logprobs": 1}
        status, headers, output = ask(port, body, headers={"Authorization": f"Bearer {key}"})
        assert status == 200 and json.loads(output)["choices"][0]["text"] == entry["completion"]
        return headers["x-headway-model"]

    port = deploy(FIRST, "first").port
    assert ask(port, {"prompt": "a", "logprobs": 1})[0] == 401 and answered(port) == FIRST
    assert endpoint.observe().ready and endpoint.serves_from().by_vllm
    assert deploy(SECOND, "second").port == port and answered(port) == SECOND
    program.behave(noise=0.05)
    with pytest.raises(JobFailed, match="nats from PyTorch's on average"):
        deploy(THIRD, "third")
    assert answered(port) == SECOND
    program.behave()
    assert endpoint.go_back("slower").model_ref == FIRST
    until(lambda: answered(port) == FIRST)
    ladders = [json.loads((one / "serve.json").read_text())["ladder"] for one in servers_of(endpoint.folder)]
    assert ladders and not any(ladders)  # two of vLLM do not fit on one GPU beside a third
