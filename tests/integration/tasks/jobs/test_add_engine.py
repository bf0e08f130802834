"""An engine that is added by the recipe of CONTRIBUTING.md trains, and no step of the recipe is without need."""

import pytest
from recipes import Copy, steps_of
from training_runs import write_tokens

STEPS = steps_of("Add an engine")
FILES = [file for step in STEPS for file in step]
NEW = {
    "tasks/config/engines/NAME.py": '''
from tasks.config.engines import Engine, Planned, require_no_megatron


class SignsEngine(Engine):
    """Our loop, which steps by the signs of gradients."""

    loop = "tasks.jobs.training.signs_engine:SignsEngine"
    planned = Planned(state_bytes={"bf16": (2, 2, 4)}, zero_stages=(0,), offloads=False)

    def require_fits(self, training, execution):
        require_no_megatron("signs", execution)
        if execution.parallel != "ddp":
            raise ValueError(f"the engine signs has no execution.parallel {execution.parallel}: use ddp")

    def job_settings(self, training, execution):
        return {"scale": execution.signs.scale}

    def execution(self, *, zero, offload, virtual, sequence_parallel, options):
        return {"parallel": "ddp"}
''',
    "tasks/jobs/training/NAME_engine.py": """
import torch

from tasks.jobs.training import torch_engine


class SignsEngine(torch_engine.TorchEngine):
    def update(self, learning_rate):
        scale = self.setting.rank.settings["scale"]
        for parameter in self.network.parameters():
            parameter.grad.copy_(torch.sign(parameter.grad) * scale)
        super().update(learning_rate)
""",
}
EDITS = {
    "tasks/config/engines/registry.py": [
        (
            "from tasks.config.engines.torch import",
            "from tasks.config.engines.signs import SignsEngine\nfrom tasks.config.engines.torch import",
        ),
        ('    "megatron": MegatronEngine(),\n', '    "megatron": MegatronEngine(),\n    "signs": SignsEngine(),\n'),
    ],
    "tasks/config/training.py": [
        ('"deepspeed", "megatron"]', '"deepspeed", "megatron", "signs"]'),
        (
            "class ExecutionConfig(Settings):\n",
            "class SignsConfig(Settings):\n    scale: float = 0.5\n\n\nclass ExecutionConfig(Settings):\n",
        ),
        (
            "    megatron: MegatronConfig = MegatronConfig()\n",
            "    megatron: MegatronConfig = MegatronConfig()\n    signs: SignsConfig = SignsConfig()\n",
        ),
    ],
    "docs/training.md": [
        (
            "| `megatron` | Megatron-LM's |",
            "| `signs` | ours | nothing | small models |\n| `megatron` | Megatron-LM's |",
        )
    ],
}
LISTED = """
from pathlib import Path
from typing import get_args
from tasks.config.engines.registry import ENGINES
from tasks.config.training import EngineName

table = Path("docs/training.md").read_text()
print(*[f"{name} has no row" for name in ENGINES if f"| `{name}` |" not in table], end="")
print(*{*get_args(EngineName)} ^ {*ENGINES}, end="")
"""
RUN = """
import importlib.util
import sys
from pathlib import Path
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig
from tasks.config.engines.registry import ENGINES
from tasks.config.flows import RetrainConfig
from tasks.planning.configured import division_of, settings_of
from tasks.planning.checkpointing import checkpoint_bytes
from tasks.planning.memory import Each, bytes_each
from tasks.planning.prediction import Division
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

home, tokens = Path(sys.argv[1]), Path(sys.argv[2])
network = {"layers": 1, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64}
training = {"engine": "signs", "network": network, "sequence_length": 32, "steps": 6, "warmup_steps": 1}
config = RetrainConfig.model_validate({"training": training, "execution": {"signs": {"scale": 0.25}}})
engine = ENGINES[config.training.engine]
assert importlib.util.find_spec(engine.loop.split(":")[0]), engine.loop
settings = {"training": config.training.model_dump(mode="json"), "execution": config.execution.model_dump(mode="json"),
            "checkpoint_every_steps": 3, "keep_checkpoints": 2, **engine.job_settings(config.training, config.execution)}
job = Job(name="train", token="d" * 32, program=engine.program, settings=settings, inputs={"tokens": str(tokens)},
          progress="checkpoints/LATEST")
cluster = ClusterConfig(ranks_per_node=1)
done = run(job, backend=open_backend(cluster), folder=home / "jobs" / job.id, journal=StoreJournal(open_store(home)),
           watch=Watch(), cluster=cluster)
assert done.result["metrics"]["loss"] > 0 and (done.output / "model.safetensors").is_file(), done
assert division_of(config.training, config.execution)["zero"] == 0
assert bytes_each(Division(engine="signs")) == Each(2, 2, 4) and checkpoint_bytes(10, engine="signs") < 10 * 16
assert settings_of(Division(engine="signs"))["execution"]["parallel"] == "ddp"
try:
    RetrainConfig.model_validate({"training": training, "execution": {"parallel": "fsdp"}})
except ValueError as error:
    assert "the engine signs has no execution.parallel fsdp" in str(error)
else:
    print("require_fits is not asked")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("headway"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def test_the_engines_that_there_are_are_listed_where_the_recipe_says(copy):
    assert copy.problems(LISTED) == ""


def test_the_recipe_touches_few_files_and_says_all_that_an_engine_needs(copy, tokens, tmp_path):
    assert sorted(FILES) == sorted([*NEW, *EDITS])
    assert len(EDITS) < 4  # and pyproject.toml, for an engine with a package of its own
    try:
        copy.follow(FILES, "signs", NEW, EDITS)
        assert copy.problems(LISTED) == ""
        assert copy.problems(RUN, str(tmp_path), str(tokens)) == ""
    finally:
        copy.undo()


@pytest.mark.parametrize("left_out", FILES)
def test_no_step_is_without_need(copy, tokens, tmp_path, left_out):
    try:
        copy.follow([file for file in FILES if file != left_out], "signs", NEW, EDITS)
        assert copy.problems(LISTED) or copy.problems(RUN, str(tmp_path), str(tokens))
    finally:
        copy.undo()
