"""Logits in parts: the same scores as of the whole, in memory that does not grow with the window; and what a GPU has room for."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_model
import torch
from suite_material import suite_bench, tiny_measured
from transformers import Gemma2Config, Gemma2ForCausalLM

from tasks.config.evaluation import EvaluationConfig, LabelledFile
from tasks.jobs.evaluation import generating
from tasks.jobs.evaluation.generating import continued
from tasks.jobs.evaluation.heldout import Encoded
from tasks.jobs.evaluation.labelled import label_scores
from tasks.jobs.evaluation.scoring import load_measured, load_model, require_room, score, weight_bytes

VOCABULARY = tiny_model.VOCABULARY
GIB = 1 << 30
WIDE = """
import json, resource, sys
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
from tasks.jobs.evaluation.heldout import Encoded
from tasks.jobs.evaluation.scoring import score
from tasks.jobs.node.runtime import Rank
from pathlib import Path

torch.manual_seed(0)
torch.set_num_threads(2)
vocabulary, length, folder = 128_000, 4096, Path(sys.argv[1])
shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=vocabulary, max_position_embeddings=length)).eval()
rank = Rank(folder=folder, rank=0, world_size=1, attempt=1, settings={}, inputs={}, output=folder)
short = Encoded([np.arange(16)], 0)
score(model, short, context=length, rank=rank)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
long = Encoded([np.random.default_rng(1).integers(0, vocabulary, length)], 0)
bits = score(model, long, context=length, rank=rank).bits
print(json.dumps({"kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, "bits": bits.tolist()}))
"""


def gemma2(folder):
    """An architecture whose head does more than multiply: it bends the logits."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    torch.manual_seed(1)
    config = Gemma2Config(
        **shape,
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        final_logit_softcapping=2.0,
        initializer_range=0.3,
        max_position_embeddings=tiny_model.CONTEXT,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)
    tiny_model.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module", params=[tiny_model.make_checkpoint, tiny_model.make_gpt2, gemma2], ids=lambda make: make.__name__
)
def measured(request, tmp_path_factory):
    checkpoint = request.param(tmp_path_factory.mktemp("checkpoint"))
    return checkpoint, load_model(checkpoint)


@pytest.fixture
def in_parts(monkeypatch):
    """Windows of more than 30 positions are large, and are looked at 7 positions at a time."""

    def begin():
        monkeypatch.setattr(generating, "WHOLE_LOGITS", 30 * VOCABULARY)
        monkeypatch.setattr(generating, "PART_LOGITS", 7 * VOCABULARY)

    return begin


def test_scores_in_parts_are_those_of_the_whole(measured, in_parts, tmp_path):
    bench = suite_bench(tmp_path, measured)
    generator = np.random.default_rng(0)
    encoded = Encoded([generator.integers(0, VOCABULARY, length) for length in (100, 31, 30, 5, 1)], 0)
    whole = score(bench.model, encoded, context=64, rank=bench.rank)
    in_parts()
    parts = score(bench.model, encoded, context=64, rank=bench.rank)
    assert parts.bits == pytest.approx(whole.bits, rel=1e-6)
    assert parts.correct.tolist() == whole.correct.tolist() and parts.tokens.tolist() == whole.tokens.tolist()
    assert parts.certainty == pytest.approx(whole.certainty, rel=1e-5)


def test_labels_and_what_is_written_are_those_of_the_whole(measured, in_parts, tmp_path):
    bench = suite_bench(tmp_path, measured)
    file = LabelledFile(name="mood", file="/none")
    texts, names = ["def first(values): " * 4, "x"], ["return self.values", "no"]
    prompts = [[0, *range(20, 70)], [0, 5], [7]]
    scores = label_scores(bench, file, texts, names)
    greedy, drawn = continued(bench, prompts, 12), continued(bench, prompts, 12, seed=3)
    in_parts()
    assert label_scores(bench, file, texts, names) == pytest.approx(scores, rel=1e-6)
    assert continued(bench, prompts, 12) == greedy and continued(bench, prompts, 12, seed=3) == drawn
    assert len({tuple(row) for row in [*greedy, *drawn]}) > 3


@pytest.mark.long
def test_a_long_window_of_a_large_vocabulary_takes_bounded_memory(tmp_path):
    """2 GiB of logits, in the memory of a part: the peak of the process with and without them is compared."""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    ran = subprocess.run(
        [sys.executable, "-c", WIDE, tmp_path], env=environment, capture_output=True, text=True, check=True
    )
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["kib"] < 256 << 10
    assert told["bits"][0] == pytest.approx(4096 * math.log2(128_000), rel=0.01)


def test_half_precision_measures_another_network_of_half_the_size(tmp_path):
    checkpoint, model = tiny_measured(tmp_path)
    half, _ = load_measured(checkpoint, EvaluationConfig(precision="bf16", device="cpu"))
    assert half.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert weight_bytes(checkpoint, "fp32") == 2 * weight_bytes(checkpoint, "bf16")
    assert weight_bytes(checkpoint, "fp32") == sum(each.numel() * 4 for each in model.parameters())
    bench = suite_bench(tmp_path, (checkpoint, half))
    encoded = Encoded([np.random.default_rng(0).integers(0, VOCABULARY, 60)], 0)
    bits = [score(each, encoded, context=64, rank=bench.rank).bits[0] for each in (model, half)]
    assert bits[1] == pytest.approx(bits[0], rel=0.02) and bits[1] != bits[0]
    assert continued(bench, [[0, 5]], 4)


def test_a_network_that_a_gpu_has_no_room_for_is_refused_with_what_to_do():
    require_room(26 * GIB, 80 * GIB, precision="fp32")
    with pytest.raises(ValueError, match="280.0 GiB in fp32.*80.0 GiB free.*precision: bf16.*evaluation.device: cpu"):
        require_room(280 * GIB, 80 * GIB, precision="fp32")
    with pytest.raises(ValueError, match="140.0 GiB in bf16") as told:
        require_room(140 * GIB, 80 * GIB, precision="bf16")
    assert "precision: bf16" not in str(told.value)
    with pytest.raises(ValueError, match="lm_eval.tasks"):
        require_room(45 * GIB, 80 * GIB, precision="bf16", copies=2)
