"""What Megatron-LM trains on: its own GPTDataset, of megatron-core, over two datasets that we wrote and a mixture of them."""

import json
import subprocess
import sys

import numpy as np
import pytest
from token_material import make_tokenizer
from waiting import limit

from tasks.data.tokenizing.mixture import data_arguments, parse_mixture
from tasks.data.tokenizing.run import plan, preprocess
from tasks.data.tokenizing.tokenizer import open_tokenizer
from tasks.data.tokenizing.units import Work
from tasks.formats.mmididx import open_tokens

pytestmark = (
    pytest.mark.long
)  # test_megatron.py shows that our bytes are those of Megatron, and that its core reads them

LENGTH, SAMPLES = 64, 400
# In a process of its own: it needs a process group, and takes seconds to import.
PROGRAM = """
import json, sys
import torch.distributed
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

class Tokenizer:
    eod = pad = int(sys.argv[3])
    vocab_size = int(sys.argv[4])
    unique_identifiers = {"name": "test"}

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/group", rank=0, world_size=1)
config = GPTDatasetConfig(
    random_seed=1, sequence_length=int(sys.argv[5]), blend=get_blend_from_list(json.loads(sys.argv[2])), split="1,0,0",
    path_to_cache=f"{sys.argv[1]}/cache", tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
    eod_mask_loss=False,
)
train = BlendedMegatronDatasetBuilder(GPTDataset, [int(sys.argv[6]), 0, 0], lambda: True, config).build()[0]
samples = [{"dataset": int(train.dataset_index[i]), "tokens": train[i]["tokens"].tolist()} for i in range(len(train))]
json.dump(samples, open(f"{sys.argv[1]}/samples.json", "w"))
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """What Megatron draws from a mixture of 70 % and 30 %, and the two prefixes."""
    folder = tmp_path_factory.mktemp("gpt")
    make_tokenizer("bytes", folder / "tokenizer")
    tokenizer = open_tokenizer(folder / "tokenizer")
    prefixes = []
    for name in ("code", "prose"):
        documents = (
            json.dumps({"text": f"{name} {n}: " + " ".join(f"{name}{n * k % 89}" for k in range(80))})
            for n in range(90)
        )
        (folder / f"{name}.jsonl").write_text("\n".join(documents))
        made = preprocess(plan([folder / f"{name}.jsonl"], Work(tokenizer), prefix=folder / name), workers=1)
        prefixes.append(made.outputs[0]["bin"].removesuffix(".bin"))
    words = data_arguments(parse_mixture(["0.7", prefixes[0], "0.3", prefixes[1]]))[1:]
    told = (folder, json.dumps(words), tokenizer.require_eod(), tokenizer.vocab_size, LENGTH, SAMPLES)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, told)], capture_output=True, text=True, timeout=limit(240)
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "samples.json").read_text()), prefixes


def test_megatron_draws_by_the_weights(samples):
    drawn, _ = samples
    assert len(drawn) >= SAMPLES
    counts = np.bincount([sample["dataset"] for sample in drawn[:SAMPLES]])
    assert counts.tolist() == [280, 120]


def test_every_sample_stands_in_the_dataset_that_it_was_drawn_from(samples):
    drawn, prefixes = samples
    streams = []
    for prefix in prefixes:
        opened = open_tokens(prefix)
        documents = [opened.tokens[a:b] for a, b in zip(opened.boundaries, opened.boundaries[1:], strict=False)]
        streams.append([document.tolist() for document in documents])
    for sample in drawn[:SAMPLES]:
        documents = streams[sample["dataset"]]
        assert any(_starts_within(sample["tokens"], document) for document in documents)


def _starts_within(tokens, document):
    """Whether a sample begins with a piece of a document, to its end or the document's."""
    for start in range(len(document)):
        piece = document[start : start + len(tokens)]
        if tokens[: len(piece)] == piece:
            return True
    return False
