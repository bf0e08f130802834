"""The seed's recipe, CodeParrot, made tiny: the shipped file with sizes on top of it, from documents to an endpoint's answer."""

import json

import pytest
import yaml
from support import PACKAGES, STAGES, STDLIB, everything_reused

from tasks.config.files import load
from tasks.data.corpus.openings import OPENINGS

SIZES = {
    "validation": {"min_documents": 5},
    "preprocessing": {"heldout_fraction": 0.2, "tokenizer": {"vocab_size": 320, "sample_bytes": 1_000_000}},
    "cluster": {"name": "here", "backend": "local", "ranks_per_node": 2, "gpus_per_node": 0, "threads_per_rank": 1},
    "benchmark": {"sku": "local-cpu", "seconds": 1.0, "matmul_size": 256, "largest_megabytes": 2},
    "planning": {"checkpoint": {"every_steps": 10}},
    "training": {
        "sequence_length": 64,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "steps": 60,
        "learning_rate": 4.0e-3,
        "warmup_steps": 5,
        "network": {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 4, "intermediate_size": 256},
    },
    "evaluation": {"max_bytes": 120_000, "min_documents": 3, "bootstrap_samples": 200},
    "comparison": {"min_gain_over_bigram": -1.0},  # sixty steps teach little; the machinery is what is tested
    "export": {"golden_prompts": ["def ", "import "], "golden_tokens": 8},
}
"""Of machines, data and network. What is left of the recipe: GPT-2, `content`, bf16, AdamW's betas and decay, the names."""


def write_documents(path):
    """As the dataset codeparrot-clean has them: a line each, the text under `content`."""
    files = [file for package in PACKAGES for file in sorted((STDLIB / package).rglob("*.py"))]
    lines = [
        {"repo_name": "cpython", "path": file.relative_to(STDLIB).as_posix(), "content": text, "license": "psf"}
        for file in files
        if (text := file.read_text(encoding="utf-8"))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.long
def test_the_recipe_reaches_an_endpoint_that_answers(fresh, tmp_path):
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text(yaml.safe_dump(SIZES))
    shipped, small = load("codeparrot", []), load(["codeparrot", str(sizes)], [])
    assert small.preprocessing.text_field == shipped.preprocessing.text_field == "content"
    assert small.training.network.architecture == shipped.training.network.architecture == "gpt2"
    assert (small.training.precision, small.training.beta2) == (shipped.training.precision, shipped.training.beta2)

    fresh.ok(
        "dataset", "publish", "codeparrot", write_documents(tmp_path / "documents.jsonl"), "--text-field", "content"
    )
    recipe = ("-c", "codeparrot", "-c", sizes)
    first = fresh.ok("retrain", *recipe, "--to", "train")  # in two parts, for a busy machine is slow
    trained = STAGES[: STAGES.index("train") + 1]
    assert first.statuses() == {stage: "ran" if stage in trained else "not_run" for stage in STAGES}
    ran = fresh.ok("retrain", *recipe)
    assert ran.statuses() == {stage: "reused" if stage in trained else "ran" for stage in STAGES}
    samples = ran.said["samples"]
    assert len(samples) == OPENINGS and all(each["completion"] for each in samples)
    assert not {each["prompt"] for each in samples} & set(small.export.golden_prompts), (
        "held-out documents are continued"
    )
    assert ran.said["endpoint"]["model"].startswith("model/codeparrot-small@")

    network = json.loads((files_of(fresh, ran, "train") / "config.json").read_text())
    assert network["architectures"] == ["GPT2LMHeadModel"]
    assert (network["n_layer"], network["n_embd"], network["n_positions"]) == (2, 64, 64)
    model = files_of(fresh, ran, "export")
    assert b"embed_positions" in (model / "model.onnx").read_bytes(), "GPT-2's own graph"
    parity = json.loads((model / "parity.json").read_text())
    assert parity["greedy_equal"] == parity["greedy_total"] == 2

    assert fresh.ok("complete", "codeparrot", "def ", "--max-tokens", "4").said["completion"]
    assert fresh.ok("retrain", *recipe).statuses() == everything_reused()


def files_of(home, ran, stage):
    """The files of the first artifact that a stage made."""
    return home.folder_of(ran.stage(stage)["outputs"][0]) / "files"
