"""Each of the first losses beside trl's, on the same conversations, with the same weights, seed and hyperparameters, in fp32.

HEADWAY_TRL names a folder that trl was installed into (`pip install --no-deps --target FOLDER trl`); without it this is skipped.
HEADWAY_TRL_BASE may name a Hugging Face folder of another base model, HEADWAY_TRL_STEPS another number of steps than 100.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conversation_material import CONFIG as PREPROCESSING
from conversation_material import TEMPLATE, conversations, make_chat_base, start_preprocessing
from support import python_path
from training_runs import Forks, numbers, said_by

from tasks.config.training import LoraConfig, TrainingConfig
from tasks.data.corpus.conversations import read
from tasks.data.tokenizing.splits import Splits
from tasks.jobs.data.samples import open_conversations

ROOT, HERE = Path(__file__).parents[5], Path(__file__)
MARKED = TEMPLATE.replace(
    "message['content'] + eos_token",
    "'' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ ''",
)
STEPS = int(os.environ.get("HEADWAY_TRL_STEPS", "100"))
CONFIG = TrainingConfig(
    model="chat",
    objective="sft",
    base="checkpoint/base",
    sequence_length=128,
    global_batch_size=4,
    micro_batch_size=2,
    steps=STEPS,
    warmup_steps=min(10, STEPS - 1),
    learning_rate=1e-3,
)
ADAPTED = CONFIG.model_copy(update={"lora": LoraConfig(rank=4, alpha=8.0), "learning_rate": 1e-2})
LARGE = {"learning_rate": 1e-4}
"""Of a base model that was trained."""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(os.environ.get("HEADWAY_TRL") or "/nowhere") / "trl").is_dir(),
        reason="HEADWAY_TRL names no folder with trl: pip install --no-deps --target FOLDER trl",
    ),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    named = os.environ.get("HEADWAY_TRL_BASE")
    return Path(named) if named else make_chat_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def prepared(base, tmp_path_factory):
    """Records of the training split, and the tokens."""
    folder = tmp_path_factory.mktemp("preprocessing")
    records = conversations(120)
    (folder / "dataset").mkdir()
    (folder / "dataset" / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = PREPROCESSING.model_copy(update={"chat_template": TEMPLATE})
    assert start_preprocessing(folder / "job", folder / "dataset", base, config) == 0
    splits = Splits((1 - config.heldout_fraction, config.heldout_fraction))
    return [each for each in records if not splits.of(read(each)[0])], folder / "job" / "out" / "tokens"


def config_of(kind):
    config = CONFIG if kind == "full" else ADAPTED
    return config.model_copy(update=LARGE) if os.environ.get("HEADWAY_TRL_BASE") else config


@pytest.fixture(scope="module")
def theirs(base, prepared, tmp_path_factory):
    """The losses of trl, by kind, of the conversations in the order in which ours are drawn."""
    records, tokens = prepared
    source = open_conversations(tokens, CONFIG)
    assert source.count == len(records)
    order = source._order.at(np.arange(CONFIG.steps * CONFIG.global_batch_size)).tolist()
    spec = {
        "base": str(base),
        "messages": [records[number]["messages"] for number in order],
        "template": MARKED,
        "trainings": {kind: config_of(kind).model_dump(mode="json") for kind in ("full", "lora")},
        "threads": 1,
    }
    folder = tmp_path_factory.mktemp("trl")
    (folder / "spec.json").write_text(json.dumps(spec))
    path = os.pathsep.join([os.environ["HEADWAY_TRL"], python_path(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    program = ROOT / "tests" / "support" / "trl_losses.py"
    command = [sys.executable, str(program), str(folder / "spec.json"), str(folder / "trl.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "trl.json").read_text())


@pytest.fixture(scope="module")
def launch():
    forks = Forks("import peft")
    yield forks
    forks.close()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_losses_are_those_of_trl(kind, base, prepared, theirs, launch, tmp_path, capsys):
    config, (_, tokens) = config_of(kind), prepared
    job = tmp_path / "job"
    job.mkdir()
    settings = {"training": config.model_dump(mode="json"), "checkpoint_every_steps": 1000, "keep_checkpoints": 2}
    inputs = {"tokens": str(tokens), "base": str(base)}
    spec = {"program": "tasks.jobs.train", "settings": settings, "inputs": inputs}
    (job / "config.json").write_text(json.dumps(spec))
    assert launch(job, ranks=1) == [0], said_by(job)
    ours, expected = [values[0] for _, values in sorted(numbers(job).items())], theirs[kind]["losses"]
    worst = max(abs(one - other) / other for one, other in zip(ours, expected, strict=True))
    with capsys.disabled():
        steps = [step for step in (1, 10, 50, 100) if step <= len(ours)]
        shown = {step: (round(ours[step - 1], 6), round(expected[step - 1], 6)) for step in steps}
        print(f"\n{kind}: {len(ours)} losses, largest relative difference {worst:.1e}; ours and trl's by step: {shown}")
    assert len(ours) == STEPS and ours == pytest.approx(expected, rel=1e-3)
    assert ours[-1] < ours[0]
